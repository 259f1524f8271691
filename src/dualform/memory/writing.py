"""Creating a memory, or reopening one, and adding segments to it: the writing half of the format.

`commit` is handed whole steps; when it returns they are on disk for good. Nothing is written twice:
a segment is a file and a line, and the manifest is written when recording begins, is resumed or
ends. `rewind` cuts a memory back to an earlier step, in an order that is safe to die in.

Why it is hard: any of these acts may fail or be cut off half way, by a full disk, Ctrl-C or the
end of the process, and what is there afterwards must be a sound memory, for the next commit too.
"""

from __future__ import annotations

import contextlib
import os
import platform
import secrets
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dualform.errors import RecordingError
from dualform.memory import files
from dualform.memory.checksums import crc32
from dualform.memory.content import SegmentContent
from dualform.memory.fields import seal
from dualform.memory.files import LINES, MANIFEST, NUMBERED, SEGMENTS, TEMPORARY
from dualform.memory.liveness import PROGRESS, Progress, WriterLock
from dualform.memory.opened import OpenedMemory
from dualform.memory.rewriting import content_of
from dualform.memory.tensor_files import write_tensor_file
from dualform.version import __version__


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
    """One memory being written. Not thread-safe: one thread at a time calls it.

    With `resume` the memory that is there is only locked; `rewind` then takes it up. `begin` is to
    be called in either case, and before the first commit.
    """

    def __init__(self, path: Path, *, overwrite: bool = False, resume: bool = False) -> None:
        self.path = path
        with refusing(path):
            path.mkdir(parents=True, exist_ok=True)
            _claim(path, overwrite=overwrite or resume)
            self._lock = WriterLock(path)
        try:
            with refusing(path):
                # once more: another recorder may have come and gone
                _claim(path, overwrite=overwrite or resume)
                if not resume:
                    clear_directory(path)
                    (path / SEGMENTS).mkdir(exist_ok=True)
                    files.replace_file(path / LINES, b"")
                self.progress = Progress(path, None if resume else 0)
        except BaseException:
            self._lock.release()
            raise
        self.steps = 0
        """How many steps are committed."""
        self._manifest: dict[str, Any] = {"run": secrets.token_hex(8)}
        self._lines = _Lines(path / LINES, files.first_link(self._manifest))
        self._next_file = 0
        self._places: dict[str, int] = {}

    def begin(self, description: Mapping[str, Any], *, write: bool = True) -> None:
        """Say what the run is: every, stored, parameters, buffers, environment, phases, remarks.

        With `write=False` nothing can be opened before `end`: a copy is whole or not there.
        """
        places = {p["name"]: i for i, p in enumerate(description["parameters"])}
        if self._places not in ({}, places):
            raise RecordingError(
                f"{self.path} holds the log of other parameters than the model has now. Resume "
                "with the model it was recorded from, or record into a new path"
            )
        self._places = places
        described = {**description, "format": files.FORMAT, "schema": files.SCHEMA}
        self._manifest = {**described, "run": self._manifest["run"]}
        if write:
            self._write_manifest(closed=False)

    def commit(self, content: SegmentContent) -> None:
        """Write a segment and make it part of the memory."""
        if content.first_step != self.steps:
            raise RecordingError(
                f"steps from {content.first_step} on were to be added to {self.path}, which holds "
                f"{self.steps} steps. This is a mistake in dualform; please report it"
            )
        with refusing(self.path):
            self._lines.append(self._write_segment(content))
        self.steps += content.steps

    def _write_segment(self, content: SegmentContent) -> dict[str, Any]:
        """Write a segment's file under a name that no other has; return what its line says."""
        tensors, entry = content.packed(self._places)
        path = self.path / SEGMENTS / f"{self._next_file:06d}.safetensors"
        self._next_file += 1  # whatever happens: a name is used once
        about = {"format": files.FORMAT, "first_step": str(content.first_step)}
        blocks = write_tensor_file(path, tensors, about)
        files.sync_directory(path.parent)
        return entry | {"file": path.name, "blocks": blocks}

    def rewind(self, step: int) -> None:
        """Take up the memory that is there, cut back to the state after `step` updates.

        It is safe to die at any point: first the new file that ends at the cut, then a manifest
        that is not closed, then all lines anew in one rename; only then are other files deleted.
        """
        with refusing(self.path):
            memory = OpenedMemory(self.path)
            if not 0 <= step <= memory.steps:
                raise RecordingError(
                    f"{self.path} holds {memory.steps} steps and cannot go back to step {step}"
                )
            manifest, entries = memory.committed.manifest, memory.committed.entries
            self._manifest = dict(manifest)
            self._places = {name: p.index for name, p in memory.description.parameters.items()}
            self._next_file = 1 + max((int(f.stem) for f in _numbered(self.path)), default=-1)
            whole = sum(segment.end <= step for segment in memory.segments)
            entries = list(entries[:whole])
            if whole < len(memory.segments) and memory.segments[whole].first_step < step:
                content = content_of(memory, memory.segments[whole], stop=step)
                entries.append(self._write_segment(content))
            self._write_manifest(closed=False)
            self._lines.replace(entries, files.first_link(manifest))
            self.steps = step
            named = {entry["file"] for entry in entries}
            for file in _numbered(self.path):
                if file.name not in named:
                    file.unlink()
            self.progress.set(step)

    def end(self, *, closed: bool, remarks: Sequence[str] = ()) -> None:
        """Write the last manifest; `closed` says that the recording ended normally."""
        with refusing(self.path):
            self._manifest["remarks"] = [*self._manifest.get("remarks", []), *remarks]
            self._write_manifest(closed=closed)

    def give_up(self, remark: str) -> None:
        """Say in the memory why it ends at its last commit."""
        self.end(closed=False, remarks=[remark])

    def release(self) -> None:
        """Let go of the directory. May be called again."""
        self.progress.close()
        self._lock.release()

    def _write_manifest(self, *, closed: bool) -> None:
        counted = {"segments": self._lines.count, "steps": self.steps} if closed else {}
        kept = {k: v for k, v in self._manifest.items() if k not in ("segments", "steps", "closed")}
        self._manifest = kept | counted | {"closed": closed}
        files.write_manifest(self.path, self._manifest)


