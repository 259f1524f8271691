"""What a reader holds: a recorded run, opened from its directory.

Nothing is loaded that is not asked for, nothing is executed, and nothing on disk is changed. A
memory may be opened while it is being recorded: it then ends at the last commit. Why it is hard:
everything here comes from files that may be damaged or made to do harm, and whatever is wrong with
them has to be one kind of error that says so, never a wrong number.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dualform.errors import MemoryFileError, QueryError
from dualform.learning_rules import Setting
from dualform.memory import directions
from dualform.memory.content import LOG
from dualform.memory.description import OWN_COLUMNS, Buffer, Event, Parameter, Phase
from dualform.memory.fields import WRONG
from dualform.memory.kept import Kept
from dualform.memory.layer import HALVES, LayerMemory
from dualform.memory.liveness import Progress, WriterLock
from dualform.memory.opened import OpenedMemory
from dualform.memory.patterns import Patterns, values_of
from dualform.memory.uses import Uses

Callback = Callable[[int, int], None]
"""Progress: called with (done, total)."""


@dataclass(frozen=True)
class ParameterLog:
    """What the optimizer did with one parameter at every step: arrays of one entry per step."""

    moved: NDArray[np.bool_]
    setting: NDArray[np.int32]
    """Places in `Memory.settings`; -1 where there is none."""
    fresh: NDArray[np.bool_]
    """Whether the optimizer remembered nothing before."""
    carried: NDArray[np.bool_]
    """Whether the gradient held that of the last moved step, too."""
    kappa: NDArray[np.float64]
    """By what the gradient was multiplied (clipping, loss scale); NaN where it is not known."""
    explained: NDArray[np.bool_]
    """Whether the gradient is what its patterns sum to."""
    seen: NDArray[np.float64]
    """The gradient along the signs and the direction; NaN where it was not looked at."""
    mark: NDArray[np.uint32]
    state_mark: NDArray[np.uint32]


class Marks(NamedTuple):
    """What says which state a model is in: a number per parameter, [P], in the log's order."""

    weights: NDArray[np.uint32]
    states: NDArray[np.uint32]


