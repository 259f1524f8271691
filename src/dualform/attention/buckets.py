"""Key sums over any ranges of steps, from sums over short stretches of training that are kept.

A timeline sums the keys of every range of steps and every group. Ranges differ from question to
question, and each table of sums takes a pass over all keys. So training is divided into stretches
of equal length once, *buckets*; a range is the sum of the buckets inside it and of the few patterns
in the buckets that its ends cut in two. Only those are read again.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dualform.attention.group_sums import build_sums, key_sums
from dualform.memory import LayerMemory

BUCKETS = 128
"""Stretches that training is divided into."""

LARGEST = 1 << 26
"""Bytes up to which a table of all buckets is worth having."""

Codes = NDArray[np.int64]


def are_worth_having(layer: LayerMemory, ranges: int, groups: int) -> bool:
    """Whether sums over so many ranges are better taken from buckets."""
    small = BUCKETS * groups * layer.in_features * 8 <= LARGEST
    return small and layer.distinct is None and 4 * ranges <= BUCKETS


def from_buckets(
    layer: LayerMemory,
    included: NDArray[np.bool_] | None,
    range_of: Codes,
    ranges: int,
    codes: Codes,
    groups: int,
) -> dict[str, Tensor]:
    """The table of key sums over `ranges` × `groups`, given each pattern's range and group."""
    steps = layer.patterns["step"]
    length = max(1, -(-int(steps.max(initial=0) + 1) // BUCKETS))
    bucket = steps // length
    fine = key_sums(layer, included, bucket * groups + codes, BUCKETS * groups)
    low, high = np.full(BUCKETS, ranges), np.full(BUCKETS, -1)
    rows = np.arange(layer.rows) if included is None else np.flatnonzero(included)
    np.minimum.at(low, bucket[rows], range_of[rows])
    np.maximum.at(high, bucket[rows], range_of[rows])
    inside = np.flatnonzero(low == high)
    cut = np.zeros(layer.rows, bool)
    cut[rows] = (low < high)[bucket[rows]]
    table = build_sums(layer, cut, range_of * groups + codes, ranges * groups)
    width = layer.in_features
    sums = fine.sums.reshape(BUCKETS, groups, width)[torch.from_numpy(inside)]
    table["sums"].view(ranges, groups, width).index_add_(0, torch.from_numpy(low[inside]), sums)
    return table | {"negative": torch.tensor([not fine.non_negative])}
