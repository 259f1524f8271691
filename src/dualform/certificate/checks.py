"""Verification: do patterns, log, kept states and weights agree, parameter by parameter?

Four checks. *steps*: every update's patterns against what training saw of its gradient.
*fingerprints*: from each to the next by the learning rule, along v. *states*: from kept state to
kept state, by torch's own optimizer. *weights*: the model's are the last kept ones.

States decide to the bit where bits can be expected: the last stretch and eight more, spread over
the run (`every_step=True`: all). Elsewhere (another machine, rows in 16 bits, sums by example) the
bounds decide: sums and walks along v, and for rules that are not linear a replay in two precisions,
what they differ by, row by row and entry by entry.
"""

from __future__ import annotations

import math
import platform
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dualform.certificate.bounds import ROUNDING, measured
from dualform.certificate.gradients import Jitter
from dualform.certificate.replay import (
    Record,
    Refuted,
    Replay,
    Stretch,
    environment_of,
    is_shaken,
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
from dualform.certificate.sums import windows
from dualform.certificate.walking import Walker, worst
from dualform.learning_rules import Classes, classes
from dualform.memory import Memory

CHOSEN = 9
"""How many stretches are replayed unless all are asked for."""

CERTIFYING = 0.01
"""Up to this share of what was learned a bound may be and still certify it."""

Progress = Callable[[int, int], None]


def verify(
    memory: Memory,
    model: nn.Module | None = None,
    *,
    every_step: bool = False,
    optimizer: type[Optimizer] | Iterable[type[Optimizer]] | None = None,
    progress: Progress | None = None,
) -> Verification:
    """Compare everything a memory holds with everything else it holds, and with the model.

    `optimizer` hands in classes that are not torch's. `progress` is called with (done, total).
    """
    verifying = Verifying(memory, classes(optimizer), every_step, progress)
    return verifying.run(model)


@dataclass(frozen=True)
class Outcome:
    """What replaying a stretch came to: where it left the way, what its end is off by."""

    left_at: int | None
    entries: int
    is_clipped: bool

    @property
    def is_reached(self) -> bool:
        return self.left_at is None and not self.entries

    @property
    def is_open(self) -> bool:
        """Whether the last places of κ decide, which no mark could tell."""
        return self.left_at is None and self.is_clipped


class Verifying:
    """One verification under way."""

    def __init__(
        self, memory: Memory, known: Classes, every_step: bool, progress: Progress | None
    ) -> None:
        self.memory, self.known, self.every_step = memory, known, every_step
        self.records = {name: Record(memory, name) for name in memory.parameters}
        self.ways = {n: self._ways(n) for n in memory.parameters}
        self.chosen = {name: self._chosen(ways) for name, ways in self.ways.items()}
        self._refuted: Refuted = {}
        self._progress, self._done = progress, 0
        replayed = sum(len(way.steps) for ways in self.chosen.values() for way in ways)
        self._total = memory.steps + replayed
        self._failures: dict[str, str] = {}

    def _ways(self, name: str) -> list[Stretch]:
        known = self.memory.parameters[name]
        if known.keep in ("values", "keys") and not self.records[name].explained.any():
            return []
        return stretches(self.memory, name, self.known)

    def _chosen(self, ways: list[Stretch]) -> list[Stretch]:
        """Choose the stretches that are replayed: the last, and some spread over the run."""
        whole = [way for way in ways if not way.broken and way.steps]
        if self.every_step or len(whole) <= CHOSEN:
            return whole
        places = np.unique(np.linspace(0, len(whole) - 1, CHOSEN).round().astype(int))
        return [whole[place] for place in places]

    def run(self, model: nn.Module | None) -> Verification:
        """Make all checks."""
        memory = self.memory
        walkers = self._walk()
        outcomes = self._replay()
        checks: list[Check] = []
        verdicts = {}
        for name in memory.parameters:
            found, verdict = self._judge(name, walkers.get(name), outcomes[name])
            checks += found
            verdicts[name] = verdict
            if model is not None:
                checks += self._weights(name, model)
        return Verification(memory.steps, verdicts, tuple(checks), memory.hashes, memory.remarks)

    def _advance(self, steps: int) -> None:
        self._done += steps
        if self._progress is not None:
            self._progress(self._done, self._total)

    # -- along v --------------------------------------------------------------------------------

    def _walk(self) -> dict[str, Walker]:
        memory = self.memory
        names = [name for name, ways in self.ways.items() if ways]
        walkers = {name: Walker(memory, self.records[name]) for name in names}
        for sums in windows(memory, names) if names else ():
            for name, walker in walkers.items():
                walker.take(sums[name])
            self._advance(len(next(iter(sums.values())).gross))
        for walker in walkers.values():
            walker.finish(memory.steps)
        return walkers

    # -- to the bit -----------------------------------------------------------------------------

    def _replay(self) -> dict[str, list[tuple[Stretch, Outcome]]]:
        """Replay the chosen stretches where bits can be expected; once more what κ left open."""
        found: dict[str, list[tuple[Stretch, Outcome]]] = {name: [] for name in self.ways}
        for name, ways in self.chosen.items():
            for way in reversed(ways):
                if self._no_bits(name, way) or (self._elsewhere(way) and _has_failed(found[name])):
                    continue
                if (outcome := self._to_the_bit(way)) is not None:
                    found[name].append((way, outcome))
        for outcomes in found.values():
            for i, (way, outcome) in enumerate(outcomes):
                if not outcome.is_reached and outcome.is_open:
                    outcomes[i] = way, self._to_the_bit(way) or outcome
        return found

    def _to_the_bit(self, way: Stretch) -> Outcome | None:
        """Replay a stretch in training's dtype; None if its class does not replay by itself."""
        memory, name, kappa = self.memory, way.parameter, self.records[way.parameter].log.kappa
        replay = Replay(
            memory, name, memory.parameters[name].dtype, self.known, refuted=self._refuted
        )
        weights, state = memory.kept.weights(name, way.start), memory.kept.state(name, way.start)
        is_clipped = bool((kappa[list(way.steps)] != 1.0).any())
        try:
            with threads_of(memory, way.steps[-1]):
                for done in replay.run(way.start, way.steps):
                    if not done.is_as_marked:
                        return Outcome(done.step, 0, is_clipped)
                    weights, state = done.weights, dict(done.state)
        except Exception as error:  # whatever a class from elsewhere raises when it is alone
            self._failures[name] = f"its optimizer cannot be replayed ({error!r:.200})"
            return None
        entries = _differing(weights, memory.kept.weights(name, way.stop))
        if not way.is_replaced:
            kept = memory.kept.state(name, way.stop)
            entries += sum(_differing(state.get(key), value) for key, value in kept.items())
        self._advance(len(way.steps))
        return Outcome(None, entries, is_clipped)

    def _no_bits(self, name: str, way: Stretch) -> str:
        """Say why a stretch cannot be replayed to the bit anywhere; empty if it can."""
        memory, known = self.memory, self.memory.parameters[name]
        layers = [memory.layer(layer) for layer in known.layers]
        if is_shaken(memory, name, way.stop):
            return "between updates something was added to the weights and taken away again"
        if any(layer.stored_eps for layer in layers):
            return f"rows are stored in {str(layers[0].stored).removeprefix('torch.')}"
        record = self.records[name]
        moved = [step for step in way.steps if record.log.moved[step]]
        if any(layer.keep == "examples" for layer in layers) and not record.is_kept[moved].all():
            return "sums of examples are not torch's sums"
        kappa = record.log.kappa[moved]
        if known.dtype != torch.float32 and (np.frexp(kappa)[0] != 0.5).any():
            return "the last places of the factor of clipping are not known"
        return ""

    def _elsewhere(self, way: Stretch) -> str:
        """Say how this machine is not that of training; empty if it is."""
        wanted = environment_of(self.memory, way.steps[-1])
        here = {
            "torch": torch.__version__,
            "machine": f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}",
        }
        differs = [n for n, v in here.items() if wanted[n] is not None and wanted[n] != v]
        return ", ".join(f"recorded with {n} {wanted[n]}, not {here[n]}" for n in differs)

    # -- the verdict ----------------------------------------------------------------------------

    def _judge(
        self, name: str, walker: Walker | None, outcomes: list[tuple[Stretch, Outcome]]
    ) -> tuple[list[Check], Verdict]:
        """Put together what was found of one parameter."""
        ways, chosen = self.ways[name], self.chosen[name]
        known, record = self.memory.parameters[name], self.records[name]
        if walker is None:
            if not record.log.moved.any():
                return self._unmoved(name)
            points = Walker(self.memory, record).points
            return points.compared(), Verdict(name, KEPT, known.why or f"kept as {known.keep}")
        checks, remainder = walker.checks, self._remainder(name, walker)
        lawless = next((way for way in ways if way.broken and way.is_unrecorded), None)
        if lawless is not None:
            why = lawless.broken
            return checks, Verdict(name, NOT, why, lawless.stop, 0, len(ways), remainder)
        if not chosen:
            why = ways[-1].broken if ways else known.why
            return checks, Verdict(name, KEPT, why, None, 0, len(ways), remainder)
        reached = [way for way, outcome in outcomes if outcome.is_reached]
        missed = [(way, o) for way, o in outcomes if not o.is_reached]
        for way, outcome in missed:
            if not self._elsewhere(way) and not outcome.is_open:
                where = way.stop - 1 if outcome.left_at is None else outcome.left_at
                why = f"torch's own optimizer, given its patterns, goes elsewhere at step {where}"
                return checks, Verdict(name, NOT, why, where, len(reached), len(ways), remainder)
        failed = next((c for c in checks if not c.passed), None)
        if failed is not None:
            why = f"{failed.kind} are off by more than rounding"
            return checks, Verdict(name, NOT, why, failed.step, 0, len(ways), remainder)
        if len(reached) == len(chosen):
            checks.append(Check(name, "states", 0.0, 0.0))
            partly = self._partly(ways)
            return checks, Verdict(name, BITS, partly, None, len(reached), len(ways), remainder)
        return self._by_bounds(
            name, walker, [w for w in chosen if w not in reached], checks, missed
        )

    def _partly(self, ways: list[Stretch]) -> str:
        broken = [way for way in ways if way.broken]
        if not broken:
            return ""
        return f"but for {len(broken)} of {len(ways)} stretches: {broken[-1].broken}"

    def _unmoved(self, name: str) -> tuple[list[Check], Verdict]:
        """A parameter that no optimizer moved: every kept state is the first one."""
        kept = self.memory.kept
        steps = kept.steps(name)
        off = [k for k in steps if _differing(kept.weights(name, steps[0]), kept.weights(name, k))]
        events = {e.step for e in self.records[name].events}
        if any(k not in events for k in off):
            return [], Verdict(name, NOT, "nothing moved it, but its kept states differ", off[0])
        return [], Verdict(
            name, BITS, "no optimizer moved it", None, len(steps) - 1, len(steps) - 1
        )

    def _by_bounds(
        self,
        name: str,
        walker: Walker,
        rest: list[Stretch],
        checks: list[Check],
        missed: list[tuple[Stretch, Outcome]],
    ) -> tuple[list[Check], Verdict]:
        """Decide by bounds, where bits cannot."""
        ways, remainder = self.ways[name], self._remainder(name, walker)
        why = self._failures.get(name) or self._no_bits(name, rest[-1]) or self._elsewhere(rest[-1])
        if not why and missed:
            why = "the last places of the factor of clipping are not known"
        room, walked = walker.room, walker.walked
        if not walker.is_linear:
            try:
                found = [self._measure(name, way) for way in rest]
            except Exception as error:  # as above
                why = f"its optimizer cannot be replayed ({error!r:.200})"
                return checks, Verdict(name, KEPT, why, None, 0, len(ways), remainder)
            checks += worst([check for check, _ in found])
            room = math.sqrt(sum(r * r for _, r in found)) * math.sqrt(len(ways) / len(found))
            walked = len(self.chosen[name])
            failed = next((c for c, _ in found if not c.passed), None)
            if failed is not None:
                said = "a replay goes elsewhere by more than rounding"
                step = failed.step
                return checks, Verdict(name, NOT, said, step, walked, len(ways), remainder)
        verdict = ROUNDED if room <= CERTIFYING * self._learned(name) else LITTLE
        if verdict == LITTLE:
            share = room / (self._learned(name) or 1e-300)
            why = f"{why}; rounding may be {share:.0%} of what was learned"
        return checks, Verdict(name, verdict, why, None, walked, len(ways), remainder)

    def _measure(self, name: str, way: Stretch) -> tuple[Check, float]:
        """Replay a stretch in two precisions; how far its end may be off, and is."""
        memory, known = self.memory, self.memory.parameters[name]
        ends = []
        moved = [
            (known.dtype, Jitter(way.start, times, is_alike=is_alike))
            for is_alike in (False, True)
            for times in (1.0, -1.0)
        ]
        for dtype, jitter in ((torch.float64, None), *moved):
            weights = memory.kept.weights(name, way.start)
            for done in Replay(memory, name, dtype, self.known, jitter=jitter).run(
                way.start, way.steps
            ):
                weights = done.weights
            ends.append(weights.double().clone())
        self._advance(len(way.steps))
        actual = memory.kept.weights(name, way.stop).double()
        off, room, scale, typical = measured(ends[0], ends[1:], actual, ROUNDING[known.dtype])
        return Check(name, "states", off / scale, room / scale, way.stop), typical

    def _learned(self, name: str) -> float:
        kept = self.memory.kept
        steps = kept.steps(name)
        moved = kept.weights(name, steps[-1]).double() - kept.weights(name, steps[0]).double()
        return float(moved.square().mean().sqrt()) if moved.numel() else 0.0

    def _remainder(self, name: str, walker: Walker) -> float:
        """The share of what was learned that patterns do not explain.

        Under rules that are not linear: the share of the way between kept states, at most.
        """
        ways, kept = self.ways[name], self.memory.kept
        if not any(way.broken for way in ways):
            return 0.0
        if walker.is_linear:
            return walker.remainder(self.memory.steps)
        sizes = [
            float((kept.weights(name, w.stop).double() - kept.weights(name, w.start)).norm())
            for w in ways
        ]
        lost = sum(size for size, way in zip(sizes, ways, strict=True) if way.broken)
        return lost / (sum(sizes) or 1.0)

    def _weights(self, name: str, model: nn.Module) -> list[Check]:
        """Compare the model's weights with the last kept ones: equal to the bit, or not."""
        own = dict(model.named_parameters()).get(name)
        last = self.memory.kept.steps(name)[-1]
        kept = self.memory.kept.weights(name, last)
        if own is None or own.shape != kept.shape:
            return [Check(name, "weights", math.inf, 0.0, last)]
        now = own.detach().cpu()
        if not _differing(now, kept):
            return [Check(name, "weights", 0.0, 0.0)]
        off = (now.double() - kept.double()).abs().max() / (kept.double().abs().max() + 1e-300)
        return [Check(name, "weights", float(off), 0.0, last)]


def _has_failed(outcomes: list[tuple[Stretch, Outcome]]) -> bool:
    return any(not outcome.is_reached for _, outcome in outcomes)


def _differing(one: Any, other: Any) -> int:
    """Count the entries of two things that are not the same; no number equals no number."""
    if not isinstance(one, Tensor) or not isinstance(other, Tensor):
        return 0 if type(one) is type(other) and one == other else 1
    if one.shape != other.shape or one.dtype != other.dtype:
        return max(1, other.numel())
    return int(((one != other) & ~((one != one) & (other != other))).sum())
