"""Measured numbers as charts take them: one number, the numbers of several runs, or mean and std.

Runs are summed up here and nowhere else, so that all pictures agree on what an error bar is: one
standard deviation over runs (with n − 1), to both sides.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from dualform.errors import QueryError


class Measured(NamedTuple):
    """A mean and its standard deviation over runs, None where it is not known."""

    mean: float
    std: float | None

    def __str__(self) -> str:
        return f"{self.mean:.1f}" if self.std is None else f"{self.mean:.1f} ± {self.std:.1f}"

    @property
    def row(self) -> dict[str, Any]:
        """What a chart's data says about it."""
        spread = self.std or 0.0
        low, high = self.mean - spread, self.mean + spread
        return {"mean": self.mean, "std": self.std, "low": low, "high": high, "text": str(self)}


def measured(value: Any, what: str) -> Measured:
    """A number, a list or array of runs, or {"mean": …, "std": …}."""
    if isinstance(value, Measured):
        return value
    if isinstance(value, Mapping):
        if "mean" not in value:
            have = ", ".join(map(str, value))
            raise QueryError(f"{what} is given by {have}; expected mean and std, or the runs")
        std = value.get("std")
        found = Measured(float(value["mean"]), None if std is None else float(std))
    else:
        try:
            runs = np.asarray(value, dtype=np.float64).reshape(-1)
        except (TypeError, ValueError) as error:
            raise QueryError(f"{what} is {value!r}; expected a number or several runs'") from error
        if not runs.size:
            raise QueryError(f"{what} has no runs; expected at least one number")
        found = Measured(float(runs.mean()), float(runs.std(ddof=1)) if runs.size > 1 else None)
    if not math.isfinite(found.mean):
        raise QueryError(f"{what} is {found.mean}; expected a finite number")
    return found
