"""Sums over everything a layer was trained on, streamed block by block.

All of attention and contribution is a handful of sums over patterns: Σ c δ xᵀ (rebuilt weights),
Σ c (x·q) δ (the dual output), x·q itself, and both projected on something. A memory may be far
larger than the machine's, so no function here holds more than a block of patterns (besides numbers
per pattern where that is the answer). Blocks are converted to float64 before they are summed:
contributions are large and cancel, and float32 would lose the digits that remain.

Ranking (`ranking.py`) and sums by group (`group_sums.py`) have faster ways of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dualform.layers.kinds import attention_weights, write
from dualform.memory import LayerMemory

BLOCK = 4096
"""Patterns per block: a few megabytes, large enough for matrix products to run at full speed."""

Progress = Callable[[int, int], None]
"""Called as `progress(patterns_done, patterns_in_total)` while a long sum runs."""

Reals = NDArray[np.float64]
Rows = NDArray[np.int64]


@dataclass(frozen=True)
class Scanned:
    """A block of patterns in float64: row numbers, keys [b, d_in], error signals [b, d_out].

    Tokens are whole numbers, [b, 1], in float64 as well.
    """

    rows: Rows
    keys: Tensor
    error_signals: Tensor


_NOTHING = torch.empty(0, 0, dtype=torch.float64)


def scan(
    layer: LayerMemory,
    included: NDArray[np.bool_] | None = None,
    *,
    keys: bool = True,
    error_signals: bool = True,
    block: int = BLOCK,
) -> Iterator[Scanned]:
    """Every pattern of the layer, or the `included` ones, in order, a block at a time."""
    for part in layer.blocks(block, keys=keys, error_signals=error_signals):
        size = part.rows
        rows = np.arange(part.start, part.start + size)
        chosen: slice | Tensor = slice(None)
        if included is not None:
            inside = included[part.start : part.start + size]
            if not inside.any():
                continue  # memory-mapped and never touched: skipping costs nothing
            if not inside.all():
                rows, chosen = rows[inside], torch.from_numpy(np.flatnonzero(inside))
        yield Scanned(
            rows,
            _NOTHING if part.keys is None else part.keys[chosen].double(),
            _NOTHING if part.error_signals is None else part.error_signals[chosen].double(),
        )


def key_blocks(
    layer: LayerMemory, included: NDArray[np.bool_] | None = None, block: int = BLOCK
) -> Iterator[tuple[Rows, Tensor]]:
    """Row numbers and keys [b, d_in] in the dtype of training, a block at a time."""
    for part in layer.blocks(block, error_signals=False):
        rows = np.arange(part.start, part.start + part.rows)
        inside = None if included is None else included[part.start : part.start + part.rows]
        if inside is not None and not inside.any():
            continue  # never touched: skipping costs nothing
        keys = part.keys
        assert keys is not None
        if inside is not None and not inside.all():
            rows, keys = rows[inside], keys[torch.from_numpy(np.flatnonzero(inside))]
        if keys.dtype not in (torch.float32, torch.float64):
            keys = keys.float()
        yield rows, keys


def gather_keys(layer: LayerMemory, rows: Rows) -> Tensor:
    """The keys of a few patterns, in the given order, float64: [len(rows), d_in]."""
    included = np.zeros(layer.rows, bool)
    included[rows] = True
    found = [part.keys for part in scan(layer, included, error_signals=False)]
    ordered = np.unique(rows)
    keys = torch.cat(found) if found else torch.empty(0, layer.key_width, dtype=torch.float64)
    return keys[torch.from_numpy(np.searchsorted(ordered, rows))]


def learned(
    layer: LayerMemory, weight: Reals | None, bias: Reals | None = None
) -> tuple[Tensor | None, Tensor | None]:
    """Σ_t weight_t δ_t x_tᵀ and Σ_t bias_t δ_t [d_out], in one pass, float64.

    The first has the shape of (the layer's rows of) its weight: [d_out, d_in], or [d_in, d_out].
    """
    matrix = vector = None
    if weight is None and bias is None:
        return None, None
    included = np.zeros(layer.rows, bool)
    if weight is not None:
        matrix = torch.zeros(layer.shape, dtype=torch.float64)
        included |= weight != 0
    if bias is not None:
        vector = torch.zeros(layer.out_features, dtype=torch.float64)
        included |= bias != 0
    for part in scan(layer, included, keys=weight is not None):
        if weight is not None and matrix is not None:
            values = part.error_signals * _at(weight, part.rows)[:, None]
            write(layer.kind, matrix, part.keys, values)
        if bias is not None and vector is not None:
            vector += _at(bias, part.rows) @ part.error_signals
    return matrix, vector


def dual_outputs(layer: LayerMemory, weight: Reals, queries: Tensor) -> Tensor:
    """Σ_t weight_t (x_t·q) δ_t for every query, the learned part as attention: [n, d_out]."""
    output = torch.zeros(len(queries), layer.out_features, dtype=torch.float64)
    for part in scan(layer, weight != 0):
        alpha = attention_weights(layer.kind, queries, part.keys)
        output += (alpha * _at(weight, part.rows)) @ part.error_signals
    return output


def attention_blocks(
    layer: LayerMemory, queries: Tensor, included: NDArray[np.bool_] | None
) -> Iterator[tuple[Scanned, Tensor]]:
    """The attention weights α = x·q of every query over a block of patterns at a time: [n, b]."""
    for part in scan(layer, included, error_signals=False):
        yield part, attention_weights(layer.kind, queries, part.keys)


def contributions(
    layer: LayerMemory,
    queries: Tensor,
    directions: Tensor,
    weight: Reals | None,
    bias: Reals | None,
) -> tuple[Reals, Reals]:
    """What each pattern wrote along g, and its attention, summed over the query rows: [T] each.

    Σ_i weight_t (x_t·q_i)(δ_t·g_i) + bias_t (δ_t·g_i); queries [n, d_in], directions [n, d_out].
    """
    written, attention = np.zeros(layer.rows), np.zeros(layer.rows)
    for part in scan(layer):
        along = directions @ part.error_signals.T
        alpha = attention_weights(layer.kind, queries, part.keys)
        attention[part.rows] = alpha.sum(0).numpy()
        if weight is not None:
            written[part.rows] += weight[part.rows] * (alpha * along).sum(0).numpy()
        if bias is not None:
            written[part.rows] += bias[part.rows] * along.sum(0).numpy()
    return written, attention


def group_codes(values: NDArray[Any]) -> tuple[list[Any], NDArray[np.int64]]:
    """The distinct values of a column, sorted, missing ones last; each row's index into them."""
    if values.dtype != object:
        distinct, codes = np.unique(values, return_inverse=True)
        return distinct.tolist(), codes.astype(np.int64).reshape(-1)
    known = sorted({v for v in values.tolist() if v is not None}, key=lambda v: (str(type(v)), v))
    listed = [*known, None] if any(v is None for v in values.tolist()) else known
    index = {value: code for code, value in enumerate(listed)}
    return listed, np.array([index[v] for v in values.tolist()], dtype=np.int64)


def _at(numbers: Reals, rows: Rows) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(numbers[rows]))
