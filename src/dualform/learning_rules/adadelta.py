"""`torch.optim.Adadelta`, with coupled decay: the gradient scaled by the size of earlier steps.

    s ← ρ s + (1−ρ) g′²      d = √(a+ε)/√(s+ε) · g′      a ← ρ a + (1−ρ) d²      W ← W − η d

a, the mean square of earlier steps, belongs to the preconditioner: it is replayed with s.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from dualform.learning_rules.adam import advance_second
from dualform.learning_rules.adaptive import (
    AdaptiveRule,
    Elementwise,
    Factor,
    Settings,
    State,
    coupled_decay,
    loss_gradient,
)


class Adadelta(AdaptiveRule):
    """The gradient over its root mean square, times that of earlier steps."""

    name = "adadelta"
    settings = ("lr", "rho", "eps", "weight_decay", "maximize")
    tensors = ("square_avg", "acc_delta")
    second = "square_avg"

    def fading(self, settings: Settings) -> tuple[float, float]:
        return settings["rho"], 1 - settings["rho"]

    def read(self, group: Mapping[str, Any]) -> tuple[float, ...]:
        return tuple(float(group[name]) for name in self.settings)

    def advance(
        self, state: State, settings: Settings, gradient: Tensor, weights: Tensor | None
    ) -> Elementwise:
        held, rho = settings.held, settings["rho"]
        eps = held(settings["eps"])
        moved = loss_gradient(settings, gradient, weights)
        state["step"] = state["step"] + 1
        second = advance_second(state["square_avg"], moved, rho, settings)
        scale = state["acc_delta"].add(eps).div_(second.add(eps)).sqrt_()
        advance_second(state["acc_delta"], scale * moved, rho, settings)
        lr, decay = held(settings["lr"]), coupled_decay(settings)
        sign = -1.0 if settings["maximize"] else 1.0
        return Elementwise(scale, ww=Factor(1.0, -lr * decay), nw=Factor(0.0, -lr * sign))
