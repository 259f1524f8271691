"""Rows in 16 bits: which of them can be held, and relative to what. Recording and conversion agree.

Why it is hard: 16 bits end early. float16 knows nothing above 65,504 and loses digits below 6e-5,
and error signals are often smaller than 1e-8. So float16 error signals are kept relative to the
largest entry of their row, and rows that 16 bits cannot hold stay in the dtype of training. What is
promised either way: every entry is within half a unit in the last place *of the largest entry of
its row*; nothing finite becomes infinite; what is not finite in training is not finite here.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dualform.layers import Layer, of

BLOCK = 1 << 17
"""How many entries are rounded at a time, so that what is computed of them stays in the cache."""


def narrowed(
    rows: Tensor, dtype: torch.dtype, *, scaled: bool
) -> tuple[Tensor, Tensor | None] | None:
    """Rows in a 16-bit type, and what each is to be multiplied by; None if it cannot hold them."""
    result = torch.empty(rows.shape, dtype=dtype)
    scales = torch.ones(len(rows)) if scaled else None
    height = max(1, BLOCK // max(1, rows.shape[1]))
    for low in range(0, len(rows), height):
        part = rows[low : low + height]
        sizes = _sizes(part)
        if scales is None:
            if not _holds(sizes, dtype):
                return None
        else:
            found = torch.where(sizes == 0, 1.0, sizes.to(torch.float32))
            if not bool((found.isfinite() & (found > 0)).all()):  # float64 goes further
                return None
            scales[low : low + height] = found
            part = part / found[:, None]
        result[low : low + height].copy_(part)
    return result, scales


def lost_in_use(
    layer: Layer,
    parameter: str,
    v: Tensor | None,
    signs: NDArray[np.float64],
    exact: tuple[Tensor, Tensor],
    rounded: tuple[Tensor, Tensor],
) -> tuple[float, float]:
    """What rounding changed in a use's Σ δ (x·v): along the signs of its rows, and by size.

    Keys and error signals as trained, and as a reader will see them.
    """
    if parameter != layer.weight or v is None:
        off = rounded[1].sum(0) - exact[1].sum(0)
    else:
        along = of(layer.kind).along
        off = along(layer, *rounded, v) - along(layer, *exact, v)
    numbers = off.double().numpy()
    return float(signs @ numbers), float(np.linalg.norm(numbers))


def _sizes(rows: Tensor) -> Tensor:
    """The largest entry of each row; if one has overflown in training, the largest finite one."""
    if not rows.numel():
        return torch.zeros(len(rows), dtype=rows.dtype)
    sizes = rows.abs().amax(1)
    if bool(sizes.isfinite().all()):
        return sizes
    return rows.abs().nan_to_num(nan=0.0, posinf=0.0).amax(1)


def _holds(sizes: Tensor, dtype: torch.dtype) -> bool:
    """Whether a 16-bit type holds rows whose largest entries are these: each is zero, or neither
    too large nor so small that it would lose digits."""
    limits = torch.finfo(dtype)
    smallest, largest = limits.smallest_normal, limits.max * (1 + limits.eps / 4)
    return bool(((sizes >= smallest) & (sizes <= largest) | (sizes == 0)).all())
