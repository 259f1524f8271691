"""Layers without a module of their own: what to call a use of a weight, and what layer it makes.

| use | name |
|---|---|
| attention's packed projection, whole or by thirds | `attn.in_proj`, `attn.in_proj_q`, ... |
| its projections apart (`kdim`, `vdim`) | `attn.q_proj`, ... |
| a whole parameter, some rows of it | `fc.weight`, `packed[0:3]` |
| a look-up | the same with `[tokens]` |
"""

from __future__ import annotations

from collections.abc import Collection

from torch import nn

from dualform.layers.finding import Layer
from dualform.layers.parts import Part
from dualform.layers.uses import Use

PACKED = {
    (0, 3): "in_proj",
    (0, 1): "in_proj_q",
    (1, 3): "in_proj_kv",
    (1, 2): "in_proj_k",
    (2, 3): "in_proj_v",
}
"""What the thirds of an attention's packed projection are called."""

Identity = tuple[str, str, int, int, str | None, int]
"""Kind, weight, its rows from and to, bias, where its entries begin."""


def identity_of(layer: Layer) -> Identity:
    """What makes a layer the one it is, besides its name."""
    end = layer.offset + layer.height
    return layer.kind, layer.weight, layer.offset, end, layer.bias, layer.bias_offset


def identity_of_use(use: Use) -> Identity:
    """The same of the layer that a use makes."""
    weight, bias = use.weight, use.bias
    named, start = (None, 0) if bias is None else (bias.parameter, bias.start)
    return use.kind, weight.parameter, weight.start, weight.stop, named, start


def layer_of(use: Use, model: nn.Module, shape: tuple[int, ...], taken: Collection[str]) -> Layer:
    """The layer a use makes, given its parameter's shape and the names that others have."""
    kind, weight, start, stop, bias, bias_offset = identity_of_use(use)
    name = _name(model, use.weight, shape) + ("[tokens]" if kind == "embedding" else "")
    if name in taken:
        name += f" + {bias}[{bias_offset}]" if bias else ".weight"
    widths = (shape[1], stop - start) if kind == "linear" else (stop - start, shape[1])
    return Layer(name, kind, weight, bias, *widths, start, bias_offset)


def possible_names(model: nn.Module) -> list[str]:
    """What layers without a module may come to be called, as far as it can be foreseen."""
    found, attended = [], set()
    for place, module in model.named_modules():
        if isinstance(module, nn.MultiheadAttention):
            prefix = f"{place}." if place else ""
            packed = module.in_proj_weight is not None
            own = PACKED.values() if packed else ("q_proj", "k_proj", "v_proj")
            found += [prefix + name for name in own]
            attended |= {id(p) for p in module.parameters()}
    known = (nn.Linear, nn.Embedding, nn.RNNBase, nn.Bilinear, nn.EmbeddingBag)
    for module in model.modules():
        if isinstance(module, known):
            attended |= {id(p) for p in module.parameters(recurse=False)}
    bare = {n: p for n, p in model.named_parameters() if id(p) not in attended}
    lazy = nn.parameter.UninitializedParameter  # has no shape yet, and will be refused
    return [*found, *(n for n, p in bare.items() if not isinstance(p, lazy) and p.dim() == 2)]


def usual_projections(model: nn.Module) -> list[Layer]:
    """The projections of the model's attentions, if each is given one input."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    found = []
    for place, module in model.named_modules():
        if not isinstance(module, nn.MultiheadAttention):
            continue
        prefix, bias = f"{place}." if place else "", module.in_proj_bias
        named = None if bias is None else names[id(bias)]
        own = {"in_proj": module.in_proj_weight}
        if module.in_proj_weight is None:
            own = {f"{part}_proj": getattr(module, f"{part}_proj_weight") for part in "qkv"}
        for number, (name, weight) in enumerate(own.items()):
            if weight.requires_grad:
                height, width = weight.shape
                at = number * height if named else 0
                found.append(
                    Layer(prefix + name, "linear", names[id(weight)], named, width, height, 0, at)
                )
    return found


def _name(model: nn.Module, weight: Part, shape: tuple[int, ...]) -> str:
    """What to call (some rows of) a parameter."""
    place, _, own = weight.parameter.rpartition(".")
    prefix = f"{place}." if place else ""
    if isinstance(model.get_submodule(place), nn.MultiheadAttention) and own.endswith("_weight"):
        third = shape[0] // 3
        if own != "in_proj_weight":
            return prefix + own.removesuffix("_weight")
        if not weight.start % third and not weight.stop % third:
            return prefix + PACKED[weight.start // third, weight.stop // third]
    whole = (weight.start, weight.stop) == (0, shape[0])
    return weight.parameter + ("" if whole else f"[{weight.start}:{weight.stop}]")
