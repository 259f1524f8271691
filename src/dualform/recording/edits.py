"""Was anything changed by hand between two updates? Asked of torch's own counters.

Every tensor counts how often it was changed in place. What the counters of a parameter, and of all
that an adaptive optimizer remembers of it, say at the end of one update, they must still say when
the next one begins. That costs a few comparisons of integers per parameter, and finds an edit, a
clamp or a `load_state_dict` in the middle of a run before the optimizer has moved on from it.

Weights may be exchanged and put back in between (averaged ones, for an evaluation). So where a
counter of weights has moved, some of their entries decide: they must be what they were, to the bit.

Why it is not all: an edit through `parameter.data` has no counter, and one that left those entries
alone passes, too. `verify` finds either.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.optim import Optimizer

from dualform.recording.parameters import Watched, parameters_of

SOME = 64
"""How many entries of a parameter are looked at where its counter has moved."""

Remembered = tuple[str, object, int]


class Counters(NamedTuple):
    """A parameter's counter, some of its entries; what is remembered of it, each with a counter."""

    version: int
    entries: bytes | Tensor
    remembered: list[Remembered]


class Moved(Protocol):
    """What is asked of an update: of which parameter."""

    @property
    def watched(self) -> Watched: ...


class Edits:
    """The counters of every parameter as its last update, or the beginning, left them."""

    def __init__(self, optimizers: Sequence[Optimizer], watched: Sequence[Watched]) -> None:
        self._known: dict[str, tuple[int | None, Counters]] = {}
        self._owners: dict[str, tuple[Optimizer, Watched]] = {}
        self._entries = Entries()
        owners = {id(p): o for o in optimizers for p in parameters_of(o)}
        for one in watched:
            if one.rule is not None:
                owner = self._owners[one.name] = owners[id(one.parameter)], one
                self._known[one.name] = None, self._counters(*owner)

    def found_now(self) -> Iterator[tuple[Watched, str]]:
        """What was changed since the last update of any parameter, before it is written down."""
        for optimizer, watched in self._owners.values():
            changed = self.found(optimizer, watched, None)
            if changed is not None:
                yield watched, changed

    def found(self, optimizer: Optimizer, watched: Watched, step: int | None) -> str | None:
        """What was changed since a parameter's last update, in a sentence; None if nothing was."""
        last, before = self._known.get(watched.name, (None, None))
        since = "recording began" if last is None else f"its update of step {last}"
        until = "now" if step is None else f"that of step {step}"
        if before is not None and not self._is_as_it_was(watched.parameter, before):
            return (
                f"it was changed in place between {since} and {until}: an edit, "
                "a clamp, a load_state_dict. No pattern wrote that."
            )
        state = _remembered(optimizer, watched)
        remembered = [] if before is None else before.remembered
        if not state:
            return None  # all is forgotten: the step counts as the first of a new optimizer
        if len(state) == len(remembered) and all(map(_is_same, state, remembered)):
            return None
        named = {entry[0]: entry for entry in remembered}
        changed = [e[0] for e in state if e[0] not in named or not _is_same(e, named[e[0]])]
        return (
            f"what the optimizer remembers of it ({', '.join(changed or named)}) was changed "
            f"between {since} and {until}. No pattern wrote that. Change settings in "
            "param_groups; start with a new optimizer, or resume, to change what is remembered."
        )

    def note(self, optimizer: Optimizer, moves: Sequence[Moved], step: int) -> None:
        """An update was made: what it left counts."""
        for move in moves:
            if move.watched.rule is not None:
                self._owners[move.watched.name] = optimizer, move.watched
                self._known[move.watched.name] = step, self._counters(optimizer, move.watched)

    def _counters(self, optimizer: Optimizer, watched: Watched) -> Counters:
        parameter = watched.parameter
        entries = self._entries.of(parameter)
        return Counters(parameter._version, entries, _remembered(optimizer, watched))

    def _is_as_it_was(self, parameter: Tensor, before: Counters) -> bool:
        """Whether weights were not touched, or, as far as some of them tell, were put back."""
        if parameter._version == before.version:
            return True
        return _are_same(self._entries.of(parameter), before.entries)


def _is_same(now: Remembered, before: Remembered) -> bool:
    """Whether a thing was not touched, or is another one with the same numbers (loaded again)."""
    if now[1] is before[1]:
        return now[2] == before[2]
    one, other = now[1], before[1]
    if not isinstance(one, Tensor) or not isinstance(other, Tensor):
        return False
    return other._version == before[2] and one.dtype == other.dtype and torch.equal(one, other)


def _remembered(optimizer: Optimizer, watched: Watched) -> list[Remembered]:
    """What the rule remembers; a loop may keep things of its own in the same place."""
    state, rule = optimizer.state.get(watched.parameter), watched.rule
    if not state or rule is None:
        return []
    return [
        (name, state[name], state[name]._version if isinstance(state[name], Tensor) else 0)
        for name in (*rule.numbers, *rule.tensors)
        if name in state
    ]


class Entries:
    """Some entries of one parameter after another, at little cost: asked for at every update."""

    def __init__(self) -> None:
        self._views: dict[int, tuple[int, NDArray[Any]]] = {}
        self._places: dict[int, NDArray[np.int64]] = {}

    def of(self, parameter: Tensor) -> bytes | Tensor:
        """As bytes, or, on other devices, as a copy there: nothing waits for it."""
        count = parameter.numel()
        places = self._places.get(count)
        if places is None:  # anywhere: evenly spaced ones would all lie in one column
            places = np.arange(count)
            if count > SOME:
                places = np.random.default_rng(count).integers(0, count, SOME)
            self._places[count] = places
        if not parameter.is_cpu:
            where = torch.from_numpy(places).to(parameter.device)
            return parameter.detach().reshape(-1)[where]
        pointer, view = self._views.get(id(parameter), NOWHERE)
        if pointer != parameter.data_ptr() or not parameter.is_contiguous():
            view = parameter.detach().reshape(-1).numpy()
            self._views[id(parameter)] = parameter.data_ptr(), view
        return view[places].tobytes()


NOWHERE: tuple[int, NDArray[Any]] = -1, np.empty(0)


def _are_same(one: bytes | Tensor, other: bytes | Tensor) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return torch.equal(one, other)
    return type(one) is type(other) and one == other  # else it was moved to another device
