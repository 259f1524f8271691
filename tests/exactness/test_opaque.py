"""What hides its patterns is kept as values, by name and with the reason; the rest stays exact."""

from __future__ import annotations

import contextlib
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, parametrizations, prune, weight_norm
from torch.optim import SGD
from torch.utils.checkpoint import checkpoint

import dualform
from dualform.certificate.replay import at as weights_at

STEPS = 6
RULE = {"lr": 0.05, "momentum": 0.9, "dampening": 0.3, "weight_decay": 0.02}


class Body(nn.Module):
    """Something between two linear layers."""

    def __init__(self, body: nn.Module, how: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.foot, self.body, self.head = nn.Linear(8, 6), body, nn.Linear(6, 3)
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.how(self.body, torch.tanh(self.foot(x))))


def called(body: nn.Module, x: Tensor) -> Tensor:
    return body(x)


def first(body: nn.Module, x: Tensor) -> Tensor:
    return body(x)[0]


def reentrant(body: nn.Module, x: Tensor) -> Tensor:
    return checkpoint(body, x, use_reentrant=True)


def old_weight_norm() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return weight_norm(nn.Linear(6, 6))


def compiled_forward() -> nn.Module:
    linear = nn.Linear(6, 6)
    linear.forward = torch.compile(linear.forward, backend="aot_eager")
    return linear


def compiled_in_place() -> nn.Module:
    linear = nn.Linear(6, 6)
    linear.compile(backend="aot_eager")
    return linear


def pruned() -> nn.Module:
    linear = nn.Linear(6, 6)
    return prune.random_unstructured(linear, "weight", 0.3)


OPAQUE: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "an LSTM": (lambda: Body(nn.LSTM(6, 6), first), r"is in a .*LSTM, whose kernel hides"),
    "a GRU": (lambda: Body(nn.GRU(6, 6, batch_first=True), first), r"is in a .*GRU, whose"),
    "an RNN": (lambda: Body(nn.RNN(6, 6), first), r"is in a .*RNN, whose kernel hides"),
    "weight norm": (
        lambda: Body(parametrizations.weight_norm(nn.Linear(6, 6)), called),
        r"is parametrized in a .*Linear",
    ),
    "old weight norm": (lambda: Body(old_weight_norm(), called), r"belongs to a .*Linear"),
    "pruning": (lambda: Body(pruned(), called), r"belongs to a .*Linear"),
    "a compiled module": (
        lambda: Body(torch.compile(nn.Linear(6, 6), backend="aot_eager"), called),
        r"is inside a compiled module: record the module as it was before",
    ),
    "a compiled forward": (
        lambda: Body(compiled_forward(), called),
        r"is compiled|compiled module|belongs to a",
    ),
    "a reentrant checkpoint": (
        lambda: Body(nn.Sequential(nn.Linear(6, 6), nn.Tanh()), reentrant),
        r"is used inside a backward pass; .*use_reentrant=False has patterns",
    ),
    "attention in a reentrant checkpoint": (
        lambda: Body(nn.TransformerEncoderLayer(6, 2, 8, 0.0, batch_first=True), reentrant),
        r"is used inside a backward pass; .*use_reentrant=False has patterns",
    ),
}
"""What hides the patterns of 'body', and what is said of it."""


def loss_of(model: nn.Module, generator: torch.Generator) -> Tensor:
    x = torch.randn(4, 3, 8, generator=generator, dtype=torch.float64)
    return model(x.to(next(model.parameters()).dtype)).square().mean()


