"""Every learning rule, rebuilt: what the optimizer may do with a plain network, case by case.

A case is a training loop as a user would write it. It is recorded, its weight snapshots are
deleted, and the weights of several steps are rebuilt from initial state, log and patterns.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import SGD
from torch.optim.lr_scheduler import (
    CosineAnnealingWarmRestarts,
    LambdaLR,
    OneCycleLR,
    StepLR,
)

STEPS = 12
FULL = {"lr": 0.05, "momentum": 0.9, "dampening": 0.3, "weight_decay": 0.02}
NESTEROV = {"lr": 0.05, "momentum": 0.9, "nesterov": True, "weight_decay": 0.02}

Train = Callable[[Any], None]
CASES: dict[str, Train] = {}


def case(name: str) -> Callable[[Train], Train]:
    def enter(train: Train) -> Train:
        CASES[name] = train
        return train

    return enter


def network(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Linear(6, 8), nn.Tanh(), nn.LayerNorm(8), nn.Linear(8, 5), nn.ReLU(), nn.Linear(5, 3)
    ).to(dtype)


def loss_of(model: nn.Module, generator: torch.Generator) -> Tensor:
    dtype = next(model.parameters()).dtype
    inputs = torch.randn(7, 6, generator=generator, dtype=torch.float64).to(dtype)
    labels = torch.randint(0, 3, (7,), generator=generator)
    return nn.functional.cross_entropy(model(inputs), labels)


def simple_loop(run: Any, optimizer: SGD, *, steps: int = STEPS, scheduler: Any = None) -> None:
    with run.recording(optimizer):
        for _ in range(steps):
            run.loss().backward()
            optimizer.step()
            optimizer.zero_grad()
            if scheduler is not None:
                scheduler.step()
            run.keep()


def weights_and_biases(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    parameters = list(model.parameters())
    return [p for p in parameters if p.dim() > 1], [p for p in parameters if p.dim() == 1]


# Options of torch.optim.SGD -----------------------------------------------------------------------

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {"lr": 0.1},
    "momentum": {"lr": 0.05, "momentum": 0.9},
    "dampening": {"lr": 0.05, "momentum": 0.9, "dampening": 0.5},
    "full dampening": {"lr": 0.05, "momentum": 0.9, "dampening": 1.0},
    "nesterov": {"lr": 0.05, "momentum": 0.9, "nesterov": True},
    "coupled decay": {"lr": 0.1, "weight_decay": 0.1},
    "decay stronger than the learning rate allows": {"lr": 0.5, "weight_decay": 1.8},
    "maximize": {"lr": 0.02, "maximize": True},
    "momentum, dampening and decay": FULL,
    "nesterov and decay": NESTEROV,
    "maximize with momentum and decay": dict(FULL, lr=0.01, maximize=True),
    "maximize with nesterov and decay": dict(NESTEROV, lr=0.01, maximize=True),
    "for-loop implementation": dict(NESTEROV, foreach=False),
    "foreach": dict(FULL, foreach=True),
    "foreach with nesterov": {"lr": 0.05, "momentum": 0.9, "nesterov": True, "foreach": True},
    "foreach with nesterov and decay": dict(NESTEROV, foreach=True),
    "foreach with everything and maximize": dict(FULL, lr=0.01, foreach=True, maximize=True),
    "foreach with nesterov and maximize": dict(NESTEROV, lr=0.01, foreach=True, maximize=True),
    "fused": {"lr": 0.1, "fused": True},
    "fused with everything": dict(FULL, fused=True),
    "fused with nesterov and decay": dict(NESTEROV, fused=True),
    "fused with everything and maximize": dict(FULL, lr=0.01, fused=True, maximize=True),
    "learning rate zero": dict(FULL, lr=0.0),
    "momentum above one": {"lr": 0.01, "momentum": 1.05},
}


def with_options(options: dict[str, Any]) -> Train:
    return lambda run: simple_loop(run, SGD(run.model.parameters(), **options))


CASES |= {name: with_options(options) for name, options in OPTIONS.items()}


@case("learning rate given as a tensor")
def _(run: Any) -> None:
    simple_loop(run, SGD(run.model.parameters(), lr=torch.tensor(0.05), momentum=0.9))


# Parameter groups ---------------------------------------------------------------------------------


@case("biases exempt from decay")
def _(run: Any) -> None:
    weights, biases = weights_and_biases(run.model)
    groups = [{"params": weights}, {"params": biases, "weight_decay": 0.0}]
    simple_loop(run, SGD(groups, lr=0.05, momentum=0.9, weight_decay=0.1))


@case("a group for every parameter, all different")
def _(run: Any) -> None:
    groups = [
        {
            "params": [p],
            "lr": 0.02 * (i + 1),
            "momentum": (0.0, 0.5, 0.9)[i % 3],
            "weight_decay": 0.01 * i,
            "nesterov": i % 3 == 1,
        }
        for i, p in enumerate(run.model.parameters())
    ]
    simple_loop(run, SGD(groups, lr=0.1))


# Schedules ----------------------------------------------------------------------------------------


@case("step schedule")
def _(run: Any) -> None:
    optimizer = SGD(run.model.parameters(), **FULL)
    simple_loop(run, optimizer, scheduler=StepLR(optimizer, 3, gamma=0.5))


@case("warm restarts")
def _(run: Any) -> None:
    optimizer = SGD(run.model.parameters(), **NESTEROV)
    simple_loop(run, optimizer, scheduler=CosineAnnealingWarmRestarts(optimizer, 4))


@case("warm-up from a learning rate of zero")
def _(run: Any) -> None:
    optimizer = SGD(run.model.parameters(), **FULL)
    simple_loop(run, optimizer, scheduler=LambdaLR(optimizer, lambda s: min(1.0, s / 5)))


@case("one-cycle, momentum cycled too")
def _(run: Any) -> None:
    optimizer = SGD(run.model.parameters(), **FULL)
    simple_loop(run, optimizer, scheduler=OneCycleLR(optimizer, 0.1, total_steps=STEPS + 1))


def with_changes(options: dict[str, Any], changes: dict[int, dict[str, Any]]) -> Train:
    """Settings that change in the middle of the run: {step: new settings}."""

    def train(run: Any) -> None:
        optimizer = SGD(run.model.parameters(), **options)
        with run.recording(optimizer):
            for step in range(STEPS):
                optimizer.param_groups[0].update(changes.get(step, {}))
                run.loss().backward()
                optimizer.step()
                optimizer.zero_grad()
                run.keep()

    return train


CASES |= {
    "momentum from 0 to 0.9 mid-run": with_changes({"lr": 0.05}, {5: {"momentum": 0.9}}),
    "momentum from 0.9 to 0 mid-run": with_changes(FULL, {5: {"momentum": 0.0}}),
    "momentum from 0.9 to 0 and back": with_changes(
        FULL, {4: {"momentum": 0.0}, 8: {"momentum": 0.8}}
    ),
    "dampening, decay and nesterov changed mid-run": with_changes(
        FULL, {3: {"dampening": 0.0}, 5: {"nesterov": True}, 8: {"weight_decay": 0.3}}
    ),
    "maximize switched on and off": with_changes(
        FULL, {4: {"maximize": True}, 6: {"maximize": False}}
    ),
}


# Clipping, accumulation, loss scaling -------------------------------------------------------------


def clipped(run: Any, clip: Callable[[], Any], options: dict[str, Any], parts: int = 1) -> None:
    optimizer = SGD(run.model.parameters(), **options)
    with run.recording(optimizer):
        for _ in range(STEPS):
            for _ in range(parts):
                (run.loss() / parts).backward()
            clip()
            optimizer.step()
            optimizer.zero_grad()
            run.keep()


@case("clipping by the global norm")
def _(run: Any) -> None:
    clipped(run, lambda: clip_grad_norm_(run.model.parameters(), 0.2), FULL)


@case("clipping by the global norm, foreach")
def _(run: Any) -> None:
    clip = lambda: clip_grad_norm_(run.model.parameters(), 0.2, foreach=True)  # noqa: E731
    clipped(run, clip, {"lr": 0.05, "momentum": 0.9, "nesterov": True, "foreach": True})


@case("clipping by the maximum norm")
def _(run: Any) -> None:
    clipped(run, lambda: clip_grad_norm_(run.model.parameters(), 0.1, float("inf")), NESTEROV)


@case("clipping that never bites")
def _(run: Any) -> None:
    clipped(run, lambda: clip_grad_norm_(run.model.parameters(), 1e6), FULL)


@case("clipping that bites now and then")
def _(run: Any) -> None:
    clipped(run, lambda: clip_grad_norm_(run.model.parameters(), 1.1), FULL)


@case("clipping per group")
def _(run: Any) -> None:
    weights, biases = weights_and_biases(run.model)

    def clip() -> None:
        clip_grad_norm_(weights, 0.3)
        clip_grad_norm_(biases, 0.01)

    clipped(run, clip, NESTEROV)


@case("clipping each parameter by itself, to nearly nothing")
def _(run: Any) -> None:
    def clip() -> None:
        for parameter in run.model.parameters():
            clip_grad_norm_([parameter], 1e-9)

    clipped(run, clip, {"lr": 1e6, "momentum": 0.9})


@case("accumulation over three micro-batches")
def _(run: Any) -> None:
    clipped(run, lambda: None, FULL, parts=3)


@case("accumulation and clipping")
def _(run: Any) -> None:
    clipped(run, lambda: clip_grad_norm_(run.model.parameters(), 0.2), NESTEROV, parts=3)


@case("accumulation with a changing number of micro-batches")
def _(run: Any) -> None:
    optimizer = SGD(run.model.parameters(), **FULL)
    with run.recording(optimizer):
        for step in range(STEPS):
            for _ in range(1 + step % 4):
                run.loss().backward()
            optimizer.step()
            optimizer.zero_grad()
            run.keep()


@case("gradients scaled by hand")
def _(run: Any) -> None:
    def scale() -> None:
        for parameter in run.model.parameters():
            parameter.grad.mul_(0.37)

    clipped(run, scale, FULL)


@case("gradients turned around by hand")
def _(run: Any) -> None:
    def turn() -> None:
        for parameter in run.model.parameters():
            parameter.grad.neg_()

    clipped(run, turn, dict(FULL, lr=0.01))


def scaled(
    run: Any,
    options: dict[str, Any],
    *,
    overflows: frozenset[int] = frozenset(),
    clip: float | None = None,
    parts: int = 1,
) -> None:
    """A loop with a loss scaler; the batches in `overflows` give infinite gradients."""
    optimizer = SGD(run.model.parameters(), **options)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
    with run.recording(optimizer):
        for batch in range(STEPS + len(overflows)):
            for _ in range(parts):
                loss = run.loss() / parts
                scaler.scale(loss * float("inf") if batch in overflows else loss).backward()
            if clip is not None:
                scaler.unscale_(optimizer)
                clip_grad_norm_(run.model.parameters(), clip)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            if batch not in overflows:
                run.keep()


SCALED: dict[str, dict[str, Any]] = {
    "loss scaling": {"options": FULL},
    "loss scaling with skipped steps": {"options": FULL, "overflows": frozenset({0, 4, 5, 13})},
    "loss scaling, accumulation and skipped steps": {
        "options": NESTEROV,
        "overflows": frozenset({3}),
        "parts": 2,
    },
    "loss scaling, unscaled for clipping": {"options": NESTEROV, "clip": 0.2},
    "loss scaling, clipping and skipped steps": {
        "options": FULL,
        "clip": 0.2,
        "overflows": frozenset({2, 8}),
    },
    "loss scaling, fused": {"options": dict(FULL, fused=True)},
    "loss scaling, fused, with skipped steps": {
        "options": dict(NESTEROV, fused=True),
        "overflows": frozenset({1, 4, 5, 13}),
    },
    "loss scaling, fused, unscaled for clipping": {"options": dict(FULL, fused=True), "clip": 0.2},
    "loss scaling, foreach nesterov": {
        "options": {"lr": 0.05, "momentum": 0.9, "nesterov": True, "foreach": True}
    },
}
CASES |= {name: functools.partial(scaled, **settings) for name, settings in SCALED.items()}


@case("gradients thrown away by hand when the loss is bad")
def _(run: Any) -> None:
    optimizer = SGD(run.model.parameters(), **FULL)
    with run.recording(optimizer):
        for batch in range(STEPS + 3):
            run.loss().backward()
            if batch % 5 == 2:
                optimizer.zero_grad()
                continue
            optimizer.step()
            optimizer.zero_grad()
            run.keep()


# Warm optimizers ----------------------------------------------------------------------------------


def warm(options: dict[str, Any], then: dict[str, Any] | None = None) -> Train:
    """Train a while before recording begins, so that momentum buffers exist by then."""

    def train(run: Any) -> None:
        optimizer = SGD(run.model.parameters(), **options)
        for _ in range(5):
            run.loss().backward()
            optimizer.step()
            optimizer.zero_grad()
        optimizer.param_groups[0].update(then or {})
        simple_loop(run, optimizer)

    return train


CASES |= {
    "warm momentum": warm({"lr": 0.05, "momentum": 0.9}),
    "warm momentum, dampening and decay": warm(FULL),
    "warm nesterov": warm(NESTEROV),
    "warm momentum, fused": warm(dict(FULL, fused=True)),
    "warm momentum, switched off when recording begins": warm(FULL, {"momentum": 0.0}),
    "warm without momentum, switched on when recording begins": warm(
        {"lr": 0.05}, {"momentum": 0.9}
    ),
}


@case("recording begins with gradients already there")
def _(run: Any) -> None:
    optimizer = SGD(run.model.parameters(), **FULL)
    run.loss().backward()
    optimizer.step()
    optimizer.zero_grad()
    simple_loop(run, optimizer)


@case("momentum buffers thrown away mid-run")
def _(run: Any) -> None:
    optimizer = SGD(run.model.parameters(), **FULL)
    with run.recording(optimizer):
        for step in range(STEPS):
            if step == 6:
                optimizer.state.clear()
            run.loss().backward()
            optimizer.step()
            optimizer.zero_grad()
            run.keep()


# Parameters that come and go ----------------------------------------------------------------------


def freezing(frozen: Callable[[int], list[str]], *, set_to_none: bool = True) -> Train:
    """`frozen(step)` names the parameters that need no gradient at that step."""

    def train(run: Any) -> None:
        optimizer = SGD(run.model.parameters(), **FULL)
        with run.recording(optimizer):
            for step in range(STEPS):
                for name, parameter in run.model.named_parameters():
                    parameter.requires_grad_(name not in frozen(step))
                run.loss().backward()
                optimizer.step()
                optimizer.zero_grad(set_to_none=set_to_none)
                run.keep()

    return train


CASES |= {
    "a layer frozen later": freezing(lambda s: ["3.weight", "3.bias"] if s >= 5 else []),
    "a layer frozen later, its momentum running on": freezing(
        lambda s: ["3.weight", "3.bias"] if s >= 5 else [], set_to_none=False
    ),
    "a layer unfrozen later": freezing(lambda s: ["0.weight", "0.bias"] if s < 5 else []),
    "weights frozen, biases trained": freezing(lambda s: ["0.weight", "3.weight", "5.weight"]),
    "biases frozen later": freezing(lambda s: ["0.bias", "2.bias"] if s >= 4 else []),
    "a layer frozen now and then": freezing(lambda s: ["5.weight"] if s % 3 == 1 else []),
    "the first layers frozen for good": freezing(lambda s: ["0.weight", "0.bias", "2.weight"]),
}


@case("parameter groups added later")
def _(run: Any) -> None:
    first, *others = (m for m in run.model if list(m.parameters()))
    optimizer = SGD(first.parameters(), **FULL)
    with run.recording(optimizer):
        for step in range(STEPS):
            if step in (3, 5, 8):
                optimizer.add_param_group(
                    {"params": list(others.pop().parameters()), "lr": 0.02, "momentum": 0.5}
                )
            run.loss().backward()
            optimizer.step()
            run.model.zero_grad()
            run.keep()


@case("parameters no optimizer owns")
def _(run: Any) -> None:
    simple_loop(run, SGD(run.model[3].parameters(), **FULL))


# Other ways to write the loop ---------------------------------------------------------------------


@case("optimizer.step(closure)")
def _(run: Any) -> None:
    optimizer = SGD(run.model.parameters(), **FULL)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = run.loss()
        loss.backward()
        return loss

    with run.recording(optimizer):
        for step in range(STEPS):
            loss = optimizer.step(closure) if step % 2 else optimizer.step(closure=closure)
            assert loss.requires_grad
            run.keep()


@case("zero_grad keeps the tensors")
def _(run: Any) -> None:
    optimizer = SGD(run.model.parameters(), **FULL)
    with run.recording(optimizer):
        for _ in range(STEPS):
            optimizer.zero_grad(set_to_none=False)
            run.loss().backward()
            optimizer.step()
            run.keep()


@case("zero_grad right before the backward pass")
def _(run: Any) -> None:
    optimizer = SGD(run.model.parameters(), **NESTEROV)
    with run.recording(optimizer):
        for _ in range(STEPS):
            loss = run.loss()
            run.model.zero_grad()
            loss.backward()
            optimizer.step()
            run.keep()


@case("zero_grad never called")
def _(run: Any) -> None:
    optimizer = SGD(run.model.parameters(), lr=0.01, momentum=0.5, weight_decay=0.1)
    with run.recording(optimizer):
        for _ in range(STEPS):
            run.loss().backward()
            optimizer.step()
            run.keep()


@case("zero_grad every third step only")
def _(run: Any) -> None:
    optimizer = SGD(run.model.parameters(), **FULL)
    with run.recording(optimizer):
        for step in range(STEPS):
            run.loss().backward()
            optimizer.step()
            if step % 3 == 2:
                optimizer.zero_grad()
            run.keep()


@case("a diagnostic backward pass thrown away at every step")
def _(run: Any) -> None:
    optimizer = SGD(run.model.parameters(), **FULL)
    with run.recording(optimizer):
        for _ in range(STEPS):
            run.loss().backward()  # on top of the last step's gradients
            optimizer.zero_grad()
            run.loss().backward()
            optimizer.step()
            run.keep()


@case("the optimizer steps twice on the same gradients")
def _(run: Any) -> None:
    optimizer = SGD(run.model.parameters(), **FULL)
    with run.recording(optimizer):
        for _ in range(STEPS // 2):
            run.loss().backward()
            optimizer.step()
            run.keep()
            optimizer.step()
            run.keep()
            optimizer.zero_grad()


# Several optimizers -------------------------------------------------------------------------------


def halves(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    parameters = list(model.parameters())
    return parameters[:4], parameters[4:]


@case("two optimizers stepping together")
def _(run: Any) -> None:
    lower, upper = halves(run.model)
    one, two = SGD(lower, **FULL), SGD(upper, **NESTEROV)
    with run.recording(one, two):
        for _ in range(STEPS):
            run.loss().backward()
            one.step()
            two.step()
            one.zero_grad()
            two.zero_grad()
            run.keep()


@case("two optimizers, weights and biases")
def _(run: Any) -> None:
    weights, biases = weights_and_biases(run.model)
    one, two = SGD(weights, **FULL), SGD(biases, lr=0.1)
    with run.recording(one, two):
        for _ in range(STEPS):
            run.loss().backward()
            one.step()
            two.step()
            run.model.zero_grad()
            run.keep()


@case("two optimizers taking turns")
def _(run: Any) -> None:
    lower, upper = halves(run.model)
    optimizers = SGD(lower, **FULL), SGD(upper, **NESTEROV)
    with run.recording(*optimizers):
        for step in range(STEPS):
            run.loss().backward()
            optimizers[step % 2].step()
            run.model.zero_grad()
            run.keep()


@case("two optimizers as in a GAN, the other one's gradients left lying about")
def _(run: Any) -> None:
    lower, upper = halves(run.model)
    optimizers = SGD(lower, **FULL), SGD(upper, **NESTEROV)
    with run.recording(*optimizers):
        for step in range(STEPS):
            optimizers[step % 2].zero_grad()
            run.loss().backward()
            optimizers[step % 2].step()
            run.keep()


@case("two optimizers, one stepping every other time on carried gradients")
def _(run: Any) -> None:
    lower, upper = halves(run.model)
    one, two = SGD(lower, **FULL), SGD(upper, **NESTEROV)
    with run.recording(one, two):
        for step in range(STEPS):
            run.loss().backward()
            one.step()
            one.zero_grad()
            if step % 2:
                two.step()
                two.zero_grad()
            run.keep()


@case("two optimizers, weights carried while biases step")
def _(run: Any) -> None:
    weights, biases = weights_and_biases(run.model)
    one, two = SGD(weights, **FULL), SGD(biases, lr=0.1)
    with run.recording(one, two):
        for step in range(STEPS):
            run.loss().backward()
            two.step()
            two.zero_grad()
            if step % 3 == 2:
                one.step()
                one.zero_grad()
            run.keep()


@case("two optimizers under one loss scaler that skips steps")
def _(run: Any) -> None:
    lower, upper = halves(run.model)
    one, two = SGD(lower, **FULL), SGD(upper, **dict(NESTEROV, fused=True))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
    with run.recording(one, two):
        for batch in range(STEPS):
            loss = run.loss() * (float("inf") if batch in (1, 3, 4) else 1.0)
            scaler.scale(loss).backward()
            scaler.step(one)
            scaler.step(two)
            scaler.update()
            run.model.zero_grad()
            if batch not in (1, 3, 4):
                run.keep()


# All at once --------------------------------------------------------------------------------------


@case("groups, one-cycle, accumulation, scaling, clipping, nesterov, decay, skipped steps")
def _(run: Any) -> None:
    weights, biases = weights_and_biases(run.model)
    groups = [{"params": weights}, {"params": biases, "weight_decay": 0.0}]
    optimizer = SGD(groups, **dict(NESTEROV, foreach=True))
    scheduler = OneCycleLR(optimizer, [0.1, 0.2], total_steps=STEPS + 1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
    with run.recording(optimizer):
        for batch in range(STEPS + 2):
            for part in range(3):
                broken = batch in (2, 7) and part == 1
                scaler.scale(run.loss() * (float("inf") if broken else 1.0)).backward()
            scaler.unscale_(optimizer)
            clip_grad_norm_(run.model.parameters(), 0.5)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad(set_to_none=batch % 2 == 0)
            if batch not in (2, 7):
                scheduler.step()
                run.keep()


@case("warm, frozen later, group added later, momentum rising, clipping per group")
def _(run: Any) -> None:
    lower, upper = halves(run.model)
    optimizer = SGD(upper, **FULL)
    for _ in range(4):
        run.loss().backward()
        optimizer.step()
        optimizer.zero_grad()
    with run.recording(optimizer):
        for step in range(STEPS):
            if step == 4:
                optimizer.add_param_group({"params": lower, "lr": 0.01, "nesterov": False})
            if step == 8:
                upper[0].requires_grad_(False)
            optimizer.param_groups[0]["momentum"] = 0.5 + 0.03 * step
            run.loss().backward()
            for group in optimizer.param_groups:
                clip_grad_norm_(group["params"], 0.3)
            optimizer.step()
            run.model.zero_grad()
            run.keep()


@case("many small segments")
def _(run: Any) -> None:
    run.options["segment_bytes"] = 2000
    clipped(run, lambda: clip_grad_norm_(run.model.parameters(), 0.2), FULL)


LOSES_DIGITS = {"decay stronger than the learning rate allows"}
"""Nine tenths of every weight are subtracted from it at every step; float32 loses a digit by it."""


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
@pytest.mark.parametrize("name", CASES)
def test_the_weights_of_every_step_are_rebuilt(
    name: str, dtype: torch.dtype, new_run: Any, certify: Any
) -> None:
    run = new_run(network(dtype), loss_of, dtype)
    CASES[name](run)
    memory = certify(run, verify=name not in LOSES_DIGITS or dtype == torch.float64)
    coverages = {p.coverage for n, p in memory.parameters.items() if not n.startswith("2.")}
    assert coverages <= {"patterns", "untrained"}
