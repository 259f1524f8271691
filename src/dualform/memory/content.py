"""What a segment is made of: whole steps, ready to be written, and the names of their tensors.

There are four families of tensors: rows, columns, the log, what was kept. The recorder hands them
over by layer, field and parameter; this file alone knows what they are called, so that a segment
that is written, cut back or copied is always named in one way (`segments.py` reads it).

Why it is hard: what was kept may change its type in mid-segment (another optimizer takes over), and
the same step may be kept twice (before and after an edit). Tensors of one type and shape are
stacked; a step's last state counts, as a whole.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dualform.errors import RecordingError
from dualform.memory.fields import as_runs, quoted
from dualform.memory.tensor_files import TensorBytes, stacked_bytes, tensor_bytes

Array = NDArray[Any]
Plain = None | bool | int | float | str
Kept = tuple[str, str, int, "Tensor | Plain"]
"""What ("weights", "state.exp_avg", …), of which parameter or buffer, after how many updates (a
gradient: in which update), the value. Of states plain numbers may be kept, too."""

LOG: dict[str, torch.dtype] = {
    "moved": torch.uint8,
    "setting": torch.int32,
    "fresh": torch.uint8,
    "carried": torch.uint8,
    "kappa": torch.float64,
    "explained": torch.uint8,
    "seen": torch.float64,
    "mark": torch.uint32,
    "state_mark": torch.uint32,
}
"""What the log says of every step and parameter, [steps, parameters]."""

USE = ("step", "microbatch", "call", "dtype", "rows", "positions", "start", "layout")
"""The columns of the table of uses, a line for every use of a layer: which backward pass of its
step, which forward call (a number that rises), the place of the compute dtype in `COMPUTED_IN`,
rows, positions per example, the first of its rows in the tag columns (-1: no tags), what the kind
said of its memory (0, if the last column is left out)."""

COMPUTED_IN = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
"""The dtypes that products are computed in; a use holds the place in this list."""

REFERENCES, SCALES = "keys.references", ".scales"


def rows_name(layer: str, part: str) -> str:
    """`keys`, `error_signals`, `weight`, `bias`, or what belongs to one of them, row by row."""
    return f"rows/{quoted(layer)}/{part}"


def column_name(what: str, name: str, parameter: str | None = None) -> str:
    """`uses` or `shapes` of a layer, `tags` by name, what was `lost` of a layer's parameter."""
    of = "" if parameter is None else f"/{quoted(parameter)}"
    return f"columns/{what}/{quoted(name)}{of}"


def kept_name(what: str, name: str, variant: int = 0, *, is_complex: bool = False) -> str:
    """The values; their steps are beside them. A variant is a further type or shape."""
    which = f"{variant or ''}{'c' if is_complex else ''}"
    return f"kept/{quoted(what)}/{quoted(name)}" + (f"/{which}" if which else "")


@dataclass
class SegmentContent:
    """Some steps, ready to be written. There may be none: then it says more of the state reached.

    `rows` are a layer's parts by name: keys, error_signals, weight, bias, keys.references (int32),
    error_signals.scales (float32). `uses` is int64 [uses, 7 or 8], see `USE`; `shapes` are leading
    shapes of uses, where those are not (rows,); `lost` float64 [uses, 2], by layer and parameter.
    """

    first_step: int
    steps: int
    rows: dict[str, list[tuple[str, TensorBytes]]] = field(default_factory=dict)
    uses: dict[str, NDArray[np.int64]] = field(default_factory=dict)
    shapes: dict[str, Sequence[tuple[int, ...]]] = field(default_factory=dict)
    tags: dict[str, Array] = field(default_factory=dict)
    lost: dict[str, dict[str, Array]] = field(default_factory=dict)
    log: dict[str, Array] = field(default_factory=dict)
    kept: list[Kept] = field(default_factory=list)
    news: dict[str, Any] = field(default_factory=dict)

    @property
    def bytes(self) -> int:
        """The size of its rows."""
        return sum(found.bytes for parts in self.rows.values() for _, found in parts)

    def packed(self, places: Mapping[str, int]) -> tuple[list[TensorBytes], dict[str, Any]]:
        """The tensors of the file, and what its line says, where parameters are known by place."""
        kept = _KeptTensors(self.kept)
        counts = {n: int(uses[:, 4].sum()) for n, uses in self.uses.items() if len(uses)}
        tensors = [*self._columns(), *self._log(), *kept.tensors(), *self._rows(counts)]
        entry: dict[str, Any] = {"first_step": self.first_step, "steps": self.steps, "rows": counts}
        distinct = {
            layer: parts["keys"].shape[0]
            for layer in counts
            if REFERENCES in (parts := dict(self.rows[layer]))
        }
        optional = {
            "distinct": distinct,
            "kept": kept.index(places),
            "news": {k: v for k, v in self.news.items() if v} | kept.plain,
        }
        return tensors, entry | {name: value for name, value in optional.items() if value}

    def _rows(self, counts: Mapping[str, int]) -> Iterator[TensorBytes]:
        for layer, parts in self.rows.items():
            known = dict(parts)
            for part, rows in known.items():
                folded = part == "keys" and REFERENCES in known
                if not folded and rows.shape[0] != counts.get(layer, 0):
                    raise RecordingError(
                        f"layer {layer!r} has {rows.shape[0]} rows of {part}, but its uses have "
                        f"{counts.get(layer, 0)}. This is a mistake in dualform; please report it"
                    )
                if rows.shape[0] or layer in counts:
                    is_flat = part == REFERENCES or part.endswith(SCALES)
                    shape = rows.shape[:1] if is_flat else rows.shape
                    yield replace(rows, name=rows_name(layer, part), shape=shape)

    def _columns(self) -> Iterator[TensorBytes]:
        for layer, uses in self.uses.items():
            if not len(uses):
                continue
            table = np.zeros((len(uses), len(USE)), np.int64)
            table[:, : uses.shape[1]] = uses
            yield tensor_bytes(column_name("uses", layer), table)
            shapes = self.shapes.get(layer, ())
            if any(s != (rows,) for s, rows in zip(shapes, uses[:, 4].tolist(), strict=False)):
                yield tensor_bytes(column_name("shapes", layer), _padded(shapes))
        for layer, of in self.lost.items():
            for parameter, lost in of.items():
                yield tensor_bytes(
                    column_name("lost", layer, parameter), np.asarray(lost, np.float64)
                )
        for name, values in self.tags.items():
            yield tensor_bytes(column_name("tags", name), narrowest(values))

    def _log(self) -> Iterator[TensorBytes]:
        if not self.steps:
            return
        for name, dtype in LOG.items():
            values = np.ascontiguousarray(self.log[name])
            yield tensor_bytes(f"log/{name}", torch.from_numpy(values).to(dtype))


