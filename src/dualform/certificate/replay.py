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

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dualform.certificate.gradients import ExplainedGradients, Jitter, times
from dualform.certificate.marks import mark_of, remembered
from dualform.errors import QueryError
from dualform.learning_rules import Classes, OneParameter, class_of, classes
from dualform.memory import Memory

REACH = 32
"""How many float32 steps κ as measured may be from what it was; mostly it is the very one."""

Refuted = dict[tuple[int, float], set[float]]
"""Of a step and κ as measured: the numbers that a mark has said κ was not."""


Flags = NDArray[np.bool_]

ENVIRONMENT = ("threads", "machine", "torch")
"""What the bits of a sum depend on."""


@dataclass(frozen=True)
class Stretch:
    """The way of one parameter from a kept state to the next: its updates, why it is no way."""

    parameter: str
    start: int
    stop: int
    steps: tuple[int, ...]
    broken: str = ""
    """Why patterns do not lead from its start to its end; empty if they do."""
    is_unrecorded: bool = False
    """Whether nothing on record accounts for that."""
    is_replaced: bool = False
    """Whether another optimizer takes over at its end: then only weights can be compared."""


class Replayed(NamedTuple):
    """A parameter after an update; `weights` and `state` are valid until the next is asked for."""

    step: int
    weights: Tensor
    state: Mapping[str, Any]
    gradient: Tensor
    is_as_marked: bool = True


def stretches(memory: Memory, parameter: str, known: Classes) -> list[Stretch]:
    """List the ways between a parameter's kept states, in order."""
    kept = memory.kept.steps(parameter)
    on_record = Record(memory, parameter)
    return [on_record.stretch(s, kept, known) for s in kept if s and s not in on_record.back]


class Record:
    """What is on record of one parameter besides its patterns."""

    def __init__(self, memory: Memory, parameter: str) -> None:
        self.memory, self.known, self.log = (
            memory,
            memory.parameters[parameter],
            memory.log(parameter),
        )
        self.events = [e for e in memory.events if not e.parameters or parameter in e.parameters]
        self.back = {e.step: e.to for e in self.events if e.to is not None}
        kept = set(memory.kept.gradient_steps(parameter))
        self.is_kept = np.zeros(memory.steps, bool)
        self.is_kept[[step for step in kept if step < memory.steps]] = True
        self.explained = self._explained()

    def _explained(self) -> Flags:
        """Which gradients are explained, all of them: with what was carried into them."""
        log, found = self.log, self.is_kept | (self.log.explained != 0)
        for step in np.flatnonzero(log.carried & log.moved & found & ~self.is_kept).tolist():
            earlier = step - 1
            while earlier >= 0 and log.carried[earlier] and not log.moved[earlier]:
                earlier -= 1
            found[step] = earlier >= 0 and (found[earlier] or not log.moved[earlier])
        explained: Flags = found
        return explained

    def way_back(self, at: int, kept: Sequence[int]) -> tuple[int, tuple[int, ...]]:
        """Walk back from the state after `at` updates to a kept one; list the updates between."""
        steps, state, is_kept = [], at, set(kept) - set(self.back)
        is_restored = False  # then what followed the restored state the first time does not count
        while True:
            if state in self.back and not is_restored:
                state, is_restored = self.back[state], True
            elif state:
                state, is_restored = state - 1, False
                steps.append(state)
            if state in is_kept or not state:
                return state, tuple(reversed(steps))

    def stretch(self, stop: int, kept: Sequence[int], known: Classes) -> Stretch:
        """Describe the way to a kept state."""
        start, steps = self.way_back(stop, kept)
        moved = [step for step in steps if self.log.moved[step]]
        why, cause = "", True
        is_inside = set(steps) - {start}
        for event in self.events:
            if event.what == "edited" and (event.step in is_inside or event.step == stop):
                why = f"{event.why} (before step {event.step})"
            elif event.what == "replaced" and event.step in is_inside:
                why = f"another optimizer took over before step {event.step}"
        for step in moved:
            if not why and not self.explained[step]:
                why, cause = self.cause(step)
        if not why:
            why = self._unreplayable(moved, known)
        is_replaced = any(e.what == "replaced" and e.step == stop for e in self.events)
        return Stretch(self.known.name, start, stop, steps, why, not cause, is_replaced)

    def cause(self, step: int) -> tuple[str, bool]:
        """Say why a gradient is not explained, and whether that is on record."""
        memory, before = self.memory, [e for e in self.events if e.step <= step]
        if self.known.keep in ("values", "keys"):
            return self.known.why or f"kept as {self.known.keep}", True
        if memory.every > 1 and step % memory.every:
            return f"patterns of one of every {memory.every} steps were kept", True
        for event in reversed(before):
            if event.what == "unexplained":
                return f"{event.why} (step {event.step})", True
        if self.log.carried[step] and memory.every > 1:
            return f"it held what was not recorded (step {step})", True
        return (
            f"the gradient of step {step} is not explained, and nothing on record says why",
            False,
        )

    def _unreplayable(self, moved: Sequence[int], known: Classes) -> str:
        for place in dict.fromkeys(int(self.log.setting[step]) for step in moved):
            setting = self.memory.settings[place]
            if class_of(setting.path, known) is None:
                name = setting.path.rpartition(".")[2]
                return f"{setting.path} is not at hand: hand the class in (optimizer={name})"
        return ""


