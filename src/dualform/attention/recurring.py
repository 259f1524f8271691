"""Keys that a layer met again and again: found by content, so that sums may meet each once.

An input layer sees the same image in every epoch. Whatever is a sum over patterns is then a sum
over distinct keys, each times how often it was met, which is several times less work. Equal keys
are found by their weight along two random directions: weights are added up row by row, so equal
keys give equal bits (`weights.py`). Different keys may, with luck, give the same; so each pattern
is compared with the first that looked like it, number by number, before they are called equal.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from dualform.attention import engine, weights
from dualform.attention.tables import kept
from dualform.memory import LayerMemory

ENOUGH_QUERIES = 32
"""Queries from which on looking for recurring keys, a pass or two, pays."""

WORTH = 1 << 16
"""Patterns from which on it does."""

SAVING = 2
"""How often a key must be met on average for its first to stand for all."""


class Recurring(NamedTuple):
    """Each pattern's distinct key: a number [T]; and which pattern met it first [T]."""

    number: NDArray[np.int64]
    is_first: NDArray[np.bool_]

    def counts(
        self, included: NDArray[np.bool_] | None, codes: NDArray[np.int64], groups: int
    ) -> NDArray[np.int64]:
        """How often each group met each key: [keys, groups]."""
        rows = np.arange(len(codes)) if included is None else np.flatnonzero(included)
        distinct = int(self.is_first.sum())
        joint = self.number[rows] * groups + codes[rows]
        return np.bincount(joint, minlength=distinct * groups).reshape(distinct, groups)


def recurring_keys(layer: LayerMemory, queries: int) -> Recurring | None:
    """The layer's distinct keys, where so many queries make that worth knowing; else None."""
    if queries < ENOUGH_QUERIES or layer.rows < WORTH:
        return None
    table = kept(layer, "recurring keys", lambda: _find(layer))
    number = table["number"].numpy().astype(np.int64)
    first = np.zeros(layer.rows, bool)
    first[table["first"].numpy()] = True
    if SAVING * int(first.sum()) > layer.rows:
        return None
    return Recurring(number, first)


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
            if part.keys is not None and len(inside):
                own = part.keys[torch.from_numpy(inside)]
                equal = (own == keys[torch.from_numpy(here[inside])]).all(1)
                same[part.start + inside] = equal.numpy()
    return same
