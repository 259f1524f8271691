"""Proof, at every step, that what was recorded explains what training did.

Two questions per parameter, both answered on a random direction v drawn once per run from a private
generator (Freivalds' check: a wrong matrix agrees on a random vector with probability zero):

1. Is the gradient the sum of the recorded patterns?   grad·v = κ Σ_t δ_t (x_t·v)   This also yields
   κ, the factor that clipping or unscaling has put in. Of a large weight a part of the rows is
   looked at, another at every step: reading all of them costs as much as the rest of the audit.
2. Did the weights move as the learning rule says?     W·v follows its own recursion, in float64,
   moved by what the patterns say, and is compared with the real weights whenever a fingerprint is
   taken, every `FINGERPRINT_EVERY` steps at least: there a tampered weight is found, or an edited
   gradient that question 1 did not look at.

Rounding is not tampering: the bounds below are several times what honest float arithmetic shows,
and far below what any edit would.

Two traps. Along v the gradient of a layer with one output is a single number, and a fitted κ would
explain any: a weight of fewer than `FEW_ROWS` rows is therefore compared entry by entry. Only a
parameter that *is* one number (the bias of that layer) has nothing to be compared with: an edit of
its gradient is a factor like any other, is recorded as κ, and the dual form still holds; unless its
patterns sum to nothing, where no factor could lead to the gradient seen, and none is accepted. And
rounding does not only scatter: what is below half a unit in the last place is lost at every step,
always the same way (a silent unit does not decay by 1e-8 a step in float32, whatever the rule
says). Scatter grows with √steps, loss with steps, and no bound can hold the second for ever without
letting edits through. So once `ANCHOR` steps have passed a full comparison, prediction starts again
from the real weights. The buffer's prediction goes on: momentum below 1 forgets its own errors.
"""

from __future__ import annotations

from math import inf, isfinite, sqrt

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dualform.memory.following import AGREEING
from dualform.recording.rows import Rows
from dualform.recording.unexplained import Unexplained, quietly, refuse_diverged, refuse_diverging

SLACK_GRADIENT = 32.0
"""How many times eps · Σ‖δ‖‖x‖ the two sides of question 1 may differ by."""

SLACK_16_BITS = 4.0
"""The same for bfloat16 and float16, which sum in float32 and round once."""

SNAP = 0.5
"""A factor κ this many times eps · Σ‖δ‖‖x‖ from 1, in units of the gradient, is taken for 1."""

SNAP_MANY = 1 / 512
"""So is one this many times eps from 1 for each pattern: a sum of many of one sign is rounded again
and again, and the same way."""

SLACK_WEIGHTS = 48.0
"""How many times eps · √steps · scale the two sides of question 2 may differ by: scatter."""

SLACK_LOST = 2.0
"""How many times eps · scale per step: half a unit in the last place, four deviations out."""

SLACK_HELD = 1.0
"""How many times eps · path / (1 − μ): settings and buffer, rounded the same way every step."""

ANCHOR = 256
"""After how many steps, if all rows pass, prediction starts again from the real weights."""

FEW_ROWS = 4
"""A weight with fewer rows is compared entry by entry: along v too little of it would be left."""

UNMEASURABLE = 1 / 16
"""A sum this many times its own bound is rounding alone: no factor above 1 is taken from it."""

BLOCK = 1 << 16
"""How many entries are widened to float64 at a time."""

LARGE = 1 << 16
"""From this many entries on a gradient is looked at in parts."""

PARTS = 16
"""In how many steps all rows of a large gradient are looked at."""

FAIR_SHARE = 4 * PARTS
"""A part of the rows must have this fraction of the whole (squared) to be looked at alone."""

EVERY_ROW = slice(None)

RECENT = 16
"""For how many steps a measured gross sum stands for the next ones."""


Transition = tuple[float, float, float, float, float, float]
"""M and κN of one step: (M_ww, M_wm, M_mw, M_mm, N_w, N_m)."""


def as_matrix(tensor: Tensor) -> Tensor:
    """Any parameter as [d0, rest]; a vector is a column."""
    if tensor.dim() == 2:
        return tensor
    return tensor.reshape(tensor.shape[0] if tensor.dim() else 1, -1)


EPSILON = {
    dtype: float(torch.finfo(dtype).eps)
    for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16)
}
"""The relative rounding of each type of numbers."""


