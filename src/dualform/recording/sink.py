"""Where patterns go: a ring of buffers, a writer thread, segments on disk.

The training loop only copies rows into page-aligned buffers it owns. When a buffer set is full at
the end of a step, it goes to the writer thread (which builds columns, checksums and writes, mostly
without the GIL) and the next set takes its place. There are `SETS` of them and no more: if the disk
cannot keep up, training waits, and memory use stays at most

    SETS × (segment_bytes + the bytes of the largest step).

A pattern becomes part of the memory only at the end of its step; until then it can be taken back
(`rewind`), which is what happens to the patterns of a step that an optimizer skipped.
"""

from __future__ import annotations

import mmap
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from math import prod
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from dualform.errors import DualFormError, RecordingError
from dualform.layers import Layer
from dualform.memory.files import PAGE, TensorBytes
from dualform.memory.writing import MemoryWriter, SegmentContent
from dualform.recording.tags import Visit, expand

SETS = 3
SEGMENT_BYTES = 64 << 20
COMMIT_SECONDS = 30.0
"""A slow run commits at least this often (at the end of a step)."""


class StepRecord(NamedTuple):
    """What the optimizers did at one step: one entry per parameter of the model, and the settings."""

    applied: np.ndarray[Any, Any]
    kappa: np.ndarray[Any, Any]
    first: np.ndarray[Any, Any]
    fresh: np.ndarray[Any, Any]
    group: np.ndarray[Any, Any]
    projection: np.ndarray[Any, Any]
    hyperparameters: list[tuple[float, ...]]


class Extras(NamedTuple):
    """What a commit carries besides patterns and log, gathered by the recorder at that moment."""

    fingerprints: dict[str, np.ndarray[Any, Any]]
    momentum_fingerprints: dict[str, np.ndarray[Any, Any]]
    learned: dict[str, Tensor]
    strings: dict[str, list[str]]
    kinds: dict[str, str]
    description: dict[str, Any]
    snapshot: dict[str, Tensor] | None


class Sink(Protocol):
    """What the recorder needs of a place for patterns."""

    def append(self, layer: Layer, keys: Tensor, error_signals: Tensor, visit: Visit) -> None: ...

    def rewind(self, layer: Layer) -> int: ...

    def end_step(
        self, record: StepRecord, gradients: dict[str, Tensor], buffers: dict[str, Tensor]
    ) -> None: ...

    def close(self, *, closed: bool) -> None: ...


