"""What a reader holds: a recorded run, opened from its directory.

Nothing is loaded that is not asked for, nothing is executed, and nothing on disk is changed. A
memory may be opened while it is being recorded: it then ends at the last commit.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dualform.errors import MemoryFileError, QueryError
from dualform.learning_rules import AdaptiveLog, ParameterLog, coefficients
from dualform.memory import files
from dualform.memory.columns import Columns
from dualform.memory.description import Buffer, Conversion, Description, Parameter, Phase
from dualform.memory.files import WRONG, TensorFile
from dualform.memory.fingerprint import Fingerprint, fingerprints_of
from dualform.memory.layer import LayerMemory
from dualform.memory.liveness import Progress, WriterLock
from dualform.memory.logs import Logs
from dualform.memory.segments import Segment
from dualform.memory.states import States

Callback = Callable[[int, int], None]
"""Progress: called with (done, total)."""


class Memory:
    """Everything a training run wrote into a network, on disk.

    Example:
        >>> import dualform as df
        >>> memory = df.Memory.open("runs/digits")      # doctest: +SKIP
        >>> memory.steps, memory.layers                  # doctest: +SKIP
        (600, ('fc1', 'fc2', 'fc3'))
    """

    def __init__(self, path: Path, manifest: dict[str, Any]) -> None:
        self.path = path
        self._manifest = manifest
        self._opened: dict[str, LayerMemory] = {}
        try:
            described = Description(manifest)
            self._segments = [Segment(path, entry) for entry in manifest["segments"]]
            described.agree(self._segments)
        except WRONG as error:
            raise MemoryFileError(
                f"{path / files.MANIFEST} does not describe a memory: {error!r}"
            ) from error
        self.steps, self.closed, self.exact = described.steps, described.closed, described.exact
        self.parameters: Mapping[str, Parameter] = described.parameters
        self.buffers: Mapping[str, Buffer] = described.buffers
        self._described = described
        self._order = {name: i for i, name in enumerate(self.parameters)}
        self._look_at_files()

    @classmethod
    def open(cls, path: str | Path) -> Memory:
        """Open a memory for reading; `MemoryFileError` says what is wrong with anything else.

        Example:
            >>> memory = df.Memory.open("runs/digits")   # doctest: +SKIP
        """
        directory = Path(path)
        return cls(directory, files.read_manifest(directory))

    def _look_at_files(self) -> None:
        """Is everything there, as long as it should be, and the initial state what it should be?"""
        self._initial = TensorFile(self.path / files.INITIAL, self._described.initial)
        for name, parameter in self.parameters.items():
            self._initial.tensor(f"parameters/{name}", parameter.shape, parameter.dtype)
        for segment in self._segments:
            try:
                size = segment.path.stat().st_size
            except OSError:
                size = -1
            if size != segment.written.bytes:
                segment.file  # noqa: B018  # opening it says what is wrong

    @property
    def layers(self) -> tuple[str, ...]:
        """The layers that have patterns, in the order the forward pass first used them."""
        return tuple(self._described.layers)

    def layer(self, name: str) -> LayerMemory:
        """One layer's keys, error signals and pattern columns.

        Example:
            >>> memory.layer("fc1").keys.shape   # doctest: +SKIP
            torch.Size([38400, 64])
        """
        if name not in self._described.layers:
            raise QueryError(
                f"there is no layer {name!r} in {self.path}; it has "
                f"{', '.join(self.layers) or 'none with patterns'}"
            )
        if name not in self._opened:
            self._opened[name] = LayerMemory(
                self._described.layers[name],
                self._segments,
                self._described_columns.of(name),
                [la.name for la in self._described.layers.values() if la.error_signals],
            )
        return self._opened[name]

    @property
    def columns(self) -> tuple[str, ...]:
        """The pattern columns: `step`, then what was tagged, then position, microbatch and call."""
        return tuple(self._described.columns)

    @cached_property
    def _described_columns(self) -> Columns:
        return Columns(self._segments, self._described.columns, self.layers)

    def log(self, parameter: str) -> ParameterLog:
        """What the optimizer did with a parameter at every step; `QueryError` under Adam and such.

        Their log is `adaptive_log`: there are no scalar coefficients.
        """
        return self._logs.linear(parameter, self._index(parameter))

    def adaptive_log(self, parameter: str) -> AdaptiveLog:
        """What an optimizer with an adaptive rule (Adam, …) did with a parameter at every step."""
        return self._logs.adaptive(parameter, self._index(parameter))

    @cached_property
    def _logs(self) -> Logs:
        why = "; ".join(self.remarks[:1])
        return Logs(self.path, self._segments, self.parameters, None if self.exact else why)

    def states(self, parameter: str) -> States:
        """What the optimizer remembered of a parameter, where that was kept."""
        self._index(parameter)
        return States(self.parameters[parameter], self._segments)

    def initial(self, parameter: str) -> Tensor:
        """The parameter when recording began, W_0."""
        return self._of_parameter("parameters", parameter)

    def initial_momentum(self, parameter: str) -> Tensor | None:
        """The optimizer's momentum buffer when recording began, m_0; None if there was none."""
        self._index(parameter)
        if f"momentum/{parameter}" not in self._initial.names:
            return None
        return self._of_parameter("momentum", parameter)

    def _of_parameter(self, kind: str, parameter: str) -> Tensor:
        self._index(parameter)
        return self._initial.tensor(f"{kind}/{parameter}", self.parameters[parameter].shape)

    def step_gradients(self, parameter: str) -> Iterator[tuple[int, Tensor]]:
        """(step, gradient as applied) of a parameter covered step by step."""
        self._index(parameter)
        shape = self.parameters[parameter].shape
        for segment in self._segments:
            yield from segment.events("gradients", parameter, shape)

    def learned(self, parameter: str, at: int) -> Tensor:
        """The learned part of a parameter without patterns after `at` updates, in float64."""
        self._index(parameter)
        self._refuse_beyond(at)
        known = self.parameters[parameter]
        if known.coverage == "patterns":
            raise QueryError(
                f"{parameter!r} was learned from patterns, which are kept one by one in its layers "
                f"({', '.join(known.layers)}); its learned part is their sum, c_t δ_t x_t"
            )
        since = known.accumulated_since
        if since is None or at <= since:
            return self._summed(parameter, at)
        kept = self.learned_steps(parameter)
        if at not in kept:
            near = sorted(sorted([since, *kept], key=lambda s: abs(s - at))[:2])
            raise QueryError(
                f"{parameter!r} is accounted for in accumulated form, which is kept only now and "
                f"then: step {at} is not among them, the nearest are {near}. Ask for one of "
                f"those, or record {self._closer(parameter)}"
            )
        return kept[at].file.tensor(f"learned/{parameter}", known.shape, torch.float64)

    def _closer(self, parameter: str) -> str:
        """With what every step of an accumulated parameter would have been kept."""
        layers = (self.layer(name) for name in self.layers)
        users = [la.name for la in layers if parameter in (la.weight, la.bias)]
        if any(not self.layer(name).has_error_signals for name in users):
            return (
                f"the error signals of {users[0]!r} too; a smaller snapshot_every keeps more steps"
            )
        return "with a larger step_budget to keep every step"

    def _summed(self, parameter: str, at: int) -> Tensor:
        """The learned part from the gradients kept step by step."""
        total = torch.zeros(self.parameters[parameter].shape, dtype=torch.float64)
        if self.parameters[parameter].coverage == "untrained":  # whatever rule it was given to
            return total
        coefficient = coefficients(self.log(parameter), at).steps
        for step, gradient in self.step_gradients(parameter):
            if step >= at:
                break
            total += float(coefficient[step]) * gradient.double()
        return total

    def learned_steps(self, parameter: str) -> dict[int, Segment]:
        """The steps at which an accumulated parameter's learned part is kept."""
        return self._steps_with(f"learned/{parameter}")

    def _steps_with(self, name: str) -> dict[int, Segment]:
        return {s.end: s for s in self._segments if name in s.file.names}

    def sizes(self, parameter: str) -> NDArray[np.float64]:
        """[3, steps]: how large the patterns of every step were that are now gone; else 0.

        Of their sum along the probe; of its parts, as if of any sign; of the most an entry got.
        """
        self._index(parameter)
        name = f"sizes/{parameter}"
        found = [
            s.file.array(name, (3, s.steps), torch.float64)
            if name in s.file.names
            else np.zeros((3, s.steps))
            for s in self._segments
        ]
        return np.concatenate([np.zeros((3, 0)), *found], axis=1)

    @property
    def every(self) -> int:
        """The patterns of every so many steps are kept: 1, all; 3, of steps 0, 3, 6, …"""
        return self._described.every

    def is_unrecorded(self, parameter: str) -> NDArray[np.bool_]:
        """At which steps a parameter with patterns was moved by a gradient that has none."""
        index = self._index(parameter)
        parts = [s.log_array("unrecorded", len(self._order))[:, index] for s in self._segments]
        found: NDArray[np.bool_] = np.concatenate([np.zeros(0), *parts]) != 0
        return found

    def unrecorded(self, parameter: str, at: int) -> tuple[Tensor, Tensor]:
        """What the steps without patterns wrote into a parameter and its momentum buffer, float64.

        After `at` updates: U in W = a W_0 + h m_0 + Σ c δ x + U, where patterns are of every k-th
        step. `QueryError` names the nearest steps at which it is kept, if this is none of them.
        """
        self._refuse_beyond(at)
        shape, moved = self.parameters[parameter].shape, self.is_unrecorded(parameter)[:at]
        if not moved.any():
            zeros = torch.zeros(shape, dtype=torch.float64)
            return zeros, zeros
        kept = self.unrecorded_steps(parameter)
        if at not in kept:
            start = int(np.argmax(moved))
            near = sorted(sorted([start, *kept], key=lambda s: abs(s - at))[:2])
            raise QueryError(
                f"every {self.every} steps were recorded; what the others wrote into {parameter!r} "
                f"is kept only now and then: step {at} is not among them, the nearest are {near}. "
                "Ask for one of those, or record with every=1 or a smaller snapshot_every"
            )
        file = kept[at].file
        names = (f"unrecorded/{parameter}", f"unrecorded_momentum/{parameter}")
        weights, momentum = (file.tensor(name, shape, torch.float64) for name in names)
        return weights, momentum

    def unrecorded_steps(self, parameter: str) -> dict[int, Segment]:
        """The steps at which the unrecorded part of a parameter is kept."""
        return self._steps_with(f"unrecorded/{parameter}")

    def buffer(self, name: str, at: int | None = None) -> Tensor:
        """A buffer's value after `at` updates (default: the last recorded one)."""
        if name not in self.buffers:
            raise QueryError(
                f"there is no buffer {name!r}; there are {', '.join(self.buffers) or 'none'}"
            )
        limit = self.steps if at is None else at
        self._refuse_beyond(limit)
        known = self.buffers[name]
        value = self._initial.tensor(f"buffers/{name}", known.shape, known.dtype)
        for segment in self._segments:
            if segment.first_step >= limit:
                break
            for step, changed in segment.events("buffers", name, known.shape, known.dtype):
                if step < limit:
                    value = changed
        return value

    @property
    def snapshot_steps(self) -> tuple[int, ...]:
        """The steps whose full weights are kept (the files may be deleted without harm)."""
        return tuple(
            sorted(s for s in self._described.snapshots if self._snapshot_path(s).exists())
        )

    def _snapshot_path(self, step: int) -> Path:
        return self.path / files.SNAPSHOTS / self._described.snapshots[step].file

    def snapshot(self, step: int) -> dict[str, Tensor]:
        """Every parameter as it was after `step` updates, where a snapshot was kept."""
        if step not in self.snapshot_steps:
            raise QueryError(f"no snapshot of step {step}; there are {list(self.snapshot_steps)}")
        file = TensorFile(self._snapshot_path(step), self._described.snapshots[step])
        return {
            name: file.tensor(f"parameters/{name}", p.shape, p.dtype)
            for name, p in self.parameters.items()
        }

    @cached_property
    def fingerprints(self) -> tuple[Fingerprint, ...]:
        """What every parameter looked like at every commit and in between, in float64."""
        return tuple(f for s in self._segments for f in fingerprints_of(s, self.parameters))

    def probe(self, parameter: str) -> Tensor:
        """The random direction v of a parameter's fingerprint W v, float64."""
        self._index(parameter)
        width = (self.parameters[parameter].width,)
        return self._initial.tensor(f"probes/{parameter}", width, torch.float64)

    def sketch(self, parameter: str) -> Tensor:
        """The random direction u of a parameter's audit projection u·(G v), float64."""
        self._index(parameter)
        height = (self.parameters[parameter].height,)
        return self._initial.tensor(f"sketches/{parameter}", height, torch.float64)

    def audit_projections(self, parameter: str) -> NDArray[np.float64]:
        """u·(gradient v) of every step, as seen in training just before the optimizer's step.

        NaN where it was not looked at: `Parameter.is_noted_in_part`.
        """
        index = self._index(parameter)
        parts = [s.log_array("projection", len(self._order))[:, index] for s in self._segments]
        return np.concatenate([np.empty(0), *parts])

    @cached_property
    def hashes(self) -> dict[str, str]:
        """SHA-256 of the initial state, of the optimizer's log and of the manifest as read."""
        initial = hashlib.sha256()
        for name in sorted(self._initial.names):
            initial.update(name.encode())
            initial.update(_raw(self._initial.tensor(name)))
        log = hashlib.sha256()
        for segment in self._segments:
            for name in sorted(n for n in segment.file.names if n.startswith("log/")):
                log.update(name.encode())
                log.update(_raw(segment.file.tensor(name)))
        manifest = hashlib.sha256(files.canonical(self._manifest))
        return {
            "initial": initial.hexdigest(),
            "log": log.hexdigest(),
            "manifest": manifest.hexdigest(),
        }

    @property
    def remarks(self) -> tuple[str, ...]:
        """Sentences about what is missing, dropped or not explained; empty if all is well."""
        if self.closed:
            return self._described.remarks
        if self.is_being_recorded:
            return (
                *self._described.remarks,
                f"still being recorded; {self.steps} steps are committed",
            )
        trained = Progress.read(self.path)
        if trained is None:
            what = "how many steps after them are lost cannot be told"
        elif trained > self.steps:
            what = f"the {trained - self.steps} steps after them are lost"
        else:
            what = "no further step was completed"
        return (
            *self._described.remarks,
            f"the recording did not end normally: {self.steps} steps are committed, {what}",
        )

    @property
    def is_being_recorded(self) -> bool:
        """Whether a recorder is writing to this memory now."""
        return not self.closed and WriterLock.is_held(self.path)

    @property
    def phases(self) -> tuple[Phase, ...]:
        """When and how the recording began, and every time it was resumed.

        Example:
            >>> [phase.first_step for phase in memory.phases]   # doctest: +SKIP
            [0, 600]
        """
        return self._described.phases

    @property
    def conversions(self) -> tuple[Conversion, ...]:
        """When and how this memory was made from another; empty if it was recorded as it is."""
        return self._described.conversions

    @property
    def environment(self) -> dict[str, Any]:
        """Versions, platform, optimizer: what the run was recorded with."""
        return dict(self._described.environment)

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
        kept = [self._initial, *(s.file for s in self._segments)]
        kept += [
            TensorFile(self._snapshot_path(s), self._described.snapshots[s])
            for s in self.snapshot_steps
        ]
        for done, file in enumerate(kept):
            if progress is not None:
                progress(done, len(kept))
            file.check()
        if progress is not None:
            progress(len(kept), len(kept))

    def refresh(self) -> Memory:
        """The same memory with everything committed since; this object stays as it is."""
        return Memory.open(self.path)

    def __repr__(self) -> str:
        state = "" if self.closed else ", not closed"
        layers = ", ".join(self.layers) or "none"
        return f"Memory({str(self.path)!r}: {self.steps} steps, layers {layers}{state})"

    def _index(self, parameter: str) -> int:
        if parameter not in self._order:
            raise QueryError(
                f"there is no parameter {parameter!r}; there are {', '.join(self.parameters)}"
            )
        return self._order[parameter]

    def _refuse_beyond(self, at: int) -> None:
        if not 0 <= at <= self.steps:
            raise QueryError(f"step {at} was asked for, but {self.path} holds 0 to {self.steps}")


def _raw(tensor: Tensor) -> bytes:
    flat = tensor.contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
