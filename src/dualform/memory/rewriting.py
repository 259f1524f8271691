"""A segment read back as what it was written from: to be cut, thinned out or narrowed, and written.

A run is often resumed from a checkpoint that is older than the memory's last commit. The steps in
between are trained again, so their patterns must go: kept twice, they would explain nothing. Whole
segments are left as they are; the one that reaches across the cut is written again, shorter. What
makes a smaller memory of one begins here, too, and leaves out what it does not want.

Why it is hard: rows, uses, tags, log, states and news must all end at the same step. Damage must
not be copied under a new checksum: what is read here is compared with the old one, like anything
that is read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from dualform.memory.content import (
    LOG,
    REFERENCES,
    USE,
    Array,
    Kept,
    SegmentContent,
    rows_name,
)
from dualform.memory.files import NO_VALUE
from dualform.memory.opened import OpenedMemory
from dualform.memory.segments import Segment
from dualform.memory.tensor_files import TensorBytes, tensor_bytes

ROWS, START = USE.index("rows"), USE.index("start")


def content_of(
    memory: OpenedMemory, segment: Segment, *, stop: int | None = None
) -> SegmentContent:
    """Read a segment's steps before `stop` (all, if there is none) back into what is written.

    Tensors are mapped from the old file, which must stay until the new one is written.
    """
    stop = segment.end if stop is None else min(stop, segment.end)
    content = SegmentContent(segment.first_step, stop - segment.first_step)
    tagged = 0
    for layer in segment.rows:
        table = segment.uses(layer)
        count = int(np.searchsorted(table.uses[:, 0], stop))
        uses = table.uses[:count]
        if not count:
            continue
        content.uses[layer] = uses
        if table.shapes is not None:
            content.shapes[layer] = [
                tuple(n for n in line if n >= 0) for line in table.shapes[:count].tolist()
            ]
        tagged = max(
            tagged, int(np.where(uses[:, START] < 0, 0, uses[:, START] + uses[:, ROWS]).max())
        )
        content.rows[layer] = _parts(segment, layer, int(uses[:, ROWS].sum()))
        for parameter in memory.description.layers[layer].layer.parameters:
            lost = segment.lost(layer, parameter)[:count]
            if lost.any():
                content.lost.setdefault(layer, {})[parameter] = lost
    for column, kind in memory.description.tags.items():
        values = segment.tags(column, torch.float64 if kind == "float" else torch.int64)
        if values is not None and tagged:
            content.tags[column] = values[:tagged]
    if content.steps:
        content.log = {field: segment.log(field, *memory.sizes)[: content.steps] for field in LOG}
    content.kept = _kept(memory, segment, stop)
    content.news = _news(segment.news, stop, whole=stop == segment.end)
    return content


def joined(one: SegmentContent, other: SegmentContent) -> SegmentContent | None:
    """Make one segment of two that follow one another; None if a layer's rows differ in type."""
    rows = dict(one.rows)
    for layer, parts in other.rows.items():
        before, after = dict(rows.get(layer, ())), dict(parts)
        both = {p: _after(before.get(p), after.get(p)) for p in {**before, **after}}
        if before and not _can_follow(before, after):
            return None
        rows[layer] = [(part, found) for part, found in both.items() if found is not None]
    tagged = max((len(values) for values in one.tags.values()), default=0)
    more = max((len(values) for values in other.tags.values()), default=0)
    found = SegmentContent(one.first_step, one.steps + other.steps, rows)
    for layer in {**one.uses, **other.uses}:
        later = other.uses.get(layer, _NO_USES).copy()
        later[:, START] += np.where(later[:, START] < 0, 0, tagged)
        earlier = one.uses.get(layer, _NO_USES)
        found.uses[layer] = np.concatenate([earlier, later])
        counts = [(content, uses[:, ROWS]) for content, uses in ((one, earlier), (other, later))]
        found.shapes[layer] = [
            tuple(shape)
            for content, rows_of in counts
            for shape in content.shapes.get(layer) or [(n,) for n in rows_of.tolist()]
        ]
        for parameter in {**one.lost.get(layer, {}), **other.lost.get(layer, {})}:
            found.lost.setdefault(layer, {})[parameter] = np.concatenate(
                [
                    content.lost.get(layer, {}).get(parameter, np.zeros((len(rows_of), 2)))
                    for content, rows_of in counts
                ]
            )
    for column in {**one.tags, **other.tags}:
        found.tags[column] = np.concatenate(
            [_column(one, column, other, tagged), _column(other, column, one, more)]
        )
    if found.steps:
        found.log = {f: np.concatenate([c.log[f] for c in (one, other) if c.log]) for f in LOG}
    found.kept = [*one.kept, *other.kept]
    for what in {**one.news, **other.news}:
        said = [content.news[what] for content in (one, other) if what in content.news]
        found.news[what] = said[0] if len(said) == 1 else _both(*said)
    return found


