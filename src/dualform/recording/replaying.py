"""Which recorded step do these weights belong to, where Adam or one of its relatives trained them?

Between fingerprints such a rule cannot be followed along one direction. But it can be replayed from
the patterns (`memory/replay.py`), entry by entry, from the first step on. One small parameter is
enough to say which step it could be; then every other one has to agree, with its weights and with
its first moments, at that very step.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from math import sqrt

import numpy as np

from dualform.memory import Memory
from dualform.memory.replay import Part, Replay
from dualform.recording.walking import Print, Reals, Target, off_by, walk

ROUNDINGS = 4096.0
"""How many roundings of its own size, √steps of them, a replayed parameter may be off by."""

CLEARLY = 16.0
"""How many times further off every other step must be."""


def find_by_replay(
    memory: Memory, targets: Sequence[Target], prints: Sequence[Print]
) -> int | None:
    """The number of updates after which the model was as it is now; None if there is none."""
    replayed = [t for t in targets if t.rule is not None and _can_be_replayed(memory, t.name)]
    if not replayed:
        return None
    smallest = min(replayed, key=lambda t: memory.parameters[t.name].height * t.audit.width)
    distances = _distances(memory, smallest, memory.steps)
    best = int(np.argmin(distances))
    if not distances[best] <= _allowed(smallest, best):
        return None
    same = np.flatnonzero(distances <= CLEARLY * max(distances[best], smallest.exact))
    if len(same) > 1 and np.ptp(same) != len(same) - 1:  # neither one step nor one that stayed
        return None
    step = int(same[-1])
    agreed = all(_agrees(memory, target, step) for target in replayed)
    others = [t for t in targets if t.log is not None]
    return step if agreed and _walked(memory, others, prints, step) else None


def _can_be_replayed(memory: Memory, name: str) -> bool:
    known = memory.parameters[name]
    return known.coverage in ("patterns", "steps") and known.accumulated_since is None


def _distances(memory: Memory, target: Target, steps: int) -> Reals:
    """How far the parameter's weights are from those after 0 … `steps` updates, along v."""
    found = np.full(steps + 1, np.inf)
    whole, reached = Part.whole(memory, target.name), 0
    now = off_by(target.audit.project(whole.weights), target.weights)
    for done in Replay(memory, target.name, steps).forward():
        found[reached : done.step + 1] = now
        whole.take(done, done.gradient)
        now, reached = off_by(target.audit.project(whole.weights), target.weights), done.step + 1
    found[reached:] = now
    return found


def _agrees(memory: Memory, target: Target, step: int) -> bool:
    """Whether weights and first moments of a parameter are those of a step."""
    whole = Part.whole(memory, target.name)
    for done in Replay(memory, target.name, step).forward():
        whole.take(done, done.gradient)
    project = target.audit.project
    if off_by(project(whole.weights), target.weights) > _allowed(target, step):
        return False
    if target.momentum is None:
        return True
    scale = max(target.spread_of_momentum, float(np.abs(target.momentum).max(initial=0.0)))
    bound = ROUNDINGS * target.audit.eps * scale + target.audit.tiny
    return off_by(project(whole.momentum), target.momentum) <= bound


def _allowed(target: Target, steps: int) -> float:
    return ROUNDINGS * target.audit.eps * sqrt(steps + 1) * target.size + target.exact


def _walked(memory: Memory, targets: Sequence[Target], prints: Sequence[Print], step: int) -> bool:
    """Whether the parameters that SGD trained agree with that step, too."""
    for start, end in itertools.pairwise(prints):
        if targets and start.step < step < end.step:
            candidates = [c for c in walk(memory, targets, start, end) if c.step == step]
            return all(c.distance <= 1.0 for c in candidates)
    return True
