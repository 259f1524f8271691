"""Sums over everything a layer was trained on, streamed block by block.

All of attention and contribution is a handful of sums over patterns: Σ c δ xᵀ (`written.py`),
Σ c (x·q) δ (the dual output), x·q itself, and both projected on something. A memory may be far
larger than the machine's, so no function here holds more than a block of patterns (besides numbers
per pattern where that is the answer). Blocks are converted to float64 before they are summed:
contributions are large and cancel, and float32 would lose the digits that remain.

Ranking (`ranking.py`) and sums by group (`group_sums.py`) have faster ways of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dualform.layers import kinds
from dualform.memory import DistinctKeys, LayerMemory
from dualform.memory.layer import Block

BLOCK = 4096
"""Patterns per block: a few megabytes, large enough for matrix products to run at full speed."""

Progress = Callable[[int, int], None]
"""Called as `progress(patterns_done, patterns_in_total)` while a long sum runs."""

Reals = NDArray[np.float64]
Rows = NDArray[np.int64]

_progress: ContextVar[Progress | None] = ContextVar("progress", default=None)


@contextmanager
def reporting(progress: Progress) -> Iterator[None]:
    """Have every pass over a layer's patterns that is made inside call `progress(done, total)`."""
    token = _progress.set(progress)
    try:
        yield
    finally:
        _progress.reset(token)


def reported(parts: Iterable[Block], total: int) -> Iterator[Block]:
    """The same blocks; progress is reported after each, if it was asked for."""
    progress, done = _progress.get(), 0
    for part in parts:
        if progress is not None:
            progress(done, total)
        done += part.rows
        yield part
    if progress is not None:
        progress(total, total)


def distinct_blocks(distinct: DistinctKeys, size: int = BLOCK) -> Iterator[tuple[int, Tensor]]:
    """The different keys of a layer that stores each once, block by block, with progress."""
    progress = _progress.get()
    for start, keys in distinct.blocks(size):
        if progress is not None:
            progress(start, distinct.rows)
        yield start, keys
    if progress is not None:
        progress(distinct.rows, distinct.rows)


@dataclass(frozen=True)
class Scanned:
    """A block of patterns in float64: row numbers, keys [b, d_in], error signals [b, d_out].

    Tokens are whole numbers, [b, 1], in float64 as well.
    """

    rows: Rows
    keys: Tensor
    error_signals: Tensor


_NOTHING = torch.empty(0, 0, dtype=torch.float64)


class Room:
    """Room that is used again for block after block: fresh memory costs more than converting."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._room = torch.empty(0, dtype=dtype)

    def converted(self, tensor: Tensor) -> Tensor:
        """The tensor in the buffer's dtype; valid until the next call."""
        if tensor.dtype == self._room.dtype:
            return tensor
        if self._room.numel() < tensor.numel():
            self._room = torch.empty(tensor.numel(), dtype=self._room.dtype)
        return self._room[: tensor.numel()].view(tensor.shape).copy_(tensor)


def keys_of(part: Block) -> Tensor:
    """A block's keys as they are stored: the caller widens them."""
    narrow = part.narrow_keys
    return part.keys if narrow is None else narrow


def products(layer: LayerMemory, queries: Tensor, keys: Tensor) -> Tensor:
    """α = x·q of every query with every key of a block: [n, d_in], [b, d_in] -> [n, b]."""
    return kinds.of(layer.kind).attention(queries, keys)


def looks_up(layer: LayerMemory) -> bool:
    """Whether keys are tokens: whole numbers that are the same or not."""
    return kinds.of(layer.kind).key_dtype is not None


def scan(
    layer: LayerMemory,
    included: NDArray[np.bool_] | None = None,
    *,
    keys: bool = True,
    error_signals: bool = True,
    block: int = BLOCK,
) -> Iterator[Scanned]:
    """Every pattern of the layer, or the `included` ones, in order, a block at a time.

    The tensors are valid until the next block.
    """
    room = Room(torch.float64), Room(torch.float64)
    blocks = layer.blocks(block, error_signals=error_signals)
    for part in reported(blocks, layer.rows):
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
            room[0].converted(keys_of(part)[chosen]) if keys else _NOTHING,
            room[1].converted(part.error_signals[chosen]) if error_signals else _NOTHING,
        )


def key_blocks(
    layer: LayerMemory,
    included: NDArray[np.bool_] | None = None,
    block: int = BLOCK,
    first: Reals | None = None,
) -> Iterator[tuple[Rows, Tensor]]:
    """Row numbers and keys [b, d_in] in float32 or float64, a block at a time.

    In order; or, given a number per pattern, the blocks with the largest `first`. Keys are valid
    until the next block.
    """
    room = Room(torch.float32)
    parts: Iterable[Block] = layer.blocks(block, error_signals=False)
    if first is not None:
        parts = _largest_first(list(parts), first)
    for part in reported(parts, layer.rows):
        rows = np.arange(part.start, part.start + part.rows)
        inside = None if included is None else included[part.start : part.start + part.rows]
        if inside is not None and not inside.any():
            continue  # never touched: skipping costs nothing
        keys = keys_of(part)
        if inside is not None and not inside.all():
            rows, keys = rows[inside], keys[torch.from_numpy(np.flatnonzero(inside))]
        keys = keys if keys.dtype == torch.float64 else room.converted(keys)
        yield rows, keys


def _largest_first(parts: list[Block], sizes: Reals) -> Iterator[Block]:
    """The same blocks in another order; none is held once it has been used."""
    parts.sort(key=lambda part: float(sizes[part.start : part.start + part.rows].max()))
    while parts:
        yield parts.pop()


def gather_keys(layer: LayerMemory, rows: Rows) -> Tensor:
    """The keys of a few patterns, in the given order, float64: [len(rows), d_in]."""
    included = np.zeros(layer.rows, bool)
    included[rows] = True
    found = [part.keys.clone() for part in scan(layer, included, error_signals=False)]
    ordered = np.unique(rows)
    keys = torch.cat(found) if found else torch.empty(0, layer.key_width, dtype=torch.float64)
    return keys[torch.from_numpy(np.searchsorted(ordered, rows))]


def dual_outputs(layer: LayerMemory, weight: Reals, queries: Tensor) -> Tensor:
    """Σ_t weight_t (x_t·q) δ_t for every query, the learned part as attention: [n, d_out]."""
    output = torch.zeros(len(queries), layer.out_features, dtype=torch.float64)
    for part in scan(layer, weight != 0):
        alpha = products(layer, queries, part.keys)
        output += (alpha * _at(weight, part.rows)) @ part.error_signals
    return output


def attention_blocks(
    layer: LayerMemory, queries: Tensor, included: NDArray[np.bool_] | None
) -> Iterator[tuple[Scanned, Tensor]]:
    """The attention weights α = x·q of every query over a block of patterns at a time: [n, b]."""
    for part in scan(layer, included, error_signals=False):
        yield part, products(layer, queries, part.keys)


def _at(numbers: Reals, rows: Rows) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(numbers[rows]))
