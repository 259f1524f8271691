"""Tensor files: ordinary safetensors files, written past the page cache and checked by blocks.

Why it is hard: the bytes must reach the disk without costing the training loop, so the big tensors
start at page boundaries and go straight from the recorder's buffers to the device (O_DIRECT), past
the page cache; everything else is copied through a small staging area. safetensors allows no holes,
so the gaps are named: tensors called `padding/…`.

A file is summed in consecutive blocks of at most 4 MiB, which never reach from one part into the
next: the header, the small tensors, then each big tensor. So damage can be pinned to a tensor, and
the list of checksums stays short.
"""

from __future__ import annotations

import contextlib
import errno
import json
import mmap
import os
import struct
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import torch
from numpy.typing import NDArray
from torch import Tensor

from dualform.errors import MemoryFileError, RecordingError
from dualform.memory.checksums import crc32

PAGE = 4096
CHECKSUM_BLOCK = 4 << 20
"""Most bytes per crc32: small enough to say where damage lies, few enough for the manifest."""

STAGING = 1 << 20
WIPE_ON_FORK = 18
"""Linux's MADV_WIPEONFORK, which the standard library does not name."""

PADDING = "padding/"
MARK = "dualform"
"""Our entry in a safetensors file's metadata: a JSON text."""

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
    torch.uint16: "U16",
    torch.uint32: "U32",
    torch.uint64: "U64",
    torch.bool: "BOOL",
}


@dataclass(frozen=True)
class TensorBytes:
    """One tensor to be written: its name, type, shape and the memory it lies in, piece by piece.

    `pages` is given by memory that starts at a page boundary and owns its last page to the end:
    those whole pages can be written from where they lie.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    pieces: Sequence[memoryview]
    pages: memoryview | None = None

    @property
    def bytes(self) -> int:
        return sum(piece.nbytes for piece in self.pieces)


def tensor_bytes(name: str, value: Tensor | NDArray[Any]) -> TensorBytes:
    """An ordinary tensor or array to be written."""
    tensor = _plain(name, value)
    return TensorBytes(name, tensor.dtype, tuple(tensor.shape), [_raw(tensor)])


def paged_bytes(name: str, value: Tensor | NDArray[Any]) -> TensorBytes:
    """A copy of a large tensor that begins at a page boundary, as O_DIRECT wants it."""
    packed = tensor_bytes(name, value)
    pages = memoryview(whole_pages(packed.bytes))[: packed.bytes + -packed.bytes % PAGE]
    pages[: packed.bytes] = packed.pieces[0]
    return replace(packed, pieces=[pages[: packed.bytes]], pages=pages)


def stacked_bytes(name: str, values: Sequence[Tensor]) -> TensorBytes:
    """Several tensors of one shape to be written as one, [n, …], without stacking them in RAM."""
    tensors = [_plain(name, value) for value in values]
    if len({(t.dtype, t.shape) for t in tensors}) != 1:
        seen = ", ".join(sorted({f"{t.dtype} {list(t.shape)}" for t in tensors}))
        raise RecordingError(f"{name}: its values changed type or shape during the run: {seen}")
    shape = (len(tensors), *tensors[0].shape)
    return TensorBytes(name, tensors[0].dtype, shape, [_raw(t) for t in tensors])


def _plain(name: str, value: Tensor | NDArray[Any]) -> Tensor:
    array = isinstance(value, np.ndarray)
    tensor = torch.from_numpy(np.ascontiguousarray(value)) if array else torch.as_tensor(value)
    tensor = tensor.detach().cpu()
    if tensor.is_complex():  # safetensors of every age know only real numbers: pairs of them
        tensor = torch.view_as_real(tensor.resolve_conj())
    if tensor.layout != torch.strided or tensor.dtype not in DTYPE_NAMES:
        raise RecordingError(
            f"{name}: a {tensor.layout} tensor of {tensor.dtype} cannot be kept in a memory; "
            "expected a dense tensor of floats, complex numbers, integers or booleans"
        )
    return tensor.reshape(value.shape).contiguous() if array else tensor.contiguous()


def _raw(tensor: Tensor) -> memoryview:
    """The memory a contiguous tensor lies in."""
    if not tensor.numel():
        return memoryview(b"")
    flat: Any = tensor.reshape(-1).view(torch.uint8).numpy()
    return memoryview(flat)


@dataclass(frozen=True)
class WrittenFile:
    """A tensor file as the manifest names it: blocks are (bytes, crc32), one after the other."""

    file: str
    blocks: tuple[tuple[int, int], ...]

    @property
    def bytes(self) -> int:
        return sum(size for size, _ in self.blocks)

    def to_json(self) -> dict[str, Any]:
        return {"file": self.file, "blocks": [list(block) for block in self.blocks]}

    @classmethod
    def from_json(cls, entry: Mapping[str, Any]) -> WrittenFile:
        """Read a manifest's entry; `ValueError` (or the like) for anything that is not one."""
        blocks = [(size, crc) for size, crc in entry["blocks"]]
        if not all(type(n) is int and n >= 0 for block in blocks for n in block):
            raise ValueError("the checksums of a file are not pairs of numbers")
        return cls(str(entry["file"]), tuple(blocks))


