"""The comparisons of `verify` for parameters trained by Adam and its relatives.

The same questions as for SGD (`checks.py`), answered by one replay of all steps, and one more:

- *steps*: every step's patterns against what training saw of its gradient;
- *fingerprints*: what W v changed by from each fingerprint to the next, and m v;
- *states*: what the optimizer remembered, replayed from one kept state to the next, against what
  was kept there: it finds another β, ε or learning rate in the log, and a state that was edited;
- *weights*: all of W against the model's.

How far honest rounding may be off, entry by entry, is followed on the way
(`memory/following.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from operator import attrgetter

import numpy as np
import torch
from torch import Tensor

from dualform.attention.rounding import DOUBLE
from dualform.attention.verification import Check
from dualform.attention.view import View
from dualform.memory import Fingerprint
from dualform.memory.following import DEVIATIONS, ROOM, Followed, rms
from dualform.memory.states import WEIGHTS

STEP_SLACK = 128.0
"""How many eps a step's projected gradient may differ by, in units of its gross sum."""

STEP_SLACK_16_BITS = 8.0
"""The same for bfloat16 and float16, which sum in float32 and round once."""

STORED_DEVIATIONS = 16.0
"""How many standard deviations of what storing in 16 bits loses a step's sum may be off by."""

FINGERPRINT_DEVIATIONS = 12.0
"""The same for a fingerprint, which is a mean."""

SUM_ROUNDINGS = 16.0
"""How many roundings of float64 the fingerprints at both ends of a stretch may show."""


@dataclass(frozen=True)
class Found:
    """A parameter's checks, its weights as replayed, and how far an entry may be off, relative."""

    checks: list[Check]
    weights: Tensor
    typical: float


def check(view: View, name: str, reference: Tensor | None) -> Found:
    """All comparisons for one parameter that an adaptive rule trained."""
    return _Checking(view, name).run(reference)


class _Checking:
    """One parameter on its way through all steps."""

    def __init__(self, view: View, name: str) -> None:
        memory = view.memory
        self.view, self.name = view, name
        self.followed = Followed(memory, name, view.at)
        self.replay, self.eps = self.followed.replay, self.followed.eps
        begun = self._project(memory.initial(name).double())
        self.prints = [f for f in memory.fingerprints if f.step <= view.at and name in f.values]
        self.last = begun, begun, self.followed.errors.copy()
        self.worst_print = Check(name, "fingerprints", 0.0, self.eps)
        self.worst_state = Check(name, "states", 0.0, self.eps)

    def run(self, reference: Tensor | None) -> Found:
        waiting = list(self.prints)
        states = [step for step in self.replay.kept if step > 0]
        for done in self.replay.forward():
            while waiting and waiting[0].step <= done.step:
                self._compare_print(waiting.pop(0))
            while states and states[0] <= done.step:
                self._compare_state(states.pop(0))
            self.followed.take(done)
        for seen in waiting:
            self._compare_print(seen)
        checks = [self.worst_print]
        if self.replay.kept and self.replay.kept[-1] > 0:
            checks.append(self.worst_state)
        checks += self._steps()
        typical = 0.0
        if reference is not None:
            weights, typical = self._weights(reference.double())
            checks.insert(0, weights)
        return Found(checks, self.followed.whole.weights, typical)

    # -- on the way ----------------------------------------------------------------------------

    def _compare_print(self, seen: Fingerprint) -> None:
        """What W v changed by since the last fingerprint, and m v as it is."""
        before, replayed, errors = self.last
        name, now, whole = self.name, self.followed.errors, self.followed.whole
        values, here = seen.values[name].double(), self._project(whole.weights)
        off = (here - replayed) - (values - before)
        spread = self._spread((now.weights - errors.weights).clamp_min(0.0))
        lost = self._project((now.lost - errors.lost).abs(), absolute=True)
        summed = SUM_ROUNDINGS * DOUBLE * self._project(whole.weights.abs(), absolute=True)
        allowed = FINGERPRINT_DEVIATIONS * spread + ROOM * lost + summed + self.followed.smallest
        scale = rms(values) or 1.0
        found = [Check(name, "fingerprints", rms(off) / scale, rms(allowed) / scale, seen.step)]
        buffer = seen.momentum.get(name)
        if buffer is not None and self.replay.log.rule.momentum is not None:
            off = self._project(whole.momentum) - buffer.double()
            summed = self._project(whole.momentum.abs(), absolute=True)
            allowed = FINGERPRINT_DEVIATIONS * self._spread(now.momentum)
            allowed = allowed + SUM_ROUNDINGS * DOUBLE * summed + self.followed.smallest
            scale = rms(buffer.double()) or 1.0
            one = Check(name, "fingerprints", rms(off) / scale, rms(allowed) / scale, seen.step)
            found.append(one)
        self.worst_print = max([self.worst_print, *found], key=attrgetter("severity"))
        self.last = values, here, now.copy()

    def _compare_state(self, step: int) -> None:
        """What is remembered by now, against what was kept; then the kept one counts."""
        kept, rule, replayed = (
            self.replay.kept_state(step),
            self.replay.log.rule,
            self.followed.state,
        )
        if replayed is None or float(kept["step"]) < float(replayed["step"]):
            return  # another optimizer: it begins anew
        # Counts and other single numbers are told to the last digit.
        off = max(abs(float(kept[n]) - float(replayed[n])) for n in rule.numbers)
        found = [Check(self.name, "states", off, 1e-6, step)]
        for name in rule.tensors:
            if name in kept:
                other = self.followed.whole.momentum if name == rule.momentum else replayed[name]
                allowed = self.followed.may_be_off(name, kept[name])
                found.append(_worst(self.name, "states", kept[name], other, allowed, step))
        if WEIGHTS in kept:
            errors, own = self.followed.errors, kept[WEIGHTS]
            other = replayed[WEIGHTS] if self.replay.couples else self.followed.whole.weights
            allowed = DEVIATIONS * (errors.weights.sqrt() + errors.lost)
            allowed = allowed + 4 * self.eps * own.abs() + self.followed.smallest
            found.append(_worst(self.name, "states", own, other, allowed, step))
        self.worst_state = max([self.worst_state, *found], key=attrgetter("severity"))

    # -- at the end ----------------------------------------------------------------------------

    def _steps(self) -> list[Check]:
        """u·(grad v) of every step by the patterns, against what training saw."""
        view, log, followed = self.view, self.replay.log, self.followed
        if not view.at:
            return []
        noted = view.memory.audit_projections(self.name)[: view.at]
        scale = np.maximum(followed.gross * float(followed.sketch.norm()), np.abs(noted))
        scale = np.maximum(scale, followed.smallest / followed.gradient_eps)
        off = np.where(log.applied, np.abs(followed.projections - noted), 0.0)
        relative = np.where(np.isfinite(off), off / scale, np.inf)
        worst = int(np.argmax(relative))
        slack = STEP_SLACK if followed.gradient_eps < 1e-5 else STEP_SLACK_16_BITS
        bound = slack * followed.gradient_eps + STORED_DEVIATIONS * followed.stored
        return [Check(self.name, "steps", float(relative[worst]), bound, worst)]

    def _weights(self, weights: Tensor) -> tuple[Check, float]:
        """|W − dual| of the worst entry, and what a typical entry may be off by."""
        size = weights.nan_to_num(0, 0, 0).abs()
        allowed = self.followed.weights_may_be_off(size)
        found = _worst(self.name, "weights", weights, self.followed.whole.weights, allowed)
        scale = float(size.max()) if size.numel() else 0.0
        return found, rms(allowed) / (scale or 1.0)

    # -- arithmetic ----------------------------------------------------------------------------

    def _project(self, tensor: Tensor, *, absolute: bool = False) -> Tensor:
        probe = self.followed.probe
        return tensor.reshape(self.followed.rows, -1) @ (probe.abs() if absolute else probe)

    def _spread(self, variance: Tensor) -> Tensor:
        """The deviation of a fingerprint, given the variance of every entry."""
        matrix = variance.reshape(self.followed.rows, -1)
        return (matrix @ self.followed.probe.square()).sqrt()


