"""Where patterns go: a ring of buffers, a writer thread, segments on disk.

The training loop only copies rows into page-aligned buffers it owns. When a buffer set is full at
the end of a step, it goes to the writer thread (which builds columns, checksums and writes, mostly
without the GIL) and the next set takes its place. There are `SETS` of them and no more: if the disk
cannot keep up, training waits, and what is waiting to be written takes at most

    SETS × (segment_bytes + the bytes of the largest step)

of memory: patterns with their columns, logs, and gradients of parameters without patterns. (On top
come the columns of the one segment being written, its keys that did not recur, what of it is stored
in 16 bits (up to half as much again as one segment), one layer's buffer while it is moved to a
larger place, an index of the inputs seen (`recurring.py`), and, when weights are to be kept, a copy
of them.)

A pattern becomes part of the memory only at the end of its step; until then it can be taken back
(`rewind`), which is what happens to the patterns of a step that an optimizer skipped.

Why it is hard: Ctrl-C can strike between any two instructions of the training thread. So there is
one order of things that leaves no half states. A step counts once its record is in the list; a
set is handed over by the one operation that puts its successor behind it in the ring.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Collection
from typing import Protocol

import torch
from torch import Tensor

from dualform.errors import DualFormError, RecordingError
from dualform.layers import Layer
from dualform.memory.writing import MemoryWriter
from dualform.recording import forks
from dualform.recording.one_core import keep_to_one_core
from dualform.recording.regions import NarrowCopies
from dualform.recording.ring import BufferSet, Events, Fold
from dualform.recording.ring import Extras as Extras
from dualform.recording.ring import StepRecord as StepRecord
from dualform.recording.storage import Storage
from dualform.recording.tags import Visit

SETS = 3
SEGMENT_BYTES = 64 << 20
COMMIT_SECONDS = 30.0
"""A slow run commits at least this often (at the end of a step)."""

PROGRESS_SECONDS = 0.1
"""How often, at most, it is written down how far training has come. That is a call to the system,
which lets go of the interpreter's lock: with other threads about, it may be long in coming back."""

VISIT_BYTES = 512
STEP_BYTES = 1024
PARAMETER_BYTES = 128
"""About what one visit, one step's record and one parameter's part of it take as Python objects."""


class Sink(Protocol):
    """What the recorder needs of a place for patterns."""

    def append(
        self, layer: Layer, keys: Tensor, error_signals: Tensor, visit: Visit
    ) -> tuple[Tensor, Tensor]: ...

    def rewind(self, layer: Layer) -> int: ...

    def take_back(self, layer: Layer, parameters: Collection[int]) -> int: ...

    def patterns_of_step(self) -> list[Layer]: ...

    def layers(self) -> list[Layer]: ...

    def end_step(
        self,
        record: StepRecord,
        gradients: dict[str, Tensor],
        buffers: dict[str, Tensor],
        states: dict[str, Tensor],
    ) -> None: ...

    @property
    def collected(self) -> int: ...

    @property
    def is_due(self) -> bool: ...

    def commit(self) -> None: ...

    def wait(self) -> None: ...

    def close(self) -> None: ...


