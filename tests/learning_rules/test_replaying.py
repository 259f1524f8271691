"""Torch's own optimizer, made for one parameter, takes the very steps it took in training."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dualform.learning_rules import (
    OneParameter,
    SeenSettings,
    Setting,
    class_of,
    classes,
    optimizer_of_one,
    read_setting,
)

Maker = Callable[[list[nn.Parameter]], Optimizer]


class Lion(Optimizer):
    def __init__(self, params: Any, lr: float = 1e-4, decay: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.99), "weight_decay": decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state, (b1, b2) = self.state[p], group["betas"]
                if not state:
                    state["exp_avg"] = torch.zeros_like(p)
                m = state["exp_avg"]
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_(torch.sign(m * b1 + p.grad * (1 - b1)), alpha=-group["lr"])
                m.mul_(b2).add_(p.grad, alpha=1 - b2)


class ScheduleFree(Optimizer):
    """SGD, schedule-free: it counts in its group, as its authors do."""

    def __init__(self, params: Any, lr: float = 0.1, beta: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "beta": beta, "k": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            c = 1 / (group["k"] + 1)
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if "z" not in state:
                    state["z"] = p.clone()
                p.lerp_(state["z"], c)
                p.add_(p.grad, alpha=group["lr"] * (group["beta"] * (1 - c) - 1))
                state["z"].sub_(p.grad, alpha=group["lr"])
            group["k"] += 1


class Ours(torch.optim.SGD):
    """A subclass that changes nothing: its rule is torch's."""


optim = torch.optim
CASES: dict[str, Maker] = {
    "sgd": lambda p: optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=1e-3, nesterov=True),
    "sgd plain": lambda p: optim.SGD(p, lr=0.05),
    "sgd dampened": lambda p: optim.SGD(p, lr=0.05, momentum=0.9, dampening=0.3, maximize=True),
    "sgd fused": lambda p: optim.SGD(p, lr=0.05, momentum=0.9, fused=True),
    "sgd foreach": lambda p: optim.SGD(p, lr=0.05, momentum=0.9, foreach=True),
    "sgd tensor": lambda p: optim.SGD(p, lr=torch.tensor(0.05), momentum=0.9),
    "adam": lambda p: optim.Adam(p, lr=1e-3, weight_decay=1e-2, amsgrad=True),
    "adam tensor": lambda p: optim.Adam(p, lr=torch.tensor(1e-3)),
    "adamw": lambda p: optim.AdamW(p, lr=1e-3),
    "adamw fused": lambda p: optim.AdamW(p, lr=1e-3, fused=True),
    "adamw foreach": lambda p: optim.AdamW(p, lr=1e-3, foreach=True, maximize=True),
    "nadam": lambda p: optim.NAdam(p, lr=1e-3, weight_decay=1e-2),
    "radam": lambda p: optim.RAdam(p, lr=1e-3),
    "rmsprop": lambda p: optim.RMSprop(p, lr=1e-3, momentum=0.9, centered=True),
    "adagrad": lambda p: optim.Adagrad(p, lr=1e-2, lr_decay=1e-3, initial_accumulator_value=0.1),
    "adagrad fused": lambda p: optim.Adagrad(p, lr=1e-2, fused=True),
    "adadelta": lambda p: optim.Adadelta(p),
    "adamax": lambda p: optim.Adamax(p, lr=1e-3),
    "asgd": lambda p: optim.ASGD(p, lr=1e-2),
    "rprop": lambda p: optim.Rprop(p),
    "lion": lambda p: Lion(p, lr=1e-3),
    "schedule-free": lambda p: ScheduleFree(p),
    "subclass": lambda p: Ours(p, lr=0.05, momentum=0.9),
}
if hasattr(optim, "Muon"):
    CASES["muon"] = lambda p: optim.Muon(p, lr=1e-2)
if hasattr(optim, "Adafactor"):
    CASES["adafactor"] = lambda p: optim.Adafactor(p, lr=1e-2)
HANDED_IN = (Lion, ScheduleFree)


def gradient(shape: torch.Size, step: int, place: int) -> Tensor:
    made = torch.Generator().manual_seed(100 * step + place)
    return torch.randn(shape, generator=made)


