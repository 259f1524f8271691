"""Who is writing to a memory, and how far training has come: what outlives a killed process.

One file says both. The operating system's lock on it goes with its process, however that ends; in
it stands the number of updates completed, written at every step: after a crash it says how many
steps are lost.

Why it is hard: a forked process (a DataLoader's worker) inherits open files, and with them the lock
of its parent, which it would hold for as long as it lives. So it closes them first thing.
"""

from __future__ import annotations

import contextlib
import os
import time
import weakref
from pathlib import Path

from dualform.errors import RecordingError

try:
    import fcntl
except ImportError:  # not a POSIX system: two writers then go unnoticed
    fcntl = None  # type: ignore[assignment]

PROGRESS = "progress"
WORD, LOW = 8, (1 << 32) - 1


class Progress:
    """Held by the one recorder that writes to a directory; its file outlives it. The number of
    updates stands there beside its complement, which shows damage."""

    def __init__(self, directory: Path) -> None:
        self._descriptor = os.open(directory / PROGRESS, os.O_RDWR | os.O_CREAT | _BINARY, 0o644)
        for _ in range(5):
            if _is_free(self._descriptor):
                _open.add(self)
                return
            time.sleep(0.02)  # a reader that just asks holds it for a moment, too
        self.close()
        raise RecordingError(
            f"{directory} is being recorded into by another process (or another recorder of "
            "this one); two writers would destroy it. End that one, or choose another path"
        )

    def set(self, steps: int) -> None:
        """Say that so many updates are completed: one short write, into the system's cache."""
        with contextlib.suppress(OSError):  # on a full disk, training goes on; it may be closed
            word = _word(steps).to_bytes(WORD, "little")
            if hasattr(os, "pwrite"):
                os.pwrite(self._descriptor, word, 0)
            else:  # not a POSIX system
                os.lseek(self._descriptor, 0, os.SEEK_SET)
                os.write(self._descriptor, word)

    def release(self) -> None:
        """Let others write. May be called again; in a forked child it does nothing."""
        if self._descriptor >= 0 and fcntl is not None:
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)  # for all who inherited it, too
        self.close()

    def close(self) -> None:
        """Let go of the file; its number stays. May be called again."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    @staticmethod
    def read(directory: Path) -> int | None:
        """The last number of updates, None if it is not known."""
        with contextlib.suppress(OSError):
            content = (directory / PROGRESS).read_bytes()
            word = int.from_bytes(content, "little")
            return word & LOW if len(content) == WORD and word == _word(word & LOW) else None
        return None

    @staticmethod
    def is_held(directory: Path) -> bool:
        """Whether a recorder is writing to this directory."""
        try:
            descriptor = os.open(directory / PROGRESS, os.O_RDONLY)
        except OSError:
            return False
        try:
            return not _is_free(descriptor)
        finally:
            os.close(descriptor)


_BINARY = getattr(os, "O_BINARY", 0)
_open: weakref.WeakSet[Progress] = weakref.WeakSet()


def _close_inherited() -> None:
    for progress in list(_open):
        progress.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_inherited)


def _is_free(descriptor: int) -> bool:
    """Whether a file could be locked; until its descriptor is closed, it is."""
    try:
        if fcntl is not None:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _word(steps: int) -> int:
    return steps & LOW | (~steps & LOW) << 32
