"""What all parameters looked like at one moment of training, along random directions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Fingerprint:
    """Float64 projections of every parameter (and momentum buffer) after `step` updates."""

    step: int
    values: Mapping[str, Tensor]
    momentum: Mapping[str, Tensor]
