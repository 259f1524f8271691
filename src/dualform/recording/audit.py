"""Proof, at every step, that what was recorded explains what training did.

Two questions per parameter, both answered on a random direction v drawn once per run from a private
generator (Freivalds' check: a wrong matrix agrees on a random vector with probability zero):

1. Is the gradient the sum of the recorded patterns?   grad·v = κ Σ_t δ_t (x_t·v)   This also yields
   κ, the factor that clipping or unscaling has put in. Of a large weight a part of the rows is
   looked at, another at every step: reading all of them costs as much as the rest of the audit.
2. Did the weights move as the learning rule says?     W·v follows its own recursion, in float64,
   moved by what the patterns say, and is compared with the real weights whenever a fingerprint is
   taken, every `FINGERPRINT_EVERY` steps at least: there a tampered weight is found, or an edited
   gradient that question 1 did not look at (`whereabouts.py`).

Rounding is not tampering: the bounds are several times what honest float arithmetic shows, and far
below what any edit would.

A trap: along v the gradient of a layer with one output is a single number, and a fitted κ would
explain any: a weight of fewer than `FEW_ROWS` rows is therefore compared entry by entry. Only a
parameter that *is* one number (the bias of that layer) has nothing to be compared with: an edit of
its gradient is a factor like any other, is recorded as κ, and the dual form still holds; unless its
patterns sum to nothing, where no factor could lead to the gradient seen, and none is accepted.
"""

from __future__ import annotations

from math import inf, sqrt

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dualform.memory.following import AGREEING
from dualform.recording.rows import Rows
from dualform.recording.unexplained import Unexplained, refuse_diverging
from dualform.recording.whereabouts import Whereabouts, as_matrix, norm

SLACK_GRADIENT = 32.0
"""How many times eps · Σ‖δ‖‖x‖ the two sides of question 1 may differ by."""

SLACK_16_BITS = 4.0
"""The same for bfloat16 and float16, which sum in float32 and round once."""

SNAP = 0.5
"""A factor κ this many times eps · Σ‖δ‖‖x‖ from 1, in units of the gradient, is taken for 1."""

SNAP_MANY = 1 / 512
"""So is one this many times eps from 1 for each pattern: a sum of many of one sign is rounded again
and again, and the same way."""

FEW_ROWS = 4
"""A weight with fewer rows is compared entry by entry: along v too little of it would be left."""

UNMEASURABLE = 1 / 16
"""A sum this many times its own bound is rounding alone: no factor above 1 is taken from it."""

LARGE = 1 << 16
"""From this many entries on a gradient is looked at in parts."""

PARTS = 16
"""In how many steps all rows of a large gradient are looked at."""

FAIR_SHARE = 4 * PARTS
"""A part of the rows must have this fraction of the whole (squared) to be looked at alone."""

EVERY_ROW = slice(None)

RECENT = 16
"""For how many steps a measured gross sum stands for the next ones."""


