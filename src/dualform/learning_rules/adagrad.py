"""`torch.optim.Adagrad`, with `lr_decay`, an initial sum and coupled decay.

    s ← s + g′²      W ← W − η_r g′/(√s + ε)      η_r = η/(1 + (r−1)·lr_decay)

The sum begins at a value of the user's choice and is there before the first step, so a recording
begins by keeping it like that of any optimizer that has been used before.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from dualform.learning_rules.adaptive import (
    AdaptiveRule,
    Elementwise,
    Factor,
    Settings,
    State,
    coupled_decay,
    is_single,
    loss_gradient,
)


class Adagrad(AdaptiveRule):
    """The gradient over the root of all squares so far."""

    name = "adagrad"
    settings = ("lr", "lr_decay", "eps", "weight_decay", "maximize", "single_lr")
    tensors = ("sum",)
    second = "sum"

    def fading(self, settings: Settings) -> tuple[float, float]:
        return 1.0, 1.0

    def read(self, group: Mapping[str, Any]) -> tuple[float, ...]:
        own = tuple(float(group[name]) for name in self.settings[:-1])
        return (*own, is_single(group["lr"]))

    def is_new(self, state: State) -> bool:
        return not state or float(state["step"]) == 0

    def advance(
        self, state: State, settings: Settings, gradient: Tensor, weights: Tensor | None
    ) -> Elementwise:
        held = settings.held
        moved = loss_gradient(settings, gradient, weights)
        state["step"] = state["step"] + 1
        count = float(state["step"])
        spread = state["sum"].addcmul_(moved, moved).sqrt().add_(held(settings["eps"]))
        lr = held(settings.rate / (1 + (count - 1) * settings["lr_decay"]))
        decay = coupled_decay(settings)
        sign = -1.0 if settings["maximize"] else 1.0
        inverse = spread.reciprocal_()
        return Elementwise(inverse, ww=Factor(1.0, -lr * decay), nw=Factor(0.0, -lr * sign))
