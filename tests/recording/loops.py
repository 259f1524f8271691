"""Training loops as people write them, and a recorder of twenty lines to compare with.

Each loop is told its batches and reports to `watch` only what a reader of the loop would say: which
gradients were thrown away unused, and that an update was made.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer


class Naive:
    """Keys and error signals of every Linear, kept in lists: the whole idea, and no more."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.step, self.is_on = model, 0, True
        self.pending: dict[str, list[tuple[Tensor, Tensor]]] = {}
        self.rows: dict[str, list[tuple[int, Tensor, Tensor]]] = {}
        self.weights = [self.state()]
        for name, module in model.named_modules():
            if isinstance(module, nn.Linear):
                module.register_forward_hook(lambda m, x, y, name=name: self.see(name, m, x[0], y))

    def see(self, name: str, module: nn.Module, x: Tensor, y: Tensor) -> None:
        if self.is_on and y.requires_grad and any(p.requires_grad for p in module.parameters()):
            key = x.detach().clone()
            y.register_hook(
                lambda d: (
                    self.pending.setdefault(name, []).append((key, d.detach().clone()))
                    if torch._C._current_graph_task_id() >= 0
                    else None
                )
            )

    def state(self) -> dict[str, Tensor]:
        return {n: p.detach().clone() for n, p in self.model.named_parameters()}

    def drop(self, prefix: str = "") -> None:
        """Gradients were thrown away."""
        self.pending = {n: p for n, p in self.pending.items() if not n.startswith(prefix)}

    def moved(self, prefix: str = "") -> None:
        """An optimizer has moved these layers; the step may not be over yet."""
        for name in [n for n in self.pending if n.startswith(prefix)]:
            found = [(self.step, k, d) for k, d in self.pending.pop(name)]
            self.rows.setdefault(name, []).extend(found)

    def next(self) -> None:
        """The step is over."""
        self.moved()
        self.step += 1
        self.weights.append(self.state())


@dataclass
class Training:
    """A model, its optimizers, its batches."""

    model: nn.Module
    optimizers: list[Optimizer]
    seed: int = 0
    steps: int = 24
    tag: Callable[..., None] = lambda **columns: None
    settings: dict[str, Any] = field(default_factory=dict)
    """Those of the optimizers, for loops that make their own."""

    def __post_init__(self) -> None:
        self.generator = torch.Generator().manual_seed(self.seed)
        self.naive: Any = None

    def batch(self, size: int = 6) -> tuple[Tensor, Tensor]:
        dtype = next(self.model.parameters()).dtype
        x = torch.randn(size, 7, generator=self.generator, dtype=torch.float64).to(dtype)
        y = torch.randint(0, 4, (size,), generator=self.generator)
        self.tag(label=y)
        return x, y

    def loss(self) -> Tensor:
        x, y = self.batch()
        return F.cross_entropy(self.model(x), y)

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()

    def zero(self, **how: Any) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad(**how)


def plain(t: Training) -> Iterator[None]:
    for _ in range(t.steps):
        t.loss().backward()
        t.step()
        yield
        t.zero()


def accumulation(t: Training) -> Iterator[None]:
    for _ in range(t.steps):
        for _ in range(3):
            (t.loss() / 3).backward()
        t.step()
        yield
        t.zero()


def clip(t: Training) -> Iterator[None]:
    for _ in range(t.steps):
        t.loss().backward()
        nn.utils.clip_grad_norm_(t.model.parameters(), 0.3)
        t.step()
        yield
        t.zero()


def scaler_skip(t: Training) -> Iterator[None]:
    for step in range(t.steps):
        (t.loss() * 1024).backward()
        for p in t.model.parameters():
            if p.grad is not None:
                p.grad.div_(1024)
        if step % 5 == 3:
            t.zero()
            t.naive.drop()
            continue
        t.step()
        yield
        t.zero()


def two_in_turn(t: Training) -> Iterator[None]:
    """Two optimizers, each of some layers, in turn within every step."""
    for _ in range(t.steps):
        t.loss().backward()
        t.optimizers[0].step()
        t.optimizers[0].zero_grad()
        t.optimizers[-1].step()
        yield
        t.zero()


def closure(t: Training) -> Iterator[None]:
    for _ in range(t.steps):
        x, y = t.batch()

        def evaluate(x: Tensor = x, y: Tensor = y) -> Tensor:
            t.zero()
            t.naive.drop()
            loss = F.cross_entropy(t.model(x), y)
            loss.backward()
            return loss

        for optimizer in t.optimizers:
            optimizer.step(evaluate)  # type: ignore[arg-type]
        yield
        t.zero()


def sam(t: Training) -> Iterator[None]:
    for _ in range(t.steps):
        x, y = t.batch()
        F.cross_entropy(t.model(x), y).backward()
        moved = []
        with torch.no_grad():
            for p in t.model.parameters():
                if p.grad is not None:
                    e = p.grad * 0.05 / (p.grad.norm() + 1e-12)
                    p.add_(e)
                    moved.append((p, e))
        t.zero()
        t.naive.drop()
        F.cross_entropy(t.model(x), y).backward()
        with torch.no_grad():
            for p, e in moved:
                p.sub_(e)
        t.step()
        yield
        t.zero()


