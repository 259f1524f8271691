"""What an optimizer is asked about the step that it is about to take."""

from __future__ import annotations

from typing import Any

from torch import Tensor


def closure_of(args: Any, kwargs: Any) -> Any:
    """The closure that a hook before an optimizer's step sees, if it is given one."""
    return args[1] if len(args) > 1 else kwargs.get("closure")


def skips(optimizer: Any) -> bool:
    """Whether a fused optimizer was told by a GradScaler to leave everything as it is."""
    found = getattr(optimizer, "found_inf", None)
    return isinstance(found, Tensor) and bool(found.item())


def unscaled(optimizer: Any) -> float:
    """By how much a fused optimizer multiplies gradients itself: a GradScaler leaves it to it."""
    scale = getattr(optimizer, "grad_scale", None)
    return 1.0 / float(scale) if isinstance(scale, Tensor) else 1.0
