"""Exact top patterns of one query through keys of one byte per number: a quarter of the reading.

Each key is also kept as x ≈ low + scale · u, u whole numbers of one byte, together with ‖x − low −
scale·u‖, what the short form leaves out. By Cauchy and Schwarz a weight computed from the short
form is off by at most that norm times ‖q‖ (and the rounding of the loop itself). So patterns whose
upper bound lies below the k-th largest lower bound are out; the few that remain are weighed
exactly. The answer is the very same as without.

Short keys take a quarter of the bytes of float32 keys, beside the memory in `derived/`, and are
made only when asked for (`DualForm.prepare`); they need the extra `fast`.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dualform.attention import engine, weights
from dualform.attention.compiled import Kernels, kernels
from dualform.attention.tables import kept, known
from dualform.memory import LayerMemory

ABOUT = "short keys, 8 bits"
LEVELS = 255.0


def prepare(layer: LayerMemory) -> int:
    """Make the short keys of a layer, if they are not there; their size in bytes."""
    if layer.kind == "embedding":
        return 0  # tokens are short already
    tensors = kept(layer, ABOUT, lambda: _build(layer), on_disk=True)
    return sum(tensor.nbytes for tensor in tensors.values())


def _build(layer: LayerMemory) -> Mapping[str, Tensor]:
    short = torch.empty(layer.rows, layer.in_features, dtype=torch.uint8)
    numbers = torch.empty(3, layer.rows, dtype=torch.float32)
    weights.norms(layer)  # refuses keys that are no numbers
    for part in weights.blocks_of(layer):
        keys = part.keys
        assert keys is not None
        here = slice(part.start, part.start + part.rows)
        wide = keys.double()
        low, high = wide.amin(1, keepdim=True).float(), wide.amax(1, keepdim=True)
        low = torch.where(low >= 0, 0.0, low)  # behind a ReLU, zeros stay exactly zero
        scale = ((high - low) / LEVELS).float()
        scale = torch.where(scale > 0, scale, 1.0)
        units = ((wide - low) / scale.double()).round_().clamp_(0, LEVELS)
        left = torch.linalg.vector_norm(wide - low - scale.double() * units, dim=1)
        short[here] = units.to(torch.uint8)
        # a hair above, since it is kept in float32 and must stay a bound
        numbers[:, here] = torch.stack([low[:, 0], scale[:, 0], (left * (1 + 1e-6)).float()])
    return {"short": short, "numbers": numbers}


def serve(layer: LayerMemory, queries: Tensor, sign: str) -> bool:
    """Whether short keys are there, and answer such a question."""
    if len(queries) != 1 or sign == "absolute" or layer.kind == "embedding":
        return False
    worth = kernels(layer) is not None
    return worth and known(layer, ABOUT) is not None


def top(
    layer: LayerMemory,
    queries: Tensor,
    included: NDArray[np.bool_] | None,
    k: int,
    sign: str,
) -> tuple[NDArray[np.int64], engine.Rows] | None:
    """Cells (all 0) and rows of what may be among the best k; None where there is no such way."""
    fast = kernels(layer)
    tensors = known(layer, ABOUT) if serve(layer, queries, sign) else None
    if fast is None or tensors is None:
        return None
    low, scale, left = tensors["numbers"].numpy()
    query = queries[0].numpy() * (-1.0 if sign == "least" else 1.0)
    size = float(np.linalg.norm(query))
    if not 1e-15 < size < 1e15 or not np.isfinite(tensors["numbers"].numpy()).all():
        return None
    products = _products(fast, tensors["short"].numpy(), query.astype(np.float32))
    middle = products.astype(np.float64) * scale + low * float(query.sum())
    # ‖q‖ times what is left out, and what float32 may do to the products and to q itself
    gamma = (layer.in_features + 4) * float(np.finfo(np.float32).eps)
    reach = scale * (LEVELS * layer.in_features**0.5)  # ≥ scale ‖u‖
    room = (left + gamma * reach) * size * (1 + 1e-9) + 1e-300
    if included is not None:
        middle = np.where(included, middle, -np.inf)
    lower = middle - room
    count = layer.rows if included is None else int(included.sum())
    if count <= k:
        rows = np.arange(layer.rows) if included is None else np.flatnonzero(included)
    else:
        kth = np.partition(lower, layer.rows - k)[layer.rows - k]
        rows = np.flatnonzero(middle + room >= kth)
    return np.zeros(len(rows), np.int64), rows


def _products(
    fast: Kernels, short: NDArray[np.uint8], query: NDArray[np.float32]
) -> NDArray[np.float32]:
    """u·q of every pattern, float32, by all threads."""
    out = np.empty(len(short), np.float32)

    def some(start: int) -> None:
        here = slice(start, start + engine.BLOCK)
        fast.short_weights(short[here], query, out[here])

    weights.spread(some, engine.starts(len(short)), torch.get_num_threads())
    return out
