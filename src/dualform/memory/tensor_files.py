"""Writing tensor files: ordinary safetensors files, past the page cache, summed by blocks.

Why it is hard: the bytes must reach the disk without costing the training loop, so the big tensors
start at page boundaries and go straight from the recorder's buffers to the device (O_DIRECT), past
the page cache; everything else is copied through a small staging area. safetensors allows no holes,
so the gaps are named: tensors called `padding/…`.

A file is summed in consecutive blocks of at most 4 MiB, which never reach from one part into the
next: the header, the small tensors, then each big tensor. So damage can be pinned to a tensor, the
list of checksums stays short, and a reader checks what it reads and little else (`mapped.py`).
"""

from __future__ import annotations

import contextlib
import errno
import json
import mmap
import os
import struct
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dualform.errors import RecordingError
from dualform.memory.checksums import crc32

PAGE = 4096
CHECKSUM_BLOCK = 4 << 20
"""Most bytes per crc32: small enough to say where damage lies, few enough for the manifest."""

WIPE_ON_FORK = 18
"""Linux's MADV_WIPEONFORK, which the standard library does not name."""

PADDING = "padding/"
DTYPE_NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint64: "U64", torch.uint32: "U32", torch.uint16: "U16", torch.uint8: "U8",
    torch.bool: "BOOL",
}  # fmt: skip


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


def stacked_bytes(name: str, values: Sequence[Tensor]) -> TensorBytes:
    """Several tensors of one type and shape as one, [n, …], without stacking them in RAM."""
    tensors = [_plain(name, value) for value in values]
    shape = (len(tensors), *tensors[0].shape)
    return TensorBytes(name, tensors[0].dtype, shape, [_raw(t) for t in tensors])


def _plain(name: str, value: Tensor | NDArray[Any]) -> Tensor:
    array = isinstance(value, np.ndarray)
    tensor = torch.from_numpy(np.ascontiguousarray(value)) if array else torch.as_tensor(value)
    tensor = tensor.detach().cpu().resolve_neg()
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
    path: Path, tensors: Sequence[TensorBytes], metadata: dict[str, str]
) -> list[list[int]]:
    """Write a safetensors file in one go and sync it; return its blocks as [bytes, crc32].

    The small tensors come first, packed; then the page-aligned ones, from where they lie. A file
    that could not be written to its end is taken away again.
    """
    small = sorted((t for t in tensors if t.pages is None), key=lambda t: -t.dtype.itemsize)
    large = [t for t in tensors if t.pages is not None]
    packed = [piece for tensor in small for piece in tensor.pieces]
    parts = [_staged([memoryview(_header(small, large, metadata))]), _staged(packed)]
    blocks: list[list[int]] = []
    try:
        descriptor = _opened(path)
        try:
            for block in chain(*parts, *map(_in_place, large)):
                blocks.append([len(block), crc32(block)])
                _write_all(descriptor, block)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except BaseException:
        with contextlib.suppress(OSError):
            path.unlink()
        raise
    return blocks


def _staged(pieces: Sequence[memoryview]) -> Iterator[memoryview]:
    """Copy pieces one after the other into whole pages, block by block; zeros fill the last."""
    area, used = memoryview(whole_pages(CHECKSUM_BLOCK)), 0
    for piece in pieces:
        while piece:
            part = piece[: CHECKSUM_BLOCK - used]
            area[used : used + len(part)] = part
            used, piece = used + len(part), piece[len(part) :]
            if used == CHECKSUM_BLOCK:
                yield area
                used = 0
    if used:
        end = used + -used % PAGE
        area[used:end] = bytes(end - used)
        yield area[:end]


def _in_place(tensor: TensorBytes) -> Iterator[memoryview]:
    """The blocks of a tensor that owns its pages; zeros fill the last."""
    pages = tensor.pages
    assert pages is not None
    pages[tensor.bytes :] = bytes(len(pages) - tensor.bytes)
    for start in range(0, len(pages), CHECKSUM_BLOCK):
        yield pages[start : start + CHECKSUM_BLOCK]


def _header(
    small: Sequence[TensorBytes], large: Sequence[TensorBytes], metadata: dict[str, str]
) -> bytes:
    """Length and entries, filled up with blanks to whole pages."""
    entries: dict[str, Any] = {"__metadata__": metadata}
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


def _opened(path: Path) -> int:
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    flags |= getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
    with contextlib.suppress(OSError, AttributeError):  # file systems without it
        return os.open(path, flags | os.O_DIRECT, 0o644)
    return os.open(path, flags, 0o644)


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
    with contextlib.suppress(ImportError, AttributeError):
        import fcntl

        flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags & ~os.O_DIRECT)
        return bool(flags & os.O_DIRECT)
    return False
