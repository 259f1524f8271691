"""flush(): everything complete is on disk, at any place of a loop, and nothing else has changed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.recording.runs import (
    Training,
    backward,
    batch,
    plain,
    proved,
    state_of,
    update,
    verified,
)
from torch import Tensor
from torch.optim import SGD

from dualform.memory import Memory
from dualform.recording import record


def keys_of(*numbers: int) -> Tensor:
    return torch.cat([batch(number)[0] for number in numbers])


@pytest.mark.parametrize("options", [{}, {"every": 2}, {"keep": "keys"}, {"keep": "values"}])
def test_a_flush_before_the_update_loses_nothing(options: dict[str, Any], tmp_path: Path) -> None:
    model = plain()
    optimizer = SGD(model.parameters(), 0.1, momentum=0.9)
    with record(model, tmp_path / "run", **options) as recorder:
        for step in range(5):
            for micro in range(2):
                backward(model, 10 * step + micro)
                recorder.flush()
            optimizer.step()
            optimizer.zero_grad()
            recorder.flush()
            assert Memory.open(tmp_path / "run").steps == step + 1
    memory = Memory.open(tmp_path / "run")
    steps = range(0, 5, memory.every)
    for name in memory.layers:
        assert memory.layer(name).rows == 10 * len(steps)
    if memory.layers:
        numbers = [10 * step + micro for step in steps for micro in range(2)]
        assert torch.equal(memory.layer("0").keys, keys_of(*numbers))
    assert verified(memory, model).passed


@pytest.mark.parametrize("options", [{}, {"every": 2}, {"keep": "keys"}])
def test_a_flush_between_optimizers_that_take_turns_ends_a_step(
    options: dict[str, Any], tmp_path: Path
) -> None:
    model = plain()
    turns = [SGD(model[i].parameters(), 0.1, momentum=0.9) for i in (0, 2)]
    states = {0: state_of(model)}
    with record(model, tmp_path / "run", **options) as recorder:
        for step in range(6):
            update(model, turns[step % 2], step)
            model.zero_grad()
            recorder.flush()
            states[step + 1] = state_of(model)
            memory = Memory.open(tmp_path / "run")
            assert memory.steps == step + 1
            assert verified(memory).passed
    if not options:
        proved(tmp_path / "run", model, states)


def test_weights_are_not_flushed_while_others_are_in_their_place(tmp_path: Path) -> None:
    training = Training(layers=plain)
    with record(training.model, tmp_path / "run") as recorder:
        for step in range(6):
            training.step(step)
            own = state_of(training.model)
            training.model.load_state_dict({n: 0.9 * p for n, p in own.items()})
            recorder.flush()
            training.model.load_state_dict(own)
    memory = training.proved(tmp_path / "run")
    assert not memory.events
