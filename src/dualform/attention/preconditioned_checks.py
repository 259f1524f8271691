"""The comparisons of `verify` for parameters trained by Adam and its relatives.

The same questions as for SGD (`checks.py`), answered by one replay of all steps, and one more:

- *steps*: every step's patterns against what training saw of its gradient;
- *fingerprints*: what W v changed by from each fingerprint to the next, and m v;
- *states*: what the optimizer remembered, replayed from one kept state to the next, against what
  was kept there: it finds another β, ε or learning rate in the log, and a state that was edited;
- *weights*: all of W against the model's.

Why it is hard: such a rule divides by what it remembers, so the roundings of a gradient count by
the size of the gradient itself. An entry whose gradient is nothing but rounding still moves by the
learning rate, and no sum of patterns can tell where to. So bounds are kept entry by entry, through
the same recursion: the variance of the error in the gradient (eps of its gross sum), in the second
moments, in m, and in W. Entries like that have a bound as wide as their way; all others have one of
a few roundings.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import sqrt

import numpy as np
import torch
from torch import Tensor

from dualform.attention import engine
from dualform.attention.rounding import CREEP, DOUBLE, ROOM
from dualform.attention.verification import Check
from dualform.attention.view import View
from dualform.layers.kinds import write
from dualform.learning_rules import State, coupled_decay, loss_gradient
from dualform.memory import Fingerprint, LayerMemory
from dualform.memory.replay import Part, Replay, Taken
from dualform.memory.states import WEIGHTS

STEP_SLACK = 128.0
"""How many eps a step's projected gradient may differ by, in units of its gross sum."""

STEP_SLACK_16_BITS = 8.0
"""The same for bfloat16 and float16, which sum in float32 and round once."""

STORED_DEVIATIONS = 16.0
"""How many standard deviations of what storing in 16 bits loses a step's sum may be off by."""

DEVIATIONS = 20.0
"""How many standard deviations of accumulated rounding the worst of all entries may show."""

FINGERPRINT_DEVIATIONS = 12.0
"""The same for a fingerprint, which is a mean."""

SUM_ROUNDINGS = 16.0
"""How many roundings of float64 the fingerprints at both ends of a stretch may show."""


LONG, STRIDE = 512, 4
"""In a run of so many steps, roundings are followed at every fourth of them, and count for four."""


@dataclass(frozen=True)
class Found:
    """A parameter's checks, its weights as replayed, and how far an entry may be off, relative."""

    checks: list[Check]
    weights: Tensor
    typical: float


@dataclass
class Roundings:
    """The variance of the error of every entry: of W, of m, of the second moments; what is lost."""

    eps: float
    weights: Tensor
    momentum: Tensor
    second: Tensor
    lost: Tensor

    @classmethod
    def none(cls, shape: tuple[int, ...], eps: float) -> Roundings:
        zeros = [torch.zeros(shape, dtype=torch.float64) for _ in range(4)]
        return cls(eps, *zeros)

    def add(self, replay: Replay, done: Taken, whole: Part, blur: Tensor, steps: int) -> None:
        """So many steps like this one: `blur` is what its gradient may be off by, one deviation."""
        rule, settings = replay.log.rule, replay.log.at(done.step, replay.dtype)
        keep, bring = rule.fading(settings)
        noise = self.eps * self.eps / 12
        gradient, blur2 = done.gradient, blur * blur
        size = whole.weights * whole.weights
        if coupled := coupled_decay(settings):  # weights are part of the gradient, with their error
            gradient = loss_gradient(settings, gradient, whole.weights)
            own = (self.weights + self.eps**2 * (size + gradient * gradient)) * coupled**2
            blur2 = blur2 + own
        second = done.state[rule.second]
        came = (4 * bring * bring) * (gradient * gradient * blur2 + blur2 * blur2)
        self.second.mul_(keep ** (2 * steps)).add_(came, alpha=steps)
        self.second.addcmul_(second, second, value=steps * noise)
        relative = (0.25 * self.second / (second * second).clamp_min(1e-300)).clamp_max(1.0)
        relative = relative.masked_fill(second == 0, 0.0) + noise
        condition = rule.condition(done.state, settings)
        relative = (relative * condition**2).clamp_max(1.0)
        step = done.rule
        reach, into = step.reach, step.factor("nm")
        update = step.factor("wm") * whole.momentum + reach * gradient
        moved = update * update
        self.weights.add_(reach * reach * blur2, alpha=steps)
        self.weights.addcmul_(relative, moved, value=steps)
        self.weights.add_(size + moved, alpha=steps * noise)
        self.momentum.mul_(step.mm ** (2 * steps)).add_(into * into * blur2, alpha=steps)
        self.momentum.addcmul_(whole.momentum, whole.momentum, value=steps * noise)
        came = into * gradient
        self.momentum.addcmul_(came, came, value=4 * steps * noise)
        if isinstance(into, Tensor):
            self.momentum.add_(relative * came * came, alpha=steps)
        creeps = moved < (CREEP * self.eps) ** 2 * size
        slow = torch.where(creeps, size.sqrt() * (self.eps / sqrt(12)), 0.0)
        self.lost.add_(slow, alpha=steps).add_(update.abs(), alpha=steps * self.eps)

    def copy(self) -> Roundings:
        parts = (self.weights, self.momentum, self.second, self.lost)
        return Roundings(self.eps, *(part.clone() for part in parts))