class Replay:
    """Replays of one parameter; `refuted` shares between parameters what marks say of κ."""

    def __init__(
        self,
        memory: Memory,
        parameter: str,
        dtype: torch.dtype,
        known: Classes,
        *,
        refuted: Refuted | None = None,
        jitter: Jitter | None = None,
    ) -> None:
        self.memory, self.known = memory, known
        self.parameter = memory.parameters[parameter]
        self.log = memory.log(parameter)
        self._gradients = ExplainedGradients(memory, parameter, dtype, jitter)
        self._is_exact = dtype == self.parameter.dtype and jitter is None
        self._is_exact &= not is_shaken(memory, parameter)
        self._dtype, self._refuted = dtype, {} if refuted is None else refuted

    def run(
        self,
        start: int,
        steps: Sequence[int],
        begin: tuple[Tensor, Mapping[str, Any]] | None = None,
    ) -> Iterator[Replayed]:
        """Take some updates from a kept state on, or from the weights and state given."""
        name, kept = self.parameter.name, self.memory.kept
        begin = begin or (kept.weights(name, start), kept.state(name, start))
        one = OneParameter(*begin, self.known, self._dtype)
        held: Tensor | None = None
        is_first = True
        for step in steps:
            held = self._gradients.before(step) if is_first else held
            is_first = False
            if not self.log.moved[step]:
                held = self._gradients.after(step, held)
                continue
            total, kappa = self._gradients.at(step, held)
            held, is_as_marked = self._take(one, step, total, kappa)
            yield Replayed(step, one.weights, one.state, held, is_as_marked)

    def _take(
        self, one: OneParameter, step: int, total: Tensor, kappa: float
    ) -> tuple[Tensor, bool]:
        """Take one update; of the numbers that κ may have been, that which the mark says."""
        setting = self.memory.settings[int(self.log.setting[step])]
        fresh = bool(self.log.fresh[step])
        if not self._is_exact or kappa == 1.0:
            held = times(total, kappa)
            one.step(setting, held.clone(), fresh=fresh)
            return held, not self._is_exact or self._is_as_marked(one, step)
        before = one.weights.clone(), {n: _copied(v) for n, v in one.state.items()}
        refuted = self._refuted.setdefault((step, kappa), set())
        for n, factor in enumerate(near(kappa, refuted)):
            if n:
                one.put(*before)
            held = times(total, factor)
            one.step(setting, held.clone(), fresh=fresh)
            if self._is_as_marked(one, step):
                return held, True
            refuted.add(factor)
        refuted.clear()  # it is not κ that is wrong
        one.put(*before)
        held = times(total, kappa)
        one.step(setting, held.clone(), fresh=fresh)
        return held, False

    def _is_as_marked(self, one: OneParameter, step: int) -> bool:
        mark, of_state = int(self.log.mark[step]), int(self.log.state_mark[step])
        if mark and mark != mark_of([one.weights]):
            return False
        return not of_state or of_state == mark_of(remembered(one.state))


