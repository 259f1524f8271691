"""One layer's part of the memory: its keys and error signals, streamed block by block.

The tensors handed out are mapped from disk: reading a block costs what the disk costs, and what was
read can be forgotten by the system at any time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from dualform.errors import QueryError
from dualform.layers import Layer
from dualform.memory.patterns import Patterns
from dualform.memory.segments import Segment


@dataclass(frozen=True)
class Block:
    """Some consecutive patterns of a layer. The tensors are mapped: clone before editing them."""

    start: int
    keys: Tensor | None
    error_signals: Tensor | None


class LayerMemory:
    """The patterns one layer was trained on: `keys` [T, d_in], `error_signals` [T, d_out].

    Example:
        >>> fc1 = df.Memory.open("runs/digits").layer("fc1")   # doctest: +SKIP
        >>> fc1.keys.shape, fc1.error_signals.shape, fc1.patterns["label"][:3]   # doctest: +SKIP
    """

    def __init__(
        self, layer: Layer, dtype: torch.dtype, segments: Sequence[Segment], patterns: Patterns
    ) -> None:
        self.name = layer.name
        self.kind = layer.kind
        self.weight = layer.weight
        self.bias = layer.bias
        self.in_features = layer.in_features
        self.out_features = layer.out_features
        self.dtype = dtype
        self.patterns = patterns
        self._segments = [s for s in segments if s.rows(layer.name)]

    @cached_property
    def rows(self) -> int:
        """T, the number of patterns."""
        return sum(segment.rows(self.name) for segment in self._segments)

    def __len__(self) -> int:
        return self.rows

    def __repr__(self) -> str:
        return (
            f"LayerMemory({self.name!r}: {self.rows:,} patterns, keys of {self.in_features}, "
            f"error signals of {self.out_features}, {str(self.dtype).removeprefix('torch.')})"
        )

    def blocks(
        self, size: int = 4096, *, keys: bool = True, error_signals: bool = True
    ) -> Iterator[Block]:
        """All patterns in order, at most `size` at a time; nothing else is ever in RAM."""
        if size < 1:
            raise QueryError(f"blocks of {size} patterns were asked for; expected at least 1")
        start = 0
        for segment in self._segments:
            rows = segment.rows(self.name)
            all_keys = all_signals = None
            if keys:
                all_keys = segment.tensor("keys", self.name, self.in_features, self.dtype)
            if error_signals:
                all_signals = segment.tensor(
                    "error_signals", self.name, self.out_features, self.dtype
                )
            for low in range(0, rows, size):
                high = min(rows, low + size)
                yield Block(
                    start + low,
                    None if all_keys is None else all_keys[low:high],
                    None if all_signals is None else all_signals[low:high],
                )
            start += rows

    @property
    def keys(self) -> Tensor:
        """Every key x_t, [T, d_in], in RAM; for large memories use `blocks`."""
        blocks = [b.keys for b in self.blocks(1 << 30, error_signals=False) if b.keys is not None]
        return torch.cat(blocks) if blocks else torch.empty(0, self.in_features, dtype=self.dtype)

    @property
    def error_signals(self) -> Tensor:
        """Every error signal δ_t as captured, [T, d_out], in RAM; see also `blocks`."""
        blocks = [
            b.error_signals for b in self.blocks(1 << 30, keys=False) if b.error_signals is not None
        ]
        return torch.cat(blocks) if blocks else torch.empty(0, self.out_features, dtype=self.dtype)