class Region:
    """Rows of one kind of one layer in page-aligned memory that grows by copying."""

    def __init__(self, width: int, dtype: torch.dtype, capacity: int) -> None:
        self.width, self.dtype = width, dtype
        self.rows = 0
        self._allocate(max(1, capacity))

    def _allocate(self, capacity: int) -> None:
        size = capacity * self.width * self.dtype.itemsize
        self.area = mmap.mmap(-1, max(PAGE, size + -size % PAGE))
        flat = torch.frombuffer(self.area, dtype=self.dtype)[: capacity * self.width]
        self.tensor = flat.view(capacity, self.width)
        self.capacity = capacity

    def append(self, rows: Tensor) -> None:
        count = rows.shape[0]
        if self.rows + count > self.capacity:
            old = self.tensor[: self.rows]
            self._allocate(max(self.rows + count, self.capacity + self.capacity // 2))
            self.tensor[: self.rows].copy_(old)
        self.tensor[self.rows : self.rows + count].copy_(rows)
        self.rows += count

    @property
    def bytes(self) -> int:
        return self.rows * self.width * self.dtype.itemsize

    def tensor_bytes(self, name: str) -> TensorBytes:
        view = memoryview(self.area)[: self.bytes]
        return TensorBytes(name, self.dtype, (self.rows, self.width), view, aligned=True)


@dataclass
class BufferSet:
    """Everything of the steps now being collected."""

    keys: dict[Layer, Region] = field(default_factory=dict)
    error_signals: dict[Layer, Region] = field(default_factory=dict)
    visits: dict[Layer, list[Visit]] = field(default_factory=dict)
    marks: dict[Layer, tuple[int, int]] = field(
        default_factory=dict
    )  # (rows, visits) at step start
    records: list[StepRecord] = field(default_factory=list)
    gradients: dict[str, tuple[list[int], list[Tensor]]] = field(default_factory=dict)
    buffers: dict[str, tuple[list[int], list[Tensor]]] = field(default_factory=dict)
    event_bytes: int = 0

    def clear(self) -> None:
        for region in (*self.keys.values(), *self.error_signals.values()):
            region.rows = 0
        self.visits, self.marks, self.records = {}, {}, []
        self.gradients, self.buffers, self.event_bytes = {}, {}, 0

    @property
    def bytes(self) -> int:
        regions = (*self.keys.values(), *self.error_signals.values())
        return sum(region.bytes for region in regions) + self.event_bytes

    def content(self, first_step: int, extras: Extras) -> SegmentContent:
        """The collected steps in the shape the format wants; layers with like rows share a table."""
        tables: list[dict[str, Any]] = []
        seen: dict[tuple[Visit, ...], int] = {}
        table_of: dict[str, int] = {}
        for layer, visits in self.visits.items():
            shape = tuple(visits)
            if shape not in seen:
                seen[shape] = len(tables)
                tables.append(expand(visits, extras.kinds))
            table_of[layer.name] = seen[shape]
        used = [layer for layer in self.visits if self.keys[layer].rows]
        return SegmentContent(
            first_step=first_step,
            steps=len(self.records),
            patterns=[
                region.tensor_bytes(f"{kind}/{layer.name}")
                for layer in used
                for kind, region in (
                    ("keys", self.keys[layer]),
                    ("error_signals", self.error_signals[layer]),
                )
            ],
            rows={layer.name: self.keys[layer].rows for layer in used},
            table_of=table_of,
            tables=tables,
            log=_log_arrays(self.records),
            fingerprints=extras.fingerprints,
            momentum_fingerprints=extras.momentum_fingerprints,
            strings=extras.strings,
            gradients=self.gradients,
            buffers=self.buffers,
            learned=extras.learned,
        )


def _log_arrays(records: list[StepRecord]) -> dict[str, np.ndarray[Any, Any]]:
    groups = max((len(r.hyperparameters) for r in records), default=0)
    width = max((len(h) for r in records for h in r.hyperparameters), default=0)
    settings = np.zeros((len(records), max(1, groups), max(1, width)))
    for row, record in zip(settings, records, strict=True):
        for index, values in enumerate(record.hyperparameters):
            row[index] = values
    names = ("applied", "kappa", "first", "fresh", "group", "projection")
    arrays = {name: np.stack([getattr(r, name) for r in records]) for name in names}
    return arrays | {"hyperparameters": settings}


class DiskSink:
    """Patterns to a memory on disk, by way of the ring and the writer thread."""

    def __init__(
        self,
        writer: MemoryWriter,
        gather: Callable[[], Extras],
        dtype_of: Callable[[Layer], torch.dtype],
        *,
        segment_bytes: int = SEGMENT_BYTES,
        commit_seconds: float = COMMIT_SECONDS,
    ) -> None:
        self.steps = 0
        self._writer = writer
        self._gather = gather
        self._dtype_of = dtype_of
        self._segment_bytes = segment_bytes
        self._commit_seconds = commit_seconds
        self._last_commit = time.monotonic()
        self._failure: BaseException | None = None
        self._free: queue.SimpleQueue[BufferSet] = queue.SimpleQueue()
        for _ in range(SETS - 1):
            self._free.put(BufferSet())
        self._current = BufferSet()
        self._jobs: queue.SimpleQueue[tuple[BufferSet, int, Extras] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._write, name="dualform-writer", daemon=True)
        self._thread.start()

    def append(self, layer: Layer, keys: Tensor, error_signals: Tensor, visit: Visit) -> None:
        """Copy the patterns of one backward pass through one use of a layer."""
        current = self._current
        if layer not in current.visits:
            current.visits[layer] = []
            if layer not in current.keys:
                dtype, rows = self._dtype_of(layer), keys.shape[0]
                current.keys[layer] = Region(layer.in_features, dtype, rows)
                current.error_signals[layer] = Region(layer.out_features, dtype, rows)
        region = current.keys[layer]
        if layer not in current.marks:
            current.marks[layer] = (region.rows, len(current.visits[layer]))
        region.append(keys)
        current.error_signals[layer].append(error_signals)
        current.visits[layer].append(visit)

    def rewind(self, layer: Layer) -> int:
        """Take back a layer's patterns of the step under way; returns how many there were."""
        current = self._current
        if layer not in current.marks:
            return 0
        rows, visits = current.marks.pop(layer)
        dropped = current.keys[layer].rows - rows
        current.keys[layer].rows = rows
        current.error_signals[layer].rows = rows
        del current.visits[layer][visits:]
        return dropped

    def patterns_of_step(self) -> list[Layer]:
        """The layers that have patterns in the step under way."""
        return list(self._current.marks)

    def end_step(
        self, record: StepRecord, gradients: dict[str, Tensor], buffers: dict[str, Tensor]
    ) -> None:
        """The step is complete: from here on its patterns are part of the memory."""
        self._raise_failure()
        current = self._current
        for store, values in ((current.gradients, gradients), (current.buffers, buffers)):
            for name, value in values.items():
                steps, kept = store.setdefault(name, ([], []))
                steps.append(self.steps)
                kept.append(value)
                current.event_bytes += value.numel() * value.element_size()
        current.records.append(record)
        current.marks = {}
        self.steps += 1
        self._writer.progress.set(self.steps)

    @property
    def is_due(self) -> bool:
        """Whether enough has been collected for a commit."""
        return self._current.bytes >= self._segment_bytes or (
            time.monotonic() - self._last_commit >= self._commit_seconds
        )

    def commit(self) -> None:
        """Hand the collected steps to the writer; waits if all buffers are still being written."""
        current = self._current
        for layer in list(current.marks):
            self.rewind(layer)
        if not current.records:
            return
        self._jobs.put((current, self.steps - len(current.records), self._gather()))
        self._current = self._take_free(current)
        self._last_commit = time.monotonic()

    def _take_free(self, like: BufferSet) -> BufferSet:
        while True:
            self._raise_failure()
            try:
                free = self._free.get(timeout=1.0)
                break
            except queue.Empty:
                continue
        for source, target in ((like.keys, free.keys), (like.error_signals, free.error_signals)):
            for layer, region in source.items():
                if layer not in target or target[layer].capacity < region.rows:
                    target[layer] = Region(region.width, region.dtype, region.capacity)
        return free

    def _write(self) -> None:
        while (job := self._jobs.get()) is not None:
            collected, first_step, extras = job
            if self._failure is None:
                try:
                    if extras.snapshot is not None:
                        step = first_step + len(collected.records)
                        self._writer.keep_snapshot(step, extras.snapshot)
                    self._writer.commit(collected.content(first_step, extras), extras.description)
                except BaseException as error:
                    self._failure = error
            collected.clear()
            self._free.put(collected)

    def _raise_failure(self) -> None:
        error = self._failure
        if error is None:
            return
        if isinstance(error, DualFormError):
            raise error
        where, kept = self._writer.path, self._writer.committed_steps
        raise RecordingError(
            f"writing to {where} failed: {error}. The {kept} steps committed before are safe and "
            "can be read; free some space or choose another disk, and record again"
        ) from error

    def close(self, *, closed: bool) -> None:
        """Commit what is complete, wait for the writer and seal the memory."""
        try:
            if self._failure is None:
                self.commit()
        finally:
            self._jobs.put(None)
            self._thread.join()
        self._raise_failure()
        self._writer.end(self._gather().description, closed=closed)


def bytes_per_step(visits: list[tuple[Layer, tuple[int, ...]]], itemsize: int = 4) -> int:
    """How many bytes of patterns a step with these visits adds to a memory."""
    return sum(prod(s) * (la.in_features + la.out_features) * itemsize for la, s in visits)