class ParameterAudit:
    """One parameter's random direction, what its patterns sum to, where its weights should be."""

    def __init__(
        self,
        parameter: Tensor,
        momentum: Tensor | None,
        generator: torch.Generator,
        directions: tuple[Tensor, Tensor] | None = None,
    ) -> None:
        matrix = as_matrix(parameter.detach())
        rows, width = matrix.shape
        self.probe64, self.sketch64 = directions or _directions(rows, width, generator)
        exact = parameter.dtype in (torch.float32, torch.float64)
        self.probe = self.probe64.to(parameter.device, parameter.dtype if exact else torch.float32)
        self.shape, self.width = parameter.shape, width
        self._root_width = sqrt(width) if rows >= FEW_ROWS else 1.0
        self.entrywise = rows < FEW_ROWS and width > 1
        self.tiny = float(torch.finfo(parameter.dtype).tiny)
        self.gradient_tiny = float(torch.finfo(self.probe.dtype).tiny)
        self.eps = EPSILON[parameter.dtype]
        self.gradient_eps = self.eps  # grows if a lower precision computes the gradient (autocast)
        self.sketch = self.sketch64.numpy()
        self.parts = PARTS if rows * width >= LARGE and rows >= 16 * PARTS else 1
        self.weights = self.project(parameter)
        self.momentum = np.zeros(rows) if momentum is None else self.project(momentum)
        self.expected = np.zeros(rows * (width if self.entrywise else 1))
        self.projected = np.zeros(rows)
        self.spread = self.ever = largest_row(matrix)  # since the anchor; of all times
        self.steps = 0  # since the prediction last started from the real weights, as are the next:
        self.travel = 0.0  # Σ of what moved, squared
        self.path = 0.0  # Σ of what moved, for as long as it acts
        self.has_patterns = False  # whether there ever were any
        self._gradient: Tensor | None = None
        self._recent, self._age = 0.0, 0  # the last gross sum measured, and how long ago that was
        self._unsized: list[Rows] = []  # seen, and not yet in `_gross`
        self._seen = EVERY_ROW  # the rows of the gradient last looked at
        self._ones = self.probe.new_empty(2, 0)
        self.initial_share = (1.0, 0.0, 0.0, 1.0)  # how much of (W_0, m_0) is in (W, m) now
        self.first = 0
        self.forget(0)

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

    # -- question 1: the gradient ---------------------------------------------------------------

    def forget(self, step: int) -> None:
        """The gradient was reset: what accumulates from here on began at `step`."""
        self.first = step
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
        return self.uses > 0 and _norm(self.expected) <= self.gradient_bound < inf

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
        return _norm(self.expected) / (self.gradient_eps * gross) if gross else 0.0

    def allows(self, measured: float, other: float, share: float = 1.0) -> bool:
        """Whether a factor other than the one measured explains the gradient as well.

        `share`: within which part of the bound.
        """
        bound = share * self.gradient_bound * max(abs(measured), abs(other))
        return abs(measured - other) * _norm(self.expected) <= bound

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
        bound, size = self.gradient_bound, _norm(expected)
        refuse_diverging(projected, expected, (size, _norm(projected), bound))
        kappa = float(expected.dot(projected)) / size**2 if size > 1e-150 else 1.0
        off_by = max(SNAP * self.rounding, SNAP_MANY * self.patterns * self.gradient_eps * size)
        if abs(kappa - 1.0) * size <= off_by:
            kappa = 1.0
        residual = _norm(projected - kappa * expected)
        if residual <= bound * abs(kappa) and (abs(kappa) <= 1.0 or size > UNMEASURABLE * bound):
            return kappa
        if _norm(projected - expected) <= bound:
            return kappa
        if size <= UNMEASURABLE * bound:
            kappa, residual = 1.0, _norm(projected - expected)
        relative = residual / max(_norm(projected), 1e-300)
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

    # -- question 2: the weights ----------------------------------------------------------------

    def advance(self, transition: Transition) -> None:
        """One step of the learning rule, seen along v, by the gradient last looked at."""
        change, pull = advance_along(self.weights, self.momentum, self.projected, transition)
        self.count(transition, float(change.dot(change)) + float(pull.dot(pull)))

    def count(self, transition: Transition, moved: float) -> None:
        """A step was made in which this much moved, squared."""
        ww, wm, mw, mm, _, _ = transition
        self.travel += moved
        self.path += sqrt(moved) / (max(1.0 - mm, 1e-3) if wm else 1.0)
        self.steps += 1
        a, b, c, d = self.initial_share
        self.initial_share = (ww * a + wm * c, ww * b + wm * d, mw * a + mm * c, mw * b + mm * d)

    @quietly()
    def compare(self, parameter: Tensor, fingerprint: NDArray[np.float64] | None = None) -> None:
        """Raise `Unexplained` unless the weights are where the rule puts them.

        Their `fingerprint` W v is taken if it is not given. If `ANCHOR` steps have passed and all
        is well, prediction starts again from it.
        """
        real = self.project(parameter) if fingerprint is None else fingerprint
        anchor = self.steps >= ANCHOR
        if anchor:
            largest = largest_row(as_matrix(parameter.detach()))
            self.spread = max(self.spread, largest)
        off = float(np.abs(real - self.weights).max(initial=0.0))
        bound = self.weights_bound
        refuse_diverged(off, bound)
        if off > bound:
            raise Unexplained(
                f"its weights are {off:.3g} away from where the learning rule puts them (rounding "
                f"allows {bound:.3g}). Was it changed outside optimizer.step(), or its gradient "
                "after it, past torch (.data, .numpy())? Or is the optimizer not what it says?"
            )
        if anchor:
            self.start_from(real, largest)

    def start_from(self, weights: NDArray[np.float64], largest: float) -> None:
        """Predict from weights with this fingerprint, whose largest row has this size."""
        np.copyto(self.weights, weights)
        self.spread = largest
        self.ever = max(self.ever, largest)
        self.travel = self.path = 0.0
        self.steps = 0

    @property
    def weights_bound(self) -> float:
        """What scatters, what is lost, what is held rounded; below the smallest number, all is.

        Weights that decayed to nothing still feel what was rounded when they were large.
        """
        scatter = SLACK_WEIGHTS * sqrt(self.steps + 1) * (self.spread + sqrt(self.travel))
        lost = SLACK_LOST * self.steps * self.spread
        held = SLACK_HELD * self.path
        return self.eps * (scatter + lost + held + self.eps * self.ever) + self.tiny

    def has_moved(self, parameter: Tensor, transition: Transition) -> bool:
        """Whether the real weights look like after this step rather than before it."""
        ww, wm, _, _, nw, _ = transition
        after = ww * self.weights + wm * self.momentum + nw * self.projected
        real = self.project(parameter)
        return _norm(real - after) < _norm(real - self.weights)

    def project(self, tensor: Tensor) -> NDArray[np.float64]:
        """The fingerprint W v in float64, [d0].

        A few rows at a time, so that what is widened to float64 stays in the processor's cache.
        """
        matrix = as_matrix(tensor.detach()).cpu()
        result = torch.empty(len(matrix), dtype=torch.float64)
        if matrix.dtype == torch.float64:
            torch.mv(matrix, self.probe64, out=result)
        else:
            height = BLOCK // max(1, self.width) + 1
            for rows, part in zip(
                torch.split(matrix, height), torch.split(result, height), strict=True
            ):
                torch.mv(rows.double(), self.probe64, out=part)
        return result.numpy()


