"""What a conversion comes back as: how much smaller the memory is, and what that cost, measured.

Nothing here is a promise. Both memories were verified, and the network that the new one rebuilds
was compared with the one that its source rebuilds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any

from rich.filesize import decimal

from dualform.attention import Verification
from dualform.errors import QueryError
from dualform.table import Table


@dataclass(frozen=True)
class Compaction:
    """A memory made from another: sizes in bytes, and the loss, parameter by parameter.

    `difference` is max|W − W'| / max|W| between what the two memories rebuild at their last step:
    relative, without unit, 0 if nothing was lost. `before` and `after` are their certificates; None
    where there can be none, and `remarks` says why.

    Example:
        >>> import dualform as df
        >>> small = df.compact("runs/digits", "runs/small", dtype="float16")  # doctest: +SKIP
        >>> small.passed, small.bytes_after / small.bytes_before              # doctest: +SKIP
    """

    source: Path
    path: Path
    what: str
    bytes_before: int
    bytes_after: int
    difference: Mapping[str, float]
    before: Verification | None
    after: Verification | None
    remarks: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        """Whether the new memory explains the network, up to rounding and what it says it lost."""
        return self.after is not None and self.after.passed

    @property
    def table(self) -> Table:
        """One line per parameter: residual before and after, its bound, and the difference."""
        names = list(self.difference) or sorted(_checked(self.before) | _checked(self.after))
        columns: dict[str, Any] = {
            "parameter": names,
            "before": [_residual(self.before, name) for name in names],
            "after": [_residual(self.after, name) for name in names],
            "bound": [_bound(self.after, name) for name in names],
            "difference": [self.difference.get(name) for name in names],
        }
        return Table(columns, "relative, 0 is perfect: residuals, and how far the weights differ")

    def to_dict(self) -> dict[str, Any]:
        """Everything in plain values, fit for `json.dumps`; sizes in bytes."""
        return {
            "source": str(self.source),
            "path": str(self.path),
            "what": self.what,
            "bytes_before": self.bytes_before,
            "bytes_after": self.bytes_after,
            "passed": self.passed,
            "difference": {n: v if isfinite(v) else None for n, v in self.difference.items()},
            "remarks": list(self.remarks),
            "before": None if self.before is None else self.before.to_dict(),
            "after": None if self.after is None else self.after.to_dict(),
        }

    def __repr__(self) -> str:
        share = self.bytes_after / max(1, self.bytes_before)
        if self.after is None:
            verdict = "NOT VERIFIED"
        else:
            verdict = "verification PASSED" if self.passed else "verification FAILED"
        lines = [
            f"{self.path}: {self.what}; {verdict}",
            f"  {decimal(self.bytes_before)} before, {decimal(self.bytes_after)} after: "
            f"{share:.1%}",
            repr(self.table),
        ]
        if self.after is not None and not self.passed:
            lines += ["  it does not pass:", *(f"  {line}" for line in self.after.blame())]
        lines += [f"  remark: {remark}" for remark in self.remarks]
        return "\n".join(lines)


def _checked(certificate: Verification | None) -> set[str]:
    found = () if certificate is None else certificate.checks
    return {check.parameter for check in found if check.kind != "outputs"}


def _residual(certificate: Verification | None, name: str) -> float | None:
    try:
        return None if certificate is None else certificate.residual(name)
    except QueryError:  # a parameter without any trace to compare with
        return None


def _bound(certificate: Verification | None, name: str) -> float | None:
    try:
        return None if certificate is None else certificate.bound(name)
    except QueryError:
        return None
