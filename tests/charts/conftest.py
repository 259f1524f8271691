"""A small recorded run with pictures for examples, and ways to look into a chart."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

import dualform
from dualform import charts

torch.set_num_threads(1)

CLASSES, EXAMPLES, STEPS, BATCH = 3, 12, 24, 6


@dataclass
class Run:
    """Two tasks, one after the other, on tiny pictures; keys and columns by brute force."""

    dual: dualform.DualForm
    images: dict[str, Tensor]

    @property
    def test(self) -> Tensor:
        return self.images["first"][:1].flatten(1) * 0.5 + 0.1

    @property
    def attention(self) -> dualform.Attention:
        return self.dual.attend(self.test)

    def layer(self, name: str) -> dualform.LayerMemory:
        return self.dual.memory.layer(name)

    def alpha(self, name: str) -> NDArray[np.float64]:
        """α = x·q of every pattern, from the stored keys alone."""
        query = self.attention[name].queries[0].numpy()
        product: NDArray[np.float64] = self.layer(name).keys.numpy() @ query
        return product

    def column(self, name: str, column: str) -> NDArray[Any]:
        found: NDArray[Any] = self.layer(name).patterns[column]
        return found


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(16, 10)
        self.fc2 = nn.Linear(10, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.fc2(torch.relu(self.fc1(x)))
        return output


@pytest.fixture(scope="session")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """24 steps of 6 patterns in float64: the tasks `first` and `second`, 3 classes, 12 examples."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Net().double()
        images = {task: torch.rand(EXAMPLES, 4, 4).double() for task in ("first", "second")}
    labels = torch.arange(EXAMPLES) % CLASSES
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.5)
    generator = torch.Generator().manual_seed(1)
    path = tmp_path_factory.mktemp("run") / "memory"
    with dualform.record(model, path) as recorder:
        for step in range(STEPS):
            task = "first" if step < STEPS // 2 else "second"
            chosen = torch.randperm(EXAMPLES, generator=generator)[:BATCH]
            recorder.tag(example=chosen, label=labels[chosen], task=task)
            optimizer.zero_grad()
            # raw pictures minus their mean: attention in the first layer has both signs
            inputs = images[task][chosen].flatten(1) - 0.5
            F.cross_entropy(model(inputs), labels[chosen]).backward()
            optimizer.step()
    return Run(dualform.DualForm(model, path), images)


@pytest.fixture(scope="session")
def rows_with() -> Callable[..., list[dict[str, Any]]]:
    """All rows of a chart's data that have some fields, layer by layer, in order."""

    def find(chart: Any, *fields: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []

        def walk(part: dict[str, Any]) -> None:
            rows = part.get("data", {}).get("values", [])
            found.extend(row for row in rows if set(fields) <= set(row))
            for inner in (*part.get("concat", []), *part.get("layer", [])):
                walk(inner)

        walk(chart.to_dict())
        return found

    return find


@pytest.fixture
def texts_of(tmp_path: Path) -> Callable[[Any], list[str]]:
    """Every text that the rendered picture shows."""

    def find(chart: Any) -> list[str]:
        svg = charts.save(chart, tmp_path / "chart.svg").read_text(encoding="utf-8")
        texts = re.findall(r"<text([^>]*)>(.*?)</text>", svg, re.DOTALL)
        visible = [text for style, text in texts if ' opacity="0"' not in style]
        parts = [re.sub(r"<[^>]+>", "\n", text).split("\n") for text in visible]
        return [text for some in parts for text in some if text]

    return find
