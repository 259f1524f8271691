"""One step at a time: what the optimizers are about to do, what they did, and when a step is over.

Just before an optimizer moves, every gradient it will use is read and compared with the patterns;
just after, the weights are compared with what the learning rule predicts. A step is over when every
optimizer has moved, when a new backward pass begins after one has, or when one moves twice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.optim import Optimizer

from dualform.errors import RecordingError
from dualform.learning_rules import ParameterLog, hyperparameters, momentum_buffer, transitions
from dualform.memory.files import INITIAL, TensorFile
from dualform.recording.accounts import Accumulated, StepAccounts
from dualform.recording.audit import Rota, Transition, Unexplained
from dualform.recording.parameters import Parameters, Watched, parameters_of
from dualform.recording.sink import StepRecord

CLEAR = 1e3
"""How far above its rounding a parameter's pattern sum must be to tell the factor κ itself."""

OnUnexplained = Callable[[Watched, str], None]


@dataclass(eq=False)
class Move:
    """What one optimizer is about to do with one parameter."""

    watched: Watched
    kappa: float
    first: int
    fresh: bool
    group: int
    sketched: float
    projected: NDArray[np.float64]
    transition: Transition | None


@dataclass
class Reading:
    """What an optimizer is about to do, read just before it does it."""

    optimizer: Optimizer
    settings: list[tuple[float, ...]] = field(default_factory=list)
    moves: list[Move] = field(default_factory=list)
    gradients: dict[str, Tensor] = field(default_factory=dict)


