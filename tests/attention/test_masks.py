"""Masks: what some patterns wrote, taken away from the weights; nothing else is touched."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor, nn

import dualform
from dualform.attention import written
from dualform.learning_rules import coefficients

EXACT = 1e-12


def everything(view: dualform.DualForm) -> dict[str, Tensor]:
    return view.weights(torch.float64)


def off(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """The largest relative difference of two networks."""
    return max(
        float((one[n] - other[n]).abs().max()) / (float(other[n].abs().max()) or 1.0) for n in one
    )


def plus(one: dualform.DualForm, other: dualform.DualForm) -> dict[str, Tensor]:
    mine, its = everything(one), everything(other)
    return {name: mine[name] + its[name] for name in mine}


# The table: every rule, every way to keep a layer, everything that leaves a remainder -----------


class Blend(nn.Module):
    """Layers kept in every way there is: by patterns, by examples, as values."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(6, 9)
        self.norm = nn.LayerNorm(9)
        self.fc2 = nn.Linear(9, 7)
        self.fc3 = nn.Linear(7, 4)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.fc3(torch.relu(self.fc2(torch.tanh(self.norm(self.fc1(x))))))
        return output


class Shared(nn.Module):
    """A layer used twice, and a weight that two layers share."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)
        self.up = nn.Linear(6, 4, bias=False)
        self.tied = nn.Linear(6, 4)
        self.tied.weight = self.up.weight
        self.other = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.inner(torch.relu(self.inner(x))))
        output: Tensor = self.up(h) + self.tied(h * 0.5) + self.other(x)
        return output


OPTIM = torch.optim
RULES: dict[str, Callable[..., OPTIM.Optimizer]] = {
    "SGD": lambda p: OPTIM.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.02, dampening=0.2),
    "Nesterov": lambda p: OPTIM.SGD(p, lr=0.1, momentum=0.8, weight_decay=0.02, nesterov=True),
    "AdamW": lambda p: OPTIM.AdamW(p, lr=3e-3, weight_decay=0.1),
    "Adam, coupled, AMSGrad": lambda p: OPTIM.Adam(p, lr=3e-3, weight_decay=0.1, amsgrad=True),
    "NAdam": lambda p: OPTIM.NAdam(p, lr=3e-3, weight_decay=0.01),
    "RMSprop": lambda p: OPTIM.RMSprop(p, lr=1e-3, momentum=0.8, centered=True),
    "Adagrad": lambda p: OPTIM.Adagrad(p, lr=1e-2, lr_decay=0.01),
    "Adadelta": lambda p: OPTIM.Adadelta(p, lr=0.5),
}
KEPT: dict[str, dict[str, Any]] = {
    "patterns": {},
    "examples": {"keep": {"fc2": "examples", "*": "auto"}},
    "values": {"keep": {"fc2": "values", "norm": "values", "*": "auto"}},
    "keys": {"keep": {"fc2": "keys", "*": "auto"}},
    "16 bits": {"dtype": "float16"},
}
ODD: dict[str, dict[str, Any]] = {
    "every third step": {"options": {"every": 3}},
    "a penalty": {"options": {"audit": "warn"}, "penalty": lambda net: net.fc2.weight.norm()},
}
MODES: dict[str, dict[str, Any]] = {rule: {"rule": RULES[rule]} for rule in RULES}
MODES |= {f"SGD, {kept}": {"rule": RULES["SGD"], "options": KEPT[kept]} for kept in KEPT}
MODES |= {f"AdamW, {kept}": {"rule": RULES["AdamW"], "options": KEPT[kept]} for kept in KEPT}
MODES |= {f"SGD, {odd}": {"rule": RULES["SGD"], **ODD[odd]} for odd in ODD}
MODES |= {f"{rule}, shared": {"rule": RULES[rule], "model": Shared} for rule in ("SGD", "AdamW")}
MASKS: tuple[dict[str, Any], ...] = ({"label": 2}, {"label": [0, 3], "task": "second"},
                                     {"step": slice(3, 17)})  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
@pytest.mark.parametrize("mode", MODES)
def test_a_mask_and_its_complement_add_up_in_every_mode(
    train: Any, mode: str, dtype: torch.dtype
) -> None:
    """`without(A) + only(A) = W + without(everything)`, with a remainder and without one."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a penalty under audit="warn" says so
        dual = train(
            **{"model": Blend, "steps": 20, "dtype": dtype, "clip": None} | MODES[mode]
        ).dual
    whole, nothing = everything(dual), everything(dual.without())
    books = {name: whole[name] + nothing[name] for name in whole}
    for where in MASKS:
        without, only = dual.without(**where), dual.only(**where)
        assert off(plus(without, only), books) <= EXACT, where
        half = everything(dual.without(strength=0.5, **where))
        assert off({n: 2 * half[n] for n in half}, plus(dual, without)) <= EXACT
    kept = {name: known.keep for name, known in dual.memory.parameters.items()}
    for name, weight in everything(dual.without(label=2)).items():
        assert torch.equal(weight, whole[name]) == (kept[name] in ("values", "keys")), name
    changed = [name for name in whole if not torch.equal(nothing[name], whole[name])]
    assert len(changed) >= 4


# What masks do, in one plain run -----------------------------------------------------------------


@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 2**31), strength=st.floats(0, 1), at=st.integers(0, 30))
def test_masks_by_any_rows_strength_and_step_keep_the_books(
    run: Any, seed: int, strength: float, at: int
) -> None:
    rows = np.random.default_rng(seed).random(240) < 0.5
    view = run.dual.at(at)
    soft, hard = everything(view.without(rows, strength=strength)), everything(view.without(rows))
    whole, only = everything(view), everything(view.only(rows))
    nothing = everything(view.without())
    for name in whole:
        mixed = (1 - strength) * whole[name] + strength * hard[name]
        scale = float(whole[name].abs().max())
        assert float((soft[name] - mixed).abs().max()) <= EXACT * scale
        assert float((hard[name] + only[name] - whole[name] - nothing[name]).abs().max()) <= (
            EXACT * scale
        )


