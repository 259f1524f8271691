"""From one kept state to the next: torch's own optimizer takes the steps again, by patterns alone.

A *stretch* leads from a kept state to the next one on the run's path (what a rewind took back is
left out). It can be replayed if every update in it is explained and nothing on record lies between.
In training's dtype, on the machine and with the threads of training, a replay must reach the very
bits of the state at its end, and the mark of every step on the way: so a tampered row is found at
its very step. Elsewhere it is right up to rounding (`judging.py`).

Why it is hard: under clipping κ was measured, which leaves a few neighbouring numbers; the step's
mark says which it was.
"""

from __future__ import annotations

import platform
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dualform.certificate.bounds import TINY, projected
from dualform.certificate.gradients import ExplainedGradients
from dualform.certificate.marks import mark_of, remembered
from dualform.errors import QueryError
from dualform.learning_rules import Classes, OneParameter, State, class_of, classes
from dualform.memory import Memory, Phase

REACH, MOST = 8, 4096  # float32 steps κ is searched for: more where terms cancel; and at most

UNSAID = "is not explained, and nothing on record says why"
ELSEWHERE = "torch's own optimizer, given its patterns, goes elsewhere"

Factors = dict[tuple[int, float], float]
"""What a mark last said κ was, by step and κ as measured."""


class Stretch(NamedTuple):
    """From a kept state to the next: the steps that moved the parameter, and why patterns do not
    lead to its end (`broken`), empty if they do."""

    start: int
    stop: int
    steps: list[int]
    broken: str


class Replayed(NamedTuple):
    """A parameter after an update; `weights` and `state` are valid until the next is asked for."""

    step: int
    weights: Tensor
    state: Mapping[str, Any]
    is_as_marked: bool


class Record:
    """What is on record of one parameter besides its patterns.

    `explained` says of every step whether patterns explain its gradient, all of it. At the states
    in `replaced` another optimizer takes over, so that only weights can be compared.
    """

    def __init__(self, memory: Memory, parameter: str) -> None:
        self.memory, self.known = memory, memory.parameters[parameter]
        self.log = log = memory.log(parameter)
        self.events = [e for e in memory.events if not e.parameters or parameter in e.parameters]
        self.back = {e.step: e.to for e in self.events if e.to is not None}
        self.replaced = {e.step for e in self.events if e.what == "replaced"}
        self.is_kept = np.isin(np.arange(memory.steps), memory.kept.gradient_steps(parameter))
        self.explained, is_held = self.is_kept | log.explained, False
        for step in range(memory.steps):
            is_held = not log.carried[step] or is_held  # what `.grad` holds, as explained
            if log.moved[step]:
                self.explained[step] &= is_held or self.is_kept[step]
                is_held = bool(self.explained[step])

    def paths(self, steps: Sequence[int] | NDArray[np.bool_]) -> list[str]:
        """List the classes that took some steps."""
        return sorted({self.memory.settings[n].path for n in np.unique(self.log.setting[steps])})

    def stretches(self, known: Classes) -> list[Stretch]:
        """List the ways between kept states, in order; the last may lead to the end of a run that
        died, of which marks alone are known."""
        kept = set(self.memory.kept.steps(self.known.name))
        ends = sorted({*kept, self.memory.steps} - {0} - self.back.keys())
        return [self.stretch(stop, kept, known) for stop in ends]

    def way_back(self, at: int, kept: Collection[int]) -> tuple[int, list[int]]:
        """Go back from the state after `at` updates to a kept one; list the updates between."""
        state, steps = self.back.get(at, at), list[int]()
        while state and (state == at or state not in kept or state in self.back):
            steps.append(state - 1)
            state = self.back.get(state - 1, state - 1)
        return state, steps[::-1]

    def stretch(self, stop: int, kept: Collection[int], known: Classes | None = None) -> Stretch:
        """Describe the way to a kept state; given classes, also whether they can take it."""
        start, steps = self.way_back(stop, kept)
        moved = [step for step in steps if self.log.moved[step]]
        within = {"edited": {*steps, stop} - {start}, "replaced": {*steps} - {start}}
        found = [e for e in self.events if e.step in within.get(e.what, ())]
        why = [f"{e.why} (before step {e.step})" for e in found]
        why += [self.cause(step) for step in moved if not self.explained[step]]
        why.sort(key=lambda said: not said.endswith(UNSAID))
        for path in self.paths(moved):
            if known is not None and class_of(path, known) is None:
                name = path.rpartition(".")[2]
                why.append(f"{path} is not at hand: hand the class in (optimizer={name})")
        return Stretch(start, stop, moved, why[0] if why else "")

    def cause(self, step: int) -> str:
        """Say why a gradient is not explained; `UNSAID` if that is not on record."""
        every = self.memory.every
        if self.known.keep in ("values", "keys"):
            return self.known.why or f"kept as {self.known.keep}"
        if every > 1 and step % every:
            return f"patterns of one of every {every} steps were kept"
        for event in reversed(self.events):
            if event.what == "unexplained" and event.step <= step:
                return f"{event.why} (step {event.step})"
        if self.log.carried[step] and every > 1:
            return f"it held what was not recorded (step {step})"
        return f"the gradient of step {step} {UNSAID}"

    def inexact(self, way: Stretch) -> str:
        """Say why a stretch need not be reached to the bit here; empty if it must be."""
        layers = [self.memory.layer(name) for name in self.known.layers]
        may_meet = ExplainedGradients(self.memory, self.known.name, self.known.dtype).may_meet
        if any(event.what == "shaken" and event.step <= way.stop for event in self.events):
            return "between updates something was added to the weights and taken away again"
        if any(layer.stored_eps for layer in layers):
            return f"rows are stored in {str(layers[0].stored).removeprefix('torch.')}"
        if any(layer.keep == "examples" for layer in layers) and not self.is_kept[way.steps].all():
            return "sums of examples are not torch's sums"
        if any(map(may_meet, way.steps)):
            return "several uses of it in a pass may have shared a view or a cast"
        then, now = phase_of(self.memory, way.stop - 1)._asdict(), here()
        differs = [n for n in ("machine", "torch") if then[n] not in ("", now[n])]
        return ", ".join(f"recorded with {n} {then[n]}, not {now[n]}" for n in differs)