# -- writing ---------------------------------------------------------------------------------------


def whole_pages(size: int) -> mmap.mmap:
    """Zeros for at least so many bytes, starting at a page boundary as O_DIRECT wants it.

    Private memory: shared memory knows no huge pages and is not given back in parts. But it is not
    handed on to forked processes (a DataLoader's workers), which see zeros in its place: else every
    page would be copied when it is next written to, and the old one live as long as the worker.
    """
    size = max(PAGE, size + -size % PAGE)
    if not hasattr(mmap, "MAP_PRIVATE"):  # not a POSIX system
        return mmap.mmap(-1, size)
    area = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if sys.platform == "linux":
        with contextlib.suppress(OSError):  # a kernel without it
            area.madvise(WIPE_ON_FORK)
    return area


def write_tensor_file(
    path: Path,
    tensors: Sequence[TensorBytes],
    metadata: dict[str, Any],
    *,
    direct: bool = True,
) -> WrittenFile:
    """Write a safetensors file in one go and sync it; `direct` asks for O_DIRECT where it helps.

    The small tensors come first, packed; then the page-aligned ones, from where they lie. A file
    that could not be written to its end is taken away again.
    """
    small = sorted((t for t in tensors if t.pages is None), key=lambda t: -t.dtype.itemsize)
    large = [t for t in tensors if t.pages is not None]
    try:
        with _opened_for_writing(path, direct) as descriptor:
            out = _Output(descriptor)
            out.copy([memoryview(_header(small, large, metadata))])
            out.end_block()
            out.copy([piece for tensor in small for piece in tensor.pieces])
            out.end_block()
            for tensor in large:
                assert tensor.pages is not None
                tensor.pages[tensor.bytes :] = bytes(len(tensor.pages) - tensor.bytes)
                out.write(tensor.pages)
                out.end_block()
            os.fsync(descriptor)
    except BaseException:
        with contextlib.suppress(OSError):
            path.unlink()
        raise
    return WrittenFile(path.name, tuple(out.blocks))


def _header(
    small: Sequence[TensorBytes], large: Sequence[TensorBytes], metadata: dict[str, Any]
) -> bytes:
    """Length and entries, filled up with blanks to whole pages."""
    entries: dict[str, Any] = {"__metadata__": {MARK: json.dumps(metadata)}}
    position = 0

    def enter(name: str, dtype: str, shape: Sequence[int], size: int) -> None:
        nonlocal position
        offsets = [position, position + size]
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": offsets}
        position += size

    def fill_page() -> None:
        if rest := -position % PAGE:
            enter(f"{PADDING}{len(entries)}", "U8", [rest], rest)

    for tensor in small:
        enter(tensor.name, DTYPE_NAMES[tensor.dtype], tensor.shape, tensor.bytes)
    fill_page()
    for tensor in large:
        enter(tensor.name, DTYPE_NAMES[tensor.dtype], tensor.shape, tensor.bytes)
        fill_page()
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % PAGE)
    return struct.pack("<Q", len(text)) + text


class _Output:
    """A file being written in whole pages, and the crc32 of its blocks."""

    def __init__(self, descriptor: int) -> None:
        self.blocks: list[tuple[int, int]] = []
        self._descriptor = descriptor
        self._staging = whole_pages(STAGING)
        self._crc = 0
        self._filled = 0

    def copy(self, pieces: Sequence[memoryview]) -> None:
        """Write pieces one after the other, then zeros to the end of the page."""
        staged = memoryview(self._staging)
        used = 0
        for piece in pieces:
            start = 0
            while start < len(piece):
                part = piece[start : start + STAGING - used]
                staged[used : used + len(part)] = part
                used, start = used + len(part), start + len(part)
                if used == STAGING:
                    self.write(staged)
                    used = 0
        if used:
            rest = -used % PAGE
            staged[used : used + rest] = bytes(rest)
            self.write(staged[: used + rest])

    def write(self, data: memoryview) -> None:
        """Write whole, page-aligned pages."""
        start = 0
        while start < len(data):
            part = data[start : start + CHECKSUM_BLOCK - self._filled]
            self._crc = crc32(part, self._crc)
            self._filled += len(part)
            start += len(part)
            if self._filled == CHECKSUM_BLOCK:
                self.end_block()
        _write_all(self._descriptor, data)

    def end_block(self) -> None:
        if self._filled:
            self.blocks.append((self._filled, self._crc))
        self._crc, self._filled = 0, 0


@contextlib.contextmanager
def _opened_for_writing(path: Path, direct: bool) -> Iterator[int]:
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    flags |= getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
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
            # A device with larger blocks than ours, or the odd end of a write that was cut short.
            if error.errno != errno.EINVAL or not _leave_direct_mode(descriptor):
                raise
            continue
        data = data[written:]


