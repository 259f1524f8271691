"""What patterns sum to along each parameter's direction, step by step: own_s v, row by row.

One number per row of a parameter stands for a whole gradient, so all steps of a run can be compared
with what training saw of them, and weights carried from fingerprint to fingerprint. Rows are read
in order, many uses at a time, and a window of steps is summed for all parameters at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from dualform.certificate.bounds import LOST, ROUNDING, Reals, sum_bound
from dualform.certificate.gradients import RowBlocks
from dualform.memory import Memory, ParameterLog

WINDOW = 1 << 22
"""How many numbers the sums of one window hold, about."""


@dataclass(frozen=True)
class Sums:
    """What a parameter's patterns sum to along v at some steps, before κ; [steps, …].

    `squares`: of the sums' terms times u, by row. `gross`: Σ u ‖δ‖ ‖x‖. `lost`: what 16 bits lost,
    along the signs and by size.
    """

    first: int
    own: Reals
    squares: Reals
    gross: Reals
    lost: Reals


@dataclass
class Explained:
    """The gradient of one update along v as patterns explain it: κ (own + what was carried)."""

    gv: Reals
    squares: Reals
    gross: float
    lost: Reals

    @property
    def room(self) -> Reals:
        """How far rounding may have put each row off, that of 16 bits as it was measured."""
        size = np.sqrt(self.squares)
        whole = float(np.sqrt(self.squares.sum()))
        found: Reals = sum_bound(size) + LOST * abs(self.lost[1]) * (
            size / whole if whole else size
        )
        return found


def windows(memory: Memory, names: list[str]) -> Iterator[dict[str, Sums]]:
    """Sum up a window of steps after the other, for all these parameters."""
    height = sum(memory.parameters[name].height for name in names)
    size = max(1, WINDOW // max(1, height))
    summing = Summing(memory, names)
    for first in range(0, memory.steps, size):
        yield summing.window(first, min(memory.steps, first + size))


class Summing:
    """Sums for some parameters, from the rows of their layers."""

    def __init__(self, memory: Memory, names: list[str]) -> None:
        self._memory, self._names = memory, names
        used = dict.fromkeys(n for name in names for n in memory.parameters[name].layers)
        layers = [memory.layer(name) for name in used]
        self._blocks = [RowBlocks(layer) for layer in layers if layer.keep != "keys"]
        self._lost = {
            (b.layer.name, p): b.layer.lost(p)
            for b in self._blocks
            for p in b.layer.layer.parameters
            if b.layer.keep == "patterns" and b.layer.stored_eps
        }
        self._v: dict[str, torch.Tensor | None] = {}

    def window(self, first: int, stop: int) -> dict[str, Sums]:
        """Sum the steps from `first` to `stop`."""
        steps, found = stop - first, {}
        for name in self._names:
            height = self._memory.parameters[name].height
            own, squares = np.zeros((2, steps, height))
            found[name] = Sums(first, own, squares, np.zeros(steps), np.zeros((steps, 2)))
        for blocks in self._blocks:
            low, high = np.searchsorted(blocks.layer.uses.step, [first, stop])
            for use in range(int(low), int(high)):
                self._add(blocks, use, found)
        return found

    def _add(self, blocks: RowBlocks, use: int, found: dict[str, Sums]) -> None:
        layer, uses = blocks.layer, blocks.layer.uses
        own = [name for name in layer.layer.parameters if name in found]
        if not own:
            return
        rows = [r.double() if r.is_floating_point() else r for r in blocks.of(use)]
        step, kind = int(uses.step[use]), blocks.kind
        for name in own:
            sums, place = found[name], layer.rows_of(name)
            at, known = step - sums.first, self._memory.parameters[name]
            u = max(ROUNDING[uses.dtype_of(use)], ROUNDING[known.dtype])
            if layer.keep == "examples":
                along, terms, gross = self._by_examples(blocks, rows, name)
            elif name == layer.weight:
                v, (keys, signals) = self._direction(name), rows
                along = kind.along(layer.layer, keys, signals, v)
                terms = kind.sizes(layer.layer, keys, signals, v).square()
                gross = kind.gross(keys, signals)
            else:
                along, terms = rows[1].sum(0), rows[1].square().sum(0)
                gross = float(torch.linalg.vector_norm(rows[1])) * len(rows[1]) ** 0.5
            sums.own[at, place] += along.numpy()
            # x·v may be small by chance where x is not: no row is taken for smaller than average
            floor = gross**2 / max(1, len(rows[0]) * known.height)
            sums.squares[at, place] += u * u * (terms.numpy() + floor)
            sums.gross[at] += u * gross
            if (lost := self._lost.get((layer.name, name))) is not None:
                sums.lost[at] += lost[use]
            elif layer.stored_eps:
                sums.lost[at, 1] += layer.stored_eps / 2 * float(terms.sum()) ** 0.5

    def _direction(self, name: str) -> Any:
        if name not in self._v:
            self._v[name] = self._memory.direction(name)
        return self._v[name]

    def _by_examples(
        self, blocks: RowBlocks, rows: list[torch.Tensor], name: str
    ) -> tuple[torch.Tensor, torch.Tensor, float]:
        written = rows[blocks.parts.index("weight" if name == blocks.layer.weight else "bias")]
        v = self._direction(name)
        terms = written if v is None else written.view(len(written), -1, len(v)) @ v
        gross = float(torch.linalg.vector_norm(written)) * len(written) ** 0.5
        return terms.sum(0), terms.square().sum(0), gross


class Chain:
    """A parameter's explained gradients along v, update by update, with what was carried."""

    def __init__(self, log: ParameterLog, height: int) -> None:
        self._log, zero = log, np.zeros(height)
        self._held = Explained(zero, zero, 0.0, np.zeros(2))

    def take(self, sums: Sums, step: int) -> Explained:
        """Give the next step's, whether it moved the parameter or not; in turn."""
        at, held = step - sums.first, self._held
        own = Explained(sums.own[at], sums.squares[at], float(sums.gross[at]), sums.lost[at])
        if self._log.carried[step]:
            own = Explained(
                own.gv + held.gv,
                own.squares + held.squares,
                own.gross + held.gross,
                own.lost + held.lost,
            )
        kappa = float(self._log.kappa[step])
        if self._log.moved[step] and kappa != 1.0:
            size = abs(kappa)
            own = Explained(
                kappa * own.gv, kappa**2 * own.squares, size * own.gross, kappa * own.lost
            )
        self._held = own
        return own
