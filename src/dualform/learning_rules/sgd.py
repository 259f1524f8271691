"""`torch.optim.SGD`: the rule with scalars only.

    W ← ww W + wm m + nw g          m ← mw W + mm m + nm g

In the order of torch's update: the sign (`maximize`), coupled decay, momentum with dampening,
Nesterov, the learning rate. A buffer made at this very step takes the gradient undamped, and
whatever an earlier one held plays no part. With momentum 0 the buffer is left as it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from dualform.learning_rules.factors import Factors
from dualform.learning_rules.settings import Setting


def linear_factors(setting: Setting, fresh: bool, dtype: torch.dtype) -> Factors:
    """Give the six scalars of one step, as arithmetic in the parameter's dtype holds them.

    torch rounds a setting to float32 before it multiplies with it (float64 apart). That is no
    noise: 0.99 is not float32(0.99), and momentum adds the difference up a hundredfold.
    """

    def held(value: float) -> float:
        return value if dtype == torch.float64 else float(np.float32(value))

    eta, mu = held(setting.number("lr")), held(setting.number("momentum"))
    decay = held(setting.number("weight_decay"))
    sign = -1.0 if setting.group.get("maximize") else 1.0
    if mu == 0:
        return Factors(ww=1 - eta * decay, nw=-eta * sign)
    keep, write = (0.0, 1.0) if fresh else (mu, held(1 - setting.number("dampening")))
    direct, buffered = (1.0, mu) if setting.group.get("nesterov") else (0.0, 1.0)
    beta = direct + buffered * write
    return Factors(
        ww=1 - eta * beta * decay,
        wm=-eta * buffered * keep,
        mw=write * decay,
        mm=keep,
        nw=-eta * beta * sign,
        nm=write * sign,
    )


def factors(setting: Setting, state: Mapping[str, Any], fresh: bool) -> Factors:
    """Give the six scalars of one step in float64; what torch remembers plays no part."""
    return linear_factors(setting, fresh, torch.float64)
