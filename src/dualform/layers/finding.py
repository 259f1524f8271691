"""The layers of a model: which modules have patterns, and what is known of each."""

from __future__ import annotations

from typing import NamedTuple

from torch import nn

from dualform.layers.embedding import is_look_up
from dualform.layers.kinds import parameter_shape
from dualform.layers.linear import is_linear

ROOT_NAME = "model"
"""What a layer is called when the whole model is that one layer."""


class Layer(NamedTuple):
    """One recorded layer: its name, its parameters' names, the widths of key and error signal.

    Its weight is rows `offset` to `offset + height` of the parameter, its bias the entries from
    `bias_offset` on: a packed projection is several layers in one parameter. `in_features` of an
    embedding is its number of tokens.
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

    @property
    def height(self) -> int:
        """How many rows of its weight the layer is."""
        return parameter_shape(self.kind, self.in_features, self.out_features)[0]


def is_recordable(module: nn.Module) -> bool:
    """Whether what the module does with its input is known, to the last bit."""
    return is_linear(module) or is_look_up(module)


def find_layers(model: nn.Module) -> dict[Layer, nn.Module]:
    """Every recordable layer of the model with its module, in the model's own order.

    A module reachable under several names counts once, under its first name; a parameter shared by
    several modules keeps the name it has in `model.named_parameters()`.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    found: dict[Layer, nn.Module] = {}
    for name, module in model.named_modules():
        if not is_recordable(module):
            continue
        if isinstance(module, nn.Embedding):
            kind, widths = "embedding", tuple(module.weight.shape)
        else:
            assert isinstance(module, nn.Linear)
            kind, widths = "linear", (module.in_features, module.out_features)
        bias = module._parameters.get("bias")
        layer = Layer(
            name or ROOT_NAME,
            kind,
            names[id(module.weight)],
            None if bias is None else names[id(bias)],
            *widths,
        )
        found[layer] = module
    return found
