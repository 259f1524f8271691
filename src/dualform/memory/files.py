"""The on-disk format, and only here: what a memory's directory holds, and its manifest.

    run/
      manifest.json                what the memory is, which segments are committed, their checksums
      initial.safetensors          parameters, buffers and momentum buffers when recording began
      segments/000000.safetensors  patterns, their columns, the log of the steps they belong to
      snapshots/000003000.safetensors   all weights now and then: a convenience, never needed
      progress                     the number of updates trained, kept current at every step
      writer.lock                  held by the recorder while it lives

Every tensor file is an ordinary safetensors file, readable without dualform (`tensor_files.py`
writes and reads them; `writing.py` and `segments.py` know what a segment's tensors mean; all of it
is told in docs/memory-format.md). A segment exists only once the manifest names it: the file is
written and synced first, then the manifest is replaced by an atomic rename. So a run killed at any
moment leaves a memory that ends at its last commit.

Nothing a manifest says is trusted: it is sealed by a checksum, every field is checked for what it
is, and a file name is only ever a plain number in a place known beforehand.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from pathlib import Path
from typing import Any

import numpy as np

from dualform.errors import MemoryFileError, RecordingError
from dualform.memory.checksums import crc32
from dualform.memory.liveness import LOCK, PROGRESS
from dualform.memory.tensor_files import TensorFile as TensorFile
from dualform.memory.tensor_files import WrittenFile

FORMAT = "dualform memory"
SCHEMA = 1

MANIFEST = "manifest.json"
TEMPORARY = MANIFEST + ".tmp"
INITIAL = "initial.safetensors"
SEGMENTS = "segments"
SNAPSHOTS = "snapshots"
OWN_NAMES = frozenset({MANIFEST, TEMPORARY, INITIAL, SEGMENTS, SNAPSHOTS, PROGRESS, LOCK})
NUMBERED = re.compile(r"[0-9]{6,18}\.safetensors", re.ASCII)
"""What files in `segments` and `snapshots` are called."""

URL = re.compile(r"[a-z][a-z0-9+.-]+:/", re.ASCII | re.IGNORECASE)
"""How an address begins, `s3://…`; one slash is left of two where it has been made a path."""

NO_VALUE = int(np.iinfo(np.int64).min)
"""What an integer column holds for a pattern that has no value there."""

WRONG = (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError, RecursionError)
"""What reading a field that is not what it should be can raise."""


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


def write_manifest(directory: Path, manifest: dict[str, Any]) -> None:
    """Replace the manifest atomically; what it names must already be on disk."""
    content = canonical(manifest)
    sealed = f'{{"crc32":{crc32(content)},"manifest":'.encode() + content + b"}\n"
    temporary = directory / TEMPORARY
    try:
        with open(temporary, "wb") as file:
            file.write(sealed)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, directory / MANIFEST)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    sync_directory(directory)


def read_manifest(directory: Path) -> dict[str, Any]:
    """The manifest of a memory, its seal checked; `MemoryFileError` for anything else."""
    path = directory / MANIFEST
    if not directory.is_dir():
        raise MemoryFileError(
            f"{directory} is {'not a directory' if directory.exists() else 'not there'}; expected "
            "the directory of a memory, as given to dualform.record"
        )
    if not path.exists():
        raise MemoryFileError(
            f"{directory} holds no {MANIFEST}: it is not a memory, or its recording died before "
            "the first commit and there is nothing in it to read"
        )
    if not path.is_file():
        raise MemoryFileError(f"{path} is not a file: {directory} is not a memory")
    try:
        sealed = json.loads(path.read_bytes())
        manifest = sealed.get("manifest") if isinstance(sealed, dict) else None
        sound = isinstance(manifest, dict) and crc32(canonical(manifest)) == sealed.get("crc32")
    except (OSError, ValueError, RecursionError) as error:
        raise MemoryFileError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise MemoryFileError(f"{path} is not the manifest of a dualform memory")
    schema = manifest.get("schema")
    if type(schema) is not int or schema != SCHEMA:
        environment = manifest.get("environment")
        writer = environment.get("dualform") if isinstance(environment, dict) else None
        raise MemoryFileError(
            f"{path} has schema version {schema!r}; this dualform reads version {SCHEMA}. Read it "
            f"with the version of dualform that wrote it ({writer or 'unknown'})"
            + ("" if sound else "; or it is damaged: it does not match its checksum as we know it")
        )
    if not sound:
        raise MemoryFileError(
            f"{path} is damaged: its content does not match its own checksum. Restore it from a "
            "copy; the segments themselves may be unharmed"
        )
    return manifest


def canonical(manifest: dict[str, Any]) -> bytes:
    """The text that the manifest's checksum and hash are taken of."""
    return json.dumps(manifest, separators=(",", ":"), sort_keys=True).encode()


def numbered_file(entry: Any) -> WrittenFile:
    """A manifest's entry for a segment or snapshot; its name is a number and nothing else."""
    written = WrittenFile.from_json(entry)
    if not NUMBERED.fullmatch(written.file):
        raise ValueError(f"{written.file!r} is not the name of a segment or snapshot")
    return written


def count(value: Any) -> int:
    """A number of things, from a manifest or a header."""
    if type(value) is not int or not 0 <= value < 1 << 62:
        raise ValueError(f"{value!r} is not a count")
    return value


def text(value: Any) -> str:
    if type(value) is not str:
        raise TypeError(f"{value!r} is not a text")
    return value
