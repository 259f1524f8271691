"""Patterns put into groups: by the values of columns, or by ranges of a number such as the step.

Every sum over a memory is a sum over groups of its patterns. A group is a *cell*: one combination
of values that occurs. Finding the cells takes a look at every pattern; they are kept as long as the
memory is open, so that a second question about the same columns costs nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from dualform.errors import QueryError
from dualform.memory import Patterns

CELLS_KEPT = 8
"""How many groupings are kept per layer: each is one number per pattern."""

Codes = NDArray[np.int64]


class Cells:
    """The combinations of values that occur, in order, and each pattern's index into them."""

    def __init__(self, values: list[tuple[Any, ...]], codes: Codes) -> None:
        self.values = values
        self.codes = codes

    def column(self, place: int) -> list[Any]:
        """The values of one of the columns, cell by cell."""
        return [value[place] for value in self.values]

    @cached_property
    def listed(self) -> NDArray[Any]:
        """The same of the first column as an array: numbers as numbers, anything else as it is."""
        values = self.column(0)
        if all(type(value) in (int, float) for value in values):
            return np.array(values)
        return np.array([*values, None], dtype=object)[:-1]

    @cached_property
    def counts(self) -> NDArray[np.int64]:
        """How many patterns each cell has."""
        return np.bincount(self.codes, minlength=len(self.values))

    @cached_property
    def members(self) -> list[NDArray[np.int64]]:
        """The patterns of each cell, in order."""
        ordered = np.argsort(self.codes, kind="stable")
        starts = np.searchsorted(self.codes[ordered], np.arange(1, len(self.values)))
        return np.split(ordered, starts)


_kept: WeakKeyDictionary[Patterns, dict[tuple[str, ...], Cells]] = WeakKeyDictionary()


def cells(patterns: Patterns, columns: Sequence[str]) -> Cells:
    """The cells of some columns together; without a column, one cell that holds every pattern."""
    kept = _kept.setdefault(patterns, {})
    for column in columns:
        if not isinstance(column, str):
            patterns[column]  # refuses it, naming the columns there are
    name = tuple(columns)
    if name not in kept:
        found = _find(patterns, name)
        while len(kept) >= CELLS_KEPT:
            del kept[next(iter(kept))]
        kept[name] = found
    return kept[name]


def _find(patterns: Patterns, columns: tuple[str, ...]) -> Cells:
    kinds = [group_codes(patterns[name]) for name in columns]
    if len(kinds) == 1:
        (values, codes) = kinds[0]
        return Cells([(value,) for value in values], codes)
    combined: list[tuple[Any, ...]] = [()]
    at = np.zeros(len(patterns), np.int64)
    for values, codes in kinds:  # one by one: all combinations together may not fit into a number
        occurring, at = group_codes(at * len(values) + codes)
        places = [divmod(code, len(values)) for code in occurring]
        combined = [(*combined[before], values[index]) for before, index in places]
    return Cells(combined, at)


def group_codes(values: NDArray[Any]) -> tuple[list[Any], Codes]:
    """The distinct values of a column, sorted, missing ones last; each row's index into them."""
    if values.dtype.kind == "i" and len(values):
        low, high = int(values.min()), int(values.max())
        if high - low < 4 * len(values):  # a table of all numbers in between, instead of sorting
            present = np.zeros(high - low + 1, bool)
            present[values - low] = True
            listed = np.flatnonzero(present)
            place = np.zeros(high - low + 1, np.int64)
            place[listed] = np.arange(len(listed))
            return (listed + low).tolist(), place[values - low]
    if values.dtype != object:
        distinct, codes = np.unique(values, return_inverse=True)
        return distinct.tolist(), codes.astype(np.int64).reshape(-1)
    known = sorted({v for v in values.tolist() if v is not None}, key=lambda v: (str(type(v)), v))
    listed_values = [*known, None] if any(v is None for v in values.tolist()) else known
    index = {value: code for code, value in enumerate(listed_values)}
    return listed_values, np.array([index[v] for v in values.tolist()], dtype=np.int64)


def bins(
    patterns: Patterns, column: str, count: int, included: NDArray[np.bool_] | None
) -> tuple[NDArray[Any], Codes]:
    """Equal ranges of a number over all or some patterns: their edges, each pattern's range."""
    values = patterns[column]
    if not isinstance(count, (int, np.integer)) or isinstance(count, bool) or count < 1:
        raise QueryError(f"bins={count!r}: expected a whole number of ranges, at least one")
    kept = values if included is None else values[included]
    kind = values.dtype.kind
    if kind not in "biuf" or (kind == "f" and not np.isfinite(kept).all()):
        raise QueryError(
            f"column {column!r} holds text, or has no (finite) number for some patterns; "
            ".over() needs a number for each: use .sum_by()"
        )
    low, high = (kept.min(), kept.max()) if len(kept) else (0, 0)
    if values.dtype.kind == "f":
        edges = np.linspace(low, np.nextafter(high, np.inf), count + 1)
    else:  # whole numbers: no more ranges than there are numbers
        edges = np.linspace(low, high + 1, min(count, int(high - low) + 1) + 1)
        edges = np.unique(np.round(edges).astype(np.int64))
    first, last = (int(values.min()), int(values.max())) if values.dtype.kind == "i" else (0, 0)
    if 0 < last - first < len(values):  # each number that may occur once, not each pattern
        each = np.searchsorted(edges, np.arange(first, last + 1), side="right") - 1
        return edges, np.clip(each, 0, len(edges) - 2)[values - first]
    where = np.searchsorted(edges, values, side="right") - 1
    return edges, np.clip(where, 0, len(edges) - 2).astype(np.int64)


def named(columns: Sequence[str | Sequence[str]], patterns: Patterns) -> list[str]:
    """The columns of `sum_by("a", "b")`, `sum_by(["a", "b"])`, `by=["a", "b"]`; at least one."""
    names: list[str] = []
    for part in columns:
        if isinstance(part, str) or not isinstance(part, Iterable):
            names.append(part)  # what is no column is refused where it is looked up
        else:
            names += part
    if not names:
        raise QueryError(f"groups need a column; there are {', '.join(patterns.names)}")
    return names
