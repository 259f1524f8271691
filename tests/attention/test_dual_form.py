"""The network by attention is the network: at the end, at every step, with every mask."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import dualform
from dualform.learning_rules import coefficients

EXACT = 1e-12


def everything(view: dualform.DualForm) -> dict[str, Tensor]:
    return view.weights(torch.float64)


@pytest.mark.parametrize("step", [0, 1, 2, 15, 29, 30])
def test_the_rebuilt_weights_are_the_weights_training_had(
    run: Any, step: int, difference: Any
) -> None:
    for name, weight in everything(run.dual.at(step)).items():
        assert difference(weight, run.history[step][name]) <= EXACT


@pytest.mark.parametrize("clip", [None, 0.5], ids=["plain", "clipped"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
def test_they_are_the_very_bits_of_training(
    train: Any, dtype: torch.dtype, clip: float | None, difference: Any
) -> None:
    """But that clipping of float64 leaves the last places of its factor open."""
    run = train(dtype=dtype, steps=40, clip=clip, warm=2)
    for step in (0, 1, 7, 26, 40):
        for name, weight in run.dual.at(step).weights().items():
            assert weight.dtype == dtype
            if clip is None or dtype == torch.float32:
                assert torch.equal(weight, run.history[step][name]), (name, step)
            assert difference(weight, run.history[step][name]) <= 1e-14


def test_outputs_by_patterns_by_weights_and_by_the_model_agree(run: Any, difference: Any) -> None:
    primal = run.model(run.inputs).detach()
    assert difference(run.dual(run.inputs), primal) <= EXACT
    assert difference(run.dual(run.inputs, by="patterns"), primal) <= EXACT


def test_patterns_and_weights_agree_in_every_view(run: Any, difference: Any) -> None:
    for view in (run.dual.at(11), run.dual.without(label=1), run.dual.only(task="first").at(20)):
        x = run.inputs[:5]
        assert difference(view(x, by="patterns"), view(x)) <= EXACT


def test_the_dual_output_is_the_papers_equation_written_out(run: Any, difference: Any) -> None:
    """Brute force over one layer: base·q + Σ_t (x_t·q) c_t δ_t, pattern by pattern."""
    memory, layer = run.memory, run.memory.layer("fc1")
    log, path = memory.log("fc1.weight"), memory.path_to("fc1.weight", memory.steps)
    factors = coefficients(log, memory.settings, path, torch.float64)
    query = run.inputs[0]
    output = factors.initial * memory.kept.weights("fc1.weight", 0) @ query
    momentum = memory.kept.state("fc1.weight", 0)["momentum_buffer"]
    output = output + factors.momentum * momentum @ query
    for key, signal, step in zip(
        layer.keys, layer.error_signals, layer.patterns["step"], strict=True
    ):
        output = output + factors.steps[step] * (key @ query) * signal
    assert difference(output, run.history[-1]["fc1.weight"] @ query) <= EXACT


def test_a_twin_may_be_changed_without_changing_the_dual_form(run: Any) -> None:
    dual = run.dual
    before = everything(dual)
    twin = dual.to_model()
    with torch.no_grad():
        for tensor in [*twin.parameters(), *dual.weights().values()]:
            tensor.zero_()
    for name, weight in everything(dual).items():
        assert torch.equal(weight, before[name])


def test_a_query_orthogonal_to_all_keys_gets_the_initial_part(train: Any, difference: Any) -> None:
    """Remark 3.3: keys live in the first five coordinates, the query in the sixth."""

    class Flat(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(6, 4, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            mask = torch.tensor([1, 1, 1, 1, 1, 0], dtype=x.dtype)
            output: Tensor = self.fc(x * mask if self.training else x)
            return output

    run = train(Flat, steps=10)
    query = torch.tensor([[0, 0, 0, 0, 0, 2.0]], dtype=torch.float64)
    spotlight = run.dual.attend(query)["fc"]
    assert float(spotlight.weights.abs().max()) == 0.0
    initial = run.dual.without()
    assert difference(run.dual(query), initial(query)) <= EXACT
    contribution = run.dual.contribute(query, target=2)
    assert float(contribution.values.abs().max()) == 0.0
    assert abs(contribution.shares["initial weights"] - contribution.primal) <= EXACT


def test_to_model_is_a_module_of_its_own(run: Any, difference: Any) -> None:
    twin = run.dual.at(7).to_model()
    for name, parameter in twin.named_parameters():
        assert difference(parameter.detach(), run.history[7][name]) <= EXACT
        assert parameter.requires_grad
    before = run.model.fc1.weight.detach().clone()
    with torch.no_grad():
        twin.fc1.weight.add_(1.0)
    assert torch.equal(run.model.fc1.weight, before)
    assert (
        difference(everything(run.dual.at(7))["fc1.weight"], run.history[7]["fc1.weight"]) <= EXACT
    )


def test_the_model_is_left_as_it_was(run: Any) -> None:
    model = run.model
    model.train()
    model.fc2.eval()
    modes = [m.training for m in model.modules()]
    state = {n: p.clone() for n, p in model.state_dict().items()}
    random = torch.random.get_rng_state()
    run.dual(run.inputs, by="patterns")
    run.dual.attend(run.inputs[:2])
    run.dual.contribute(run.inputs[:1], target=0, layer="fc1")
    run.dual.verify(run.inputs[:2])
    assert [m.training for m in model.modules()] == modes
    assert all(torch.equal(p, state[n]) for n, p in model.state_dict().items())
    assert torch.equal(random, torch.random.get_rng_state())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert all(p.grad is None or not p.grad.any() for p in model.parameters())
    model.train()


def test_no_hook_and_no_mode_survives_a_model_that_raises(run: Any) -> None:
    with pytest.raises(RuntimeError):
        run.dual.attend(torch.zeros(1, 99, dtype=torch.float64))
    assert not any(m._forward_hooks for m in run.model.modules())
    assert all(m.training for m in run.model.modules())


class Mixed(nn.Module):
    """A norm (by examples), positions, a layer used twice, a weight shared by two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)
        self.norm = nn.LayerNorm(6)
        self.up = nn.Linear(6, 4, bias=False)
        self.tied = nn.Linear(6, 4)
        self.tied.weight = self.up.weight
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.inner(x))
        h = self.norm(self.inner(h))
        output: Tensor = self.up(h) + self.tied(self.drop(h) * 0.5)
        return output