@pytest.mark.parametrize("at", [0, 1, 17, 30])
def test_without_everything_is_the_initial_part(run: Any, at: int, difference: Any) -> None:
    memory = run.memory
    for name, weight in everything(run.dual.at(at).without()).items():
        path = memory.path_to(name, at)
        factors = coefficients(memory.log(name), memory.settings, path, torch.float64)
        momentum = memory.kept.state(name, 0)["momentum_buffer"]
        expected = factors.initial * run.history[0][name] + factors.momentum * momentum
        assert difference(weight, expected) <= EXACT


def test_masks_multiply_and_time_travel_keeps_them(run: Any) -> None:
    both = run.dual.without(label=1, strength=0.5).without(label=1, strength=0.5)
    assert off(everything(both), everything(run.dual.without(label=1, strength=0.75))) <= EXACT
    one_way = everything(run.dual.at(12).without(label=1))
    other_way = everything(run.dual.without(label=1).at(12))
    assert all(torch.equal(one_way[name], other_way[name]) for name in one_way)


def test_time_travel_is_not_masking_the_later_steps_when_there_is_momentum(run: Any) -> None:
    travelled, masked = run.dual.at(15), run.dual.without(step=slice(15, None))
    gap = everything(travelled)["fc1.weight"] - everything(masked)["fc1.weight"]
    assert float(gap.abs().max()) > 1e-3


@settings(max_examples=8, deadline=None)
@given(
    labels=st.lists(st.integers(0, 3), min_size=1, max_size=3, unique=True),
    task=st.sampled_from(["first", "second"]),
    strength=st.floats(0, 1),
    at=st.integers(0, 30),
)
def test_a_mask_by_columns_is_the_mask_by_rows(
    run: Any, labels: list[int], task: str, strength: float, at: int
) -> None:
    """By rows, patterns are summed one by one; by columns, matrices of groups are."""
    dual = run.dual.at(at)
    patterns = run.memory.layer("fc1").patterns
    rows = patterns.select(label=labels)
    for columns, by_rows in (
        (dual.without(label=labels, strength=strength), dual.without(rows, strength=strength)),
        (dual.only(label=labels), dual.only(rows)),
        (
            dual.without(label=labels, strength=strength).only(task=task),
            dual.without(rows, strength=strength).only(patterns.select(task=task)),
        ),
    ):
        assert off(everything(columns), everything(by_rows)) < EXACT


def test_once_the_matrices_are_known_no_mask_looks_at_a_pattern_again(
    run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    dual = run.dual
    everything(dual.without(label=1))

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("patterns were read again")

    monkeypatch.setattr(dualform.LayerMemory, "blocks", refuse)
    for strength in (0.25, 1.0):
        everything(dual.without(label=[0, 3], strength=strength))
    everything(dual.only(label=2))


def test_too_many_groups_are_masked_pattern_by_pattern(
    run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    by_matrices = everything(run.dual.without(label=1))
    monkeypatch.setattr(written, "MOST_GROUPS", 1)
    assert off(everything(run.dual.without(label=1)), by_matrices) < EXACT
    by_range = everything(run.dual.without(step=range(3, 9)))
    assert off(everything(run.dual.without(step=slice(3, 9))), by_range) < EXACT


# Masks of some layers ----------------------------------------------------------------------------


@pytest.mark.parametrize("strength", [1.0, 0.3])
def test_a_mask_of_one_layer_leaves_the_others_as_they_are(run: Any, strength: float) -> None:
    whole, all_layers = (
        everything(run.dual),
        everything(run.dual.without(label=1, strength=strength)),
    )
    one = run.dual.without(label=1, strength=strength, layers=["fc1"])
    for name, weight in everything(one).items():
        expected = all_layers[name] if name.startswith("fc1.") else whole[name]
        assert torch.equal(weight, expected)
    assert "layers=['fc1']" in repr(one)
    only = everything(run.dual.only(task="first", layers="fc3"))
    assert torch.equal(only["fc1.weight"], whole["fc1.weight"])
    assert not torch.equal(only["fc3.weight"], whole["fc3.weight"])


def test_masks_of_all_layers_one_by_one_are_the_mask_of_all(run: Any) -> None:
    view = run.dual
    for layer in ("fc1", "fc2", "fc3"):
        view = view.without(task="second", layers=layer)
    assert off(everything(view), everything(run.dual.without(task="second"))) < EXACT


def test_a_mask_of_no_layer_or_an_unknown_one_is_refused(run: Any) -> None:
    with pytest.raises(dualform.QueryError, match="fc1, fc2, fc3"):
        run.dual.without(label=1, layers=["fc9"])
    with pytest.raises(dualform.QueryError, match="names no layer"):
        run.dual.without(label=1, layers=[])


def test_spotlights_of_other_layers_are_not_masked(run: Any) -> None:
    attention = run.dual.without(label=1, layers="fc1").attend(run.inputs[:1])
    labels = run.memory.layer("fc1").patterns["label"]
    assert len(attention["fc1"].rows) == int(np.sum(labels != 1))
    assert len(attention["fc2"].rows) == 240


def test_a_memory_without_rows_of_what_was_written_refuses_masks(train: Any) -> None:
    run = train(steps=3, options={"keep": "values"})
    with pytest.raises(dualform.QueryError, match="kept as keys alone or as values"):
        run.dual.without()
