"""Keys alone: loops that do more than forward, backward and step, each as in a full recording."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

import dualform as df
from dualform.memory.noted import NOTED_EVERY

STEPS = NOTED_EVERY + 9


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4)).double()


def batch(number: int) -> Tensor:
    generator = torch.Generator().manual_seed(number)
    return torch.randn(8, 6, generator=generator, dtype=torch.float64)


def backward(model: nn.Module, step: int) -> None:
    model(batch(step)).square().mean().backward()


Loop = Callable[[nn.Sequential, Optimizer, int], None]


def momentum_from_the_tenth_step(model: nn.Sequential, optimizer: Optimizer, step: int) -> None:
    optimizer.param_groups[0]["momentum"] = 0.0 if step < 10 else 0.9
    backward(model, step)
    optimizer.step()


def masked_micro_batches(model: nn.Sequential, optimizer: Optimizer, step: int) -> None:
    """Some of them write nothing: the loop's own hook sees to that."""
    for number in range(4 * step, 4 * step + 4):
        output = model(batch(number))
        if number % 5 == 0:
            output.register_hook(torch.zeros_like)
        output.square().mean().backward()
    optimizer.step()


def masked_batches(model: nn.Sequential, optimizer: Optimizer, step: int) -> None:
    output = model(batch(step))
    if step % 5 == 0:
        output.register_hook(torch.zeros_like)
    output.square().mean().backward()
    optimizer.step()


def sharpness_aware(model: nn.Sequential, optimizer: Optimizer, step: int) -> None:
    """Weights are moved and moved back, up to rounding."""
    backward(model, step)
    moves = [(p, 0.05 * p.grad) for p in model.parameters() if p.grad is not None]
    with torch.no_grad():
        for parameter, move in moves:
            parameter.add_(move)
    optimizer.zero_grad()
    backward(model, step)
    with torch.no_grad():
        for parameter, move in moves:
            parameter.sub_(move)
    optimizer.step()


def shape(error_signal: Tensor) -> Tensor:
    return error_signal * torch.linspace(0.1, 1, error_signal.shape[-1], dtype=torch.float64)


def late_layer_with_a_hook(model: nn.Sequential, optimizer: Optimizer, step: int) -> None:
    for parameter in model[0].parameters():
        parameter.requires_grad_(step >= 7)
    hidden = model[0](batch(step))
    if hidden.requires_grad:
        hidden.register_hook(shape)
    model[2](model[1](hidden)).square().mean().backward()
    optimizer.step()


LOOPS = (
    momentum_from_the_tenth_step,
    masked_micro_batches,
    masked_batches,
    sharpness_aware,
    late_layer_with_a_hook,
)
MOVED_BACK = (sharpness_aware,)


def test_moving_weights_back_is_no_edit_where_they_are_small(tmp_path: Path) -> None:
    for kind in (SGD, AdamW):
        model = network().float()
        for layer in (model[0], model[2]):
            nn.init.zeros_(layer.bias)
        optimizer = kind(model.parameters(), lr=1e-4)
        path = tmp_path / kind.__name__
        with df.record(model, optimizer, path, error_signals=False):
            for step in range(30):
                loss = model(batch(step).float()).square().mean()
                loss.backward()
                norm = sum(float(p.grad.square().sum()) for p in model.parameters()) ** 0.5
                moves = [(p, 0.05 / norm * p.grad) for p in model.parameters()]
                with torch.no_grad():
                    for parameter, move in moves:
                        parameter.add_(move)
                optimizer.zero_grad()
                model(batch(step).float()).square().mean().backward()
                with torch.no_grad():
                    for parameter, move in moves:
                        parameter.sub_(move)
                optimizer.step()
                optimizer.zero_grad()
        assert df.Memory.open(path).exact


@pytest.mark.parametrize("kind", [SGD, AdamW])
@pytest.mark.parametrize("error_signals", [True, False])
def test_an_update_that_was_not_made_is_not_recorded(
    tmp_path: Path, kind: Any, error_signals: bool
) -> None:
    """Weights were moved and moved back, then a hook ends training before the update."""
    model = network().float()
    optimizer = kind(model.parameters(), lr=1e-3)

    def stop(*_: Any) -> None:
        raise StopIteration

    with (
        pytest.raises(StopIteration),
        df.record(model, optimizer, tmp_path, error_signals=error_signals),
    ):
        for step in range(20):
            model(batch(step).float()).square().mean().backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(0.01)
                    parameter.sub_(0.01)
            if step == 10:
                optimizer.register_step_pre_hook(stop)
            optimizer.step()
            optimizer.zero_grad()
    memory = df.Memory.open(tmp_path)
    assert memory.steps == 10
    assert memory.layer("0").rows == 80


