"""Copies of inputs that may legally be changed in place before the backward pass."""

from __future__ import annotations

import weakref

import torch
from torch import Tensor

from dualform.recording.parameters import version_of


class Copies:
    """Makes them; layers that are fed the same tensor one after the other share one.

    So do the projections of attention: where a checkpoint is to save memory, that counts.
    """

    def __init__(self) -> None:
        self._last: tuple[weakref.ref[Tensor], int, weakref.ref[Tensor]] | None = None

    def of(self, given: Tensor, dtype: torch.dtype) -> Tensor:
        """The tensor as it is now, in one piece and without its graph; not to be written to."""
        version, last = version_of(given), self._last
        if last is not None and last[0]() is given and version == last[1] != -1:
            known = last[2]()
            if known is not None and known.dtype == dtype:
                return known
        copy = given.detach().to(dtype, copy=True, memory_format=torch.contiguous_format)
        self._last = weakref.ref(given), version, weakref.ref(copy)
        return copy
