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

from collections.abc import Callable, Iterable, Iterator
from math import inf, sqrt
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dualform.certificate.bounds import ROUNDING, TINY, measured
from dualform.certificate.marks import mark_of
from dualform.certificate.replay import ELSEWHERE, UNSAID, Factors, Record, Replay, Stretch
from dualform.certificate.report import (
    ANOTHER,
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

CHOSEN = 9  # how many stretches are replayed unless all are asked for
JITTERED = (
    32  # of so many entries at least one must see what replays differ by; else two replays do
)
CLOSE = 1e-4  # how far off the last places of κ may put the end of a stretch, of its largest entry
NOISE = 0.5  # of what was learned: from here on rounding decides where a replay leads
CERTIFYING = 0.01  # of what was learned: up to here a bound certifies it

UNKNOWN = "the last places of the factor of clipping are not known"

Missed = tuple[Stretch, int, str, str]
"""A stretch whose end was not reached to the bit: where the replay left the way, why, and why it
need not be reached (empty if it must be)."""


def verify(
    memory: Memory,
    model: nn.Module | None = None,
    *,
    every_step: bool = False,
    optimizer: type[Optimizer] | Iterable[type[Optimizer]] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Verification:
    """Compare everything a memory holds with everything else it holds, and with the model.

    A model that is the network at another recorded step is no failure, and said to be that; one
    that is of no recorded step lends its architecture alone. `optimizer` hands in classes that are
    not torch's. `progress` is called with (done, total).
    """
    names, known, factors = list(memory.parameters), classes(optimizer), Factors()
    judged = dict[str, Judged]()
    for done, name in enumerate(names, 1):
        judged[name] = Judged(Record(memory, name), known, every_step, factors)
        if progress is not None:
            progress(done, len(names))
    for name in names:
        if judged[name].verdict.why.startswith(UNKNOWN):  # the marks of all others are heard now
            judged[name] = Judged(Record(memory, name), known, every_step, factors)
    checks = [check for found in judged.values() for check in found.checks.values()]
    compared = [] if model is None else [compare(memory, name, model) for name in names]
    place: int | str = ""
    if model is not None and not all(check.passed for check in compared):
        own = (c for c in compared if memory.log(c.parameter).moved.any())
        place = ANOTHER if (at := step_of(memory, model)) is None else at
        if place == memory.steps or (place == ANOTHER and any(check.passed for check in own)):
            place = ""  # the last one, edited
    checks += compared if place == "" else []
    verdicts = {name: found.verdict for name, found in judged.items()}
    return Verification(memory.steps, verdicts, tuple(checks), memory.hashes, memory.remarks, place)


def step_of(memory: Memory, model: nn.Module) -> int | None:
    """The last recorded step whose weights a model has, by their marks; None if there is none."""
    named, kept = dict(model.named_parameters()), memory.kept
    if named.keys() != memory.parameters.keys():
        return None
    now = {name: named[name].detach().cpu() for name in memory.parameters}
    marks = np.array([mark_of([tensor]) for tensor in now.values()], np.uint32)
    found = np.flatnonzero((memory.marks[:, 0] == marks).all(axis=1))
    if len(found):
        return int(found[-1]) + 1
    return 0 if all(kept.is_kept_as(name, 0, tensor) for name, tensor in now.items()) else None


class Judged:
    """What bits and bounds say of one parameter: its `checks`, and the `verdict`."""

    def __init__(self, record: Record, known: Classes, every_step: bool, factors: Factors) -> None:
        self._record, self._known, self._factors = record, known, factors
        self._memory, self._name, self._dtype = record.memory, record.known.name, record.known.dtype
        if self._memory.kept.digest(self._name):
            self.checks = dict[str, Check]()
            self.verdict = Verdict(self._name, KEPT, "not trained: of its weights a digest is kept")
            return
        ways, moved = record.stretches(known), record.log.moved.any()
        broken = [way.broken for way in ways if way.broken]
        is_open = record.explained.any() or not moved
        chosen = [way for way in ways if is_open and not way.broken and way.steps]
        if not every_step and len(chosen) > CHOSEN:  # the last, and some spread over the run
            chosen = [chosen[round(at)] for at in np.linspace(0, len(chosen) - 1, CHOSEN)]
        missed = [found for way in reversed(chosen) if (found := self._missed(way))]
        walker = Walker(record)
        self.checks, room = walker.checks, walker.room
        if missed and not walker.is_linear and all(excuse for *_, excuse in missed):
            try:
                self.checks["states"], room = self._measure([way for way, *_ in missed])
                room *= sqrt(len(ways))
            except QueryError as error:
                chosen, broken = [], [str(error)]
        share = room / (walker.learned + TINY)
        if share > NOISE:
            self.checks.pop("states", None)

        def findings() -> Iterator[tuple[str, str, int | None]]:
            """Say what was found, the gravest first."""
            yield from ((NOT, way.broken, way.stop) for way in ways if way.broken.endswith(UNSAID))
            yield from ((NOT, why, step) for _, step, why, excuse in missed if not excuse)
            for kind, check in self.checks.items():
                if not check.passed:
                    yield NOT, f"{kind} are off by more than rounding", check.step
            if not chosen:
                yield KEPT, broken[-1] if broken else record.known.why, None
            if not missed:
                some = [f"but for {len(broken)} of {len(ways)} stretches: {why}" for why in broken]
                yield BITS, "".join(some[-1:]) if moved else "no optimizer moved it", None
            why = missed[0][-1]
            if share <= CERTIFYING:
                yield ROUNDED, why, None
            much = f"{share:.0%}" if share < 10 else "more than ten times"
            yield LITTLE, f"{why}; rounding may be {much} of what was learned", None

        said, remainder = next(findings()), walker.remainder if broken else 0.0
        if said[0] == BITS:
            self.checks["states"] = Check(self._name, "states", 0.0, 0.0)
        self.verdict = Verdict(self._name, *said, len(chosen), len(ways), remainder)

    def _missed(self, way: Stretch) -> Missed | None:
        """Replay a stretch in training's dtype; None if it reaches the very bits of its end."""
        log, kept, name = self._record.log, self._memory.kept, self._name
        replay = Replay(self._record, self._dtype, self._known, self._factors)
        weights, state = kept.weights(name, way.start), kept.state(name, way.start)
        is_clipped = (log.moved & (log.kappa != 1.0))[list(way.steps)].any()

        def missed(step: int, why: str, is_open: bool = False) -> Missed:
            unknown = UNKNOWN if is_clipped and is_open else ""
            return way, step, why, self._record.inexact(way) or unknown

        try:
            for done in replay.run(way.start, way.steps):
                weights, state = done.weights, dict(done.state)
                if not done.is_as_marked:  # in other dtypes κ is known less well
                    why = f"{ELSEWHERE} at step {done.step}"
                    return missed(done.step, why, self._dtype != torch.float32)
        except QueryError as error:
            return missed(way.start, str(error))
        if way.stop not in kept.steps(name):  # all that is known of it are the marks
            return None
        end = {} if way.stop in self._record.replaced else kept.state(name, way.stop)
        pairs = [(weights, kept.weights(name, way.stop)), *((state.get(k), end[k]) for k in end)]
        if all(_same(*pair) for pair in pairs):
            return None
        is_close = all(_same(*pair, room=CLOSE) for pair in pairs)
        return missed(way.stop - 1, f"{ELSEWHERE} by step {way.stop}", is_close)

    def _measure(self, ways: list[Stretch]) -> tuple[Check, float]:
        """Replay stretches in two precisions: the worst end, and how far off a way may be."""
        kept, name = self._memory.kept, self._name
        found, rooms = [Check(name, "states", 0.0, 0.0)], list[float]()
        for way in (way for way in ways if way.stop in kept.steps(name)):
            actual, ends = kept.weights(name, way.stop).double(), list[Tensor]()
            for jitter in (None, *range(2 + JITTERED // max(1, actual.numel()))):
                kind = torch.float64 if jitter is None else self._dtype
                replay = Replay(self._record, kind, self._known, jitter=jitter)
                end = kept.weights(name, way.start)
                for done in replay.run(way.start, way.steps):
                    end = done.weights
                ends.append(end.double())
            off, room = measured(ends[0], ends[1:], actual, ROUNDING[self._dtype])
            size = actual.abs().amax().numpy()
            found.append(Check.of_rows(name, "states", off, room, size, way.stop))
            rooms.append(float(np.median(room)))
        room_of_one = float(np.sqrt(np.mean(np.square(rooms)))) if rooms else inf
        return max(found, key=lambda check: check.severity), room_of_one


def compare(memory: Memory, name: str, model: nn.Module) -> Check:
    """Compare the model's weights with the last kept ones, or (of a run that died) with the mark of
    the last update: equal to the bit, or not."""
    last, own = memory.kept.steps(name)[-1], dict(model.named_parameters()).get(name)
    now, kept, off = torch.empty(0) if own is None else own.detach().cpu(), memory.kept, inf
    if kept.digest(name):
        return Check(name, "weights", float(not kept.is_kept_as(name, 0, now)), 0.0, 0)
    if last < memory.steps:
        marked = int(memory.marks[-1, 0, memory.parameters[name].index])
        return Check(name, "weights", float(mark_of([now]) != marked), 0.0, memory.steps)
    if now.shape == (end := kept.weights(name, last)).shape and not _same(now, end):
        off = float((now.double() - end).abs().max()) / float(end.abs().max() or 1) or 1.0
    return Check(name, "weights", 0.0 if _same(now, end) else off, 0.0, last)


def _same(one: Any, other: Any, room: float = 0.0) -> bool:
    """Whether two things are the same in every bit, or up to a share of the largest entry.

    No number equals no number.
    """
    if not isinstance(one, Tensor) or not isinstance(other, Tensor):
        return type(one) is type(other) and bool(one == other)
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    is_real = other.is_floating_point() and other.numel() > 0
    size = float(other.abs().amax()) if room and is_real else 0.0
    return torch.allclose(one, other, rtol=0.0, atol=room * size, equal_nan=True)