def check_stated(view: View, name: str, reference: Tensor | None) -> Found:
    """A parameter of which only W − W_0 is kept now and then: it must show its fingerprints.

    W − W_0 and W_0 + (W − W_0) are rounded once each, by the larger of their parts: where weights
    have shrunk, that is W_0. So an entry may be off by `SUM_ROUNDINGS` · eps · (|W_0| + |W|).
    """
    memory = view.memory
    probe, kept = memory.probe(name).double(), memory.learned_steps(name)
    initial, rows = memory.initial(name).double(), memory.parameters[name].height
    worst = Check(name, "fingerprints", 0.0, DOUBLE)
    for seen in memory.fingerprints:
        if seen.step <= view.at and seen.step in kept and name in seen.values:
            weights = initial + memory.learned(name, seen.step)
            scale = rms(weights.abs().reshape(rows, -1) @ probe.abs()) or 1.0
            allowed = rms(_sum_may_be_off(initial, weights).reshape(rows, -1) @ probe.abs())
            off = rms(weights.reshape(rows, -1) @ probe - seen.values[name].double())
            found = Check(name, "fingerprints", off / scale, allowed / scale, seen.step)
            worst = max([worst, found], key=attrgetter("severity"))
    weights = view.base(name)
    checks, allowed_of_each = [worst], _sum_may_be_off(initial, weights)
    if reference is not None:
        own = reference.double()
        checks.insert(0, _worst(name, "weights", own, weights, allowed_of_each))
    scale = float(weights.abs().max()) if weights.numel() else 0.0
    return Found(checks, weights, rms(allowed_of_each) / (scale or 1.0))


def _sum_may_be_off(initial: Tensor, weights: Tensor) -> Tensor:
    """How far each entry of W_0 + (W − W_0), summed in float64, may be from W."""
    smallest = torch.finfo(torch.float64).smallest_normal
    return SUM_ROUNDINGS * DOUBLE * (initial.abs() + weights.abs()) + smallest


def _worst(
    parameter: str,
    kind: str,
    own: Tensor,
    other: Tensor,
    allowed: Tensor,
    step: int | None = None,
) -> Check:
    """The entry that is furthest off in units of what it may be; relative to the largest."""
    if not own.numel():
        return Check(parameter, kind, 0.0, 0.0, step)
    off = (own - other).abs()
    place = int(torch.argmax(torch.where(off.isfinite(), off / allowed, torch.inf)))
    scale = float(own.nan_to_num(0, 0, 0).abs().max()) or 1.0
    residual, bound = (float(t.reshape(-1)[place]) / scale for t in (off, allowed))
    return Check(parameter, kind, residual, bound, step)
