"""One layer's part of the memory: its keys and error signals, streamed block by block.

The tensors handed out are mapped from disk: reading a block costs what the disk costs, and what was
read can be forgotten by the system at any time. Keys that recur are stored once: a segment holds
the rows that no earlier one had, and for every pattern the number of its row, counted through all.

Why it is hard: rows may be stored in 16 bits, with or without scales, in another dtype in each
segment, or as references to earlier ones. They come back in the dtype of training, so every reader
sees the same numbers, only coarser. And a number that is wrong would be another pattern's key.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, partial
from itertools import pairwise
from math import prod
from operator import attrgetter

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dualform.errors import QueryError
from dualform.layers import kinds
from dualform.memory.content import COMPUTED_IN, SCALES
from dualform.memory.patterns import Patterns, Uses
from dualform.memory.segments import OpenedMemory, Segment

INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64)
HALVES = (torch.float16, torch.bfloat16)
PARTS = {"patterns": ("error_signals",), "keys": (), "examples": ("weight", "bias")}
"""What there is of a layer's rows besides keys, by how it is kept."""


class Block:
    """Some consecutive patterns of a layer, each part read when it is asked for. The tensors are
    mapped: clone before editing them."""

    def __init__(self, layer: LayerMemory, low: int, high: int) -> None:
        self.start, self.rows = low, high - low
        self._layer, self._here = layer, (low, high)

    @cached_property
    def keys(self) -> Tensor:
        """[rows, d_in], in the dtype of training (tokens: [rows, 1])."""
        return self._layer.read("keys", *self._here)

    @cached_property
    def error_signals(self) -> Tensor:
        """[rows, d_out], in the dtype of training."""
        return self._layer.read("error_signals", *self._here)

    @property
    def narrow_keys(self) -> Tensor | None:
        """The keys as stored, where that is in 16 bits and one by one: to be widened on the way."""
        return self._layer.narrow_keys(*self._here)


class DistinctKeys:
    """The different keys of a layer, [rows, d_in], and which of them each pattern has."""

    def __init__(self, layer: LayerMemory, segments: Sequence[Segment]) -> None:
        self._name, self._segments = layer.name, [s for s in segments if layer.name in s.distinct]
        self._starts = np.cumsum([0, *(s.distinct[layer.name] for s in self._segments)])
        self._read, self._dtype = partial(layer.stored_rows, "keys"), layer.dtype_of("keys")

    @property
    def rows(self) -> int:
        """How many different keys there are."""
        return int(self._starts[-1])

    @cached_property
    def references(self) -> NDArray[np.int64]:
        """The number of every pattern's key, [T]; of segments that hold references."""
        known = [self.of_segment(segment) for segment in self._segments]
        return np.concatenate([np.empty(0, np.int64), *known])

    def of_segment(self, segment: Segment, rows: slice = slice(None)) -> NDArray[np.int64]:
        """The numbers of some of a segment's keys; checked, for they come from a file."""
        known = self._starts[1 + self._segments.index(segment)]
        numbers: NDArray[np.int64] = segment.references(self._name, rows).to(torch.int64).numpy()
        is_known = not len(numbers) or 0 <= numbers.min() <= numbers.max() < known
        segment.need(is_known, f"layer {self._name!r} refers to other keys than the first {known}")
        return numbers

    def take(self, numbers: NDArray[np.int64]) -> Tensor:
        """The keys of these numbers, [n, d_in], in the dtype of training."""
        none = self._read(self._segments[0], slice(0, 0))  # proves the width
        taken = torch.empty(len(numbers), none.shape[1], dtype=self._dtype)
        part_of = np.searchsorted(self._starts, numbers, side="right") - 1
        for part in np.unique(part_of).tolist():
            here = np.flatnonzero(part_of == part)
            local = numbers[here] - self._starts[part]
            low = int(local.min())
            stored = self._read(self._segments[part], slice(low, int(local.max()) + 1))
            rows = stored[torch.from_numpy(local - low)]
            taken[torch.from_numpy(here)] = rows.to(self._dtype)
        return taken

    def blocks(self, size: int = 4096) -> Iterator[tuple[int, Tensor]]:
        """All different keys in order, (number of the first, [n, d_in]), `size` at a time."""
        for start, segment in zip(self._starts.tolist(), self._segments, strict=False):
            for low in range(0, segment.distinct[self._name], size):
                yield start + low, self._read(segment, slice(low, low + size)).to(self._dtype)

    def stored(self) -> Iterator[Tensor]:
        """The rows as they lie on disk, segment by segment."""
        for segment in self._segments:
            yield self._read(segment, slice(None))


