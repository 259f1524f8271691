"""Weights against values: every pattern is counted once, and only counts are in the picture."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import dualform
from dualform import charts


@pytest.mark.parametrize("log", [True, False])
def test_every_pattern_falls_into_one_square(rows_with: Callable[..., Any], log: bool) -> None:
    generator = np.random.default_rng(3)
    weights = generator.normal(size=4000)
    sizes = np.exp(generator.normal(size=4000))
    chart = charts.weights_against_values(weights, sizes, bins=12, log=log)
    squares = rows_with(chart, "patterns")
    assert sum(row["patterns"] for row in squares) == 4000
    assert len(squares) <= 144
    for row in squares[:: len(squares) // 7]:
        # edges are rounded in the 15th digit: patterns at an edge may lie on either side
        room = 1e-9
        inside = (weights >= row["from"] - room) & (weights <= row["to"] + room)
        inside &= (sizes >= row["low"] * (1 - room)) & (sizes <= row["high"] * (1 + room))
        assert inside.sum() == row["patterns"]


def test_the_line_goes_through_the_medians(rows_with: Callable[..., Any]) -> None:
    weights = np.repeat([0.0, 1.0, 2.0, 3.0], 5)
    sizes = np.concatenate([np.array([1, 2, 3, 40, 50]) * 10.0**i for i in range(4)])
    chart = charts.weights_against_values(weights, sizes, bins=4)
    medians = [row["median"] for row in rows_with(chart, "median")]
    assert medians == pytest.approx([3.0, 30.0, 300.0, 3000.0])


def test_values_of_zero_are_left_out_and_counted(texts_of: Callable[..., Any]) -> None:
    chart = charts.weights_against_values([1.0, 2.0, 3.0], [0.0, 1.0, 2.0], title="Side note")
    texts = texts_of(chart)
    assert "2 patterns; line: median; 1 whose value is zero are left out" in texts
    alone = charts.weights_against_values([2.0, 3.0], [1.0, 2.0])
    assert "2 patterns; line: median" in texts_of(alone)
    assert {"Side note", "attention weight α", "size of the value |e|"} <= set(texts)


def test_what_cannot_be_mapped_is_refused() -> None:
    with pytest.raises(dualform.QueryError, match="2 weights and 1 sizes"):
        charts.weights_against_values([1, 2], [1])
    with pytest.raises(dualform.QueryError, match="no size is above zero"):
        charts.weights_against_values([1, 2], [0, 0])
    with pytest.raises(dualform.QueryError, match="weights hold something"):
        charts.weights_against_values([1, float("inf")], [1, 1])
