"""The attention weights themselves, in float64, for a few queries or a few pairs.

Why it is hard: keys are stored in float32 (or less), weights are wanted in float64, and converting
all keys first would cost four times what reading them costs. So keys are widened as they are used:
by a compiled loop, or by torch in pieces that stay in the processor's cache. And equal keys (the
same image, seen again) must give equal bits wherever they lie, or ties would be broken by chance:
every weight is added up along its own row, never as part of a matrix product, whose kernels treat
the edges of their tiles differently.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import islice
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dualform.attention import engine
from dualform.attention.compiled import Kernels, kernels
from dualform.attention.tables import kept
from dualform.errors import QueryError
from dualform.memory import LayerMemory
from dualform.memory.layer import Block

Item = TypeVar("Item")

FEW = 8
"""Queries up to which weights are computed one by one; beyond, matrix products are faster."""

HELD = 1 << 23
"""Weights that may be held at once: 64 MB."""

CACHED = 1 << 19
"""Numbers that are widened at once: 4 MB in float64, which a processor's cache can hold."""

READ = 1 << 24
"""Numbers that a compiled loop reads in one go: 64 MB, some milliseconds."""

NEAR = 1 << 17
"""Numbers that are weighed at once by several queries: 512 KB, which the nearest caches hold."""


def are_few(layer: LayerMemory, queries: Tensor) -> bool:
    """Whether all weights of these queries may be computed at once and held."""
    return len(queries) <= FEW and len(queries) * layer.rows <= HELD


def all_weights(
    layer: LayerMemory,
    queries: Tensor,
    included: NDArray[np.bool_] | None = None,
    *,
    of: str = "keys",
) -> engine.Reals:
    """α = x·q of every pattern, [n, T] float64; zero where a pattern is not included.

    `of="error_signals"` gives δ·g instead, for directions g in place of queries.
    """
    if of == "keys" and engine.looks_up(layer):
        return _of_tokens(layer, queries, included)
    distinct = layer.distinct if of == "keys" else None
    if distinct is not None:  # keys that recur are weighed once
        rows = (
            RowsFrom(start, keys) for start, keys in engine.distinct_blocks(distinct, _size(layer))
        )
        out = _weigh(layer, queries, distinct.rows, rows, of)[:, distinct.references]
    else:
        blocks = layer.blocks(_size(layer), error_signals=of != "keys")
        parts = engine.reported(blocks, layer.rows)
        if included is not None:
            parts = (p for p in parts if included[p.start : p.start + p.rows].any())
        out = _weigh(layer, queries, layer.rows, (_rows(part, of) for part in parts), of)
    if included is not None:
        out[:, ~included] = 0.0
    return out


def _of_tokens(
    layer: LayerMemory, queries: Tensor, included: NDArray[np.bool_] | None
) -> engine.Reals:
    """An embedding's: 1 where a pattern is of the query's token, else 0."""
    same = queries.double().numpy() == layer.keys[:, 0].numpy()
    return np.where(same if included is None else same & included, 1.0, 0.0)


class RowsFrom(NamedTuple):
    """Some consecutive rows to be weighed, and where they begin."""

    start: int
    keys: Tensor


def _rows(part: Block, of: str) -> RowsFrom:
    keys = engine.keys_of(part) if of == "keys" else part.error_signals
    return RowsFrom(part.start, keys)


def _weigh(
    layer: LayerMemory, queries: Tensor, count: int, rows: Iterable[RowsFrom], of: str
) -> engine.Reals:
    """The weights of so many rows, [n, count]; zero for those that are left out."""
    out = np.zeros((len(queries), count))
    fast = kernels(layer)
    asked = np.ascontiguousarray(queries.numpy())
    room = threading.local()

    def one(some: RowsFrom) -> None:
        stop = some.start + len(some.keys)
        here = out[:, some.start : stop]
        if fast is not None:
            _by_pairs(fast, _array(some.keys, room), asked, here)
        else:
            _by_rows(some.keys, asked, here, room)
        if not np.isfinite(here).all():
            if bool(torch.isfinite(some.keys).all()):
                check_size(layer, here)
            refuse(layer, some.start, stop, of)

    spread(one, rows, 1 if fast is None else torch.get_num_threads())  # torch divides its own
    return out


def spread(work: Callable[[Item], None], items: Iterable[Item], threads: int) -> None:
    """Do some work for every item, by so many threads; a few items at a time, so Ctrl-C ends it."""
    if threads == 1:
        for item in items:
            work(item)
        return
    waiting = iter(items)
    with ThreadPoolExecutor(threads) as pool:
        while some := list(islice(waiting, 4 * threads)):
            list(pool.map(work, some))


