"""Attention summed over groups of patterns, without looking at the patterns again.

Attention is linear in the key: Σ_{t in g} x_t·q = (Σ_{t in g} x_t)·q. So one table of key sums, a
row per group, answers every query at the cost of a tiny product, however long the training was. The
sum of absolute values, the paper's choice, is the same number wherever no weight is negative:
behind ReLUs, or for images, where neither keys nor query have negative entries. Only where signs
are mixed must the patterns be met again, and there keys that recur are met once (`recurring.py`).

A table takes one pass over the keys and is then kept (`tables.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from hashlib import blake2b
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dualform.attention import engine
from dualform.attention.compiled import AT_ONCE, kernels
from dualform.attention.recurring import recurring_keys
from dualform.attention.tables import kept
from dualform.attention.weights import CACHED
from dualform.memory import LayerMemory

QUERIES_AT_ONCE = 256
"""Queries per matrix product: a block's weights stay small."""

LARGEST_TABLE = 1 << 28
"""Bytes up to which a table is worth having; more groups than that are summed as they stream."""

MOST_COUNTS = 1 << 24
"""Distinct keys × groups up to which it is counted how often each group met each key."""

MANY_GROUPS = 64
"""Groups from which on rows are added one by one instead of by a matrix product."""


Build = Callable[[], dict[str, Tensor]]


class KeySums(NamedTuple):
    """Σ x over each group [groups, d_in], float64; whether no key has a negative entry."""

    sums: Tensor
    non_negative: bool


def group_sums(
    layer: LayerMemory,
    queries: Tensor,
    included: NDArray[np.bool_] | None,
    codes: NDArray[np.int64],
    groups: int,
    build: Build | None = None,
) -> tuple[Tensor, Tensor]:
    """Σ α and Σ |α| over the patterns of each group: [n, groups] twice, float64.

    Queries may be of any precision: they are widened a few at a time. `build` is a shorter way to
    the table of key sums, if there is one.
    """
    if engine.looks_up(layer):
        counts = _token_counts(layer, queries, included, codes, groups)
        return counts, counts
    if groups * layer.in_features * 8 > LARGEST_TABLE:
        return _streamed(layer, queries.double(), included, codes, groups)
    table = key_sums(layer, included, codes, groups, build)
    signed = torch.empty(len(queries), groups, dtype=torch.float64)
    mixed = torch.ones(len(queries), dtype=torch.bool)
    room = engine.Room(torch.float64)
    for low in range(0, len(queries), QUERIES_AT_ONCE):
        here = slice(low, low + QUERIES_AT_ONCE)
        wide = room.converted(queries[here])
        signed[here] = torch.mm(table.sums, wide.T).T
        if table.non_negative:
            mixed[here] = wide.amin(1) < 0
    absolute = signed.clone()
    if bool(mixed.any()):
        asked = queries[mixed].double()
        absolute[mixed] = _absolute(layer, asked, included, codes, groups)
    return signed, absolute


def sums_of_held(
    held: engine.Reals, included: NDArray[np.bool_] | None, codes: NDArray[np.int64], groups: int
) -> tuple[Tensor, Tensor]:
    """The same from weights that are all known, [n, T], zero where a pattern is not included."""
    inside = slice(None) if included is None else np.flatnonzero(included)
    signed, absolute = np.zeros((2, len(held), groups))
    for i, line in enumerate(held):
        signed[i] = np.bincount(codes[inside], line[inside], groups)
        absolute[i] = signed[i]
        if line.min(initial=0.0) < 0:
            absolute[i] = np.bincount(codes[inside], np.abs(line[inside]), groups)
    return torch.from_numpy(signed), torch.from_numpy(absolute)


def key_sums(
    layer: LayerMemory,
    included: NDArray[np.bool_] | None,
    codes: NDArray[np.int64],
    groups: int,
    build: Build | None = None,
) -> KeySums:
    """The table of key sums of these groups, built in one pass or taken from those kept."""
    about = f"key sums of {groups} groups {_digest(included, codes, groups)}"
    table = kept(layer, about, build or (lambda: build_sums(layer, included, codes, groups)))
    return KeySums(table["sums"], not bool(table["negative"]))


def _digest(included: NDArray[np.bool_] | None, codes: NDArray[np.int64], groups: int) -> str:
    short = codes.astype(np.min_scalar_type(max(0, groups - 1)))
    digest = blake2b(short.tobytes(), digest_size=16)
    digest.update(b"all" if included is None else np.packbits(included).tobytes())
    return digest.hexdigest()


