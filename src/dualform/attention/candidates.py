"""What may still be among the best k of every query and group, while a memory streams by.

A *cell* is a query × a group. Each has a limit: below it, a product cannot be among the cell's best
k, whatever rounding did to it and to the others. Most of a memory falls below the limits and is
never looked at again; what does not is put on the cell's list, and a list that grows long is cut
back to its best k, which raises the limit.

Two ways to the same end: `CompiledCandidates` weighs what reaches its limit at once, while the keys
are at hand, so lists hold exact weights and stay short; `PlainCandidates` compares whole blocks by
numpy, keeps the products as they are, and cuts all lists at once by one sort.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from dualform.attention import engine
from dualform.attention.compiled import Kernels
from dualform.attention.products import Products

Codes = NDArray[np.int64]

Weigh = Callable[[Codes, engine.Rows, Codes, Tensor], engine.Reals]

AT_ONCE = 1 << 16
"""Pairs of a query and a pattern that are weighed at once: their limits rise in between."""

ROOM = 64
"""How much longer than 2 k a list may grow, so that short ones are not cut all the time."""


class Candidates(Protocol):
    """The lists of all cells."""

    def take(
        self, first: int, products: NDArray[Any], rows: engine.Rows, codes: Codes, keys: Tensor
    ) -> None:
        """Look at products [n, b] of the queries from `first` on with the patterns `rows`."""
        ...

    def result(self) -> tuple[Codes, engine.Rows]:
        """The cell and pattern of everything that is left, in no order."""
        ...


class CompiledCandidates:
    """Lists of a fixed length per cell, filled by compiled loops.

    `weigh(query, rows, place, keys)` gives the exact weights of pairs of a query and a place in a
    block of keys, as they are to be ranked; `asked` brought them to products by `asked.scale`.
    """

    def __init__(
        self, fast: Kernels, weigh: Weigh, asked: Products, groups: int, k: int, most: int
    ) -> None:
        self._fast, self._weigh, self._groups, self._k = fast, weigh, groups, k
        self._asked = asked
        cells, capacity = len(asked.room) * groups, max(1, min(2 * k + ROOM, most))
        self._limits = np.full(cells, -np.inf)
        self._products = np.full(cells, -np.inf, np.float32)
        self._values = np.empty((cells, capacity))
        self._found = np.empty((cells, capacity), np.int64)
        self._fill = np.zeros(cells, np.int64)
        self._scratch = np.empty(capacity)
        self._pairs = np.empty((2, AT_ONCE), np.int64)

    def take(
        self, first: int, products: NDArray[Any], rows: engine.Rows, codes: Codes, keys: Tensor
    ) -> None:
        self._begin(first, products)
        done = 0
        while done < products.size:
            done, count = self._fast.reach(
                products, codes, self._groups, first, self._products, *self._pairs, done
            )
            if count:
                query, place = self._pairs[:, :count]
                self._list(query, place, rows, codes, keys)

    def _begin(self, first: int, products: NDArray[Any]) -> None:
        """Nothing to go by yet: the block's own k-th best, instead of weighing all of it."""
        here = slice(first, first + len(products))
        width, k = products.shape[1], self._k
        if self._groups == 1 and width > 2 * k and np.isneginf(self._limits[here]).any():
            kth = np.partition(products, width - k, axis=1)[:, width - k].astype(np.float64)
            lowest = np.ldexp(kth - self._asked.room[here], -self._asked.scale[here])
            self._limits[here] = np.maximum(self._limits[here], lowest)
            self._raise()

    def _list(
        self, query: Codes, place: Codes, rows: engine.Rows, codes: Codes, keys: Tensor
    ) -> None:
        cells = query * self._groups
        if self._groups > 1:
            cells += codes[place]
        ranked, done = self._weigh(query, rows, place, keys), 0
        while True:
            done = self._fast.insert(
                cells, ranked, rows[place], self._k, self._limits, self._values, self._found,
                self._fill, self._scratch, done,
            )  # fmt: skip
            if done == len(cells):
                return self._raise()
            self._grow()

    def _raise(self) -> None:
        """Limits as products have to reach them: below what rounding can do to them."""
        scale = np.repeat(self._asked.scale, self._groups)
        limits = np.ldexp(self._limits, scale) - np.repeat(self._asked.room, self._groups)
        with np.errstate(over="ignore"):
            narrow = limits.astype(self._products.dtype)
        self._products = np.nextafter(narrow, narrow.dtype.type(-np.inf))

    def _grow(self) -> None:
        """Longer lists: one is nearly full of numbers that are all the same."""
        self._values = np.concatenate([self._values, np.empty_like(self._values)], axis=1)
        self._found = np.concatenate([self._found, np.empty_like(self._found)], axis=1)
        self._scratch = np.empty(2 * len(self._scratch))

    def result(self) -> tuple[Codes, engine.Rows]:
        capacity, k = self._found.shape[1], self._k
        self._values[np.arange(capacity) >= self._fill[:, None]] = -np.inf
        if capacity > k:  # a last cut
            kth = np.partition(self._values, capacity - k, axis=1)[:, capacity - k]
            self._limits = np.maximum(self._limits, kth)
        left = self._values >= np.maximum(self._limits, np.finfo(np.float64).min)[:, None]
        return np.nonzero(left)[0], self._found[left]


