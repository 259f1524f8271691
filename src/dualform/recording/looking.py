"""The gradients of all parameters along their probes, in as few calls as possible.

`ParameterAudit.look_at` says what is done: grad·v, of large weights a part of the rows at every
step. Parameter by parameter that is a dozen small calls each, and amid a training step, which has
just filled the processor's caches with something else, every one of them costs several times what
it does alone. Here those of all parameters are made together, as far as they can be.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dualform.recording.audit import EVERY_ROW, SNAP, ParameterAudit
from dualform.recording.unexplained import LARGEST

Array = NDArray[np.float64]

LARGEST_SQUARE = LARGEST * LARGEST

_nature = attrgetter("is_cpu", "requires_grad", "layout", "dtype", "shape")


class Product(NamedTuple):
    """The rows that are looked at of one weight's gradient, in one of so many steps."""

    number: int
    """The weight's."""
    rows: slice
    probe: Tensor
    place: Tensor
    """Where what is seen goes."""


class Part(NamedTuple):
    """A weight that is looked at in part: what the patterns of these rows, and of all, sum to."""

    audit: ParameterAudit
    number: int
    order: int
    rows: slice
    expected: Array
    whole: Array


class Turn(NamedTuple):
    """What is looked at in one of so many steps: first rows of weights, then biases."""

    products: list[Product]
    parts: list[Part]
    biases: list[int]
    """Their numbers."""
    place: Tensor
    """Where what is seen of them goes."""
    values: Array | NDArray[np.float32]
    """All that is seen, as it was computed."""
    seen: Array
    which: NDArray[np.int64]
    """Which of all rows these are."""
    audits: list[ParameterAudit]
    """Whose: in this order."""
    starts: NDArray[np.int64]
    """Where the rows of each begin."""


