"""An optimizer's step that is like its last one, where accounts follow all of its parameters.

Where keys alone are kept, a step asks for little: which gradients were used, under which settings.
Reading it in full (`steps.py`) parameter by parameter costs more than that is worth. So what does
not change from step to step is kept here, and only what may have changed is looked at. If anything
has, the answer is no, and the step is read in full.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import repeat
from operator import attrgetter, is_
from typing import NamedTuple

from torch import Tensor, nn
from torch.optim import Optimizer

from dualform.learning_rules import hyperparameters
from dualform.recording.accountant import Accountant, Routinely
from dualform.recording.audit import Transition
from dualform.recording.explaining import Move, Reading
from dualform.recording.lending import Account, Lot, can_be_lent, natures
from dualform.recording.ring import StepRecord

TransitionOf = Callable[[tuple[float, ...], bool, float], Transition]
"""Given settings, whether there is no momentum buffer yet, and what gradients are multiplied by."""

gradient_in = attrgetter("grad")


class Group(NamedTuple):
    """One of the optimizer's groups: its parameters and their accounts; had they no buffer?"""

    parameters: list[nn.Parameter]
    accounts: list[Account]
    fresh: bool


class Routine:
    """The steps of one optimizer, as long as they are alike."""

    def __init__(self, groups: Sequence[Group], optimizer: Optimizer) -> None:
        self._groups = groups
        self._parameters = [p for group in groups for p in group.parameters]
        self._accounts = [account for group in groups for account in group.accounts]
        self._natures, self._sizes = natures(self._accounts), [a.bytes for a in self._accounts]
        self.bytes = sum(self._sizes)
        self._states = list(optimizer.state.values())
        self._fresh = list(map(is_fresh, self._states))
        self._settings: list[tuple[float, ...]] = []
        self._transitions: list[Transition] = []
        self._places = [
            (account.watched.index, number, group.fresh)
            for number, group in enumerate(groups)
            for account in group.accounts
        ]
        in_order = sorted(self._places)
        self._is_all = [i for i, *_ in in_order] == list(range(len(in_order)))
        """Whether they are the first parameters of the model, and so all if there are no others."""
        self._log = (
            [True] * len(in_order),
            [is_new for *_, is_new in in_order],
            [number for _, number, _ in in_order],
        )

    @classmethod
    def of(cls, reading: Reading) -> Routine | None:
        """That of a step that was read in full and made; None if it is not such a one.

        It was fresh, or not, before it was made: there is a momentum buffer now in any case.
        """
        groups = []
        for number, group in enumerate(reading.optimizer.param_groups):
            moves = [move for move in reading.moves if move.group == number]
            accounts = [move.account for move in moves if is_lent(move) and move.account]
            fresh = {move.fresh for move in moves}
            if not len(accounts) == len(moves) == len(group["params"]) or len(fresh) > 1:
                return None
            if fresh == {True} and group["momentum"]:
                return None
            groups.append(Group(list(group["params"]), accounts, fresh == {True}))
        return cls(groups, reading.optimizer)

    def read(
        self, reading: Reading, accountant: Accountant, transition_of: TransitionOf
    ) -> Routinely | None:
        """What the optimizer is about to do; None if it is not what it did the last time."""
        optimizer = reading.optimizer
        if not self._remembers_as_before(optimizer):
            return None
        settings = []
        for group, known in zip(optimizer.param_groups, self._groups, strict=True):
            given = group["params"]
            if len(given) != len(known.parameters) or not all(map(is_, given, known.parameters)):
                return None
            settings.append(hyperparameters(group))
        gradients = list(map(gradient_in, self._parameters))
        if any(map(is_, gradients, repeat(None))):
            return None
        if not can_be_lent(gradients, self._natures, self._sizes):
            return None
        lot = Lot.of(self._accounts, gradients)
        if not accountant.borrows(lot):
            return None
        if settings != self._settings:
            self._settings, self._transitions = settings, []
            for (_, accounts, fresh), one in zip(self._groups, settings, strict=True):
                self._transitions += [transition_of(one, fresh, 1.0)] * len(accounts)
        reading.settings = settings
        return Routinely(lot, self._transitions)

    def _remembers_as_before(self, optimizer: Optimizer) -> bool:
        """Whether it has as many groups, and its states are where they were, with what they had."""
        states = list(optimizer.state.values())
        return (
            len(optimizer.param_groups) == len(self._groups)
            and len(states) == len(self._states)
            and all(map(is_, states, self._states))
            and list(map(is_fresh, states)) == self._fresh
        )

    def write_down(self, record: StepRecord, step: int, offset: int) -> None:
        """The step in the log; `offset`: how many groups of other optimizers come first."""
        applied, fresh, kappa, first = record.applied, record.fresh, record.kappa, record.first
        if self._is_all and len(applied) == len(self._places) and not offset:
            applied[:], fresh[:], record.group[:] = self._log
            kappa[:], first[:] = [1.0] * len(kappa), [step] * len(first)
            return
        for i, number, is_new in self._places:
            applied[i], fresh[i], kappa[i], first[i] = True, is_new, 1.0, step
            record.group[i] = offset + number

    def moves(self, did: Routinely, step: int) -> list[Move]:
        """The same as reading in full would have given it, parameter by parameter."""
        lot, transitions = did
        each = zip(transitions, *lot[:3], self._places, strict=True)
        return [
            Move(account.watched, 1.0, step, fresh, group, transition, account, grad, (grad, then))
            for transition, account, grad, then, (_, group, fresh) in each
        ]


def is_fresh(state: dict[str, object] | None) -> bool:
    """Whether SGD remembers nothing of a parameter yet."""
    return not state or state.get("momentum_buffer") is None


def is_lent(move: Move) -> bool:
    """Whether the accountant reads a gradient where it lies, and nobody else asks about it."""
    lent: Tensor | None = None if move.original is None else move.original[0]
    plain = move.kappa == 1.0 and move.watched.rule is None and not move.unrecorded
    return plain and lent is not None and move.gradient is lent
