"""Which recorded step do these weights belong to? Found by fingerprint, for a run that is resumed.

A memory knows W v and m v of every parameter every few dozen steps, in float64. There a checkpoint
is told to the last digit. In between the learning rule leads from one fingerprint to the next, up
to the rounding of training, and the checkpoint is compared with every step on the way:

1. along both probes at once: u·(W v) of every step follows from the log alone, which has u·(G v).
   That is cheap for any number of steps, and says which stretches are worth a closer look;
2. there along v only, [d0] numbers per parameter, by the patterns themselves.

Why it is hard: in float32 rounding blurs what the rule predicts, and late in training neighbouring
steps differ little. A step is taken only if weights and momentum buffers agree within the audit's
bounds *and* clearly better than with any other step; weights that did not move at all belong to the
last of the steps they stayed for.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import sqrt

import numpy as np
import torch
from numpy.typing import NDArray

from dualform.errors import QueryError, RecordingError
from dualform.learning_rules import ParameterLog, transitions
from dualform.memory import Memory
from dualform.recording.audit import (
    SLACK_GRADIENT,
    SLACK_HELD,
    SLACK_LOST,
    SLACK_WEIGHTS,
    ParameterAudit,
    as_matrix,
    largest_row,
)
from dualform.recording.parameters import Parameters, Watched

Reals = NDArray[np.float64]

DOUBLE = float(np.finfo(np.float64).eps)

ROUGHLY = 16.0
"""How many times the audit's bounds the first, cheap look allows."""

CLEARLY = 4.0
"""How many times worse every other step must agree."""

STRETCHES = 16
"""At most so many stretches between fingerprints are looked at closely."""


class Target:
    """One parameter of the model as it is now, and what the memory knows of it."""

    def __init__(self, memory: Memory, watched: Watched) -> None:
        audit = watched.audit
        self.name, self.audit = watched.name, audit
        self.weights = audit.weights.copy()
        self.momentum = None if watched.momentum is None else audit.momentum.copy()
        self.spread_of_momentum = (
            0.0 if watched.momentum is None else largest_row(as_matrix(watched.momentum.detach()))
        )
        self.size = max(audit.spread, float(np.abs(self.weights).max(initial=0.0)), 1e-300)
        """About that of the weights."""
        self.log = known_log(memory, watched.name)
        # Two float64 sums of the same terms, each in an order of its own.
        terms = as_matrix(watched.parameter.detach()).cpu().double().abs() @ audit.probe64.abs()
        self.exact = (audit.width + 16) * DOUBLE * float(terms.max() if terms.numel() else 0.0)

    def is_at(self, weights: Reals) -> bool:
        """Whether the parameter has exactly this fingerprint."""
        return _off(self.weights, weights) <= self.exact

    def has_momentum_of(self, momentum: Reals | None) -> bool:
        """Whether the optimizer's buffer is this one; a new optimizer has none, which is well."""
        if self.momentum is None:
            return True
        if momentum is None:
            return False
        scale = max(self.spread_of_momentum, float(np.abs(momentum).max(initial=0.0)))
        return _off(self.momentum, momentum) <= (self.audit.width + 16) * DOUBLE * scale


@dataclass(frozen=True)
class Print:
    """What all parameters looked like after a number of updates."""

    step: int
    weights: dict[str, Reals]
    momentum: dict[str, Reals]


@dataclass(frozen=True)
class Candidate:
    """A step between two fingerprints: how far weights and buffers are, in units of rounding."""

    step: int
    weights: float
    momentum: float
    misfit: str | None
    """The parameter whose momentum buffer agrees least."""
    state: bytes
    """The predicted weights: equal where nothing moved."""

    @property
    def distance(self) -> float:
        return max(self.weights, self.momentum)


def find_step(memory: Memory, parameters: Parameters) -> int:
    """The number of recorded updates after which the model was as it is now.

    `RecordingError` says what is nearest if there is none, or why it cannot be told.
    """
    targets = [Target(memory, watched) for watched in parameters]
    prints = _prints(memory, parameters)
    exact = [p for p in prints if all(t.is_at(p.weights[t.name]) for t in targets)]
    for found in reversed(exact):
        if _misfit(targets, found) is None:
            return found.step
    if any(target.log is None for target in targets):
        raise _nothing_fits(memory, targets, prints, exact)
    rough, apart = _rough_distances(memory, targets, prints)
    pairs = list(itertools.pairwise(prints))
    best = [float(rough[a.step + 1 : b.step].min(initial=np.inf)) for a, b in pairs]
    order = sorted((i for i in range(len(pairs)) if best[i] <= 1.0), key=lambda i: best[i])
    candidates = [
        c
        for i in sorted(order[:STRETCHES])
        for c in _walk(memory, targets, *pairs[i])
        if c.weights <= 1
    ]
    fitting = [c for c in candidates if c.momentum <= 1.0]
    if fitting:
        return _clearest(memory, fitting)
    if candidates:
        nearest = min(candidates, key=lambda c: c.weights)
        assert nearest.misfit is not None
        raise _wrong_momentum(memory, nearest.step, nearest.misfit)
    raise _nothing_fits(memory, targets, prints, exact, apart)


