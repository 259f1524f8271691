"""Cutting a memory back to an earlier step: what is left of its segments, snapshots and manifest.

A run is often resumed from a checkpoint that is older than the memory's last commit. The steps in
between are trained again, so their patterns must go: kept twice, they would explain nothing.
Whole segments are left as they are; the one that reaches across the cut is written again, shorter.
Nothing here changes a file: `MemoryWriter.rewind` does, in an order that is safe to die in.

Why it is hard: a segment is a closed account. Its log, its patterns with their columns, gradients
and buffers must all end at the same step, and its last fingerprint must be of that step: it is
given by whoever resumes, taken from the real weights. Damage must not be copied under a new
checksum, so the old one is checked first.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from dualform.errors import MemoryFileError
from dualform.memory.files import NO_VALUE, read_manifest
from dualform.memory.fingerprint import STATE_FINGERPRINTS
from dualform.memory.memory import Memory
from dualform.memory.segments import Segment
from dualform.memory.tensor_files import TensorBytes, paged_bytes, tensor_bytes

SUMS = ("learned", "unrecorded", "unrecorded_momentum")
FINGERPRINTS = ("fingerprints", "momentum_fingerprints", STATE_FINGERPRINTS)
OWN_COLUMNS = ("step", "position", "microbatch", "call", "rank")
Projections = Mapping[str, NDArray[np.float64]]


@dataclass(frozen=True)
class Cut:
    """How parameters look at the step that is gone back to, along their probes.

    W v and m v of every parameter, [d0]; NaN where there is no momentum buffer. Of what else an
    adaptive optimizer remembers, STATE/NAME, only what is there.
    """

    step: int
    weights: Projections
    momentum: Projections
    states: Projections


@dataclass(frozen=True)
class CutSegment:
    """The first steps of a segment, ready to be written."""

    tensors: list[TensorBytes]
    metadata: dict[str, Any]
    rows: dict[str, int]


@dataclass(frozen=True)
class Remainder:
    """What a memory keeps when it is cut back to `step`: manifest entries, and one new segment."""

    step: int
    initial: dict[str, Any]
    segments: list[dict[str, Any]]
    snapshots: list[dict[str, Any]]
    cut: CutSegment | None
    columns: frozenset[str]
    """The columns that still have a value somewhere."""
    buffers: frozenset[str]
    """The buffers that had changed by then."""


class ReopenedMemory(Memory):
    """A memory that is to be gone on with: what its recorder has to know, and no reader."""

    @classmethod
    def reopen(cls, path: Path) -> ReopenedMemory:
        """The memory at a path, which must be locked."""
        return cls(path, read_manifest(path))

    @property
    def kinds(self) -> dict[str, str]:
        """The kind of every column: int, float, bool or string."""
        return dict(self._described.columns)

    @property
    def recorded_remarks(self) -> tuple[str, ...]:
        """The recorder's own remarks, without what can be seen from how the memory ends."""
        return self._described.remarks

    @property
    def layer_entries(self) -> list[dict[str, Any]]:
        """The manifest's own words on the layers."""
        return [dict(entry) for entry in self._manifest["layers"]]

    def strings(self, column: str, segments: int) -> list[str]:
        """The strings a column met in the first so many segments, in the order of their codes."""
        return [s for segment in self._segments[:segments] for s in segment.strings(column)]

    def applied(self, parameter: str) -> NDArray[np.bool_]:
        """At which steps the optimizer moved a parameter, whether its rule is known or not."""
        index = self._index(parameter)
        parts = [s.log_array("applied", len(self._order))[:, index] for s in self._segments]
        return np.concatenate([np.zeros(0, bool), *parts]).astype(bool)

    def cut_back(self, at: Cut) -> Remainder:
        """What is left at a step, where parameters look like this; nothing on disk is changed."""
        manifest, step = self._manifest, at.step
        entries = dict(zip(self._segments, manifest["segments"], strict=True))
        whole = [s for s in self._segments if s.end <= step]
        cut = None
        names = {name for segment in whole for name in segment.file.names}
        for segment in self._segments:
            if segment.first_step < step < segment.end:
                segment.file.check()
                cut = cut_segment(segment, at)
                names |= {tensor.name for tensor in cut.tensors}
        split = [name.split("/", 2) for name in names]
        return Remainder(
            step,
            manifest["initial"],
            [entries[segment] for segment in whole],
            [entry for entry in manifest["snapshots"] if entry["step"] <= step],
            cut,
            frozenset(parts[2] for parts in split if parts[0] == "patterns" and len(parts) == 3),
            frozenset(
                name.removeprefix("buffers/").removesuffix("/step")
                for name in names
                if name.startswith("buffers/") and name.endswith("/step")
            ),
        )


