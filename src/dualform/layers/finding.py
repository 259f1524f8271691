"""The layers of a model: which modules have patterns, and why the parameters of others are values.

Patterns are seen where a weight meets its input. A fused recurrent kernel, a compiled function or a
parametrization hides that, and of many modules it is not known: such parameters are values, and the
reason follows their name in a remark. What code past all modules does with a weight makes a layer,
called `attn.in_proj` (or `attn.in_proj_q`, ... by thirds; `attn.q_proj`, ... where attention has
them apart), `fc.weight`, `packed[0:3]` (some rows), `words.weight[tokens]` (a look-up).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace
from itertools import count
from typing import TypeGuard

from torch import nn
from torch.nn.utils.parametrize import ParametrizationList, is_parametrized

from dualform.layers.kinds import recognised
from dualform.layers.layer import Layer
from dualform.layers.torch_internals import is_compiled

ROOT_NAME = "model"  # what a layer is called when the whole model is that one layer

PACKED = {(0, 3): "", (0, 1): "_q", (1, 3): "_kv", (1, 2): "_k", (2, 3): "_v"}
"""What is added to in_proj for the thirds of an attention's packed projection."""
CELLS = nn.RNNBase, nn.RNNCellBase
OWN_WAY = (nn.Embedding, nn.EmbeddingBag, nn.Bilinear, nn.MultiheadAttention, *CELLS)
"""Modules that use their matrices in a way of their own."""

OTHER_USE = "is used by torch's {}, which has no patterns"
IN_CHECKPOINT = "is used inside an activation checkpoint whose inputs cannot be read"
REENTRANT = "is used inside a backward pass; a checkpoint with use_reentrant=False has patterns"
NOT_STRIDED = "is given a sparse or nested input, whose rows are not patterns"
REPLACED = "is computed from other tensors (functional_call, a parametrization) when it is used"


def find_layers(model: nn.Module) -> dict[Layer, nn.Module]:
    """Every layer of the model that is of a known kind with its module, in the model's own order.

    A module or parameter of several names counts once, under its first. What is inside a compiled
    module is left out: its calls are not seen.
    """
    names, hidden = {id(p): name for name, p in model.named_parameters()}, _compiled(model)
    found, shortened = dict[Layer, nn.Module](), kept_short(model)
    for name, module in model.named_modules():
        kind = None if module in hidden else recognised(module)
        own = (module._parameters.get(role) for role in ("weight", "bias"))
        weight, bias = (None if p is None else names[id(p)] for p in own)
        if kind is not None and weight not in shortened:
            found[kind.layer(module, name or ROOT_NAME, weight or "", bias)] = module
    return found


def kept_short(model: nn.Module) -> set[str]:
    """The weights that an embedding's `max_norm` changes in the forward pass, tied ones too."""
    tables = (m for m in model.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag))
    short = {id(m._parameters.get("weight")) for m in tables if m.max_norm is not None}
    return {name for name, p in model.named_parameters() if id(p) in short}


def reasons_for_values(model: nn.Module, layers: Collection[Layer]) -> dict[str, str]:
    """Why each parameter in no layer is kept as values (unless functional code turns out to
    multiply with it), in words that follow its name."""
    covered = {name for layer in layers for name in layer.parameters}
    names, hidden = {id(p): name for name, p in model.named_parameters()}, _compiled(model)
    shortened, found = kept_short(model), dict[str, str]()
    for module in model.modules():
        kind = f"{type(module).__module__}.{type(module).__qualname__}"
        if module in hidden:
            why = "is inside a compiled module: record the module as it was before"
        elif names.get(id(module._parameters.get("weight"))) in shortened:
            why = f"belongs to a {kind}, whose weight max_norm changes in the forward pass"
        elif isinstance(module, nn.RNNBase):
            why = f"is in a {kind}, whose kernel hides what its weights are multiplied with"
        elif is_parametrized(module) or isinstance(module, ParametrizationList):
            why = f"is parametrized in a {kind}: what is trained is not what meets the input"
        else:
            why = f"belongs to a {kind}, which no kind of layer describes"
        for parameter in (p for p in module._parameters.values() if p is not None):
            if names[id(parameter)] not in covered:
                found.setdefault(names[id(parameter)], why)
    return found


def named(layer: Layer, model: nn.Module, taken: Collection[str]) -> Layer:
    """A layer that functional code has made, with a name that no other has."""
    name = _name(model, layer) + "[tokens]" * (layer.kind == "embedding")
    longer = f" + {layer.bias}[{layer.bias_offset}]" if layer.bias else ".weight"
    names = (f"{name}{longer * (n > 0)}{f' ({n})' * (n > 1)}" for n in count())
    return replace(layer, name=next(name for name in names if name not in taken))


def possible_names(model: nn.Module) -> list[str]:
    """What layers without a module may come to be called, as far as it can be foreseen."""
    found = []
    for place, module in model.named_modules():
        if isinstance(module, nn.MultiheadAttention):
            packed = [f"in_proj{third}" for third in PACKED.values()]
            own = packed if module.in_proj_weight is not None else ["q_proj", "k_proj", "v_proj"]
            found += [f"{place}.{name}".lstrip(".") for name in own]
    bare = parameters_outside(model, *OWN_WAY, nn.Linear)
    return found + [name for name, p in bare if p.dim() == 2]


def parameters_outside(
    model: nn.Module, *modules: type[nn.Module]
) -> Iterator[tuple[str, nn.Parameter]]:
    """The parameters that have a shape and are not in modules of some classes."""
    inside = {id(p) for m in model.modules() if isinstance(m, modules) for p in m.parameters()}
    for name, p in model.named_parameters():
        if id(p) not in inside and not isinstance(p, nn.parameter.UninitializedParameter):
            yield name, p


def _name(model: nn.Module, layer: Layer) -> str:
    """What to call (some rows of) a parameter."""
    place, _, own = layer.weight.rpartition(".")
    height, start = model.get_parameter(layer.weight).shape[0], layer.offset
    prefix, stop = f"{place}.".lstrip("."), start + layer.shape[0]
    if isinstance(model.get_submodule(place), nn.MultiheadAttention) and own.endswith("_weight"):
        third = PACKED.get((3 * start / height, 3 * stop / height))  # type: ignore[arg-type]
        if third is not None:  # (0, 3) of one that is not packed
            return prefix + own.removesuffix("_weight") + third
    return layer.weight + f"[{start}:{stop}]" * ((start, stop) != (0, height))


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
