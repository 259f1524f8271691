"""The gradients of all parameters along their probes, in as few calls as possible.

`ParameterAudit.look_at` says what is done: grad·v, of large weights a part of the rows at every
step. Parameter by parameter that is a dozen small calls each, and amid a training step, which has
just filled the processor's caches with something else, every one of them costs several times what
it does alone. Here those of all parameters are made together, as far as they can be.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dualform.recording.audit import EVERY_ROW, ParameterAudit

Array = NDArray[np.float64]


class Turn(NamedTuple):
    """Which rows are looked at in one of so many steps: of every parameter, by its number."""

    rows: list[slice]
    places: list[Tensor]
    """Where what is seen of them goes."""
    products: list[Tensor]
    """Where it is computed."""
    expected: list[tuple[Array, Array]]
    """What the patterns of these rows, and of all of the parameter's, sum to."""


class Together:
    """Looks at the gradients of all parameters, whose audits share two arrays."""

    def __init__(self, audits: Sequence[ParameterAudit], expected: Array, projected: Array) -> None:
        self._audits, self._expected, self._projected = audits, expected, projected
        self._turns: dict[int, Turn] = {}

    def look_at(self, gradients: Sequence[Tensor], step: int) -> None:
        """Put every parameter's grad·v into `projected`, by its number."""
        turn = self._turn(step)
        np.copyto(self._projected, self._expected)
        seen: list[Tensor] = []
        places: list[Tensor] = []
        apart: list[tuple[ParameterAudit, Tensor]] = []
        for number, (audit, gradient) in enumerate(zip(self._audits, gradients, strict=True)):
            rows = turn.rows[number]
            if not can_be_read(gradient, audit) or (
                rows is not EVERY_ROW and not audit.can_stand_for_all(*turn.expected[number])
            ):
                apart.append((audit, gradient))
                continue
            audit.have_seen(rows)
            places.append(turn.places[number])
            if audit.width == 1:
                seen.append(gradient)
            else:
                part = gradient if rows is EVERY_ROW else gradient[rows]
                seen.append(torch.mv(part, audit.probe, out=turn.products[number]))
        if places:
            torch._foreach_copy_(places, seen)
        for audit, gradient in apart:
            audit.look_at(gradient, step)

    def _turn(self, step: int) -> Turn:
        largest = max(audit.parts for audit in self._audits)
        number = (step + step // largest) % largest
        if number not in self._turns:
            self._turns[number] = self._plan(step)
        return self._turns[number]

    def _plan(self, step: int) -> Turn:
        ends = np.cumsum([len(audit.sketch) for audit in self._audits]).tolist()
        starts = [0, *ends[:-1]]
        rows = [audit.rows_of_turn(step) for audit in self._audits]
        whole = [slice(*r.indices(e - s)) for r, s, e in zip(rows, starts, ends, strict=True)]
        parts = [(s + r.start, s + r.stop) for r, s in zip(whole, starts, strict=True)]
        projected = torch.from_numpy(self._projected)
        return Turn(
            rows,
            [projected[start:stop] for start, stop in parts],
            [
                audit.probe.new_empty(stop - start)
                for audit, (start, stop) in zip(self._audits, parts, strict=True)
            ],
            [
                (self._expected[a:b], self._expected[start:end])
                for (a, b), start, end in zip(parts, starts, ends, strict=True)
            ],
        )


def can_be_read(gradient: Tensor, audit: ParameterAudit) -> bool:
    """Whether a gradient can be multiplied with its probe as it lies there."""
    return (
        gradient.dtype is audit.probe.dtype
        and gradient.is_cpu
        and not gradient.requires_grad
        and gradient.dim() == (1 if audit.width == 1 else 2)
    )