def largest_row(matrix: Tensor) -> float:
    """The largest row's root-mean-square: about the size of an entry of W v."""
    if not matrix.numel():
        return 0.0
    size = float(torch.linalg.vector_norm(matrix.float(), dim=1).max())
    if not isfinite(size):  # beyond float32
        size = float(torch.linalg.vector_norm(matrix.double(), dim=1).max())
    return size / sqrt(matrix.shape[1])


def _directions(rows: int, width: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """v [width] and u [rows]."""
    probe = torch.ones(width, dtype=torch.float64)
    if width > 1:
        probe = torch.randn(width, generator=generator, dtype=torch.float64) / sqrt(width)
    return probe, torch.randn(rows, generator=generator, dtype=torch.float64) / sqrt(rows or 1)


def advance_along(
    weights: NDArray[np.float64],
    momentum: NDArray[np.float64],
    gradient: NDArray[np.float64],
    transition: Transition,
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """W and m, in place; returns what W changed by, and what of it is the gradient's pull."""
    ww, wm, mw, mm, nw, nm = transition
    pull = nw * gradient
    change = pull + wm * momentum if wm else pull
    if ww != 1.0:
        change = change + (ww - 1.0) * weights
    if nm or mw or mm != 1.0:
        momentum *= mm
        momentum += gradient if nm == 1.0 else nm * gradient
        if mw:
            momentum += mw * weights
    weights += change
    return change, pull


def _norm(vector: NDArray[np.float64]) -> float:
    return sqrt(float(vector.dot(vector)))
