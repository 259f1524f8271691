"""One layer's part of the memory: its keys and error signals, streamed block by block.

The tensors handed out are mapped from disk: reading a block costs what the disk costs, and what was
read can be forgotten by the system at any time. Why it is hard: rows may be stored in 16 bits, with
or without scales, in another dtype in each segment, or as references to earlier ones. They come
back in the dtype of training, so every reader sees the same numbers, only coarser.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, partial
from math import prod

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dualform.errors import QueryError
from dualform.layers import kinds
from dualform.memory.content import SCALES
from dualform.memory.description import KeptLayer
from dualform.memory.distinct import DistinctKeys
from dualform.memory.patterns import Patterns
from dualform.memory.segments import INTEGERS, Segment
from dualform.memory.uses import Uses

FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
HALVES = (torch.float16, torch.bfloat16)


class Block:
    """Some consecutive patterns of a layer. The tensors are mapped: clone before editing them.

    They are read when they are asked for, so skipping a block is free.
    """

    def __init__(
        self, layer: LayerMemory, segment: Segment, start: int, here: slice, parts: Sequence[str]
    ) -> None:
        self.start, self.rows = start + here.start, here.stop - here.start
        self._layer, self._segment, self._here, self._parts = layer, segment, here, parts

    @cached_property
    def keys(self) -> Tensor | None:
        """[rows, d_in], in the dtype of training (tokens: [rows, 1]); None if not asked for."""
        return self._read("keys")

    @cached_property
    def error_signals(self) -> Tensor | None:
        """[rows, d_out], in the dtype of training; None if not asked for."""
        return self._read("error_signals")

    @property
    def narrow_keys(self) -> Tensor | None:
        """The keys as stored, where that is in 16 bits and one by one: to be widened on the way."""
        if "keys" not in self._parts:
            return None
        return self._layer.narrow_keys(self._segment, self._here)

    def _read(self, part: str) -> Tensor | None:
        if part not in self._parts:
            return None
        return self._layer.read_segment(self._segment, part, self._here)


class LayerMemory:
    """The patterns one layer was trained on: `keys` [T, d_in], `error_signals` [T, d_out].

    Example:
        >>> fc1 = df.Memory.open("runs/digits").layer("fc1")   # doctest: +SKIP
        >>> fc1.keys.shape, fc1.error_signals.shape, fc1.patterns["label"][:3]   # doctest: +SKIP
    """

    def __init__(
        self,
        known: KeptLayer,
        dtypes: tuple[torch.dtype, torch.dtype],
        segments: Sequence[Segment],
        with_error_signals: Sequence[str],
        patterns: Patterns,
        uses: Callable[[], Uses],
    ) -> None:
        """`dtypes` are those of training and of storing."""
        self.layer, self.keep = layer, _ = known
        self.name, self.kind, self.weight, self.bias = (
            layer.name, layer.kind, layer.weight, layer.bias,
        )  # fmt: skip
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.shape, self.offset, self.bias_offset = layer.shape, layer.offset, layer.bias_offset
        self.dtype, self.stored = dtypes
        self._kind = kinds.of(layer.kind)
        self.key_width = self._kind.key_width(layer)
        self.rows_of = layer.rows_of
        self._with_error_signals = tuple(with_error_signals)
        self._segments = [s for s in segments if layer.name in s.rows]
        self._starts: list[int] = np.cumsum(
            [0, *(s.rows[layer.name] for s in self._segments)]
        ).tolist()
        self.patterns, self._uses = patterns, uses

    @property
    def rows(self) -> int:
        """T, the number of patterns."""
        return self._starts[-1]

    def __len__(self) -> int:
        return self.rows

    def __repr__(self) -> str:
        stored = str(self.stored).removeprefix("torch.")
        what = {"patterns": "patterns", "keys": "keys alone", "examples": "examples"}[self.keep]
        sizes = f"{self.in_features} to {self.out_features}"
        return f"LayerMemory({self.name!r}: {self.rows:,} {what}, {self.kind}, {sizes}, {stored})"

    @property
    def has_error_signals(self) -> bool:
        """Whether every pattern has its error signal: what contributions need."""
        return self.keep == "patterns"

    def need_error_signals(self, what_for: str) -> None:
        """Raise `QueryError` unless the error signals of the patterns are kept."""
        if not self.has_error_signals:
            kept = "keys alone are" if self.keep == "keys" else "what each example wrote is"
            raise QueryError(
                f"{what_for} needs error signals, but of layer {self.name!r} {kept} kept. Layers "
                f"with error signals: {', '.join(self._with_error_signals) or 'none'}"
            )

    @property
    def stored_eps(self) -> float:
        """The relative rounding that storing added to every pattern; 0 where it is exact."""
        return 0.0 if self.stored == self.dtype else float(torch.finfo(self.stored).eps)

    def lost(self, parameter: str) -> NDArray[np.float64]:
        """What 16 bits lost of a parameter's gradient in every use: [uses, 2].

        Along the signs, and by size, as the writer measured it; 0 where rows are exact.
        """
        self.rows_of(parameter)
        found = [s.lost(self.name, parameter) for s in self._segments]
        return np.concatenate([np.zeros((0, 2)), *found])

    # -- its uses ----------------------------------------------------------------------------------

    @property
    def uses(self) -> Uses:
        """Every use of the layer: its step, pass, call, dtype, rows and leading shape."""
        return self._uses()

    def uses_of(self, step: int) -> range:
        """Which uses a step has, as places in `uses`."""
        return self.uses.of_step(step)

    # -- rows --------------------------------------------------------------------------------------

    def read(self, part: str, low: int, high: int) -> Tensor:
        """Rows `low` to `high` of keys, error_signals, or (by examples) weight and bias.

        In the dtype of training; tokens are int64.
        """
        if not 0 <= low <= high <= self.rows:
            raise QueryError(
                f"rows {low} to {high} of layer {self.name!r} were asked for; it has {self.rows}"
            )
        self._width(part)
        found = []
        place = bisect_right(self._starts, low) - 1
        while low < high:
            start, stop = self._starts[place], self._starts[place + 1]
            here = slice(low - start, min(high, stop) - start)
            if here.start < here.stop:
                found.append(self.read_segment(self._segments[place], part, here))
            low, place = max(low, min(high, stop)), place + 1
        if len(found) == 1:
            return found[0]
        dtype = self._key_dtype if part == "keys" else self.dtype
        return torch.cat(found) if found else torch.empty(0, self._width(part), dtype=dtype)

    def blocks(
        self, size: int = 4096, *, keys: bool = True, error_signals: bool = True
    ) -> Iterator[Block]:
        """All patterns in order, at most `size` at a time; nothing else is ever in RAM."""
        if size < 1:
            raise QueryError(f"blocks of {size} patterns were asked for; expected at least 1")
        if error_signals:
            self.need_error_signals("reading them (error_signals=False reads keys alone)")
        wanted = [("keys", keys), ("error_signals", error_signals)]
        parts = [part for part, is_wanted in wanted if is_wanted]
        for segment, start in zip(self._segments, self._starts, strict=False):
            rows = segment.rows[self.name]
            for low in range(0, rows, size):
                yield Block(self, segment, start, slice(low, min(rows, low + size)), parts)

    @property
    def keys(self) -> Tensor:
        """Every key x_t, [T, d_in], in RAM; for large memories use `blocks`.

        Those of an embedding, single ones among zeros, as tokens: int64, [T, 1].
        """
        return self.read("keys", 0, self.rows)

    @property
    def error_signals(self) -> Tensor:
        """Every error signal δ_t as captured, [T, d_out], in RAM; see also `blocks`."""
        self.need_error_signals("reading them")
        return self.read("error_signals", 0, self.rows)

    @property
    def distinct(self) -> DistinctKeys | None:
        """The different keys, where keys that recur are stored once; None where each is stored.

        So it is for layers that are fed with the network's inputs, unless there are too many.
        """
        referring = all(self.name in s.distinct for s in self._segments)
        return self._distinct if referring and self._segments else None

    @cached_property
    def _distinct(self) -> DistinctKeys:
        """The different keys of the segments in which keys that recur are stored once."""
        referring = [s for s in self._segments if self.name in s.distinct]
        return DistinctKeys(
            self.name, self.key_width, self._key_dtype, referring, partial(self._stored, "keys")
        )

    @property
    def _key_dtype(self) -> torch.dtype:
        return self._kind.key_dtype or self.dtype

    def _width(self, part: str) -> int:
        """How wide a part is; `QueryError` if the layer's rows have no such part."""
        parts = {
            "patterns": ("keys", "error_signals"),
            "keys": ("keys",),
            "examples": ("keys", "weight", "bias"),
        }[self.keep]
        if part not in parts or (part == "bias" and self.bias is None):
            raise QueryError(
                f"{part} of layer {self.name!r} were asked for; of it {', '.join(parts)} are kept"
            )
        if part in ("weight", "bias"):
            return prod(self._kind.shape_of(self.layer, part))
        return self.key_width if part == "keys" else self.out_features

    def _stored(self, part: str, segment: Segment, rows: slice) -> Tensor:
        """Rows as they lie on disk, checked for what they can be."""
        tokens = part == "keys" and self._kind.key_dtype is not None
        dtypes = INTEGERS if tokens else FLOATS
        stored = segment.read_rows(self.name, part, self._width(part), dtypes, rows)
        if (
            tokens
            and len(stored)
            and not 0 <= int(stored.min()) <= int(stored.max()) < self.in_features
        ):
            raise segment.wrong(
                f"the keys of layer {self.name!r} hold tokens outside of 0 to "
                f"{self.in_features - 1}"
            )
        return stored

    def read_segment(self, segment: Segment, part: str, rows: slice) -> Tensor:
        """Some rows of one segment, in the dtype of training."""
        if part == "keys" and self.name in segment.distinct:
            return self._distinct.take(self._distinct.of_segment(segment, rows))
        stored = self._stored(part, segment, rows)
        if not stored.dtype.is_floating_point:
            return stored.to(self._key_dtype)
        scales = segment.scales(self.name, part + SCALES, rows)
        if scales is None:
            return stored.to(self.dtype)
        return stored.to(self.dtype) * scales[:, None].to(self.dtype)

    def narrow_keys(self, segment: Segment, rows: slice) -> Tensor | None:
        """Some keys as stored, where that is in 16 bits and one by one."""
        if self.name in segment.distinct or self._kind.key_dtype is not None:
            return None
        stored = self._stored("keys", segment, rows)
        is_narrow = stored.dtype in HALVES and stored.dtype != self.dtype
        return (
            stored
            if is_narrow and segment.scales(self.name, "keys" + SCALES, rows) is None
            else None
        )
