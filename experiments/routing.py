"""The mask the paper says does not exist in practice: each input chooses how much training to use.

A network trained on one task after another forgets the earlier ones: later patterns overwrite what
they wrote. Masking the later phase brings the earlier task back, but only if one knows which task
an input belongs to. The keys of the first layer tell: an input is most like the keys of its own
task. So per input, the phase whose keys are most like it is found (mean of the k largest cosines),
and what *later* phases wrote is left out. Earlier phases always stay: later ones built on them.

It is a mask like any other: the patterns that stay keep what they wrote. It is not retraining.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import normalize

import dualform

AT_ONCE = 2048
"""Keys that are compared with all queries at once."""


def cosines(
    layer: dualform.LayerMemory, queries: Tensor, by: str, phases: Sequence[Any], k: int = 10
) -> NDArray[np.float64]:
    """Mean of the k largest cosines of each query with the keys of each phase: [n, phases].

    Phases are values of the column `by`. A key that was met several times counts as often.
    """
    keys = layer.distinct  # where keys that recur are stored once, each is compared once
    count, number = layer.rows, np.arange(layer.rows)
    if keys is not None:
        count, number = keys.rows, keys.references
    column = layer.patterns[by]
    met = [torch.from_numpy(np.bincount(number[column == p], minlength=count)) for p in phases]
    dtype = torch.float64 if layer.dtype == torch.float64 else torch.float32
    asked = normalize(queries.to(dtype))
    none = torch.empty(len(asked), 0, dtype=dtype)
    found = [(none, none.long())] * len(phases)
    for start, block in _blocks(layer):
        alike = asked @ normalize(block.to(dtype)).T
        for i, visits in enumerate(met):
            here = visits[start : start + len(block)]
            seen = here > 0
            values = torch.cat([found[i][0], alike[:, seen]], dim=1)
            times = torch.cat([found[i][1], here[seen].expand(len(asked), -1)], dim=1)
            values, places = values.topk(min(k, values.shape[1]), dim=1)
            found[i] = values, times.gather(1, places)
    means = [_mean(values.double(), times, k) for values, times in found]
    return torch.stack(means, dim=1).numpy()


def _blocks(layer: dualform.LayerMemory) -> Any:
    """Where each block of keys begins, and the keys: different ones, or those of all patterns."""
    if layer.distinct is not None:
        yield from layer.distinct.blocks(AT_ONCE)
        return
    for block in layer.blocks(AT_ONCE, error_signals=False):
        yield block.start, block.keys


def _mean(values: Tensor, times: Tensor, k: int) -> Tensor:
    """The mean of the first k of values that count so many times, the largest first."""
    before = times.cumsum(1) - times
    taken = torch.minimum(times, (k - before).clamp(min=0)).double()
    return (values * taken).sum(1) / taken.sum(1)