class DiskSink(Sink):
    """Patterns to a memory on disk, by way of the ring and the writer thread.

    The last set of the ring is being filled; those before it are the writer's, oldest first.
    """

    def __init__(
        self,
        writer: MemoryWriter,
        gather: Callable[[int], Extras],
        dtype_of: Callable[[Layer], torch.dtype],
        storage: Storage,
        *,
        owes: Callable[[], bool] = lambda: False,
        segment_bytes: int = SEGMENT_BYTES,
        commit_seconds: float | None = None,
        first_step: int = 0,
        fold: Fold = lambda layer, rows: None,
    ) -> None:
        self._writer = writer
        self._gather = gather
        self._dtype_of = dtype_of
        self._storage = storage
        self._fold, self._copies = fold, NarrowCopies()
        self._owes = owes
        self._segment_bytes = segment_bytes
        self._commit_seconds = COMMIT_SECONDS if commit_seconds is None else commit_seconds
        self._last_commit = time.monotonic()
        self._last_told = 0.0
        self._largest_step = 0
        self._step_start = 0
        self._collected = 0
        self._failure: BaseException | None = None
        self._free: queue.SimpleQueue[BufferSet] = queue.SimpleQueue()
        for _ in range(SETS - 1):
            self._free.put(BufferSet())
        self._ring = deque([BufferSet(first_step)])
        self._handed_over = threading.Semaphore(0)
        self._ending = False
        self._forks = forks.count
        self._thread = threading.Thread(target=self._write, name="dualform-writer", daemon=True)
        self._thread.start()

    @property
    def steps(self) -> int:
        """How many steps are complete."""
        return self._ring[-1].end

    def append(
        self, layer: Layer, keys: Tensor, error_signals: Tensor, visit: Visit
    ) -> tuple[Tensor, Tensor]:
        """Copy the patterns of one backward pass through one use of a layer.

        Returns the copies, good for looking at them until the step after this one is over. Of a
        layer whose keys alone are kept, the error signals come back as they were given.
        """
        current = self._ring[-1]
        for_keys = current.keys.get(layer)
        if for_keys is None:
            dtype, rows = self._dtype_of(layer), keys.shape[0]
            for_keys, for_signals = self._storage.places(layer, dtype, rows)
            if for_signals is not None:
                current.error_signals[layer] = for_signals
            current.keys[layer] = for_keys  # last: Ctrl-C in between leaves nothing half made
        visits = current.visits.get(layer)
        if visits is None:
            visits = current.visits[layer] = []
        if layer not in current.marks:
            current.marks[layer] = (for_keys.rows, len(visits))
        kept_keys = current.append(for_keys, keys)
        for_signals = current.error_signals.get(layer)
        if for_signals is not None:
            error_signals = current.append(for_signals, error_signals)
        visits.append(visit)
        columns = 3 if visit.tag is None else 3 + len(visit.tag.given)
        current.add_bytes(VISIT_BYTES + 8 * columns * kept_keys.shape[0])
        self._keep_within_bounds(current)
        return kept_keys, error_signals

    def _keep_within_bounds(self, current: BufferSet) -> None:
        """A layer may have grown where another has shrunk: give back what is not in use."""
        size = current.bytes - self._step_start
        if size > self._largest_step:
            self._largest_step = size
        if current.touched > self._segment_bytes + self._largest_step:
            current.trim()

    def rewind(self, layer: Layer) -> int:
        """Take back a layer's patterns of the step under way; returns how many there were."""
        return self._ring[-1].rewind(layer)

    def take_back(self, layer: Layer, parameters: Collection[int]) -> int:
        """Take back its patterns since one of the parameters last moved, if not committed."""
        return self._ring[-1].take_back(layer, parameters)

    def patterns_of_step(self) -> list[Layer]:
        """The layers that have patterns in the step under way."""
        return list(self._ring[-1].marks)

    def layers(self) -> list[Layer]:
        """The layers that have patterns in the steps not committed yet."""
        return list(self._ring[-1].visits)

    def end_step(
        self,
        record: StepRecord,
        gradients: dict[str, Tensor],
        buffers: dict[str, Tensor],
        states: dict[str, Tensor],
    ) -> None:
        """The step is complete: from here on its patterns are part of the memory."""
        self._raise_failure()
        current = self._ring[-1]
        added = STEP_BYTES + PARAMETER_BYTES * len(record.applied)
        for store, values in (
            (current.gradients, gradients),
            (current.buffers, buffers),
            (current.states, states),
        ):
            if values:
                added += keep(store, values, current.end)
        current.add_bytes(added)
        current.marks = {}
        current.records.append(record)
        self._keep_within_bounds(current)
        self._collected += current.bytes - self._step_start
        self._step_start = current.bytes
        if self._collected == self._step_start and len(current.records) == 1:
            # the first one: now it is known about how many steps will fill a segment
            repeats = self._segment_bytes // current.bytes + 1
            for region in (*current.keys.values(), *current.error_signals.values()):
                region.reserve(region.rows * repeats)
        now = time.monotonic()
        if now - self._last_told >= PROGRESS_SECONDS:
            self._tell(now)

    def _tell(self, now: float) -> None:
        """Write down how far training has come: what a killed run says of its end."""
        self._last_told = now
        self._writer.progress.set(self.steps)

    @property
    def collected(self) -> int:
        """How many bytes of complete steps have come in so far."""
        return self._collected

    @property
    def is_due(self) -> bool:
        """Whether enough has been collected for a commit."""
        return self._ring[-1].bytes >= self._segment_bytes or (
            time.monotonic() - self._last_commit >= self._commit_seconds
        )

    def commit(self) -> None:
        """Hand the collected steps to the writer; waits if all buffers are still being written.

        A forked process has no writer: what is trained there is not the run that is recorded.
        """
        current = self._ring[-1]
        if forks.count != self._forks:
            current.rewind_all()
            current.clear()
            self._step_start, self._last_commit = 0, time.monotonic()
            return
        if not self._complete(current):
            return
        following = self._take_free()
        try:
            following.first_step = current.end
            following.make_room(current)
        except BaseException:
            self._free.put(following)
            raise
        self._step_start = 0
        self._last_commit = time.monotonic()
        self._tell(self._last_commit)
        self._ring.append(following)
        self._handed_over.release()

    def wait(self) -> None:
        """Wait until everything handed over is on disk."""
        if forks.count != self._forks:
            raise RecordingError(
                "flush() was called in a process forked from the one that records; what is trained "
                "here is not recorded: only the process that began the recording writes to it"
            )
        while len(self._ring) > 1:
            self._raise_failure()
            time.sleep(0.002)
        self._raise_failure()

    def _complete(self, current: BufferSet) -> bool:
        """Put to a set what a commit carries; False if there is nothing to commit."""
        current.rewind_all()
        if not current.records and not self._owes():
            return False
        earlier = current.extras
        if earlier is None or current.gathered != len(current.records):
            extras = self._gather(current.stored_bytes)
            if earlier is not None:  # a commit was interrupted, and training went on
                extras = extras._replace(strings=_joined(earlier.strings, extras.strings))
            current.extras, current.gathered = extras, len(current.records)
        return True

    def _take_free(self) -> BufferSet:
        while True:
            self._raise_failure()
            try:
                return self._free.get(timeout=0.2)
            except queue.Empty:
                continue

    # -- the writer thread ----------------------------------------------------------------------

    def _write(self) -> None:
        keep_to_one_core()
        while True:
            self._handed_over.acquire()
            while len(self._ring) > 1 or (self._ending and self._ring[0].extras is not None):
                self._write_set(self._ring[0])
                if len(self._ring) > 1:
                    self._free.put(self._ring.popleft())
            if self._ending:
                return

    def _write_set(self, collected: BufferSet) -> None:
        if self._failure is None:
            try:
                extras = collected.extras
                assert extras is not None
                content = collected.content(extras, self._fold, self._copies)
                self._writer.commit(content, extras.description)
                self._copies.next_segment()
                if extras.snapshot is not None:
                    self._writer.keep_snapshot(collected.end, extras.snapshot)
            except BaseException as error:
                self._failure = error
        collected.clear()

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

    def close(self) -> None:
        """Commit what is complete, wait for the writer and seal the memory.

        Whatever happened before or happens here, the writer thread ends and what was handed over to
        it is written if that is possible at all. May be called again: then there is nothing to do.
        """
        if self._ending or forks.count != self._forks:  # a forked child has nothing to write
            return
        self._tell(time.monotonic())
        extras, trouble = None, None
        try:
            extras = self._last_extras()
        except BaseException as error:
            trouble = error
            self._ring[-1].extras = None  # of a commit that was interrupted: they may not fit
        finally:
            self._ending = True
            self._handed_over.release()
            interrupt = self._join()
        if self._failure is not None or trouble is not None:
            reason = f"writing failed: {self._failure}"
            if self._failure is None:
                reason = f"closing the memory failed: {type(trouble).__name__}: {trouble}"
            with contextlib.suppress(OSError):
                self._writer.give_up(reason)
        self._raise_failure()
        if trouble is not None:
            raise trouble
        assert extras is not None
        self._writer.end(extras.description, closed=True)
        if interrupt is not None:
            raise interrupt

    def _last_extras(self) -> Extras | None:
        last = self._ring[-1]
        last.gathered = -1  # remarks may have come since a commit that was interrupted
        if self._failure is not None:
            return None
        return last.extras if self._complete(last) else self._gather(0)

    def _join(self) -> KeyboardInterrupt | None:
        """Until the writer is done: what is left is little, and a second Ctrl-C would lose it."""
        interrupt = None
        while self._thread.is_alive():
            try:
                self._thread.join()
            except KeyboardInterrupt as error:
                interrupt = error
        return interrupt


def keep(store: Events, values: dict[str, Tensor], step: int) -> int:
    """Put values of a step to those of the steps before it; how many bytes they take."""
    added = 0
    for name, value in values.items():
        steps, kept = store.setdefault(name, ([], []))
        steps.append(step)
        kept.append(value)
        added += value.numel() * value.element_size()
    return added


def _joined(first: dict[str, list[str]], then: dict[str, list[str]]) -> dict[str, list[str]]:
    return {name: [*first.get(name, []), *then.get(name, [])] for name in first | then}
