"""The certificate: does the memory explain the network, up to rounding, and nothing less?

`checks.py` makes the comparisons; this is what they come back as. A certificate is only worth
something if it can fail, so it never hides a residual: each stands beside the bound that honest
rounding keeps to, and the first thing the printed form says is whether all of them do.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from dualform.errors import QueryError
from dualform.table import Table

KINDS = {
    "weights": "rebuilt weights against the model's",
    "fingerprints": "from fingerprint to fingerprint",
    "steps": "every step's patterns against its gradient",
    "states": "what the optimizer remembered, from one kept state to the next",
    "outputs": "outputs by attention against the model's",
}


@dataclass(frozen=True)
class Check:
    """One comparison: a relative residual (0 is perfect), and the bound that rounding keeps to."""

    parameter: str
    kind: str
    residual: float
    bound: float
    step: int | None = None

    @property
    def passed(self) -> bool:
        """Whether the residual is finite and within its bound, and that finite too."""
        return bool(np.isfinite([self.residual, self.bound]).all() and self.residual <= self.bound)

    @property
    def severity(self) -> float:
        """How far the residual is on its way to the bound: more than 1 is a failure."""
        if not np.isfinite([self.residual, self.bound]).all():
            return float("inf")  # a bound without end would take anything
        if self.residual == 0:
            return 0.0
        if self.bound <= 0:
            return float("inf")
        return self.residual / self.bound

    def to_dict(self) -> dict[str, Any]:
        """Plain values, fit for `json.dumps`."""
        residual, bound = (x if np.isfinite(x) else None for x in (self.residual, self.bound))
        return {
            "parameter": self.parameter,
            "check": self.kind,
            "residual": residual,
            "bound": bound,
            "step": self.step,
            "passed": self.passed,
        }


@dataclass(frozen=True)
class Verification:
    """Whether a memory explains a network: residual and bound per parameter, and hashes.

    Residuals are relative, without unit, 0 is perfect; `passed` says that each is within the bound
    rounding keeps to, and that recording met nothing it could not account for.

    Example:
        >>> certificate = dual.verify(images)                             # doctest: +SKIP
        >>> certificate.passed, certificate.residual("fc1.weight")        # doctest: +SKIP
    """

    step: int
    checks: tuple[Check, ...]
    hashes: Mapping[str, str]
    exact: bool = True
    remarks: tuple[str, ...] = ()
    stored: Mapping[str, str] = field(default_factory=dict)
    """The layers whose patterns were rounded when they were stored, and to what."""
    keys_alone: tuple[str, ...] = ()
    """The layers recorded without error signals: only checksums speak for their keys."""

    @property
    def passed(self) -> bool:
        """Whether every residual is within its bound, in a memory that is exact."""
        return self.exact and all(check.passed for check in self.checks)

    @property
    def failures(self) -> tuple[Check, ...]:
        """The checks that did not pass."""
        return tuple(check for check in self.checks if not check.passed)

    def residual(self, parameter: str, kind: str | None = None) -> float:
        """The relative residual of one parameter: of its weights, or of the check named."""
        return self._check(parameter, kind).residual

    def bound(self, parameter: str, kind: str | None = None) -> float:
        """The bound that rounding keeps that residual to."""
        return self._check(parameter, kind).bound

    @property
    def table(self) -> Table:
        """One line per check: relative residual, bound, the step where it is worst."""
        columns: dict[str, Any] = {
            "parameter": [check.parameter for check in self.checks],
            "check": [check.kind for check in self.checks],
            "residual": [check.residual for check in self.checks],
            "bound": [check.bound for check in self.checks],
            "step": [check.step for check in self.checks],
            "passed": ["yes" if check.passed else "NO" for check in self.checks],
        }
        return Table(columns, "relative residuals: 0 is perfect, up to the bound is rounding")

    def raise_if_failed(self) -> None:
        """Raise `QueryError` saying what did not pass; nothing if all did.

        Example:
            >>> dual.verify().raise_if_failed()                            # doctest: +SKIP
        """
        if not self.passed:
            raise QueryError("\n".join(["the memory does not explain the network:", *self.blame()]))

    def to_dict(self) -> dict[str, Any]:
        """Everything in plain values, fit for `json.dumps`."""
        return {
            "passed": self.passed,
            "step": self.step,
            "exact": self.exact,
            "remarks": list(self.remarks),
            "hashes": dict(self.hashes),
            "stored": dict(self.stored),
            "keys_alone": list(self.keys_alone),
            "checks": [check.to_dict() for check in self.checks],
        }

    def __repr__(self) -> str:
        verdict = "PASSED" if self.passed else "FAILED"
        lines = [f"Verification after {self.step:,} updates: {verdict}", self._summary()]
        if not self.passed:
            lines += self.blame()
        for dtype in dict.fromkeys(self.stored.values()):
            names = ", ".join(name for name, stored in self.stored.items() if stored == dtype)
            lines.append(
                f"  stored in {dtype}: {names}. Residuals are what that lost, bounds allow for it"
            )
        if self.keys_alone:
            names = ", ".join(self.keys_alone)
            lines.append(f"  kept without error signals: {names}. Checksums cover their keys")
        lines += [f"  remark: {remark}" for remark in self.remarks]
        lines += [f"  sha256 {name}: {value[:16]}…" for name, value in self.hashes.items()]
        return "\n".join(lines)

    def _summary(self) -> str:
        found = {(c.parameter, c.kind): c for c in self.checks if c.kind != "outputs"}
        kinds = [kind for kind in KINDS if any(known == kind for _, known in found)]
        names = list(dict.fromkeys(name for name, _ in found))
        columns = {"parameter": names} | {
            kind: [_cell(found.get((name, kind))) for name in names] for kind in kinds
        }
        table = repr(Table(columns, "residual ≤ bound, relative: 0 is perfect"))
        outputs = [f"  {c.parameter}: {_cell(c)}" for c in self.checks if c.kind == "outputs"]
        return "\n".join([table, *outputs])

    def blame(self) -> list[str]:
        """What did not pass, in sentences."""
        lines = [
            f"  {check.parameter}, {KINDS[check.kind]}: residual {check.residual:.2g} is more than "
            f"the {check.bound:.2g} of rounding"
            + ("" if check.step is None else f", worst at step {check.step}")
            for check in self.failures
        ]
        if not self.exact:
            lines.append("  the recording met something it could not account for: see the remarks")
        if self.failures and all(check.kind in ("weights", "outputs") for check in self.failures):
            lines.append(
                f"  the memory agrees with itself: is this the model as it was after {self.step:,} "
                "recorded updates?"
            )
        return lines

    def _check(self, parameter: str, kind: str | None) -> Check:
        for wanted in KINDS if kind is None else (kind,):
            for check in self.checks:
                if (check.parameter, check.kind) == (parameter, wanted):
                    return check
        have = ", ".join(f"{check.parameter} ({check.kind})" for check in self.checks)
        raise QueryError(f"nothing was checked for {parameter!r}, {kind or 'any check'}: {have}")


def _cell(check: Check | None) -> str:
    if check is None:
        return ""
    return f"{check.residual:.1e} {'≤' if check.passed else '> !'} {check.bound:.1e}"