class Memory:
    """Everything a training run wrote into a network, on disk.

    Example:
        >>> import dualform as df
        >>> memory = df.Memory.open("runs/digits")      # doctest: +SKIP
        >>> memory.steps, memory.layers                  # doctest: +SKIP
        (600, ('fc1', 'fc2', 'fc3'))
    """

    def __init__(self, opened: OpenedMemory) -> None:
        self.opened = opened
        """What writers look into: segments, lines, strings."""
        self.path, self.steps = opened.path, opened.steps
        described = opened.description
        self.closed, self.every = described.closed, described.every
        self.parameters: Mapping[str, Parameter] = described.parameters
        self.buffers: Mapping[str, Buffer] = described.buffers
        self.environment: Mapping[str, Any] = described.environment
        self.phases: tuple[Phase, ...] = described.phases
        self.events: tuple[Event, ...] = tuple(described.events)
        self.kept = Kept(opened.segments, self.parameters, self.buffers)
        self._layers: dict[str, LayerMemory] = {}

    @classmethod
    def open(cls, path: str | Path) -> Memory:
        """Open a memory for reading; `MemoryFileError` says what is wrong with anything else.

        Example:
            >>> memory = df.Memory.open("runs/digits")   # doctest: +SKIP
        """
        return cls(OpenedMemory(Path(path)))

    def refresh(self) -> Memory:
        """The same memory with everything committed since; this object stays as it is."""
        return Memory.open(self.path)

    # -- layers and their patterns -----------------------------------------------------------------

    @property
    def layers(self) -> tuple[str, ...]:
        """The layers that have patterns, in the order the forward pass first used them."""
        return tuple(self.opened.description.layers)

    @property
    def columns(self) -> tuple[str, ...]:
        """The pattern columns: `step`, then what was tagged, then position, microbatch and call."""
        return tuple(self._column_kinds)

    @cached_property
    def _column_kinds(self) -> dict[str, str]:
        own = dict.fromkeys(OWN_COLUMNS, "int")
        return {"step": "int", **self.opened.description.tags, **own}

    def layer(self, name: str) -> LayerMemory:
        """One layer's keys, error signals and pattern columns.

        Example:
            >>> memory.layer("fc1").keys.shape   # doctest: +SKIP
            torch.Size([38400, 64])
        """
        described, segments = self.opened.description, self.opened.segments
        if name not in described.layers:
            raise QueryError(
                f"there is no layer {name!r} in {self.path}; it has "
                f"{', '.join(self.layers) or 'none with patterns'}"
            )
        if name not in self._layers:
            known = described.layers[name]
            dtype, stored = self.parameters[known.layer.weight].dtype, described.stored
            is_narrow = stored in HALVES and dtype.itemsize > stored.itemsize
            whole = [n for n, (_, keep) in described.layers.items() if keep == "patterns"]
            kinds, strings = self._column_kinds, described.strings
            # A layer does not hold on to its memory: it would be let go late, as rings are.
            uses = cache(partial(Uses, name, [s for s in segments if name in s.rows]))
            anywhere = partial(values_of, self.layers, segments, kinds, strings)
            self._layers[name] = LayerMemory(
                known,
                (dtype, stored if is_narrow else dtype),
                segments,
                whole,
                Patterns(name, segments, kinds, strings, uses, anywhere),
                uses,
            )
        return self._layers[name]

    # -- parameters --------------------------------------------------------------------------------

    @cached_property
    def settings(self) -> tuple[Setting, ...]:
        """The settings that the log refers to, in the order they first occurred."""
        try:
            return tuple(map(Setting.from_json, self.opened.description.settings))
        except WRONG as error:
            raise MemoryFileError(f"{self.path} has settings that are none: {error!r}") from error

    def log(self, parameter: str) -> ParameterLog:
        """What the optimizer did with a parameter at every step."""
        index = self._parameter(parameter).index
        found: dict[str, Any] = {}
        for field, dtype in LOG.items():
            parts = [s.log(field, *self.opened.sizes)[:, index] for s in self.opened.segments]
            column = np.concatenate([torch.zeros(0, dtype=dtype).numpy(), *parts])
            found[field] = column.astype(bool) if dtype == torch.uint8 else column
        return ParameterLog(**found)

    def marks(self, step: int) -> Marks:
        """What marked weights and optimizer states after `step` updates, at least one."""
        if not 1 <= step <= self.steps:
            raise QueryError(
                f"the marks after {step} updates were asked for; {self.path} has those of 1 to "
                f"{self.steps}"
            )
        segment = self.opened.segments[self._ends.searchsorted(step)]
        sizes, line = self.opened.sizes, step - 1 - segment.first_step
        return Marks(*(segment.log(field, *sizes)[line].copy() for field in ("mark", "state_mark")))

    @cached_property
    def _ends(self) -> NDArray[np.int64]:
        return np.array([segment.end for segment in self.opened.segments], np.int64)

    def path_to(self, parameter: str, at: int) -> NDArray[np.int64]:
        """The steps that led to the state after `at` updates: what was taken back is left out."""
        self._parameter(parameter)
        self._refuse_beyond(at)
        rewinds = [e for e in self.events if e.to is not None and parameter in e.parameters]
        parts, end, limit = [], at, at + 1
        for event in reversed(rewinds):
            if event.step < limit:
                assert event.to is not None
                parts.append(np.arange(event.step, end))
                end = limit = event.to  # the state that an update left, before what followed it
        parts.append(np.arange(0, end))
        return np.concatenate(parts[::-1]).astype(np.int64)

    def direction(self, parameter: str) -> Tensor | None:
        """The direction v along which a parameter's rows are looked at: float64, [width].

        Rounded to the parameter's dtype, as it was used; None for a vector: its entries are rows.
        """
        known = self._parameter(parameter)
        self._refuse_sizes(known)
        if len(known.shape) < 2:
            return None
        v = directions.direction(known.index, known.width)
        return v.to(known.dtype).double() if known.dtype.is_floating_point else v

    def signs(self, parameter: str) -> NDArray[np.float64]:
        """The signs that its rows were summed up with, for the log's `seen`: [height]."""
        known = self._parameter(parameter)
        self._refuse_sizes(known)
        return directions.signs(known.index, known.height)

    def buffer(self, name: str, at: int | None = None) -> Tensor:
        """A buffer's value after `at` updates (default: the last recorded one)."""
        limit = self.steps if at is None else at
        self._refuse_beyond(limit)
        return self.kept.buffer(name, limit)

    # -- the whole ---------------------------------------------------------------------------------

    @property
    def is_being_recorded(self) -> bool:
        """Whether a recorder is writing to this memory now."""
        return not self.closed and WriterLock.is_held(self.path)

    @property
    def remarks(self) -> tuple[str, ...]:
        """Sentences about what is missing, dropped or not explained; empty if all is well."""
        recorded = tuple(self.opened.description.remarks)
        if self.closed:
            return recorded
        committed = f"{_count(self.steps)} {'is' if self.steps == 1 else 'are'} committed"
        if self.is_being_recorded:
            return (*recorded, f"still being recorded; {committed}")
        trained = Progress.read(self.path)
        if trained is None or trained < self.steps:
            what = "how many steps after that are lost is not known"
        elif trained == self.steps:
            what = "no further step was completed"
        elif trained == self.steps + 1:
            what = "the 1 step after that is lost"
        else:
            what = f"the {trained - self.steps} steps after that are lost"
        torn = ", while a segment was being committed" if self.opened.committed.torn else ""
        return (*recorded, f"the recording did not end normally{torn}: {committed}, {what}")

    @cached_property
    def hashes(self) -> dict[str, str]:
        """SHA-256 of everything that is committed: its manifest and lines, with all checksums."""
        return {"memory": hashlib.sha256(self.opened.committed.content).hexdigest()}

    @property
    def bytes_on_disk(self) -> int:
        """The size of everything this memory keeps on disk."""
        total = 0
        for file in self.path.rglob("*"):
            with contextlib.suppress(OSError):  # a recorder may have taken it away just now
                total += file.stat().st_size if file.is_file() else 0
        return total

    def check(self, progress: Callback | None = None) -> None:
        """Read every byte and compare it with its checksum.

        `MemoryFileError` names the file, the place and the tensors that do not match.
        """
        OpenedMemory(self.path)
        total = len(self.opened.segments)
        for done, segment in enumerate(self.opened.segments):
            if progress is not None:
                progress(done, total)
            segment.file.check()
        if progress is not None:
            progress(total, total)

    def __repr__(self) -> str:
        state = "" if self.closed else ", not closed"
        layers = ", ".join(self.layers) or "none"
        return f"Memory({str(self.path)!r}: {_count(self.steps)}, layers {layers}{state})"

    def _parameter(self, name: str) -> Parameter:
        if name not in self.parameters:
            raise QueryError(
                f"there is no parameter {name!r}; there are {', '.join(self.parameters)}"
            )
        return self.parameters[name]

    def _refuse_beyond(self, at: int) -> None:
        if not 0 <= at <= self.steps:
            raise QueryError(f"step {at} was asked for, but {self.path} holds 0 to {self.steps}")

    def _refuse_sizes(self, known: Parameter) -> None:
        """Raise where a parameter is said to be larger than everything that was kept."""
        most = max(1 << 16, sum(segment.bytes for segment in self.opened.segments))
        if known.height * known.width > most:
            raise MemoryFileError(
                f"{self.path} says that {known.name!r} has shape {known.shape}, which is more than "
                "it holds: it is damaged or was made by hand"
            )


def _count(steps: int) -> str:
    return "1 step" if steps == 1 else f"{steps} steps"
