"""SGD, and any rule with scalars only: from the log to the coefficient of every training pattern.

Step s turns the parameter W and the momentum buffer m into

    [W, m]  ←  M_s [W, m] + κ_s N_s G_s            G_s = Σ_t δ_t ⊗ x_t over the step's patterns

with scalars only, so after S steps  W_S = a W_0 + h m_0 + Σ_s c_s G_s.  The coefficients come from
one backward recursion of 2-vectors, ρ_S = (1, 0), ρ_{s-1} = ρ_s M_s:  c_s = κ_s ρ_s·N_s and
(a, h) = ρ_0. Started at any earlier step it gives the network of that step (time travel).

Why it is hard: momentum and decay change the coefficients of *old* patterns at every new step, so a
coefficient can never be stored with its pattern. What is stored is the log of scalars below, and
everything else follows from it. Each parameter has a log of its own: a bias is often exempt from
decay, a layer may sit out a step, an optimizer may own only some of the parameters.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from operator import itemgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dualform.errors import QueryError

HYPERPARAMETERS = ("lr", "momentum", "dampening", "weight_decay", "nesterov", "maximize")
"""What a step of SGD depends on, as named in torch's parameter groups."""

_in_order = itemgetter(*HYPERPARAMETERS)


@dataclass(frozen=True)
class ParameterLog:
    """What the optimizer did with one parameter, step by step; every array is [steps].

    `applied` is False where the parameter had no gradient (or its optimizer sat the step out):
    nothing moved. `kappa` multiplies the patterns' sum: clipping, unscaling. `first` is the first
    step whose patterns were in the gradient applied here (its own step, unless gradients were
    carried over several steps). `fresh` marks a step that found no momentum buffer and made one.
    """

    applied: NDArray[np.bool_]
    kappa: NDArray[np.float64]
    first: NDArray[np.int64]
    fresh: NDArray[np.bool_]
    lr: NDArray[np.float64]
    momentum: NDArray[np.float64]
    dampening: NDArray[np.float64]
    weight_decay: NDArray[np.float64]
    nesterov: NDArray[np.float64]
    maximize: NDArray[np.float64]

    def __len__(self) -> int:
        return len(self.applied)

    @classmethod
    def constant(cls, steps: int, **hyperparameters: float) -> ParameterLog:
        """A log of `steps` ordinary steps, for tests and estimates: `constant(100, lr=0.1)`."""
        full = dict.fromkeys(HYPERPARAMETERS, 0.0) | hyperparameters
        fresh = np.zeros(steps, bool)
        fresh[:1] = True
        return cls(
            applied=np.ones(steps, bool),
            kappa=np.ones(steps),
            first=np.arange(steps),
            fresh=fresh,
            **{name: np.full(steps, float(value)) for name, value in full.items()},
        )

    @classmethod
    def single(cls, settings: tuple[float, ...], *, fresh: bool, kappa: float) -> ParameterLog:
        """The log of one step with these settings (in the order of `HYPERPARAMETERS`)."""
        return cls(
            applied=np.ones(1, bool),
            kappa=np.array([kappa]),
            first=np.zeros(1, np.int64),
            fresh=np.array([fresh]),
            **{n: np.array([v]) for n, v in zip(HYPERPARAMETERS, settings, strict=True)},
        )

    def head(self, steps: int) -> ParameterLog:
        """The log of the first `steps` steps."""
        return ParameterLog(**{f.name: getattr(self, f.name)[:steps] for f in fields(self)})


@dataclass(frozen=True)
class Coefficients:
    """W = initial · W_0 + momentum · m_0 + Σ_s steps[s] · G_s, for one parameter at one step."""

    initial: float
    momentum: float
    steps: NDArray[np.float64]

    def per_pattern(self, step: NDArray[np.integer[Any]]) -> NDArray[np.float64]:
        """The coefficient of each pattern, given the step it was seen at; later steps get 0."""
        known = np.append(self.steps, 0.0)
        result: NDArray[np.float64] = known[np.minimum(step, len(self.steps))]
        return result


def transitions(log: ParameterLog) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """M [S, 2, 2] and κN [S, 2] of every step: `torch.optim.SGD` with all its options.

    The order of torch's update: the sign (`maximize`), coupled decay, momentum with dampening,
    Nesterov, the learning rate. A buffer made at this very step takes the gradient undamped, and
    whatever an earlier buffer held plays no part. With momentum 0 the buffer is left as it is.
    """
    mu, eta, decay = log.momentum, log.lr, log.weight_decay
    has_momentum = mu != 0
    keep = np.where(has_momentum & ~log.fresh, mu, 0.0)  # how much of the old buffer stays
    write = np.where(log.fresh, 1.0, 1.0 - log.dampening)  # how much of the gradient enters it
    nesterov = log.nesterov != 0
    nu = np.where(has_momentum & ~nesterov, 0.0, 1.0)  # the gradient's direct way into W
    omega = np.where(has_momentum, np.where(nesterov, mu, 1.0), 0.0)  # the buffer's way into W
    beta = nu + omega * write
    matrix = np.zeros((len(log), 2, 2))
    matrix[:, 0, 0] = 1.0 - eta * beta * decay
    matrix[:, 0, 1] = -eta * omega * keep
    matrix[:, 1, 0] = np.where(has_momentum, write * decay, 0.0)
    matrix[:, 1, 1] = np.where(has_momentum, keep, 1.0)
    vector = np.stack([-eta * beta, np.where(has_momentum, write, 0.0)], axis=1)
    sign = np.where(log.maximize != 0, -1.0, 1.0)
    vector *= (sign * log.kappa)[:, None]
    matrix[~log.applied] = np.eye(2)
    vector[~log.applied] = 0.0
    return matrix, vector


def coefficients(
    log: ParameterLog, at: int | None = None, average: NDArray[np.float64] | None = None
) -> Coefficients:
    """How much of every step's patterns is in the parameter after `at` updates (default: all).

    One backward recursion in float64, O(steps). Prefix products and inverses are no alternative:
    μ^S underflows. With `average` [at + 1] it is those of Σ_s average[s] W_s: every step's weights
    enter the recursion where they are.
    """
    last = len(log) if at is None else at
    if not 0 <= last <= len(log):
        raise QueryError(f"step {last} was asked for, but the log holds steps 0 to {len(log)}")
    matrix, vector = transitions(log.head(last))
    steps = np.zeros(last)
    entering = [1.0 if s == last else 0.0 for s in range(last + 1)]
    if average is not None:
        entering = average.tolist()
    rho_w, rho_m = entering[last], 0.0
    rows = zip(
        range(last - 1, -1, -1),
        matrix[::-1].reshape(-1, 4).tolist(),
        vector[::-1].tolist(),
        log.applied[:last][::-1].tolist(),
        log.first[:last][::-1].tolist(),
        strict=True,
    )
    for s, (m_ww, m_wm, m_mw, m_mm), (n_w, n_m), applied, first in rows:
        if applied:
            steps[first : s + 1] += rho_w * n_w + rho_m * n_m
            rho_w, rho_m = rho_w * m_ww + rho_m * m_mw, rho_w * m_wm + rho_m * m_mm
        rho_w += entering[s]
    return Coefficients(initial=rho_w, momentum=rho_m, steps=steps)


def hyperparameters(group: dict[str, Any]) -> tuple[float, ...]:
    """One parameter group's settings now, in the order of `HYPERPARAMETERS`."""
    return tuple(map(float, _in_order(group)))
