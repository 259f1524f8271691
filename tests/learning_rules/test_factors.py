"""The factors of every rule give torch's own step, and coefficients the sum over patterns."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from dualform.learning_rules import (
    RULES,
    Factors,
    Setting,
    coefficients,
    linear_factors,
    read_setting,
    rule_of,
)

optim = torch.optim
CASES: list[tuple[type[torch.optim.Optimizer], dict[str, Any]]] = []
for _decay, _maximize in itertools.product((0.0, 0.1), (False, True)):
    shared = {"lr": 0.03, "weight_decay": _decay, "maximize": _maximize}
    CASES += [
        (optim.SGD, shared),
        (optim.SGD, {**shared, "momentum": 0.9}),
        (optim.SGD, {**shared, "momentum": 0.9, "nesterov": True}),
        (optim.SGD, {**shared, "momentum": 0.9, "dampening": 0.4}),
        (optim.Adam, shared),
        (optim.Adam, {**shared, "amsgrad": True}),
        (optim.Adam, {**shared, "decoupled_weight_decay": True}),
        (optim.AdamW, {**shared, "lr": torch.tensor(0.03)}),
        (optim.NAdam, shared),
        (optim.NAdam, {**shared, "decoupled_weight_decay": True, "momentum_decay": 0.1}),
        (optim.RMSprop, shared),
        (optim.RMSprop, {**shared, "momentum": 0.8}),
        (optim.RMSprop, {**shared, "centered": True, "momentum": 0.8}),
        (optim.Adagrad, {**shared, "lr_decay": 0.1, "initial_accumulator_value": 0.2}),
        (optim.Adadelta, {**shared, "lr": 0.5}),
    ]  # fmt: skip


def moved(f: Factors, weights: Tensor, momentum: Tensor, gradient: Tensor | None) -> list[Tensor]:
    """Move (W, m) one step; None is a gradient of zeros."""
    found = [f.ww * weights + f.wm * momentum, f.mw * weights + f.mm * momentum]
    if gradient is not None:
        found = [found[0] + f.nw * gradient, found[1] + f.nm * gradient]
    return found


def ids(case: tuple[type, dict[str, Any]]) -> str:
    return case[0].__name__ + "-" + "-".join(f"{k}={v}" for k, v in case[1].items())


def remembered(optimizer: torch.optim.Optimizer, parameter: Tensor) -> dict[str, Any]:
    state = optimizer.state.get(parameter) or {}
    return {n: v.clone() if isinstance(v, Tensor) else v for n, v in state.items()}


@pytest.mark.parametrize("case", CASES, ids=map(ids, CASES))
def test_factors_give_torchs_own_step(case: tuple[type, dict[str, Any]]) -> None:
    torch.manual_seed(0)
    kind, options = case
    parameter = nn.Parameter(torch.randn(4, 3, dtype=torch.float64))
    optimizer = kind([parameter], **options)
    rule = rule_of(read_setting(optimizer, optimizer.param_groups[0]).path)
    assert rule is not None
    weights, momentum = parameter.detach().clone(), torch.zeros(4, 3, dtype=torch.float64)
    for _ in range(12):
        gradient = torch.randn(4, 3, dtype=torch.float64)
        before = remembered(optimizer, parameter)
        setting = read_setting(optimizer, optimizer.param_groups[0])
        parameter.grad = gradient.clone()
        optimizer.step()
        state = remembered(optimizer, parameter) | {n: before.get(n) for n in rule.before}
        f = rule.factors(setting, state, not before)
        weights, momentum = moved(f, weights, momentum, gradient)
        torch.testing.assert_close(weights, parameter.detach(), rtol=1e-12, atol=1e-12)
        if rule.momentum is not None and isinstance(state.get(rule.momentum), Tensor):
            torch.testing.assert_close(momentum, state[rule.momentum], rtol=1e-12, atol=1e-12)
            assert rule.is_linear == all(not isinstance(x, Tensor) for x in f)


def test_scalars_are_held_as_arithmetic_in_the_dtype_holds_them() -> None:
    setting = Setting("torch.optim.sgd.SGD", {"lr": 0.1, "momentum": 0.99}, {})
    assert linear_factors(setting, False, torch.float64).mm == 0.99
    assert linear_factors(setting, False, torch.float32).mm == float(np.float32(0.99))
    assert linear_factors(setting, False, torch.bfloat16).mm == float(np.float32(0.99))


def test_a_rule_is_known_by_its_class_alone() -> None:
    assert rule_of("torch.optim.adamw.AdamW") is RULES["torch.optim.adamw.AdamW"]
    assert rule_of("torch.optim.radam.RAdam") is None
    assert rule_of("elsewhere.SGD") is None


@dataclass
class Log:
    moved: NDArray[Any]
    setting: NDArray[Any]
    fresh: NDArray[Any]
    carried: NDArray[Any]
    kappa: NDArray[Any]


def run(
    log: Log, settings: list[Setting], own: Tensor, weights: Tensor, path: list[int]
) -> tuple[Tensor, Tensor]:
    """Steps taken one by one; those outside the path leave nothing but the gradient they held."""
    momentum, held = torch.full_like(weights, 0.3), torch.zeros_like(weights)
    begun = momentum.clone()
    for step in range(len(log.moved)):
        if not log.moved[step]:
            continue
        held = log.kappa[step] * (own[step] + (held if log.carried[step] else 0.0))
        if step in path:
            setting = settings[int(log.setting[step])]
            f = linear_factors(setting, bool(log.fresh[step]), torch.float64)
            weights, momentum = moved(f, weights, momentum, held)
    return weights, begun


@pytest.mark.parametrize("taken_back", [False, True])
def test_coefficients_sum_the_patterns_to_the_weights(taken_back: bool) -> None:
    chance = np.random.default_rng(3)
    steps = 25
    settings = [
        Setting("", {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.05, "dampening": 0.2}, {}),
        Setting("", {"lr": 0.05, "momentum": 0.8, "nesterov": True}, {}),
        Setting("", {"lr": 0.2, "momentum": 0}, {}),
    ]
    log = Log(
        moved=chance.random(steps) < 0.8,
        setting=chance.integers(0, 3, steps),
        fresh=chance.random(steps) < 0.1,
        carried=chance.random(steps) < 0.3,
        kappa=np.where(chance.random(steps) < 0.5, 1.0, chance.random(steps)),
    )
    own = torch.from_numpy(chance.normal(size=(steps, 3)))
    begun = torch.from_numpy(chance.normal(size=3))
    path = [*range(12), *range(17, 25)] if taken_back else list(range(steps))
    weights, momentum = run(log, settings, own, begun, path)
    found = coefficients(log, settings, path, torch.float64)
    summed = torch.einsum("s,sd->d", torch.from_numpy(found.steps), own)
    rebuilt = found.initial * begun + found.momentum * momentum + summed
    torch.testing.assert_close(rebuilt, weights, rtol=1e-12, atol=1e-12)
    assert found.per_pattern(np.array([0, 3, 99])).tolist() == [found.steps[0], found.steps[3], 0.0]


def test_the_mean_of_states_has_coefficients_too() -> None:
    steps = 6
    settings = [Setting("", {"lr": 0.1, "momentum": 0.9}, {})]
    on, off = np.ones(steps, bool), np.zeros(steps, bool)
    fresh = off.copy()
    fresh[0] = True
    log = Log(on, np.zeros(steps, int), fresh, off, np.ones(steps))
    own, begun = torch.randn(steps, 3, dtype=torch.float64), torch.randn(3, dtype=torch.float64)
    states = [begun, *(run(log, settings, own, begun, list(range(s)))[0] for s in range(1, 7))]
    average = np.array([0.0, 0.1, 0.2, 0, 0, 0.3, 0.4])
    found = coefficients(log, settings, range(steps), torch.float64, average)
    rebuilt = found.initial * begun + torch.einsum("s,sd->d", torch.from_numpy(found.steps), own)
    expected = sum(float(a) * w for a, w in zip(average, states, strict=True))
    torch.testing.assert_close(rebuilt, expected, rtol=1e-12, atol=1e-12)
