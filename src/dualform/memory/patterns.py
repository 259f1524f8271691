"""The coordinates of every pattern (step, example, label, task, position, ...) and `where`.

Conditions are the same everywhere in dualform: `label=7`, `label=[1, 7]`, `task="fashion"`,
`step=slice(0, 3000)`, `example=ids`, or one boolean array with an entry per pattern.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from dualform.errors import QueryError
from dualform.memory.files import NO_VALUE
from dualform.memory.segments import Segment


class Patterns:
    """One layer's pattern columns, read when asked for.

    Example:
        >>> patterns = df.Memory.open("runs/digits").layer("fc1").patterns   # doctest: +SKIP
        >>> patterns.select(label=[1, 7], step=slice(0, 100)).sum()          # doctest: +SKIP
    """

    def __init__(
        self,
        layer: str,
        segments: Sequence[Segment],
        kinds: Mapping[str, str],
        strings: Callable[[str], list[str]],
        elsewhere: Callable[[str], Iterable[Any]],
    ) -> None:
        self._layer = layer
        self._segments = [s for s in segments if s.rows(layer)]
        self._kinds = dict(kinds)
        self._strings = strings
        self._elsewhere = elsewhere
        self._stored: dict[str, NDArray[Any]] = {}

    @property
    def names(self) -> tuple[str, ...]:
        """The columns there are, `step` first."""
        return tuple(self._kinds)

    def __len__(self) -> int:
        return sum(segment.rows(self._layer) for segment in self._segments)

    def __repr__(self) -> str:
        return f"Patterns of layer {self._layer!r}: {len(self):,} rows of {', '.join(self.names)}"

    def __contains__(self, column: object) -> bool:
        return column in self._kinds

    def __getitem__(self, column: str) -> NDArray[Any]:
        """A column: int64, float64, bool, or objects (strings; None where there is no value)."""
        stored, kind = self._column(column), self._kinds[column]
        if kind == "float":
            return stored
        missing = stored == NO_VALUE
        if kind == "string":
            dictionary = np.array([*self._strings(column), None], dtype=object)
            decoded: NDArray[Any] = dictionary[np.where(missing, len(dictionary) - 1, stored)]
            return decoded
        values = stored.astype(bool) if kind == "bool" else stored
        if missing.any():
            values = values.astype(object)
            values[missing] = None
        return values

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
        return (
            sorted({v for v in np.unique(self[column].astype(object)) if v is not None})
            if len(self)
            else []
        )

    def _column(self, column: str) -> NDArray[Any]:
        if column not in self._kinds:
            raise QueryError(
                f"there is no column {column!r}; the patterns have {', '.join(self.names)}. Columns "
                "are what recorder.tag(...) was given during training"
            )
        if column not in self._stored:
            self._stored[column] = self._read(column)
        return self._stored[column]

    def _read(self, column: str) -> NDArray[Any]:
        is_float = self._kinds[column] == "float"
        parts = []
        for segment in self._segments:
            part = segment.column(self._layer, column)
            if part is None:
                part = np.full(segment.rows(self._layer), np.nan if is_float else NO_VALUE)
            parts.append(part.astype(np.float64 if is_float else np.int64))
        return np.concatenate(parts) if parts else np.empty(0, float if is_float else np.int64)

    def _meets(self, column: str, condition: Any) -> NDArray[np.bool_]:
        stored = self._column(column)
        if isinstance(condition, slice):
            return self._in_range(column, stored, condition)
        if isinstance(condition, torch.Tensor):
            condition = condition.cpu().numpy()
        if isinstance(condition, str) or not isinstance(condition, Iterable):
            wanted = [condition]
        else:
            wanted = (
                list(np.asarray(condition).ravel())
                if isinstance(condition, np.ndarray)
                else list(condition)
            )
        codes = [self._code(column, value) for value in wanted]
        array = np.array(codes, dtype=stored.dtype) if codes else np.empty(0, stored.dtype)
        found = np.isin(stored, array)
        unmet = set(codes) - set(stored[found].tolist()) if codes else set()
        if unmet:
            self._refuse_unknown(
                column, [v for v, c in zip(wanted, codes, strict=True) if c in unmet]
            )
        return found

    def _in_range(self, column: str, stored: NDArray[Any], condition: slice) -> NDArray[np.bool_]:
        if self._kinds[column] not in ("int", "float") or condition.step is not None:
            raise QueryError(
                f"{column}={condition} was asked for; a range takes a number column and no stride, "
                f"and {column!r} is of kind {self._kinds[column]}"
            )
        chosen = (
            np.ones(len(stored), bool) if self._kinds[column] == "float" else stored != NO_VALUE
        )
        if condition.start is not None:
            chosen &= stored >= condition.start
        if condition.stop is not None:
            chosen &= stored < condition.stop
        return chosen

    def _code(self, column: str, value: Any) -> Any:
        """How a value asked for is stored; strings are codes of the dictionary."""
        kind = self._kinds[column]
        if kind == "string":
            dictionary = self._strings(column)
            return dictionary.index(value) if value in dictionary else len(dictionary)
        is_number = isinstance(value, (int, float, bool, np.number, np.bool_))
        if not is_number or (kind == "int" and float(value) != int(value)):
            raise QueryError(
                f"{column}={value!r} was asked for, but {column!r} is a column of kind {kind}"
            )
        return float(value) if kind == "float" else int(value)

    def _refuse_unknown(self, column: str, values: list[Any]) -> None:
        known = set(self._elsewhere(column))
        unknown = [v for v in values if v not in known]
        if unknown:
            listed = sorted(known)
            shown = ", ".join(map(repr, listed[:12])) + (", ..." if len(listed) > 12 else "")
            raise QueryError(
                f"no recorded pattern has {column}={unknown[0]!r}; {column!r} takes the "
                f"{len(listed)} values {shown}"
            )
