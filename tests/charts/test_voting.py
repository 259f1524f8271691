"""Votes: Table 1 as a picture, ours beside the paper's."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import pytest

import dualform
from dualform import charts

OURS = {
    "layer 0": {"wrong: target": [19.1, 20.5], "right": [75.0, 75.2]},
    "layer 1": {"wrong: target": [20.2, 21.0], "right": [80.0, 80.4]},
}
PAPER = {
    "layer 0": {"wrong: target": {"mean": 17.2, "std": 2.7}, "right": {"mean": 75.1, "std": 0.0}},
    "layer 1": {"wrong: target": {"mean": 18.0, "std": 2.9}, "right": {"mean": 78.8, "std": 0.8}},
}


def test_ours_and_the_papers_stand_side_by_side(
    rows_with: Callable[..., Any], texts_of: Callable[..., Any]
) -> None:
    chart = charts.votes(OURS, paper=PAPER, title="Table 1")
    drawn = {(r["source"], r["layer"], r["question"]): r for r in rows_with(chart, "source")}
    assert len(drawn) == 8
    one = drawn["ours", "layer 1", "right"]
    assert one["mean"] == pytest.approx(80.2)
    assert one["std"] == pytest.approx(statistics.stdev([80.0, 80.4]))
    other = drawn["paper", "layer 0", "wrong: target"]
    assert (other["low"], other["high"]) == (pytest.approx(14.5), pytest.approx(19.9))
    texts = set(texts_of(chart))
    assert {"ours", "paper", "layer 0", "layer 1", "right", "wrong: target", "Table 1"} <= texts
    assert {"17.2 ± 2.7", "75.1 ± 0.1", "0", "20", "100", "agreement (%)"} <= texts


def test_ours_alone_need_no_legend(
    rows_with: Callable[..., Any], texts_of: Callable[..., Any]
) -> None:
    chart = charts.votes(OURS)
    assert {row["source"] for row in rows_with(chart, "source")} == {"ours"}
    assert "ours" not in texts_of(chart)


def test_numbers_to_compare_with_must_have_a_counterpart() -> None:
    with pytest.raises(
        dualform.QueryError, match="paper has 'layer 9', 'right', which ours has not"
    ):
        charts.votes(OURS, paper={"layer 9": {"right": 3}})
    with pytest.raises(dualform.QueryError, match="nothing to draw"):
        charts.votes({})
