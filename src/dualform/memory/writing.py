"""Creating a memory, or reopening one, and adding segments to it: the writing half of the format.

Whoever calls `commit` has handed over whole steps; when it returns they are on disk for good. The
manifest is rebuilt from what the recorder says of itself at that moment and from the list of
segments and snapshots kept here. `rewinding.py` says what is left of a memory that is cut back.
"""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dualform.errors import RecordingError
from dualform.memory import files
from dualform.memory.fingerprint import STATE_FINGERPRINTS
from dualform.memory.liveness import PROGRESS, Progress, WriterLock
from dualform.memory.rewinding import Remainder
from dualform.memory.tensor_files import (
    TensorBytes,
    stacked_bytes,
    tensor_bytes,
    write_tensor_file,
)
from dualform.version import __version__

Array = NDArray[Any]


@dataclass
class SegmentContent:
    """Whole steps, ready to be written. `tables` are shared by layers whose rows are alike.

    There may be no step at all: then it carries `sums` that the segment before does not have.
    """

    first_step: int
    steps: int
    patterns: list[TensorBytes]
    rows: dict[str, int]
    table_of: dict[str, int]
    tables: list[dict[str, Array]]
    log: dict[str, Array]
    fingerprint_steps: Array
    fingerprints: dict[str, Array]
    momentum_fingerprints: dict[str, Array]
    state_fingerprints: dict[str, Array] = field(default_factory=dict)
    """Of what else an adaptive optimizer remembers: STATE/NAME."""
    strings: dict[str, list[str]] = field(default_factory=dict)
    gradients: dict[str, tuple[list[int], list[Tensor]]] = field(default_factory=dict)
    buffers: dict[str, tuple[list[int], list[Tensor]]] = field(default_factory=dict)
    states: dict[str, tuple[list[int], list[Tensor]]] = field(default_factory=dict)
    sums: dict[str, Tensor] = field(default_factory=dict)
    """Learned and unrecorded parts after the last step, under the names they are stored by."""

    def tensors(self) -> list[TensorBytes]:
        small: dict[str, Array | Tensor] = {}
        for index, table in enumerate(self.tables):
            small |= {f"patterns/{index}/{name}": narrowest(v) for name, v in table.items()}
        small |= {f"log/{name}": values for name, values in self.log.items()}
        small["fingerprint_steps"] = self.fingerprint_steps
        small |= {f"fingerprints/{name}": v for name, v in self.fingerprints.items()}
        small |= {f"momentum_fingerprints/{n}": v for n, v in self.momentum_fingerprints.items()}
        small |= {f"{STATE_FINGERPRINTS}/{n}": v for n, v in self.state_fingerprints.items()}
        small |= self.sums
        for name, strings in self.strings.items():
            small[f"strings/{name}"] = np.frombuffer(json.dumps(strings).encode(), np.uint8).copy()
        written = [tensor_bytes(name, value) for name, value in small.items()]
        kinds = {"gradients": self.gradients, "buffers": self.buffers, "states": self.states}
        for kind, events in kinds.items():
            for name, (steps, values) in events.items():
                written.append(tensor_bytes(f"{kind}/{name}/step", np.array(steps, np.int64)))
                written.append(stacked_bytes(f"{kind}/{name}/value", values))
        return [*written, *self.patterns]

    def metadata(self) -> dict[str, Any]:
        layers = {n: {"rows": r, "table": self.table_of[n]} for n, r in self.rows.items()}
        return {"first_step": self.first_step, "steps": self.steps, "layers": layers}


def narrowest(values: Array) -> Array:
    """A column in the smallest signed integers that hold it; floats as they are.

    A memory has many columns that count to ten, and as many rows as patterns.
    """
    if values.dtype.kind != "i" or not values.size:
        return values
    low, high = values.min(), values.max()
    for dtype in (np.int8, np.int16, np.int32):
        if np.iinfo(dtype).min <= low and high <= np.iinfo(dtype).max:
            return values.astype(dtype)
    return values


