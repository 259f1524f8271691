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
from itertools import count

from torch import nn

from dualform.layers.embedding import look_up
from dualform.layers.layer import Layer
from dualform.layers.linear import POSITIONS_FIRST
from dualform.layers.parts import Part
from dualform.layers.uses import Product

PACKED = {
    (0, 3): "in_proj",
    (0, 1): "in_proj_q",
    (1, 3): "in_proj_kv",
    (1, 2): "in_proj_k",
    (2, 3): "in_proj_v",
}
"""What the thirds of an attention's packed projection are called."""

NOT_READ = (nn.Embedding, nn.EmbeddingBag, nn.RNNBase, nn.RNNCellBase, nn.Bilinear)
"""Modules whose matrices are not multiplied with an input that could be read from the graph."""


def layer_of(
    use: Product, model: nn.Module, shape: tuple[int, ...], *, positions_first: bool
) -> Layer:
    """The layer a use makes, given its parameter's shape."""
    part, bias = use.weight, use.bias
    name, own = _name(model, part, shape), (part.rows, shape[1])
    if use.kind == "embedding":
        return look_up(f"{name}[tokens]", part.parameter, own, use.padding, part.start)
    named, start = (None, 0) if bias is None else (bias.parameter, bias.start)
    widths = own[::-1] if use.kind == "linear" else own
    details = ((POSITIONS_FIRST, True),) if positions_first else ()
    return Layer(name, use.kind, part.parameter, named, *widths, own, part.start, start, details)


def free_name(layer: Layer, taken: Collection[str]) -> str:
    """The layer's name, or a longer one if another layer has it."""
    longer = f" + {layer.bias}[{layer.bias_offset}]" if layer.bias else ".weight"
    names = (f"{layer.name}{longer * (n > 0)}{f' ({n})' * (n > 1)}" for n in count())
    return next(name for name in names if name not in taken)


def possible_names(model: nn.Module) -> list[str]:
    """What layers without a module may come to be called, as far as it can be foreseen."""
    found, other = [], set()
    for place, module in model.named_modules():
        if isinstance(module, nn.MultiheadAttention):
            prefix = f"{place}." if place else ""
            packed = module.in_proj_weight is not None
            own = PACKED.values() if packed else ("q_proj", "k_proj", "v_proj")
            found += [prefix + name for name in own]
        if isinstance(module, (*NOT_READ, nn.Linear, nn.MultiheadAttention)):
            other |= {id(p) for p in module.parameters()}
    lazy = nn.parameter.UninitializedParameter  # has no shape yet
    bare = {n: p for n, p in model.named_parameters() if id(p) not in other}
    return [*found, *(n for n, p in bare.items() if not isinstance(p, lazy) and p.dim() == 2)]


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
