"""Any optimizer is recorded: torch's own, and classes that dualform was never told of."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import Optimizer

from dualform.certificate.checks import verify
from dualform.certificate.replay import at
from dualform.errors import QueryError
from dualform.learning_rules import classes
from dualform.memory import Memory
from dualform.recording import record


class Signed(Optimizer):
    """Moves by the sign of a mean of gradients (Lion's rule, without decay)."""

    def __init__(self, params: Any, lr: float = 1e-3) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    mean = self.state[p].setdefault("mean", torch.zeros_like(p))
                    p.sub_(torch.sign(mean * 0.9 + p.grad * 0.1), alpha=group["lr"])
                    mean.lerp_(p.grad, 0.01)


class ScheduleFree(Optimizer):
    """Averages its own iterates, and counts in its group, not in the state."""

    def __init__(self, params: Any, lr: float = 0.05) -> None:
        super().__init__(params, {"lr": lr, "k": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            weight = 1.0 / (group["k"] + 1)
            for p in group["params"]:
                if p.grad is not None:
                    z = self.state[p].setdefault("z", p.detach().clone())
                    z.sub_(p.grad, alpha=group["lr"])
                    p.lerp_(z, weight)
            group["k"] += 1


class GlobalNorm(Optimizer):
    """Divides by the norm of all gradients together: no parameter can be moved by itself."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        held = [p for g in self.param_groups for p in g["params"] if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p in held]).norm()  # type: ignore[union-attr]
        for p in held:
            p.sub_(p.grad / norm, alpha=self.param_groups[0]["lr"])


class Chance(Optimizer):
    """Adds noise: not deterministic."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad + 0.1 * torch.randn_like(p), alpha=group["lr"])


class OwnAdamW(torch.optim.AdamW):
    """A subclass that changes nothing of the rule."""


OPTIMIZERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "SGD": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    "SGD, a tensor's lr": (torch.optim.SGD, {"lr": torch.tensor(0.1), "foreach": False}),
    "SGD fused": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "fused": True}),
    "Adam": (torch.optim.Adam, {"lr": 0.01, "amsgrad": True}),
    "Adam foreach": (torch.optim.Adam, {"lr": 0.01, "foreach": True}),
    "AdamW": (torch.optim.AdamW, {"lr": 0.01}),
    "AdamW fused": (torch.optim.AdamW, {"lr": 0.01, "fused": True}),
    "AdamW, a subclass": (OwnAdamW, {"lr": 0.01}),
    "NAdam": (torch.optim.NAdam, {"lr": 0.01}),
    "RAdam": (torch.optim.RAdam, {"lr": 0.01}),
    "RMSprop": (torch.optim.RMSprop, {"lr": 0.01, "momentum": 0.5, "centered": True}),
    "Adagrad": (torch.optim.Adagrad, {"lr": 0.05, "initial_accumulator_value": 0.1}),
    "Adadelta": (torch.optim.Adadelta, {"lr": 1.0}),
    "Adamax": (torch.optim.Adamax, {"lr": 0.01}),
    "ASGD": (torch.optim.ASGD, {"lr": 0.05}),
    "Rprop": (torch.optim.Rprop, {"lr": 0.01}),
    "Signed": (Signed, {"lr": 0.003}),
    "ScheduleFree": (ScheduleFree, {"lr": 0.05}),
}
ONLY_KEPT: dict[str, tuple[Any, dict[str, Any]]] = {
    "GlobalNorm": (GlobalNorm, {}),
    "Chance": (Chance, {}),
    "LBFGS": (torch.optim.LBFGS, {"lr": 0.1, "max_iter": 3}),
}
OWN = (Signed, ScheduleFree, GlobalNorm, Chance)


def train(
    path: Path | None, kind: Any, settings: dict[str, Any], steps: int = 12
) -> tuple[nn.Module, list[dict[str, torch.Tensor]], Optimizer]:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
    optimizer = kind(model.parameters(), **copy.deepcopy(settings))
    states = [state_of(model)]

    def loop() -> None:
        for step in range(steps):
            torch.manual_seed(100 + step)
            x, y = torch.randn(8, 6), torch.randint(0, 3, (8,))

            def closure(x: Any = x, y: Any = y) -> torch.Tensor:
                optimizer.zero_grad()
                loss = F.cross_entropy(model(x), y)
                loss.backward()
                return loss

            if kind is torch.optim.LBFGS:
                optimizer.step(closure)  # type: ignore[arg-type]
            else:
                closure()
                optimizer.step()
            states.append(state_of(model))

    if path is None:
        loop()
    else:
        with record(model, optimizer, path):
            loop()
    return model, states, optimizer