def build_sums(
    layer: LayerMemory,
    included: NDArray[np.bool_] | None,
    codes: NDArray[np.int64],
    groups: int,
) -> dict[str, Tensor]:
    """The table of key sums, in one pass over the patterns that are included."""
    sums = torch.zeros(groups, layer.in_features, dtype=torch.float64)
    if layer.distinct is not None and layer.distinct.rows * groups <= MOST_COUNTS:
        return _build_from_distinct(layer, included, codes, sums)
    negative, fast = False, kernels(layer)
    room = np.empty(AT_ONCE, np.int64), np.empty(groups, np.int64)
    for rows, keys in engine.key_blocks(layer, included):
        if fast is not None:
            array = keys.numpy()
            bits = array.view(np.int32 if array.dtype == np.float32 else np.int64)
            signs = fast.add_rows(array, bits, codes[rows], sums.numpy(), *room)
        else:
            _add_rows(keys, codes[rows], sums)
            signs = True
        # zeros may have a minus sign, and are not negative
        negative = negative or (signs and bool(keys.numel() and keys.min() < 0))
    return {"sums": sums, "negative": torch.tensor([negative])}


def _build_from_distinct(
    layer: LayerMemory, included: NDArray[np.bool_] | None, codes: NDArray[np.int64], sums: Tensor
) -> dict[str, Tensor]:
    """The same where keys that recur are stored once: each times how often a group met it."""
    recurring, negative = recurring_keys(layer, 1), False
    assert recurring is not None
    counts = recurring.counts(included, codes, len(sums))
    for numbers, keys in recurring.blocks():
        often = counts[numbers]
        sums += torch.from_numpy(often).double().T @ keys
        met = keys[torch.from_numpy(often.any(1))]
        negative |= bool(met.numel() and met.min() < 0)
    return {"sums": sums, "negative": torch.tensor([negative])}


def _add_rows(keys: Tensor, codes: NDArray[np.int64], sums: Tensor) -> None:
    """Add each key to its group's sum, widened in pieces that stay in the cache."""
    step, room = max(1, CACHED // keys.shape[1]), engine.Room(torch.float64)
    groups = torch.arange(len(sums))[:, None]
    for start in range(0, len(keys), step):
        wide = room.converted(keys[start : start + step])
        code = torch.from_numpy(codes[start : start + step])
        if len(sums) <= MANY_GROUPS:  # as a product with ones and zeros
            sums += (code == groups).double() @ wide
        else:
            sums.index_add_(0, code, wide)


def _streamed(
    layer: LayerMemory,
    queries: Tensor,
    included: NDArray[np.bool_] | None,
    codes: NDArray[np.int64],
    groups: int,
) -> tuple[Tensor, Tensor]:
    """Both sums for more groups than a table can hold: all patterns, block by block."""
    signed = torch.zeros(groups, len(queries), dtype=torch.float64)
    absolute = torch.zeros_like(signed)
    for part in engine.scan(layer, included, error_signals=False):
        code = torch.from_numpy(codes[part.rows])
        for low in range(0, len(queries), QUERIES_AT_ONCE):
            here = slice(low, low + QUERIES_AT_ONCE)
            alpha = engine.products(layer, queries[here], part.keys).T
            signed[:, here].index_add_(0, code, alpha)
            absolute[:, here].index_add_(0, code, alpha.abs_())
    return signed.T.contiguous(), absolute.T.contiguous()


def _absolute(
    layer: LayerMemory,
    queries: Tensor,
    included: NDArray[np.bool_] | None,
    codes: NDArray[np.int64],
    groups: int,
) -> Tensor:
    """Σ |α| where signs are mixed: every distinct key, times how often each group met it."""
    total = torch.zeros(groups, len(queries), dtype=torch.float64)
    recurring = recurring_keys(layer, len(queries))
    if recurring is None or recurring.rows * groups > MOST_COUNTS:
        for part in engine.scan(layer, included, error_signals=False):
            code = torch.from_numpy(codes[part.rows])
            for low in range(0, len(queries), QUERIES_AT_ONCE):
                here = slice(low, low + QUERIES_AT_ONCE)
                total[:, here].index_add_(
                    0, code, engine.products(layer, queries[here], part.keys).abs_().T
                )
        return total.T.contiguous()
    counts = recurring.counts(included, codes, groups)
    for numbers, keys in recurring.blocks():
        often = torch.from_numpy(counts[numbers]).double().T
        for low in range(0, len(queries), QUERIES_AT_ONCE):
            here = slice(low, low + QUERIES_AT_ONCE)
            total[:, here] += often @ engine.products(layer, queries[here], keys).abs_().T
    return total.T.contiguous()


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
