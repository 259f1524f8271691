"""Matrix products of keys and queries, each with what it may be off by.

Ranking many queries needs no exact weight of most patterns: only to know that they are out. So a
block of keys is multiplied with all queries in float32 (float64, if float32 cannot hold the keys),
and every product comes with a bound on its error: γ‖x‖‖q‖, γ = (d + 4)·eps, the textbook bound on a
sum of products, however it is ordered. What the bound cannot rule out is weighed again in float64
(`ranking.py`).

Queries are multiplied by a power of two first, so that none is too large or too small for float32:
which patterns are the strongest does not depend on it.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dualform.attention import engine, weights
from dualform.memory import LayerMemory

SMALLEST, LARGEST = 1e-15, 1e15
"""Lengths of keys between which float32 neither runs over nor loses digits."""


class Products:
    """How blocks of keys are multiplied with the queries; `longest` is the largest ‖x‖."""

    def __init__(
        self, queries: Tensor, scale: NDArray[np.int32], dtype: torch.dtype, longest: float
    ) -> None:
        self.dtype = dtype
        self.scale = scale
        """The power of two that each query was multiplied by."""
        gamma = (queries.shape[1] + 4) * torch.finfo(dtype).eps
        self.room: engine.Reals = gamma * longest * queries.norm(dim=1).numpy()
        """What the products of each query may be off by, at most."""
        self._queries = queries.to(dtype)

    def rounded(self, keys: Tensor) -> Tensor:
        """A block of keys as it is to be multiplied."""
        return keys.to(self.dtype)

    def times(self, first: int, last: int, keys: Tensor) -> Tensor:
        """The products of some queries with rounded keys, in `dtype`: [last − first, b]."""
        return torch.mm(self._queries[first:last], keys.T)


def products(layer: LayerMemory, queries: Tensor) -> Products:
    """Products of a layer's keys with some queries."""
    longest = weights.longest_key(layer)
    scale = -torch.frexp(queries.abs().amax(1)).exponent
    asked = torch.ldexp(queries, scale[:, None])
    narrow = layer.dtype != torch.float64 and SMALLEST < longest < LARGEST
    dtype = torch.float32 if narrow else torch.float64
    return Products(asked, scale.numpy(), dtype, longest)