class Together:
    """Looks at the gradients of all parameters, whose audits share two arrays."""

    def __init__(self, audits: Sequence[ParameterAudit], expected: Array, projected: Array) -> None:
        self._audits, self._expected, self._projected = audits, expected, projected
        self._dtype = audits[0].probe.dtype if audits else torch.float64
        self._natures = [(True, False, torch.strided, self._dtype, a.shape) for a in audits]
        self._largest = 1  # number of parts, of any
        self._turns: dict[int, Turn] = {}
        self._latest: Turn | None = None

    def look_at(self, gradients: Sequence[Tensor], step: int) -> None:
        """Put every parameter's grad·v into `projected`, by its number."""
        if not self._can_read(gradients):
            for audit, gradient in zip(self._audits, gradients, strict=True):
                audit.look_at(gradient, step)
            return
        turn = self._see(gradients, step)
        self.complete()
        for audit in self._audits:
            audit.have_seen(EVERY_ROW)
        for part in turn.parts:
            if part.audit.can_stand_for_all(part.expected, part.whole):
                part.audit.have_seen(part.rows)
            else:
                part.audit.look_at(gradients[part.number])

    def explain(self, gradients: Sequence[Tensor], step: int) -> bool:
        """Whether all gradients are plain, as far as they are looked at in this step.

        If so, `complete` is to follow, before anything else is seen of patterns.
        """
        if not self._can_read(gradients):
            return False
        turn = self._see(gradients, step)
        expected = self._expected.take(turn.which)
        sums = squares(expected, turn.seen - expected, turn.starts)
        for audit, _, order, _, part, whole in turn.parts:
            if not audit.can_stand_for_all(part, whole):
                return False
            sums[order][0] = float(whole.dot(whole))
        return all(map(is_plain, turn.audits, sums))

    def complete(self) -> None:
        """Put what was last seen into `projected`; of other rows, what patterns sum to."""
        assert self._latest is not None
        np.copyto(self._projected, self._expected)
        self._projected[self._latest.which] = self._latest.seen

    def _can_read(self, gradients: Sequence[Tensor]) -> bool:
        """Whether all can be multiplied with their probes as they lie there."""
        return list(map(_nature, gradients)) == self._natures

    def _see(self, gradients: Sequence[Tensor], step: int) -> Turn:
        if not self._turns:
            self._largest = max(audit.parts for audit in self._audits)
        number = (step + step // self._largest) % self._largest
        turn = self._turns.get(number)
        if turn is None:
            turn = self._turns[number] = self._plan(step)
        for weight, rows, probe, place in turn.products:
            gradient = gradients[weight]
            torch.mv(gradient if rows is EVERY_ROW else gradient[rows], probe, out=place)
        if turn.biases:
            torch.cat([gradients[bias].reshape(-1) for bias in turn.biases], out=turn.place)
        np.copyto(turn.seen, turn.values)
        self._latest = turn
        return turn

    def _plan(self, step: int) -> Turn:
        firsts = np.cumsum([0, *(len(audit.sketch) for audit in self._audits)]).tolist()
        in_order = sorted(range(len(self._audits)), key=lambda n: self._audits[n].width == 1)
        rows = {n: self._audits[n].rows_of_turn(step) for n in in_order}
        index = [np.arange(firsts[n], firsts[n + 1])[rows[n]] for n in in_order]
        starts = np.cumsum([0, *map(len, index)])
        values = torch.empty(int(starts[-1]), dtype=self._dtype)
        places = dict(zip(in_order, torch.split(values, list(map(len, index))), strict=True))
        audits = [self._audits[n] for n in in_order]
        weights = [n for n in in_order if self._audits[n].width > 1]
        everything = np.concatenate(index)
        return Turn(
            [Product(n, rows[n], self._audits[n].probe, places[n]) for n in weights],
            [
                Part(
                    self._audits[n],
                    n,
                    order,
                    rows[n],
                    self._expected[firsts[n] : firsts[n + 1]][rows[n]],
                    self._expected[firsts[n] : firsts[n + 1]],
                )
                for order, n in enumerate(weights)
                if rows[n] is not EVERY_ROW
            ],
            in_order[len(weights) :],
            values[int(starts[len(weights)]) :],
            values.numpy(),
            np.empty(len(everything)),
            everything,
            audits,
            starts[:-1],
        )


def can_be_read(gradient: Tensor, audit: ParameterAudit) -> bool:
    """Whether a gradient can be multiplied with its probe as it lies there."""
    return (
        gradient.dtype is audit.probe.dtype
        and gradient.is_cpu
        and not gradient.requires_grad
        and gradient.dim() == (1 if audit.width == 1 else 2)
    )


def squares(expected: Array, off: Array, starts: NDArray[Any]) -> list[list[float]]:
    """E·E, E·o and o·o of every parameter, whose rows begin at `starts`."""
    products = np.empty((3, len(expected)))
    np.multiply(expected, expected, out=products[0])
    np.multiply(expected, off, out=products[1])
    np.multiply(off, off, out=products[2])
    found: list[list[float]] = np.add.reduceat(products, starts, axis=1).T.tolist()
    return found


def is_plain(audit: ParameterAudit, sums: Sequence[float]) -> bool:
    """Whether, with E what the patterns sum to, the gradient E + o is E up to rounding.

    Given E·E, E·o and o·o. NaN answers no, and so does what is too large to be compared.
    """
    square, along, distance = sums
    if not 1e-300 < square < LARGEST_SQUARE or not audit.uses:
        return False
    size = sqrt(square)
    # first by what need not be measured: ‖E‖, less than the gross sum, or a recent one
    rounding = max(audit.gradient_eps * size, audit.recent_rounding)
    return _is_within(audit, rounding, size, along, distance) or _is_within(
        audit, audit.rounding, size, along, distance
    )


def _is_within(
    audit: ParameterAudit, rounding: float, size: float, along: float, distance: float
) -> bool:
    off_by, bound = SNAP * rounding * size, audit.bound_of(rounding)
    return -off_by <= along <= off_by and distance <= bound * bound < LARGEST_SQUARE
