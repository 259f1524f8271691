"""Matrix products of keys and queries, each with what it may be off by.

Ranking many queries needs no exact weight of most patterns: only to know that they are out. So a
block of keys is multiplied with all queries as fast as the machine can, and every product comes
with a bound on its error; what the bound cannot rule out is weighed again in float64
(`ranking.py`). Two ways:

- `Fine`: in the precision the keys are stored in. Off by γ‖x‖‖q‖, γ = (d + 4)·eps, the textbook
  bound on a sum of products, however it is ordered.
- `Coarse`: in bfloat16, which processors with instructions for it multiply twice as fast (with
  matrix units, many times). By Cauchy and Schwarz, rounding keys and queries moves a product by at
  most ‖x − x̃‖‖q‖ + ‖x̃‖‖q − q̃‖; products of bfloat16 numbers are exact in float32, in which they
  are added up; and the sum is rounded once more.

Queries are multiplied by a power of two first, so that none is too large or too small for either:
which patterns are the strongest does not depend on it.
"""

from __future__ import annotations

from functools import cache
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dualform.attention import engine, weights
from dualform.memory import LayerMemory

WORTH = 1 << 22
"""Products (patterns × queries) from which on bfloat16 pays; fewer are soon done anyway."""

BFLOAT16 = 2.0**-8
"""What rounding to bfloat16 may change a number by, relative to it."""

SMALLEST, LARGEST = 1e-15, 1e15
"""Lengths of keys between which float32 neither runs over nor loses digits."""


class Products(Protocol):
    """How blocks of keys are multiplied with the queries."""

    dtype: torch.dtype
    room: engine.Reals
    """What the products of each query may be off by, at most."""
    scale: NDArray[np.int32]
    """The power of two that each query was multiplied by."""

    def rounded(self, keys: Tensor) -> Tensor:
        """A block of keys as it is to be multiplied; valid until the next."""
        ...

    def times(self, first: int, last: int, keys: Tensor) -> Tensor:
        """The products of some queries with rounded keys, in `dtype`: [last − first, b]."""
        ...


def products(
    layer: LayerMemory, queries: Tensor, scales: engine.Reals | None, *, coarse: bool
) -> Products:
    """The fastest way there is, `coarse` if that may be.

    `scales` are 1/‖x‖, if products will be multiplied by it.
    """
    longest = weights.longest_key(layer)
    scale = -torch.frexp(queries.abs().amax(1)).exponent
    asked = torch.ldexp(queries, scale[:, None])
    narrow = layer.dtype != torch.float64 and SMALLEST < longest < LARGEST
    scaled = scales is not None
    if scales is not None:
        narrow = narrow and bool((scales < 1e30).all())
    native = is_native() and torch.backends.mkldnn.enabled
    if coarse and narrow and layer.rows * len(queries) >= WORTH and native:
        off = weights.rounding_to_bfloat16(layer)
        off, longest = (BFLOAT16, 1.001) if scaled else (off, longest)
        return Coarse(asked, scale.numpy(), off, longest)
    dtype = torch.float32 if narrow else torch.float64
    return Fine(asked, scale.numpy(), dtype, 1.001 if scaled else longest)


@cache
def is_native() -> bool:
    """Whether this processor multiplies bfloat16 numbers by instructions of their own."""
    found = getattr(torch.cpu, "_is_avx512_bf16_supported", None)
    amx = getattr(torch.cpu, "_is_amx_tile_supported", None)
    known = any(bool(ask()) for ask in (found, amx) if ask is not None)
    return known and bool(torch.backends.mkldnn.is_available())  # type: ignore[no-untyped-call]


class Fine:
    """Products in the precision keys are stored in."""

    def __init__(
        self, queries: Tensor, scale: NDArray[np.int32], dtype: torch.dtype, longest: float
    ) -> None:
        self.dtype, self.scale = dtype, scale
        gamma = (queries.shape[1] + 4) * torch.finfo(dtype).eps
        self.room = gamma * longest * queries.norm(dim=1).numpy()
        self._queries = queries.to(dtype)

    def rounded(self, keys: Tensor) -> Tensor:
        return keys.to(self.dtype)

    def times(self, first: int, last: int, keys: Tensor) -> Tensor:
        return torch.mm(self._queries[first:last], keys.T)


class Coarse:
    """Products in bfloat16; `off` is the largest ‖x − x̃‖, `longest` the largest ‖x‖."""

    dtype = torch.float32

    def __init__(
        self, queries: Tensor, scale: NDArray[np.int32], off: float, longest: float
    ) -> None:
        self.scale = scale
        self._queries = queries.to(torch.bfloat16)
        sizes = queries.norm(dim=1)
        moved = (queries - self._queries.double()).norm(dim=1)
        gamma = (queries.shape[1] + 4) * torch.finfo(torch.float32).eps
        bound = off * sizes + 1.01 * longest * (moved + (gamma + BFLOAT16) * sizes)
        self.room: engine.Reals = (bound * (1 + 1e-6)).numpy().astype(np.float64)
        self._keys, self._wide = engine.Buffer(torch.bfloat16), engine.Buffer(torch.float32)

    def rounded(self, keys: Tensor) -> Tensor:
        return self._keys.converted(keys)

    def times(self, first: int, last: int, keys: Tensor) -> Tensor:
        return self._wide.converted(torch.mm(self._queries[first:last], keys.T))
