"""A memory made from another: how its source is read, and how it comes to be on disk.

The source is only read. The copy is written file by file, and its manifest last and once: until
then there is nothing that could be opened, however the process ends. What an exception or Ctrl-C
leaves behind is taken away again; what a killed process leaves is segments without a manifest,
which are refused like any others of that kind.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from dualform.errors import MemoryFileError, RecordingError
from dualform.memory import files
from dualform.memory.checksums import crc32
from dualform.memory.layer import LayerMemory
from dualform.memory.liveness import LOCK, PROGRESS, Progress
from dualform.memory.memory import Memory
from dualform.memory.segments import Segment
from dualform.memory.tensor_files import TensorBytes, TensorFile, WrittenFile
from dualform.memory.writing import MemoryWriter, clear_directory, refusing


class SourceMemory(Memory):
    """A memory that another is made from: what a converter has to know, and no reader."""

    @classmethod
    def reopen(cls, path: Path) -> SourceMemory:
        """The memory at a path as it is now; one that is being recorded is refused."""
        memory = cls(path, files.read_manifest(path))
        if memory.is_being_recorded:
            raise RecordingError(
                f"{path} is still being recorded; what it holds would be cut off in the middle. "
                "Wait until the recording has ended"
            )
        return memory

    @property
    def segments(self) -> Sequence[Segment]:
        """The committed segments, in order."""
        return self._segments

    @property
    def manifest(self) -> dict[str, Any]:
        """The manifest's own words, free to be changed."""
        return dict(self._manifest)

    @property
    def recorded_remarks(self) -> tuple[str, ...]:
        """The recorder's own remarks, without what can be seen from how the memory ends."""
        return self._described.remarks

    @property
    def initial_file(self) -> TensorFile:
        return self._initial

    def snapshot_files(self) -> Iterator[tuple[int, TensorFile]]:
        """(step, file) of every snapshot that is still there."""
        for step in self.snapshot_steps:
            yield step, TensorFile(self._snapshot_path(step), self._described.snapshots[step])

    def layer_in(self, segment: Segment, name: str) -> LayerMemory:
        """A layer's patterns of one segment alone."""
        patterns = self._described_columns.of(name, [segment])
        layer = LayerMemory(self._described.layers[name], [segment], patterns, ())
        layer.recurring = self.layer(name).recurring  # its keys may lie in earlier segments
        return layer

    @property
    def trained(self) -> int:
        """How many updates were made, as far as is known: more than `steps` after a crash."""
        return max(self.steps, Progress.read(self.path) or 0)


class MemoryCopy(MemoryWriter):
    """A memory being written that is complete or not there at all.

    As a context it takes away again what was written, unless `finish` was reached.
    """

    def __init__(self, path: Path, *, overwrite: bool = False) -> None:
        self._made = not path.exists()
        self._finished = False
        super().__init__(path, overwrite=overwrite)

    def __enter__(self) -> MemoryCopy:
        return self

    def __exit__(self, *exception: object) -> None:
        try:
            if not self._finished:
                self._abandon()
        finally:
            self.release()

    def copy_initial(self, source: TensorFile) -> None:
        """The initial state, byte by byte."""
        with refusing(self.path):
            self._initial = _copied(source, self.path / files.INITIAL).to_json()

    def copy_snapshot(self, step: int, source: TensorFile) -> None:
        """The weights kept of a step, byte by byte."""
        directory = self.path / files.SNAPSHOTS
        with refusing(self.path):
            directory.mkdir(exist_ok=True)
            written = _copied(source, directory / source.path.name)
            files.sync_directory(directory)
        self._snapshots.append(written.to_json() | {"step": step})

    def add_segment(self, tensors: Sequence[TensorBytes], metadata: dict[str, Any]) -> None:
        """Write a segment; the manifest will name it."""
        with refusing(self.path):
            entry = self._write_segment(tensors, metadata)
        rows = {name: layer["rows"] for name, layer in metadata["layers"].items()}
        self._segments.append(entry | {"rows": rows})
        self.committed_steps += int(metadata["steps"])

    def finish(self, manifest: dict[str, Any], *, closed: bool, trained: int) -> None:
        """Make it a memory: from here on it can be opened."""
        self.progress.set(trained)
        with refusing(self.path):
            self._write_manifest(manifest, closed=closed)
        self._finished = True

    def _abandon(self) -> None:
        with contextlib.suppress(OSError):
            clear_directory(self.path)
            for name in (files.SEGMENTS, files.SNAPSHOTS):
                if (self.path / name).is_dir():
                    (self.path / name).rmdir()
            for name in (PROGRESS, LOCK):
                (self.path / name).unlink(missing_ok=True)
            if self._made:
                self.path.rmdir()


def _copied(source: TensorFile, target: Path) -> WrittenFile:
    """Copy a file block by block; every block has to match its checksum."""
    assert source.expected is not None
    with open(source.path, "rb") as original, open(target, "wb") as copy:
        for size, expected in source.expected.blocks:
            block = original.read(size)
            if crc32(block) != expected:
                raise MemoryFileError(
                    f"{source.path} is damaged: it does not match its checksums. Restore it from a "
                    "copy; `dualform verify` says which tensors are concerned"
                )
            copy.write(block)
        copy.flush()
        os.fsync(copy.fileno())
    return WrittenFile(target.name, source.expected.blocks)
