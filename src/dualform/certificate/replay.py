"""From one kept state to the next: torch's own optimizer takes the steps again, by patterns alone.

A *stretch* leads from a kept state to the next one on the run's path (what a rewind took back is
left out). It can be walked if every update in it is explained and nothing on record lies between.
In training's dtype, on the machine and with the threads of training, a walk must reach the very
bits of the state at its end, and the mark of every step on the way: so a tampered row is found at
its very step. Elsewhere it is right up to rounding (`checks.py`).

Why it is hard: under clipping κ was measured, which leaves a few neighbouring numbers; the step's
mark says which it was.
"""

from __future__ import annotations

import platform
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from dualform.certificate.bounds import TINY
from dualform.certificate.gradients import ExplainedGradients, times
from dualform.certificate.marks import mark_of, remembered
from dualform.errors import QueryError
from dualform.learning_rules import Classes, OneParameter, class_of, classes
from dualform.memory import Memory, Phase

REACH, MOST = 8, 4096
"""How many float32 steps κ is searched for: the more, the more terms cancel; and at most."""

UNSAID = "is not explained, and nothing on record says why"

Begin = tuple[Tensor, Mapping[str, Any]]
Factors = dict[tuple[int, float], tuple[list[float], set[float]]]
"""Of a step and κ as measured: what marks have said κ was, last of all, and what it was not."""


@dataclass(frozen=True)
class Stretch:
    """The way of one parameter from a kept state to the next: its updates, why it is no way."""

    parameter: str
    start: int
    stop: int
    steps: tuple[int, ...]
    broken: str = ""
    """Why patterns do not lead from its start to its end; empty if they do."""
    is_replaced: bool = False
    """Whether another optimizer takes over at its end: then only weights can be compared."""


class Replayed(NamedTuple):
    """A parameter after an update; `weights` and `state` are valid until the next is asked for."""

    step: int
    weights: Tensor
    state: Mapping[str, Any]
    is_as_marked: bool


def stretches(memory: Memory, parameter: str, known: Classes) -> list[Stretch]:
    """List the ways between a parameter's kept states, in order; the last may lead to the end of
    a run that died, of which marks alone are known."""
    kept, record = memory.kept.steps(parameter), Record(memory, parameter)
    ends = [s for s in {*kept, memory.steps} if s and s not in record.back]
    return [record.stretch(stop, kept, known) for stop in sorted(ends)]


class Record:
    """What is on record of one parameter besides its patterns.

    `explained` says of every step whether patterns explain its gradient, all of it.
    """

    def __init__(self, memory: Memory, parameter: str) -> None:
        self.memory, self.known = memory, memory.parameters[parameter]
        self.log = log = memory.log(parameter)
        self.events = [e for e in memory.events if not e.parameters or parameter in e.parameters]
        self.back = {e.step: e.to for e in self.events if e.to is not None}
        self.is_kept = np.isin(np.arange(memory.steps), memory.kept.gradient_steps(parameter))
        self.explained, is_held = self.is_kept | log.explained, False
        for step in range(memory.steps):
            is_held = not log.carried[step] or is_held  # what `.grad` holds, as explained
            if log.moved[step]:
                self.explained[step] &= is_held or self.is_kept[step]
                is_held = bool(self.explained[step])

    def way_back(self, at: int, kept: Sequence[int]) -> tuple[int, tuple[int, ...]]:
        """Go back from the state after `at` updates to a kept one; list the updates between."""
        path = self.memory.path_to(self.known.name, at)
        on_path = {0, *(path + 1).tolist()} - {at} - self.back.keys()
        start = max(on_path.intersection(kept), default=0)
        return start, tuple(path[path >= start].tolist())

    def stretch(self, stop: int, kept: Sequence[int], known: Classes | None = None) -> Stretch:
        """Describe the way to a kept state; given classes, also whether they can take it."""
        start, steps = self.way_back(stop, kept)
        moved = [step for step in steps if self.log.moved[step]]
        changed = {"edited": {*steps, stop} - {start}, "replaced": {*steps} - {start}}
        causes = [self.cause(step) for step in moved if not self.explained[step]]
        events = [event for event in self.events if event.step in changed.get(event.what, ())]
        found = [why for why in causes if why.endswith(UNSAID)]
        found += [*(f"{event.why} (before step {event.step})" for event in events), *causes]
        for place in np.unique(self.log.setting[moved]).tolist():
            path = self.memory.settings[place].path
            if known is not None and class_of(path, known) is None:
                name = path.rpartition(".")[2]
                found.append(f"{path} is not at hand: hand the class in (optimizer={name})")
        broken = found[0] if found else ""
        is_replaced = any(e.what == "replaced" and e.step == stop for e in self.events)
        return Stretch(self.known.name, start, stop, steps, broken, is_replaced)

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


