"""Questions at the edge of attention: refused by name, or answered all the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import dualform


@pytest.mark.parametrize(
    ("ask", "words"),
    [
        (lambda s: s.top(0), "at least 1"),
        (lambda s: s.top(2.5), "whole number"),
        (lambda s: s.top(3, sign="best"), "most, least, absolute"),
        (lambda s: s.top(3, by="colour"), "label"),
        (lambda s: s.sum_by("colour"), "label"),
        (lambda s: s.over("task"), "sum_by"),
        (lambda s: s.over("step", bins=0), "at least one"),
        (lambda s: s.over("step", bins=2.5), "whole number"),
        (lambda s: s.over("step", bins=None), "whole number"),
        (lambda s: s.sum_by(5), "no column 5"),
        (lambda s: s.sum_by(None), "label"),
    ],
)
def test_questions_without_an_answer_name_what_exists(run: Any, ask: Any, words: str) -> None:
    with pytest.raises(dualform.QueryError, match=words):
        ask(run.dual.attend(run.inputs[:1])["fc1"])


def test_an_unknown_layer_names_the_layers(run: Any) -> None:
    with pytest.raises(dualform.QueryError, match="fc1, fc2, fc3"):
        run.dual.attend(run.inputs[:1])["fc9"]


def test_a_column_with_gaps_cannot_be_laid_over_time(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with dualform.record(model, tmp_path) as recorder:
        recorder.tag(quality=[0.5, float("nan"), 0.25])
        model(torch.ones(3, 4)).sum().backward()
        optimizer.step()
    spotlight = dualform.DualForm(model, tmp_path).attend(torch.ones(1, 4))["0"]
    with pytest.raises(
        dualform.QueryError, match=r"'quality' holds text, or has no \(finite\) number"
    ):
        spotlight.over("quality")


def test_a_tag_never_hides_a_result_of_the_same_name(tmp_path: Path) -> None:
    """Whoever tags sample weights as `weight` still sees the attention weights."""
    model = nn.Linear(4, 3).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tags: dict[str, Any] = {"weight": 0.5, "pattern": "p", "sum": 7, "patterns": 3, "query": 5}
    tags |= {"absolute": 1, "contribution": 9, "attention": 4, "from": 2, "to": 4, "input": 6}
    with dualform.record(model, tmp_path / "run") as recorder:
        for _ in range(3):
            recorder.tag(**tags)
            model(torch.randn(5, 4).double()).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    dual = dualform.DualForm(model, tmp_path / "run")
    inputs = torch.randn(2, 4).double()
    spotlight = next(iter(dual.attend(inputs).values()))
    top = spotlight.top(4)
    expected = spotlight.weights[top["query"], top["pattern"]]
    assert np.allclose(top["weight"], expected)
    assert set(top["weight (tag)"]) == {0.5}
    assert set(top["pattern (tag)"]) == {"p"}
    assert set(top["query (tag)"]) == {5}
    sums = [spotlight.sum_by(*tags), spotlight.by_example("sum"), spotlight.over(bins=1, by="to")]
    for table, tag in zip(sums, ("sum", "sum", "to"), strict=True):
        assert np.allclose(table["sum"], spotlight.weights.sum(1))
        assert set(table["patterns"]) == {15}
        assert set(table[f"{tag} (tag)"]) == {tags[tag]}
    contribution = dual.contribute(inputs[:1], target=1)
    top = contribution.top(4)
    assert np.allclose(top["contribution"], contribution.values[top["pattern"]])
    sums = [contribution.sum_by(*tags), contribution.by_example("absolute")]
    for table in [*sums, contribution.over(bins=1, by="from")]:
        assert np.allclose(table["contribution"], contribution.values.sum())


@pytest.mark.parametrize(
    ("queries", "words"),
    [
        (torch.ones(6, dtype=torch.complex64), "real numbers"),
        ("pictures", "real numbers"),
        (torch.full((1, 6), 1e308, dtype=torch.float64), "larger than float64"),
        (torch.full((20, 6), 1e308, dtype=torch.float64), "larger than float64"),
    ],
)
def test_queries_that_are_no_vectors_of_numbers_are_refused(
    run: Any, queries: Any, words: str
) -> None:
    for ask in (lambda s: s.top(3), lambda s: s.sum_by("label")):
        with pytest.raises(dualform.QueryError, match=words):
            ask(run.dual.attend(queries=queries, layers="fc1")["fc1"])


@pytest.mark.parametrize("n", [1, 20])
@pytest.mark.parametrize("size", [1e-250, 1e250])
def test_the_effective_number_does_not_depend_on_the_querys_length(
    run: Any, n: int, size: float
) -> None:
    queries = run.inputs[:n]
    plain = run.dual.attend(queries=queries, layers="fc1")["fc1"].effective
    scaled = run.dual.attend(queries=queries * size, layers="fc1")["fc1"].effective
    assert np.allclose(plain, scaled, rtol=1e-12, atol=0)


def test_one_recorded_example_is_asked_for_at_a_time(run: Any) -> None:
    with pytest.raises(dualform.QueryError, match="one recorded example"):
        run.dual.attend(example=[3, 4])


def test_no_input_at_all_gives_empty_tables(run: Any) -> None:
    spotlight = run.dual.attend(run.inputs[:0])["fc1"]
    for table in (spotlight.top(3), spotlight.sum_by("label"), spotlight.over(bins=3)):
        assert len(table) == 0
    assert len(spotlight.by_example()) == len(spotlight.effective) == 0


def test_combinations_of_many_columns_are_told_apart_beyond_what_a_number_holds(
    tmp_path: Path,
) -> None:
    """Six columns of 2,000 values have 6.4e19 combinations, more than 64 bits count."""
    model = nn.Linear(2, 2).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    names = [f"column_{i}" for i in range(6)]
    generator = torch.Generator().manual_seed(0)
    tags = {name: torch.randperm(2000, generator=generator) for name in names}
    with dualform.record(model, tmp_path / "run") as recorder:
        recorder.tag(**tags)
        model(torch.randn(2000, 2).double()).sum().backward()
        optimizer.step()
    spotlight = next(
        iter(dualform.DualForm(model, tmp_path / "run").attend(torch.ones(1, 2).double()).values())
    )
    table = spotlight.sum_by(*names)
    found = list(zip(*(table[name].tolist() for name in names), strict=True))
    assert found == sorted(zip(*(tags[name].tolist() for name in names), strict=True))
