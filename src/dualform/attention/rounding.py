"""How far honest rounding can carry a network away from its dual form: the bounds of `verify`.

Training rounds at every step: the weight, the momentum buffer and the gradient are each stored in
the parameter's dtype. The dual form, summed in float64, has none of that, so the two differ by an
accumulated rounding error, and a bound for it is what tells rounding from tampering.

The model: each rounding is an independent error of standard deviation eps·|value|/√12 (a uniform
error of one unit in the last place), and errors travel through training by the learning rule's own
recursion z ← M z + N G, z = (W, m). So the covariance P of the error in (W, m) follows

    P ← M P Mᵀ + (eps²/12) · diag(w² + u², m²) + eps_g² · N Nᵀ g²

with w the size of the weights, m that of the buffer, u that of the update, and g = Σ_t |δ_t||x_t|
of the step, the *gross* gradient: a sum that cancels has the rounding of its parts (and its factor
κ was measured, not given). eps is the precision that weights are stored in, eps_g the one their
gradients were computed in: the same, or coarser (autocast). For plain SGD it is the familiar
eps · √steps · max|W|. Where momentum lets an error act for 1/(1−μ) steps, or decay lets it fade, P
knows.

Two things are not random and add up linearly. A change smaller than a unit in the last place of the
weight is lost at every step, always the same way: weights of a silent unit do not decay by 1e-8 a
step in float32, whatever the rule says. So decay below resolution counts as `lost`, and an entry
that should have moved by less than a unit per step may not have moved at all (`unmoved`). Updates
that are small and hardly change (full batches, a tiny learning rate) are rounded the same way step
after step, so while they are below `CREEP` units, each counts as a loss of its rounding. And the
dual form's own factor 1 − ηλ is rounded once, in float64, and then used at every step.

Patterns stored in 16 bits are another matter: training was exact, it is the dual form that is off.
Key and error signal of a pattern are each rounded once, entry by entry, with standard deviation
eps_s/√12, so what a step's patterns sum to is off by eps_s/√6 times the root of the sum of their
squares. A key that comes again is rounded the same way again: from one fingerprint to the next that
counts as if all steps were off alike; over a run, with other error signals each time, it scatters.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf, isfinite, sqrt

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dualform.learning_rules import ParameterLog, transitions
from dualform.memory.following import AGREEING, CREEP, ROOM, rms

Reals = NDArray[np.float64]

DOUBLE = float(np.finfo(np.float64).eps)

EQUAL = 128.0
"""Equal parts leave their number over this many more of eps times their sum."""

HUGE = 1e100
"""Sizes beyond this, of runs that diverge, are taken in units of the largest: squares overflow."""

CREEP_OF_AN_ENTRY = 16 * CREEP
"""The same where `gross` is the most an entry may get: most entries get far less."""


def as_computed(log: ParameterLog, dtype: torch.dtype) -> ParameterLog:
    """The log with its settings as arithmetic in this dtype held them.

    torch rounds a setting to the precision it computes in before it multiplies. That is no noise:
    0.99 is not float32(0.99), and momentum adds the difference up a hundredfold.
    """
    if dtype == torch.float64:
        return log

    def held(values: Reals) -> Reals:
        return values.astype(np.float32).astype(np.float64)

    return replace(
        log,
        lr=held(log.lr),
        momentum=held(log.momentum),
        dampening=1.0 - held(1.0 - log.dampening),
        weight_decay=held(log.weight_decay),
    )


@dataclass(frozen=True)
class Drift:
    """The error to expect at some steps, in W and m, [stops, 2]: standard deviations of training's
    own roundings, its losses, and the deviations that storing the patterns has added."""

    deviation: Reals
    lost: Reals
    stored: Reals

    def bound(self, deviations: float) -> Reals:
        """How far W and m may be off, that many standard deviations out: [stops, 2]."""
        result: Reals = deviations * (self.deviation + self.stored) + ROOM * self.lost
        return result

    def times(self, unit: float) -> Drift:
        """The same of numbers that were taken in these units."""
        return Drift(self.deviation * unit, self.lost * unit, self.stored * unit)


def drift(
    log: ParameterLog,
    stops: NDArray[np.int64],
    *,
    eps: float,
    gradient_eps: float,
    size: float,
    gross: Reals,
    anchored: bool,
    buffers: Reals | None = None,
    stored: Reals | None = None,
) -> Drift:
    """The error at each of the `stops` (numbers of updates, ascending).

    `size` is that of the weights, `gross` [steps] that of each step's patterns before κ, `buffers`
    [steps] that of the momentum buffer (by default the most that `gross` allows). `anchored` starts
    afresh at every stop, where W and m are known again; otherwise errors accumulate from 0.
    `stored` [steps] is what storing the patterns has put each step's sum off by, one deviation.
    """
    largest = max(size, float(np.max(gross, initial=0.0)))
    if HUGE < largest < inf:
        found_in_units = drift(
            log,
            stops,
            eps=eps,
            gradient_eps=gradient_eps,
            size=size / largest,
            gross=gross / largest,
            anchored=anchored,
            buffers=None if buffers is None else buffers / largest,
            stored=None if stored is None else stored / largest,
        )
        return found_in_units.times(largest)
    matrix, vector = transitions(log)
    acting = 1.0 / np.maximum(1.0 - log.momentum, 1e-3)  # for how many steps an update acts
    decay = np.abs(log.lr * log.weight_decay) * acting
    below = np.where(decay < eps, decay, 0.0) + np.where(decay > 0, DOUBLE, 0.0)
    swallowed = np.where(log.applied, below, 0.0) * size
    sizes = np.full(len(log), np.inf) if buffers is None else buffers
    seen = carried(gross, log)
    # Lower precision than the weights' rounds a gradient's parts once and sums them in float32.
    noise, blur = eps * eps / 12, max(eps * eps, gradient_eps * gradient_eps / 12)
    unit = eps * size / sqrt(12)
    creep = (CREEP if anchored else CREEP_OF_AN_ENTRY) * eps * size
    found = np.zeros((len(stops), 4))
    ww = wm = mm = buffer = walk = lost_w = lost_m = 0.0
    start = 0
    for i, stop in enumerate(stops.tolist()):
        if anchored:
            ww = wm = mm = lost_w = lost_m = 0.0
        rows = zip(
            log.applied[start:stop].tolist(),
            matrix[start:stop].reshape(-1, 4).tolist(),
            vector[start:stop].tolist(),
            seen[start:stop].tolist(),
            swallowed[start:stop].tolist(),
            sizes[start:stop].tolist(),
            strict=True,
        )
        for applied, (a, b, c, d), (nw, nm), g, gone, most in rows:
            if not applied:
                continue
            update = abs(1 - a) * size + abs(b) * buffer + abs(nw) * g
            # Along one direction a buffer of few patterns may all but vanish, while its entries,
            # and so their roundings, do not: it is at least what gradients of any sign add up to.
            into_w, into_m = nw * g, nm * g  # products: a power that overflows is an exception
            walk = d * d * walk + into_m * into_m
            buffer = min(max(most, sqrt(walk)), abs(c) * size + abs(d) * buffer + abs(nm) * g)
            ww, wm, mm = (
                a * a * ww
                + 2 * a * b * wm
                + b * b * mm
                + noise * (size * size + update * update)
                + blur * into_w * into_w,
                a * c * ww + (a * d + b * c) * wm + b * d * mm + blur * into_w * into_m,
                c * c * ww
                + 2 * c * d * wm
                + d * d * mm
                + noise * buffer * buffer
                + blur * into_m * into_m,
            )
            lost_m = abs(c) * lost_w + abs(d) * lost_m
            lost_w += gone + (unit if update < creep else 0.0)
        found[i] = sqrt(max(ww, 0.0)), sqrt(max(mm, 0.0)), lost_w, lost_m
        start = stop
    coarse = np.zeros((len(stops), 2))
    if stored is not None and stored.any():
        coarse = _stored_drift(log, stops, carried(stored, log), anchored=anchored)
    return Drift(found[:, :2], found[:, 2:], coarse)


def _stored_drift(
    log: ParameterLog, stops: NDArray[np.int64], stored: Reals, *, anchored: bool
) -> Reals:
    """How far W and m are off at each stop by what storing has put every step's sum off by.

    Anchored: as if always the same way. Otherwise at random: sizes become variances.
    """
    matrix, vector = transitions(log)
    found = np.zeros((len(stops), 2))
    w = m = wm = 0.0
    start = 0
    for i, stop in enumerate(stops.tolist()):
        if anchored:
            w = m = 0.0
        rows = zip(
            log.applied[start:stop].tolist(),
            matrix[start:stop].reshape(-1, 4).tolist(),
            vector[start:stop].tolist(),
            stored[start:stop].tolist(),
            strict=True,
        )
        for applied, (a, b, c, d), (nw, nm), g in rows:
            if not applied:
                continue
            if anchored:
                w, m = (
                    abs(a) * w + abs(b) * m + abs(nw) * g,
                    abs(c) * w + abs(d) * m + abs(nm) * g,
                )
            else:
                into_w, into_m = nw * g, nm * g
                w, wm, m = (
                    a * a * w + 2 * a * b * wm + b * b * m + into_w * into_w,
                    a * c * w + (a * d + b * c) * wm + b * d * m + into_w * into_m,
                    c * c * w + 2 * c * d * wm + d * d * m + into_m * into_m,
                )
        found[i] = (w, m) if anchored else (sqrt(max(w, 0.0)), sqrt(max(m, 0.0)))
        start = stop
    return found


def agreeing(patterns: Reals) -> Reals:
    """How much more than eps times its gross size a step's gradient may be off by: [steps].

    Every partial sum is rounded: that tells in a large batch whose patterns agree (`AGREEING`).
    Equal ones (the output's bias under a mean) are even rounded the same way each time, until torch
    begins another partial sum.
    """
    more: Reals = 1 + np.sqrt(patterns) / AGREEING + np.minimum(patterns, 1024) / EQUAL
    return more


def entries_size(probe: Tensor, *weights: Tensor | None) -> float:
    """How large W v is where its terms do not cancel: the root of Σ W² v², the largest of several.

    The roundings of W's entries do not cancel along with the entries. Weights that training has
    made larger, along few directions, may all but vanish along v.
    """
    sizes = []
    for w in weights:
        if w is not None and w.numel():
            matrix = w.double().reshape(-1, len(probe))
            largest = float(matrix.abs().max())
            unit = largest if largest > HUGE else 1.0
            sizes.append(unit * rms(((matrix / unit).square() @ probe.square()).sqrt()))
    return max((size for size in sizes if isfinite(size)), default=0.0)


def buffer_sizes(log: ParameterLog, applied: Reals, weight: float, momentum: float) -> Reals:
    """The size of the momentum buffer after every step, from its projection on one direction.

    `applied` is the gradient's projection at every step, κ included; `weight` and `momentum` are
    those of W and m at the start. One projection is off by a random factor of order one, so the
    largest of the steps an update acts for is taken.
    """
    matrix, vector = transitions(replace(log, kappa=np.ones(len(log))))
    found = np.zeros(len(log))
    for s, ((a, b, c, d), (nw, nm), p) in enumerate(
        zip(matrix.reshape(-1, 4).tolist(), vector.tolist(), applied.tolist(), strict=True)
    ):
        weight, momentum = a * weight + b * momentum + nw * p, c * weight + d * momentum + nm * p
        found[s] = max(abs(momentum), abs(d) * found[s - 1] if s else 0.0)
    return found


@dataclass(frozen=True)
class Stretch:
    """From one stop to the next: z(end) = whole · z(start) + Σ_s steps[s − first] G_s."""

    first: int
    steps: Reals
    whole: Reals


def stretches(log: ParameterLog, stops: NDArray[np.int64]) -> list[Stretch]:
    """The learning rule between stops, for W and m alike: the local form of `coefficients`."""
    matrix, vector = transitions(log)
    found = []
    start = 0
    for stop in stops.tolist():
        used = log.first[start:stop][log.applied[start:stop]]
        first = int(min(used.min(initial=start), start))
        steps = np.zeros((stop - first, 2))
        # Plain numbers: a run has many steps, and an array of four is slower than its entries.
        ww, wm, mw, mm = 1.0, 0.0, 0.0, 1.0
        rows = zip(
            range(stop - 1, start - 1, -1),
            log.applied[start:stop][::-1].tolist(),
            log.first[start:stop][::-1].tolist(),
            matrix[start:stop][::-1].reshape(-1, 4).tolist(),
            vector[start:stop][::-1].tolist(),
            strict=True,
        )
        for s, applied, since, (a, b, c, d), (nw, nm) in rows:
            if applied:
                steps[since - first : s + 1 - first] += ww * nw + wm * nm, mw * nw + mm * nm
                ww, wm, mw, mm = (
                    ww * a + wm * c,
                    ww * b + wm * d,
                    mw * a + mm * c,
                    mw * b + mm * d,
                )
        found.append(Stretch(first, steps, np.array([[ww, wm], [mw, mm]])))
        start = stop
    return found


def unmoved(displacement: Tensor, size: Tensor | float, steps: int, eps: float) -> Tensor:
    """What rounding may have lost of a displacement: all of it, below a unit per step."""
    distance = displacement.abs()
    return torch.where(distance < steps * eps * size, ROOM * distance, torch.zeros_like(distance))


def carried(sums: Reals, log: ParameterLog) -> Reals:
    """What each update saw of a sum over patterns: its own step's, or all those carried into it."""
    total = np.concatenate([[0.0], np.cumsum(sums)])
    steps = np.arange(len(sums))
    # A step's own sum is taken as it is: a difference of running totals would lose digits.
    seen: Reals = np.where(log.first == steps, sums, total[steps + 1] - total[log.first])
    return seen
