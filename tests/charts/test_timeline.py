"""Attention over training: sums per range of steps, and when the strongest were met."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import dualform
from dualform import charts


@pytest.mark.parametrize("mean", [False, True])
def test_each_range_shows_what_its_patterns_got(
    run: Any, rows_with: Callable[..., Any], mean: bool
) -> None:
    chart = charts.over_time(run.attention["fc1"], by="label", bins=6, mean=mean)
    rows = rows_with(chart, "at", "amount")
    alpha, steps = np.abs(run.alpha("fc1")), run.column("fc1", "step")
    labels = run.column("fc1", "label")
    for start in range(0, 24, 4):
        for label in range(3):
            inside = (steps >= start) & (steps < start + 4) & (labels == label)
            expected = alpha[inside].mean() if mean else alpha[inside].sum()
            of_group = [row for row in rows if row["group"] == str(label)]
            drawn = [row for row in of_group if row["order"] in (2 * start, 2 * start + 1)]
            assert [row["at"] for row in drawn] == [start, start + 4]
            assert [row["amount"] for row in drawn] == pytest.approx([expected] * 2, abs=1e-11)


def test_where_a_group_has_no_pattern_its_line_is_interrupted(
    run: Any, rows_with: Callable[..., Any]
) -> None:
    rows = rows_with(charts.over_time(run.attention["fc2"], by="task", bins=4), "at", "amount")
    first = [row["amount"] for row in rows if row["group"] == "first"]
    assert [value is None for value in first] == [False] * 4 + [True] * 4


def test_contributions_over_time_are_signed_and_add_up_to_the_patterns_share(
    run: Any, rows_with: Callable[..., Any], texts_of: Callable[..., Any]
) -> None:
    contribution = run.dual.contribute(run.test, target=1)
    chart = charts.over_time(contribution, bins=8)
    rows = rows_with(chart, "at", "amount")
    total = sum(row["amount"] for row in rows) / 2  # each range has a start and an end
    assert total == pytest.approx(contribution.shares["patterns"], abs=1e-12)
    texts = texts_of(chart)
    assert "Contribution to output 1 of the model" in texts
    assert "Σ contribution" in texts


def test_tables_and_spotlights_give_the_same_timeline(run: Any) -> None:
    tables = {n: s.over("step", bins=5, by="task") for n, s in run.attention.items()}
    one = charts.over_time(run.attention, by="task", bins=5)
    assert charts.over_time(tables, by="task").to_dict() == one.to_dict()


def test_the_strongest_are_counted_where_training_met_them(
    run: Any, rows_with: Callable[..., Any], texts_of: Callable[..., Any]
) -> None:
    chart = charts.top_over_time(run.attention, 30, bins=6)
    rows = [row for row in rows_with(chart, "count") if row["from"] < 24]
    drawn = {}
    for layer, start in ((layer, start) for layer in ("fc1", "fc2") for start in range(0, 24, 4)):
        alpha = np.abs(run.alpha(layer))
        steps = run.column(layer, "step")[np.argsort(-alpha, kind="stable")[:30]]
        drawn[layer, start] = int(((steps >= start) & (steps < start + 4)).sum())
    bars = [row for i, row in enumerate(rows) if i % 12 < 6]  # bars, then the line of each layer
    assert [row["count"] for row in bars] == list(drawn.values())
    assert all(row["even"] == pytest.approx(30 / 6) for row in bars)
    assert sum(row["count"] for row in bars) == 60
    assert {"layer fc1", "layer fc2", "of the top 30", "step"} <= set(texts_of(chart))
    assert "counts per range of steps; dashed: if time did not matter" in texts_of(chart)


def test_more_lines_than_colours_have_to_be_chosen_from(run: Any) -> None:
    with pytest.raises(dualform.QueryError, match=r"12 groups would need 12 colours.*groups="):
        charts.over_time(run.attention["fc1"], by="example")
    chart = charts.over_time(run.attention["fc1"], by="example", groups=[3, 1, 2])
    scale = chart.to_dict()["concat"][0]["encoding"]["color"]["scale"]
    assert scale["domain"] == ["3", "1", "2"]
    assert len(set(scale["range"])) == 3


def test_what_a_table_does_not_hold_cannot_be_counted(run: Any) -> None:
    with pytest.raises(dualform.QueryError, match="expected spotlights"):
        charts.top_over_time({"fc1": run.attention["fc1"].top(5)})  # type: ignore[dict-item]
    with pytest.raises(dualform.QueryError, match="bins=0"):
        charts.over_time(run.attention, bins=0)


@pytest.mark.parametrize(("by", "mean"), [(None, False), (None, True), ("label", True)])
def test_the_even_line_is_all_patterns_attended_to_alike(
    run: Any,
    rows_with: Callable[..., Any],
    texts_of: Callable[..., Any],
    by: str | None,
    mean: bool,
) -> None:
    chart = charts.over_time(run.attention["fc2"], by=by, bins=4, mean=mean)
    each = np.abs(run.alpha("fc2")).mean()
    even = [row["even"] for row in rows_with(chart, "at", "even")]
    expected = each * (1 if mean else 144 / 4)
    assert even == pytest.approx([expected] * len(even), abs=1e-11)
    assert len(even) >= 8
    assert "even" in texts_of(chart)


def test_groups_that_are_summed_have_no_even_line(run: Any, rows_with: Callable[..., Any]) -> None:
    assert not rows_with(charts.over_time(run.attention, by="label"), "even")
