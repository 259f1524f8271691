"""What is committed in a directory, read and checked as a whole: where reading and writing meet.

A reader's `Memory` looks into this; a writer that goes on with a memory, cuts it back or makes
another of it needs the segments themselves. Why it is hard: lines are right or wrong only together
(steps that follow one another, rows of layers that are known), and a memory may have thousands of
them: they are gone through once, and no file is opened.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dualform.errors import MemoryFileError
from dualform.memory.description import Description
from dualform.memory.fields import WRONG
from dualform.memory.files import LINES, MANIFEST, Committed, read_committed
from dualform.memory.mapped import size_of
from dualform.memory.segments import Segment


class OpenedMemory:
    """A memory's directory at one moment: its manifest and lines, description and segments."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.committed: Committed = read_committed(path)
        manifest = self.committed.manifest
        try:
            self.description = Description(manifest)
        except WRONG as error:
            raise _undescribed(path / MANIFEST, error) from error
        self.segments: list[Segment] = []
        for number, entry in enumerate(self.committed.entries):
            try:
                self._add(Segment(path, entry))
            except WRONG as error:
                raise _undescribed(f"line {number + 1} of {path / LINES}", error) from error
        self.steps = self.segments[-1].end if self.segments else 0
        if self.description.closed and manifest.get("steps") != self.steps:
            raise MemoryFileError(
                f"{path / MANIFEST} was closed after {manifest.get('steps')!r:.50} steps, but "
                f"{self.steps} are committed: it belongs to another memory. Restore it from a copy"
            )
        most = max(1 << 20, sum(segment.bytes for segment in self.segments))
        for layer, _ in self.description.layers.values():
            if max(layer.in_features, layer.out_features) > most:
                raise _undescribed(path / LINES, ValueError(f"{layer.name!r} is larger than it"))
        for segment in self.segments:  # opening a file says what is wrong with its length
            if size_of(segment.path) != segment.bytes:
                segment.file  # noqa: B018

    def _add(self, segment: Segment) -> None:
        last = self.segments[-1] if self.segments else None
        if segment.first_step != (last.end if last else 0):
            raise ValueError(f"steps from {segment.first_step} on do not follow those before")
        if last and segment.number <= last.number:
            raise ValueError("its file is not newer than the one before")
        self.description.add(segment.news)
        if unknown := segment.rows.keys() - self.description.layers.keys():
            raise ValueError(f"rows of a layer {min(unknown)!r:.100} that is not described")
        self.segments.append(segment)

    @property
    def sizes(self) -> tuple[int, int]:
        """How many parameters the log has, and how many settings it can name."""
        return len(self.description.parameters), len(self.description.settings)


def _undescribed(what: Any, error: Exception) -> MemoryFileError:
    return MemoryFileError(
        f"{what} does not describe a memory: {error!r:.300}. It is damaged, or made by another "
        "program; restore it from a copy"
    )
