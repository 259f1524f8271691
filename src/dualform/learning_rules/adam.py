"""`torch.optim.Adam` and `AdamW`, with AMSGrad, `maximize` and decay of either kind.

    m ← β₁ m + (1−β₁) g′      v ← β₂ v + (1−β₂) g′²      W ← ζ W − P m      P = η/((1−β₁ʳ)(√v̂ + ε))

r is the optimizer's own count, v̂ = v/(1−β₂ʳ) (AMSGrad: of the largest v so far), g′ = ±g + λ W with
ζ = 1 where decay is coupled, else g′ = ±g with ζ = 1 − ηλ.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dualform.learning_rules.factors import Factors, decay, sign
from dualform.learning_rules.settings import Setting


def factors(setting: Setting, state: Mapping[str, Any], fresh: bool) -> Factors:
    """Give the factors of a step, from what torch remembers after it."""
    beta1, beta2 = map(float, setting["betas"])
    count = float(state["step"])
    second = state["max_exp_avg_sq"] if setting["amsgrad"] else state["exp_avg_sq"]
    spread = (second / (1 - beta2**count)).sqrt() + setting.number("eps")
    scale = float(setting.rate / (1 - beta1**count)) / spread
    shrink, coupled = decay(setting)
    write = 1 - beta1
    return Factors(
        ww=shrink - scale * (write * coupled) if coupled else shrink,
        wm=-scale * beta1,
        mw=write * coupled,
        mm=beta1,
        nw=scale * (-write * sign(setting)),
        nm=write * sign(setting),
    )
