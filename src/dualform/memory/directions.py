"""The fixed directions along which parameters and their gradients are looked at.

Recorder and readers make them anew from a parameter's place in the memory, so none is stored. They
must never change, and a library's random numbers may be drawn otherwise in its next version. Raw
words of Philox cannot: they are fixed by its definition, and what is made of them is exact.

A direction's entries are ±[0.5, 1.5]/√width: no entry is missed, and no exchange of two goes
unseen as it would with plain signs.
"""

from __future__ import annotations

from math import sqrt

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_DIRECTIONS, _SIGNS = 1, 2


def direction(index: int, width: int) -> Tensor:
    """Make the direction v of the parameter at a place in the list of them: float64, [width]."""
    words = _words(_DIRECTIONS, index, width)
    sizes = 0.5 + (words & np.uint64((1 << 52) - 1)).astype(np.float64) * 2.0**-52
    return torch.from_numpy(_signed(words, sizes) / sqrt(max(1, width)))


def signs(index: int, height: int) -> NDArray[np.float64]:
    """Make the signs that sum up the rows of a parameter: ±1, [height]."""
    return _signed(_words(_SIGNS, index, height), np.ones(height))


def _words(what: int, index: int, count: int) -> NDArray[np.uint64]:
    key = np.array([index, what], np.uint64)
    return np.asarray(np.random.Philox(counter=0, key=key).random_raw(count), np.uint64)


def _signed(words: NDArray[np.uint64], sizes: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.where(words >> np.uint64(63) != 0, -sizes, sizes)