def pair_weights(
    layer: LayerMemory,
    rows: engine.Rows,
    queries: Tensor,
    which: NDArray[np.int64],
    *,
    of_distinct: bool = False,
) -> engine.Reals:
    """x_t·q for pairs of a pattern and a query, float64; `rows` ascending. Only they are read.

    `of_distinct`: rows are numbers of different keys, not of patterns.
    """
    out = np.zeros(len(rows))
    fast = kernels(layer)
    asked = np.ascontiguousarray(queries.numpy())
    buffers, room = threading.local(), engine.Room(torch.float64)
    for start, size, read in _parts(layer, of_distinct):
        low, high = np.searchsorted(rows, (start, start + size))
        if low == high:
            continue
        keys = read()
        inside, query = rows[low:high] - start, which[low:high]
        if fast is not None:
            fast.pair_weights(_array(keys, buffers), inside, asked, query, out[low:high])
            continue
        step = max(1, NEAR // layer.in_features)
        for first in range(0, len(inside), step):
            some = slice(first, first + step)
            chosen = torch.index_select(keys, 0, torch.from_numpy(inside[some]))
            wide = room.converted(chosen).numpy()  # 16 bits widen exactly
            _dots(wide, asked[query[some]], out[low:high][some])
    return out


def _parts(
    layer: LayerMemory, of_distinct: bool
) -> Iterator[tuple[int, int, Callable[[], Tensor]]]:
    """Where each block begins, how many rows it has, and its keys, read only if asked for."""
    if of_distinct:
        assert layer.distinct is not None
        for start, keys in engine.distinct_blocks(layer.distinct, _size(layer)):
            yield start, len(keys), partial(_itself, keys)
        return
    for part in engine.reported(layer.blocks(_size(layer), error_signals=False), layer.rows):
        yield part.start, part.rows, partial(engine.keys_of, part)


def _itself(keys: Tensor) -> Tensor:
    return keys


def _by_pairs(fast: Kernels, keys: NDArray[Any], queries: engine.Reals, out: engine.Reals) -> None:
    """All weights of some keys by the loop over pairs; several queries while keys are at hand."""
    step = len(keys) if len(queries) == 1 else max(1, NEAR // keys.shape[1])
    for start in range(0, len(keys), step):
        rows = np.arange(start, min(len(keys), start + step))
        for query, line in enumerate(out):
            which = np.full(len(rows), query)
            fast.pair_weights(keys, rows, queries, which, line[start : start + step])


def _by_rows(keys: Tensor, queries: engine.Reals, out: engine.Reals, room: threading.local) -> None:
    """The same without compiled loops: row by row, in pieces that stay in the cache."""
    if not hasattr(room, "wide"):
        room.wide = engine.Room(torch.float64)
    step = max(1, CACHED // keys.shape[1])
    for start in range(0, len(keys), step):
        wide = room.wide.converted(keys[start : start + step]).numpy()
        for query, line in zip(queries, out, strict=True):
            _dots(wide, query, line[start : start + step])


def _dots(keys: engine.Reals, queries: engine.Reals, out: engine.Reals) -> None:
    """out[t] = keys[t]·queries[t] (or ·queries, if there is one): each row on its own."""
    if hasattr(np, "vecdot"):
        with np.errstate(over="ignore", invalid="ignore"):  # the caller looks at the result
            np.vecdot(keys, queries, out=out)
    else:  # numpy before 2.0
        out[:] = torch.from_numpy(keys * queries).sum(1).numpy()


def _size(layer: LayerMemory) -> int:
    """Patterns per block: 16-bit keys are widened block by block, better in the cache.

    A compiled loop reads the others where they lie: the longer, the less is asked in between.
    """
    if layer.stored_eps:
        return max(1, CACHED // layer.key_width)
    return engine.BLOCK if kernels(layer) is None else max(1, READ // layer.key_width)


def _array(keys: Tensor, room: threading.local) -> NDArray[np.float32] | NDArray[np.float64]:
    """Keys as compiled loops take them; 16 bits are widened into the thread's own buffer."""
    if keys.dtype not in (torch.float32, torch.float64):
        if not hasattr(room, "buffer"):
            room.buffer = engine.Room(torch.float32)
        keys = room.buffer.converted(keys)
    array: NDArray[np.float32] = keys.contiguous().numpy()
    return array


def check_size(layer: LayerMemory, found: engine.Reals) -> None:
    """Refuse numbers that ran over float64, though everything they were made of is finite."""
    if not np.isfinite(found).all():
        raise QueryError(
            f"attention in layer {layer.name!r} is larger than float64 can hold "
            f"({np.finfo(np.float64).max:.1e}); ask with a query of smaller numbers"
        )


def refuse(layer: LayerMemory, start: int, stop: int, of: str = "keys") -> None:
    """Keys that are no numbers have no attention."""
    what = of.replace("_", " ")
    raise QueryError(
        f"layer {layer.name!r} holds {what} that are not finite (patterns {start} to {stop - 1}): "
        "what attention to them would be is not defined"
    )


def norms(layer: LayerMemory) -> engine.Reals:
    """‖x‖ of every pattern, [T] float64; keys must be finite numbers."""
    if engine.looks_up(layer):
        return np.ones(layer.rows)
    array: engine.Reals = kept(layer, "norms", lambda: _lengths(layer))["norms"].numpy()
    return array


def _lengths(layer: LayerMemory) -> dict[str, Tensor]:
    """‖x‖ of every pattern, in one pass."""
    distinct = layer.distinct
    found = np.zeros(layer.rows if distinct is None else distinct.rows)
    rows = (_rows(part, "keys") for part in blocks_of(layer))
    step = max(1, CACHED // layer.in_features)
    for first, block in rows if distinct is None else engine.distinct_blocks(distinct):
        for low in range(0, len(block), step):
            keys, start = block[low : low + step], first + low
            size = torch.linalg.vector_norm(keys, dim=1, dtype=torch.float64)
            if not bool(torch.isfinite(size).all()):
                refuse(layer, start, start + len(keys))
            found[start : start + len(keys)] = size.numpy()
    every = found if distinct is None else found[distinct.references]
    return {"norms": torch.from_numpy(every)}


def longest_key(layer: LayerMemory) -> float:
    """The largest ‖x‖ of a layer, a hair above it."""
    return float(norms(layer).max(initial=0.0)) * 1.001


def blocks_of(layer: LayerMemory) -> Iterator[Block]:
    """Keys alone, block by block, with progress."""
    return engine.reported(layer.blocks(engine.BLOCK, error_signals=False), layer.rows)
