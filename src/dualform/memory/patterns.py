"""The coordinates of every pattern (step, example, label, task, position, ...) and `where`.

Step, position, microbatch and call follow from the layer's uses; what was tagged lies in columns
that all layers share, and a use says where its rows begin there. Why it is hard: a tag may have
come late, so that earlier segments lack its column, and a use may have none at all.

Conditions are the same everywhere in dualform: `label=7`, `label=[1, 7]`, `task="fashion"`,
`step=slice(0, 3000)`, `example=ids`, or one boolean array with an entry per pattern.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from dualform.errors import MemoryFileError, QueryError
from dualform.memory.content import USE
from dualform.memory.description import OWN_COLUMNS
from dualform.memory.files import NO_VALUE
from dualform.memory.segments import Segment
from dualform.memory.uses import Uses

NUMBER = (int, float, np.number, np.bool_)


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
        strings: Mapping[str, list[str]],
        uses: Callable[[], Uses],
        elsewhere: Callable[[str], Iterable[Any]],
    ) -> None:
        self._layer = layer
        self._segments = [s for s in segments if layer in s.rows]
        self._kinds = dict(kinds)
        self._strings = strings
        self._uses = uses
        self._elsewhere = elsewhere
        self._stored: dict[str, NDArray[Any]] = {}
        self._dictionaries: dict[str, dict[str, int]] = {}

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
        """The values of a few patterns only: `patterns[column][rows]`, without decoding the rest.

        Example:
            >>> patterns.take("label", np.array([3, 1]))             # doctest: +SKIP
        """
        return self._decoded(column, self._column(column)[rows])

    def _decoded(self, column: str, stored: NDArray[Any]) -> NDArray[Any]:
        kind = self._kinds[column]
        if kind == "float":
            return stored
        missing = stored == NO_VALUE
        if kind == "string":
            strings = self._strings.get(column, [])
            known = len(strings)
            codes = np.where(missing, known, stored)
            if ((codes < 0) | (codes > known)).any():
                raise MemoryFileError(
                    f"column {column!r} of layer {self._layer!r} refers to strings that are not "
                    "in the memory: it is damaged. `check()` says where"
                )
            decoded: NDArray[Any] = np.array([*strings, None], dtype=object)[codes]
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
        stored, kind = self._column(column), self._kinds[column]
        if kind == "string":
            return sorted({v for v in self[column].tolist() if v is not None})
        distinct = np.unique(stored)
        if kind == "float":
            return [float(v) for v in distinct if not np.isnan(v)]
        return [bool(v) if kind == "bool" else int(v) for v in distinct if v != NO_VALUE]

    def _column(self, column: str) -> NDArray[Any]:
        if not isinstance(column, str) or column not in self._kinds:
            raise QueryError(
                f"there is no column {column!r}; the patterns have {', '.join(self.names)}. "
                "Columns are what recorder.tag(...) was given during training"
            )
        if column not in self._stored:
            self._stored[column] = self._read(column)
        return self._stored[column]

    def _read(self, column: str) -> NDArray[Any]:
        if column in ("step", *OWN_COLUMNS):
            return self._uses().column(column)
        is_float = self._kinds[column] == "float"
        dtype, blank = (torch.float64, np.nan) if is_float else (torch.int64, NO_VALUE)
        found = np.full(len(self), blank, np.float64 if is_float else np.int64)
        low = 0
        for segment in self._segments:
            rows, values = segment.rows[self._layer], segment.tags(column, dtype)
            if values is not None:
                self._lay_out(segment, values, found[low : low + rows])
            low += rows
        return found

    def _lay_out(self, segment: Segment, values: NDArray[Any], found: NDArray[Any]) -> None:
        """Give the rows of one segment their values, use by use."""
        uses = segment.uses(self._layer).uses
        rows, start = uses[:, USE.index("rows")], uses[:, USE.index("start")]
        if (np.where(start < 0, 0, start + rows) > len(values)).any():
            raise segment.wrong(f"rows of layer {self._layer!r} refer to tags that are not there")
        offsets = np.repeat(start - (np.cumsum(rows) - rows), rows)
        is_tagged = np.repeat(start >= 0, rows)
        found[is_tagged] = values[(np.arange(len(found)) + offsets)[is_tagged]]

    def _meets(self, column: str, condition: Any) -> NDArray[np.bool_]:
        stored = self._column(column)
        if isinstance(condition, slice):
            return self._in_range(column, stored, condition)
        if isinstance(condition, torch.Tensor):
            condition = condition.cpu().numpy()
        if isinstance(condition, np.ndarray):
            wanted = condition.ravel().tolist()
        elif isinstance(condition, str) or not isinstance(condition, Iterable):
            wanted = [condition]
        else:
            wanted = list(condition)
        codes = [self._code(column, value) for value in wanted]
        stored_as = [code for code in codes if code is not None]
        found = np.isin(stored, np.array(stored_as, dtype=stored.dtype))
        met = set(stored[found].tolist())
        if unmet := [v for v, c in zip(wanted, codes, strict=True) if c is None or c not in met]:
            self._refuse_unknown(column, unmet)
        return found

    def _in_range(self, column: str, stored: NDArray[Any], condition: slice) -> NDArray[np.bool_]:
        if self._kinds[column] not in ("int", "float") or condition.step is not None:
            raise QueryError(
                f"{column}={condition} was asked for; a range takes a number column and no stride, "
                f"and {column!r} is of kind {self._kinds[column]}"
            )
        for bound in (condition.start, condition.stop):
            if bound is not None and not isinstance(bound, NUMBER):
                raise QueryError(f"{column}={condition} was asked for; a range goes by numbers")
        is_float = self._kinds[column] == "float"
        chosen = np.ones(len(stored), bool) if is_float else stored != NO_VALUE
        if condition.start is not None:
            chosen &= stored >= condition.start
        if condition.stop is not None:
            chosen &= stored < condition.stop
        return chosen

    def _code(self, column: str, value: Any) -> Any:
        """How a value asked for is stored (strings: a code), None if it cannot be stored."""
        kind = self._kinds[column]
        fits = isinstance(value, str) if kind == "string" else isinstance(value, NUMBER)
        if not fits or (kind in ("int", "bool") and value != value // 1):
            raise QueryError(
                f"{column}={value!r} was asked for, but {column!r} is a column of kind {kind}"
            )
        if kind == "string":
            return self._codes(column).get(value)
        if kind == "float":
            return float(value)
        return int(value) if NO_VALUE < value < -NO_VALUE else None

    def _codes(self, column: str) -> dict[str, int]:
        if column not in self._dictionaries:
            self._dictionaries[column] = {s: i for i, s in enumerate(self._strings.get(column, []))}
        return self._dictionaries[column]

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


def values_of(
    layers: Sequence[str],
    segments: Sequence[Segment],
    kinds: Mapping[str, str],
    strings: Mapping[str, list[str]],
    column: str,
) -> set[Any]:
    """What a column holds in any of the layers."""
    found: set[Any] = set()
    for layer in layers:
        uses = partial(Uses, layer, [s for s in segments if layer in s.rows])
        known = Patterns(layer, segments, kinds, strings, uses, lambda _: ())
        found.update(known.values(column))
    return found
