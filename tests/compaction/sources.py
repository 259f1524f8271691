"""Recorded memories of every kind that a conversion may meet, small and deterministic.

`SOURCES` lists functions that record one into a directory. What a conversion must not change is
what a memory rebuilds, so no other reference is needed.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.memory.runs import train
from tests.memory.tampering import read_manifest, write_manifest
from torch import Tensor, nn
from torch.nn import functional as F

import dualform as df


class Net(nn.Module):
    """Three linear layers; the first sees small and large inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2, self.fc3 = nn.Linear(6, 9), nn.Linear(9, 7), nn.Linear(7, 4)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.fc3(torch.relu(self.fc2(torch.tanh(self.fc1(x)))))
        return output


class Tied(nn.Module):
    """Two layers with one weight and a bias each, and a third."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.head = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 4)
        self.two.weight = self.one.weight

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.head(torch.tanh(self.two(torch.tanh(self.one(x)))))
        return output


class Functional(nn.Module):
    """A weight used by a function: its layer is called as the parameter is. A bias never used."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.head = nn.Linear(6, 6), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.head(torch.tanh(F.linear(x, self.fc.weight)))
        return output


class Attending(nn.Module):
    """A packed projection: several layers in one parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.attn = nn.MultiheadAttention(6, 2, batch_first=True)
        self.head = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        seen, _ = self.attn(x, x.flip(1), x.flip(1), need_weights=False)
        output: Tensor = self.head(seen.mean(1))
        return output


class Idle(Net):
    """A layer that is used at some steps only."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.fc1(x))
        if float(x.sum()) > 0:
            hidden = F.pad(self.fc2(hidden), (0, 2))
        output: Tensor = self.fc3(hidden[:, :7])
        return output


def build(model: Callable[[], nn.Module], dtype: torch.dtype, **settings: Any) -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        net = model().to(dtype)
    settings = {"lr": 0.2, "momentum": 0.9, "weight_decay": 1e-2} | settings
    return net, torch.optim.SGD(net.parameters(), **settings)


def batches(
    start: int, steps: int, shape: tuple[int, ...], period: int = 1000
) -> Iterator[tuple[Tensor, Tensor]]:
    for step in range(start, start + steps):
        generator = torch.Generator().manual_seed(step % period)
        inputs = torch.randn(8, *shape, generator=generator, dtype=torch.float64)
        yield inputs, torch.randint(0, 4, (8,), generator=generator)


def record(
    path: Path,
    model: Callable[[], nn.Module] = Net,
    *,
    precision: torch.dtype = torch.float64,
    steps: int = 20,
    shape: tuple[int, ...] = (6,),
    tagged: bool = True,
    carry: int = 1,
    more: int = 0,
    period: int = 1000,
    clip: float = 0.5,
    settings: dict[str, Any] | None = None,
    **options: Any,
) -> nn.Module:
    """Train and record; `carry`: gradients are kept over so many steps; `more`: resumed steps;
    `period`: after so many steps the same inputs come again."""
    net, optimizer = build(model, precision, **(settings or {}))
    options = {"segment_bytes": 16_000} | options
    for start, count, resume in ((0, steps, False), (steps, more, True)):
        if not count and resume:
            continue
        with df.record(net, optimizer, path, resume=resume, **options) as recorder:
            for i, (inputs, labels) in enumerate(batches(start, count, shape, period)):
                if tagged:
                    recorder.tag(example=labels + 10 * i, label=labels, task=f"task {i // 7}")
                F.cross_entropy(net(inputs.to(precision)), labels).backward()
                nn.utils.clip_grad_norm_(net.parameters(), clip)
                optimizer.step()
                if i % carry == carry - 1:
                    optimizer.zero_grad()
    return net


def crashed(path: Path) -> None:
    """A recording that died three steps after its last commit."""
    record(path)
    manifest = read_manifest(path)
    write_manifest(path, manifest | {"closed": False})
    steps = manifest["steps"] + 3
    (path / "progress").write_bytes(struct.pack("<qq", steps, ~steps))


def not_exact(path: Path) -> None:
    """A run that was edited by hand half way."""
    net, optimizer = build(Net, torch.float64)
    recorder = df.record(net, optimizer, path, audit="warn", segment_bytes=14_000)
    with pytest.warns(UserWarning, match="not exact"), recorder:  # noqa: PT031
        for i, (inputs, labels) in enumerate(batches(0, 12, (6,))):
            F.cross_entropy(net(inputs), labels).backward()
            optimizer.step()
            optimizer.zero_grad()
            if i == 5:
                with torch.no_grad():
                    net.fc1.weight += 0.1


SOURCES: dict[str, Callable[[Path], Any]] = {
    "several segments": record,
    "float32": lambda path: record(path, precision=torch.float32),
    "norms, buffers, strings": lambda path: train(path, 13, segment_bytes=12_000),
    "resumed": lambda path: record(path, more=9),
    "recurring inputs": lambda path: record(path, period=5),
    "untagged": lambda path: record(path, tagged=False),
    "keys alone": lambda path: record(path, error_signals=["fc2"]),
    "float16": lambda path: record(path, precision=torch.float32, dtype="float16"),
    "accumulated": lambda path: record(path, error_signals=False, step_budget=0, snapshot_every=5),
    "one layer": lambda path: record(path, layers="fc2"),
    "tied": lambda path: record(path, Tied),
    "functional": lambda path: record(path, Functional),
    "packed": lambda path: record(path, Attending, shape=(3, 6)),
    "idle layer": lambda path: record(path, Idle),
    "carried gradients": lambda path: record(path, carry=3, clip=1e9),
    "crashed": crashed,
    "trained in bfloat16": lambda path: record(path, precision=torch.bfloat16),
}