@pytest.mark.parametrize("name", CASES)
def test_a_step_of_one_is_bit_for_bit_the_step_of_all(name: str) -> None:
    torch.manual_seed(0)
    shapes = [(6, 5), (4, 6), (3, 4)]
    parameters = [nn.Parameter(torch.randn(shape)) for shape in shapes]
    optimizer = CASES[name](parameters)
    known = classes(HANDED_IN)
    begun = [copy.deepcopy(dict(optimizer.state.get(p) or {})) for p in parameters]
    alone = [OneParameter(p, s, known, p.dtype) for p, s in zip(parameters, begun, strict=True)]
    seen = SeenSettings()
    for step in range(6):
        group = optimizer.param_groups[0]
        if step == 3:
            group["lr"] = group["lr"] * 0.5
        setting = Setting.from_json(seen.settings[seen.index(optimizer, group)].to_json())
        fresh = [not optimizer.state.get(p) for p in parameters]
        for i, p in enumerate(parameters):
            p.grad = gradient(p.shape, step, i)
        optimizer.step()
        for i, (p, one) in enumerate(zip(parameters, alone, strict=True)):
            one.step(setting, gradient(p.shape, step, i), fresh=fresh[i])
            assert torch.equal(p, one.weights), f"parameter {i} after step {step}"
            for key, value in optimizer.state[p].items():
                same = one.state[key]
                equal = torch.equal(value, same) if isinstance(value, Tensor) else value == same
                assert equal, f"{key} of parameter {i} after step {step}"


def test_a_replay_goes_on_from_a_kept_state_in_the_middle() -> None:
    parameter = nn.Parameter(torch.randn(3, 4))
    optimizer = optim.AdamW([parameter], lr=1e-2)
    for step in range(3):
        parameter.grad = gradient(parameter.shape, step, 0)
        optimizer.step()
    kept = parameter.detach().clone(), copy.deepcopy(dict(optimizer.state[parameter]))
    setting = read_setting(optimizer, optimizer.param_groups[0])
    one = OneParameter(*kept, classes(), parameter.dtype)
    for step in range(3, 6):
        parameter.grad = gradient(parameter.shape, step, 0)
        optimizer.step()
        one.step(setting, gradient(parameter.shape, step, 0), fresh=False)
    assert torch.equal(one.weights, parameter)
    one = OneParameter(*kept, classes(), parameter.dtype)
    for step in range(3, 6):
        one.step(setting, gradient(parameter.shape, step, 0), fresh=False)
    assert torch.equal(one.weights, parameter)


def test_a_replay_in_double_precision_converts_tensors_and_leaves_counters() -> None:
    parameter = nn.Parameter(torch.randn(3, 4))
    optimizer = optim.AdamW([parameter], lr=1e-2)
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    one = OneParameter(parameter, dict(optimizer.state[parameter]), classes(), torch.float64)
    assert one.state["exp_avg"].dtype == torch.float64
    assert one.state["step"].dtype == torch.float32
    one.step(
        read_setting(optimizer, optimizer.param_groups[0]), torch.ones(3, 4).double(), fresh=False
    )
    assert one.weights.dtype == torch.float64


def test_a_replay_changes_neither_the_kept_state_nor_the_settings() -> None:
    parameter = nn.Parameter(torch.randn(3))
    optimizer = ScheduleFree([parameter])
    setting = read_setting(optimizer, optimizer.param_groups[0])
    state = {"z": torch.zeros(3)}
    one = OneParameter(torch.ones(3), state, classes(ScheduleFree), torch.float32)
    one.step(setting, torch.ones(3), fresh=False)
    assert setting["k"] == 0
    assert not state["z"].any()


def test_a_class_is_found_by_name_and_never_imported() -> None:
    assert class_of("torch.optim.sgd.SGD", classes()) is torch.optim.SGD
    assert class_of("elsewhere.now.Lion", classes(Lion)) is Lion
    assert class_of("elsewhere.Lion", classes()) is None
    assert class_of("torch.optim.os.system", classes()) is None
    one = OneParameter(torch.ones(3), {}, classes(), torch.float32)
    setting = Setting("nowhere.Lion", {}, {})
    with pytest.raises(LookupError, match="Lion"):
        one.step(setting, torch.ones(3), fresh=True)


def test_an_optimizer_of_one_has_the_group_and_what_was_remembered() -> None:
    parameter = nn.Parameter(torch.randn(3))
    optimizer = optim.SGD([parameter], lr=0.1, momentum=0.9)
    setting = read_setting(optimizer, optimizer.param_groups[0])
    state = {"momentum_buffer": torch.ones(3)}
    made = optimizer_of_one(optim.SGD, setting, parameter, state)
    assert made.param_groups[0]["params"] == [parameter]
    assert made.param_groups[0]["momentum"] == 0.9
    assert made.state[parameter] is state
