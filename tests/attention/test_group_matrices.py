"""Masks as sums of a few matrices, against the same masks pattern by pattern."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

import dualform as df
from dualform.attention import group_matrices

EXACT = 1e-12


def everything(view: df.DualForm) -> dict[str, Tensor]:
    return view.weights(torch.float64)


def off(one: df.DualForm, other: df.DualForm) -> float:
    mine, its = everything(one), everything(other)
    return max(
        float((mine[n] - its[n]).abs().max()) / (float(its[n].abs().max()) or 1.0) for n in mine
    )


@settings(max_examples=25, deadline=None)
@given(
    labels=st.lists(st.integers(0, 3), min_size=1, max_size=3, unique=True),
    task=st.sampled_from(["first", "second"]),
    strength=st.floats(-2, 2),
    at=st.integers(0, 30),
)
def test_a_mask_by_columns_is_the_mask_by_rows(
    run: Any, labels: list[int], task: str, strength: float, at: int
) -> None:
    """By rows, patterns are summed one by one; by columns, matrices of groups are."""
    dual = run.dual.at(at)
    patterns = run.memory.layer("fc1").patterns
    rows = patterns.select(label=labels)
    assert (
        off(dual.without(label=labels, strength=strength), dual.without(rows, strength=strength))
        < EXACT
    )
    assert off(dual.only(label=labels), dual.only(rows)) < EXACT
    both = dual.without(label=labels, strength=strength).only(task=task)
    by_rows = dual.without(rows, strength=strength).only(patterns.select(task=task))
    assert off(both, by_rows) < EXACT


def test_once_the_matrices_are_known_no_mask_looks_at_a_pattern_again(
    run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    dual = run.dual
    everything(dual.without(label=1))

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("patterns were read again")

    monkeypatch.setattr(df.LayerMemory, "blocks", refuse)
    for strength in (0.25, 1.0):
        everything(dual.without(label=[0, 3], strength=strength))
    everything(dual.only(label=2))


def test_too_many_groups_are_masked_pattern_by_pattern(
    run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    by_matrices = run.dual.without(label=1)
    everything(by_matrices)
    monkeypatch.setattr(group_matrices, "MOST_GROUPS", 1)
    assert off(run.dual.without(label=1), by_matrices) < EXACT
    assert off(run.dual.without(step=slice(3, 9)), run.dual.without(step=range(3, 9))) < EXACT


@pytest.mark.parametrize("strength", [1.0, 0.3])
def test_a_mask_of_one_layer_leaves_the_others_as_they_are(run: Any, strength: float) -> None:
    whole, all_layers = (
        everything(run.dual),
        everything(run.dual.without(label=1, strength=strength)),
    )
    one = run.dual.without(label=1, strength=strength, layers=["fc1"])
    for name, weight in everything(one).items():
        expected = all_layers[name] if name.startswith("fc1.") else whole[name]
        assert float((weight - expected).abs().max()) <= EXACT * float(expected.abs().max())
    assert "layers=['fc1']" in repr(one)
    only = everything(run.dual.only(task="first", layers="fc3"))
    assert torch.equal(only["fc1.weight"], whole["fc1.weight"])
    assert not torch.equal(only["fc3.weight"], whole["fc3.weight"])


def test_masks_of_all_layers_one_by_one_are_the_mask_of_all(run: Any) -> None:
    view = run.dual
    for layer in ("fc1", "fc2", "fc3"):
        view = view.without(task="second", layers=layer)
    assert off(view, run.dual.without(task="second")) < EXACT


def test_a_mask_of_no_layer_or_an_unknown_one_is_refused(run: Any) -> None:
    with pytest.raises(df.QueryError, match="fc1, fc2, fc3"):
        run.dual.without(label=1, layers=["fc9"])
    with pytest.raises(df.QueryError, match="names no layer"):
        run.dual.without(label=1, layers=[])


def test_spotlights_of_other_layers_are_not_masked(run: Any) -> None:
    attention = run.dual.without(label=1, layers="fc1").attend(run.inputs[:1])
    labels = run.memory.layer("fc1").patterns["label"]
    assert len(attention["fc1"].rows) == int(np.sum(labels != 1))
    assert len(attention["fc2"].rows) == 240