def environment() -> dict[str, str]:
    """What a run was recorded with, for the manifest."""
    return {
        "dualform": __version__,
        "torch": torch.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
        "platform": sys.platform,
    }


class MemoryWriter:
    """One memory being written. Not thread-safe: the sink calls it from one thread at a time.

    With `resume` the memory that is there is only locked; `rewind` then takes it up.
    """

    def __init__(self, path: Path, *, overwrite: bool = False, resume: bool = False) -> None:
        self.path = path
        with refusing(path):
            path.mkdir(parents=True, exist_ok=True)
            _claim(path, overwrite=overwrite or resume)
            self.lock = WriterLock(path)
        try:
            with refusing(path):
                # once more: another recorder may have come and gone
                _claim(path, overwrite=overwrite or resume)
                if not resume:
                    clear_directory(path)
                    (path / files.SEGMENTS).mkdir(exist_ok=True)
                self.progress = Progress(path, None if resume else 0)
        except BaseException:
            self.lock.release()
            raise
        self.committed_steps = 0
        self._next_segment = 0
        self._segments: list[dict[str, Any]] = []
        self._snapshots: list[dict[str, Any]] = []
        self._initial: dict[str, Any] = {}
        self._description: dict[str, Any] = {}

    def begin(self, initial: Mapping[str, Tensor | Array], description: dict[str, Any]) -> None:
        """Write the initial state and the first, empty commit."""
        tensors = [tensor_bytes(name, value) for name, value in initial.items()]
        with refusing(self.path):
            written = write_tensor_file(self.path / files.INITIAL, tensors, {}, direct=False)
            self._initial = written.to_json()
            self._write_manifest(description, closed=False)

    def rewind(self, left: Remainder, description: dict[str, Any]) -> None:
        """Take up the memory that is there, cut back to what is left of it.

        The order makes it safe to die at any point: first the new file that ends at the cut, then
        the manifest that names it in place of others, and only then are those taken away.
        """
        directory = self.path / files.SEGMENTS
        with refusing(self.path):
            directory.mkdir(exist_ok=True)
            numbers = [int(f.stem) for f in _numbered(self.path) if f.parent == directory]
            self._next_segment = 1 + max(numbers, default=-1)
            self._initial, self._snapshots = left.initial, left.snapshots
            self._segments = list(left.segments)
            if left.cut is not None:
                self._segments.append(
                    self._write_segment(left.cut.tensors, left.cut.metadata)
                    | {"rows": left.cut.rows}
                )
            self.committed_steps = left.step
            self._write_manifest(description, closed=False)
            named = {files.SEGMENTS: self._segments, files.SNAPSHOTS: self._snapshots}
            for file in _numbered(self.path):
                if all(file.name != entry["file"] for entry in named[file.parent.name]):
                    file.unlink()
            self.progress.close()
            self.progress = Progress(self.path, left.step)

    def commit(self, content: SegmentContent, description: dict[str, Any]) -> None:
        """Write a segment and make it part of the memory."""
        entry = self._write_segment(content.tensors(), content.metadata()) | {"rows": content.rows}
        self._write_manifest(description, closed=False, segment=entry)
        self._segments.append(entry)
        self.committed_steps += content.steps

    def _write_segment(
        self, tensors: Sequence[TensorBytes], metadata: dict[str, Any]
    ) -> dict[str, Any]:
        """Write a segment's file under a name that no other has; the manifest's entry."""
        directory = self.path / files.SEGMENTS
        name = f"{self._next_segment:06d}.safetensors"
        written = write_tensor_file(directory / name, tensors, metadata)
        files.sync_directory(directory)
        self._next_segment += 1
        return written.to_json() | {k: metadata[k] for k in ("first_step", "steps")}

    def keep_snapshot(self, step: int, weights: Mapping[str, Tensor]) -> None:
        """Write all weights of a step beside the segments; named by the next commit."""
        directory = self.path / files.SNAPSHOTS
        directory.mkdir(exist_ok=True)
        tensors = [tensor_bytes(f"parameters/{name}", value) for name, value in weights.items()]
        path = directory / f"{step:09d}.safetensors"
        written = write_tensor_file(path, tensors, {"step": step}, direct=False)
        files.sync_directory(directory)
        self._snapshots = [s for s in self._snapshots if s["step"] != step]
        self._snapshots.append(written.to_json() | {"step": step})

    def end(self, description: dict[str, Any], *, closed: bool) -> None:
        """The last commit; `closed` says that the recording ended normally."""
        with refusing(self.path):
            self._write_manifest(description, closed=closed)

    def give_up(self, remark: str) -> None:
        """Say in the memory why it ends at its last commit."""
        remarks = [*self._description.get("remarks", []), remark]
        self._write_manifest(self._description | {"remarks": remarks}, closed=False)

    def release(self) -> None:
        """Let go of the directory. May be called again."""
        self.progress.close()
        self.lock.release()

    def _write_manifest(
        self,
        description: dict[str, Any],
        *,
        closed: bool,
        segment: dict[str, Any] | None = None,
    ) -> None:
        manifest = description | {
            "format": files.FORMAT,
            "schema": files.SCHEMA,
            "closed": closed,
            "steps": self.committed_steps + (segment["steps"] if segment else 0),
            "initial": self._initial,
            "segments": [*self._segments, segment] if segment else self._segments,
            "snapshots": self._snapshots,
        }
        files.write_manifest(self.path, manifest)
        self._description = description