class _Lines:
    """The list of segments: lines are appended, each with the checksum of the one before it."""

    def __init__(self, path: Path, first: int) -> None:
        self._path, self._last = path, first
        self.count, self._length = 0, 0

    def append(self, entry: dict[str, Any]) -> None:
        """Add a line for good. What is cut off half way is taken away, now or before the next."""
        line = seal("segment", entry | {"after": self._last})
        flags = os.O_WRONLY | os.O_APPEND | getattr(os, "O_BINARY", 0)
        descriptor = os.open(self._path, flags)
        try:
            if os.fstat(descriptor).st_size != self._length:
                os.ftruncate(descriptor, self._length)
            try:
                rest = memoryview(line)
                while rest:
                    rest = rest[os.write(descriptor, rest) :]
                os.fsync(descriptor)
            except BaseException:
                with contextlib.suppress(OSError):
                    os.ftruncate(descriptor, self._length)
                raise
        finally:
            os.close(descriptor)
        self.count, self._length, self._last = self.count + 1, self._length + len(line), crc32(line)

    def replace(self, entries: Sequence[dict[str, Any]], first: int) -> None:
        """Put these lines in place of all, in one rename."""
        lines, last = [], first
        for entry in entries:
            lines.append(seal("segment", entry | {"after": last}))
            last = crc32(lines[-1])
        content = b"".join(lines)
        files.replace_file(self._path, content)
        self.count, self._length, self._last = len(lines), len(content), last


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
    if MANIFEST in names:
        raise RecordingError(
            f"{path} already holds a recorded memory; nothing was touched. Choose another path, "
            "pass resume=True to go on from the step your model is at, or overwrite=True to "
            "delete that memory and record anew"
        )
    if _numbered(path):
        raise RecordingError(
            f"{path} holds recorded segments, but the {MANIFEST} that explains them is gone; "
            "nothing was touched. Restore it, choose another path, or pass overwrite=True to "
            "delete them and record anew"
        )


def _foreign(path: Path, names: set[str]) -> Iterator[str]:
    """Find what was not made by a recorder: no `overwrite` may ever delete it."""
    yield from names - files.OWN_NAMES
    manifest = path / MANIFEST
    if MANIFEST in names and not (
        manifest.is_file() and files.FORMAT.encode() in manifest.read_bytes()
    ):
        yield MANIFEST
    if SEGMENTS in names and not (path / SEGMENTS).is_dir():
        yield SEGMENTS
    elif SEGMENTS in names:
        for entry in (path / SEGMENTS).iterdir():
            if not NUMBERED.fullmatch(entry.name) or entry.is_dir():
                yield f"{SEGMENTS}/{entry.name}"


def _numbered(path: Path) -> list[Path]:
    directory = path / SEGMENTS
    found = directory.iterdir() if directory.is_dir() else ()
    return [file for file in found if NUMBERED.fullmatch(file.name)]


def clear_directory(path: Path) -> None:
    """Delete an earlier memory; the manifest goes first, so that no half of it looks whole."""
    (path / MANIFEST).unlink(missing_ok=True)
    files.sync_directory(path)
    for file in _numbered(path):
        file.unlink()
    for name in (LINES, PROGRESS, MANIFEST + TEMPORARY, LINES + TEMPORARY):
        (path / name).unlink(missing_ok=True)
