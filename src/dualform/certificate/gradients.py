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
from functools import reduce
from itertools import groupby
from math import prod
from operator import add, itemgetter

import torch
from torch import Tensor

from dualform import layers
from dualform.certificate.bounds import LEAST, LOST, ROUNDING, SUM, spread
from dualform.memory import LayerMemory, Memory

Use = tuple[tuple[int, int], LayerMemory, int]
"""The pass and the place of its arrival there; the layer, and the number of the use there."""


class FromPatterns(ABC):
    """One parameter's gradients, seen in one way."""

    def __init__(self, memory: Memory, parameter: str) -> None:
        self.known, self.log = memory.parameters[parameter], memory.log(parameter)
        self.v, self.signs = memory.direction(parameter), memory.signs(parameter)
        found = (memory.layer(name) for name in self.known.layers)
        self.layers = [layer for layer in found if layer.keep != "keys"]
        self.last: tuple[int | None, Tensor] = None, torch.empty(0)  # step, and `.grad` after it

    @abstractmethod
    def own(self, step: int, held: Tensor | None) -> Tensor:
        """Add what the patterns of a step sum to onto what `.grad` held; κ comes later."""

    def total(self, step: int) -> tuple[Tensor, float]:
        """Give the gradient of a step as the backward pass left it, and κ as in the log."""
        log, first = self.log, step
        while first and log.carried[first] and first - 1 != self.last[0]:
            first -= 1
        for earlier in range(first, step):
            self.of(earlier)
        is_carried = log.carried[step] and self.last[0] == step - 1
        kappa = float(log.kappa[step]) if log.moved[step] else 1.0
        return self.own(step, self.last[1] if is_carried else None), kappa

    def of(self, step: int) -> Tensor:
        """Give the gradient of a step."""
        self.last = step, self.times(*self.total(step))
        return self.last[1]

    def times(self, gradient: Tensor, kappa: float) -> Tensor:
        """Multiply by κ as the dtype does."""
        return gradient if kappa == 1.0 else gradient * kappa

    def _passes(self, step: int) -> list[list[Use]]:
        """List the uses of a step, pass by pass, in the order in which they arrived."""
        found = [
            (la.uses.arrival_of(u), la, u) for la in self.layers for u in la.uses.of_step(step)
        ]
        found.sort(key=itemgetter(0))
        return [list(uses) for _, uses in groupby(found, key=lambda use: use[0][0])]

    def _role(self, layer: LayerMemory) -> str:
        return "weight" if self.known.name == layer.weight else "bias"


class ExplainedGradients(FromPatterns):
    """One parameter's gradients as a whole, in one dtype: in float64 they are free of rounding.

    Given a number as `jitter`, rows are moved by what storing and computing round away.
    """

    def __init__(self, memory: Memory, parameter: str, dtype: torch.dtype, jitter: int = 0) -> None:
        super().__init__(memory, parameter)
        self.dtype, self._kept, self._jitter = dtype, memory.kept, jitter

    def total(self, step: int) -> tuple[Tensor, float]:
        kept = self._kept.gradient(self.known.name, step)
        return super().total(step) if kept is None else (kept.to(self.dtype, copy=True), 1.0)

    def own(self, step: int, held: Tensor | None) -> Tensor:
        onto = [] if held is None else [held]
        for uses in self._passes(step):
            sums: dict[object, Tensor] = {}
            for at, layer, use in uses:
                product, dtype = self._of_use(layer, use), layer.uses.dtype_of(use)
                key = at if dtype == self.known.dtype else dtype  # one cast for all of fewer bits
                sums[key] = sums.pop(key) + product if key in sums else product
            onto.append(reduce(add, (one.to(self.dtype) for one in sums.values())))
        return reduce(add, onto or [torch.zeros(self.known.shape, dtype=self.dtype)])

    def may_meet(self, step: int) -> bool:
        """Whether uses may be added up before they reach `.grad`, in a way that is not on record.

        Casts are one for every region of autocast; code past modules, whose layers are called after
        the weight, may use one view of a weight several times.
        """
        return any(
            sum(layer.uses.dtype_of(use) != self.known.dtype for _, layer, use in uses) > 1
            or (len(uses) > 2 and any(layer.name == layer.weight for _, layer, _ in uses))
            for uses in self._passes(step)
        )

    def _of_use(self, layer: LayerMemory, use: int) -> Tensor:
        """Compute what one use brought, as large as the parameter."""
        kind, role, uses, dtype = layers.of(layer.kind), self._role(layer), layer.uses, self.dtype
        if layer.keep == "examples":
            written = self._rows(layer, use, role, dtype)
            own = written.sum(0).view(kind.shape_of(layer.layer, role))
        else:
            dtype = uses.dtype_of(use) if dtype == self.known.dtype else dtype
            keys, signals = (self._rows(layer, use, p, dtype) for p in ("keys", "error_signals"))
            facts = uses.shape_of(use), int(uses.layout[use])
            own = kind.gradient(layer.layer, role, keys, signals, *facts)
        if tuple(own.shape) == self.known.shape:
            return own
        full = torch.zeros(self.known.shape, dtype=own.dtype)
        full[layer.rows_of(self.known.name)] = own
        return full

    def _rows(self, layer: LayerMemory, use: int, part: str, dtype: torch.dtype) -> Tensor:
        """Read the rows of a use; jitter follows from each number itself: one that comes back (an
        input, say) was rounded in one way each time, and that adds up."""
        rows = rows_of(layer, use, part)
        if not self._jitter or not rows.is_floating_point():
            return rows.to(dtype) if rows.is_floating_point() else rows
        size = max(layer.stored_eps / 2, ROUNDING[layer.dtype]) * rows.abs()
        if layer.stored == torch.float16:  # its smallest step, of keys or relative to each row
            size = size + 2.0**-25 * (1.0 if part == "keys" else rows.abs().amax(1, keepdim=True))
        digits = 1e6 * rows.double().abs().clamp(min=2.0**-200).log2() + 0.755 * (self._jitter - 1)
        chance = (digits + 0.570 * torch.arange(rows.shape[1])).frac().abs()
        return (rows + size * (2 * chance - 1).to(rows.dtype)).to(dtype)