class _KeptTensors:
    """What was kept, by name, what and step, as tensors of one type and shape each."""

    def __init__(self, kept: Sequence[Kept]) -> None:
        self._by_name: dict[str, dict[str, dict[int, list[Any]]]] = {}
        for what, name, step, value in kept:
            of_name = self._by_name.setdefault(name, {})
            if what == "weights":  # a whole state begins anew
                for other, states in of_name.items():
                    if other.startswith("state."):
                        states.pop(step, None)
            values = of_name.setdefault(what, {}).setdefault(step, [])
            if what != "fingerprint":
                values.clear()
            values.append(value)

    def _items(self) -> Iterator[tuple[str, str, list[tuple[int, Any]]]]:
        for name, of_name in self._by_name.items():
            for what, by_step in of_name.items():
                steps = sorted(by_step)
                yield what, name, [(step, value) for step in steps for value in by_step[step]]

    def tensors(self) -> Iterator[TensorBytes]:
        for what, name, items in self._items():
            natures: dict[tuple[torch.dtype, torch.Size], list[tuple[int, Tensor]]] = {}
            for step, value in items:
                if isinstance(value, Tensor):
                    natures.setdefault((value.dtype, value.shape), []).append((step, value))
            for number, ((dtype, _), found) in enumerate(natures.items()):
                full = kept_name(what, name, number, is_complex=dtype.is_complex)
                yield stacked_bytes(full, [value for _, value in found])
                steps = np.array([step for step, _ in found], np.int64)
                yield tensor_bytes(f"{full}/steps", steps)

    def index(self, places: Mapping[str, int]) -> dict[str, Any]:
        """Which steps were kept of which parameters (by place) and buffers (by name).

        Those with the same steps stand together.
        """
        groups: dict[str, dict[tuple[int, ...], list[Any]]] = defaultdict(dict)
        for what, name, items in self._items():
            if not what.startswith("state."):
                steps = tuple(dict.fromkeys(step for step, _ in items))
                place = name if what == "buffer" else places[name]
                groups[what].setdefault(steps, []).append(place)
        return {
            what: [
                [as_runs(steps), of if what == "buffer" else as_runs(sorted(of))]
                for steps, of in found.items()
            ]
            for what, found in groups.items()
        }

    @property
    def plain(self) -> dict[str, Any]:
        """States that are no tensors: [step, parameter, key, value]."""
        found = [
            [step, name, what.removeprefix("state."), _json_number(value)]
            for what, name, items in self._items()
            for step, value in items
            if not isinstance(value, Tensor)
        ]
        return {"plain": found} if found else {}


def _json_number(value: Plain) -> Any:
    """A number as JSON knows it: what is not finite as an object of its own."""
    if isinstance(value, float) and not abs(value) < float("inf"):
        return {"float": str(value)}
    return value


def _padded(shapes: Sequence[tuple[int, ...]]) -> NDArray[np.int64]:
    """Leading shapes in one table: [uses, most dimensions], filled up with -1."""
    found = np.full((len(shapes), max(map(len, shapes))), -1, np.int64)
    for line, shape in zip(found, shapes, strict=True):
        line[: len(shape)] = shape
    return found


def narrowest(values: Array) -> Array:
    """A column in the smallest signed integers that hold it; floats as they are.

    A memory has many columns that count to ten, and as many rows as patterns.
    """
    if values.dtype.kind == "f":
        return values.astype(np.float64)
    values = values.astype(np.int64)
    low, high = (values.min(), values.max()) if values.size else (0, 0)
    for dtype in (np.int8, np.int16, np.int32):
        if np.iinfo(dtype).min <= low and high <= np.iinfo(dtype).max:
            return values.astype(dtype)
    return values
