"""A parameter's gradients as its patterns explain them, the way torch computes them.

    g_s = κ_s (own_s + carried_s g_{s−1})          s−1: the parameter's update before

Own is what the layer's kind computes from the rows of each use. In training's dtype that gives the
very bits: rows in the dtype of the product, uses of one backward pass added one to the other in
the order of record, each pass added onto what `.grad` held, κ multiplied last. Where the gradient
itself was kept, it is taken as it is. In float64 the same sums are free of rounding.

A `Jitter` asks how much storing in 16 bits may have changed: rows are moved by what their storage
rounds away, at random, or every row of a layer alike: what is rounded again and again in one way
(an input that comes back, an error signal too small to be kept) adds up.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

import torch
from torch import Tensor

from dualform import layers
from dualform.certificate.bounds import ROUNDING
from dualform.layers import Kind
from dualform.memory import LayerMemory, Memory, ParameterLog

BLOCK = 1 << 24
"""How many bytes of rows are read at a time, about."""


class RowBlocks:
    """A layer's rows, use by use: many uses are read at a time."""

    def __init__(self, layer: LayerMemory) -> None:
        self.layer = layer
        self.kind: Kind = layers.of(layer.kind)
        self.parts: tuple[str, ...] = ("keys", "error_signals")
        if layer.keep == "examples":
            self.parts = ("weight",) if layer.bias is None else ("weight", "bias")
        self._low = self._high = self._start = 0
        self._rows: list[Tensor] = []

    def of(self, use: int) -> list[Tensor]:
        """Read the rows of a use: keys and error signals, or what examples wrote by role."""
        uses = self.layer.uses
        if not self._low <= use < self._high:
            width = sum(self.layer.read(part, 0, 0).shape[1] for part in self.parts)
            most = int(uses.start[use]) + BLOCK // max(1, width * self.layer.dtype.itemsize)
            self._low, self._start = use, int(uses.start[use])
            self._high = max(use + 1, int(uses.start.searchsorted(most, side="right")) - 1)
            end = int(uses.start[self._high - 1] + uses.rows[self._high - 1])
            self._rows = [self.layer.read(part, self._start, end) for part in self.parts]
        first = int(uses.start[use]) - self._start
        return [rows[first : first + int(uses.rows[use])] for rows in self._rows]


class Jitter:
    """How rows are moved: `times` what storing and computing round away, in a direction of chance.

    Two of one seed and opposite `times` move rows in opposite directions: a gradient so small that
    rounding decides on its sign has the other sign in one of the two.
    """

    def __init__(self, seed: int, times: float, *, is_alike: bool = False) -> None:
        self.times = times
        self._chance = torch.Generator().manual_seed(seed)
        self._alike: dict[tuple[str, str], Tensor] | None = {} if is_alike else None

    def of(self, layer: LayerMemory, part: str, rows: Tensor) -> Tensor:
        """Move some rows of a layer."""
        if not rows.is_floating_point():
            return rows
        size = max(layer.stored_eps / 2, ROUNDING[layer.dtype]) * rows.abs()
        if layer.stored == torch.float16:  # its smallest step, of keys or relative to each row
            size = size + 2.0**-25 * (1.0 if part == "keys" else rows.abs().amax(1, keepdim=True))
        return rows + self.times * size * self._draw(layer.name, part, rows)

    def _draw(self, layer: str, part: str, rows: Tensor) -> Tensor:
        if self._alike is None:
            return 2 * torch.rand(rows.shape, generator=self._chance, dtype=rows.dtype) - 1
        if (layer, part) not in self._alike:
            draw = torch.rand(rows.shape[1], generator=self._chance, dtype=rows.dtype)
            self._alike[layer, part] = 2 * draw - 1
        return self._alike[layer, part].to(rows.dtype)


