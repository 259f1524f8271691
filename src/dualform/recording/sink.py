"""From memory to disk: what is collected is handed to the writer, a whole segment at a time.

The training thread hands over regions full of rows, the log and what was kept; the writer's thread
lays out columns, rounds to 16 bits, finds recurring inputs, sums checks, writes and syncs, mostly
without Python's lock. There are three sets of regions and no more: if the disk cannot keep up,
training waits, and memory stays within three times (a segment and the largest step).

Rows that no update has consumed yet stay behind, in the next set: a segment holds whole steps.

Why it is hard: Ctrl-C can strike between any two instructions. A step counts once its line is in
the log; a segment is the writer's once it is in its queue. And nothing that can raise may stand
between the end of the loop and closing: `close` writes what there is, whatever happened before.
"""

from __future__ import annotations

import contextlib
import queue
import time
from collections.abc import Callable
from typing import Any

from dualform.layers import Layer
from dualform.memory.writing import MemoryWriter
from dualform.recording.contents import Contents, Regions
from dualform.recording.kept import Kept
from dualform.recording.line import Line
from dualform.recording.regions import Region
from dualform.recording.watched import Settled, Site
from dualform.recording.worker import Worker

SETS = 3
SEGMENT_BYTES = 64 << 20
COMMIT_SECONDS = 30.0
"""A slow run commits at least this often, at the end of a step."""


class Sink:
    """Collects whole steps, and hands them to the writer's thread."""

    def __init__(
        self,
        writer: MemoryWriter,
        sites: dict[Layer, Site],
        contents: Contents,
        segment_bytes: int,
        first_step: int,
    ) -> None:
        self._writer, self._sites, self._contents = writer, sites, contents
        self._segment_bytes, self._first_step = segment_bytes, first_step
        self.lines: list[Line] = []
        self.thread = Worker("dualform-writer")
        self._free: queue.SimpleQueue[Regions] = queue.SimpleQueue()
        for _ in range(SETS - 1):
            self._free.put({})
        self._last_commit = time.monotonic()
        self._bytes_then = 0
        self._failure: BaseException | None = None
        self._handed = self._stored = 0

    @property
    def steps(self) -> int:
        """How many steps are complete."""
        return self._first_step + len(self.lines)

    @property
    def stored_share(self) -> float:
        """How much of the rows handed over was stored: less in 16 bits, or where inputs recur."""
        return self._stored / self._handed if self._handed else 1.0

    def is_due(self, recorded: int) -> bool:
        """Whether so many bytes in all, or so long a time, ask for a commit."""
        if recorded - self._bytes_then >= self._segment_bytes:
            self._bytes_then = recorded
            return True
        return time.monotonic() - self._last_commit >= COMMIT_SECONDS

    def end_step(self, line: Line) -> None:
        """The step is complete: from here on it counts."""
        self.raise_failure()
        self.lines.append(line)

    def commit(self, kept: list[Kept], news: dict[str, Any]) -> None:
        """Hand everything settled to the writer; waits while all sets are still being written."""
        self.raise_failure()
        spare = self._take_free()
        full: Regions = {}
        uses: dict[Layer, list[Settled]] = {}
        for layer, site in self._sites.items():
            for part, region in list(site.parts.items()):
                other = spare.pop((layer, part), None)
                if other is None:
                    other = Region(region.width, region.dtype, region.rows + region.rows // 8)
                other.cut(0)
                if region.rows > site.settled:
                    other.append(region.filled[site.settled :])
                region.cut(site.settled)
                full[layer, part], site.parts[part] = region, other
            uses[layer], site.uses, site.settled = site.uses, [], 0
        lines, first = self.lines, self._first_step
        self.lines, self._first_step = [], first + len(lines)
        self._last_commit = time.monotonic()
        self.thread.do(self._write, first, lines, full, uses, kept, news)

    def _take_free(self) -> Regions:
        while True:
            try:
                return self._free.get(timeout=0.2)
            except queue.Empty:
                self.raise_failure()

    def wait(self) -> None:
        """Wait until everything handed over is on disk."""
        self.thread.wait()
        self.raise_failure()

    def raise_failure(self) -> None:
        """Raise what stopped the writer."""
        if self._failure is not None:
            raise self._failure

    def close(self, last: Callable[[], None]) -> None:
        """Write what is complete, and seal the memory, or say in it why it ends where it does."""
        trouble: BaseException | None = None
        try:
            last()
        except BaseException as error:
            trouble = error
        interrupt = self.thread.close()
        failure = self._failure or trouble
        if failure is not None:
            with contextlib.suppress(OSError):
                remark = f"the recording ended early: {failure}"
                self._writer.end(closed=False, remarks=[remark])
            self.raise_failure()
            raise failure
        self._writer.end(closed=True)
        if interrupt is not None:
            raise interrupt

    # -- the writer's thread --------------------------------------------------------------------

    def _write(
        self,
        first: int,
        lines: list[Line],
        full: Regions,
        uses: dict[Layer, list[Settled]],
        kept: list[Kept],
        news: dict[str, Any],
    ) -> None:
        if self._failure is not None:
            return
        try:
            content = self._contents.content(first, lines, full, uses)
            content.kept, content.news = kept, news
            self._writer.commit(content)
            self._handed += sum(region.filled.nbytes for region in full.values())
            self._stored += sum(t.nbytes for parts in content.rows.values() for _, t in parts)
        except BaseException as error:
            self._failure = error
        for key, region in list(full.items()):
            if region.rows:
                region.cut(0)
            else:
                del full[key]  # not seen for a whole segment: give its memory back
        self._free.put(full)
