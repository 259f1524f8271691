"""Contributions add up to the output, pattern by pattern, and autograd agrees."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import dualform
from dualform.attention import compiled
from dualform.attention import weights as weights_room
from dualform.learning_rules import coefficients

EXACT = 1e-12


@pytest.mark.parametrize("target", [0, 3, [1.0, -1.0, 0.0, 0.5]])
def test_for_the_last_layer_the_parts_add_up_to_the_logit(run: Any, target: Any) -> None:
    contribution = run.dual.contribute(run.inputs[:1], target=target)
    with torch.no_grad():
        logits = run.model(run.inputs[:1])[0]
    wanted = logits[target] if isinstance(target, int) else logits @ torch.tensor(target).double()
    assert contribution.layer == "fc3"
    assert contribution.total == pytest.approx(float(wanted), abs=EXACT)
    assert contribution.primal == pytest.approx(float(wanted), abs=EXACT)
    assert abs(contribution.residual) <= EXACT
    assert sum(contribution.shares.values()) == pytest.approx(contribution.total, abs=EXACT)


def test_each_value_is_coefficient_times_attention_times_error_signal(run: Any) -> None:
    """Brute force: weight and bias each with their own coefficients."""
    contribution = run.dual.contribute(run.inputs[4:5], target=2)
    layer = run.memory.layer("fc3")
    query = run.dual.attend(run.inputs[4:5])["fc3"].queries[0]
    memory, steps = run.memory, layer.patterns["step"]
    weight, bias = (
        torch.from_numpy(
            coefficients(
                memory.log(name), memory.settings, memory.path_to(name, 30), torch.float64
            ).per_pattern(steps)
        )
        for name in ("fc3.weight", "fc3.bias")
    )
    expected = (weight * (layer.keys @ query) + bias) * layer.error_signals[:, 2]
    assert float((contribution.values - expected).abs().max()) <= EXACT


@pytest.mark.parametrize("layer", ["fc1", "fc2"])
def test_a_hidden_layer_is_split_along_the_gradient_autograd_gives(run: Any, layer: str) -> None:
    x = run.inputs[2:3]
    contribution = run.dual.contribute(x, target=1, layer=layer)
    held: list[Tensor] = []

    def keep(module: nn.Module, args: Any, output: Tensor) -> None:
        output.retain_grad()
        held.append(output)

    handle = run.model.get_submodule(layer).register_forward_hook(keep)
    run.model(x)[0, 1].backward()
    handle.remove()
    run.model.zero_grad()
    along = held[0].grad
    assert along is not None
    assert contribution.first_order
    assert "first order" in contribution.caption
    assert contribution.total == pytest.approx(float((held[0].detach() * along).sum()), abs=EXACT)
    assert abs(contribution.residual) <= EXACT


def test_first_order_means_the_derivative_of_scaling_what_a_pattern_wrote(run: Any) -> None:
    """d(logit)/d(strength) of a mask over label 1, summed over all layers, by finite difference."""
    x, h = run.inputs[6:7], 1e-6
    written = 0.0
    for layer in ("fc1", "fc2", "fc3"):
        table = run.dual.contribute(x, target=0, layer=layer).sum_by("label")
        written += float(table["contribution"][table["label"] == 1][0])
    whole, less, least = (
        float(run.dual.without(label=1, strength=strength)(x)[0, 0]) for strength in (0, h, 2 * h)
    )
    assert (3 * whole - 4 * less + least) / (2 * h) == pytest.approx(written, rel=1e-6)


def test_groups_examples_and_patterns_tell_the_same_total(run: Any) -> None:
    contribution = run.dual.contribute(run.inputs[:1], target=0)
    written = contribution.shares["patterns"]
    for table in (
        contribution.sum_by("label"),
        contribution.sum_by("task"),
        contribution.by_example(),
        contribution.top(1000),
    ):
        assert table["contribution"].sum() == pytest.approx(written, abs=EXACT)
    assert np.all(np.diff(contribution.by_example()["contribution"]) <= 0)
    assert len(contribution.top(1000)) == 240


def test_top_lists_what_raises_and_what_lowers(run: Any) -> None:
    contribution = run.dual.contribute(run.inputs[:1], target=0)
    values = contribution.values.numpy()
    assert contribution.top(3)["contribution"][0] == values.max()
    assert contribution.top(3, sign="least")["contribution"][0] == values.min()
    assert abs(contribution.top(1, sign="absolute")["contribution"][0]) == np.abs(values).max()
    assert "positive raises it" in contribution.top(1).caption


def test_a_warm_optimizer_has_its_share(run: Any) -> None:
    shares = run.dual.contribute(run.inputs[:1], target=0).shares
    assert set(shares) == {
        "initial weights", "initial momentum", "initial bias", "not explained by patterns",
        "patterns",
    }  # fmt: skip
    assert shares["initial momentum"] != 0
    assert abs(shares["not explained by patterns"]) <= EXACT


@pytest.mark.parametrize("at", [0, 1, 17])
def test_in_a_view_the_parts_add_up_to_the_views_output(run: Any, at: int) -> None:
    view = run.dual.at(at)
    contribution = view.contribute(run.inputs[:1], target=2)
    assert contribution.total == pytest.approx(float(view(run.inputs[:1])[0, 2]), abs=EXACT)
    assert len(contribution.top(1000)) == at * 8
    masked = view.without(label=[0, 1])
    if at:
        part = masked.contribute(run.inputs[:1], target=2)
        assert part.total == pytest.approx(float(masked(run.inputs[:1])[0, 2]), abs=EXACT)


def test_a_recorded_example_is_split_at_the_layers_own_outputs(run: Any) -> None:
    dual = dualform.DualForm(None, run.path)
    contribution = dual.contribute(example=5, target=1)
    layer = run.memory.layer("fc3")
    row = np.flatnonzero(layer.patterns["example"] == 5)[-1]
    output = run.model.fc3(layer.keys[row])[1].detach()
    assert contribution.total == pytest.approx(float(output), abs=EXACT)
    hidden = dual.contribute(example=5, target=8, layer="fc1")
    assert hidden.layer == "fc1"
    assert abs(hidden.residual) <= EXACT


def test_positions_are_summed(train: Any) -> None:
    run = train(shape=(3, 6), steps=6)
    x = run.inputs[:1]
    target = torch.zeros(1, 3, 4, dtype=torch.float64)
    target[0, :, 2] = 1 / 3
    contribution = run.dual.contribute(x, target=target)
    assert contribution.total == pytest.approx(
        float(run.model(x)[0, :, 2].mean().detach()), abs=EXACT
    )
    with pytest.raises(dualform.QueryError, match="own shape"):
        run.dual.contribute(x, target=2)


class Tied(nn.Module):
    """The last layer's weight is also used below it; the layer in between is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.below = nn.Linear(6, 6)
        self.twice = nn.Linear(6, 6)
        self.last = nn.Linear(6, 6, bias=False)
        self.last.weight = self.below.weight
        self.head = nn.LayerNorm(6)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.twice(torch.tanh(self.twice(torch.tanh(self.below(x))))))
        output: Tensor = self.last(self.head(h))[..., :4]
        return output