class ParameterAudit(Whereabouts):
    """What one parameter's patterns sum to along its random direction; and its whereabouts."""

    def __init__(
        self,
        parameter: Tensor,
        momentum: Tensor | None,
        generator: torch.Generator,
        directions: tuple[Tensor, Tensor] | None = None,
    ) -> None:
        super().__init__(parameter, momentum, generator, directions)
        rows, width = len(self.sketch), self.width
        exact = parameter.dtype in (torch.float32, torch.float64)
        self.probe = self.probe64.to(parameter.device, parameter.dtype if exact else torch.float32)
        self._root_width = sqrt(width) if rows >= FEW_ROWS else 1.0
        self.entrywise = rows < FEW_ROWS and width > 1
        self.gradient_tiny = float(torch.finfo(self.probe.dtype).tiny)
        self.gradient_eps = self.eps  # grows if a lower precision computes the gradient (autocast)
        self.parts = PARTS if rows * width >= LARGE and rows >= 16 * PARTS else 1
        self.expected = np.zeros(rows * (width if self.entrywise else 1))
        self.has_patterns = False  # whether there ever were any
        self._gradient: Tensor | None = None
        self._recent, self._age = 0.0, 0  # the last gross sum measured, and how long ago that was
        self._unsized: list[Rows] = []  # seen, and not yet in `_gross`
        self._seen = EVERY_ROW  # the rows of the gradient last looked at
        self._ones = self.probe.new_empty(2, 0)
        self.first = 0  # the step in which the gradient began to accumulate
        self.uses = self.patterns = 0  # what was seen of it since
        self._gross = 0.0

    def place(
        self,
        weights: NDArray[np.float64],
        momentum: NDArray[np.float64],
        expected: NDArray[np.float64],
        projected: NDArray[np.float64],
    ) -> None:
        """Keep the numbers in arrays given, [d0] each."""
        np.copyto(weights, self.weights)
        np.copyto(momentum, self.momentum)
        self.weights, self.momentum, self.projected = weights, momentum, projected
        if not self.entrywise:
            self.expected = expected

    def forget(self, step: int) -> None:
        """The gradient was reset: what accumulates from here on began at `step`."""
        self.first = step
        if not self.uses:
            return
        self.uses = self.patterns = 0
        self.expected.fill(0.0)
        self._gross = 0.0
        self._unsized.clear()

    def see(self, part: Tensor, rows: Rows, eps: float, offset: int = 0) -> None:
        """Patterns that will be in the gradient: their Σ δ (x·v), and where they are kept.

        Σ δ x, flat, where entries are compared. `offset`: the first row they are for.
        """
        seen = part.cpu().numpy()
        if len(seen) == len(self.expected):
            self.expected += seen
        else:  # a layer that is some rows of this parameter
            start = offset * self.width if self.entrywise else offset
            self.expected[start : start + len(seen)] += seen
        self._unsized.append(rows)
        if eps > self.gradient_eps:
            self.gradient_eps = eps
        self.uses += 1
        self.patterns += rows.patterns
        self.has_patterns = True

    def look_at(self, gradient: Tensor, step: int | None = None) -> None:
        """Put grad·v into `projected`, [d0]; given a step, only the rows whose turn it is.

        What is not looked at is taken to be what the patterns sum to. Where entries are compared,
        `explain` will look at the gradient itself.
        """
        if gradient.requires_grad:
            gradient = gradient.detach()
        self._gradient = gradient if self.entrywise and self.has_patterns else None
        self._seen = EVERY_ROW
        if self.width == 1:
            self._into_projected(gradient.reshape(-1))
            return
        matrix = as_matrix(gradient)
        if step is not None and self.parts > 1:
            rows = self.rows_of_turn(step)
            part, whole = self.expected[rows], self.expected
            if self.can_stand_for_all(part, whole):
                self._seen, matrix = rows, matrix[rows]
                np.copyto(self.projected, self.expected)
        if matrix.dtype != self.probe.dtype:
            matrix = matrix.to(self.probe.dtype)
        self._into_projected(torch.mv(matrix, self.probe))

    def look_at_all_rows(self) -> None:
        """At every step: where no rule predicts the weights, nothing would tell of an edit."""
        self.parts = 1

    def rows_of_turn(self, step: int) -> slice:
        """The rows to be looked at in a step."""
        if self.parts == 1:
            return EVERY_ROW
        turn = (step + step // self.parts) % self.parts  # edits every so many steps meet it
        rows = len(self.projected)
        return slice(rows * turn // self.parts, rows * (turn + 1) // self.parts)

    def can_stand_for_all(self, part: NDArray[np.float64], whole: NDArray[np.float64]) -> bool:
        """Whether κ can be told from some rows: those of silent units would explain any factor.

        Given what the patterns of these rows, and of all, sum to. And whether the patterns
        tell what the other rows are: a gradient of lower precision than the weights (autocast) was
        rounded, and moves them by what it is, not by what it should be.
        """
        if self.gradient_eps > self.eps:
            return False
        return FAIR_SHARE * float(part.dot(part)) >= float(whole.dot(whole)) > 0

    def have_seen(self, rows: slice) -> None:
        """Somebody else has looked at these rows of the gradient, and put them in `projected`."""
        self._gradient, self._seen = None, rows

    @property
    def sketched(self) -> float:
        """u·(grad v), for the log."""
        return float(self.sketch.dot(self.projected))

    def _into_projected(self, values: Tensor) -> None:
        if values.dtype == torch.bfloat16:  # numpy has none
            values = values.float()
        self.projected[self._seen] = values.cpu().numpy()

    def ones_and(self, patterns: int) -> Tensor:
        """A row of ones and a row to write to, [2, n]; the same tensor as long as n stays."""
        if self._ones.shape[1] != patterns:
            self._ones = torch.ones(2, patterns, dtype=self.probe.dtype, device=self.probe.device)
        return self._ones

    @property
    def is_finite(self) -> bool:
        """Whether what the patterns sum to is a number at all."""
        return bool(np.isfinite(self.expected).all())

    @property
    def expects_nothing(self) -> bool:
        """Whether the patterns seen sum to zero, up to rounding: an input of zeros, say."""
        return self.uses > 0 and norm(self.expected) <= self.gradient_bound < inf

    @property
    def gradient_bound(self) -> float:
        """Relative rounding; and below the smallest normal number all rounding is absolute."""
        return self.bound_of(self.rounding)

    def bound_of(self, rounding: float) -> float:
        slack = SLACK_GRADIENT if self.gradient_eps < 1e-5 else SLACK_16_BITS
        return slack * rounding + self.gradient_tiny

    @property
    def gross(self) -> float:
        """Σ ‖δ‖‖x‖ over the patterns seen, more where they are many (`AGREEING`): what the rounding
        of their sum scales with."""
        while self._unsized:
            rows = self._unsized.pop()
            size = sqrt(rows.patterns) if self.width == 1 else rows.size_of_keys / self._root_width
            agreeing = 1 + sqrt(rows.patterns) / AGREEING
            self._gross += rows.size_of_error_signals * size * agreeing
            self._recent, self._age = self._gross, 0
        return self._gross

    @property
    def recent_rounding(self) -> float:
        """About what `rounding` is, by the last few steps: no need to measure it every time."""
        self._age += 1
        return self.gradient_eps * self._recent if self._age < RECENT else 0.0

    def settle(self, step: int) -> None:
        """Take the sizes of rows of earlier steps, before their place is used for others."""
        if self._unsized and self._unsized[0].step < step:
            self._gross = self.gross

    @property
    def has_unsized(self) -> bool:
        """Whether there are rows whose sizes were not taken."""
        return bool(self._unsized)

    @property
    def rounding(self) -> float:
        """What the sum of all patterns may be off by, if each part is rounded once."""
        return self.gradient_eps * self.gross

    @property
    def clarity(self) -> float:
        """How far what the patterns sum to stands above its own rounding, by a recent measure."""
        gross = self._recent if self._recent and self._age < RECENT else self.gross
        return norm(self.expected) / (self.gradient_eps * gross) if gross else 0.0

    def allows(self, measured: float, other: float, share: float = 1.0) -> bool:
        """Whether a factor other than the one measured explains the gradient as well.

        `share`: within which part of the bound.
        """
        bound = share * self.gradient_bound * max(abs(measured), abs(other))
        return abs(measured - other) * norm(self.expected) <= bound

    def explain(self) -> float:
        """κ with grad·v = κ Σ δ (x·v), or `Unexplained`, for the gradient last looked at.

        κ is measured even where 1 would do: where patterns nearly cancel, or in 16 bits, rounding
        could hide a clipped gradient.
        """
        if self.entrywise:
            return self._factor(self._entries(), self.expected)
        kappa = self._factor(self.projected[self._seen], self.expected[self._seen])
        if kappa != 1.0 and self._seen is not EVERY_ROW:
            seen = self.projected[self._seen].copy()
            np.multiply(self.expected, kappa, out=self.projected)
            self.projected[self._seen] = seen
        return kappa

    def _factor(self, projected: NDArray[np.float64], expected: NDArray[np.float64]) -> float:
        bound, size = self.gradient_bound, norm(expected)
        refuse_diverging(projected, expected, (size, norm(projected), bound))
        kappa = float(expected.dot(projected)) / size**2 if size > 1e-150 else 1.0
        off_by = max(SNAP * self.rounding, SNAP_MANY * self.patterns * self.gradient_eps * size)
        if abs(kappa - 1.0) * size <= off_by:
            kappa = 1.0
        residual = norm(projected - kappa * expected)
        if residual <= bound * abs(kappa) and (abs(kappa) <= 1.0 or size > UNMEASURABLE * bound):
            return kappa
        if norm(projected - expected) <= bound:
            return kappa
        if size <= UNMEASURABLE * bound:
            kappa, residual = 1.0, norm(projected - expected)
        relative = residual / max(norm(projected), 1e-300)
        raise Unexplained(
            f"{relative:.1%} of its gradient is not in the recorded patterns (best factor "
            f"{kappa:.4g}); clipping by norm, loss scaling and accumulation would leave nothing "
            "over. Was the gradient edited by hand, clipped by value, given noise, the weight used "
            "outside its layer, or in the loss itself: a penalty on the weight (give the optimizer "
            "weight_decay instead), a penalty on gradients (create_graph=True)? Or was a backward "
            "pass for only some of its layer's parameters, and another of this step for more: "
            "backward(inputs=...) with one of weight and bias (name both, or neither)?"
        )

    def _entries(self) -> NDArray[np.float64]:
        """The entries of the gradient projected last, flat."""
        gradient, self._gradient = self._gradient, None
        assert gradient is not None, "explain() goes with the look_at() before it"
        return gradient.reshape(-1).double().cpu().numpy()
