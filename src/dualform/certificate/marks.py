"""Marks: one number per parameter and step, of some sixty entries of each of its tensors.

The mark of a parameter's weights, and that of what its optimizer remembers, say after every update
where training was, bit for bit: an edit is seen before the next update, a restored checkpoint is
found among recorded steps, and a replay knows at which step it left the way.

Why it is hard: at every update all parameters must cost a few microseconds together. So entries
are read as words through numpy's views of the tensors' memory, put in a row by one call, multiplied
by random odd numbers and summed by parameter, modulo 2³².
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
_WORDS = {1: torch.int8, 2: torch.int16}
"""What entries of so many bytes are read as; larger ones as one int32 or several."""

Words = NDArray[np.integer[Any]]


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
        self.seen = [t.detach() for t in self.tensors]
        """The same memory; of one that was put into another dtype or shape, what it was before."""
        owned = [(owner, nth) for owner, own in enumerate(tensors) for nth in range(len(own))]
        self._read = [(*owned[i], i) for i, t in enumerate(self.tensors) if t.numel()]
        found = [_views(self.seen[i]) for _, _, i in self._read]
        sizes = [sum(map(len, views)) for views in found]
        self._places = [slice(*ends) for ends in pairwise(np.cumsum([0, *sizes]).tolist())]
        owners = [owner for owner, _, _ in self._read]
        firsts = [i for i, owner in enumerate(owners) if i == 0 or owners[i - 1] != owner]
        self._owners = np.array([owners[i] for i in firsts], np.int64)
        self._starts = np.array([self._places[i].start for i in firsts], np.int64)
        factors = (_factors(nth)[:n] for (_, nth, _), n in zip(self._read, sizes, strict=True))
        self._factors = np.concatenate([np.zeros(0, np.uint32), *factors])
        self._views: list[Words] = []
        self._memory: list[int] | None = None
        self._is_seen = True

    def _addresses(self) -> list[int]:
        return [t.data_ptr() for t in self.tensors]

    def sampled(self) -> Words:
        """Copy the sampled entries of all parameters, as words.

        Of a tensor that was put into another dtype or shape, those of what it was before.
        """
        memory = self._addresses()
        if memory != self._memory or not self._is_seen:  # other memory, or on another device
            self._memory = memory
            pairs = zip(self.tensors, self.seen, strict=True)
            self.seen = [t.detach() if nature_of(t) == nature_of(s) else s for t, s in pairs]
            read = [self.seen[i] for _, _, i in self._read]
            self._views = [view for tensor in read for view in _views(tensor)]
            self._is_seen = all(t.is_cpu and t.is_contiguous() for t in read)
        return np.concatenate(self._views) if self._views else np.zeros(0, np.int32)

    def numbers(self, sampled: Words) -> NDArray[np.uint32]:
        """Turn sampled entries into one number for each parameter; 0 where it has no tensors."""
        found = np.zeros(self._count, np.uint32)
        if len(self._owners):
            words = sampled.astype(np.int32, copy=False).view(np.uint32) * self._factors
            found[self._owners] = np.maximum(np.add.reduceat(words, self._starts), 1)
        return found

    def apart(self, before: Words, now: Words) -> NDArray[np.float64]:
        """How far sampled entries of each parameter are apart at most, and how large they are."""
        found = np.zeros((2, self._count))
        for (owner, _, i), place in zip(self._read, self._places, strict=True):
            if not np.array_equal(before[place], now[place]):
                a, b = (_entries(words[place], self.seen[i].dtype) for words in (before, now))
                most = np.abs(a - b).max(), np.maximum(np.abs(a), np.abs(b)).max()
                found[:, owner] = np.maximum(found[:, owner], most)
        return found


def nature_of(tensor: Tensor) -> tuple[torch.Size, torch.dtype]:
    """What a conversion changes: the shape, and the dtype."""
    return tensor.shape, tensor.dtype


def _views(tensor: Tensor) -> list[Words]:
    """See the sampled entries of a tensor as words; those of several words, word by word."""
    flat = tensor.detach().reshape(-1)
    count = max(1, flat.element_size() // 4)
    words = flat.view(_WORDS.get(flat.element_size(), torch.int32)).view(-1, count)
    sample = words[:: stride(len(flat))].cpu()
    return [np.asarray(sample[:, nth].numpy()) for nth in range(count)]


def _entries(words: Words, dtype: torch.dtype) -> NDArray[np.float64]:
    """Read the entries of a tensor from the words it was sampled as."""
    own = torch.from_numpy(words).to(_WORDS.get(dtype.itemsize, torch.int32))
    table = own.view(max(1, dtype.itemsize // 4), -1).t().contiguous()
    return np.asarray(table.view(dtype).reshape(-1).double().numpy())


def stride(numel: int) -> int:
    """Choose how far apart the entries lie that are read of a flattened tensor: an odd number."""
    return max(1, numel // SAMPLES) | 1


@lru_cache(maxsize=64)
def _factors(nth: int) -> NDArray[np.uint32]:
    """Make the odd numbers that the words of a parameter's n-th tensor are multiplied by."""
    key = np.array([nth, _MARKS], np.uint64)
    raw = np.random.Philox(counter=0, key=key).random_raw(8 * SAMPLES)
    return (np.asarray(raw, np.uint64) >> np.uint64(32)).astype(np.uint32) | np.uint32(1)