_NO_USES = np.zeros((0, len(USE)), np.int64)


def _can_follow(before: Mapping[str, TensorBytes], after: Mapping[str, TensorBytes]) -> bool:
    """Whether rows may lie behind others: of one type, scaled or not, references or not."""
    keys = {"keys"} if REFERENCES in before else set()  # there may be no new one to refer to
    same = before.keys() - keys == after.keys() - keys
    return same and all(before[p].dtype == after[p].dtype for p in before.keys() & after.keys())


def _after(one: TensorBytes | None, other: TensorBytes | None) -> TensorBytes | None:
    if one is None or other is None:
        return one or other
    shape = (one.shape[0] + other.shape[0], *one.shape[1:])
    return replace(one, shape=shape, pieces=[*one.pieces, *other.pieces], pages=None)


def _column(content: SegmentContent, name: str, beside: SegmentContent, rows: int) -> Array:
    """A tag column, of blanks where only the other segment has it."""
    if name in content.tags:
        return content.tags[name]
    is_float = beside.tags[name].dtype.kind == "f"
    return np.full(rows, np.nan if is_float else NO_VALUE)


def _both(one: Any, other: Any) -> Any:
    """News of two lines as one: lists go on, what is said by name is said of more names."""
    if isinstance(one, list):
        return one + other
    return {
        name: one[name] + other[name]
        if isinstance(one.get(name), list) and name in other
        else other.get(name, one.get(name))
        for name in {**one, **other}
    }


def _parts(segment: Segment, layer: str, rows: int) -> list[tuple[str, TensorBytes]]:
    """The first rows of everything that a layer has in the file."""
    prefix, found = rows_name(layer, ""), []
    total, stored = segment.rows[layer], segment.distinct.get(layer, 0)
    for name in sorted(n for n in segment.file.names if n.startswith(prefix)):
        part, left = name.removeprefix(prefix), rows
        size = total
        if part == "keys" and layer in segment.distinct:
            numbers = segment.file.tensor(rows_name(layer, REFERENCES), (total,), (torch.int32,))
            # rows are numbered as they first come: what later patterns brought is at the end
            gone = int(numbers.max()) - int(numbers[:rows].max())
            left, size = max(0, stored - gone), stored
        shape = segment.file.place(name).shape
        if shape[:1] != (size,):
            raise segment.wrong(f"{name} has shape {shape}, expected {size} rows")
        found.append((part, tensor_bytes(name, segment.file.tensor(name, rows=slice(0, left)))))
    return found


def _kept(memory: OpenedMemory, segment: Segment, stop: int) -> list[Kept]:
    found: list[Kept] = []
    for name in (*memory.description.parameters, *memory.description.buffers):
        whats = sorted(segment.kept_names(name), key=lambda what: what != "weights")
        for what in whats:
            for step, value in segment.kept(what, name):
                if step < stop or (step == stop and what != "gradient"):
                    found.append((what, name, step, value))
    for (name, step), state in segment.plain.items():
        if step <= stop:
            found += [(f"state.{key}", name, step, value) for key, value in state.items()]
    return found


def _news(news: Mapping[str, Any], stop: int, *, whole: bool) -> dict[str, Any]:
    """What a line said that is still so: names and settings stay, for others count on from them."""
    kept = {what: said for what, said in news.items() if what != "plain"}
    if whole:
        return kept
    if "events" in kept:
        kept["events"] = [event for event in kept["events"] if event["step"] < stop]
    if "remarks" in kept:
        kept["remarks"] = [r for r in kept["remarks"] if type(r) is str or r[0] < stop]
    return kept
