"""A full segment as the format wants it: columns, 16 bits, recurring inputs once.

This is the writer's work: the training run copies rows as they are, for rounding them costs more
than that. float16 error signals are kept relative to the largest entry of their row; what 16 bits
cannot hold is written in the dtype of training.

Why it is hard: a certificate needs to know what rounding lost. It is measured here, use by use, of
the sums that every gradient was compared with: the difference along the signs, and its size.
"""

from __future__ import annotations

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
from dualform.recording.tags import lay_out, positions
from dualform.recording.watched import LayerCall, Site, Watch

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
        self, first: int, lines: list[Line], full: Regions, uses: dict[Layer, list[LayerCall]]
    ) -> SegmentContent:
        """Lay out whole steps: rows, their uses, the columns of their tags, the log."""
        used = {layer: found for layer, found in uses.items() if found}
        rows: dict[str, list[tuple[str, Tensor]]] = {}
        lost: dict[str, Lost] = {}
        for layer, found in used.items():
            site = self._sites[layer]
            parts = {
                part: Narrowed(full[layer, part], self._stored, scaled=part != "keys")
                for part in site.parts
            }
            rows[layer.name] = [
                tensor
                for part, narrowed in parts.items()
                for tensor in self._tensors(layer, part, narrowed)
            ]
            if self._stored is not None and site.keep == "patterns":
                lost[layer.name] = self._lost(site, parts, found)
        passes: dict[int, set[int]] = {}
        for call in (u for found in used.values() for u in found):
            passes.setdefault(call.step, set()).add(call.number)
        rank = {(s, n): r for s, own in passes.items() for r, n in enumerate(sorted(own))}
        laid = {layer: [self._laid_over(layer, u) for u in found] for layer, found in used.items()}
        pairs = [
            (u.tag, s) for la, found in used.items() for u, s in zip(found, laid[la], strict=True)
        ]
        begins, tags = lay_out(pairs, self._kinds)
        start = iter(begins)
        return SegmentContent(
            first_step=first,
            steps=len(lines),
            rows=rows,
            uses={
                layer.name: use_table(
                    [
                        [
                            *(u.step, rank[u.step, u.number], *u[2:6]),
                            *(positions(u.tag, over), next(start), u.layout),
                        ]
                        for u, over in zip(found, laid[layer], strict=True)
                    ],
                    [u.shape for u in found],
                )
                for layer, found in used.items()
            },
            tags=tags,
            lost=lost,
            log=stacked(lines) if lines else {},
            kept=[],
            news={},
        )

    def _laid_over(self, layer: Layer, use: LayerCall) -> tuple[int, ...]:
        """What tags are laid over: a use's patterns, or where examples are kept, one row each."""
        return use.shape[:1] if self._sites[layer].keep == "examples" else use.shape

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
        found: dict[str, list[tuple[float, float]]] = {w.name: [] for _, w in site.parameters}
        first = 0
        for use in uses:
            here = slice(first, first := first + use.rows)
            exact = keys.full[here], signals.full[here]
            rounded = keys.read(here), signals.read(here)
            for _, w in site.parameters:
                signs = self._watch.signs[w.place_of(site.layer)]
                found[w.name].append(lost_in_use(site.layer, w.name, w.v, signs, exact, rounded))
        return {name: np.array(table) for name, table in found.items()}
