"""The on-disk format, and only here: what a memory's directory holds, and how it is committed.

    run/
      manifest.json                what the memory is; written at its begin, resume and close
      segments.jsonl               one sealed line per committed segment, only ever appended to
      segments/000000.safetensors  rows, columns, log, kept states of some steps
      progress                     the number of updates completed, kept current at every step
      writer.lock                  held by the recorder while it lives

A segment exists only once its line does: the file is written and synced first, then the line is
appended and synced. So a run killed at any moment leaves a memory that ends at its last commit, and
a commit costs the same however long the run. A line that was being appended is torn; it is the last
one, and has no end. Every line holds the checksum of the one before it, and the first that of the
run's own number: a line that is missing, or of another memory, shows.

Why it is hard: a reader may come at any moment, between any two of a writer's acts. So the manifest
is read again after the lines, and both once more if it was replaced meanwhile.
"""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dualform.errors import MemoryFileError, RecordingError
from dualform.memory.checksums import crc32
from dualform.memory.fields import WRONG, exactly, seal, unseal
from dualform.memory.liveness import LOCK, PROGRESS

FORMAT = "dualform memory"
SCHEMA = 2

MANIFEST = "manifest.json"
LINES = "segments.jsonl"
SEGMENTS = "segments"
TEMPORARY = ".tmp"
OWN_NAMES = frozenset(
    {MANIFEST, MANIFEST + TEMPORARY, LINES, LINES + TEMPORARY, SEGMENTS, PROGRESS, LOCK}
)
NUMBERED = re.compile(r"[0-9]{6,18}\.safetensors", re.ASCII)
"""What files in `segments` are called."""

URL = re.compile(r"[a-z][a-z0-9+.-]+:/", re.ASCII | re.IGNORECASE)
"""How an address begins, `s3://…`; one slash is left of two where it has been made a path."""

NO_VALUE = int(np.iinfo(np.int64).min)
"""What an integer column holds for a pattern that has no value there."""

TRIES = 3


class Committed(NamedTuple):
    """What a directory says of itself at one moment: the manifest, the lines, what is torn."""

    manifest: dict[str, Any]
    entries: list[dict[str, Any]]
    torn: int
    """How many bytes follow the last whole line: a commit that was cut off."""
    content: bytes
    """The manifest and all whole lines, as they lie on disk."""


def local_path(path: str | os.PathLike[str]) -> Path:
    """Where a memory is to be written; `RecordingError` if that is an address, no directory."""
    if URL.match(os.fspath(path)):
        raise RecordingError(
            f"{os.fspath(path)} was given as the place of a memory, which looks like a URL; "
            "expected a directory on this machine. Write into one and copy it from there: a memory "
            "is ordinary files (a directory that is really called so has an absolute path)"
        )
    return Path(path)


def sync_directory(path: Path) -> None:
    """Make renames and new files in a directory survive a power cut."""
    with contextlib.suppress(OSError):  # some file systems cannot; the rename itself is atomic
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def replace_file(path: Path, content: bytes) -> None:
    """Put content in place of a file, atomically and for good."""
    temporary = path.with_name(path.name + TEMPORARY)
    try:
        with open(temporary, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    sync_directory(path.parent)


def write_manifest(directory: Path, manifest: dict[str, Any]) -> None:
    replace_file(directory / MANIFEST, seal("manifest", manifest))


def first_link(manifest: dict[str, Any]) -> int:
    """The checksum that a memory's first line holds."""
    return crc32(exactly(str, manifest["run"]).encode())


def read_committed(directory: Path) -> Committed:
    """What is committed in a directory; `MemoryFileError` for anything that is no sound memory."""
    for _ in range(TRIES):
        content = _content(directory, MANIFEST)
        try:
            return _read_lines(directory, _manifest(directory / MANIFEST, content), content)
        except MemoryFileError:
            if _content(directory, MANIFEST) == content:
                raise
    raise MemoryFileError(
        f"{directory} was rewritten again and again while it was read; expected a memory at rest. "
        "Open it again in a moment"
    )


def _content(directory: Path, name: str) -> bytes:
    path = directory / name
    if not directory.is_dir():
        raise MemoryFileError(
            f"{directory} is {'not a directory' if directory.exists() else 'not there'}; expected "
            "the directory of a memory, as given to dualform.record"
        )
    if not path.exists():
        raise MemoryFileError(
            f"{directory} holds no {name}: it is not a memory, or its recording died before "
            "the first commit and there is nothing in it to read"
        )
    try:
        return path.read_bytes()
    except OSError as error:
        raise MemoryFileError(f"{path} cannot be read: {error.strerror}") from error


def _manifest(path: Path, content: bytes) -> dict[str, Any]:
    if FORMAT.encode() not in content:
        raise MemoryFileError(f"{path} is not the manifest of a dualform memory")
    try:
        manifest = unseal("manifest", content)
        schema = manifest["schema"]
    except WRONG as error:
        said = re.search(rb'"schema": ?([0-9]{1,9})\b', content)
        schema = SCHEMA if said is None else int(said[1])
        if schema == SCHEMA:
            raise _damaged(path, error) from error
    if schema != SCHEMA or type(schema) is not int:
        raise MemoryFileError(
            f"{path} has schema version {schema!r:.50}; this dualform reads version {SCHEMA}. "
            "Read it with the version of dualform that wrote it"
        )
    return manifest


def _read_lines(directory: Path, manifest: dict[str, Any], sealed: bytes) -> Committed:
    """Read all lines; the last may be torn, in a memory that was not closed."""
    path, length = directory / LINES, 0
    content, entries = _content(directory, LINES), []
    try:
        last = first_link(manifest)
        while (end := content.find(b"\n", length) + 1) > 0:
            line = content[length:end]
            entry = unseal("segment", line)
            if entry["after"] != last:
                raise ValueError("it does not follow the line before it")
            entries.append(entry)
            length, last = end, crc32(line)
    except WRONG as error:
        raise _damaged(f"line {len(entries) + 1} of {path}", error) from error
    torn = content[length:]
    with contextlib.suppress(*WRONG):
        unseal("segment", torn[:-1] + b"\n")  # no torn line has all but its last character
        raise _damaged(f"line {len(entries) + 1} of {path}", "its end was changed")
    listed = manifest.get("segments")
    if manifest.get("closed") is not False and (torn or listed != len(entries)):
        raise MemoryFileError(
            f"{path} has {len(entries)} whole lines, but the memory was closed with "
            f"{listed!r:.50}: it was truncated or exchanged. Restore it from a copy"
        )
    return Committed(manifest, entries, len(torn), sealed + content[:length])


def _damaged(what: object, why: object) -> MemoryFileError:
    return MemoryFileError(
        f"{what} is damaged: {why}. Restore it from a copy; the segments themselves may be unharmed"
    )
