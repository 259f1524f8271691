"""A full segment as the format wants it: columns, 16 bits, recurring inputs once.

This is the writer's work: the training run copies rows as they are, for rounding them costs more
than that. float16 error signals are kept relative to the largest entry of their row; what 16 bits
cannot hold is written in the dtype of training.

Why it is hard: a certificate needs to know what rounding lost. It is measured here, use by use, of
the sums that every gradient was compared with: the difference along the signs, and its size.
"""

from __future__ import annotations

from itertools import chain

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dualform.layers import Layer
from dualform.memory.content import SegmentContent, use_table
from dualform.memory.narrowing import lost_in_use, narrowed
from dualform.recording.line import Line, stacked
from dualform.recording.recurring import Recurring
from dualform.recording.regions import Region
from dualform.recording.tags import TagColumns, positions
from dualform.recording.watched import LayerCall, Settled, Site, Watch

Regions = dict[tuple[Layer, str], Region]

Lost = dict[str, NDArray[np.float64]]


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


class Contents:
    """Makes the content of segments; `stored` is the 16-bit type asked for, None for none."""

    def __init__(
        self,
        watch: Watch,
        kinds: dict[str, str],
        stored: torch.dtype | None,
        recurring: Recurring,
    ) -> None:
        self._watch, self._sites, self._kinds = watch, watch.sites, kinds
        self._stored, self._recurring = stored, recurring

    def content(
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
        made = SegmentContent(first, len(lines), log=stacked(lines) if lines else {})
        for layer, own in calls.items():
            site, name = self._sites[layer], layer.name
            parts = {
                part: Narrowed(full[layer, part], self._stored, scaled=part != "keys")
                for part in site.parts
            }
            found = [self._tensors(layer, part, rows) for part, rows in parts.items()]
            made.rows[name] = list(chain.from_iterable(found))
            if self._stored is not None and site.keep == "patterns":
                made.lost[name] = self._lost(site, parts, [call for _, call in own])
            table = []
            for step, call in own:  # where examples are kept, each is one row
                over = call.shape[:1] if site.keep == "examples" else call.shape
                place = positions(call.tag, over), tags.place(call.tag, over), call.layout
                table.append([step, rank[step, call.number], *call[1:5], *place])
            made.uses[name] = use_table(table, [call.shape for _, call in own])
        made.tags = tags.columns()
        return made

    def _tensors(self, layer: Layer, part: str, narrowed: Narrowed) -> list[tuple[str, Tensor]]:
        """The tensors that one part is written as."""
        written = narrowed.rows
        recurs = part == "keys" and self._sites[layer].is_given
        folded = self._recurring.fold(layer, written) if recurs else None
        found: list[tuple[str, Tensor]] = []
        if folded is not None:
            found.append(("keys.references", torch.as_tensor(folded.references)))
            if len(folded.new) < len(written):
                return [*found, (part, folded.new)]
        found.append((part, written))
        if narrowed.scales is not None:
            found.append((f"{part}.scales", narrowed.scales))
        return found

    def _lost(self, site: Site, parts: dict[str, Narrowed], uses: list[LayerCall]) -> Lost:
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
