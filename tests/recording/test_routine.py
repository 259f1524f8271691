"""A step like the last one is noted as if it had been read in full, whatever comes in between."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import SGD

import dualform as df
from dualform.recording.lent import Lent
from dualform.recording.passed_over import PassedOver
from dualform.recording.plain import Plain

STEPS = 24
Between = Callable[[int, nn.Module, SGD], None]
"""What a loop does before the optimizer's step: given its number, the model and the optimizer."""


def nothing(step: int, model: nn.Module, optimizer: SGD) -> None: ...


def schedule(step: int, model: nn.Module, optimizer: SGD) -> None:
    optimizer.param_groups[0]["lr"] = 0.1 / (1 + step)


def missing_gradient(step: int, model: nn.Module, optimizer: SGD) -> None:
    if step % 5 == 0:
        model.get_parameter("2.bias").grad = None


def forgotten_momentum(step: int, model: nn.Module, optimizer: SGD) -> None:
    if step == 9:
        optimizer.state.clear()
    if step == 13:
        optimizer.state[model.get_parameter("0.weight")] = {}


def loaded_state(step: int, model: nn.Module, optimizer: SGD) -> None:
    if step == 11:
        optimizer.load_state_dict(optimizer.state_dict())


def another_order(step: int, model: nn.Module, optimizer: SGD) -> None:
    if step == 7:
        optimizer.param_groups[0]["params"].reverse()


def another_group(step: int, model: nn.Module, optimizer: SGD) -> None:
    if step == 7:
        moved = optimizer.param_groups[0]["params"].pop()
        optimizer.add_param_group({"params": [moved], "lr": 0.01})


def replaced_gradient(step: int, model: nn.Module, optimizer: SGD) -> None:
    if step in (8, 15):
        weight = model.get_parameter("0.weight")
        whole = torch.zeros(2, *weight.shape, dtype=weight.dtype)
        whole[0] = 2 * weight.grad  # a part of a larger tensor is not lent
        weight.grad = whole[0]


def clipped(step: int, model: nn.Module, optimizer: SGD) -> None:
    if step % 7 == 6:
        nn.utils.clip_grad_norm_(model.parameters(), 1e-3)


LOOPS = (
    nothing, schedule, missing_gradient, forgotten_momentum,
    loaded_state, another_order, another_group, replaced_gradient, clipped,
)  # fmt: skip

KINDS: dict[Any, dict[str, Any]] = {
    Plain: {},
    PassedOver: {"error_signals": False},
    Lent: {"layers": [], "step_budget": 0},
}
"""Which kind of routine there is, and how to record so that it is."""

each_kind = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)


def train(path: Path, between: Between, momentum: float, options: dict[str, Any]) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 4)).double()
    optimizer = SGD(model.parameters(), lr=0.1, momentum=momentum, weight_decay=0.01)
    generator = torch.Generator().manual_seed(1)
    with df.record(model, optimizer, path, **options):
        for step in range(STEPS):
            inputs = torch.randn(5, 6, generator=generator, dtype=torch.float64)
            model(inputs).square().mean().backward()
            between(step, model, optimizer)
            optimizer.step()
            optimizer.zero_grad()
    return model


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@each_kind
@pytest.mark.parametrize("between", LOOPS, ids=lambda loop: loop.__name__)
def test_the_memory_is_the_one_of_steps_read_in_full(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    between: Between,
    kind: Any,
    momentum: float,
) -> None:
    routinely = []
    read = kind.read

    def counted(routine: Any, *args: Any) -> bool:
        routinely.append(read(routine, *args))
        return routinely[-1]

    monkeypatch.setattr(kind, "read", counted)
    model = train(tmp_path / "short", between, momentum, KINDS[kind])
    assert sum(routinely) > STEPS // 3  # else nothing was tested
    monkeypatch.setattr(kind, "of", lambda *args: None)
    other = train(tmp_path / "full", between, momentum, KINDS[kind])
    short, full = (df.Memory.open(tmp_path / name) for name in ("short", "full"))
    assert short.exact
    assert full.exact
    assert short.remarks == full.remarks == ()
    for name in short.parameters:
        assert torch.equal(model.get_parameter(name), other.get_parameter(name))
        one, two = short.log(name), full.log(name)
        for column in ("applied", "kappa", "first", "fresh", "lr", "momentum", "weight_decay"):
            assert (getattr(one, column) == getattr(two, column)).all(), (name, column)
        seen = short.audit_projections(name), full.audit_projections(name)
        np.testing.assert_allclose(*seen, rtol=1e-12, atol=1e-15)
    certificate = df.DualForm(model, short).verify()
    assert certificate.passed, certificate


@each_kind
def test_an_update_that_was_broken_off_is_told_from_one_that_was_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Any
) -> None:
    """Ctrl-C inside the optimizer's step, before or after the weights have moved."""
    step = SGD.step
    for when in ("before", "after"):
        calls = 0

        def broken_off(optimizer: SGD, *args: Any, when: str = when) -> Any:
            nonlocal calls
            calls += 1
            if calls == STEPS // 2 and when == "before":
                raise KeyboardInterrupt
            moved = step.__wrapped__(optimizer, *args)  # type: ignore[attr-defined]
            if calls == STEPS // 2:
                raise KeyboardInterrupt
            return moved

        monkeypatch.setattr(SGD, "step", SGD.profile_hook_step(broken_off))
        with pytest.raises(KeyboardInterrupt):
            train(tmp_path / when, nothing, 0.9, KINDS[kind])
        memory = df.Memory.open(tmp_path / when)
        assert memory.steps == STEPS // 2 - (when == "before")
        assert df.DualForm(None, memory).verify().passed
