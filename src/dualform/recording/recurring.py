"""Inputs that come again are stored once: found by their content, in the writer thread.

A network's inputs are the same few thousand rows, epoch after epoch; every later layer's keys are
new at every step. So of layers that are fed with what training did not compute, each segment keeps
only the rows that no earlier one had, and for every pattern the number of its row.

What counts is the content as it is stored, to the last bit: an augmented image is another one, and
the same image under another example id is the same. Rows are told apart by two sums Σ a_i w_i mod
2⁶⁴ over their 32-bit words w with random a: for two given rows, whatever they are, the sums agree
with a probability below 2⁻⁶⁶, and rows that differ in more than the top bit of one word are told
apart far more surely. No row is kept in RAM, only some 140 bytes.

Why it is hard: it is not known how many rows there will be, or that any will come again. The index
grows by what is new alone; beyond `MOST` rows it is given up, and later rows are stored as they
come.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dualform.layers import Layer

MOST = 1 << 20
"""How many different rows of one layer are remembered: some 140 MB."""

AT_ONCE = 1 << 16
"""How many words are summed at a time: few enough to stay in the processor's cache."""

Sums = NDArray[np.uint64]
Known = Callable[[Layer], Iterable[Tensor]]
"""The rows of a layer that are stored already, in their order: those of a resumed memory."""


class Recurring:
    """What each layer's stored rows are, over all segments; `known`: those of a resumed memory."""

    def __init__(self, known: Known | None = None) -> None:
        self._known = known
        self._index: dict[Layer, RowIndex | None] = {}

    def fold(self, layer: Layer, rows: Tensor) -> tuple[Tensor, NDArray[np.int32]] | None:
        """Of the rows [n, d] of a segment those not seen before, and the number of every row,
        counted from 0; None if too many are different."""
        if layer not in self._index:
            self._index[layer] = begun = RowIndex()
            for stored in () if self._known is None else self._known(layer):
                begun.add(stored)
        index = self._index[layer]
        if index is None or index.rows + len(rows) > MOST or not rows.shape[1]:
            self._index[layer] = None
            return None
        references, fresh = index.add(rows)
        new = rows if len(fresh) == len(rows) else rows[torch.from_numpy(fresh)]
        return new, references.astype(np.int32)


class RowIndex:
    """The numbers of rows by their content, which two sums of it stand for."""

    def __init__(self) -> None:
        self._numbers: dict[bytes, int] = {}

    @property
    def rows(self) -> int:
        """How many different rows there were."""
        return len(self._numbers)

    def add(self, rows: Tensor) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The number of every row, and which of them are new (in the order they come)."""
        known, before = self._numbers, len(self._numbers)
        contents = row_sums(rows).view("V16").ravel().tolist()
        found = np.array([known.setdefault(own, len(known)) for own in contents], np.int64)
        highest = np.maximum.accumulate(np.append(before - 1, found))[:-1]
        return found, np.flatnonzero(found > highest)


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