class ExplainedGradients:
    """One parameter's gradients, update by update, in one dtype."""

    def __init__(
        self,
        memory: Memory,
        parameter: str,
        dtype: torch.dtype,
        jitter: Jitter | None = None,
    ) -> None:
        self.known, self.dtype = memory.parameters[parameter], dtype
        self.log: ParameterLog = memory.log(parameter)
        self._kept, self._jitter = memory.kept, jitter
        writers = [memory.layer(name) for name in self.known.layers]
        self._blocks = [RowBlocks(layer) for layer in writers if layer.keep != "keys"]
        self._has_kept = frozenset(memory.kept.gradient_steps(parameter))

    def before(self, step: int) -> Tensor | None:
        """The gradient that the update at `step` finds in `.grad`, as explained; None if none."""
        if not self.log.carried[step]:
            return None
        first = step
        while first and self.log.carried[first]:
            first -= 1
        held = None
        for s in range(first, step):
            held = self.after(s, held)
        return held

    def after(self, step: int, held: Tensor | None) -> Tensor | None:
        """What `.grad` holds after a step that moved the parameter or, as its layer, did not."""
        is_carried, is_used = held is not None and self.log.carried[step], self._is_used(step)
        if not self.log.moved[step] and not is_used:
            return held if is_carried else None
        total, kappa = self.at(step, held)
        return times(total, kappa)

    def at(self, step: int, held: Tensor | None) -> tuple[Tensor, float]:
        """The gradient of an update before κ, and κ; `held` is that of the update before."""
        if step in self._has_kept:
            kept = self._kept.gradient(self.known.name, step)
            assert kept is not None
            return kept.to(self.dtype, copy=True), 1.0
        total = held.clone() if held is not None and self.log.carried[step] else None
        for passed in self._passes(step):
            total = passed if total is None else total.add_(passed)
        if total is None:
            total = torch.zeros(self.known.shape, dtype=self.dtype)
        return total, float(self.log.kappa[step]) if self.log.moved[step] else 1.0

    def all(self, steps: Sequence[int]) -> Iterator[tuple[int, Tensor]]:
        """Give every update's gradient in turn, κ as in the log; steps that moved nothing: none."""
        held, is_first = None, True
        for step in steps:
            held = self.before(step) if is_first else held
            held, is_first = self.after(step, held), False
            if self.log.moved[step]:
                assert held is not None
                yield step, held

    def _is_used(self, step: int) -> bool:
        return any(len(blocks.layer.uses_of(step)) for blocks in self._blocks)

    def _passes(self, step: int) -> Iterator[Tensor]:
        """What each backward pass of a step brought."""
        found = [
            (int(blocks.layer.uses.microbatch[use]), blocks, use)
            for blocks in self._blocks
            for use in blocks.layer.uses_of(step)
        ]
        for _, uses in groupby(sorted(found, key=lambda f: f[0]), key=lambda f: f[0]):
            total: Tensor | None = None
            for _, blocks, use in uses:
                own = self._own(blocks, use)
                total = own if total is None else total + own
            assert total is not None
            yield total.to(self.dtype)

    def _own(self, blocks: RowBlocks, use: int) -> Tensor:
        """What one use brought, as large as the parameter."""
        layer, kind, uses = blocks.layer, blocks.kind, blocks.layer.uses
        role = "weight" if self.known.name == layer.weight else "bias"
        rows = blocks.of(use)
        if self._jitter is not None:
            shaken = zip(blocks.parts, rows, strict=True)
            rows = [self._jitter.of(layer, part, own) for part, own in shaken]
        if layer.keep == "examples":
            shape = kind.shape_of(layer.layer, role)
            own = rows[blocks.parts.index(role)].to(self.dtype).sum(0).view(shape)
        else:
            dtype = uses.dtype_of(use) if self.dtype == self.known.dtype else self.dtype
            keys, signals = (r.to(dtype) if r.is_floating_point() else r for r in rows)
            facts = uses.shape_of(use), int(uses.layout[use])
            own = kind.gradient(layer.layer, role, keys, signals, *facts)
        place = layer.rows_of(self.known.name)
        if tuple(own.shape) == self.known.shape:
            return own
        full = torch.zeros(self.known.shape, dtype=own.dtype)
        full[place] = own
        return full


def times(gradient: Tensor, kappa: float) -> Tensor:
    """Multiply by κ as the dtype does."""
    return gradient if kappa == 1.0 else gradient * kappa
