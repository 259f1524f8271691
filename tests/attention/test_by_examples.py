"""Layers kept by examples: what each example wrote, all its rows together; norms above all."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import dualform

EXACT = 1e-12


class Normed(nn.Module):
    """A norm over positions, and a Linear beside it that may be kept by examples."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(6, 5)
        self.norm = nn.LayerNorm(5)
        self.head = nn.Linear(5, 4)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.head(torch.tanh(self.norm(self.fc1(x))))
        return output


RULES: dict[str, Any] = {
    "SGD": {},
    "AdamW": {"rule": lambda p: torch.optim.AdamW(p, lr=3e-3, weight_decay=0.1)},
}


@pytest.fixture(scope="module", params=RULES)
def normed(train: Any, request: pytest.FixtureRequest) -> Any:
    """Batches of 8 examples of 3 positions: 24 patterns a step, or 8 rows by examples."""
    run = train(Normed, shape=(3, 6), steps=14, clip=None, **RULES[request.param])
    kept = {name: run.memory.layer(name).keep for name in run.memory.layers}
    assert kept == {"fc1": "patterns", "norm": "examples", "head": "patterns"}
    assert (run.memory.layer("norm").rows, run.memory.layer("fc1").rows) == (14 * 8, 14 * 24)
    return run


def test_rows_by_examples_have_the_tags_of_their_examples(normed: Any) -> None:
    coarse, fine = (normed.memory.layer(name).patterns for name in ("norm", "fc1"))
    for column in ("label", "example", "task", "step"):
        assert np.array_equal(np.repeat(coarse[column], 3), fine[column]), column
    assert coarse.values("position") == []


def slopes(run: Any, x: Tensor, target: Tensor, layer: str) -> tuple[Tensor, Tensor]:
    """A layer's output and d(target)/d(its output), by autograd."""
    held: list[Tensor] = []

    def keep(module: nn.Module, args: Any, output: Tensor) -> None:
        output.retain_grad()
        held.append(output)

    handle = run.model.get_submodule(layer).register_forward_hook(keep)
    (run.model(x) * target).sum().backward()
    handle.remove()
    run.model.zero_grad()
    assert held[0].grad is not None
    return held[0].detach(), held[0].grad


def test_a_norms_contributions_add_up_to_gradient_times_output(normed: Any) -> None:
    x, target = normed.inputs[:1], torch.zeros(1, 3, 4, dtype=torch.float64)
    target[0, 1, 2], target[0, 2, 0] = 1.0, -0.5
    split = normed.dual.contribute(x, target=target, layer="norm")
    output, along = slopes(normed, x, target, "norm")
    assert split.first_order
    assert split.total == pytest.approx(float((output * along).sum()), abs=EXACT)
    assert abs(split.residual) <= EXACT
    assert abs(split.shares["not explained by patterns"]) <= EXACT
    assert sum(split.shares.values()) == pytest.approx(split.total, abs=EXACT)
    for column in ("label", "task", "example", "step"):
        summed = split.sum_by(column)["contribution"].sum()
        assert summed == pytest.approx(split.shares["patterns"], abs=EXACT)


def test_an_example_contributes_what_leaving_it_out_takes_away(normed: Any) -> None:
    """d(output)/d(strength) of a mask over one step's example, in the norm alone."""
    x, target = normed.inputs[1:2], torch.ones(1, 3, 4, dtype=torch.float64)
    split = normed.dual.contribute(x, target=target, layer="norm")
    given = torch.nn.functional.layer_norm(normed.model.fc1(x), (5,)).detach()
    _, along = slopes(normed, x, target, "norm")
    whole = normed.dual.weights(torch.float64)
    patterns = normed.memory.layer("norm").patterns
    for row in (0, 37, 14 * 8 - 1):
        one = {"example": int(patterns["example"][row]), "step": int(patterns["step"][row])}
        left = normed.dual.without(layers="norm", **one).weights(torch.float64)
        gain, offset = (whole[f"norm.{role}"] - left[f"norm.{role}"] for role in ("weight", "bias"))
        same = (patterns["example"] == one["example"]) & (patterns["step"] == one["step"])
        wrote = float(((given * gain + offset) * along).sum())
        assert float(split.values[torch.from_numpy(same)].sum()) == pytest.approx(wrote, abs=EXACT)


