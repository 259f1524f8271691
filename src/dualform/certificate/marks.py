"""Marks: one number per parameter and step, of some sixty entries of each of its tensors.

The mark of a parameter's weights, and that of what its optimizer remembers, say after every update
where training was, bit for bit: an edit is seen before the next update, a restored checkpoint is
found among recorded steps, and a replay knows at which step it left the way.

Why it is hard: at every update all parameters must cost a few microseconds together. So entries
are read as words through numpy's views of the tensors' memory, put in a row by one call, multiplied
by the powers of an odd number and summed by parameter, modulo 2³².
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

SAMPLES = 64  # about how many entries of a tensor are read
FACTOR = 0x9E3779B1
WORDS = {1: torch.int8, 2: torch.int16}  # entries of so many bytes; of more: one int32 or two

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
        self.seen = [t.detach() for t in self.tensors]
        """The same memory; of one that was put into another dtype or shape, what it was before."""
        self._view()
        self._ends = np.cumsum([0, *(_words(tensor).size for tensor in self.seen)])
        self._of = self._ends[np.cumsum([0, *map(len, tensors)])]  # by parameter
        factors = np.cumprod(np.full(self._ends[-1], FACTOR, np.uint32), dtype=np.uint32)
        known = (factors[:words] for words in np.diff(self._of))
        self._factors = np.concatenate([factors[:0], *known])

    def _view(self) -> None:
        """View the memory that the tensors have now; after a conversion, what was before."""
        pairs = zip(self.tensors, self.seen, strict=True)
        self.seen = [t.detach() if nature_of(t) == nature_of(s) else s for t, s in pairs]
        self._views = [column for tensor in self.seen for column in _words(tensor).T]
        self._memory = [t.data_ptr() for t in self.tensors]
        self._is_live = all(t.is_cpu and t.is_contiguous() for t in self.tensors)

    def sampled(self) -> Words:
        """Copy the sampled entries of all parameters, as words."""
        if not self._is_live or self._memory != [t.data_ptr() for t in self.tensors]:
            self._view()
        return np.concatenate(self._views) if self._views else np.zeros(0, np.int32)

    def numbers(self, sampled: Words) -> NDArray[np.uint32]:
        """Turn sampled entries into one number for each parameter; 0 where it has no tensors."""
        sums = np.zeros(len(sampled) + 1, np.uint32)
        words = sampled.astype(np.int32, copy=False).view(np.uint32)
        np.cumsum(words * self._factors, out=sums[1:])
        found: NDArray[np.uint32] = np.diff(sums[self._of])
        found[(found == 0) & (np.diff(self._of) > 0)] = 1
        return found

    def apart(self, before: Words, now: Words) -> NDArray[np.float64]:
        """How far sampled entries of each tensor are apart at most, and how large they are."""
        found = np.zeros((2, len(self.seen)))
        for nth, tensor in enumerate(self.seen):
            a, b = (words[self._ends[nth] : self._ends[nth + 1]] for words in (before, now))
            if not np.array_equal(a, b):
                pair = torch.stack([_entries(words, tensor.dtype) for words in (a, b)])
                found[:, nth] = float((pair[1] - pair[0]).abs().max()), float(pair.abs().max())
        return found


def nature_of(tensor: Tensor) -> tuple[torch.Size, torch.dtype]:
    """What a conversion changes: the shape, and the dtype."""
    return tensor.shape, tensor.dtype


def _words(tensor: Tensor) -> Words:
    """See some entries of a tensor, an odd number of them apart, as words: [entries, words]."""
    flat = tensor.detach().reshape(-1, 1)
    sample = flat[:: max(1, len(flat) // SAMPLES) | 1]
    words: Words = sample.view(WORDS.get(flat.element_size(), torch.int32)).cpu().numpy()
    return words


def _entries(words: Words, dtype: torch.dtype) -> Tensor:
    """Read the entries of a tensor from the words it was sampled as."""
    table = torch.from_numpy(words).to(WORDS.get(dtype.itemsize, torch.int32))
    return table.view(max(1, dtype.itemsize // 4), -1).T.contiguous().view(dtype).double()
