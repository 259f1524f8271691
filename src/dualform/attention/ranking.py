"""The strongest patterns of many queries, found in one streamed pass.

A block of keys is multiplied with all queries in the precision the keys are stored in, and compared
with one threshold per query and group: the k-th best so far. Only what passes is kept, and now and
then cut back to the best k. Nothing of the size patterns × queries is ever held, and no block is
sorted. Once some thousand patterns have been met, hardly anything passes any more, so the cost is
that of the product.

Why it is hard: the product's last digits depend on where a row sits in a block, since matrix
kernels treat the edges of their tiles differently. Yet identical keys (the same image, seen again)
must tie exactly, the earlier pattern first. So the thresholds leave room for everything rounding
can do (γ = (d + 2)·eps relative to ‖x‖‖q‖, the textbook bound), and what remains at the end is
computed again row by row in float64, where equal keys give equal bits.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dualform.attention import engine
from dualform.errors import QueryError
from dualform.memory import LayerMemory

QUERIES_AT_ONCE = 256
"""Queries per pass: the block's products, and what is kept of them, stay small."""

Ranking = Callable[[Any], Any]

ORDERS: dict[str, Ranking] = {"most": lambda a: a, "least": lambda a: -a, "absolute": abs}
"""What "top" can mean: most positive, most negative, or largest either way."""


def order(sign: str) -> Ranking:
    """The ranking function behind a `sign`; `QueryError` naming the ones there are."""
    if sign not in ORDERS:
        raise QueryError(f"sign={sign!r} is unknown; expected one of: {', '.join(ORDERS)}")
    return ORDERS[sign]


def top_of(values: engine.Reals, k: int, sign: str) -> NDArray[np.intp]:
    """The indices of the top k of numbers already at hand; ties: earlier first."""
    chosen: NDArray[np.intp] = np.argsort(-order(sign)(values), kind="stable")[:k]
    return chosen


def top_patterns(
    layer: LayerMemory,
    queries: Tensor,
    included: NDArray[np.bool_] | None,
    k: int,
    sign: str,
    codes: NDArray[np.int64] | None = None,
    groups: int = 1,
    *,
    block: int = engine.BLOCK,
) -> list[list[tuple[engine.Rows, engine.Reals]]]:
    """Rows and attention weights of the top k, per query and group; ties: earlier pattern first."""
    rank = order(sign)
    if layer.kind == "embedding":
        return _top_tokens(layer, queries, included, k, sign, codes, groups)
    found: list[list[tuple[engine.Rows, engine.Reals]]] = []
    for low in range(0, len(queries), QUERIES_AT_ONCE):
        some = queries[low : low + QUERIES_AT_ONCE]
        candidates = _Candidates(len(some), groups, k)
        _collect(candidates, layer, some, included, rank, codes, block)
        found += _settle(candidates, layer, some, rank)
    return found


class _Candidates:
    """What may be among the best k of each query and group, with the values it was found by."""

    def __init__(self, queries: int, groups: int, k: int) -> None:
        self.k = k
        self.groups = groups
        self.thresholds = np.full((queries, groups), -np.inf)  # the k-th best so far
        self.slack = np.zeros(queries)  # what rounding may have done to any value so far
        self.cells = np.zeros(0, np.int64)  # query × group
        self.rows = np.zeros(0, np.int64)
        self.values = np.zeros(0)
        self._new: list[tuple[NDArray[np.int64], engine.Rows, engine.Reals]] = []
        self._waiting = 0
        self._at_most = max(1 << 16, 2 * k * queries * groups)

    def add(self, cells: NDArray[np.int64], rows: engine.Rows, values: engine.Reals) -> None:
        self._new.append((cells, rows, values))
        self._waiting += len(rows)
        if self._waiting > self._at_most or not np.isfinite(self.thresholds).all():
            self.cut()

    def cut(self) -> None:
        """Keep what can still be among the best k, and raise the thresholds."""
        parts = zip((self.cells, self.rows, self.values), *self._new, strict=True)
        cells, rows, values = (np.concatenate(part) for part in parts)
        self._new, self._waiting = [], 0
        ordered = np.lexsort((-values, cells))
        cells, rows, values = cells[ordered], rows[ordered], values[ordered]
        starts = np.searchsorted(cells, np.arange(self.thresholds.size + 1))
        enough = np.flatnonzero(np.diff(starts) >= self.k)
        self.thresholds.reshape(-1)[enough] = values[starts[enough] + self.k - 1]
        room = np.repeat(2 * self.slack, self.groups)
        kept = values >= (self.thresholds.reshape(-1) - room)[cells]
        self.cells, self.rows, self.values = cells[kept], rows[kept], values[kept]


def _collect(
    candidates: _Candidates,
    layer: LayerMemory,
    queries: Tensor,
    included: NDArray[np.bool_] | None,
    rank: Ranking,
    codes: NDArray[np.int64] | None,
    block: int,
) -> None:
    """One pass over all patterns."""
    sizes = queries.norm(dim=1).numpy()
    longest = _longest_key(layer)
    narrow = 1e-15 < longest * float(sizes.max(initial=0.0)) < 1e30  # float32 ends there
    narrowed = queries.float()
    for rows, keys in engine.key_blocks(layer, included, block):
        if keys.dtype == torch.float32 and narrow:
            products = torch.mm(narrowed, keys.T)
        else:
            products = torch.mm(queries, keys.double().T)
        eps = torch.finfo(products.dtype).eps
        rounding = (layer.in_features + 2) * eps * longest * sizes
        np.maximum(candidates.slack, rounding, out=candidates.slack)
        _pick(candidates, rank(products.numpy()), rows, None if codes is None else codes[rows])
    candidates.cut()


