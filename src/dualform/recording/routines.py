"""Every optimizer's routine, if it has one: learned from one step read in full, until the next."""

from __future__ import annotations

from torch.optim import Optimizer

from dualform.recording.accountant import Accountant
from dualform.recording.audits import Audits
from dualform.recording.clerk import Clerk
from dualform.recording.edits import Edits
from dualform.recording.explaining import Reading
from dualform.recording.lent import Lent
from dualform.recording.passed_over import PassedOver
from dualform.recording.plain import Plain
from dualform.recording.routine import Routine, TransitionOf


class Routines:
    """Steps that are like the last one, of every optimizer."""

    def __init__(
        self,
        audits: Audits,
        accountant: Accountant,
        clerk: Clerk,
        edits: Edits,
        transition_of: TransitionOf,
    ) -> None:
        self._audits, self._accountant, self._clerk = audits, accountant, clerk
        self._edits, self._transition_of = edits, transition_of
        self._of: dict[Optimizer, Routine] = {}

    def read(self, optimizer: Optimizer, step: int) -> Reading | None:
        """What the optimizer is about to do, if that is what it did the last time."""
        routine = self._of.get(optimizer)
        if routine is None:
            return None
        reading = Reading(optimizer, 1.0, routine=routine)
        if routine.read(reading, step):
            return reading
        routine.settle()
        del self._of[optimizer]
        return None

    def settle(self) -> None:
        """Everybody is to know what was noted of the steps so far."""
        for routine in self._of.values():
            routine.settle()

    def learn(self, reading: Reading) -> None:
        """A step that was read in full and made, by SGD: the next one may be like it."""
        if reading.unscale != 1.0:
            return
        found: Routine | None
        known = self._of.get(reading.optimizer)
        if isinstance(known, PassedOver) and all(
            move.watched.is_read_off for move in reading.moves
        ):
            known.begin_anew()
            return
        if reading.resolved:
            found = Plain.of(reading, self._audits, self._clerk, self._transition_of)
        elif reading.moves and not reading.moves[0].is_followed:
            found = PassedOver.of(reading, self._edits, self._transition_of)
        else:
            found = Lent.of(reading, self._accountant, self._transition_of)
        if found is not None:
            self._of[reading.optimizer] = found
