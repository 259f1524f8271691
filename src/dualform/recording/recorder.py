"""Following a training run, step by step, without changing a bit of it.

A *step* collects everything between two updates: forward and backward passes, however many, and the
optimizer's own step (or several optimizers' steps in a row). The recorder hears of patterns from
`capture.py`, reads every gradient just before the optimizer uses it, lets `audit.py` compare the
two, and closes the step when the optimizer is done. Only then do its patterns count.

Why it is hard: gradients may be accumulated over micro-batches, carried over steps of another
optimizer, dropped by a loss scaler, reset by hand, clipped, or missing; each parameter may fare
differently. The recorder never asks what the loop meant. It looks at `.grad`: what is in it now,
since which step, and by which factor.
"""

from __future__ import annotations

import logging
import threading
import warnings
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from dualform.errors import AuditError, RecordingError
from dualform.layers import Layer, NamePatterns, chosen_names, find_layers, is_chosen
from dualform.layers.naming import possible_names
from dualform.learning_rules import unknown_rule
from dualform.memory.writing import MemoryWriter
from dualform.recording.buffers import BufferWatch
from dualform.recording.capture import Capture, running_pass
from dualform.recording.clerk import Clerk
from dualform.recording.closures import read_before_moving
from dualform.recording.commits import Commits
from dualform.recording.description import describe
from dualform.recording.findings import Findings
from dualform.recording.fingerprints import Fingerprints
from dualform.recording.graph import GraphCapture
from dualform.recording.intake import Intake
from dualform.recording.interrupts import Interrupts
from dualform.recording.opaque import refuse_opaque
from dualform.recording.optimizer_state import OptimizerStates
from dualform.recording.parameters import Parameters, Watched, is_reset
from dualform.recording.recurring import Recurring
from dualform.recording.resuming import Resumption, reopen, started
from dualform.recording.sink import SETS, DiskSink, Sink
from dualform.recording.steps import Steps
from dualform.recording.storage import Storage
from dualform.recording.tags import Context, Tag, Tags
from dualform.recording.unused import Unused

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
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        path: Path,
        *,
        layers: NamePatterns,
        audit: str,
        every: int,
        overwrite: bool,
        resume: bool | str,
        step_budget: int,
        state_share: float,
        snapshot_every: int,
        segment_bytes: int,
        storage: Storage,
    ) -> None:
        self._model, self._optimizers, self._path = model, list(optimizers), path
        self._chosen, self._strict, self._every = layers, audit == "raise", every
        self._findings = Findings(strict=self._strict)
        self._overwrite, self._resume = overwrite, resume
        self._phases: list[dict[str, Any]] = []
        self._snapshot_every, self._segment_bytes = snapshot_every, segment_bytes
        self._storage, self._step_budget, self._state_share = storage, step_budget, state_share
        self._lock, self._interrupts, self._clerk = threading.RLock(), Interrupts(), Clerk()
        self._tags = Tags()
        self._tag: Tag | None = None
        self._updates = 0  # of any optimizer: no tag outlives the next one
        self._state = "new"
        self._first_use: dict[Layer, int] = {}
        self._calls = 0  # of any layer, in the step under way
        self._changed: dict[str, Tensor] = {}
        self._flush_due = False

    # -- what users see -------------------------------------------------------------------------

    def __enter__(self) -> Recorder:
        if self._state != "new":
            raise RecordingError("this recorder was used before; call dualform.record again")
        self._interrupts.install()
        self._interrupts.hold()
        try:
            self._begin()
            self._state = "recording"
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
        self._interrupts.hold()
        self._remove_hooks()
        self._state, self._commits.ended = "ended", True
        try:
            try:
                with self._lock:
                    self._clerk.wait(quietly=kind is not None)
                    self._steps.apply_interrupted()
                    if self._steps.stepped:
                        self._changed |= self._buffers.changes()
                        self._close_step()
                    self._unused.drop_at_the_end()
            finally:
                if kind is not None:
                    self._findings.remark(f"the training loop was ended by {kind.__name__}")
                if self._buffers.changes():
                    self._findings.remark(
                        "buffers changed after the last update (forward passes in training mode); "
                        "the memory holds those of the last update"
                    )
                self._sink.close()
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
                ending.callback(self._writer.release)
                ending.callback(self._steps.accountant.close)
                ending.callback(self._clerk.close)

    def tag(self, **columns: Any) -> None:
        """Name the patterns of the batch that is about to be fed: ids, labels, tasks, anything.

        Every column is [B], [B, L] or one value; numbers, booleans or strings. A tag holds until
        the next call or the next update, whichever comes first.

        Example:
            >>> recorder.tag(example=[3, 1, 4], label=[0, 7, 7], task="digits")   # doctest: +SKIP
        """
        self._must_be_recording("tag")
        with self._lock:
            self._tag = self._tags.make(self._updates, columns)

    def flush(self) -> None:
        """Commit every complete step and wait until it is on disk for good.

        What is accumulated is kept with it: call this where you save a checkpoint to resume from.
        Between a backward pass and its update nothing can be cut off: the commit comes after it.

        Example:
            >>> recorder.flush()   # doctest: +SKIP
        """
        self._must_be_recording("flush")
        with self._interrupts.held(), self._lock:
            self._clerk.wait()
            if self._steps.stepped:  # one of several optimizers has moved: that is a step
                self._changed |= self._buffers.changes()
                self._close_step()
            self._flush_due = self._awaits_update()
            if not self._flush_due:
                self._commit_all()
        self._sink.wait()
        self._findings.raise_trouble()

    @property
    def steps(self) -> int:
        """How many updates have been recorded."""
        return self._steps.step if self._state != "new" else 0

    @property
    def exact(self) -> bool:
        """Whether everything so far is explained."""
        return self._findings.exact

    @property
    def remarks(self) -> tuple[str, ...]:
        """What was dropped or could not be explained so far, in sentences."""
        return self._findings.remarks

    @property
    def buffer_bytes(self) -> int:
        """The most the recorder's buffers take, besides three times the largest single step."""
        return SETS * self._segment_bytes

    # -- the beginning and the end --------------------------------------------------------------

    def _begin(self) -> None:
        unknown = unknown_rule(self._optimizers)
        if unknown is not None:
            if self._strict:
                raise AuditError(unknown[1])
            self._findings.not_exact(f"the learning rule of {unknown[0]} is not known")
        found, others = find_layers(self._model), possible_names(self._model)
        names = (layer.name for layer in found)
        chosen = chosen_names(names, self._chosen, "layers", others, none=True)
        self._layers = {la: module for la, module in found.items() if la.name in chosen}
        refuse_opaque(self._model, self._chosen)
        self._storage.check(self._layers, (n for n in others if is_chosen(n, self._chosen)))
        with ExitStack() as undo:
            resumed = reopen(self._path, undo) if self._resume else None
            for layer in [] if resumed is None else resumed.without_module(found):
                if is_chosen(layer.name, self._chosen):
                    self._layers[layer] = self._model
            self._prepare(unknown is None, found, resumed)
            if resumed is None:
                self._writer = MemoryWriter(self._path, overwrite=self._overwrite)
                undo.callback(self._writer.release)
                self._phases = started(self._parameters)
                initial: dict[str, Any] = dict(self._parameters.initial())
                initial |= {f"buffers/{name}": b for name, b in self._buffers.values.items()}
                self._writer.begin(initial, self._description())
            else:
                self._go_on(resumed)
            known = None if resumed is None else resumed.stored_keys
            recurring = Recurring(lambda layer: self._capture.is_given(layer), known)
            self._sink: Sink = DiskSink(
                self._writer,
                self._commits.gather,
                lambda layer: self._parameters.by_name[layer.weight].dtype,
                self._storage,
                owes=lambda: self._commits.owes_sums,
                segment_bytes=self._segment_bytes,
                first_step=self._steps.step,
                fold=recurring.fold,
            )
            undo.pop_all()
        if unknown is None and any(w.rule is not None for w in self._parameters):
            self._steps.states = OptimizerStates(self._state_share, lambda: self._sink.collected)
        self._intake = Intake(
            self._parameters, self._steps, self._sink, self._findings, self._clerk
        )
        self._unused = Unused(
            self._parameters, self._steps, self._sink, self._findings, self._clerk, self._every
        )
        self._capture = Capture(
            self._layers, self._context, self._on_patterns, self._storage.keeps_error_signals
        )
        self._graph = GraphCapture(
            self._model, self._layers, self._parameters, self._capture, self._sink, self._chosen
        )
        self._handles = [o.register_step_pre_hook(self._before_step) for o in self._optimizers]
        self._handles += [o.register_step_post_hook(self._after_step) for o in self._optimizers]

    def _prepare(
        self, known_rules: bool, found: Iterable[Layer], resumed: Resumption | None
    ) -> None:
        """Look at the model and the optimizers; nothing is written."""
        if resumed is not None:
            resumed.compare(self._model, self._layers, every=self._every, strict=self._strict)
        directions = None if resumed is None else resumed.directions
        self._parameters = Parameters(self._model, self._layers, self._optimizers, directions)
        self._parameters.resolve(self._storage.keeps_error_signals)
        self._parameters.keep_to_steps(la for la in found if la not in self._layers)
        self._parameters.refuse_sharing(self._optimizers)
        if known_rules and self._every > 1:
            self._parameters.refuse_gaps()
        self._buffers = BufferWatch(self._model)
        self._steps = Steps(
            self._parameters,
            self._optimizers,
            self._path,
            step_budget=self._step_budget,
            every=self._every,
            known_rules=known_rules,
            without_patterns=self._without_patterns,
            findings=self._findings,
            clerk=self._clerk,
        )
        self._commits = Commits(
            self._steps,
            self._parameters,
            Fingerprints(self._parameters, self._optimizers, self._clerk, self._steps.accountant),
            self._tags,
            self._description,
            snapshot_every=self._snapshot_every,
            segment_bytes=self._segment_bytes,
        )

    def _go_on(self, resumed: Resumption) -> None:
        """A memory that is there: find the step, restore what was known then, cut it back."""
        self._writer = resumed.writer
        self._steps.step = resumed.find(self._parameters, even_the_first=self._resume == "rewind")
        self._commits.go_on()
        resumed.restore(
            self._parameters,
            self._layers,
            self._steps.accounts,
            self._tags,
            self._buffers,
            self._findings,
        )
        self._tag = self._tags.forgotten()
        self._first_use = {layer: i for i, layer in enumerate(resumed.used(self._layers))}
        self._phases = resumed.phases
        resumed.rewind(self._description())

    def _remove_hooks(self) -> None:
        self._graph.remove()
        self._capture.remove()
        for handle in self._handles:
            handle.remove()

    def _must_be_recording(self, verb: str) -> None:
        if self._state != "recording":
            raise RecordingError(
                f"recorder.{verb}(...) was called {'before' if self._state == 'new' else 'after'} "
                "the recording; call it inside `with dualform.record(...) as recorder:`"
            )

    # -- patterns -------------------------------------------------------------------------------

    def _context(self, layer: Layer) -> Context:
        """What is true of a forward call: its tag, and whether that is stale; which call it is."""
        self._calls = call = self._calls + 1
        if layer not in self._first_use:
            self._first_use[layer] = len(self._first_use)
        if self._steps.accountant.is_due:
            self._steps.accountant.wake()
        tag = self._tag
        stale = tag is not None and tag.update != self._updates
        return tag, stale, call, running_pass() != -1

    def _on_patterns(
        self,
        layer: Layer,
        keys: Tensor,
        error_signals: Tensor,
        shape: tuple[int, ...],
        context: Context,
        backward: int,
    ) -> None:
        with self._lock:
            if self._steps.stepped:  # an optimizer has moved since: a new step begins
                with self._interrupts.held():
                    self._clerk.wait()
                    self._close_step()
            self._intake.take(layer, keys, error_signals, shape, context, backward)

    def _without_patterns(self, watched: Watched) -> None:
        """A layer whose parameters get gradients past its module: called functionally, compiled."""
        seen = [layer for layer in watched.layers if layer in self._layers]
        for layer in seen:
            self._capture.forget(layer)
            self._layers.pop(layer)
        if seen:
            warnings.warn(
                f"dualform: layer {seen[0].name!r} was never called as a module, yet got a "
                "gradient (its weight is used directly, the gradient is from before recording "
                "began, or the model is compiled or transformed); it is accounted for step by "
                "step, without patterns",
                stacklevel=2,
            )

    # -- the optimizer's step -------------------------------------------------------------------

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        return read_before_moving(lambda: self._read(optimizer), args, kwargs)

    def _read(self, optimizer: Optimizer) -> None:
        self._interrupts.hold()  # until the update is written down, in _after_step
        try:
            with self._lock:
                if self._steps.has_moved(optimizer):  # twice without a backward pass in between
                    self._clerk.wait()
                    self._close_step()
                self._clerk.wait()
                self._intake.refuse_changed()
                self._unused.look_for_left_over(optimizer)
                self._steps.read(optimizer)
        except BaseException:
            self._interrupts.release()
            raise

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        try:
            with self._lock:
                self._updates += 1
                self._steps.apply()
                self._changed |= self._buffers.changes()
                if self._steps.is_over:
                    self._close_step()
        finally:
            self._interrupts.release()
        self._findings.raise_trouble()

    def _close_step(self) -> None:
        """The step is over: its patterns and its log become part of the memory.

        The clerk may still be following where the update put the weights, and nothing else.
        """
        audits = self._parameters.audits
        if audits.are_behind:
            self._clerk.wait()
            audits.catch_up()
        if self._every > 1 or not self._steps.all_moved:
            self._unused.drop()
        if audits.have_seen:
            self._clerk.then(audits.settle, self._steps.step)
        record, gradients, states = self._steps.close()
        changed, self._changed = self._changed, {}
        self._calls = 0
        self._capture.needs_error_signals = (
            self._steps.begins_round or self._steps.some_are_untrained or self._intake.had_many
        )
        self._intake.next_step()
        self._graph.next_step()
        self._sink.end_step(record, gradients, changed, states)
        self._commits.keep_up()
        if self._state == "ended":  # the last commit comes when the memory is closed
            return
        if self._flush_due:
            self._commit_all()
        elif self._sink.is_due or self._commits.is_due:
            self._sink.commit()

    def _commit_all(self) -> None:
        """A commit that also carries what is accumulated."""
        self._commits.flushing, self._flush_due = True, False
        try:
            self._sink.commit()
        finally:
            self._commits.flushing = False

    def _awaits_update(self) -> bool:
        """Whether patterns have come since the last update whose gradient was not thrown away."""
        held = self._sink.patterns_of_step()
        parts = (part for layer in held for part in self._parameters.of_layer(layer))
        return not all(is_reset(part.parameter.grad) for part in parts)

    def _description(self) -> dict[str, Any]:
        layers = [la for la in self._first_use if la in self._layers]
        return describe(
            self._optimizers,
            self._parameters,
            layers,
            self._tags.kinds,
            self._steps.accounts.since,
            self._storage,
        ) | {
            "exact": self._findings.exact,
            "every": self._every,
            "phases": self._phases,
            "remarks": list(self.remarks),
            "buffers": self._buffers.describe(),
        }
