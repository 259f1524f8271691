"""Reading tensor files: tensors are mapped, not loaded, and damaged bytes never become numbers.

A tensor handed out lies in the file itself: reading it costs what the disk costs. Why it is hard:
nothing tells when its pages are touched, so the blocks it lies in are compared with their checksums
before it is handed out, once, and remembered. Rows are asked for slice by slice, so only the blocks
that a question needs are read. The header is a block like any other; what a well-sealed header says
is still checked, for a checksum proves that a file is what was written, not who wrote it.
"""

from __future__ import annotations

import json
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dualform.errors import MemoryFileError
from dualform.memory.checksums import crc32
from dualform.memory.fields import WRONG, count, exactly, shape
from dualform.memory.tensor_files import DTYPE_NAMES, PADDING

DTYPES_BY_NAME = {name: dtype for dtype, name in DTYPE_NAMES.items()}


class Place(NamedTuple):
    """Where a tensor lies in its file, as its header says."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    stop: int


class TensorFile:
    """A tensor file open for reading. No descriptor stays open: there may be thousands of them."""

    def __init__(self, path: Path, blocks: NDArray[np.int64]) -> None:
        self.path = path
        self._blocks = blocks
        self._ends: list[int] = np.cumsum(blocks[:, 0]).tolist()
        self._verified = bytearray(len(blocks))
        self._compare_size()
        try:
            self._content = torch.from_file(
                str(path), shared=False, size=self._ends[-1], dtype=torch.uint8
            )
        except (RuntimeError, OSError, ValueError) as error:
            raise MemoryFileError(f"{path} cannot be read: {error}") from error
        content: Any = self._content.numpy()
        self._bytes = memoryview(content)
        self._places: dict[str, Place] = {}
        self._entries: dict[str, Any] = {}
        try:
            self._entries = self._read_header()
        except WRONG as error:
            raise self._wrong(f"its header cannot be read ({error!r:.200})") from error

    def _read_header(self) -> dict[str, Any]:
        self.verify(0, 8)
        length = int.from_bytes(self._bytes[:8], "little")
        if length > len(self._bytes) - 8:
            raise ValueError(f"a header of {length} bytes")
        self.verify(8, 8 + length)
        self._data = 8 + length
        return exactly(dict, json.loads(bytes(self._bytes[8 : self._data])))

    @property
    def names(self) -> Iterator[str]:
        """The tensors there are."""
        return (n for n in self._entries if not n.startswith(PADDING) and n != "__metadata__")

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def place(self, name: str) -> Place:
        """Find a tensor; `MemoryFileError` unless it lies in the file as a tensor can."""
        if name not in self._places:
            if name not in self._entries:
                raise self._wrong(f"it holds no tensor {name!r}")
            try:
                entry = exactly(dict, self._entries[name])
                dtype, sizes = DTYPES_BY_NAME[entry["dtype"]], shape(entry["shape"])
                low, high = map(count, entry["data_offsets"])
                start = self._data + low
                fits = prod(sizes) * dtype.itemsize == high - low
                if not fits or self._data + high > len(self._bytes) or start % dtype.itemsize:
                    raise ValueError(f"bytes {low} to {high} for {sizes} of {dtype}")
            except WRONG as error:
                raise self._wrong(f"{name!r} is not where it is said ({error!r:.200})") from error
            self._places[name] = Place(dtype, sizes, start, self._data + high)
        return self._places[name]

    def tensor(
        self,
        name: str,
        sizes: Sequence[int] | None = None,
        dtypes: Sequence[torch.dtype] | None = None,
        rows: slice | None = None,
    ) -> Tensor:
        """A tensor, or some of its rows, mapped; its bytes are those that were written.

        `MemoryFileError` unless the tensor has the shape and one of the types it should have.
        """
        place = self.place(name)
        if dtypes is not None and place.dtype not in dtypes:
            wanted = " or ".join(map(str, dtypes))
            raise self._wrong(f"{name!r} has type {place.dtype}, expected {wanted}")
        if sizes is not None and place.shape != tuple(sizes):
            raise self._wrong(f"{name!r} has shape {place.shape}, expected {tuple(sizes)}")
        start, stop, found = place.start, place.stop, place.shape
        if rows is not None:
            low, high, _ = rows.indices(found[0])
            high = max(low, high)
            of_row = prod(found[1:]) * place.dtype.itemsize
            start, stop = place.start + low * of_row, place.start + high * of_row
            found = (high - low, *found[1:])
        self.verify(start, stop)
        return self._content[start:stop].view(place.dtype).view(found)

    def array(
        self, name: str, sizes: Sequence[int] | None = None, dtype: torch.dtype | None = None
    ) -> NDArray[Any]:
        """The same as an array."""
        return self.tensor(name, sizes, None if dtype is None else (dtype,)).numpy()

    def verify(self, start: int, stop: int) -> None:
        """Compare the blocks that bytes lie in with their checksums, unless that was done."""
        if start >= stop:
            return
        first, last = bisect_right(self._ends, start), bisect_left(self._ends, stop)
        if self._verified.find(0, first, last + 1) < 0:
            return
        for number in range(first, last + 1):
            if not self._verified[number]:
                start = self._ends[number] - int(self._blocks[number, 0])
                self._verify_block(number, self._bytes[start : self._ends[number]])
                self._verified[number] = 1

    def check(self) -> None:
        """Read every byte from the disk anew and compare it with its checksum."""
        self._compare_size()
        try:
            with open(self.path, "rb") as file:
                for number, size in enumerate(self._blocks[:, 0].tolist()):
                    self._verify_block(number, memoryview(file.read(size)))
        except OSError as error:
            raise MemoryFileError(f"{self.path} cannot be read: {error.strerror}") from error
        for name in self.names:
            self.place(name)

    def _verify_block(self, number: int, content: memoryview) -> None:
        if crc32(content) != int(self._blocks[number, 1]):
            stop = self._ends[number]
            start = stop - int(self._blocks[number, 0])
            raise MemoryFileError(
                f"{self.path} is damaged: bytes {start} to {stop - 1} do not match their checksum "
                f"({self._what_lies_in(start, stop)}). Restore the file from a copy; the other "
                "files are unharmed"
            )

    def _what_lies_in(self, start: int, stop: int) -> str:
        """The tensors between two places of the file, for a message."""
        if not self._entries:
            return "its header"
        places = [(name, self.place(name)) for name in self.names]
        touched = [name for name, at in places if at.start < stop and at.stop > start]
        more = f" and {len(touched) - 8} more" if len(touched) > 8 else ""
        return (", ".join(touched[:8]) or "no tensor") + more

    def _compare_size(self) -> None:
        size = size_of(self.path)
        if size != self._ends[-1]:
            what = "truncated" if size < self._ends[-1] else "changed"
            raise MemoryFileError(
                f"{self.path} is {size} bytes long, but {self._ends[-1]} were written: it was "
                f"{what} after it was committed. Restore it from a copy"
            )

    def _wrong(self, why: str) -> MemoryFileError:
        return MemoryFileError(f"{self.path} is damaged or not what it should be: {why}")


def size_of(path: Path) -> int:
    """How long a file is; `MemoryFileError` if there is none."""
    try:
        size = path.stat().st_size
    except (OSError, ValueError) as error:
        raise MemoryFileError(
            f"{path} cannot be opened: {error}. The memory lists it, so it was deleted or moved; "
            "restore it from a copy"
        ) from error
    if not path.is_file():
        raise MemoryFileError(f"{path} is not a file")
    return size
