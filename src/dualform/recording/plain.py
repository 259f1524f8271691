"""A step like the last one, where every gradient is what its patterns sum to.

So it is in most steps by SGD, where nothing is clipped. What the gradients are along the probes is
asked of all of them at once (`looking.py`), and where they put the weights is left to the clerk.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import repeat
from operator import attrgetter, is_

from dualform.recording.audits import Audits
from dualform.recording.clerk import Clerk
from dualform.recording.explaining import Move, Reading
from dualform.recording.ring import StepRecord
from dualform.recording.routine import Group, Routine, TransitionOf, gradient_in, groups_of
from dualform.recording.unexplained import quietly
from dualform.recording.whereabouts import Transition

_first = attrgetter("first")


class Plain(Routine):
    """Steps of one optimizer that has all parameters of the model, and all have patterns."""

    def __init__(
        self,
        groups: Sequence[Group],
        reading: Reading,
        audits: Audits,
        clerk: Clerk,
        transition_of: TransitionOf,
    ) -> None:
        super().__init__(groups, reading.optimizer, transition_of)
        self._audits, self._clerk = audits, clerk
        in_order = sorted((w for group in groups for w in group.watched), key=lambda w: w.index)
        self._each = [watched.audit for watched in in_order]
        self._in_order = [watched.parameter for watched in in_order]
        self._is_for_clerk = 16 * audits.rows

    @classmethod
    def of(
        cls, reading: Reading, audits: Audits, clerk: Clerk, transition_of: TransitionOf
    ) -> Plain | None:
        """That of a step that was read in full and made; None if it is not such a one."""
        if not audits.are_alike or len(reading.resolved) != len(audits):
            return None
        groups = groups_of(reading, is_plain)
        return None if groups is None else cls(groups, reading, audits, clerk, transition_of)

    @quietly()
    def read(self, reading: Reading, step: int) -> bool:
        if not self._is_as_before(reading):
            return False
        gradients = list(map(gradient_in, self._in_order))
        if any(map(is_, gradients, repeat(None))):
            return False
        came_now = list(map(_first, self._each)) == [step] * len(self._each)
        return came_now and self._audits.explain(gradients, step)

    def take(self, record: StepRecord) -> None:
        if self._clerk.is_for(self._is_for_clerk):
            self._clerk.later(self._follow, record, self._transitions)
        else:
            self._follow(record, self._transitions)

    @quietly()
    def _follow(self, record: StepRecord, transitions: Sequence[Transition]) -> None:
        """Write down what the gradients are along the probes, and where that puts the weights."""
        self._audits.complete()
        record.projection[:] = self._audits.sketched()
        if len(set(transitions)) == 1:
            self._audits.advance(transitions[0])
            return
        for (i, *_), transition in zip(self._places, transitions, strict=True):
            self._each[i].advance(transition)

    def moves(self, step: int) -> list[Move]:
        self._audits.complete()
        watched = [w for group in self._groups for w in group.watched]
        return [
            Move(one, 1.0, step, fresh, group, transition)
            for one, (_, group, fresh), transition in zip(
                watched, self._places, self._transitions, strict=True
            )
        ]


def is_plain(move: Move) -> bool:
    """Whether patterns of its own step are all there is to a gradient, and to its update."""
    return (
        move.kappa == 1.0
        and move.watched.rule is None
        and move.account is None
        and not move.unrecorded
    )