@pytest.mark.parametrize("at", [0, 5])
def test_an_earlier_view_splits_its_own_norm(normed: Any, at: int) -> None:
    view = normed.dual.at(at)
    target = torch.ones(1, 3, 4, dtype=torch.float64)
    split = view.contribute(normed.inputs[:1], target=target, layer="norm")
    assert abs(split.residual) <= EXACT
    assert len(split.top(1000)) == at * 8


def test_what_a_norm_looked_at_is_refused_by_name(normed: Any) -> None:
    x = normed.inputs[:2]
    with pytest.raises(
        dualform.QueryError, match=r"'norm' was asked what it looked at.*contribute"
    ):
        normed.dual.attend(x, layers="norm")
    assert list(normed.dual.attend(x)) == ["fc1", "head"]
    assert list(normed.dual.attend(example=3)) == ["fc1", "head"]


def test_masks_by_position_leave_it_untouched_and_the_repr_says_so(normed: Any) -> None:
    whole = normed.dual.weights(torch.float64)
    masked = normed.dual.without(position=1)
    found = masked.weights(torch.float64)
    for name, weight in whole.items():
        assert torch.equal(found[name], weight) == name.startswith("norm"), name
    assert "no mask reaches: norm.weight, norm.bias" in repr(masked)
    both = normed.dual.without(label=1)
    assert "no mask reaches" not in repr(both)
    assert not torch.equal(both.weights(torch.float64)["norm.weight"], whole["norm.weight"])
    nothing = normed.dual.without().weights(torch.float64)
    left, only = (
        view.weights(torch.float64)
        for view in (normed.dual.without(position=[0, 2]), normed.dual.only(position=[0, 2]))
    )
    for name in whole:
        books = whole[name] + (whole if name.startswith("norm") else nothing)[name]
        assert float((left[name] + only[name] - books).abs().max()) <= EXACT


def test_a_linear_by_examples_gives_what_its_patterns_give_summed_by_example(
    train: Any, difference: Any
) -> None:
    options = {"keep": {"fc1": "examples", "head": "examples", "*": "auto"}}
    coarse = train(Normed, shape=(3, 6), steps=14, options=options)
    fine = train(Normed, shape=(3, 6), steps=14)
    assert coarse.memory.layer("fc1").rows * 3 == fine.memory.layer("fc1").rows
    assert coarse.dual.verify(coarse.inputs[:2]).passed
    x, target = coarse.inputs[:1], torch.ones(1, 3, 4, dtype=torch.float64)
    for layer in ("fc1", "head"):
        ours, theirs = (
            run.dual.contribute(x, target=target, layer=layer) for run in (coarse, fine)
        )
        assert abs(ours.residual) <= EXACT
        assert ours.values.numpy() == pytest.approx(
            theirs.values.reshape(-1, 3).sum(1).numpy(), abs=EXACT
        )
        for name, share in theirs.shares.items():
            assert ours.shares[name] == pytest.approx(share, abs=EXACT)
    for name, weight in fine.dual.without(label=2).weights(torch.float64).items():
        assert difference(coarse.dual.without(label=2).weights(torch.float64)[name], weight) < EXACT
    keys = fine.memory.layer("fc1").keys.reshape(-1, 3, 6).sum(1)
    assert difference(coarse.memory.layer("fc1").keys, keys) < EXACT
    attention = coarse.dual.attend(x)["fc1"].weights
    assert (
        difference(attention, fine.dual.attend(x)["fc1"].weights.reshape(3, -1, 3).sum(2)) < EXACT
    )
