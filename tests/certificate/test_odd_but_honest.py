"""Honest runs that were refuted or stopped once: none of them may be again."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD

from dualform.certificate import verify
from dualform.certificate.report import BITS
from dualform.memory import Memory
from dualform.recording import record


class Averaged(nn.Module):
    """A norm whose gradient is a long sum of numbers of one sign."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.norm, self.head = nn.Linear(32, 64), nn.LayerNorm(64), nn.Linear(64, 5)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.head(self.norm(self.wide(x)).mean(1))
        return output


def test_norms_whose_gradients_add_up_are_no_alarm(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    for seed in range(5):
        torch.manual_seed(seed)
        model = Averaged()
        optimizer = SGD(model.parameters(), lr=1e-3)
        with record(model, tmp_path / str(seed)):
            for _ in range(3):
                output = model(torch.randn(16, 80, 32))
                (output * torch.rand_like(output)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        assert verify(Memory.open(tmp_path / str(seed)), model, every_step=True).passed


def test_an_optimizer_that_moves_every_third_step_adds_passes_as_they_came(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 9), nn.Tanh(), nn.Linear(9, 4))
    fast, slow = SGD(model[0].parameters(), lr=0.1), SGD(model[2].parameters(), lr=0.1)
    with record(model, tmp_path / "run"):
        for i in range(30):
            F.cross_entropy(model(torch.randn(6, 7)), torch.randint(0, 4, (6,))).backward()
            fast.step()
            fast.zero_grad()
            if i % 3 == 2:
                slow.step()
                slow.zero_grad()
    found = verify(Memory.open(tmp_path / "run"), model, every_step=True)
    assert {v.verdict for v in found.verdicts.values()} == {BITS}, found


def test_a_run_that_died_is_compared_with_the_marks_of_its_last_update(tmp_path: Path) -> None:
    """What it kept last lies before its end: no state says what the model was, but marks do."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 9), nn.Tanh(), nn.Linear(9, 4))
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    recorder = record(model, tmp_path / "run")
    with recorder:
        for i in range(70):
            F.cross_entropy(model(torch.randn(6, 7)), torch.randint(0, 4, (6,))).backward()
            optimizer.step()
            optimizer.zero_grad()
            if i == 68:  # a commit as a full segment makes it, without keeping a state
                recorder._commit()
                recorder._parts.sink.wait()
                died = Memory.open(tmp_path / "run")
                found = verify(died, model, every_step=True)
    assert died.kept.steps("0.weight")[-1] < died.steps == 69
    assert found.passed, found
    assert not verify(died, model).passed  # it has learned on
