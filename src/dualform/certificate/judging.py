"""One parameter judged, by three checks: its verdict, and the worst of each kind.

*steps*: every update's patterns against what training saw of its gradient. *fingerprints*: under a
rule with scalars only, (W v, m v) of the rows and of their signed sum is carried from each point
that is known to the next; what no walk explains is the remainder. *states*: torch's own optimizer
goes from kept state to kept state: the last stretch and eight more (`every_step=True`: all).

States decide to the bit where bits can be expected. Elsewhere (another machine, rows in 16 bits,
sums by example) the bounds decide: sums and walks along v, and for rules that are not linear
replays in two precisions, what they differ by.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import inf, sqrt
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dualform.certificate import bounds
from dualform.certificate.bounds import TINY, Along, Motion, Reals, projected, root_mean_square
from dualform.certificate.gradients import Sums
from dualform.certificate.replay import ELSEWHERE, UNSAID, Factors, Record, Replay, Stretch
from dualform.certificate.report import BITS, KEPT, LITTLE, NOT, ROUNDED, Check, Verdict
from dualform.errors import QueryError
from dualform.learning_rules import Classes, linear_steps, rule_of

CHOSEN = 9  # how many stretches are replayed unless all are asked for
JITTERED = 32  # of so many entries one at least must see what replays differ by; else two replays
CLOSE = 1e-4  # how far off the last places of κ may put the end of a stretch, of its largest entry
NOISE = 0.5  # of what was learned: from here on rounding decides where a replay leads
CERTIFYING = 0.01  # of what was learned: up to here a bound certifies it

UNKNOWN = "the last places of the factor of clipping are not known"

Missed = tuple[Stretch, int, str, str]
"""A stretch whose end was not reached to the bit: where the replay left the way, why, and why it
need not be reached (empty if it must be)."""


class Judged:
    """What bits and bounds say of one parameter: its `checks`, and the `verdict`."""

    def __init__(self, record: Record, known: Classes, every_step: bool, factors: Factors) -> None:
        self._record, self._known, self._factors = record, known, factors
        self._kept, self._log, self._name = record.memory.kept, record.log, record.known.name
        self._dtype, self._u = record.known.dtype, bounds.ROUNDING[record.known.dtype]
        self.checks = dict[str, Check]()
        if self._kept.digest(self._name):
            self.verdict = Verdict(self._name, KEPT, "not trained: of its weights a digest is kept")
            return
        self._sums = Sums(record.memory, self._name)
        ways, moved = record.stretches(known), record.log.moved.any()
        broken = [way.broken for way in ways if way.broken]
        is_open = record.explained.any() or not moved
        chosen = [way for way in ways if is_open and not way.broken]
        if not every_step and len(chosen) > CHOSEN:  # the last, and some spread over the run
            chosen = [chosen[round(at)] for at in np.linspace(0, len(chosen) - 1, CHOSEN)]
        missed = [found for way in reversed(chosen) if (found := self._missed(way))]
        is_linear, room, learned, remainder = self._walk()
        if missed and not is_linear and all(excuse for *_, excuse in missed):
            try:
                room = self._measure([way for way, *_ in missed]) * sqrt(len(ways))
            except QueryError as error:
                chosen, broken, room = [], [str(error)], inf
        share = room / (learned + TINY)
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

        said = next(findings())
        if said[0] == BITS:
            self.checks["states"] = Check(self._name, "states", 0.0, 0.0)
        of_it = remainder if broken else 0.0
        self.verdict = Verdict(self._name, *said, len(chosen), len(ways), of_it)

    def _keep(self, kind: str, off: Reals, room: Reals, size: Reals, step: int) -> None:
        """Keep the worst check of each kind: the row that is farthest on its way to its bound,
        relative to the largest size."""
        off, scale = np.abs(off), float(np.abs(size).max()) + TINY
        row = int(np.argmax(np.where(np.isfinite(off), off / (room + TINY), inf)))
        check = Check(self._name, kind, float(off[row]) / scale, float(room[row]) / scale, step)
        self.checks[kind] = max(self.checks.get(kind, check), check, key=lambda c: c.severity)

    # -- by torch's own optimizer ---------------------------------------------------------------

    def _missed(self, way: Stretch) -> Missed | None:
        """Replay a stretch in training's dtype; None if it reaches the very bits of its end."""
        log, kept, name = self._log, self._kept, self._name
        weights, state = kept.weights(name, way.start), kept.state(name, way.start)
        is_clipped = (log.moved & (log.kappa != 1.0))[way.steps].any()

        def missed(step: int, why: str, is_open: bool = False) -> Missed:
            unknown = UNKNOWN if is_clipped and is_open else ""
            return way, step, why, self._record.inexact(way) or unknown

        replay = Replay(self._record, self._dtype, self._known, self._factors)
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
        if all(is_same(*pair) for pair in pairs):
            return None
        is_close = all(is_same(*pair, room=CLOSE) for pair in pairs)
        return missed(way.stop - 1, f"{ELSEWHERE} by step {way.stop}", is_close)

    def _measure(self, ways: list[Stretch]) -> float:
        """Replay stretches in two precisions; say how far off a way may be."""
        kept, name, rooms = self._kept, self._name, list[float]()
        self.checks["states"] = Check(name, "states", 0.0, 0.0)
        for way in (way for way in ways if way.stop in kept.steps(name)):
            actual, ends = kept.weights(name, way.stop).double(), list[Tensor]()
            for jitter in range(3 + JITTERED // max(1, actual.numel())):
                kind = self._dtype if jitter else torch.float64
                replay = Replay(self._record, kind, self._known, {}, jitter)
                end = kept.weights(name, way.start)
                for done in replay.run(way.start, way.steps):
                    end = done.weights
                ends.append(end.double())
            off, room = bounds.measured(ends[0], ends[1:], actual, self._u)
            self._keep("states", off, room, actual.abs().amax().numpy(), way.stop)
            rooms.append(float(np.median(room)))
        return root_mean_square(np.array(rooms)) if rooms else inf

    # -- along v --------------------------------------------------------------------------------

    def _walk(self) -> tuple[bool, float, float, float]:
        """Follow it from point to point: whether its rules have scalars only; the bounds of all
        ways together; how far it went; the share of that which patterns do not explain."""
        record, memory, log = self._record, self._record.memory, self._log
        rules = [rule_of(path) for path in record.paths(log.moved)]
        is_linear = bool(rules) and all(rule and rule.is_linear for rule in rules)
        factors = linear_steps(log, memory.settings, self._dtype) if is_linear else []
        disturbed = {e.step for e in record.events if e.what != "unexplained"}
        found = zip(*self._kept.fingerprints(self._name), strict=True)
        prints = {int(s): Along(*p.numpy()) for s, p in found if int(s) not in disturbed}
        steps = sorted({*self._kept.steps(self._name), *prints} - record.back.keys())
        points = {step: self._at(step, prints.get(step)) for step in steps}
        path = set(memory.path_to(self._name, memory.steps).tolist())
        left = set(np.flatnonzero(log.moved & record.explained).tolist())
        room, rest = 0.0, np.zeros(record.known.height + 1)
        for stop in steps[1:]:
            way, motions = record.stretch(stop, points), list[Motion]()
            start, end, nothing = points[way.start], points[stop], (0.0, 0.0)
            for step in way.steps:
                seen = self._compare(step) if record.explained[step] else nothing
                motions += [(factors[step], *seen)] if is_linear else []
            off = (end.W - start.W) * bool(way.broken)
            if is_linear:
                reached = bounds.walk(start, end, motions, self._u)
                off = end.W - reached.W
                if motions and not way.broken and np.isfinite(end.W).all():
                    room += float(reached.room_W[-1]) / max(1, record.known.height) ** 0.5
                    self._keep("fingerprints", off, reached.room_W, end.size, stop)
                    if stop not in record.replaced:
                        self._keep("fingerprints", end.m - reached.m, reached.room_m, end.m, stop)
            left -= set(way.steps)
            rest += off if stop - 1 in path else 0.0
        for step in sorted(left):
            self._compare(step)
        learned = root_mean_square((points[steps[-1]].W - points[steps[0]].W)[:-1])
        return is_linear, room, learned, root_mean_square(rest[:-1]) / (learned + TINY)

    def _compare(self, step: int) -> tuple[Reals, Reals]:
        """Compare a step's sum with what training saw; give G v and its room, for a motion."""
        gv, room = self._sums.of(step).numpy()
        if self._log.explained[step]:
            off, size = gv[-1:] - self._log.seen[step], room[-1:] / bounds.SUM / self._u
            self._keep("steps", off, room[-1:], size, step)
        return gv, room

    def _at(self, step: int, found: Along | None) -> Along:
        """Find where it was: by the kept state, which must agree with the fingerprint."""
        kept, v, signs = self._kept, self._sums.v, self._sums.signs
        if found is None or step in kept.steps(self._name):
            W, size = projected(kept.weights(self._name, step), v)
            momentum = kept.state(self._name, step).get("momentum_buffer")
            m = projected(momentum, v)[0] if isinstance(momentum, Tensor) else np.zeros_like(W)
            if found is not None and len(W):
                room = np.full_like(W, bounds.DOUBLE * size.max())
                self._keep("fingerprints", W - found.W, room, size, step)
        else:
            W, m, size, _ = found
        m_size = np.append(np.full_like(m, root_mean_square(m)), np.linalg.norm(m))
        whole = np.append(W, signs @ W), np.append(m, signs @ m)
        return Along(*whole, np.append(size, np.linalg.norm(size)), m_size)


def is_same(one: Any, other: Any, room: float = 0.0) -> bool:
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
