"""Creating a memory and adding segments to it: the writing half of the format.

Whoever calls `commit` has handed over whole steps; when it returns they are on disk for good. The
manifest is rebuilt from what the recorder says of itself at that moment and from the list of
segments and snapshots kept here.
"""

from __future__ import annotations

import json
import platform
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dualform.errors import RecordingError
from dualform.memory import files
from dualform.memory.files import TensorBytes, tensor_bytes, write_manifest, write_tensor_file

Array = NDArray[Any]


@dataclass
class SegmentContent:
    """Whole steps, ready to be written. `tables` are shared by layers whose rows are alike."""

    first_step: int
    steps: int
    patterns: list[TensorBytes]
    rows: dict[str, int]
    table_of: dict[str, int]
    tables: list[dict[str, Array]]
    log: dict[str, Array]
    fingerprints: dict[str, Array]
    momentum_fingerprints: dict[str, Array]
    strings: dict[str, list[str]] = field(default_factory=dict)
    gradients: dict[str, tuple[list[int], list[Tensor]]] = field(default_factory=dict)
    buffers: dict[str, tuple[list[int], list[Tensor]]] = field(default_factory=dict)
    learned: dict[str, Tensor] = field(default_factory=dict)

    def tensors(self) -> list[TensorBytes]:
        small: dict[str, Array | Tensor] = {}
        for index, table in enumerate(self.tables):
            small |= {f"patterns/{index}/{name}": values for name, values in table.items()}
        small |= {f"log/{name}": values for name, values in self.log.items()}
        small |= {f"fingerprints/{name}": v for name, v in self.fingerprints.items()}
        small |= {f"momentum_fingerprints/{n}": v for n, v in self.momentum_fingerprints.items()}
        small |= {f"learned/{name}": value for name, value in self.learned.items()}
        for name, strings in self.strings.items():
            small[f"strings/{name}"] = np.frombuffer(json.dumps(strings).encode(), np.uint8).copy()
        for kind, events in (("gradients", self.gradients), ("buffers", self.buffers)):
            for name, (steps, values) in events.items():
                small[f"{kind}/{name}/step"] = np.array(steps, np.int64)
                small[f"{kind}/{name}/value"] = torch.stack(values)
        return [*(tensor_bytes(name, value) for name, value in small.items()), *self.patterns]

    def metadata(self) -> dict[str, Any]:
        layers = {n: {"rows": r, "table": self.table_of[n]} for n, r in self.rows.items()}
        return {"first_step": self.first_step, "steps": self.steps, "layers": layers}


def environment() -> dict[str, str]:
    """What a run was recorded with, for the manifest."""
    from dualform import __version__

    return {
        "dualform": __version__,
        "torch": torch.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
        "platform": sys.platform,
    }


class MemoryWriter:
    """One memory being written. Not thread-safe: the sink calls it from one thread at a time."""

    def __init__(self, path: Path, *, overwrite: bool) -> None:
        self.path = path
        _claim(path, overwrite=overwrite)
        self.lock = files.WriterLock(path)
        try:
            if overwrite:
                _clear(path)
            (path / files.SEGMENTS).mkdir(exist_ok=True)
            self.progress = files.Progress(path)
        except BaseException:
            self.lock.release()
            raise
        self.committed_steps = 0
        self._segments: list[dict[str, Any]] = []
        self._snapshots: list[dict[str, Any]] = []
        self._initial: dict[str, Any] = {}

    def begin(self, initial: Mapping[str, Tensor | Array], description: dict[str, Any]) -> None:
        """Write the initial state and the first, empty commit."""
        tensors = [tensor_bytes(name, value) for name, value in initial.items()]
        written = write_tensor_file(self.path / files.INITIAL, tensors, {}, direct=False)
        self._initial = written.to_json()
        self._write_manifest(description, closed=False)

    def commit(self, content: SegmentContent, description: dict[str, Any]) -> None:
        """Write a segment and make it part of the memory."""
        name = f"{len(self._segments):06d}.safetensors"
        directory = self.path / files.SEGMENTS
        written = write_tensor_file(directory / name, content.tensors(), content.metadata())
        files.sync_directory(directory)
        self._segments.append(
            written.to_json() | {"first_step": content.first_step, "steps": content.steps}
        )
        self.committed_steps += content.steps
        self._write_manifest(description, closed=False)

    def keep_snapshot(self, step: int, weights: Mapping[str, Tensor]) -> None:
        """Write all weights of a step beside the segments; named by the next commit."""
        directory = self.path / files.SNAPSHOTS
        directory.mkdir(exist_ok=True)
        tensors = [tensor_bytes(f"parameters/{name}", value) for name, value in weights.items()]
        path = directory / f"{step:09d}.safetensors"
        written = write_tensor_file(path, tensors, {"step": step}, direct=False)
        self._snapshots.append(written.to_json() | {"step": step})

    def end(self, description: dict[str, Any], *, closed: bool) -> None:
        """The last commit; `closed` says that the recording ended normally."""
        self._write_manifest(description, closed=closed)

    def release(self) -> None:
        self.progress.close()
        self.lock.release()

    def _write_manifest(self, description: dict[str, Any], *, closed: bool) -> None:
        manifest = description | {
            "format": files.FORMAT,
            "schema": files.SCHEMA,
            "closed": closed,
            "steps": self.committed_steps,
            "initial": self._initial,
            "segments": self._segments,
            "snapshots": self._snapshots,
        }
        write_manifest(self.path, manifest)


def _claim(path: Path, *, overwrite: bool) -> None:
    """Make sure the directory is there and is ours to write to; touch nothing in it."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        names = {entry.name for entry in path.iterdir()}
    except OSError as error:
        raise RecordingError(
            f"{path} cannot be used as the directory of a memory: {error.strerror}"
        ) from error
    foreign = _foreign(names)
    if foreign:
        raise RecordingError(
            f"{path} holds files that are not a memory's ({', '.join(sorted(foreign)[:5])}); nothing "
            "was touched. Choose an empty or a new directory"
        )
    if files.MANIFEST in names and not overwrite:
        raise RecordingError(
            f"{path} already holds a recorded memory; nothing was touched. Choose another path, or "
            "pass overwrite=True to delete that memory and record anew"
        )


def _foreign(names: Sequence[str] | set[str]) -> set[str]:
    return set(names) - files.OWN_NAMES


def _clear(path: Path) -> None:
    """Delete an earlier memory; the manifest goes first, so that no half of it looks whole."""
    (path / files.MANIFEST).unlink(missing_ok=True)
    files.sync_directory(path)
    for name in (files.SEGMENTS, files.SNAPSHOTS):
        shutil.rmtree(path / name, ignore_errors=True)
    for name in (files.INITIAL, files.PROGRESS, files.MANIFEST + ".tmp"):
        (path / name).unlink(missing_ok=True)
