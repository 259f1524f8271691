"""`torch.optim.Adadelta`, with coupled decay: the gradient scaled by the size of earlier steps.

    s ← ρ s + (1−ρ) g′²      d = √(a+ε)/√(s+ε) · g′      a ← ρ a + (1−ρ) d²      W ← W − η d

The step uses a as it was before, so this rule asks for `acc_delta` from before the step.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dualform.learning_rules.factors import Factors, decay, sign
from dualform.learning_rules.settings import Setting


def factors(setting: Setting, state: Mapping[str, Any], fresh: bool) -> Factors:
    """Give the factors of a step, from what torch remembers after it, `acc_delta` before it."""
    eps, before = setting.number("eps"), state.get("acc_delta")
    earlier = 0.0 if fresh or before is None else before
    scale = ((earlier + eps) / (state["square_avg"] + eps)).sqrt()
    reach = scale * -setting.number("lr")
    _, coupled = decay(setting)
    return Factors(ww=1 + reach * coupled if coupled else 1.0, nw=reach * sign(setting))
