"""What patterns wrote into a parameter: weighted sums of δ ⊗ x, together or group by group.

A row kept by patterns wrote δ xᵀ into its weight and δ into its bias; a row kept by examples is
what it wrote. Everything that adds such rows up goes through `Writing`, so nothing else asks how a
layer is kept. With the sums of groups at hand, any mask over the columns that made the groups is a
sum of a few matrices: no pattern is looked at again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dualform.attention import engine
from dualform.attention.entrywise import Way
from dualform.layers import kinds
from dualform.memory import LayerMemory

MOST_GROUPS = 64
LARGEST = 1 << 28
"""Groups, and bytes of their matrices, up to which they are worth having."""

Codes = NDArray[np.int64]


class Wrote(NamedTuple):
    """Some rows of a layer in float64: their numbers, and keys and error signals, or (by examples)
    None and what they wrote."""

    rows: engine.Rows
    keys: Tensor | None
    wrote: Tensor


class Writing:
    """The rows of a layer, as what they wrote into one of its parameters."""

    def __init__(self, layer: LayerMemory, parameter: str) -> None:
        self.layer, self.is_weight = layer, parameter == layer.weight
        self.kind = kinds.of(layer.kind)
        self.role = "weight" if self.is_weight else "bias"
        self.shape = self.kind.shape_of(layer.layer, self.role)
        self.by_examples = layer.keep == "examples"

    def all(self, included: NDArray[np.bool_] | None) -> Iterator[Wrote]:
        """All rows, or those included, block by block."""
        if not self.by_examples:
            for part in engine.scan(self.layer, included, keys=self.is_weight):
                yield Wrote(part.rows, part.keys if self.is_weight else None, part.error_signals)
            return
        for low in range(0, self.layer.rows, engine.BLOCK):
            yield self.between(low, min(self.layer.rows, low + engine.BLOCK))

    def between(self, low: int, high: int) -> Wrote:
        """The rows from one to another."""
        rows = np.arange(low, high)
        if self.by_examples:
            return Wrote(rows, None, self.layer.read(self.role, low, high).double())
        keys = self.layer.read("keys", low, high).double() if self.is_weight else None
        return Wrote(rows, keys, self.layer.read("error_signals", low, high).double())

    def of_step(self, step: int) -> Wrote | None:
        """The rows of one step; None if there are none."""
        uses, own = self.layer.uses, self.layer.uses.of_step(step)
        if not len(own):
            return None
        return self.between(int(uses.start[own[0]]), int(uses.start[own[-1]] + uses.rows[own[-1]]))

    def add(self, total: Tensor, part: Wrote, weights: engine.Reals) -> None:
        """Add what some rows wrote, each times its weight."""
        each = torch.from_numpy(np.ascontiguousarray(weights))
        if self.by_examples or not self.is_weight:
            total += (each @ part.wrote).view(self.shape)
        else:
            assert part.keys is not None
            self.kind.write(total, part.keys, part.wrote * each[:, None])

    def along(self, direction: Tensor, part: Wrote) -> engine.Reals:
        """What each row wrote along a direction of the parameter: ⟨direction, δ ⊗ x⟩."""
        if self.by_examples or not self.is_weight:
            found = part.wrote @ direction.reshape(-1)
        else:
            assert part.keys is not None
            found = (self.kind.multiply(direction, part.keys) * part.wrote).sum(1)
        numbers: engine.Reals = found.numpy()
        return numbers


def are_worth_having(layer: LayerMemory, groups: int) -> bool:
    """Whether matrices of all these groups fit."""
    size = (layer.in_features + 1) * layer.out_features * 8
    return groups <= MOST_GROUPS and groups * size <= LARGEST


def sums(
    layer: LayerMemory,
    parameter: str,
    weights: engine.Reals,
    way: Way | None = None,
    codes: Codes | None = None,
    groups: int = 1,
) -> Tensor:
    """Σ weight_t δ_t ⊗ x_t of every group, [groups, …], float64; with a way, each times its D_r."""
    rows = Writing(layer, parameter)
    codes = np.zeros(layer.rows, np.int64) if codes is None else codes
    total = torch.zeros(groups, *rows.shape, dtype=torch.float64)
    if way is None:
        for part in rows.all(weights != 0):
            _add(rows, total, part, weights, codes)
        return total
    own = layer.rows_of(parameter)
    for step, factor in way:
        part_of_step = rows.of_step(step)
        if part_of_step is not None and weights[part_of_step.rows].any():
            driven = torch.zeros_like(total)
            _add(rows, driven, part_of_step, weights, codes)
            total += driven * factor[own]
    return total


def of_all(way: Way, layers: Sequence[LayerMemory]) -> list[tuple[LayerMemory, Tensor]]:
    """What all patterns of some layers wrote into the parameter of a way, in one sweep."""
    name = way.record.known.name
    found = [(Writing(layer, name), layer.rows_of(name)) for layer in layers]
    totals = [torch.zeros(*rows.shape, dtype=torch.float64) for rows, _ in found]
    for step, factor in way:
        for (rows, own), total in zip(found, totals, strict=True):
            if (part := rows.of_step(step)) is not None:
                driven = torch.zeros_like(total)
                rows.add(driven, part, np.ones(len(part.rows)))
                total += driven * factor[own]
    return list(zip(layers, totals, strict=True))


def _add(rows: Writing, total: Tensor, part: Wrote, weights: engine.Reals, codes: Codes) -> None:
    here = codes[part.rows]
    for group in np.unique(here).tolist():
        if len(total) == 1:
            rows.add(total[0], part, weights[part.rows])
            return
        inside = np.flatnonzero(here == group)
        chosen = torch.from_numpy(inside)
        keys = None if part.keys is None else part.keys[chosen]
        own = Wrote(part.rows[inside], keys, part.wrote[chosen])
        rows.add(total[group], own, weights[own.rows])


def along(
    layer: LayerMemory,
    parameter: str,
    direction: Tensor,
    weights: engine.Reals,
    way: Way | None = None,
) -> engine.Reals:
    """What each pattern wrote into a parameter along a direction of the layer's rows of it: [T]."""
    rows, found = Writing(layer, parameter), np.zeros(layer.rows)
    if way is None:
        for part in rows.all(weights != 0):
            found[part.rows] = rows.along(direction, part)
        return found * weights
    own = layer.rows_of(parameter)
    for step, factor in way:
        if (part_of_step := rows.of_step(step)) is not None:
            found[part_of_step.rows] = rows.along(direction * factor[own], part_of_step)
    return found * weights
