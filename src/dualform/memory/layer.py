"""One layer's part of the memory: its keys and error signals, streamed block by block.

The tensors handed out are mapped from disk: reading a block costs what the disk costs, and what was
read can be forgotten by the system at any time. Patterns stored in 16 bits come back in the dtype
of training: whoever asks sees the same numbers, only coarser.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, partial

import torch
from torch import Tensor

from dualform.errors import QueryError
from dualform.layers.kinds import key_width, parameter_shape
from dualform.memory.description import DescribedLayer
from dualform.memory.distinct import DistinctKeys
from dualform.memory.patterns import Patterns
from dualform.memory.segments import Segment

Read = Callable[[], Tensor]


ReadRows = Callable[[int, int], Tensor]
"""Reads some of the rows of a segment."""


class Block:
    """Some consecutive patterns of a layer. The tensors are mapped: clone before editing them.

    Patterns stored in 16 bits are widened when they are asked for, so skipping a block is free.
    """

    def __init__(
        self, start: int, rows: int, keys: Read | None, error_signals: Read | None
    ) -> None:
        self.start, self.rows = start, rows
        self._keys, self._error_signals = keys, error_signals

    @cached_property
    def keys(self) -> Tensor | None:
        """[rows, d_in], in the dtype of training (tokens: [rows, 1]); None if not asked for."""
        return None if self._keys is None else self._keys()

    @property
    def narrow_keys(self) -> Tensor | None:
        """The keys as stored, where that is in 16 bits: for whoever widens them on the way."""
        if isinstance(self._keys, partial) and isinstance(self._keys.func, Widened):
            return self._keys.func.stored[slice(*self._keys.args)]
        return None

    @cached_property
    def error_signals(self) -> Tensor | None:
        """[rows, d_out], in the dtype of training; None if not asked for."""
        return None if self._error_signals is None else self._error_signals()


class Widened:
    """Patterns stored in 16 bits, read from row to row in the dtype of training."""

    def __init__(self, stored: Tensor, dtype: torch.dtype) -> None:
        self.stored, self._dtype = stored, dtype

    def __call__(self, low: int, high: int) -> Tensor:
        return self.stored[low:high].to(self._dtype)


class LayerMemory:
    """The patterns one layer was trained on: `keys` [T, d_in], `error_signals` [T, d_out].

    Example:
        >>> fc1 = df.Memory.open("runs/digits").layer("fc1")   # doctest: +SKIP
        >>> fc1.keys.shape, fc1.error_signals.shape, fc1.patterns["label"][:3]   # doctest: +SKIP
    """

    def __init__(
        self,
        described: DescribedLayer,
        segments: Sequence[Segment],
        patterns: Patterns,
        with_error_signals: Sequence[str],
    ) -> None:
        layer = described.layer
        self.name = layer.name
        self.kind = layer.kind
        self.weight = layer.weight
        self.bias = layer.bias
        self.in_features = layer.in_features
        self.out_features = layer.out_features
        self.key_width = key_width(layer.kind, layer.in_features)
        self.shape = parameter_shape(layer.kind, layer.in_features, layer.out_features)
        self.dtype, self.stored = described.dtype, described.stored
        self.offset, self.bias_offset = layer.offset, layer.bias_offset
        self.patterns = patterns
        self.has_error_signals = described.error_signals
        self._with_error_signals = tuple(with_error_signals)
        self._segments = [s for s in segments if s.rows(layer.name)]
        self._mapped: dict[tuple[Segment, str], Tensor] = {}

    def rows_of(self, parameter: str) -> slice:
        """Which rows of its weight (or entries of its bias) the layer uses: all, or a part."""
        if parameter == self.weight:
            return slice(self.offset, self.offset + self.shape[0])
        return slice(self.bias_offset, self.bias_offset + self.out_features)

    @cached_property
    def rows(self) -> int:
        """T, the number of patterns."""
        return sum(segment.rows(self.name) for segment in self._segments)

    def __len__(self) -> int:
        return self.rows

    def __repr__(self) -> str:
        signals = f"error signals of {self.out_features}"
        signals = signals if self.has_error_signals else "no error signals"
        keys = "tokens of" if self.kind == "embedding" else "keys of"
        return (
            f"LayerMemory({self.name!r}: {self.rows:,} patterns, "
            f"{keys} {self.in_features}, {signals}, {str(self.stored).removeprefix('torch.')})"
        )

    def need_error_signals(self, what_for: str) -> None:
        """Raise `QueryError` if keys alone are kept of this layer."""
        if not self.has_error_signals:
            raise QueryError(
                f"{what_for} needs error signals, but of layer {self.name!r} keys alone are "
                "kept, which is enough to attend; layers with error signals: "
                f"{', '.join(self._with_error_signals) or 'none'}"
            )

    @property
    def stored_eps(self) -> float:
        """The relative rounding that storing added to every pattern; 0 where it is exact."""
        return 0.0 if self.stored == self.dtype else float(torch.finfo(self.stored).eps)

    def blocks(
        self, size: int = 4096, *, keys: bool = True, error_signals: bool = True
    ) -> Iterator[Block]:
        """All patterns in order, at most `size` at a time; nothing else is ever in RAM."""
        if size < 1:
            raise QueryError(f"blocks of {size} patterns were asked for; expected at least 1")
        if error_signals:
            self.need_error_signals("reading them (error_signals=False reads keys alone)")
        start = 0
        for segment in self._segments:
            rows = segment.rows(self.name)
            all_keys = self._tensor(segment, "keys") if keys else None
            all_signals = self._tensor(segment, "error_signals") if error_signals else None
            for low in range(0, rows, size):
                high = min(rows, low + size)
                parts = (
                    None if whole is None else partial(whole, low, high)
                    for whole in (all_keys, all_signals)
                )
                yield Block(start + low, high - low, *parts)
            start += rows

    def part(self, low: int, high: int, *, keys: bool = True) -> tuple[Tensor | None, Tensor]:
        """Keys (if asked for) and error signals of the patterns from row `low` to `high`."""
        found: list[tuple[Tensor | None, Tensor]] = []
        for start, rows, read_keys, read_signals in self._readers:
            here = max(low - start, 0), min(high - start, rows)
            if here[0] < here[1]:
                found.append((read_keys(*here) if keys else None, read_signals(*here)))
        if len(found) == 1:
            return found[0]
        signals = [part for _, part in found]
        joined = torch.cat([k for k, _ in found if k is not None]) if keys and found else None
        if not found:
            dtype = torch.int64 if self.kind == "embedding" else self.dtype
            joined = torch.empty(0, self.key_width, dtype=dtype) if keys else None
            signals = [torch.empty(0, self.out_features, dtype=self.dtype)]
        return joined, torch.cat(signals)

    @cached_property
    def _readers(self) -> list[tuple[int, int, ReadRows, ReadRows]]:
        """Of every segment: its first row, its rows, and what reads keys and error signals."""
        self.need_error_signals("reading single steps")
        found, start = [], 0
        for segment in self._segments:
            rows = segment.rows(self.name)
            kinds = ("keys", "error_signals")
            read_keys, read_signals = (self._tensor(segment, kind) for kind in kinds)
            found.append((start, rows, read_keys, read_signals))
            start += rows
        return found

    def _tensor(self, segment: Segment, kind: str) -> Callable[[int, int], Tensor]:
        """A segment's keys or error signals, to be read from row to row."""
        if kind == "keys" and self.kind == "embedding":
            tokens = segment.tokens(self.name, self.in_features)
            return lambda low, high: tokens[low:high]
        if kind == "keys" and segment.references(self.name) is not None:
            numbers = self.recurring.of_segment(segment)
            return lambda low, high: self.recurring.take(numbers[low:high])
        stored = self._stored(segment, kind)
        if stored.dtype == self.dtype:
            return lambda low, high: stored[low:high]
        if kind == "keys" or stored.dtype != torch.float16:
            return Widened(stored, self.dtype)
        scales = segment.scales(kind, self.name)

        def read(low: int, high: int) -> Tensor:
            scale = scales[low:high, None].to(self.dtype)
            return stored[low:high].to(self.dtype) * scale

        return read

    def _stored(self, segment: Segment, kind: str) -> Tensor:
        """As it lies on disk, looked up once: tensors are only mapped, and cost nothing to keep."""
        if (segment, kind) not in self._mapped:
            width = self.in_features if kind == "keys" else self.out_features
            found = segment.tensor(kind, self.name, width, (self.dtype, self.stored))
            self._mapped[segment, kind] = found
        return self._mapped[segment, kind]

    @cached_property
    def recurring(self) -> DistinctKeys:
        """The different keys of the segments in which keys that recur are stored once."""
        referring = [s for s in self._segments if s.references(self.name) is not None]
        return DistinctKeys(self.name, self.in_features, self.dtype, self.stored, referring)

    @property
    def distinct(self) -> DistinctKeys | None:
        """The different keys, where keys that recur are stored once; None where each is stored.

        So it is for layers that are fed with the network's inputs, unless there are too many.
        """
        referring = all(s.references(self.name) is not None for s in self._segments)
        return self.recurring if referring and self._segments else None

    @property
    def keys(self) -> Tensor:
        """Every key x_t, [T, d_in], in RAM; for large memories use `blocks`.

        Those of an embedding, single ones among zeros, as tokens: int64, [T, 1].
        """
        blocks = [b.keys for b in self.blocks(1 << 30, error_signals=False) if b.keys is not None]
        dtype = torch.int64 if self.kind == "embedding" else self.dtype
        return torch.cat(blocks) if blocks else torch.empty(0, self.key_width, dtype=dtype)

    @property
    def error_signals(self) -> Tensor:
        """Every error signal δ_t as captured, [T, d_out], in RAM; see also `blocks`."""
        blocks = [
            b.error_signals for b in self.blocks(1 << 30, keys=False) if b.error_signals is not None
        ]
        return torch.cat(blocks) if blocks else torch.empty(0, self.out_features, dtype=self.dtype)
