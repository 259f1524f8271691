"""`torch.optim.Adagrad`, with `lr_decay`, an initial sum and coupled decay.

s ← s + g′²      W ← W − η_r g′/(√s + ε)      η_r = η/(1 + (r−1)·lr_decay)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dualform.learning_rules.factors import Factors, decay, sign
from dualform.learning_rules.settings import Setting


def factors(setting: Setting, state: Mapping[str, Any], fresh: bool) -> Factors:
    """Give the factors of a step, from what torch remembers after it."""
    slowed = 1 + (float(state["step"]) - 1) * setting.number("lr_decay")
    reach = -float(setting.rate / slowed) / (state["sum"].sqrt() + setting.number("eps"))
    _, coupled = decay(setting)
    return Factors(ww=1 + reach * coupled if coupled else 1.0, nw=reach * sign(setting))
