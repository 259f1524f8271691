"""Whom a layer's attention votes for: Table 1, and what the paper says beside it, as numbers.

A layer's *vote* for a test input is the class that gets the largest total attention, Σ|α| over all
patterns of the class (absolute values as in the paper; behind a ReLU no weight is negative anyway).
All percentages are of test inputs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

import dualform

Ints = NDArray[np.int64]
Reals = NDArray[np.float64]


def percent(condition: Any) -> float:
    """How many of a hundred; not a number if there are none to count."""
    values = np.asarray(condition, dtype=np.float64)
    return round(100 * float(values.mean()), 2) if values.size else float("nan")


def predicted(network: Any, images: Tensor) -> Ints:
    """The class that a network (or a dual form) puts first."""
    with torch.no_grad():
        return network(images).argmax(1).numpy()


def accuracy(network: Any, images: Tensor, labels: Tensor) -> float:
    """Percent of inputs classified right."""
    return percent(predicted(network, images) == labels.numpy())


def totals(
    spotlight: dualform.Spotlight, *by: str, signed: bool = False
) -> tuple[Reals, list[tuple[Any, ...]]]:
    """Σ|α| (or Σα) of every query over each group of patterns, [n, groups]; and the groups."""
    table, n = spotlight.sum_by(*by), len(spotlight.queries)
    sums = table["sum" if signed else "absolute"].reshape(n, -1)
    columns = [table[name][: sums.shape[1]].tolist() for name in by]
    return sums, list(zip(*columns, strict=True))


def votes(spotlight: dualform.Spotlight) -> Ints:
    """The class with the largest total attention, for every query."""
    sums, classes = totals(spotlight, "label")
    return np.array([label for (label,) in classes])[sums.argmax(1)]


def split(vote: Ints, target: Ints, output: Ints) -> dict[str, float]:
    """A row of Table 1: how often the vote is the target or the output, by who was right."""
    right = output == target
    return {
        "target, if wrong": percent(vote[~right] == target[~right]),
        "output, if wrong": percent(vote[~right] == output[~right]),
        "both, if right": percent(vote[right] == target[right]),
    }


def table1(dual: dualform.DualForm, images: Tensor, labels: Tensor) -> dict[str, Any]:
    """Table 1 of one network: a row per layer, and how many inputs it is about."""
    target, output = labels.numpy(), predicted(dual, images)
    attention = dual.attend(images)
    rows = {layer: split(votes(attention[layer]), target, output) for layer in attention}
    return {"wrong": int((output != target).sum()), "inputs": len(target), "layers": rows}


# Attention times the size of what was learned -----------------------------------------------------


def error_norms(layer: dualform.LayerMemory) -> Reals:
    """‖δ_t‖ of every pattern: the length of its error signal."""
    norms = [block.error_signals.double().norm(dim=1) for block in layer.blocks(4096)]
    return torch.cat(norms).numpy()


def weighted_votes(layer: dualform.LayerMemory, queries: Tensor) -> Ints:
    """Votes where each pattern's |α| is multiplied by the length of its error signal.

    Keys that recur are met once, with all their visits' lengths added up; where no weight can be
    negative, all patterns of a class are met at once, as the sum of their keys.
    """
    norms, labels = error_norms(layer), layer.patterns["label"]
    classes = int(labels.max()) + 1
    if layer.distinct is not None:
        size = np.zeros((layer.distinct.rows, classes))
        np.add.at(size, (layer.distinct.references, labels), norms)
        sums = torch.zeros(len(queries), classes, dtype=queries.dtype)
        for first, keys in layer.distinct.blocks(4096):
            here = torch.from_numpy(size[first : first + len(keys)]).to(queries.dtype)
            sums += (queries @ keys.to(queries.dtype).T).abs_() @ here
        return sums.argmax(1).numpy()
    by_class = torch.zeros(classes, layer.in_features, dtype=torch.float64)
    for block in layer.blocks(4096):
        rows = slice(block.start, block.start + block.rows)
        scaled = block.keys.double() * torch.from_numpy(norms[rows])[:, None]
        by_class.index_add_(0, torch.from_numpy(labels[rows]), scaled)
        if block.keys.min() < 0:
            raise ValueError(f"layer {layer.name} has negative keys that do not recur")
    return (queries.double() @ by_class.T).argmax(1).numpy()


# When, and which ----------------------------------------------------------------------------------


def steps_of_the_strongest(
    spotlight: dualform.Spotlight, k: int, steps: int, bins: int
) -> list[float]:
    """Percent of the k strongest patterns of each query that come from each part of training."""
    found = spotlight.top(k, sign="absolute")["step"]
    counts, _ = np.histogram(found, bins=bins, range=(0, steps))
    return [round(100 * float(count) / len(found), 3) for count in counts]


def key_lengths(layer: dualform.LayerMemory) -> Reals:
    """‖x_t‖ of every pattern: the length of its key."""
    blocks = layer.blocks(4096, error_signals=False)
    return torch.cat([block.keys.double().norm(dim=1) for block in blocks]).numpy()


def strongest_examples(
    spotlight: dualform.Spotlight, k: int, look: int = 500
) -> list[list[dict[str, Any]]]:
    """The k different training examples with the strongest visit, for every query."""
    found: list[dict[tuple[Any, int], dict[str, Any]]] = [{} for _ in spotlight.queries]
    for row in spotlight.top(look, sign="absolute").rows():
        mine = found[row.get("query", 0)]
        if len(mine) < k:
            mine.setdefault((row["task"], row["example"]), row)
    return [list(mine.values()) for mine in found]


def recurring(spotlight: dualform.Spotlight, k: int = 3, look: int = 80) -> list[dict[str, Any]]:
    """The training examples that are among the k strongest of the most queries."""
    lists = strongest_examples(spotlight, k, look)
    counts = Counter((row["task"], row["example"], row["label"]) for one in lists for row in one)
    return [
        {"task": task, "example": int(example), "label": int(label), "percent of inputs": share}
        for (task, example, label), count in counts.most_common(3)
        for share in [round(100 * count / len(lists), 1)]
    ]


def first(condition: Sequence[bool] | NDArray[np.bool_], rule: str) -> int:
    """The first test example of which something is true."""
    found = np.flatnonzero(condition)
    if not len(found):
        raise LookupError(f"no test example is {rule}")
    return int(found[0])
