"""Keeping what an adaptive optimizer remembers, now and then, and checking it at its word.

Adam's second moments decide what a pattern writes. They follow from the patterns, so they are kept
only every so many steps, just before an update: as often as `state_share` of the bytes recorded
allows (`MIN_EVERY` steps apart at least), and always at the first update after recording began or
was resumed. A reader replays them in between.

Along a random direction such a rule cannot be followed, as the audit follows SGD: it divides entry
by entry. Instead, wherever a state is kept, the one step after it is predicted, entry by entry, in
float64, from the state, the gradient and the settings as logged, for some rows (all of them the
first time, then others in turn), and compared with the weights. That finds an optimizer that does
something else, settings that were misread, weights that were edited in that step. An edit between
two updates is found by torch's own counters (`edits.py`); one that has no counter (`.data`) by
`verify`, which replays all steps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil, sqrt
from typing import Protocol

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

from dualform.learning_rules import Settings, State, adaptive_rule_of
from dualform.memory.states import WEIGHTS
from dualform.recording.parameters import Watched

MIN_EVERY = 16
"""Fewest steps from one kept state to the next."""

CHECKED = 1 << 15
"""About how many entries of a parameter one step is predicted for."""

CANCELS = 64.0
"""A sum of error signals below so many roundings of its parts is nothing but rounding."""

LOST = 1 / 16
"""The share of a bias's entries that must be like that for it to be kept step by step."""

CANCELLED = (
    "the patterns of {0!r} cancel to rounding (it stands before a norm, say), which its optimizer "
    "divides by its own size: it is accounted for step by step, without patterns"
)

SLACK = 32.0
"""How many roundings of the weight and of its update a prediction may be off by."""


class Moved(Protocol):
    """What is asked of an update: of which parameter, by which group of settings."""

    @property
    def watched(self) -> Watched: ...

    @property
    def group(self) -> int: ...

    @property
    def fresh(self) -> bool: ...


@dataclass
class Before:
    """A parameter just before an update: what is kept, and the rows whose step is predicted."""

    state: State
    kept: bool
    rows: slice
    weights: Tensor
    gradient: Tensor


