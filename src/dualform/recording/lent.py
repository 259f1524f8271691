"""A step like the last one, where accounts follow all parameters by gradients that are lent.

So it is where no parameter has patterns, and the budget for their gradients is used up: all that is
asked is which gradients were used, under which settings.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import repeat
from operator import is_

from torch import Tensor

from dualform.recording.accountant import Accountant, Routinely
from dualform.recording.explaining import Move, Reading
from dualform.recording.lending import Lot, can_be_lent, natures
from dualform.recording.ring import StepRecord
from dualform.recording.routine import Group, Routine, TransitionOf, gradient_in, groups_of


class Lent(Routine):
    """Steps of one optimizer that the accountant follows."""

    def __init__(
        self,
        groups: Sequence[Group],
        reading: Reading,
        accountant: Accountant,
        transition_of: TransitionOf,
    ) -> None:
        super().__init__(groups, reading.optimizer, transition_of)
        self._accountant = accountant
        self._accounts = [accountant.accounts[w.name] for group in groups for w in group.watched]
        self._natures, self._sizes = natures(self._accounts), [a.bytes for a in self._accounts]
        self._bytes = sum(self._sizes)
        self._lot = Lot.of([], [])

    @classmethod
    def of(
        cls, reading: Reading, accountant: Accountant, transition_of: TransitionOf
    ) -> Lent | None:
        """That of a step that was read in full and made; None if it is not such a one."""
        groups = groups_of(reading, is_lent)
        return None if groups is None else cls(groups, reading, accountant, transition_of)

    def read(self, reading: Reading, step: int) -> bool:
        if not self._is_as_before(reading):
            return False
        gradients = list(map(gradient_in, self._parameters))
        if any(map(is_, gradients, repeat(None))):
            return False
        if not can_be_lent(gradients, self._natures, self._sizes):
            return False
        self._lot = Lot.of(self._accounts, gradients)
        return self._accountant.borrows(self._lot)

    def take(self, record: StepRecord) -> None:
        did = Routinely(self._lot, self._transitions)
        self._lot = Lot.of([], [])  # gradients are not held on to
        self._accountant.hand_over_routinely(did, self._bytes, record)

    def moves(self, step: int) -> list[Move]:
        each = zip(self._transitions, *self._lot[:3], self._places, strict=True)
        return [
            Move(account.watched, 1.0, step, fresh, group, transition, account, grad, (grad, then))
            for transition, account, grad, then, (_, group, fresh) in each
        ]


def is_lent(move: Move) -> bool:
    """Whether the accountant reads a gradient where it lies, and nobody else asks about it."""
    lent: Tensor | None = None if move.original is None else move.original[0]
    plain = move.kappa == 1.0 and move.watched.rule is None and not move.unrecorded
    return plain and move.account is not None and lent is not None and move.gradient is lent