def is_shaken(memory: Memory, parameter: str, at: int | None = None) -> bool:
    """Whether a loop has changed the last bits of a parameter between updates, up to a step."""
    last = memory.steps if at is None else at
    events = (e for e in memory.events if e.what == "shaken" and e.step <= last)
    return any(parameter in event.parameters for event in events)


def near(kappa: float, refuted: set[float]) -> Iterator[float]:
    """List the numbers that κ may have been, the likeliest first."""
    low = high = np.float32(kappa)
    far = np.float32(np.inf)
    yield from {kappa, float(low)} - refuted
    for _ in range(REACH):
        low, high = np.nextafter(low, np.float32(0)), np.nextafter(high, np.copysign(far, high))
        yield from {float(low), float(high)} - refuted


def replay(
    memory: Memory,
    parameter: str,
    start: int,
    stop: int,
    dtype: torch.dtype,
    known: Classes | None = None,
) -> Iterator[Replayed]:
    """Take the updates between two states again; `start` is a kept one on the way to `stop`."""
    known = classes() if known is None else known
    reached, steps = Record(memory, parameter).way_back(stop, [start])
    if reached != start:
        raise QueryError(
            f"step {start} does not lie on the way to step {stop}: a rewind left it out. "
            "Begin at an earlier kept state"
        )
    yield from Replay(memory, parameter, dtype, known).run(start, steps)


def at(memory: Memory, parameter: str, step: int, known: Classes | None = None) -> Tensor:
    """Give a parameter's very weights after so many updates; raise `QueryError` if they cannot be.

    On the machine and with the threads of training to the bit, elsewhere up to rounding.
    """
    known, kept = classes() if known is None else known, memory.kept.steps(parameter)
    if not 0 <= step <= memory.steps:
        raise QueryError(f"step {step} was asked for; the memory holds steps 0 to {memory.steps}")
    on_record = Record(memory, parameter)
    if step in kept and step not in on_record.back:
        return memory.kept.weights(parameter, step).clone()
    found = on_record.stretch(step, kept, known)
    if found.broken:
        after = next((k for k in kept if k > step), None)
        around = f"steps {found.start} and {after}" if after is not None else f"step {found.start}"
        raise QueryError(
            f"the weights of {parameter!r} after {step} updates cannot be rebuilt: {found.broken}. "
            f"They were kept at {around}: ask for one of these"
        )
    weights = memory.kept.weights(parameter, found.start)
    with threads_of(memory, max(0, step - 1)):
        for done in Replay(memory, parameter, weights.dtype, known).run(found.start, found.steps):
            weights = done.weights
    return weights.clone()


def environment_of(memory: Memory, step: int) -> dict[str, Any]:
    """Give threads, machine and torch of the phase of recording that an update belongs to."""
    begun = [phase for phase in memory.phases if phase.first_step <= step]
    found = {name: getattr(begun[-1], name, None) for name in ENVIRONMENT} if begun else {}
    return {n: memory.environment.get(n) if found.get(n) is None else found[n] for n in ENVIRONMENT}


@contextmanager
def threads_of(memory: Memory, step: int) -> Iterator[None]:
    """Compute with as many threads as training did at a step: sums depend on it to the bit."""
    wanted, now = environment_of(memory, step)["threads"], torch.get_num_threads()
    if not isinstance(wanted, int) or wanted == now or not 0 < wanted <= 4096:
        yield
        return
    torch.set_num_threads(wanted)
    try:
        yield
    finally:
        torch.set_num_threads(now)


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value
