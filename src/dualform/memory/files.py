"""The on-disk format, and only here: what a memory's directory holds, how it is written and read.

    run/
      manifest.json                what the memory is, which segments are committed, their checksums
      initial.safetensors          parameters, buffers and momentum buffers when recording began
      segments/000000.safetensors  patterns, their columns, the log of the steps they belong to
      snapshots/000003000.safetensors   all weights now and then: a convenience, never needed
      progress                     the number of updates trained, 8 bytes, kept current at every step
      writer.lock                  held by the recorder while it lives

Every tensor file is an ordinary safetensors file, readable without dualform. A segment exists only
once the manifest names it: the file is written and synced first, then the manifest is replaced by
an atomic rename. So a run killed at any moment leaves a memory that ends at its last commit.

Why it is hard: the bytes must reach the disk without costing the training loop, so the big tensors
start at page boundaries and can go straight from the recorder's buffers to the device (O_DIRECT),
past the page cache. safetensors allows no holes, so the gaps are named: tensors called `padding/…`.
"""

from __future__ import annotations

import contextlib
import errno
import json
import mmap
import os
import struct
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import torch
from torch import Tensor

from dualform.errors import MemoryFileError, RecordingError

try:
    import fcntl
except ImportError:  # not a POSIX system: two writers are then not told apart
    fcntl = None  # type: ignore[assignment]

FORMAT = "dualform memory"
SCHEMA = 1
PAGE = 4096
CHECKSUM_BLOCK = 4 << 20
"""Bytes per crc32: small enough to say where damage lies, few enough for the manifest."""

MANIFEST = "manifest.json"
INITIAL = "initial.safetensors"
SEGMENTS = "segments"
SNAPSHOTS = "snapshots"
PROGRESS = "progress"
LOCK = "writer.lock"
OWN_NAMES = frozenset({MANIFEST, MANIFEST + ".tmp", INITIAL, SEGMENTS, SNAPSHOTS, PROGRESS, LOCK})

NO_VALUE = np.iinfo(np.int64).min
"""What an integer column holds for a pattern that has no value there."""

DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


@dataclass(frozen=True)
class TensorBytes:
    """One tensor to be written: its name, type, shape and the memory it lies in.

    `aligned` says that the memory starts at a page boundary and owns its last page to the end, so
    that it can be written without a copy.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    data: memoryview
    aligned: bool = False

    @property
    def bytes(self) -> int:
        return self.data.nbytes


def tensor_bytes(name: str, value: Tensor | np.ndarray[Any, Any]) -> TensorBytes:
    """An ordinary (small) tensor or array to be written, copied to the CPU if it is not there."""
    tensor = (
        torch.from_numpy(np.ascontiguousarray(value)) if isinstance(value, np.ndarray) else value
    )
    tensor = tensor.detach().cpu().contiguous()
    raw = (
        tensor.reshape(-1).view(torch.uint8)
        if tensor.numel()
        else torch.empty(0, dtype=torch.uint8)
    )
    return TensorBytes(name, tensor.dtype, tuple(tensor.shape), memoryview(raw.numpy()))


@dataclass(frozen=True)
class WrittenFile:
    """A tensor file as the manifest names it."""

    file: str
    bytes: int
    crc32: tuple[int, ...]

    def to_json(self) -> dict[str, Any]:
        return {"file": self.file, "bytes": self.bytes, "crc32": list(self.crc32)}


class _Checksums:
    """crc32 of a byte stream, cut into blocks of `CHECKSUM_BLOCK`."""

    def __init__(self) -> None:
        self.done: list[int] = []
        self._crc = 0
        self._filled = 0

    def add(self, data: memoryview) -> None:
        start = 0
        while start < len(data):
            stop = min(len(data), start + CHECKSUM_BLOCK - self._filled)
            self._crc = zlib.crc32(data[start:stop], self._crc)
            self._filled += stop - start
            start = stop
            if self._filled == CHECKSUM_BLOCK:
                self.done.append(self._crc)
                self._crc, self._filled = 0, 0

    def finish(self) -> tuple[int, ...]:
        return (*self.done, self._crc) if self._filled else tuple(self.done)


def write_tensor_file(
    path: Path,
    tensors: Sequence[TensorBytes],
    metadata: dict[str, Any],
    *,
    direct: bool = True,
) -> WrittenFile:
    """Write a safetensors file in one go and sync it; `direct` asks for O_DIRECT where it helps.

    The small tensors come first, packed; then the page-aligned ones, written from where they lie.
    """
    small = sorted((t for t in tensors if not t.aligned), key=lambda t: -t.dtype.itemsize)
    large = [t for t in tensors if t.aligned]
    packed = bytearray().join(t.data.cast("B") for t in small)
    packed += bytes(-len(packed) % PAGE)
    header, chunks = _lay_out(small, large, packed, metadata)
    checksums = _Checksums()
    size = 0
    with _opened_for_writing(path, direct) as descriptor:
        for chunk in chunks(header):
            checksums.add(chunk)
            _write_all(descriptor, chunk)
            size += len(chunk)
        os.fsync(descriptor)
    return WrittenFile(path.name, size, checksums.finish())


def _lay_out(
    small: Sequence[TensorBytes],
    large: Sequence[TensorBytes],
    packed: bytearray,
    metadata: dict[str, Any],
) -> tuple[bytes, Callable[[bytes], Iterator[memoryview]]]:
    """The header, and the page-aligned pieces of the file in order."""
    entries: dict[str, Any] = {"__metadata__": {"dualform": json.dumps(metadata)}}
    position = 0

    def enter(name: str, dtype: str, shape: Sequence[int], size: int) -> None:
        nonlocal position
        entries[name] = {
            "dtype": dtype,
            "shape": list(shape),
            "data_offsets": [position, position + size],
        }
        position += size

    def pad(limit: int) -> None:
        if position < limit:
            enter(f"padding/{len(entries)}", "U8", [limit - position], limit - position)

    for tensor in small:
        enter(tensor.name, DTYPE_NAMES[tensor.dtype], tensor.shape, tensor.bytes)
    pad(len(packed))
    for tensor in large:
        enter(tensor.name, DTYPE_NAMES[tensor.dtype], tensor.shape, tensor.bytes)
        pad(position + -position % PAGE)
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % PAGE)
    header = struct.pack("<Q", len(text)) + text

    def chunks(header: bytes) -> Iterator[memoryview]:
        yield _page_aligned(header)
        if packed:
            yield _page_aligned(packed)
        for tensor in large:
            if tensor.bytes:
                yield _whole_pages(tensor)

    return header, chunks


def _page_aligned(data: bytes | bytearray) -> memoryview:
    """A copy of whole pages of bytes that starts at a page boundary."""
    area = mmap.mmap(-1, len(data))
    area[:] = bytes(data)
    return memoryview(area)


def _whole_pages(tensor: TensorBytes) -> memoryview:
    """The tensor's memory up to the end of its last page, the rest of that page zeroed."""
    size = tensor.bytes + -tensor.bytes % PAGE
    area = tensor.data.obj
    view = memoryview(area).cast("B")[:size]  # type: ignore[arg-type]
    view[tensor.bytes :] = bytes(size - tensor.bytes)
    return view


