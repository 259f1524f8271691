"""What hides its patterns is refused by name; left out by choice, it is rebuilt from its steps."""

from __future__ import annotations

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

import dualform as df

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
    "an LSTM": (lambda: Body(nn.LSTM(6, 6), first), r"module 'body' is an nn.LSTM"),
    "a GRU": (lambda: Body(nn.GRU(6, 6, batch_first=True), first), r"'body' is an nn.GRU"),
    "an RNN": (lambda: Body(nn.RNN(6, 6), first), r"'body' is an nn.RNN"),
    "weight norm": (
        lambda: Body(parametrizations.weight_norm(nn.Linear(6, 6)), called),
        r"module 'body' has a parametrized weight",
    ),
    "old weight norm": (lambda: Body(old_weight_norm(), called), r"has a parametrized weight"),
    "pruning": (lambda: Body(pruned(), called), r"has a parametrized weight"),
    "a compiled module": (
        lambda: Body(torch.compile(nn.Linear(6, 6), backend="aot_eager"), called),
        r"module 'body' is compiled \(torch.compile\)",
    ),
    "a module compiled in place": (lambda: Body(compiled_in_place(), called), r"is compiled"),
    "a compiled forward": (lambda: Body(compiled_forward(), called), r"is compiled"),
}

AT_FIRST_USE: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "a reentrant checkpoint": (
        lambda: Body(nn.Sequential(nn.Linear(6, 6), nn.Tanh()), reentrant),
        r"layer 'body.0' was called inside a running backward pass.*use_reentrant=False",
    ),
    "attention in a reentrant checkpoint": (
        lambda: Body(nn.TransformerEncoderLayer(6, 2, 8, 0.0, batch_first=True), reentrant),
        r"layer 'body\..*' was called inside a running backward pass.*use_reentrant=False",
    ),
}


def loss_of(model: nn.Module, generator: torch.Generator) -> Tensor:
    x = torch.randn(4, 3, 8, generator=generator, dtype=torch.float64)
    return model(x.to(next(model.parameters()).dtype)).square().mean()


def seeded(build: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(5)
    return build().double()


def train(run: Any) -> None:
    optimizer = SGD(run.model.parameters(), **RULE)
    with run.recording(optimizer):
        for _ in range(STEPS):
            run.loss().backward()
            clip_grad_norm_(run.model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
            run.keep()


@pytest.mark.parametrize("name", [*OPAQUE, *AT_FIRST_USE])
def test_what_hides_its_patterns_is_refused_by_name(name: str, new_run: Any) -> None:
    build, message = (OPAQUE | AT_FIRST_USE)[name]
    run = new_run(seeded(build), loss_of, torch.float64)
    with pytest.raises(df.RecordingError, match=message) as refused:
        train(run)
    assert "layers=" in str(refused.value)
    if name in OPAQUE:
        assert 'layers=["foot", "head"]' in str(refused.value)
        assert not run.path.exists()


@pytest.mark.filterwarnings("ignore")  # dynamo raises many of its own
@pytest.mark.parametrize("name", [*OPAQUE, *AT_FIRST_USE])
def test_left_out_by_choice_it_is_rebuilt_from_its_steps(
    name: str, new_run: Any, certify: Any
) -> None:
    build, _ = (OPAQUE | AT_FIRST_USE)[name]
    run = new_run(seeded(build), loss_of, torch.float64, layers=["foot", "head"])
    train(run)
    memory = certify(run)
    coverage = {n: p.coverage for n, p in memory.parameters.items()}
    assert {c for n, c in coverage.items() if n.startswith("body")} == {"steps"}
    assert {c for n, c in coverage.items() if not n.startswith("body")} == {"patterns"}


def test_no_layer_at_all_may_be_chosen(new_run: Any, certify: Any) -> None:
    run = new_run(seeded(lambda: Body(nn.LSTM(6, 6), first)), loss_of, torch.float64, layers=[])
    train(run)
    memory = certify(run)
    assert memory.layers == ()
    assert {p.coverage for p in memory.parameters.values()} == {"steps"}


def test_a_choice_that_reaches_into_it_is_refused(new_run: Any) -> None:
    run = new_run(seeded(OPAQUE["an LSTM"][0]), loss_of, torch.float64, layers="*")
    with pytest.raises(df.RecordingError, match=r"module 'body' is an nn.LSTM"):
        train(run)


def test_what_is_not_trained_is_not_refused(new_run: Any, certify: Any) -> None:
    model = seeded(OPAQUE["an LSTM"][0])
    model.body.requires_grad_(False)
    run = new_run(model, loss_of, torch.float64)
    train(run)
    assert certify(run).parameters["body.weight_ih_l0"].coverage == "untrained"


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (parametrizations.weight_norm, "weight"),
        (parametrizations.spectral_norm, "weight"),
        (lambda body: prune.random_unstructured(body, "weight", 0.5), "weight"),
        (lambda body: prune.random_unstructured(body, "bias", 0.5), "bias"),
    ],
    ids=["weight norm", "spectral norm", "pruning", "pruning of the bias"],
)
@pytest.mark.parametrize("step", [0, 2])
def test_a_layer_parametrized_while_it_is_recorded_is_refused_by_name(
    change: Callable[[nn.Module], Any], what: str, step: int, tmp_path: Path
) -> None:
    model = seeded(lambda: Body(nn.Linear(6, 6), called))
    optimizer = SGD(model.parameters(), **RULE)
    generator = torch.Generator().manual_seed(1)
    message = rf"layer 'body': its {what} was a parameter when recording began and is none now"
    with (
        pytest.raises(df.RecordingError, match=message) as refused,
        df.record(model, optimizer, tmp_path / "run"),
    ):
        for now in range(STEPS):
            if now == step:
                change(model.body)
            loss_of(model, generator).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert "layers=" in str(refused.value)
    assert df.Memory.open(tmp_path / "run").steps == step
