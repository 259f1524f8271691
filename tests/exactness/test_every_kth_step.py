"""The patterns of every k-th step only: the other steps are part of the remainder, and said so."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.recording.runs import Training, backward, batch, plain, update, verified
from torch import nn
from torch.optim import SGD, AdamW

from dualform.certificate.replay import at
from dualform.certificate.report import KEPT
from dualform.errors import AuditError, QueryError, RecordingError
from dualform.memory import Memory
from dualform.recording import record

STEPS = 24


@pytest.mark.parametrize("kind", [SGD, AdamW])
def test_only_those_steps_have_patterns_and_kept_states_are_the_very_weights(
    kind: Any, tmp_path: Path
) -> None:
    training = Training(kind, {"lr": 0.01}, layers=plain)
    memory = training.record(tmp_path / "run", 0, STEPS, every=3)
    assert set(memory.layer("0").patterns["step"].tolist()) == set(range(0, STEPS, 3))
    inputs = torch.cat([batch(step)[0] for step in range(0, STEPS, 3)])
    assert torch.equal(memory.layer("0").keys, inputs)
    found = verified(memory, training.model)
    assert found.passed, found
    verdict = found.verdicts["0.weight"]
    assert (verdict.verdict, verdict.why) == (KEPT, "patterns of one of every 3 steps were kept")
    assert kind is AdamW or 0.2 < verdict.remainder < 1.5
    for step in memory.kept.steps("0.weight"):
        assert torch.equal(at(memory, "0.weight", step), training.kept[step][0]["0.weight"])
    with pytest.raises(
        QueryError, match=r"one of every 3 steps were kept\. They were kept at steps"
    ):
        at(memory, "0.weight", 5)


def halves(model: nn.Sequential) -> list[SGD]:
    return [SGD(model[i].parameters(), lr=0.1, momentum=0.9) for i in (0, 2)]


def weights_and_biases(model: nn.Sequential) -> list[SGD]:
    return [SGD([p for p in model.parameters() if p.dim() == d], lr=0.1) for d in (2, 1)]


@pytest.mark.parametrize("pair", [halves, weights_and_biases])
@pytest.mark.parametrize("every", [2, 3])
@pytest.mark.parametrize("period", [2, 3, 4])
@pytest.mark.parametrize("is_reset", [True, False])
def test_gradients_that_do_not_keep_to_a_step_raise_no_alarm(
    pair: Callable[..., list[SGD]], every: int, period: int, is_reset: bool, tmp_path: Path
) -> None:
    """The second optimizer moves every so many steps; its gradients are carried over, or reset."""
    model = plain()
    one, two = pair(model)
    with record(model, tmp_path / "run", every=every):
        for step in range(STEPS):
            backward(model, step)
            one.step()
            one.zero_grad()
            if step % period == period - 1:
                two.step()
            if is_reset or step % period == period - 1:
                two.zero_grad()
    memory = Memory.open(tmp_path / "run")
    assert set(memory.layer("0").patterns["step"].tolist()) <= set(range(0, memory.steps, every))
    found = verified(memory, model)
    assert found.passed, found
    assert found.verdict == KEPT
    assert not [event for event in memory.events if event.what == "unexplained"]


@pytest.mark.parametrize(("edited", "is_found"), [(9, True), (10, False)])
def test_an_edited_gradient_is_found_in_a_recorded_step_and_is_remainder_elsewhere(
    edited: int, is_found: bool, tmp_path: Path
) -> None:
    model = plain()
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)

    def train() -> None:
        with record(model, tmp_path / "run", every=3):
            for step in range(STEPS):
                backward(model, step)
                if step == edited:
                    model[0].weight.grad[0] += 0.01  # type: ignore[index]
                optimizer.step()
                optimizer.zero_grad()

    if is_found:
        with pytest.raises(AuditError, match=r"'0.weight'.*step 9"):
            train()
    else:
        train()
    memory = Memory.open(tmp_path / "run")
    assert memory.steps == (9 if is_found else STEPS)
    assert verified(memory, model).passed


@pytest.mark.parametrize("start", [10, 15])
def test_a_resumed_run_keeps_the_cadence_and_another_one_is_refused(
    start: int, tmp_path: Path
) -> None:
    training = Training(layers=plain)
    training.record(tmp_path / "run", 0, 18, every=3)
    training.load(start)
    with (
        pytest.raises(RecordingError, match="every=2 was given, and every=3 was recorded"),
        record(training.model, tmp_path / "run", every=2, resume=True),
    ):
        pass
    memory = training.record(tmp_path / "run", start, STEPS, every=3, resume=True)
    assert set(memory.layer("2").patterns["step"].tolist()) == set(range(0, STEPS, 3))
    assert verified(memory, training.model).passed


@pytest.mark.parametrize("every", [0, -1, 1.5, True, None])
def test_a_cadence_that_is_none_is_refused(tmp_path: Path, every: Any) -> None:
    with pytest.raises(RecordingError, match="expected a whole number"):
        record(plain(), tmp_path, every=every)


def test_skipped_steps_count_for_neither(tmp_path: Path) -> None:
    model = plain()
    optimizer = SGD(model.parameters(), lr=0.1)
    with record(model, tmp_path / "run", every=2):
        for step in range(STEPS):
            if step % 3 == 1:  # as a loss scaler does that met an overflow
                backward(model, step + 99)
                optimizer.zero_grad()
            update(model, optimizer, step)
    keys = torch.cat([batch(step)[0] for step in range(0, STEPS, 2)])
    assert torch.equal(Memory.open(tmp_path / "run").layer("0").keys, keys)
