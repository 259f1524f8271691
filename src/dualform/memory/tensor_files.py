"""Tensor files: ordinary safetensors files, written past the page cache, checked as they are read.

A file is summed in blocks of at most 4 MiB, which never reach from one part into the next: the
header, the small tensors, then each big one. A tensor that is read lies in the file itself, mapped;
its blocks are compared with their checksums before it is handed out, once. So damaged bytes never
become numbers, and a reader checks what it reads and little else.

Why it is hard: the bytes must reach the disk without costing the training loop, so the big tensors
start at page boundaries and go straight from the recorder's buffers to the device (O_DIRECT: past
the page cache, all threads together take a quarter less). safetensors allows no holes, so the gaps
are named: tensors called `padding/…`. And a checksum proves that a file is what was written, not
who wrote it: what a header says is checked, too.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from dualform.errors import MemoryFileError, RecordingError
from dualform.memory.fields import DTYPES, count, crc32, damaged, exactly, reading, shape
from dualform.memory.files import NEW, write_synced

PAGE = 4096
CHECKSUM_BLOCK = 4 << 20
"""Most bytes per crc32: small enough to say where damage lies, few enough for the list of them."""

PADDING = "padding/"
DTYPE_NAMES = {  # F32, BF16, I64, U8, BOOL, …
    dtype: name.upper().replace("FLOAT", "F").replace("UINT", "U").replace("INT", "I")
    for name, dtype in DTYPES.items()
    if not dtype.is_complex
}
DTYPES_BY_NAME = {name: dtype for dtype, name in DTYPE_NAMES.items()}


# -- writing ---------------------------------------------------------------------------------------


def write_tensor_file(
    path: Path, tensors: Mapping[str, Tensor], metadata: dict[str, str]
) -> list[tuple[int, int]]:
    """Write a safetensors file in one go and sync it; return its blocks as (bytes, crc32).

    Whole pages of tensors that begin with one are written from where they lie. The others come
    first, packed.
    """
    plain = {name: _plain(name, tensor) for name, tensor in tensors.items()}
    large = [name for name, t in plain.items() if t.nbytes >= PAGE and not t.data_ptr() % PAGE]
    small = sorted(plain.keys() - set(large), key=lambda name: (-plain[name].itemsize, name))
    ordered = {name: plain[name] for name in (*small, *large)}
    header = memoryview(_header(ordered, {*small[-1:], *large}, metadata))

    def blocks() -> Iterator[memoryview]:
        yield from _packed([header])
        yield from _packed([_raw(plain[name]) for name in small])
        for raw in (_raw(plain[name]) for name in large):
            whole = len(raw) // PAGE * PAGE
            for start in range(0, whole, CHECKSUM_BLOCK):
                yield raw[start : min(start + CHECKSUM_BLOCK, whole)]
            yield from _packed([raw[whole:]])

    try:
        return write_synced(path, NEW | os.O_DIRECT, blocks())
    except (AttributeError, OSError):  # there is no such thing, or the blocks are larger than ours
        return write_synced(path, NEW, blocks())


def _plain(name: str, tensor: Tensor) -> Tensor:
    """A tensor as it can be written."""
    tensor = tensor.detach().cpu().resolve_neg()
    if tensor.is_complex():  # safetensors of every age know only real numbers: pairs of them
        tensor = torch.view_as_real(tensor.resolve_conj())
    if tensor.layout != torch.strided or tensor.dtype not in DTYPE_NAMES:
        raise RecordingError(
            f"{name}: a {tensor.layout} tensor of {tensor.dtype} cannot be kept in a memory; "
            "expected a dense tensor of floats, complex numbers, integers or booleans"
        )
    return tensor.contiguous()


def _raw(tensor: Tensor) -> memoryview:
    """The memory a contiguous tensor lies in."""
    flat: Any = tensor.reshape(-1).view(torch.uint8).numpy()
    return memoryview(flat)


def _packed(pieces: Sequence[memoryview]) -> Iterator[memoryview]:
    """Copy pieces one after the other into whole pages, block by block; zeros fill the last."""
    area, used = mmap.mmap(-1, CHECKSUM_BLOCK), 0  # begins with a page
    to = np.frombuffer(area, np.uint8)
    for piece in pieces:
        while piece:
            part, piece = piece[: CHECKSUM_BLOCK - used], piece[CHECKSUM_BLOCK - used :]
            to[used : used + len(part)] = np.frombuffer(part, np.uint8)
            used = (used + len(part)) % CHECKSUM_BLOCK
            if not used:
                yield memoryview(area)
    if used:
        end = used + -used % PAGE
        to[used:end] = 0
        yield memoryview(area)[:end]


def _header(tensors: Mapping[str, Tensor], last: set[str], metadata: dict[str, str]) -> bytes:
    """Length and entries, filled up with blanks to whole pages; what is `last` ends with one."""
    entries: dict[str, Any] = {"__metadata__": metadata}
    end = 0
    for name, tensor in tensors.items():
        start, end = end, end + tensor.nbytes
        entries[name] = {"dtype": DTYPE_NAMES[tensor.dtype], "shape": list(tensor.shape)}
        entries[name]["data_offsets"] = [start, end]
        if name in last and (rest := -end % PAGE):
            start, end = end, end + rest
            padding = {"dtype": "U8", "shape": [rest], "data_offsets": [start, end]}
            entries[f"{PADDING}{len(entries)}"] = padding
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % PAGE)
    return struct.pack("<Q", len(text)) + text


# -- reading ---------------------------------------------------------------------------------------


class Place(NamedTuple):
    """Where a tensor lies in its file, as its header says."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    stop: int


