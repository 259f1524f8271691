"""Proof, at every step, that what was recorded explains what training did.

Two questions per parameter, both answered on a random direction v drawn once per run from a private
generator (Freivalds' check: a wrong matrix agrees on a random vector with probability zero):

1. Is the gradient the sum of the recorded patterns?   grad·v = κ Σ_t δ_t (x_t·v)   This also yields
   κ, the factor that clipping or unscaling has put in.
2. Did the weights move as the learning rule says?     W·v follows its own recursion, in float64;
   every step a part of the rows is compared with the real weights, so that a tampered weight is
   found within `TURNS` steps and all are compared at every commit.

The cost is one matrix-vector product per parameter and step. Rounding is not tampering: the bounds
below are several times what honest float arithmetic shows, and far below what any edit would.

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

from math import sqrt

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

SLACK_GRADIENT = 32.0
"""How many times eps · Σ‖δ‖‖x‖ the two sides of question 1 may differ by."""

SLACK_16_BITS = 4.0
"""The same for bfloat16 and float16, which sum in float32 and round once."""

SNAP = 0.5
"""A factor κ this many times eps · Σ‖δ‖‖x‖ from 1, in units of the gradient, is taken for 1."""

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

TURNS = 16
"""In how many steps all rows of a large parameter are compared with their prediction."""


Transition = tuple[float, float, float, float, float, float]
"""M and κN of one step: (M_ww, M_wm, M_mw, M_mm, N_w, N_m)."""


class Unexplained(Exception):
    """A step that the recorded patterns and the learning rule do not account for."""


def as_matrix(tensor: Tensor) -> Tensor:
    """Any parameter as [d0, rest]; a vector is a column."""
    return tensor.reshape(tensor.shape[0] if tensor.dim() else 1, -1)


def epsilon(dtype: torch.dtype) -> float:
    return float(torch.finfo(dtype).eps)


class ParameterAudit:
    """One parameter's random direction, what its patterns sum to, where its weights should be."""

    def __init__(
        self, parameter: Tensor, momentum: Tensor | None, generator: torch.Generator
    ) -> None:
        matrix = as_matrix(parameter.detach())
        rows, width = matrix.shape
        self.probe64 = (
            torch.randn(width, generator=generator, dtype=torch.float64) / sqrt(width)
            if width > 1
            else torch.ones(width, dtype=torch.float64)
        )
        self.sketch64 = torch.randn(rows, generator=generator, dtype=torch.float64) / sqrt(
            rows or 1
        )
        exact = parameter.dtype in (torch.float32, torch.float64)
        self.probe = self.probe64.to(parameter.device, parameter.dtype if exact else torch.float32)
        self.width = width
        self.entrywise = rows < FEW_ROWS and width > 1
        self.tiny = float(torch.finfo(parameter.dtype).tiny)
        self.gradient_tiny = float(torch.finfo(self.probe.dtype).tiny)
        self.eps = epsilon(parameter.dtype)
        self.gradient_eps = self.eps  # grows if a lower precision computes the gradient (autocast)
        self.sketch = self.sketch64.numpy()
        self.weights = self.project(parameter)
        self.momentum = np.zeros(rows) if momentum is None else self.project(momentum)
        self.spread = self.ever = self._largest_row(matrix)  # since the anchor; of all times
        self.steps = 0  # since the prediction last started from the real weights, as are the next:
        self.travel = 0.0  # √Σ of what moved, squared
        self.path = 0.0  # Σ of what moved, for as long as it acts
        self.has_patterns = False  # whether there ever were any
        self._gradient: Tensor | None = None
        self.initial_share = (1.0, 0.0, 0.0, 1.0)  # how much of (W_0, m_0) is in (W, m) now
        self.first = 0
        self.forget(0)

    # -- question 1: the gradient ---------------------------------------------------------------

    def forget(self, step: int) -> None:
        """The gradient was reset: what accumulates from here on began at `step`."""
        self.first = step
        self.uses = 0
        self.expected = np.zeros(len(self.sketch) * (self.width if self.entrywise else 1))
        self.gross = 0.0

    def see(self, part: Tensor, gross: float, eps: float) -> None:
        """Patterns that will be in the gradient: their Σ δ (x·v), and how large its terms are.

        Σ δ x, flat, where entries are compared.
        """
        self.expected += part.cpu().numpy()
        self.gross += gross
        self.gradient_eps = max(self.gradient_eps, eps)
        self.uses += 1
        self.has_patterns = True

    def gradient_projection(self, gradient: Tensor) -> NDArray[np.float64]:
        """grad·v, [d0]. Where entries are compared, `explain` will look at the gradient itself."""
        self._gradient = gradient.detach() if self.entrywise and self.has_patterns else None
        if self.width == 1:
            # a copy: the optimizer may overwrite the gradient (foreach, fused)
            return gradient.detach().reshape(-1).double().cpu().numpy().copy()
        projected = torch.mv(as_matrix(gradient.detach()).to(self.probe.dtype), self.probe)
        return projected.double().cpu().numpy()

    @property
    def is_finite(self) -> bool:
        """Whether what the patterns sum to is a number at all."""
        return bool(np.isfinite(self.expected).all())

    @property
    def expects_nothing(self) -> bool:
        """Whether the patterns seen sum to zero, up to rounding: an input of zeros, say."""
        return self.uses > 0 and _norm(self.expected) <= self._gradient_bound

    @property
    def _gradient_bound(self) -> float:
        """Relative rounding; and below the smallest normal number all rounding is absolute."""
        slack = SLACK_GRADIENT if self.gradient_eps < 1e-5 else SLACK_16_BITS
        return slack * self.gradient_eps * self.gross + self.gradient_tiny

    @property
    def clarity(self) -> float:
        """How far what the patterns sum to stands above its own rounding."""
        rounding = self.gradient_eps * self.gross
        return _norm(self.expected) / rounding if rounding else 0.0

    def allows(self, measured: float, other: float) -> bool:
        """Whether a factor other than the one measured explains the gradient as well."""
        bound = self._gradient_bound * max(abs(measured), abs(other))
        return abs(measured - other) * _norm(self.expected) <= bound

    def explain(self, projected: NDArray[np.float64]) -> float:
        """κ with grad·v = κ Σ δ (x·v), or `Unexplained`; `projected` is what was projected last.

        κ is measured even where 1 would do: where patterns nearly cancel, or in 16 bits, rounding
        could hide a clipped gradient.
        """
        expected, bound = self.expected, self._gradient_bound
        if self.entrywise:
            projected = self._entries()
        if not (np.isfinite(projected).all() and np.isfinite(expected).all()):
            raise Unexplained("its gradient is not finite (NaN or infinite)")
        size = _norm(expected)
        kappa = float(expected.dot(projected)) / size**2 if size > 1e-150 else 1.0
        if abs(kappa - 1.0) * size <= SNAP * self.gradient_eps * self.gross:
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
            "over. Was the gradient edited by hand, clipped by value, given noise, or the weight "
            "used outside its layer?"
        )

    def _entries(self) -> NDArray[np.float64]:
        """The entries of the gradient projected last, flat."""
        gradient, self._gradient = self._gradient, None
        assert gradient is not None, "explain() goes with the gradient_projection() before it"
        return gradient.reshape(-1).double().cpu().numpy()

    # -- question 2: the weights ----------------------------------------------------------------

    def advance(self, transition: Transition, projected: NDArray[np.float64]) -> None:
        """One step of the learning rule, seen along v."""
        ww, wm, mw, mm, nw, nm = transition
        pull = change = nw * projected
        if wm:
            change = change + wm * self.momentum
        if ww != 1.0:
            change = change + (ww - 1.0) * self.weights
        if nm or mw or mm != 1.0:
            self.momentum = mm * self.momentum + nm * projected
            if mw:
                self.momentum += mw * self.weights
        self.weights = self.weights + change
        moved = float(change.dot(change)) + float(pull.dot(pull))
        self.travel = sqrt(self.travel**2 + moved)
        self.path += sqrt(moved) / (max(1.0 - mm, 1e-3) if wm else 1.0)
        self.steps += 1
        share = self.initial_share
        self.initial_share = (
            ww * share[0] + wm * share[2],
            ww * share[1] + wm * share[3],
            mw * share[0] + mm * share[2],
            mw * share[1] + mm * share[3],
        )

    def compare(self, parameter: Tensor, low: int = 0, high: int | None = None) -> None:
        """Raise `Unexplained` unless the real weights (some rows) are where the rule puts them.

        All rows are compared every `ANCHOR` steps, and if they pass, prediction starts from them.
        """
        matrix = as_matrix(parameter.detach())
        anchor = self.steps >= ANCHOR
        if anchor or high is None:
            low, high = 0, len(matrix)
            largest = self._largest_row(matrix)
            self.spread = max(self.spread, largest)
            self.ever = max(self.ever, largest)
        real = (matrix[low:high].to(self.probe.dtype) @ self.probe).cpu().numpy()
        off = float(np.abs(real - self.weights[low:high]).max(initial=0.0))
        bound = self._weights_bound
        if not off <= bound:
            raise Unexplained(
                f"its weights are {off:.3g} away from where the learning rule puts them (rounding "
                f"allows {bound:.3g}). Was it changed outside optimizer.step(), or is the "
                "optimizer not what it says?"
            )
        if anchor:
            self.weights, self.spread = real.astype(np.float64), largest
            self.travel = self.path = 0.0
            self.steps = 0

    @property
    def _weights_bound(self) -> float:
        """What scatters, what is lost, what is held rounded; below the smallest number, all is.

        Weights that decayed to nothing still feel what was rounded when they were large.
        """
        scatter = SLACK_WEIGHTS * sqrt(self.steps + 1) * (self.spread + self.travel)
        lost = SLACK_LOST * self.steps * self.spread
        held = SLACK_HELD * self.path
        return self.eps * (scatter + lost + held + self.eps * self.ever) + self.tiny

    def has_moved(
        self, parameter: Tensor, transition: Transition, projected: NDArray[np.float64]
    ) -> bool:
        """Whether the real weights look like after this step rather than before it."""
        ww, wm, _, _, nw, _ = transition
        after = ww * self.weights + wm * self.momentum + nw * projected
        real = self.project(parameter)
        return _norm(real - after) < _norm(real - self.weights)

    def project(self, tensor: Tensor) -> NDArray[np.float64]:
        """The fingerprint W v in float64, [d0]."""
        flat = as_matrix(tensor.detach()).cpu()
        return (flat.double() @ self.probe64).numpy()

    def _largest_row(self, matrix: Tensor) -> float:
        if not matrix.numel():
            return 0.0
        width = matrix.shape[1]
        return float(torch.linalg.vector_norm(matrix.float(), dim=1).max()) / sqrt(width)


