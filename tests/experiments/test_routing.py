"""Each input chooses how much of the training to use: the same by brute force."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import dualform
import routing

TASKS = ["first", "second"]


@pytest.fixture(scope="module")
def memory(tmp_path_factory: pytest.TempPathFactory) -> dualform.Memory:
    """Two tasks, each with inputs of its own that come again and again."""
    path = tmp_path_factory.mktemp("routing") / "memory"
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 4)).double()
        inputs = torch.randn(2, 20, 6, dtype=torch.float64)
        inputs[1] += 1.0
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    generator = torch.Generator().manual_seed(1)
    with dualform.record(model, path) as recorder:
        for step in range(40):
            task = step // 20
            chosen = torch.randint(0, 20, (8,), generator=generator)
            recorder.tag(example=chosen + 20 * task, label=chosen % 4, task=TASKS[task])
            F.cross_entropy(model(inputs[task][chosen]), chosen % 4).backward()
            optimizer.step()
            optimizer.zero_grad()
    return dualform.Memory.open(path)


@pytest.mark.parametrize("name", ["0", "2"])
@pytest.mark.parametrize("k", [1, 10, 500])
@pytest.mark.parametrize("at_once", [7, 2048])
def test_cosines_are_those_of_all_patterns(
    memory: dualform.Memory, name: str, k: int, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(routing, "AT_ONCE", at_once)
    layer = memory.layer(name)
    assert (layer.distinct is not None) == (name == "0")  # the network's inputs are stored once
    generator = torch.Generator().manual_seed(2)
    queries = torch.randn(5, layer.in_features, generator=generator, dtype=torch.float64)
    alike = (F.normalize(queries) @ F.normalize(layer.keys).T).numpy()
    tasks: np.ndarray[Any, Any] = layer.patterns["task"]
    expected = np.stack(
        [np.sort(alike[:, tasks == task], axis=1)[:, -k:].mean(1) for task in TASKS], axis=1
    )
    found = routing.cosines(layer, queries, "task", TASKS, k)
    assert np.abs(found - expected).max() < 1e-12
