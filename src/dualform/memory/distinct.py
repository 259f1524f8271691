"""Keys that recur are stored once: the different rows of a layer, over all its segments.

A segment holds the rows that no earlier one had, and for every pattern the number of its row,
counted through all segments. What asks for keys gets them as if they were stored one by one; what
computes the same thing for every key may compute it for the different ones.

Why it is hard: the numbers come from a file, and one that is wrong would be another pattern's key.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dualform.memory.content import REFERENCES
from dualform.memory.segments import Segment

ReadKeys = Callable[[Segment, slice], Tensor]
"""Reads some of the keys that a segment stores, as they lie there."""


class DistinctKeys:
    """The different keys of a layer, [rows, d_in], and which of them each pattern has.

    Example:
        >>> inputs = df.Memory.open("runs/digits").layer("fc1").distinct   # doctest: +SKIP
        >>> inputs.rows, inputs.references.shape   # doctest: +SKIP
        (1438, (38400,))
    """

    def __init__(
        self,
        layer: str,
        width: int,
        dtype: torch.dtype,
        segments: Sequence[Segment],
        read: ReadKeys,
    ) -> None:
        self._layer, self._width, self._dtype, self._read = layer, width, dtype, read
        self._segments = list(segments)
        self._starts = np.cumsum([0, *(s.distinct[layer] for s in self._segments)])
        self._place = {segment: place for place, segment in enumerate(self._segments)}

    @property
    def rows(self) -> int:
        """How many different keys there are."""
        return int(self._starts[-1])

    @cached_property
    def references(self) -> NDArray[np.int64]:
        """The number of every pattern's key, [T]; of segments that hold references."""
        known = [self.of_segment(segment) for segment in self._segments]
        return np.concatenate([np.empty(0, np.int64), *known])

    def of_segment(self, segment: Segment, rows: slice = slice(None)) -> NDArray[np.int64]:
        """The numbers of some of a segment's keys; checked, for they come from a file."""
        stored = segment.read_rows(self._layer, REFERENCES, None, (torch.int32,), rows)
        known = self._starts[1 + self._place[segment]]
        numbers: NDArray[np.int64] = stored.to(torch.int64).numpy()
        if len(numbers) and not (numbers.min() >= 0 and numbers.max() < known):
            raise segment.wrong(
                f"the keys of layer {self._layer!r} refer to rows {numbers.min()} to "
                f"{numbers.max()}, but there are {known} up to here"
            )
        return numbers

    def take(self, numbers: NDArray[np.int64]) -> Tensor:
        """The keys of these numbers, [n, d_in], in the dtype of training."""
        taken = torch.empty(0, self._width, dtype=self._dtype)
        part_of = np.searchsorted(self._starts, numbers, side="right") - 1
        for part in np.unique(part_of).tolist():
            here = np.flatnonzero(part_of == part)
            local = numbers[here] - self._starts[part]
            low = int(local.min())
            stored = self._read(self._segments[part], slice(low, int(local.max()) + 1))
            if not len(taken):  # the first rows that are read prove the width
                taken = torch.empty(len(numbers), self._width, dtype=self._dtype)
            rows = stored[torch.from_numpy(local - low)]
            taken[torch.from_numpy(here)] = rows.to(self._dtype)
        return taken

    def blocks(self, size: int = 4096) -> Iterator[tuple[int, Tensor]]:
        """All different keys in order, (number of the first, [n, d_in]), `size` at a time."""
        for start, segment in zip(self._starts.tolist(), self._segments, strict=False):
            for low in range(0, segment.distinct[self._layer], size):
                yield start + low, self._read(segment, slice(low, low + size)).to(self._dtype)

    def stored(self) -> Iterator[Tensor]:
        """The rows as they lie on disk, segment by segment."""
        for segment in self._segments:
            yield self._read(segment, slice(None))
