"""Measured percentages as charts take them: one number, those of several runs, or mean and std.

Runs are summed up and printed here and nowhere else, so that all pictures, and tables beside them,
agree on what an error bar is (one standard deviation over runs, with n − 1, to both sides) and on
what the last digit is (halves go up).
"""

from __future__ import annotations

from collections.abc import Mapping
from decimal import ROUND_HALF_UP, Decimal
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dualform.errors import QueryError

ROUNDING = 1e-9
"""Room for a percentage that was computed: 100 × a share may be the next number after 100."""


class Measured(NamedTuple):
    """A mean and its standard deviation over runs, None where it is not known."""

    mean: float
    std: float | None

    def text(self, digits: int = 1) -> str:
        """As it is printed: the mean, and the deviation where there is one."""
        mean = decimal(self.mean, digits)
        return mean if self.std is None else f"{mean} ± {decimal(self.std, digits)}"

    @property
    def row(self) -> dict[str, Any]:
        """What a chart's data says about it."""
        spread = self.std or 0.0
        low, high = self.mean - spread, self.mean + spread
        return {"mean": self.mean, "std": self.std, "low": low, "high": high, "text": self.text()}


def printed(value: Any, digits: int = 1) -> str:
    """A measured percentage as charts print it, for a table beside one: mean ± std, halves up.

    A number, a list of runs or `{"mean": …, "std": …}`, in percent.

    Example:
        >>> from dualform import charts
        >>> charts.printed([45.7, 52.5]), charts.printed(96.25)
        ('49.1 ± 4.8', '96.3')
    """
    return measured(value, "the number to print").text(digits)


def decimal(value: float, digits: int) -> str:
    """A number with so many decimals. Halves go up, and what is a half is asked in decimals.

    75.05 is stored as 75.04999…, and a mean of runs may miss it by another 1e-14: both are read as
    the 75.05 that was meant, to six more digits than are printed.
    """
    meant = Decimal(repr(round(float(value), digits + 6)))
    return str(meant.quantize(Decimal(1).scaleb(-digits), ROUND_HALF_UP))


def measured(value: Any, what: str) -> Measured:
    """A number, a list or array of runs, or {"mean": …, "std": …}; all in percent."""
    if isinstance(value, Mapping):
        if "mean" not in value:
            have = ", ".join(map(str, value))
            raise QueryError(f"{what} is given by {have}; expected mean and std, or the runs")
        mean, std = value["mean"], value.get("std")
        numbers = _percentages(mean if std is None else [mean, std], what)
        if len(numbers) != (1 if std is None else 2):
            raise QueryError(f"{what} is {value!r}; expected one mean and one std, or the runs")
        return Measured(float(numbers[0]), None if std is None else float(numbers[1]))
    runs = _percentages(value, what)
    return Measured(float(runs.mean()), float(runs.std(ddof=1)) if runs.size > 1 else None)


def _percentages(value: Any, what: str) -> NDArray[np.float64]:
    """One number or several, as a vector."""
    try:
        numbers = np.asarray(value, dtype=np.float64).reshape(-1)
    except (TypeError, ValueError) as error:
        raise QueryError(f"{what} is {value!r}; expected a number or several runs'") from error
    if not numbers.size:
        raise QueryError(f"{what} has no runs; expected at least one number")
    for seen in numbers:
        if not np.isfinite(seen):
            raise QueryError(
                f"{what} is {seen}; expected a finite number. Leave out what is unknown"
            )
        if not -ROUNDING <= seen <= 100 + ROUNDING:
            raise QueryError(f"{what} is {seen:g}; expected a percentage, 0 to 100")
    return numbers


def nested(found: Any, what: str, levels: str) -> None:
    """Refuse what is no mapping of mappings: `levels` says of what to what."""
    if not isinstance(found, Mapping):
        raise QueryError(f"{what} was given {type(found).__name__}; expected a dict, {levels}")
    for name, inner in found.items():
        if not isinstance(inner, Mapping):
            raise QueryError(
                f"{what} was given {inner!r} for {name!r}; expected a dict of dicts, {levels}"
            )