class Steps:
    """The step under way, for all optimizers together.

    `unexplained_gradient` is called before the optimizer has moved, `unexplained_weights` after;
    either may raise, and the step is then not taken as recorded.
    """

    def __init__(
        self,
        parameters: Parameters,
        optimizers: Sequence[Optimizer],
        accounts: StepAccounts,
        path: Path,
        *,
        known_rules: bool,
        without_patterns: Callable[[Watched], None],
        unexplained_gradient: OnUnexplained,
        unexplained_weights: OnUnexplained,
    ) -> None:
        self.step = 0
        self.stepped: list[Optimizer] = []
        self._parameters = parameters
        self._optimizers = list(optimizers)
        self._accounts = accounts
        self._path = path
        self._known_rules = known_rules
        self._without_patterns = without_patterns
        self._unexplained_gradient = unexplained_gradient
        self._unexplained_weights = unexplained_weights
        self._record = _blank_record(len(parameters))
        self._gradients: dict[str, Tensor] = {}
        self._pending: Reading | None = None
        self._transitions: dict[tuple[Any, ...], Transition] = {}
        self._rota = Rota(
            {w.name: (len(w.audit.sketch), len(w.audit.probe)) for w in parameters if known_rules}
        )

    @property
    def is_over(self) -> bool:
        """Whether every optimizer has moved in this step."""
        return len(self.stepped) == len(self._optimizers)

    def has_moved(self, optimizer: Optimizer) -> bool:
        """Whether this step already holds an update of one of the optimizer's parameters."""
        applied = self._record.applied
        return bool(self.stepped) and any(
            applied[self._parameters.of(p).index] for p in parameters_of(optimizer)
        )

    def moved(self, watched: Watched) -> bool:
        return bool(self._record.applied[watched.index])

    # -- before ---------------------------------------------------------------------------------

    def read(self, optimizer: Optimizer) -> None:
        """Look at every gradient the optimizer is about to use, and explain it."""
        self._pending = None
        if bool(getattr(optimizer, "found_inf", 0)):  # a fused optimizer told to skip this one
            return
        scale = getattr(optimizer, "grad_scale", None)  # ... or to unscale by itself
        unscale = 1.0 if scale is None else 1.0 / float(scale)
        reading = Reading(optimizer)
        for group in optimizer.param_groups:
            reading.settings.append(hyperparameters(group) if self._known_rules else ())
            for parameter in group["params"]:
                watched = self._parameters.of(parameter)
                if parameter.grad is not None:
                    self._read_parameter(reading, watched, parameter.grad, unscale)
        _share_factors(reading.moves)
        self._pending = reading

    def _read_parameter(
        self, reading: Reading, watched: Watched, gradient: Tensor, unscale: float
    ) -> None:
        if gradient.is_sparse:
            raise RecordingError(
                f"parameter {watched.name!r} has a sparse gradient, which cannot be accounted for; "
                "use a dense one (nn.Embedding(..., sparse=False))"
            )
        if watched.parameter.dtype != watched.dtype or watched.parameter.shape != watched.shape:
            raise RecordingError(
                f"parameter {watched.name!r} was {watched.dtype} {list(watched.shape)} when "
                f"recording began and is now {watched.parameter.dtype} "
                f"{list(watched.parameter.shape)}; end the recording, then record into a new memory"
            )
        audit = watched.audit
        projected = audit.gradient_projection(gradient)
        if watched.coverage == "untrained":
            self._decide_coverage(watched, projected)
        kappa, first = 1.0, self.step
        if watched.coverage == "patterns":
            first = audit.first
            try:
                kappa = audit.explain(projected)
            except Unexplained as reason:
                self._unexplained_gradient(watched, str(reason))
        else:
            reading.gradients[watched.name] = gradient.detach().to("cpu", copy=True)
        fresh = momentum_buffer(reading.optimizer, watched.parameter) is None
        settings = reading.settings[-1]
        reading.moves.append(
            Move(
                watched,
                kappa * unscale,
                first,
                fresh,
                len(reading.settings) - 1,
                float(audit.sketch @ projected) * unscale,
                projected,
                self._transition(settings, fresh, unscale) if self._known_rules else None,
            )
        )

    def _decide_coverage(self, watched: Watched, projected: NDArray[np.float64]) -> None:
        """A parameter's first gradient: are there patterns that explain it? Zero needs none."""
        if watched.layers and (watched.audit.uses or not projected.any()):
            watched.coverage = "patterns"
            return
        watched.coverage = "steps"
        if watched.layers:
            self._without_patterns(watched)

    def _transition(self, settings: tuple[float, ...], fresh: bool, unscale: float) -> Transition:
        key = (settings, fresh, unscale)
        if key not in self._transitions:
            if len(self._transitions) > 256:
                self._transitions.clear()
            matrix, vector = transitions(ParameterLog.single(settings, fresh=fresh, kappa=unscale))
            ww, wm, mw, mm = matrix[0].ravel().tolist()
            nw, nm = vector[0].tolist()
            self._transitions[key] = (ww, wm, mw, mm, nw, nm)
        return self._transitions[key]

    # -- after ----------------------------------------------------------------------------------

    def apply(self) -> None:
        """The optimizer has moved: write it down, and compare the weights with the prediction."""
        reading, self._pending = self._pending, None
        if reading is not None:
            self._take(reading, reading.moves)
            if self._known_rules:
                self._compare_some()

    def apply_interrupted(self) -> None:
        """Training ended inside an optimizer's step: take what it did, parameter by parameter."""
        reading, self._pending = self._pending, None
        if reading is None or not self._known_rules:
            return
        moves = [
            m
            for m in reading.moves
            if m.transition is not None
            and m.watched.audit.has_moved(m.watched.parameter, m.transition, m.projected)
        ]
        if moves:
            self._take(reading, moves)

    def _take(self, reading: Reading, moves: Sequence[Move]) -> None:
        record = self._record
        offset = len(record.hyperparameters)
        record.hyperparameters.extend(reading.settings)
        for move in moves:
            i = move.watched.index
            record.applied[i], record.fresh[i] = True, move.fresh
            record.kappa[i], record.first[i] = move.kappa, move.first
            record.group[i], record.projection[i] = offset + move.group, move.sketched
            if move.transition is not None:
                move.watched.audit.advance(move.transition, move.projected)
        if reading.gradients and self._known_rules:
            kept = {m.watched.name: m.transition for m in moves if m.transition is not None}
            self._gradients |= self._accounts.keep(
                self.step,
                {name: g for name, g in reading.gradients.items() if name in kept},
                kept,
                self._learned_now,
            )
        self.stepped.append(reading.optimizer)

    def _compare_some(self) -> None:
        for name, low, high in self._rota.at(self.step):
            watched = self._parameters.by_name[name]
            if watched.coverage != "untrained" and not watched.spoiled:
                self.compare(watched, low, high)

    def compare(self, watched: Watched, low: int = 0, high: int | None = None) -> None:
        """Compare a parameter (or some of its rows) with where the learning rule puts it."""
        if not self._known_rules or watched.spoiled:
            return
        try:
            watched.audit.compare(watched.parameter, low, high)
        except Unexplained as reason:
            watched.spoiled = True
            self._unexplained_weights(watched, str(reason))

    def _learned_now(self, name: str) -> Accumulated:
        """What training has added to a parameter and its momentum buffer so far."""
        watched = self._parameters.by_name[name]
        initial = TensorFile(self._path / INITIAL)
        weights = initial.tensor(f"parameters/{name}").double()
        stored = f"momentum/{name}"
        momentum = initial.tensor(stored).double() if stored in initial.names else weights * 0
        buffers = (momentum_buffer(o, watched.parameter) for o in self._optimizers)
        buffer = next((b for b in buffers if b is not None), torch.zeros_like(watched.parameter))
        ww, wm, mw, mm = watched.audit.initial_share
        return Accumulated(
            watched.parameter.detach().cpu().double() - ww * weights - wm * momentum,
            buffer.detach().cpu().double() - mw * weights - mm * momentum,
        )

    def close(self) -> tuple[StepRecord, dict[str, Tensor]]:
        """The step is over: its log, and the gradients kept with it."""
        done = self._record, self._gradients
        self._record, self._gradients = _blank_record(len(self._parameters)), {}
        self.stepped = []
        self.step += 1
        return done


def _share_factors(moves: Sequence[Move]) -> None:
    """Give κ to parameters whose own patterns cannot tell it, from the one that tells it best.

    Patterns may cancel to nothing but rounding (a bias before BatchNorm): any factor explains such
    a gradient, but what each of its patterns wrote depends on the right one. Clipping and unscaling
    act on all parameters of a group alike.
    """
    resolved = [m for m in moves if m.watched.coverage == "patterns"]
    clear = [m for m in resolved if m.watched.audit.clarity >= CLEAR]
    for move in resolved:
        if move in clear:
            continue
        alike = [m for m in clear if m.group == move.group] or clear
        if alike:
            best = max(alike, key=lambda m: m.watched.audit.clarity)
            if move.watched.audit.allows(move.kappa, best.kappa):
                move.kappa = best.kappa


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
