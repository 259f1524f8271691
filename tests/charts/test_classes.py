"""Attention class by class: the numbers in the pictures are those of the stored keys."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import dualform
from dualform import charts

EXACT = 1e-12
BOTH = ("task", "label")
LAYERS = ("fc1", "fc2")


@pytest.mark.parametrize("absolute", [True, False])
def test_the_top_of_a_class_are_its_largest_weights_in_order(
    run: Any, rows_with: Callable[..., Any], absolute: bool
) -> None:
    chart = charts.top_per_class(run.attention, 10, absolute=absolute)
    rows = rows_with(chart, "rank", "weight")
    expected = []
    for layer in ("fc1", "fc2"):
        alpha = np.abs(run.alpha(layer)) if absolute else run.alpha(layer)
        for label in range(3):
            mine = np.sort(alpha[run.column(layer, "label") == label])[::-1][:10]
            expected += [(str(label), i + 1, weight) for i, weight in enumerate(mine)]
            expected.append(expected[-1])  # the last rank has an end too
    assert [(row["class"], row["rank"]) for row in rows] == [e[:2] for e in expected]
    drawn = np.array([row["weight"] for row in rows])
    assert np.abs(drawn - [e[2] for e in expected]).max() <= EXACT


def test_classes_of_two_tasks_are_drawn_apart(run: Any, rows_with: Callable[..., Any]) -> None:
    chart = charts.top_per_class(run.attention, 5, by=BOTH, layers=["fc2"])
    rows = rows_with(chart, "rank", "weight")
    alpha = run.alpha("fc2")
    task, label = run.column("fc2", "task"), run.column("fc2", "label")
    for name in ("first", "second"):
        for value in range(3):
            mine = [row for row in rows if row["class"] == f"{name} {value}"]
            expected = np.sort(alpha[(task == name) & (label == value)])[::-1][:5]
            drawn = [row["weight"] for row in mine]
            assert np.allclose(drawn, [*expected, expected[-1]], rtol=0, atol=EXACT)
            assert {row["shade"] for row in mine} == {name}
    ends = [max(row["x"] for row in rows if row["class"] == f"first {v}") for v in range(3)]
    begins = min(row["x"] for row in rows if row["class"] == "second 0")
    assert begins - max(ends) > 0.5


def test_few_ranks_are_drawn_the_first_and_the_last_among_them(
    run: Any, rows_with: Callable[..., Any]
) -> None:
    whole = rows_with(charts.top_per_class(run.attention["fc2"], 40), "rank")
    few = rows_with(charts.top_per_class(run.attention["fc2"], 40, points=7), "rank")
    ranks = [row["rank"] for row in few if row["class"] == "1"]
    assert len(set(ranks)) == 7
    assert ranks[0] == 1
    assert ranks[-2:] == [40, 40]
    assert all(row in whole for row in few)
    with pytest.raises(dualform.QueryError, match="points=1: expected at least 2"):
        charts.top_per_class(run.attention["fc2"], points=1)


def test_tables_made_by_hand_are_drawn_with_their_own_unit(
    rows_with: Callable[..., Any], texts_of: Callable[..., Any]
) -> None:
    table = dualform.Table({"label": ["cat", "dog"], "absolute": [2.0, 0.0], "sum": [-2.0, 0.0]})
    chart = charts.totals_per_class(table, unit="Σ|α||e|", predicted="dog")
    assert [row["total"] for row in rows_with(chart, "total")] == [2.0, 0.0]
    assert {"Σ|α||e|", "cat", "dog", "0.5", "predicted"} <= set(texts_of(chart))
    chart = charts.totals_per_class(table, absolute=False, predicted="cat")
    assert [row["y"] for row in rows_with(chart, "mark")] == [0.0]  # above a bar that hangs down


def test_a_single_pattern_can_be_seen(rows_with: Callable[..., Any]) -> None:
    chart = charts.top_per_class(dualform.Table({"label": [0], "weight": [3.0]}))
    left, right = (row["x"] for row in rows_with(chart, "rank"))
    assert right - left > 0.5


def test_names_of_very_many_classes_do_not_run_into_each_other(
    texts_of: Callable[..., Any],
) -> None:
    many = dualform.Table({"label": list(range(60)), "absolute": [1.0] * 60})
    shown = [text for text in texts_of(charts.totals_per_class(many)) if text.isdigit()]
    assert 10 < len(shown) < 60
    few = dualform.Table({"label": list(range(20)), "absolute": [9.5] * 20})
    assert set(map(str, range(20))) <= set(texts_of(charts.totals_per_class(few)))


@pytest.mark.parametrize(("absolute", "column"), [(True, "absolute"), (False, "sum")])
def test_the_totals_are_sums_over_every_pattern(
    run: Any, rows_with: Callable[..., Any], absolute: bool, column: str
) -> None:
    rows = rows_with(charts.totals_per_class(run.attention, absolute=absolute), "total")
    expected = []
    for layer in ("fc1", "fc2"):
        alpha = np.abs(run.alpha(layer)) if absolute else run.alpha(layer)
        labels = run.column(layer, "label")
        expected += [alpha[labels == value].sum() for value in range(3)]
    assert np.abs(np.array([row["total"] for row in rows]) - expected).max() <= 100 * EXACT


def test_tables_give_the_same_pictures_as_spotlights(run: Any) -> None:
    attention = run.attention
    sums = {name: spotlight.sum_by(*BOTH) for name, spotlight in attention.items()}
    one = charts.totals_per_class(attention, by=BOTH, predicted=1)
    assert charts.totals_per_class(sums, by=BOTH, predicted=1).to_dict() == one.to_dict()
    tops = {n: s.top(20, by=BOTH, sign="absolute") for n, s in attention.items()}
    one = charts.top_per_class(attention, 20, by=BOTH)
    assert charts.top_per_class(tops, 20, by=BOTH).to_dict() == one.to_dict()


def test_a_predicted_class_is_marked_in_every_task_and_the_true_one_in_its_own(
    run: Any, rows_with: Callable[..., Any], texts_of: Callable[..., Any]
) -> None:
    chart = charts.totals_per_class(run.attention, by=BOTH, predicted=2, true=("first", 0))
    bars = rows_with(chart, "total")
    strong = {row["class"] for row in bars if not row["shade"].endswith("(others)")}
    assert strong == {"first 2", "second 2", "first 0"}
    marks = rows_with(chart, "mark")
    of = {row["class"]: (row["from"] + row["to"]) / 2 for row in bars}
    layers = 2
    places = {kind: sorted(round(row["x"], 6) for row in marks if row["mark"] == kind)
              for kind in ("predicted", "true")}  # fmt: skip
    assert places["predicted"] == sorted(
        [round(of["first 2"], 6), round(of["second 2"], 6)] * layers
    )
    assert places["true"] == [round(of["first 0"], 6)] * layers
    assert {"predicted", "true", "first", "second", "layer fc1"} <= set(texts_of(chart))


def test_an_index_of_torch_names_a_class(run: Any) -> None:
    predicted = run.dual(run.test).argmax()
    one = charts.totals_per_class(run.attention, predicted=predicted)
    assert (
        one.to_dict() == charts.totals_per_class(run.attention, predicted=int(predicted)).to_dict()
    )


def test_classes_and_layers_are_shown_by_the_names_given(
    run: Any, texts_of: Callable[..., Any]
) -> None:
    names = {("second", 1): "coat", 2: "bag", "first": "Digits"}
    chart = charts.totals_per_class(
        run.attention, by=BOTH, names=names, layers={"fc2": "layer 1"}, title="A title"
    )
    texts = texts_of(chart)
    assert {"coat", "bag", "0", "Digits", "second", "layer 1", "A title", "Σ|α|"} <= set(texts)
    assert texts.count("bag") == 2
    assert "layer fc1" not in texts


def test_a_heading_says_layer_once(run: Any, texts_of: Callable[..., Any]) -> None:
    tables = {f"layer {i}": run.attention[name].sum_by("label") for i, name in enumerate(LAYERS)}
    texts = texts_of(charts.totals_per_class(tables))
    assert {"layer 0", "layer 1"} <= set(texts)
    assert not any("layer layer" in text for text in texts)


def test_names_are_nothing_but_text(run: Any, texts_of: Callable[..., Any]) -> None:
    odd = ["'] + alert(1) + ['", 'say "so"', "back\\slash"]
    texts = texts_of(charts.totals_per_class(run.attention["fc2"], names=odd))
    assert any("alert(1)" in text for text in texts)
    assert any("so" in text for text in texts)
    assert "back\\slash" in texts


def test_groups_choose_classes_and_their_order(run: Any, rows_with: Callable[..., Any]) -> None:
    wanted = [("second", 2), ("first", 0)]
    chart = charts.totals_per_class(run.attention["fc2"], by=BOTH, groups=wanted)
    assert [row["class"] for row in rows_with(chart, "total")] == ["second 2", "first 0"]


def test_one_of_several_queries_is_drawn(run: Any, rows_with: Callable[..., Any]) -> None:
    several = run.dual.attend(run.images["second"][:3].flatten(1))
    alone = run.dual.attend(run.images["second"][2:3].flatten(1))
    one = rows_with(charts.totals_per_class(several, query=2), "total")
    other = rows_with(charts.totals_per_class(alone), "total")
    assert np.allclose([r["total"] for r in one], [r["total"] for r in other], atol=1e-10)
    with pytest.raises(dualform.QueryError, match="3 queries"):
        charts.totals_per_class(several)
    with pytest.raises(dualform.QueryError, match="only one"):
        charts.totals_per_class(alone, query=1)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"predicted": 7}, "predicted=7 names no class"),
        ({"true": ("third", 0), "by": BOTH}, "names no class"),
        ({"groups": [9]}, "groups=9 names no class"),
        ({"layers": ["fc9"]}, "expected some of fc1, fc2, or None"),
        ({"by": "colour"}, "colour"),
        ({"by": ("task", "label", "example")}, "expected a column of classes"),
        ({"names": {0: "same", 1: "same"}}, "both be called 'same'"),
    ],
)
def test_what_is_not_there_cannot_be_drawn(run: Any, asked: dict[str, Any], message: str) -> None:
    with pytest.raises(dualform.QueryError, match=message):
        charts.totals_per_class(run.attention, **asked)
    with pytest.raises(dualform.QueryError, match=message):
        charts.top_per_class(run.attention, 5, **asked)


def test_only_attention_is_drawn_class_by_class(run: Any) -> None:
    with pytest.raises(dualform.QueryError, match="int was given to draw"):
        charts.totals_per_class(7)  # type: ignore[arg-type]
    with pytest.raises(dualform.QueryError, match="Contribution was given to draw"):
        charts.totals_per_class(run.dual.contribute(run.test, target=0))


def test_a_table_without_the_column_says_what_it_has(run: Any) -> None:
    with pytest.raises(dualform.QueryError, match="no column 'label' in this table; it has: task"):
        charts.totals_per_class(run.attention["fc2"].sum_by("task"))
