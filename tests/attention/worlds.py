"""Worlds made to be awkward: keys as a memory hands them out, and the same by brute force."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, cast

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from torch import Tensor

from dualform.attention import candidates, compiled, ranking
from dualform.attention import weights as weights_room
from dualform.attention.grouping import Cells
from dualform.memory import LayerMemory


class Rows:
    """Some consecutive keys, as a block of a memory hands them out."""

    narrow_keys = error_signals = None

    def __init__(self, start: int, keys: Tensor) -> None:
        self.start, self.rows, self.keys = start, len(keys), keys


@dataclass(eq=False)
class World:
    """A layer's keys in segments of any length, as `LayerMemory` hands them out."""

    keys: Tensor
    segments: list[int]
    name: str = "fc"
    kind: str = "linear"
    passes: int = 0
    in_features: int = field(init=False)
    key_width: int = field(init=False)
    rows: int = field(init=False)
    distinct: Any = None
    stored_eps: float = 0.0

    def __post_init__(self) -> None:
        self.rows, self.in_features = self.keys.shape
        self.key_width = self.in_features
        self.dtype = self.stored = self.keys.dtype

    def blocks(
        self, size: int = 4096, *, keys: bool = True, error_signals: bool = True
    ) -> Iterator[Rows]:
        assert keys
        self.passes += 1
        ends = sorted({min(e, self.rows) for e in [*np.cumsum(self.segments).tolist(), self.rows]})
        start = 0
        for end in ends:
            for low in range(start, end, size):
                part = self.keys[low : min(end, low + size)]
                yield Rows(low, part)
            start = end

    @property
    def layer(self) -> LayerMemory:
        return cast(LayerMemory, self)


@st.composite
def worlds(draw: Any) -> tuple[World, Tensor, Any, Any, int]:
    """Keys, queries, which patterns count, groups: ties, gaps, signs, scales and lengths of all."""
    rows, width = draw(st.integers(1, 120)), draw(st.integers(1, 9))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    dtype = draw(st.sampled_from([torch.float32, torch.float64]))
    kind = draw(st.sampled_from(["whole", "alike", "any"]))
    if kind == "alike":  # keys that differ by less than a float32 product of this width can tell
        width = 200
        queries = torch.randn(draw(st.integers(1, 5)), width, generator=generator)
        one = torch.randn(1, width, generator=generator)
        keys = (one + 2e-7 * torch.randn(rows, width, generator=generator)).to(dtype)
    elif kind == "whole":  # small whole numbers: products are exact and ties abound
        keys = torch.randint(-2, 3, (rows, width), generator=generator).to(dtype)
        queries = torch.randint(-2, 3, (draw(st.integers(1, 5)), width), generator=generator)
    else:
        scale = 10.0 ** draw(st.integers(-30, 12))
        keys = (torch.randn(rows, width, generator=generator) * scale).to(dtype)
        queries = torch.randn(draw(st.integers(1, 5)), width, generator=generator)
        seen_again = torch.randint(0, rows, (rows,), generator=generator)
        keys = keys[seen_again]
    if draw(st.booleans()):
        keys, queries = keys.abs(), queries.abs()
    if draw(st.booleans()):
        queries[0] = 0
    groups = draw(st.integers(1, 6))
    codes = torch.randint(0, groups, (rows,), generator=generator).numpy()
    included = draw(st.sampled_from([None, 0.5, 0.05]))
    if included is not None:
        included = torch.rand(rows, generator=generator).numpy() < included
    segments = draw(st.lists(st.integers(1, 50), max_size=5))
    return World(keys, segments), queries.double(), included, codes, groups


def brute(world: World, queries: Tensor) -> np.ndarray[Any, Any]:
    products = world.keys.double()[None] * queries[:, None]
    weights: np.ndarray[Any, Any] = products.sum(2).numpy()
    return weights


def check_top(
    world: World,
    queries: Tensor,
    included: Any,
    codes: Any,
    groups: int,
    k: int,
    sign: str,
    found: ranking.Ranked,
) -> None:
    """Against a full sort: the same patterns in the same order, up to float64's own rounding."""
    weights = brute(world, queries)
    sizes = queries.norm(dim=1)[:, None] * world.keys.double().norm(dim=1)
    off = 1e-14 * sizes.numpy()
    chosen = np.ones(world.rows, bool) if included is None else included
    rank = ranking.order(sign)
    assert np.array_equal(found.query, np.sort(found.query))
    for query in range(len(queries)):
        for group in range(groups):
            mine = (found.query == query) & (found.group == group)
            rows, values = found.row[mine], found.weight[mine]
            here = np.flatnonzero(chosen if codes is None else chosen & (codes == group))
            assert len(rows) == min(k, len(here))
            assert np.array_equal(found.rank[mine], np.arange(len(rows)))
            assert np.isin(rows, here).all()
            assert len(set(rows.tolist())) == len(rows)
            assert (np.abs(values - weights[query][rows]) <= off[query][rows]).all()
            # in order, and where weights are equal to the bit, the earlier pattern first
            order = np.lexsort((rows, -rank(values)))
            assert np.array_equal(order, np.arange(len(rows)))
            out = np.setdiff1d(here, rows)
            if len(out) and len(rows):
                worst, last = rank(values)[-1], rows[-1]
                better = rank(weights[query][out]) > worst + 2 * off[query].max()
                assert not better.any()
                # the same key as the last one listed, but not listed: it comes later
                same = (world.keys[out] == world.keys[last]).all(1).numpy()
                assert (out[same] > last).all()


class Distinct:
    """The different keys of a world, as a memory that stores them once hands them out."""

    def __init__(self, keys: Tensor) -> None:
        self._keys, references = torch.unique(keys, dim=0, return_inverse=True)
        self.references = references.numpy()
        self.rows = len(self._keys)

    def blocks(self, size: int = 4096) -> Iterator[tuple[int, Tensor]]:
        for low in range(0, self.rows, 7):
            yield low, self._keys[low : low + 7]


def grouped(codes: Any, groups: int) -> Cells:
    return Cells([(group,) for group in range(groups)], codes)


def choose(monkeypatch: Any, way: str) -> None:
    """One of the ways to rank: few queries or many, with compiled loops or without."""
    if way.startswith("compiled"):
        pytest.importorskip("numba")
    monkeypatch.setattr(compiled, "WORTH", 0 if way.startswith("compiled") else 1 << 62)
    monkeypatch.setattr(weights_room, "FEW", 8 if "few" in way else 0)
    monkeypatch.setattr(candidates, "ROOM", 1)
    monkeypatch.setattr(candidates, "AT_ONCE", compiled.CHUNK + 3)
