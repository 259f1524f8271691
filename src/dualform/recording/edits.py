"""Was anything changed by hand between two updates? Asked of torch's own counters.

Every tensor counts how often it was changed in place (all but torch's own fused optimizers see to
that). What the counters of a parameter, and of all that its optimizer remembers of it, say at the
end of one update, they must still say when the next one begins. That costs a few comparisons of
integers per parameter, and finds an edit, a clamp or a `load_state_dict` in the middle of a run
before the optimizer has moved on from it. It is asked of parameters whose every step is not
predicted: those under adaptive rules, and those of layers recorded with keys alone.

Weights may be exchanged and put back in between (averaged ones, for an evaluation), or moved and
moved back (SAM). So where a counter of weights has moved, some of their entries decide: they must
be what they were, within rounding.

Why it is not all: an edit through `parameter.data` has no counter, and one that left those entries
alone passes, too. Under adaptive rules `verify` finds either, where error signals are kept.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from operator import attrgetter
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.optim import Optimizer

from dualform.recording.parameters import Watched, apart, parameters_of, version_of

BUFFER = "momentum_buffer"
"""What SGD remembers."""

ROUNDINGS = 4.0
"""How many roundings of the largest weights those may be off by that were moved and moved back."""

Remembered = tuple[str, object, int]

version_in = attrgetter("_version")


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

    def __init__(self, optimizers: Sequence[Optimizer], watched: Iterable[Watched]) -> None:
        self._known: dict[Watched, tuple[int | None, Counters]] = {}
        self._owners: dict[Watched, Optimizer] = {}
        self._entries = Entries()
        self.put_back: dict[Watched, int | None] = {}
        """Weights changed and, as far as some entries tell, put back: after which step."""
        owners = {id(p): o for o in optimizers for p in parameters_of(o)}
        for one in watched:
            owner = owners.get(id(one.parameter))
            if owner is not None and one.is_counted:
                self._owners[one] = owner
                self._known[one] = None, self._counters(owner, one)

    def found_now(self) -> Iterator[tuple[Watched, str]]:
        """What was changed since the last update of any parameter, before it is written down."""
        for watched, optimizer in self._owners.items():
            changed = self.found(optimizer, watched, None)
            if changed is not None:
                yield watched, changed

    def found(self, optimizer: Optimizer, watched: Watched, step: int | None) -> str | None:
        """What was changed since a parameter's last update, in a sentence; None if nothing was."""
        if not watched.is_counted:
            return None
        last, before = self._known.get(watched, (None, None))
        since = "recording began" if last is None else f"its update of step {last}"
        until = "now" if step is None else f"that of step {step}"
        if before is not None and watched.parameter._version != before.version:
            if not self._has_its_entries(watched.parameter, before):
                return (
                    f"it was changed in place between {since} and {until}: an edit, "
                    "a clamp, a load_state_dict. No pattern wrote that."
                )
            self.put_back.setdefault(watched, last)
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
            if move.watched.is_counted:
                self._owners[move.watched] = optimizer
                self._known[move.watched] = step, self._counters(optimizer, move.watched)

    def know(self, those: Company, step: int) -> None:
        """What was noted of several, as their update of this step left them, is known of each."""
        for one, counters in those.each():
            self._known[one] = step, counters

    def _counters(self, optimizer: Optimizer, watched: Watched) -> Counters:
        parameter = watched.parameter
        entries = self._entries.of(parameter)
        return Counters(parameter._version, entries, _remembered(optimizer, watched))

    def has_other_entries(self, watched: Watched) -> bool:
        """Whether a parameter's entries are not those of its last update, to the bit."""
        _, before = self._known.get(watched, (None, None))
        return before is not None and not _are_same(
            self._entries.of(watched.parameter), before.entries
        )

    def _has_its_entries(self, parameter: Tensor, before: Counters) -> bool:
        """Whether weights, as far as some of them tell, are what they were."""
        now = self._entries.of(parameter)
        if _are_same(now, before.entries):
            return True
        size = max(one.audit.spread for one in self._known)  # what was added may be larger than it
        return _are_close(now, before.entries, parameter.dtype, size)