def test_shared_and_repeated_layers_add_up_too(train: Any) -> None:
    run = train(Tied, steps=8)
    x = run.inputs[:1]
    with pytest.raises(dualform.QueryError, match="first order"):
        run.dual.contribute(x, target=0)
    for layer in ("below", "twice", "last"):
        contribution = run.dual.contribute(x, target=0, layer=layer)
        assert abs(contribution.residual) <= EXACT
    assert "weight written by below" in contribution.shares


def test_a_layer_changed_in_place_afterwards_is_not_the_output(train: Any) -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 4), nn.ReLU(inplace=True))

    run = train(build, steps=4)
    with pytest.raises(dualform.QueryError, match="layer=one of 0"):
        run.dual.contribute(run.inputs[:1], target=0)
    assert run.dual.contribute(run.inputs[:1], target=0, layer="0").first_order


def test_a_model_that_returns_no_tensor_is_refused(train: Any) -> None:
    class Dressed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(6, 4)

        def forward(self, x: Tensor) -> Any:
            y = self.fc(x)
            return y if self.training else {"logits": y}

    run = train(Dressed, steps=3)
    with pytest.raises(dualform.QueryError, match="returns a dict"):
        run.dual.contribute(run.inputs[:1], target=0)


def test_the_repr_shows_the_sum(run: Any) -> None:
    text = repr(run.dual.contribute(run.inputs[:1], target=0))
    for words in ("initial weights", "patterns", "total", "primal", "residual", "positive raises"):
        assert words in text


@pytest.mark.parametrize("label", [None, 0, 3])
def test_a_margin_is_one_output_minus_the_best_other(run: Any, label: int | None) -> None:
    x = run.inputs[9:10]
    contribution = run.dual.contribute(x, target="margin", label=label)
    with torch.no_grad():
        logits = run.model(x)[0]
    best = int(logits.argmax()) if label is None else label
    others = [float(logits[i]) for i in range(4) if i != best]
    assert contribution.total == pytest.approx(float(logits[best]) - max(others), abs=EXACT)
    assert abs(contribution.residual) <= EXACT
    assert ("runner-up" if label is None else "true − best other") in contribution.target
    hidden = run.dual.contribute(x, target="margin", label=label, layer="fc1")
    assert hidden.first_order
    assert abs(hidden.residual) <= EXACT


def test_a_recorded_example_has_a_margin_too(run: Any) -> None:
    contribution = dualform.DualForm(None, run.path).contribute(example=5, target="margin", label=2)
    layer = run.memory.layer("fc3")
    row = np.flatnonzero(layer.patterns["example"] == 5)[-1]
    outputs = run.model.fc3(layer.keys[row]).detach()
    others = torch.cat([outputs[:2], outputs[3:]])
    assert contribution.total == pytest.approx(float(outputs[2] - others.max()), abs=EXACT)


