"""Verification: do patterns, log, kept states and weights agree, parameter by parameter?

Four checks. *steps*: every update's patterns against what training saw of its gradient.
*fingerprints*: from each to the next by the learning rule, along v. *states*: from kept state to
kept state, by torch's own optimizer. *weights*: the model's are the last kept ones.

States decide to the bit where bits can be expected: the last stretch and eight more, spread over
the run (`every_step=True`: all). Elsewhere (another machine, rows in 16 bits, sums by example) the
bounds decide: sums and walks along v, and for rules that are not linear replays in two precisions,
what they differ by.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dualform.certificate.bounds import ROUNDING, TINY, measured
from dualform.certificate.gradients import ExplainedGradients
from dualform.certificate.marks import mark_of
from dualform.certificate.replay import (
    UNSAID,
    Factors,
    Record,
    Replay,
    Stretch,
    inexact,
    stretches,
    threads_of,
)
from dualform.certificate.report import (
    BITS,
    KEPT,
    LITTLE,
    NOT,
    ROUNDED,
    Check,
    Verdict,
    Verification,
)
from dualform.certificate.walking import Walker
from dualform.errors import QueryError
from dualform.learning_rules import Classes, classes
from dualform.memory import Memory

CHOSEN = 9
"""How many stretches are replayed unless all are asked for."""

ELSEWHERE = "torch's own optimizer, given its patterns, goes elsewhere"
UNKNOWN = "the last places of the factor of clipping are not known"

Found = tuple[Verdict, list[Check]]

JITTERED = 32
"""Of so many entries at least one must see what replays differ by; large parameters: in two."""

CLOSE = 1e-4
"""How far the last places of κ may put the end of a stretch off, of its largest entry."""

NOISE = 0.1
"""From this share on, what storing rows took from gradients decides where weights go."""

CERTIFYING = 0.01
"""Up to this share of what was learned a bound may be and still certify it."""


def verify(
    memory: Memory,
    model: nn.Module | None = None,
    *,
    every_step: bool = False,
    optimizer: type[Optimizer] | Iterable[type[Optimizer]] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Verification:
    """Compare everything a memory holds with everything else it holds, and with the model.

    `optimizer` hands in classes that are not torch's. `progress` is called with (done, total).
    """
    verifying = Verifying(memory, classes(optimizer), every_step)
    names, found = list(memory.parameters), dict[str, Found]()
    for done, name in enumerate(names):
        found[name] = verifying.judge(name)
        if progress is not None:
            progress(done + 1, len(names))
    for name in names:
        if found[name][0].why.startswith(UNKNOWN):  # the marks of all others have been heard now
            found[name] = verifying.judge(name)
    checks = [check for _, own in found.values() for check in own]
    if model is not None:
        checks += [verifying.compare(name, model) for name in names]
    verdicts = {name: verdict for name, (verdict, _) in found.items()}
    return Verification(memory.steps, verdicts, tuple(checks), memory.hashes, memory.remarks)


class Missed(NamedTuple):
    """A stretch whose end was not reached to the bit: where the replay left the way, and why."""

    way: Stretch
    left_at: int
    why: str
    excuse: str = ""
    """Why it need not be reached to the bit; empty if it must be."""


class Verifying:
    """One verification: parameters are judged in turn, and share what marks say of κ."""

    def __init__(self, memory: Memory, known: Classes, every_step: bool) -> None:
        self.memory, self._classes, self._every_step = memory, known, every_step
        self._factors: Factors = {}

    def judge(self, name: str) -> Found:
        """Put together what bits and bounds say of a parameter."""
        record = Record(self.memory, name)
        moved, is_explained = record.log.moved.any(), record.explained.any()
        ways = stretches(self.memory, name, self._classes) if is_explained or not moved else []
        broken, chosen = [way.broken for way in ways if way.broken], self._chosen(ways)
        walker = Walker(record)
        checks = walker.run()
        missed = [found for way in reversed(chosen) if (found := self._missed(record, way))]
        remainder = walker.remainder if broken or not ways else 0.0

        def said(verdict: str, why: str = "", step: int | None = None) -> Found:
            walked = len(chosen) if verdict in (ROUNDED, LITTLE) else len(chosen) - len(missed)
            return Verdict(name, verdict, why, step, walked, len(ways), remainder), checks

        for way in ways:
            if way.broken.endswith(UNSAID):
                return said(NOT, way.broken, way.stop)
        for found in missed:
            if not found.excuse:
                return said(NOT, found.why, found.left_at)
        for check in checks:
            if not check.passed:
                return said(NOT, f"{check.kind} are off by more than rounding", check.step)
        if not chosen:
            return said(KEPT, broken[-1] if broken else record.known.why)
        if not missed:
            checks.append(Check(name, "states", 0.0, 0.0))
            some = [f"but for {len(broken)} of {len(ways)} stretches: {why}" for why in broken]
            return said(BITS, "".join(some[-1:]) if moved else "no optimizer moved it")
        room = walker.room
        if not walker.is_linear:
            kept = self.memory.kept.steps(name)
            try:
                measures = [self._measure(record, m.way) for m in missed if m.way.stop in kept]
            except QueryError as error:
                return said(KEPT, str(error))
            checks += sorted((check for check, _ in measures), key=lambda c: c.severity)[-1:]
            if not all(check.passed for check in checks):
                step = checks[-1].step
                if all(self._is_noise(record, m.way) for m in missed if m.way.stop in kept):
                    checks.pop()
                    return said(LITTLE, "its gradients are hardly more than rounding")
                return said(NOT, "a replay goes elsewhere by more than rounding", step)
            room = sum(r * r for _, r in measures) * len(ways) / max(1, len(measures))
            room = math.sqrt(room) if measures else math.inf
        why = missed[0].excuse
        if room <= CERTIFYING * walker.learned:
            return said(ROUNDED, why)
        share = room / (walker.learned + TINY)
        much = f"{share:.0%}" if share < 10 else "more than ten times"
        return said(LITTLE, f"{why}; rounding may be {much} of what was learned")

    def _chosen(self, ways: list[Stretch]) -> list[Stretch]:
        """Choose the stretches that are replayed: the last, and some spread over the run."""
        whole = [way for way in ways if not way.broken and way.steps]
        if self._every_step or len(whole) <= CHOSEN:
            return whole
        return [whole[round(place)] for place in np.linspace(0, len(whole) - 1, CHOSEN)]

    def _missed(self, record: Record, way: Stretch) -> Missed | None:
        """Replay a stretch in training's dtype; None if it reaches the very bits of its end."""
        kept, log, name, dtype = self.memory.kept, record.log, way.parameter, record.known.dtype
        replay = Replay(self.memory, name, dtype, self._classes, factors=self._factors)
        weights, state = kept.weights(name, way.start), kept.state(name, way.start)
        is_clipped = bool((log.moved & (log.kappa != 1.0))[list(way.steps)].any())

        def missed(step: int, why: str, is_open: bool = False) -> Missed:
            return Missed(way, step, why, inexact(record, way) or UNKNOWN * is_open)

        try:
            with threads_of(self.memory, way.steps[-1]):
                for done in replay.run(way.start, way.steps):
                    weights, state = done.weights, dict(done.state)
                    if not done.is_as_marked:  # in other dtypes κ is known less well
                        is_open = is_clipped and dtype != torch.float32
                        return missed(done.step, f"{ELSEWHERE} at step {done.step}", is_open)
        except QueryError as error:
            return missed(way.start, str(error))
        if way.stop not in kept.steps(name):  # all that is known of it are the marks
            return None
        end = {} if way.is_replaced else kept.state(name, way.stop)
        pairs = [(weights, kept.weights(name, way.stop)), *((state.get(k), end[k]) for k in end)]
        if all(_same(*pair) for pair in pairs):
            return None
        is_open = is_clipped and all(_same(*pair, room=CLOSE) for pair in pairs)
        return missed(way.stop - 1, f"{ELSEWHERE} by step {way.stop}", is_open)

    def _is_noise(self, record: Record, way: Stretch) -> bool:
        """Whether gradients are hardly more than what storing rows took from them: then a rule that
        goes entry by entry moves weights by chance (a bias right before a norm)."""
        pair = [
            ExplainedGradients(self.memory, way.parameter, torch.float64, jitter)
            for jitter in (None, 1)
        ]
        off = size = 0.0
        for step in way.steps:
            if record.log.moved[step]:
                gradient, moved = (gradients.of(step) for gradients in pair)
                off += float((moved - gradient).square().sum())
                size += float(gradient.square().sum())
        return off > NOISE**2 * size

    def _measure(self, record: Record, way: Stretch) -> tuple[Check, float]:
        """Replay a stretch in two precisions; how far its end may be off, and is."""
        name, dtype, ends = way.parameter, record.known.dtype, []
        actual = self.memory.kept.weights(name, way.stop).double()
        for jitter in (None, *range(2 + JITTERED // max(1, actual.numel()))):
            kind = torch.float64 if jitter is None else dtype
            replay = Replay(self.memory, name, kind, self._classes, jitter=jitter)
            end = self.memory.kept.weights(name, way.start)
            for done in replay.run(way.start, way.steps):
                end = done.weights
            ends.append(end.double().clone())
        off, room, scale, typical = measured(ends[0], ends[1:], actual, ROUNDING[dtype])
        return Check(name, "states", off / scale, room / scale, way.stop), typical

    def compare(self, name: str, model: nn.Module) -> Check:
        """Compare the model's weights with the last kept ones, or (of a run that died) with the
        mark of the last update: equal to the bit, or not."""
        last, own = self.memory.kept.steps(name)[-1], dict(model.named_parameters()).get(name)
        kept, off = self.memory.kept.weights(name, last), math.inf
        now = None if own is None else own.detach().cpu()
        index = self.memory.parameters[name].index
        if last < (steps := self.memory.steps) and now is not None:
            is_marked = mark_of([now]) == int(self.memory.marks(steps).weights[index])
            return Check(name, "weights", 0.0 if is_marked else 1.0, 0.0, steps)
        if _same(now, kept):
            off = 0.0
        elif now is not None and now.shape == kept.shape:
            off = float((now.double() - kept).abs().max()) / float(kept.abs().max() or 1) or 1.0
        return Check(name, "weights", off, 0.0, last)


def _same(one: Any, other: Any, room: float = 0.0) -> bool:
    """Whether two things are the same in every bit, or up to a share of the largest entry.

    No number equals no number.
    """
    if not isinstance(one, Tensor) or not isinstance(other, Tensor):
        return type(one) is type(other) and bool(one == other)
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    near = (one == other) | ((one != one) & (other != other))
    if room and one.is_floating_point() and one.numel():
        near |= (one.double() - other).abs() <= room * other.abs().amax()
    return bool(near.all())
