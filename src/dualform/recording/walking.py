"""From one fingerprint towards the next, step by step, beside weights whose step is looked for.

Each parameter has a walker: it starts from a recorded fingerprint and takes every recorded step, by
the patterns themselves, along the probe v; at each it says how far the real weights and the
optimizer's buffer are, in units of what rounding allows.

Patterns stored in 16 bits lead only so far: a walker that goes by them must allow for what storing
has lost, which is more than neighbouring steps may differ by. There a second walker goes along: by
u·(grad v), of which the log has every step as training saw it. It knows one number where the first
knows a row of them, but knows it to the last digit. Both must agree.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import sqrt
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from dualform.errors import QueryError
from dualform.layers.kinds import parameter_shape
from dualform.learning_rules import ParameterLog, transitions
from dualform.memory import Memory
from dualform.recording.audit import SLACK_GRADIENT
from dualform.recording.parameters import Watched
from dualform.recording.whereabouts import SLACK_WEIGHTS, as_matrix, largest_row

Reals = NDArray[np.float64]

DOUBLE = float(np.finfo(np.float64).eps)

STORED_DEVIATIONS = 6.0
"""How many standard deviations of what storing in 16 bits loses a step's sum may be off by."""


class Target:
    """One parameter of the model as it is now, and what the memory knows of it."""

    def __init__(self, memory: Memory, watched: Watched) -> None:
        audit = watched.audit
        self.name, self.audit = watched.name, audit
        self.parameter, self.remembered = watched.parameter, watched.remembered
        self.learned_by = watched.rule
        self.weights = audit.weights.copy()
        self.momentum = None if watched.momentum is None else audit.momentum.copy()
        self.spread_of_momentum = (
            0.0 if watched.momentum is None else largest_row(as_matrix(watched.momentum.detach()))
        )
        self.size = max(audit.spread, float(np.abs(self.weights).max(initial=0.0)), 1e-300)
        """About that of the weights."""
        self.log = known_log(memory, watched.name)
        known = memory.parameters[watched.name]
        self.rule = known.adaptive if memory.exact else None
        """The adaptive rule it was trained by, if all it did is explained."""
        self.can_be_replayed = (
            self.rule is not None
            and known.coverage in ("patterns", "steps")
            and known.accumulated_since is None
        )
        self._accumulated_since = known.accumulated_since
        # Two float64 sums of the same terms, each in an order of its own.
        terms = as_matrix(watched.parameter.detach()).cpu().double().abs() @ audit.probe64.abs()
        self.exact = (audit.width + 16) * DOUBLE * float(terms.max() if terms.numel() else 0.0)

    def can_be_replayed_to(self, step: int) -> bool:
        """Whether every gradient up to a step is kept, though later ones may be but a sum."""
        since = self._accumulated_since
        return self.can_be_replayed or (
            self.rule is not None and since is not None and step <= since
        )

    def is_at(self, weights: Reals) -> bool:
        """Whether the parameter has exactly this fingerprint."""
        return off_by(self.weights, weights) <= self.exact

    def has_momentum_of(self, momentum: Reals | None) -> bool:
        """Whether the optimizer's buffer is this one; a new optimizer has none, which is well."""
        if self.momentum is None:
            return True
        if momentum is None:
            return False
        scale = max(self.spread_of_momentum, float(np.abs(momentum).max(initial=0.0)))
        return off_by(self.momentum, momentum) <= (self.audit.width + 16) * DOUBLE * scale


@dataclass(frozen=True)
class Print:
    """What all parameters looked like after a number of updates."""

    step: int
    weights: dict[str, Reals]
    momentum: dict[str, Reals]
    states: Mapping[str, Mapping[str, torch.Tensor]] = field(default_factory=dict)
    """Of what else adaptive optimizers remembered, by parameter and name."""


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
        # Σ of gross gradients that acted on W and m, and of what storing has put them off by.
        self._blur, self._lost = np.zeros(2), np.zeros(2)

    def advance(self, way: Way, offset: int) -> None:
        """One step; what it may be off by acts on like everything else."""
        matrix, vector = way.matrix[offset], way.vector[offset]
        size, spread = np.abs(matrix), np.abs(vector)
        self._blur = size @ self._blur + spread * float(way.gross[offset])
        self._lost = size @ self._lost + spread * float(way.stored[offset])
        np.copyto(self._audit.projected, way.gradient[offset])
        self._audit.advance((*matrix.ravel().tolist(), *vector.tolist()))
        self._size = max(self._size, float(np.abs(self._audit.momentum).max(initial=0.0)))

    @property
    def _allowed(self) -> Reals:
        """What the gradients' own rounding, and that of storing them, may have put W and m off."""
        rounded: Reals = SLACK_GRADIENT * self._audit.gradient_eps * self._blur
        return rounded + STORED_DEVIATIONS * self._lost

    @property
    def weights_off(self) -> float:
        """How far the real weights are, in units of what rounding allows."""
        bound = self._audit.weights_bound + float(self._allowed[0])
        return off_by(self._audit.weights, self.goal) / bound

    @property
    def momentum_off(self) -> float:
        """The same of the optimizer's buffer; 0 where it has none."""
        if self.buffer is None:
            return 0.0
        scatter = SLACK_WEIGHTS * sqrt(self._audit.steps + 1) * self._audit.eps * self._size
        bound = scatter + float(self._allowed[1]) + self._audit.tiny
        return off_by(self._audit.momentum, self.buffer) / bound

    @property
    def state(self) -> bytes:
        return self._audit.weights.tobytes()


