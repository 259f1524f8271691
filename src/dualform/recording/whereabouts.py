"""Where a parameter is along its random direction v, by the learning rule, and where it really is.

W·v follows its own recursion, in float64, moved by what gradients are along v, and is compared with
the real weights whenever a fingerprint is taken. This is the second question of the audit
(`audit.py`).

Why it is hard: rounding is not tampering, and does not only scatter. What is below half a unit in
the last place is lost at every step, always the same way (a silent unit does not decay by 1e-8 a
step in float32, whatever the rule says). Scatter grows with √steps, loss with steps, and no bound
can hold the second for ever without letting edits through. So once `ANCHOR` steps have passed a
full comparison, prediction starts again from the real weights. The buffer's prediction goes on:
momentum below 1 forgets its own errors.
"""

from __future__ import annotations

from math import isfinite, sqrt

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dualform.recording.unexplained import Unexplained, quietly, refuse_diverged

SLACK_WEIGHTS = 48.0
"""How many times eps · √steps · scale the two sides of question 2 may differ by: scatter."""

SLACK_LOST = 2.0
"""How many times eps · scale per step: half a unit in the last place, four deviations out."""

SLACK_HELD = 1.0
"""How many times eps · path / (1 − μ): settings and buffer, rounded the same way every step."""

ANCHOR = 256
"""After how many steps, if all rows pass, prediction starts again from the real weights."""

LOOK_AGAIN = 4
"""How often following begins anew until the largest row is measured, not taken to be no larger than
it was, or than the fingerprint's largest number."""

BLOCK = 1 << 16
"""How many entries are widened to float64 at a time."""

Transition = tuple[float, float, float, float, float, float]
"""M and κN of one step: (M_ww, M_wm, M_mw, M_mm, N_w, N_m)."""

Share = tuple[float, float, float, float]
"""How much of an earlier (W, m) is in a later one, by the M of all steps between them."""

ALL: Share = (1.0, 0.0, 0.0, 1.0)


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


class Whereabouts:
    """One parameter's random direction v, and W v and m v as the learning rule has them."""

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
        self.shape, self.width = parameter.shape, width
        self.tiny = float(torch.finfo(parameter.dtype).tiny)
        self.eps = EPSILON[parameter.dtype]
        self.sketch = self.sketch64.numpy()
        self.weights = self.project(parameter)
        self.momentum = np.zeros(rows) if momentum is None else self.project(momentum)
        self.projected = np.zeros(rows)  # grad v, of the gradient last looked at
        self.spread = self.ever = largest_row(matrix)  # since the anchor; of all times
        self.steps = 0  # since the prediction last started from the real weights, as are the next:
        self.travel = 0.0  # Σ of what moved, squared
        self.path = 0.0  # Σ of what moved, for as long as it acts
        self.initial_share = ALL  # how much of (W_0, m_0) is in (W, m) now
        self.is_followed = True  # whether every gradient was looked at since `weights` were W v
        self._taken_up = 0  # how often that began anew

    def advance(self, transition: Transition) -> None:
        """One step of the learning rule, seen along v, by the gradient last looked at."""
        change, pull = advance_along(self.weights, self.momentum, self.projected, transition)
        self.count(transition, float(change.dot(change)) + float(pull.dot(pull)))

    def count(self, transition: Transition, moved: float) -> None:
        """A step was made in which this much moved, squared."""
        _, wm, _, mm, _, _ = transition
        self.travel += moved
        self.path += sqrt(moved) / (max(1.0 - mm, 1e-3) if wm else 1.0)
        self.steps += 1
        self.initial_share = carried(transition[:4], self.initial_share)

    def pass_over(self, transition: Transition) -> None:
        """A step was made by a gradient that nobody has looked at."""
        self.carry(transition[:4])

    def carry(self, share: Share) -> None:
        """So were several; `share`: how much of what was before them is there after."""
        self.is_followed = False
        self.initial_share = carried(share, self.initial_share)

    def take_up(
        self, parameter: Tensor, weights: NDArray[np.float64], momentum: NDArray[np.float64]
    ) -> None:
        """Follow from here on, where these are W v and m v; NaN: there is no momentum."""
        self._taken_up += 1
        largest = max(self.spread, float(np.abs(weights).max(initial=0.0)))
        if self._taken_up % LOOK_AGAIN == 0:  # at all entries
            largest = largest_row(as_matrix(parameter.detach()))
        self.start_from(weights, largest)
        np.copyto(self.momentum, np.nan_to_num(momentum))
        self.is_followed = True

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
        return norm(real - after) < norm(real - self.weights)

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


def carried(last: Share, before: Share) -> Share:
    """The product of two."""
    ww, wm, mw, mm = last
    a, b, c, d = before
    return ww * a + wm * c, ww * b + wm * d, mw * a + mm * c, mw * b + mm * d


def norm(vector: NDArray[np.float64]) -> float:
    return sqrt(float(vector.dot(vector)))
