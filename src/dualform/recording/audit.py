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

SLACK_16_BITS = 4.0
"""The same for bfloat16 and float16, which sum in float32 and round once."""

SNAP = 0.5
"""A factor κ this many times eps · Σ‖δ‖‖x‖ from 1, in units of the gradient, is taken for 1."""

SLACK_WEIGHTS = 48.0
"""How many times eps · √steps · scale the two sides of question 2 may differ by."""

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
        self.eps = epsilon(parameter.dtype)
        self.gradient_eps = self.eps  # grows if a lower precision computes the gradient (autocast)
        self.sketch = self.sketch64.numpy()
        self.weights = self.project(parameter)
        self.momentum = np.zeros(rows) if momentum is None else self.project(momentum)
        self.spread = self._largest_row(matrix)
        self.travel = 0.0
        self.steps = 0
        self.initial_share = (1.0, 0.0, 0.0, 1.0)  # how much of (W_0, m_0) is in (W, m) now
        self.first = 0
        self.forget(0)

    # -- question 1: the gradient ---------------------------------------------------------------

    def forget(self, step: int) -> None:
        """The gradient was reset: what accumulates from here on began at `step`."""
        self.first = step
        self.uses = 0
        self.expected = np.zeros(len(self.sketch))
        self.gross = 0.0

    def see(self, part: Tensor, gross: float, eps: float) -> None:
        """Patterns that will be in the gradient: their Σ δ (x·v), and how large its terms are."""
        self.expected += part.cpu().numpy()
        self.gross += gross
        self.gradient_eps = max(self.gradient_eps, eps)
        self.uses += 1

    def gradient_projection(self, gradient: Tensor) -> NDArray[np.float64]:
        """grad·v, [d0]."""
        if len(self.probe) == 1:
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
        smallest = torch.finfo(self.probe.dtype).tiny
        return slack * self.gradient_eps * self.gross + smallest

    def explain(self, projected: NDArray[np.float64]) -> float:
        """κ with grad·v = κ Σ δ (x·v), or `Unexplained`.

        κ is measured even where 1 would do: where patterns nearly cancel, or in 16 bits, rounding
        could hide a clipped gradient.
        """
        expected, bound = self.expected, self._gradient_bound
        if not (np.isfinite(projected).all() and np.isfinite(expected).all()):
            raise Unexplained("its gradient is not finite (NaN or infinite)")
        size = _norm(expected)
        kappa = float(expected @ projected) / size**2 if size > 1e-150 else 1.0
        if abs(kappa - 1.0) * size <= SNAP * self.gradient_eps * self.gross:
            kappa = 1.0
        residual = _norm(projected - kappa * expected)
        if residual <= bound * abs(kappa) or _norm(projected - expected) <= bound:
            return kappa
        relative = residual / max(_norm(projected), 1e-300)
        raise Unexplained(
            f"{relative:.1%} of its gradient is not in the recorded patterns (best factor "
            f"{kappa:.4g}); clipping by norm, loss scaling and accumulation would leave nothing "
            "over. Was the gradient edited by hand, clipped by value, given noise, or the weight "
            "used outside its layer?"
        )

    # -- question 2: the weights ----------------------------------------------------------------

    def advance(self, transition: Transition, projected: NDArray[np.float64]) -> None:
        """One step of the learning rule, seen along v."""
        ww, wm, mw, mm, nw, nm = transition
        pull = nw * projected
        moved = ww * self.weights + wm * self.momentum + pull
        change = moved - self.weights
        if nm or mw or mm != 1.0:
            self.momentum = mw * self.weights + mm * self.momentum + nm * projected
        self.weights = moved
        self.travel = sqrt(self.travel**2 + float(change @ change) + float(pull @ pull))
        self.steps += 1
        share = self.initial_share
        self.initial_share = (
            ww * share[0] + wm * share[2],
            ww * share[1] + wm * share[3],
            mw * share[0] + mm * share[2],
            mw * share[1] + mm * share[3],
        )

    def compare(self, parameter: Tensor, low: int = 0, high: int | None = None) -> None:
        """Raise `Unexplained` unless the real weights (some rows) are where the rule puts them."""
        matrix = as_matrix(parameter.detach())
        if high is None:
            high = len(matrix)
            self.spread = max(self.spread, self._largest_row(matrix))
        real = matrix[low:high].to(self.probe.dtype) @ self.probe
        off = float(np.abs(real.cpu().numpy() - self.weights[low:high]).max(initial=0.0))
        bound = SLACK_WEIGHTS * self.eps * sqrt(self.steps + 1) * (self.spread + self.travel)
        bound += torch.finfo(parameter.dtype).tiny  # below it all rounding is absolute
        if not off <= bound:
            raise Unexplained(
                f"its weights are {off:.3g} away from where the learning rule puts them (rounding "
                f"allows {bound:.1g}). Was it changed outside optimizer.step(), or is the "
                "optimizer not what it says?"
            )

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

    The bias's key is the constant 1, so one product serves both: [x·v, 1]ᵀ δ.
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
    else:
        projected = torch.mv(keys, weight.probe)
        sums = torch.stack((ones, projected)) @ error_signals
        weight.see(sums[1], size * _size(keys) / sqrt(max(1, len(weight.probe))), eps)
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
    return float(sqrt(float(vector @ vector)))
