"""A segment read back as what it was written from: to be cut, thinned out or narrowed, and written.

A run is often resumed from a checkpoint that is older than the memory's last commit. The steps in
between are trained again, so their patterns must go; the segment that reaches across the cut is
written again, shorter. What makes a smaller memory of one begins here, too.

Why it is hard: rows, uses, tags, log, states and news must all end at the same step. Damage must
not be copied under a new checksum: it is compared with the old one, like anything that is read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dualform.memory.content import (
    LOG,
    REFERENCES,
    ROWS,
    START,
    Kept,
    SegmentContent,
    rows_name,
    stacked_uses,
)
from dualform.memory.files import NO_VALUE
from dualform.memory.segments import OpenedMemory, Segment


def content_of(
    memory: OpenedMemory, segment: Segment, *, stop: int | None = None
) -> SegmentContent:
    """Read a segment's steps before `stop` (all, if there is none) back into what is written; the
    tensors are mapped from the old file, which must stay until the new one is written."""
    stop = segment.end if stop is None else min(stop, segment.end)
    content = SegmentContent(segment.first_step, stop - segment.first_step)
    for layer in segment.rows:
        uses = segment.uses(layer)
        uses = uses[: np.searchsorted(uses[:, 0], stop)]
        if not len(uses):
            continue
        content.uses[layer] = uses
        content.rows[layer] = list(_parts(segment, layer, int(uses[:, ROWS].sum())))
        for parameter in memory.description.layers[layer].layer.parameters:
            lost = segment.lost(layer, parameter)[: len(uses)]
            if lost.any():
                content.lost.setdefault(layer, {})[parameter] = lost
    tagged = max((_tagged(uses) for uses in content.uses.values()), default=0)
    for column, kind in memory.description.tags.items():
        values = segment.tags(column, kind)
        if values is not None and tagged:
            content.tags[column] = values[:tagged]
    if content.steps:
        content.log = {field: segment.log(field, *memory.sizes)[: content.steps] for field in LOG}
    content.kept = list(_kept(memory, segment, stop))
    content.news = dict(segment.news)
    if stop < segment.end:  # names and settings stay, for others count on from them
        for what, later in (("events", lambda e: e["step"]), ("remarks", _step_of)):
            said = segment.news.get(what, [])
            content.news[what] = [entry for entry in said if later(entry) < stop]
    return content


def _step_of(remark: Any) -> int:
    return -1 if type(remark) is str else int(remark[0])


def _tagged(uses: NDArray[np.int64]) -> int:
    """How many values of the tag columns some uses refer to."""
    return int(np.where(uses[:, START] < 0, 0, uses[:, START] + uses[:, ROWS]).max())


def _parts(segment: Segment, layer: str, rows: int) -> Iterator[tuple[str, Tensor]]:
    """The first rows of everything that a layer has in the file."""
    prefix, total = rows_name(layer, ""), segment.rows[layer]
    for name in sorted(n for n in segment.file.places if n.startswith(prefix)):
        part, left, size = name.removeprefix(prefix), rows, total
        if part == "keys" and layer in segment.distinct:
            numbers = segment.read_rows(layer, REFERENCES, None, (torch.int32,), slice(None))
            # rows are numbered as they first come: what later patterns brought is at the end
            size = segment.distinct[layer]
            left = max(0, size - int(numbers.max()) + int(numbers[:rows].max()))
        found = segment.file.tensor(name)
        segment.need(found.shape[:1] == (size,), f"{name} has {found.shape}, expected {size} rows")
        yield part, found[:left]


def _kept(memory: OpenedMemory, segment: Segment, stop: int) -> Iterator[Kept]:
    for name in (*memory.description.parameters, *memory.description.buffers):
        for what in sorted(segment.kept_of(name), key=lambda what: what != "weights"):
            for step, value in segment.kept(what, name):
                if step < stop or (step == stop and what != "gradient"):
                    yield what, name, step, value


# -- two segments as one ---------------------------------------------------------------------------


def joined(one: SegmentContent, other: SegmentContent) -> SegmentContent | None:
    """Make one segment of two that follow one another; None if a layer's rows differ in type."""
    found = SegmentContent(one.first_step, one.steps + other.steps, dict(one.rows))
    for layer, parts in other.rows.items():
        before, after = dict(one.rows.get(layer, ())), dict(parts)
        if before and not _can_follow(before, after):
            return None
        both = [[of[part] for of in (before, after) if part in of] for part in before | after]
        found.rows[layer] = list(zip(before | after, map(torch.cat, both), strict=True))
    lengths = [max(map(len, content.tags.values()), default=0) for content in (one, other)]
    none = stacked_uses([])
    for layer in one.uses | other.uses:
        earlier, later = one.uses.get(layer, none), other.uses.get(layer, none).copy()
        later[:, START] += np.where(later[:, START] < 0, 0, lengths[0])
        found.uses[layer] = stacked_uses([earlier, later])
        lost = [content.lost.get(layer, {}) for content in (one, other)]
        for parameter in lost[0] | lost[1]:
            tables = [
                of.get(parameter, np.zeros((len(uses), 2)))
                for of, uses in zip(lost, (earlier, later), strict=True)
            ]
            found.lost.setdefault(layer, {})[parameter] = np.concatenate(tables)
    for column, known in (one.tags | other.tags).items():
        blank = np.nan if known.dtype.kind == "f" else NO_VALUE
        values = zip((one.tags, other.tags), lengths, strict=True)
        found.tags[column] = np.concatenate(
            [tags.get(column, np.full(length, blank)) for tags, length in values]
        )
    logs = [content.log for content in (one, other) if content.log]
    found.log = {f: np.concatenate([log[f] for log in logs]) for f in LOG if logs}
    found.kept = [*one.kept, *other.kept]
    for what in one.news | other.news:
        said = [content.news[what] for content in (one, other) if what in content.news]
        found.news[what] = said[0] if len(said) == 1 else _both(*said)
    return found


def _can_follow(before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> bool:
    """Whether rows may lie behind others: of one type, scaled or not, references or not."""
    keys = {"keys"} if REFERENCES in before else set()  # there may be no new one to refer to
    same = before.keys() - keys == after.keys() - keys
    return same and all(before[p].dtype == after[p].dtype for p in before.keys() & after.keys())


def _both(one: Any, other: Any) -> Any:
    """News of two lines as one: lists go on, what is said by name is said of more names."""
    if isinstance(one, list):
        return one + other
    return {
        name: _both(one[name], other[name])
        if name in one and name in other and isinstance(one[name], list)
        else (other | one if name not in other else other)[name]
        for name in one | other
    }
