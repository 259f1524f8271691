"""What a reader holds: a recorded run, opened from its directory.

Nothing is loaded that is not asked for, nothing is executed, and nothing on disk is changed. A
memory may be opened while it is being recorded: it then ends at the last commit. Why it is hard:
everything here comes from files that may be damaged or made to do harm, and whatever is wrong with
them has to be one kind of error that says so, never a wrong number.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dualform.errors import QueryError
from dualform.learning_rules import Setting
from dualform.memory import directions
from dualform.memory.content import LOG
from dualform.memory.description import Buffer, Event, Parameter, Phase
from dualform.memory.fields import named, reading
from dualform.memory.kept import Kept
from dualform.memory.layer import LayerMemory
from dualform.memory.liveness import Progress
from dualform.memory.segments import OpenedMemory
from dualform.memory.tensor_files import TensorFile


@dataclass(frozen=True)
class ParameterLog:
    """What the optimizer did with one parameter at every step: arrays of one entry per step.

    `setting`: its place in `Memory.settings`, -1 where there is none. `fresh`: the optimizer
    remembered nothing before. `carried`: the gradient held that of the last moved step, too.
    `kappa`: what it was multiplied by (clipping, loss scale); NaN where that is not known.
    `explained`: it is what its patterns sum to. `seen`: it along the signs and the direction; NaN
    where it was not looked at.
    """

    moved: NDArray[np.bool_]
    setting: NDArray[np.int32]
    fresh: NDArray[np.bool_]
    carried: NDArray[np.bool_]
    kappa: NDArray[np.float64]
    explained: NDArray[np.bool_]
    seen: NDArray[np.float64]
    mark: NDArray[np.uint32]
    state_mark: NDArray[np.uint32]


class Memory:
    """Everything a training run wrote into a network, on disk.

    Example:
        >>> memory = dualform.Memory.open("runs/digits")   # doctest: +SKIP
        >>> memory.steps, memory.layers                    # doctest: +SKIP
        (600, ('fc1', 'fc2', 'fc3'))
    """

    def __init__(self, opened: OpenedMemory) -> None:
        self.opened, described = opened, opened.description
        self.path, self.steps = opened.path, opened.steps
        self.closed, self.every = described.closed, described.every
        self.parameters: Mapping[str, Parameter] = described.parameters
        self.buffers: Mapping[str, Buffer] = described.buffers
        self.environment: Mapping[str, Any] = described.environment
        self.phases: tuple[Phase, ...] = described.phases
        self.events: tuple[Event, ...] = tuple(described.events)
        self.kept = Kept(opened)
        self._layers: dict[str, LayerMemory] = {}

    @classmethod
    def open(cls, path: str | Path) -> Memory:
        """Open a memory for reading; `MemoryFileError` says what is wrong with anything else."""
        return cls(OpenedMemory(Path(path)))

    def refresh(self) -> Memory:
        """The same memory with everything committed since."""
        return Memory.open(self.path)

    @property
    def layers(self) -> tuple[str, ...]:
        """The layers that have patterns, in the order the forward pass first used them."""
        return tuple(self.opened.description.layers)

    @property
    def columns(self) -> tuple[str, ...]:
        """The pattern columns: `step`, then what was tagged, then position, microbatch and call."""
        return tuple(self.opened.description.columns)

    def layer(self, name: str) -> LayerMemory:
        """One layer's keys, error signals and pattern columns."""
        own = (p for p in self.parameters.values() if p.name.rpartition(".")[0] == name)
        for parameter in (p for p in own if not p.layers):
            why = f"{parameter.name!r} {parameter.why}"
            raise QueryError(f"there is no layer {name!r} that has patterns: {why}")
        named(self.opened.description.layers, name, "layer")
        if name not in self._layers:
            self._layers[name] = LayerMemory(self.opened, name)
        return self._layers[name]

    @cached_property
    def settings(self) -> tuple[Setting, ...]:
        """The settings that the log refers to, in the order they first occurred."""
        with reading(f"the settings of {self.path}"):
            return tuple(map(Setting.from_json, self.opened.description.settings))

    def log(self, parameter: str) -> ParameterLog:
        """What the optimizer did with a parameter at every step."""
        index = named(self.parameters, parameter, "parameter").index
        found: dict[str, Any] = {}
        for field, dtype in LOG.items():
            parts = [s.log(field, *self.opened.sizes)[:, index] for s in self.opened.segments]
            column = np.concatenate([torch.zeros(0, dtype=dtype).numpy(), *parts])
            found[field] = column.astype(bool) if dtype == torch.uint8 else column
        return ParameterLog(**found)

    @cached_property
    def marks(self) -> NDArray[np.uint32]:
        """What marked weights and optimizer states after every update: [steps, 2, parameters]."""
        segments, sizes = self.opened.segments, self.opened.sizes
        fields = ((s.log("mark", *sizes), s.log("state_mark", *sizes)) for s in segments)
        none = np.zeros((0, 2, sizes[0]), np.uint32)
        return np.concatenate([none, *(np.stack(both, 1) for both in fields)])

    def path_to(self, parameter: str, at: int) -> NDArray[np.int64]:
        """The steps that led to the state after `at` updates: what was taken back is left out."""
        named(self.parameters, parameter, "parameter")
        self._refuse_beyond(at)
        parts, end, limit = [], at, at + 1
        for event in reversed(self.events):
            if event.to is not None and parameter in event.parameters and event.step < limit:
                parts.append(np.arange(event.step, end))
                end = limit = event.to  # the state that an update left, before what followed it
        parts.append(np.arange(0, end))
        return np.concatenate(parts[::-1]).astype(np.int64)

    def direction(self, parameter: str) -> Tensor | None:
        """The direction v along which a parameter's rows are looked at: float64, [width], rounded
        to the parameter's dtype, as it was used; None for a vector: its entries are rows."""
        known = named(self.parameters, parameter, "parameter")
        if len(known.shape) < 2:
            return None
        v = directions.direction(known.index, known.width)
        return v.to(known.dtype).double() if known.dtype.is_floating_point else v

    def signs(self, parameter: str) -> NDArray[np.float64]:
        """The signs that its rows were summed up with, for the log's `seen`: [height]."""
        known = named(self.parameters, parameter, "parameter")
        return directions.signs(known.index, known.height)

    def buffer(self, name: str, at: int | None = None) -> Tensor:
        """A buffer's value after `at` updates (default: the last recorded one)."""
        limit = self.steps if at is None else at
        self._refuse_beyond(limit)
        return self.kept.buffer(name, limit)

    @property
    def is_being_recorded(self) -> bool:
        """Whether a recorder is writing to this memory now."""
        return not self.closed and Progress.is_held(self.path)

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
        elif lost := trained - self.steps:
            what = f"the {_count(lost)} after that {'is' if lost == 1 else 'are'} lost"
        else:
            what = "no further step was completed"
        torn = ", while a segment was being committed" if self.opened.committed.is_torn else ""
        return (*recorded, f"the recording did not end normally{torn}: {committed}, {what}")

    @cached_property
    def hashes(self) -> dict[str, str]:
        """SHA-256 of everything that is committed: its manifest and lines, with all checksums."""
        return {"memory": hashlib.sha256(self.opened.committed.content).hexdigest()}

    @property
    def bytes_on_disk(self) -> int:
        """The size of everything this memory keeps on disk."""
        segments = self.opened.segments
        return len(self.opened.committed.content) + sum(segment.bytes for segment in segments)

    def check(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Compare every byte with its checksum; `MemoryFileError` names what does not match.
        `progress` is called with (done, total)."""
        OpenedMemory(self.path)
        total = len(self.opened.segments)
        for done, segment in enumerate(self.opened.segments, 1):
            TensorFile(segment.path, segment.blocks).verify(0, segment.bytes)
            if progress is not None:
                progress(done, total)

    def __repr__(self) -> str:
        state = "" if self.closed else ", not closed"
        layers = ", ".join(self.layers) or "none"
        return f"Memory({str(self.path)!r}: {_count(self.steps)}, layers {layers}{state})"

    def _refuse_beyond(self, at: int, *, least: int = 0) -> None:
        if not least <= at <= self.steps:
            raise QueryError(
                f"what there was after {at} updates was asked for; {self.path} knows it of {least} "
                f"to {self.steps}. Ask for a step between them"
            )


def _count(steps: int) -> str:
    return "1 step" if steps == 1 else f"{steps} steps"