def _leave_direct_mode(descriptor: int) -> bool:
    """Go on through the page cache; False if that is how the file was written anyway."""
    try:
        import fcntl
    except ImportError:
        return False
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    if not flags & getattr(os, "O_DIRECT", 0):
        return False
    fcntl.fcntl(descriptor, fcntl.F_SETFL, flags & ~os.O_DIRECT)
    return True


# -- reading ---------------------------------------------------------------------------------------


class TensorFile:
    """A tensor file open for reading: tensors are mapped, not loaded, until they are touched."""

    def __init__(self, path: Path, expected: WrittenFile | None = None) -> None:
        self.path = path
        self.expected = expected
        self._compare_size()
        try:
            # No descriptor stays open, only a mapping: a memory may have thousands of segments.
            opened: Any = safetensors.safe_open(path, framework="pt", device="cpu")
            self._file = opened.__enter__()
            metadata = json.loads((self._file.metadata() or {}).get(MARK, "{}"))
            names = self._file.keys()
        except (safetensors.SafetensorError, OSError, ValueError, RecursionError) as error:
            raise MemoryFileError(f"{path} is damaged: {error}") from error
        self.metadata: dict[str, Any] = metadata if isinstance(metadata, dict) else {}
        self.names = frozenset(n for n in names if not n.startswith(PADDING))

    def tensor(
        self, name: str, shape: Sequence[int] | None = None, dtype: torch.dtype | None = None
    ) -> Tensor:
        """A tensor, mapped; `MemoryFileError` unless it has the shape and type it should have."""
        if name not in self.names:
            raise MemoryFileError(
                f"{self.path} holds no tensor {name!r}: it is not what it should be"
            )
        try:
            tensor: Tensor = self._file.get_tensor(name)
        except Exception as error:  # the library's, torch's: a type one of them does not know
            raise MemoryFileError(f"{self.path}: {name!r} cannot be read: {error}") from error
        stored = dtype
        if dtype is not None and dtype.is_complex and shape is not None:
            stored, shape = dtype.to_real(), (*shape, 2)
        for what, seen, wanted in (
            ("shape", list(tensor.shape), None if shape is None else list(shape)),
            ("type", tensor.dtype, stored),
        ):
            if wanted is not None and seen != wanted:
                raise MemoryFileError(
                    f"{self.path}: {name!r} has {what} {seen}, expected {wanted}; the file is "
                    "damaged or belongs to another memory"
                )
        return torch.view_as_complex(tensor) if stored is not dtype else tensor

    def array(
        self, name: str, shape: Sequence[int] | None = None, dtype: torch.dtype | None = None
    ) -> NDArray[Any]:
        """The same as an array. Give the type: numpy does not know all of torch's."""
        return self.tensor(name, shape, dtype).numpy()

    def check(self) -> None:
        """Read every byte and compare with the manifest's checksums."""
        if self.expected is None:
            return
        self._compare_size()
        start = 0
        try:
            with open(self.path, "rb") as file:
                for size, expected in self.expected.blocks:
                    if crc32(file.read(size)) != expected:
                        raise MemoryFileError(
                            f"{self.path} is damaged: bytes {start} to {start + size - 1} do not "
                            f"match their checksum ({self._what_lies_at(start, start + size)}). "
                            "Restore the file from a copy; the other files are unharmed"
                        )
                    start += size
        except OSError as error:
            raise MemoryFileError(f"{self.path} cannot be read: {error.strerror}") from error

    def _compare_size(self) -> None:
        try:
            size = self.path.stat().st_size
        except (OSError, ValueError) as error:
            raise MemoryFileError(f"{self.path} cannot be opened: {error}") from error
        if not self.path.is_file():
            raise MemoryFileError(f"{self.path} is not a file")
        if self.expected is not None and size != self.expected.bytes:
            raise MemoryFileError(
                f"{self.path} is {size} bytes long, the manifest says {self.expected.bytes}: it "
                f"was {'truncated' if size < self.expected.bytes else 'changed'} after it was "
                "committed. Restore it from a copy"
            )

    def _what_lies_at(self, start: int, stop: int) -> str:
        """The tensors between two places of the file, for a message."""
        try:
            with open(self.path, "rb") as file:
                (length,) = struct.unpack("<Q", file.read(8))
                entries = json.loads(file.read(min(length, self.path.stat().st_size)))
            if start < 8 + length:
                return "the header"
            touched = [
                name
                for name, entry in entries.items()
                if not name.startswith(("__", PADDING))
                and entry["data_offsets"][0] + 8 + length < stop
                and entry["data_offsets"][1] + 8 + length > start
            ]
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError, struct.error):
            return "the header is damaged, too"
        if not touched:
            return "between the tensors"
        if len(touched) == 1:
            return f"tensor {touched[0]}"
        more = f" and {len(touched) - 12} more" if len(touched) > 12 else ""
        return f"one or more of the tensors {', '.join(touched[:12])}{more}"
