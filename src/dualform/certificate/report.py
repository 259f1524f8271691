"""The certificate as it is handed out: a verdict for every parameter, and the checks behind it.

A certificate is only worth something if it can fail, so it hides no residual: each stands beside
the bound that honest rounding keeps to, and a share that patterns do not explain is named.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf, isfinite
from typing import Any

from dualform.errors import QueryError
from dualform.table import Table

BITS, ROUNDED, NOT = "bit for bit", "within rounding", "not"
LITTLE, KEPT = "within rounding, certifies little", "not replayable: kept states only"

ANOTHER = "of no recorded step"

KINDS = {
    "steps": "every step's patterns against its gradient",
    "fingerprints": "from fingerprint to fingerprint",
    "states": "from kept state to kept state",
    "weights": "the last kept weights against the model's",
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
        return self.severity <= 1

    @property
    def severity(self) -> float:
        """How far the residual is on its way to the bound: more than 1 is a failure."""
        if not isfinite(self.residual) or not isfinite(self.bound):
            return inf  # a bound without end would take anything
        return self.residual / self.bound if self.bound > 0 else inf if self.residual else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Plain values, fit for `json.dumps`."""
        own = {n: None if v in (inf, -inf) or v != v else v for n, v in vars(self).items()}
        return {**own, "passed": self.passed}

    def __str__(self) -> str:
        if self.residual == self.bound == 0:
            return "0"
        return f"{self.residual:.1e} {'≤' if self.passed else '> !'} {self.bound:.1e}"


@dataclass(frozen=True)
class Verdict:
    """What was found of one parameter, and why it is not better than that.

    `walked` of `ways` between its kept states were replayed; `step`: where it was found not to be.
    `remainder`: the share of what it learned that patterns do not explain, 0 to 1 and above.
    """

    parameter: str
    verdict: str
    why: str = ""
    step: int | None = None
    walked: int = 0
    ways: int = 0
    remainder: float = 0.0

    @property
    def passed(self) -> bool:
        return self.verdict in (BITS, ROUNDED, KEPT)


@dataclass(frozen=True)
class Verification:
    """Whether a memory explains a network: a verdict per parameter, residuals beside bounds.

    `model`: the recorded step whose weights the model has, where that is not the last, or "of no
    recorded step": then nothing is said of the model.

    Example:
        >>> certificate = dual.verify()                                    # doctest: +SKIP
        >>> certificate.passed, certificate.verdicts["fc1.weight"].verdict  # doctest: +SKIP
        (True, 'bit for bit')
    """

    steps: int
    verdicts: Mapping[str, Verdict]
    checks: tuple[Check, ...]
    hashes: Mapping[str, str]
    remarks: tuple[str, ...]
    model: int | str = ""

    @property
    def passed(self) -> bool:
        """Whether every check passes, no verdict is "not" or certifies little, and the model, if
        one was given, is of a recorded step."""
        return self.verdict not in (NOT, LITTLE) and self.model != ANOTHER

    @property
    def verdict(self) -> str:
        """The weakest verdict of all parameters that patterns explain."""
        found = {NOT} if self.failures else {v.verdict for v in self.verdicts.values()}
        return next((v for v in (NOT, LITTLE, ROUNDED, BITS) if v in found), KEPT)

    @property
    def failures(self) -> tuple[Check, ...]:
        """The checks that did not pass."""
        return tuple(check for check in self.checks if not check.passed)

    @property
    def table(self) -> Table:
        """One line per parameter: the verdict, residual ≤ bound of each check, the remainder."""
        checks, found = {(c.parameter, c.kind): str(c) for c in self.checks}, self.verdicts.values()
        columns: dict[str, list[str]] = {
            "parameter": [*self.verdicts],
            "verdict": [v.verdict for v in found],
            "replayed": [f"{v.walked} of {v.ways}" for v in found],
            **{kind: [checks.get((name, kind), "") for name in self.verdicts] for kind in KINDS},
            "not explained": [f"{v.remainder:.1%}" if v.remainder else "" for v in found],
        }
        shown = {name: cells for name, cells in columns.items() if any(cells)}
        return Table(shown, "residual ≤ bound, relative: 0 is perfect")

    def raise_if_failed(self) -> None:
        """Raise `QueryError` saying what did not pass; nothing if all did."""
        if not self.passed:
            raise QueryError("\n".join(["the memory does not explain the network:", *self.blame()]))

    def to_dict(self) -> dict[str, Any]:
        """Everything in plain values, fit for `json.dumps`."""
        found = {n: getattr(self, n) for n in ("passed", "verdict", "steps", "model")}
        found |= {"remarks": [*self.remarks], "hashes": {**self.hashes}}
        found["parameters"] = [{**vars(verdict)} for verdict in self.verdicts.values()]
        return {**found, "checks": [check.to_dict() for check in self.checks]}

    def __repr__(self) -> str:
        said = "FAILED" if self.verdict in (NOT, LITTLE) else "PASSED"
        lines = [f"Verification after {self.steps:,} updates: {said}, {self.verdict}"]
        lines[0] += "; the model is another" * (self.model == ANOTHER)
        lines += [repr(self.table), *self.blame()]
        if isinstance(self.model, int):
            asked = f"{self.model} updates: ask at({self.model}) for that"
            lines.append(f"  the model is the network as it was after {asked}")
        lines += [f"  {c.parameter}: {c}" for c in self.checks if c.kind == "outputs"]
        found = [(f"{v.verdict}: {v.why}", n) for n, v in self.verdicts.items() if v.why]
        for why in dict.fromkeys(why for why, name in found if self.verdicts[name].passed):
            lines.append(f"  {', '.join(name for one, name in found if one == why)}: {why}")
        lines += [f"  remark: {remark}" for remark in self.remarks]
        lines += [f"  sha256 {name}: {value[:16]}…" for name, value in self.hashes.items()]
        return "\n".join(lines)

    def blame(self) -> list[str]:
        """What did not pass, in sentences."""
        failed = [v for v in self.verdicts.values() if not v.passed]
        lines = [f"{v.parameter}: {v.verdict}, {v.why}" for v in failed]
        if self.model == ANOTHER:
            lines.append(
                "the model has weights of no recorded step, so only its architecture was used; "
                "load the checkpoint of a recorded step to have it compared"
            )
        for c in self.failures:
            where = "" if c.step is None else f", worst at step {c.step}"
            off = f"residual {c.residual:.2g} is more than the {c.bound:.2g} of rounding{where}"
            lines.append(f"{c.parameter}, {KINDS[c.kind]}: {off}")
        if self.failures and not failed:
            asked = f"is this the model as it was after {self.steps:,} recorded updates?"
            lines.append(f"the memory agrees with itself: {asked}")
        return [f"  {line}" for line in lines]
