"""Where every pattern came from: the uses of a layer, its columns, and the conditions of `where`.

A use is one call of one layer, gone through by one backward pass. What is the same for all its rows
(step, microbatch, call) is kept once for it, as is where its rows begin in the tags (example,
label, task, …), which all layers share. The columns that readers ask for are made here.

Conditions are the same everywhere in dualform: `label=7`, `label=[1, 7]`, `task="fashion"`,
`step=slice(0, 3000)`, `example=ids`, or one boolean array with an entry per pattern.

Why it is hard: a tag may have come late, so that earlier segments lack its column, and a use may
have none at all. And calls are numbered as they were made, by whatever model.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from dualform.errors import QueryError
from dualform.memory.content import COMPUTED_IN, ROWS, START, USE, stacked_uses
from dualform.memory.fields import damaged, named
from dualform.memory.files import NO_VALUE
from dualform.memory.segments import OpenedMemory, Segment

Integers = NDArray[np.int64]
NUMBER = (int, float, np.number, np.bool_)


class Uses:
    """All uses of one layer, in the order of their rows; arrays of one entry per use."""

    def __init__(self, layer: str, segments: Iterable[Segment]) -> None:
        self._table = stacked_uses([segment.uses(layer) for segment in segments])
        columns = (np.ascontiguousarray(column) for column in self._table[:, : len(USE)].T)
        self.step, self.microbatch, _, self.order, self.dtype, *rest = columns
        self.rows, self.positions, _, self.layout = rest
        self.start: Integers = np.cumsum(self.rows) - self.rows
        """The first row of each."""

    def __len__(self) -> int:
        return len(self._table)

    def of_step(self, step: int) -> range:
        """Which uses a step has."""
        low, high = np.searchsorted(self.step, [step, step + 1])
        return range(int(low), int(high))

    def arrival_of(self, use: int) -> tuple[int, int]:
        """Which pass of its step went through a use, and as the how-manieth of all layers'."""
        return int(self.microbatch[use]), int(self.order[use])

    def dtype_of(self, use: int) -> torch.dtype:
        """The dtype that a use was computed in."""
        return COMPUTED_IN[int(self.dtype[use])]

    def shape_of(self, use: int) -> tuple[int, ...]:
        """How the rows of a use lay in the input of the layer: [B], [B, L], …"""
        return tuple(n for n in self._table[use, len(USE) :].tolist() if n >= 0)

    @cached_property
    def call(self) -> Integers:
        """The how-manieth use of the layer in its backward pass, in the order of the calls."""
        known, which = np.unique(self._table[:, :3], axis=0, return_inverse=True)
        is_first = np.ones(len(known), bool)
        is_first[1:] = (known[1:, :2] != known[:-1, :2]).any(axis=1)
        number = np.arange(len(known)) - np.flatnonzero(is_first)[np.cumsum(is_first) - 1]
        return np.asarray(number[which.reshape(-1)])

    def column(self, name: str) -> Integers:
        """Of every row: step, microbatch, call, or its position in its example."""
        if name != "position":
            return np.repeat(np.asarray(getattr(self, name)), self.rows)
        rows = int(self.rows.sum())
        if not (self.positions > 1).any():
            return np.full(rows, NO_VALUE)
        within: Integers = np.arange(rows) - np.repeat(self.start, self.rows)
        of_example: Integers = np.repeat(np.maximum(self.positions, 1), self.rows)
        return np.remainder(within, of_example)


