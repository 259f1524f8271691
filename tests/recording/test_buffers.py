"""Buffers are those of every step, also where torch counts no change in place (BatchNorm)."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

from dualform.memory import Memory
from dualform.recording import record


def test_running_statistics_are_those_of_every_step(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    states = [{name: value.clone() for name, value in model.named_buffers()}]
    with record(model, optimizer, tmp_path / "run"):
        for _ in range(5):
            F.cross_entropy(model(torch.randn(16, 6)), torch.randint(0, 3, (16,))).backward()
            optimizer.step()
            optimizer.zero_grad()
            states.append({name: value.clone() for name, value in model.named_buffers()})
    memory = Memory.open(tmp_path / "run")
    assert not torch.equal(states[0]["1.running_mean"], states[1]["1.running_mean"])
    for step, state in enumerate(states):
        for name, value in state.items():
            assert torch.equal(memory.buffer(name, step), value), (step, name)
