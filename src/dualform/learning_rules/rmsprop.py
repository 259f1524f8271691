"""`torch.optim.RMSprop`, plain, centred, with momentum and coupled decay.

s ← α s + (1−α) g′²      P = 1/(√s + ε)   (centred: √(s − ḡ²), ḡ the mean gradient)
b ← μ b + P g′           W ← W − η b      (without momentum: W ← W − η P g′)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dualform.learning_rules.factors import Factors, decay, sign
from dualform.learning_rules.settings import Setting


def factors(setting: Setting, state: Mapping[str, Any], fresh: bool) -> Factors:
    """Give the factors of a step, from what torch remembers after it."""
    lr, momentum = setting.number("lr"), setting.number("momentum")
    spread = state["square_avg"]
    if setting["centered"]:
        spread = spread.addcmul(state["grad_avg"], state["grad_avg"], value=-1)
    inverse = 1 / (spread.sqrt() + setting.number("eps"))
    _, coupled = decay(setting)
    reach = inverse * (-lr)
    ww = 1 + reach * coupled if coupled else 1.0
    if momentum <= 0:
        return Factors(ww=ww, nw=reach * sign(setting))
    return Factors(
        ww=ww,
        wm=-lr * momentum,
        mw=inverse * coupled if coupled else 0.0,
        mm=momentum,
        nw=reach * sign(setting),
        nm=inverse * sign(setting),
    )
