"""`nn.Embedding`: every token looked up is one pattern.

Token ids of shape [B, L] give B·L patterns. The key is a single 1 among as many zeros as there are
tokens, so it is kept as the token's number, [n, 1]: attention, key · query, is 1 where tokens are
the same, else 0. The padding token writes nothing: its error signals are zeros.

Some look-ups are no layers: `scale_grad_by_freq` divides the gradient, `sparse` gives none that
could be compared (and `finding.kept_short` names those whose weight `max_norm` changes).
"""

from __future__ import annotations

import math
from collections.abc import Set
from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor, nn

from dualform.layers.kinds import Kind, Shape, is_plain, register
from dualform.layers.layer import Fact, Layer

PADDING = "padding"  # the detail that names the token that writes nothing; -1: there is none


class EmbeddingKind(Kind):
    """W[token]: a weight [tokens, d_out]."""

    name: ClassVar[str] = "embedding"
    words: ClassVar[tuple[str, ...]] = ("patterns", "keys", "values")
    key_dtype: ClassVar[torch.dtype | None] = torch.int64
    tags_must_fit: ClassVar[bool] = False

    def recognises(self, module: nn.Module) -> bool:
        return is_plain(module, nn.Embedding) and not (module.sparse or module.scale_grad_by_freq)

    def layer(self, module: nn.Module, name: str, weight: str, bias: str | None) -> Layer:
        found = super().layer(module, name, weight, bias)
        return replace(found, in_features=found.shape[0], out_features=found.shape[1])

    def facts(self, module: nn.Module) -> dict[str, Fact]:
        padding = vars(module)["padding_idx"]
        return {PADDING: -1 if padding is None else padding}

    def key_width(self, layer: Layer) -> int:
        return 1

    def keys(self, given: Tensor) -> Tensor:
        return given.reshape(-1, 1)

    def leading(self, given: Tensor) -> Shape:
        return tuple(given.shape)

    def rows(self, layer: Layer, given: Tensor, signal: Tensor) -> tuple[Tensor, Tensor, Shape]:
        padding = layer.detail(PADDING, -1)
        if padding >= 0:
            signal = signal.masked_fill((given == padding).unsqueeze(-1), 0.0)
        return super().rows(layer, given, signal)

    def has_tags(self, layer: Layer, keys: Tensor, shape: Shape, lengths: Set[int]) -> bool:
        """Positions, 0, 1, 2, … in order, are looked up once for all examples: they have no tag.
        A whole table looked up in order is one of examples (nodes), unless they have positions."""
        count, in_order = len(keys), torch.arange(len(keys)).to(keys)
        if len(shape) != 1 or count < 2 or not torch.equal(keys[:, 0], in_order):
            return True
        return count == layer.in_features and count not in lengths

    def attention(self, queries: Tensor, keys: Tensor) -> Tensor:
        return (queries == keys.T).to(torch.float64)

    def write(self, matrix: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        return matrix.index_add_(0, keys[:, 0].long(), values)

    def multiply(self, matrix: Tensor, queries: Tensor) -> Tensor:
        return matrix[queries[:, 0].long()]

    def gradient(
        self, layer: Layer, role: str, keys: Tensor, signals: Tensor, shape: Shape, layout: int = 0
    ) -> Tensor:
        """torch's own backward: it adds up the rows of a token in the order of the tokens given.
        Tied to a head, it is added to the head's product, never scattered into it."""
        facts = layer.in_features, layer.detail(PADDING, -1), False
        return torch.ops.aten.embedding_dense_backward(signals, keys[:, 0], *facts)  # type: ignore[no-any-return]

    def along(self, layer: Layer, keys: Tensor, signals: Tensor, v: Tensor) -> Tensor:
        terms = torch.mv(signals, v)
        return self.write(terms.new_zeros(layer.in_features), keys, terms)

    def gross(self, keys: Tensor, signals: Tensor) -> float:
        longest = float(torch.bincount(keys[:, 0].long(), minlength=1).max())  # sum of one row
        return float(torch.linalg.vector_norm(signals)) * math.sqrt(longest / signals.shape[1])

    def sizes(self, layer: Layer, keys: Tensor, signals: Tensor, v: Tensor) -> Tensor:
        terms = torch.mv(signals, v).square()
        return self.write(terms.new_zeros(layer.in_features), keys, terms).sqrt()


register(EmbeddingKind())
