"""A parameter's gradients as its patterns explain them, update by update.

    g_s = κ_s (own_s + carried_s g_{s−1})         κ = 1 at steps that do not move the parameter

`ExplainedGradients` are whole gradients: own is what the layer's kind computes from the rows of
each use. In training's dtype that gives the very bits: rows in the dtype of the product, uses of
one backward pass added one to the other in the order in which it arrived at them, each pass added
onto what `.grad` held, κ multiplied last. Where the gradient itself was kept, it is taken as it is.
`Sums` are the same along the parameter's direction v, one number per row, for every step of a run.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import reduce
from itertools import groupby
from math import prod
from operator import add, itemgetter
from typing import Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

from dualform import layers
from dualform.certificate.bounds import LOST, ROUNDING, Reals, spread, sum_bound
from dualform.memory import LayerMemory, Memory


@dataclass(frozen=True)
class Sum:
    """Σ δ (x·v) of a parameter's patterns, row by row, and how far it may be off.

    `squares`: of its terms times u, by row. `gross`: Σ u ‖δ‖ ‖x‖. `lost`: what 16 bits lost, along
    the signs and by size.
    """

    gv: Reals
    squares: Reals
    gross: float
    lost: Reals

    def __add__(self, other: Sum) -> Sum:
        gv, squares = self.gv + other.gv, self.squares + other.squares
        return Sum(gv, squares, self.gross + other.gross, self.lost + other.lost)

    def __mul__(self, kappa: float) -> Sum:
        size = abs(kappa)
        return Sum(self.gv * kappa, self.squares * size**2, self.gross * size, self.lost * kappa)

    @property
    def room(self) -> Reals:
        """How far rounding may have put each row off, that of 16 bits as it was measured."""
        size = np.sqrt(self.squares)
        lost = LOST * abs(self.lost[1]) * size / (float(np.linalg.norm(size)) or 1.0)
        found: Reals = sum_bound(size) + lost
        return found


T = TypeVar("T", Tensor, Sum)

Place = tuple[int, int]
"""Which pass of its step goes through a use, and when the use's product reaches `.grad` in it."""


class FromPatterns(ABC, Generic[T]):
    """One parameter's gradients, seen in one way."""

    def __init__(self, memory: Memory, parameter: str) -> None:
        self.known, self.log = memory.parameters[parameter], memory.log(parameter)
        found = (memory.layer(name) for name in self.known.layers)
        self.layers = [layer for layer in found if layer.keep != "keys"]
        self._last: tuple[int | None, T | None] = (None, None)

    @abstractmethod
    def own(self, step: int, held: T | None) -> T:
        """Add what the patterns of a step sum to onto what `.grad` held; κ comes later."""

    def before(self, step: int) -> T | None:
        """The gradient that a step finds in `.grad`, as explained; None if none is carried."""
        if not step or not self.log.carried[step]:
            return None
        first = step - 1
        while first and first != self._last[0] and self.log.carried[first]:
            first -= 1
        for s in range(first, step):
            if s != self._last[0]:
                self.of(s)
        return self._last[1]

    def total(self, step: int) -> tuple[T, float]:
        """The gradient of a step before κ, and κ as in the log."""
        kappa = float(self.log.kappa[step]) if self.log.moved[step] else 1.0
        return self.own(step, self.before(step)), kappa

    def of(self, step: int) -> T:
        """The gradient of a step."""
        return self.hold(step, times(*self.total(step)))

    def hold(self, step: int, gradient: T) -> T:
        """Remember what `.grad` holds after a step."""
        self._last = step, gradient
        return gradient

    def _uses(self, step: int) -> list[tuple[Place, LayerMemory, int]]:
        """The uses of a step, by backward pass and order in it: the layer, the number there.

        Products of fewer bits share a cast of the weight, which waits for the last of them.
        """
        uses = ((layer, use) for layer in self.layers for use in layer.uses.of_step(step))
        found = [(layer.uses.arrival_of(use), layer, use) for layer, use in uses]
        found.sort(key=itemgetter(0))
        casts = {(at[0], layer.uses.dtype_of(use)): at for at, layer, use in found}
        casts = {cast: at for cast, at in casts.items() if cast[1] != self.known.dtype}
        for nth, (at, layer, use) in enumerate(found):
            found[nth] = casts.get((at[0], layer.uses.dtype_of(use)), at), layer, use
        return sorted(found, key=itemgetter(0))

    def may_meet(self, step: int) -> bool:
        """Whether uses may be added up before they reach `.grad`, in a way that is not on record.

        Casts are one for every region of autocast; code past modules, whose layers are called after
        the weight, may use one view of a weight several times.
        """
        passes = [list(uses) for _, uses in groupby(self._uses(step), key=lambda use: use[0][0])]
        return any(
            sum(layer.uses.dtype_of(use) != self.known.dtype for _, layer, use in uses) > 1
            or (len(uses) > 2 and any(layer.name == layer.weight for _, layer, _ in uses))
            for uses in passes
        )

    def _role(self, layer: LayerMemory) -> str:
        return "weight" if self.known.name == layer.weight else "bias"


