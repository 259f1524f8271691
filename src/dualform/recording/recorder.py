"""Following a training run without changing a bit of it: the context manager that users hold.

It begins, tags, flushes and ends, and connects torch's hooks with the files that do the work:
`passes.py` (what a backward pass brings) and `updates.py` (what an optimizer's step does).

Why it is hard: a run may end anywhere. By Ctrl-C in the middle of an update, by an exception under
way, in a forked process that inherited the recorder; by a loop that puts other weights into the
model after its last update. Whatever happens, every step that was complete is written.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, distributed, nn
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from dualform.errors import RecordingError
from dualform.layers import (
    Capture,
    Keep,
    find_layers,
    possible_names,
    reasons_for_values,
)
from dualform.memory.writing import MemoryWriter, environment
from dualform.recording.findings import Findings
from dualform.recording.interrupts import Interrupts
from dualform.recording.kept import Keeper
from dualform.recording.optimizers import closure_of
from dualform.recording.passes import Passes
from dualform.recording.resuming import phase, reopened
from dualform.recording.sink import Sink
from dualform.recording.states import States
from dualform.recording.tags import Tags
from dualform.recording.trial import ByHand
from dualform.recording.updates import ANCHOR, Updates
from dualform.recording.watched import Flags, Line, Watch, is_empty
from dualform.recording.worker import Worker

if TYPE_CHECKING:
    from dualform.recording.entry import Options

logger = logging.getLogger("dualform")


class Recorder:
    """A recording under way; made by `record`, used in a `with` block or by `start` and `close`.

    Example:
        >>> with dualform.record(model, "runs/digits") as recorder:   # doctest: +SKIP
        ...     recorder.tag(example=[3, 1], label=[0, 7])
        ...     recorder.steps
        0
    """

    def __init__(self, model: nn.Module, path: Path, options: Options) -> None:
        self._model, self._path = model, path
        self._options = options
        self._state = "new"
        self._is_in_with = False
        self._findings = Findings(options.audit)
        self._interrupts = Interrupts()
        self._tags = Tags(options.tags)
        self._parts: _Parts

    def __deepcopy__(self, memo: Any) -> Recorder:
        """A copy of a model that keeps its recorder keeps the same one."""
        return self

    # -- what users see -------------------------------------------------------------------------

    def start(self) -> Recorder:
        """Begin to record, where a `with` block does not fit: in a notebook, in a callback.

        May be called again. What is still recorded when Python ends is committed.

        Example:
            >>> recorder = dualform.record(model, "runs/digits").start()   # doctest: +SKIP
        """
        if self._state == "recording":
            return self
        if self._state != "new":
            raise RecordingError(
                "this recorder was used before; call dualform.record again, with resume=True to go "
                "on with its memory, or overwrite=True to begin anew"
            )
        for other in list(_recording):  # a notebook's cell that is run again has lost it
            if other._state == "recording" and other._path == self._path and not other._is_in_with:
                other.close()
        refuse_ranks()
        self._interrupts.install()
        self._interrupts.hold()
        try:
            self._begin()
            self._state = "recording"
            _recording.add(self)
            self._interrupts.release()
        except BaseException as error:
            if self._state == "recording":  # Ctrl-C came just now
                self.__exit__(type(error), error, error.__traceback__)
            self._interrupts.remove()
            raise
        return self

    def close(self) -> None:
        """End the recording and commit it. May be called again, and while an error is handled,
        which it never hides.

        Example:
            >>> recorder.close()   # doctest: +SKIP
        """
        self.__exit__(*sys.exc_info())

    def __enter__(self) -> Recorder:
        self._is_in_with = True
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._state != "recording":  # or a forked process: there is nothing of ours here
            return
        self._interrupts.hold()
        self._state = "ended"
        parts = self._parts
        parts.remove_hooks()
        try:
            parts.sink.close(lambda: self._end(kind))
            if kind is None:
                self._findings.raise_trouble()
        except BaseException:
            if kind is None:
                raise
            logger.exception("dualform: closing the memory at %s failed", self._path)
        finally:
            with ExitStack() as ending:  # from below: all of it, even if Ctrl-C comes once more
                ending.callback(self._interrupts.release)
                ending.callback(self._interrupts.remove)
                ending.callback(parts.writer.release)
                ending.callback(parts.passes.worker.close)

    def tag(self, **columns: Any) -> None:
        """Name the patterns of the batch that is about to be fed: ids, labels, tasks, anything.

        Every column is [B], [B, L] or one value; numbers, booleans or strings. A tag holds until
        the next call or the next update, whichever comes first.

        Example:
            >>> recorder.tag(example=[3, 1, 4], label=[0, 7, 7], task="digits")   # doctest: +SKIP
        """
        self._must_be_recording("tag")
        self._tags.give(columns)

    @contextmanager
    def update(self) -> Iterator[None]:
        """Say that the loop moves the parameters itself, without an optimizer, in this block.

        By which rule is not known: what it moves is kept as values, so that attention works and
        contributions do not.

        Example:
            >>> with recorder.update():                             # doctest: +SKIP
            ...     for p in model.parameters():
            ...         p.data.add_(p.grad, alpha=-0.1)
        """
        self._must_be_recording("update")
        parts = self._parts
        hand = parts.by_hand = parts.by_hand or ByHand(self._model.parameters())
        self._before(hand, (), {})
        try:
            yield
            if not parts.updates.is_moving and parts.keeper.states.changed().any():
                raise RecordingError(
                    "`with recorder.update():` moved weights, but no parameter had a gradient when "
                    "the block began. Call backward() before the block; what moves weights without "
                    "gradients cannot be recorded"
                )
        except BaseException:
            parts.updates.break_off()
            self._interrupts.release()
            raise
        self._after(hand, (), {})

    def flush(self) -> None:
        """Commit every complete step and wait until it is on disk for good.

        Call this where you save a checkpoint to resume from. Patterns that no update has used yet
        stay in memory until one does.

        Example:
            >>> recorder.flush()   # doctest: +SKIP
        """
        self._must_be_recording("flush")
        parts = self._parts
        self._interrupts.hold()
        try:
            if parts.updates.is_under_way:  # one of several optimizers has moved: that is a step
                parts.updates.close_step()
            if not parts.keeper.states.changed().any():  # others may stand in for an evaluation
                self._keep_state()
            self._commit()
        finally:
            self._interrupts.release()
        parts.sink.wait()
        self._findings.raise_trouble()

    @property
    def steps(self) -> int:
        """How many updates have been recorded, one that is under way included."""
        if self._state == "new":
            return 0
        return self._parts.updates.step + self._parts.updates.is_under_way

    @property
    def remarks(self) -> tuple[str, ...]:
        """What was dropped or could not be explained so far, in sentences."""
        return tuple(self._findings.remarks)

    # -- the beginning --------------------------------------------------------------------------

    def _begin(self) -> None:
        options, model = self._options, self._model
        keep = Keep(options.keep)
        found = find_layers(model)
        watch = Watch(model)
        with ExitStack() as undo:
            resumed = reopened(self._path, undo) if options.resume else None
            states = States(watch)
            for layer in found:
                watch.add(layer, keep.word(layer))
            keep.check(found, possible_names(model))
            if resumed is None:
                writer = MemoryWriter(self._path, overwrite=options.overwrite)
                undo.callback(writer.release)
                step = 0
            else:
                resumed.compare(model, watch, options)
                writer, step = resumed.writer, resumed.find(watch, states, options)
            worker = Worker("dualform-worker")
            undo.callback(worker.close)
            passes = Passes(watch, worker)
            for name, why in reasons_for_values(model, found).items():
                watch.make_values(watch.named(name), why)
            keeper = Keeper(watch, states, model, worker, self._findings)
            updates = Updates(watch, passes, keeper, self._findings, options.every)
            updates.begin(step)
            if resumed is not None:
                resumed.restore(self._tags, self._findings, updates, keeper)
            capture = Capture(
                model,
                {layer: module for layer, module in found.items() if layer in watch.sites},
                on_use=passes.take,
                on_new_layer=lambda layer: watch.add(layer, keep.word(layer)),
                on_values=lambda name, why: watch.make_values(watch.named(name), why),
                context=self._tags.context,
                by_examples=lambda layer: watch.sites[layer].keep == "examples",
            )
            declined = {layer.weight for layer in found if layer not in watch.sites}
            capture.are_values |= declined - {layer.weight for layer in watch.sites}
            known = None if resumed is None else resumed.stored_keys
            stored, size = options.stored, options.segment_bytes
            sink = Sink(writer, watch, self._tags.kinds, stored, known, size, step)
            self._parts = _Parts(watch, passes, updates, keeper, capture, writer, sink)
            updates.on_step = self._on_step
            for w in watch:
                watch.unknown[w.index] = not is_empty(w.tensor.grad)
            description = {
                "every": options.every,
                "stored": str(options.stored or torch.float32).removeprefix("torch."),
                "environment": environment(),
                "parameters": [described(w.name, w.tensor) | watch.coverage(w) for w in watch],
                "buffers": [described(*named) for named in model.named_buffers()],
                "phases": [phase(step, None)] if resumed is None else resumed.phases,
            }
            writer.begin(description)
            keeper.begin(step, keeper.freeze(watch) if resumed is None or not step else [])
            keeper.keep_buffers(step)
            states.take()
            states.remember(step)
            capture.start()
            self._parts.handles = [
                register_optimizer_step_pre_hook(self._before),
                register_optimizer_step_post_hook(self._after),
                *self._tags.follow(model),
            ]
            undo.pop_all()

    # -- torch's hooks --------------------------------------------------------------------------

    def _before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        updates = self._parts.updates
        self._parts.watch.members.follow()
        if self._state != "recording" or not updates.holds(optimizer):
            return None
        if updates.is_running(self._parts.by_hand):
            raise RecordingError(
                "an optimizer took a step, or another block began, inside `with recorder.update():`"
                "; expected only what the loop moves by hand there. An optimizer's step needs no "
                "block: call it outside"
            )
        if not self._tags.moves:
            refuse_ranks()
            if closure_of(args, kwargs) is None:  # else it is yet to call the model
                self._tags.must_be_asked()
        self._interrupts.hold()  # until the update is written down, in _after
        try:
            return updates.before(optimizer, args, kwargs)
        except BaseException:
            self._interrupts.release()
            raise

    def _after(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        updates = self._parts.updates
        if self._state != "recording" or not updates.holds(optimizer):
            return
        try:
            self._tags.moved()
            updates.after(optimizer)
            self._parts.writer.progress.set(self.steps)
        finally:
            if not updates.is_open:
                self._interrupts.release()
        self._tags.must_be_asked()
        self._findings.raise_trouble()

    def _on_step(self, line: Line) -> None:
        """A step is over: it counts, and may be the one to commit."""
        parts = self._parts
        parts.sink.end_step(line)
        parts.capture.next_step()
        parts.keeper.recorded = int(parts.passes.bytes * parts.sink.stored_share)
        step = parts.updates.step
        if parts.keeper.due or step % ANCHOR == 0:
            self._keep_state()
        if parts.sink.is_due(parts.passes.bytes) and self._state == "recording":
            self._commit()

    def _keep_state(self, *, keep: bool = False, but: Flags | None = None) -> None:
        updates = self._parts.updates
        self._parts.keeper.anchor(updates.step, updates.settings.settings, keep=keep, but=but)

    def _commit(self) -> None:
        parts = self._parts
        parts.passes.worker.wait()
        tellers = self._findings, parts.updates, parts.watch, self._tags
        news = {what: fresh for teller in tellers for what, fresh in teller.news().items()}
        kept, parts.keeper.kept = parts.keeper.kept, []
        parts.sink.commit(kept, news)

    # -- the end --------------------------------------------------------------------------------

    def _end(self, kind: type[BaseException] | None) -> None:
        """Write what is complete, and what the model is now."""
        parts = self._parts
        updates = parts.updates
        if kind is not None:
            self._findings.remark(f"the training loop was ended by {kind.__name__}")
        try:
            parts.passes.finish()
            parts.watch.members.follow()
            if said := parts.watch.converted():
                self._findings.remark(f"{said}; the memory ends with what it was")
            changed = updates.end()
            if kind is None and not updates.step:
                say = self._findings.remark if self._options.resume else self._findings.warn
                say(
                    "nothing was recorded: no optimizer moved a parameter of this model. Step the "
                    "optimizer of this very model during the recording, and mark updates made by "
                    "hand by `with recorder.update():`"
                )
            self._keep_state(keep=True, but=changed)
        finally:
            self._commit()

    def _must_be_recording(self, verb: str) -> None:
        if self._state == "forked":
            raise RecordingError(
                f"{verb}() was called in a process forked from the one that records; what is "
                "trained here is not recorded: only the process that began the recording writes"
            )
        if self._state != "recording":
            raise RecordingError(
                f"recorder.{verb}(...) was called {'before' if self._state == 'new' else 'after'} "
                "the recording; call it inside `with dualform.record(...) as recorder:`"
            )

    def _abandon(self) -> None:
        """In a forked process: forget the recording. It has no threads here, and no lock."""
        self._state = "forked"
        self._parts.remove_hooks()
        self._interrupts.remove()


@dataclass
class _Parts:
    """What works together while a recording is under way."""

    watch: Watch
    passes: Passes
    updates: Updates
    keeper: Keeper
    capture: Capture
    writer: MemoryWriter
    sink: Sink
    by_hand: ByHand | None = None
    handles: list[Any] = field(default_factory=list)

    def remove_hooks(self) -> None:
        """Leave nothing behind in torch."""
        self.capture.remove()
        for handle in self.handles:
            handle.remove()
        self.handles = []


def described(name: str, tensor: Tensor) -> dict[str, Any]:
    """What the manifest says of a parameter or a buffer."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    return {"name": name, "shape": list(tensor.shape), "dtype": dtype}


def refuse_ranks() -> None:
    """Refuse to record one rank of several."""
    is_distributed = distributed.is_available() and distributed.is_initialized()
    if is_distributed and (ranks := distributed.get_world_size()) > 1:
        raise RecordingError(
            f"torch.distributed trains this model on {ranks} ranks, whose gradients are averaged: "
            "one rank's patterns do not explain them, so this is not supported yet. Train on one "
            "rank, with batches accumulated, to record"
        )


_recording: weakref.WeakSet[Recorder] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """Commit every recording that was not closed: nothing is lost when Python ends."""
    for recorder in list(_recording):
        with suppress(Exception):
            recorder.close()


def _abandon_all() -> None:
    for recorder in list(_recording):
        recorder._abandon()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_abandon_all)