class TensorFile:
    """A tensor file open for reading. No descriptor stays open: there may be thousands of them."""

    def __init__(self, path: Path, blocks: Sequence[tuple[int, int]]) -> None:
        self.path, self._blocks = path, blocks
        self._ends = list(accumulate(size for size, _ in blocks))
        self._verified = bytearray(len(blocks))
        compare_size(path, self._ends[-1])
        try:
            whole = torch.from_file(str(path), shared=False, size=self._ends[-1], dtype=torch.uint8)
        except (RuntimeError, OSError, ValueError) as error:
            raise MemoryFileError(f"{path} cannot be read: {error}") from error
        self._content, self._bytes = whole, _raw(whole)
        self.places: dict[str, Place] = {}
        with reading(f"the header of {path}"):
            self.verify(0, 8)
            data = 8 + int.from_bytes(self._bytes[:8], "little")
            self.verify(8, min(data, len(self._bytes)))
            entries = exactly(dict, json.loads(bytes(self._bytes[8:data])))
            for name, entry in entries.items():
                if name == "__metadata__" or name.startswith(PADDING):
                    continue
                dtype, sizes = DTYPES_BY_NAME[entry["dtype"]], shape(entry["shape"])
                start, stop = (data + count(at) for at in entry["data_offsets"])
                fits = prod(sizes) * dtype.itemsize == stop - start and start % dtype.itemsize == 0
                if not fits or stop > len(self._bytes):
                    raise ValueError(f"{name!r} in bytes {start} to {stop}: {sizes} of {dtype}")
                self.places[name] = Place(dtype, sizes, start, stop)

    def tensor(
        self,
        name: str,
        sizes: Sequence[int] | None = None,
        dtypes: Sequence[torch.dtype] = (),
        rows: slice = slice(None),
    ) -> Tensor:
        """A tensor, or some of its rows, mapped; its bytes are those that were written.

        `MemoryFileError` unless the tensor has the shape and one of the types it should have.
        """
        if name not in self.places:
            raise damaged(self.path, f"it holds no tensor {name!r}")
        dtype, found, start, stop = self.places[name]
        if (dtypes and dtype not in dtypes) or (sizes is not None and found != tuple(sizes)):
            wanted = " or ".join(map(str, dtypes)), sizes and tuple(sizes)
            raise damaged(self.path, f"{name!r} is {dtype}, {found}; expected {wanted}")
        if rows != slice(None):
            low, high, _ = rows.indices(found[0])
            found = (max(0, high - low), *found[1:])
            of_row = prod(found[1:]) * dtype.itemsize
            start, stop = start + low * of_row, start + (low + found[0]) * of_row
        self.verify(start, stop)
        return self._content[start:stop].view(dtype).view(found)

    def verify(self, start: int, stop: int) -> None:
        """Compare the blocks that bytes lie in with their checksums, unless that was done."""
        first, last = bisect_right(self._ends, start), bisect_left(self._ends, stop)
        if start >= stop or self._verified.find(0, first, last + 1) < 0:
            return
        for number in range(first, last + 1):
            (size, checksum), end = self._blocks[number], self._ends[number]
            if not self._verified[number] and crc32(self._bytes[end - size : end]) != checksum:
                here = [
                    n for n, at in self.places.items() if at.start < end and at.stop > end - size
                ]
                what = ", ".join(here[:8]) or "its header"
                raise MemoryFileError(
                    f"{self.path} is damaged: bytes {end - size} to {end - 1} do not match their "
                    f"checksum ({what}{', …' * (len(here) > 8)}). Restore the file from a copy; "
                    "the other files are unharmed"
                )
            self._verified[number] = 1


def compare_size(path: Path, written: int) -> None:
    """`MemoryFileError` unless a file is there, and as long as it was written."""
    try:
        size = path.stat().st_size
    except (OSError, ValueError) as error:
        raise MemoryFileError(
            f"{path} cannot be opened: {error}. The memory lists it, so it was deleted or moved; "
            "restore it from a copy"
        ) from error
    if size != written or not path.is_file():
        what = "truncated" if size < written else "changed"
        raise MemoryFileError(
            f"{path} is {size} bytes long, but {written} were written: it was {what} after it was "
            "committed. Restore it from a copy"
        )