@pytest.fixture(scope="session")
def mixed(train: Any) -> Any:
    return train(Mixed, shape=(3, 6), steps=20)


@pytest.mark.parametrize("step", [0, 9, 20])
def test_the_weights_of_shared_and_repeated_layers_come_back(
    mixed: Any, step: int, difference: Any
) -> None:
    for name, weight in everything(mixed.dual.at(step)).items():
        assert difference(weight, mixed.history[step][name]) <= EXACT


def test_outputs_of_shared_and_repeated_layers_agree_by_patterns(
    mixed: Any, difference: Any
) -> None:
    mixed.model.eval()
    primal = mixed.model(mixed.inputs)
    mixed.model.train()
    assert difference(mixed.dual(mixed.inputs), primal) <= EXACT
    assert difference(mixed.dual(mixed.inputs, by="patterns"), primal) <= EXACT


def test_batch_norm_runs_with_the_statistics_of_its_step(train: Any, difference: Any) -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 4))

    run = train(build, steps=12)
    run.model.eval()
    primal = run.model(run.inputs)
    run.model.train()
    assert difference(run.dual(run.inputs), primal) <= EXACT
    early = run.dual.at(5).to_model()
    assert int(early[1].num_batches_tracked) < int(run.model[1].num_batches_tracked)
    early.eval()
    assert difference(run.dual.at(5)(run.inputs), early(run.inputs)) <= EXACT
    masked = run.dual.without(label=0).to_model()
    assert torch.equal(masked[1].running_mean, run.model[1].running_mean)


def test_the_repr_says_step_masks_and_that_a_mask_is_not_retraining(run: Any) -> None:
    text = repr(run.dual.at(12).without(label=[1, 2], strength=0.5))
    assert "at(12)" in text
    assert "12 of 30" in text
    assert "without(label=[1, 2], strength=0.5)" in text
    assert "not retraining" in text
    assert "not retraining" not in repr(run.dual)


