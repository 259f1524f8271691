"""Marks: one number per parameter and step, of some sixty entries of each of its tensors.

The mark of a parameter's weights, and that of what its optimizer remembers, say after every update
where training was, bit for bit: an edit is seen before the next update, a restored checkpoint is
found among recorded steps, and a replay knows at which step it left the way.

Why it is hard: at every update all parameters must cost a few microseconds together. So entries
are read through numpy's views of the tensors' memory, put in a row by one call, multiplied by
random odd numbers and summed by parameter, modulo 2³².
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

SAMPLES = 64
"""About how many entries of a tensor are read."""

_MARKS = 3
_SHORT = {torch.float32, torch.float16, torch.bfloat16, torch.bool, torch.uint8, torch.int8}
"""Types whose every value is a float32."""

Reals = NDArray[np.floating[Any]]


def remembered(state: Mapping[str, Any] | None) -> list[Tensor]:
    """List the tensors an optimizer remembers of a parameter, in the order of their marks."""
    held = state or {}
    return [held[name] for name in sorted(held) if isinstance(held[name], Tensor)]


def mark_of(tensors: Sequence[Tensor]) -> int:
    """Take the mark of one parameter's tensors; 0 where there are none."""
    marks = Marks([tensors])
    return int(marks.numbers(marks.sampled())[0])


class Marks:
    """The tensors of some parameters, a list for each, ready to be read at every update."""

    def __init__(self, tensors: Sequence[Sequence[Tensor]]) -> None:
        self.tensors = [t for own in tensors for t in own]
        self._count = len(tensors)
        members: dict[torch.dtype, list[tuple[int, int, Tensor]]] = {}
        for owner, own in enumerate(tensors):
            for nth, tensor in enumerate(own):
                if tensor.numel():
                    members.setdefault(tensor.dtype, []).append((owner, nth, tensor))
        self._groups = [_Group(dtype, found) for dtype, found in members.items()]
        ends = np.cumsum([0, *(group.entries for group in self._groups)]).tolist()
        places = [slice(a, b) for a, b in pairwise(ends)]
        self._places_of = list(zip(self._groups, places, strict=True))
        self._has_tensors = np.array([any(t.numel() for t in own) for own in tensors], bool)
        self._memory = [t.data_ptr() for t in self.tensors]

    def sampled(self) -> Reals:
        """Copy the sampled entries of all parameters."""
        memory = [t.data_ptr() for t in self.tensors]
        if memory != self._memory:  # a tensor has been given other memory
            self._memory = memory
            for group in self._groups:
                group.find()
        if len(self._groups) == 1:
            return self._groups[0].read()
        return np.concatenate([np.zeros(0, np.float32), *(g.read() for g in self._groups)])

    def numbers(self, sampled: Reals) -> NDArray[np.uint32]:
        """Turn sampled entries into one number for each parameter; 0 where it has no tensors."""
        found = np.zeros(self._count, np.uint32)
        for group, place in self._places_of:
            words = sampled[place].astype(group.dtype, copy=False).view(np.uint32) * group.factors
            found[group.owners] += np.add.reduceat(words, group.words, dtype=np.uint32)
        found[(found == 0) & self._has_tensors] = 1
        return found

    def spread(self, entries: Reals) -> NDArray[np.float64]:
        """Find the largest number of each parameter, one for every sampled entry given."""
        found = np.zeros(self._count)
        for group, place in self._places_of:
            largest = np.maximum.reduceat(entries[place], group.starts)
            found[group.owners] = np.maximum(found[group.owners], largest)
        return found


class _Group:
    """All tensors of one type of number, in a row."""

    def __init__(self, dtype: torch.dtype, members: list[tuple[int, int, Tensor]]) -> None:
        self._tensors = [tensor for _, _, tensor in members]  # their memory may be exchanged
        self._is_bfloat16 = dtype == torch.bfloat16
        self.dtype = np.dtype(np.float32 if dtype in _SHORT else np.float64)
        each = self.dtype.itemsize // 4
        sizes = [len(range(0, t.numel(), stride(t.numel()))) for t in self._tensors]
        owners = [owner for owner, _, _ in members]
        first = [i for i, owner in enumerate(owners) if i == 0 or owners[i - 1] != owner]
        self.owners = np.array([owners[i] for i in first])
        self.starts = np.cumsum([0, *sizes])[:-1][first]
        self.words, self.entries = self.starts * each, sum(sizes)
        numbers = [
            _factors(nth)[: size * each] for (_, nth, _), size in zip(members, sizes, strict=True)
        ]
        self.factors = np.concatenate(numbers)
        self.find()

    def find(self) -> None:
        """Make views of the sampled entries; what has none (another device) is copied each time."""
        seen = all(t.is_cpu and t.is_contiguous() for t in self._tensors)
        self._views = [self._view(t) for t in self._tensors] if seen else None

    def read(self) -> Reals:
        views = self._views if self._views is not None else [self._view(t) for t in self._tensors]
        found = np.concatenate(views)
        if self._is_bfloat16:
            return (found.astype(np.uint32) << np.uint32(16)).view(np.float32)
        return found if found.dtype == self.dtype else found.astype(self.dtype)

    def _view(self, tensor: Tensor) -> NDArray[Any]:
        entries = tensor.detach().reshape(-1)[:: stride(tensor.numel())].cpu()
        if self._is_bfloat16:
            return np.asarray(entries.view(torch.int16).numpy()).view(np.uint16)
        return np.asarray(entries.numpy())


def stride(numel: int) -> int:
    """Choose how far apart the entries lie that are read of a flattened tensor: an odd number."""
    return max(1, numel // SAMPLES) | 1


@lru_cache(maxsize=64)
def _factors(nth: int) -> NDArray[np.uint32]:
    """Make the odd numbers that the words of a parameter's n-th tensor are multiplied by."""
    key = np.array([nth, _MARKS], np.uint64)
    raw = np.random.Philox(counter=0, key=key).random_raw(4 * SAMPLES)
    return (np.asarray(raw, np.uint64) >> np.uint64(32)).astype(np.uint32) | np.uint32(1)
