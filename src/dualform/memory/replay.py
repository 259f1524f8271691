"""What an adaptive optimizer did with one parameter, step by step: replayed from the patterns.

Given the patterns of a step, its gradient is κ Σ_t δ_t ⊗ x_t. Given what the optimizer remembered
before the step, the rule says what it did to every entry of W and m, and what it remembers next
(`learning_rules/adaptive.py`). From one kept state to the next that is all there is to it, forward.

Why it is hard: contributions need the steps *backward*, from the last to the first, and second
moments cannot be taken back a step. So a stretch between two kept states is halved until half of
it fits into memory: the earlier half waits while the later one, replayed from the middle, is used.
Rounding stays as small as it was in training, since every kept state is a fresh start.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dualform.errors import MemoryFileError
from dualform.layers.kinds import write
from dualform.learning_rules import AdaptiveLog, Elementwise, State
from dualform.memory.layer import LayerMemory
from dualform.memory.memory import Memory
from dualform.memory.states import WEIGHTS

HELD = 1 << 28
"""Bytes of replayed steps held at once on the way back."""

Reals = NDArray[np.float64]


class StepGradients:
    """A parameter's gradients, step by step: from the patterns of its layers, or as they were kept.

    Always κ times the sum, in float64, as large as the parameter.
    """

    def __init__(self, memory: Memory, parameter: str, log: AdaptiveLog) -> None:
        self._memory, self._name, self._log = memory, parameter, log
        known = memory.parameters[parameter]
        self.shape = known.shape
        self.writers = {n: memory.layer(n) for n in known.layers if known.coverage == "patterns"}
        self._by_steps = known.coverage != "patterns"

    @cached_property
    def _kept(self) -> dict[int, Tensor]:
        return dict(self._memory.step_gradients(self._name))

    @cached_property
    def _bounds(self) -> dict[str, NDArray[np.int64]]:
        """Where the patterns of every step begin, by layer: [steps + 1]."""
        found = {}
        for name, layer in self.writers.items():
            steps: NDArray[np.int64] = layer.patterns["step"]
            if (np.diff(steps) < 0).any():
                raise MemoryFileError(
                    f"{self._memory.path} is damaged: the patterns of layer {name!r} are not in "
                    "the order of their steps, so no step can be replayed"
                )
            found[name] = np.searchsorted(steps, np.arange(self._memory.steps + 1))
        return found

    def rows(self, layer: str, step: int) -> slice:
        """The patterns of a layer that the update of this step was made of."""
        bounds = self._bounds[layer]
        return slice(int(bounds[int(self._log.first[step])]), int(bounds[step + 1]))

    def patterns(self, layer: LayerMemory, step: int) -> tuple[Tensor, Tensor, slice]:
        """Keys and error signals behind the update of a step, float64, and their rows."""
        rows = self.rows(layer.name, step)
        is_weight = self._name == layer.weight
        keys, signals = layer.part(rows.start, rows.stop, keys=is_weight)
        signals = signals.double()
        if not is_weight or keys is None:
            return signals.new_ones(len(signals), 1), signals, rows
        return keys if layer.kind == "embedding" else keys.double(), signals, rows

    def of(self, step: int) -> Tensor:
        """The whole gradient that the optimizer used at a step."""
        if self._by_steps:
            kept = self._kept.get(step)
            if kept is None:
                raise MemoryFileError(
                    f"{self._memory.path} is damaged: {self._name!r} moved at step {step}, but its "
                    "gradient of that step is not there"
                )
            return kept.double() * float(self._log.kappa[step])
        total: Tensor | None = None
        for layer in self.writers.values():
            part, own = self.part(layer, step), layer.rows_of(self._name)
            if total is None and own == slice(0, self.shape[0]):
                total = part
                continue
            total = torch.zeros(self.shape, dtype=torch.float64) if total is None else total
            total[own] += part
        return torch.zeros(self.shape, dtype=torch.float64) if total is None else total

    def part(self, layer: LayerMemory, step: int, weights: Reals | None = None) -> Tensor:
        """What a layer's patterns have in the gradient of a step, each times its weight.

        As large as the layer's rows of the parameter.
        """
        keys, signals, rows = self.patterns(layer, step)
        factors = torch.full((len(signals),), float(self._log.kappa[step]), dtype=torch.float64)
        if weights is not None:
            factors *= torch.from_numpy(weights[rows])
            inside = factors != 0
            if not bool(inside.all()):
                keys, signals, factors = keys[inside], signals[inside], factors[inside]
        if self._name != layer.weight:
            return factors @ signals
        if weights is not None or float(self._log.kappa[step]) != 1.0:
            signals = signals * factors[:, None]
        if layer.kind == "linear":
            return torch.mm(signals.T, keys)
        return write(layer.kind, torch.zeros(layer.shape, dtype=torch.float64), keys, signals)


@dataclass(frozen=True)
class Taken:
    """One step as it was replayed: what it did, by which gradient; what is remembered after it.

    `state` is valid until the next step is asked for. `gradient` is empty on the way back, unless
    it was asked for.
    """

    step: int
    gradient: Tensor
    rule: Elementwise
    fresh: bool
    state: State


class Replay:
    """One parameter's updates up to a step, forward or backward."""

    def __init__(self, memory: Memory, parameter: str, at: int) -> None:
        self._memory, self.name, self.at = memory, parameter, at
        self.log = memory.adaptive_log(parameter).head(at)
        self.gradients = StepGradients(memory, parameter, self.log)
        self.dtype = memory.parameters[parameter].dtype
        self.shape = self.gradients.shape
        self.couples = self.log.rule.couples(self.log.settings[self.log.applied])
        self._states = memory.states(parameter)
        kept = [s for s in self._states.steps if s < at]
        self.kept = [s for s in kept if not self.couples or WEIGHTS in self._states.at(s)]
        """The steps before which a kept state takes the place of the replayed one."""

    @property
    def shrunk(self) -> float:
        """What decoupled decay alone has left of the initial weights."""
        rule, steps = self.log.rule, np.flatnonzero(self.log.applied).tolist()
        return prod(rule.shrink(self.log.at(step, self.dtype)) for step in steps)

    def kept_state(self, step: int) -> State:
        """What was remembered before a step, as it was kept."""
        return self._states.at(step)

    def forward(self) -> Iterator[Taken]:
        """Every update, from the first on."""
        for start, stop in self._stretches():
            yield from self._run(self._begin(start), start, stop)

    def backward(self, *, gradients: bool = False) -> Iterator[Taken]:
        """Every update, from the last to the first; with its gradient if that is needed."""
        for start, stop in reversed(list(self._stretches())):
            yield from self._back(self._begin(start), start, stop, gradients)

    def _stretches(self) -> Iterator[tuple[int, int]]:
        stops = [s for s in self.kept if s > 0]
        yield from zip([0, *stops], [*stops, self.at], strict=True)

    def _begin(self, step: int) -> State | None:
        """What is remembered before the first step of a stretch; None if nothing is yet."""
        if step in self.kept:
            return self.kept_state(step)
        if self.couples:
            return {WEIGHTS: self._memory.initial(self.name).double()}
        return None

    def _back(self, state: State | None, start: int, stop: int, gradients: bool) -> Iterator[Taken]:
        if stop - start <= self._at_once(gradients):
            empty = torch.empty(0, dtype=torch.float64)
            run = self._run(state, start, stop)
            taken = [done if gradients else replace(done, gradient=empty) for done in run]
            while taken:
                yield taken.pop()
            return
        middle, at_middle = (start + stop) // 2, _copy(state)
        for done in self._run(at_middle, start, middle):
            at_middle = done.state
        yield from self._back(_copy(at_middle), middle, stop, gradients)
        yield from self._back(state, start, middle, gradients)

    def _at_once(self, gradients: bool) -> int:
        """How many steps may be held: each has its scale, and may have its gradient."""
        return max(1, HELD // max(1, (1 + gradients) * 8 * torch.Size(self.shape).numel()))

    def _run(self, state: State | None, start: int, stop: int) -> Iterator[Taken]:
        """The updates from one step to another; `state` is taken over and changed."""
        log, rule = self.log, self.log.rule
        state = _copy(state)
        for step in range(start, stop):
            if not log.applied[step]:
                continue
            settings, fresh = log.at(step, self.dtype), bool(log.fresh[step])
            if fresh:
                known = {} if state is None or WEIGHTS not in state else {WEIGHTS: state[WEIGHTS]}
                state = rule.fresh(self.shape, settings) | known
            if state is None or "step" not in state:
                raise MemoryFileError(
                    f"{self._memory.path} is damaged: what the optimizer remembered of "
                    f"{self.name!r} before step {step} is not there"
                )
            gradient = self.gradients.of(step)
            taken = rule.advance(state, settings, gradient, state.get(WEIGHTS))
            if self.couples:
                self._move(state, taken, gradient)
            yield Taken(step, gradient, taken, fresh, state)

    def _move(self, state: State, taken: Elementwise, gradient: Tensor) -> None:
        """The weights themselves, where they enter the next gradient by coupled decay."""
        weights, momentum = state[WEIGHTS], state.get(self.log.rule.momentum or "")
        taken.move(weights, torch.zeros_like(weights) if momentum is None else momentum, gradient)


def _copy(state: State | None) -> State | None:
    return None if state is None else {name: value.clone() for name, value in state.items()}


class Part:
    """One part of the weights: its (W, m), carried through the steps by the rule.

    The whole of them, if it begins with W_0 and m_0 and is driven by every gradient.
    """

    def __init__(self, weights: Tensor, momentum: Tensor | None = None) -> None:
        self.weights = weights
        self.momentum = torch.zeros_like(weights) if momentum is None else momentum
        self._idle = momentum is None and not bool(weights.any())

    @classmethod
    def whole(cls, memory: Memory, parameter: str) -> Part:
        """A parameter as it was when recording began."""
        weights, buffer = memory.initial(parameter), memory.initial_momentum(parameter)
        begun = weights.to(torch.float64, copy=True)
        if buffer is None:
            return cls(begun, torch.zeros_like(begun))
        return cls(begun, buffer.to(torch.float64, copy=True))

    def take(self, done: Taken, gradient: Tensor | None) -> None:
        """One step, driven by this part of the gradient; None drives nothing."""
        if done.fresh:
            self.momentum.zero_()
        if gradient is None and self._idle:
            return
        self._idle = False
        done.rule.move(self.weights, self.momentum, gradient)