REFUSED: dict[str, tuple[Callable[[dualform.DualForm, Tensor], Any], str]] = {
    "a step too far": (lambda dual, x: dual.at(31), "from 0 to 30"),
    "a negative step": (lambda dual, x: dual.at(-1), "from 0 to 30"),
    "half a step": (lambda dual, x: dual.at(1.5), "whole number"),  # type: ignore[arg-type]
    "an unknown column": (lambda dual, x: dual.without(colour=1), "label"),
    "an unknown value": (lambda dual, x: dual.only(label=99), "99"),
    "rows of another length": (lambda dual, x: dual.without(np.ones(7, bool)), "240"),
    "rows that are numbers": (lambda dual, x: dual.without(np.arange(240)), "boolean"),
    "an unknown way to run": (lambda dual, x: dual(x, by="magic"), "weights"),
    "a strength that is no number": (
        lambda dual, x: dual.without(strength="all"),
        "expected a number from 0 to 1",
    ),
    "layers that are no names": (lambda dual, x: dual.without(layers=3), "name of a layer"),  # type: ignore[arg-type]
    "an unknown layer": (lambda dual, x: dual.attend(x, layers="fc9"), "fc1"),
    "no layer": (lambda dual, x: dual.attend(x, layers=[]), "fc1"),
    "an unknown column among several to group by": (
        lambda dual, x: dual.attend(x)["fc1"].top(3, by=["label", "colour"]),
        "there is no column 'colour'",
    ),
    "no column to group by": (
        lambda dual, x: dual.attend(x)["fc1"].top(3, by=[]),
        "groups need a column; there are",
    ),
    "no column to group contributions by": (
        lambda dual, x: dual.contribute(x[:1], target=0).top(3, by=[]),
        "groups need a column; there are",
    ),
    "inputs of another precision": (
        lambda dual, x: dual.attend(x.float() if x.dtype == torch.float64 else x.double()),
        r"recorded in float\d\d; convert",
    ),
    "not a number": (lambda dual, x: dual.attend(x * float("nan")), "NaN"),
    "infinity": (lambda dual, x: dual(x / 0), "infinite"),
    "nothing to ask with": (lambda dual, x: dual.attend(), "example="),
    "two things at once": (lambda dual, x: dual.attend(x, example=3), "got inputs, example"),
    "an unknown example": (lambda dual, x: dual.attend(example=12345), "12345"),
    "a query too wide": (
        lambda dual, x: dual.attend(queries=torch.ones(2, 3), layers="fc1"),
        r"\[n, 6\]",
    ),
    "a query for several layers": (lambda dual, x: dual.attend(queries=torch.ones(2, 6)), "fc2"),
    "a target too high": (lambda dual, x: dual.contribute(x[:1], target=4), "0 to 3"),
    "a negative target": (lambda dual, x: dual.contribute(x[:1], target=-1), "0 to 3"),
    "a target of another width": (
        lambda dual, x: dual.contribute(x[:1], target=[1.0, 2.0]),
        r"\[1, 4\]",
    ),
    "several inputs at once": (lambda dual, x: dual.contribute(x, target=0), "one input"),
    "an unknown layer to split": (
        lambda dual, x: dual.contribute(x[:1], target=0, layer="fc9"),
        "fc1",
    ),
    "no input to split": (lambda dual, x: dual.contribute(target=0), "example="),
    "a masked view verified": (lambda dual, x: dual.without(label=1).verify(), "without"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_answered_is_refused_by_name(run: Any, case: str) -> None:
    ask, words = REFUSED[case]
    with pytest.raises(dualform.QueryError, match=words):
        ask(run.dual, run.inputs[:3])


def test_another_architecture_is_refused_with_its_first_differences(run: Any) -> None:
    other = nn.Sequential(nn.Linear(6, 9), nn.Linear(9, 4))
    with pytest.raises(dualform.QueryError, match=r"fc1\.weight") as refused:
        dualform.DualForm(other, run.path)
    assert "no such parameter" in str(refused.value)
    wider = type(run.model)()
    wider.fc2 = nn.Linear(9, 8)
    with pytest.raises(
        dualform.QueryError, match=r"fc2.weight: model has \(8, 9\), memory has \(7, 9\)"
    ):
        dualform.DualForm(wider, run.path)


def test_without_a_model_only_questions_that_need_a_forward_pass_are_refused(run: Any) -> None:
    dual = dualform.DualForm(None, run.path)
    assert set(dual.weights()) == set(run.history[0])
    assert dual.verify().passed
    assert len(dual.attend(example=3)["fc1"].top(2)) == 2
    for ask in (
        lambda: dual(run.inputs),
        lambda: dual.attend(run.inputs),
        lambda: dual.contribute(run.inputs[:1], target=0),
        lambda: dual.to_model(),
        lambda: dual.verify(run.inputs),
    ):
        with pytest.raises(dualform.QueryError, match="model"):
            ask()


def test_a_hook_of_the_users_own_acts_on_what_the_layer_gives(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    model[2].register_forward_hook(lambda module, arguments, output: 3 * output)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs = torch.randn(7, 6, dtype=torch.float64)
    with dualform.record(model, tmp_path):
        model(inputs).square().mean().backward()
        optimizer.step()
    dual = dualform.DualForm(model, tmp_path)
    with torch.no_grad():
        assert float((dual(inputs, by="patterns") - model(inputs)).abs().max()) <= 1e-12
    assert dual.verify(inputs).passed