class Company:
    """The counters of parameters that one optimizer moves by SGD: all asked for in a few calls."""

    def __init__(self, watched: Sequence[Watched], buffers: Sequence[Tensor | None]) -> None:
        self._watched, self._buffers = list(watched), list(buffers)
        self._parameters = [one.parameter for one in watched]
        self._tensors = [*self._parameters, *(b for b in buffers if b is not None)]
        self._places: list[int] = []
        self._views: list[NDArray[Any]] = []
        self.note()

    def note(self) -> None:
        """An update was made: what it left counts."""
        self._versions = list(map(version_in, self._tensors))
        places = [p.data_ptr() for p in self._parameters]
        if places != self._places:
            self._views = [_view_of(p) for p in self._parameters]
            self._places = places if all(map(can_be_noted, self._parameters)) else []
        self._some = [view.tobytes() for view in self._views]

    def are_untouched(self) -> bool:
        """Whether nothing was changed in place since."""
        return list(map(version_in, self._tensors)) == self._versions

    @property
    def versions(self) -> list[int]:
        """How often each parameter was changed in place."""
        return self._versions[: len(self._watched)]

    def each(self) -> Iterator[tuple[Watched, Counters]]:
        """What was noted of each parameter."""
        counts = iter(self._versions[len(self._watched) :])
        for watched, buffer, version, some in zip(
            self._watched, self._buffers, self.versions, self._some, strict=True
        ):
            remembered: list[Remembered] = []
            if buffer is not None:
                remembered.append((BUFFER, buffer, next(counts)))
            yield watched, Counters(version, some, remembered)


def can_be_noted(tensor: Tensor) -> bool:
    """Whether a tensor has a counter, and entries that numpy can look at where they lie."""
    return tensor.is_cpu and tensor.is_contiguous() and not tensor.is_inference()


def _is_same(now: Remembered, before: Remembered) -> bool:
    """Whether a thing was not touched, or is another one with the same numbers (loaded again)."""
    if now[1] is before[1]:
        return now[2] == before[2]
    one, other = now[1], before[1]
    if not isinstance(one, Tensor) or not isinstance(other, Tensor):
        return False
    return version_of(other) == before[2] and one.dtype == other.dtype and torch.equal(one, other)


def _remembered(optimizer: Optimizer, watched: Watched) -> list[Remembered]:
    """What the rule remembers; a loop may keep things of its own in the same place."""
    state, rule = optimizer.state.get(watched.parameter), watched.rule
    if not state:
        return []
    names = (BUFFER,) if rule is None else (*rule.numbers, *rule.tensors)
    return [
        (name, state[name], version_of(state[name]) if isinstance(state[name], Tensor) else 0)
        for name in names
        if state.get(name) is not None
    ]


class Entries:
    """Some entries of one parameter after another, at little cost: asked for at every update."""

    def __init__(self) -> None:
        self._views: dict[int, tuple[int, NDArray[Any]]] = {}

    def of(self, parameter: Tensor) -> bytes | Tensor:
        """About 64 as bytes, or, on other devices, as a copy there: nothing waits for it."""
        if not parameter.is_cpu:
            return _some_of(parameter.detach()).clone()
        pointer, view = self._views.get(id(parameter), NOWHERE)
        if pointer != parameter.data_ptr():
            view = _view_of(parameter)
            if parameter.is_contiguous():  # else it is a copy
                self._views[id(parameter)] = parameter.data_ptr(), view
        return view.tobytes()


NOWHERE: tuple[int, NDArray[Any]] = -1, np.empty(0)


def _view_of(parameter: Tensor) -> NDArray[Any]:
    view: NDArray[Any] = _some_of(parameter.detach()).numpy()
    return view


def _some_of(tensor: Tensor) -> Tensor:
    """Entries of many rows and columns, as numbers that numpy has."""
    flat = tensor.reshape(-1)
    some = flat[:: apart(flat.numel(), tensor.shape[-1] if tensor.dim() else 1)]
    return some.view(torch.int16) if some.dtype == torch.bfloat16 else some


def _are_close(one: bytes | Tensor, other: bytes | Tensor, dtype: torch.dtype, size: float) -> bool:
    """Whether entries differ by no more than what adding something and taking it away rounds.

    `size`: of the largest weights. In 16 bits that would be a few percent: nothing is allowed.
    """
    if dtype.itemsize < 4:
        return False
    if not isinstance(one, Tensor) or not isinstance(other, Tensor):
        if not isinstance(one, bytes) or not isinstance(other, bytes):
            return False
        one, other = (torch.frombuffer(bytearray(b), dtype=dtype) for b in (one, other))
    off, largest = (one.double() - other.double()).abs().max(), other.double().abs().max()
    return bool(off <= ROUNDINGS * torch.finfo(dtype).eps * max(float(largest), size))


def _are_same(one: bytes | Tensor, other: bytes | Tensor) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return torch.equal(one, other)
    return type(one) is type(other) and one == other  # else it was moved to another device
