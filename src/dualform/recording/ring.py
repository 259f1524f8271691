"""What is collected until it is written: rows in their regions, visits, logs, gradients.

One `BufferSet` is being filled by the training thread while others wait for the writer. Why it is
hard: the memory must be reused (fresh pages cost as much as the copying), must be given back where
layers come and go, and must stay whole if Ctrl-C strikes in the middle of growing.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from dualform.layers import Layer
from dualform.learning_rules import HYPERPARAMETERS
from dualform.memory.segments import REFERENCES, scales_of
from dualform.memory.tensor_files import TensorBytes, paged_bytes, tensor_bytes
from dualform.memory.writing import SegmentContent
from dualform.recording.learned import Learned
from dualform.recording.recurring import Folded
from dualform.recording.regions import NarrowCopies, Region
from dualform.recording.tags import Visit, expand, numbered

Fold = Callable[[Layer, Tensor], Folded | None]
"""Given a layer's keys of one segment: as stored if rows recur, None if each is stored."""


class StepRecord(NamedTuple):
    """What the optimizers did at one step: an entry per parameter of the model, the settings.

    Lists: they are made and filled at every step, and become arrays when a segment is written.
    """

    applied: list[bool]
    kappa: list[float]
    first: list[int]
    fresh: list[bool]
    group: list[int]
    projection: list[float]
    unrecorded: list[bool]
    hyperparameters: list[tuple[float, ...]]

    @classmethod
    def blank(cls, parameters: int) -> StepRecord:
        """Of a step at which nothing has happened yet."""
        no, none = [False] * parameters, [0.0] * parameters
        return cls(no, none, [0] * parameters, no[:], [-1] * parameters, none[:], no[:], [])


LOG_TYPES = {
    "applied": np.uint8,
    "kappa": np.float64,
    "first": np.int64,
    "fresh": np.uint8,
    "group": np.int32,
    "projection": np.float64,
}
"""What the log's columns are stored as."""


class Extras(NamedTuple):
    """What a commit carries besides patterns and log, gathered by the recorder at that moment."""

    fingerprint_steps: NDArray[Any]
    fingerprints: dict[str, NDArray[Any]]
    momentum_fingerprints: dict[str, NDArray[Any]]
    state_fingerprints: dict[str, NDArray[Any]]
    sums: dict[str, Tensor | Learned]
    """Learned and unrecorded parts, under the names they are stored by."""
    strings: dict[str, list[str]]
    kinds: dict[str, str]
    description: dict[str, Any]
    snapshot: dict[str, Tensor] | None


Events = dict[str, tuple[list[int], list[Tensor]]]
"""Values by name, with the steps they belong to."""


