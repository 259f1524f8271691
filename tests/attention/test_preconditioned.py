"""Contributions and masks where Adam and its relatives trained the network."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import dualform
from dualform.attention import entrywise

STEPS = 52
KINDS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=3e-3, weight_decay=0.1),
    "Adam, coupled": lambda p: torch.optim.Adam(p, lr=3e-3, weight_decay=0.1),
    "RMSprop, momentum": lambda p: torch.optim.RMSprop(p, lr=1e-3, momentum=0.8),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2),
}


class Tied(nn.Module):
    """An embedding whose weight is the output layer's, too, and a layer used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(9, 6)
        self.middle = nn.Linear(6, 6)
        self.output = nn.Linear(6, 9)
        self.output.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens).mean(1)
        return self.output(torch.tanh(self.middle(torch.tanh(self.middle(hidden)))))


@dataclass
class Run:
    model: nn.Module
    path: Path
    inputs: Tensor

    @property
    def dual(self) -> dualform.DualForm:
        return dualform.DualForm(self.model, self.path)


def plain() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def train(
    path: Path,
    kind: str = "AdamW",
    *,
    model: nn.Module | None = None,
    dtype: torch.dtype = torch.float64,
    steps: int = STEPS,
    **options: Any,
) -> Run:
    torch.set_num_threads(1)
    torch.manual_seed(5)
    model = (plain() if model is None else model).to(dtype)
    optimizer = KINDS[kind](model.parameters())
    generator = torch.Generator().manual_seed(1)
    tokens = isinstance(model, Tied)
    with dualform.record(model, path, **options) as recorder:
        for step in range(steps):
            inputs = torch.randn(7, 6, generator=generator, dtype=torch.float64).to(dtype)
            labels = torch.randint(0, 3, (7,), generator=generator)
            if tokens:
                inputs = torch.randint(0, 9, (7, 4), generator=generator)
            tags: dict[str, Any] = {"label": labels, "task": "late" if step > 25 else "early"}
            recorder.tag(example=torch.arange(7) + 7 * (step % 9), **tags)
            nn.functional.cross_entropy(model(inputs), labels).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.3)
            optimizer.step()
            optimizer.zero_grad()
    return Run(model, path, inputs[:3])


@pytest.fixture(params=KINDS)
def run(request: pytest.FixtureRequest, tmp_path: Path) -> Run:
    return train(tmp_path / "run", request.param)


# Contributions -----------------------------------------------------------------------------------


def test_contributions_and_the_initial_part_add_up_to_the_output(run: Run) -> None:
    for target in range(3):
        split = run.dual.contribute(run.inputs[:1], target=target)
        assert abs(split.residual) <= 1e-12
        assert split.primal == pytest.approx(float(run.model(run.inputs[:1])[0, target].detach()))


def test_a_pattern_contributes_what_leaving_it_out_takes_away(run: Run) -> None:
    """Two ways that have little in common: backward factors, and a forward sweep with a mask."""
    dual = run.dual
    split = dual.contribute(run.inputs[:1], target=1, layer="2")
    inside = dual.attend(run.inputs[:1], layers="2")["2"].queries
    for row in (0, 100, 7 * STEPS - 1):
        mask = np.zeros(7 * STEPS, bool)
        mask[row] = True
        weights = dual.without(mask, layers="2").weights(dtype=torch.float64)
        left = inside.double() @ weights["2.weight"].T + weights["2.bias"]
        whole = dual.weights(dtype=torch.float64)
        full = inside.double() @ whole["2.weight"].T + whole["2.bias"]
        assert float(split.values[row]) == pytest.approx(float((full - left)[0, 1]), abs=1e-13)


def test_contributions_of_groups_are_what_their_matrices_write(run: Run) -> None:
    dual = run.dual
    split = dual.contribute(run.inputs[:1], target=2)
    table = split.sum_by("label")
    hidden = dual.attend(run.inputs[:1], layers="2")["2"].queries.double()
    nothing = dual.without(layers="2").weights(dtype=torch.float64)
    for label, value in zip(table["label"], table["contribution"], strict=True):
        own = dual.only(label=int(label), layers="2").weights(dtype=torch.float64)
        wrote = hidden @ (own["2.weight"] - nothing["2.weight"]).T
        wrote = wrote + own["2.bias"] - nothing["2.bias"]
        assert value == pytest.approx(float(wrote[0, 2]), abs=1e-12)


def test_a_layer_further_down_is_split_as_well(run: Run) -> None:
    split = run.dual.contribute(run.inputs[:1], target=0, layer="0")
    assert abs(split.residual) <= 1e-12


def test_the_way_back_is_the_same_however_little_is_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = train(tmp_path / "run")
    whole = run.dual.contribute(run.inputs[:1], target=1).values
    monkeypatch.setattr(entrywise, "HELD", 1)
    assert torch.equal(run.dual.contribute(run.inputs[:1], target=1).values, whole)


# Masks and time travel ---------------------------------------------------------------------------


def test_a_mask_and_its_complement_add_up(run: Run) -> None:
    dual = run.dual
    whole, nothing = dual.weights(torch.float64), dual.without().weights(torch.float64)
    for where in ({"label": 1}, {"task": "late"}, {"step": slice(3, 31)}):
        left, own = dual.without(**where), dual.only(**where)
        for name in whole:
            both = left.weights(torch.float64)[name] + own.weights(torch.float64)[name]
            assert (both - whole[name] - nothing[name]).abs().max() <= 1e-13


