"""What an output adds up from: the bars are a walk from zero to the network's own output."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest

import dualform
from dualform import charts

EXACT = 1e-12


def parts_of(rows_with: Callable[..., Any], chart: Any) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = rows_with(chart, "part", "value")
    return rows


def test_the_walk_ends_at_the_networks_own_output(run: Any, rows_with: Callable[..., Any]) -> None:
    contribution = run.dual.contribute(run.test, target=2)
    *parts, total = parts_of(rows_with, charts.parts(contribution))
    with_model = float(run.dual.model(run.test)[0, 2].detach())
    assert total["kind"] == "total"
    assert total["from"] == 0.0
    assert total["to"] == pytest.approx(with_model, abs=EXACT)
    assert sum(row["value"] for row in parts) == pytest.approx(with_model, abs=EXACT)
    assert parts[0]["from"] == 0.0
    for before, row in pairwise(parts):
        assert row["from"] == before["to"]
        assert row["kind"] == ("raises" if row["value"] >= 0 else "lowers")
    assert parts[-1]["to"] == total["to"]


def test_the_parts_are_the_initial_shares_and_the_sums_by_class(
    run: Any, rows_with: Callable[..., Any]
) -> None:
    contribution = run.dual.contribute(run.test, target=0)
    drawn = {row["part"]: row["value"] for row in parts_of(rows_with, charts.parts(contribution))}
    values, labels = contribution.values.numpy(), run.column("fc2", "label")
    for label in range(3):
        assert drawn[f"label {label}"] == pytest.approx(values[labels == label].sum(), abs=EXACT)
    for name in ("initial weights", "initial bias"):
        assert drawn[name] == contribution.shares[name]


def test_smaller_groups_are_drawn_as_one_and_nothing_is_lost(
    run: Any, rows_with: Callable[..., Any]
) -> None:
    contribution = run.dual.contribute(run.test, target=0)
    first = len(contribution.shares) - 1  # initial weights and biases, and what is not explained
    whole = parts_of(rows_with, charts.parts(contribution, by=("task", "label")))
    few = parts_of(rows_with, charts.parts(contribution, by=("task", "label"), at_most=3))
    assert [row["part"] for row in few][-2:] == ["4 others", "output 0 of the model"]
    assert few[-1]["value"] == pytest.approx(whole[-1]["value"], abs=EXACT)
    sizes = sorted((abs(row["value"]) for row in whole[first:-1]), reverse=True)
    assert sorted((abs(row["value"]) for row in few[first : first + 2]), reverse=True) == sizes[:2]
    chosen = parts_of(rows_with, charts.parts(contribution, groups=[1, 0]))
    assert [row["part"] for row in chosen[first:-1]] == ["label 1", "label 0", "1 other"]
    alone = parts_of(rows_with, charts.parts(contribution, by=None))
    assert [row["part"] for row in alone[first:-1]] == ["patterns"]


def test_a_split_to_first_order_is_not_called_the_output(
    run: Any, rows_with: Callable[..., Any], texts_of: Callable[..., Any]
) -> None:
    contribution = run.dual.contribute(run.test, target=0, layer="fc1")
    chart = charts.parts(contribution, by="task")
    assert parts_of(rows_with, chart)[-1]["part"] == "gradient · output of the layer"
    assert parts_of(rows_with, chart)[-1]["value"] == pytest.approx(contribution.total, abs=EXACT)
    texts = texts_of(chart)
    assert {"output 0 of the model through one layer, to first order", "layer fc1"} <= set(texts)


def test_every_part_is_labelled_with_its_name_and_number(
    run: Any, texts_of: Callable[..., Any]
) -> None:
    contribution = run.dual.contribute(run.test, target=1)
    texts = texts_of(charts.parts(contribution, names=["a", "b", "initial bias"], title="Mine"))
    assert {"initial weights", "a", "b", "raises", "lowers", "total", "Mine"} <= set(texts)
    assert texts.count("initial bias") == 2  # a class may be called like another part
    assert f"{contribution.total:.3g}".replace("-", "−") in texts


def test_only_a_contribution_adds_up(run: Any) -> None:
    with pytest.raises(dualform.QueryError, match="Spotlight was given to draw"):
        charts.parts(run.attention["fc1"])
    with pytest.raises(dualform.QueryError, match="groups=8"):
        charts.parts(run.dual.contribute(run.test, target=1), groups=[8])