class Replay:
    """Replays of one parameter; `factors` shares between parameters what marks say of κ."""

    def __init__(
        self,
        memory: Memory,
        parameter: str,
        dtype: torch.dtype,
        known: Classes,
        *,
        factors: Factors | None = None,
        jitter: int | None = None,
    ) -> None:
        self.memory, self.known = memory, known
        self.parameter, self.log = memory.parameters[parameter], memory.log(parameter)
        self._gradients = ExplainedGradients(memory, parameter, dtype, jitter)
        self._is_marked = dtype == self.parameter.dtype and jitter is None
        was_scaled = (self.log.kappa[self.log.explained] != 1.0).any()
        is_kept = np.isin(np.arange(memory.steps), memory.kept.gradient_steps(parameter))
        self._is_measured = ~is_kept & was_scaled
        """At which steps κ is known as measured only: a gradient that was kept has it in it."""
        self._dtype, self._factors = dtype, {} if factors is None else factors
        self._v, self._signs = memory.direction(parameter), memory.signs(parameter)

    def run(
        self, start: int, steps: Sequence[int], begin: Begin | None = None
    ) -> Iterator[Replayed]:
        """Take some updates from a kept state on, or from the weights and state given."""
        name, kept = self.parameter.name, self.memory.kept
        begin = begin or (kept.weights(name, start), kept.state(name, start))
        one = OneParameter(*begin, self.known, self._dtype)
        for step in steps:
            if self.log.moved[step]:
                self._gradients.hold(step, self._take(one, step, *self._gradients.total(step)))
                yield Replayed(step, one.weights, one.state, self._is_marked)

    def _take(self, one: OneParameter, step: int, total: Tensor, kappa: float) -> Tensor:
        """Take one update; of the numbers that κ may have been, that which the mark says."""
        setting, fresh = self.memory.settings[self.log.setting[step]], bool(self.log.fresh[step])
        before, factors = (one.weights, one.state), iter([kappa])
        heard, refuted = list[float](), set[float]()
        if not (is_sure := not (self._is_marked and self._is_measured[step])):
            heard, refuted = self._factors.setdefault((step, kappa), (heard, refuted))
            factors = chain(list(heard), self._near(step, total, kappa))
            before = one.weights.clone(), {n: _copied(v) for n, v in one.state.items()}
        held, tried = total, set[float]()
        for factor in (f for f in factors if f not in refuted and f not in tried):
            if tried:
                one.put(*before)
            held = times(total, factor)
            try:
                one.step(setting, held.clone(), fresh=fresh)
            except Exception as error:  # whatever a class raises that is given other settings
                said = f"{setting.path} cannot take step {step} again: {error!r:.200}"
                raise QueryError(said) from error
            if not self._is_marked:
                return held
            if self._is_as_marked(one, step):
                heard[:] = [factor]
                refuted |= tried
                return held
            tried.add(factor)
        self._is_marked = False  # it is not κ that is wrong
        if is_sure:
            return held
        one.put(*before)
        return self._take(one, step, total, kappa)

    def _near(self, step: int, total: Tensor, kappa: float) -> Iterator[float]:
        """What κ may have been: as measured or near it, and what makes the gradient what was seen.

        A number next to 1 was taken for 1 when it was measured. What was seen may be far off where
        the rows' signed sum is small by chance.
        """
        with np.errstate(all="ignore"):
            beside = np.array(sorted(range(-REACH, REACH + 1), key=abs), np.int32)
            found = (np.float32(kappa).view(np.int32) + beside).view(np.float32).astype(float)
        yield from (kappa, *found[np.isfinite(found)].tolist())
        if kappa == 1.0:
            return
        rows, signs = total.double().reshape(len(self._signs), -1), self._signs
        along = (rows[:, 0] if self._v is None else rows @ self._v).numpy()
        whole = float(signs @ along) or TINY
        # x·v may be small by chance where the gradient is not: its size says how far sums are off
        reach = int(min(MOST, REACH + REACH * float(torch.linalg.vector_norm(rows)) / abs(whole)))
        places = np.array(sorted(range(-reach, reach + 1), key=abs), np.int32)
        with np.errstate(all="ignore"):
            centre = np.float32(self.log.seen[step] / whole).view(np.int32)
            found = (centre + places).view(np.float32).astype(float)
        yield from found[np.isfinite(found)].tolist()

    def _is_as_marked(self, one: OneParameter, step: int) -> bool:
        mark, of_state = int(self.log.mark[step]), int(self.log.state_mark[step])
        if mark and mark != mark_of([one.weights]):
            return False
        return not of_state or of_state == mark_of(remembered(one.state))


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
    found = record.stretch(step, kept, known)
    if found.broken:
        around = " and ".join(str(k) for k in (found.start, *(k for k in kept if k > step))[:2])
        raise QueryError(
            f"the weights of {parameter!r} after {step} updates cannot be rebuilt: {found.broken}. "
            f"They were kept at steps {around}: ask for one of these"
        )
    weights = memory.kept.weights(parameter, found.start)
    replay = Replay(memory, parameter, weights.dtype, known, factors=factors)
    is_exact = weights.dtype == torch.float32 and not inexact(record, found)
    with threads_of(memory, max(0, step - 1)):
        for done in replay.run(found.start, found.steps):
            weights = done.weights
            if is_exact and not done.is_as_marked:
                raise QueryError(
                    f"the weights of {parameter!r} after {step} updates cannot be rebuilt: torch's "
                    f"own optimizer, given its patterns, goes elsewhere at step {done.step}. "
                    f"verify() says more; they were kept at step {found.start}"
                )
    return weights.clone()


