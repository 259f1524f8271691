"""A step like the last one, where keys alone are kept and no gradient is looked at.

All that is asked is under which settings the parameters were moved, and whether anything but their
optimizer has touched them since the last time (`edits.py`).
"""

from __future__ import annotations

from itertools import repeat
from operator import is_

import numpy as np

from dualform.recording.edits import Edits, Together
from dualform.recording.explaining import Move, Reading
from dualform.recording.ring import StepRecord
from dualform.recording.routine import Group, Routine, TransitionOf, gradient_in, groups_of


class PassedOver(Routine):
    """Steps of one optimizer whose parameters are all of layers recorded with keys alone."""

    def __init__(
        self, groups: list[Group], reading: Reading, edits: Edits, transition_of: TransitionOf
    ) -> None:
        super().__init__(groups, reading.optimizer, transition_of)
        self._watched = [watched for group in groups for watched in group.watched]
        self._audits = [watched.audit for watched in self._watched]
        self._edits, self._step = edits, 0
        self._together = Together(reading.optimizer, self._watched, edits.entries)

    @classmethod
    def of(cls, reading: Reading, edits: Edits, transition_of: TransitionOf) -> PassedOver | None:
        """That of a step that was read in full and made; None if it is not such a one."""
        groups = groups_of(reading, is_passed_over)
        return None if groups is None else cls(groups, reading, edits, transition_of)

    def read(self, reading: Reading, step: int) -> bool:
        if not self._is_as_before(reading):
            return False
        if any(map(is_, map(gradient_in, self._parameters), repeat(None))):
            return False
        self._step = step
        return self._together.are_untouched()

    def take(self, record: StepRecord) -> None:
        for i, *_ in self._places:
            record.projection[i] = np.nan
        for audit, transition in zip(self._audits, self._transitions, strict=True):
            audit.pass_over(transition)
        self._edits.note_together(self._together, self._step)

    def moves(self, step: int) -> list[Move]:
        versions = self._together.versions
        each = zip(self._watched, self._places, self._transitions, versions, strict=True)
        return [
            Move(one, 1.0, step, fresh, group, transition, version=version, is_followed=False)
            for one, (_, group, fresh), transition, version in each
        ]


def is_passed_over(move: Move) -> bool:
    """Whether nobody looks at the gradient, and nothing else is asked about it."""
    return not move.is_followed and move.kappa == 1.0