class ExplainedGradients(FromPatterns[Tensor]):
    """One parameter's gradients as a whole, in one dtype: in float64 they are free of rounding.

    Given a number as `jitter`, rows are moved by what storing and computing round away.
    """

    def __init__(
        self, memory: Memory, parameter: str, dtype: torch.dtype, jitter: int | None = None
    ) -> None:
        super().__init__(memory, parameter)
        self.dtype, self._kept, self._jitter = dtype, memory.kept, jitter

    def total(self, step: int) -> tuple[Tensor, float]:
        kept = self._kept.gradient(self.known.name, step)
        return super().total(step) if kept is None else (kept.to(self.dtype, copy=True), 1.0)

    def own(self, step: int, held: Tensor | None) -> Tensor:
        total = held
        for _, uses in groupby(self._uses(step), key=lambda use: use[0][0]):
            casts = groupby(uses, key=itemgetter(0))
            sums = (reduce(add, (self._of_use(*use[1:]) for use in cast)) for _, cast in casts)
            passed = reduce(add, (one.to(self.dtype) for one in sums))
            total = passed if total is None else total + passed
        return torch.zeros(self.known.shape, dtype=self.dtype) if total is None else total

    def _of_use(self, layer: LayerMemory, use: int) -> Tensor:
        """What one use brought, as large as the parameter."""
        kind, role, uses = layers.of(layer.kind), self._role(layer), layer.uses
        if layer.keep == "examples":
            written = self._rows(layer, use, role).to(self.dtype)
            own = written.sum(0).view(kind.shape_of(layer.layer, role))
        else:
            dtype = uses.dtype_of(use) if self.dtype == self.known.dtype else self.dtype
            rows = (self._rows(layer, use, part) for part in ("keys", "error_signals"))
            keys, signals = (r.to(dtype) if r.is_floating_point() else r for r in rows)
            facts = uses.shape_of(use), int(uses.layout[use])
            own = kind.gradient(layer.layer, role, keys, signals, *facts)
        if tuple(own.shape) == self.known.shape:
            return own
        full = torch.zeros(self.known.shape, dtype=own.dtype)
        full[layer.rows_of(self.known.name)] = own
        return full

    def _rows(self, layer: LayerMemory, use: int, part: str) -> Tensor:
        rows = rows_of(layer, use, part)
        if self._jitter is None or not rows.is_floating_point():
            return rows
        return rows + jitter(layer, part, rows, self._jitter)


class Sums(FromPatterns[Sum]):
    """One parameter's gradients along v."""

    def __init__(self, memory: Memory, parameter: str) -> None:
        super().__init__(memory, parameter)
        self._v = memory.direction(parameter)
        self._lost = {layer.name: layer.lost(parameter) for layer in self.layers}

    def own(self, step: int, held: Sum | None) -> Sum:
        zero = np.zeros(self.known.height)
        found = (self._of_use(layer, use) for *_, layer, use in self._uses(step))
        return reduce(add, found, held or Sum(zero, zero, 0.0, np.zeros(2)))

    def _of_use(self, layer: LayerMemory, use: int) -> Sum:
        kind, role = layers.of(layer.kind), self._role(layer)
        v = self._v if role == "weight" else None
        rows = rows_of(layer, use, role if layer.keep == "examples" else "error_signals").double()
        if v is not None and layer.keep == "patterns":
            keys = rows_of(layer, use, "keys")
            keys = keys.double() if keys.is_floating_point() else keys
            along, gross = kind.along(layer.layer, keys, rows, v), kind.gross(keys, rows)
            terms = kind.sizes(layer.layer, keys, rows, v).square()
        else:
            gross = float(torch.linalg.vector_norm(rows)) * len(rows) ** 0.5
            rows = rows if v is None else rows.view(len(rows), -1, len(v)) @ v
            along, terms = rows.sum(0), rows.square().sum(0)
        # x·v may be small by chance where x is not: no row is taken for smaller than average
        floor = gross**2 / max(1, len(rows) * self.known.height)
        lost = self._lost[layer.name][use]
        if layer.keep == "examples" and layer.stored_eps:
            lost = np.array([0.0, layer.stored_eps / 2 * float(terms.sum()) ** 0.5])
        u = max(ROUNDING[layer.uses.dtype_of(use)], ROUNDING[self.known.dtype])
        (gv, squares), place = np.zeros((2, self.known.height)), layer.rows_of(self.known.name)
        by_examples = layer.keep == "examples"
        terms_added = prod(layer.uses.shape_of(use)) if by_examples else len(rows)
        u *= spread(terms_added, in_turn=by_examples)
        gv[place], squares[place] = along.numpy(), u * u * (terms.numpy() + floor)
        return Sum(gv, squares, u * gross, lost)


def rows_of(layer: LayerMemory, use: int, part: str) -> Tensor:
    """Read one part of a use's rows."""
    start = int(layer.uses.start[use])
    return layer.read(part, start, start + int(layer.uses.rows[use]))


def jitter(layer: LayerMemory, part: str, rows: Tensor, seed: int) -> Tensor:
    """Make up what rounding took from some rows, in a direction of chance.

    It follows from the stored number itself: one that comes back (an input, a signal too small to
    be kept) was rounded in one way each time, and that adds up.
    """
    size = max(layer.stored_eps / 2, ROUNDING[layer.dtype]) * rows.abs()
    if layer.stored == torch.float16:  # its smallest step, of keys or relative to each row
        size = size + 2.0**-25 * (1.0 if part == "keys" else rows.abs().amax(1, keepdim=True))
    words = rows.float().contiguous().view(torch.int32).long() + seed * 0x9E3779B1
    words = (words + torch.arange(rows.shape[1]) * 0xC2B2AE35) * 0x85EBCA6B & 0xFFFFFFFF
    words = (words ^ (words >> 15)) * 0x2C1B3C6D & 0xFFFFFFFF
    return size * ((words ^ (words >> 12)) * 2.0**-31 - 1).to(rows.dtype)


def times(gradient: T, kappa: float) -> T:
    """Multiply by κ as the dtype does."""
    return gradient if kappa == 1.0 else gradient * kappa
