"""Attention weights against brute force: the same numbers by one matrix product over all keys."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor, nn

import dualform
from dualform.attention import buckets, engine, ranking
from dualform.attention import weights as weights_room


def brute(run: Any, layer: str, queries: torch.Tensor) -> np.ndarray[Any, Any]:
    weights: np.ndarray[Any, Any] = (queries @ run.memory.layer(layer).keys.T).numpy()
    return weights


def hidden(run: Any, x: torch.Tensor) -> torch.Tensor:
    """What fc2 receives, computed by hand."""
    with torch.no_grad():
        received: torch.Tensor = torch.tanh(run.model.fc1(x))
    return received


def test_the_queries_of_an_input_are_what_each_layer_receives(run: Any, difference: Any) -> None:
    x = run.inputs[:3]
    attention = run.dual.attend(x)
    assert list(attention) == ["fc1", "fc2", "fc3"]
    assert torch.equal(attention["fc1"].queries, x)
    assert difference(attention["fc2"].queries, hidden(run, x)) <= 1e-12


def test_weights_are_key_times_query(run: Any) -> None:
    spotlight = run.dual.attend(run.inputs[:3])["fc1"]
    expected = brute(run, "fc1", run.inputs[:3])
    assert spotlight.weights.shape == (3, 240)
    assert np.allclose(spotlight.weights.numpy(), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("sign", ["most", "least", "absolute"])
def test_top_is_a_full_sort_cut_off(run: Any, sign: str) -> None:
    table = run.dual.attend(run.inputs[:2])["fc2"].top(7, sign=sign)
    weights = brute(run, "fc2", hidden(run, run.inputs[:2]))
    ranked = {"most": weights, "least": -weights, "absolute": np.abs(weights)}[sign]
    for query in range(2):
        mine = table["query"] == query
        best = np.sort(ranked[query])[::-1][:7]
        found = weights[query][table["pattern"][mine]]
        assert np.allclose(np.abs(found), np.abs(best), rtol=0, atol=1e-12)
        assert np.allclose(table["weight"][mine], found, rtol=0, atol=1e-12)


def test_top_by_group_is_the_top_of_each_group(run: Any) -> None:
    table = run.dual.attend(run.inputs[:1])["fc1"].top(3, by="label")
    weights = brute(run, "fc1", run.inputs[:1])[0]
    labels = run.memory.layer("fc1").patterns["label"]
    for label in range(4):
        mine = table["weight"][table["label"] == label]
        assert np.allclose(mine, np.sort(weights[labels == label])[::-1][:3], rtol=0, atol=1e-12)


@pytest.mark.parametrize("count", [2, 12])
def test_top_by_two_columns_is_the_top_of_every_combination(run: Any, count: int) -> None:
    """Of a few queries, whose weights are held, and of many, which are ranked as they stream."""
    table = run.dual.attend(run.inputs[:count])["fc1"].top(3, by=["task", "label"])
    weights = brute(run, "fc1", run.inputs[:count])
    patterns = run.memory.layer("fc1").patterns
    rows = table.rows()
    for query in range(count):
        for task in ("first", "second"):
            for label in range(4):
                here = (patterns["task"] == task) & (patterns["label"] == label)
                expected = np.sort(weights[query][here])[::-1][:3]
                wanted = {"query": query, "task": task, "label": label}
                mine = [row["weight"] for row in rows if wanted.items() <= row.items()]
                assert np.allclose(mine, expected, rtol=0, atol=1e-12)
    assert "per task and label" in table.caption


def test_the_same_input_seen_again_ties_and_the_earlier_visit_comes_first(run: Any) -> None:
    table = run.dual.attend(run.inputs[11:12])["fc1"].top(240)
    examples, patterns = table["example"], table["pattern"]
    for example in np.unique(examples):
        visits = patterns[examples == example]
        assert np.all(np.diff(visits) > 0)
        assert len(set(table["weight"][examples == example].tolist())) == 1


def test_sums_by_group_add_up_signed_and_absolute(run: Any) -> None:
    spotlight = run.dual.attend(run.inputs[:2])["fc1"]
    table = spotlight.sum_by("label")
    weights = brute(run, "fc1", run.inputs[:2])
    labels = run.memory.layer("fc1").patterns["label"]
    for row in table.rows():
        mine = weights[row["query"]][labels == row["label"]]
        assert row["sum"] == pytest.approx(mine.sum(), abs=1e-11)
        assert row["absolute"] == pytest.approx(np.abs(mine).sum(), abs=1e-11)
        assert row["patterns"] == len(mine)


def test_sums_by_two_columns_are_those_of_every_combination_that_occurs(run: Any) -> None:
    spotlight = run.dual.attend(run.inputs[:2])["fc1"]
    table = spotlight.sum_by("task", "label")
    weights = brute(run, "fc1", run.inputs[:2])
    patterns = run.memory.layer("fc1").patterns
    cells = list(zip(patterns["task"].tolist(), patterns["label"].tolist(), strict=True))
    assert len(table) == 2 * len(set(cells))
    for row in range(len(table)):
        cell = (table["task"][row], table["label"][row])
        here = np.array([c == cell for c in cells])
        assert table["patterns"][row] == here.sum()
        mine = weights[table["query"][row]][here]
        assert abs(table["sum"][row] - mine.sum()) <= 1e-11
        assert abs(table["absolute"][row] - np.abs(mine).sum()) <= 1e-11
    assert spotlight.sum_by(["task", "label"])["sum"].tolist() == table["sum"].tolist()
    with pytest.raises(dualform.QueryError, match="groups need a column; there are step"):
        spotlight.sum_by()


def test_visits_of_an_example_are_added_up_strongest_first(run: Any) -> None:
    spotlight = run.dual.attend(run.inputs[:1])["fc1"]
    weights = brute(run, "fc1", run.inputs[:1])[0]
    examples = run.memory.layer("fc1").patterns["example"]
    before, after = spotlight.by_example(), spotlight.by_example(absolute="after")
    assert sorted(before["example"].tolist()) == sorted(set(examples.tolist()))
    for table in (before, after):  # the strongest first, whatever its sign
        assert np.all(np.diff(table["absolute"]) <= 0)
        assert table["sum"].min() < 0
    for table, what in ((before, lambda a: np.abs(a).sum()), (after, lambda a: abs(a.sum()))):
        for row, example in enumerate(table["example"].tolist()):
            mine = weights[examples == example]
            assert table["patterns"][row] == len(mine)
            assert abs(table["sum"][row] - mine.sum()) <= 1e-11
            assert abs(table["absolute"][row] - what(mine)) <= 1e-11
    with pytest.raises(dualform.QueryError, match='expected "before" or "after"'):
        spotlight.by_example(absolute="both")


def test_an_earlier_view_lists_only_the_examples_it_has_seen(run: Any) -> None:
    examples = run.memory.layer("fc1").patterns["example"]
    steps = run.memory.layer("fc1").patterns["step"]
    table = run.dual.at(step=2).attend(run.inputs[:2])["fc1"].by_example()
    seen = set(examples[steps < 2].tolist())
    for query in range(2):
        assert set(np.asarray(table["example"])[table["query"] == query].tolist()) == seen


def test_the_effective_number_of_patterns_is_between_one_and_all(run: Any) -> None:
    spotlight = run.dual.attend(run.inputs[:3])["fc2"]
    weights = brute(run, "fc2", hidden(run, run.inputs[:3]))
    expected = np.abs(weights).sum(1) ** 2 / (weights**2).sum(1)
    assert np.allclose(spotlight.effective, expected, rtol=1e-12)
    assert ((spotlight.effective >= 1) & (spotlight.effective <= 240)).all()
    nothing = run.dual.attend(queries={"fc2": torch.zeros(1, 9)})
    assert nothing["fc2"].effective.tolist() == [0.0]


def test_text_columns_group_too(run: Any) -> None:
    table = run.dual.attend(run.inputs[:1])["fc1"].sum_by("task")
    assert table["task"].tolist() == ["first", "second"]
    assert table["patterns"].tolist() == [120, 120]


@pytest.mark.parametrize("at", [30, 17])
@pytest.mark.parametrize("by", [None, "label"])
def test_a_timeline_of_other_ranges_reads_only_what_their_ends_cut(
    run: Any, monkeypatch: pytest.MonkeyPatch, by: str | None, at: int
) -> None:
    monkeypatch.setattr(buckets, "BUCKETS", 16)  # of two steps each
    monkeypatch.setattr(weights_room, "FEW", 0)
    read: list[int] = []
    blocks = engine.key_blocks

    def counted(*args: Any) -> Any:
        for rows, keys in blocks(*args):
            read.append(len(rows))
            yield rows, keys

    monkeypatch.setattr(engine, "key_blocks", counted)
    dual = run.dual.at(at)
    spotlight = dual.attend(run.inputs[:5])["fc2"]
    weights = spotlight.weights.numpy()
    patterns = run.memory.layer("fc2").patterns
    steps, labels = patterns["step"][spotlight.rows], patterns["label"][spotlight.rows]
    passes = []
    for bins in (4, 3, 1, 4):
        read.clear()
        table = spotlight.over("step", bins=bins, by=by)
        passes.append(sum(read))
        for i in range(len(table["sum"])):
            here = (steps >= table["from"][i]) & (steps < table["to"][i])
            here &= True if by is None else labels == table["label"][i]
            expected = weights[table["query"][i], here]
            assert abs(table["sum"][i] - expected.sum()) <= 1e-11
            assert abs(table["absolute"][i] - np.abs(expected).sum()) <= 1e-11
            assert table["patterns"][i] == here.sum()
    first, other, whole, again = passes
    assert first >= 8 * at  # all of it once
    assert other <= 2 * 16  # at most two buckets are cut
    assert whole == again == 0


def test_the_timeline_adds_up_to_the_whole(run: Any) -> None:
    spotlight = run.dual.attend(run.inputs[:1])["fc1"]
    line = spotlight.over("step", bins=7)
    assert line["from"][0] == 0
    assert line["to"][-1] == 30
    assert np.array_equal(line["to"][:-1], line["from"][1:])
    assert line["sum"].sum() == pytest.approx(float(spotlight.weights.sum()), abs=1e-10)
    split = spotlight.over("step", bins=7, by="label")
    assert split["sum"].sum() == pytest.approx(line["sum"].sum(), abs=1e-10)
    assert split["patterns"].sum() == 240
    assert len(spotlight.over("step", bins=500)) == 30


def test_an_earlier_view_attends_to_earlier_patterns_only(run: Any) -> None:
    spotlight = run.dual.at(10).attend(run.inputs[:1])["fc1"]
    assert spotlight.weights.shape == (1, 80)
    assert spotlight.top(500)["step"].max() == 9
    masked = run.dual.without(label=2).attend(run.inputs[:1])["fc1"]
    assert 2 not in masked.top(500)["label"].tolist()
    assert len(masked.rows) == masked.weights.shape[1]


def test_the_last_visit_is_the_last_micro_batch_that_held_the_example(tmp_path: Path) -> None:
    """First in the first of two micro-batches, later in the second: one query, the later key."""
    torch.manual_seed(0)
    model = nn.Linear(4, 3).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen: list[Tensor] = []
    with dualform.record(model, tmp_path / "run") as recorder:
        for order in ([0, 1, 2, 3], [2, 3, 0, 1], [0, 2, 1, 0]):
            for pair in torch.tensor(order).split(2):
                inputs = torch.randn(2, 4).double()
                seen += [
                    x for x, example in zip(inputs, pair.tolist(), strict=True) if example == 0
                ]
                recorder.tag(example=pair)
                model(inputs).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    dual = dualform.DualForm(model, tmp_path / "run")
    assert torch.equal(dual.attend(example=0)["model"].queries, seen[-1][None])
    assert torch.equal(dual.at(2).attend(example=0)["model"].queries, seen[1][None])
    assert abs(dual.contribute(example=0, target=1).residual) < 1e-12


def test_a_recorded_example_asks_with_the_keys_of_its_last_visit(run: Any) -> None:
    patterns = run.memory.layer("fc2").patterns
    last = np.flatnonzero(patterns["example"] == 5)[-1]
    spotlight = run.dual.attend(example=5)["fc2"]
    assert torch.equal(spotlight.queries[0], run.memory.layer("fc2").keys[last])


def test_queries_may_be_handed_over(run: Any) -> None:
    given_one = run.dual.attend(queries=run.inputs[0], layers="fc1")["fc1"]
    given_all = run.dual.attend(queries={"fc1": run.inputs[:1]})
    assert list(given_all) == ["fc1"]
    assert torch.equal(given_one.weights, given_all["fc1"].weights)


def test_float32_inputs_to_a_float32_run_keep_their_device_and_width(train: Any) -> None:
    run = train(dtype=torch.float32, steps=4)
    spotlight = run.dual.attend(run.inputs[:1])["fc1"]
    assert spotlight.queries.dtype == torch.float32
    assert spotlight.weights.dtype == torch.float64
    exact = run.inputs[:1].double() @ run.memory.layer("fc1").keys.double().T
    assert float((spotlight.weights - exact).abs().max()) <= 1e-12


def test_positions_are_queries_of_their_own(train: Any) -> None:
    run = train(shape=(3, 6), steps=5)
    spotlight = run.dual.attend(run.inputs[:2])["fc1"]
    assert spotlight.queries.shape == (6, 6)
    assert "position" in spotlight.top(2).columns
    assert run.dual.attend(example=int(spotlight.patterns["example"][0]))["fc1"].queries.shape == (
        3,
        6,
    )


def test_reprs_are_readable(run: Any) -> None:
    attention = run.dual.attend(run.inputs[:1])
    assert "fc2: 1 × 9 queries over 240 patterns" in repr(attention)
    text = repr(attention["fc1"])
    assert "key · query" in text
    assert "label" in text
    assert "score" not in text


@settings(max_examples=30, deadline=None)
@given(block=st.integers(1, 300), k=st.integers(1, 300), seed=st.integers(0, 1000))
def test_block_size_does_not_matter(run: Any, block: int, k: int, seed: int) -> None:
    """Remark 3.1 in small: how the memory is cut up changes nothing."""
    layer = run.memory.layer("fc1")
    generator = torch.Generator().manual_seed(seed)
    # Small whole numbers: every product is exact, and ties abound.
    queries = torch.randint(-2, 3, (2, 6), generator=generator).double()
    included = np.random.default_rng(seed).random(240) < 0.7
    queries = queries.repeat(5, 1)  # more than a few: block by block
    whole = ranking.top_patterns(layer, queries, included, k, "most")
    cut = ranking.top_patterns(layer, queries, included, k, "most", block=block)
    for one, other in zip(whole, cut, strict=True):
        assert np.array_equal(one, other)