@dataclass
class Seen:
    """What the replay meets on its way, step by step."""

    projections: engine.Reals
    gross: engine.Reals
    checks: list[Check] = field(default_factory=list)


def check(view: View, name: str, reference: Tensor | None) -> Found:
    """All comparisons for one parameter that an adaptive rule trained."""
    return _Checking(view, name).run(reference)


class _Checking:
    """One parameter on its way through all steps."""

    def __init__(self, view: View, name: str) -> None:
        memory = view.memory
        self.view, self.name = view, name
        self.replay = Replay(memory, name, view.at)
        known = memory.parameters[name]
        self.eps = float(torch.finfo(known.dtype).eps)
        writers = self.replay.gradients.writers.values()
        dtypes = [float(torch.finfo(layer.dtype).eps) for layer in writers]
        self.gradient_eps = max([known.eps, self.eps, *dtypes])
        self.stored = max([0.0, *(layer.stored_eps for layer in writers)]) / sqrt(6)
        self.rows = known.height
        self.stride = STRIDE if view.at >= LONG else 1
        self.probe, self.sketch = memory.probe(name).double(), memory.sketch(name).double()
        begun = memory.initial(name).double()
        self.whole = Part.whole(memory, name)
        self.errors = Roundings.none(known.shape, self.eps)
        self.seen = Seen(np.zeros(view.at), np.zeros(view.at))
        self.prints = [f for f in memory.fingerprints if f.step <= view.at and name in f.values]
        self.last = self._project(begun), self._project(begun), self.errors.copy()
        self.worst_print = Check(name, "fingerprints", 0.0, self.eps)
        self.worst_state = Check(name, "states", 0.0, self.eps)

    def run(self, reference: Tensor | None) -> Found:
        waiting = list(self.prints)
        states = [step for step in self.replay.kept if step > 0]
        state: State | None = None
        for done in self.replay.forward():
            while waiting and waiting[0].step <= done.step:
                self._compare_print(waiting.pop(0))
            while states and states[0] <= done.step:
                self._compare_state(states.pop(0), state)
            blur = self._look(done, whole=done.step % self.stride == 0)
            if blur is not None:
                self.errors.add(self.replay, done, self.whole, blur, self.stride)
            self.whole.take(done, done.gradient)
            state = done.state
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
        return Found(checks, self.whole.weights, typical)

    # -- one step ------------------------------------------------------------------------------

    def _look(self, done: Taken, *, whole: bool) -> Tensor | None:
        """Note the step's gradient along both probes; what each entry of it may be off by."""
        step, gradients = done.step, self.replay.gradients
        matrix = done.gradient.reshape(self.rows, -1)
        projected = matrix @ self.probe
        self.seen.projections[step] = float(self.sketch @ projected)
        typical = float(self.probe.norm()) / sqrt(max(1, len(self.probe)))
        if not gradients.writers:
            self.seen.gross[step] = float(matrix.norm()) * typical
            return done.gradient.abs() * self.eps if whole else None
        kappa = abs(float(self.replay.log.kappa[step]))
        gross = torch.zeros_like(done.gradient) if whole else None
        for layer in gradients.writers.values():
            keys, signals, _ = gradients.patterns(layer, step)
            if not len(keys):
                continue
            lengths = signals.norm(dim=1)
            if self.name == layer.weight and layer.kind != "embedding":
                lengths = lengths * keys.norm(dim=1)
            if gross is not None:
                self._add_gross(gross[layer.rows_of(self.name)], layer, kappa, keys, signals)
            self.seen.gross[step] += kappa * float(lengths.sum()) * typical
        if gross is None:
            return None
        blur = gross * sqrt(self.gradient_eps**2 + self.stored**2)
        if float(self.replay.log.kappa[step]) != 1.0:  # measured, and off for all entries alike
            measured = self.gradient_eps * self.seen.gross[step] / float(projected.norm() + 1e-300)
            blur = blur + min(measured, 1.0) * done.gradient.abs()
        return blur

    def _add_gross(
        self, place: Tensor, layer: LayerMemory, kappa: float, keys: Tensor, signals: Tensor
    ) -> None:
        """Σ |δ||x| of every entry; of a matrix what Cauchy and Schwarz allow it to be, at most."""
        if self.name != layer.weight:
            place += kappa * sqrt(len(signals)) * signals.norm(dim=0)
        elif layer.kind == "embedding":
            write(layer.kind, place, keys, kappa * signals.abs())
        else:
            a, b = (signals, keys) if layer.kind == "linear" else (keys, signals)
            place += kappa * torch.outer(a.norm(dim=0), b.norm(dim=0))

    # -- on the way ----------------------------------------------------------------------------

    def _compare_print(self, seen: Fingerprint) -> None:
        """What W v changed by since the last fingerprint, and m v as it is."""
        before, replayed, errors = self.last
        name, now = self.name, self.errors
        values, here = seen.values[name].double(), self._project(self.whole.weights)
        off = (here - replayed) - (values - before)
        spread = self._spread((now.weights - errors.weights).clamp_min(0.0))
        lost = self._project((now.lost - errors.lost).abs(), absolute=True)
        summed = SUM_ROUNDINGS * DOUBLE * self._project(self.whole.weights.abs(), absolute=True)
        allowed = FINGERPRINT_DEVIATIONS * spread + ROOM * lost + summed + self._smallest
        scale = _rms(values) or 1.0
        found = [Check(name, "fingerprints", _rms(off) / scale, _rms(allowed) / scale, seen.step)]
        buffer = seen.momentum.get(name)
        if buffer is not None and self.replay.log.rule.momentum is not None:
            off = self._project(self.whole.momentum) - buffer.double()
            summed = self._project(self.whole.momentum.abs(), absolute=True)
            allowed = FINGERPRINT_DEVIATIONS * self._spread(now.momentum)
            allowed = allowed + SUM_ROUNDINGS * DOUBLE * summed + self._smallest
            scale = _rms(buffer.double()) or 1.0
            one = Check(name, "fingerprints", _rms(off) / scale, _rms(allowed) / scale, seen.step)
            found.append(one)
        self.worst_print = max([self.worst_print, *found], key=severity)
        self.last = values, here, now.copy()

    def _compare_state(self, step: int, replayed: State | None) -> None:
        """What is remembered by now, against what was kept; then the kept one counts."""
        kept, rule = self.replay.kept_state(step), self.replay.log.rule
        if replayed is None or float(kept["step"]) < float(replayed["step"]):
            return  # another optimizer: it begins anew
        # Counts and other single numbers are told to the last digit.
        off = max(abs(float(kept[n]) - float(replayed[n])) for n in rule.numbers)
        found = [Check(self.name, "states", off, 1e-6, step)]
        second = kept[rule.second]
        pairs = [(second, replayed[rule.second], self.errors.second.sqrt())]
        if rule.momentum in kept:
            momentum = self.whole.momentum
            pairs.append((kept[rule.momentum], momentum, self.errors.momentum.sqrt()))
        if WEIGHTS in kept and WEIGHTS in replayed:
            errors = self.errors.weights.sqrt() + self.errors.lost
            pairs.append((kept[WEIGHTS], replayed[WEIGHTS], errors))
        for name in rule.tensors:
            if name in kept and name not in (rule.second, rule.momentum):
                ways = self.errors.second.sqrt() + self.errors.momentum.sqrt()
                spread = (
                    _rms(ways) + float(ways.max()) + 8 * self.eps * float(kept[name].abs().max())
                )
                pairs.append((kept[name], replayed[name], torch.full_like(second, spread)))
        for own, other, deviation in pairs:
            allowed = DEVIATIONS * deviation + 4 * self.eps * own.abs() + self._smallest
            found.append(self._worst("states", own, other, allowed, step))
        self.worst_state = max([self.worst_state, *found], key=severity)
        self.errors.second.zero_()

    # -- at the end ----------------------------------------------------------------------------

    def _steps(self) -> list[Check]:
        """u·(grad v) of every step by the patterns, against what training saw."""
        view, log = self.view, self.replay.log
        if not view.at:
            return []
        noted = view.memory.audit_projections(self.name)[: view.at]
        scale = np.maximum(self.seen.gross * float(self.sketch.norm()), np.abs(noted))
        scale = np.maximum(scale, self._smallest / self.gradient_eps)
        off = np.where(log.applied, np.abs(self.seen.projections - noted), 0.0)
        relative = np.where(np.isfinite(off), off / scale, np.inf)
        worst = int(np.argmax(relative))
        slack = STEP_SLACK if self.gradient_eps < 1e-5 else STEP_SLACK_16_BITS
        bound = slack * self.gradient_eps + STORED_DEVIATIONS * self.stored
        return [Check(self.name, "steps", float(relative[worst]), bound, worst)]

    def _weights(self, weights: Tensor) -> tuple[Check, float]:
        """|W − dual| of the worst entry, and what a typical entry may be off by."""
        errors, size = self.errors, weights.nan_to_num(0, 0, 0).abs()
        allowed = DEVIATIONS * errors.weights.sqrt() + ROOM * errors.lost
        allowed = allowed + 2 * self.eps * size + self._smallest
        found = self._worst("weights", weights, self.whole.weights, allowed, None)
        scale = float(size.max()) if size.numel() else 0.0
        return found, _rms(allowed) / (scale or 1.0)

    # -- arithmetic ----------------------------------------------------------------------------

    def _worst(
        self, kind: str, own: Tensor, other: Tensor, allowed: Tensor, step: int | None
    ) -> Check:
        """The entry that is furthest off in units of what it may be; relative to the largest."""
        if not own.numel():
            return Check(self.name, kind, 0.0, 0.0, step)
        off = (own - other).abs()
        place = int(torch.argmax(torch.where(off.isfinite(), off / allowed, torch.inf)))
        scale = float(own.nan_to_num(0, 0, 0).abs().max()) or 1.0
        residual, bound = (float(t.reshape(-1)[place]) / scale for t in (off, allowed))
        return Check(self.name, kind, residual, bound, step)

    @property
    def _smallest(self) -> float:
        return float(torch.finfo(self.replay.dtype).smallest_normal)

    def _project(self, tensor: Tensor, *, absolute: bool = False) -> Tensor:
        return tensor.reshape(self.rows, -1) @ (self.probe.abs() if absolute else self.probe)

    def _spread(self, variance: Tensor) -> Tensor:
        """The deviation of a fingerprint, given the variance of every entry."""
        return (variance.reshape(self.rows, -1) @ self.probe.square()).sqrt()


