"""Which recorded step do these weights belong to? Found by fingerprint, for a run that is resumed.

A memory knows W v and m v of every parameter every few dozen steps, in float64. There a checkpoint
is told to the last digit. In between the learning rule leads from one fingerprint to the next, up
to the rounding of training, and the checkpoint is compared with every step on the way:

1. along both probes at once: u·(W v) of every step follows from the log alone, which has u·(G v).
   That is cheap for any number of steps, and says which stretches are worth a closer look;
2. there along v only, [d0] numbers per parameter, by the patterns themselves: `walking.py`.

Why it is hard: in float32 rounding blurs what the rule predicts, and late in training neighbouring
steps differ little. A step is taken only if weights and momentum buffers agree within the audit's
bounds *and* clearly better than with any other step; weights that did not move at all belong to the
last of the steps they stayed for.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from math import sqrt

import numpy as np

from dualform.errors import RecordingError
from dualform.learning_rules import transitions
from dualform.memory import Memory
from dualform.recording.audit import ParameterAudit
from dualform.recording.differences import Difference, at_print
from dualform.recording.parameters import Parameters
from dualform.recording.replaying import find_by_replay
from dualform.recording.walking import Candidate, Print, Reals, Target, off_by, walk
from dualform.recording.whereabouts import SLACK_HELD, SLACK_LOST, SLACK_WEIGHTS

ROUGHLY = 16.0
"""How many times the audit's bounds the first, cheap look allows."""

CLEARLY = 4.0
"""How many times worse every other step must agree."""

STRETCHES = 16
"""At most so many stretches between fingerprints are looked at closely."""


def find_step(memory: Memory, parameters: Parameters) -> int:
    """The number of recorded updates after which the model was as it is now.

    `RecordingError` says what is nearest if there is none, or why it cannot be told.
    """
    targets = [Target(memory, watched) for watched in parameters]
    prints = _prints(memory, parameters)
    exact = [p for p in prints if all(t.is_at(p.weights[t.name]) for t in targets)]
    wrong: list[RecordingError] = []
    for seen in reversed(exact):
        reason = _misfit(memory, targets, seen)
        if reason is None:
            return seen.step
        wrong.append(reason)
    if any(target.log is None and target.rule is None for target in targets):
        raise wrong[0] if wrong else _nothing_fits(memory, targets, prints)
    if any(target.log is None for target in targets):
        return _replayed(memory, targets, prints, wrong)
    if any(known.is_noted_in_part for known in memory.parameters.values()):
        raise wrong[0] if wrong else _nothing_fits(memory, targets, prints)
    rough, apart = _rough_distances(memory, targets, prints)
    pairs = list(itertools.pairwise(prints))
    best = [float(rough[a.step + 1 : b.step].min(initial=np.inf)) for a, b in pairs]
    order = sorted((i for i in range(len(pairs)) if best[i] <= 1.0), key=lambda i: best[i])
    candidates = [
        c
        for i in sorted(order[:STRETCHES])
        for c in walk(memory, targets, *pairs[i])
        if c.weights <= 1
    ]
    fitting = [c for c in candidates if c.momentum <= 1.0]
    if fitting:
        return _clearest(memory, fitting)
    if candidates:
        nearest = min(candidates, key=lambda c: c.weights)
        assert nearest.misfit is not None
        raise _wrong_momentum(memory, nearest.step, nearest.misfit)
    raise wrong[0] if wrong else _nothing_fits(memory, targets, prints, apart)


def _replayed(
    memory: Memory, targets: Sequence[Target], prints: Sequence[Print], wrong: list[RecordingError]
) -> int:
    """The step by replaying the run; where there is none, what is said of the nearest."""
    found = find_by_replay(memory, targets, prints)
    if found is not None and not found.steps and not found.differences:
        return found.step
    if wrong:
        raise wrong[0]
    if found is None:
        raise _nothing_fits(memory, targets, prints)
    if found.steps:
        raise _cannot_tell(memory, found.steps, found.step)
    raise _differ(memory, found.step, found.differences)


def _clearest(memory: Memory, fitting: Sequence[Candidate]) -> int:
    best = min(fitting, key=lambda c: c.distance)
    close = [c for c in fitting if c.distance < CLEARLY * best.distance or c.state == best.state]
    apart = [c for c in close if c.state != best.state]
    if apart:
        steps = sorted({best.step, *(c.step for c in apart)})
        raise _cannot_tell(memory, steps, best.step)
    return max(c.step for c in close)


