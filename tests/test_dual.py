"""The paper's equations: primal and dual form of one layer, and the remarks about them."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dualform import dual


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def test_a_layer_trained_by_gradient_descent_is_an_attention_over_its_training() -> None:
    initial, learning_rate = random(3, 5, seed=1), 0.1
    weight, keys, signals = initial.clone(), [], []
    for step in range(6):
        inputs, targets = random(4, 5, seed=10 + step), random(4, 3, seed=20 + step)
        error_signal = dual.primal(weight, inputs) - targets  # of ½ Σ ‖y - target‖²
        weight -= learning_rate * error_signal.T @ inputs
        keys.append(inputs)
        signals.append(error_signal)
    values = dual.values(torch.cat(signals), torch.full((24,), -learning_rate, dtype=torch.float64))
    queries = random(7, 5, seed=2)
    assert torch.allclose(
        dual.primal(weight, queries),
        dual.dual(initial, torch.cat(keys), values, queries),
        rtol=1e-13,
        atol=1e-13,
    )


def test_attention_weights_are_plain_scalar_products() -> None:
    keys, queries = random(6, 4), random(2, 4, seed=1)
    weights = dual.attention_weights(keys, queries)
    assert weights.shape == (2, 6)
    assert torch.isclose(weights[1, 4], keys[4] @ queries[1])
    assert (weights < 0).any()


def test_values_scale_every_error_signal_by_its_own_coefficient() -> None:
    signals = random(3, 2)
    assert torch.equal(
        dual.values(signals, torch.tensor([1.0, 0.0, -2.0]).double()),
        torch.stack([signals[0], torch.zeros(2).double(), -2 * signals[2]]),
    )


@given(st.integers(0, 9), st.integers(1, 5), st.integers(1, 5), st.integers(1, 4))
@settings(deadline=None, max_examples=30)
def test_attending_and_multiplying_by_the_learned_matrix_agree(
    patterns: int, d_in: int, d_out: int, n: int
) -> None:
    keys, values = random(patterns, d_in), random(patterns, d_out, seed=1)
    queries = random(n, d_in, seed=2)
    attended = dual.learned_part(keys, values, queries)
    multiplied = dual.primal(dual.learned_matrix(keys, values), queries)
    assert attended.shape == (n, d_out)
    assert torch.allclose(attended, multiplied, atol=1e-12)


@given(st.permutations(range(12)))
@settings(deadline=None, max_examples=30)
def test_the_order_of_patterns_does_not_matter(order: list[int]) -> None:
    """Remark 3.1 of the paper."""
    keys, values, queries = random(12, 4), random(12, 3, seed=1), random(2, 4, seed=2)
    assert torch.allclose(
        dual.learned_part(keys[order], values[order], queries),
        dual.learned_part(keys, values, queries),
        atol=1e-13,
    )


def test_a_query_orthogonal_to_all_keys_gets_the_initial_part() -> None:
    """Remark 3.3 of the paper."""
    keys, values, initial = random(3, 5), random(3, 2, seed=1), random(2, 5, seed=2)
    basis = torch.linalg.qr(keys.T, mode="complete").Q
    orthogonal = basis[:, 3:].T
    assert torch.allclose(
        dual.dual(initial, keys, values, orthogonal), dual.primal(initial, orthogonal), atol=1e-14
    )