class Patterns:
    """One layer's pattern columns, read when asked for.

    Example:
        >>> patterns = dualform.Memory.open("runs/digits").layer("fc1").patterns   # doctest: +SKIP
        >>> patterns.select(label=[1, 7], step=slice(0, 100)).sum()          # doctest: +SKIP
    """

    def __init__(self, opened: OpenedMemory, layer: str) -> None:
        self._opened, self._layer = opened, layer
        self._segments = [s for s in opened.segments if layer in s.rows]
        self._kinds = opened.description.columns
        self._stored: dict[str, NDArray[Any]] = {}

    @cached_property
    def uses(self) -> Uses:
        """Every use of the layer: its step, pass, call, dtype, rows and leading shape."""
        return Uses(self._layer, self._segments)

    @property
    def names(self) -> tuple[str, ...]:
        """The columns there are, `step` first."""
        return tuple(self._kinds)

    def __len__(self) -> int:
        return sum(segment.rows[self._layer] for segment in self._segments)

    def __repr__(self) -> str:
        return f"Patterns of layer {self._layer!r}: {len(self):,} rows of {', '.join(self.names)}"

    def __contains__(self, column: object) -> bool:
        return column in self._kinds

    def __getitem__(self, column: str) -> NDArray[Any]:
        """A column: int64, float64, bool, or objects (strings; None where there is no value)."""
        return self._decoded(column, self._column(column))

    def take(self, column: str, rows: NDArray[np.int64]) -> NDArray[Any]:
        """The values of a few patterns: `patterns[column][rows]`, without decoding the rest."""
        return self._decoded(column, self._column(column)[rows])

    def select(self, rows: Any = None, /, **where: Any) -> NDArray[np.bool_]:
        """Which patterns meet every condition; without a condition, all of them."""
        chosen = np.ones(len(self), bool)
        if rows is not None:
            given = np.asarray(rows.cpu() if isinstance(rows, torch.Tensor) else rows)
            if given.dtype != bool or given.shape != chosen.shape:
                raise QueryError(
                    f"a {given.dtype} array of shape {given.shape} was given to select patterns of "
                    f"layer {self._layer!r}; expected a boolean array of shape {chosen.shape}, or "
                    "conditions by name such as label=7"
                )
            chosen &= given
        for column, condition in where.items():
            chosen &= self._meets(column, condition)
        return chosen

    def values(self, column: str) -> list[Any]:
        """The distinct values of a column, sorted; no-value left out."""
        found = self._decoded(column, np.unique(self._column(column))).tolist()
        return sorted(value for value in found if value is not None and value == value)

    def _column(self, column: str) -> NDArray[Any]:
        """Numbers, or codes of strings; `NO_VALUE` or NaN where there is none."""
        named(self._kinds, column, "column")
        if column not in self._stored:
            is_tag = column in self._opened.description.tags
            self._stored[column] = self._tags(column) if is_tag else self.uses.column(column)
        return self._stored[column]

    def _tags(self, column: str) -> NDArray[Any]:
        """Give every row its value, segment by segment and use by use."""
        kind, low = self._kinds[column], 0
        found = np.full(len(self), np.nan if kind == "float" else NO_VALUE)
        for segment in self._segments:
            values = segment.tags(column, kind)
            here = found[low : (low := low + segment.rows[self._layer])]
            if values is None:
                continue
            rows, start = segment.uses(self._layer)[:, [ROWS, START]].T
            known = np.where(start < 0, 0, start + rows) <= len(values)
            segment.need(known.all(), f"layer {self._layer!r} refers to tags that are not there")
            offsets = np.repeat(start - (np.cumsum(rows) - rows), rows)
            is_tagged = np.repeat(start >= 0, rows)
            here[is_tagged] = values[(np.arange(len(here)) + offsets)[is_tagged]]
        return found

    def _decoded(self, column: str, stored: NDArray[Any]) -> NDArray[Any]:
        kind, missing = self._kinds[column], stored == NO_VALUE
        if kind == "float":
            return stored
        if kind == "string":
            strings = self._opened.description.strings.get(column, [])
            codes = np.where(missing, len(strings), stored)
            if codes.size and not 0 <= codes.min() <= codes.max() <= len(strings):
                raise damaged(self._opened.path, f"{column!r} refers to strings that are not there")
            decoded: NDArray[Any] = np.array([*strings, None], dtype=object)[codes]
            return decoded
        values = stored.astype(bool) if kind == "bool" else stored
        if missing.any():
            values = values.astype(object)
            values[missing] = None
        return values

    def _meets(self, column: str, condition: Any) -> NDArray[np.bool_]:
        stored = self._column(column)
        if isinstance(condition, slice):
            return self._in_range(column, stored, condition)
        if isinstance(condition, torch.Tensor | np.ndarray):
            condition = condition.reshape(-1).tolist()
        is_one = isinstance(condition, str) or not isinstance(condition, Iterable)
        wanted = [condition] if is_one else list(condition)
        codes = self._codes(column, wanted)
        found = np.isin(stored, np.array([c for c in codes if c is not None], dtype=stored.dtype))
        met = set(stored[found].tolist())
        if unmet := [v for v, c in zip(wanted, codes, strict=True) if c not in met]:
            self._refuse_unknown(column, unmet)
        return found

    def _in_range(self, column: str, stored: NDArray[Any], condition: slice) -> NDArray[np.bool_]:
        kind, low, high = self._kinds[column], condition.start, condition.stop
        is_number = all(bound is None or isinstance(bound, NUMBER) for bound in (low, high))
        if kind not in ("int", "float") or condition.step is not None or not is_number:
            raise QueryError(
                f"{column}={condition} was asked for; a range takes a column of numbers, two "
                f"numbers and no stride, and {column!r} is of kind {kind}"
            )
        chosen = np.ones(len(stored), bool) if kind == "float" else stored != NO_VALUE
        if low is not None:
            chosen &= stored >= low
        if high is not None:
            chosen &= stored < high
        return chosen

    def _codes(self, column: str, wanted: list[Any]) -> list[Any]:
        """How values asked for are stored; None for one that cannot be."""
        kind = self._kinds[column]
        if kind == "string":
            strings = self._opened.description.strings.get(column, [])
            known = {string: code for code, string in enumerate(strings)}
            return [known.get(value) if isinstance(value, str) else None for value in wanted]
        numbers: list[Any] = [value if isinstance(value, NUMBER) else np.nan for value in wanted]
        if kind == "float":
            return [float(number) for number in numbers]
        return [int(n) if NO_VALUE < n < -NO_VALUE and n == n // 1 else None for n in numbers]

    def _refuse_unknown(self, column: str, values: list[Any]) -> None:
        """Raise for a value that no pattern of any layer has."""
        layers = self._opened.description.layers
        known = {v for name in layers for v in Patterns(self._opened, name).values(column)}
        for value in values:
            if not isinstance(value, Hashable) or value not in known:
                shown = ", ".join(map(repr, sorted(known)[:12])) + ", ..." * (len(known) > 12)
                raise QueryError(
                    f"no recorded pattern has {column}={value!r}; {column!r} takes the "
                    f"{len(known)} values {shown}"
                )