def test_half_the_strength_is_half_the_way(run: Run) -> None:
    dual = run.dual
    whole, gone = dual.weights(torch.float64), dual.without(label=2).weights(torch.float64)
    for name, weight in dual.without(label=2, strength=0.5).weights(torch.float64).items():
        assert (weight - (whole[name] + gone[name]) / 2).abs().max() <= 1e-13


def test_outputs_by_patterns_are_those_by_weights_masked_or_not(run: Run) -> None:
    dual = run.dual
    for view in (dual, dual.at(20), dual.without(label=0), dual.only(task="early").at(40)):
        by_patterns = view(run.inputs, by="patterns")
        assert (view(run.inputs) - by_patterns).abs().max() <= 1e-12


def test_masks_by_rows_and_by_columns_are_the_same(run: Run) -> None:
    dual = run.dual
    label = dual.memory.layer("0").patterns["label"]
    by_rows = dual.without(label == 1).weights(torch.float64)
    for name, weight in dual.without(label=1).weights(torch.float64).items():
        assert (weight - by_rows[name]).abs().max() <= 1e-13


@pytest.mark.parametrize("kind", ["AdamW", "Adam, coupled"])
def test_shared_weights_are_rebuilt_and_split(tmp_path: Path, kind: str) -> None:
    run = train(tmp_path / "run", kind, model=Tied())
    dual = run.dual
    tokens = run.inputs
    certificate = dual.verify(tokens)
    assert certificate.passed, repr(certificate)
    for name, parameter in run.model.named_parameters():
        off = (dual.weights(torch.float64)[name] - parameter.detach()).abs().max()
        assert off <= 1e-12 * parameter.detach().abs().max()
    assert (dual(tokens) - dual(tokens, by="patterns")).abs().max() <= 1e-12
    assert abs(dual.contribute(tokens[:1], target=4).residual) <= 1e-12


def test_attention_has_a_packed_projection_that_is_rebuilt(tmp_path: Path) -> None:
    class Attending(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
            self.output = nn.Linear(8, 3)

        def forward(self, rows: Tensor) -> Tensor:
            rows = torch.stack([rows, rows.roll(1, -1), rows.roll(2, -1)], 1)
            rows = torch.cat([rows, rows[..., :2]], -1)
            return self.output(self.attention(rows, rows, rows)[0].mean(1))

    run = train(tmp_path / "run", model=Attending())
    certificate = run.dual.verify(run.inputs)
    assert certificate.passed, repr(certificate)


# What an adaptive optimizer was given, and never moved -------------------------------------------

GIVEN: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    kind.__name__: kind
    for kind in (
        torch.optim.Adam,
        torch.optim.AdamW,
        torch.optim.NAdam,
        torch.optim.RMSprop,
        torch.optim.Adagrad,
        torch.optim.Adadelta,
    )
}


class PartlyUsed(nn.Module):
    """A frozen layer, one that is never called, and one that is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Linear(6, 8).requires_grad_(False)
        self.unused = nn.Linear(4, 4)
        self.head = nn.Linear(8, 3)

    def forward(self, rows: Tensor) -> Tensor:
        return self.head(torch.tanh(self.backbone(rows)))


def partly_trained(path: Path, kind: str, **options: Any) -> Run:
    torch.manual_seed(5)
    model = PartlyUsed()
    optimizer = GIVEN[kind](model.parameters())
    inputs = torch.randn(7, 6)
    with dualform.record(model, path, **options):
        for _ in range(20):
            model(inputs).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    return Run(model, path, inputs[:3])


@pytest.mark.parametrize("keep", ["auto", "keys"])
@pytest.mark.parametrize("kind", GIVEN)
def test_parameters_that_never_had_a_gradient_are_as_they_were(
    tmp_path: Path, kind: str, keep: str
) -> None:
    run = partly_trained(tmp_path / "run", kind, keep=keep)
    certificate = run.dual.verify(run.inputs)
    assert certificate.passed, repr(certificate)
    off = {c.parameter: c.residual for c in certificate.checks if c.kind == "weights"}
    for name in ("backbone.weight", "backbone.bias", "unused.weight", "unused.bias"):
        assert off[name] == 0
        for at in (0, 7, 20):
            kept = run.dual.memory.kept.weights(name, 0)
            view = run.dual.at(at)
            if keep == "auto" or at in (0, 20):
                assert torch.equal(view.weights()[name], kept)


@pytest.mark.parametrize("keep", ["auto", "keys"])
@pytest.mark.parametrize("name", ["backbone.weight", "unused.bias"])
def test_parameters_that_never_had_a_gradient_fail_if_they_have_changed(
    tmp_path: Path, name: str, keep: str
) -> None:
    run = partly_trained(tmp_path / "run", "AdamW", keep=keep)
    with torch.no_grad():
        run.model.get_parameter(name).view(-1)[0] += 1e-5
    certificate = run.dual.verify()
    assert {(c.parameter, c.kind) for c in certificate.failures} == {(name, "weights")}
