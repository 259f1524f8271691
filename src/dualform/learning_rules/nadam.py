"""`torch.optim.NAdam`: Adam whose step looks ahead, with decay of either kind.

    W ← ζ W − (P_g g′ + P_m m)      P_g = η (1−μ_r)/((1−Π μ)(√v̂+ε))      P_m = η μ_{r+1}/((1−μ_{r+1} Π μ)(√v̂+ε))

Π μ is the product of all μ so far, which torch keeps as a single number of its own precision: it is
rounded here just as it is there.
"""  # noqa: E501

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from dualform.learning_rules.adam import SHARED, advance_second, read_shared
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


class NAdam(AdaptiveRule):
    """Adam with Nesterov's look ahead."""

    name = "nadam"
    settings = (*SHARED, "momentum_decay", "maximize", "single_lr", "double_numbers")
    tensors = ("exp_avg", "exp_avg_sq")
    numbers = ("step", "mu_product")
    momentum = "exp_avg"
    second = "exp_avg_sq"

    def fading(self, settings: Settings) -> tuple[float, float]:
        return settings["beta2"], 1 - settings["beta2"]

    def read(self, group: Mapping[str, Any]) -> tuple[float, ...]:
        return (
            *read_shared(group),
            float(group["momentum_decay"]),
            float(group["maximize"]),
            is_single(group["lr"]),
            float(torch.get_default_dtype() == torch.float64),
        )

    def fresh(self, shape: torch.Size | tuple[int, ...], settings: Settings) -> State:
        dtype = torch.float64 if settings["double_numbers"] else torch.float32
        return super().fresh(shape, settings) | {"mu_product": torch.ones((), dtype=dtype)}

    def advance(
        self, state: State, settings: Settings, gradient: Tensor, weights: Tensor | None
    ) -> Elementwise:
        held, lr, beta1, beta2 = settings.held, settings.rate, settings["beta1"], settings["beta2"]
        moved = loss_gradient(settings, gradient, weights)
        state["step"] = state["step"] + 1
        count, fading = float(state["step"]), settings["momentum_decay"]
        mu = beta1 * (1.0 - 0.5 * (0.96 ** (count * fading)))
        following = beta1 * (1.0 - 0.5 * (0.96 ** ((count + 1) * fading)))
        state["mu_product"] = state["mu_product"] * mu
        product = float(state["mu_product"])
        second = advance_second(state["exp_avg_sq"], moved, beta2, settings)
        spread = second.div(held(1 - beta2**count)).sqrt_().add_(held(settings["eps"]))
        inverse = spread.reciprocal_()
        by_gradient = held(lr * (1.0 - mu) / (1.0 - product))
        by_momentum = held(lr * following / (1.0 - product * following))
        write = held(1 - beta1)
        keep = 1 - write
        sign = -1.0 if settings["maximize"] else 1.0
        direct = by_gradient + by_momentum * write
        decay = coupled_decay(settings)
        return Elementwise(
            inverse,
            ww=Factor(self.shrink(settings), -direct * decay),
            wm=Factor(0.0, -by_momentum * keep),
            mw=Factor(write * decay),
            mm=keep,
            nw=Factor(0.0, -direct * sign),
            nm=Factor(write * sign),
        )
