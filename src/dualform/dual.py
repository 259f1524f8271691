"""The paper's equations, as pure functions on tensors (Irie, Csordás and Schmidhuber, 2022).

A linear layer trained by gradient descent for S steps is, in its *primal* form, a matrix:

    y = W_S q

and, in its *dual* form, an attention over everything it was trained on:

    y = W_init q + Σ_t (x_t · q) e_t            W_init = a W_0 + h m_0,   e_t = c_t δ_t

`x_t` is the key of training pattern t (the layer's input then), `δ_t` its error signal
(dloss/d output then), `e_t` its value: what the pattern wrote into the layer. The learning rule
(`learning_rules.py`) supplies the scalars a, h and c_t. Attention is unnormalised and signed.

Nothing here streams, caches or rounds: this file is meant to be read in five minutes, and tests
compare everything fast with it.
"""

from __future__ import annotations

from torch import Tensor


def attention_weights(keys: Tensor, queries: Tensor) -> Tensor:
    """α_t = x_t · q for every query and pattern: keys [T, d_in], queries [n, d_in] -> [n, T]."""
    return queries @ keys.T


def values(error_signals: Tensor, coefficients: Tensor) -> Tensor:
    """e_t = c_t δ_t: error signals [T, d_out], coefficients [T] -> [T, d_out]."""
    return error_signals * coefficients[:, None]


def learned_part(keys: Tensor, values: Tensor, queries: Tensor) -> Tensor:
    """Σ_t (x_t · q) e_t (equation 13 of the paper): -> [n, d_out]."""
    return attention_weights(keys, queries) @ values


def learned_matrix(keys: Tensor, values: Tensor) -> Tensor:
    """Σ_t e_t ⊗ x_t, what training added to the initial weights: -> [d_out, d_in]."""
    return values.T @ keys


def primal(weight: Tensor, queries: Tensor) -> Tensor:
    """W q: weight [d_out, d_in], queries [n, d_in] -> [n, d_out]."""
    return queries @ weight.T


def dual(initial_weight: Tensor, keys: Tensor, values: Tensor, queries: Tensor) -> Tensor:
    """W_init q + Σ_t (x_t · q) e_t, the dual form of `primal`: -> [n, d_out]."""
    return primal(initial_weight, queries) + learned_part(keys, values, queries)