@contextlib.contextmanager
def _opened_for_writing(path: Path, direct: bool) -> Iterator[int]:
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | getattr(os, "O_CLOEXEC", 0)
    descriptor = -1
    if direct and hasattr(os, "O_DIRECT"):
        with contextlib.suppress(OSError):  # file systems without it (tmpfs, some networks)
            descriptor = os.open(path, flags | os.O_DIRECT, 0o644)
    if descriptor < 0:
        descriptor = os.open(path, flags, 0o644)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _write_all(descriptor: int, data: memoryview) -> None:
    while data:
        try:
            written = os.write(descriptor, data)
        except OSError as error:
            if error.errno != errno.EINVAL or fcntl is None:
                raise
            flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)  # a device with odd block sizes
            if not flags & getattr(os, "O_DIRECT", 0):
                raise
            fcntl.fcntl(descriptor, fcntl.F_SETFL, flags & ~os.O_DIRECT)
            continue
        data = data[written:]


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
    temporary = directory / (MANIFEST + ".tmp")
    content = json.dumps(manifest, separators=(",", ":"), sort_keys=True)
    sealed = json.dumps(
        {"manifest": manifest, "crc32": zlib.crc32(content.encode())}, sort_keys=True
    )
    with open(temporary, "w", encoding="utf-8") as file:
        file.write(sealed)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, directory / MANIFEST)
    sync_directory(directory)