class PlainCandidates:
    """One long list of everything that reached its limit, cut back by sorting when it is long."""

    def __init__(self, groups: int, k: int, room: engine.Reals, dtype: Any) -> None:
        self._groups, self._k = groups, k
        self._limits = np.full((len(room), groups), -np.inf, dtype)
        self._room = np.repeat(2 * room, groups)
        self._lists: list[tuple[Codes, engine.Rows, NDArray[Any]]] = []
        self._waiting = 0
        self._at_most = max(1 << 17, k * len(room) * groups)

    def take(
        self, first: int, products: NDArray[Any], rows: engine.Rows, codes: Codes, keys: Tensor
    ) -> None:
        limits = self._limits[first : first + len(products)]
        width, k = products.shape[1], self._k
        if self._groups == 1 and width > 2 * k and np.isneginf(limits).any():
            # nothing to go by yet: the block's own k-th best, instead of listing all of it
            kth = np.partition(products, width - k, axis=1)[:, width - k : width - k + 1]
            limits[:] = np.maximum(
                limits, _lowered(kth, self._room[first : first + len(limits), None])
            )
        reached = products >= (limits if self._groups == 1 else limits[:, codes])
        flat = np.flatnonzero(reached)
        if not len(flat):
            return
        query, column = np.divmod(flat, width)
        cells = (query + first) * self._groups
        if self._groups > 1:
            cells += codes[column]
        self._lists.append((cells, rows[column], products.reshape(-1)[flat]))
        self._waiting += len(flat)
        if self._waiting > self._at_most:
            self._cut()

    def _cut(self) -> None:
        """Keep what can still be among the best k, and raise the limits."""
        cells, rows, values = (np.concatenate(part) for part in zip(*self._lists, strict=True))
        ordered = _by_cell_and_value(cells, values)
        cells, rows, values = cells[ordered], rows[ordered], values[ordered]
        starts = np.searchsorted(cells, np.arange(self._limits.size + 1))
        enough = np.flatnonzero(np.diff(starts) >= self._k)
        kth = values[starts[enough] + self._k - 1]
        limits = self._limits.reshape(-1)
        limits[enough] = np.maximum(limits[enough], _lowered(kth, self._room[enough]))
        kept = values >= limits[cells]
        self._lists = [(cells[kept], rows[kept], values[kept])]
        self._waiting = 0
        self._at_most = max(self._at_most, int(kept.sum()))

    def result(self) -> tuple[Codes, engine.Rows]:
        if not self._lists:
            return np.zeros(0, np.int64), np.zeros(0, np.int64)
        self._cut()
        cells, rows, _ = self._lists[0]
        return cells, rows


def _lowered(kth: NDArray[Any], room: engine.Reals) -> NDArray[Any]:
    """k-th best − room, never rounded up in the products' own precision."""
    limit = (kth - room).astype(kth.dtype)
    lowered: NDArray[Any] = np.nextafter(limit, kth.dtype.type(-np.inf))
    return lowered


def _by_cell_and_value(cells: Codes, values: NDArray[Any]) -> NDArray[np.intp]:
    """The order by cell, then by value, the largest first."""
    if values.dtype != np.float32:
        return np.lexsort((-values, cells))
    # one whole number for both: its sort is many times faster than two sorts of one
    bits = values.view(np.uint32)
    rising = np.where(bits >> 31, ~bits, bits | np.uint32(1 << 31))
    ordered: NDArray[np.intp] = np.argsort((cells.astype(np.uint64) << 32) | ~rising)
    return ordered