def state_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_step_is_rebuilt_to_the_bit(name: str, tmp_path: Path) -> None:
    kind, settings = OPTIMIZERS[name]
    alone, _, _ = train(None, kind, settings)
    model, states, _ = train(tmp_path / "run", kind, settings)
    for parameter, p in model.named_parameters():
        assert torch.equal(p, alone.get_parameter(parameter))
    memory = Memory.open(tmp_path / "run")
    found = verify(memory, model, every_step=True, optimizer=OWN)
    assert found.passed, repr(found)
    assert found.verdict == "bit for bit", repr(found)
    for step, state in enumerate(states):
        for parameter, weights in state.items():
            assert torch.equal(at(memory, parameter, step, classes(OWN)), weights)


@pytest.mark.filterwarnings("ignore:dualform")
@pytest.mark.parametrize("name", ONLY_KEPT)
def test_what_cannot_be_replayed_is_values_by_name(name: str, tmp_path: Path) -> None:
    kind, settings = ONLY_KEPT[name]
    model, states, _ = train(tmp_path / "run", kind, settings)
    memory = Memory.open(tmp_path / "run")
    assert {p.keep for p in memory.parameters.values()} == {"values"}
    assert any(kind.__name__ in remark for remark in memory.remarks)
    found = verify(memory, model, optimizer=OWN)
    assert found.passed
    assert found.verdict == "not replayable: kept states only"
    assert name in repr(found)
    for step, state in enumerate(states):
        for parameter, weights in state.items():
            if step in memory.kept.steps(parameter):
                assert torch.equal(at(memory, parameter, step), weights)
            else:
                with pytest.raises(QueryError, match="kept at steps"):
                    at(memory, parameter, step)
    assert {0, 1, len(states) - 1} <= set(memory.kept.steps("0.bias"))


def test_a_class_from_elsewhere_is_handed_in_and_never_imported(tmp_path: Path) -> None:
    model, _, _ = train(tmp_path / "run", Signed, {"lr": 0.003})
    memory = Memory.open(tmp_path / "run")
    found = verify(memory, model)
    assert found.verdict == "not replayable: kept states only"
    assert "optimizer=Signed" in repr(found)
    assert verify(memory, model, optimizer=Signed).verdict == "bit for bit"


@pytest.mark.parametrize("name", [*OPTIMIZERS, "LBFGS"])
@pytest.mark.filterwarnings("ignore:dualform")
def test_a_run_goes_on_from_any_recorded_step(name: str, tmp_path: Path) -> None:
    kind, settings = (OPTIMIZERS | ONLY_KEPT)[name]
    model, states, optimizer = train(tmp_path / "run", kind, settings, steps=6)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    other = copy.deepcopy(model)
    other.load_state_dict(saved[0])
    again = kind(other.parameters(), **copy.deepcopy(settings))
    again.load_state_dict(saved[1])
    with record(other, again, tmp_path / "run", resume=True) as recorder:
        assert recorder.steps == 6
        for step in range(6, 9):
            torch.manual_seed(100 + step)
            x, y = torch.randn(8, 6), torch.randint(0, 3, (8,))

            def closure(x: Any = x, y: Any = y) -> torch.Tensor:
                again.zero_grad()
                loss = F.cross_entropy(other(x), y)
                loss.backward()
                return loss

            again.step(closure)  # type: ignore[arg-type]
            if kind in OWN:
                closure()
                again.step()
    memory = Memory.open(tmp_path / "run")
    assert [phase.first_step for phase in memory.phases] == [0, 6]
    assert verify(memory, other, every_step=True, optimizer=OWN).passed
    for parameter, weights in states[6].items():
        assert torch.equal(memory.kept.weights(parameter, 6), weights)
