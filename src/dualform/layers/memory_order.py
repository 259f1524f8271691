"""How a tensor lies in memory, as one small number, and a tensor that lies so again.

A sum's last bits depend on the order of its terms, and torch adds in the order of memory: the bias
of a layer whose error signal comes transposed, or the product with an input that is stored column
by column (float64, or one column only), have other bits than the same rows stored one by one. Such
uses are rare; they say how they lay, and their gradients are computed from rows that lie so again.

Known are tensors of 2 to 4 dimensions: the order of their dimensions in memory, which of them are
repeated (expanded), and whether there are gaps. 0 stands for rows one by one, and for all others.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import permutations

import torch
from torch import Tensor

_ORDERS = {n: list(permutations(range(n))) for n in (2, 3, 4)}
_BITS = 13
SPREAD, PITCH = 1, 2
"""Gaps between neighbours; between runs of neighbours."""


def code_of_pair(one: Tensor, other: Tensor) -> int:
    """Both in one number."""
    return code_of(one) << _BITS | code_of(other)


def split(code: int) -> tuple[int, int]:
    """The two that `code_of_pair` put together."""
    return code >> _BITS, code & (1 << _BITS) - 1


def code_of(tensor: Tensor) -> int:
    """How a tensor lies: 2 bits for its dimensions, 4 for repeats, 2 for gaps, 5 for the order."""
    n = tensor.dim()
    if n not in _ORDERS or tensor.is_contiguous():
        return 0
    sizes, strides = tensor.shape, tensor.stride()
    order = tuple(sorted(range(n), key=lambda d: -strides[d]))
    repeats = sum(1 << d for d in range(n) if strides[d] == 0 and sizes[d] > 1)
    smallest = min((stride for stride in strides if stride), default=1)
    gaps = SPREAD * (smallest != 1)
    dense = _strides(sizes, order, repeats, gaps)
    gaps |= PITCH * any(
        s != t for s, t, size in zip(strides, dense, sizes, strict=True) if size > 1
    )
    return _ORDERS[n].index(order) << 8 | gaps << 6 | repeats << 2 | (n - 1)


def restored(rows: Tensor, shape: tuple[int, ...], code: int) -> Tensor:
    """Rows [n, d] of a use of some leading shape, lying as the code says."""
    if not code:
        return rows
    n, repeats, gaps, order = (code & 3) + 1, code >> 2 & 15, code >> 6 & 3, code >> 8
    tensor = rows if n == 2 else rows.view(*shape, -1)
    strides = _strides(tensor.shape, _ORDERS[n][order], repeats, gaps)
    kept = tensor
    for d in range(n):
        kept = kept.narrow(d, 0, 1) if repeats >> d & 1 else kept
    lying = torch.empty_strided(kept.shape, strides, dtype=rows.dtype, device=rows.device)
    return lying.copy_(kept).expand(tensor.shape)


def _strides(sizes: Sequence[int], order: Sequence[int], repeats: int, gaps: int) -> list[int]:
    """The strides of a tensor whose dimensions lie in this order, with gaps or without."""
    strides, stride, is_first = [0] * len(sizes), 1 + (gaps & SPREAD), True
    for d in reversed(order):
        if not repeats >> d & 1:
            strides[d] = stride
            stride = stride * max(1, sizes[d]) + (is_first and gaps & PITCH > 0)
            is_first = False
    return strides
