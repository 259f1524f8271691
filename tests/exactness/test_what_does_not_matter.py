"""What must not matter: order of patterns, segments, batch splits, threads, hyper-parameters.

The dual form is a sum over patterns, and a sum has no order (Remark 3.1 of the paper); a query that
no key points at gets the initial part (Remark 3.3); a mask and its complement add up.
"""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import SGD

import dualform
from dualform.learning_rules import Coefficients, coefficients


def share_of(memory: dualform.Memory, name: str, at: int) -> Coefficients:
    """a, h and c of a parameter after so many updates."""
    path, dtype = memory.path_to(name, at), memory.parameters[name].dtype
    return coefficients(memory.log(name), memory.settings, path, dtype)


RULE = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.05}


def network(*widths: int, bias: bool = True) -> nn.Module:
    torch.manual_seed(11)
    layers: list[nn.Module] = []
    for d_in, d_out in itertools.pairwise(widths):
        layers += [nn.Linear(d_in, d_out, bias=bias), nn.Tanh()]
    return nn.Sequential(*layers[:-1]).double()


def record_run(
    path: Path,
    *,
    parts: int = 1,
    steps: int = 6,
    batch: int = 8,
    widths: tuple[int, ...] = (5, 7, 3),
    bias: bool = True,
    clip: float | None = 0.5,
    rule: dict[str, Any] = RULE,
    flushed: int = 0,
    **options: Any,
) -> tuple[nn.Module, dualform.Memory]:
    """The same examples in the same steps, each batch cut into so many parts.

    A segment ends after every `flushed` steps.
    """
    model = network(*widths, bias=bias)
    optimizer = SGD(model.parameters(), **rule)
    generator = torch.Generator().manual_seed(4)
    with dualform.record(model, path, **options) as recorder:
        for step in range(steps):
            inputs = torch.randn(batch, widths[0], generator=generator, dtype=torch.float64)
            ids = torch.arange(batch) + batch * step
            for part, names in zip(inputs.chunk(parts), ids.chunk(parts), strict=True):
                recorder.tag(example=names, parity=names % 2)
                (model(part).square().sum() / batch).backward()
            if clip is not None:
                clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()
            if flushed and step % flushed == 0:
                recorder.flush()
    return model, dualform.Memory.open(path)


def assert_same_weights(one: dict[str, Tensor], other: dict[str, Tensor], bound: float) -> None:
    assert one.keys() == other.keys()
    for name, weight in one.items():
        off = float((weight - other[name]).abs().max() / other[name].abs().max())
        assert off <= bound, f"{name}: {off:.1e}"


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def test_the_order_of_rows_does_not_matter(tmp_path: Path) -> None:
    model, memory = record_run(tmp_path / "run")
    for name in memory.layers:
        layer = memory.layer(name)
        shuffled = torch.randperm(len(layer), generator=torch.Generator().manual_seed(1))
        for parameter in (layer.weight, layer.bias):
            c = share_of(memory, parameter, memory.steps)
            of_row = torch.from_numpy(c.per_pattern(layer.patterns["step"]))[shuffled]
            values = layer.error_signals[shuffled] * of_row[:, None]
            learned = (
                values.T @ layer.keys[shuffled] if parameter == layer.weight else values.sum(0)
            )
            rebuilt = c.initial * memory.kept.weights(parameter, 0) + learned
            assert torch.allclose(rebuilt, model.get_parameter(parameter), rtol=0, atol=1e-14)


@pytest.mark.parametrize("flushed", [1, 2, 4])
def test_the_size_of_segments_does_not_matter(flushed: int, tmp_path: Path) -> None:
    model, whole = record_run(tmp_path / "whole")
    _, cut = record_run(tmp_path / "cut", flushed=flushed)
    assert len(whole.opened.segments) < len(cut.opened.segments)
    for name in whole.layers:
        one, other = whole.layer(name), cut.layer(name)
        assert torch.equal(one.keys, other.keys)
        assert torch.equal(one.error_signals, other.error_signals)
        for column in whole.columns:
            assert one.patterns[column].tolist() == other.patterns[column].tolist()
    assert_same_weights(
        dualform.DualForm(model, whole).weights(), dualform.DualForm(model, cut).weights(), 1e-14
    )


