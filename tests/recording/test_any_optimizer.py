"""Any optimizer is recorded: torch's own, and classes that dualform was never told of."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.recording.rules import Chance, GlobalNorm, Lion, OwnAdamW, ScheduleFree
from tests.recording.runs import Training, plain, proved, state_of, verified
from torch import nn
from torch.nn import functional as F
from torch.optim import (
    ASGD,
    LBFGS,
    SGD,
    Adadelta,
    Adagrad,
    Adam,
    Adamax,
    AdamW,
    NAdam,
    RAdam,
    RMSprop,
    Rprop,
    SparseAdam,
)  # fmt: skip

from dualform.certificate.checks import verify
from dualform.certificate.replay import at
from dualform.certificate.report import KEPT
from dualform.errors import QueryError
from dualform.recording import record

NESTEROV = {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}
REPLAYED: dict[str, tuple[Any, dict[str, Any]]] = {
    "SGD": (SGD, NESTEROV),
    "SGD, a tensor's lr": (SGD, {"lr": torch.tensor(0.1), "foreach": False}),
    "SGD fused": (SGD, {"lr": 0.1, "momentum": 0.9, "fused": True}),
    "Adam": (Adam, {"lr": 0.01, "amsgrad": True, "weight_decay": 0.1}),
    "Adam foreach": (Adam, {"lr": 0.01, "foreach": True}),
    "Adam capturable": (Adam, {"lr": torch.tensor(0.01), "foreach": False}),
    "AdamW": (AdamW, {"lr": 0.01}),
    "AdamW fused": (AdamW, {"lr": 0.01, "fused": True}),
    "AdamW, a subclass": (OwnAdamW, {"lr": 0.01}),
    "NAdam": (NAdam, {"lr": 0.01}),
    "RAdam": (RAdam, {"lr": 0.01}),
    "RMSprop": (RMSprop, {"lr": 0.01, "momentum": 0.5, "centered": True}),
    "Adagrad": (Adagrad, {"lr": 0.05, "initial_accumulator_value": 0.1}),
    "Adadelta": (Adadelta, {"lr": 1.0}),
    "Adamax": (Adamax, {"lr": 0.01}),
    "ASGD": (ASGD, {"lr": 0.05}),
    "Rprop": (Rprop, {"lr": 0.01}),
    "Lion": (Lion, {"lr": 0.003}),
    "schedule-free": (ScheduleFree, {"lr": 0.05}),
}
ONLY_KEPT: dict[str, tuple[Any, dict[str, Any]]] = {
    "a global norm": (GlobalNorm, {"lr": 0.1}),
    "noise": (Chance, {"lr": 0.1}),
    "LBFGS": (LBFGS, {"lr": 0.1, "max_iter": 3}),
}
LINEAR = ("SGD", "Adam", "NAdam", "RMSprop", "Adagrad", "Adadelta")
STEPS = 9


def made(chosen: tuple[Any, dict[str, Any]], layers: Callable[[], nn.Module] = plain) -> Training:
    return Training(*chosen, layers=layers)


@pytest.mark.parametrize("name", REPLAYED)
def test_every_step_is_rebuilt_to_the_bit(name: str, tmp_path: Path) -> None:
    alone, training = made(REPLAYED[name]), made(REPLAYED[name])
    for number in range(STEPS):
        alone.step(number)
    training.record(tmp_path / "run", 0, STEPS)
    for mine, theirs in zip(training.model.parameters(), alone.model.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    memory = training.proved(tmp_path / "run")
    is_linear = name.startswith(LINEAR) and not name.startswith("Adamax")
    assert len(memory.remarks) == (0 if is_linear else 1)  # and that one says what it cannot do
    assert all("contributions and masks do not reach" in remark for remark in memory.remarks)


@pytest.mark.filterwarnings("ignore:dualform")
@pytest.mark.parametrize("name", ONLY_KEPT)
def test_what_cannot_be_replayed_is_values_by_name(name: str, tmp_path: Path) -> None:
    training = made(ONLY_KEPT[name])
    memory = training.record(tmp_path / "run", 0, STEPS)
    kind = type(training.optimizer).__name__
    assert {p.keep for p in memory.parameters.values()} == {"values"}
    assert any(kind in remark for remark in memory.remarks)
    found = verified(memory, training.model)
    assert (found.passed, found.verdict) == (True, KEPT)
    assert kind in repr(found)
    for step, (state, _) in training.kept.items():
        for parameter in memory.parameters:
            if step in memory.kept.steps(parameter):
                assert torch.equal(at(memory, parameter, step), state[parameter])
            else:
                with pytest.raises(QueryError, match="kept at steps"):
                    at(memory, parameter, step)
    assert {0, 1, STEPS} <= set(memory.kept.steps("0.bias"))


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon")
def test_muon_beside_adamw(tmp_path: Path) -> None:
    model = plain()
    weights = [p for p in model.parameters() if p.dim() == 2]
    biases = [p for p in model.parameters() if p.dim() == 1]
    both = torch.optim.Muon(weights, lr=0.01), AdamW(biases, lr=0.01)
    states = {0: state_of(model)}
    with record(model, tmp_path / "run"):
        for step in range(STEPS):
            F.cross_entropy(model(torch.randn(5, 6)), torch.arange(5) % 4).backward()
            for optimizer in both:
                optimizer.step()
                optimizer.zero_grad()
            states[step + 1] = state_of(model)
    proved(tmp_path / "run", model, states)


@pytest.mark.filterwarnings("ignore:dualform")
def test_sparse_adam_has_kept_states_alone(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Embedding(9, 4, sparse=True), nn.Linear(4, 2))
    both = SparseAdam(model[0].parameters(), lr=0.01), SGD(model[1].parameters(), lr=0.1)
    with record(model, tmp_path / "run"):
        for _ in range(STEPS):
            model(torch.randint(0, 9, (5,))).square().mean().backward()
            for optimizer in both:
                optimizer.step()
                optimizer.zero_grad()
    found = verified(tmp_path / "run", model)
    assert found.passed, found
    assert found.verdicts["0.weight"].verdict == KEPT
    assert found.verdicts["1.weight"].verdict == "bit for bit"


def test_a_class_from_elsewhere_is_handed_in_and_never_imported(tmp_path: Path) -> None:
    training = made(REPLAYED["Lion"])
    memory = training.record(tmp_path / "run", 0, STEPS)
    found = verify(memory, training.model)
    assert found.verdict == KEPT
    assert "optimizer=Lion" in repr(found)
    assert verify(memory, training.model, optimizer=Lion).verdict == "bit for bit"


@pytest.mark.parametrize("name", [*REPLAYED, *ONLY_KEPT])
@pytest.mark.filterwarnings("ignore:dualform")
def test_a_run_goes_on_from_any_recorded_step(name: str, tmp_path: Path) -> None:
    training = made((REPLAYED | ONLY_KEPT)[name])
    training.record(tmp_path / "run", 0, 6)
    for start in (6, 4):
        training.load(start)
        memory = training.record(tmp_path / "run", start, 8, resume=True)
        assert [phase.first_step for phase in memory.phases][-1] == start
        assert verified(memory, training.model).passed
