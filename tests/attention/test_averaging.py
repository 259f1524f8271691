"""Averaged weights, read from the memory, against the average that torch keeps beside the model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import dualform

STEPS = 40
RULES: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=0.02, nesterov=True),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=3e-3, weight_decay=0.1),
    "Adam, coupled": lambda p: torch.optim.Adam(p, lr=3e-3, weight_decay=0.1),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=1e-3, momentum=0.9),
}


def train(path: Path, rule: str, *, start: int = 1, every: int = 1, **options: Any) -> Any:
    """The model, and averages of both kinds as torch keeps them."""
    torch.set_num_threads(1)
    torch.manual_seed(4)
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.LayerNorm(8), nn.Linear(8, 3)).double()
    optimizer = RULES[rule](model.parameters())
    averages = (
        AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9)),
        AveragedModel(model),
    )
    generator = torch.Generator().manual_seed(3)
    with dualform.record(model, path, **options) as recorder:
        for step in range(1, STEPS + 1):
            labels = torch.randint(0, 3, (6,), generator=generator)
            recorder.tag(label=labels)
            inputs = torch.randn(6, 5, generator=generator, dtype=torch.float64)
            nn.functional.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
            optimizer.zero_grad()
            if step >= start and (step - start) % every == 0:
                for average in averages:
                    average.update_parameters(model)
    return model, *(average.module for average in averages)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(("start", "every"), [(1, 1), (11, 4)])
def test_averages_are_those_that_torch_keeps(
    tmp_path: Path, rule: str, start: int, every: int
) -> None:
    model, exponential, mean = train(tmp_path / "run", rule, start=start, every=every)
    dual = dualform.DualForm(model, tmp_path / "run")
    for decay, kept in ((0.9, exponential), (None, mean)):
        view = dual.averaged(decay, start=start, every=every)
        rebuilt = view.weights(dtype=torch.float64)
        for name, parameter in kept.named_parameters():
            off = (rebuilt[name] - parameter.detach()).abs().max() / parameter.detach().abs().max()
            assert off <= 1e-12, name


@pytest.mark.parametrize("rule", RULES)
def test_an_average_can_be_masked_split_and_asked_by_patterns(tmp_path: Path, rule: str) -> None:
    model, exponential, _ = train(tmp_path / "run", rule)
    view = dualform.DualForm(model, tmp_path / "run").averaged(0.9)
    inputs = torch.randn(2, 5).double()
    with torch.no_grad():
        assert (view(inputs) - exponential(inputs)).abs().max() <= 1e-12
    assert (view(inputs) - view(inputs, by="patterns")).abs().max() <= 1e-12
    split = view.contribute(inputs[:1], target=1)
    assert abs(split.residual) <= 1e-12
    one, other = view.without(label=1), view.only(label=1)
    nothing, whole = view.without().weights(torch.float64), view.weights(torch.float64)
    for name in whole:
        both = one.weights(torch.float64)[name] + other.weights(torch.float64)[name]
        assert (both - whole[name] - nothing[name]).abs().max() <= 1e-12


def test_an_average_of_one_step_is_that_step(tmp_path: Path) -> None:
    model, *_ = train(tmp_path / "run", "AdamW")
    dual = dualform.DualForm(model, tmp_path / "run")
    view = dual.averaged(start=17, every=1000)
    for name, weight in dual.at(17).weights(torch.float64).items():
        assert (view.weights(torch.float64)[name] - weight).abs().max() <= 1e-13


def test_what_is_no_average_is_refused(tmp_path: Path) -> None:
    model, *_ = train(tmp_path / "run", "SGD")
    dual = dualform.DualForm(model, tmp_path / "run")
    for wrong in ({"decay": 1.0}, {"decay": -0.1}, {"start": -1}, {"every": 0}, {"every": 1.5}):
        with pytest.raises(dualform.QueryError, match="averaged"):
            dual.averaged(**wrong)
    with pytest.raises(dualform.QueryError, match="nothing to average"):
        dual.at(3).averaged(start=5)
    with pytest.raises(dualform.QueryError, match="cannot be verified"):
        dual.averaged(0.9).verify()


def test_states_that_cannot_be_rebuilt_have_no_average(tmp_path: Path) -> None:
    model, *_ = train(tmp_path / "run", "SGD", keep="keys")
    dual = dualform.DualForm(model, tmp_path / "run").averaged(0.9)
    with pytest.raises(dualform.QueryError, match=r"after \d+ updates cannot be rebuilt"):
        dual.weights()


@pytest.mark.parametrize(("start", "every"), [(1, 1), (11, 4), (5, 1000)])
def test_buffers_are_those_of_the_last_time_the_average_was_kept(
    tmp_path: Path, start: int, every: int
) -> None:
    torch.manual_seed(4)
    first = nn.Linear(5, 8, bias=False)  # before a norm a bias is moved by rounding alone
    model = nn.Sequential(first, nn.BatchNorm1d(8), nn.Linear(8, 3)).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    with dualform.record(model, tmp_path / "run"):
        for step in range(1, STEPS + 1):
            model(torch.randn(6, 5).double()).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if step >= start and (step - start) % every == 0:
                average.update_parameters(model)
    view = dualform.DualForm(model, tmp_path / "run").averaged(0.9, start=start, every=every)
    twin = view.to_model()
    for mine, theirs in zip(twin.buffers(), average.module.buffers(), strict=True):
        assert torch.equal(mine, theirs)
    inputs = torch.randn(2, 5).double()
    with torch.no_grad():
        assert (view(inputs) - average.module.eval()(inputs)).abs().max() <= 1e-12