@dataclass
class BufferSet:
    """Everything of the steps now being collected. `extras` are given when it is complete."""

    first_step: int = 0
    keys: dict[Layer, Region] = field(default_factory=dict)
    error_signals: dict[Layer, Region] = field(default_factory=dict)
    visits: dict[Layer, list[Visit]] = field(default_factory=dict)
    marks: dict[Layer, tuple[int, int]] = field(default_factory=dict)
    """(rows, visits) of a layer when the step under way began, for layers seen since."""
    records: list[StepRecord] = field(default_factory=list)
    gradients: Events = field(default_factory=dict)
    buffers: Events = field(default_factory=dict)
    states: Events = field(default_factory=dict)
    bytes: int = 0
    """What has been collected."""
    touched: int = 0
    """How much memory that takes, with what was in use earlier and was not given back."""
    extras: Extras | None = None
    gathered: int = 0
    """How many records there were when the extras were gathered."""

    def clear(self) -> None:
        """Make ready for other steps; keep the memory that the last ones needed."""
        for regions in (self.keys, self.error_signals):
            for layer in [la for la in regions if la not in self.visits]:
                del regions[layer]  # not seen for a whole segment
            for region in regions.values():
                region.restart()
        self.first_step = self.end
        self.visits, self.marks, self.records, self.extras = {}, {}, [], None
        self.gradients, self.buffers, self.states, self.bytes = {}, {}, {}, 0
        self.count_touched()

    def count_touched(self) -> None:
        regions = (*self.keys.values(), *self.error_signals.values())
        self.touched = sum(r.touched for r in regions)
        self.touched += self.bytes - sum(r.bytes for r in regions)

    @property
    def end(self) -> int:
        """The number of updates after the last complete step."""
        return self.first_step + len(self.records)

    def append(self, region: Region, rows: Tensor) -> Tensor:
        """Copy rows to one of the regions, and count them."""
        used, touched = region.bytes, region.touched
        copy = region.append(rows)
        self.bytes += region.bytes - used
        self.touched += region.touched - touched
        return copy

    @property
    def stored_bytes(self) -> int:
        """What has been collected as it will be written, rows that recur included."""
        regions = (*self.keys.values(), *self.error_signals.values())
        narrower = sum(r.bytes - r.rows * r.width * r.stored.itemsize for r in regions)
        return self.bytes - narrower

    def add_bytes(self, size: int) -> None:
        """Count what lies elsewhere: columns, logs, gradients."""
        self.bytes += size
        self.touched += size

    def trim(self) -> None:
        """Give back all memory that is not in use now."""
        for region in (*self.keys.values(), *self.error_signals.values()):
            region.trim()
        self.count_touched()

    def make_room(self, other: BufferSet) -> None:
        """Room for what another set came to hold."""
        for mine, theirs in ((self.keys, other.keys), (self.error_signals, other.error_signals)):
            for layer in other.visits:
                region = theirs.get(layer)
                if region is None:  # keys alone are kept
                    continue
                room = region.rows + region.rows // 8
                if layer in mine:
                    mine[layer].reserve(room)
                else:
                    mine[layer] = region.like(room)
        self.count_touched()

    def _of_layer(self, layer: Layer) -> dict[str, Region]:
        """A layer's keys, and its error signals where they are kept."""
        kinds = {"keys": self.keys, "error_signals": self.error_signals}
        return {kind: regions[layer] for kind, regions in kinds.items() if layer in regions}

    def rewind(self, layer: Layer) -> int:
        """Take back a layer's patterns of the step under way; returns how many there were."""
        if layer not in self.marks:
            return 0
        dropped = self._cut(layer, *self.marks[layer])
        del self.marks[layer]
        return dropped

    def take_back(self, layer: Layer, parameters: Collection[int]) -> int:
        """Take back a layer's patterns of the complete steps since one of the parameters moved.

        None of the layer may be in the step under way. Returns how many there were.
        """
        moved = (any(record.applied[i] for i in parameters) for record in reversed(self.records))
        last = self.end - 1 - next((n for n, has in enumerate(moved) if has), len(self.records))
        visits = self.visits.get(layer, [])
        used = sum(visit.step <= last for visit in visits)
        rows = sum(prod(visit.shape) for visit in visits[used:])
        return self._cut(layer, self.keys[layer].rows - rows, used) if rows else 0

    def _cut(self, layer: Layer, rows: int, visits: int) -> int:
        """Keep the first rows and visits of a layer; returns how many rows there were more."""
        dropped = self.keys[layer].rows - rows
        for region in self._of_layer(layer).values():
            used = region.bytes
            region.cut(rows)
            self.bytes += region.bytes - used
        del self.visits[layer][visits:]
        return dropped

    def rewind_all(self) -> None:
        """Take back whatever belongs to a step that was not completed."""
        for layer in list(self.marks):
            self.rewind(layer)
        for events in (self.gradients, self.buffers, self.states):
            for steps, values in events.values():
                complete = sum(step < self.end for step in steps)
                del steps[complete:], values[complete:]
            for name in [n for n, (steps, _) in events.items() if not steps]:
                del events[name]

    def content(
        self,
        extras: Extras,
        fold: Fold = lambda layer, rows: None,
        copies: NarrowCopies | None = None,
    ) -> SegmentContent:
        """The collected steps as the format wants them; layers with like rows share a table.

        `fold` is asked for the keys of every layer: are there rows that were stored before?
        `copies` is where rows are written down that are stored in 16 bits.
        """
        narrow = NarrowCopies() if copies is None else copies
        tables: list[dict[str, Any]] = []
        seen: dict[tuple[Visit, ...], int] = {}
        table_of: dict[str, int] = {}
        used = [layer for layer in self.visits if self.keys[layer].rows]
        for layer in used:
            shape = numbered(self.visits[layer])
            if shape not in seen:
                seen[shape] = len(tables)
                tables.append(expand(shape, extras.kinds))
            table_of[layer.name] = seen[shape]
        return SegmentContent(
            first_step=self.first_step,
            steps=len(self.records),
            patterns=[tensor for layer in used for tensor in self._tensors(layer, fold, narrow)],
            rows={layer.name: self.keys[layer].rows for layer in used},
            table_of=table_of,
            tables=tables,
            log=_log_arrays(self.records),
            fingerprint_steps=extras.fingerprint_steps,
            fingerprints=extras.fingerprints,
            momentum_fingerprints=extras.momentum_fingerprints,
            state_fingerprints=extras.state_fingerprints,
            strings=extras.strings,
            gradients=self.gradients,
            buffers=self.buffers,
            states=self.states,
            sums={n: s.part() if isinstance(s, Learned) else s for n, s in extras.sums.items()},
        )

    def _tensors(self, layer: Layer, fold: Fold, copies: NarrowCopies) -> Iterator[TensorBytes]:
        for kind, region in self._of_layer(layer).items():
            name = f"{kind}/{layer.name}"
            written, scales = copies.of(kind, layer, region)
            folded = fold(layer, written.filled) if kind == "keys" else None
            if folded is None or len(folded.new) == written.rows:
                yield written.tensor_bytes(name)
            else:
                yield paged_bytes(name, folded.new)
            if folded is not None:
                yield tensor_bytes(f"{REFERENCES}/{layer.name}", folded.references)
            if scales is not None:
                beside = scales.tensor_bytes(f"{scales_of(kind)}/{layer.name}")
                yield replace(beside, shape=(scales.rows,))


def _log_arrays(records: list[StepRecord]) -> dict[str, NDArray[Any]]:
    if not records:
        return {}
    groups = max((len(r.hyperparameters) for r in records), default=0)
    width = max([len(HYPERPARAMETERS), *(len(v) for r in records for v in r.hyperparameters)])
    settings = np.full((len(records), max(1, groups), width), np.nan)
    for row, record in zip(settings, records, strict=True):
        for index, values in enumerate(record.hyperparameters):
            if values:  # an optimizer whose rule is not known has none
                row[index, : len(values)] = values
    arrays = {n: np.array([getattr(r, n) for r in records], t) for n, t in LOG_TYPES.items()}
    unrecorded = np.array([r.unrecorded for r in records], np.uint8)
    if unrecorded.any():
        arrays["unrecorded"] = unrecorded
    return arrays | {"hyperparameters": settings}