class Sums(FromPatterns):
    """One parameter's gradients along v, [2, rows + 1]: G v of each row, and how far it may be off.

    The last column is the rows' signed sum. Of it is known what 16 bits lost in every use, so it is
    as sharp as if rows were exact (of examples that is not known).
    """

    def __init__(self, memory: Memory, parameter: str) -> None:
        super().__init__(memory, parameter)
        self._lost = {layer.name: layer.lost(parameter) for layer in self.layers}

    def own(self, step: int, held: Tensor | None) -> Tensor:
        found = (self._of_use(*use[1:]) for uses in self._passes(step) for use in uses)
        nothing = torch.tensor([[0.0], [LEAST]], dtype=torch.float64)
        return reduce(add, found, nothing.repeat(1, len(self.signs) + 1) if held is None else held)

    def times(self, gradient: Tensor, kappa: float) -> Tensor:
        return gradient * torch.tensor([[kappa], [abs(kappa)]], dtype=torch.float64)

    def _of_use(self, layer: LayerMemory, use: int) -> Tensor:
        kind, role, rows_here = layers.of(layer.kind), self._role(layer), len(self.signs)
        v, by_examples = self.v if role == "weight" else None, layer.keep == "examples"
        rows = rows_of(layer, use, role if by_examples else "error_signals").double()
        if v is not None and not by_examples:
            keys = rows_of(layer, use, "keys")
            keys = keys.double() if keys.is_floating_point() else keys
            along, gross = kind.along(layer.layer, keys, rows, v), kind.gross(keys, rows)
            terms = kind.sizes(layer.layer, keys, rows, v).square()
        else:
            gross = float(torch.linalg.vector_norm(rows)) * len(rows) ** 0.5
            rows = rows if v is None else rows.view(len(rows), -1, len(v)) @ v
            along, terms = rows.sum(0), rows.square().sum(0)
        # x·v may be small by chance where x is not: no row is taken for smaller than average
        size = (terms + gross**2 / max(1, len(rows) * rows_here)).sqrt()
        by_signs, lost = self._lost[layer.name][use].tolist()
        if by_examples and layer.stored_eps:
            by_signs, lost = 0.0, layer.stored_eps / 2 * float(terms.sum()) ** 0.5
        added = prod(layer.uses.shape_of(use)) if by_examples else len(rows)
        u = max(ROUNDING[layer.uses.dtype_of(use)], ROUNDING[self.known.dtype])
        u *= SUM * spread(added, in_turn=by_examples)
        place, found = layer.rows_of(self.known.name), torch.zeros(2, rows_here + 1).double()
        found[0, :-1][place] = along
        found[1, :-1][place] = (u + LOST * lost / (float(size.norm()) or 1.0)) * size
        found[0, -1] = float(self.signs[place] @ along.numpy()) - by_signs
        found[1, -1] = u * gross + (LOST * lost if by_examples else 0.0)
        return found


def rows_of(layer: LayerMemory, use: int, part: str) -> Tensor:
    """Read one part of a use's rows."""
    start = int(layer.uses.start[use])
    return layer.read(part, start, start + int(layer.uses.rows[use]))
