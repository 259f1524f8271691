"""An optimizer's step that is like its last one: what need not be asked again.

Reading a step in full (`steps.py`), parameter by parameter, costs more than most steps are worth:
the same parameters, in the same groups, moved by the same rule. What does not change from step to
step is kept here, and only what may have changed is looked at. If anything has, the answer is no,
and the step is read in full. Kinds of steps that recur: `plain.py`, `passed_over.py`, `lent.py`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from operator import attrgetter, is_
from typing import Any, NamedTuple

from torch import nn
from torch.optim import Optimizer

from dualform.learning_rules import hyperparameters
from dualform.recording.edits import BUFFER
from dualform.recording.explaining import Move, Reading
from dualform.recording.parameters import Watched
from dualform.recording.ring import StepRecord
from dualform.recording.whereabouts import Transition

TransitionOf = Callable[[tuple[float, ...], bool, float], Transition]
"""Given settings, whether there is no momentum buffer yet, and what gradients are multiplied by."""

gradient_in = attrgetter("grad")


class Group(NamedTuple):
    """One of the optimizer's groups: its parameters, and whether they had no buffer yet."""

    parameters: list[nn.Parameter]
    watched: list[Watched]
    fresh: bool


class Routine(ABC):
    """The steps of one optimizer, as long as they are alike."""

    def __init__(
        self, groups: Sequence[Group], optimizer: Optimizer, transition_of: TransitionOf
    ) -> None:
        self._groups, self._transition_of = groups, transition_of
        self._parameters = [p for group in groups for p in group.parameters]
        self._states = list(optimizer.state.values())
        self._buffers = list(map(buffer_in, self._states))
        self._settings: list[tuple[float, ...]] = []
        self._of_groups: list[Transition] = []
        self._transitions: list[Transition] = []  # of every parameter
        self._places = [
            (watched.index, number, group.fresh)
            for number, group in enumerate(groups)
            for watched in group.watched
        ]
        in_order = sorted(self._places)
        self._is_all = [i for i, *_ in in_order] == list(range(len(in_order)))
        """Whether they are the first parameters of the model, and so all if there are no others."""
        self._log = (
            [True] * len(in_order),
            [is_new for *_, is_new in in_order],
            [number for _, number, _ in in_order],
        )

    @abstractmethod
    def read(self, reading: Reading, step: int) -> bool:
        """Note what the optimizer is about to do; False if it is not what it did the last time."""

    @abstractmethod
    def take(self, record: StepRecord) -> None:
        """The optimizer has moved, as it was about to, and that is written down."""

    def settle(self) -> None:
        """Everybody is to know what was noted of the steps so far."""
        return

    @abstractmethod
    def moves(self, step: int) -> list[Move]:
        """What was noted, as reading in full would have given it, parameter by parameter."""

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

    def _is_as_before(self, reading: Reading) -> bool:
        """Whether the optimizer has the parameters it had, and remembers of them what it did.

        Notes its settings, which may be others.
        """
        optimizer = reading.optimizer
        states = list(optimizer.state.values())
        if (
            len(optimizer.param_groups) != len(self._groups)
            or len(states) != len(self._states)
            or not all(map(is_, states, self._states))
            or not all(map(is_, map(buffer_in, states), self._buffers))
        ):
            return False
        settings = []
        for group, known in zip(optimizer.param_groups, self._groups, strict=True):
            given = group["params"]
            if len(given) != len(known.parameters) or not all(map(is_, given, known.parameters)):
                return False
            settings.append(hyperparameters(group))
        if settings != self._settings:
            self._settings, self._of_groups, self._transitions = settings, [], []
            for (_, watched, fresh), one in zip(self._groups, settings, strict=True):
                self._of_groups.append(self._transition_of(one, fresh, 1.0))
                self._transitions += [self._of_groups[-1]] * len(watched)
        reading.settings = settings
        return True


def groups_of(reading: Reading, is_usual: Callable[[Move], bool]) -> list[Group] | None:
    """The groups of a step that was read in full and made; None if not all of it is usual.

    They were fresh, or not, before it was made: there is a momentum buffer now in any case.
    """
    groups = []
    for number, group in enumerate(reading.optimizer.param_groups):
        moves = [move for move in reading.moves if move.group == number]
        fresh = {move.fresh for move in moves}
        if len(moves) != len(group["params"]) or len(fresh) > 1 or not all(map(is_usual, moves)):
            return None
        if fresh == {True} and group["momentum"]:
            return None
        watched = [move.watched for move in moves]
        groups.append(Group(list(group["params"]), watched, fresh == {True}))
    return groups


def buffer_in(state: dict[str, Any]) -> Any:
    """What SGD remembers of a parameter; None if nothing."""
    return state.get(BUFFER)


def is_fresh(state: dict[str, Any] | None) -> bool:
    """Whether SGD remembers nothing of a parameter yet."""
    return not state or state.get(BUFFER) is None
