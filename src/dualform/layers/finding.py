"""The layers of a model: which modules have patterns, and why the parameters of others are values.

Patterns are seen where a weight meets its input. A fused recurrent kernel, a compiled function or a
parametrization hides that meeting, and of many modules it is not known. Nothing is refused for it:
such parameters are values, kept as snapshots, and the reason follows their name in a remark.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TypeGuard

from torch import nn
from torch.nn.utils import parametrize

from dualform.layers.kinds import recognised
from dualform.layers.layer import Layer
from dualform.layers.torch_internals import is_compiled

ROOT_NAME = "model"
"""What a layer is called when the whole model is that one layer."""

NODES = {
    "EmbeddingBackward0": "is looked up as an embedding, sparse or scaled by frequency",
    "EmbeddingBagBackward0": "is looked up by an embedding bag",
    "CompiledFunctionBackward": "is used inside a compiled function",
    "BmmBackward0": "is multiplied by torch.einsum, bmm or a product of more than two dimensions",
}
"""What some nodes of the graph mean, in words."""
IN_CHECKPOINT = "is used inside an activation checkpoint whose inputs cannot be read"
REENTRANT = (
    "is used inside a backward pass, as a reentrant activation checkpoint does; with "
    "use_reentrant=False it has patterns"
)
NOT_STRIDED = "is given a sparse or nested input, whose rows are not patterns"
REPLACED = "is computed from other tensors (functional_call, a parametrization) when it is used"


def reason_of(node: str) -> str:
    """Say how a parameter is used, given the name of the node that uses it."""
    return NODES.get(node, f"is used by {node}, which has no patterns")


def find_layers(model: nn.Module) -> dict[Layer, nn.Module]:
    """Every layer of the model that is of a known kind with its module, in the model's own order.

    A module reachable under several names counts once, under its first name; a parameter shared by
    several modules keeps the name it has in `model.named_parameters()`. What is inside a compiled
    module is left out: its calls are not seen.
    """
    names, hidden = {id(p): name for name, p in model.named_parameters()}, _compiled(model)
    found: dict[Layer, nn.Module] = {}
    for name, module in model.named_modules():
        kind = None if module in hidden else recognised(module)
        if kind is not None:
            found[kind.layer(module, name or ROOT_NAME, lambda p: names[id(p)])] = module
    return found


def reasons_for_values(model: nn.Module, layers: Collection[Layer]) -> dict[str, str]:
    """Why each parameter in no layer is kept as values, in words that follow its name.

    Of some it may turn out that functional code multiplies with them: then they get a layer.
    """
    covered = {name for layer in layers for name in layer.parameters}
    names, hidden = {id(p): name for name, p in model.named_parameters()}, _compiled(model)
    found: dict[str, str] = {}
    for place, module in model.named_modules():
        where = f"{place or 'model'!r}, {type(module).__module__}.{type(module).__qualname__}"
        if module in hidden:
            why = f"is inside {where}, which is compiled: record the module as it was before"
        elif isinstance(module, nn.RNNBase):
            why = f"is in {where}, whose kernel hides what its weights are multiplied with"
        elif parametrize.is_parametrized(module) or isinstance(
            module, parametrize.ParametrizationList
        ):
            why = f"is parametrized in {where}: what is trained is not what meets the input"
        else:
            why = f"belongs to {where}, which no kind of layer describes"
        for parameter in (p for p in module._parameters.values() if p is not None):
            if names[id(parameter)] not in covered:
                found.setdefault(names[id(parameter)], why)
    return found


def is_attention(module: nn.Module) -> TypeGuard[nn.MultiheadAttention]:
    """Whether the module computes what `nn.MultiheadAttention` does: it multiplies with its
    parameters by functions, never calling a module."""
    return (
        isinstance(module, nn.MultiheadAttention)
        and type(module).forward is nn.MultiheadAttention.forward
        and "forward" not in vars(module)
    )


def _compiled(model: nn.Module) -> set[nn.Module]:
    """Every module that torch.compile stands in for, with what is inside."""
    return {inner for m in model.modules() if is_compiled(m) for inner in m.modules()}
