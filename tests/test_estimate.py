"""`estimate`: what is foretold is what a recording then takes."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dualform as df


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 10))


def with_norms() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 96), nn.LayerNorm(96), nn.ReLU(), nn.Linear(96, 10))


def with_batch_norm() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 96), nn.BatchNorm1d(96), nn.Linear(96, 10, bias=False))


def record(model: nn.Module, batch: Tensor, steps: int, path: Path, **settings: Any) -> df.Memory:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    with df.record(model, optimizer, path, **settings) as recorder:
        for _ in range(steps):
            recorder.tag(example=torch.arange(len(batch)), label=torch.zeros(len(batch)).long())
            model(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return df.Memory.open(path)


def test_layers_that_the_optimizer_does_not_have_are_not_counted(tmp_path: Path) -> None:
    model, batch = with_norms(), torch.randn(32, 64)
    optimizer = torch.optim.SGD(model[3].parameters(), lr=0.01)  # type: ignore[index]
    with df.record(model, optimizer, tmp_path / "run"):
        for _ in range(50):
            model(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    estimate = df.estimate(model, batch=32, steps=50, inputs=batch, optimizer=optimizer)
    assert [layer.name for layer in estimate.layers] == ["3"]
    found = df.Memory.open(tmp_path / "run").bytes_on_disk
    assert abs(estimate.bytes_on_disk / found - 1) < 0.05


@pytest.mark.parametrize(
    ("make", "shape", "settings"),
    [
        (mlp, (32, 64), {}),
        (mlp, (32, 64), {"segment_bytes": 1 << 20}),
        (mlp, (8, 6, 64), {}),
        (with_norms, (32, 64), {"segment_bytes": 2 << 20}),
        (with_norms, (32, 64), {"step_budget": 20_000, "snapshot_every": 50}),
        (with_batch_norm, (16, 64), {}),
        (lambda: mlp().double(), (16, 64), {}),
        (mlp, (32, 64), {"dtype": "float16"}),
        (mlp, (8, 6, 64), {"dtype": "bfloat16", "segment_bytes": 1 << 20}),
        (lambda: mlp().double(), (16, 64), {"dtype": "float16"}),
        (mlp, (32, 64), {"error_signals": False}),
        (mlp, (32, 64), {"error_signals": "2", "dtype": "float16"}),
        (mlp, (32, 64), {"error_signals": False, "snapshot_every": 40}),
        (mlp, (32, 64), {"every": 3}),
        (mlp, (256, 64), {"every": 2, "snapshot_every": 50, "segment_bytes": 1 << 19}),
    ],
    ids=[
        "mlp",
        "segments",
        "positions",
        "norms",
        "over budget",
        "batch norm",
        "float64",
        "float16",
        "bfloat16",
        "float64 in float16",
        "keys alone",
        "keys alone of one layer",
        "keys alone, sums kept often",
        "every third step",
        "every other step, sums large",
    ],
)
def test_the_estimate_is_within_three_percent_of_a_real_recording(
    make: Callable[[], nn.Module], shape: tuple[int, ...], settings: Any, tmp_path: Path
) -> None:
    model = make()
    batch = torch.randn(shape, dtype=next(model.parameters()).dtype)
    foretold = df.estimate(
        model, batch=shape[0], steps=150, inputs=batch, examples=shape[0], **settings
    )
    memory = record(model, batch, 150, tmp_path / "run", **settings)
    assert foretold.bytes_on_disk == pytest.approx(memory.bytes_on_disk, rel=0.03)
    for layer in foretold.layers:
        assert layer.patterns == memory.layer(layer.name).rows


def test_the_parts_and_the_layers_add_up() -> None:
    found = df.estimate(mlp(), batch=128, steps=1000)
    assert found.bytes_on_disk == sum(found.parts.values())
    patterns = found.parts["keys"] + found.parts["error signals"]
    assert patterns == sum(layer.bytes_on_disk for layer in found.layers)
    assert [layer.bytes_per_pattern for layer in found.layers] == [4 * (64 + 96), 4 * (96 + 10)]


def test_sixteen_bits_take_half_the_bytes_and_float16_a_scale_per_error_signal() -> None:
    whole, half, brain = (
        [layer.bytes_per_pattern for layer in df.estimate(mlp(), batch=8, steps=9, dtype=d).layers]
        for d in ("float32", "float16", "bfloat16")
    )
    assert brain == [size // 2 for size in whole]
    assert half == [size // 2 + 4 for size in whole]
    trained_in_16 = df.estimate(mlp().bfloat16(), batch=8, steps=9, dtype="float16").layers
    assert [layer.bytes_per_pattern for layer in trained_in_16] == brain
    with pytest.raises(df.RecordingError, match="float64"):
        df.estimate(mlp(), batch=8, steps=9, dtype="float64")


def test_without_inputs_each_layer_sees_one_pattern_per_example_and_says_so() -> None:
    found = df.estimate(mlp(), batch=128, steps=1000)
    assert {layer.patterns for layer in found.layers} == {128_000}
    assert "one pattern per example" in repr(found)


def test_a_sample_of_another_size_is_scaled_to_the_batch() -> None:
    found = df.estimate(mlp(), batch=100, steps=10, inputs=torch.randn(4, 7, 64))
    assert {layer.patterns_per_step for layer in found.layers} == {700}


class Twice(nn.Module):
    """One layer used twice, one never, one frozen; inputs by name; random in eval mode too."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused, self.frozen = (nn.Linear(8, 8) for _ in range(3))
        self.frozen.requires_grad_(False)
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, *, left: Tensor, right: Tensor) -> Tensor:
        self.calls += 1  # type: ignore[operator]
        random.random()
        hidden: Tensor = self.frozen(self.used(left) + self.used(right))
        return hidden + torch.rand_like(hidden)