@pytest.mark.parametrize("error_signals", [True, False])
def test_state_changed_in_an_update_that_was_broken_off_is_found_under_adam(
    tmp_path: Path, error_signals: bool
) -> None:
    model = network()
    optimizer = AdamW(model.parameters(), lr=1e-3)

    def change_and_stop(*_: Any) -> None:
        for state in optimizer.state.values():
            state["exp_avg"].mul_(3)
        raise StopIteration

    with (
        pytest.raises(StopIteration),
        df.record(model, optimizer, tmp_path, error_signals=error_signals),
    ):
        for step in range(20):
            backward(model, step)
            if step == 10:
                optimizer.register_step_pre_hook(change_and_stop)
            optimizer.step()
            optimizer.zero_grad()
    assert not df.Memory.open(tmp_path).exact


def record(path: Path, loop: Loop, kind: Any, error_signals: bool, **options: Any) -> df.Memory:
    model = network()
    settings = {"lr": 0.05, "momentum": 0.9} if kind is SGD else {"lr": 1e-3}
    optimizer = kind(model.parameters(), **settings, **options)
    with df.record(model, optimizer, path, error_signals=error_signals):
        for step in range(STEPS):
            loop(model, optimizer, step)
            optimizer.zero_grad()
    memory = df.Memory.open(path)
    assert memory.exact, memory.remarks
    certificate = df.DualForm(model, memory).verify()
    assert certificate.passed, certificate
    return memory


CASES = [(loop, SGD) for loop in LOOPS] + [(loop, AdamW) for loop in LOOPS[1:]]
"""The first is about SGD's momentum."""


@pytest.mark.parametrize(("loop", "kind"), CASES, ids=lambda one: one.__name__)
def test_keys_are_those_of_a_full_recording(tmp_path: Path, loop: Loop, kind: Any) -> None:
    full, alone = (record(tmp_path / str(keep), loop, kind, keep) for keep in (True, False))
    for name in full.layers:
        assert torch.equal(full.layer(name).keys, alone.layer(name).keys)
    if loop in MOVED_BACK:
        assert [remark for remark in alone.remarks if "put back" in remark]
    else:
        assert alone.remarks == full.remarks


@pytest.mark.parametrize("fused", [False, True])
def test_optimizers_in_turns_with_hooks_of_the_loops_own(tmp_path: Path, fused: bool) -> None:
    model = network()
    optimizers = [SGD(model[i].parameters(), lr=0.05, momentum=0.9, fused=fused) for i in (0, 2)]
    for module in (model[0], model[2]):
        module.register_forward_hook(lambda m, i, output: output.register_hook(shape) and None)
    with df.record(model, optimizers, tmp_path, error_signals=False):
        for step in range(2 * STEPS):
            backward(model, step)
            optimizers[step % 2].step()
            model.zero_grad()
    memory = df.Memory.open(tmp_path)
    assert not [remark for remark in memory.remarks if "was not called" in remark]
    assert [remark.split()[1] for remark in memory.remarks] == ["patterns"]  # thrown away in turns
    assert df.DualForm(model, memory).verify().passed


# -- fused optimizers, updates that were broken off ------------------------------------------------


@pytest.mark.parametrize("last", [10, NOTED_EVERY + 1, STEPS - 2])
@pytest.mark.parametrize("fused", [False, True])
def test_an_update_whose_hook_ends_training_was_made(
    tmp_path: Path, fused: bool, last: int
) -> None:
    model = network()
    optimizer = SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.1, fused=fused)
    updates = 0

    def stop(*_: Any) -> None:
        nonlocal updates
        updates += 1
        if updates == last:
            raise StopIteration

    optimizer.register_step_post_hook(stop)
    with (
        pytest.raises(StopIteration),
        df.record(model, optimizer, tmp_path, error_signals=False),
    ):
        for step in range(STEPS):
            backward(model, step)
            optimizer.step()
            optimizer.zero_grad()
    memory = df.Memory.open(tmp_path)
    assert memory.exact
    assert memory.steps == last
    assert df.DualForm(model, memory).verify().passed


def test_a_layer_that_joins_late_under_a_hook_of_the_loops_own(tmp_path: Path) -> None:
    model = network()
    optimizer = SGD(model[0].parameters(), lr=0.05, momentum=0.9)
    model[2].register_forward_hook(lambda m, i, output: output.register_hook(shape) and None)
    with df.record(model, optimizer, tmp_path, error_signals=False):
        for step in range(20):
            if step == 7:
                optimizer.add_param_group({"params": list(model[2].parameters()), "lr": 0.01})
            backward(model, step)
            optimizer.step()
            model.zero_grad()
    assert df.Memory.open(tmp_path).remarks == ()