def inexact(record: Record, way: Stretch) -> str:
    """Say why a stretch need not be reached to the bit here; empty if it must be."""
    layers = [record.memory.layer(name) for name in record.known.layers]
    if any(event.what == "shaken" and event.step <= way.stop for event in record.events):
        return "between updates something was added to the weights and taken away again"
    if any(layer.stored_eps for layer in layers):
        return f"rows are stored in {str(layers[0].stored).removeprefix('torch.')}"
    moved = [step for step in way.steps if record.log.moved[step]]
    if any(layer.keep == "examples" for layer in layers) and not record.is_kept[moved].all():
        return "sums of examples are not torch's sums"
    gradients = ExplainedGradients(record.memory, record.known.name, record.known.dtype)
    if any(map(gradients.may_meet, moved)):
        return "several uses of it in a pass may have shared a view or a cast"
    then = phase_of(record.memory, way.steps[-1] if way.steps else 0)._asdict()
    differs = [n for n, now in here().items() if n != "threads" and then[n] not in ("", now)]
    return ", ".join(f"recorded with {n} {then[n]}, not {here()[n]}" for n in differs)


def phase_of(memory: Memory, step: int) -> Phase:
    """Give the phase of recording that an update belongs to: its threads, machine and torch."""
    begun = (phase for phase in reversed(memory.phases) if phase.first_step <= step)
    return next(begun, Phase(0, "", "", None))


def here() -> dict[str, Any]:
    """Say what the bits of a sum depend on: threads, machine and torch."""
    machine = f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"
    return {"threads": torch.get_num_threads(), "machine": machine, "torch": torch.__version__}


@contextmanager
def threads_of(memory: Memory, step: int) -> Iterator[None]:
    """Compute with as many threads as training did at a step: sums depend on it to the bit."""
    wanted, now = phase_of(memory, step).threads, torch.get_num_threads()
    torch.set_num_threads(wanted if 0 < wanted <= 4096 else now)
    try:
        yield
    finally:
        torch.set_num_threads(now)


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value