# -- at the fingerprints -------------------------------------------------------------------------


def _prints(memory: Memory, parameters: Parameters) -> list[Print]:
    """The initial state and every fingerprint."""
    weights, momentum = {}, {}
    for watched in parameters:
        weights[watched.name] = watched.audit.project(memory.initial(watched.name))
        buffer = memory.initial_momentum(watched.name)
        if buffer is not None:
            momentum[watched.name] = watched.audit.project(buffer)
    return [Print(0, weights, momentum)] + [
        Print(
            f.step,
            {name: value.numpy() for name, value in f.values.items()},
            {name: value.numpy() for name, value in f.momentum.items()},
            f.states,
        )
        for f in memory.fingerprints
    ]


def _misfit(memory: Memory, targets: Sequence[Target], seen: Print) -> RecordingError | None:
    """What is wrong with an optimizer's state that is neither empty nor the memory's."""
    for target in targets:
        if target.learned_by is None:
            if not target.has_momentum_of(seen.momentum.get(target.name)):
                return _wrong_momentum(memory, seen.step, target.name)
        elif (difference := at_print(memory, target, seen)) is not None:
            return _differ(memory, seen.step, [difference])
    return None


# -- between them, roughly -----------------------------------------------------------------------


def _rough_distances(
    memory: Memory, targets: Sequence[Target], prints: Sequence[Print]
) -> tuple[Reals, Reals]:
    """|u·(W_s − W) v| of the worst parameter at every step: in bounds, and relative to its size.

    The bounds are generous. All stretches between fingerprints are walked side by side. At the
    fingerprints themselves it is infinite: those were looked at exactly.
    """
    starts = np.array([p.step for p in prints])
    ends = np.append(starts[1:], starts[-1])
    worst, relative = np.zeros(memory.steps + 1), np.zeros(memory.steps + 1)
    for target in targets:
        log = target.log
        assert log is not None
        matrix, vector = transitions(replace(log, kappa=np.ones(len(log))))
        seen = memory.audit_projections(target.name)
        u = target.audit.sketch
        goal = float(u.dot(target.weights))
        w = np.array([u.dot(p.weights[target.name]) for p in prints])
        m = np.array([u.dot(p.momentum.get(target.name, np.zeros_like(u))) for p in prints])
        travel, path = np.zeros(len(w)), np.zeros(len(w))
        for offset in range(int((ends - starts).max(initial=0)) - 1):
            on = np.flatnonzero(starts + offset + 1 < ends)
            at = starts[on] + offset
            moved = matrix[at, 0, 0] * w[on] + matrix[at, 0, 1] * m[on] + vector[at, 0] * seen[at]
            m[on] = matrix[at, 1, 0] * w[on] + matrix[at, 1, 1] * m[on] + vector[at, 1] * seen[at]
            change, w[on] = np.abs(moved - w[on]), moved
            travel[on] += change**2
            path[on] += change / np.maximum(1.0 - matrix[at, 1, 1] * (log.momentum[at] != 0), 1e-3)
            bound = _rough_bound(target.audit, offset + 1, np.sqrt(travel[on]), path[on])
            off = np.abs(w[on] - goal)
            off = np.where(np.isfinite(off), off, np.inf)
            worst[at + 1] = np.maximum(worst[at + 1], off / bound)
            relative[at + 1] = np.maximum(relative[at + 1], off / target.size)
    worst[starts] = relative[starts] = np.inf
    return worst, relative


def _rough_bound(audit: ParameterAudit, steps: int, travel: Reals, path: Reals) -> Reals:
    scatter = SLACK_WEIGHTS * sqrt(steps + 1) * (audit.spread + travel)
    lost = SLACK_LOST * steps * audit.spread + SLACK_HELD * path
    bound: Reals = ROUGHLY * (audit.eps * (scatter + lost) + audit.tiny)
    return bound


# -- what to say ---------------------------------------------------------------------------------


