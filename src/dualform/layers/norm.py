"""Norms: what each example wrote into a gain and a bias, Σ δ ⊙ x̂ and Σ δ over its rows.

A norm's gain multiplies the normalised input x̂ entry by entry, so a pattern is as long as the
gain itself, and rows are kept per example. x̂ is computed anew from the input, by torch's own norm
without gain and bias. There is no attention in such a layer, only contributions.

Why it is hard: the rows' sum is not the gradient to the bit. BatchNorm's statistics are of all
examples, and treated as given; in evaluation mode of its past: such calls have no rows by example.
"""

from __future__ import annotations

from math import prod
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dualform.layers.kinds import Kind, Shape, is_plain, register
from dualform.layers.layer import Fact, Layer

MOST_ENTRIES = 1 << 12
"""Up to this many entries keep="auto" keeps rows by example: one costs as much as the gain."""


class NormKind(Kind):
    """A norm with a gain. `channels`: the gain belongs to dimension 1, else to the last ones."""

    words: ClassVar[tuple[str, ...]] = ("examples", "values")

    def __init__(self, name: str, *modules: type[nn.Module], channels: bool = False) -> None:
        self.name = name  # type: ignore[misc]
        self.modules, self.channels = modules, channels

    def recognises(self, module: nn.Module) -> bool:
        return any(is_plain(module, kind) for kind in self.modules)

    def facts(self, module: nn.Module) -> dict[str, Fact]:
        return {fact: vars(module)[fact] for fact in ("eps", "num_groups") if fact in vars(module)}

    def refuses(self, module: nn.Module) -> str | None:
        if module.training or not hasattr(module, "running_mean"):
            return None
        return "normalises with running statistics (evaluation mode), which no example wrote"

    def keep(self, layer: Layer) -> str:
        return "examples" if prod(layer.shape) <= MOST_ENTRIES else "values"

    def key_width(self, layer: Layer) -> int:
        return 0

    def shape_of(self, layer: Layer, role: str) -> Shape:
        return layer.shape

    def leading(self, given: Tensor) -> Shape:
        return (given.shape[0], *given.shape[2:]) if self.channels else tuple(given.shape[:-1])

    def examples(self, layer: Layer, given: Tensor, signal: Tensor) -> dict[str, Tensor]:
        with torch.no_grad():
            both = {"weight": signal * self.norm(layer, given), "bias": signal}
        return {role: self._summed(layer, rows) for role, rows in both.items()}

    def norm(self, layer: Layer, x: Tensor) -> Tensor:
        """torch's own function, without gain and bias."""
        eps = layer.detail("eps")
        match self.name:
            case "layer_norm":
                return F.layer_norm(x, layer.shape, eps=eps)
            case "rms_norm":
                return F.rms_norm(x, layer.shape, eps=eps)
            case "group_norm":
                return F.group_norm(x, layer.detail("num_groups"), eps=eps)
        return F.batch_norm(x, None, None, training=True, momentum=0.0, eps=eps)

    def _summed(self, layer: Layer, rows: Tensor) -> Tensor:
        own = len(layer.shape)
        rows = rows if rows.dim() > own else rows[None]
        between = range(2, rows.dim()) if self.channels else range(1, rows.dim() - own)
        return rows.sum(tuple(between)) if between else rows


for kind in (
    NormKind("layer_norm", nn.LayerNorm),
    NormKind("rms_norm", nn.RMSNorm),
    NormKind("group_norm", nn.GroupNorm, channels=True),
    NormKind("batch_norm", nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, channels=True),
):
    register(kind)