@contextmanager
def refusing(path: Path) -> Iterator[None]:
    """A directory that cannot be written to is an error of recording that says so."""
    try:
        yield
    except OSError as error:
        raise RecordingError(
            f"{path} cannot be used as the directory of a memory: {error.strerror or error}. "
            "Choose a directory that can be written to, on a disk with space"
        ) from error


def _claim(path: Path, *, overwrite: bool) -> None:
    """Make sure the directory is ours to write to; touch nothing in it."""
    names = {entry.name for entry in path.iterdir()}
    foreign = sorted(_foreign(path, names))
    if foreign:
        raise RecordingError(
            f"{path} holds files that are not a memory's ({', '.join(foreign[:5])}); nothing was "
            "touched. Choose an empty or a new directory"
        )
    if overwrite:
        return
    if files.MANIFEST in names:
        raise RecordingError(
            f"{path} already holds a recorded memory; nothing was touched. Choose another path, "
            "pass resume=True to go on from the step your model is at, or overwrite=True to "
            "delete that memory and record anew"
        )
    if _numbered(path):
        raise RecordingError(
            f"{path} holds recorded segments, but the {files.MANIFEST} that explains them is gone; "
            "nothing was touched. Restore it, choose another path, or pass overwrite=True to "
            "delete them and record anew"
        )


def _foreign(path: Path, names: set[str]) -> Iterator[str]:
    """Whatever was not made by a recorder: no `overwrite` may ever delete it."""
    yield from names - files.OWN_NAMES
    manifest = path / files.MANIFEST
    if files.MANIFEST in names and not (
        manifest.is_file() and files.FORMAT.encode() in manifest.read_bytes()
    ):
        yield files.MANIFEST
    for name in {files.SEGMENTS, files.SNAPSHOTS} & names:
        if not (path / name).is_dir():
            yield name
            continue
        for entry in (path / name).iterdir():
            if not files.NUMBERED.fullmatch(entry.name) or entry.is_dir():
                yield f"{name}/{entry.name}"


def _numbered(path: Path) -> list[Path]:
    return [
        file
        for name in (files.SEGMENTS, files.SNAPSHOTS)
        if (path / name).is_dir()
        for file in (path / name).iterdir()
        if files.NUMBERED.fullmatch(file.name)
    ]


def clear_directory(path: Path) -> None:
    """Delete an earlier memory; the manifest goes first, so that no half of it looks whole."""
    (path / files.MANIFEST).unlink(missing_ok=True)
    files.sync_directory(path)
    for file in _numbered(path):
        file.unlink()
    for name in (files.INITIAL, PROGRESS, files.TEMPORARY):
        (path / name).unlink(missing_ok=True)
