"""Where rows lie until they are written: page-aligned memory, exact or in 16 bits.

A `Region` holds the rows of one kind (keys or error signals) of one layer, in the dtype of
training. `Narrow` and `Scaled` hold them in half the bytes: which rows 16 bits can hold, and
relative to what, is `memory/narrowing.py`'s to say. Rows that they cannot hold turn the region back
into one of the dtype of training, until the next segment begins.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
from dataclasses import replace

import torch
from torch import Tensor

from dualform.memory.narrowing import holds, row_scales
from dualform.memory.segments import scales_of
from dualform.memory.tensor_files import PAGE, TensorBytes, whole_pages

AT_ONCE = 1 << 17
"""How many entries are rounded at a time."""

HUGE = 8 << 20
"""From this many bytes on a region asks for huge pages."""

Memory = tuple[mmap.mmap, Tensor]


class Region:
    """Rows of one kind of one layer in page-aligned memory that grows by copying.

    Memory costs only once it is touched; `touched` bytes of it have been.
    """

    def __init__(self, width: int, dtype: torch.dtype, capacity: int) -> None:
        self.width, self.dtype = width, dtype
        self.row_bytes = width * dtype.itemsize
        self.rows = 0
        self.touched = 0
        self._memory = self._allocate(max(1, capacity))

    def like(self, capacity: int) -> Region:
        """An empty region of the same kind."""
        return Region(self.width, self.dtype, capacity)

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
        if rows.dtype == self.dtype and rows.is_cpu and rows.is_contiguous():
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

    @property
    def scales(self) -> Tensor | None:
        """What the rows last appended have to be multiplied by, [n]; None if by nothing."""
        return None

    def tensor_bytes(self, name: str) -> TensorBytes:
        memory = memoryview(self._memory[0])
        whole = memory[: self.bytes + -self.bytes % PAGE]
        shape = (self.rows, self.width)
        return TensorBytes(name, self.dtype, shape, [memory[: self.bytes]], pages=whole)

    def tensors(self, kind: str, layer: str) -> list[TensorBytes]:
        """What is to be written of it."""
        return [self.tensor_bytes(f"{kind}/{layer}")]


class Narrow:
    """Rows in 16 bits, or, from the first that 16 bits cannot hold on, in the dtype of training.

    What is not finite in training is not finite here.
    """

    def __init__(self, width: int, dtype: torch.dtype, wide: torch.dtype, capacity: int) -> None:
        self.narrow, self.wide = dtype, wide
        self._held = Region(width, dtype, capacity)  # replaced in one go: Ctrl-C leaves no half

    def like(self, capacity: int) -> Narrow:
        return Narrow(self._held.width, self.narrow, self.wide, capacity)

    @property
    def is_wide(self) -> bool:
        return self._held.dtype == self.wide

    def append(self, rows: Tensor) -> Tensor:
        """Copy rows, rounded; returns the copy."""
        if rows.dtype == self.narrow or self.is_wide or not rows.numel():
            return self._held.append(rows)
        place = self._held.room(len(rows))
        for part, to in zip(_parts(rows), _parts(place, like=rows), strict=True):
            if not holds(part, self.narrow):
                self._widen()
                return self._held.append(rows)
            to.copy_(part)
        self._held.take(len(rows))
        return place

    def _widen(self) -> None:
        held = self._held
        wide = Region(held.width, self.wide, held.capacity)
        wide.append(self._widened())
        self._held = wide

    def _widened(self) -> Tensor:
        return self._held.filled.to(self.wide)

    def reserve(self, capacity: int) -> None:
        self._held.reserve(capacity)

    def cut(self, rows: int) -> None:
        self._held.cut(rows)

    def restart(self) -> None:
        """Begin anew, in 16 bits again."""
        if self.is_wide:
            self._held = Region(self._held.width, self.narrow, self._held.capacity)
        self._held.restart()

    def trim(self) -> None:
        self._held.trim()

    @property
    def filled(self) -> Tensor:
        """The rows there are, as they will be written (without their scales)."""
        return self._held.filled

    @property
    def rows(self) -> int:
        return self._held.rows

    @property
    def bytes(self) -> int:
        return self._held.bytes

    @property
    def touched(self) -> int:
        return self._held.touched

    @property
    def scales(self) -> Tensor | None:
        return None

    def tensors(self, kind: str, layer: str) -> list[TensorBytes]:
        return self._held.tensors(kind, layer)


class Scaled(Narrow):
    """Rows in 16 bits relative to their largest entry, which is kept beside them in float32."""

    def __init__(self, width: int, dtype: torch.dtype, wide: torch.dtype, capacity: int) -> None:
        super().__init__(width, dtype, wide, capacity)
        self._scales = Region(1, torch.float32, capacity)
        self._last: Tensor | None = None

    def like(self, capacity: int) -> Scaled:
        return Scaled(self._held.width, self.narrow, self.wide, capacity)

    def append(self, rows: Tensor) -> Tensor:
        """Copy rows, rounded; returns the copy, to be multiplied by `scales`."""
        self._last = None
        if self.is_wide:
            return self._held.append(rows)
        self._scales.cut(self.rows)
        place, kept = self._held.room(len(rows)), self._scales.room(len(rows))[:, 0]
        for part, to, beside in zip(
            _parts(rows), _parts(place, like=rows), _parts(kept, like=rows), strict=True
        ):
            scales = row_scales(part)
            if scales is None:
                self._widen()
                return self._held.append(rows)
            to.copy_(part / scales[:, None])
            beside.copy_(scales)
        if not rows.numel():
            kept.fill_(1.0)
        self._scales.take(len(rows))
        self._held.take(len(rows))
        self._last = kept
        return place

    def _widen(self) -> None:
        super()._widen()
        self._scales.restart()

    def _widened(self) -> Tensor:
        scales = self._scales.filled[: self.rows]
        return self._held.filled.to(self.wide) * scales.to(self.wide)

    def reserve(self, capacity: int) -> None:
        self._scales.reserve(capacity)
        super().reserve(capacity)

    def cut(self, rows: int) -> None:
        super().cut(rows)
        self._scales.cut(min(rows, self._scales.rows))

    def restart(self) -> None:
        super().restart()
        self._scales.restart()

    def trim(self) -> None:
        super().trim()
        self._scales.trim()

    @property
    def bytes(self) -> int:
        return self._held.bytes + self._scales.bytes

    @property
    def touched(self) -> int:
        return self._held.touched + self._scales.touched

    @property
    def scales(self) -> Tensor | None:
        return self._last

    def tensors(self, kind: str, layer: str) -> list[TensorBytes]:
        held = super().tensors(kind, layer)
        if self.is_wide:
            return held
        self._scales.cut(self.rows)
        scales = self._scales.tensor_bytes(f"{scales_of(kind)}/{layer}")
        return [*held, replace(scales, shape=(self.rows,))]


Place = Region | Narrow
"""Any of them."""


def _parts(rows: Tensor, like: Tensor | None = None) -> tuple[Tensor, ...]:
    """A few rows at a time, so that what is computed of them on the way stays in the cache.

    On an accelerator all at once: there, waiting costs more. `like`: cut as those rows are.
    """
    model = rows if like is None else like
    if not model.numel():
        return ()
    if model.device.type != "cpu":
        return (rows,)
    return torch.split(rows, max(1, AT_ONCE // model.shape[1]))
