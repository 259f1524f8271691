"""Accuracies: means and deviations over runs, drawn where they belong."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import dualform
from dualform import charts

FOUND = {
    "final": {"MNIST": [45.7, 52.5, 49.0], "F-MNIST": {"mean": 86.5, "std": 0.4}},
    "masked": {"MNIST": 96.4, "F-MNIST": np.array([9.0, 11.0])},
}


def test_runs_are_drawn_as_mean_and_deviation(rows_with: Callable[..., Any]) -> None:
    rows = rows_with(charts.accuracies(FOUND), "condition", "mean")
    drawn = {(row["condition"], row["task"]): row for row in rows}
    runs = FOUND["final"]["MNIST"]
    one = drawn["final", "MNIST"]
    assert one["mean"] == pytest.approx(statistics.mean(runs))
    assert one["std"] == pytest.approx(statistics.stdev(runs))
    assert one["low"] == pytest.approx(one["mean"] - one["std"])
    assert one["high"] == pytest.approx(one["mean"] + one["std"])
    assert one["text"] == "49.1 ± 3.4"
    assert drawn["final", "F-MNIST"]["text"] == "86.5 ± 0.4"
    assert drawn["masked", "MNIST"]["text"] == "96.4"
    assert drawn["masked", "MNIST"]["std"] is None
    assert drawn["masked", "F-MNIST"]["mean"] == 10.0


def test_conditions_tasks_and_numbers_are_all_readable(texts_of: Callable[..., Any]) -> None:
    chart = charts.accuracies(FOUND, paper={"final": {"MNIST": 45}}, title="Forgetting")
    texts = set(texts_of(chart))
    assert {"final", "masked", "MNIST", "F-MNIST", "paper", "Forgetting"} <= texts
    assert {"49.1 ± 3.4", "96.4", "0", "20", "40", "60", "80", "100", "test accuracy (%)"} <= texts


def test_the_papers_numbers_stand_at_their_place(rows_with: Callable[..., Any]) -> None:
    chart = charts.accuracies(FOUND, paper={"final": {"MNIST": 45}}, reference="the paper")
    rows = rows_with(chart, "source")
    assert {(row["condition"], row["task"], row["mean"]) for row in rows} == {
        ("final", "MNIST", 45)
    }
    with pytest.raises(
        dualform.QueryError, match="'travelled back', 'MNIST', which was not measured"
    ):
        charts.accuracies(FOUND, paper={"travelled back": {"MNIST": 97}})


def test_a_curve_has_a_point_for_every_strength(
    rows_with: Callable[..., Any], texts_of: Callable[..., Any]
) -> None:
    strength = np.linspace(0, 1, 5)
    first = [[40.0 + 50 * s, 44.0 + 50 * s] for s in strength]
    second = [86.0 - 70 * s for s in strength]
    chart = charts.strengths(strength, {"MNIST": first, "F-MNIST": second}, title="Masking")
    rows = rows_with(chart, "strength", "mean")
    drawn = {(row["task"], row["strength"]): row for row in rows}
    for s, runs, alone in zip(strength, first, second, strict=True):
        assert drawn["MNIST", s]["mean"] == pytest.approx(sum(runs) / 2)
        assert drawn["MNIST", s]["std"] == pytest.approx(statistics.stdev(runs))
        assert drawn["F-MNIST", s]["mean"] == pytest.approx(alone)
        assert drawn["F-MNIST", s]["low"] == drawn["F-MNIST", s]["high"]
    assert {"MNIST", "F-MNIST", "strength of the mask", "Masking", "100"} <= set(texts_of(chart))


@pytest.mark.parametrize(
    ("found", "message"),
    [
        ({}, "nothing to draw"),
        ({"final": {}}, "nothing to draw"),
        ({"final": {"MNIST": []}}, "MNIST, final, has no runs"),
        ({"final": {"MNIST": "high"}}, "expected a number or several"),
        ({"final": {"MNIST": {"std": 1}}}, "given by std; expected mean and std"),
        ({"final": {"MNIST": float("nan")}}, "expected a finite number"),
    ],
)
def test_what_is_no_accuracy_is_refused(found: Any, message: str) -> None:
    with pytest.raises(dualform.QueryError, match=message):
        charts.accuracies(found)


def test_a_curve_needs_a_number_for_every_strength() -> None:
    with pytest.raises(
        dualform.QueryError, match="3 strengths and 2 accuracies of 'MNIST'; expected one"
    ):
        charts.strengths([0, 0.5, 1], {"MNIST": [1, 2]})
    with pytest.raises(dualform.QueryError, match="nothing to draw"):
        charts.strengths([], {})


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (75.05, "75.1"),  # stored as 75.0499…
        (75.15, "75.2"),
        (0.25, "0.3"),  # Python's own format rounds this half down
        ([75.0, 75.1], "75.1 ± 0.1"),
        ([96.37, 96.33], "96.4 ± 0.0"),  # a mean that misses 96.35 by the last bit
        ({"mean": 86.45, "std": 0.35}, "86.5 ± 0.4"),
        (75.0499, "75.0"),
        (100.00000000000001, "100.0"),
        (0, "0.0"),
    ],
)
def test_halves_go_up_in_charts_and_in_tables_beside_them(
    rows_with: Callable[..., Any], value: Any, text: str
) -> None:
    assert charts.printed(value) == text
    (bar,) = rows_with(charts.accuracies({"final": {"MNIST": value}}), "mean")
    (dot,) = rows_with(charts.votes({"fc": {"right": value}}), "mean")
    assert bar["text"] == dot["text"] == text
    assert charts.printed(72.5, 0) == "73"