class Replay:
    """Replays of one parameter; `factors` shares between parameters what marks say of κ."""

    def __init__(
        self, record: Record, dtype: torch.dtype, known: Classes, factors: Factors, jitter: int = 0
    ) -> None:
        self._memory, self._name, self._log = record.memory, record.known.name, record.log
        self._gradients = ExplainedGradients(self._memory, self._name, dtype, jitter)
        self._is_own = dtype == record.known.dtype
        self._is_marked = self._is_own and not jitter
        self._is_measured = ~record.is_kept & (self._log.kappa[self._log.explained] != 1.0).any()
        """At which steps κ is known as measured only: a gradient that was kept has it in it."""
        self._dtype, self._known, self._factors = dtype, known, factors

    def run(
        self, start: int, steps: Sequence[int], begin: tuple[Tensor, State] | None = None
    ) -> Iterator[Replayed]:
        """Take some updates from a kept state on, or from the weights and state given."""
        kept, threads = self._memory.kept, torch.get_num_threads()
        begin = begin or (kept.weights(self._name, start), kept.state(self._name, start))
        one = OneParameter(*begin, self._known, self._dtype)
        for step in (step for step in steps if self._log.moved[step]):
            then = phase_of(self._memory, step).threads
            try:  # sums depend on it to the bit
                torch.set_num_threads(then if self._is_own and 0 < then <= 4096 else threads)
                one = self._taken(one, step)
            finally:
                torch.set_num_threads(threads)
            yield Replayed(step, one.weights, one.state, self._is_marked)

    def _taken(self, one: OneParameter, step: int) -> OneParameter:
        """Take one update; of the numbers that κ may have been, that which the mark says."""
        log, gradients = self._log, self._gradients
        setting, fresh = self._memory.settings[log.setting[step]], bool(log.fresh[step])
        (total, kappa), before = gradients.total(step), one
        if is_searched := self._is_marked and self._is_measured[step]:
            before = OneParameter(one.weights, one.state, self._known, self._dtype)
        for nth, factor in enumerate(self._may_be(step, total, kappa) if is_searched else [kappa]):
            if nth:
                one = OneParameter(before.weights, before.state, self._known, self._dtype)
            gradients.last = step, gradients.times(total, factor)
            try:
                one.step(setting, gradients.last[1].clone(), fresh=fresh)
            except Exception as error:  # whatever a class raises that is given other settings
                said = f"{setting.path} cannot take step {step} again: {error!r:.200}"
                raise QueryError(said) from error
            if self._is_marked and (  # a mark of 0 is none
                log.mark[step] in (0, mark_of([one.weights]))
                and log.state_mark[step] in (0, mark_of(remembered(one.state)))
            ):
                self._factors[step, kappa] = factor
                return one
        self._is_marked = False  # it is not κ that is wrong
        return one

    def _may_be(self, step: int, total: Tensor, kappa: float) -> Iterator[float]:
        """List what κ may have been: what another parameter found, as measured or near it, near
        what makes the gradient what was seen; if none of them was, as measured. A number next to 1
        was taken for 1 when it was measured."""
        yield self._factors.get((step, kappa), kappa)
        yield from _beside(kappa, REACH)
        if kappa != 1.0:
            v, signs = self._gradients.v, self._gradients.signs
            whole = float(signs @ projected(total, v)[0]) or TINY
            # x·v may be small by chance where the gradient is not: its size bounds its sums
            terms = float(torch.linalg.vector_norm(total.double())) / abs(whole)
            yield from _beside(self._log.seen[step] / whole, int(min(MOST, REACH + REACH * terms)))
        yield kappa


