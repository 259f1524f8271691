"""The layers of a model: which modules have patterns, and what is known of each."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeGuard

from torch import nn

from dualform.layers.kinds import recognised
from dualform.layers.layer import Layer

ROOT_NAME = "model"
"""What a layer is called when the whole model is that one layer."""


def find_layers(model: nn.Module) -> dict[Layer, nn.Module]:
    """Every layer of the model that is of a known kind with its module, in the model's own order.

    A module reachable under several names counts once, under its first name; a parameter shared by
    several modules keeps the name it has in `model.named_parameters()`. What is inside a compiled
    module is left out: its calls are not seen.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    hidden = {id(inner) for module in compiled_modules(model) for inner in module.modules()}
    found: dict[Layer, nn.Module] = {}
    for name, module in model.named_modules():
        kind = None if id(module) in hidden else recognised(module)
        if kind is not None:
            layer = kind.layer(module, name or ROOT_NAME, lambda tensor: names[id(tensor)])
            found[layer] = module
    return found


def is_attention(module: nn.Module) -> TypeGuard[nn.MultiheadAttention]:
    """Whether the module computes what `nn.MultiheadAttention` does: it multiplies with its
    parameters by functions, never calling a module."""
    return (
        isinstance(module, nn.MultiheadAttention)
        and type(module).forward is nn.MultiheadAttention.forward
        and "forward" not in vars(module)
    )


def compiled_modules(model: nn.Module) -> Iterator[nn.Module]:
    """Every module that torch.compile stands in for, by any of its three ways."""
    for module in model.modules():
        if (
            type(module).__name__ == "OptimizedModule"
            or vars(module).get("_compiled_call_impl") is not None
            or hasattr(vars(module).get("forward"), "_torchdynamo_orig_callable")
        ):
            yield module
