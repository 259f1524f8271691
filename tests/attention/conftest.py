"""Small recorded runs that keep their own history, and the same quantities by brute force."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import dualform

torch.set_num_threads(1)

CLASSES = 4


class Net(nn.Module):
    """Three linear layers, the last one without anything after it."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(6, 9)
        self.fc2 = nn.Linear(9, 7)
        self.fc3 = nn.Linear(7, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.fc3(torch.relu(self.fc2(torch.tanh(self.fc1(x)))))
        return output


@dataclass
class Run:
    """A recorded run with everything a test needs to compute the same thing another way."""

    model: nn.Module
    path: Path
    history: list[dict[str, Tensor]]
    inputs: Tensor
    labels: Tensor

    @property
    def memory(self) -> dualform.Memory:
        return dualform.Memory.open(self.path)

    @property
    def dual(self) -> dualform.DualForm:
        return dualform.DualForm(self.model, self.path)


def plain_sgd(parameters: Any, **settings: Any) -> torch.optim.Optimizer:
    """SGD with momentum and decay, unless other settings are asked for."""
    settings = {"lr": 0.2, "momentum": 0.9, "weight_decay": 1e-2} | settings
    return torch.optim.SGD(parameters, **settings)


Train = Callable[..., Run]


@pytest.fixture(scope="session")
def train(tmp_path_factory: pytest.TempPathFactory) -> Train:
    """Train and record: `train(steps=30, lr=0.1, momentum=0.9, clip=1.0, dtype=torch.float64)`.

    `rule` makes the optimizer, `penalty` is added to the loss, `options` are `dualform.record`'s.
    """

    def run(
        model: Callable[[], nn.Module] = Net,
        *,
        rule: Callable[..., torch.optim.Optimizer] = plain_sgd,
        penalty: Callable[[nn.Module], Tensor] | None = None,
        steps: int = 30,
        batch: int = 8,
        clip: float | None = 0.5,
        dtype: torch.dtype = torch.float64,
        warm: int = 0,
        options: dict[str, Any] | None = None,
        shape: tuple[int, ...] = (6,),
        **settings: Any,
    ) -> Run:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            net = model().to(dtype)
            inputs = torch.randn(40, *shape, dtype=dtype)
            labels = torch.randint(0, CLASSES, (40,))
        optimizer = rule(net.parameters(), **settings)
        generator = torch.Generator().manual_seed(1)
        history: list[dict[str, Tensor]] = []

        def keep() -> None:
            history.append({n: p.detach().clone() for n, p in net.named_parameters()})

        def step(recorder: dualform.Recorder | None = None, task: str = "") -> None:
            chosen = torch.randint(0, len(inputs), (batch,), generator=generator)
            if recorder is not None:
                recorder.tag(example=chosen, label=labels[chosen], task=task)
            output = net(inputs[chosen])
            output = output.reshape(batch, -1, CLASSES).mean(1)
            loss = F.cross_entropy(output, labels[chosen])
            (loss if penalty is None else loss + penalty(net)).backward()
            if clip is not None:
                nn.utils.clip_grad_norm_(net.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()

        for _ in range(warm):
            step()
        keep()
        path = tmp_path_factory.mktemp("run") / "memory"
        with dualform.record(net, path, **(options or {})) as recorder:
            for s in range(steps):
                step(recorder, "first" if s < steps // 2 else "second")
                keep()
        return Run(net, path, history, inputs, labels)

    return run


@pytest.fixture(scope="session")
def run(train: Train) -> Run:
    """Momentum, decay, clipping, a warm optimizer; float64, 30 steps of 8 patterns."""
    return train(warm=3)


def relative(one: Tensor, other: Tensor) -> float:
    one, other = one.detach().double(), other.detach().double()
    return float((one - other).abs().max()) / (float(other.abs().max()) or 1.0)


@pytest.fixture(scope="session")
def difference() -> Callable[[Tensor, Tensor], float]:
    """max|one − other| / max|other|."""
    return relative