@np.errstate(all="ignore")
def _beside(number: float, reach: int) -> list[float]:
    """List the float32 numbers around one, the nearest first."""
    places = np.array(sorted(range(-reach, reach + 1), key=abs), np.int32)
    found = (np.float32(number).view(np.int32) + places).view(np.float32)
    return [float(beside) for beside in found if np.isfinite(beside)]


def at(
    memory: Memory,
    parameter: str,
    step: int,
    known: Classes | None = None,
    factors: Factors | None = None,
) -> Tensor:
    """Give a parameter's very weights after so many updates; raise `QueryError` if they cannot be.

    On the machine and with the threads of training to the bit, elsewhere up to rounding. `factors`
    shares between parameters what marks say of κ.
    """
    known, kept = classes() if known is None else known, memory.kept.steps(parameter)
    if not 0 <= step <= memory.steps:
        raise QueryError(f"step {step} was asked for; the memory holds steps 0 to {memory.steps}")
    record = Record(memory, parameter)
    if step in kept and step not in record.back:
        return memory.kept.weights(parameter, step).clone()
    way, dtype = record.stretch(step, kept, known), record.known.dtype
    why, weights = way.broken, memory.kept.weights(parameter, way.start)
    is_exact = dtype == torch.float32 and not why and not record.inexact(way)
    replay = Replay(record, dtype, known, {} if factors is None else factors)
    for done in replay.run(way.start, () if why else way.steps):
        weights = done.weights
        if is_exact and not done.is_as_marked:
            why = f"{ELSEWHERE} at step {done.step}"
            break
    if why:
        around = " and ".join(str(k) for k in (way.start, *(k for k in kept if k > step))[:2])
        raise QueryError(
            f"the weights of {parameter!r} after {step} updates cannot be rebuilt: {why}. They "
            f"were kept at steps {around}: ask for one of these; verify() says more"
        )
    return weights.clone()


def phase_of(memory: Memory, step: int) -> Phase:
    """Give the phase of recording that an update belongs to: its threads, machine and torch."""
    begun = (phase for phase in reversed(memory.phases) if phase.first_step <= max(0, step))
    return next(begun, Phase(0, "", "", None))


def here() -> dict[str, Any]:
    """Say what the bits of a sum depend on: threads, machine and torch."""
    machine = f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"
    return {"threads": torch.get_num_threads(), "machine": machine, "torch": torch.__version__}
