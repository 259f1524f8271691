"""The on-disk format, and only here: what a memory's directory holds, and how it is committed.

    run/
      manifest.json                what the memory is; written at its begin, resume and close
      segments.jsonl               one sealed line per committed segment, only ever appended to
      segments/000000.safetensors  rows, columns, log, kept states of some steps
      progress                     the number of updates completed; locked by a living recorder

A segment exists only once its line does: the file is written and synced first, then the line is
appended and synced. So a run killed at any moment leaves a memory that ends at its last commit, and
a commit costs the same however long the run. A line that was being appended is torn: it has no end.
The checksum of every line goes on from that of the one before it, and the first from the run's own
number: a line that is missing, or of another memory, shows.

Why it is hard: a reader may come at any moment, between any two of a writer's acts. So the manifest
is read again after the lines, and both once more if it was replaced meanwhile.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dualform.errors import MemoryFileError, RecordingError
from dualform.memory.fields import WRONG, crc32, damaged, exactly, reading, unseal

FORMAT = "dualform memory"
SCHEMA = 2

MANIFEST = "manifest.json"
LINES = "segments.jsonl"
SEGMENTS = "segments"
TEMPORARY = ".tmp"
NEW = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
NUMBERED = re.compile(r"[0-9]{6,18}\.safetensors", re.ASCII)
"""What files in `segments` are called."""

URL = re.compile(r"[a-z][a-z0-9+.-]+:/", re.ASCII | re.IGNORECASE)
NO_VALUE = int(np.iinfo(np.int64).min)
"""What an integer column holds for a pattern that has no value there."""


class Committed(NamedTuple):
    """What a directory says of itself at one moment, by which bytes; whether a commit is torn."""

    manifest: dict[str, Any]
    entries: list[dict[str, Any]]
    is_torn: bool
    content: bytes


def local_path(path: str | os.PathLike[str]) -> Path:
    """Where a memory is to be written; `RecordingError` if that is an address, no directory."""
    if URL.match(os.fspath(path)):  # of s3://…, one slash is left where it has been made a path
        raise RecordingError(
            f"{os.fspath(path)} was given as the place of a memory, which looks like a URL; "
            "expected a directory on this machine. Write into one and copy it from there: a memory "
            "is ordinary files (a directory that is really called so has an absolute path)"
        )
    return Path(path)


def sync_directory(path: Path) -> None:
    """Make renames and new files in a directory survive a power cut."""
    with contextlib.suppress(OSError):  # some file systems cannot; the rename itself is atomic
        write_synced(path, os.O_RDONLY, [])


def replace_file(path: Path, content: bytes) -> None:
    """Put content in place of a file, atomically and for good."""
    temporary = path.with_name(path.name + TEMPORARY)
    write_synced(temporary, NEW, [content])
    os.replace(temporary, path)
    sync_directory(path.parent)


def write_synced(
    path: Path, flags: int, blocks: Iterable[bytes | memoryview]
) -> list[tuple[int, int]]:
    """Write blocks for good; return size and crc32 of each. A new file is whole or not there."""
    written = []
    try:
        descriptor = os.open(path, flags | getattr(os, "O_BINARY", 0), 0o644)
        try:
            for block in blocks:
                rest = memoryview(block)
                written.append((len(rest), crc32(rest)))
                while rest:
                    rest = rest[os.write(descriptor, rest) :]
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except BaseException:
        if flags & os.O_CREAT:
            with contextlib.suppress(OSError):
                path.unlink()
        raise
    return written


def first_link(manifest: dict[str, Any]) -> int:
    """What the checksum of a memory's first line goes on from."""
    return crc32(exactly(str, manifest["run"]).encode())


def read_committed(directory: Path) -> Committed:
    """What is committed in a directory; `MemoryFileError` for anything that is no sound memory."""
    content = _content(directory, MANIFEST)
    try:
        return _read_lines(directory, _manifest(directory / MANIFEST, content), content)
    except MemoryFileError:
        if _content(directory, MANIFEST) == content:
            raise
        return read_committed(directory)  # it was replaced meanwhile


def _content(directory: Path, name: str) -> bytes:
    try:
        return (directory / name).read_bytes()
    except OSError as error:
        why = f"holds no {name} that can be read: {error.strerror}"
        if not directory.is_dir():
            why = "is not there; expected the directory of a memory, as given to dualform.record"
        elif isinstance(error, FileNotFoundError):
            why = (
                f"holds no {name}: it is not a memory, or its recording died before the first "
                "commit and there is nothing in it to read"
            )
        raise MemoryFileError(f"{directory} {why}") from error


def _manifest(path: Path, content: bytes) -> dict[str, Any]:
    said = re.search(rb'"schema": ?([0-9]{1,9})\b', content)
    if FORMAT.encode() not in content or said is None:
        raise MemoryFileError(f"{path} is not the manifest of a dualform memory")
    if int(said[1]) != SCHEMA:
        raise MemoryFileError(
            f"{path} has schema version {int(said[1])}; this dualform reads version {SCHEMA}. "
            "Read it with the version of dualform that wrote it"
        )
    with reading(path):
        return unseal("manifest", content)[0]


def _read_lines(directory: Path, manifest: dict[str, Any], sealed: bytes) -> Committed:
    """Read all lines; the last may be torn, in a memory that was not closed."""
    path = directory / LINES
    *lines, torn = _content(directory, LINES).split(b"\n")
    entries: list[dict[str, Any]] = []
    with reading(directory / MANIFEST):
        last = first_link(manifest)
    for line in lines:
        with reading(f"line {len(entries) + 1} of {path}"):
            entry, last = unseal("segment", line + b"\n", last)
        entries.append(entry)
    with contextlib.suppress(*WRONG):
        unseal("segment", torn[:-1] + b"\n", last)  # no torn line has all but its last character
        raise damaged(f"line {len(entries) + 1} of {path}", "its end was changed")
    listed = manifest.get("segments")
    if manifest.get("closed") is not False and (torn or listed != len(entries)):
        raise MemoryFileError(
            f"{path} has {len(entries)} whole lines, but the memory was closed with "
            f"{listed!r:.50}: it was truncated or exchanged. Restore it from a copy"
        )
    whole = b"".join(line + b"\n" for line in lines)
    return Committed(manifest, entries, bool(torn), sealed + whole)
