"""`torch.optim.RMSprop`, plain, centred, with momentum and coupled decay.

s ← α s + (1−α) g′²      P = 1/(√s + ε)   (centred: √(s − ḡ²), ḡ the mean gradient)
b ← μ b + P g′           W ← W − η b      (without momentum: W ← W − η P g′)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from dualform.learning_rules.adam import advance_second
from dualform.learning_rules.adaptive import (
    AdaptiveRule,
    Elementwise,
    Factor,
    Number,
    Settings,
    State,
    loss_gradient,
)


class RMSprop(AdaptiveRule):
    """The gradient over its root mean square."""

    name = "rmsprop"
    settings = ("lr", "alpha", "eps", "weight_decay", "momentum", "centered", "maximize")
    tensors = ("momentum_buffer", "square_avg", "grad_avg")
    momentum = "momentum_buffer"
    second = "square_avg"

    def fading(self, settings: Settings) -> tuple[float, float]:
        return settings["alpha"], 1 - settings["alpha"]

    def read(self, group: Mapping[str, Any]) -> tuple[float, ...]:
        return tuple(float(group[name]) for name in self.settings)

    def condition(self, state: State, settings: Settings) -> Number:
        if not settings["centered"]:
            return 1.0
        second = state["square_avg"]
        spread = second.addcmul(state["grad_avg"], state["grad_avg"], value=-1)
        return torch.where(second > 0, second / spread.clamp_min(1e-300), 1.0)

    def advance(
        self, state: State, settings: Settings, gradient: Tensor, weights: Tensor | None
    ) -> Elementwise:
        held, alpha = settings.held, settings["alpha"]
        moved = loss_gradient(settings, gradient, weights)
        state["step"] = state["step"] + 1
        spread = advance_second(state["square_avg"], moved, alpha, settings)
        if settings["centered"]:
            mean = state["grad_avg"].lerp_(moved, held(1 - alpha))
            spread = spread.addcmul(mean, mean, value=-1).sqrt_()
        else:
            spread = spread.sqrt()
        inverse = spread.add_(held(settings["eps"])).reciprocal_()  # P
        sign = -1.0 if settings["maximize"] else 1.0
        lr, decay = held(settings["lr"]), held(settings["weight_decay"])
        momentum = held(settings["momentum"])
        if momentum == 0:
            return Elementwise(inverse, ww=Factor(1.0, -lr * decay), nw=Factor(0.0, -lr * sign))
        return Elementwise(
            inverse,
            ww=Factor(1.0, -lr * decay),
            wm=Factor(-lr * momentum),
            mw=Factor(0.0, decay),
            mm=momentum,
            nw=Factor(0.0, -lr * sign),
            nm=Factor(0.0, sign),
        )
