"""Where model and optimizer differ from what the memory knows of a step.

Everything that will be gone on with is compared: weights, every tensor that an adaptive optimizer
remembers, every count. Where a state was kept before the next update, bit by bit; where there is a
fingerprint, to the last digit of a sum; between those, entry by entry with the replay, within what
rounding explains (`memory/following.py`): what is accepted here, `verify` will accept.

A new optimizer remembers nothing: then there is nothing to compare but weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dualform.learning_rules import State
from dualform.memory import Memory
from dualform.memory.following import Followed
from dualform.memory.states import WEIGHTS
from dualform.recording.walking import DOUBLE, Print, Target, off_by
from dualform.recording.whereabouts import as_matrix


@dataclass(frozen=True)
class Difference:
    """What differs: a parameter's weights, or something that its optimizer remembers."""

    parameter: str
    what: str
    said: str

    @property
    def is_of_weights(self) -> bool:
        return self.what == WEIGHTS


def weights_at_print(target: Target, seen: Print) -> Difference | None:
    """Whether a parameter has not the fingerprint it had after so many updates."""
    known = seen.weights[target.name]
    if target.is_at(known):
        return None
    off = off_by(target.weights, known) / target.size
    said = _differs(WEIGHTS, off, target.exact / target.size)
    return Difference(target.name, WEIGHTS, said)


def at_print(memory: Memory, target: Target, seen: Print) -> Difference | None:
    """What the optimizer remembers that it did not after so many updates; weights agree."""
    if not target.remembered:
        return None
    kept = _kept_at(memory, target, seen.step)
    if kept is not None:
        return next(_bit_by_bit(target, kept), None)
    states = dict(seen.states.get(target.name, {}))
    if not states:
        if not target.can_be_replayed:
            return None
        return next((d for d in by_replay(memory, target, seen.step) if not d.is_of_weights), None)
    rule = target.learned_by
    assert rule is not None
    if rule.momentum is not None and target.name in seen.momentum:
        states[rule.momentum] = torch.from_numpy(seen.momentum[target.name])
    return next(_by_projection(target, states), None)


def by_replay(memory: Memory, target: Target, step: int) -> Iterator[Difference]:
    """What differs from a parameter as it is replayed up to a step."""
    followed = Followed(memory, target.name, step)
    for done in followed.replay.forward():
        followed.take(done)
    weights, kept = target.parameter.detach().cpu().double(), _kept_at(memory, target, step)
    if kept is not None and WEIGHTS in kept:
        found = _entries(target, WEIGHTS, weights, kept[WEIGHTS], torch.zeros_like(weights))
    else:
        allowed = followed.weights_may_be_off(weights)
        found = _entries(target, WEIGHTS, weights, followed.whole.weights, allowed)
    if found is not None:
        yield found
    if target.remembered and kept is not None:
        yield from _bit_by_bit(target, kept)
    elif target.remembered:
        yield from _with_replayed(target, followed)


def _with_replayed(target: Target, followed: Followed) -> Iterator[Difference]:
    rule, replayed = followed.replay.log.rule, followed.state
    if replayed is None:
        yield Difference(target.name, "", "there is a state, and none was recorded by then")
        return
    for name, value in target.remembered.items():
        if name in rule.numbers:
            found = _number(target, name, float(value), float(replayed[name]))
        else:
            own = value.detach().cpu().double()
            other = followed.whole.momentum if name == rule.momentum else replayed[name]
            found = _entries(target, name, own, other, followed.may_be_off(name, own))
        if found is not None:
            yield found


def _kept_at(memory: Memory, target: Target, step: int) -> State | None:
    """The state as it was kept before the next update, if it was and is the same optimizer's."""
    if target.rule is None:
        return None
    applied, states = memory.adaptive_log(target.name).applied, memory.states(target.name)
    moved = np.flatnonzero(applied[step:])
    following = step + int(moved[0]) if len(moved) else -1
    kept = states.at(following) if following in states.steps else None
    if kept is not None and applied[:step].any() and target.rule.is_new(kept):
        return None
    return kept


def _bit_by_bit(target: Target, kept: State) -> Iterator[Difference]:
    rule = target.learned_by
    assert rule is not None
    for name, value in target.remembered.items():
        if name not in kept:
            yield Difference(target.name, name, f"{name} is there and was not recorded")
        elif name in rule.numbers:
            found = _number(target, name, float(value), float(kept[name]))
            if found is not None:
                yield found
        else:
            own = value.detach().cpu().double()
            found = _entries(target, name, own, kept[name], torch.zeros_like(own))
            if found is not None:
                yield found


def _by_projection(target: Target, states: State) -> Iterator[Difference]:
    rule = target.learned_by
    assert rule is not None
    for name, value in target.remembered.items():
        known = states.get(name)
        if known is None:
            yield Difference(target.name, name, f"{name} is there and was not recorded")
        elif name in rule.numbers:
            found = _number(target, name, float(value), float(known))
            if found is not None:
                yield found
        else:
            audit, matrix = target.audit, as_matrix(value.detach()).cpu().double()
            # Two float64 sums of the same terms, each in an order of its own.
            terms = float((matrix.abs() @ audit.probe64.abs()).max()) if matrix.numel() else 0.0
            own, allowed = audit.project(value), (audit.width + 16) * DOUBLE * terms
            off = float(np.abs(own - known.numpy()).max(initial=0.0))
            if not off <= allowed:
                size = max(float(np.abs(own).max(initial=0.0)), float(known.abs().max()), 1e-300)
                yield Difference(target.name, name, _differs(name, off / size, allowed / size))


def _number(target: Target, name: str, own: float, known: float) -> Difference | None:
    if own == known:
        return None
    return Difference(target.name, name, f"{name!r} is {own:g} and was {known:g}")


def _entries(
    target: Target, what: str, own: Tensor, other: Tensor, allowed: Tensor
) -> Difference | None:
    """The entry that is furthest beyond what it may be, if one is; relative to the largest."""
    if not own.numel():
        return None
    off = (own - other).abs()
    if bool((off <= allowed).all()):
        return None
    beyond = torch.where(off.isfinite(), off / allowed.clamp_min(1e-300), torch.inf)
    place = int(torch.argmax(beyond.masked_fill(off <= allowed, -1.0)))
    size = max(float(other.nan_to_num(0, 0, 0).abs().max()), 1e-300)
    apart, explained = (float(t.reshape(-1)[place]) / size for t in (off, allowed))
    return Difference(target.name, what, _differs(what, apart, explained))


def _differs(what: str, apart: float, explained: float) -> str:
    rounding = f"rounding explains {explained:.2g}" if explained else "it was kept bit by bit"
    verb = "differ" if what == WEIGHTS else "differs"
    return f"{what} {verb} by {apart:.2g} of the largest entry ({rounding})"
