"""Who is writing to a memory, and how far training has come: what outlives a killed process.

The lock is the operating system's and goes with its process, however that ends. The progress is one
64-bit word in a mapped file, stored anew at every step: enough to say, after a crash, how many
steps the last commit is missing.

Why it is hard: a forked process (a DataLoader's worker) inherits open files, and with them the lock
of its parent, which it would hold for as long as it lives. So it closes them first thing. And a
process may be killed between any two instructions: the word is stored by one of them.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import sys
import time
import weakref
from pathlib import Path

from dualform.errors import RecordingError

try:
    import fcntl
except ImportError:  # not a POSIX system: two writers then go unnoticed
    fcntl = None  # type: ignore[assignment]

PROGRESS, LOCK = "progress", "writer.lock"
TRIES = 5
WORD, LOW = 8, (1 << 32) - 1


class _Own:
    """Something that belongs to this process alone; a forked child closes its copy."""

    def __init__(self) -> None:
        _own.add(self)

    def _close(self) -> None:
        raise NotImplementedError


_own: weakref.WeakSet[_Own] = weakref.WeakSet()


def _close_inherited() -> None:
    for thing in list(_own):
        with contextlib.suppress(OSError):
            thing._close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_inherited)


class WriterLock(_Own):
    """At most one recorder writes to a directory; a reader can tell whether one does."""

    def __init__(self, directory: Path) -> None:
        self._descriptor = os.open(directory / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
        super().__init__()
        for attempt in range(TRIES if fcntl is not None else 0):
            try:
                fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except OSError:
                if attempt < TRIES - 1:  # a reader that just asks holds it for a moment, too
                    time.sleep(0.02)
        if fcntl is not None:
            self._close()
            raise RecordingError(
                f"{directory} is being recorded into by another process (or another recorder of "
                "this one); two writers would destroy it. End that one, or choose another path"
            )

    def release(self) -> None:
        """Let others write. May be called again; in a forked child it does nothing."""
        if self._descriptor >= 0 and fcntl is not None:
            with contextlib.suppress(OSError):
                fcntl.flock(self._descriptor, fcntl.LOCK_UN)  # for all who inherited it, too
        self._close()

    def _close(self) -> None:
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    @staticmethod
    def is_held(directory: Path) -> bool:
        """Whether a recorder is writing to this directory."""
        try:
            descriptor = os.open(directory / LOCK, os.O_RDONLY)
        except OSError:
            return False
        try:
            if fcntl is not None:
                fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return True
        finally:
            os.close(descriptor)
        return False


class Progress(_Own):
    """The number of updates completed so far, beside its complement, which shows damage.

    The page stays in the system's cache if this process is killed, and so outlives it.
    """

    def __init__(self, directory: Path, steps: int | None = 0) -> None:
        """`steps=None` leaves what an earlier recorder wrote, until `set` is called."""
        with open(directory / PROGRESS, "a+b") as file:
            if file.seek(0, os.SEEK_END) != WORD:
                # A page that the disk has no room for would end the process when it is stored to.
                file.truncate(0)
                file.write(_word(0).to_bytes(WORD, sys.byteorder))
                file.flush()
            self._map = mmap.mmap(file.fileno(), WORD)
        self._word: memoryview | None = memoryview(self._map).cast("Q")
        super().__init__()
        if steps is not None:
            self.set(steps)

    def set(self, steps: int) -> None:
        """Say that so many updates are completed: a store into memory, no system call."""
        if self._word is not None:
            self._word[0] = steps & LOW | (~steps & LOW) << 32  # `_word`, written out

    def _close(self) -> None:
        word, self._word = self._word, None
        if word is not None:
            word.release()
            self._map.close()

    def close(self) -> None:
        """Let go of the file; its number stays. May be called again."""
        self._close()

    @staticmethod
    def read(directory: Path) -> int | None:
        """The last number of updates, None if it is not known."""
        try:
            with open(directory / PROGRESS, "rb") as file:
                content = file.read(WORD + 1)
        except OSError:
            return None
        word = int.from_bytes(content, sys.byteorder)
        return word & LOW if len(content) == WORD and word == _word(word & LOW) else None


def _word(steps: int) -> int:
    return steps & LOW | (~steps & LOW) << 32
