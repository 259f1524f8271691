"""What is committed, read: one segment, its line and its file; and all that a directory holds.

Everything read here is compared with what the line says of it: a column too short, a step that lies
elsewhere, a row that is not there is an error that names the file, never a wrong number. A segment
can also be read back as what it was written from: cut back to an earlier step, or made smaller.

Why it is hard: there may be thousands of segments, and opening a memory must stay cheap. So a line
is checked for its own sake at once, but the file, and what was kept in it, are looked into late.
Several threads may ask at a time: what is remembered can be made twice, and is the same.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dualform.memory.content import (
    COMPUTED_IN,
    LOG,
    REFERENCES,
    ROWS,
    START,
    USE,
    Plain,
    SegmentContent,
    column_name,
    rows_name,
)
from dualform.memory.description import Description
from dualform.memory.fields import count, counts, damaged, exactly, reading, unquoted
from dualform.memory.files import LINES, MANIFEST, NUMBERED, SEGMENTS, read_committed
from dualform.memory.tensor_files import TensorFile, compare_size

ROOM = 1 << 20
"""How many steps, rows or entries a file may speak of besides one for each of its bytes."""


class Segment:
    """One committed segment; its file is opened when it is first asked for something."""

    def __init__(self, directory: Path, entry: dict[str, Any]) -> None:
        name = exactly(str, entry["file"])
        if not NUMBERED.fullmatch(name):
            raise ValueError(f"{name!r:.50} is not the name of a segment")
        self.path = directory / SEGMENTS / name
        self.blocks = [(count(size), count(crc)) for size, crc in exactly(list, entry["blocks"])]
        self.bytes = sum(size for size, _ in self.blocks)
        self.first_step, self.steps = count(entry["first_step"]), count(entry["steps"])
        self.end = self.first_step + self.steps
        """The number of updates after its last step."""
        self.rows, self.distinct = counts(entry["rows"]), counts(entry["distinct"])
        """Of every layer, and how many keys are stored of those whose keys are referred to."""
        self.same_keys = {n: exactly(str, of) for n, of in entry["same_keys"].items()}
        """Layers that were given the same input as another one, whose keys are stored."""
        self.news = exactly(dict, entry["news"])
        self._listed = exactly(dict, entry["kept"])
        most = max(self.steps, *self.rows.values(), 0)
        fewer = all(n <= self.rows[layer] for layer, n in self.distinct.items())
        shared = all(self.rows[n] == self.rows[of] for n, of in self.same_keys.items())
        if most > self.bytes + ROOM or not fewer or not shared or (self.rows and not self.steps):
            raise ValueError("steps, rows and keys that its file cannot hold")

    @cached_property
    def file(self) -> TensorFile:
        return TensorFile(self.path, self.blocks)

    def need(self, is_sound: Any, otherwise: str) -> None:
        """Raise the error that names the file unless what was read of it is sound."""
        if not is_sound:
            raise damaged(self.path, otherwise)

    def read_rows(
        self, layer: str, part: str, width: int | None, dtypes: Sequence[torch.dtype], rows: slice
    ) -> Tensor:
        """Some rows of a part as they are stored; [n, width], or [n] without a width."""
        total = self._stored(layer, part)
        shape = (total,) if width is None else (total, width)
        layer = self.same_keys.get(layer, layer) if part == "keys" else layer
        return self.file.tensor(rows_name(layer, part), shape, dtypes, rows)

    def references(self, layer: str, rows: slice = slice(None)) -> Tensor:
        """Which key some patterns have, of those that are stored once."""
        return self.read_rows(layer, REFERENCES, None, (torch.int32,), rows)

    def parts(self, layer: str, rows: int) -> Iterator[tuple[str, Tensor]]:
        """The first rows of everything that a layer has, and the keys that they refer to."""
        prefix = rows_name(layer, "")
        for name in sorted(n for n in self.file.places if n.startswith(prefix)):
            part, stored, size = name.removeprefix(prefix), self.file.tensor(name), rows
            total, seen = self._stored(layer, part), tuple(stored.shape)
            self.need(seen[:1] == (total,), f"{name} has not {total} rows, but {seen}")
            if part == "keys" and layer in self.distinct:
                # numbered as they first come: those that later patterns brought are at the end
                numbers = self.references(layer)
                size = max(0, total - int(numbers.max()) + int(numbers[:rows].max()))
            yield part, stored[:size]
        if layer in self.same_keys:
            yield "keys", self.file.tensor(rows_name(self.same_keys[layer], "keys"))[:rows]

    def _stored(self, layer: str, part: str) -> int:
        """How many rows of a part are stored."""
        return self.distinct.get(layer, self.rows[layer]) if part == "keys" else self.rows[layer]

    def scales(self, layer: str, part: str, rows: slice) -> Tensor | None:
        """What each of some narrow rows is to be multiplied by; None where they are as they are."""
        if rows_name(layer, part) not in self.file.places:
            return None
        scales = self.read_rows(layer, part, None, (torch.float32,), rows)
        sound = bool((scales.isfinite() & (scales >= 0)).all())
        self.need(sound, f"{part} of layer {layer!r} holds negative or infinite sizes")
        return scales

    def uses(self, layer: str) -> NDArray[np.int64]:
        """The uses whose rows a layer has here (`content.USE`), in their order; checked."""
        name, total = column_name("uses", layer), self.rows[layer]
        table = self.file.tensor(name, None, (torch.int64,)).numpy()
        is_table = table.ndim == 2 and table.shape[1] >= len(USE) and len(table)
        self.need(is_table, f"{name} has shape {table.shape}")
        step, *_, dtype, rows, _, start, _ = table[:, : len(USE)].T
        in_order = (step[1:] >= step[:-1]).all() and self.first_step <= step[0]
        self.need(in_order and step[-1] < self.end, f"{name} is not of its own steps, in order")
        known = dtype.max() < len(COMPUTED_IN) and -1 <= start.min() <= start.max() <= self.bytes
        known &= np.delete(table[:, : len(USE)], START, axis=1).min() >= 0
        self.need(known and rows.max() <= total, f"{name} holds numbers that mean nothing")
        self.need(rows.sum() == total, f"{name} has {rows.sum()} rows, not {total}")
        shape = table[:, len(USE) :]
        fits = np.where(shape < 0, 1.0, shape).prod(1) == rows  # or they are one for each example
        fits |= (shape == rows[:, None])[:, :1].any(1)
        self.need(fits.all() and shape.min(initial=0) >= -1, f"{name} has shapes of other rows")
        return table

    def tags(self, column: str, kind: str) -> NDArray[Any] | None:
        """The values that uses refer to, int64 or float64; None where none were given here."""
        name = column_name("tags", column)
        if name not in self.file.places:
            return None
        dtype = torch.float64 if kind == "float" else torch.int64
        values = self.file.tensor(name, None, (dtype,)).numpy()
        self.need(values.ndim == 1, f"{name} has shape {values.shape}")
        return values

    def lost(self, layer: str, parameter: str) -> NDArray[np.float64]:
        """What 16 bits lost of a parameter, of every use: [uses, 2]; zeros where it is exact."""
        name, shape = column_name("lost", layer, parameter), (len(self.uses(layer)), 2)
        if name not in self.file.places:
            return np.zeros(shape)
        return self.file.tensor(name, shape, (torch.float64,)).numpy()

    def log(self, field: str, parameters: int, settings: int) -> NDArray[Any]:
        """One of `content.LOG`, [steps, parameters]; checked."""
        dtype = LOG[field]
        if not self.steps:
            return torch.zeros(0, parameters, dtype=dtype).numpy()
        values = self.file.tensor(f"log/{field}", (self.steps, parameters), (dtype,)).numpy()
        limits = {torch.uint8: (0, 1), torch.int32: (-1, settings - 1)}.get(dtype)
        if limits and values.size:
            known = limits[0] <= values.min() <= values.max() <= limits[1]
            self.need(known, f"log/{field} is not of {limits[0]} to {limits[1]}")
        return values

    @cached_property
    def keeps(self) -> dict[str, dict[str, list[tuple[str, list[int]]]]]:
        """What was kept, by what it is of and what it is (weights, state.exp_avg, …): tensors, and
        after how many updates (of which updates, a gradient) the values in them were so."""
        found: dict[str, dict[str, list[tuple[str, list[int]]]]] = {}
        with reading(f"what {self.path} is said to keep"):
            for name, listed in self._listed.items():
                _, what, of, _ = name.split("/")
                steps, last = list(map(count, listed)), self.end - (what == "gradient")
                if steps != sorted(steps) or not 0 <= steps[0] <= steps[-1] <= last:
                    raise ValueError(f"{name} of steps {steps!r:.100}")
                own = found.setdefault(unquoted(of), {})
                own.setdefault(unquoted(what), []).append((name, steps))
        return found

    def kept(
        self, what: str, of: str, at: int | None = None
    ) -> Iterator[tuple[int, Tensor | Plain]]:
        """What was kept, at any step or at one, whatever its type and shape: (step, value)."""
        for name, steps in self.keeps.get(of, {}).get(what, ()):
            if at is not None and at not in steps:
                continue
            values, dtype = self.file.tensor(name), name.rpartition("/")[2].partition("[")[0]
            self.need(values.shape[:1] == (len(steps),), f"{name} does not hold its steps")
            if dtype.startswith("complex"):
                pairs = values.dtype in (torch.float32, torch.float64)
                self.need(pairs and values.shape[1:][-1:] == (2,), f"{name} holds no pairs")
                values = torch.view_as_complex(values.clone())  # they need not lie evenly
            for step, value in zip(steps, values, strict=True):
                found: Tensor | Plain = value
                if at not in (None, step):
                    continue
                if dtype == "json":
                    with reading(f"{name} of {self.path}"):
                        found = json.loads(value.numpy().tobytes())
                    self.need(isinstance(found, Plain), f"{name} holds no plain value")
                yield step, found


class OpenedMemory:
    """A memory's directory at one moment, checked as a whole, for lines are right or wrong only
    together (steps follow one another, layers are known): where reading and writing meet."""

    def __init__(self, path: Path) -> None:
        self.path, self.committed = path, read_committed(path)
        with reading(path / MANIFEST):
            self.description = Description(self.committed.manifest)
        self.segments: list[Segment] = []
        self.steps = 0
        for number, entry in enumerate(self.committed.entries):
            with reading(f"line {number + 1} of {path / LINES}"):
                self._add(Segment(path, entry))
        for segment in self.segments:
            compare_size(segment.path, segment.bytes)
        sizes = {p.name: p.height * p.width for p in self.description.parameters.values()}
        for layer, _ in self.description.layers.values():
            sizes[layer.name] = max(layer.in_features, layer.out_features)
        most = ROOM + sum(segment.bytes for segment in self.segments)
        if self.segments and (large := [name for name in sizes if sizes[name] > most]):
            raise damaged(path, f"{large[0]!r} is said to be larger than all that it holds")

    def _add(self, segment: Segment) -> None:
        if segment.first_step != self.steps:
            raise ValueError(f"steps from {segment.first_step} on do not follow those before")
        self.description.add(segment.news)
        if unknown := segment.rows.keys() - self.description.layers.keys():
            raise ValueError(f"rows of a layer {min(unknown)!r:.100} that is not described")
        self.segments.append(segment)
        self.steps = segment.end

    def content(self, segment: Segment, *, stop: int | None = None) -> SegmentContent:
        """Read a segment's steps before `stop` (default: all) back into what is written; the rows
        are mapped from its file, which must stay until the new one is written."""
        stop = segment.end if stop is None else min(stop, segment.end)
        known, content = self.description, SegmentContent(segment.first_step, 0)
        content.steps = stop - segment.first_step
        for layer in segment.rows:
            uses = segment.uses(layer)
            uses = uses[: np.searchsorted(uses[:, 0], stop)]
            if not len(uses):
                continue
            content.uses[layer] = uses
            content.rows[layer] = list(segment.parts(layer, int(uses[:, ROWS].sum())))
            for parameter in known.layers[layer][0].parameters:
                if (lost := segment.lost(layer, parameter)[: len(uses)]).any():
                    content.lost.setdefault(layer, {})[parameter] = lost
        for column, kind in known.tags.items():
            if (values := segment.tags(column, kind)) is not None:
                content.tags[column] = values
        if content.steps:
            content.log = {f: segment.log(f, *self.sizes)[: content.steps] for f in LOG}
        content.kept = [
            (what, name, step, value)
            for name in (*known.parameters, *known.buffers)
            for what in sorted(segment.keeps.get(name, ()), key=lambda what: what != "weights")
            for step, value in segment.kept(what, name)
            if step < stop or (step == stop and what != "gradient")
        ]
        content.news = dict(segment.news)
        if stop < segment.end:  # names and settings stay, for others count on from them
            events, remarks = (content.news.get(what, []) for what in ("events", "remarks"))
            content.news["events"] = [e for e in events if e["step"] < stop]
            content.news["remarks"] = [r for r in remarks if type(r) is str or r[0] < stop]
        return content

    @property
    def sizes(self) -> tuple[int, int]:
        """How many parameters the log has, and how many settings it can name."""
        return len(self.description.parameters), len(self.description.settings)
