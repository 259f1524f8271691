"""`nn.Linear` and products with a matrix: every row of the flattened input is one pattern.

An input of shape [B, d] gives B patterns, [B, L, d] gives B·L in row-major order, and so on. With
the weight [d_out, d_in] the kind is `linear`; the other way round (x @ W, as GPT-2's) `transposed`.

Why it is hard: torch's sums depend on how their terms lie in memory. Row by row, δᵀ x and Σ δ have
torch's bits; a use that lies otherwise says so (`memory_order.py`). `nn.MultiheadAttention` given
the batch first multiplies with positions first: the layer's details say that.
"""

from __future__ import annotations

import math
from typing import ClassVar

import torch
from torch import Tensor, nn

from dualform.layers import memory_order
from dualform.layers.kinds import Kind, Rows, Shape, is_plain, register
from dualform.layers.layer import Layer

POSITIONS_FIRST = "positions_first"
"""The detail of a layer whose rows are multiplied in the order [L, B], though given as [B, L]."""


class LinearKind(Kind):
    """W x: a weight [d_out, d_in]."""

    name: ClassVar[str] = "linear"
    hooks_below_views: ClassVar[bool] = True

    def recognises(self, module: nn.Module) -> bool:
        return is_plain(module, nn.Linear)

    def rows(self, layer: Layer, given: Tensor, signal: Tensor) -> Rows:
        if given.dim() == 2 == signal.dim():  # the usual case, without three calls more
            return given, signal, (given.shape[0],)
        return super().rows(layer, given, signal)

    def layout(self, given: Tensor, signal: Tensor) -> int:
        return memory_order.code_of_pair(given, signal)

    def attention(self, queries: Tensor, keys: Tensor) -> Tensor:
        return queries @ keys.T

    def write(self, matrix: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        matrix.view(len(matrix), -1).addmm_(values.T, keys)
        return matrix

    def multiply(self, matrix: Tensor, queries: Tensor) -> Tensor:
        return queries @ matrix.flatten(1).T

    def gradient(
        self, layer: Layer, role: str, keys: Tensor, signals: Tensor, shape: Shape, layout: int = 0
    ) -> Tensor:
        """δᵀ x, and Σ δ over all leading dimensions at once.

        Uses in one pass: the last in the forward pass is the first term.
        """
        if layer.detail(POSITIONS_FIRST) and len(shape) == 2:
            keys, signals = (
                rows.view(*shape, -1).transpose(0, 1).reshape(len(rows), -1)
                for rows in (keys, signals)
            )
            shape = shape[::-1]
        of_keys, of_signals = memory_order.split(layout)
        signal = memory_order.restored(signals, shape, of_signals)
        if role == "bias":
            return signal.sum(tuple(range(signal.dim() - 1)))
        key = memory_order.restored(keys, shape, of_keys)
        key, signal = (t.reshape(-1, t.shape[-1]) for t in (key, signal))
        return self._product(key, signal).view(layer.shape)

    def _product(self, keys: Tensor, signals: Tensor) -> Tensor:
        """What patterns write: [n, ·] or by example [B, n, ·]."""
        return signals.mT @ keys

    def along(self, layer: Layer, keys: Tensor, signals: Tensor, v: Tensor) -> Tensor:
        return torch.mv(signals.T, torch.mv(keys, v))

    def gross(self, keys: Tensor, signals: Tensor) -> float:
        sizes = (float(torch.linalg.vector_norm(rows)) for rows in (keys, signals))
        return math.prod(sizes) / math.sqrt(max(1, keys.shape[1]))

    def sizes(self, layer: Layer, keys: Tensor, signals: Tensor, v: Tensor) -> Tensor:
        return torch.mv(signals.T.square(), torch.mv(keys, v).square()).sqrt()

    def examples(
        self, layer: Layer, given: Tensor, signal: Tensor, axis: int = 0
    ) -> dict[str, Tensor]:
        keys, signals = (_by_example(tensor, axis) for tensor in (given, signal))
        wrote = self._product(keys, signals).view(-1, *layer.shape)
        return {"weight": wrote, "bias": signals.sum(1), "keys": keys.sum(1)}


class TransposedKind(LinearKind):
    """x W: a weight [d_in, d_out]: keys and error signals change places. No module of torch's is
    one; functional code and GPT-2 are."""

    name: ClassVar[str] = "transposed"

    def recognises(self, module: nn.Module) -> bool:
        return False

    def write(self, matrix: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        return super().write(matrix, values, keys)

    def multiply(self, matrix: Tensor, queries: Tensor) -> Tensor:
        return queries @ matrix

    def _product(self, keys: Tensor, signals: Tensor) -> Tensor:
        return super()._product(signals, keys)

    def along(self, layer: Layer, keys: Tensor, signals: Tensor, v: Tensor) -> Tensor:
        return super().along(layer, signals, keys, v)

    def gross(self, keys: Tensor, signals: Tensor) -> float:
        return super().gross(signals, keys)

    def sizes(self, layer: Layer, keys: Tensor, signals: Tensor, v: Tensor) -> Tensor:
        return super().sizes(layer, signals, keys, v)


def _by_example(tensor: Tensor, axis: int) -> Tensor:
    """[..., d] -> [B, rows of each, d]."""
    by = tensor.movedim(axis, 0) if tensor.dim() > 1 else tensor[None]
    return by.reshape(by.shape[0], by.shape[1:-1].numel(), by.shape[-1])


LINEAR, TRANSPOSED = register(LinearKind()), register(TransposedKind())