def _clearest(memory: Memory, fitting: Sequence[Candidate]) -> int:
    best = min(fitting, key=lambda c: c.distance)
    close = [c for c in fitting if c.distance < CLEARLY * best.distance or c.state == best.state]
    apart = [c for c in close if c.state != best.state]
    if apart:
        steps = sorted({best.step, *(c.step for c in apart)})
        raise RecordingError(
            f"the model's weights could be those of any of the steps {_listed(steps)} of "
            f"{memory.path}: they moved less in between than rounding can tell. Resume from a "
            f"checkpoint of a step that was committed (nearest: {_nearest_print(memory, best.step)}"
            "); calling recorder.flush() whenever you save a checkpoint makes it one"
        )
    return max(c.step for c in close)


# -- at the fingerprints -------------------------------------------------------------------------


def _prints(memory: Memory, parameters: Parameters) -> list[Print]:
    """The initial state and every fingerprint."""
    weights, momentum = {}, {}
    for watched in parameters:
        weights[watched.name] = watched.audit.project(memory.initial(watched.name))
        buffer = memory.initial_momentum(watched.name)
        if buffer is not None:
            momentum[watched.name] = watched.audit.project(buffer)
    return [Print(0, weights, momentum)] + [
        Print(
            f.step,
            {name: value.numpy() for name, value in f.values.items()},
            {name: value.numpy() for name, value in f.momentum.items()},
        )
        for f in memory.fingerprints
    ]


def _misfit(targets: Sequence[Target], seen: Print) -> str | None:
    """A parameter whose momentum buffer is neither empty nor the memory's."""
    names = (t.name for t in targets if not t.has_momentum_of(seen.momentum.get(t.name)))
    return next(names, None)


# -- between them, roughly -----------------------------------------------------------------------


def _rough_distances(
    memory: Memory, targets: Sequence[Target], prints: Sequence[Print]
) -> tuple[Reals, Reals]:
    """|u·(W_s − W) v| of the worst parameter at every step: in bounds, and relative to its size.

    The bounds are generous. All stretches between fingerprints are walked side by side. At the
    fingerprints themselves it is infinite: those were looked at exactly.
    """
    starts = np.array([p.step for p in prints])
    ends = np.append(starts[1:], starts[-1])
    worst, relative = np.zeros(memory.steps + 1), np.zeros(memory.steps + 1)
    for target in targets:
        log = target.log
        assert log is not None
        matrix, vector = transitions(replace(log, kappa=np.ones(len(log))))
        seen = memory.audit_projections(target.name)
        u = target.audit.sketch
        goal = float(u.dot(target.weights))
        w = np.array([u.dot(p.weights[target.name]) for p in prints])
        m = np.array([u.dot(p.momentum.get(target.name, np.zeros_like(u))) for p in prints])
        travel, path = np.zeros(len(w)), np.zeros(len(w))
        for offset in range(int((ends - starts).max(initial=0)) - 1):
            on = np.flatnonzero(starts + offset + 1 < ends)
            at = starts[on] + offset
            moved = matrix[at, 0, 0] * w[on] + matrix[at, 0, 1] * m[on] + vector[at, 0] * seen[at]
            m[on] = matrix[at, 1, 0] * w[on] + matrix[at, 1, 1] * m[on] + vector[at, 1] * seen[at]
            change, w[on] = np.abs(moved - w[on]), moved
            travel[on] += change**2
            path[on] += change / np.maximum(1.0 - matrix[at, 1, 1] * (log.momentum[at] != 0), 1e-3)
            bound = _rough_bound(target.audit, offset + 1, np.sqrt(travel[on]), path[on])
            off = np.abs(w[on] - goal)
            off = np.where(np.isfinite(off), off, np.inf)
            worst[at + 1] = np.maximum(worst[at + 1], off / bound)
            relative[at + 1] = np.maximum(relative[at + 1], off / target.size)
    worst[starts] = relative[starts] = np.inf
    return worst, relative


def _rough_bound(audit: ParameterAudit, steps: int, travel: Reals, path: Reals) -> Reals:
    scatter = SLACK_WEIGHTS * sqrt(steps + 1) * (audit.spread + travel)
    lost = SLACK_LOST * steps * audit.spread + SLACK_HELD * path
    bound: Reals = ROUGHLY * (audit.eps * (scatter + lost) + audit.tiny)
    return bound


