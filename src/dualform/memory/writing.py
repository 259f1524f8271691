"""Creating a memory, or reopening one, and adding segments to it: the writing half of the format.

`commit` is handed whole steps; when it returns they are on disk for good. Nothing is written twice:
a segment is a file and a line, and the manifest is written when recording begins, is resumed or
ends. `rewind` cuts a memory back to an earlier step, in an order that is safe to die in.

Why it is hard: any of these acts may be cut off half way, by a full disk, Ctrl-C or the end of the
process, and what is there afterwards must be a sound memory, for the next commit too.
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
from dualform.memory.content import SegmentContent
from dualform.memory.fields import seal, unseal
from dualform.memory.files import LINES, MANIFEST, NUMBERED, SEGMENTS, TEMPORARY
from dualform.memory.liveness import PROGRESS, Progress
from dualform.memory.segments import OpenedMemory
from dualform.memory.tensor_files import write_tensor_file
from dualform.version import __version__

OWN = (MANIFEST + TEMPORARY, LINES, LINES + TEMPORARY)


def environment() -> dict[str, str]:
    """What a run was recorded with, for the manifest."""
    versions = {"dualform": __version__, "torch": torch.__version__, "numpy": np.__version__}
    return versions | {"python": platform.python_version(), "platform": sys.platform}


class MemoryWriter:
    """One memory being written, by one thread at a time. With `resume` the memory that is there is
    only locked; `rewind` then takes it up. `begin` is called in either case, before a commit."""

    def __init__(self, path: Path, *, overwrite: bool = False, resume: bool = False) -> None:
        self.path = path
        self.steps = 0
        """How many steps are committed."""
        self._manifest: dict[str, Any] = {"run": secrets.token_hex(8)}
        self._next_file = self._count = self._length = 0
        self._last = files.first_link(self._manifest)
        """How many lines there are, their bytes together, and the checksum of the last."""
        with refusing(path):
            path.mkdir(parents=True, exist_ok=True)
            _claim(path, overwrite=overwrite or resume)
            self.progress = Progress(path)
            try:
                _claim(path, overwrite=overwrite or resume)  # another may have come and gone
                if not resume:
                    clear_directory(path)
                    (path / SEGMENTS).mkdir(exist_ok=True)
                    files.replace_file(path / LINES, b"")
                    self.progress.set(0)
            except BaseException:
                self.progress.release()
                raise

    def begin(self, description: Mapping[str, Any], *, write: bool = True) -> None:
        """Say what the run is: every, stored, parameters, buffers, environment, phases, remarks;
        with `write=False` nothing can be opened before `end`: a copy is whole or not there."""
        known = [p["name"] for p in self._manifest.get("parameters", description["parameters"])]
        if known != [p["name"] for p in description["parameters"]]:
            raise RecordingError(
                f"{self.path} holds the log of other parameters than the model has now. Resume "
                "with the model it was recorded from, or record into a new path"
            )
        about = {"format": files.FORMAT, "schema": files.SCHEMA, "run": self._manifest["run"]}
        self._manifest = {**description, **about}
        if write:
            self._write_manifest(closed=False)

    def commit(self, content: SegmentContent) -> None:
        """Write a segment and make it part of the memory."""
        if content.first_step != self.steps:
            raise RecordingError(
                f"steps from {content.first_step} on were to be added to {self.path}, which holds "
                f"{self.steps} steps. This is a mistake in dualform; please report it"
            )
        try:
            self._append_line(self._write_segment(content))
        except OSError as error:
            raise RecordingError(
                f"writing to {self.path} failed: {error}. The {self.steps} steps committed before "
                "are safe and can be read; free some space or choose another disk, and try again"
            ) from error
        self.steps += content.steps

    def _write_segment(self, content: SegmentContent) -> dict[str, Any]:
        """Write a segment's file under a name that no other has; return what its line says."""
        tensors, entry = content.packed()
        path = self.path / SEGMENTS / f"{self._next_file:06d}.safetensors"
        self._next_file += 1  # whatever happens: a name is used once
        about = {"format": files.FORMAT, "first_step": str(content.first_step)}
        blocks = write_tensor_file(path, tensors, about)
        files.sync_directory(path.parent)
        return entry | {"file": path.name, "blocks": blocks}

    def rewind(self, step: int) -> None:
        """Take up the memory that is there, cut back to the state after `step` updates. It is safe
        to die at any point: first the new file that ends at the cut, then a manifest that is not
        closed, then all lines anew in one rename; only then are other files deleted."""
        with refusing(self.path):
            memory = OpenedMemory(self.path)
            if not 0 <= step <= memory.steps:
                raise RecordingError(
                    f"{self.path} holds {memory.steps} steps and cannot go back to step {step}"
                )
            self._manifest = dict(memory.committed.manifest)
            self._next_file = 1 + max((int(f.stem) for f in _numbered(self.path)), default=-1)
            whole = sum(segment.end <= step for segment in memory.segments)
            entries = memory.committed.entries[:whole]
            if whole < len(memory.segments) and memory.segments[whole].first_step < step:
                content = memory.content(memory.segments[whole], stop=step)
                entries.append(self._write_segment(content))
            self._write_manifest(closed=False)
            self._replace_lines(entries)
            self.steps = step
            for file in _numbered(self.path):
                if file.name not in {entry["file"] for entry in entries}:
                    file.unlink()
            self.progress.set(step)

    def end(self, *, closed: bool, remarks: Sequence[str] = ()) -> None:
        """Write the last manifest; `closed` says that the recording ended normally."""
        with refusing(self.path):
            self._manifest["remarks"] = [*self._manifest.get("remarks", []), *remarks]
            self._write_manifest(closed=closed)

    def release(self) -> None:
        """Let others write. May be called again."""
        self.progress.release()

    def _write_manifest(self, *, closed: bool) -> None:
        """What a closed memory holds is counted, so that a line that is missing is missed."""
        counted = {"segments": self._count, "steps": self.steps, "closed": closed}
        files.replace_file(self.path / MANIFEST, seal("manifest", self._manifest | counted))

    def _append_line(self, entry: dict[str, Any]) -> None:
        """Add a line for good. What is cut off half way is taken away, now or before the next."""
        path, line = self.path / LINES, seal("segment", entry, self._last)
        os.truncate(path, self._length)
        try:
            files.write_synced(path, os.O_WRONLY | os.O_APPEND, [line])
        except BaseException:
            with contextlib.suppress(OSError):
                os.truncate(path, self._length)
            raise
        self._count_line(line)

    def _replace_lines(self, entries: Sequence[dict[str, Any]]) -> None:
        """Put these lines in place of all, in one rename."""
        self._last, self._length, self._count = files.first_link(self._manifest), 0, 0
        lines = [self._count_line(seal("segment", entry, self._last)) for entry in entries]
        files.replace_file(self.path / LINES, b"".join(lines))

    def _count_line(self, line: bytes) -> bytes:
        self._last = unseal("segment", line, self._last)[1]
        self._length, self._count = self._length + len(line), self._count + 1
        return line


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
    """Make sure that all that is there is a recorder's, and may be deleted; touch nothing."""
    is_there = (path / MANIFEST).is_file()
    own = {path / SEGMENTS, path / PROGRESS, *(path / name for name in OWN), *_numbered(path)}
    if is_there and files.FORMAT.encode() in (path / MANIFEST).read_bytes():
        own.add(path / MANIFEST)
    if foreign := {*path.iterdir(), *path.glob(f"{SEGMENTS}/*")} - own:
        names = sorted(str(file.relative_to(path)) for file in foreign)
        raise RecordingError(
            f"{path} holds files that are not a memory's ({', '.join(names[:5])}); nothing was "
            "touched. Choose an empty or a new directory"
        )
    if not overwrite and (is_there or _numbered(path)):
        gone = "" if is_there else f", but its {MANIFEST} is gone: restore it, if you can"
        raise RecordingError(
            f"{path} already holds a recorded memory{gone}; nothing was touched. Choose another "
            "path, pass resume=True to go on from the step your model is at, or overwrite=True to "
            "delete that memory and record anew"
        )


def _numbered(path: Path) -> list[Path]:
    found = path.glob(f"{SEGMENTS}/*")
    return [file for file in found if NUMBERED.fullmatch(file.name) and file.is_file()]


def clear_directory(path: Path) -> None:
    """Delete an earlier memory; the manifest goes first, so that no half of it looks whole."""
    (path / MANIFEST).unlink(missing_ok=True)
    files.sync_directory(path)
    for file in (*_numbered(path), *(path / name for name in OWN)):
        file.unlink(missing_ok=True)