def walk(
    memory: Memory, targets: Sequence[Target], start: Print, end: Print
) -> Iterator[Candidate]:
    """Every step strictly between two fingerprints, compared with the model."""
    walkers: list[tuple[Walker, Way]] = []
    for target in targets:
        by_patterns = _way_by_patterns(memory, target, start.step, end.step)
        if by_patterns is not None:
            walkers.append((Walker(target, start, along_sketch=False), by_patterns))
        if by_patterns is None or by_patterns.stored.any():
            by_log = _way_by_log(memory, target, start.step, end.step)
            walkers.append((Walker(target, start, along_sketch=True), by_log))
    for offset, step in enumerate(range(start.step + 1, end.step)):
        for walker, way in walkers:
            walker.advance(way, offset)
        worst = max((walker for walker, _ in walkers), key=lambda w: w.momentum_off)
        yield Candidate(
            step,
            max(walker.weights_off for walker, _ in walkers),
            worst.momentum_off,
            worst.name,
            b"".join(walker.state for walker, _ in walkers),
        )


class Way(NamedTuple):
    """What leads from one fingerprint to the next: M [n, 2, 2], N [n, 2], the gradients.

    `gradient` is G v [n, d0], or u·(G v) [n, 1]; `gross` [n] what its rounding scales with,
    `stored` [n] the deviation that storing patterns has put it off by.
    """

    matrix: Reals
    vector: Reals
    gradient: Reals
    gross: Reals
    stored: Reals


def _way_by_log(memory: Memory, target: Target, start: int, stop: int) -> Way:
    """By u·(G v) of every step, as training saw it."""
    assert target.log is not None
    seen = memory.audit_projections(target.name)[start:stop]
    matrix, vector = transitions(replace(target.log, kappa=np.ones(len(target.log))))
    rule = matrix[start:stop], vector[start:stop]
    return Way(*rule, seen[:, None], np.abs(seen), np.zeros(len(seen)))


def _way_by_patterns(memory: Memory, target: Target, start: int, stop: int) -> Way | None:
    """By the patterns, or by the gradients kept; None where neither is there for all steps."""
    known, log = memory.parameters[target.name], target.log
    assert log is not None
    matrix, vector = (part[start:stop] for part in transitions(log))
    zeros = np.zeros(stop - start)
    since = known.accumulated_since
    if known.coverage == "patterns" and memory.every == 1:
        summed = _sum_patterns(memory, target, start, stop)
        return None if summed is None else Way(matrix, vector, *summed)
    if known.coverage in ("steps", "accumulated") and (since is None or since >= stop):
        gradient, gross = np.zeros((stop - start, known.height)), zeros.copy()
        for step, kept in memory.step_gradients(target.name):
            if start <= step < stop:
                gradient[step - start] = target.audit.project(kept)
                gross[step - start] = float(kept.double().norm()) / sqrt(max(known.width, 1))
        return Way(matrix, vector, gradient, gross, zeros)
    if known.coverage == "untrained":
        return Way(matrix, vector, np.zeros((stop - start, known.height)), zeros, zeros)
    return None


def _sum_patterns(
    memory: Memory, target: Target, start: int, stop: int
) -> tuple[Reals, Reals, Reals] | None:
    """Σ δ (x·v) over all patterns each step applied, and what that may be off by, as in `Way`.

    None for a layer that is some rows of the parameter.
    """
    known, log = memory.parameters[target.name], target.log
    assert log is not None
    applied = log.applied[start:stop]
    first = int(np.where(applied, log.first[start:stop], start).min(initial=start))
    sums, squares = np.zeros((stop - first, known.height)), np.zeros((stop - first, 3))
    eps = 0.0
    for name in known.layers:
        layer = memory.layer(name)
        weight = target.name == layer.weight
        expected = (layer.out_features, 1)
        if weight:
            expected = parameter_shape(layer.kind, layer.in_features, layer.out_features)
        if (known.height, known.width) != expected:
            return None
        _add_patterns(memory, name, weight, target.audit.probe64, first, sums, squares)
        eps = max(eps, layer.stored_eps)
    sizes = np.stack([np.sqrt(squares[:, 0] * squares[:, 1]), np.sqrt(squares[:, 2])])
    sizes /= sqrt(max(known.width, 1))
    reach = [slice(max(f - first, 0), s - first + 1) for s, f in _reach(log, start, stop)]
    return (
        np.stack([sums[part].sum(0) for part in reach]),
        np.array([sizes[0, part].sum() for part in reach]),
        np.array([eps / sqrt(6) * sizes[1, part].sum() for part in reach]),
    )


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
    """G v of every step from `first` on, and Σ‖δ‖², Σ‖x‖², Σ‖δ‖²‖x‖²."""
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
        reaches = np.ones(len(keys))
        if not weight:
            np.add.at(sums, at, signals.numpy())
        elif layer.kind == "embedding":
            np.add.at(sums, (at, keys[:, 0].long().numpy()), (signals @ probe).numpy())
        else:
            rows, others = (signals, keys) if layer.kind == "linear" else (keys, signals)
            np.add.at(sums, at, (rows * (others @ probe)[:, None]).numpy())
            reaches = keys.square().sum(1).numpy()
        lengths = signals.square().sum(1).numpy()
        np.add.at(squares, at, np.column_stack([lengths, reaches, lengths * reaches]))


def known_log(memory: Memory, name: str) -> ParameterLog | None:
    """What the optimizer did with a parameter; None where its learning rule is not known."""
    try:
        return memory.log(name)
    except QueryError:
        return None


def off_by(one: Reals, other: Reals) -> float:
    off = float(np.abs(one - other).max(initial=0.0))
    return off if np.isfinite(off) else float("inf")
