"""Every learning rule, rebuilt: what an optimizer may do with a plain network, case by case.

A case is a training loop as a user would write it. Of every step the weights are rebuilt from the
patterns: to the bit by torch's own optimizer, and in float64 by the sum over patterns itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.recording.runs import proved, state_of
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grad_norm_
from torch.optim import SGD, Adadelta, Adagrad, Adam, AdamW, NAdam, Optimizer, RMSprop
from torch.optim.lr_scheduler import (
    CosineAnnealingWarmRestarts,
    LambdaLR,
    OneCycleLR,
    StepLR,
)

from dualform.learning_rules import coefficients
from dualform.memory import Memory
from dualform.recording import record

STEPS = 12
FULL = {"lr": 0.05, "momentum": 0.9, "dampening": 0.3, "weight_decay": 0.02}
NESTEROV = {"lr": 0.05, "momentum": 0.9, "nesterov": True, "weight_decay": 0.02}


class Run:
    """A network, its batches, and what it was after every update."""

    def __init__(self, dtype: torch.dtype, path: Path) -> None:
        torch.manual_seed(3)
        self.model = nn.Sequential(
            nn.Linear(6, 8), nn.Tanh(), nn.LayerNorm(8), nn.Linear(8, 5), nn.Tanh(), nn.Linear(5, 3)
        ).to(dtype)
        self.dtype, self.path = dtype, path
        self.generator = torch.Generator().manual_seed(7)
        self.states: dict[int, dict[str, Tensor]] = {}

    def loss(self) -> Tensor:
        inputs = torch.randn(7, 6, generator=self.generator, dtype=torch.float64).to(self.dtype)
        return cross_entropy(
            self.model(inputs), torch.randint(0, 3, (7,), generator=self.generator)
        )

    @contextmanager
    def recording(self, *optimizers: Optimizer) -> Iterator[None]:
        self.keep()
        with record(self.model, self.path):
            yield

    def keep(self) -> None:
        self.states[len(self.states)] = state_of(self.model)

    def move(
        self, *optimizers: Optimizer, zero: bool = True, keep: bool = True, **how: Any
    ) -> None:
        """One update by all of these; where others follow in the same step, it is not kept."""
        for optimizer in optimizers:
            optimizer.step()
        for optimizer in optimizers if zero else ():
            optimizer.zero_grad(**how)
        if keep:
            self.keep()

    @property
    def kinds(self) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
        """Weights and vectors."""
        parameters = list(self.model.parameters())
        return [p for p in parameters if p.dim() > 1], [p for p in parameters if p.dim() == 1]

    @property
    def halves(self) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
        parameters = list(self.model.parameters())
        return parameters[:4], parameters[4:]


Train = Callable[[Run], None]
CASES: dict[str, Train] = {}


def case(name: str) -> Callable[[Train], Train]:
    def enter(train: Train) -> Train:
        CASES[name] = train
        return train

    return enter


def loop(
    run: Run,
    *optimizers: Optimizer,
    parts: int = 1,
    clip: Callable[[], Any] = lambda: None,
    before: Callable[[int], Any] = lambda step: None,
    scheduler: Any = None,
    turns: Callable[[int], list[Optimizer]] | None = None,
    zero: Callable[[int], bool] = lambda step: True,
    **how: Any,
) -> None:
    """The loop everyone writes, with what is put into it."""
    with run.recording(*optimizers):
        for step in range(STEPS):
            before(step)
            for _ in range(parts):
                (run.loss() / parts).backward()
            clip()
            moving = turns(step) if turns else optimizers
            is_over = step % len(optimizers) == len(optimizers) - 1 or not turns
            run.move(*moving, zero=zero(step), keep=is_over, **how)
            if turns:
                run.model.zero_grad()
            if scheduler is not None:
                scheduler.step()


# Options ------------------------------------------------------------------------------------------

OPTIONS: dict[str, tuple[Any, dict[str, Any]]] = {
    "plain": (SGD, {"lr": 0.1}),
    "momentum": (SGD, {"lr": 0.05, "momentum": 0.9}),
    "full dampening": (SGD, {"lr": 0.05, "momentum": 0.9, "dampening": 1.0}),
    "nesterov": (SGD, {"lr": 0.05, "momentum": 0.9, "nesterov": True}),
    "coupled decay": (SGD, {"lr": 0.1, "weight_decay": 0.1}),
    "momentum, dampening and decay": (SGD, FULL),
    "nesterov and decay, for-loop": (SGD, NESTEROV | {"foreach": False}),
    "maximize with momentum and decay": (SGD, FULL | {"lr": 0.01, "maximize": True}),
    "maximize with nesterov, foreach": (
        SGD, NESTEROV | {"lr": 0.01, "maximize": True, "foreach": True},
    ),
    "foreach with nesterov": (SGD, NESTEROV | {"foreach": True}),
    "fused with everything and maximize": (
        SGD, FULL | {"lr": 0.01, "fused": True, "maximize": True},
    ),
    "fused with nesterov and decay": (SGD, NESTEROV | {"fused": True}),
    "learning rate zero": (SGD, FULL | {"lr": 0.0}),
    "learning rate given as a tensor": (SGD, {"lr": torch.tensor(0.05), "momentum": 0.9}),
    "momentum above one": (SGD, {"lr": 0.01, "momentum": 1.05}),
    "Adam, amsgrad and coupled decay": (Adam, {"amsgrad": True, "weight_decay": 0.1}),
    "Adam, maximize": (Adam, {"maximize": True, "weight_decay": 0.05}),
    "Adam, no momentum at all": (Adam, {"betas": (0.0, 0.99), "eps": 1e-3}),
    "Adam, foreach": (Adam, {"foreach": True, "weight_decay": 0.1, "amsgrad": True}),
    "Adam, for-loop": (Adam, {"foreach": False, "weight_decay": 0.1}),
    "Adam, fused with amsgrad": (Adam, {"fused": True, "amsgrad": True, "maximize": True}),
    "Adam, decoupled by option": (Adam, {"weight_decay": 0.1, "decoupled_weight_decay": True}),
    "AdamW, amsgrad": (AdamW, {"lr": 3e-3, "weight_decay": 0.3, "amsgrad": True}),
    "AdamW, fused, learning rate as a tensor": (AdamW, {"lr": torch.tensor(3e-3), "fused": True}),
    "AdamW, learning rate zero": (AdamW, {"lr": 0.0}),
    "NAdam, coupled decay": (NAdam, {"weight_decay": 0.1, "momentum_decay": 0.01}),
    "NAdam, decoupled decay": (NAdam, {"weight_decay": 0.1, "decoupled_weight_decay": True}),
    "NAdam, maximize, foreach": (NAdam, {"maximize": True, "foreach": True}),
    "RMSprop, all of it": (
        RMSprop, {"lr": 1e-3, "centered": True, "momentum": 0.9, "weight_decay": 0.02},
    ),
    "RMSprop, maximize, foreach": (RMSprop, {"lr": 1e-3, "maximize": True, "foreach": True}),
    "Adagrad, all of it": (
        Adagrad, {"lr_decay": 0.1, "initial_accumulator_value": 0.2, "weight_decay": 0.1},
    ),
    "Adagrad, fused, maximize": (Adagrad, {"fused": True, "maximize": True}),
    "Adadelta, decay, maximize": (Adadelta, {"weight_decay": 0.1, "maximize": True}),
}  # fmt: skip


def with_options(kind: Any, options: dict[str, Any]) -> Train:
    return lambda run: loop(run, kind(run.model.parameters(), **options))


CASES |= {name: with_options(*chosen) for name, chosen in OPTIONS.items()}


# Groups, schedules, settings that change ----------------------------------------------------------


@case("biases exempt from decay")
def _(run: Run) -> None:
    weights, vectors = run.kinds
    groups = [{"params": weights}, {"params": vectors, "weight_decay": 0.0}]
    loop(run, SGD(groups, lr=0.05, momentum=0.9, weight_decay=0.1))


@case("a group for every parameter, all different")
def _(run: Run) -> None:
    groups = [
        {"params": [p], "lr": 0.02 * (i + 1), "momentum": (0.0, 0.5, 0.9)[i % 3],
         "weight_decay": 0.01 * i, "nesterov": i % 3 == 1}
        for i, p in enumerate(run.model.parameters())
    ]  # fmt: skip
    loop(run, SGD(groups, lr=0.1))


SCHEDULES: dict[str, tuple[Any, Callable[[Any], Any]]] = {
    "step schedule": (FULL, lambda o: StepLR(o, 3, gamma=0.5)),
    "warm restarts": (NESTEROV, lambda o: CosineAnnealingWarmRestarts(o, 4)),
    "warm-up from zero": (FULL, lambda o: LambdaLR(o, lambda s: min(1.0, s / 5))),
    "one-cycle, momentum cycled too": (FULL, lambda o: OneCycleLR(o, 0.1, total_steps=STEPS + 1)),
}


def scheduled(options: Any, schedule: Callable[[Any], Any]) -> Train:
    def train(run: Run) -> None:
        optimizer = SGD(run.model.parameters(), **options)
        loop(run, optimizer, scheduler=schedule(optimizer))

    return train


CASES |= {name: scheduled(*chosen) for name, chosen in SCHEDULES.items()}


@case("AdamW, one-cycle, betas cycled too")
def _(run: Run) -> None:
    optimizer = AdamW(run.model.parameters(), lr=1e-3)
    loop(run, optimizer, scheduler=OneCycleLR(optimizer, 0.01, total_steps=STEPS + 1))


CHANGES: dict[str, tuple[dict[str, Any], dict[int, dict[str, Any]]]] = {
    "momentum from 0 to 0.9 mid-run": ({"lr": 0.05}, {5: {"momentum": 0.9}}),
    "momentum from 0.9 to 0 and back": (FULL, {4: {"momentum": 0.0}, 8: {"momentum": 0.8}}),
    "dampening, decay and nesterov changed mid-run": (
        FULL, {3: {"dampening": 0.0}, 5: {"nesterov": True}, 8: {"weight_decay": 0.3}},
    ),
    "maximize switched on and off": (FULL, {4: {"maximize": True}, 6: {"maximize": False}}),
}  # fmt: skip


def changing(options: dict[str, Any], changes: dict[int, dict[str, Any]]) -> Train:
    def train(run: Run) -> None:
        optimizer = SGD(run.model.parameters(), **options)
        group = optimizer.param_groups[0]
        loop(run, optimizer, before=lambda step: group.update(changes.get(step, {})))

    return train


CASES |= {name: changing(*chosen) for name, chosen in CHANGES.items()}


# Clipping, accumulation, loss scaling -------------------------------------------------------------


def norms(run: Run, by: str, size: float = 0.2) -> None:
    weights, vectors = run.kinds
    groups = {"all": [[*weights, *vectors]], "kinds": [weights, vectors],
              "each": [[p] for p in weights + vectors]}[by]  # fmt: skip
    for group in groups:
        clip_grad_norm_(group, size)


def times(run: Run, factor: float) -> None:
    for parameter in run.model.parameters():
        assert parameter.grad is not None
        parameter.grad.mul_(factor)


CLIPS: dict[str, tuple[dict[str, Any], Callable[[Run], Any], int]] = {
    "clipping by the global norm": (FULL, lambda r: norms(r, "all"), 1),
    "clipping that never bites": (FULL, lambda r: norms(r, "all", 1e6), 1),
    "clipping that bites at some steps": (FULL, lambda r: norms(r, "all", 0.9), 1),
    "clipping per group": (NESTEROV, lambda r: norms(r, "kinds", 0.1), 1),
    "clipping each parameter by itself, to nearly nothing": (
        {"lr": 1e6, "momentum": 0.9}, lambda r: norms(r, "each", 1e-9), 1,
    ),
    "accumulation over three micro-batches": (FULL, lambda r: None, 3),
    "accumulation and clipping": (NESTEROV, lambda r: norms(r, "all"), 3),
    "gradients scaled by hand": (FULL, lambda r: times(r, 0.37), 1),
    "gradients turned around by hand": (FULL | {"lr": 0.01}, lambda r: times(r, -1.0), 1),
}  # fmt: skip


def clipped(options: dict[str, Any], clip: Callable[[Run], Any], parts: int) -> Train:
    return lambda run: loop(
        run, SGD(run.model.parameters(), **options), clip=lambda: clip(run), parts=parts
    )


CASES |= {name: clipped(*chosen) for name, chosen in CLIPS.items()}


@case("AdamW, clipping and accumulation")
def _(run: Run) -> None:
    loop(run, AdamW(run.model.parameters(), lr=3e-3), clip=lambda: norms(run, "all"), parts=3)


def scaled(
    run: Run, *options: dict[str, Any], overflows: tuple[int, ...] = (), clip: float = 0.0,
    parts: int = 1,
) -> None:  # fmt: skip
    """A loop with a loss scaler; the batches in `overflows` give infinite gradients."""
    halves = [list(run.model.parameters())] if len(options) == 1 else run.halves
    optimizers = [SGD(half, **chosen) for half, chosen in zip(halves, options, strict=True)]
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
    with run.recording(*optimizers):
        for number in range(STEPS + len(overflows)):
            for _ in range(parts):
                loss = run.loss() / parts
                scaler.scale(loss * float("inf") if number in overflows else loss).backward()
            if clip:
                for optimizer in optimizers:
                    scaler.unscale_(optimizer)
                clip_grad_norm_(run.model.parameters(), clip)
            for optimizer in optimizers:
                scaler.step(optimizer)
            scaler.update()
            run.model.zero_grad(set_to_none=number % 2 == 0)
            if number not in overflows:
                run.keep()


FUSED = FULL | {"fused": True}
CASES |= {
    "loss scaling with skipped steps": lambda run: scaled(run, FULL, overflows=(0, 4, 5, 13)),
    "loss scaling, accumulation": lambda run: scaled(run, NESTEROV, overflows=(3,), parts=2),
    "loss scaling, clipping": lambda run: scaled(run, FULL, overflows=(2, 8), clip=0.2),
    "loss scaling, fused": lambda run: scaled(run, FUSED, overflows=(1, 4, 5, 13)),
    "loss scaling, fused, clipping": lambda run: scaled(run, FUSED, clip=0.2),
    "loss scaling, two optimizers": lambda run: scaled(run, FULL, FUSED, overflows=(1, 3, 4)),
}


# Warm optimizers, parameters that come and go -----------------------------------------------------


def warm(kind: Any, options: dict[str, Any], then: dict[str, Any]) -> Train:
    """Train a while before recording begins, so that the optimizer remembers by then."""

    def train(run: Run) -> None:
        optimizer = kind(run.model.parameters(), **options)
        for _ in range(5):
            run.loss().backward()
            optimizer.step()
            optimizer.zero_grad()
        optimizer.param_groups[0].update(then)
        loop(run, optimizer)

    return train


CASES |= {
    "warm momentum, dampening and decay": warm(SGD, FULL, {}),
    "warm momentum, fused": warm(SGD, FUSED, {}),
    "warm momentum, switched off when recording begins": warm(SGD, FULL, {"momentum": 0.0}),
    "warm without momentum, switched on then": warm(SGD, {"lr": 0.05}, {"momentum": 0.9}),
    "warm Adam": warm(Adam, {"lr": 3e-3, "amsgrad": True, "weight_decay": 0.1}, {}),
    "warm NAdam": warm(NAdam, {"lr": 3e-3}, {}),
}


def freezing(frozen: Callable[[int], list[str]], kind: Any = SGD, **how: Any) -> Train:
    """`frozen(step)` names the parameters that need no gradient at that step."""

    def train(run: Run) -> None:
        def freeze(step: int) -> None:
            for name, parameter in run.model.named_parameters():
                parameter.requires_grad_(name not in frozen(step))

        options = FULL if kind is SGD else {"lr": 3e-3}
        loop(run, kind(run.model.parameters(), **options), before=freeze, **how)

    return train


LAYER = ["3.weight", "3.bias"]
CASES |= {
    "a layer frozen later": freezing(lambda s: LAYER if s >= 5 else []),
    "a layer frozen later, its momentum running on": freezing(
        lambda s: LAYER if s >= 5 else [], set_to_none=False
    ),
    "a layer unfrozen later": freezing(lambda s: ["0.weight", "0.bias"] if s < 5 else []),
    "weights frozen, biases trained": freezing(lambda s: ["0.weight", "3.weight", "5.weight"]),
    "biases frozen later": freezing(lambda s: ["0.bias", "2.bias"] if s >= 4 else []),
    "a layer that sits out some steps": freezing(lambda s: LAYER if s % 3 == 1 else [], AdamW),
}


@case("parameter groups added later")
def _(run: Run) -> None:
    first, *others = (m for m in run.model if list(m.parameters()))
    optimizer = SGD(first.parameters(), **FULL)

    def add(step: int) -> None:
        if step in (3, 5, 8):
            optimizer.add_param_group({"params": list(others.pop().parameters()), "lr": 0.02})

    loop(run, optimizer, before=add, turns=lambda step: [optimizer])


@case("parameters no optimizer owns")
def _(run: Run) -> None:
    loop(run, SGD(run.model[3].parameters(), **FULL))


@case("warm, frozen later, group added later, momentum rising, clipping per group")
def _(run: Run) -> None:
    lower, upper = run.halves
    optimizer = SGD(upper, **FULL)
    for _ in range(4):
        run.loss().backward()
        optimizer.step()
        run.model.zero_grad()

    def change(step: int) -> None:
        if step == 4:
            optimizer.add_param_group({"params": lower, "lr": 0.01, "nesterov": False})
        upper[0].requires_grad_(step < 8)
        optimizer.param_groups[0]["momentum"] = 0.5 + 0.03 * step

    def clip() -> None:
        for group in optimizer.param_groups:
            clip_grad_norm_(group["params"], 0.3)

    loop(run, optimizer, before=change, clip=clip, turns=lambda step: [optimizer])


# Gradients that are kept, several optimizers ------------------------------------------------------


@case("zero_grad never called")
def _(run: Run) -> None:
    optimizer = SGD(run.model.parameters(), lr=0.01, momentum=0.5, weight_decay=0.1)
    loop(run, optimizer, zero=lambda step: False)


@case("the optimizer steps twice on the same gradients")
def _(run: Run) -> None:
    optimizer = SGD(run.model.parameters(), **FULL)
    with run.recording(optimizer):
        for _ in range(STEPS // 2):
            run.loss().backward()
            run.move(optimizer, zero=False)
            run.move(optimizer)


def pair(run: Run, by: str = "halves") -> tuple[SGD, SGD]:
    lower, upper = getattr(run, by)
    return SGD(lower, **FULL), SGD(upper, **NESTEROV)


@case("two optimizers taking turns")
def _(run: Run) -> None:
    both = pair(run)
    loop(run, *both, turns=lambda step: [both[step % 2]])


@case("two optimizers as in a GAN, the other one's gradients left lying about")
def _(run: Run) -> None:
    both = pair(run)
    with run.recording(*both):
        for step in range(STEPS):
            both[step % 2].zero_grad()
            run.loss().backward()
            run.move(both[step % 2], zero=False, keep=step % 2 == 1)


def carrying(by: str) -> Train:
    """The second optimizer moves every other time, by what has come together until then."""

    def train(run: Run) -> None:
        one, two = pair(run, by)
        with run.recording(one, two):
            for step in range(STEPS):
                run.loss().backward()
                run.move(one, *([] if step % 2 else [two]))

    return train


CASES |= {
    f"two optimizers, {by}, gradients carried over": carrying(by) for by in ("halves", "kinds")
}


@case("weights by AdamW, the rest by SGD")
def _(run: Run) -> None:
    weights, vectors = run.kinds
    loop(run, AdamW(weights, lr=3e-3), SGD(vectors, **FULL))


DTYPES = pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["64", "32"])


@DTYPES
@pytest.mark.parametrize("name", CASES)
def test_the_weights_of_every_step_are_rebuilt(
    name: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    torch.set_num_threads(1)
    run = Run(dtype, tmp_path / "run")
    CASES[name](run)
    memory = Memory.open(run.path)
    kappa = np.nan_to_num([memory.log(name).kappa for name in memory.parameters], nan=1.0)
    is_exact = dtype == torch.float32 or bool((np.frexp(abs(kappa))[0] == 0.5).all())
    memory = proved(
        run.path,
        run.model,
        run.states,
        verdict="bit for bit" if is_exact else None,
        off=0.0 if is_exact else 1e-12,
    )
    assert memory.steps == len(run.states) - 1
    if dtype == torch.float64:
        for parameter, weights in by_hand(memory).items():
            off = (weights - run.states[memory.steps][parameter]).abs().max()
            assert off <= 1e-12, parameter


def by_hand(memory: Memory) -> dict[str, Tensor]:
    """What SGD moved, from W_0, m_0, log and patterns alone, added up in the plainest way."""
    found = {}
    for name, known in memory.parameters.items():
        log = memory.log(name)
        used = {memory.settings[place].path for place in log.setting[log.moved]}
        layers = [memory.layer(layer) for layer in known.layers]
        if used - {"torch.optim.sgd.SGD"} or any(layer.keep != "patterns" for layer in layers):
            continue
        path = memory.path_to(name, memory.steps)
        c = coefficients(log, memory.settings, path, known.dtype)
        total = c.initial * memory.kept.weights(name, 0)
        momentum = memory.kept.state(name, 0).get("momentum_buffer")
        total = total if momentum is None else total + c.momentum * momentum
        for layer in layers:
            strength = torch.from_numpy(c.per_pattern(layer.patterns["step"]))
            values = layer.error_signals * strength[:, None]
            total = total + (values.sum(0) if name.endswith("bias") else values.T @ layer.keys)
        found[name] = total
    return found