def read_manifest(directory: Path) -> dict[str, Any]:
    """The manifest of a memory, checked; `MemoryFileError` for anything else."""
    path = directory / MANIFEST
    if not directory.is_dir():
        raise MemoryFileError(
            f"{directory} is {'not a directory' if directory.exists() else 'not there'}; expected "
            "the directory of a memory, as given to dualform.record"
        )
    try:
        sealed = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise MemoryFileError(
            f"{directory} holds no {MANIFEST}: it is not a memory, or its recording died before "
            "the first commit and there is nothing in it to read"
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise MemoryFileError(f"{path} cannot be read as JSON: {error}") from error
    manifest = sealed.get("manifest") if isinstance(sealed, dict) else None
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise MemoryFileError(f"{path} is not the manifest of a dualform memory")
    if manifest.get("schema") != SCHEMA:
        raise MemoryFileError(
            f"{path} has schema version {manifest.get('schema')!r}; this dualform reads version "
            f"{SCHEMA}. Read it with the version of dualform that wrote it "
            f"({manifest.get('environment', {}).get('dualform', 'unknown')})"
        )
    content = json.dumps(manifest, separators=(",", ":"), sort_keys=True)
    if zlib.crc32(content.encode()) != sealed.get("crc32"):
        raise MemoryFileError(f"{path} is damaged: its content does not match its own checksum")
    return manifest


class TensorFile:
    """A tensor file open for reading: tensors are mapped, not loaded, until they are touched."""

    def __init__(self, path: Path, expected: WrittenFile | None = None) -> None:
        self.path = path
        self.expected = expected
        try:
            size = path.stat().st_size
        except OSError as error:
            raise MemoryFileError(f"{path} cannot be opened: {error.strerror}") from error
        if expected is not None and size != expected.bytes:
            raise MemoryFileError(
                f"{path} is {size} bytes long, the manifest says {expected.bytes}: it was "
                f"{'truncated' if size < expected.bytes else 'changed'} after it was committed"
            )
        try:
            self._file = safetensors.safe_open(path, framework="pt", device="cpu")
            self._file.__enter__()
            metadata = json.loads((self._file.metadata() or {}).get("dualform", "{}"))
        except (safetensors.SafetensorError, OSError, ValueError, RecursionError) as error:
            raise MemoryFileError(f"{path} is damaged: {error}") from error
        self.metadata: dict[str, Any] = metadata if isinstance(metadata, dict) else {}
        self.names = frozenset(n for n in self._file.keys() if not n.startswith("padding/"))  # noqa: SIM118

    def tensor(self, name: str) -> Tensor:
        if name not in self.names:
            raise MemoryFileError(
                f"{self.path} holds no tensor {name!r}: it is not what it should be"
            )
        tensor: Tensor = self._file.get_tensor(name)
        return tensor

    def array(self, name: str) -> np.ndarray[Any, Any]:
        return self.tensor(name).numpy()

    def check(self) -> None:
        """Read every byte and compare with the manifest's checksums."""
        if self.expected is None:
            return
        with open(self.path, "rb") as file:
            for index, expected in enumerate(self.expected.crc32):
                if zlib.crc32(file.read(CHECKSUM_BLOCK)) != expected:
                    start = index * CHECKSUM_BLOCK
                    raise MemoryFileError(
                        f"{self.path} is damaged: bytes {start} to {start + CHECKSUM_BLOCK - 1} do "
                        f"not match their checksum ({self._tensors_at(start)}). Restore the file "
                        "from a copy; the other segments are unharmed"
                    )

    def _tensors_at(self, start: int) -> str:
        with open(self.path, "rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            try:
                entries = json.loads(file.read(min(length, 100_000_000)))
            except ValueError:
                return "the header"
        touched = [
            name
            for name, entry in entries.items()
            if not name.startswith(("__", "padding/"))
            and entry["data_offsets"][0] + 8 + length < start + CHECKSUM_BLOCK
            and entry["data_offsets"][1] + 8 + length > start
        ]
        return "tensors " + ", ".join(touched) if touched else "the header"


def written_file(entry: Any, path: Path) -> WrittenFile:
    """A manifest's entry for a file, checked for shape."""
    try:
        return WrittenFile(str(entry["file"]), int(entry["bytes"]), tuple(map(int, entry["crc32"])))
    except (KeyError, TypeError, ValueError) as error:
        raise MemoryFileError(
            f"{path} names a file without saying what it is: {entry!r}"
        ) from error


class WriterLock:
    """At most one recorder writes to a directory; a reader can tell whether one does.

    The operating system drops the lock when its process ends, however it ends.
    """

    def __init__(self, directory: Path) -> None:
        self._path = directory / LOCK
        self._descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o644)
        if fcntl is None:
            return
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._descriptor)
            raise RecordingError(
                f"{directory} is being recorded into by another process (or another recorder of "
                "this one); two writers would destroy it. End that one, or choose another path"
            ) from None

    def release(self) -> None:
        os.close(self._descriptor)

    @staticmethod
    def is_held(directory: Path) -> bool:
        if fcntl is None:
            return False
        try:
            descriptor = os.open(directory / LOCK, os.O_RDWR)
        except OSError:
            return False
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return True
        else:
            return False
        finally:
            os.close(descriptor)


class Progress:
    """The number of updates trained so far, in 8 bytes that outlive the process.

    Kept in a mapped page, so that counting costs nothing and a killed run can still say how many
    steps its last commit is missing.
    """

    def __init__(self, directory: Path) -> None:
        with open(directory / PROGRESS, "w+b") as file:
            file.write(bytes(8))
            file.flush()
            self._map = mmap.mmap(file.fileno(), 8)

    def set(self, steps: int) -> None:
        struct.pack_into("<q", self._map, 0, steps)

    def close(self) -> None:
        self._map.close()

    @staticmethod
    def read(directory: Path) -> int | None:
        try:
            data = (directory / PROGRESS).read_bytes()
        except OSError:
            return None
        return int(struct.unpack("<q", data)[0]) if len(data) == 8 else None
