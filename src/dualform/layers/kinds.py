"""The kinds of layers, and the arithmetic in which they differ.

A pattern has a key x and an error signal δ, and what it wrote into its parameter is an outer
product of the two. Which way round, and whether the key is written out, depends on the layer:

| kind | output | parameter | a pattern wrote |
|---|---|---|---|
| `linear` | W x | [d_out, d_in] | δ xᵀ |
| `transposed` | x W | [d_in, d_out] | x δᵀ |
| `embedding` | W[token] | [tokens, d_out] | δ into the token's row: x δᵀ with a one-hot x |

The key of an embedding is a single 1 among as many zeros as there are tokens, so it is kept as the
token's number, [n, 1]: attention, key · query, is then 1 where the tokens are the same, else 0.
Everything else in dualform speaks of keys, and asks here what they mean.
"""

from __future__ import annotations

import torch
from torch import Tensor

KINDS = ("linear", "transposed", "embedding")


def as_patterns(kind: str, tensor: Tensor) -> Tensor:
    """What a layer is given, as keys or queries: [..., d] -> [n, d], tokens [...] -> [n, 1]."""
    if kind not in KINDS:
        raise ValueError(f"unknown kind of layer: {kind!r}")
    return flattened(tensor.unsqueeze(-1) if kind == "embedding" else tensor)


def flattened(tensor: Tensor) -> Tensor:
    """Error signals or outputs, one per pattern: [..., d] -> [n, d]."""
    if tensor.requires_grad:
        tensor = tensor.detach()
    return tensor if tensor.dim() == 2 else tensor.reshape(-1, tensor.shape[-1])


def leading_shape(kind: str, tensor: Tensor) -> tuple[int, ...]:
    """How the patterns of one call lie: [B], [B, L], ...: what tags are matched against."""
    if kind == "embedding":
        return tuple(tensor.shape)
    return (tensor.size(0),) if tensor.dim() == 2 else tuple(tensor.shape[:-1])


def key_width(kind: str, in_features: int) -> int:
    """How many numbers a key is kept as."""
    return 1 if kind == "embedding" else in_features


def parameter_shape(kind: str, in_features: int, out_features: int) -> tuple[int, int]:
    """The shape of the weight, or of the rows of it that the layer is."""
    return (out_features, in_features) if kind == "linear" else (in_features, out_features)


def attention_weights(kind: str, queries: Tensor, keys: Tensor) -> Tensor:
    """α = x · q of every query with every key: [n, ·], [b, ·] -> [n, b]."""
    if kind == "embedding":
        return (queries == keys.T).to(torch.float64)
    return queries @ keys.T


def write(kind: str, matrix: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Add what patterns write to (their rows of) a parameter, in place; returns it."""
    if kind == "embedding":
        return matrix.index_add_(0, keys[:, 0].long(), values)
    return matrix.add_(values.T @ keys if kind == "linear" else keys.T @ values)


def multiply(kind: str, matrix: Tensor, queries: Tensor) -> Tensor:
    """The layer's output, without its bias, for (its rows of) a parameter: [n, d_out]."""
    if kind == "embedding":
        return matrix[queries[:, 0].long()]
    return queries @ (matrix.T if kind == "linear" else matrix)
