"""Which recorded step do these weights belong to, where Adam or one of its relatives trained them?

Between fingerprints such a rule cannot be followed along one direction. But it can be replayed from
the patterns (`memory/replay.py`), entry by entry, from the first step on. A small parameter is
enough to say which step it could be, and the optimizer's own count where weights hardly move; then
every parameter has to agree, with all that is remembered of it, at that very step
(`differences.py`).
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from dualform.memory import Memory
from dualform.memory.replay import Part, Replay
from dualform.memory.states import WEIGHTS
from dualform.recording.differences import Difference, at_print, by_replay, weights_at_print
from dualform.recording.walking import Print, Reals, Target, off_by, walk

CLEARLY = 16.0
"""How many times further off every other step must be."""


@dataclass(frozen=True)
class Found:
    """The step that model and optimizer are at; if there is none, what is in the way."""

    step: int
    differences: list[Difference] = field(default_factory=list)
    """What differs at that step, which is then the nearest."""
    steps: list[int] = field(default_factory=list)
    """Several steps that cannot be told apart."""


def find_by_replay(
    memory: Memory, targets: Sequence[Target], prints: Sequence[Print]
) -> Found | None:
    """The number of updates after which the model was as it is now; None if nothing can tell."""
    replayed = sorted(
        (t for t in targets if t.can_be_replayed),
        key=lambda t: memory.parameters[t.name].height * t.audit.width,
    )
    if not replayed:
        return None
    steps = _narrowed(memory, replayed)
    if len(steps) > 1:
        return Found(int(steps[-1]), steps=steps.tolist())
    found = _compared(memory, targets, prints, int(steps[0]))
    if not found.differences:
        return found
    likely = Counter(_nearest(memory, target) for target in replayed).most_common(1)[0][0]
    return found if likely == found.step else _compared(memory, targets, prints, likely)


def _narrowed(memory: Memory, replayed: Sequence[Target]) -> NDArray[np.int64]:
    """The steps that the weights could be of: by counts, by one parameter, or by several.

    An update that is less than a rounding may have been lost, at every step. Of steps between which
    no weight moved at all, the last.
    """
    steps: NDArray[np.int64] = np.arange(memory.steps + 1)
    stayed = True
    for target in replayed:
        distances, counts = _distances(memory, target)
        if target.remembered:
            counted = steps[counts[steps] == float(target.remembered["step"])]
            steps = counted if len(counted) else steps
        clearly = CLEARLY * max(float(distances[steps].min()), target.exact)
        lost = target.audit.eps * target.size * (1 + steps)
        steps = steps[distances[steps] <= np.maximum(clearly, lost)]
        if len(steps) == 1:
            return steps
        stayed = stayed and not bool(np.ptp(distances[steps]))
    return steps[-1:] if stayed else steps


def _nearest(memory: Memory, target: Target) -> int:
    return int(np.argmin(_distances(memory, target)[0]))


def _distances(memory: Memory, target: Target) -> tuple[Reals, Reals]:
    """How far the weights are, along v, from those after 0, 1, … updates; the counts there."""
    steps, reached = memory.steps, 0
    found, counts = np.full(steps + 1, np.inf), np.zeros(steps + 1)
    whole, count = Part.whole(memory, target.name), -1.0
    now = off_by(target.audit.project(whole.weights), target.weights)
    for done in Replay(memory, target.name, steps).forward():
        found[reached : done.step + 1], counts[reached : done.step + 1] = now, count
        whole.take(done, done.gradient)
        now, reached = off_by(target.audit.project(whole.weights), target.weights), done.step + 1
        count = float(done.state["step"])
    found[reached:], counts[reached:] = now, count
    return found, counts


def _compared(
    memory: Memory, targets: Sequence[Target], prints: Sequence[Print], step: int
) -> Found:
    """Everything at one step: by its fingerprint, or else by the replay and by SGD's own log."""
    seen = next((p for p in prints if p.step == step), None)
    if seen is not None:
        found = [d for d in (weights_at_print(t, seen) for t in targets) if d]
        found += [d for d in (at_print(memory, t, seen) for t in targets) if d]
        return Found(step, found)
    found = [d for t in targets if t.can_be_replayed_to(step) for d in by_replay(memory, t, step)]
    untrained = [t for t in targets if memory.parameters[t.name].coverage == "untrained"]
    found += [d for d in (weights_at_print(t, prints[0]) for t in untrained) if d]
    for start, end in itertools.pairwise(prints):
        if start.step < step < end.step:
            for target in (t for t in targets if t.log is not None):
                found += _walked(memory, target, start, end, step)
    return Found(step, found)


def _walked(
    memory: Memory, target: Target, start: Print, end: Print, step: int
) -> Iterator[Difference]:
    """How a parameter that SGD trained differs from its step between two fingerprints."""
    for candidate in walk(memory, [target], start, end):
        parts = {WEIGHTS: candidate.weights, "the momentum buffer": candidate.momentum}
        for what, distance in parts.items() if candidate.step == step else ():
            if distance > 1.0:
                said = f"{what}: {distance:.2g} times what rounding explains"
                yield Difference(target.name, what, said)