def ema_exchange(t: Training) -> Iterator[None]:
    average = copy.deepcopy(t.model.state_dict())
    for _ in range(t.steps):
        t.loss().backward()
        t.step()
        yield
        t.zero()
        for name, p in t.model.named_parameters():
            average[name].mul_(0.9).add_(p.detach(), alpha=0.1)
        own = {n: p.data for n, p in t.model.named_parameters()}
        for name, p in t.model.named_parameters():
            p.data = average[name].clone()
        with torch.no_grad():
            t.model(torch.zeros(2, 7, dtype=average[name].dtype))
        for name, p in t.model.named_parameters():
            p.data = own[name]


def zero_in_place(t: Training) -> Iterator[None]:
    for _ in range(t.steps):
        t.loss().backward()
        t.step()
        yield
        t.zero(set_to_none=False)


def zero_at_start(t: Training) -> Iterator[None]:
    for _ in range(t.steps):
        t.zero()
        t.loss().backward()
        t.step()
        yield


def carried_over(t: Training) -> Iterator[None]:
    """Gradients that are used again: they are only reset every third step, and clipped."""
    for step in range(t.steps):
        t.loss().backward()
        nn.utils.clip_grad_norm_(t.model.parameters(), 0.3)
        t.step()
        yield
        if step % 3 == 2:
            t.zero()


def in_backward(t: Training) -> Iterator[None]:
    """Each parameter moves as soon as its gradient is there."""
    own = [
        type(t.optimizers[0])([p], **t.settings) for p in t.model.parameters() if p.requires_grad
    ]

    def move(p: Tensor, optimizer: Optimizer) -> None:
        optimizer.step()
        optimizer.zero_grad()

    handles = []
    trained = [p for p in t.model.parameters() if p.requires_grad]
    for p, optimizer in zip(trained, own, strict=True):
        hook = lambda p, optimizer=optimizer: move(p, optimizer)  # noqa: E731
        handles.append(p.register_post_accumulate_grad_hook(hook))
    t.optimizers[:] = own
    for _ in range(t.steps):
        t.loss().backward()
        yield
    for handle in handles:
        handle.remove()


def late_and_frozen(t: Training) -> Iterator[None]:
    layers = [m for m in t.model.modules() if isinstance(m, nn.Linear)]
    layers[0].requires_grad_(False)
    for step in range(t.steps):
        if step == t.steps // 3:
            layers[0].requires_grad_(True)
        if step == 2 * t.steps // 3:
            layers[1].requires_grad_(False)
            layers[1].weight.grad = layers[1].bias.grad = None
        t.loss().backward()
        t.step()
        yield
        t.zero()


def validation(t: Training) -> Iterator[None]:
    for _ in range(t.steps):
        t.loss().backward()
        t.model.eval()
        with torch.no_grad():
            t.model(torch.ones(3, 7, dtype=next(t.model.parameters()).dtype))
        x = torch.ones(2, 7, dtype=next(t.model.parameters()).dtype, requires_grad=True)
        t.naive.is_on = False
        torch.autograd.grad(t.model(x).sum(), x)
        t.naive.is_on = True
        t.model.train()
        t.step()
        yield
        t.zero()


def broken_off(t: Training) -> Iterator[None]:
    """A backward pass that ends in an exception; its gradients are thrown away."""
    for step in range(t.steps):
        if step % 4 == 1:
            x, y = t.batch()
            out = t.model(x)
            first = [m for m in t.model.modules() if isinstance(m, nn.Linear)][1]

            def fail(module: nn.Module, given: Any, got: Any) -> None:
                raise ZeroDivisionError

            handle = first.register_full_backward_hook(fail)
            with contextlib.suppress(ZeroDivisionError):
                F.cross_entropy(t.model(x) + 0 * out, y).backward()
            handle.remove()
            t.zero()
            t.naive.drop()
        t.loss().backward()
        t.step()
        yield
        t.zero()


def retained(t: Training) -> Iterator[None]:
    """The same graph gone through twice."""
    for _ in range(t.steps):
        loss = t.loss()
        loss.backward(retain_graph=True)
        loss.backward()
        t.step()
        yield
        t.zero()


def gan(t: Training) -> Iterator[None]:
    """Two networks in one model; the second moves at every other turn only."""
    generator, critic = t.model.generator, t.model.critic  # type: ignore[union-attr]
    of_generator, of_critic = t.optimizers
    dtype = next(t.model.parameters()).dtype
    for step in range(t.steps):
        x, _ = t.batch()
        z = torch.randn(len(x), 3, generator=t.generator, dtype=torch.float64).to(dtype)
        of_critic.zero_grad()
        t.naive.drop("critic")
        real, fake = critic(x), critic(generator(z).detach())
        (F.softplus(-real).mean() + F.softplus(fake).mean()).backward()
        of_critic.step()
        t.naive.moved("critic")
        if not step % 2:
            of_generator.zero_grad()
            t.tag(label=torch.zeros(len(x), dtype=torch.int64))
            F.softplus(-critic(generator(z))).mean().backward()
            of_generator.step()
            t.naive.moved("generator")
            t.naive.drop("critic")  # what the generator's pass gave the critic is reset unused
        yield


LOOPS: dict[str, Callable[[Training], Iterator[None]]] = {
    loop.__name__: loop
    for loop in (
        plain, accumulation, clip, scaler_skip, two_in_turn, gan, closure, sam, ema_exchange,
        zero_in_place, zero_at_start, carried_over, in_backward, late_and_frozen, validation,
        broken_off, retained,
    )
}  # fmt: skip