def _nothing_fits(
    memory: Memory,
    targets: Sequence[Target],
    prints: Sequence[Print],
    between: Reals | None = None,
) -> RecordingError:
    apart = np.full(memory.steps + 1, np.inf) if between is None else between
    for seen in prints:
        apart[seen.step] = max(off_by(seen.weights[t.name], t.weights) / t.size for t in targets)
    if between is None:
        return _not_at_a_print(memory, [p.step for p in prints], apart)
    nearest = int(np.argmin(apart))
    return RecordingError(
        f"the model's weights are not those of any step of {memory.path}. They were compared with "
        f"the {len(prints)} fingerprints of steps 0 to {memory.steps}, and with the steps in "
        f"between as the log predicts them. The nearest is step {nearest}, where they still differ "
        f"by {apart[nearest]:.2g} of their size. Load a checkpoint of this run, saved between two "
        f"updates (step {memory.steps} is the last one recorded), or record into a new path"
    )


def _not_at_a_print(memory: Memory, prints: Sequence[int], apart: Reals) -> RecordingError:
    """Where nothing leads from one fingerprint to the next: which of them can be gone on from."""
    sums = kept_sums(memory).values()
    possible = [s for s in prints if all(s <= since or s in kept for since, kept in sums)]
    near = sorted(sorted(possible, key=lambda s: apart[s])[:2])
    differ = " and ".join(f"{apart[s]:.2g}" for s in near)
    return RecordingError(
        f"the model's weights are not those of any step of {memory.path} that they can be compared "
        f"with: it has {len(prints)} fingerprints of steps 0 to {memory.steps}, and what is kept "
        "does not lead from one to the next (keys alone do not), so "
        "a checkpoint saved in between is not found. The nearest that can be resumed from are "
        f"steps {near}, where they differ by {differ} of their size. Load a checkpoint of one of "
        "those, or record into a new path; calling recorder.flush() whenever you save a checkpoint "
        "makes its step one of them"
    )


def kept_sums(memory: Memory) -> dict[str, tuple[int, set[int]]]:
    """Of which parameters only a sum is known: since when, and at which steps it is kept."""
    found: dict[str, tuple[int, set[int]]] = {}
    for name, known in memory.parameters.items():
        if known.accumulated_since is not None:
            found[name] = known.accumulated_since, set(memory.learned_steps(name))
        elif known.coverage == "patterns" and (moved := memory.is_unrecorded(name)).any():
            found[name] = int(np.argmax(moved)), set(memory.unrecorded_steps(name))
    return found


def _wrong_momentum(memory: Memory, step: int, name: str) -> RecordingError:
    return RecordingError(
        f"the model's weights are those of step {step} of {memory.path}, but the optimizer's "
        f"momentum buffer of {name!r} is neither the one recorded at that step nor empty, so what "
        "it holds would have no pattern behind it. Load the optimizer's state of the same "
        "checkpoint, start with a new optimizer, or record into a new path"
    )


def _differ(memory: Memory, step: int, differences: Sequence[Difference]) -> RecordingError:
    weights = [d for d in differences if d.is_of_weights]
    worst = (weights or list(differences))[0]
    more = len({d.parameter for d in differences} - {worst.parameter})
    others = f"; {more} more parameters differ" if more else ""
    if weights:
        return RecordingError(
            f"the model's weights are not those of any step of {memory.path}. The nearest is step "
            f"{step}, where {worst.parameter!r} does not agree: {worst.said}{others}. Load a "
            f"checkpoint of this run, saved between two updates (step {memory.steps} is the last "
            "one recorded), or record into a new path"
        )
    return RecordingError(
        f"the model's weights are those of step {step} of {memory.path}, but what the optimizer "
        f"remembers of {worst.parameter!r} is neither what was recorded at that step nor nothing: "
        f"{worst.said}{others}. Load the optimizer's state of the same checkpoint, start with a "
        "new optimizer, or record into a new path"
    )


def _cannot_tell(memory: Memory, steps: Sequence[int], best: int) -> RecordingError:
    return RecordingError(
        f"the model's weights could be those of any of the steps {_listed(steps)} of "
        f"{memory.path}: they moved less in between than rounding can tell. Resume from a "
        f"checkpoint of a step that was committed (nearest: {_nearest_print(memory, best)}"
        "); calling recorder.flush() whenever you save a checkpoint makes it one"
    )


def _nearest_print(memory: Memory, step: int) -> int:
    return min((f.step for f in memory.fingerprints), key=lambda s: abs(s - step), default=0)


def _listed(steps: Sequence[int]) -> str:
    if len(steps) > 8:
        return f"{steps[0]} to {steps[-1]}"
    return ", ".join(map(str, steps))
