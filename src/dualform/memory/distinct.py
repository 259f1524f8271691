"""Keys that recur are stored once: the different rows of a layer, over all its segments.

A segment holds the rows that no earlier one had, and for every pattern the number of its row,
counted through all segments. Everything that asks for keys gets them as if they were stored one by
one; whoever computes the same thing for every key may compute it for the different ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dualform.errors import MemoryFileError
from dualform.memory.segments import Segment


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
        stored: torch.dtype,
        segments: Sequence[Segment],
    ) -> None:
        self._layer, self._width, self._dtype = layer, width, dtype
        self._segments = list(segments)
        self._parts = [
            segment.tensor("keys", layer, width, (dtype, stored)) for segment in self._segments
        ]
        self._starts = np.cumsum([0, *(len(part) for part in self._parts)])

    @property
    def rows(self) -> int:
        """How many different keys there are."""
        return int(self._starts[-1])

    @cached_property
    def references(self) -> NDArray[np.int64]:
        """The number of every pattern's key, [T]; of segments that hold references."""
        known = [self.of_segment(segment) for segment in self._segments]
        return np.concatenate([np.empty(0, np.int64), *known])

    def of_segment(self, segment: Segment) -> NDArray[np.int64]:
        """The numbers of one segment's keys; checked, for they come from a file."""
        references = segment.references(self._layer)
        assert references is not None
        known = self._starts[1 + self._segments.index(segment)]
        if len(references) and not (references.min() >= 0 and references.max() < known):
            raise MemoryFileError(
                f"{segment.path} is damaged or belongs to another memory: the keys of layer "
                f"{self._layer!r} refer to rows {references.min()} to {references.max()}, but "
                f"there are {known} up to here"
            )
        return references.astype(np.int64)

    def take(self, numbers: NDArray[np.int64]) -> Tensor:
        """The keys of these numbers, [n, d_in], in the dtype of training."""
        taken = torch.empty(len(numbers), self._width, dtype=self._dtype)
        part_of = np.searchsorted(self._starts, numbers, side="right") - 1
        for part in np.unique(part_of).tolist():
            here = np.flatnonzero(part_of == part)
            rows = self._parts[part][torch.from_numpy(numbers[here] - self._starts[part])]
            taken[torch.from_numpy(here)] = rows.to(self._dtype)
        return taken

    def blocks(self, size: int = 4096) -> Iterator[tuple[int, Tensor]]:
        """All different keys in order, (number of the first, [n, d_in]), `size` at a time."""
        for start, part in zip(self._starts.tolist(), self._parts, strict=False):
            for low in range(0, len(part), size):
                yield start + low, part[low : low + size].to(self._dtype)

    def stored(self) -> Iterator[Tensor]:
        """The rows as they lie on disk, segment by segment."""
        yield from self._parts
