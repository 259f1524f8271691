"""A step like the last one, where keys alone are kept and no gradient is looked at.

All that is asked is under which settings the parameters were moved, and whether anything but their
optimizer has touched them since the last time (`edits.py`).
"""

from __future__ import annotations

from itertools import repeat
from operator import is_

import numpy as np

from dualform.recording.edits import Company, Edits, can_be_noted
from dualform.recording.explaining import Move, Reading
from dualform.recording.parameters import parameters_of
from dualform.recording.ring import StepRecord
from dualform.recording.routine import (
    Group,
    Routine,
    TransitionOf,
    buffer_in,
    gradient_in,
    groups_of,
)
from dualform.recording.whereabouts import ALL, carried


class PassedOver(Routine):
    """Steps of one optimizer whose parameters are all of layers recorded with keys alone.

    What they leave of the weights before them is multiplied up, and handed on when somebody asks.
    """

    def __init__(
        self, groups: list[Group], reading: Reading, edits: Edits, transition_of: TransitionOf
    ) -> None:
        super().__init__(groups, reading.optimizer, transition_of)
        self._watched = [watched for group in groups for watched in group.watched]
        self._edits, self._about_to, self._last = edits, -1, -1  # steps: not handed on; -1: none
        self._shares = [ALL] * len(groups)
        buffers = [buffer_in(reading.optimizer.state.get(p, {})) for p in self._parameters]
        self._company = Company(self._watched, buffers)

    @classmethod
    def of(cls, reading: Reading, edits: Edits, transition_of: TransitionOf) -> PassedOver | None:
        """That of a step that was read in full and made; None if it is not such a one."""
        groups = groups_of(reading, is_passed_over)
        optimizer = reading.optimizer
        buffers = (b for b in map(buffer_in, optimizer.state.values()) if b is not None)
        if groups is None or not all(map(can_be_noted, (*parameters_of(optimizer), *buffers))):
            return None
        return cls(groups, reading, edits, transition_of)

    def read(self, reading: Reading, step: int) -> bool:
        if not self._is_as_before(reading):
            return False
        if any(map(is_, map(gradient_in, self._parameters), repeat(None))):
            return False
        for settings, known in zip(reading.optimizer.param_groups, self._groups, strict=True):
            if known.fresh and settings["momentum"]:
                return False  # there is about to be a buffer
        self._about_to = step
        return self._company.are_untouched()

    def take(self, record: StepRecord) -> None:
        for i, *_ in self._places:
            record.projection[i] = np.nan
        for number, transition in enumerate(self._of_groups):
            self._shares[number] = carried(transition[:4], self._shares[number])
        self._company.note()
        self._last = self._about_to

    def begin_anew(self) -> None:
        """Steps in between were read in full, and there may be more like those before."""
        self._company.note()

    def settle(self) -> None:
        if self._last == -1:
            return
        for group, share in zip(self._groups, self._shares, strict=True):
            for watched in group.watched:
                watched.audit.carry(share)
        self._shares = [ALL] * len(self._groups)
        self._edits.know(self._company, self._last)
        self._last = -1

    def moves(self, step: int) -> list[Move]:
        versions, of_groups = self._company.versions, self._of_groups
        each = zip(self._watched, self._places, versions, strict=True)
        return [
            Move(
                one,
                1.0,
                step,
                is_new,
                number,
                of_groups[number],
                version=version,
                is_followed=False,
            )
            for one, (_, number, is_new), version in each
        ]


def is_passed_over(move: Move) -> bool:
    """Whether nobody looks at the gradient, and nothing else is asked about it."""
    return not move.is_followed and move.kappa == 1.0
