"""Attention summed over groups of patterns, without looking at the patterns again.

Attention is linear in the key: Σ_{t in g} x_t·q = (Σ_{t in g} x_t)·q. So one table of key sums, a
row per group, answers every query at the cost of a tiny product, however long the training was. The
sum of absolute values, the paper's choice, is the same number wherever no weight is negative:
behind ReLUs, or for images, where neither keys nor query have negative entries. Only where signs
are mixed must all patterns be met again.

A table takes one pass over the keys; the last few are kept as long as the memory is open.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dualform.attention import engine
from dualform.memory import LayerMemory

TABLES_KEPT = 8
"""How many tables are kept per layer: a table is as large as a weight of as many rows as groups."""


class KeySums(NamedTuple):
    """Σ x over each group [groups, d_in], float64; whether no key has a negative entry."""

    sums: Tensor
    non_negative: bool


_tables: WeakKeyDictionary[LayerMemory, dict[bytes, KeySums]] = WeakKeyDictionary()


def group_sums(
    layer: LayerMemory,
    queries: Tensor,
    included: NDArray[np.bool_] | None,
    codes: NDArray[np.int64],
    groups: int,
) -> tuple[Tensor, Tensor]:
    """Σ α and Σ |α| over the patterns of each group: [n, groups] twice, float64."""
    if layer.kind == "embedding":
        counts = _token_counts(layer, queries, included, codes, groups)
        return counts, counts
    table = key_sums(layer, included, codes, groups)
    signed = queries @ table.sums.T
    mixed = torch.ones(len(queries), dtype=torch.bool)
    if table.non_negative:
        mixed = (queries < 0).any(dim=1)
    absolute = signed.clone()
    if bool(mixed.any()):
        absolute[mixed] = _absolute(layer, queries[mixed], included, codes, groups)
    return signed, absolute


def key_sums(
    layer: LayerMemory,
    included: NDArray[np.bool_] | None,
    codes: NDArray[np.int64],
    groups: int,
) -> KeySums:
    """The table of key sums of these groups, built in one pass or taken from the last few."""
    kept = _tables.setdefault(layer, {})
    name = _name(included, codes, groups)
    if name not in kept:
        built = _build(layer, included, codes, groups)
        while len(kept) >= TABLES_KEPT:
            del kept[next(iter(kept))]
        kept[name] = built
    return kept[name]


def _name(included: NDArray[np.bool_] | None, codes: NDArray[np.int64], groups: int) -> bytes:
    digest = blake2b(codes.tobytes(), digest_size=16)
    digest.update(b"all" if included is None else np.packbits(included).tobytes())
    digest.update(str(groups).encode())
    return digest.digest()


def _build(
    layer: LayerMemory,
    included: NDArray[np.bool_] | None,
    codes: NDArray[np.int64],
    groups: int,
) -> KeySums:
    sums = torch.zeros(groups, layer.in_features, dtype=torch.float64)
    lowest = 0.0
    for rows, keys in engine.key_blocks(layer, included):
        code = codes[rows]
        if (np.diff(code) < 0).any():  # each group's rows together: then they are plain sums
            ordered = np.argsort(code, kind="stable")
            code, keys = code[ordered], keys[torch.from_numpy(ordered)]
        starts = np.flatnonzero(np.diff(code, prepend=-1))
        for start, stop in zip(starts, [*starts[1:], len(code)], strict=True):
            sums[code[start]] += keys[start:stop].sum(0, dtype=torch.float64)
        lowest = min(lowest, float(keys.min())) if keys.numel() else lowest
    return KeySums(sums, lowest >= 0.0)


def _absolute(
    layer: LayerMemory,
    queries: Tensor,
    included: NDArray[np.bool_] | None,
    codes: NDArray[np.int64],
    groups: int,
) -> Tensor:
    """Σ |α| where signs are mixed: all patterns, block by block."""
    total = torch.zeros(len(queries), groups, dtype=torch.float64)
    for part, alpha in engine.attention_blocks(layer, queries, included):
        total.index_add_(1, torch.from_numpy(codes[part.rows]), alpha.abs())
    return total


def _token_counts(
    layer: LayerMemory,
    queries: Tensor,
    included: NDArray[np.bool_] | None,
    codes: NDArray[np.int64],
    groups: int,
) -> Tensor:
    """An embedding: how many patterns of each group are of the query's token."""
    tokens = layer.keys[:, 0].numpy()
    counts = np.zeros((len(queries), groups))
    for count, token in zip(counts, queries[:, 0].long().tolist(), strict=True):
        same = tokens == token if included is None else (tokens == token) & included
        count += np.bincount(codes[same], minlength=groups)
    return torch.from_numpy(counts)
