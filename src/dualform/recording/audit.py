"""Proof, at every step, that what was recorded explains what training did.

Two questions per parameter, both answered on a random direction v drawn once per run from a private
generator (Freivalds' check: a wrong matrix agrees on a random vector with probability zero):

1. Is the gradient the sum of the recorded patterns?   grad·v = κ Σ_t δ_t (x_t·v)   This also yields
   κ, the factor that clipping or unscaling has put in.
2. Did the weights move as the learning rule says?     W·v follows its own recursion, in float64,
   from the first step on; every step a part of the rows is compared with the real weights, so that
   a tampered weight is found within `TURNS` steps and all are compared at every commit.

The cost is one matrix-vector product per parameter and step. Rounding is not tampering: the bounds
below are several times what honest float arithmetic shows, and far below what any edit would.
"""

from __future__ import annotations

from math import sqrt

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

SLACK_GRADIENT = 32.0
"""How many times eps · Σ‖δ‖‖x‖ the two sides of question 1 may differ by."""

SLACK_WEIGHTS = 48.0
"""How many times eps · √steps · scale the two sides of question 2 may differ by."""

TURNS = 8
"""In how many steps all rows of a large parameter are compared with their prediction."""


class Unexplained(Exception):
    """A step that the recorded patterns and the learning rule do not account for."""


def as_matrix(tensor: Tensor) -> Tensor:
    """Any parameter as [d0, rest]; a vector is a column."""
    return tensor.reshape(tensor.shape[0] if tensor.dim() else 1, -1)


def epsilon(dtype: torch.dtype) -> float:
    return float(torch.finfo(dtype).eps)


class ParameterAudit:
    """One parameter's random direction, what its patterns sum to, and where its weights should be."""

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
        self.eps = epsilon(parameter.dtype)
        self.gradient_eps = self.eps  # grows if a lower precision computes the gradient (autocast)
        self.sketch = self.sketch64.numpy()
        self.weights = self.project(parameter)
        self.momentum = np.zeros(rows) if momentum is None else self.project(momentum)
        self.spread = self._largest_row(matrix)
        self.travel = 0.0
        self.steps = 0
        self.initial_share = np.eye(2)  # how much of (W_0, m_0) is in (W, m) now
        self.first = 0
        self.forget(0)

    # -- question 1: the gradient ---------------------------------------------------------------

    def forget(self, step: int) -> None:
        """The gradient was reset: what accumulates from here on began at `step`."""
        self.first = step
        self.uses = 0
        self.expected = np.zeros(len(self.sketch))
        self.gross = 0.0

    def see_keys(self, keys: Tensor, error_signals: Tensor, size: float) -> None:
        """Patterns of a weight: Σ δ (x·v). `size` is ‖δ‖·‖x‖ of the whole batch."""
        self.gradient_eps = max(self.gradient_eps, epsilon(error_signals.dtype))
        projected = keys.to(self.probe.dtype) @ self.probe
        part = error_signals.to(self.probe.dtype).T @ projected
        self.expected += part.cpu().numpy()
        self.gross += size / sqrt(max(1, len(self.probe)))
        self.uses += 1

    def see_ones(self, error_signals: Tensor, size: float) -> None:
        """Patterns of a bias: the key is the constant 1."""
        self.gradient_eps = max(self.gradient_eps, epsilon(error_signals.dtype))
        self.expected += error_signals.to(self.probe.dtype).sum(0).cpu().numpy()
        self.gross += size
        self.uses += 1

    def gradient_projection(self, gradient: Tensor) -> NDArray[np.float64]:
        """grad·v, [d0]."""
        projected = as_matrix(gradient).to(self.probe.dtype) @ self.probe
        return projected.cpu().numpy().astype(np.float64)

    def explain(self, projected: NDArray[np.float64]) -> float:
        """κ with grad·v = κ Σ δ (x·v), or `Unexplained`."""
        expected = self.expected
        if not np.isfinite(projected).all() or not np.isfinite(expected).all():
            raise Unexplained("its gradient is not finite (NaN or infinite)")
        bound = SLACK_GRADIENT * self.gradient_eps * self.gross
        if _norm(projected - expected) <= bound:
            return 1.0
        size = float(expected @ expected)
        kappa = float(expected @ projected) / size if size else 0.0
        residual = _norm(projected - kappa * expected)
        if residual <= bound * abs(kappa) or (kappa == 0.0 and residual == 0.0):
            return kappa
        relative = residual / max(_norm(projected), 1e-300)
        raise Unexplained(
            f"{relative:.1%} of its gradient is not in the recorded patterns (best factor "
            f"{kappa:.4g}); clipping by norm, loss scaling and accumulation would leave nothing "
            "over. Was the gradient edited by hand, clipped by value, given noise, or the weight "
            "used outside its layer?"
        )

    # -- question 2: the weights ----------------------------------------------------------------

    def advance(
        self,
        matrix: NDArray[np.float64],
        vector: NDArray[np.float64],
        projected: NDArray[np.float64],
    ) -> None:
        """One step of the learning rule, seen along v."""
        moved = matrix[0, 0] * self.weights + matrix[0, 1] * self.momentum + vector[0] * projected
        change = float(np.abs(moved - self.weights).max(initial=0.0))
        self.momentum = (
            matrix[1, 0] * self.weights + matrix[1, 1] * self.momentum + vector[1] * projected
        )
        self.weights = moved
        self.initial_share = matrix @ self.initial_share
        pull = abs(vector[0]) * float(np.abs(projected).max(initial=0.0))
        self.travel = sqrt(self.travel**2 + change**2 + pull**2)
        self.steps += 1

    def compare(self, parameter: Tensor, *, everything: bool = False) -> None:
        """Raise `Unexplained` unless the real weights are where the learning rule says."""
        rows = len(self.weights)
        low, high = 0, rows
        if rows >= 8 * TURNS and not everything:
            turn = self.steps % TURNS
            low, high = rows * turn // TURNS, rows * (turn + 1) // TURNS
        if everything:
            self.spread = max(self.spread, self._largest_row(as_matrix(parameter.detach())))
        part = as_matrix(parameter.detach())[low:high].to(self.probe.dtype) @ self.probe
        off = float(np.abs(part.cpu().numpy() - self.weights[low:high]).max(initial=0.0))
        scale = self.spread + self.travel
        bound = SLACK_WEIGHTS * self.eps * sqrt(self.steps + 1) * scale
        if not off <= bound:
            raise Unexplained(
                f"its weights are {off:.3g} away from where the learning rule puts them (rounding "
                f"allows {bound:.1g}). Was it changed outside optimizer.step(), or is the "
                "optimizer not what it says?"
            )

    def project(self, tensor: Tensor) -> NDArray[np.float64]:
        """The fingerprint W v in float64, [d0]."""
        flat = as_matrix(tensor.detach()).cpu()
        return (flat.double() @ self.probe64).numpy()

    def settle(self, parameter: Tensor) -> None:
        """Take the real weights as given from here on (a run that is no longer called exact)."""
        self.weights = self.project(parameter)

    def _largest_row(self, matrix: Tensor) -> float:
        if not matrix.numel():
            return 0.0
        width = matrix.shape[1]
        return float(torch.linalg.vector_norm(matrix.float(), dim=1).max()) / sqrt(width)


def _norm(vector: NDArray[np.float64]) -> float:
    return float(sqrt(float(vector @ vector)))
