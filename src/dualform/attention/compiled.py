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

AT_ONCE = 128
"""Keys added up at once: so many stay in a processor's own cache while they are sorted."""

FEW_GROUPS = 512
"""Groups up to which keys are put in the order of their groups before they are added up."""

_logger = logging.getLogger("dualform")


class Kernels(NamedTuple):
    """The compiled loops; all of them let other Python threads run."""

    pair_weights: Callable[..., None]
    add_rows: Callable[..., bool]
    reach: Callable[..., tuple[int, int]]
    insert: Callable[..., int]


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
    for part in (_has_signs, _add_in_order):
        numba.extending.register_jitable(inline="always")(part)
    # Sums may be reordered into vectors; infinities and signs of zero stay what they are.
    loop = numba.njit(nogil=True, cache=True, fastmath={"reassoc", "contract"})
    try:
        return _all(loop)
    except RuntimeError:  # nowhere to cache them: neither beside this file nor in a home
        return _all(numba.njit(nogil=True, fastmath={"reassoc", "contract"}))


def _all(loop: Callable[..., Any]) -> Kernels:
    return Kernels(loop(_pair_weights), loop(_add_rows), loop(_reach), loop(_insert))


def _pair_weights(keys: Any, rows: Any, queries: Any, which: Any, out: Any) -> None:
    """out[p] = keys[rows[p]]·queries[which[p]], added up in float64.

    The one loop behind every weight, so that a weight has the same bits whichever question it
    answers. Four pairs at a time, from four places: a processor that reads ahead in several streams
    brings nearly a third more than from one.
    """
    last = len(rows) - 1
    quarter = (last + 4) // 4
    for p in range(quarter):
        # beyond the end, the last pair once more: all go through the same four sums
        b, c, d = min(p + quarter, last), min(p + 2 * quarter, last), min(p + 3 * quarter, last)
        first, second, third, fourth = keys[rows[p]], keys[rows[b]], keys[rows[c]], keys[rows[d]]
        one, two, three, four = 0.0, 0.0, 0.0, 0.0
        q, r, s, t = queries[which[p]], queries[which[b]], queries[which[c]], queries[which[d]]
        for i in range(keys.shape[1]):
            one += np.float64(first[i]) * q[i]
            two += np.float64(second[i]) * r[i]
            three += np.float64(third[i]) * s[i]
            four += np.float64(fourth[i]) * t[i]
        out[p], out[b], out[c], out[d] = one, two, three, four


def _add_rows(keys: Any, bits: Any, codes: Any, sums: Any, order: Any, ends: Any) -> bool:
    """sums[codes[t]] += keys[t], in float64; returns whether any number has a minus sign.

    `bits` are the keys' own bits as whole numbers; `order` [AT_ONCE] and `ends` [groups] are room.
    The keys' signs are looked at in the order they lie in, which brings them into the cache; from
    there they are added up group by group, so that sums are fetched and put back once for eight.
    """
    signs = False
    groups, width = sums.shape
    for low in range(0, len(keys), AT_ONCE):
        some, code = keys[low : low + AT_ONCE], codes[low : low + AT_ONCE]
        signs |= _has_signs(bits[low : low + AT_ONCE])
        if groups > FEW_GROUPS:
            for t in range(len(code)):
                total = sums[code[t]]
                for i in range(width):
                    total[i] += np.float64(some[t, i])
            continue
        ends[:] = 0
        for t in range(len(code)):
            ends[code[t]] += 1
        end = 0
        for group in range(groups):  # where each group begins; filled, where it ends
            begin, end = end, end + ends[group]
            ends[group] = begin
        for t in range(len(code)):
            order[ends[code[t]]] = t
            ends[code[t]] += 1
        begin = 0
        for group in range(groups):
            _add_in_order(some, order, begin, ends[group], sums[group])
            begin = ends[group]
    return signs


def _has_signs(bits: Any) -> bool:
    """Whether the highest bit, a minus sign, is set in any number."""
    seen = bits[0, 0]
    for t in range(bits.shape[0]):
        for i in range(bits.shape[1]):
            seen |= bits[t, i]
    return bool(seen < 0)


def _add_in_order(keys: Any, order: Any, begin: int, end: int, total: Any) -> None:
    """total += Σ keys[order[begin:end]], eight keys at a time."""
    width = keys.shape[1]
    p = begin
    while p + 8 <= end:
        a, b, c, d = keys[order[p]], keys[order[p + 1]], keys[order[p + 2]], keys[order[p + 3]]
        e, f, g, h = keys[order[p + 4]], keys[order[p + 5]], keys[order[p + 6]], keys[order[p + 7]]
        for i in range(width):
            left = np.float64(a[i]) + np.float64(b[i]) + np.float64(c[i]) + np.float64(d[i])
            right = np.float64(e[i]) + np.float64(f[i]) + np.float64(g[i]) + np.float64(h[i])
            total[i] += left + right
        p += 8
    while p < end:
        a = keys[order[p]]
        for i in range(width):
            total[i] += np.float64(a[i])
        p += 1


def _reach(
    products: Any,
    codes: Any,
    groups: int,
    first: int,
    limits: Any,
    query: Any,
    place: Any,
    done: int,
) -> tuple[int, int]:
    """List the products [n, b] that reach the limit of their cell, a query × a group.

    Begins after `done` products; returns how many are done, and how many were listed in `query` and
    `place`: fewer are done than there are where the lists are full.
    """
    n, b = products.shape
    room, count = len(query) - CHUNK, 0
    for q in range(done // b, n):
        base = (first + q) * groups
        start = done - q * b if q == done // b else 0
        while start < b:
            if count > room:
                return q * b + start, count
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
                    if products[q, j] >= limits[base + (codes[j] if groups > 1 else 0)]:
                        query[count], place[count] = first + q, j
                        count += 1
            start = stop
    return n * b, count


def _insert(
    cells: Any,
    ranked: Any,
    rows: Any,
    k: int,
    limits: Any,
    values: Any,
    found: Any,
    fill: Any,
    scratch: Any,
    done: int,
) -> int:
    """Put what reaches its cell's limit on the cell's list; cut a full list to its best k.

    Each cell has a limit, the k-th best that was seen, and a list of values and rows. Begins after
    `done` and returns how many are done: fewer than all where a list is nearly full of numbers that
    are all the same, and has to grow. `scratch` is as long as a list.
    """
    capacity = values.shape[1]
    for p in range(done, len(cells)):
        cell = cells[p]
        if ranked[p] < limits[cell]:
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
            limits[cell] = scratch[k - 1]
            kept = 0
            for i in range(capacity):
                if values[cell, i] >= limits[cell]:
                    values[cell, kept] = values[cell, i]
                    found[cell, kept] = found[cell, i]
                    kept += 1
            fill[cell] = kept
            if 4 * kept > 3 * capacity:
                return p
            if ranked[p] < limits[cell]:
                continue
        values[cell, fill[cell]] = ranked[p]
        found[cell, fill[cell]] = rows[p]
        fill[cell] += 1
    return len(cells)
