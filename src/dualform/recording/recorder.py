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
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dualform.errors import AuditError, RecordingError
from dualform.layers import Layer, find_layers
from dualform.learning_rules import (
    ParameterLog,
    hyperparameters,
    momentum_buffer,
    rule_of,
    transitions,
)
from dualform.memory.files import INITIAL, TensorFile
from dualform.memory.writing import MemoryWriter, environment
from dualform.recording.accounts import Accumulated, BufferWatch, StepAccounts
from dualform.recording.audit import ParameterAudit, Unexplained
from dualform.recording.capture import Capture
from dualform.recording.sink import SEGMENT_BYTES, SETS, DiskSink, Extras, StepRecord
from dualform.recording.tags import Tag, Tags, Visit

logger = logging.getLogger("dualform")

STEP_BUDGET = 1 << 30
SNAPSHOT_EVERY = 1000
SNAPSHOT_SHARE = 20
"""Weights are kept whenever this many times their size has been written since the last time."""


def record(
    model: nn.Module,
    optimizers: Optimizer | Iterable[Optimizer],
    path: str | Path,
    *,
    audit: str = "raise",
    overwrite: bool = False,
    step_budget: int = STEP_BUDGET,
    snapshot_every: int = SNAPSHOT_EVERY,
    segment_bytes: int = SEGMENT_BYTES,
) -> Recorder:
    """Record a training run into a memory at `path`; wrap the loop in it and change nothing else.

    Example:
        >>> with df.record(model, optimizer, "runs/digits") as recorder:   # doctest: +SKIP
        ...     for example, image, label in loader:
        ...         recorder.tag(example=example, label=label)
        ...         loss_fn(model(image), label).backward()
        ...         optimizer.step(); optimizer.zero_grad()

    Args:
        optimizers: the optimizer, or a list of all that train this model.
        audit: "raise" stops at the first step that cannot be explained; "warn" goes on, and the
            memory remembers that it is not exact.
        overwrite: delete a memory that is already at `path`.
        step_budget: bytes for gradients of parameters without patterns (norms, embeddings), which
            are kept step by step; beyond it only their learned part is, every `snapshot_every` steps.
        segment_bytes: how much is collected per commit. Buffers take at most 3 × (this + the bytes
            of the largest step).
    """
    if not isinstance(model, nn.Module):
        raise RecordingError(f"expected a torch.nn.Module to record, got {type(model).__name__}")
    if audit not in ("raise", "warn"):
        raise RecordingError(f'audit={audit!r} was given; expected "raise" or "warn"')
    for name, value in (
        ("step_budget", step_budget + 1),
        ("snapshot_every", snapshot_every),
        ("segment_bytes", segment_bytes),
    ):
        if value < 1:
            raise RecordingError(f"{name} must be positive")
    listed = [optimizers] if isinstance(optimizers, Optimizer) else list(optimizers)
    if not listed or not all(isinstance(o, Optimizer) for o in listed):
        raise RecordingError(
            "expected a torch optimizer or a list of them, got "
            f"{[type(o).__name__ for o in listed] if listed else 'none'}"
        )
    return Recorder(
        model,
        listed,
        Path(path),
        audit=audit,
        overwrite=overwrite,
        step_budget=step_budget,
        snapshot_every=snapshot_every,
        segment_bytes=segment_bytes,
    )


@dataclass
class Watched:
    """One parameter of the model, as the recorder follows it."""

    index: int
    name: str
    parameter: nn.Parameter
    layers: list[Layer] = field(default_factory=list)
    role: str | None = None
    coverage: str = "untrained"
    audit: ParameterAudit | None = None
    backward: int = -1  # the last backward pass that reached it
    spoiled: bool = False


