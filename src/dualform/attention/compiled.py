"""The few inner loops that are worth compiling, by numba where the extra `fast` brought it.

Each has an equal in torch or numpy beside its caller, and gives the same answer: only faster. They
add up in float64 while reading the keys as they are stored, which no matrix library does: so one
query costs what reading the memory costs, and is exact all the same.

Compiling takes some seconds, once: the result is cached on disk by numba. It begins only where a
layer is large enough to be worth it (`WORTH`), never at import, and a message in the log says
so. `DUALFORM_FAST=0` in the environment does without.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from dualform.memory import LayerMemory

WORTH = 1 << 24
"""Numbers in a layer's keys from which on compiled loops are used: 64 MB of float32."""

CHUNK = 64
"""Products compared with their limits at once, before any is looked at singly."""

_logger = logging.getLogger("dualform")


class Kernels(NamedTuple):
    """The compiled loops; all of them let other Python threads run."""

    weights: Callable[..., None]
    pair_weights: Callable[..., None]
    short_weights: Callable[..., None]
    add_rows: Callable[..., int]
    pick: Callable[..., int]


def kernels(layer: LayerMemory) -> Kernels | None:
    """The compiled loops, if the layer is worth them and numba is there.

    One rule for all questions: whichever way a weight is computed, it has the same bits.
    """
    if layer.rows * layer.in_features < WORTH or os.environ.get("DUALFORM_FAST") == "0":
        return None
    return _compiled()


@cache
def _compiled() -> Kernels | None:
    try:
        import numba.extending
    except ImportError:
        return None
    _logger.info("preparing compiled loops (numba): some seconds the first time, then cached")
    numba.extending.register_jitable(inline="always")(_dot)
    # Sums may be reordered into vectors; infinities and signs of zero stay what they are.
    loop = numba.njit(nogil=True, cache=True, fastmath={"reassoc", "contract"})
    try:
        return _all(loop)
    except RuntimeError:  # nowhere to cache them: neither beside this file nor in a home
        return _all(numba.njit(nogil=True, fastmath={"reassoc", "contract"}))


def _all(loop: Callable[..., Any]) -> Kernels:
    return Kernels(
        loop(_weights), loop(_pair_weights), loop(_short_weights), loop(_add_rows), loop(_pick)
    )


def _dot(keys: Any, t: int, queries: Any, j: int) -> Any:
    """keys[t]·queries[j], added up in float64: the same loop, and so the same bits, everywhere."""
    total = 0.0
    for i in range(keys.shape[1]):
        total += np.float64(keys[t, i]) * queries[j, i]
    return total


def _weights(keys: Any, queries: Any, out: Any) -> None:
    """out[j, t] = keys[t]·queries[j]."""
    for t in range(keys.shape[0]):
        for j in range(queries.shape[0]):
            out[j, t] = _dot(keys, t, queries, j)


def _pair_weights(keys: Any, rows: Any, queries: Any, which: Any, out: Any) -> None:
    """out[p] = keys[rows[p]]·queries[which[p]]."""
    for p in range(len(rows)):
        out[p] = _dot(keys, rows[p], queries, which[p])


def _short_weights(short: Any, query: Any, out: Any) -> None:
    """out[t] = short[t]·query for keys of one byte per number, in float32."""
    rows, width = short.shape
    for t in range(rows):
        total = np.float32(0)
        for i in range(width):
            total += np.float32(short[t, i]) * query[i]
        out[t] = total


def _add_rows(keys: Any, codes: Any, sums: Any) -> int:
    """sums[codes[t]] += keys[t], in float64; returns how many of the numbers were negative."""
    rows, width = keys.shape
    negative = 0
    for t in range(rows):
        group = codes[t]
        for i in range(width):
            sums[group, i] += np.float64(keys[t, i])
        for i in range(width):
            negative += keys[t, i] < 0
    return negative


def _pick(
    products: Any,
    codes: Any,
    groups: int,
    first: int,
    rows: Any,
    k: int,
    room: Any,
    limits: Any,
    values: Any,
    found: Any,
    fill: Any,
    scratch: Any,
    done: int,
) -> int:
    """Put what reaches its cell's limit into the cell's list; cut a full list to its best k.

    products [n, b]; a cell is query × group, with a limit, and a list of values and rows. Begins
    after `done` products and returns how many are done: fewer than all where a list is full of
    numbers that rounding cannot tell apart, and has to grow. `scratch` is as long as a list.
    """
    n, b = products.shape
    capacity = values.shape[1]
    for q in range(done // b, n):
        base = (first + q) * groups
        start = done - q * b if q == done // b else 0
        while start < b:
            stop = min(b, start + CHUNK)
            reached = 0
            if groups == 1:
                limit = limits[base]
                for j in range(start, stop):
                    reached += products[q, j] >= limit
            else:
                for j in range(start, stop):
                    reached += products[q, j] >= limits[base + codes[j]]
            if reached:
                for j in range(start, stop):
                    cell = base + (codes[j] if groups > 1 else 0)
                    if products[q, j] < limits[cell]:
                        continue
                    if fill[cell] == capacity:
                        scratch[:] = values[cell]
                        low, high = 0, capacity - 1
                        while low < high:  # quickselect: the k-th largest comes to its place
                            pivot = scratch[(low + high) // 2]
                            left, right = low, high
                            while left <= right:
                                while scratch[left] > pivot:
                                    left += 1
                                while scratch[right] < pivot:
                                    right -= 1
                                if left <= right:
                                    held = scratch[left]
                                    scratch[left] = scratch[right]
                                    scratch[right] = held
                                    left += 1
                                    right -= 1
                            if k - 1 <= right:
                                high = right
                            elif k - 1 >= left:
                                low = left
                            else:
                                break
                        kth = scratch[k - 1]
                        # below what rounding can do to either side: nothing is lost
                        limits[cell] = np.nextafter(
                            values.dtype.type(kth - room[first + q]), values.dtype.type(-np.inf)
                        )
                        kept = 0
                        for i in range(capacity):
                            if values[cell, i] >= limits[cell]:
                                values[cell, kept] = values[cell, i]
                                found[cell, kept] = found[cell, i]
                                kept += 1
                        fill[cell] = kept
                        if kept == capacity:
                            return int(q * b + j)
                        if products[q, j] < limits[cell]:
                            continue
                    values[cell, fill[cell]] = products[q, j]
                    found[cell, fill[cell]] = rows[j]
                    fill[cell] += 1
            start = stop
    return int(n * b)