@dataclass
class OptimizerStates:
    """Which optimizer's state was kept when; the states waiting for their update to be made.

    `collected` says how many bytes have been recorded so far.
    """

    share: float
    collected: Callable[[], int]
    _last: dict[int, tuple[int, int]] = field(default_factory=dict)  # by optimizer: step, bytes
    _known: set[str] = field(default_factory=set)  # parameters looked at since recording began
    _turn: int = 0
    _waiting: dict[str, Before] = field(default_factory=dict)

    def before(
        self,
        optimizer: Optimizer,
        moves: Sequence[Moved],
        settings: Sequence[tuple[float, ...]],
        step: int,
    ) -> None:
        """An optimizer is about to move: keep its state if that is due."""
        self._waiting = {}
        due = self._is_due(optimizer, moves, step)
        for move in moves:
            watched = move.watched
            first = watched.name not in self._known
            if watched.rule is None or not (due or first):
                continue
            self._known.add(watched.name)
            self._waiting[watched.name] = self._look(optimizer, move, settings, whole=first)
        if due:
            self._last[id(optimizer)] = step, self.collected()
            self._turn += 1

    def _is_due(self, optimizer: Optimizer, moves: Sequence[Moved], step: int) -> bool:
        last, collected = self._last.setdefault(id(optimizer), (step, self.collected()))
        if step - last < MIN_EVERY:
            return False
        size = sum(_bytes(optimizer, m.watched) for m in moves if m.watched.rule is not None)
        return (self.collected() - collected) * self.share >= size

    def _look(
        self,
        optimizer: Optimizer,
        move: Moved,
        settings: Sequence[tuple[float, ...]],
        *,
        whole: bool,
    ) -> Before:
        watched = move.watched
        rule, parameter = watched.rule, watched.parameter.detach()
        assert rule is not None
        assert watched.parameter.grad is not None
        found = rule.found(optimizer.state.get(watched.parameter))
        state = {n: t.detach().to("cpu", copy=True) for n, t in (found or {}).items()}
        names = dict(zip(rule.settings, settings[move.group], strict=True))
        coupled = names["weight_decay"] and not names.get("decoupled")
        if state and (whole or coupled):
            state[WEIGHTS] = parameter.to("cpu", copy=True)
        rows = self._rows(parameter, whole=whole)
        gradient = watched.parameter.grad.detach()
        before, slope = (_part(t, rows).to("cpu", copy=True) for t in (parameter, gradient))
        return Before(state, bool(state), rows, before, slope)

    def _rows(self, parameter: Tensor, *, whole: bool) -> slice:
        height = parameter.shape[0] if parameter.dim() else 1
        part = max(1, CHECKED * height // max(parameter.numel(), 1))
        if whole or part >= height:
            return slice(0, height)
        start = self._turn * part % height
        return slice(start, min(start + part, height))

    def after(
        self,
        moves: Sequence[Moved],
        settings: Sequence[tuple[float, ...]],
        unscale: float,
        unexplained: Callable[[Watched, str], None],
    ) -> dict[str, Tensor]:
        """The optimizer has moved: what is to be kept with this step, by name."""
        waiting, self._waiting = self._waiting, {}
        kept: dict[str, Tensor] = {}
        for move in moves:
            before = waiting.get(move.watched.name)
            if before is None:
                continue
            off = self._predict(move, before, settings[move.group], unscale)
            if off is not None:
                unexplained(move.watched, off)
            if before.kept:
                kept |= {f"{n}/{move.watched.name}": t for n, t in before.state.items()}
        return kept

    def _predict(
        self, move: Moved, before: Before, settings: tuple[float, ...], unscale: float
    ) -> str | None:
        """What is wrong with the rows' step, if it is not what the rule says."""
        watched, rule = move.watched, move.watched.rule
        assert rule is not None
        single = watched.dtype != torch.float64
        known = Settings(dict(zip(rule.settings, settings, strict=True)), single)
        weights, gradient = before.weights.double(), before.gradient.double() * unscale
        state = rule.fresh(weights.shape, known)
        momentum = torch.zeros_like(weights)
        for name, value in before.state.items():
            number = name in rule.numbers
            # a copy: what is kept must stay as it was before the step
            own = value if number else _part(value, before.rows)
            state[name] = own if number else own.to(torch.float64, copy=True)
        if rule.momentum is not None:
            momentum = state[rule.momentum]
        step = rule.advance(state, known, gradient, weights)
        magnified = rule.condition(state, known)
        pull, drive = step.factor("wm") * momentum, step.factor("nw") * gradient
        predicted = step.factor("ww") * weights + pull + drive
        real = _part(watched.parameter.detach(), before.rows).cpu().double()
        moved = pull.abs() + drive.abs()
        eps = watched.audit.eps
        allowed = SLACK * eps * (weights.abs() + predicted.abs() + magnified * moved)
        off = (real - predicted).abs()
        if bool((off <= allowed + watched.audit.tiny).all()):
            return None
        worst = float((off / (allowed + watched.audit.tiny)).nan_to_num(torch.inf).max())
        return (
            f"an update of its weights is {worst:.3g} times further from what the rule "
            f"{rule.name!r} says than rounding allows (largest difference {float(off.max()):.3g}). "
            "Was it changed outside optimizer.step(), or is the optimizer not what it says?"
        )


def lost_in_rounding(watched: Watched) -> bool:
    """Whether entries of a bias get nothing but rounding from its patterns: before a norm, say.

    An adaptive rule divides that by its own size and moves them as far as any other. Only the
    gradient itself then tells where to.
    """
    audit = watched.audit
    if watched.rule is None or audit.width != 1 or watched.dtype == torch.float64:
        return False
    if audit.gradient_eps > audit.eps:  # autocast: all is coarse, and little of it lost
        return False
    expected = np.abs(audit.expected)
    typical = audit.gross / sqrt(max(1, len(expected)))
    lost = (expected > 0) & (expected < CANCELS * audit.gradient_eps * typical)
    return bool(lost.mean() > LOST) if lost.size else False


def bytes_of_states(optimizer: Optimizer, step_bytes: int, steps: int, share: float) -> int:
    """What the kept states of an optimizer will take, if a step brings so many bytes."""
    rule, size = adaptive_rule_of(optimizer), 0
    for group in optimizer.param_groups if rule is not None else ():
        assert rule is not None
        names = dict(zip(rule.settings, rule.read(group), strict=True))
        coupled = bool(names["weight_decay"] and not names.get("decoupled"))
        tensors = len(rule.remembered(names)) + coupled
        size += tensors * sum(p.numel() * p.element_size() for p in group["params"])
    every = max(MIN_EVERY, ceil(size / (share * max(step_bytes, 1))))
    return size * ((steps - 1) // every)


def _part(tensor: Tensor, rows: slice) -> Tensor:
    return tensor[rows] if tensor.dim() else tensor


def _bytes(optimizer: Optimizer, watched: Watched) -> int:
    state: Mapping[str, Tensor] = optimizer.state.get(watched.parameter) or {}
    return sum(t.numel() * t.element_size() for t in state.values() if isinstance(t, Tensor))
