"""One parameter followed through its replay, with what rounding may have put each entry off by.

A replay in float64 (`replay.py`) is not where training in float32 went, to the last digit. How far
honest rounding can be from it tells rounding from tampering: for `verify`, and for a checkpoint
that a run is resumed from.

Why it is hard: an adaptive rule divides by what it remembers, so the roundings of a gradient count
by the size of the gradient itself. An entry whose gradient is nothing but rounding still moves by
the learning rate, and no sum of patterns can tell where to. So bounds are kept entry by entry,
through the same recursion: the variance of the error in the gradient (eps of its gross sum), in the
second moments, in m, and in W. Entries like that have a bound as wide as their way; all others have
one of a few roundings.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf, sqrt

import numpy as np
import torch
from torch import Tensor

from dualform.layers.kinds import write
from dualform.learning_rules import State, coupled_decay, loss_gradient
from dualform.memory.layer import LayerMemory
from dualform.memory.memory import Memory
from dualform.memory.replay import Part, Replay, Taken

AGREEING = 16.0
"""Summing n parts of one sign leaves, rounded one after the other, up to √n / 6 of eps times their
sum; of any sign, a fifth. So what is left is taken for 1 + √n / this many times as large."""

CREEP = 1024.0
"""Below how many units in the last place of the weight an update may repeat its rounding."""

ROOM = 3.0
"""How many times a systematic loss may be exceeded: sizes are estimates."""

DEVIATIONS = 20.0
"""How many standard deviations of accumulated rounding the worst of all entries may show."""

OTHERS = 4.0
"""How many times the second moments' own error what is made of them may have, after each step."""

LONG, STRIDE = 512, 4
"""In a run of so many steps, roundings are followed at every fourth of them, and count for four."""


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


class Followed:
    """One parameter on its way: (W, m) and what is remembered, and what each may be off by.

    `take` every update of `replay.forward()`, in order.
    """

    def __init__(self, memory: Memory, name: str, at: int) -> None:
        known = memory.parameters[name]
        self.name, self.replay = name, Replay(memory, name, at)
        self.eps = float(torch.finfo(known.dtype).eps)
        writers = self.replay.gradients.writers.values()
        dtypes = [float(torch.finfo(layer.dtype).eps) for layer in writers]
        self.gradient_eps = max([known.eps, self.eps, *dtypes])
        self.stored = max([0.0, *(layer.stored_eps for layer in writers)]) / sqrt(6)
        self.rows = known.height
        self.probe, self.sketch = memory.probe(name).double(), memory.sketch(name).double()
        self.whole = Part.whole(memory, name)
        self.errors = Roundings.none(known.shape, self.eps)
        self.state: State | None = None
        """What is remembered after the last update taken."""
        self.projections, self.gross = np.zeros(at), np.zeros(at)
        """u·(gradient v) of every step, and what its rounding scales with."""
        self._stride = STRIDE if at >= LONG else 1
        self._kept = [step for step in self.replay.kept if step > 0]
        self._since = 0  # updates, from the last kept state on

    def take(self, done: Taken) -> None:
        """One update further."""
        while self._kept and self._kept[0] <= done.step:  # the kept state counts from here on
            self._kept.pop(0)
            self.errors.second.zero_()
            self._since = 0
        self._since += 1
        blur = self._look(done, whole=done.step % self._stride == 0)
        if blur is not None:
            self.errors.add(self.replay, done, self.whole, blur, self._stride)
        self.whole.take(done, done.gradient)
        self.state = done.state

    def may_be_off(self, name: str, value: Tensor) -> Tensor:
        """How far each entry of what the optimizer remembers under a name may be from the replay.

        `value` is what it is said to be.
        """
        rule, errors = self.replay.log.rule, self.errors
        if name == rule.second:
            deviation = errors.second.sqrt()
        elif name == rule.momentum:
            deviation = errors.momentum.sqrt()
        else:
            deviation = self._follows_second(name, value)
        return DEVIATIONS * deviation + 4 * self.eps * value.abs() + self.smallest

    def _follows_second(self, name: str, value: Tensor) -> Tensor:
        """The deviation of what is made of the second moments: about theirs, relative, summed up.

        A mean of gradients may cancel: its error is that of their size.
        """
        assert self.state is not None
        second = self.state[self.replay.log.rule.second]
        relative = self.errors.second.sqrt() / second.clamp_min(1e-300)
        relative = relative.clamp_max(1.0).masked_fill(second == 0, 0.0)
        size = second.sqrt() if name == "grad_avg" else value.abs()
        return OTHERS * (1 + sqrt(self._since)) * (relative + self.eps) * size

    def weights_may_be_off(self, weights: Tensor) -> Tensor:
        """The same of the weights, which are said to be these."""
        allowed = DEVIATIONS * self.errors.weights.sqrt() + ROOM * self.errors.lost
        return allowed + 2 * self.eps * weights.abs() + self.smallest

    @property
    def smallest(self) -> float:
        return float(torch.finfo(self.replay.dtype).smallest_normal)

    # -- one gradient --------------------------------------------------------------------------

    def _look(self, done: Taken, *, whole: bool) -> Tensor | None:
        """Note the step's gradient along both probes; what each entry of it may be off by."""
        step, gradients = done.step, self.replay.gradients
        matrix = done.gradient.reshape(self.rows, -1)
        projected = matrix @ self.probe
        self.projections[step] = float(self.sketch @ projected)
        typical = float(self.probe.norm()) / sqrt(max(1, len(self.probe)))
        if not gradients.writers:
            self.gross[step] = float(matrix.norm()) * typical
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
            self.gross[step] += kappa * float(lengths.sum()) * typical
        if gross is None:
            return None
        blur = gross * sqrt(self.gradient_eps**2 + self.stored**2)
        if float(self.replay.log.kappa[step]) != 1.0:  # measured, and off for all entries alike
            measured = self.gradient_eps * self.gross[step] / float(projected.norm() + 1e-300)
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


def rms(tensor: Tensor) -> float:
    """The root of the mean square of all entries."""
    size = float(tensor.norm())
    if size == inf:  # squares overflow long before numbers do
        largest = float(tensor.abs().max())
        size = largest * float((tensor / largest).norm()) if largest < inf else inf
    return size / sqrt(max(tensor.numel(), 1))
