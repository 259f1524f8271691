"""One committed segment, read: its line, and its file once it is asked for something.

Everything read here is compared with what the line says of it: a column too short, a step that lies
elsewhere, a row that is not there is an error that names the file, never a wrong number.

Why it is hard: there may be thousands of segments, and opening a memory must stay cheap. So a line
is checked for its own sake at once, but the file, and what was kept in it, are looked into late;
and all of it may be asked for by several threads at a time (what is remembered can be made twice,
and is the same).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dualform.errors import MemoryFileError
from dualform.memory.content import COMPUTED_IN, LOG, USE, column_name, rows_name
from dualform.memory.fields import WRONG, blocks, count, exactly, from_runs, texts, unquoted
from dualform.memory.files import NUMBERED, SEGMENTS
from dualform.memory.mapped import TensorFile

INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64)
"""What columns of whole numbers may be stored in."""

VARIANT = re.compile(r"[0-9]{0,9}c?", re.ASCII)
ROOM = 1 << 20
"""How many steps or rows may lie in a file besides one for each of its bytes."""


class UseTable(NamedTuple):
    """The uses of one layer in one segment: int64 [uses, 8] (`content.USE`), and leading shapes,
    [uses, most dimensions], filled up with -1; None where each is (rows,)."""

    uses: NDArray[np.int64]
    shapes: NDArray[np.int64] | None


class Segment:
    """One committed segment; its file is opened when it is first asked for something."""

    def __init__(self, directory: Path, entry: dict[str, Any]) -> None:
        name = exactly(str, entry["file"])
        if not NUMBERED.fullmatch(name):
            raise ValueError(f"{name!r:.50} is not the name of a segment")
        self.path = directory / SEGMENTS / name
        self.number = int(name.partition(".")[0])
        self.blocks = blocks(entry["blocks"])
        self.bytes = int(self.blocks[:, 0].sum())
        self.first_step, self.steps = count(entry["first_step"]), count(entry["steps"])
        self.end = self.first_step + self.steps
        """The number of updates after its last step."""
        self.rows, self.distinct = _counts(entry["rows"]), _counts(entry.get("distinct", {}))
        """Of every layer, and how many keys are stored of those whose keys are referred to."""
        self.news = exactly(dict, entry.get("news", {}))
        self._kept = exactly(dict, entry.get("kept", {}))
        self._logs: dict[str, NDArray[Any]] = {}
        self._tables: dict[str, UseTable] = {}
        if max(self.steps, *self.rows.values(), 0) > self.bytes + ROOM:
            raise ValueError("more steps or rows than a file of this size can hold")
        if any(n > self.rows[layer] for layer, n in self.distinct.items()):
            raise ValueError("more distinct keys than rows")
        if self.rows and not self.steps:
            raise ValueError("rows of no step")

    @cached_property
    def file(self) -> TensorFile:
        return TensorFile(self.path, self.blocks)

    def wrong(self, why: str) -> MemoryFileError:
        return MemoryFileError(f"{self.path} is damaged or belongs to another memory: {why}")

    # -- rows and columns --------------------------------------------------------------------------

    def read_rows(
        self, layer: str, part: str, width: int | None, dtypes: Sequence[torch.dtype], rows: slice
    ) -> Tensor:
        """Some rows of a part as they are stored; [n, width], or [n] without a width."""
        total = self.distinct.get(layer, self.rows[layer]) if part == "keys" else self.rows[layer]
        shape = (total,) if width is None else (total, width)
        return self.file.tensor(rows_name(layer, part), shape, dtypes, rows)

    def scales(self, layer: str, part: str, rows: slice) -> Tensor | None:
        """What each of some narrow rows is to be multiplied by; None where they are as they are."""
        if rows_name(layer, part) not in self.file:
            return None
        scales = self.read_rows(layer, part, None, (torch.float32,), rows)
        if not bool((scales.isfinite() & (scales >= 0)).all()):
            raise self.wrong(f"{part} of layer {layer!r} holds no sizes: negative or not finite")
        return scales

    def uses(self, layer: str) -> UseTable:
        """The uses whose rows a layer has here, in their order; checked."""
        if layer not in self._tables:
            name = column_name("uses", layer)
            uses = self.file.array(name, dtype=torch.int64)
            if uses.ndim != 2 or uses.shape[1] != len(USE) or not len(uses):
                raise self.wrong(f"{name} has shape {uses.shape}")
            step, *numbers, start, layout = uses.T
            self._compare_steps(step, name, self.end)
            dtype, rows = numbers[2], numbers[3]
            if min(column.min() for column in (*numbers, start + 1, layout)) < 0:
                raise self.wrong(f"{name} holds negative numbers")
            if dtype.max() >= len(COMPUTED_IN) or start.max() > self.bytes:
                raise self.wrong(f"{name} holds numbers that are no dtypes, or no tags")
            if rows.max() > self.rows[layer] or rows.sum() != self.rows[layer]:
                raise self.wrong(f"{name} has {rows.sum()} rows, not {self.rows[layer]}")
            shapes, full = None, column_name("shapes", layer)
            if full in self.file:
                shapes = self.file.array(full, dtype=torch.int64)
                if shapes.ndim != 2 or len(shapes) != len(uses) or (shapes < -1).any():
                    raise self.wrong(f"{full} are not the shapes of {len(uses)} uses")
            self._tables[layer] = UseTable(uses, shapes)
        return self._tables[layer]

    def tags(self, column: str, dtype: torch.dtype) -> NDArray[Any] | None:
        """The values that uses refer to, int64 or float64; None where none were given here."""
        name = column_name("tags", column)
        if name not in self.file:
            return None
        values = self.file.tensor(name, None, INTEGERS if dtype == torch.int64 else (dtype,))
        if values.dim() != 1:
            raise self.wrong(f"{name} has shape {tuple(values.shape)}")
        return values.to(dtype).numpy()

    def lost(self, layer: str, parameter: str) -> NDArray[np.float64]:
        """What 16 bits lost of a parameter, of every use: [uses, 2]; zeros where it is exact."""
        name, uses = column_name("lost", layer, parameter), len(self.uses(layer).uses)
        if name not in self.file:
            return np.zeros((uses, 2))
        return self.file.array(name, (uses, 2), torch.float64)

    # -- the log -----------------------------------------------------------------------------------

    def log(self, field: str, parameters: int, settings: int) -> NDArray[Any]:
        """One of `content.LOG`, [steps, parameters]; checked."""
        dtype = LOG[field]
        if not self.steps:
            return torch.zeros(0, parameters, dtype=dtype).numpy()
        if field not in self._logs:
            values = self.file.array(f"log/{field}", (self.steps, parameters), dtype)
            if dtype == torch.uint8 and values.max(initial=0) > 1:
                raise self.wrong(f"log/{field} holds {values.max()}, neither true nor false")
            if dtype == torch.int32 and ((values < -1) | (values >= settings)).any():
                raise self.wrong("its log names settings that are not there")
            self._logs[field] = values
        return self._logs[field]

    # -- what was kept -----------------------------------------------------------------------------

    def kept_steps(self, what: str, of: int | str) -> list[int]:
        """After how many updates something was kept of a parameter (by place) or buffer (by name).

        A gradient: of which updates.
        """
        for steps, places in self._kept_groups.get(what, ()):
            if any(of in some for some in places):
                return [step for run in steps for step in run]
        return []

    @cached_property
    def _kept_groups(self) -> dict[str, list[tuple[list[range], list[Any]]]]:
        found: dict[str, list[tuple[list[range], list[Any]]]] = {}
        try:
            for what, groups in self._kept.items():
                high = self.end - (what == "gradient")
                for runs, of in exactly(list, groups):
                    places = [texts(of)] if what == "buffer" else from_runs(of, 0, 1 << 40)
                    steps = from_runs(runs, self.first_step, high)
                    found.setdefault(what, []).append((steps, places))
        except WRONG as error:
            raise self.wrong(f"its line does not say what was kept ({error!r:.200})") from error
        return found

    @cached_property
    def _variants(self) -> dict[str, dict[str, list[str]]]:
        """The tensors of what was kept: by parameter or buffer, then by what."""
        found: dict[str, dict[str, list[str]]] = {}
        for name in self.file.names:
            family, *rest = name.split("/")
            if family == "kept" and len(rest) >= 2 and VARIANT.fullmatch("".join(rest[2:])):
                what, of = map(unquoted, rest[:2])
                found.setdefault(of, {}).setdefault(what, []).append(name)
        return found

    def kept_names(self, of: str) -> list[str]:
        """What was kept of a parameter or buffer: weights, state.exp_avg, …"""
        return list(self._variants.get(of, {}))

    def kept(self, what: str, of: str, at: int | None = None) -> Iterator[tuple[int, Tensor]]:
        """What was kept, at any step or at one, whatever its type and shape: (step, value)."""
        for name in self._variants.get(of, {}).get(what, ()):
            steps = self.file.array(f"{name}/steps", dtype=torch.int64)
            self._compare_steps(steps, f"{name}/steps", self.end + (what != "gradient"))
            low, high = (0, len(steps)) if at is None else np.searchsorted(steps, [at, at + 1])
            if self.file.place(name).shape[:1] != (len(steps),):
                raise self.wrong(f"{name} has another number of values than steps")
            if low < high:
                values = self.file.tensor(name, rows=slice(int(low), int(high)))
                if name.endswith("c") and name.count("/") == 3:
                    if values.shape[-1:] != (2,) or values.dtype.itemsize < 4:
                        raise self.wrong(f"{name} holds no complex numbers")
                    values = torch.view_as_complex(values)
                yield from zip(steps[low:high].tolist(), values, strict=True)

    @cached_property
    def plain(self) -> dict[tuple[str, int], dict[str, Any]]:
        """States that are no tensors, by parameter and step."""
        found: dict[tuple[str, int], dict[str, Any]] = {}
        try:
            for step, name, key, value in exactly(list, self.news.get("plain", [])):
                if not self.first_step <= count(step) <= self.end:
                    raise ValueError(f"a state of step {step}")
                states = found.setdefault((exactly(str, name), step), {})
                states[exactly(str, key)] = _plain(value)
        except WRONG as error:
            raise self.wrong(f"its line holds states that are none ({error!r:.200})") from error
        return found

    def _compare_steps(self, steps: NDArray[np.int64], what: str, stop: int) -> None:
        if steps.ndim != 1 or (np.diff(steps) < 0).any():
            raise self.wrong(f"{what} are not in the order of their steps")
        if len(steps) and not (self.first_step <= steps[0] and steps[-1] < stop):
            raise self.wrong(
                f"{what} are of steps {steps[0]} to {steps[-1]}, outside of its own "
                f"{self.first_step} to {stop - 1}"
            )


def _counts(value: Any) -> dict[str, int]:
    return {layer: count(n) for layer, n in exactly(dict, value).items()}


def _plain(value: Any) -> Any:
    """Read a plain number as `content` wrote it."""
    if type(value) is dict:
        if value.keys() != {"float"} or value["float"] not in ("inf", "-inf", "nan"):
            raise ValueError(f"{value!r:.100} is no number")
        return float(value["float"])
    if type(value) not in (type(None), bool, int, float, str):
        raise TypeError(f"{value!r:.100} is no plain number")
    return value