def see_patterns(
    weight: ParameterAudit | None, bias: ParameterAudit | None, keys: Tensor, error_signals: Tensor
) -> None:
    """Tell a layer's weight and bias (where they are trained) of patterns on their way to `.grad`.

    The bias's key is the constant 1, so one product serves both: [1, x·v]ᵀ δ.
    """
    either = weight or bias
    if either is None:
        return
    eps = epsilon(error_signals.dtype)
    precise = either.probe.dtype
    keys, error_signals = keys.to(precise), error_signals.to(precise)
    size = _size(error_signals)
    ones = torch.ones(len(keys), dtype=precise, device=keys.device)
    if weight is None:
        sums = ones[None] @ error_signals
    elif weight.entrywise:
        sums = ones[None] @ error_signals
        weight.see((error_signals.T @ keys).reshape(-1), size * _size(keys), eps)
    else:
        projected = torch.mv(keys, weight.probe)
        sums = torch.stack((ones, projected)) @ error_signals
        weight.see(sums[1], size * _size(keys) / sqrt(max(1, weight.width)), eps)
    if bias is not None:
        bias.see(sums[0], size * sqrt(len(keys)), eps)


def _size(rows: Tensor) -> float:
    """The Frobenius norm, by the cheapest way there is."""
    flat = rows.reshape(-1)
    square = float(torch.dot(flat, flat))
    if not 1e-30 < square < 1e30:  # near the ends of float32's range
        square = float(torch.dot(flat.double(), flat.double()))
    return sqrt(square)


class Rota:
    """Which rows of which parameters are compared at which step, evenly spread over `TURNS`."""

    def __init__(self, sizes: dict[str, tuple[int, int]]) -> None:
        total = sum(rows * width for rows, width in sizes.values())
        share = max(1, total // TURNS)
        self._turns: list[list[tuple[str, int, int]]] = [[] for _ in range(TURNS)]
        done = 0
        for name, (rows, width) in sizes.items():
            low = 0
            while low < rows:
                turn = min(TURNS - 1, done // share)
                left = share * (turn + 1) - done if turn < TURNS - 1 else total
                high = min(rows, low + max(1, left // max(1, width)))
                self._turns[turn].append((name, low, high))
                done += (high - low) * width
                low = high

    def at(self, step: int) -> list[tuple[str, int, int]]:
        return self._turns[step % TURNS]


def _norm(vector: NDArray[np.float64]) -> float:
    return sqrt(float(vector.dot(vector)))
