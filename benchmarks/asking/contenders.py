"""A recorded memory and every way to ask it: dualform's, the authors', torch's, numpy's, faiss'."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import dualform

WIDTH, BATCH, EXAMPLES, CLASSES, K = 800, 128, 20_000, 10, 500
LAYER = "2"


def images(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Images of ten classes, each a mean and forty directions to vary in."""
    shape = torch.Generator().manual_seed(1)
    means = torch.rand(CLASSES, 784, generator=shape)
    directions = 0.15 * torch.randn(CLASSES, 40, 784, generator=shape)
    labels = torch.randint(0, CLASSES, (count,), generator=generator)
    varied = torch.bmm(torch.randn(count, 1, 40, generator=generator), directions[labels])[:, 0]
    noise = 0.05 * torch.randn(count, 784, generator=generator)
    return (means[labels] + varied + noise).clamp(0, 1), labels


def recorded(path: Path, patterns: int, width: int, **options: Any) -> nn.Sequential:
    """Train and record the keys of the second layer."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(784, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=3e-3, momentum=0.9)
    generator = torch.Generator().manual_seed(2)
    inputs, labels = images(EXAMPLES, generator)
    settings = {"keep": {LAYER: "keys", "*": "values"}} | options
    with dualform.record(model, path, **settings) as recorder:
        for step in range(patterns // BATCH):
            batch = torch.randint(0, EXAMPLES, (BATCH,), generator=generator)
            task = "first" if step < patterns // BATCH // 2 else "second"
            recorder.tag(example=batch, label=labels[batch], task=task)
            nn.functional.cross_entropy(model(inputs[batch]), labels[batch]).backward()
            optimizer.step()
            optimizer.zero_grad()
    return model


def queries_for(model: nn.Sequential, count: int) -> Tensor:
    with torch.no_grad():
        hidden: Tensor = model[:2](images(count, torch.Generator().manual_seed(3))[0])
    return hidden


class Asked:
    """One memory and one set of queries, asked in every way there is."""

    def __init__(self, path: Path, queries: Tensor) -> None:
        self.memory = dualform.Memory.open(path)
        self.layer = self.memory.layer(LAYER)
        self.queries = queries
        self.keys = [b.keys for b in self.layer.blocks(4096, error_signals=False)]
        patterns = self.layer.patterns
        self.labels = torch.from_numpy(patterns["label"])
        self.examples = torch.from_numpy(patterns["example"])

    def spotlight(self, queries: Tensor | None = None) -> dualform.Spotlight:
        asked = self.queries if queries is None else queries
        return dualform.DualForm(None, self.memory).attend(queries=asked, layers=LAYER)[LAYER]

    def limit(self) -> None:
        """One product of all keys with all queries, streamed, its result thrown away."""
        for block in self.keys:
            if len(self.queries) == 1:
                torch.mv(block, self.queries[0])
            else:
                torch.mm(self.queries, block.T)

    def read(self) -> None:
        """Every number of every key once."""
        for block in self.keys:
            block.sum()

    def sgemm(self) -> None:
        """A product in the shape that suits a machine best."""
        square = self._square
        torch.mm(square, square)

    _square = torch.rand(2048, 2048)

    def top(self) -> dualform.Table:
        return self.spotlight().top(K)

    def everything(self) -> list[dualform.Table]:
        """Top patterns in all and per class, sums by class, per example and over time."""
        spotlight = self.spotlight()
        tables = [spotlight.top(K), spotlight.top(K, by="label"), spotlight.sum_by("label")]
        return [*tables, spotlight.by_example(), spotlight.over("step")]

    def torch(self) -> tuple[Tensor, Tensor]:
        found = torch.cat([self.queries @ block.T for block in self.keys], dim=1).topk(K)
        return found.values, found.indices

    def numpy(self) -> Any:
        keys, asked = self.keys, self.queries.numpy()
        weights = np.concatenate([asked @ block.numpy().T for block in keys], axis=1)
        best = np.argpartition(weights, -K, axis=1)[:, -K:]
        return np.take_along_axis(weights, best, axis=1)

    def authors(self) -> list[Tensor]:
        """The paper's code on these keys: chunks of a step, |α|, index_add, full sorts."""
        parts = [
            (self.queries @ block[low : low + BATCH].T).abs()
            for block in self.keys
            for low in range(0, len(block), BATCH)
        ]
        weights = torch.cat(parts, dim=1)
        per_example = torch.zeros(len(self.queries), EXAMPLES)
        per_example.index_add_(1, self.examples, weights)
        ordered = torch.sort(weights, dim=1, descending=True)
        answers = [ordered.values[:, :K], per_example]
        for label in range(CLASSES):
            inside = weights[:, self.labels == label]
            answers += [inside.sum(1), torch.sort(inside, dim=1, descending=True).values[:, :K]]
        return answers

    def authors_sums(self) -> Tensor:
        """Only what Table 1 needs: sums of |α| by class."""
        sums = torch.zeros(len(self.queries), CLASSES)
        start = 0
        for block in self.keys:
            for low in range(0, len(block), BATCH):
                weights = (self.queries @ block[low : low + BATCH].T).abs()
                sums.index_add_(1, self.labels[start : start + weights.shape[1]], weights)
                start += weights.shape[1]
        return sums


def agree(asked: Asked) -> None:
    """Nobody is compared before everybody gives the same answer (in float32)."""
    mine = asked.top()["weight"].reshape(len(asked.queries), -1)
    for other in (asked.torch()[0].numpy(), np.sort(asked.numpy(), axis=1)[:, ::-1]):
        assert np.allclose(mine, other, rtol=1e-4), "the contenders give different answers"
    sums = asked.spotlight().sum_by("label")["absolute"].reshape(-1, CLASSES)
    assert np.allclose(sums, asked.authors_sums().numpy(), rtol=1e-3)


def faiss_index(asked: Asked) -> Any:
    try:
        import faiss
    except ImportError:
        return None
    faiss.omp_set_num_threads(1)
    faiss.cvar.distance_compute_blas_threshold = 20
    index = faiss.IndexFlatIP(WIDTH)
    for block in asked.keys:
        index.add(block.numpy())
    return index
