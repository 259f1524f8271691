"""Following a training run without changing a bit of it: the context manager that users hold.

It begins, tags, flushes and ends, and connects torch's hooks with the files that do the work:
`passes.py` (what a backward pass brings) and `updates.py` (what an optimizer's step does).

Why it is hard: a run may end anywhere. By Ctrl-C in the middle of an update, by an exception under
way, in a forked process that inherited the recorder; by a loop that puts other weights into the
model after its last update. Whatever happens, every step that was complete is written.
"""

from __future__ import annotations

import logging
import os
import weakref
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
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
from dualform.recording.contents import Contents
from dualform.recording.findings import Findings
from dualform.recording.interrupts import Interrupts
from dualform.recording.kept import Keeper
from dualform.recording.line import Line
from dualform.recording.passes import Passes
from dualform.recording.recurring import Recurring
from dualform.recording.resuming import Resumption, phase, reopened
from dualform.recording.sink import Sink
from dualform.recording.states import States
from dualform.recording.tags import Context, Tag, Tags
from dualform.recording.updates import ANCHOR, Updates
from dualform.recording.watched import Watch, is_empty, listed
from dualform.recording.worker import Worker

if TYPE_CHECKING:
    from dualform.recording.entry import Options

logger = logging.getLogger("dualform")


class Recorder:
    """A recording under way; made by `record`, used as a context manager.

    Example:
        >>> with df.record(model, optimizer, "runs/digits") as recorder:   # doctest: +SKIP
        ...     recorder.tag(example=[3, 1], label=[0, 7])
        ...     recorder.steps
        0
    """

    def __init__(
        self, model: nn.Module, optimizers: list[Optimizer], path: Path, options: Options
    ) -> None:
        self._model, self._optimizers, self._path = model, optimizers, path
        self._options = options
        self._state = "new"
        self._findings = Findings(options.audit)
        self._interrupts = Interrupts()
        self._tags = Tags()
        self._tag: Tag | None = None
        self._calls, self._moves = 0, 0
        self._parts: _Parts

    # -- what users see -------------------------------------------------------------------------

    def __enter__(self) -> Recorder:
        if self._state != "new":
            raise RecordingError("this recorder was used before; call dualform.record again")
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

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._state != "recording":  # a forked process: there is nothing of ours here
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
        self._tag = self._tags.make(self._moves, columns)

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
        """How many updates have been recorded."""
        return 0 if self._state == "new" else self._parts.updates.step

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
            states = States(watch, self._optimizers)
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
                watch.by_name[name].why = why
            keeper = Keeper(watch, states, model, worker, self._findings)
            updates = Updates(
                watch, passes, keeper, self._findings, self._optimizers, options.every
            )
            updates.go_on(step)
            if resumed is not None:
                resumed.restore(self._tags, self._findings, updates, states, step)
                self._tag = self._tags.forgotten()
            capture = Capture(
                model,
                {layer: module for layer, module in found.items() if layer in watch.sites},
                on_use=passes.take,
                on_new_layer=lambda layer: watch.add(layer, keep.word(layer)),
                on_values=self._make_values,
                context=self._context,
                by_examples=lambda layer: watch.sites[layer].keep == "examples",
            )
            declined = {layer.weight for layer in found if layer not in watch.sites}
            capture.are_values |= declined - {layer.weight for layer in watch.sites}
            recurring = Recurring(None if resumed is None else resumed.stored_keys)
            contents = Contents(watch, self._tags.kinds, options.stored, recurring)
            sink = Sink(writer, watch.sites, contents, options.segment_bytes, step)
            self._parts = _Parts(watch, passes, updates, keeper, capture, writer, sink)
            updates.on_step = self._on_step
            for w in watch:
                watch.unknown[w.index] = not is_empty(w.tensor.grad)
            writer.begin(self._description(resumed, step))
            keeper.keep_all(step)
            states.take()
            states.remember(step)
            capture.start()
            self._parts.handles = [
                register_optimizer_step_pre_hook(self._before),
                register_optimizer_step_post_hook(self._after),
            ]
            undo.pop_all()

    def _make_values(self, parameter: str, reason: str) -> None:
        """Keep a parameter as values: it is used in a way that has no patterns."""
        watch = self._parts.watch
        w = watch.by_name[parameter]
        watch.make_values(w, reason)
        if w.sites:
            self._findings.warn(f"{parameter!r} {reason}; it is kept as values, without patterns")

    def _description(self, resumed: Resumption | None, step: int) -> dict[str, Any]:
        parts, options = self._parts, self._options
        stored = options.stored
        return {
            "every": options.every,
            "stored": str(stored or torch.float32).removeprefix("torch."),
            "environment": environment(),
            "parameters": [
                described(w.name, w.tensor) | parts.watch.coverage(w) for w in parts.watch
            ],
            "buffers": [described(*named) for named in self._model.named_buffers()],
            "phases": [phase(step, None)] if resumed is None else resumed.phases,
        }

    # -- torch's hooks --------------------------------------------------------------------------

    def _context(self) -> Context:
        """What is true of a forward call: its tag, whether that is stale, which call it is."""
        self._calls += 1
        tag = self._tag
        return Context(tag, tag is not None and tag.update != self._moves, self._calls)

    def _before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        updates = self._parts.updates
        self._parts.watch.members.follow()
        if self._state != "recording" or not updates.holds(optimizer):
            return None
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
            self._moves += 1  # of any optimizer: a step may have several, a tag holds until one
            updates.after(optimizer)
        finally:
            if not updates.is_open:
                self._interrupts.release()
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

    def _keep_state(self, *, keep: bool = False) -> None:
        updates = self._parts.updates
        self._parts.keeper.anchor(updates.step, updates.settings.settings, keep=keep)

    def _commit(self) -> None:
        parts = self._parts
        parts.passes.worker.wait()
        tags = {"columns": dict(self._tags.kinds), "strings": self._tags.new_strings()}
        news = self._findings.news() | parts.updates.news() | parts.watch.news() | tags
        parts.sink.commit(parts.keeper.take(), news)

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
            if found := parts.watch.converted():
                self._findings.remark(
                    f"{listed([w.name for w in found])}: became {found[0].became} after update "
                    f"{updates.step}; the memory ends with what it was"
                )
            is_edited = updates.is_open and updates.break_off()
            if updates.is_under_way:
                updates.close_step()
            if updates.find_edits(is_over=True) or is_edited:
                parts.keeper.keep_all(updates.step)
            else:
                self._keep_state(keep=True)
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


_recording: weakref.WeakSet[Recorder] = weakref.WeakSet()


def _abandon_all() -> None:
    for recorder in list(_recording):
        recorder._abandon()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_abandon_all)