def seeded(build: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(5)
    return build().double()


def train(run: Any) -> None:
    optimizer = SGD(run.model.parameters(), **RULE)
    with run.recording(optimizer) as recorder:
        for step in range(STEPS):
            recorder.tag(example=[4 * step + i for i in range(4)])
            run.loss().backward()
            clip_grad_norm_(run.model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
            run.keep()


@pytest.mark.filterwarnings("ignore")  # dynamo raises many of its own
@pytest.mark.parametrize("name", OPAQUE)
def test_what_hides_its_patterns_is_values_by_name_and_the_rest_is_exact(
    name: str, new_run: Any, certify: Any
) -> None:
    build, why = OPAQUE[name]
    run = new_run(seeded(build), loss_of, torch.float64)
    train(run)
    memory = certify(run)
    body = [known for n, known in memory.parameters.items() if n.startswith("body")]
    assert {known.keep for known in body} == {"values"}
    assert [known for known in body if re.search(why, known.why)]
    others = [known for n, known in memory.parameters.items() if not n.startswith("body")]
    assert {known.keep for known in others} == {"patterns"}
    assert set(memory.layers) == {"foot", "head"}
    dual = dualform.DualForm(run.model, memory)
    assert "kept as values, without patterns: body" in repr(dual)
    for known in body:
        assert torch.equal(dual.weights()[known.name], run.kept[STEPS][known.name])
    split = dual.contribute(example=2, target=torch.ones(3, 6), layer="foot")
    assert abs(split.residual) <= 1e-12


@pytest.mark.filterwarnings("ignore")
def test_a_module_compiled_in_place_is_run_eagerly_and_read_from_the_graph(
    new_run: Any, certify: Any
) -> None:
    run = new_run(seeded(lambda: Body(compiled_in_place(), called)), loss_of, torch.float64)
    train(run)
    assert {known.keep for known in certify(run).parameters.values()} == {"patterns"}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("keep", ["values", {"foot": "patterns", "*": "values"}])
def test_what_is_left_out_by_choice_is_values_too(keep: Any, new_run: Any, certify: Any) -> None:
    run = new_run(seeded(OPAQUE["an LSTM"][0]), loss_of, torch.float64, keep=keep)
    train(run)
    memory = certify(run)
    assert memory.layers == (() if keep == "values" else ("foot",))
    for name, known in memory.parameters.items():
        assert known.keep == ("patterns" if name.startswith(memory.layers or "-") else "values")


def test_a_choice_that_names_what_has_no_patterns_is_refused(new_run: Any) -> None:
    run = new_run(seeded(OPAQUE["an LSTM"][0]), loss_of, torch.float64, keep={"body": "patterns"})
    with pytest.raises(
        dualform.RecordingError, match=r"'body'.*this model's layers are foot, head"
    ):
        train(run)


def test_what_is_not_trained_is_as_it_was(new_run: Any, certify: Any) -> None:
    model = seeded(OPAQUE["an LSTM"][0])
    model.body.requires_grad_(False)
    run = new_run(model, loss_of, torch.float64)
    train(run)
    memory = certify(run)
    assert not memory.log("body.weight_ih_l0").moved.any()
    weight = dualform.DualForm(run.model, memory).at(3).weights()["body.weight_ih_l0"]
    assert torch.equal(weight, model.body.weight_ih_l0)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "change",
    [
        parametrizations.weight_norm,
        parametrizations.spectral_norm,
        lambda body: prune.random_unstructured(body, "weight", 0.5),
        lambda body: prune.random_unstructured(body, "bias", 0.5),
    ],
    ids=["weight norm", "spectral norm", "pruning", "pruning of the bias"],
)
@pytest.mark.parametrize("when", [0, 2])
def test_a_layer_parametrized_while_it_is_recorded_is_never_silently_wrong(
    change: Callable[[nn.Module], Any], when: int, tmp_path: Path
) -> None:
    """It stops, or its weights are values from there on; what was before stays exact."""
    model = seeded(lambda: Body(nn.Linear(6, 6), called))
    optimizer, kept = SGD(model.parameters(), **RULE), []
    generator = torch.Generator().manual_seed(1)
    with (
        contextlib.suppress(dualform.RecordingError),
        dualform.record(model, tmp_path / "run"),
    ):
        for now in range(STEPS):
            if now == when:
                change(model.body)
            loss_of(model, generator).backward()
            optimizer.step()
            optimizer.zero_grad()
            kept.append(model.foot.weight.detach().clone())
    memory = dualform.Memory.open(tmp_path / "run")
    assert memory.steps >= when
    assert dualform.DualForm(None, memory).verify().passed
    for at in range(1, memory.steps + 1):
        assert torch.equal(weights_at(memory, "foot.weight", at), kept[at - 1])
    assert memory.steps == when or memory.parameters["body.weight"].keep == "values"