def test_keyword_inputs_repeated_and_unused_layers_are_counted_as_they_are() -> None:
    inputs = {"left": torch.randn(3, 8), "right": torch.randn(3, 8)}
    found = df.estimate(Twice(), batch=3, steps=10, inputs=inputs)
    assert [(layer.name, layer.patterns_per_step) for layer in found.layers] == [("used", 6)]
    assert any("unused" in remark for remark in found.remarks)


def test_counting_leaves_model_and_random_state_as_they_were() -> None:
    model = Twice()
    model.used.eval()
    random_state, torch_state = random.getstate(), torch.get_rng_state()
    inputs = {"left": torch.randn(3, 8), "right": torch.randn(3, 8)}
    torch.set_rng_state(torch_state)
    df.estimate(model, batch=3, steps=10, inputs=inputs)
    assert torch.equal(torch.get_rng_state(), torch_state)
    assert random.getstate() == random_state
    assert model.training
    assert not model.used.training
    assert model.calls.item() == 0
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_nothing_stays_behind_when_the_model_raises() -> None:
    model = mlp()
    with pytest.raises(RuntimeError):
        df.estimate(model, batch=3, steps=10, inputs=torch.randn(3, 9))
    assert model.training
    assert not any(m._forward_pre_hooks for m in model.modules())


def test_it_says_whether_the_disk_holds_it(tmp_path: Path) -> None:
    place = tmp_path / "not" / "there" / "yet"
    small = df.estimate(mlp(), batch=1, steps=1, path=place)
    large = df.estimate(mlp(), batch=10**9, steps=10**9, path=place)
    assert small.fits is True
    assert large.fits is False
    assert "NOT ENOUGH" in repr(large)
    assert df.estimate(mlp(), batch=1, steps=1).fits is None


def test_ram_is_bounded_by_segments_and_the_largest_step() -> None:
    found = df.estimate(mlp(), batch=128, steps=10, segment_bytes=1 << 20)
    step = sum(layer.bytes_per_pattern * layer.patterns_per_step for layer in found.layers)
    assert found.buffer_bytes == 3 * ((1 << 20) + step)


def test_it_prints_and_converts() -> None:
    found = df.estimate(with_norms(), batch=128, steps=1000)
    assert json.loads(json.dumps(found.to_dict()))["bytes_on_disk"] == found.bytes_on_disk
    assert "1.weight" in repr(found)
    assert "<table" in found._repr_html_()


@pytest.mark.parametrize("bad", [{"batch": 0}, {"steps": -1}, {"batch": 1.5}, {"steps": True}])
def test_counts_that_are_none_are_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(df.DualFormError, match="whole number"):
        df.estimate(mlp(), **{"batch": 1, "steps": 1, **bad})


def test_a_sample_without_examples_is_refused() -> None:
    with pytest.raises(df.DualFormError, match="no tensor"):
        df.estimate(mlp(), batch=1, steps=1, inputs=3)
