"""Where rows lie until they are written: page-aligned memory that grows by copying.

The training run only ever copies rows here, as they are; rounding them to 16 bits is the writer's
work. Fresh pages cost as much as the copying, so a region is reused from segment to segment, and
the writer hands its pages to the disk from where they lie.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import sys

import torch
from torch import Tensor

WIPE_ON_FORK = 18
"""Linux's MADV_WIPEONFORK, which the standard library does not name."""

HUGE = 8 << 20
"""From this many bytes on a region asks for huge pages: far fewer page faults while copying."""


class Region:
    """Rows of one part of one layer: [rows, width] in one dtype."""

    def __init__(self, width: int, dtype: torch.dtype, capacity: int) -> None:
        self.width, self.dtype = width, dtype
        self.rows = 0
        """How many there are; to take some back, the memory stays."""
        self._rows = self._allocate(max(1, capacity))

    def _allocate(self, capacity: int) -> Tensor:
        size = capacity * self.width * self.dtype.itemsize
        area = whole_pages(size)
        if size >= HUGE and hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):  # a kernel without them
                area.madvise(mmap.MADV_HUGEPAGE)
        flat = torch.frombuffer(area, dtype=self.dtype)[: capacity * self.width]
        return flat.view(capacity, self.width)

    @property
    def filled(self) -> Tensor:
        """The rows there are, where they lie: [rows, width]."""
        return self._rows[: self.rows]

    def append(self, rows: Tensor) -> Tensor:
        """Copy rows to the end; return the copy."""
        count = rows.shape[0]
        end = self.rows + count
        if end > self._rows.shape[0]:
            kept = self.filled
            room = max(end, self._rows.shape[0] + self._rows.shape[0] // 2)
            self._rows = self._allocate(room)
            self.filled.copy_(kept)
        place = self._rows[self.rows : end]
        is_plain = rows.dtype == self.dtype and rows.is_cpu and rows.is_contiguous()
        if is_plain and not rows.is_neg():  # a view of a complex number's part may be negated
            # the C library's copy does not read what it is about to overwrite
            ctypes.memmove(place.data_ptr(), rows.data_ptr(), place.nbytes)
        else:
            place.copy_(rows)
        self.rows = end
        return place


def whole_pages(size: int) -> mmap.mmap:
    """Zeros for at least so many bytes, from where whole pages can be written past the page cache.

    Private memory: shared memory knows no huge pages and is not given back in parts. But it is not
    handed on to forked processes (a DataLoader's workers), which see zeros in its place: else every
    page would be copied when it is next written to, and the old one live as long as the worker.
    """
    size = max(mmap.PAGESIZE, size + -size % mmap.PAGESIZE)
    if not hasattr(mmap, "MAP_PRIVATE"):  # not a POSIX system
        return mmap.mmap(-1, size)
    area = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if sys.platform == "linux":
        with contextlib.suppress(OSError):  # a kernel without it
            area.madvise(WIPE_ON_FORK)
    return area
