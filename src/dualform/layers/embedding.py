"""`nn.Embedding`: every token looked up is one pattern.

Token ids of shape [B, L] give B·L patterns. The key is a single 1 among as many zeros as there are
tokens, so it is kept as the token's number, [n, 1]: attention, key · query, is 1 where tokens are
the same, else 0. The padding token writes nothing: its error signals are zeros.

Why it is hard: torch does something else with some look-ups, which are no layers: `max_norm`
rewrites the weight in the forward pass, `scale_grad_by_freq` divides the gradient by how often a
token occurs, `sparse` gives no gradient that could be compared.
"""

from __future__ import annotations

import math
from typing import ClassVar

import torch
from torch import Tensor, nn

from dualform.layers.kinds import Kind, NameOf, Shape, is_plain, register
from dualform.layers.layer import Layer

PADDING = "padding"
"""The detail that names the token that writes nothing."""


class EmbeddingKind(Kind):
    """W[token]: a weight [tokens, d_out]."""

    name: ClassVar[str] = "embedding"
    words: ClassVar[tuple[str, ...]] = ("patterns", "keys", "values")
    key_dtype: ClassVar[torch.dtype | None] = torch.int64
    tags_must_fit: ClassVar[bool] = False

    def recognises(self, module: nn.Module) -> bool:
        return (
            isinstance(module, nn.Embedding)
            and is_plain(module, nn.Embedding)
            and module.max_norm is None
            and not (module.scale_grad_by_freq or module.sparse)
        )

    def layer(self, module: nn.Module, name: str, name_of: NameOf) -> Layer:
        assert isinstance(module, nn.Embedding)
        tokens, width = module.weight.shape
        return look_up(name, name_of(module.weight), (tokens, width), module.padding_idx)

    def key_width(self, layer: Layer) -> int:
        return 1

    def keys(self, given: Tensor) -> Tensor:
        return given.reshape(-1, 1)

    def leading(self, given: Tensor) -> Shape:
        return tuple(given.shape)

    def rows(self, layer: Layer, given: Tensor, signal: Tensor) -> tuple[Tensor, Tensor, Shape]:
        padding = layer.detail(PADDING)
        if padding is not None:
            signal = signal.masked_fill((given == padding).unsqueeze(-1), 0.0)
        return super().rows(layer, given, signal)

    def has_tags(self, keys: Tensor, shape: Shape) -> bool:
        """Positions, 0, 1, 2, … in order, are looked up once for all examples: they have no tag."""
        in_order = torch.arange(len(keys)).to(keys)
        return not (len(shape) == 1 and len(keys) > 1 and torch.equal(keys[:, 0], in_order))

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

        Beside a head with the same weight (tied): the head's product comes first, for the backward
        pass reaches it first, and this is added to it; never scattered into it.
        """
        padding = layer.detail(PADDING)
        facts = layer.in_features, -1 if padding is None else padding, False
        found: Tensor = torch.ops.aten.embedding_dense_backward(signals, keys[:, 0], *facts)
        return found

    def along(self, layer: Layer, keys: Tensor, signals: Tensor, v: Tensor) -> Tensor:
        terms = torch.mv(signals, v)
        return self.write(terms.new_zeros(layer.in_features), keys, terms)

    def gross(self, keys: Tensor, signals: Tensor) -> float:
        if not len(keys):
            return 0.0
        longest = float(torch.bincount(keys[:, 0].long()).max())  # the longest sum of one row
        return float(torch.linalg.vector_norm(signals)) * math.sqrt(longest / signals.shape[1])

    def sizes(self, layer: Layer, keys: Tensor, signals: Tensor, v: Tensor) -> Tensor:
        terms = torch.mv(signals, v).square()
        return self.write(terms.new_zeros(layer.in_features), keys, terms).sqrt()


def look_up(
    name: str, weight: str, shape: tuple[int, int], padding: int | None, offset: int = 0
) -> Layer:
    """The layer of a look-up in some rows of a weight."""
    details = () if padding is None else ((PADDING, padding),)
    return Layer(name, "embedding", weight, None, *shape, shape, offset, 0, details)


EMBEDDING = register(EmbeddingKind())
