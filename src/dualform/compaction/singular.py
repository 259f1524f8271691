"""An equivalent memory of low rank (Remark 3.4): few patterns that write what all of them wrote.

What a layer learned is one matrix, ΔW = Σ_t c_t δ_t x_tᵀ = U S Vᵀ. Its singular vectors, taken as
patterns, are a memory with the same output for every query:

    ΔW q = Σ_i σ_i u_i (v_i·q)         keys v_i, of length 1; error signals σ_i u_i; coefficient 1

No more than min(d_in, d_out) of them are needed, however long training was; the first r are the
best that r patterns can do. What is lost is every link to examples, labels and steps: a singular
vector is of all of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dualform.errors import QueryError
from dualform.memory.layer import LayerMemory
from dualform.memory.narrowing import narrowed


@dataclass(frozen=True)
class Equivalent:
    """At most `rank` patterns in place of a layer's own, as stored, and what they leave out."""

    keys: Tensor
    error_signals: Tensor
    scales: Tensor | None
    """What each row of the error signals is to be multiplied by, where they are in float16."""
    left_out: Tensor
    """ΔW minus what these patterns write, with every rounding: float64 [d_out, d_in]."""


def equivalent(
    layer: LayerMemory, learned: Tensor, rank: int, dtype: torch.dtype | None = None
) -> Equivalent:
    """The first singular vectors of what a layer learned; in 16 bits where they can be."""
    if not bool(learned.isfinite().all()):
        raise QueryError(
            f"what layer {layer.name!r} learned is not finite, so it has no singular vectors; "
            "leave it out of rank="
        )
    left, sizes, right = torch.linalg.svd(learned, full_matrices=False)
    known = int((sizes > sizes.max() * torch.finfo(sizes.dtype).eps).sum()) if len(sizes) else 0
    count = min(rank, known)
    keys, signals = right[:count], (left[:, :count] * sizes[:count]).T
    # The sign of a pair of singular vectors is free: the largest entry of a key is positive.
    if count:
        largest = keys.gather(1, keys.abs().argmax(1, keepdim=True))
        keys, signals = keys * largest.sign(), signals * largest.sign()
    keys, signals = keys.to(layer.dtype).contiguous(), signals.to(layer.dtype).contiguous()
    scales = None
    if dtype is not None:
        as_keys = narrowed(keys, dtype, scaled=False)
        as_signals = narrowed(signals, dtype, scaled=dtype == torch.float16)
        keys = keys if as_keys is None else as_keys[0]
        signals, scales = (signals, None) if as_signals is None else as_signals
    values = signals.to(layer.dtype)
    if scales is not None:
        values = values * scales[:, None].to(layer.dtype)
    left_out = learned - values.double().T @ keys.to(layer.dtype).double()
    if not bool(left_out.isfinite().all()):
        raise QueryError(
            f"{str(layer.dtype).removeprefix('torch.')}, which layer {layer.name!r} was trained "
            "in, cannot hold the singular vectors of what it learned; leave it out of rank="
        )
    return Equivalent(keys, signals, scales, left_out)
