"""`nn.Linear` and products with a matrix: every row of the flattened input is one pattern.

An input of shape [B, d] gives B patterns, [B, L, d] gives B·L in row-major order, and so on. With
the weight [d_out, d_in] the kind is `linear`; the other way round (x @ W, as GPT-2's) `transposed`.

Why it is hard: torch adds in the order of memory. Row by row, δᵀ x and Σ δ have its bits; a bias
whose error signal comes transposed or is one number repeated, a product with an input stored column
by column, have others. Such uses say how they lay; gradients come from rows that lie so again.
"""

from __future__ import annotations

import math
from typing import ClassVar

import torch
from torch import Tensor, nn

from dualform.layers.kinds import Kind, Shape, is_plain, register
from dualform.layers.layer import Layer

_BASE = 10**9
EXCHANGED = _BASE**2  # added where the first two dimensions change places before the product


class LinearKind(Kind):
    """W x: a weight [d_out, d_in]."""

    name: ClassVar[str] = "linear"

    def recognises(self, module: nn.Module) -> bool:
        return is_plain(module, nn.Linear)

    def rows(self, layer: Layer, given: Tensor, signal: Tensor) -> tuple[Tensor, Tensor, Shape]:
        if given.ndim == 2 == signal.ndim:  # the usual case, in five calls less
            return given, signal, (given.shape[0],)
        return super().rows(layer, given, signal)

    def layout(self, given: Tensor, signal: Tensor) -> int:
        return order_of(given) * _BASE + order_of(signal)

    def factors(self, keys: Tensor, signals: Tensor) -> tuple[Tensor, Tensor]:
        """Patterns as what gives the weight's rows, and what gives its columns."""
        return signals, keys

    def attention(self, queries: Tensor, keys: Tensor) -> Tensor:
        return queries @ keys.T

    def write(self, matrix: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        rows, columns = self.factors(keys, values)
        matrix.view(len(matrix), -1).addmm_(rows.T, columns)
        return matrix

    def multiply(self, matrix: Tensor, queries: Tensor) -> Tensor:
        return queries @ matrix.flatten(1).T

    def gradient(
        self, layer: Layer, role: str, keys: Tensor, signals: Tensor, shape: Shape, layout: int = 0
    ) -> Tensor:
        """δᵀ x, and Σ δ over all leading dimensions at once."""
        key = restored(keys, shape, layout % EXCHANGED // _BASE)
        signal = restored(signals, shape, layout % _BASE)
        if layout >= EXCHANGED:
            key, signal = (t.transpose(0, 1) if t.dim() > 2 else t for t in (key, signal))
        if role == "bias":
            return signal.sum(tuple(range(signal.dim() - 1)))
        rows, columns = self.factors(*(t.reshape(-1, t.shape[-1]) for t in (key, signal)))
        return (rows.T @ columns).view(layer.shape)

    def along(self, layer: Layer, keys: Tensor, signals: Tensor, v: Tensor) -> Tensor:
        rows, columns = self.factors(keys, signals)
        return torch.mv(rows.T, torch.mv(columns, v))

    def gross(self, keys: Tensor, signals: Tensor) -> float:
        rows, columns = self.factors(keys, signals)
        sizes = (float(torch.linalg.vector_norm(side)) for side in (rows, columns))
        return math.prod(sizes) / math.sqrt(max(1, columns.shape[1]))

    def sizes(self, layer: Layer, keys: Tensor, signals: Tensor, v: Tensor) -> Tensor:
        rows, columns = self.factors(keys, signals)
        return torch.mv(rows.T.square(), torch.mv(columns, v).square()).sqrt()

    def examples(self, layer: Layer, given: Tensor, signal: Tensor) -> dict[str, Tensor]:
        *rows, shape = self.rows(layer, given, signal)
        of_each = (shape or (1,))[0], math.prod(shape[1:])
        keys, signals = (t.view(*of_each, t.shape[-1]) for t in rows)
        one, two = self.factors(keys, signals)
        wrote = (one.mT @ two).view(-1, *layer.shape)
        return {"weight": wrote, "bias": signals.sum(1), "keys": keys.sum(1)}


class TransposedKind(LinearKind):
    """x W: a weight [d_in, d_out]. No module of torch's is one; functional code and GPT-2 are."""

    name: ClassVar[str] = "transposed"

    def recognises(self, module: nn.Module) -> bool:
        return False

    def factors(self, keys: Tensor, signals: Tensor) -> tuple[Tensor, Tensor]:
        return keys, signals

    def multiply(self, matrix: Tensor, queries: Tensor) -> Tensor:
        return queries @ matrix


def order_of(tensor: Tensor) -> int:
    """How a tensor lies in memory: 9 and then its dimensions as they follow each other, slowest
    first, without those that are repeated (expanded). 0: row by row. Gaps make no difference."""
    if tensor.is_contiguous() or not 2 <= tensor.dim() <= 8:
        return 0
    sizes, strides = tensor.shape, tensor.stride()
    own = [d for d, stride in enumerate(strides) if stride or sizes[d] == 1]
    return int("9" + "".join(str(d) for d in sorted(own, key=lambda d: -strides[d])))


def restored(rows: Tensor, shape: tuple[int, ...], order: int) -> Tensor:
    """Rows [n, d] of a use of some leading shape, lying in some order."""
    if not order:
        return rows
    whole = once = rows.view(*shape, -1)
    own = [int(digit) for digit in str(order)[1:]]
    repeated = [d for d in range(whole.dim()) if d not in own]
    for d in repeated:
        once = once.narrow(d, 0, 1)
    dims = repeated + own
    lying = once.permute(dims).contiguous()
    return lying.permute([dims.index(d) for d in range(len(dims))]).expand(whole.shape)


LINEAR, TRANSPOSED = register(LinearKind()), register(TransposedKind())