@pytest.mark.parametrize("fused", [False, True])
def test_fused_optimizers_are_as_any_other(tmp_path: Path, fused: bool) -> None:
    def edit(model: nn.Sequential, optimizer: Optimizer, step: int) -> None:
        if step == 40:
            with torch.no_grad():
                model[2].weight.mul_(1.001)
        backward(model, step)
        optimizer.step()

    record(tmp_path / "honest", masked_batches, SGD, False, fused=fused)
    with pytest.raises(df.AuditError, match=r"step 40, .*changed in place"):
        record(tmp_path / "edited", edit, SGD, False, fused=fused)


def test_an_update_that_fails_half_way_leaves_an_exact_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The buffers have taken the gradient in, and no weight has moved."""
    model = network()
    optimizer = SGD(model.parameters(), lr=0.05, momentum=0.9, foreach=True)
    add, calls = torch._foreach_add_, 0

    def fail(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 2 * 20:
            raise MemoryError("no room")
        return add(*args, **kwargs)

    monkeypatch.setattr(torch, "_foreach_add_", fail)
    with (
        pytest.raises(MemoryError),
        df.record(model, optimizer, tmp_path, error_signals=False),
    ):
        for step in range(STEPS):
            backward(model, step)
            optimizer.step()
            optimizer.zero_grad()
    memory = df.Memory.open(tmp_path)
    assert memory.exact, memory.remarks
    assert df.DualForm(model, memory).verify().passed


# -- what is found, and what is said ---------------------------------------------------------------


def test_some_rows_of_a_large_weight_changed_in_place_are_remarked_on(tmp_path: Path) -> None:
    """Whether all entries were put back cannot be known from some of them."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(5000, 64), nn.Linear(64, 3))
    optimizer = SGD(model.parameters(), lr=0.05)
    with df.record(model, optimizer, tmp_path, error_signals=False):
        for step in range(60):
            model(torch.randint(0, 5000, (16,))).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if step == 30:
                with torch.no_grad():
                    model[0].weight[17:40].normal_()
    (remark,) = df.Memory.open(tmp_path).remarks
    assert "'0.weight': it was changed in place after its update of step 30" in remark
    assert "not known" in remark


def test_weights_set_anew_before_they_join_an_optimizer_are_found(tmp_path: Path) -> None:
    model = network()
    optimizer = SGD(model[0].parameters(), lr=0.05, momentum=0.9)
    with (
        pytest.raises(
            df.AuditError, match=r"step 7, parameter '2\.weight': its weights are .* away"
        ),
        df.record(model, optimizer, tmp_path, error_signals=False),
    ):
        for step in range(20):
            if step == 7:
                model[2].reset_parameters()
                optimizer.add_param_group({"params": list(model[2].parameters()), "lr": 0.01})
            backward(model, step)
            optimizer.step()
            model.zero_grad()


def test_a_memory_converted_to_fewer_layers_verifies(tmp_path: Path) -> None:
    record(tmp_path / "run", masked_batches, SGD, False)
    df.compact(tmp_path / "run", tmp_path / "small", layers=["0"])
    memory = df.Memory.open(tmp_path / "small")
    assert memory.layers == ("0",)
    certificate = df.DualForm(None, memory).verify()
    assert certificate.passed, certificate


def hide_a_step(tampering: Any, path: Path, step: int) -> None:
    """As if the update had not been made, and nothing been noted of it."""
    file, row = tampering.segment_of(path, step)
    tampering.edit_tensor(file, "log/applied", lambda t: t[row].fill_(0))
    tampering.edit_tensor(file, "log/projection", lambda t: t[row].fill_(torch.nan))
    tampering.reseal(path)


def hide_what_was_noted(tampering: Any, path: Path, step: int) -> None:
    file, row = tampering.segment_of(path, step)
    tampering.edit_tensor(file, "log/projection", lambda t: t[row].fill_(torch.nan))
    tampering.reseal(path)


@pytest.mark.parametrize("step", [0, 1, NOTED_EVERY, NOTED_EVERY + 1])
@pytest.mark.parametrize("forge", [hide_a_step, hide_what_was_noted])
def test_no_step_that_is_to_be_noted_can_be_hidden(
    tampering: Any, tmp_path: Path, forge: Callable[[Any, Path, int], None], step: int
) -> None:
    honest = tmp_path / "honest"
    memory = record(honest, momentum_from_the_tenth_step, SGD, False)
    assert not np.isnan(memory.audit_projections("0.weight")[step])
    shutil.copytree(honest, tmp_path / "forged")
    forge(tampering, tmp_path / "forged", step)
    failures = df.DualForm(None, df.Memory.open(tmp_path / "forged")).verify().failures
    assert "fingerprints" in {check.kind for check in failures}
