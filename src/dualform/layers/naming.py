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
from dualform.layers.uses import Part, Use

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


def layer_of(use: Use, model: nn.Module) -> Layer:
    """The layer a use makes."""
    part, bias, kind = use.weight, use.bias, use.kind or ""
    name, own = _name(model, part), (part.stop - part.start, part.shape[1])
    if kind == "embedding":
        return look_up(f"{name}[tokens]", part.parameter, own, use.padding, part.start)
    named, start = (None, 0) if bias is None else (bias.parameter, bias.start)
    inputs = part.shape[1] if kind == "linear" else own[0]
    return Layer(name, kind, part.parameter, named, inputs, part.outputs, own, part.start, start)


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
            packed = module.in_proj_weight is not None
            own = PACKED.values() if packed else ("q_proj", "k_proj", "v_proj")
            found += [f"{place}.{name}".lstrip(".") for name in own]
        if isinstance(module, (*NOT_READ, nn.Linear, nn.MultiheadAttention)):
            other |= {id(p) for p in module.parameters()}
    lazy = nn.parameter.UninitializedParameter  # has no shape yet
    bare = {n: p for n, p in model.named_parameters() if id(p) not in other}
    return [*found, *(n for n, p in bare.items() if not isinstance(p, lazy) and p.dim() == 2)]


def _name(model: nn.Module, part: Part) -> str:
    """What to call (some rows of) a parameter."""
    place, _, own = part.parameter.rpartition(".")
    prefix, third = f"{place}.".lstrip("."), part.shape[0] // 3
    if isinstance(model.get_submodule(place), nn.MultiheadAttention) and own.endswith("_weight"):
        if own != "in_proj_weight":
            return prefix + own.removesuffix("_weight")
        if not part.start % third and not part.stop % third:
            return prefix + PACKED[part.start // third, part.stop // third]
    whole = (part.start, part.stop) == (0, part.shape[0])
    return part.parameter + ("" if whole else f"[{part.start}:{part.stop}]")
