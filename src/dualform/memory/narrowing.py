"""Rows in 16 bits: which of them can be held, and relative to what. Recording and conversion agree.

Why it is hard: 16 bits end early. float16 knows nothing above 65,504 and loses digits below 6e-5,
and error signals are often smaller than 1e-8. So float16 error signals are kept relative to the
largest entry of their row, and rows that 16 bits cannot hold stay in the dtype of training. What is
promised either way: every entry is within half a unit in the last place *of the largest entry of
its row*; nothing finite becomes infinite; what is not finite in training is not finite here.
"""

from __future__ import annotations

from math import isfinite

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dualform.layers import Layer, of

BLOCK = 1 << 17
"""How many entries are rounded at a time."""


def holds(rows: Tensor, dtype: torch.dtype) -> bool:
    """Whether a 16-bit type holds rows: the largest entry of each is zero, or neither too large nor
    so small that it would lose digits."""
    if not rows.numel():
        return True
    limits = torch.finfo(dtype)
    smallest, largest = limits.smallest_normal, limits.max * (1 + limits.eps / 4)
    sizes = rows.abs().amax(1)
    if float(sizes.min()) >= smallest and float(sizes.max()) <= largest:
        return True
    sizes = _finite_sizes(rows)
    fit = (sizes >= smallest) & (sizes <= largest) | (sizes == 0)
    return bool(fit.all())


def row_scales(rows: Tensor) -> Tensor | None:
    """The largest entry of each row in float32 (1 for a row of zeros); None if it is beyond that.

    Only float64 can be.
    """
    if not rows.numel():
        return torch.ones(len(rows))
    sizes = rows.abs().amax(1)
    if not isfinite(float(sizes.max())):  # an overflow in training, which may still be dropped
        sizes = _finite_sizes(rows)
    scales = sizes.to(torch.float32)
    if float(scales.min()) == 0.0:
        scales = torch.where(sizes == 0, 1.0, scales)
    if rows.dtype == torch.float64 and not bool((scales.isfinite() & (scales > 0)).all()):
        return None
    return scales


def narrowed(
    rows: Tensor, dtype: torch.dtype, *, scaled: bool
) -> tuple[Tensor, Tensor | None] | None:
    """Rows in a 16-bit type, and what each is to be multiplied by; None if it cannot hold them.

    The same numbers as a recorder keeps that was asked for this type from the start.
    """
    result = torch.empty(rows.shape, dtype=dtype)
    scales = torch.ones(len(rows)) if scaled else None
    return (result, scales) if narrow(rows, result, scales) else None


def narrow(rows: Tensor, to: Tensor, scales: Tensor | None) -> bool:
    """Write rows to a 16-bit tensor, and their scales; False if it cannot hold them.

    A few rows at a time, so that what is computed of them on the way stays in the cache.
    """
    if not rows.numel():
        return True
    height = max(1, BLOCK // rows.shape[1])
    for low in range(0, len(rows), height):
        part = rows[low : low + height]
        if scales is None:
            if not holds(part, to.dtype):
                return False
        else:
            found = row_scales(part)
            if found is None:
                return False
            scales[low : low + height].view(-1).copy_(found)
            part = part / found[:, None]
        to[low : low + height].copy_(part)
    return True


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


def _finite_sizes(rows: Tensor) -> Tensor:
    """The largest finite entry of each row, by size."""
    return rows.abs().nan_to_num(nan=0.0, posinf=0.0).amax(1)
