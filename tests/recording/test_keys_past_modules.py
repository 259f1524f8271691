"""Keys alone: a use that begins later, past all modules, is warned of in any loop."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, Adam, Optimizer

import dualform as df
from dualform.memory.noted import NOTED_EVERY
from dualform.recording.complete_keys import is_multiple

RULES: dict[str, Callable[..., Optimizer]] = {
    "SGD": lambda parameters: SGD(parameters, lr=0.01, momentum=0.9),
    "Adam": lambda parameters: Adam(parameters, lr=0.01),
}
STEPS = 3 * NOTED_EVERY


class Net(nn.Module):
    """Two layers in turn; beyond `past` steps, those named are used without their modules."""

    def __init__(self, functional: str = "", past: int = 10) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 3)
        self._functional, self._past, self.step = functional, past, 0
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        self.step += 1
        for name in "abc":
            layer: nn.Linear = getattr(self, name)
            used = name in self._functional and self.step > self._past
            x = torch.tanh(F.linear(x, layer.weight, layer.bias) if used else layer(x))
        return x


def batch(generator: torch.Generator) -> Tensor:
    return torch.randn(5, 4, generator=generator, dtype=torch.float64)


def train(
    path: Path,
    model: Net,
    rule: str,
    *,
    set_to_none: bool = True,
    trained: str = "abc",
    clipped: bool = False,
) -> list[str]:
    parameters = [p for n, p in model.named_parameters() if n[0] in trained]
    optimizer = RULES[rule](parameters)
    generator = torch.Generator().manual_seed(1)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        with df.record(model, optimizer, path, error_signals=False):
            for _ in range(STEPS):
                model(batch(generator)).square().mean().backward()
                if clipped:
                    nn.utils.clip_grad_norm_(parameters, 0.1)
                optimizer.step()
                optimizer.zero_grad(set_to_none=set_to_none)
    return [str(one.message) for one in warned]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("functional", ["abc", "b"], ids=["all layers", "one layer"])
@pytest.mark.parametrize("trained", ["abc", "ab"], ids=["all trained", "gradients linger"])
def test_it_is_warned_of(
    tmp_path: Path, rule: str, set_to_none: bool, functional: str, trained: str
) -> None:
    model = Net(functional)
    said = train(tmp_path / "run", model, rule, set_to_none=set_to_none, trained=trained)
    assert len(said) == 1
    assert "keys may be missing" in said[0]
    assert "it has a gradient, and its layer was not called" in said[0]
    memory = df.Memory.open(tmp_path / "run")
    assert len(memory.remarks) == 1
    assert len(memory.layer("b").keys) == 5 * 10
    assert df.DualForm(model, memory).verify().passed


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("clipped", [False, True])
def test_nothing_is_said_where_nothing_is_missing(
    tmp_path: Path, rule: str, set_to_none: bool, clipped: bool
) -> None:
    model = Net()
    assert train(tmp_path / "run", model, rule, set_to_none=set_to_none, clipped=clipped) == []
    memory = df.Memory.open(tmp_path / "run")
    assert memory.remarks == ()
    assert len(memory.layer("b").keys) == 5 * STEPS


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("clipped", [False, True])
def test_gradients_that_are_left_over_are_no_news(tmp_path: Path, rule: str, clipped: bool) -> None:
    """A second head that was used for a while; nobody throws its last gradient away."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"one": nn.Linear(4, 3), "two": nn.Linear(4, 3)}).double()
    optimizer = RULES[rule](model.parameters())
    generator = torch.Generator().manual_seed(1)
    with df.record(model, optimizer, tmp_path / "run", error_signals=False):  # warnings are errors
        for step in range(STEPS):
            name = "two" if step < 20 else "one"
            model["one"].zero_grad()
            if step < 20:
                model["two"].zero_grad()
            model[name](batch(generator)).square().mean().backward()
            if clipped:
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
    memory = df.Memory.open(tmp_path / "run")
    assert memory.remarks == ()
    assert df.DualForm(model, memory).verify().passed


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("period", [2, 3, 5])
@pytest.mark.parametrize("apart", [False, True], ids=["one optimizer", "an optimizer each"])
def test_layers_used_in_some_steps_only_have_their_turn(
    tmp_path: Path, rule: str, period: int, apart: bool
) -> None:
    """As the two networks of a GAN: the second one moves in every few steps, never in the first."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"one": nn.Linear(4, 8), "two": nn.Linear(4, 8)}).double()
    groups = [model[n].parameters() for n in model] if apart else [model.parameters()]
    optimizers = [RULES[rule](group) for group in groups]
    generator = torch.Generator().manual_seed(1)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        with df.record(model, optimizers, tmp_path / "run", error_signals=False):
            for step in range(NOTED_EVERY * period + 1):
                is_second = step % period == period - 1
                x, layer = batch(generator), model["two" if is_second else "one"]
                y = layer(x)
                if is_second and step > period:
                    y = y + F.linear(x * x, layer.weight)
                optimizer = optimizers[is_second] if apart else optimizers[0]
                optimizer.zero_grad()
                y.square().mean().backward()
                optimizer.step()
    assert len(warned) == 1
    assert "parameter 'two.weight'" in str(warned[0].message)


def test_the_first_step_of_a_layer_is_compared(tmp_path: Path) -> None:
    """Though it is not the first of all."""
    model = nn.ModuleDict({"one": nn.Linear(4, 8), "two": nn.Linear(4, 8)}).double()
    optimizer = SGD(model.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(1)

    def run() -> None:
        with df.record(model, optimizer, tmp_path / "run", error_signals=False):
            for step in range(9):
                x = batch(generator)
                y = model["one"](x)
                if step >= 7:
                    y = y + model["two"](x) + F.linear(x * x, model["two"].weight)
                y.square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()

    with pytest.warns(UserWarning, match="step 7, parameter 'two.weight'"):
        run()


def test_a_multiple_is_told_from_another_vector() -> None:
    one = np.random.default_rng(0).normal(size=20)
    other = one.copy()
    other[3] += 1e-4
    assert is_multiple(one, 3.0 * one)
    assert is_multiple(-0.1 * one, one)
    assert is_multiple(np.zeros(20), one)
    assert not is_multiple(one, np.zeros(20))
    assert not is_multiple(one, other)