# -- between them, closely -----------------------------------------------------------------------


class Walker:
    """One parameter's way from one fingerprint towards the next, compared with where it is now."""

    def __init__(self, target: Target, seen: Print, along_sketch: bool) -> None:
        name, u = target.name, target.audit.sketch
        weights = seen.weights[name]
        momentum = seen.momentum.get(name, np.zeros_like(weights))
        self.goal, self.buffer = target.weights, target.momentum
        if along_sketch:  # only u·(W v) is known on the way
            weights, momentum, self.goal = (
                np.atleast_1d(u.dot(a)) for a in (weights, momentum, self.goal)
            )
            self.buffer = None if self.buffer is None else np.atleast_1d(u.dot(self.buffer))
        self.name, self.along_sketch = name, along_sketch
        self._audit = copy.copy(target.audit)
        self._audit.weights, self._audit.momentum = weights.copy(), momentum.copy()
        self._audit.projected = np.zeros_like(weights)
        self._audit.steps, self._audit.travel, self._audit.path = 0, 0.0, 0.0
        self._size = max(target.spread_of_momentum, float(np.abs(momentum).max(initial=0.0)))
        self._blur = (0.0, 0.0)  # Σ of gross gradients that acted on W and m: what they round by

    def advance(self, matrix: Reals, vector: Reals, gradient: Reals, gross: float) -> None:
        ww, wm, mw, mm = np.abs(matrix).ravel().tolist()
        nw, nm = np.abs(vector).tolist()
        w, m = self._blur
        self._blur = ww * w + wm * m + nw * gross, mw * w + mm * m + nm * gross
        np.copyto(self._audit.projected, gradient)
        self._audit.advance((*matrix.ravel().tolist(), *vector.tolist()))
        self._size = max(self._size, float(np.abs(self._audit.momentum).max(initial=0.0)))

    @property
    def weights_off(self) -> float:
        """How far the real weights are, in units of what rounding allows."""
        blur = SLACK_GRADIENT * self._audit.gradient_eps * self._blur[0]
        return _off(self._audit.weights, self.goal) / (self._audit.weights_bound + blur)

    @property
    def momentum_off(self) -> float:
        """The same of the optimizer's buffer; 0 where it has none."""
        if self.buffer is None:
            return 0.0
        scatter = SLACK_WEIGHTS * sqrt(self._audit.steps + 1) * self._audit.eps * self._size
        blur = SLACK_GRADIENT * self._audit.gradient_eps * self._blur[1]
        return _off(self._audit.momentum, self.buffer) / (scatter + blur + self._audit.tiny)

    @property
    def state(self) -> bytes:
        return self._audit.weights.tobytes()


def _walk(
    memory: Memory, targets: Sequence[Target], start: Print, end: Print
) -> Iterator[Candidate]:
    """Every step strictly between two fingerprints, compared with the model."""
    walkers, ways = [], []
    for target in targets:
        assert target.log is not None
        gradients = _gradients(memory, target, start.step, end.step)
        walkers.append(Walker(target, start, gradients is None))
        if gradients is None:
            seen = memory.audit_projections(target.name)[start.step : end.step]
            log = replace(target.log, kappa=np.ones(len(target.log)))
            gradients = seen[:, None], np.abs(seen)
        else:
            log = target.log
        ways.append((*(part[start.step : end.step] for part in transitions(log)), *gradients))
    for offset, step in enumerate(range(start.step + 1, end.step)):
        for walker, (matrix, vector, gradient, gross) in zip(walkers, ways, strict=True):
            walker.advance(matrix[offset], vector[offset], gradient[offset], float(gross[offset]))
        worst = max(walkers, key=lambda w: w.momentum_off)
        yield Candidate(
            step,
            max(w.weights_off for w in walkers),
            worst.momentum_off,
            worst.name,
            b"".join(w.state for w in walkers),
        )


