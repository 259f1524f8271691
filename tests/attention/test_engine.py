"""The fast ways against brute force in float64, on worlds made to be awkward."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from tests.attention.worlds import Distinct, World, brute, check_top, choose, grouped, worlds

import dualform
from dualform.attention import candidates, compiled, products, ranking, recurring, visits
from dualform.attention import group_sums as sums
from dualform.attention import weights as weights_room

SIGNS = st.sampled_from(["most", "least", "absolute"])


@pytest.mark.parametrize("way", ["few", "plain", "compiled", "compiled, few"])
@settings(
    max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    made=worlds(), k=st.integers(1, 130), sign=SIGNS, block=st.integers(1, 130), by=st.booleans()
)
def test_the_top_k_is_a_full_sort_cut_off(
    monkeypatch: Any, way: str, made: Any, k: int, sign: str, block: int, by: bool
) -> None:
    choose(monkeypatch, way)
    world, queries, included, codes, groups = made
    if not by:
        codes, groups = None, 1
    cells = grouped(codes, groups) if by else None
    found = ranking.top_patterns(world.layer, queries, included, k, sign, cells, block=block)
    check_top(world, queries, included, codes, groups, k, sign, found)


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(made=worlds(), block=st.integers(1, 130))
def test_products_are_off_by_less_than_they_say(made: Any, block: int) -> None:
    world, queries, _, _, _ = made
    asked = products.products(world.layer, queries)
    exact = np.ldexp(brute(world, queries), asked.scale[:, None])
    for low in range(0, world.rows, block):
        keys = asked.rounded(world.keys[low : low + block])
        found = asked.times(0, len(queries), keys).double().numpy()
        assert (np.abs(found - exact[:, low : low + block]) <= asked.room[:, None]).all()


def test_products_leave_little_to_weigh_again(monkeypatch: Any) -> None:
    choose(monkeypatch, "compiled")
    generator = torch.Generator().manual_seed(0)
    world = World(torch.randn(20_000, 64, generator=generator).relu(), [])
    queries = torch.randn(9, 64, generator=generator, dtype=torch.float64).relu()
    weighed = 0
    weigh = candidates.CompiledCandidates._list

    def counted(self: Any, query: Any, *others: Any) -> None:
        nonlocal weighed
        weighed += len(query)
        weigh(self, query, *others)

    monkeypatch.setattr(candidates.CompiledCandidates, "_list", counted)
    ranking.top_patterns(world.layer, queries, None, 100, "most")
    assert 9 * 100 <= weighed < 9 * 1500


@pytest.mark.parametrize("way", ["plain", "compiled"])
@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(made=worlds())
def test_sums_by_group_are_the_sums_over_all_patterns(
    monkeypatch: Any, way: str, made: Any
) -> None:
    choose(monkeypatch, way)
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("groups", [1, 12, compiled.FEW_GROUPS + 90])
def test_key_sums_are_the_same_with_compiled_loops_however_many_groups(
    monkeypatch: Any, groups: int, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(0)
    keys = torch.randn(2000, 33, generator=generator, dtype=dtype).relu() * -1.0  # zeros: -0.0
    codes = torch.randint(0, groups, (2000,), generator=generator).numpy()
    for sign in (1.0, -1.0):
        found = {}
        for way in ("plain", "compiled"):
            choose(monkeypatch, way)
            world = World(sign * keys, [500, 3])
            found[way] = sums.key_sums(world.layer, None, codes, groups)
        expected = np.zeros((groups, 33))
        np.add.at(expected, codes, (sign * keys).double().numpy())
        for table in found.values():
            assert np.abs(table.sums.numpy() - expected).max() <= 1e-12 * np.abs(expected).max()
            assert table.non_negative == (sign < 0)


@pytest.mark.parametrize("way", ["plain", "compiled"])
def test_many_queries_take_several_passes_and_give_the_same(monkeypatch: Any, way: str) -> None:
    choose(monkeypatch, way)
    generator = torch.Generator().manual_seed(0)
    world = World(torch.randn(700, 8, generator=generator), [300, 1, 200])
    queries = torch.randn(23, 8, generator=generator, dtype=torch.float64)
    codes = torch.randint(0, 3, (700,), generator=generator).numpy()
    whole = ranking.top_patterns(world.layer, queries, None, 11, "most", grouped(codes, 3))
    monkeypatch.setattr(ranking, "QUERIES_AT_ONCE", 4)
    monkeypatch.setattr(ranking, "LISTED", 3 * 11 * 40)
    parts = ranking.top_patterns(
        world.layer, queries, None, 11, "most", grouped(codes, 3), block=37
    )
    for one, other in zip(whole, parts, strict=True):
        assert np.array_equal(one, other)


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


@pytest.mark.parametrize("way", ["plain", "compiled"])
@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(made=worlds(), scaled=st.booleans())
def test_the_weights_of_a_few_queries_are_key_times_query_to_float64(
    monkeypatch: Any, way: str, made: Any, scaled: bool
) -> None:
    choose(monkeypatch, way)
    world, queries, included, _, _ = made
    found = weights_room.all_weights(world.layer, queries, included)
    expected = brute(world, queries)
    if included is not None:
        expected[:, ~included] = 0.0
    sizes = queries.norm(dim=1)[:, None] * world.keys.double().norm(dim=1)
    assert (np.abs(found - expected) <= 1e-14 * sizes.numpy()).all()
    for one in range(world.rows):  # equal keys tie to the bit, wherever they lie
        same = (world.keys == world.keys[one]).all(1).numpy()
        if included is not None:
            same &= included
        assert len(np.unique(found[:, same], axis=1).T) <= 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("way", ["plain", "compiled"])
def test_a_weight_has_the_same_bits_whichever_way_it_is_computed(
    monkeypatch: Any, way: str, dtype: torch.dtype
) -> None:
    choose(monkeypatch, way)
    generator = torch.Generator().manual_seed(0)
    for width in (1, 2, 3, 7, 8, 9, 16, 31, 33, 64, 129, 257, 800):
        world = World(torch.randn(50, width, generator=generator, dtype=dtype), [7, 20])
        queries = torch.randn(6, width, generator=generator, dtype=torch.float64)
        whole = weights_room.all_weights(world.layer, queries)
        alone = weights_room.all_weights(world.layer, queries[4:5])
        assert np.array_equal(alone[0], whole[4])
        rows, which = np.repeat(np.arange(50), 6), np.tile(np.arange(6), 50)
        pairs = weights_room.pair_weights(world.layer, rows, queries, which)
        assert np.array_equal(pairs, whole[which, rows])


@pytest.mark.parametrize("threads", [1, 2])
def test_compiled_loops_use_all_threads_and_give_the_same(monkeypatch: Any, threads: int) -> None:
    choose(monkeypatch, "compiled, few")
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    generator = torch.Generator().manual_seed(0)
    world = World(torch.randn(20_000, 5, generator=generator), [300, 9000])
    queries = torch.randn(3, 5, generator=generator, dtype=torch.float64)
    found = weights_room.all_weights(world.layer, queries)
    assert np.allclose(found, brute(world, queries), rtol=0, atol=1e-13)


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(made=worlds())
def test_keys_that_recur_are_met_once_and_sums_stay_the_same(monkeypatch: Any, made: Any) -> None:
    monkeypatch.setattr(recurring, "WORTH", 0)
    monkeypatch.setattr(recurring, "ENOUGH_QUERIES", 1)
    monkeypatch.setattr(recurring, "SAVING", 1)
    world, queries, included, codes, groups = made
    found = recurring.recurring_keys(world.layer, 1)
    assert found is not None
    distinct = torch.unique(world.keys, dim=0)
    assert found.rows == len(distinct)
    for numbers, keys in found.blocks():
        for number, key in zip(range(numbers.start, numbers.stop), keys, strict=True):
            rows = torch.from_numpy(np.flatnonzero(found.number == number))
            assert torch.equal(world.keys[rows].double(), key.expand(len(rows), -1))
    _, absolute = sums.group_sums(world.layer, queries, included, codes, groups)
    weights = np.abs(brute(world, queries))
    chosen = np.ones(world.rows, bool) if included is None else included
    size = np.abs(world.keys.double().numpy()).sum() * float(queries.abs().max()) + 1e-300
    for group in range(groups):
        here = chosen & (codes == group)
        off = np.abs(absolute[:, group].numpy() - weights[:, here].sum(1)).max()
        assert off <= 1e-13 * size


@pytest.mark.parametrize("way", ["few", "plain", "compiled, few", "compiled"])
@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(made=worlds(), k=st.integers(1, 130), sign=SIGNS, saving=st.sampled_from([0, 1 << 62]))
def test_a_memory_that_stores_recurring_keys_once_gives_the_same(
    monkeypatch: Any, way: str, made: Any, k: int, sign: str, saving: int
) -> None:
    choose(monkeypatch, way)
    monkeypatch.setattr(visits, "SAVING", saving)  # by different keys, and pattern by pattern
    world, queries, included, codes, groups = made
    world.distinct = Distinct(world.keys)
    found = ranking.top_patterns(world.layer, queries, included, k, sign)
    check_top(world, queries, included, None, 1, k, sign, found)
    cells = grouped(codes, groups)
    found = ranking.top_patterns(world.layer, queries, included, k, sign, cells)
    check_top(world, queries, included, codes, groups, k, sign, found)
    signed, absolute = sums.group_sums(world.layer, queries, included, codes, groups)
    weights = brute(world, queries)
    chosen = np.ones(world.rows, bool) if included is None else included
    size = np.abs(world.keys.double().numpy()).sum() * float(queries.abs().max()) + 1e-300
    for group in range(groups):
        here = chosen & (codes == group)
        for mine, expected in ((signed, weights), (absolute, np.abs(weights))):
            off = np.abs(mine[:, group].numpy() - expected[:, here].sum(1)).max()
            assert off <= 1e-13 * size


def test_more_groups_than_a_table_can_hold_are_summed_as_they_stream(monkeypatch: Any) -> None:
    generator = torch.Generator().manual_seed(0)
    world = World(torch.randn(500, 6, generator=generator), [200])
    codes = torch.randint(0, 90, (500,), generator=generator).numpy()
    queries = torch.randn(9, 6, generator=generator, dtype=torch.float64)
    table = sums.group_sums(world.layer, queries, codes < 70, codes, 90)
    monkeypatch.setattr(sums, "LARGEST_TABLE", 0)
    monkeypatch.setattr(sums, "QUERIES_AT_ONCE", 4)
    streamed = sums.group_sums(world.layer, queries, codes < 70, codes, 90)
    for one, other in zip(table, streamed, strict=True):
        assert torch.allclose(one, other, rtol=0, atol=1e-12)


def test_every_pass_reports_its_progress() -> None:
    world = World(torch.randn(10_000, 6), [100])
    told: list[tuple[int, int]] = []
    with dualform.attention.reporting(lambda done, total: told.append((done, total))):
        weights_room.all_weights(world.layer, torch.ones(1, 6, dtype=torch.float64))
    assert told[0] == (0, 10_000)
    assert told[-1] == (10_000, 10_000)
    assert [done for done, _ in told] == sorted(done for done, _ in told)
    weights_room.all_weights(world.layer, torch.ones(1, 6, dtype=torch.float64))
    assert told[-1] == (10_000, 10_000)
    assert len(told) == 5


def test_a_pass_over_keys_that_are_stored_once_reports_its_progress_too() -> None:
    world = World(torch.randn(10_000, 6), [100])
    world.distinct = Distinct(world.keys)
    ask = torch.ones(1, 6, dtype=torch.float64)
    codes = np.arange(10_000) % 3
    for question in (
        lambda: weights_room.all_weights(world.layer, ask),
        lambda: weights_room.norms(world.layer),
        lambda: sums.group_sums(world.layer, ask, None, codes, 3),
    ):
        told: list[tuple[int, int]] = []
        with dualform.attention.reporting(
            lambda done, total, told=told: told.append((done, total))
        ):
            question()
        assert told[0] == (0, world.distinct.rows)
        assert told[-1] == (world.distinct.rows, world.distinct.rows)


def test_weighing_again_reports_its_progress(monkeypatch: Any) -> None:
    choose(monkeypatch, "compiled, few")
    world = World(torch.randn(10_000, 6), [100])
    ask = torch.ones(1, 6, dtype=torch.float64)
    rows = np.arange(0, 10_000, 99)
    told: list[tuple[int, int]] = []
    with dualform.attention.reporting(lambda done, total: told.append((done, total))):
        weights_room.pair_weights(world.layer, rows, ask, np.zeros_like(rows))
    assert told[0] == (0, 10_000)
    assert told[-1] == (10_000, 10_000)


@pytest.mark.parametrize("way", ["few", "plain"])
def test_keys_that_are_not_finite_are_refused_by_name(monkeypatch: Any, way: str) -> None:
    choose(monkeypatch, way)
    keys = torch.ones(8, 3)
    keys[5, 1] = torch.inf
    queries = torch.ones(1, 3, dtype=torch.float64)
    with pytest.raises(dualform.QueryError, match="layer 'fc' holds keys that are not finite"):
        ranking.top_patterns(World(keys, [4]).layer, queries, None, 2, "most")