class LayerMemory:
    """The patterns one layer was trained on: `keys` [T, d_in], `error_signals` [T, d_out].

    Example:
        >>> fc1 = dualform.Memory.open("runs/digits").layer("fc1")   # doctest: +SKIP
        >>> fc1.keys.shape, fc1.error_signals.shape, fc1.patterns["label"][:3]   # doctest: +SKIP
    """

    name = cached_property[str](attrgetter("layer.name"))
    kind = cached_property[str](attrgetter("layer.kind"))
    weight = cached_property[str](attrgetter("layer.weight"))
    bias = cached_property[str | None](attrgetter("layer.bias"))
    shape = cached_property[tuple[int, ...]](attrgetter("layer.shape"))
    offset = cached_property[int](attrgetter("layer.offset"))
    bias_offset = cached_property[int](attrgetter("layer.bias_offset"))
    in_features = cached_property[int](attrgetter("layer.in_features"))
    out_features = cached_property[int](attrgetter("layer.out_features"))
    rows_of = cached_property[Callable[[str], slice]](attrgetter("layer.rows_of"))
    uses = cached_property[Uses](attrgetter("patterns.uses"))

    def __init__(self, opened: OpenedMemory, name: str) -> None:
        described = opened.description
        self.layer, self.keep = described.layers[name]
        """What is recorded, and whether by "patterns", "keys" or "examples"."""
        self.patterns = Patterns(opened, name)
        self.dtype = described.parameters[self.layer.weight].dtype
        """That of training; `stored` is that of patterns on disk, where it can hold them."""
        is_narrow = described.stored in HALVES and self.dtype.itemsize > described.stored.itemsize
        self.stored = described.stored if is_narrow else self.dtype
        self.key_width = kinds.of(self.layer.kind).key_width(self.layer)
        self._others = described.layers
        self._segments = [s for s in opened.segments if name in s.rows]
        self._starts: list[int] = np.cumsum([0, *(s.rows[name] for s in self._segments)]).tolist()
        self._distinct = DistinctKeys(self, self._segments)

    @property
    def rows(self) -> int:
        """T, the number of patterns."""
        return self._starts[-1]

    def __len__(self) -> int:
        return self.rows

    def __repr__(self) -> str:
        what = {"keys": "keys alone"}.get(self.keep, self.keep)
        sizes, stored = f"{self.in_features} to {self.out_features}", str(self.stored)[6:]
        return f"LayerMemory({self.name!r}: {self.rows:,} {what}, {self.kind}, {sizes}, {stored})"

    @property
    def has_error_signals(self) -> bool:
        """Whether every pattern has its error signal: what contributions need."""
        return self.keep == "patterns"

    def need_error_signals(self, what_for: str) -> None:
        """Raise `QueryError` unless the error signals of the patterns are kept."""
        if not self.has_error_signals:
            kept = "keys alone are" if self.keep == "keys" else "what each example wrote is"
            whole = [name for name, (_, keep) in self._others.items() if keep == "patterns"]
            raise QueryError(
                f"{what_for} needs error signals, but of layer {self.name!r} {kept} kept. Layers "
                f"with error signals: {', '.join(whole) or 'none'}"
            )

    @property
    def stored_eps(self) -> float:
        """The relative rounding that storing added to every pattern; 0 where it is exact."""
        return 0.0 if self.stored == self.dtype else float(torch.finfo(self.stored).eps)

    def lost(self, parameter: str) -> NDArray[np.float64]:
        """What 16 bits lost of a parameter's gradient in every use, along the signs and by size:
        [uses, 2], as the writer measured it; 0 where rows are exact."""
        found = [s.lost(self.name, parameter) for s in self._segments]
        return np.concatenate([np.zeros((0, 2)), *found])

    @property
    def keys(self) -> Tensor:
        """Every key x_t, [T, d_in] (tokens: int64, [T, 1]), in RAM; see also `blocks`."""
        return self.read("keys", 0, self.rows)

    @property
    def error_signals(self) -> Tensor:
        """Every error signal δ_t as captured, [T, d_out], in RAM; see also `blocks`."""
        self.need_error_signals("reading them")
        return self.read("error_signals", 0, self.rows)

    def blocks(self, size: int = 4096, *, error_signals: bool = True) -> Iterator[Block]:
        """All patterns in order, at most `size` at a time; nothing else is ever in RAM."""
        if size < 1:
            raise QueryError(f"blocks of {size} patterns were asked for; expected at least 1")
        if error_signals:
            self.need_error_signals("reading them (error_signals=False reads keys alone)")
        for start, stop in pairwise(self._starts):  # none reaches across two segments
            for low in range(start, stop, size):
                yield Block(self, low, min(stop, low + size))

    def read(self, part: str, low: int, high: int) -> Tensor:
        """Rows of keys, error_signals, or (by examples) weight and bias; in training's dtype."""
        if not 0 <= low <= high <= self.rows:
            raise QueryError(
                f"rows {low} to {high} of layer {self.name!r} were asked for; it has {self.rows}"
            )
        found = [torch.empty(0, self._width(part), dtype=self.dtype_of(part))]
        found += [self.read_segment(s, part, rows) for s, rows in self._within(low, high)]
        return found[1] if len(found) == 2 else torch.cat(found)  # one is handed out as mapped

    @property
    def distinct(self) -> DistinctKeys | None:
        """The different keys, where keys that recur are stored once; None where each is stored."""
        referring = all(self.name in s.distinct for s in self._segments)
        return self._distinct if referring and self._segments else None

    def read_segment(self, segment: Segment, part: str, rows: slice) -> Tensor:
        """Some rows of one segment, in the dtype of training."""
        if part == "keys" and self.name in segment.distinct:
            return self._distinct.take(self._distinct.of_segment(segment, rows))
        stored = self.stored_rows(part, segment, rows).to(self.dtype_of(part))
        scales = segment.scales(self.name, part + SCALES, rows)
        return stored if scales is None else stored * scales[:, None].to(stored.dtype)

    def narrow_keys(self, low: int, high: int) -> Tensor | None:
        """Some keys of one segment as stored, where that is in 16 bits and one by one."""
        segment, rows = next(self._within(low, high))
        if self.name in segment.distinct or self.stored == self.dtype:
            return None
        stored = self.stored_rows("keys", segment, rows)
        return stored if stored.dtype in HALVES else None

    def _within(self, low: int, high: int) -> Iterator[tuple[Segment, slice]]:
        """The segments that some rows lie in, and where."""
        for place in range(bisect_right(self._starts, low) - 1, len(self._segments)):
            start, stop = self._starts[place : place + 2]
            if max(low, start) < min(high, stop):
                yield self._segments[place], slice(max(low, start) - start, min(high, stop) - start)
            if stop >= high:
                return

    def dtype_of(self, part: str) -> torch.dtype:
        """That of training: tokens are whole numbers."""
        return (part == "keys" and kinds.of(self.kind).key_dtype) or self.dtype

    def _width(self, part: str) -> int:
        """How wide a part is; `QueryError` if the layer's rows have no such part."""
        parts = ("keys", *PARTS[self.keep][: None if self.bias else 1])
        if part not in parts:
            raise QueryError(
                f"{part} of layer {self.name!r} were asked for; of it {', '.join(parts)} are kept"
            )
        if part in ("weight", "bias"):
            return prod(kinds.of(self.kind).shape_of(self.layer, part))
        return self.key_width if part == "keys" else self.out_features

    def stored_rows(self, part: str, segment: Segment, rows: slice) -> Tensor:
        """Rows as they lie on disk, checked for what they can be."""
        are_tokens = not self.dtype_of(part).is_floating_point
        dtypes = INTEGERS if are_tokens else COMPUTED_IN
        stored = segment.read_rows(self.name, part, self._width(part), dtypes, rows)
        if are_tokens and len(stored):
            known = 0 <= int(stored.min()) <= int(stored.max()) < self.in_features
            segment.need(known, f"layer {self.name!r} has tokens beyond {self.in_features - 1}")
        return stored
