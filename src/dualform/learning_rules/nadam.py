"""`torch.optim.NAdam`: Adam whose step looks ahead, with decay of either kind.

    W ← ζ W − (P_g g′ + P_m m)    P_g = η (1−μ_r)/((1−Π μ) d)    P_m = η μ_{r+1}/((1−μ_{r+1} Π μ) d)

d = √v̂ + ε; Π μ, the product of all μ so far, is remembered by torch as a number of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dualform.learning_rules.factors import Factors, decay, sign
from dualform.learning_rules.settings import Setting


def factors(setting: Setting, state: Mapping[str, Any], fresh: bool) -> Factors:
    """Give the factors of a step, from what torch remembers after it."""
    rate, (beta1, beta2) = setting.rate, map(float, setting["betas"])
    count, fading = float(state["step"]), setting.number("momentum_decay")
    now = beta1 * (1.0 - 0.5 * 0.96 ** (count * fading))
    following = beta1 * (1.0 - 0.5 * 0.96 ** ((count + 1) * fading))
    product = float(state["mu_product"])
    inverse = 1 / ((state["exp_avg_sq"] / (1 - beta2**count)).sqrt() + setting.number("eps"))
    by_gradient = float(rate * (1.0 - now) / (1.0 - product))
    by_momentum = float(rate * following / (1.0 - product * following))
    shrink, coupled = decay(setting)
    write = 1 - beta1
    direct = by_gradient + by_momentum * write
    return Factors(
        ww=shrink - inverse * (direct * coupled) if coupled else shrink,
        wm=inverse * (-by_momentum * beta1),
        mw=write * coupled,
        mm=beta1,
        nw=inverse * (-direct * sign(setting)),
        nm=write * sign(setting),
    )
