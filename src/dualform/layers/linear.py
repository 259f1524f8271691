"""`nn.Linear`: every row of the flattened input is one pattern.

An input of shape [B, d] gives B patterns, [B, L, d] gives B·L in row-major order, and so on: the
leading shape is what tags are matched against.
"""

from __future__ import annotations

from torch import nn


def is_linear(module: nn.Module) -> bool:
    """Whether the module computes exactly `F.linear(input, self.weight, self.bias)`."""
    return (
        isinstance(module, nn.Linear)
        and type(module).forward is nn.Linear.forward
        and "forward" not in vars(module)  # replaced on this very module
        and isinstance(module._parameters.get("weight"), nn.Parameter)
        and not isinstance(module._parameters["weight"], nn.parameter.UninitializedParameter)
    )