@dataclass
class Reading:
    """What an optimizer is about to do, read just before it does it."""

    optimizer: Optimizer
    settings: list[tuple[float, ...]] = field(default_factory=list)
    facts: list[tuple[Watched, float, int, bool, int, float]] = field(default_factory=list)
    moves: list[tuple[Watched, int, bool, np.ndarray[Any, Any], float]] = field(
        default_factory=list
    )
    gradients: dict[str, Tensor] = field(default_factory=dict)


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
        audit: str,
        overwrite: bool,
        step_budget: int,
        snapshot_every: int,
        segment_bytes: int,
    ) -> None:
        self._model, self._optimizers, self._path = model, list(optimizers), path
        self._strict = audit == "raise"
        self._overwrite = overwrite
        self._snapshot_every = snapshot_every
        self._segment_bytes = segment_bytes
        self._accounts = StepAccounts(step_budget)
        self._lock = threading.RLock()
        self._tags = Tags()
        self._tag: Tag | None = None
        self._state = "new"
        self.exact = True
        self._remarks: list[str] = []
        self._dropped = 0

    # -- the context ----------------------------------------------------------------------------

    def __enter__(self) -> Recorder:
        if self._state != "new":
            raise RecordingError("this recorder was used before; call dualform.record again")
        self._look_at_model()
        self._look_at_optimizers()
        self._writer = MemoryWriter(self._path, overwrite=self._overwrite)
        try:
            self._begin()
        except BaseException:
            self._writer.release()
            raise
        self._state = "recording"
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._remove_hooks()
        self._state = "ended"
        try:
            self._finish_interrupted_step()
            if kind is not None:
                self._remark(f"the training loop was ended by {kind.__name__}")
            self._sink.close(closed=True)
        except BaseException:
            if kind is None:
                raise
            logger.exception("dualform: closing the memory at %s failed", self._path)
        finally:
            self._writer.release()

    def tag(self, **columns: Any) -> None:
        """Name the patterns of the batch that is about to be fed: ids, labels, tasks, anything.

        Every column is [B], [B, L] or one value; numbers, booleans or strings. A tag holds until
        the next call or the next update, whichever comes first.

        Example:
            >>> recorder.tag(example=[3, 1, 4], label=[0, 7, 7], task="digits")   # doctest: +SKIP
        """
        with self._lock:
            self._tag = self._tags.make(self._step, columns)

    @property
    def steps(self) -> int:
        """How many updates have been recorded."""
        return self._step

    @property
    def remarks(self) -> tuple[str, ...]:
        """What was dropped or could not be explained so far, in sentences."""
        dropped = f"{self._dropped} patterns of skipped steps were dropped"
        return (*self._remarks, *([dropped] if self._dropped else []))

    @property
    def buffer_bytes(self) -> int:
        """The most the recorder's buffers take, besides the largest single step (three of each)."""
        return SETS * self._segment_bytes

    # -- the beginning --------------------------------------------------------------------------

    def _look_at_model(self) -> None:
        named = list(self._model.named_parameters())
        self._layers = find_layers(self._model)
        self._watched = {id(p): Watched(index, name, p) for index, (name, p) in enumerate(named)}
        self._by_name = {w.name: w for w in self._watched.values()}
        for layer in self._layers:
            for role, name in (("weight", layer.weight), ("bias", layer.bias)):
                if name is not None:
                    self._by_name[name].layers.append(layer)
                    self._by_name[name].role = role
        for name, parameter in named:
            if not parameter.is_floating_point():
                raise RecordingError(
                    f"parameter {name!r} has dtype {parameter.dtype}; expected floats"
                )

    def _look_at_optimizers(self) -> None:
        self._known_rules = True
        for optimizer in self._optimizers:
            try:
                rule_of(optimizer)
            except RecordingError as error:
                if self._strict:
                    raise AuditError(str(error)) from None
                self._known_rules = False
                self._not_exact(f"the learning rule of {type(optimizer).__name__} is not known")
            self._look_at_groups(optimizer)

    def _look_at_groups(self, optimizer: Optimizer) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if id(parameter) not in self._watched:
                    raise RecordingError(
                        f"the optimizer trains a parameter of shape {list(parameter.shape)} that is "
                        "not in the model given to record. Give a module that holds all trained "
                        "parameters, such as nn.ModuleList([model, criterion]), and call its parts "
                        "as before"
                    )

    def _begin(self) -> None:
        self._step = 0
        self._round: StepRecord | None = None
        self._stepped: list[Optimizer] = []
        self._pending: Reading | None = None
        self._gradients: dict[str, Tensor] = {}
        self._written_since_snapshot = 0
        self._first_use: dict[Layer, int] = {}
        self._calls: dict[Layer, int] = {}
        self._transitions: dict[
            tuple[Any, ...], tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]
        ] = {}
        self._buffers = BufferWatch(self._model)
        generator = torch.Generator().manual_seed(_private_seed())
        momenta = {id(p): momentum_buffer(o, p) for o in self._optimizers for p in _parameters(o)}
        initial: dict[str, Tensor | np.ndarray[Any, Any]] = {}
        for key, watched in self._watched.items():
            momentum = momenta.get(key)
            watched.audit = ParameterAudit(watched.parameter, momentum, generator)
            initial[f"parameters/{watched.name}"] = watched.parameter
            initial[f"probes/{watched.name}"] = watched.audit.probe64
            initial[f"sketches/{watched.name}"] = watched.audit.sketch64
            if momentum is not None:
                initial[f"momentum/{watched.name}"] = momentum
        initial |= {f"buffers/{name}": value for name, value in self._buffers.values.items()}
        self._model_bytes = sum(p.numel() * p.element_size() for p in self._model.parameters())
        self._writer.begin(initial, self._description())
        self._sink = DiskSink(
            self._writer,
            self._gather,
            lambda layer: self._by_name[layer.weight].parameter.dtype,
            segment_bytes=self._segment_bytes,
        )
        self._capture = Capture(self._layers, self._context, self._on_patterns)
        self._handles = [
            handle
            for optimizer in self._optimizers
            for handle in (
                optimizer.register_step_pre_hook(self._before_step),
                optimizer.register_step_post_hook(self._after_step),
            )
        ]

    def _remove_hooks(self) -> None:
        self._capture.remove()
        for handle in self._handles:
            handle.remove()

    # -- patterns -------------------------------------------------------------------------------

    def _context(self, layer: Layer) -> tuple[Tag | None, bool, int]:
        """The tag in force at a forward call, whether it is stale, and which call it is."""
        self._first_use.setdefault(layer, len(self._first_use))
        call = self._calls.get(layer, 0)
        self._calls[layer] = call + 1
        tag = self._tag
        return tag, tag is not None and tag.step != self._step, call

    def _on_patterns(
        self,
        layer: Layer,
        keys: Tensor,
        error_signals: Tensor,
        shape: tuple[int, ...],
        context: tuple[Tag | None, bool, int],
        backward: int,
    ) -> None:
        tag, stale, call = context
        with self._lock:
            if self._stepped:  # another optimizer of the same step has moved: a new step begins
                self._close_step()
            if tag is not None:
                if stale:
                    raise RecordingError(
                        f"layer {layer.name!r} saw a batch of leading shape {list(shape)} at step "
                        f"{self._step} that was not tagged, though earlier batches were. Call "
                        "recorder.tag(...) for every batch, before the model is called"
                    )
                tag.check(layer.name, shape)
            self._notice_resets(layer, backward)
            visit = Visit(self._step, 0 if tag is None else tag.microbatch, call, shape, tag)
            self._sink.append(layer, keys, error_signals, visit)
            size = float(torch.linalg.vector_norm(error_signals))
            weight = self._by_name[layer.weight]
            if weight.parameter.requires_grad and weight.audit is not None:
                key_size = float(torch.linalg.vector_norm(keys))
                weight.audit.see_keys(keys, error_signals, size * key_size)
            if layer.bias is not None:
                bias = self._by_name[layer.bias]
                if bias.parameter.requires_grad and bias.audit is not None:
                    bias.audit.see_ones(error_signals, size * keys.shape[0] ** 0.5)

    def _notice_resets(self, layer: Layer, backward: int) -> None:
        """Find out, once per backward pass, whether gradients start anew or go on accumulating."""
        anew = []
        for name in layer.parameters:
            watched = self._by_name[name]
            if watched.backward == backward or not watched.parameter.requires_grad:
                continue
            watched.backward = backward
            if watched.audit is not None and _is_reset(watched.parameter.grad):
                anew.append(watched.audit.uses > 0 and watched.audit.first == self._step)
                watched.audit.forget(self._step)
        if anew and all(anew):  # seen in this very step, then thrown away: a skipped step
            self._dropped += self._sink.rewind(layer)

    # -- the optimizer's step -------------------------------------------------------------------

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is None:
            self._read(optimizer)
            return None

        def closure_then_read() -> Any:
            loss = closure()
            self._read(optimizer)
            return loss

        if len(args) > 1:
            return (args[0], closure_then_read, *args[2:]), kwargs
        return args, kwargs | {"closure": closure_then_read}

    def _read(self, optimizer: Optimizer) -> None:
        with self._lock:
            self._look_at_groups(optimizer)
            self._pending = None
            if self._round is not None and any(
                self._round.applied[self._watched[id(p)].index] for p in _parameters(optimizer)
            ):
                self._close_step()
            reading = Reading(optimizer)
            if bool(getattr(optimizer, "found_inf", 0)):  # a fused optimizer skips by itself
                self._pending = reading
                return
            scale = getattr(optimizer, "grad_scale", None)
            unscale = 1.0 if scale is None else 1.0 / float(scale)
            for group in optimizer.param_groups:
                settings = hyperparameters(group) if self._known_rules else ()
                reading.settings.append(settings)
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        self._read_parameter(reading, self._watched[id(parameter)], unscale)
            self._pending = reading

    def _read_parameter(self, reading: Reading, watched: Watched, unscale: float) -> None:
        gradient, audit = watched.parameter.grad, watched.audit
        assert gradient is not None and audit is not None
        if gradient.is_sparse:
            raise RecordingError(
                f"parameter {watched.name!r} has a sparse gradient, which cannot be accounted for; "
                "use a dense one (nn.Embedding(..., sparse=False))"
            )
        projected = audit.gradient_projection(gradient)
        kappa, first = 1.0, self._step
        if watched.coverage == "untrained":
            self._decide_coverage(watched)
        if watched.coverage == "patterns":
            first = audit.first
            try:
                kappa = audit.explain(projected)
            except Unexplained as reason:
                self._unexplained(watched, str(reason))
        else:
            reading.gradients[watched.name] = gradient
        fresh = momentum_buffer(reading.optimizer, watched.parameter) is None
        group = len(reading.settings) - 1
        sketched = float(audit.sketch @ projected)
        reading.facts.append((watched, kappa * unscale, first, fresh, group, sketched))
        reading.moves.append((watched, group, fresh, projected, unscale))

    def _decide_coverage(self, watched: Watched) -> None:
        """A parameter's first gradient: are there patterns that explain it?"""
        assert watched.audit is not None
        if watched.layers and watched.audit.uses:
            watched.coverage = "patterns"
            return
        watched.coverage = "steps"
        if watched.layers:
            for layer in watched.layers:
                self._capture.forget(layer)
                self._layers.pop(layer, None)
            warnings.warn(
                f"dualform: {watched.name!r} got a gradient though its layer was never called as a "
                "module; it is accounted for step by step, without patterns",
                stacklevel=2,
            )

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        with self._lock:
            self._apply_pending(check=True)
            if len(self._stepped) == len(self._optimizers):
                self._close_step()

    def _apply_pending(self, *, check: bool) -> None:
        """Write down what the optimizer did, and compare the weights with the prediction."""
        reading, self._pending = self._pending, None
        if reading is None:
            return
        if self._round is None:
            self._round = _blank_record(len(self._watched))
        record = self._round
        offset = len(record.hyperparameters)
        record.hyperparameters.extend(reading.settings)
        for watched, kappa, first, fresh, group, sketched in reading.facts:
            i = watched.index
            record.applied[i], record.fresh[i] = True, fresh
            record.kappa[i], record.first[i] = kappa, first
            record.group[i], record.projection[i] = offset + group, sketched
        for watched, group, fresh, projected, unscale in reading.moves:
            self._follow(watched, reading.settings[group], fresh, projected, unscale, check=check)
        if reading.gradients and self._known_rules:
            moves = {
                w.name: self._transition(reading.settings[g], fresh, unscale)
                for w, g, fresh, _, unscale in reading.moves
            }
            self._gradients |= self._accounts.keep(
                self._step, reading.gradients, moves, self._learned_now
            )
        self._stepped.append(reading.optimizer)

    def _learned_now(self, name: str) -> Accumulated:
        """What training has added to a parameter and its momentum buffer so far."""
        watched = self._by_name[name]
        parameter, audit = watched.parameter, watched.audit
        assert audit is not None
        initial = TensorFile(self._path / INITIAL)
        weights = initial.tensor(f"parameters/{name}").double()
        stored = f"momentum/{name}"
        momentum = initial.tensor(stored).double() if stored in initial.names else weights * 0
        buffers = (momentum_buffer(o, parameter) for o in self._optimizers)
        buffer = next((b for b in buffers if b is not None), torch.zeros_like(parameter))
        (ww, wm), (mw, mm) = audit.initial_share.tolist()
        return Accumulated(
            parameter.detach().cpu().double() - ww * weights - wm * momentum,
            buffer.detach().cpu().double() - mw * weights - mm * momentum,
        )

    def _follow(
        self,
        watched: Watched,
        settings: tuple[float, ...],
        fresh: bool,
        projected: np.ndarray[Any, Any],
        unscale: float,
        *,
        check: bool,
    ) -> None:
        audit = watched.audit
        if audit is None or not self._known_rules or watched.spoiled:
            return
        audit.advance(*self._transition(settings, fresh, unscale), projected)
        if check:
            self._compare(watched, everything=False)

    def _compare(self, watched: Watched, *, everything: bool) -> None:
        assert watched.audit is not None
        try:
            watched.audit.compare(watched.parameter, everything=everything)
        except Unexplained as reason:
            self._unexplained(watched, str(reason))
            watched.spoiled = True

    def _transition(
        self, settings: tuple[float, ...], fresh: bool, unscale: float
    ) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        key = (settings, fresh, unscale)
        if key not in self._transitions:
            if len(self._transitions) > 256:
                self._transitions.clear()
            matrix, vector = transitions(ParameterLog.single(settings, fresh=fresh, kappa=unscale))
            self._transitions[key] = matrix[0], vector[0]
        return self._transitions[key]

    def _close_step(self) -> None:
        """The step is over: its patterns and its log become part of the memory."""
        record = self._round if self._round is not None else _blank_record(len(self._watched))
        for layer in self._sink.patterns_of_step():
            parts = [self._by_name[name] for name in layer.parameters]
            used = any(record.applied[p.index] for p in parts)
            if not used and all(p.parameter.grad is None for p in parts):
                self._dropped += self._sink.rewind(layer)
        self._round, self._stepped = None, []
        gradients, self._gradients = self._gradients, {}
        self._step += 1
        self._calls = {}
        self._sink.end_step(record, gradients, self._buffers.changes())
        if self._sink.is_due or (self._accounts.since and self._step % self._snapshot_every == 0):
            self._sink.commit()

    def _finish_interrupted_step(self) -> None:
        """At the end: a step whose optimizer was interrupted counts if the weights did move."""
        with self._lock:
            if self._pending is not None:
                moved = [w for w, *_ in self._pending.moves if _has_moved(w)]
                if moved:
                    self._apply_pending(check=False)
            if self._round is not None:
                self._close_step()

    # -- what a commit carries ------------------------------------------------------------------

    def _gather(self) -> Extras:
        fingerprints, momenta = {}, {}
        for watched in self._watched.values():
            if watched.audit is None or watched.coverage == "untrained":
                continue
            if self._known_rules and not watched.spoiled:
                self._compare(watched, everything=True)
            fingerprints[watched.name] = watched.audit.project(watched.parameter)
        for optimizer in self._optimizers:
            for parameter in _parameters(optimizer):
                watched = self._watched[id(parameter)]
                buffer = momentum_buffer(optimizer, parameter)
                if buffer is not None and watched.audit is not None:
                    momenta[watched.name] = watched.audit.project(buffer)
        self._written_since_snapshot += self._segment_bytes
        snapshot = None
        if self._state == "ended" or (
            self._written_since_snapshot >= SNAPSHOT_SHARE * self._model_bytes
        ):
            self._written_since_snapshot = 0
            snapshot = {w.name: w.parameter.detach().cpu().clone() for w in self._watched.values()}
        return Extras(
            fingerprints,
            momenta,
            self._accounts.learned(),
            self._tags.new_strings(),
            dict(self._tags.kinds),
            self._description(),
            snapshot,
        )

    def _description(self) -> dict[str, Any]:
        order = sorted(self._first_use, key=self._first_use.__getitem__)
        kinds = {"step": "int"} | self._tags.kinds
        kinds |= {"position": "int", "microbatch": "int", "call": "int"}
        return {
            "environment": environment(),
            "optimizers": [
                {"class": f"{type(o).__module__}.{type(o).__qualname__}"} for o in self._optimizers
            ],
            "exact": self.exact,
            "remarks": list(self.remarks),
            "columns": [[name, kind] for name, kind in kinds.items()],
            "layers": [
                {
                    "name": layer.name,
                    "kind": layer.kind,
                    "weight": layer.weight,
                    "bias": layer.bias,
                    "in_features": layer.in_features,
                    "out_features": layer.out_features,
                    "dtype": _dtype_name(self._by_name[layer.weight].parameter),
                }
                for layer in order
                if layer in self._layers
            ],
            "parameters": [
                {
                    "name": w.name,
                    "shape": list(w.parameter.shape),
                    "dtype": _dtype_name(w.parameter),
                    "coverage": "accumulated" if w.name in self._accounts.since else w.coverage,
                    "accumulated_since": self._accounts.since.get(w.name),
                    "eps": w.audit.gradient_eps if w.audit else 0.0,
                    "layers": [la.name for la in w.layers if w.coverage == "patterns"],
                    "role": w.role,
                }
                for w in self._watched.values()
            ],
            "buffers": [
                {
                    "name": name,
                    "shape": list(value.shape),
                    "dtype": _dtype_name(value),
                    "coverage": "recorded" if name in self._buffers.changed else "constant",
                }
                for name, value in self._buffers.values.items()
            ],
        }

    def _unexplained(self, watched: Watched, reason: str) -> None:
        message = f"step {self._step}, parameter {watched.name!r}: {reason}"
        if self._strict:
            self.exact = False
            self._remark(message)
            raise AuditError(
                message + ' Recording stopped here; audit="warn" would go on with a memory that is '
                "not exact."
            )
        self._not_exact(message)

    def _not_exact(self, message: str) -> None:
        if self.exact:
            warnings.warn(f"dualform: this run is not exact. {message}", stacklevel=2)
        self.exact = False
        self._remark(message)

    def _remark(self, message: str) -> None:
        if len(self._remarks) < 100:
            self._remarks.append(message)


def _parameters(optimizer: Optimizer) -> list[nn.Parameter]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _is_reset(gradient: Tensor | None) -> bool:
    """Whether there is no gradient: none at all, or all zeros (looked at sparingly first)."""
    if gradient is None:
        return True
    flat = gradient.detach().reshape(-1)
    sample = flat[:: max(1, flat.numel() // 64)]
    return not bool(sample.any()) and not bool(flat.any())


def _has_moved(watched: Watched) -> bool:
    audit = watched.audit
    if audit is None:
        return False
    return bool(np.abs(audit.project(watched.parameter) - audit.weights).max(initial=0.0) > 0)


def _blank_record(parameters: int) -> StepRecord:
    return StepRecord(
        applied=np.zeros(parameters, np.uint8),
        kappa=np.zeros(parameters),
        first=np.zeros(parameters, np.int64),
        fresh=np.zeros(parameters, np.uint8),
        group=np.full(parameters, -1, np.int32),
        projection=np.zeros(parameters),
        hyperparameters=[],
    )


def _dtype_name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _private_seed() -> int:
    """A seed that takes nothing from torch's, numpy's or Python's global generators."""
    return int.from_bytes(np.random.SeedSequence().generate_state(2).tobytes(), "little") >> 1
