"""The coefficients of SGD, against torch's own SGD run on gradients made up for the purpose."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from dualform.errors import QueryError, RecordingError
from dualform.learning_rules import (
    HYPERPARAMETERS,
    Coefficients,
    ParameterLog,
    coefficients,
    hyperparameters,
    momentum_buffer,
    rule_of,
    transitions,
)

WIDTH = 3
PLAIN = dict.fromkeys(HYPERPARAMETERS, 0.0) | {"lr": 0.1}


@dataclasses.dataclass
class Step:
    """One update: SGD's settings, the factor on the gradient, and how much of it is carried on."""

    options: dict[str, Any]
    kappa: float = 1.0
    has_gradient: bool = True
    carried: bool = False
    forgets_momentum: bool = False


def trained_by_torch(
    steps: list[Step], gradients: Tensor, warm: int
) -> tuple[list[Tensor], Tensor, ParameterLog]:
    """Run torch's SGD: the weights after every step, the initial momentum buffer, and the log."""
    weight = nn.Parameter(torch.linspace(-1, 2, WIDTH, dtype=torch.float64))
    optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9)
    for _ in range(warm):
        weight.grad = torch.full_like(weight, 0.3)
        optimizer.step()
    buffer = momentum_buffer(optimizer, weight)
    initial_momentum = torch.zeros(WIDTH, dtype=torch.float64) if buffer is None else buffer.clone()
    weights = [weight.detach().clone()]
    rows: list[dict[str, Any]] = []
    held, first = torch.zeros(WIDTH, dtype=torch.float64), 0
    for s, (step, gradient) in enumerate(zip(steps, gradients, strict=True)):
        if step.forgets_momentum:
            optimizer.state.clear()
        if not step.carried:
            held, first = torch.zeros_like(held), s
        held = held + gradient
        optimizer.param_groups[0].update(step.options)
        weight.grad = step.kappa * held if step.has_gradient else None
        rows.append(
            dict(zip(HYPERPARAMETERS, hyperparameters(optimizer.param_groups[0]), strict=True))
            | {
                "applied": step.has_gradient,
                "kappa": step.kappa,
                "first": first,
                "fresh": momentum_buffer(optimizer, weight) is None,
            }
        )
        optimizer.step()
        weights.append(weight.detach().clone())
    names = [f.name for f in dataclasses.fields(ParameterLog)]
    log = ParameterLog(**{name: np.array([row[name] for row in rows]) for name in names})
    return weights, initial_momentum, log


def rebuilt(c: Coefficients, initial: Tensor, momentum: Tensor, gradients: Tensor) -> Tensor:
    learned = torch.from_numpy(c.steps) @ gradients[: len(c.steps)]
    return c.initial * initial + c.momentum * momentum + learned


def assert_coefficients_explain(steps: list[Step], *, warm: int = 0, seed: int = 0) -> None:
    generator = torch.Generator().manual_seed(seed)
    gradients = torch.randn(len(steps), WIDTH, generator=generator, dtype=torch.float64)
    weights, momentum, log = trained_by_torch(steps, gradients, warm)
    size = max(float(w.abs().max()) for w in weights)
    for at, weight in enumerate(weights):
        off = rebuilt(coefficients(log, at), weights[0], momentum, gradients) - weight
        assert float(off.abs().max()) <= 1e-12 * size


options = st.fixed_dictionaries(
    {
        "lr": st.floats(0, 0.5),
        "momentum": st.sampled_from([0.0, 0.0, 0.5, 0.9, 0.99]),
        "dampening": st.floats(0, 1),
        "weight_decay": st.one_of(st.just(0.0), st.floats(0, 1)),
        "nesterov": st.booleans(),
        "maximize": st.booleans(),
    }
)
updates = st.builds(
    Step,
    options,
    kappa=st.one_of(st.just(1.0), st.floats(1e-3, 2)),
    has_gradient=st.sampled_from([True, True, True, False]),
    carried=st.sampled_from([False, False, True]),
    forgets_momentum=st.sampled_from([False] * 9 + [True]),
)


@given(st.lists(updates, min_size=1, max_size=12), st.integers(0, 2), st.integers(0, 1000))
@settings(deadline=None, max_examples=150)
def test_any_sequence_of_settings_is_explained(steps: list[Step], warm: int, seed: int) -> None:
    assert_coefficients_explain(steps, warm=warm, seed=seed)


@given(options, st.integers(1, 40), st.integers(0, 1))
@settings(deadline=None, max_examples=60)
def test_constant_settings_are_explained(chosen: dict[str, Any], count: int, warm: int) -> None:
    assert_coefficients_explain([Step(chosen)] * count, warm=warm)


