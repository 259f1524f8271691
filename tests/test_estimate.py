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

import dualform

Make = Callable[[], nn.Module]


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 10))


def with_norms() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 96), nn.LayerNorm(96), nn.ReLU(), nn.Linear(96, 10))


def with_batch_norm() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 96), nn.BatchNorm1d(96), nn.Linear(96, 10, bias=False))


class Text(nn.Module):
    """Tokens, packed attention, norms, a head that shares the embedding's weight."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
        self.emb, self.body = nn.Embedding(50, 32), nn.TransformerEncoder(layer, 2)

    def forward(self, tokens: Tensor) -> dict[str, Tensor]:
        return {"logits": self.body(self.emb(tokens)) @ self.emb.weight.T}


class Adapter(nn.Module):
    """A frozen layer with a trained one of low rank beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(128, 128).requires_grad_(False)
        self.a, self.b = nn.Linear(128, 4, bias=False), nn.Linear(4, 128, bias=False)
        self.head = nn.Linear(128, 3)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.head((self.base(x) + self.b(self.a(x))).mean(1))
        return output


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)


def record(
    model: nn.Module, optimizer: torch.optim.Optimizer, batch: Tensor, path: Path, **options: Any
) -> dualform.Memory:
    """150 steps; every batch has other values, of `batch`'s few rows."""
    with dualform.record(model, path, **options) as recorder:
        for _ in range(150):
            order = torch.randperm(len(batch))
            recorder.tag(example=order, label=order % 10)
            output = model(batch[order])
            output = output["logits"] if isinstance(output, dict) else output
            output.square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return dualform.Memory.open(path)


def rows(*shape: int) -> Tensor:
    return torch.randn(shape)


TOKENS = torch.randint(0, 50, (8, 16), generator=torch.Generator().manual_seed(0))
CASES: dict[str, tuple[Make, Tensor, Any, dict[str, Any]]] = {
    "mlp": (mlp, rows(32, 64), sgd, {}),
    "positions": (mlp, rows(8, 6, 64), sgd, {}),
    "norms": (with_norms, rows(32, 64), sgd, {}),
    "adam": (with_norms, rows(32, 64), adam, {}),
    "batch norm": (with_batch_norm, rows(16, 64), sgd, {}),
    "float64": (lambda: mlp().double(), rows(16, 64).double(), adam, {}),
    "float16": (mlp, rows(32, 64), sgd, {"dtype": "float16"}),
    "bfloat16": (mlp, rows(8, 6, 64), adam, {"dtype": "bfloat16"}),
    "float64 in float16": (
        lambda: mlp().double(),
        rows(16, 64).double(),
        sgd,
        {"dtype": "float16"},
    ),
    "keys alone": (mlp, rows(32, 64), sgd, {"keep": "keys"}),
    "keys of one layer": (mlp, rows(32, 64), sgd, {"keep": {"2": "patterns", "*": "keys"}}),
    "values": (mlp, rows(32, 64), adam, {"keep": "values"}),
    "every third step": (mlp, rows(32, 64), sgd, {"every": 3}),
    "text": (Text, TOKENS, adam, {}),
    "text, keys": (Text, TOKENS, adam, {"keep": "keys"}),
    "adapter": (Adapter, rows(8, 20, 128), adam, {}),
}


@pytest.mark.parametrize("case", CASES)
def test_the_estimate_is_within_five_percent_of_a_recording(case: str, tmp_path: Path) -> None:
    make, batch, rule, options = CASES[case]
    model = make()
    optimizer = rule(model)
    found = dualform.estimate(
        model, batch, steps=150, optimizer=optimizer, examples=len(batch), **options
    )
    memory = record(model, optimizer, batch, tmp_path / "run", **options)
    assert found.bytes_on_disk == pytest.approx(memory.bytes_on_disk, rel=0.05)
    known = [(name, memory.layer(name).keep, memory.layer(name).rows) for name in memory.layers]
    if known:
        table = found.table
        assert list(zip(table["layer"], table["kept"], table["rows"], strict=True)) == known
    assert found.bytes_on_disk == sum(found.parts.values())


def test_other_choices_of_keep_are_measured_too(tmp_path: Path) -> None:
    model, batch = with_norms(), rows(32, 64)
    found = dualform.estimate(model, batch, steps=150, optimizer=sgd(model), examples=32)
    for word, size in found.by_keep.items():
        again = with_norms()
        memory = record(again, sgd(again), batch, tmp_path / word, keep=word)
        assert size == pytest.approx(memory.bytes_on_disk, rel=0.05)
    assert set(found.by_keep) == {"keys", "values"}


