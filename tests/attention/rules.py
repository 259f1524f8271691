"""Learning rules as textbooks write them: how a share of the weights is carried along.

They know neither the memory's log nor torch's optimizers: only the share, its gradient, and what
torch remembered at that step (the second moments, say), which is taken as given.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

State = dict[str, Any]
Share = tuple[Tensor, Tensor]
Rule = Callable[[Share, Tensor, State, State], Share]
"""(share of the weights, share of the momentum), gradient, what torch remembered after the step and
before it -> the share after the step."""


def sgd(lr: float, momentum: float, decay: float) -> Rule:
    def step(share: Share, g: Tensor, now: State, before: State) -> Share:
        W, m = share
        m = momentum * m + g + decay * W
        return W - lr * m, m

    return step


def adam(lr: float, b1: float, b2: float, decay: float, *, coupled: bool, amsgrad: bool) -> Rule:
    def step(share: Share, g: Tensor, now: State, before: State) -> Share:
        W, m = share
        t, v = int(now["step"]), now["max_exp_avg_sq" if amsgrad else "exp_avg_sq"]
        g, W = (g + decay * W, W) if coupled else (g, (1 - lr * decay) * W)
        m = b1 * m + (1 - b1) * g
        return W - lr * m / (1 - b1**t) / ((v / (1 - b2**t)).sqrt() + 1e-8), m

    return step


def nadam(lr: float, b1: float, b2: float, psi: float, decay: float) -> Rule:
    def step(share: Share, g: Tensor, now: State, before: State) -> Share:
        W, m = share
        t = int(now["step"])
        mu, after = (b1 * (1 - 0.5 * 0.96 ** (k * psi)) for k in (t, t + 1))
        g = g + decay * W
        m = b1 * m + (1 - b1) * g
        size = (now["exp_avg_sq"] / (1 - b2**t)).sqrt() + 1e-8
        product = float(now["mu_product"])
        W = W - lr * (1 - mu) / (1 - product) * g / size
        return W - lr * after / (1 - product * after) * m / size, m

    return step


def rmsprop(lr: float, momentum: float, decay: float, *, centered: bool) -> Rule:
    def step(share: Share, g: Tensor, now: State, before: State) -> Share:
        W, m = share
        v = now["square_avg"]
        v = v - now["grad_avg"] ** 2 if centered else v
        m = momentum * m + (g + decay * W) / (v.sqrt() + 1e-8)
        return W - lr * m, m

    return step


def adagrad(lr: float, lr_decay: float) -> Rule:
    def step(share: Share, g: Tensor, now: State, before: State) -> Share:
        W, m = share
        rate = lr / (1 + (int(now["step"]) - 1) * lr_decay)
        return W - rate * g / (now["sum"].sqrt() + 1e-10), m

    return step


def adadelta(lr: float, decay: float) -> Rule:
    def step(share: Share, g: Tensor, now: State, before: State) -> Share:
        W, m = share
        earlier = before.get("acc_delta", torch.zeros_like(W))
        size = (earlier + 1e-6).sqrt() / (now["square_avg"] + 1e-6).sqrt()
        return W - lr * size * (g + decay * W), m

    return step
