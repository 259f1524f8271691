"""Gradients from elsewhere, or that lie elsewhere, or of a pass that was broken off."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

import dualform as df
from dualform.recording.fingerprints import FINGERPRINT_EVERY

NDArray = np.ndarray[Any, Any]

BOTH = pytest.mark.parametrize("error_signals", [True, False], ids=["patterns", "keys alone"])


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 4)).double()


def inputs(seed: int, rows: int = 5) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, 6, generator=generator, dtype=torch.float64)


def train(
    model: nn.Module,
    optimizer: Optimizer,
    steps: int,
    before: Callable[[nn.Module], None] = lambda model: None,
) -> None:
    for seed in range(steps):
        model(inputs(seed)).square().mean().backward()
        before(model)
        optimizer.step()
        optimizer.zero_grad()


# -- a pass that was broken off --------------------------------------------------------------------


class Heads(nn.Module):
    """Two layers side by side: a backward pass meets the second one first, then a product."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(300, 200), nn.Linear(300, 200)

    def forward(self, one: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
        return 1.0 * self.a(one), self.b(other)


def break_off(_: Tensor) -> None:
    raise ValueError("out of memory")


@BOTH
@pytest.mark.parametrize("thrown_away", [True, False])
def test_keys_of_a_broken_off_pass_are_the_right_ones_or_refused(
    tmp_path: Path, error_signals: bool, thrown_away: bool
) -> None:
    torch.manual_seed(0)
    model = Heads()
    optimizer = SGD(model.parameters(), lr=0.01)
    batch, fed = torch.empty(300, 300), []

    def loop() -> None:
        for step in range(6):
            batch.copy_(torch.randn(300, 300))
            one, other = model(batch, batch)
            loss = one.square().mean() + other.square().mean()
            if step == 3:
                one.register_hook(break_off)
                with pytest.raises(ValueError, match="out of memory"):
                    loss.backward()
                batch.fill_(0)
                if thrown_away:
                    optimizer.zero_grad()
                    continue
            else:
                loss.backward()
            fed.append(batch.clone())
            optimizer.step()
            optimizer.zero_grad()

    with df.record(model, optimizer, tmp_path / "run", error_signals=error_signals):
        if thrown_away:
            loop()
        else:
            with pytest.raises(df.RecordingError, match="changed in place"):
                loop()
    memory = df.Memory.open(tmp_path / "run")
    assert memory.steps == (5 if thrown_away else 3)
    assert torch.equal(memory.layer("b").keys, torch.cat(fed[: memory.steps]))


def test_a_pass_inside_of_another_one_is_told_from_it(tmp_path: Path) -> None:
    """Its gradients are there when the outer one goes on; nothing was thrown away."""
    model = network()
    optimizer = SGD(model.parameters(), lr=0.1)
    with df.record(model, optimizer, tmp_path / "run") as recorder:
        for seed in range(4):
            hidden = model[1](model[0](inputs(seed, 300)))
            inner = model(inputs(seed + 9, 300)).mean()
            hidden.register_hook(lambda _, inner=inner: inner.backward())
            model[2](hidden).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert recorder.remarks == ()
    dual = df.DualForm(model, tmp_path / "run")
    assert [dual.memory.layer(name).rows for name in ("0", "2")] == [2400, 2400]
    assert dual.verify().passed


# -- gradients of zeros ----------------------------------------------------------------------------


@BOTH
def test_a_micro_batch_that_writes_nothing_was_not_thrown_away(
    tmp_path: Path, error_signals: bool
) -> None:
    model = network()
    optimizer = SGD(model.parameters(), lr=0.1)
    with df.record(model, optimizer, tmp_path / "run", error_signals=error_signals) as recorder:
        for step in range(4):
            for weight in (0.0, 1.0):
                (weight * model(inputs(step)).square().mean()).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert recorder.remarks == ()
    memory = df.Memory.open(tmp_path / "run")
    assert [memory.layer(name).rows for name in ("0", "2")] == [40, 40]


@BOTH
def test_a_micro_batch_that_was_thrown_away_by_zeroing_is_dropped(
    tmp_path: Path, error_signals: bool
) -> None:
    model = network()
    optimizer = SGD(model.parameters(), lr=0.1)
    with df.record(model, optimizer, tmp_path / "run", error_signals=error_signals):
        for step in range(4):
            model(inputs(step)).square().mean().backward()
            optimizer.zero_grad(set_to_none=False)
            model(inputs(step + 9)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    memory = df.Memory.open(tmp_path / "run")
    assert torch.equal(memory.layer("0").keys, torch.cat([inputs(s + 9) for s in range(4)]))


# -- weights changed after the last update ---------------------------------------------------------


@BOTH
@pytest.mark.parametrize("flush", [True, False])
@pytest.mark.parametrize("rule", [SGD, AdamW])
@pytest.mark.parametrize("steps", [FINGERPRINT_EVERY - 1, FINGERPRINT_EVERY])
def test_weights_exchanged_at_the_end_are_found(
    tmp_path: Path, rule: Any, steps: int, flush: bool, error_signals: bool
) -> None:
    model = network()
    best = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer = rule(model.parameters(), lr=0.01)
    with (
        pytest.raises(df.AuditError, match="changed"),
        df.record(model, optimizer, tmp_path / "run", error_signals=error_signals) as recorder,
    ):
        train(model, optimizer, steps)
        model.load_state_dict(best)
        if flush:
            recorder.flush()
    assert not df.Memory.open(tmp_path / "run").exact


# -- where gradients lie ---------------------------------------------------------------------------


class Placed:
    """Puts every gradient to the same place, in a tensor that is new each time."""

    def __init__(self, place: Callable[[NDArray], Tensor]) -> None:
        self._place, self._arrays = place, dict[str, NDArray]()

    def __call__(self, model: nn.Module) -> None:
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None
            array = self._arrays.setdefault(name, np.empty(parameter.shape))
            array[...] = parameter.grad.numpy()
            parameter.grad = self._place(array)


_TENSORS: dict[int, Tensor] = {}


def of_a_tensor(array: NDArray) -> Tensor:
    return _TENSORS.setdefault(id(array), torch.from_numpy(array)).data


@pytest.mark.parametrize("place", [torch.from_numpy, of_a_tensor])
@pytest.mark.parametrize("options", [{"error_signals": False}, {"layers": [], "step_budget": 0}])
def test_gradients_that_always_lie_in_the_same_place_are_not_lent(
    tmp_path: Path, place: Callable[[NDArray], Tensor], options: dict[str, Any]
) -> None:
    _TENSORS.clear()
    model = network()
    optimizer = SGD(model.parameters(), lr=0.05, momentum=0.9)
    with df.record(model, optimizer, tmp_path / "run", **options) as recorder:
        train(model, optimizer, FINGERPRINT_EVERY + 6, Placed(place))
        assert recorder.remarks == ()
    assert df.DualForm(model, tmp_path / "run").verify().passed


@BOTH
def test_gradients_made_in_inference_mode_are_recorded_like_others(
    tmp_path: Path, error_signals: bool
) -> None:
    def halve(model: nn.Module) -> None:
        with torch.inference_mode():
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter.grad = parameter.grad * 0.5

    model = network()
    optimizer = SGD(model.parameters(), lr=0.05, momentum=0.9)
    with df.record(model, optimizer, tmp_path / "run", error_signals=error_signals):
        train(model, optimizer, 9, halve)
    assert df.DualForm(model, tmp_path / "run").verify().passed


@pytest.mark.parametrize("shape", [(0, 4), (4, 0)])
@pytest.mark.filterwarnings("ignore:Initializing zero-element")
def test_an_empty_parameter_is_refused_by_name(tmp_path: Path, shape: tuple[int, int]) -> None:
    layer = nn.Linear(*shape)
    with (
        pytest.raises(df.RecordingError, match=r"parameter 'weight' has shape"),
        df.record(layer, SGD(layer.parameters(), lr=0.1), tmp_path / "run"),
    ):
        pass


# -- other processes, other threads ----------------------------------------------------------------


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork.*")
@pytest.mark.parametrize("does", ["flush", "train"])
def test_a_forked_process_that_goes_on_waits_for_nobody(tmp_path: Path, does: str) -> None:
    model = network()
    optimizer = SGD(model.parameters(), lr=0.1)
    with df.record(model, optimizer, tmp_path / "run", segment_bytes=2000) as recorder:
        train(model, optimizer, 20)
        child = os.fork()
        if child == 0:
            signal.alarm(60)  # rather than hang
            status = 1
            try:
                if does == "train":
                    train(model, optimizer, 60)
                    status = 0
                else:
                    recorder.flush()
            except df.RecordingError as error:
                status = 0 if "forked" in str(error) else 2
            finally:
                os._exit(status)
        assert os.waitpid(child, 0)[1] == 0
        train(model, optimizer, 5)
    assert df.Memory.open(tmp_path / "run").steps == 25
    assert df.DualForm(model, tmp_path / "run").verify().passed


def test_ctrl_c_is_the_main_threads_though_training_runs_in_another(tmp_path: Path) -> None:
    model = network()
    optimizer = SGD(model.parameters(), lr=0.1)
    done = threading.Event()

    def loop() -> None:
        optimizer.register_step_pre_hook(lambda *_: signal.raise_signal(signal.SIGINT))
        train(model, optimizer, 1)
        done.set()

    thread = threading.Thread(target=loop)
    with (
        pytest.raises(KeyboardInterrupt),
        df.record(model, optimizer, tmp_path / "run"),
    ):
        thread.start()
        thread.join()
        done.wait(60)
    thread.join()
    assert done.is_set()
    assert df.Memory.open(tmp_path / "run").steps == 1
