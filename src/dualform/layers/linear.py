"""`nn.Linear`: every row of the flattened input is one pattern.

An input of shape [B, d] gives B patterns, [B, L, d] gives B·L in row-major order, and so on: the
leading shape is what tags are matched against.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor, nn

ROOT_NAME = "model"
"""What a layer is called when the whole model is that one layer."""


class Layer(NamedTuple):
    """One recorded layer: its name, its parameters' names, the widths of key and error signal.

    Its weight is rows `offset` to `offset + out_features` of the parameter, its bias the entries
    from `bias_offset` on: a packed projection is several layers in one parameter.
    """

    name: str
    kind: str
    weight: str
    bias: str | None
    in_features: int
    out_features: int
    offset: int = 0
    bias_offset: int = 0

    @property
    def parameters(self) -> tuple[str, ...]:
        return (self.weight,) if self.bias is None else (self.weight, self.bias)


def is_recordable(module: nn.Module) -> bool:
    """Whether the module computes exactly `F.linear(input, self.weight, self.bias)`."""
    return (
        isinstance(module, nn.Linear)
        and type(module).forward is nn.Linear.forward
        and "forward" not in vars(module)  # replaced on this very module
        and isinstance(module._parameters.get("weight"), nn.Parameter)
        and not isinstance(module._parameters["weight"], nn.parameter.UninitializedParameter)
    )


def find_layers(model: nn.Module) -> dict[Layer, nn.Module]:
    """Every recordable layer of the model with its module, in the model's own order.

    A module reachable under several names counts once, under its first name; a parameter shared by
    several modules keeps the name it has in `model.named_parameters()`.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    found: dict[Layer, nn.Module] = {}
    for name, module in model.named_modules():
        if not isinstance(module, nn.Linear) or not is_recordable(module):
            continue
        layer = Layer(
            name=name or ROOT_NAME,
            kind="linear",
            weight=names[id(module.weight)],
            bias=None if module.bias is None else names[id(module.bias)],
            in_features=module.in_features,
            out_features=module.out_features,
        )
        found[layer] = module
    return found


def as_patterns(kind: str, tensor: Tensor) -> Tensor:
    """The rows of a layer's input (keys, queries) or error signal: [..., d] -> [n, d]."""
    if kind != "linear":
        raise ValueError(f"unknown kind of layer: {kind!r}")
    if tensor.requires_grad:
        tensor = tensor.detach()
    return tensor if tensor.dim() == 2 else tensor.reshape(-1, tensor.shape[-1])