def check_stated(view: View, name: str, reference: Tensor | None) -> Found:
    """A parameter of which only W − W_0 is kept now and then: it must show its fingerprints."""
    memory = view.memory
    probe, kept = memory.probe(name).double(), memory.learned_steps(name)
    initial, rows = memory.initial(name).double(), memory.parameters[name].height
    worst = Check(name, "fingerprints", 0.0, DOUBLE)
    for seen in memory.fingerprints:
        if seen.step <= view.at and seen.step in kept and name in seen.values:
            weights = (initial + memory.learned(name, seen.step)).reshape(rows, -1)
            summed = _rms(weights.abs() @ probe.abs()) or 1.0
            off = _rms(weights @ probe - seen.values[name].double()) / summed
            found = Check(name, "fingerprints", off, SUM_ROUNDINGS * DOUBLE, seen.step)
            worst = max([worst, found], key=severity)
    weights = view.base(name)
    checks = [worst]
    if reference is not None and weights.numel():
        scale = float(reference.abs().max()) or 1.0
        off = float((weights - reference.double()).abs().max()) / scale
        checks.insert(0, Check(name, "weights", off, SUM_ROUNDINGS * DOUBLE))
    return Found(checks, weights, SUM_ROUNDINGS * DOUBLE)


def severity(check: Check) -> float:
    """How many times its bound a residual is."""
    if check.residual == 0:
        return 0.0
    if not np.isfinite(check.residual) or check.bound <= 0:
        return float("inf")
    return float(check.residual / check.bound)


def _rms(tensor: Tensor) -> float:
    return float(tensor.norm()) / sqrt(max(tensor.numel(), 1))
