"""What a reader holds: a recorded run, opened from its directory.

Nothing is loaded that is not asked for, nothing is executed, and nothing on disk is changed. A
memory may be opened while it is being recorded: it then ends at the last commit.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dualform.errors import MemoryFileError, QueryError
from dualform.layers import Layer
from dualform.learning_rules import ParameterLog, coefficients
from dualform.memory import files
from dualform.memory.files import TensorFile, WriterLock
from dualform.memory.layer import LayerMemory
from dualform.memory.patterns import Patterns
from dualform.memory.segments import Segment

Callback = Callable[[int, int], None]
"""Progress: called with (done, total)."""


@dataclass(frozen=True)
class Parameter:
    """A parameter of the recorded model and how its training is accounted for.

    `coverage` is "patterns" (every pattern known), "steps" (its gradient kept at every step),
    "accumulated" (its learned part kept every so many steps) or "untrained".
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    coverage: str
    layers: tuple[str, ...] = ()
    role: str | None = None
    eps: float = 0.0
    """The relative rounding of the arithmetic that made its gradients (autocast: a coarser one)."""
    accumulated_since: int | None = None

    @property
    def layer(self) -> str | None:
        """The layer that uses it (the first, where several share it)."""
        return self.layers[0] if self.layers else None


@dataclass(frozen=True)
class Buffer:
    """A buffer of the recorded model: "recorded" if training changed it, else "constant"."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    coverage: str


@dataclass(frozen=True)
class Fingerprint:
    """Float64 projections of every parameter (and momentum buffer) after `step` updates."""

    step: int
    values: Mapping[str, Tensor]
    momentum: Mapping[str, Tensor]


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
        try:
            self._read(manifest)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise MemoryFileError(
                f"{path / files.MANIFEST} does not describe a memory: {error!r}"
            ) from error

    @classmethod
    def open(cls, path: str | Path) -> Memory:
        """Open a memory for reading; `MemoryFileError` says what is wrong with anything else.

        Example:
            >>> memory = df.Memory.open("runs/digits")   # doctest: +SKIP
        """
        directory = Path(path)
        return cls(directory, files.read_manifest(directory))

    def _read(self, manifest: dict[str, Any]) -> None:
        self.steps = int(manifest["steps"])
        self.closed = bool(manifest["closed"])
        self.exact = bool(manifest["exact"])
        self.parameters: Mapping[str, Parameter] = {
            p["name"]: Parameter(
                p["name"],
                tuple(map(int, p["shape"])),
                _dtype(p["dtype"]),
                str(p["coverage"]),
                tuple(map(str, p["layers"])),
                p["role"],
                float(p["eps"]),
                p["accumulated_since"],
            )
            for p in manifest["parameters"]
        }
        self._order = {name: i for i, name in enumerate(self.parameters)}
        self.buffers: Mapping[str, Buffer] = {
            b["name"]: Buffer(
                b["name"], tuple(map(int, b["shape"])), _dtype(b["dtype"]), str(b["coverage"])
            )
            for b in manifest["buffers"]
        }
        self._kinds = {str(name): str(kind) for name, kind in manifest["columns"]}
        self._segments = [Segment(self.path, entry) for entry in manifest["segments"]]
        expected = 0
        for segment in self._segments:
            if segment.first_step != expected:
                raise ValueError(f"segment {segment.path.name} does not follow the one before")
            expected = segment.end
        if expected != self.steps:
            raise ValueError(f"the segments hold {expected} steps, not {self.steps}")
        self._initial = TensorFile(
            self.path / files.INITIAL, files.written_file(manifest["initial"], self.path)
        )
        for segment in self._segments:
            size = segment.path.stat().st_size if segment.path.exists() else -1
            if size != segment.written.bytes:
                segment.file  # noqa: B018  # opening it says what is wrong
        self._layers = {
            entry["name"]: (
                Layer(
                    str(entry["name"]),
                    str(entry["kind"]),
                    str(entry["weight"]),
                    entry["bias"],
                    int(entry["in_features"]),
                    int(entry["out_features"]),
                ),
                _dtype(entry["dtype"]),
            )
            for entry in manifest["layers"]
        }

    @property
    def layers(self) -> tuple[str, ...]:
        """The layers that have patterns, in the order the forward pass first used them."""
        return tuple(self._layers)

    def layer(self, name: str) -> LayerMemory:
        """One layer's keys, error signals and pattern columns.

        Example:
            >>> memory.layer("fc1").keys.shape   # doctest: +SKIP
            torch.Size([38400, 64])
        """
        if name not in self._layers:
            raise QueryError(
                f"there is no layer {name!r} in {self.path}; it has {', '.join(self.layers) or 'none'}"
            )
        return self._layer_memory(name)

    def _layer_memory(self, name: str) -> LayerMemory:
        if name not in self._opened:
            layer, dtype = self._layers[name]
            patterns = Patterns(
                name, self._segments, self._kinds, self._strings, self._values_anywhere
            )
            self._opened[name] = LayerMemory(layer, dtype, self._segments, patterns)
        return self._opened[name]

    @cached_property
    def _opened(self) -> dict[str, LayerMemory]:
        return {}

    @property
    def columns(self) -> tuple[str, ...]:
        """The pattern columns: `step`, then what was tagged, then position, microbatch and call."""
        return tuple(self._kinds)

    def _strings(self, column: str) -> list[str]:
        if column not in self._dictionaries:
            self._dictionaries[column] = [
                s for segment in self._segments for s in segment.strings(column)
            ]
        return self._dictionaries[column]

    @cached_property
    def _dictionaries(self) -> dict[str, list[str]]:
        return {}

    def _values_anywhere(self, column: str) -> set[Any]:
        return {v for name in self.layers for v in self.layer(name).patterns.values(column)}

    def log(self, parameter: str) -> ParameterLog:
        """What the optimizer did with a parameter at every step."""
        index = self._index(parameter)
        if parameter not in self._logs:
            parts = [segment.log(index) for segment in self._segments]
            names = ParameterLog.__dataclass_fields__
            empty = ParameterLog.constant(0)
            self._logs[parameter] = ParameterLog(
                **{n: np.concatenate([getattr(p, n) for p in [empty, *parts]]) for n in names}
            )
        return self._logs[parameter]

    @cached_property
    def _logs(self) -> dict[str, ParameterLog]:
        return {}

    def initial(self, parameter: str) -> Tensor:
        """The parameter when recording began, W_0."""
        self._index(parameter)
        return self._initial.tensor(f"parameters/{parameter}")

    def initial_momentum(self, parameter: str) -> Tensor | None:
        """The optimizer's momentum buffer when recording began, m_0; None if there was none."""
        self._index(parameter)
        name = f"momentum/{parameter}"
        return self._initial.tensor(name) if name in self._initial.names else None

    def step_gradients(self, parameter: str) -> Iterator[tuple[int, Tensor]]:
        """(step, gradient as applied) of a parameter covered step by step."""
        self._index(parameter)
        for segment in self._segments:
            yield from segment.events("gradients", parameter)

    def learned(self, parameter: str, at: int) -> Tensor:
        """The learned part of a parameter without patterns after `at` updates, in float64."""
        self._index(parameter)
        since = self.parameters[parameter].accumulated_since
        if since is None or at <= since:
            return self._summed(parameter, at)
        known = self.learned_steps(parameter)
        if at not in known:
            near = sorted(known, key=lambda s: abs(s - at))[:2]
            raise QueryError(
                f"{parameter!r} is accounted for in accumulated form, which is kept only now and "
                f"then: step {at} is not among them, the nearest are {sorted(near)}. Ask for one of "
                "those, or record with a larger step_budget to keep every step"
            )
        return known[at].file.tensor(f"learned/{parameter}")

    def _summed(self, parameter: str, at: int) -> Tensor:
        """The learned part from the gradients kept step by step."""
        coefficient = coefficients(self.log(parameter), at).steps
        total = torch.zeros(self.parameters[parameter].shape, dtype=torch.float64)
        for step, gradient in self.step_gradients(parameter):
            if step < at:
                total += float(coefficient[step]) * gradient.double()
        return total

    def learned_steps(self, parameter: str) -> dict[int, Segment]:
        """The steps at which an accumulated parameter's learned part is kept."""
        name = f"learned/{parameter}"
        return {s.end: s for s in self._segments if name in s.file.names}

    def buffer(self, name: str, at: int | None = None) -> Tensor:
        """A buffer's value after `at` updates (default: the last recorded one)."""
        if name not in self.buffers:
            raise QueryError(f"there is no buffer {name!r}; there are {', '.join(self.buffers)}")
        limit = self.steps if at is None else at
        value = self._initial.tensor(f"buffers/{name}")
        for segment in self._segments:
            if segment.first_step >= limit:
                break
            for step, changed in segment.events("buffers", name):
                if step < limit:
                    value = changed
        return value

    @property
    def snapshot_steps(self) -> tuple[int, ...]:
        """The steps whose full weights are kept (the files may be deleted without harm)."""
        return tuple(sorted(self._snapshots))

    @property
    def _snapshots(self) -> dict[int, TensorFile]:
        entries = {int(e["step"]): e for e in self._manifest.get("snapshots", [])}
        paths = {s: self.path / files.SNAPSHOTS / str(e["file"]) for s, e in entries.items()}
        return {
            step: TensorFile(path, files.written_file(entries[step], self.path))
            for step, path in paths.items()
            if path.exists()
        }

    def snapshot(self, step: int) -> dict[str, Tensor]:
        """Every parameter as it was after `step` updates, where a snapshot was kept."""
        if step not in self._snapshots:
            raise QueryError(f"no snapshot of step {step}; there are {list(self.snapshot_steps)}")
        file = self._snapshots[step]
        return {name: file.tensor(f"parameters/{name}") for name in self.parameters}

    @cached_property
    def fingerprints(self) -> tuple[Fingerprint, ...]:
        """What every parameter looked like at every commit, as float64 projections."""
        return tuple(
            Fingerprint(
                segment.end,
                self._projections(segment, "fingerprints"),
                self._projections(segment, "momentum_fingerprints"),
            )
            for segment in self._segments
        )

    def _projections(self, segment: Segment, kind: str) -> dict[str, Tensor]:
        return {
            name: segment.file.tensor(f"{kind}/{name}")
            for name in self.parameters
            if f"{kind}/{name}" in segment.file.names
        }

    def probe(self, parameter: str) -> Tensor:
        """The random direction v of a parameter's fingerprint W v, float64."""
        self._index(parameter)
        return self._initial.tensor(f"probes/{parameter}")

    def sketch(self, parameter: str) -> Tensor:
        """The random direction u of a parameter's audit projection u·(G v), float64."""
        self._index(parameter)
        return self._initial.tensor(f"sketches/{parameter}")

    def audit_projections(self, parameter: str) -> NDArray[np.float64]:
        """u·(gradient v) of every step, as seen in training just before the optimizer's step."""
        index = self._index(parameter)
        parts = [s.file.array("log/projection")[:, index] for s in self._segments]
        return np.concatenate([np.empty(0), *parts])

    @cached_property
    def hashes(self) -> dict[str, str]:
        """SHA-256 of the initial state and of the optimizer's log."""
        initial = hashlib.sha256()
        for name in sorted(self._initial.names):
            initial.update(name.encode())
            initial.update(_raw(self._initial.tensor(name)))
        log = hashlib.sha256()
        for segment in self._segments:
            for name in sorted(n for n in segment.file.names if n.startswith("log/")):
                log.update(name.encode())
                log.update(_raw(segment.file.tensor(name)))
        return {"initial": initial.hexdigest(), "log": log.hexdigest()}

    @property
    def remarks(self) -> tuple[str, ...]:
        """Sentences about what is missing, dropped or not explained; empty if all is well."""
        remarks = [str(r) for r in self._manifest.get("remarks", [])]
        if self.closed:
            return tuple(remarks)
        if self.is_being_recorded:
            return (*remarks, f"still being recorded; {self.steps} steps are committed")
        trained = files.Progress.read(self.path)
        lost = 0 if trained is None else max(0, trained - self.steps)
        what = f"the {lost} steps after them are lost" if lost else "nothing after them was trained"
        return (
            *remarks,
            f"the recording did not end normally: {self.steps} steps are committed, {what}",
        )

    @property
    def is_being_recorded(self) -> bool:
        """Whether a recorder is writing to this memory now."""
        return not self.closed and WriterLock.is_held(self.path)

    @property
    def environment(self) -> dict[str, Any]:
        """Versions, platform, optimizer: what the run was recorded with."""
        return dict(self._manifest.get("environment", {}))

    @property
    def bytes_on_disk(self) -> int:
        """The size of everything this memory keeps on disk."""
        return sum(f.stat().st_size for f in self.path.rglob("*") if f.is_file())

    def check(self, progress: Callback | None = None) -> None:
        """Read every byte and compare it with its checksum; `MemoryFileError` says where it differs."""
        all_files = [self._initial, *(s.file for s in self._segments)]
        for done, file in enumerate(all_files):
            if progress is not None:
                progress(done, len(all_files))
            file.check()
        if progress is not None:
            progress(len(all_files), len(all_files))

    def refresh(self) -> Memory:
        """The same memory with everything committed since; this object stays as it is."""
        return Memory.open(self.path)

    def __repr__(self) -> str:
        state = "" if self.closed else ", not closed"
        return f"Memory({str(self.path)!r}: {self.steps} steps, layers {', '.join(self.layers)}{state})"

    def _index(self, parameter: str) -> int:
        if parameter not in self._order:
            raise QueryError(
                f"there is no parameter {parameter!r}; there are {', '.join(self.parameters)}"
            )
        return self._order[parameter]


def _dtype(name: Any) -> torch.dtype:
    dtype = getattr(torch, str(name), None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"unknown dtype {name!r}")
    return dtype


def _raw(tensor: Tensor) -> bytes:
    flat = tensor.contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
