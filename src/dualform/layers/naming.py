"""Layers without a module of their own: what to call them.

| use | name |
|---|---|
| attention's packed projection, whole or by thirds | `attn.in_proj`, `attn.in_proj_q`, ... |
| its projections apart (`kdim`, `vdim`) | `attn.q_proj`, ... |
| a whole parameter, some rows of it | `fc.weight`, `packed[0:3]` |
| a look-up | the same with `[tokens]` |
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from itertools import count

from torch import nn

from dualform.layers.layer import Layer

PACKED: dict[tuple[float, float], str] = {
    (0, 3): "in_proj",
    (0, 1): "in_proj_q",
    (1, 3): "in_proj_kv",
    (1, 2): "in_proj_k",
    (2, 3): "in_proj_v",
}
"""What the thirds of an attention's packed projection are called."""

NOT_READ = (nn.Embedding, nn.EmbeddingBag, nn.RNNBase, nn.RNNCellBase, nn.Bilinear)
"""Modules whose matrices are not multiplied with an input that could be read from the graph."""


def named(layer: Layer, model: nn.Module, taken: Collection[str]) -> Layer:
    """A layer that functional code has made, with a name that no other has."""
    name = _name(model, layer) + "[tokens]" * (layer.kind == "embedding")
    longer = f" + {layer.bias}[{layer.bias_offset}]" if layer.bias else ".weight"
    names = (f"{name}{longer * (n > 0)}{f' ({n})' * (n > 1)}" for n in count())
    return replace(layer, name=next(name for name in names if name not in taken))


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


def _name(model: nn.Module, layer: Layer) -> str:
    """What to call (some rows of) a parameter."""
    place, _, own = layer.weight.rpartition(".")
    height, start = model.get_parameter(layer.weight).shape[0], layer.offset
    prefix, stop = f"{place}.".lstrip("."), start + layer.shape[0]
    if isinstance(model.get_submodule(place), nn.MultiheadAttention) and own.endswith("_weight"):
        thirds = start / height * 3, stop / height * 3
        third = PACKED.get(thirds) if own == "in_proj_weight" else own.removesuffix("_weight")
        if third is not None:
            return prefix + third
    return layer.weight + f"[{start}:{stop}]" * ((start, stop) != (0, height))
