"""An optimizer's step that is like its last one, where accounts follow all of its parameters.

Where keys alone are kept, a step asks for little: which gradients were used, under which settings.
Reading it in full (`steps.py`) parameter by parameter costs more than that is worth. So what does
not change from step to step is kept here, and only what may have changed is looked at. If anything
has, the answer is no, and the step is read in full.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import is_
from typing import NamedTuple

from torch import Tensor, nn

from dualform.learning_rules import hyperparameters
from dualform.recording.accountant import Account, Accountant, Update
from dualform.recording.audit import Transition
from dualform.recording.explaining import Move, Reading
from dualform.recording.ring import StepRecord

TransitionOf = Callable[[tuple[float, ...], bool, float], Transition]
"""Given settings, whether there is no momentum buffer yet, and what gradients are multiplied by."""


class Group(NamedTuple):
    """One of the optimizer's groups: its parameters and their accounts; had they no buffer?"""

    parameters: list[nn.Parameter]
    accounts: list[Account]
    fresh: bool


class Routine:
    """The steps of one optimizer, as long as they are alike."""

    def __init__(self, groups: Sequence[Group]) -> None:
        self._groups = groups
        self._places = [
            (account.watched.index, number, group.fresh)
            for number, group in enumerate(groups)
            for account in group.accounts
        ]

    @classmethod
    def of(cls, reading: Reading) -> Routine | None:
        """That of a step that was read in full; None if it is not such a one."""
        groups = []
        for number, group in enumerate(reading.optimizer.param_groups):
            moves = [move for move in reading.moves if move.group == number]
            accounts = [move.account for move in moves if is_lent(move) and move.account]
            fresh = {move.fresh for move in moves}
            if not len(accounts) == len(moves) == len(group["params"]) or len(fresh) > 1:
                return None
            groups.append(Group(list(group["params"]), accounts, fresh == {True}))
        return cls(groups)

    def read(
        self, reading: Reading, accountant: Accountant, transition_of: TransitionOf
    ) -> list[Update] | None:
        """What the optimizer is about to do; None if it is not what it did the last time."""
        groups, state = reading.optimizer.param_groups, reading.optimizer.state
        if len(groups) != len(self._groups):
            return None
        updates = []
        for group, (parameters, accounts, fresh) in zip(groups, self._groups, strict=True):
            given = group["params"]
            if len(given) != len(parameters) or not all(map(is_, given, parameters)):
                return None
            settings = hyperparameters(group)
            reading.settings.append(settings)
            transition = transition_of(settings, fresh, 1.0)
            for parameter, account in zip(parameters, accounts, strict=True):
                gradient = parameter.grad
                if (
                    gradient is None
                    or is_fresh(state.get(parameter)) is not fresh
                    or not accountant.borrows(account, gradient)
                ):
                    return None
                original = gradient, gradient._version
                updates.append(Update(account, transition, gradient, original, None))
        return updates

    def write_down(self, record: StepRecord, step: int, offset: int) -> None:
        """The step in the log; `offset`: how many groups of other optimizers come first."""
        applied, fresh, kappa, first = record.applied, record.fresh, record.kappa, record.first
        for i, number, is_new in self._places:
            applied[i], fresh[i], kappa[i], first[i] = True, is_new, 1.0, step
            record.group[i] = offset + number

    def moves(self, updates: Sequence[Update], step: int) -> list[Move]:
        """The same as reading in full would have given it, parameter by parameter."""
        return [
            Move(a.watched, 1.0, step, fresh, number, transition, a, gradient, original)
            for (a, transition, gradient, original, _), (_, number, fresh) in zip(
                updates, self._places, strict=True
            )
        ]


def is_fresh(state: dict[str, object] | None) -> bool:
    """Whether SGD remembers nothing of a parameter yet."""
    return not state or state.get("momentum_buffer") is None


def is_lent(move: Move) -> bool:
    """Whether the accountant reads a gradient where it lies, and nobody else asks about it."""
    lent: Tensor | None = None if move.original is None else move.original[0]
    plain = move.kappa == 1.0 and move.watched.rule is None and not move.unrecorded
    return plain and lent is not None and move.gradient is lent
