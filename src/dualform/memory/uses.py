"""The uses of a layer, over all segments: which rows each has, and the columns that follow from it.

A use is one call of one layer, gone through by one backward pass. What is the same for all its rows
(step, pass, call) is kept once for it; the columns that readers ask for are made here.

Why it is hard: calls are numbered as they were made, by whatever model; what a pattern says is the
how-manieth use of this layer in its pass it belongs to, 0, 1, …, and forward calls that no backward
pass went through do not count.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from math import prod

import numpy as np
import torch
from numpy.typing import NDArray

from dualform.memory.content import COMPUTED_IN, USE
from dualform.memory.files import NO_VALUE
from dualform.memory.segments import Segment

Integers = NDArray[np.int64]


class Uses:
    """All uses of one layer, in the order of their rows; arrays of one entry per use.

    Example:
        >>> uses = df.Memory.open("runs/digits").layer("fc1").uses   # doctest: +SKIP
        >>> uses.start[5], uses.rows[5], uses.shape_of(5)            # doctest: +SKIP
        (320, 64, (64,))
    """

    def __init__(self, layer: str, segments: Sequence[Segment]) -> None:
        tables = [segment.uses(layer) for segment in segments]
        parts = [np.zeros((0, len(USE)), np.int64), *(table.uses for table in tables)]
        self._table = np.concatenate(parts)
        self._shapes = [table.shapes for table in tables]
        self._segments = segments
        self._firsts = np.cumsum([0, *(len(table.uses) for table in tables)])
        self.step, self.microbatch, _, self.dtype, self.rows, self.positions, _, self.layout = (
            np.ascontiguousarray(column) for column in self._table.T
        )
        self.start: Integers = np.cumsum(self.rows) - self.rows
        """The first row of each."""

    def __len__(self) -> int:
        return len(self._table)

    def of_step(self, step: int) -> range:
        """Which uses a step has."""
        low, high = np.searchsorted(self.step, [step, step + 1])
        return range(int(low), int(high))

    def dtype_of(self, use: int) -> torch.dtype:
        """The dtype that a use was computed in."""
        return COMPUTED_IN[int(self.dtype[use])]

    def shape_of(self, use: int) -> tuple[int, ...]:
        """How the rows of a use lay in the input of the layer: [B], [B, L], …"""
        segment = int(np.searchsorted(self._firsts, use, side="right")) - 1
        shapes = self._shapes[segment]
        if shapes is None:
            return (int(self.rows[use]),)
        found = tuple(n for n in shapes[use - self._firsts[segment]].tolist() if n >= 0)
        if self.rows[use] not in (prod(found), *found[:1]):
            raise self._segments[segment].wrong(f"a use of {self.rows[use]} rows has shape {found}")
        return found

    @cached_property
    def call(self) -> Integers:
        """The how-manieth use of the layer in its backward pass, in the order of the calls."""
        if not len(self):
            return self.step
        known, which = np.unique(self._table[:, :3], axis=0, return_inverse=True)
        is_first = np.ones(len(known), bool)
        is_first[1:] = (known[1:, :2] != known[:-1, :2]).any(axis=1)
        firsts = np.flatnonzero(is_first)
        number = np.arange(len(known)) - firsts[np.cumsum(is_first) - 1]
        found: Integers = number[which.reshape(-1)]
        return found

    def column(self, name: str) -> Integers:
        """Of every row: step, microbatch, call, or its position in its example."""
        if name != "position":
            found: Integers = np.repeat(getattr(self, name), self.rows)
            return found
        if not (self.positions > 1).any():
            return np.full(int(self.rows.sum()), NO_VALUE)
        within: Integers = np.arange(int(self.rows.sum())) - np.repeat(self.start, self.rows)
        of_example: Integers = np.repeat(np.maximum(self.positions, 1), self.rows)
        return np.remainder(within, of_example)