def test_without_inputs_it_says_what_it_assumed() -> None:
    found = dualform.estimate(mlp(), batch=128, steps=1000)
    assert found.table["rows"].tolist() == [128_000, 128_000]
    for said in ("[128, 64] are assumed, from layer '0'", "AdamW is assumed", "taken to be new"):
        assert said in repr(found)
    tokens = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 2))
    assert "[3, 1] are assumed" in repr(dualform.estimate(tokens, batch=3, steps=10))
    with pytest.raises(dualform.DualFormError, match=r"shape \[2, 32\].*sample batch"):
        dualform.estimate(nn.Sequential(nn.Flatten(0), nn.Linear(32, 2)), batch=2, steps=1)


def test_inputs_that_recur_are_counted_once_where_it_is_said_how_many_there_are() -> None:
    batch = rows(32, 64)
    new, known = (
        dualform.estimate(mlp(), batch, steps=100, examples=n).parts["keys"] for n in (None, 64)
    )
    assert new - known == (3200 - 64) * 64 * 4


def test_a_sample_of_another_size_is_scaled_to_the_batch() -> None:
    found = dualform.estimate(mlp(), torch.randn(4, 7, 64), batch=100, steps=10)
    assert found.table["rows"].tolist() == [7000, 7000]


class Twice(nn.Module):
    """One layer used twice, one never, one frozen; inputs by name; random."""

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


def test_model_optimizer_and_random_numbers_are_left_as_they_were() -> None:
    model, inputs = Twice(), {"left": torch.randn(3, 8), "right": torch.randn(3, 8)}
    optimizer = sgd(model)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    states = random.getstate(), torch.get_rng_state()
    found = dualform.estimate(model, inputs, steps=10, optimizer=optimizer)
    assert found.table.rows()[0] | {"bytes/row": 0, "MB": 0} == {
        "layer": "used", "kept": "patterns", "rows": 60, "bytes/row": 0, "MB": 0,
    }  # fmt: skip
    assert random.getstate() == states[0]
    assert torch.equal(torch.get_rng_state(), states[1])
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert not optimizer.state
    assert all(p.grad is None for p in model.parameters())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_any_optimizer_will_do_and_only_what_it_trains_counts() -> None:
    model = mlp()
    last = model[2].parameters()  # type: ignore[index]
    for optimizer, layers in (
        (torch.optim.SGD, ["0", "2"]),
        (torch.optim.LBFGS, ["0", "2"]),
        ([sgd(model[0]), adam(model[2])], ["0", "2"]),  # type: ignore[index]
        (torch.optim.SGD(last, lr=0.0), ["2"]),
    ):
        found = dualform.estimate(model, rows(4, 64), steps=10, optimizer=optimizer)  # type: ignore[arg-type]
        assert found.table["layer"].tolist() == layers
        assert found.parts["kept states"] > 0


def test_it_prints_and_converts_and_says_whether_it_fits(tmp_path: Path) -> None:
    found = dualform.estimate(with_norms(), batch=128, steps=1000, path=tmp_path / "not" / "there")
    assert found.fits
    assert found.to_dict()["fits"]
    large = dualform.estimate(mlp(), batch=128, steps=10**12, path=tmp_path)
    assert not large.fits
    assert "NOT ENOUGH" in repr(large)
    with pytest.raises(dualform.DualFormError, match="looks like a URL"):
        dualform.estimate(mlp(), batch=1, steps=1, path="s3://bucket/run")
    assert json.loads(json.dumps(found.to_dict()))["bytes_on_disk"] == found.bytes_on_disk
    for said in ("on disk for 1,000 steps of 128", "examples", "error signals", "RAM"):
        assert said in repr(found)
        assert said in found._repr_html_()


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ({"batch": 0}, "batch=0.*whole number"),
        ({"steps": True}, "whole number"),
        ({"every": 1.5}, "whole number"),
        ({"batch": None}, "neither inputs nor batch"),
        ({"inputs": 3}, "no tensor"),
        ({"model": mlp().requires_grad_(False)}, "nothing that the model returns can be trained"),
        ({"model": nn.Linear}, "expected a torch.nn.Module"),
        ({"dtype": "float8"}, "'float32', 'float16', 'bfloat16'"),
        ({"keep": {"nowhere": "keys"}}, "matches no layer"),
    ],
)
def test_what_makes_no_sense_is_refused(choices: dict[str, Any], message: str) -> None:
    with pytest.raises(dualform.DualFormError, match=message):
        dualform.estimate(**{"model": mlp(), "batch": 1, "steps": 1, **choices})
