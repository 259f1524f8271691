"""Learning rules that dualform was never told of, as people write them."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import Optimizer


class Own(Optimizer):
    """A rule in one method: `move` is given the group and every parameter with a gradient."""

    def __init__(self, params: Any, lr: float = 1e-2, **settings: Any) -> None:
        super().__init__(params, {"lr": lr, **settings})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            self.begin(group)
            for p in group["params"]:
                if p.grad is not None:
                    self.move(group, p, self.state[p])
        return loss

    def begin(self, group: dict[str, Any]) -> None: ...

    def move(self, group: dict[str, Any], p: Any, state: dict[str, Any]) -> None:
        raise NotImplementedError


class Lion(Own):
    """The sign of a mean."""

    def move(self, group: dict[str, Any], p: Any, state: dict[str, Any]) -> None:
        m = state.setdefault("m", torch.zeros_like(p))
        p.add_((m * 0.9 + p.grad * 0.1).sign(), alpha=-group["lr"])
        m.mul_(0.99).add_(p.grad, alpha=0.01)


class ScheduleFree(Own):
    """Averages its own iterates, and counts in its group, not in the state."""

    def begin(self, group: dict[str, Any]) -> None:
        group["k"] = group.get("k", 0) + 1

    def move(self, group: dict[str, Any], p: Any, state: dict[str, Any]) -> None:
        z = state.setdefault("z", p.detach().clone())
        z.sub_(p.grad, alpha=group["lr"])
        p.lerp_(z, 1.0 / group["k"])


class GlobalNorm(Own):
    """Divides by the norm of all gradients together, as Prodigy shares one step size."""

    def begin(self, group: dict[str, Any]) -> None:
        held = [p.grad for p in group["params"] if p.grad is not None]
        self.norm = torch.stack([g.norm() for g in held]).norm()

    def move(self, group: dict[str, Any], p: Any, state: dict[str, Any]) -> None:
        p.sub_(p.grad / self.norm, alpha=group["lr"])


class Chance(Own):
    """Adds noise: not deterministic."""

    def move(self, group: dict[str, Any], p: Any, state: dict[str, Any]) -> None:
        p.sub_(p.grad + 0.1 * torch.randn_like(p), alpha=group["lr"])


class OwnAdamW(torch.optim.AdamW):
    """A subclass that changes nothing of the rule."""


OWN: tuple[type[Optimizer], ...] = (Lion, ScheduleFree, GlobalNorm, Chance, OwnAdamW)