@pytest.mark.parametrize("parts", [2, 4, 8])
def test_how_batches_are_split_does_not_matter(parts: int, tmp_path: Path) -> None:
    model, whole = record_run(tmp_path / "whole")
    split_model, split = record_run(tmp_path / "split", parts=parts)
    assert_same_weights(weights(model), weights(split_model), 1e-13)
    assert_same_weights(
        dualform.DualForm(model, whole).weights(), dualform.DualForm(model, split).weights(), 1e-13
    )
    for name in whole.layers:
        one, other = whole.layer(name), split.layer(name)
        assert one.patterns["example"].tolist() == other.patterns["example"].tolist()
        assert torch.allclose(one.keys, other.keys, atol=1e-13)
        assert torch.allclose(one.error_signals, other.error_signals, atol=1e-13)


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def test_the_number_of_threads_does_not_matter(threads: Any, tmp_path: Path) -> None:
    threads(2)
    model, memory = record_run(tmp_path / "run", batch=64, widths=(40, 60, 10))
    rebuilt = {}
    for count in (1, 2):
        threads(count)
        rebuilt[count] = dualform.DualForm(model, memory).weights()
        assert_same_weights(rebuilt[count], weights(model), 1e-12)
    assert_same_weights(rebuilt[1], rebuilt[2], 1e-14)


def test_a_query_orthogonal_to_all_keys_gets_the_initial_part(tmp_path: Path) -> None:
    """Remark 3.3: one example seen again and again spans one direction of eight."""
    model = network(8, 4)
    optimizer = SGD(model.parameters(), **RULE)
    key = torch.randn(1, 8, dtype=torch.float64)
    with dualform.record(model, tmp_path / "run"):
        for _ in range(10):
            model(key).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    memory = dualform.Memory.open(tmp_path / "run")
    c = share_of(memory, "0.weight", 10)
    basis = torch.linalg.qr(key.T, mode="complete").Q
    orthogonal = basis[:, 1:].T
    rebuilt = dualform.DualForm(model, memory).weights()
    primal = orthogonal @ rebuilt["0.weight"].T
    initial = c.initial * (orthogonal @ memory.kept.weights("0.weight", 0).T)
    assert torch.allclose(primal, initial, atol=1e-14)
    assert not torch.allclose(
        key @ rebuilt["0.weight"].T, c.initial * key @ memory.kept.weights("0.weight", 0).T
    )
    outputs = dualform.DualForm(model, memory)(orthogonal, by="patterns")
    assert torch.allclose(outputs, initial + rebuilt["0.bias"], atol=1e-13)


@pytest.mark.parametrize("at", [0, 1, 4, 6])
def test_a_mask_and_its_complement_add_up(at: int, tmp_path: Path) -> None:
    model, memory = record_run(tmp_path / "run")
    dual = dualform.DualForm(model, memory).at(at)
    everything = dual.without().weights()
    for where in ({"parity": 1}, {"example": [3, 17]}, {"step": slice(2, 4)}):
        without, only = dual.without(**where).weights(), dual.only(**where).weights()
        for name, weight in dual.weights().items():
            assert torch.allclose(without[name] + only[name], weight + everything[name], atol=1e-13)
    for name, weight in everything.items():
        share = share_of(memory, name, at).initial
        assert torch.allclose(weight, share * memory.kept.weights(name, 0), atol=1e-15)


rules = st.fixed_dictionaries(
    {
        "lr": st.floats(1e-3, 0.3),
        "momentum": st.sampled_from([0.0, 0.5, 0.9, 0.99]),
        "dampening": st.sampled_from([0.0, 0.4, 1.0]),
        "weight_decay": st.sampled_from([0.0, 1e-3, 0.3]),
        "nesterov": st.booleans(),
        "maximize": st.booleans(),
        "foreach": st.booleans(),
    }
).filter(lambda rule: not rule["nesterov"] or (rule["momentum"] > 0 and rule["dampening"] == 0))


@example(  # one row, whose sum along v is small by chance
    rule={
        "lr": 0.25,
        "momentum": 0.0,
        "dampening": 0.0,
        "weight_decay": 0.0,
        "nesterov": False,
        "maximize": False,
        "foreach": False,
    },
    widths=(4, 1),
    steps=1,
    batch=2,
    bias=False,
    clip=0.01,
    flushed=0,
)
@given(
    rule=rules,
    widths=st.lists(st.integers(1, 6), min_size=2, max_size=4).map(tuple),
    steps=st.integers(1, 5),
    batch=st.sampled_from([1, 2, 4]),
    bias=st.booleans(),
    clip=st.sampled_from([None, 1e-2, 0.5]),
    flushed=st.sampled_from([0, 1, 3]),
)
@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.too_slow])
def test_any_sgd_on_any_small_network_is_rebuilt(
    rule: dict[str, Any], widths: tuple[int, ...], **how: Any
) -> None:
    with tempfile.TemporaryDirectory() as directory:
        model, memory = record_run(Path(directory) / "run", rule=rule, widths=widths, **how)
        dual = dualform.DualForm(model, memory)
        assert_same_weights(dual.weights(), weights(model), 1e-12)
        nothing = dual.without().weights(torch.float64)
        for name, weight in nothing.items():  # what patterns do not explain is rounding alone
            initial = share_of(memory, name, memory.steps).initial * memory.kept.weights(name, 0)
            bound = 1e-12 * float(weights(model)[name].abs().max())
            assert float((weight - initial).abs().max()) <= bound
        del memory
