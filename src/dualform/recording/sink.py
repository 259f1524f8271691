"""From memory to disk: what is collected is handed to the writer, a whole segment at a time.

The training thread hands over regions full of rows, the log and what was kept; the writer's thread
lays out columns, rounds to 16 bits, finds recurring inputs, sums checks, writes and syncs, mostly
without Python's lock. There are three sets of regions and no more: if the disk cannot keep up,
training waits, and memory stays within three times (a segment and the largest step).

Rows that no update has consumed yet stay behind, in the next set: a segment holds whole steps.
float16 error signals are kept relative to the largest entry of their row; what 16 bits cannot hold
is written in the dtype of training. What rounding lost a certificate needs to know: it is measured
here, use by use, of the sums that every gradient was compared with.

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

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dualform.layers import Layer
from dualform.memory.content import Kept, SegmentContent, use_table
from dualform.memory.narrowing import lost_in_use, narrowed
from dualform.memory.writing import MemoryWriter
from dualform.recording.recurring import Known, Recurring
from dualform.recording.regions import Region
from dualform.recording.tags import TagColumns, positions
from dualform.recording.watched import LayerCall, Line, Settled, Site, Watch, stacked
from dualform.recording.worker import Worker

SETS = 3
SEGMENT_BYTES = 64 << 20
COMMIT_SECONDS = 30.0
"""A slow run commits at least this often, at the end of a step."""

Regions = dict[tuple[Layer, str], Region]


class Sink:
    """Collects whole steps, and hands them to the writer's thread.

    `kinds`: of the tags there are. `stored`: the 16-bit type asked for, None for none. `known`: the
    stored rows of a resumed memory.
    """

    def __init__(
        self,
        writer: MemoryWriter,
        watch: Watch,
        kinds: dict[str, str],
        stored: torch.dtype | None,
        known: Known | None,
        segment_bytes: int,
        first_step: int,
    ) -> None:
        self._writer, self._watch, self._kinds = writer, watch, kinds
        self._dtype, self._recurring = stored, Recurring(known)
        self._segment_bytes, self._first_step = segment_bytes, first_step
        self._lines: list[Line] = []
        self._thread = Worker("dualform-writer")
        self._free: queue.SimpleQueue[Regions] = queue.SimpleQueue()
        for _ in range(SETS - 1):
            self._free.put({})
        self._last_commit = time.monotonic()
        self._bytes_then = 0
        self._failure: BaseException | None = None
        self._handed = self._stored = 0

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
        self._lines.append(line)

    def commit(self, kept: list[Kept], news: dict[str, Any]) -> None:
        """Hand everything settled to the writer; waits while all sets are still being written."""
        self.raise_failure()
        spare = self._free.get()
        self.raise_failure()
        full: Regions = {}
        uses: dict[Layer, list[Settled]] = {}
        for layer, site in self._watch.sites.items():
            for part, region in list(site.parts.items()):
                other = spare.pop((layer, part), None)
                if other is None:
                    other = Region(region.width, region.dtype, region.rows + region.rows // 8)
                other.rows = 0
                if region.rows > site.settled:
                    other.append(region.filled[site.settled :])
                region.rows = site.settled
                full[layer, part], site.parts[part] = region, other
            uses[layer], site.uses, site.settled = site.uses, [], 0
        lines, first = self._lines, self._first_step
        self._lines, self._first_step = [], first + len(lines)
        self._last_commit = time.monotonic()
        self._thread.do(self._write, first, lines, full, uses, kept, news)

    def wait(self) -> None:
        """Wait until everything handed over is on disk."""
        self._thread.wait()
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
        interrupt = self._thread.close()
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
        try:
            if self._failure is None:
                content = self._content(first, lines, full, uses)
                content.kept, content.news = kept, news
                self._writer.commit(content)
                self._handed += sum(region.filled.nbytes for region in full.values())
                self._stored += sum(t.nbytes for parts in content.rows.values() for _, t in parts)
        except BaseException as error:
            self._failure = error
        for key, region in list(full.items()):
            if region.rows:
                region.rows = 0
            else:
                del full[key]  # not seen for a whole segment: give its memory back
        self._free.put(full)

    def _content(
        self, first: int, lines: list[Line], full: Regions, uses: dict[Layer, list[Settled]]
    ) -> SegmentContent:
        """Lay out whole steps: rows, their uses, the columns of their tags, the log."""
        calls = {
            layer: [(step, call) for step, own in settled for call in own]
            for layer, settled in uses.items()
            if settled
        }
        numbers = sorted({(step, call.number) for own in calls.values() for step, call in own})
        firsts: dict[int, int] = {}
        rank = {(step, n): at - firsts.setdefault(step, at) for at, (step, n) in enumerate(numbers)}
        tags = TagColumns(self._kinds)
        made = SegmentContent(first, len(lines), log=stacked(lines))
        for layer, own in calls.items():
            site, name = self._watch.sites[layer], layer.name
            parts = {
                part: Narrowed(full[layer, part], self._dtype, scaled=part != "keys")
                for part in site.parts
            }
            made.rows[name] = [
                own for part, rows in parts.items() for own in self._tensors(site, part, rows)
            ]
            if self._dtype is not None and site.keep == "patterns":
                made.lost[name] = self._lost(site, parts, [call for _, call in own])
            table = []
            for step, call in own:  # where examples are kept, each is one row
                over = call.shape[:1] if site.keep == "examples" else call.shape
                place = positions(call.tag, over), tags.place(call.tag, over), call.layout
                table.append([step, rank[step, call.number], *call[1:5], *place])
            made.uses[name] = use_table(table, [call.shape for _, call in own])
        made.tags = tags.columns()
        return made

    def _tensors(self, site: Site, part: str, narrowed: Narrowed) -> list[tuple[str, Tensor]]:
        """The tensors that one part is written as."""
        found = [(part, narrowed.rows)]
        if narrowed.scales is not None:
            found.append((f"{part}.scales", narrowed.scales))
        if part != "keys" or not site.is_given:
            return found
        folded = self._recurring.fold(site.layer, narrowed.rows)
        if folded is None:
            return found
        new, references = folded
        return [("keys.references", torch.as_tensor(references)), (part, new)]

    def _lost(
        self, site: Site, parts: dict[str, Narrowed], uses: list[LayerCall]
    ) -> dict[str, NDArray[np.float64]]:
        """What rounding changed in every use, parameter by parameter."""
        keys, signals = parts["keys"], parts["error_signals"]
        found: dict[str, list[tuple[float, float]]] = {w.name: [] for w in site.parameters.values()}
        first = 0
        for use in uses:
            here = slice(first, first := first + use.rows)
            exact = keys.full[here], signals.full[here]
            rounded = keys.read(here), signals.read(here)
            for role, w in site.parameters.items():
                signs = self._watch.signs[site.places[role]]
                found[w.name].append(lost_in_use(site.layer, w.name, w.v, signs, exact, rounded))
        return {name: np.array(table) for name, table in found.items()}


class Narrowed:
    """One part of a layer's rows in the bits it is stored in."""

    def __init__(self, region: Region, stored: torch.dtype | None, *, scaled: bool) -> None:
        self.full = self.rows = region.filled
        self.scales: Tensor | None = None
        if stored is None or not region.dtype.is_floating_point or region.dtype.itemsize <= 2:
            return
        made = narrowed(self.full, stored, scaled=scaled and stored == torch.float16)
        if made is not None:
            self.rows, self.scales = made

    def read(self, here: slice) -> Tensor:
        """Some rows as a reader will see them."""
        rows = self.rows[here].to(self.full.dtype)
        return rows if self.scales is None else rows * self.scales[here, None].to(rows.dtype)