_longest: WeakKeyDictionary[LayerMemory, float] = WeakKeyDictionary()


def _longest_key(layer: LayerMemory) -> float:
    """The largest ‖x‖ of a layer, a hair above it, taken once; keys must be numbers."""
    if layer not in _longest:
        longest = 0.0
        for rows, keys in engine.key_blocks(layer):
            largest = float(torch.linalg.vector_norm(keys, dim=1).max())
            if not np.isfinite(largest):  # of float32, perhaps, where float64 still reaches
                largest = float(torch.linalg.vector_norm(keys.double(), dim=1).max())
            if not np.isfinite(largest):
                raise QueryError(
                    f"layer {layer.name!r} holds keys that are not finite (patterns {rows[0]} to "
                    f"{rows[-1]}): what attention to them would be is not defined"
                )
            longest = max(longest, largest)
        _longest[layer] = longest * 1.001
    return _longest[layer]


def _pick(
    candidates: _Candidates,
    ranked: NDArray[Any],
    rows: engine.Rows,
    codes: NDArray[np.int64] | None,
) -> None:
    """Hand over what passes the thresholds; where there are none yet, the block's own best k."""
    limits = candidates.thresholds - 2 * candidates.slack[:, None]
    blank = np.isneginf(limits)
    if blank.any():
        for group in np.flatnonzero(blank.any(axis=0)):
            here = slice(None) if codes is None else np.flatnonzero(codes == group)
            inside = ranked[:, here]
            if inside.shape[1] > candidates.k:
                at = inside.shape[1] - candidates.k
                kth = np.partition(inside, at, axis=1)[:, at].astype(np.float64)
                fresh = blank[:, group]
                limits[fresh, group] = (kth - 2 * candidates.slack)[fresh]
    # rounded down to the products' own precision: a comparison in it lets no candidate slip
    rounded = limits.astype(ranked.dtype)
    rounded = np.where(rounded > limits, np.nextafter(rounded, -np.inf), rounded)
    passed = ranked >= (rounded if codes is None else rounded[:, codes])
    query, column = np.nonzero(passed)
    if len(query):
        cells = query.astype(np.int64) * candidates.groups
        if codes is not None:
            cells += codes[column]
        candidates.add(cells, rows[column], ranked[query, column].astype(np.float64))


def _settle(
    candidates: _Candidates, layer: LayerMemory, queries: Tensor, rank: Ranking
) -> list[list[tuple[engine.Rows, engine.Reals]]]:
    """The exact weights of what is left, in order, and the best k of them."""
    wanted = np.unique(candidates.rows)
    exact = np.zeros(len(candidates.rows))
    place = np.searchsorted(wanted, candidates.rows)
    by_row = np.argsort(place, kind="stable")
    for low in range(0, len(wanted), engine.BLOCK):
        keys = engine.gather_keys(layer, wanted[low : low + engine.BLOCK])
        first, last = np.searchsorted(place[by_row], (low, low + len(keys)))
        for start in range(first, last, engine.BLOCK):
            pairs = by_row[start : min(start + engine.BLOCK, last)]
            query = torch.from_numpy(candidates.cells[pairs] // candidates.groups)
            # row by row instead of by matrix product: equal keys give equal bits
            products = keys[torch.from_numpy(place[pairs] - low)] * queries[query]
            exact[pairs] = products.sum(1).numpy()
    ordered = np.lexsort((candidates.rows, -rank(exact), candidates.cells))
    cells = candidates.cells[ordered]
    starts = np.searchsorted(cells, np.arange(candidates.thresholds.size + 1))
    best = []
    for start, stop in pairwise(starts.tolist()):
        kept = ordered[start : min(stop, start + candidates.k)]
        best.append((candidates.rows[kept], exact[kept]))
    groups = candidates.groups
    return [best[i : i + groups] for i in range(0, len(best), groups)]


def _top_tokens(
    layer: LayerMemory,
    queries: Tensor,
    included: NDArray[np.bool_] | None,
    k: int,
    sign: str,
    codes: NDArray[np.int64] | None,
    groups: int,
) -> list[list[tuple[engine.Rows, engine.Reals]]]:
    """The same for an embedding, where attention is 1 or 0 and nearly everything ties."""
    tokens = layer.keys[:, 0].numpy()
    rows = np.arange(layer.rows) if included is None else np.flatnonzero(included)
    inside = [rows if codes is None else rows[codes[rows] == group] for group in range(groups)]
    found = []
    for token in queries[:, 0].long().tolist():
        alphas = [(tokens[group] == token).astype(np.float64) for group in inside]
        tops = [top_of(alpha, k, sign) for alpha in alphas]
        parts = zip(inside, alphas, tops, strict=True)
        found.append([(group[top], alpha[top]) for group, alpha, top in parts])
    return found