def cut_segment(segment: Segment, at: Cut) -> CutSegment:
    """A segment's steps before the cut; parameters are then as its projections say."""
    file, step = segment.file, at.step
    steps = step - segment.first_step
    layers = file.metadata["layers"]
    rows, tables = _rows_left(segment, step)
    used = sorted({layers[name]["table"] for name in rows})
    tensors: list[TensorBytes] = []
    for name in sorted(file.names):
        kind, _, rest = name.partition("/")
        stored = file.tensor(name)
        if kind == "patterns":
            index, _, column = rest.partition("/")
            values = stored[: tables.get(int(index), 0)]
            if int(index) in used and not _is_blank(column, values):
                place = f"patterns/{used.index(int(index))}/{column}"
                tensors.append(tensor_bytes(place, values))
        elif kind == "log":
            tensors.append(tensor_bytes(name, stored[:steps]))
        elif kind in ("gradients", "buffers", "states"):
            if name.endswith("/step"):
                kept = int((stored < step).sum())
                if kept:
                    value = f"{name.removesuffix('/step')}/value"
                    tensors.append(tensor_bytes(name, stored[:kept]))
                    tensors.append(tensor_bytes(value, file.tensor(value)[:kept]))
        elif kind in SUMS:
            pass  # of the segment's end, which is gone
        elif kind in FINGERPRINTS or name == "fingerprint_steps":
            pass  # below, with the new last one
        elif rest in layers:  # rows of a layer, or what goes with them row by row
            if rest in rows:
                left = rows[rest] if kind != "keys" else _keys_left(segment, rest, rows[rest])
                tensors.append(paged_bytes(name, stored[:left]))
        else:
            tensors.append(tensor_bytes(name, stored))
    tensors += _fingerprints(segment, at)
    metadata = file.metadata | {
        "first_step": segment.first_step,
        "steps": steps,
        "layers": {
            name: layers[name] | {"rows": left, "table": used.index(layers[name]["table"])}
            for name, left in rows.items()
        },
    }
    return CutSegment(tensors, metadata, rows)


def _rows_left(segment: Segment, step: int) -> tuple[dict[str, int], dict[int, int]]:
    """How many patterns of each layer, and rows of each table, are of earlier steps."""
    rows: dict[str, int] = {}
    tables: dict[int, int] = {}
    for name, layer in segment.file.metadata["layers"].items():
        steps = segment.column(name, "step", torch.int64)
        if steps is None or (np.diff(steps) < 0).any():
            raise MemoryFileError(
                f"{segment.path}: the patterns of layer {name!r} are not in the order of their "
                "steps, so they cannot be cut; the file is damaged"
            )
        left = int(np.searchsorted(steps, step))
        if left:
            rows[name] = tables[layer["table"]] = left
    return rows, tables


def _keys_left(segment: Segment, layer: str, rows: int) -> int:
    """How many of the stored keys the first patterns need: each its own, or those referred to.

    Rows are numbered as they first come, so that what later patterns brought is at the end.
    """
    references = segment.references(layer)
    if references is None:
        return rows
    stored = segment.file.tensor(f"keys/{layer}").shape[0]
    highest = int(references.max(initial=-1))
    return max(0, stored - (highest - int(references[:rows].max(initial=-1))))


def _is_blank(column: str, values: torch.Tensor) -> bool:
    """Whether a tagged column has no value at all: it was first given later."""
    if column in OWN_COLUMNS:
        return False
    blank = values.isnan() if values.is_floating_point() else values.long() == NO_VALUE
    return bool(blank.all())


def _fingerprints(segment: Segment, at: Cut) -> list[TensorBytes]:
    """The segment's own before the cut, and the one there."""
    earlier = [s for s in segment.fingerprint_steps() if s < at.step]
    written = [tensor_bytes("fingerprint_steps", np.array([*earlier, at.step], np.int64))]
    for kind, now in zip(FINGERPRINTS, (at.weights, at.momentum, at.states), strict=True):
        for full in sorted(n for n in segment.file.names if n.startswith(f"{kind}/")):
            before = segment.file.array(full, dtype=torch.float64)
            values = now.get(full.removeprefix(f"{kind}/"), np.full(before.shape[1:], np.nan))
            joined = np.concatenate([before[: len(earlier)], values[None]])
            written.append(tensor_bytes(full, joined))
    return written
