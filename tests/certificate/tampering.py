"""Changing a recorded memory on disk so that every checksum and seal still matches.

A forger with full knowledge of the format: every segment is read back as what it was written from,
changed, and written anew by the memory's own writer, so `Memory.check()` has nothing to object to.
What is left to find the lie is arithmetic. Tests of `verify` use it through

    forge(run, into, zero_error_signals("2", step=7), scale_learning_rate(step=7, by=1.001))
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from dualform.memory import Memory, MemoryWriter, SegmentContent
from dualform.memory.content import ROWS
from dualform.memory.segments import OpenedMemory


@dataclass
class Forgery:
    """One segment of a memory, open for changes; `manifest` is that of the whole memory."""

    content: SegmentContent
    rows: dict[str, dict[str, Tensor]]
    manifest: dict[str, Any]

    def of_step(self, layer: str, part: str, step: int) -> Tensor:
        """The rows of one step, to be written to; none if another segment has them."""
        uses = self.content.uses[layer]
        ends = np.cumsum(uses[:, ROWS])
        of_step = np.flatnonzero(uses[:, 0] == step)
        if not len(of_step):
            return self.rows[layer][part][:0]
        first, last = of_step[0], of_step[-1]
        return self.rows[layer][part][ends[first] - uses[first, ROWS] : ends[last]]

    def line(self, step: int) -> int | None:
        """Which line of the log is a step's."""
        place = step - self.content.first_step
        return place if 0 <= place < self.content.steps else None


Change = Callable[[Forgery], None]


def forge(run: Path, into: Path, *changes: Change) -> Memory:
    """Write a memory that is the one at `run`, changed; everything in it matches its checksum."""
    opened = OpenedMemory(run)
    manifest = json.loads((run / "manifest.json").read_text())["manifest"]
    for name in ("run", "closed", "segments", "steps", "format", "schema"):
        manifest.pop(name, None)
    found = []
    for segment in opened.segments:
        content = opened.content(segment)
        rows = {
            layer: {part: values.clone() for part, values in parts}
            for layer, parts in content.rows.items()
        }
        content.log = {field: column.copy() for field, column in content.log.items()}
        content.kept = [
            (what, name, step, value.clone() if isinstance(value, Tensor) else value)
            for what, name, step, value in content.kept
        ]
        content.news = copy.deepcopy(content.news)
        found.append(Forgery(content, rows, manifest))
        for change in changes:
            change(found[-1])
    writer = MemoryWriter(into)
    try:
        writer.begin(manifest)
        for forgery in found:
            rows = forgery.rows.items()
            forgery.content.rows = {layer: list(parts.items()) for layer, parts in rows}
            writer.commit(forgery.content)
        writer.end(closed=True)
    finally:
        writer.release()
    memory = Memory.open(into)
    memory.check()
    return memory


def zero_error_signals(layer: str, step: int) -> Change:
    """The error signals of one step become zero."""

    def change(found: Forgery) -> None:
        found.of_step(layer, "error_signals", step).zero_()

    return change


def scale_key(layer: str, step: int, row: int, by: float) -> Change:
    """One pattern's key becomes another."""

    def change(found: Forgery) -> None:
        found.of_step(layer, "keys", step)[row : row + 1] *= by

    return change


def exchange_keys(layer: str, step: int) -> Change:
    """Two patterns of a step have each other's key."""

    def change(found: Forgery) -> None:
        keys = found.of_step(layer, "keys", step)
        if len(keys):
            keys[[0, 1]] = keys[[1, 0]]

    return change


def scale_learning_rate(step: int, by: float) -> Change:
    """Another learning rate is logged for one step, of all parameters."""

    def change(found: Forgery) -> None:
        line = found.line(step)
        if line is not None:
            assert found.content.first_step == 0, "settings are counted from the first segment on"
            settings = found.content.news["settings"]
            other = copy.deepcopy(settings[int(found.content.log["setting"][line].max())])
            other["group"]["lr"] *= by
            found.content.log["setting"][line] = len(settings)
            settings.append(other)

    return change


def write_log(field: str, step: int, value: Any, parameter: int | slice = slice(None)) -> Change:
    """Something else stands in one line of the log."""

    def change(found: Forgery) -> None:
        line = found.line(step)
        if line is not None:
            found.content.log[field][line, parameter] = value

    return change


def scale_log(field: str, step: int, by: float) -> Change:
    """A number in one line of the log becomes another, of all parameters."""

    def change(found: Forgery) -> None:
        line = found.line(step)
        if line is not None:
            found.content.log[field][line] *= by

    return change


def scale_kept_entry(parameter: str, step: int, by: float, what: str = "weights") -> Change:
    """The largest entry of a kept tensor becomes another."""

    def change(found: Forgery) -> None:
        for kept, name, at, value in found.content.kept:
            if (kept, name, at) == (what, parameter, step):
                value.view(-1)[value.abs().argmax()] *= by

    return change


def drop_events(found: Forgery) -> None:
    """Nothing is on record of what happened besides updates."""
    found.content.news.pop("events", None)


def name_class(path: str) -> Change:
    """The log says that another class took the steps."""

    def change(found: Forgery) -> None:
        for setting in found.content.news.get("settings", []):
            setting["path"] = path

    return change


def elsewhere(found: Forgery) -> None:
    """It was recorded on another machine: bits are not to be expected."""
    for phase in found.manifest["phases"]:
        phase["machine"] = "another machine"


def shuffle_rows(found: Forgery) -> None:
    """The patterns of every use stand in another order: nothing is forged but the last bits."""
    rng = np.random.default_rng(0)
    for layer, parts in found.rows.items():
        start = 0
        for rows in found.content.uses[layer][:, ROWS].tolist():
            order = start + rng.permutation(rows)
            for part, values in parts.items():
                if part != "keys" or "keys.references" not in parts:
                    values[start : start + rows] = values[order]
            start += rows
