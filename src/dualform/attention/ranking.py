"""The strongest patterns of some queries, exactly, without ever holding all weights of many.

A few queries: every weight is computed in float64 (`weights.py`), and the best are picked out. Many
queries: blocks of keys are multiplied with all of them, as fast as the machine can, and compared
with one limit per query and group (`candidates.py`). Keys that are stored once are ranked
once (`visits.py`).

Why it is hard: the last digits of a matrix product depend on where a row sits in a block. Yet
identical keys must tie exactly, the earlier pattern first. So limits leave room for everything that
rounding can do (`products.py`), and what remains is weighed again, row by row in float64, where
equal keys give equal bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dualform.attention import engine, weights
from dualform.attention.candidates import (
    Candidates,
    CompiledCandidates,
    PlainCandidates,
    Weigh,
)
from dualform.attention.compiled import Kernels, kernels
from dualform.attention.grouping import Cells
from dualform.attention.products import products
from dualform.attention.visits import Visits, recur
from dualform.errors import QueryError
from dualform.memory import LayerMemory

QUERIES_AT_ONCE = 256
"""Queries per matrix product: a block's products stay small."""

LISTED = 1 << 22
"""Candidates held at once, all queries together: about 64 MB."""

Ranking = Callable[[Any], Any]

ORDERS: dict[str, Ranking] = {"most": lambda a: a, "least": lambda a: -a, "absolute": abs}
"""What "top" can mean: most positive, most negative, or largest either way."""


class Ranked(NamedTuple):
    """One entry per listed pattern, by query, then group, then rank (from 0)."""

    query: NDArray[np.int64]
    group: NDArray[np.int64]
    rank: NDArray[np.int64]
    row: engine.Rows
    weight: engine.Reals


def order(sign: str) -> Ranking:
    """The ranking function behind a `sign`; `QueryError` naming the ones there are."""
    if sign not in ORDERS:
        raise QueryError(f"sign={sign!r} is unknown; expected one of: {', '.join(ORDERS)}")
    return ORDERS[sign]