def test_margins_of_nothing_are_refused(run: Any) -> None:
    x = run.inputs[:1]
    for wrong, words in (
        ({"target": "margin", "label": 4}, "outputs 0 to 3"),
        ({"target": 1, "label": 2}, 'target="margin"'),
        ({"target": "margin", "label": "a"}, "index of the true class"),
        ({"target": "largest"}, '"margin"'),
    ):
        with pytest.raises(dualform.QueryError, match=words):
            run.dual.contribute(x, **wrong)
    with pytest.raises(dualform.QueryError, match="one input at a time"):
        run.dual.contribute(run.inputs[:2], target="margin")


def test_contributions_over_time_and_by_groups_are_sums_of_the_values(run: Any) -> None:
    contribution = run.dual.contribute(run.inputs[:1], target=0)
    values, patterns = contribution.values.numpy(), contribution.patterns
    over = contribution.over("step", bins=7, by="task")
    for row in over.rows():
        here = (patterns["step"] >= row["from"]) & (patterns["step"] < row["to"])
        here &= patterns["task"] == row["task"]
        assert row["contribution"] == pytest.approx(values[here].sum(), abs=EXACT)
        assert row["absolute"] == pytest.approx(np.abs(values[here]).sum(), abs=EXACT)
        assert row["patterns"] == here.sum()
    assert over["contribution"].sum() == pytest.approx(contribution.shares["patterns"], abs=EXACT)
    both = contribution.sum_by("task", "label")
    for row in both.rows():
        here = (patterns["task"] == row["task"]) & (patterns["label"] == row["label"])
        assert row["contribution"] == pytest.approx(values[here].sum(), abs=EXACT)
    both = contribution.top(2, by=["task", "label"])
    for task, label in {(row["task"], row["label"]) for row in both.rows()}:
        mine = both["contribution"][(both["task"] == task) & (both["label"] == label)]
        here = (patterns["task"] == task) & (patterns["label"] == label)
        assert np.array_equal(mine, np.sort(values[here])[::-1][:2])
    best = contribution.top(2, by="label", sign="least")
    for label in range(4):
        mine = best["contribution"][best["label"] == label]
        assert np.array_equal(mine, np.sort(values[patterns["label"] == label])[:2])
    with pytest.raises(dualform.QueryError, match="text"):
        contribution.over("task")


@pytest.mark.parametrize("way", ["few", "streamed", "compiled"])
def test_every_way_to_sum_contributions_gives_the_same(
    run: Any, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    if way == "compiled":
        pytest.importorskip("numba")
    expected = run.dual.contribute(run.inputs[3:4], target=1)
    monkeypatch.setattr(compiled, "WORTH", 0 if way == "compiled" else 1 << 62)
    monkeypatch.setattr(weights_room, "FEW", 0 if way == "streamed" else 8)
    for layer in ("fc1", "fc3"):
        found = run.dual.contribute(run.inputs[3:4], target=1, layer=layer)
        assert abs(found.residual) <= EXACT
    assert float((found.values - expected.values).abs().max()) <= EXACT


def test_a_class_index_may_be_numpys_or_torchs(run: Any) -> None:
    x = run.inputs[:1]
    output = run.dual(x)
    plain = run.dual.contribute(x, target=int(output.argmax()))
    for target in (output.argmax(), output.argmax().numpy(), np.int64(int(output.argmax()))):
        assert run.dual.contribute(x, target=target).to_dict() == plain.to_dict()
    label = run.labels[0]
    margin = run.dual.contribute(x, target="margin", label=label)
    assert margin.target == run.dual.contribute(x, target="margin", label=int(label)).target
    for target in (True, 1.0, torch.tensor(1.0)):
        with pytest.raises(dualform.QueryError, match="expected a class index"):
            run.dual.contribute(x, target=target)


@pytest.mark.filterwarnings("ignore:dualform. nothing was recorded")
def test_a_memory_without_patterns_has_no_contributions(tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    with dualform.record(model, tmp_path / "run"):
        pass
    with pytest.raises(dualform.QueryError, match="no patterns"):
        dualform.DualForm(model, tmp_path / "run").contribute(example=3, target=1)


def test_a_projection_that_attention_does_not_call_contributes_all_the_same(tmp_path: Path) -> None:
    model = nn.TransformerEncoderLayer(4, 2, 6, dropout=0.0, batch_first=True).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(2, 3, 4).double()
    with dualform.record(model, tmp_path / "run"):
        model(x).square().sum().backward()
        optimizer.step()
    dual = dualform.DualForm(model, tmp_path / "run")
    split = dual.contribute(x, target=torch.ones(2, 3, 4), layer="self_attn.out_proj")
    assert split.first_order
    assert abs(split.residual) <= 1e-12