def _gradients(memory: Memory, target: Target, start: int, stop: int) -> tuple[Reals, Reals] | None:
    """G v of the steps of a stretch, [n, d0], and what its rounding scales with, [n].

    By the patterns or by the gradients kept; None where neither is there.
    """
    known, log = memory.parameters[target.name], target.log
    assert log is not None
    height, width = known.height, known.width
    applied = log.applied[start:stop]
    first = int(np.where(applied, log.first[start:stop], start).min(initial=start))
    sums, squares = np.zeros((stop - first, height)), np.zeros((stop - first, 2))
    if known.coverage == "patterns" and memory.every > 1:
        return None
    if known.coverage == "patterns":
        for name in known.layers:
            layer = memory.layer(name)
            weight = target.name == layer.weight
            if (height, width) != (layer.out_features, layer.in_features if weight else 1):
                return None
            _add_patterns(memory, name, weight, target.audit.probe64, first, sums, squares)
        sums = np.stack(
            [sums[max(f - first, 0) : s - first + 1].sum(0) for s, f in _reach(log, start, stop)]
        )
        sizes = np.sqrt(squares.prod(1))
        gross = np.array(
            [sizes[max(f - first, 0) : s - first + 1].sum() for s, f in _reach(log, start, stop)]
        )
        return sums, gross / sqrt(max(width, 1))
    since = known.accumulated_since
    if known.coverage in ("steps", "accumulated") and (since is None or since >= stop):
        gross = np.zeros(stop - start)
        sums = np.zeros((stop - start, height))
        for step, gradient in memory.step_gradients(target.name):
            if start <= step < stop:
                sums[step - start] = target.audit.project(gradient)
                gross[step - start] = float(gradient.double().norm()) / sqrt(max(width, 1))
        return sums, gross
    return (sums, np.zeros(stop - start)) if known.coverage == "untrained" else None


def _reach(log: ParameterLog, start: int, stop: int) -> Iterator[tuple[int, int]]:
    """Each step and the first one whose patterns it applied."""
    for step in range(start, stop):
        yield step, int(log.first[step]) if log.applied[step] else step


def _add_patterns(
    memory: Memory,
    name: str,
    weight: bool,
    probe: torch.Tensor,
    first: int,
    sums: Reals,
    squares: Reals,
) -> None:
    """Σ δ (x·v) of every step from `first` on, and Σ‖δ‖², Σ‖x‖²."""
    layer = memory.layer(name)
    steps = layer.patterns["step"]
    low, high = np.searchsorted(steps, [first, first + len(sums)]).tolist()
    for block in layer.blocks():
        assert block.keys is not None
        assert block.error_signals is not None
        here = slice(max(low - block.start, 0), max(high - block.start, 0))
        keys, signals = block.keys[here].double(), block.error_signals[here].double()
        if not len(keys):
            continue
        at = steps[block.start + here.start :][: len(keys)] - first
        along = keys @ probe if weight else torch.ones(len(keys), dtype=torch.float64)
        np.add.at(sums, at, (signals * along[:, None]).numpy())
        np.add.at(squares[:, 0], at, signals.square().sum(1).numpy())
        np.add.at(squares[:, 1], at, keys.square().sum(1).numpy() if weight else 1.0)


# -- what to say ---------------------------------------------------------------------------------


def _nothing_fits(
    memory: Memory,
    targets: Sequence[Target],
    prints: Sequence[Print],
    exact: Sequence[Print],
    between: Reals | None = None,
) -> RecordingError:
    if exact:
        name = _misfit(targets, exact[-1])
        assert name is not None
        return _wrong_momentum(memory, exact[-1].step, name)
    apart = np.full(memory.steps + 1, np.inf) if between is None else between
    for seen in prints:
        apart[seen.step] = max(_off(seen.weights[t.name], t.weights) / t.size for t in targets)
    nearest = int(np.argmin(apart))
    steps = "" if between is None else ", and with the steps in between as the log predicts them"
    return RecordingError(
        f"the model's weights are not those of any step of {memory.path}. They were compared with "
        f"the {len(prints)} fingerprints of steps 0 to {memory.steps}{steps}. The nearest is step "
        f"{nearest}, where they still differ by {apart[nearest]:.2g} of their size. Load a "
        f"checkpoint of this run, saved between two updates (step {memory.steps} is the last one "
        "recorded), or record into a new path"
    )


def _wrong_momentum(memory: Memory, step: int, name: str) -> RecordingError:
    return RecordingError(
        f"the model's weights are those of step {step} of {memory.path}, but the optimizer's "
        f"momentum buffer of {name!r} is neither the one recorded at that step nor empty, so what "
        "it holds would have no pattern behind it. Load the optimizer's state of the same "
        "checkpoint, start with a new optimizer, or record into a new path"
    )


def _nearest_print(memory: Memory, step: int) -> int:
    return min((f.step for f in memory.fingerprints), key=lambda s: abs(s - step), default=0)


def _listed(steps: Sequence[int]) -> str:
    if len(steps) > 8:
        return f"{steps[0]} to {steps[-1]}"
    return ", ".join(map(str, steps))


def known_log(memory: Memory, name: str) -> ParameterLog | None:
    """What the optimizer did with a parameter; None where its learning rule is not known."""
    try:
        return memory.log(name)
    except QueryError:
        return None


def _off(one: Reals, other: Reals) -> float:
    off = float(np.abs(one - other).max(initial=0.0))
    return off if np.isfinite(off) else float("inf")
