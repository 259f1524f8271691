"""Weights used past their modules: attention's projections, functional code, mixed uses; rebuilt.

Each case trains under a demanding rule and is rebuilt from patterns by hand and by `DualForm`, at
several steps, in float64 to 1e-12; and the same training without the recorder gives the same bits.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.exactness.functional import (
    CASES,
    RULE,
    STEPS,
    WITHOUT_PATTERNS,
    Checkpointed,
    Functional,
    SelfAttention,
    in_a_checkpoint,
    loss_of,
    seeded,
    train,
)
from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from torch.optim import SGD

import dualform


def trained_with_warnings(run: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        train(run)
    return [str(warning.message) for warning in said]


def hooks() -> list[int]:
    return [
        len(v) for n, v in vars(torch_module).items() if n.startswith("_global_") and "hooks" in n
    ]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[pytest.mark.long] if "in a checkpoint" in n else []) for n in CASES],
)
def test_every_matrix_has_patterns_and_is_rebuilt(
    name: str, dtype: torch.dtype, new_run: Any, certify: Any
) -> None:
    before = hooks()
    run = new_run(seeded(CASES[name], dtype), loss_of, dtype)
    train(run)
    assert hooks() == before
    memory = certify(run)
    trained = [p for p in memory.parameters.values() if memory.log(p.name).moved.any()]
    assert {p.keep for p in trained if len(p.shape) == 2} == {"patterns"}
    dual = dualform.DualForm(run.model, memory)
    twin = dual.to_model()
    for parameter, weight in run.weights().items():
        assert torch.allclose(twin.get_parameter(parameter), weight, rtol=1e-4, atol=1e-6)
    everything, nothing = dual.without(), dual.only()
    for parameter, weight in dual.weights(torch.float64).items():
        parts = [d.weights(torch.float64)[parameter] for d in (everything, nothing)]
        assert torch.allclose(sum(parts), weight + parts[0], atol=1e-12)
    unrecorded = new_run(seeded(CASES[name], dtype), loss_of, dtype)
    train(unrecorded, record=False)
    for parameter, weight in unrecorded.weights().items():
        assert torch.equal(weight, run.kept[STEPS][parameter])


def test_the_layers_are_named_after_what_they_are(new_run: Any, certify: Any) -> None:
    expected = {
        "self-attention": {"attn.in_proj", "attn.out_proj", "head"},
        "cross-attention": {"attn.in_proj_q", "attn.in_proj_kv", "attn.out_proj"},
        "attention with three inputs": {
            *(f"attn.in_proj_{part}" for part in "qkv"),
            "attn.out_proj",
        },
        "attention with widths of its own": {
            *(f"attn.{part}_proj" for part in "qkv"),
            "attn.out_proj",
        },
        "bare parameters": {"packed[0:3]", "packed[3:6]", "packed[6:9]", "weight"},
        "F.linear": {"first", "fc"},
        "x @ W.T": {"first", "fc.weight"},
        "module and function": {"first", "fc", "fc.weight"},
    }
    for name, layers in expected.items():
        run = new_run(seeded(CASES[name]), loss_of, torch.float64, overwrite=True)
        train(run)
        assert set(dualform.Memory.open(run.path).layers) == layers, name


def test_an_attentions_patterns_are_tagged_like_its_inputs(tmp_path: Path) -> None:
    model = seeded(SelfAttention)
    optimizer = SGD(model.parameters(), lr=0.1)
    inputs = torch.randn(4, 3, 8, dtype=torch.float64)
    with dualform.record(model, tmp_path / "run") as recorder:
        recorder.tag(example=[10, 11, 12, 13])
        model(inputs).square().mean().backward()
        optimizer.step()
    memory = dualform.Memory.open(tmp_path / "run")
    for name in ("attn.in_proj", "attn.out_proj", "head"):
        patterns = memory.layer(name).patterns
        assert patterns["example"].tolist() == [10 + i // 3 for i in range(12)]
        assert patterns["position"].tolist() == [0, 1, 2] * 4
    assert torch.equal(memory.layer("attn.in_proj").keys, inputs.flatten(0, 1))


@pytest.mark.parametrize("checkpointed", [False, True], ids=["plain", "checkpointed"])
@pytest.mark.parametrize("name", WITHOUT_PATTERNS)
def test_a_product_of_another_kind_makes_its_weight_values_by_name(
    name: str, checkpointed: bool, new_run: Any, certify: Any
) -> None:
    use = WITHOUT_PATTERNS[name]
    build = (lambda: in_a_checkpoint(use)) if checkpointed else (lambda: Functional(use))
    run = new_run(seeded(build), loss_of, torch.float64)
    said = trained_with_warnings(run)
    assert [s for s in said if "'fc.weight'" in s and "; it is kept as values" in s]
    memory = certify(run)
    kept = {name: known.keep for name, known in memory.parameters.items()}
    assert kept == {"first.weight": "patterns", "first.bias": "patterns", "fc.weight": "values",
                    "fc.bias": "values"}  # fmt: skip
    assert memory.parameters["fc.weight"].why in " ".join(memory.remarks)


def test_a_weight_that_is_returned_through_a_view_is_kept_as_values(
    new_run: Any, certify: Any
) -> None:
    class Returned(nn.Linear):
        def forward(self, x: Tensor) -> Any:
            return super().forward(x), self.weight.T

    def loss(model: nn.Module, generator: torch.Generator) -> Tensor:
        x = torch.randn(4, 3, 8, generator=generator, dtype=torch.float64)
        output, view = model(x)
        return output.square().mean() + view.square().sum()

    run = new_run(seeded(lambda: Returned(8, 5)), loss, torch.float64)
    assert [s for s in trained_with_warnings(run) if "'weight'" in s and "kept as values" in s]
    assert certify(run).parameters["weight"].keep == "values"


def test_a_network_of_modules_keeps_no_hook_for_graphs_after_the_first_step(
    tmp_path: Path,
) -> None:
    model = seeded(lambda: nn.Sequential(nn.Linear(8, 5), nn.ReLU(), nn.Linear(5, 3)))
    optimizer = SGD(model.parameters(), lr=0.1)
    before = hooks()
    with dualform.record(model, tmp_path / "run"):
        for step in range(2):
            loss_of(model, torch.Generator().manual_seed(step)).backward()
            optimizer.step()
            optimizer.zero_grad()
        during = hooks()
        assert sum(during) - sum(before) == 2  # the module engine's one hook, in two tables
    assert hooks() == before


def test_a_checkpoint_backward_twice_counts_twice(new_run: Any, certify: Any) -> None:
    run = new_run(seeded(Checkpointed), loss_of, torch.float64)
    optimizer = SGD(run.model.parameters(), **RULE)
    with run.recording(optimizer):
        for _ in range(STEPS):
            loss = run.loss()
            loss.backward(retain_graph=True)
            (2 * loss).backward()
            run.loss().backward()
            optimizer.step()
            optimizer.zero_grad()
            run.keep()
    memory = certify(run)
    patterns = memory.layer("attn.attn.in_proj").patterns
    assert patterns.values("microbatch") == [0, 1, 2]
    assert patterns.values("call") == [0]
    assert memory.layer("layer.self_attn.in_proj").patterns.values("call") == [0, 1]


def test_a_forward_pass_that_is_never_differentiated_is_no_call(tmp_path: Path) -> None:
    model = seeded(SelfAttention)
    optimizer = SGD(model.parameters(), lr=0.1)
    with dualform.record(model, tmp_path / "run"):
        for _ in range(3):
            x = torch.randn(4, 3, 8, dtype=torch.float64)
            model(x)
            loss = model(x).square().mean()
            model(x)
            (loss + model(x).cos().mean()).backward()
            optimizer.step()
            optimizer.zero_grad()
    memory = dualform.Memory.open(tmp_path / "run")
    for name in memory.layers:
        patterns = memory.layer(name).patterns
        assert patterns.values("call") == [0, 1]
        assert (patterns["call"] == 0).sum() == (patterns["call"] == 1).sum() == 36


def test_what_is_kept_elsewhere_until_the_backward_pass_is_read_from_there(
    new_run: Any, certify: Any
) -> None:
    """Hooks on saved tensors, such as those that move them to another device."""

    def loss(model: nn.Module, generator: torch.Generator) -> Tensor:
        with torch.autograd.graph.save_on_cpu():
            return loss_of(model, generator)

    run = new_run(seeded(CASES["module and function"]), loss, torch.float64)
    train(run)
    memory = certify(run)
    assert {p.keep for p in memory.parameters.values()} == {"patterns"}


def test_recurrent_cells_have_patterns(new_run: Any, certify: Any) -> None:
    class Cells(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.LSTMCell(8, 5), nn.GRUCell(5, 4)

        def forward(self, x: Tensor) -> Tensor:
            state, last = None, None
            for position in range(x.shape[1]):
                state = self.one(x[:, position], state)
                last = self.two(state[0], last)
            return last

    run = new_run(seeded(Cells), loss_of, torch.float64)
    train(run)
    memory = certify(run)
    assert {p.keep for p in memory.parameters.values()} == {"patterns"}
    assert set(memory.layers) == {f"{c}.weight_{w}" for c in ("one", "two") for w in ("ih", "hh")}
    assert memory.layer("one.weight_hh").patterns.values("call") == [0, 1, 2]
