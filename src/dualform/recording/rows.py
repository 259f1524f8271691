"""The patterns of one use of a layer on their way: where they are kept, and how large they are.

The audit bounds the rounding of a sum by the sizes of its parts. Measuring them costs as much as
summing, and is hardly ever needed, so it waits until somebody asks.
"""

from __future__ import annotations

from functools import cached_property
from math import sqrt

import torch
from torch import Tensor

from dualform.layers import Layer

PLAIN = Layer("", "linear", "", None, 0, 0)
"""A layer that is all of its parameters."""


class Rows:
    """Patterns as kept for writing, [n, d]. Sizes are seldom needed, and taken when they are.

    `dtype` is None where keys and error signals are not alike; tokens are like any error signals.
    """

    def __init__(
        self,
        step: int,
        keys: Tensor,
        error_signals: Tensor,
        layer: Layer = PLAIN,
    ) -> None:
        self.step, self.layer = step, layer
        self.patterns = keys.shape[0]
        self.keys, self.error_signals = keys, error_signals
        alike = keys.dtype == error_signals.dtype or not keys.is_floating_point()
        self.dtype = error_signals.dtype if alike else None

    @cached_property
    def size_of_keys(self) -> float:
        return sqrt(self.patterns) if self.layer.kind == "embedding" else _size(self.keys)

    @cached_property
    def size_of_error_signals(self) -> float:
        return _size(self.error_signals)


def _size(rows: Tensor) -> float:
    """The Frobenius norm, by the cheapest way there is."""
    flat = rows.reshape(-1)
    if flat.dtype not in (torch.float32, torch.float64):
        flat = flat.float()
    square = float(torch.dot(flat, flat))
    if not 1e-30 < square < 1e30:  # near the ends of float32's range
        square = float(torch.dot(flat.double(), flat.double()))
    return sqrt(square)
