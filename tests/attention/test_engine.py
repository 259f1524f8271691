"""The fast ways against brute force in float64, on worlds made to be awkward."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, cast

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

import dualform as df
from dualform.attention import group_sums as sums
from dualform.attention import ranking
from dualform.memory import LayerMemory
from dualform.memory.layer import Block


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

    def __post_init__(self) -> None:
        self.rows, self.in_features = self.keys.shape
        self.key_width = self.in_features

    def blocks(
        self, size: int = 4096, *, keys: bool = True, error_signals: bool = True
    ) -> Iterator[Block]:
        assert keys
        self.passes += 1
        ends = sorted({min(e, self.rows) for e in [*np.cumsum(self.segments).tolist(), self.rows]})
        start = 0
        for end in ends:
            for low in range(start, end, size):
                part = self.keys[low : min(end, low + size)]
                yield Block(low, len(part), lambda part=part: part, None)  # type: ignore[misc]
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


@settings(max_examples=150, deadline=None)
@given(
    worlds(),
    st.integers(1, 130),
    st.sampled_from(["most", "least", "absolute"]),
    st.integers(1, 130),
    st.booleans(),
)
def test_the_top_k_is_a_full_sort_cut_off(
    made: Any, k: int, sign: str, block: int, grouped: bool
) -> None:
    world, queries, included, codes, groups = made
    if not grouped:
        codes, groups = None, 1
    found = ranking.top_patterns(
        world.layer, queries, included, k, sign, codes, groups, block=block
    )
    weights = brute(world, queries)
    chosen = np.ones(world.rows, bool) if included is None else included
    for query, by_group in enumerate(found):
        assert len(by_group) == groups
        for group, (rows, values) in enumerate(by_group):
            here = np.flatnonzero(chosen if codes is None else chosen & (codes == group))
            alpha = weights[query][here]
            expected = here[np.lexsort((here, -ranking.order(sign)(alpha)))][:k]
            assert np.array_equal(rows, expected)
            assert np.array_equal(values, weights[query][expected])


@settings(max_examples=100, deadline=None)
@given(worlds())
def test_sums_by_group_are_the_sums_over_all_patterns(made: Any) -> None:
    world, queries, included, codes, groups = made
    signed, absolute = sums.group_sums(world.layer, queries, included, codes, groups)
    weights = brute(world, queries)
    chosen = np.ones(world.rows, bool) if included is None else included
    size = np.abs(world.keys.double().numpy()).sum() * float(queries.abs().max()) + 1e-300
    for group in range(groups):
        here = chosen & (codes == group)
        for found, expected in ((signed, weights), (absolute, np.abs(weights))):
            off = np.abs(found[:, group].numpy() - expected[:, here].sum(1)).max()
            assert off <= 1e-13 * size


def test_many_queries_take_several_passes_and_give_the_same(monkeypatch: Any) -> None:
    generator = torch.Generator().manual_seed(0)
    world = World(torch.randn(700, 8, generator=generator), [300, 1, 200])
    queries = torch.randn(23, 8, generator=generator, dtype=torch.float64)
    codes = torch.randint(0, 3, (700,), generator=generator).numpy()
    whole = ranking.top_patterns(world.layer, queries, None, 11, "most", codes, 3)
    monkeypatch.setattr(ranking, "QUERIES_AT_ONCE", 4)
    parts = ranking.top_patterns(world.layer, queries, None, 11, "most", codes, 3, block=37)
    for one, other in zip(whole, parts, strict=True):
        for (rows, values), (same_rows, same_values) in zip(one, other, strict=True):
            assert np.array_equal(rows, same_rows)
            assert np.array_equal(values, same_values)


def test_a_table_of_sums_is_built_once_and_where_no_sign_is_mixed_nothing_is_scanned() -> None:
    generator = torch.Generator().manual_seed(0)
    world = World(torch.rand(500, 6, generator=generator), [200])
    codes = torch.randint(0, 4, (500,), generator=generator).numpy()
    queries = torch.rand(9, 6, generator=generator, dtype=torch.float64)
    for _ in range(3):
        sums.group_sums(world.layer, queries, None, codes, 4)
    assert world.passes == 1
    sums.group_sums(world.layer, -queries, None, codes, 4)  # signs are mixed now: one scan more
    assert world.passes == 2
    sums.group_sums(world.layer, queries, codes == 1, codes, 4)  # another mask: another table
    assert world.passes == 3


def test_keys_that_are_not_finite_are_refused_by_name() -> None:
    keys = torch.ones(8, 3)
    keys[5, 1] = torch.inf
    queries = torch.ones(1, 3, dtype=torch.float64)
    with pytest.raises(df.QueryError, match="layer 'fc' holds keys that are not finite"):
        ranking.top_patterns(World(keys, [4]).layer, queries, None, 2, "most")
