"""SGD: how much of every step's patterns is in a parameter, by one recursion of 2-vectors.

    W = initial · W_0 + momentum · m_0 + Σ_s steps[s] · G_s,      G_s = Σ_t δ_t ⊗ x_t

Step s is [W, m] ← M_s [W, m] + N_s g_s with g_s = κ_s (G_s + carried_s g_{s−1}); a step that does
not move the parameter only adds to the gradient, κ = 1 and N = 0. Backward, ρ = (1, 0) at the end:
D_r = κ_r (ρ_r·N_r + carried_{r+1} D_{r+1}), ρ_{r−1} = ρ_r M_r. Momentum and decay change the
coefficients of *old* patterns at every new step, so none is stored with its pattern. Prefix
products are no alternative: μ^S underflows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from dualform.learning_rules.factors import UNMOVED, Factors
from dualform.learning_rules.settings import Setting
from dualform.learning_rules.sgd import linear_factors


class UpdateLog(Protocol):
    """What an optimizer did with one parameter at every step; `setting` is a place in a list."""

    @property
    def moved(self) -> NDArray[Any]: ...
    @property
    def setting(self) -> NDArray[Any]: ...
    @property
    def fresh(self) -> NDArray[Any]: ...
    @property
    def carried(self) -> NDArray[Any]: ...
    @property
    def kappa(self) -> NDArray[Any]: ...


@dataclass(frozen=True)
class Coefficients:
    """W = initial · W_0 + momentum · m_0 + Σ_s steps[s] · G_s, for one parameter in one state."""

    initial: float
    momentum: float
    steps: NDArray[np.float64]

    def per_pattern(self, step: NDArray[np.integer[Any]]) -> NDArray[np.float64]:
        """Give each pattern its coefficient, by the step it was seen at; later steps get 0."""
        known = np.append(self.steps, 0.0)
        result: NDArray[np.float64] = known[np.minimum(step, len(self.steps))]
        return result


def coefficients(
    log: UpdateLog,
    settings: Sequence[Setting],
    path: Sequence[int] | NDArray[np.integer[Any]],
    dtype: torch.dtype,
    average: NDArray[np.float64] | None = None,
) -> Coefficients:
    """Follow the steps of a path backward: those that led to a state, without what was taken back.

    W_0 and m_0 are those before the path's first step. A step whose κ is not known wrote nothing
    that patterns explain. With `average` [len(path) + 1] it is Σ_i average[i] W_i, the mean of the
    states on the way: every one enters the recursion where it is.
    """
    steps = np.zeros(len(log.moved))
    entering = np.zeros(len(path) + 1) if average is None else np.asarray(average, np.float64)
    if average is None:
        entering[-1] = 1.0
    place = {int(step): i for i, step in enumerate(path)}
    factors, kappa = linear_steps(log, settings, dtype), np.nan_to_num(log.kappa, nan=0.0)
    rho_w, rho_m, later, carried = float(entering[-1]), 0.0, 0.0, False
    first, last = (min(place), max(place)) if place else (0, -1)
    for step in range(last, -1, -1):
        if step < first and not carried:
            break
        later = later if carried else 0.0
        if log.moved[step]:
            if step in place:
                ww, wm, mw, mm, nw, nm = (float(x) for x in factors[step])
                later += rho_w * nw + rho_m * nm
                rho_w, rho_m = rho_w * ww + rho_m * mw, rho_w * wm + rho_m * mm
            later *= kappa[step]
        steps[step], carried = later, bool(log.carried[step])
        if step in place:
            rho_w += float(entering[place[step]])
    return Coefficients(rho_w, rho_m, steps)


def linear_steps(log: UpdateLog, settings: Sequence[Setting], dtype: torch.dtype) -> list[Factors]:
    """Give every step's scalars (SGD); those of a step that moved nothing change nothing."""
    known: dict[tuple[int, bool], Factors] = {}
    found = []
    for moved, place, fresh in zip(
        log.moved.tolist(), log.setting.tolist(), log.fresh.tolist(), strict=True
    ):
        if moved and (place, fresh) not in known:
            known[place, fresh] = linear_factors(settings[place], bool(fresh), dtype)
        found.append(known[place, fresh] if moved else UNMOVED)
    return found