def test_plain_descent_subtracts_every_gradient_once() -> None:
    c = coefficients(ParameterLog.constant(4, lr=0.1))
    assert c.initial == 1.0
    assert c.momentum == 0.0
    assert np.allclose(c.steps, -0.1)


def test_momentum_lets_old_gradients_count_more_than_recent_ones() -> None:
    c = coefficients(ParameterLog.constant(50, lr=0.1, momentum=0.9))
    assert np.allclose(c.steps, -0.1 * (1 - 0.9 ** np.arange(50, 0, -1)) / 0.1)
    assert (np.diff(c.steps) > 0).all()


def test_decay_lets_old_gradients_fade() -> None:
    c = coefficients(ParameterLog.constant(30, lr=0.1, weight_decay=0.5))
    assert np.isclose(c.initial, 0.95**30)
    assert np.allclose(c.steps, -0.1 * 0.95 ** np.arange(29, -1, -1))


def test_maximize_turns_the_sign_of_the_gradient_but_not_of_the_decay() -> None:
    down = coefficients(ParameterLog.constant(5, lr=0.1, weight_decay=0.5, momentum=0.5))
    up = coefficients(ParameterLog.constant(5, lr=0.1, weight_decay=0.5, momentum=0.5, maximize=1))
    assert up.initial == down.initial
    assert np.array_equal(up.steps, -down.steps)


def test_thousands_of_steps_of_heavy_momentum_do_not_underflow() -> None:
    c = coefficients(ParameterLog.constant(20_000, lr=0.01, momentum=0.999, weight_decay=1e-4))
    assert np.isfinite(c.steps).all()
    assert np.isclose(c.steps[-1], -0.01)


def test_an_earlier_step_is_the_recursion_of_a_shorter_log() -> None:
    log = ParameterLog.constant(20, lr=0.1, momentum=0.9, weight_decay=0.1)
    early, short = coefficients(log, 7), coefficients(log.head(7))
    assert early.initial == short.initial
    assert np.array_equal(early.steps, short.steps)


def test_before_the_first_step_there_is_only_the_initial_weight() -> None:
    c = coefficients(ParameterLog.constant(5, lr=0.1, momentum=0.9), at=0)
    assert (c.initial, c.momentum, len(c.steps)) == (1.0, 0.0, 0)


@pytest.mark.parametrize("at", [-1, 6])
def test_a_step_outside_the_log_is_refused(at: int) -> None:
    with pytest.raises(QueryError, match=rf"step {at} was asked for, but the log holds .* 0 to 5"):
        coefficients(ParameterLog.constant(5, lr=0.1), at)


def test_patterns_of_later_steps_have_no_coefficient() -> None:
    c = Coefficients(1.0, 0.0, np.array([-1.0, -2.0, -3.0]))
    assert c.per_pattern(np.array([2, 0, 1, 3, 99])).tolist() == [-3.0, -1.0, -2.0, 0.0, 0.0]


def test_a_step_without_a_gradient_moves_nothing() -> None:
    log = ParameterLog.constant(3, lr=0.1, momentum=0.9, weight_decay=0.5)
    log.applied[1] = False
    matrix, vector = transitions(log)
    assert np.array_equal(matrix[1], np.eye(2))
    assert not vector[1].any()


def test_gradients_carried_over_steps_share_the_coefficient_of_their_update() -> None:
    log = ParameterLog.constant(4, lr=0.1)
    log.applied[:3] = False
    log.first[3] = 1
    assert coefficients(log).steps.tolist() == [0.0, -0.1, -0.1, -0.1]


def test_a_rule_is_known_by_the_very_class_of_its_optimizer() -> None:
    class Mine(torch.optim.SGD):
        pass

    weight = nn.Parameter(torch.zeros(2))
    assert rule_of(torch.optim.SGD([weight])) == "sgd"
    assert rule_of(torch.optim.AdamW([weight])) == "adam"
    for optimizer in (torch.optim.Adamax([weight]), Mine([weight])):
        with pytest.raises(RecordingError, match=rf"{type(optimizer).__name__}; its learning rule"):
            rule_of(optimizer)


def test_what_cannot_be_explained_is_refused_with_the_reason() -> None:
    weight = nn.Parameter(torch.zeros(2, 2))
    with pytest.raises(RecordingError, match="matrix iteration in bfloat16"):
        rule_of(torch.optim.Muon([weight]))
    with pytest.raises(RecordingError, match="capturable=True"):
        rule_of(torch.optim.Adam([weight], capturable=True))
    with pytest.raises(RecordingError, match="differentiable=True"):
        rule_of(torch.optim.RMSprop([weight], differentiable=True))
