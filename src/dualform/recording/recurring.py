"""Inputs that come again are stored once: found by their content, in the writer thread.

A network's inputs are the same few thousand rows, epoch after epoch; every later layer's keys are
new at every step. So of layers that are fed with what training did not compute, each segment keeps
only the rows that no earlier one had, and for every pattern the number of its row.

What counts is the content as it is stored, to the last bit: an augmented image is another one, and
the same image under another example id is the same. Rows are told apart by two sums Σ a_i w_i mod
2⁶⁴ over their 32-bit words w with random a: for two given rows, whatever they are, the sums agree
with a probability below 2⁻⁶⁶, and rows that differ in more than the top bit of one word are told
apart far more surely. No row is kept in RAM for it, only 24 bytes each.

Why it is hard: nobody says how many rows there will be, or that any will come again. The index
grows by what is new alone; beyond `MOST` rows it is given up, and later rows are stored as they
come.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dualform.layers import Layer

MOST = 1 << 21
"""How many different rows of one layer are remembered: 50 MB, and once more while some come in."""

AT_ONCE = 1 << 16
"""How many words are summed at a time: few enough to stay in the processor's cache."""

Sums = NDArray[np.uint64]
Known = Callable[[Layer], Iterable[Tensor]]
"""The rows of a layer that are stored already, in their order: those of a resumed memory."""


class Folded(NamedTuple):
    """Rows [n, d] as stored: those not seen before, and the number of every row, counted from 0."""

    new: Tensor
    references: NDArray[np.int32]


class Recurring:
    """What each layer's stored rows are, over all segments; `known`: those of a resumed memory."""

    def __init__(self, known: Known | None = None) -> None:
        self._known = known
        self._index: dict[Layer, RowIndex | None] = {}

    def fold(self, layer: Layer, rows: Tensor) -> Folded | None:
        """The rows of one segment; None if too many are different."""
        if layer not in self._index:
            self._index[layer] = begun = RowIndex()
            for stored in () if self._known is None else self._known(layer):
                begun.add_stored(stored)
        index = self._index[layer]
        if index is None or index.rows + len(rows) > MOST or not rows.shape[1]:
            self._index[layer] = None
            return None
        references, fresh = index.add(rows)
        new = rows if len(fresh) == len(rows) else rows[torch.from_numpy(fresh)]
        return Folded(new, references.astype(np.int32))


class RowIndex:
    """The numbers of rows by their content: their sums, in the order of the first of the two."""

    def __init__(self) -> None:
        self.rows = 0
        self._sums, self._numbers = np.empty((0, 2), np.uint64), np.empty(0, np.int64)

    def add(self, rows: Tensor) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The number of every row, and which of them are new (in the order they come)."""
        sums = row_sums(rows)
        found = np.full(len(sums), -1, np.int64)
        if self.rows:
            place = np.searchsorted(self._sums[:, 0], sums[:, 0])
            place[place == self.rows] = 0
            same = (self._sums[place] == sums).all(axis=1)
            found[same] = self._numbers[place[same]]
        unknown = np.flatnonzero(found < 0)
        _, first, same = np.unique(sums[unknown], axis=0, return_index=True, return_inverse=True)
        order = np.argsort(first)  # new rows are numbered as they come
        rank = np.empty(len(order), np.int64)
        rank[order] = np.arange(len(order))
        found[unknown] = self.rows + rank[same.reshape(-1)]
        fresh = unknown[first[order]]
        self._remember(sums[fresh])
        return found, fresh

    def add_stored(self, rows: Tensor) -> None:
        """Rows that have their numbers already, one after the other."""
        self._remember(row_sums(rows))

    def _remember(self, sums: Sums) -> None:
        if not len(sums):
            return
        order = np.argsort(sums[:, 0], kind="stable")
        place = np.searchsorted(self._sums[:, 0], sums[order, 0])
        self._sums = np.insert(self._sums, place, sums[order], axis=0)
        self._numbers = np.insert(self._numbers, place, self.rows + order)
        self.rows += len(sums)


def row_sums(rows: Tensor) -> Sums:
    """Two sums of every row's content, [n, 2]."""
    found = np.empty((len(rows), 2), np.uint64)
    flat = rows.contiguous().view(torch.uint8)
    words = flat.numpy().view(np.uint32 if flat.shape[1] % 4 == 0 else np.uint16)
    factors = _factors(words.shape[1], words.itemsize, str(rows.dtype))
    height = max(1, AT_ONCE // words.shape[1])
    for low in range(0, len(rows), height):
        wide = words[low : low + height].astype(np.uint64)
        for which in (0, 1):  # whole numbers have no product as quick as this, one row at a time
            np.einsum("rw,w->r", wide, factors[which, 1:], out=found[low : low + height, which])
    found += factors[:, 0]
    return found


_drawn: dict[tuple[int, int, str], Sums] = {}


def _factors(words: int, size: int, kind: str) -> Sums:
    """Random factors for rows of one shape and type, [2, 1 + words]; others for another type."""
    key = words, size, kind
    if key not in _drawn:
        generator = np.random.default_rng()  # of its own: training's is not touched
        _drawn[key] = generator.integers(0, 1 << 64, (2, 1 + words), dtype=np.uint64)
    return _drawn[key]
