"""Adam and its relatives, rebuilt: what they may do with a plain network, case by case.

A case is a training loop as a user would write it. It is recorded, its weight snapshots are
deleted, and the weights of several steps are rebuilt in two ways that have nothing in common: by
`DualForm`, as a sum over patterns with elementwise factors, and by torch's own optimizer, fed with
the gradients that the recorded patterns sum to.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import SGD, Adadelta, Adagrad, Adam, AdamW, NAdam, RMSprop
from torch.optim.lr_scheduler import CosineAnnealingWarmRestarts, LambdaLR, OneCycleLR

import dualform as df

STEPS = 40
"""More than two stretches between kept states."""

EARLIER = (0, 1, 13, 17, 33, STEPS - 1, STEPS)

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
        nn.Linear(6, 8), nn.Tanh(), nn.LayerNorm(8), nn.Linear(8, 5), nn.Tanh(), nn.Linear(5, 3)
    ).to(dtype)


def loss_of(model: nn.Module, generator: torch.Generator) -> Tensor:
    dtype = next(model.parameters()).dtype
    inputs = torch.randn(7, 6, generator=generator, dtype=torch.float64).to(dtype)
    labels = torch.randint(0, 3, (7,), generator=generator)
    return nn.functional.cross_entropy(model(inputs), labels)


def simple_loop(run: Any, optimizer: Any, *, steps: int = STEPS, scheduler: Any = None) -> None:
    with run.recording(optimizer):
        for _ in range(steps):
            run.loss().backward()
            optimizer.step()
            optimizer.zero_grad()
            if scheduler is not None:
                scheduler.step()
            run.keep()


# Every optimizer, every option ---------------------------------------------------------------

OPTIONS: dict[str, tuple[type, dict[str, Any]]] = {
    "Adam": (Adam, {}),
    "Adam, coupled decay": (Adam, {"lr": 3e-3, "weight_decay": 0.1}),
    "Adam, amsgrad": (Adam, {"lr": 3e-3, "amsgrad": True}),
    "Adam, amsgrad and coupled decay": (Adam, {"amsgrad": True, "weight_decay": 0.1}),
    "Adam, maximize": (Adam, {"maximize": True, "weight_decay": 0.05}),
    "Adam, other betas and eps": (Adam, {"betas": (0.5, 0.9), "eps": 1e-3}),
    "Adam, no momentum at all": (Adam, {"betas": (0.0, 0.99)}),
    "Adam, foreach": (Adam, {"foreach": True, "weight_decay": 0.1, "amsgrad": True}),
    "Adam, for-loop": (Adam, {"foreach": False, "weight_decay": 0.1}),
    "Adam, fused": (Adam, {"fused": True, "weight_decay": 0.1}),
    "Adam, fused with amsgrad and maximize": (
        Adam,
        {"fused": True, "amsgrad": True, "maximize": True},
    ),
    "Adam, decoupled by option": (Adam, {"weight_decay": 0.1, "decoupled_weight_decay": True}),
    "AdamW": (AdamW, {"lr": 3e-3, "weight_decay": 0.3}),
    "AdamW, amsgrad": (AdamW, {"amsgrad": True}),
    "AdamW, maximize": (AdamW, {"maximize": True, "foreach": True}),
    "AdamW, fused": (AdamW, {"fused": True, "lr": 3e-3}),
    "AdamW, learning rate as a tensor": (AdamW, {"lr": torch.tensor(3e-3), "foreach": False}),
    "AdamW, learning rate zero": (AdamW, {"lr": 0.0}),
    "AdamW, fused, learning rate as a tensor": (
        AdamW,
        {"lr": torch.tensor(3e-3), "weight_decay": 0.1, "fused": True},
    ),
    "Adam, fused, learning rate as a tensor": (Adam, {"lr": torch.tensor(3e-3), "fused": True}),
    "Adam, learning rate as a tensor": (Adam, {"lr": torch.tensor(3e-3), "foreach": False}),
    "NAdam": (NAdam, {}),
    "NAdam, coupled decay": (NAdam, {"weight_decay": 0.1, "momentum_decay": 0.01}),
    "NAdam, decoupled decay": (NAdam, {"weight_decay": 0.1, "decoupled_weight_decay": True}),
    "NAdam, maximize, foreach": (NAdam, {"maximize": True, "foreach": True}),
    "RMSprop, coupled decay": (RMSprop, {"weight_decay": 0.1}),
    "RMSprop": (RMSprop, {"lr": 1e-3}),
    "RMSprop, momentum": (RMSprop, {"lr": 1e-3, "momentum": 0.9}),
    "RMSprop, centred": (RMSprop, {"lr": 1e-3, "centered": True}),
    "RMSprop, all of it": (
        RMSprop,
        {"lr": 1e-3, "centered": True, "momentum": 0.9, "weight_decay": 0.02},
    ),
    "RMSprop, maximize, foreach": (RMSprop, {"lr": 1e-3, "maximize": True, "foreach": True}),
    "Adagrad": (Adagrad, {}),
    "Adagrad, all of it": (
        Adagrad,
        {"lr_decay": 0.1, "initial_accumulator_value": 0.2, "weight_decay": 0.1},
    ),
    "Adagrad, fused, maximize": (Adagrad, {"fused": True, "maximize": True}),
    "Adadelta": (Adadelta, {"lr": 0.5}),
    "Adadelta, decay, maximize": (Adadelta, {"weight_decay": 0.1, "maximize": True}),
}


def with_options(kind: type, options: dict[str, Any]) -> Train:
    return lambda run: simple_loop(run, kind(run.model.parameters(), **options))


CASES |= {name: with_options(*chosen) for name, chosen in OPTIONS.items()}


# Groups, schedules, clipping, accumulation, skipped steps --------------------------------------


@case("biases and norms exempt from decay")
def _(run: Any) -> None:
    groups = [
        {"params": [p for p in run.model.parameters() if p.dim() > 1]},
        {"params": [p for p in run.model.parameters() if p.dim() == 1], "weight_decay": 0.0},
    ]
    simple_loop(run, AdamW(groups, lr=3e-3, weight_decay=0.2))


@case("a group for every parameter, all different")
def _(run: Any) -> None:
    groups = [
        {
            "params": [p],
            "lr": 1e-3 * (i + 1),
            "betas": ((0.9, 0.999), (0.5, 0.9), (0.0, 0.99))[i % 3],
            "weight_decay": 0.01 * i,
            "eps": 1e-8 * 10**i,
        }
        for i, p in enumerate(run.model.parameters())
    ]
    simple_loop(run, Adam(groups))


@case("one-cycle, betas cycled too")
def _(run: Any) -> None:
    optimizer = AdamW(run.model.parameters(), lr=1e-3)
    scheduler = OneCycleLR(optimizer, 0.01, total_steps=STEPS + 1, cycle_momentum=True)
    simple_loop(run, optimizer, scheduler=scheduler)


@case("warm-up from zero")
def _(run: Any) -> None:
    optimizer = Adam(run.model.parameters(), lr=5e-3, weight_decay=0.1)
    simple_loop(run, optimizer, scheduler=LambdaLR(optimizer, lambda s: min(1.0, s / 9)))


@case("warm restarts")
def _(run: Any) -> None:
    optimizer = NAdam(run.model.parameters(), lr=5e-3)
    simple_loop(run, optimizer, scheduler=CosineAnnealingWarmRestarts(optimizer, 7))


@case("decay switched on, from decoupled none to coupled")
def _(run: Any) -> None:
    optimizer = Adam(run.model.parameters(), lr=3e-3)
    with run.recording(optimizer):
        for step in range(STEPS):
            optimizer.param_groups[0]["weight_decay"] = 0.2 if step > 20 else 0.0
            run.loss().backward()
            optimizer.step()
            optimizer.zero_grad()
            run.keep()


@case("clipping and accumulation")
def _(run: Any) -> None:
    optimizer = AdamW(run.model.parameters(), lr=3e-3)
    with run.recording(optimizer):
        for _ in range(STEPS):
            for _ in range(3):
                (run.loss() / 3).backward()
            clip_grad_norm_(run.model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
            run.keep()


@case("steps that are skipped")
def _(run: Any) -> None:
    optimizer = Adam(run.model.parameters(), lr=3e-3, weight_decay=0.1)
    with run.recording(optimizer):
        for step in range(2 * STEPS):
            run.loss().backward()
            if step % 2:
                optimizer.step()
                run.keep()
            optimizer.zero_grad()


@case("a layer that sits out some steps")
def _(run: Any) -> None:
    optimizer = AdamW(run.model.parameters(), lr=3e-3)
    with run.recording(optimizer):
        for step in range(STEPS):
            for parameter in run.model[3].parameters():
                parameter.requires_grad_(step % 3 != 1)
            run.loss().backward()
            optimizer.step()
            optimizer.zero_grad()
            run.keep()


@case("an optimizer that has been used before")
def _(run: Any) -> None:
    optimizer = Adam(run.model.parameters(), lr=3e-3, amsgrad=True, weight_decay=0.1)
    for _ in range(9):
        run.loss().backward()
        optimizer.step()
        optimizer.zero_grad()
    simple_loop(run, optimizer)


@case("NAdam that has been used before")
def _(run: Any) -> None:
    optimizer = NAdam(run.model.parameters(), lr=3e-3)
    for _ in range(9):
        run.loss().backward()
        optimizer.step()
        optimizer.zero_grad()
    simple_loop(run, optimizer)


@case("weights by AdamW, the rest by SGD with momentum")
def _(run: Any) -> None:
    weights = [p for p in run.model.parameters() if p.dim() > 1]
    others = [p for p in run.model.parameters() if p.dim() == 1]
    pair = AdamW(weights, lr=3e-3), SGD(others, lr=0.05, momentum=0.9)
    with run.recording(*pair):
        for _ in range(STEPS):
            run.loss().backward()
            for optimizer in pair:
                optimizer.step()
            for optimizer in pair:
                optimizer.zero_grad()
            run.keep()


@case("two optimizers in turn, as a GAN has them")
def _(run: Any) -> None:
    halves = list(run.model[:3].parameters()), list(run.model[3:].parameters())
    pair = Adam(halves[0], lr=3e-3, betas=(0.5, 0.9)), RMSprop(halves[1], lr=1e-3)
    with run.recording(*pair):
        for step in range(STEPS):
            run.loss().backward()
            pair[step % 2].step()
            for optimizer in pair:
                optimizer.zero_grad()
            run.keep()


def off_by(one: Tensor, other: Tensor) -> float:
    off = float((one.double() - other.double()).abs().max())
    return off / max(float(other.abs().max()), 1e-30) if off else off


@pytest.mark.parametrize("name", CASES)
def test_a_network_is_rebuilt_to_the_last_digits_in_float64(new_run: Any, name: str) -> None:
    run = new_run(network(torch.float64), loss_of, torch.float64)
    CASES[name](run)
    memory = without_snapshots(run)
    for at in EARLIER:
        rebuilt = df.DualForm(run.model, memory).at(at).weights(dtype=torch.float64)
        for parameter, checkpoint in run.kept[at].items():
            off = off_by(rebuilt[parameter], checkpoint)
            assert off <= 1e-12, f"{parameter} after {at} updates: {off:.2e}"
    certificate = df.DualForm(run.model, memory).verify()
    assert certificate.passed, repr(certificate)


@pytest.mark.parametrize("name", CASES)
def test_a_network_is_rebuilt_up_to_rounding_in_float32(new_run: Any, name: str) -> None:
    """Bound: sixteen times what SGD keeps to, √S roundings of the weights and those of their way.

    A gradient's entries are rounded by the size of the largest, and divided by their own size.
    """
    run = new_run(network(torch.float32), loss_of, torch.float32)
    CASES[name](run)
    memory = without_snapshots(run)
    for at in EARLIER:
        rebuilt = df.DualForm(run.model, memory).at(at).weights(dtype=torch.float64)
        for parameter, checkpoint in run.kept[at].items():
            bound = 16 * run.float32_bound(parameter, at, torch.finfo(torch.float32).eps)
            off = off_by(rebuilt[parameter], checkpoint)
            assert off <= bound, f"{parameter} after {at} updates: {off:.2e}, bound {bound:.2e}"
    certificate = df.DualForm(run.model, memory).verify()
    assert certificate.passed, repr(certificate)


def without_snapshots(run: Any) -> df.Memory:
    shutil.rmtree(run.path / "snapshots", ignore_errors=True)
    memory = df.Memory.open(run.path)
    memory.check()
    assert memory.steps == STEPS
    assert memory.exact
    return memory


BY_TORCH = {
    "adam": (Adam, lambda s: {"betas": (s["beta1"], s["beta2"]), "amsgrad": bool(s["amsgrad"])}),
    "rmsprop": (RMSprop, lambda s: {"alpha": s["alpha"], "momentum": s["momentum"]}),
    "nadam": (NAdam, lambda s: {"betas": (s["beta1"], s["beta2"])}),
}


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (Adam, {"lr": 3e-3, "weight_decay": 0.1, "amsgrad": True}),
        (RMSprop, {"lr": 1e-3, "momentum": 0.9}),
        (NAdam, {"lr": 3e-3}),
    ],
    ids=["Adam", "RMSprop", "NAdam"],
)
def test_torch_itself_gets_there_by_the_gradients_that_patterns_sum_to(
    new_run: Any, kind: Any, options: dict[str, Any]
) -> None:
    run = new_run(network(torch.float64), loss_of, torch.float64)
    simple_loop(run, kind(run.model.parameters(), **options))
    memory = without_snapshots(run)
    dual = df.DualForm(run.model, memory)
    for name in ("0.weight", "3.bias", "5.weight"):
        log = memory.adaptive_log(name)
        layer = memory.layer(name.rpartition(".")[0])
        keys, signals = layer.keys.double(), layer.error_signals.double()
        weight = nn.Parameter(memory.initial(name).double().clone())
        chosen, convert = BY_TORCH[log.rule.name]
        optimizer: Any = None
        for step in range(memory.steps):
            here = torch.from_numpy(layer.patterns["step"] == step)
            settings = dict(zip(log.rule.settings, log.settings[step].tolist(), strict=True))
            common = {n: settings[n] for n in ("lr", "eps", "weight_decay")}
            optimizer = optimizer or chosen([weight], **common, **convert(settings))
            total = signals[here].sum(0) if name.endswith("bias") else signals[here].T @ keys[here]
            weight.grad = float(log.kappa[step]) * total
            optimizer.step()
        assert off_by(dual.weights(dtype=torch.float64)[name], weight.detach()) <= 1e-12


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "options"),
    [(Adam, {"lr": 1e-3}), (AdamW, {"lr": 1e-3}), (RMSprop, {"lr": 1e-4}), (Adagrad, {})],
)
def test_three_thousand_steps_of_float32_stay_within_a_millionth(
    new_run: Any, kind: Any, options: dict[str, Any]
) -> None:
    run = new_run(network(torch.float32), loss_of, torch.float32)
    simple_loop(run, kind(run.model.parameters(), **options), steps=3000)
    dual = df.DualForm(run.model, run.path)
    for name, weight in dual.weights(dtype=torch.float64).items():
        assert off_by(weight, run.kept[3000][name]) <= 2e-5, name
    certificate = dual.verify()
    assert certificate.passed, repr(certificate)
