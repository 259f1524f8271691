"""Who is writing to a memory, and how far training has come: what outlives a killed process.

The lock is the operating system's and goes with its process, however that ends. The progress is
16 bytes in a file, overwritten several times a second without syncing: enough to say, after a
crash, how many steps the last commit is missing.

Why it is hard: a forked process (a DataLoader's worker) inherits open files, and with them the lock
of its parent, which it would hold for as long as it lives. So it closes them first thing.
"""

from __future__ import annotations

import contextlib
import os
import struct
import time
import weakref
from pathlib import Path

from dualform.errors import RecordingError

try:
    import fcntl
except ImportError:  # not a POSIX system: two writers are then not told apart
    fcntl = None  # type: ignore[assignment]

PROGRESS = "progress"
LOCK = "writer.lock"
TRIES = 5


class _OwnFile:
    """An open file that belongs to this process alone; a forked child closes its copy."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        _own_files.add(self)

    def _close(self) -> None:
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


_own_files: weakref.WeakSet[_OwnFile] = weakref.WeakSet()


def _close_inherited() -> None:
    for file in list(_own_files):
        with contextlib.suppress(OSError):
            file._close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_inherited)


class WriterLock(_OwnFile):
    """At most one recorder writes to a directory; a reader can tell whether one does."""

    def __init__(self, directory: Path) -> None:
        super().__init__(os.open(directory / LOCK, os.O_RDWR | os.O_CREAT, 0o644))
        if fcntl is None:
            return
        for attempt in range(TRIES):
            try:
                fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except OSError:
                if attempt < TRIES - 1:  # a reader that just looks holds it for a moment, too
                    time.sleep(0.02)
        self._close()
        raise RecordingError(
            f"{directory} is being recorded into by another process (or another recorder of this "
            "one); two writers would destroy it. End that one, or choose another path"
        )

    def release(self) -> None:
        """Let others write. May be called again; in a forked child it does nothing."""
        if self._descriptor >= 0 and fcntl is not None:
            with contextlib.suppress(OSError):
                fcntl.flock(self._descriptor, fcntl.LOCK_UN)  # for all who inherited it, too
        self._close()

    @staticmethod
    def is_held(directory: Path) -> bool:
        """Whether a recorder is writing to this directory."""
        if fcntl is None:
            return False
        try:
            descriptor = os.open(directory / LOCK, os.O_RDONLY)
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


class Progress(_OwnFile):
    """The number of updates trained so far, and its complement: a torn or damaged one shows."""

    def __init__(self, directory: Path, steps: int | None = 0) -> None:
        flags = os.O_WRONLY | os.O_CREAT | getattr(os, "O_BINARY", 0)
        super().__init__(os.open(directory / PROGRESS, flags, 0o644))
        if steps is not None:  # else what an earlier recorder wrote stays, for now
            os.ftruncate(self._descriptor, 0)
            self.set(steps)

    def set(self, steps: int) -> None:
        """A few microseconds; the page stays in the system's cache if this process is killed."""
        with contextlib.suppress(OSError):  # only a courtesy: never a reason to stop training
            os.pwrite(self._descriptor, struct.pack("<qq", steps, ~steps), 0)

    def close(self) -> None:
        self._close()

    @staticmethod
    def read(directory: Path) -> int | None:
        """The last number of updates, None if it cannot be told."""
        try:
            with open(directory / PROGRESS, "rb") as file:
                steps, complement = struct.unpack("<qq", file.read(17))
        except (OSError, struct.error):
            return None
        return int(steps) if steps >= 0 and complement == ~steps else None
