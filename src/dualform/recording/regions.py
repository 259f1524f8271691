"""Where rows lie until they are written: page-aligned memory, exact or in 16 bits.

A `Region` holds the rows of one kind (keys or error signals) of one layer, in the dtype of
training. `NarrowCopies` has them in half the bytes, for the writer: which rows 16 bits can hold,
and relative to what, is `memory/narrowing.py`'s to say.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap

import torch
from torch import Tensor

from dualform.layers import Layer
from dualform.memory.narrowing import narrow
from dualform.memory.segments import scales_of
from dualform.memory.tensor_files import PAGE, TensorBytes, whole_pages

HUGE = 8 << 20
"""From this many bytes on a region asks for huge pages."""

Memory = tuple[mmap.mmap, Tensor]


class Region:
    """Rows of one kind of one layer in page-aligned memory that grows by copying.

    Memory costs only once it is touched; `touched` bytes of it have been.
    """

    def __init__(
        self, width: int, dtype: torch.dtype, capacity: int, stored: torch.dtype | None = None
    ) -> None:
        self.width, self.dtype = width, dtype
        self.stored = dtype if stored is None else stored  # what the rows are to be written in
        self.row_bytes = width * dtype.itemsize
        self.rows = 0
        self.touched = 0
        self._memory = self._allocate(max(1, capacity))

    def like(self, capacity: int) -> Region:
        """An empty region of the same kind."""
        return Region(self.width, self.dtype, capacity, self.stored)

    def _allocate(self, capacity: int) -> Memory:
        size = capacity * self.row_bytes
        area = whole_pages(size)
        if size >= HUGE and hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):  # a kernel without them
                area.madvise(mmap.MADV_HUGEPAGE)  # far fewer faults and look-ups while copying
        flat = torch.frombuffer(area, dtype=self.dtype)[: capacity * self.width]
        return area, flat.view(capacity, self.width)

    @property
    def capacity(self) -> int:
        return self._memory[1].shape[0]

    @property
    def filled(self) -> Tensor:
        """The rows there are, where they lie: [rows, width]."""
        return self._memory[1][: self.rows]

    def append(self, rows: Tensor) -> Tensor:
        """Copy rows; returns the copy."""
        place = self.room(rows.shape[0])
        if (
            rows.dtype == self.dtype
            and rows.is_cpu
            and rows.is_contiguous()
            and not rows.is_neg()  # a view of a complex number's part may be negated on the way
        ):
            # a plain copy by the C library does not read what it is about to overwrite
            ctypes.memmove(place.data_ptr(), rows.data_ptr(), rows.shape[0] * self.row_bytes)
        else:
            place.copy_(rows)
        self.take(rows.shape[0])
        return place

    def room(self, rows: int) -> Tensor:
        """Where the next rows will lie; they are there once they are taken."""
        end = self.rows + rows
        if end > self.capacity:
            self.reserve(max(end, self.capacity + self.capacity // 2))
        return self._memory[1][self.rows : end]

    def take(self, rows: int) -> None:
        """So many rows have been written where there was room for them."""
        end = self.rows + rows
        self.touched = max(self.touched, end * self.row_bytes)
        self.rows = end

    def reserve(self, capacity: int) -> None:
        """Make room for so many rows. The old memory counts until the new one is complete."""
        if capacity > self.capacity:
            larger = self._allocate(capacity)
            larger[1][: self.rows].copy_(self._memory[1][: self.rows])
            self._memory = larger
            self.touched = self.bytes

    def cut(self, rows: int) -> None:
        """Keep only the first rows."""
        self.rows = rows

    def restart(self) -> None:
        """Begin anew, for another segment; the memory stays."""
        self.rows = 0

    def trim(self) -> None:
        """Give back the memory behind the last row."""
        used = self.bytes + -self.bytes % PAGE
        if self.touched > used:
            area, _ = self._memory
            with contextlib.suppress(OSError):  # pages locked into memory stay, and count
                if hasattr(mmap, "MADV_DONTNEED"):
                    area.madvise(mmap.MADV_DONTNEED, used, len(area) - used)
                self.touched = self.bytes

    @property
    def bytes(self) -> int:
        return self.rows * self.row_bytes

    def tensor_bytes(self, name: str) -> TensorBytes:
        memory = memoryview(self._memory[0])
        whole = memory[: self.bytes + -self.bytes % PAGE]
        shape = (self.rows, self.width)
        return TensorBytes(name, self.dtype, shape, [memory[: self.bytes]], pages=whole)


class NarrowCopies:
    """For the writer thread: rows in 16 bits, in memory that serves one segment after the other.

    The training thread only ever copies rows as they are: rounding them costs more than that, and
    here it costs training nothing. What 16 bits cannot hold is written in the dtype of training.
    """

    def __init__(self) -> None:
        self._copies: dict[tuple[str, Layer], Region] = {}
        self._used: set[tuple[str, Layer]] = set()

    def of(self, kind: str, layer: Layer, region: Region) -> tuple[Region, Region | None]:
        """A layer's keys or error signals as they are to be written, and their scales."""
        if region.stored == region.dtype or not region.filled.numel():
            return region, None
        rows = region.filled
        copy = self._region((kind, layer), region.width, region.stored, len(rows))
        scales = None
        if kind == "error_signals" and region.stored == torch.float16:
            scales = self._region((scales_of(kind), layer), 1, torch.float32, len(rows))
        beside = None if scales is None else scales.room(len(rows))
        if not narrow(rows, copy.room(len(rows)), beside):
            return region, None
        for taken in (copy, scales):
            if taken is not None:
                taken.take(len(rows))
        return copy, scales

    def _region(self, key: tuple[str, Layer], width: int, dtype: torch.dtype, rows: int) -> Region:
        if key not in self._copies:
            self._copies[key] = Region(width, dtype, rows)
        self._used.add(key)
        self._copies[key].restart()
        return self._copies[key]

    def next_segment(self) -> None:
        """Let go of the memory of layers that were not in the last one."""
        self._copies = {key: copy for key, copy in self._copies.items() if key in self._used}
        self._used = set()
