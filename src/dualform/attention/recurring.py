"""Keys that a layer met again and again: found by content, so that sums may meet each once.

An input layer sees the same image in every epoch. Whatever is a sum over patterns is then a sum
over distinct keys, each times how often it was met, which is several times less work. Where a
memory stores recurring keys once, it knows them. Else equal keys are found by
their weight along two random directions: weights are added up row by row, so equal keys give equal
bits (`weights.py`). Different keys may, with luck, give the same; so each pattern is compared with
the first that looked like it, number by number, before they are called equal.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dualform.attention import engine, weights
from dualform.attention.tables import kept
from dualform.memory import LayerMemory

ENOUGH_QUERIES = 32
"""Queries from which on looking for recurring keys, a pass or two, pays."""

WORTH = 1 << 16
"""Patterns from which on it does."""

SAVING = 2
"""How often a key must be met on average for its first to stand for all."""


class RecurringKeys:
    """Each pattern's distinct key, as a number [T]; and the keys, in the order of their numbers."""

    def __init__(self, layer: LayerMemory, number: NDArray[np.int64], first: engine.Rows) -> None:
        self.number = number
        self.rows = len(first)
        self._layer, self._first = layer, first

    def counts(
        self, included: NDArray[np.bool_] | None, codes: NDArray[np.int64], groups: int
    ) -> NDArray[np.int64]:
        """How often each group met each key: [keys, groups]."""
        rows = np.arange(len(codes)) if included is None else np.flatnonzero(included)
        joint = self.number[rows] * groups + codes[rows]
        return np.bincount(joint, minlength=self.rows * groups).reshape(self.rows, groups)

    def blocks(self) -> Iterator[tuple[slice, Tensor]]:
        """The distinct keys, float64, a block at a time; valid until the next."""
        room = engine.Room(torch.float64)
        if self._layer.distinct is not None:
            for start, keys in engine.distinct_blocks(self._layer.distinct):
                yield slice(start, start + len(keys)), room.converted(keys)
            return
        is_first = np.zeros(self._layer.rows, bool)
        is_first[self._first] = True
        start = 0
        for part in engine.scan(self._layer, is_first, error_signals=False):
            yield slice(start, start + len(part.rows)), part.keys
            start += len(part.rows)


def recurring_keys(layer: LayerMemory, queries: int) -> RecurringKeys | None:
    """The layer's distinct keys, where so many queries make that worth knowing; else None."""
    distinct = layer.distinct
    if distinct is not None:
        number = distinct.references
        return RecurringKeys(layer, number, np.arange(distinct.rows))
    if queries < ENOUGH_QUERIES or layer.rows < WORTH:
        return None
    table = kept(layer, "recurring keys", lambda: _find(layer))
    first = table["first"].numpy()
    if SAVING * len(first) > layer.rows:
        return None
    return RecurringKeys(layer, table["number"].numpy().astype(np.int64), first)


def _find(layer: LayerMemory) -> dict[str, torch.Tensor]:
    """Number distinct keys in the order they were first met."""
    generator = torch.Generator().manual_seed(0)
    probes = torch.randn(2, layer.in_features, generator=generator, dtype=torch.float64)
    marks = weights.all_weights(layer, probes)
    pairs = np.ascontiguousarray(marks.T).view(np.complex128)[:, 0]
    _, first, code = np.unique(pairs, return_index=True, return_inverse=True)
    if SAVING * len(first) > layer.rows:  # hardly any recurs: each stands for itself
        itself = torch.arange(layer.rows)
        return {"first": itself, "number": itself.to(torch.int32)}
    rows = first[code.reshape(-1)]  # the first pattern that looks like each
    rows[~_are_equal(layer, rows)] = -1
    rows = np.where(rows < 0, np.arange(layer.rows), rows)
    firsts, number = np.unique(rows, return_inverse=True)
    return {
        "first": torch.from_numpy(firsts.astype(np.int64)),
        "number": torch.from_numpy(number.reshape(-1).astype(np.int32)),
    }


def _are_equal(layer: LayerMemory, rows: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Whether each pattern's key is, number by number, that of the earlier pattern named."""
    same = np.ones(layer.rows, bool)
    distinct = np.unique(rows)
    place = np.searchsorted(distinct, rows)
    step = max(1, (1 << 23) // layer.in_features)  # so many first keys at a time: 64 MB
    for low in range(0, len(distinct), step):
        keys = engine.gather_keys(layer, distinct[low : low + step]).to(layer.dtype)
        for part in weights.blocks_of(layer):
            here = place[part.start : part.start + part.rows] - low
            inside = np.flatnonzero((here >= 0) & (here < len(keys)))
            if len(inside):
                own = part.keys[torch.from_numpy(inside)]
                equal = (own == keys[torch.from_numpy(here[inside])]).all(1)
                same[part.start + inside] = equal.numpy()
    return same
