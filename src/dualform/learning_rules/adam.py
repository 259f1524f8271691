"""`torch.optim.Adam` and `AdamW`, with AMSGrad, `maximize` and decay of either kind.

    m ← β₁ m + (1−β₁) g′      v ← β₂ v + (1−β₂) g′²      W ← ζ W − P m      P = η/((1−β₁ʳ)(√v̂ + ε))

r is the optimizer's own count, v̂ = v/(1−β₂ʳ) (AMSGrad: of the largest v so far), g′ = ±g + λ W with
ζ = 1 where decay is coupled, else g′ = ±g with ζ = 1 − ηλ.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
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

SHARED = ("lr", "beta1", "beta2", "eps", "weight_decay", "decoupled")
"""The settings of Adam and of its nearest relatives."""


class Adam(AdaptiveRule):
    """Adam and AdamW: they differ in one setting, `decoupled`."""

    name = "adam"
    settings = (*SHARED, "amsgrad", "maximize", "single_lr")
    tensors = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")
    momentum = "exp_avg"
    second = "exp_avg_sq"

    def fading(self, settings: Settings) -> tuple[float, float]:
        return settings["beta2"], 1 - settings["beta2"]

    def read(self, group: Mapping[str, Any]) -> tuple[float, ...]:
        return (
            *read_shared(group),
            float(group["amsgrad"]),
            float(group["maximize"]),
            0.0 if group.get("fused") else is_single(group["lr"]),  # its kernel widens the number
        )

    def advance(
        self, state: State, settings: Settings, gradient: Tensor, weights: Tensor | None
    ) -> Elementwise:
        held, lr, beta1, beta2 = settings.held, settings.rate, settings["beta1"], settings["beta2"]
        moved = loss_gradient(settings, gradient, weights)
        state["step"] = state["step"] + 1
        count = float(state["step"])
        second = advance_second(state["exp_avg_sq"], moved, beta2, settings)
        if settings["amsgrad"]:
            second = torch.maximum(state["max_exp_avg_sq"], second, out=state["max_exp_avg_sq"])
        # η/((1−β₁ʳ)(√v/c + ε)) = size · c / (√v + c ε)
        corrected = held((1 - beta2**count) ** 0.5)
        size = held(lr / (1 - beta1**count)) * corrected
        scale = second.sqrt().add_(corrected * held(settings["eps"])).reciprocal_()
        write = held(1 - beta1)
        keep = 1 - write  # torch moves m towards g by the weight 1 − β₁
        sign = -1.0 if settings["maximize"] else 1.0
        decay = coupled_decay(settings)
        return Elementwise(
            scale,
            ww=Factor(self.shrink(settings), -size * write * decay),
            wm=Factor(0.0, -size * keep),
            mw=Factor(write * decay),
            mm=keep,
            nw=Factor(0.0, -size * write * sign),
            nm=Factor(write * sign),
            after=-size,
        )


def read_shared(group: Mapping[str, Any]) -> tuple[float, ...]:
    """One parameter group's settings now, in the order of `SHARED`."""
    beta1, beta2 = group["betas"]
    return (
        float(group["lr"]),
        float(beta1),
        float(beta2),
        float(group["eps"]),
        float(group["weight_decay"]),
        float(group.get("decoupled_weight_decay", False)),
    )


def advance_second(second: Tensor, gradient: Tensor, beta: float, settings: Settings) -> Tensor:
    """v ← β v + (1−β) g², in place."""
    second.mul_(settings.held(beta))
    return second.addcmul_(gradient, gradient, value=settings.held(1 - beta))
