"""Patterns whose keys recur, taken together: each different key of a group once, with its visits.

An input layer meets the same image in every epoch. All those patterns have one key, so one weight
per query: it is enough to rank the different keys, and to list the patterns behind the best of them
(`ranking.py`). Where a group (a class, a task) shares a key with another, each has it once.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dualform.attention import engine
from dualform.memory import LayerMemory

SAVING = 2
"""How often a key must be met on average for this to pay."""

Codes = NDArray[np.int64]


class Visits:
    """Every (different key, group) that patterns have: an *entry*; and the patterns of each."""

    def __init__(
        self,
        layer: LayerMemory,
        included: NDArray[np.bool_] | None,
        codes: Codes | None,
        groups: int,
    ) -> None:
        assert layer.distinct is not None
        self._keys = layer.distinct
        number = self._keys.references
        joint = number * groups if codes is None else number * groups + codes
        rows = np.arange(layer.rows) if included is None else np.flatnonzero(included)
        rows = rows[np.argsort(joint[rows], kind="stable")]  # in order within each entry
        fresh = np.flatnonzero(np.diff(joint[rows], prepend=-1))
        self._patterns, self._starts = rows, fresh
        self.counts = np.diff(fresh, append=len(rows))
        self.number, self.codes = np.divmod(joint[rows[fresh]], groups)

    def blocks(self, size: int) -> Iterator[tuple[engine.Rows, Tensor]]:
        """Entries and their keys [b, d_in], float32 or float64, a block at a time."""
        room = engine.Room(torch.float32)
        for start, keys in engine.distinct_blocks(self._keys, size):
            low, high = np.searchsorted(self.number, (start, start + len(keys)))
            place = self.number[low:high] - start
            wide = keys if keys.dtype == torch.float64 else room.converted(keys)
            if not np.array_equal(place, np.arange(len(keys))):
                wide = wide[torch.from_numpy(place)]
            if len(place):
                yield np.arange(low, high), wide

    def patterns(self, entries: Codes) -> engine.Rows:
        """The patterns of some entries, one entry's after the other's, each in order."""
        counts = self.counts[entries]
        ends = np.cumsum(counts)
        inside = np.arange(ends[-1] if len(ends) else 0) - np.repeat(ends - counts, counts)
        rows: engine.Rows = self._patterns[np.repeat(self._starts[entries], counts) + inside]
        return rows


def recur(layer: LayerMemory) -> bool:
    """Whether keys are stored once and recur often enough."""
    distinct = layer.distinct
    return distinct is not None and SAVING * distinct.rows <= layer.rows