def top_of(values: engine.Reals, k: int, sign: str) -> NDArray[np.intp]:
    """The indices of the top k of numbers already at hand; ties: earlier first."""
    ranked = order(sign)(values)
    if k < len(ranked):  # only what reaches the k-th best needs sorting
        few = ranked[:: max(1, math.isqrt(len(ranked) // k))]
        reached = np.flatnonzero(ranked >= _kth(few, min(k, len(few))))  # k-th best of a part
        reached = reached[ranked[reached] >= _kth(ranked[reached], k)]
        best: NDArray[np.intp] = reached[np.argsort(-ranked[reached], kind="stable")[:k]]
        return best
    chosen: NDArray[np.intp] = np.argsort(-ranked, kind="stable")[:k]
    return chosen


def _kth(ranked: engine.Reals, k: int) -> Any:
    """The k-th largest."""
    return np.partition(ranked, len(ranked) - k)[len(ranked) - k]


def top_patterns(
    layer: LayerMemory,
    queries: Tensor,
    included: NDArray[np.bool_] | None,
    k: int,
    sign: str,
    cells: Cells | None = None,
    *,
    held: engine.Reals | None = None,
    block: int = engine.BLOCK,
) -> Ranked:
    """The top k patterns per query, in all or in each of the groups; ties: earlier first.

    `held` are all weights, where they are known already.
    """
    order(sign)
    k = min(k, max(1, layer.rows))
    if engine.looks_up(layer) and not weights.are_few(layer, queries):
        return _one_by_one(layer, queries, included, k, sign, cells)
    if held is None and weights.are_few(layer, queries):
        held = weights.all_weights(layer, queries, included)
    if held is not None:
        return _of_held(layer, held, included, k, sign, cells)
    _check_size(layer, queries)
    codes, groups = (None, 1) if cells is None else (cells.codes, max(1, len(cells.values)))
    per_query = groups * min(2 * k + 64, max(1, layer.rows))
    at_once = max(1, LISTED // per_query)
    parts, visits = [], Visits(layer, included, codes, groups) if recur(layer) else None
    for low in range(0, len(queries), at_once):
        some = queries[low : low + at_once]
        if visits is not None:
            part = _of_visits(layer, some, visits, k, sign, groups, block)
        else:
            # Keys grow while a network learns: with the longest first, most never reach a limit.
            blocks = engine.key_blocks(layer, included, block, weights.norms(layer))
            found = _collect(layer, some, blocks, k, sign, codes, groups)
            part = _settle(layer, some, *found, k, sign, groups)
        parts.append(part._replace(query=part.query + low))
    return _joined(parts)


def _check_size(layer: LayerMemory, queries: Tensor) -> None:
    """What is too large for float64 cannot be compared."""
    longest = float(torch.linalg.vector_norm(queries, dim=1).max()) if len(queries) else 0.0
    with np.errstate(over="ignore"):
        weights.check_size(layer, np.float64(longest) * weights.norms(layer).max(initial=0.0))


def _joined(parts: list[Ranked]) -> Ranked:
    if len(parts) == 1:
        return parts[0]
    return Ranked(*(np.concatenate(column) for column in zip(*parts, strict=True)))


def _one_by_one(
    layer: LayerMemory,
    queries: Tensor,
    included: NDArray[np.bool_] | None,
    k: int,
    sign: str,
    cells: Cells | None,
) -> Ranked:
    """The same for an embedding, where attention is 1 or 0 and nearly everything ties."""
    parts = []
    for number in range(len(queries)):
        held = weights.all_weights(layer, queries[number : number + 1], included)
        part = _of_held(layer, held, included, k, sign, cells)
        parts.append(part._replace(query=part.query + number))
    return _joined(parts)


def _of_held(
    layer: LayerMemory,
    held: engine.Reals,
    included: NDArray[np.bool_] | None,
    k: int,
    sign: str,
    cells: Cells | None,
) -> Ranked:
    """The same from weights that are all known: they are exact, and equal keys tie."""
    members = [np.arange(layer.rows)] if cells is None else cells.members
    if included is not None:
        members = [rows[included[rows]] for rows in members]
    found: list[tuple[int, int, engine.Rows, engine.Reals]] = []
    for query, line in enumerate(held):
        for group, rows in enumerate(members):
            inside = line if len(rows) == len(line) else line[rows]
            best = rows[top_of(inside, k, sign)]
            found.append((query, group, best, line[best]))
    lengths = [len(rows) for _, _, rows, _ in found]
    return Ranked(
        np.repeat([f[0] for f in found], lengths).astype(np.int64),
        np.repeat([f[1] for f in found], lengths).astype(np.int64),
        np.concatenate([np.arange(n) for n in [0, *lengths]]),
        np.concatenate([np.zeros(0, np.int64), *(f[2] for f in found)]),
        np.concatenate([np.zeros(0), *(f[3] for f in found)]),
    )


def _collect(
    layer: LayerMemory,
    queries: Tensor,
    blocks: Iterable[tuple[engine.Rows, Tensor]],
    k: int,
    sign: str,
    codes: NDArray[np.int64] | None,
    groups: int,
) -> tuple[NDArray[np.int64], engine.Rows]:
    """One pass over all patterns (or entries): cells and rows of what may be among the best.

    `codes` are those of the rows that the blocks name.
    """
    fast = kernels(layer)
    directed = -queries if sign == "least" else queries
    asked = products(layer, directed)
    candidates: Candidates
    if fast is not None:
        most = layer.rows if codes is None else int(np.bincount(codes).max(initial=0))
        weigh = _weigher(fast, directed, sign)
        candidates = CompiledCandidates(fast, weigh, asked, groups, k, most)
    else:
        as_numpy = np.float32 if asked.dtype == torch.float32 else np.float64
        candidates = PlainCandidates(groups, k, asked.room, as_numpy)
    for rows, keys in blocks:
        inside = rows if codes is None else codes[rows]
        rounded = asked.rounded(keys)
        for first in range(0, len(queries), QUERIES_AT_ONCE):
            found = asked.times(first, first + QUERIES_AT_ONCE, rounded)
            if sign == "absolute":
                found.abs_()
            candidates.take(first, found.numpy(), rows, inside, keys)
    return candidates.result()


def _weigher(fast: Kernels, queries: Tensor, sign: str) -> Weigh:
    """Exact weights of a few pairs, as they are to be ranked."""
    asked = np.ascontiguousarray(queries.numpy())
    rank = abs if sign == "absolute" else lambda values: values

    def weigh(
        query: NDArray[np.int64], rows: engine.Rows, place: NDArray[np.int64], keys: Tensor
    ) -> engine.Reals:
        exact = np.empty(len(query))
        fast.pair_weights(keys.numpy(), place, asked, query, exact)
        ranked: engine.Reals = rank(exact)
        return ranked

    return weigh


def _of_visits(
    layer: LayerMemory,
    queries: Tensor,
    visits: Visits,
    k: int,
    sign: str,
    groups: int,
    block: int,
) -> Ranked:
    """The same where keys recur: different keys are ranked, and the patterns of the best listed."""
    blocks, codes = visits.blocks(block), None if groups == 1 else visits.codes
    cells, entries = _collect(layer, queries, blocks, k, sign, codes, groups)
    by_key = np.argsort(entries, kind="stable")
    cells, entries = cells[by_key], entries[by_key]
    exact = weights.pair_weights(
        layer, visits.number[entries], queries, cells // groups, of_distinct=True
    )
    ranked = order(sign)(exact)
    best = np.lexsort((-ranked, cells))
    cells, entries, exact, ranked = cells[best], entries[best], exact[best], ranked[best]
    # enough entries to have k patterns, and those that tie with the last of them
    counts = visits.counts[entries]
    first = np.searchsorted(cells, cells)  # of each entry's cell
    before = np.cumsum(counts) - counts
    needed = before - before[first] < k
    last = np.full(len(queries) * groups, np.inf)
    np.minimum.at(last, cells[needed], ranked[needed])
    kept = ranked >= last[cells]
    rows, counts = visits.patterns(entries[kept]), counts[kept]
    cells, exact, ranked = (np.repeat(of[kept], counts) for of in (cells, exact, ranked))
    listed = np.lexsort((rows, -ranked, cells))
    rank = np.arange(len(cells)) - np.searchsorted(cells, cells)
    listed, rank = listed[rank < k], rank[rank < k]
    cells = cells[listed]
    return Ranked(cells // groups, cells % groups, rank, rows[listed], exact[listed])


def _settle(
    layer: LayerMemory,
    queries: Tensor,
    cells: NDArray[np.int64],
    rows: engine.Rows,
    k: int,
    sign: str,
    groups: int,
) -> Ranked:
    """The exact weights of what is left, in order, and the best k of them."""
    by_row = np.argsort(rows, kind="stable")
    cells, rows = cells[by_row], rows[by_row]
    exact = weights.pair_weights(layer, rows, queries, cells // groups)
    ordered = _by_cell(cells, len(queries) * groups)  # rows still ascend within each cell
    counts = np.bincount(cells, minlength=len(queries) * groups)
    place = np.arange(len(cells)) - np.repeat(np.cumsum(counts) - counts, counts)
    # one line per cell: sorting many short lines is faster than one long list
    lines = np.full((len(counts), int(counts.max(initial=0))), -np.inf)
    lines[cells[ordered], place] = order(sign)(exact[ordered])
    best = np.argsort(-lines, axis=1, kind="stable")[:, :k]
    listed = np.arange(best.shape[1]) < counts[:, None]
    cell, rank = np.nonzero(listed)
    chosen = ordered[(np.cumsum(counts) - counts)[cell] + best[listed]]
    return Ranked(cell // groups, cell % groups, rank, rows[chosen], exact[chosen])


def _by_cell(cells: NDArray[np.int64], count: int) -> NDArray[np.intp]:
    """The stable order by cell; numbers of 16 bits sort in one sweep."""
    small = cells.astype(np.uint16) if count <= 1 << 16 else cells
    ordered: NDArray[np.intp] = np.argsort(small, kind="stable")
    return ordered
