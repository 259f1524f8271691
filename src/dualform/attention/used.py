"""Weights that have no module of their own: their queries, read from the graph of a forward pass.

What a module is given can be looked at by a hook. What attention's packed projections or functional
code multiply with a weight cannot; but a forward pass with gradients on leaves every such input in
the autograd graph, where recording finds it as well, by the same code. The same nodes say what the
derivative with respect to a product is, when a backward pass comes by.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node, get_gradient_edge

from dualform.errors import QueryError
from dualform.layers import Layer, kinds
from dualform.layers.finding import is_attention
from dualform.layers.torch_internals import saved_input, sequence_number
from dualform.layers.uses import Graph, Use, tensors_in
from dualform.memory import LayerMemory


class Found(NamedTuple):
    """One use of a layer: its place among all, its queries [n, d_in], and the order of its rows."""

    place: int
    rows: Tensor
    use: Use
    ordered: Callable[[Tensor], Tensor]
    is_whole: bool
    """Whether the product is with all of the layer's rows, not with a part of them."""


class GraphUses:
    """Collects what some layers are multiplied with while a network runs with gradients on.

    `state` is what the network runs with; the layers' parameters in it become leaves of the graph.
    """

    def __init__(self, layers: Sequence[LayerMemory], state: Mapping[str, Tensor]) -> None:
        self._layers, self.state = layers, state
        self._found: dict[str, list[Found]] = {layer.name: [] for layer in layers}
        self._seen: set[Node] = set()
        self._asking = False
        self._leaves: dict[Node, tuple[str, tuple[int, ...]]] = {}
        for name in {p for la in layers for p in (la.weight, la.bias) if p is not None}:
            leaf = state[name].requires_grad_()
            self._leaves[get_gradient_edge(leaf).node] = name, tuple(leaf.shape)

    def watch(self, model: nn.Module) -> list[Any]:
        """Look at every attention that returns; the handles of the hooks that do."""
        return [
            module.register_forward_hook(self._look, with_kwargs=True)
            for module in model.modules()
            if is_attention(module)
        ]

    def _look(self, module: nn.MultiheadAttention, args: Any, kwargs: Any, output: Any) -> None:
        if self._asking:  # a checkpoint runs its part again
            return
        query: Tensor = args[0] if args else kwargs["query"]
        batch = query.shape[0] if module.batch_first and query.dim() == 3 else 0
        given = {t.grad_fn for t in tensors_in([args, kwargs])}
        for use in Graph(tensors_in(output), given.__contains__).uses(self._leaves):
            if use.layer is not None:
                self._take(use, lambda rows: as_given(batch, rows))

    def look(self, output: Any) -> None:
        """Find the uses that no attention has shown, in the graph behind the network's output."""
        for use in Graph(tensors_in(output), lambda node: False).uses(self._leaves):
            if use.layer is not None and use.node not in self._seen:
                self._take(use, lambda rows: rows)
        for uses in self._found.values():
            uses.sort(key=lambda found: found.place)

    def read(self) -> dict[str, list[Tensor]]:
        """What each layer was multiplied with, [n, d_in], use by use, in the order of the uses."""
        return {name: [found.rows for found in uses] for name, uses in self._found.items()}

    def layer_of(self, output: Any) -> str | None:
        """The layer whose one product this very tensor is; None if it is none's."""
        node = output.grad_fn if isinstance(output, Tensor) else None
        for name, uses in self._found.items():
            if len(uses) == 1 and uses[0].is_whole:
                use = uses[0].use
                if node in (use.node, use.unfolded, use.end):
                    return name
        return None

    def slopes(self, layer: str, value: Tensor) -> tuple[Tensor, Tensor]:
        """A layer's queries [n, d_in] and d(value)/d(its output) [n, d_out], use by use."""
        uses = self._found[layer]
        if not uses:
            raise QueryError(
                f"layer {layer!r} is not used for this input (or its use leaves no trace in the "
                "graph); name another layer, or ask for a recorded one with example=..."
            )
        if not all(found.is_whole for found in uses):
            raise QueryError(
                f"layer {layer!r} was recorded as rows of a weight that this input does not use "
                "together: what they wrote cannot be told apart; name another layer, or ask for a "
                "recorded one with example=..."
            )
        caught: dict[int, Tensor] = {}

        def catch(number: int) -> Callable[[tuple[Tensor | None, ...]], None]:
            def hook(slopes: tuple[Tensor | None, ...]) -> None:
                if slopes[0] is not None:
                    caught[number] = slopes[0].detach()

            return hook

        handles = [f.use.end.register_prehook(catch(i)) for i, f in enumerate(uses)]
        try:
            leaves = [self.state[name] for name, _ in self._leaves.values()]
            torch.autograd.grad(value, leaves, allow_unused=True)
        finally:
            for handle in handles:
                handle.remove()
        slopes = [self._slope(found, caught.get(i), layer) for i, found in enumerate(uses)]
        return torch.cat([found.rows for found in uses]), torch.cat(slopes)

    def _slope(self, found: Found, slope: Tensor | None, layer: str) -> Tensor:
        width = next(la.out_features for la in self._layers if la.name == layer)
        if slope is None:  # nothing of it reaches the value
            return torch.zeros(len(found.rows), width, dtype=found.rows.dtype)
        return found.ordered(slope.reshape(len(found.rows), width))

    def output(self, layer: LayerMemory, rows: Tensor) -> Tensor:
        """The layer's output for these queries, as the network computes it: [n, d_out]."""
        weight = self.state[layer.weight].detach()[layer.rows_of(layer.weight)]
        output = kinds.of(layer.kind).multiply(weight, rows)
        if layer.bias is not None:
            output = output + self.state[layer.bias].detach()[layer.rows_of(layer.bias)]
        return output

    def _take(self, use: Use, ordered: Callable[[Tensor], Tensor]) -> None:
        self._seen.add(use.node)
        layer, is_whole = self._layer(use.layer)
        key = saved_input(use.node, use.saved)
        if layer is not None and key is not None:
            self._asking = True
            try:
                given = (key if isinstance(key, Tensor) else key()).detach()
            finally:
                self._asking = False
            rows = ordered(kinds.of(layer.kind).keys(given))
            place = sequence_number(use.node)
            self._found[layer.name].append(Found(place, rows, use, ordered, is_whole))

    def _layer(self, used: Layer | None) -> tuple[LayerMemory | None, bool]:
        """The recorded layer that is used, and whether it is the very one, not a part (or the
        reverse)."""
        if used is None:
            return None, False
        own = [la for la in self._layers if (la.kind, la.weight) == (used.kind, used.weight)]
        here = used.rows_of(used.weight)
        for la in own:
            if la.bias == used.bias and la.rows_of(la.weight) == here:
                return la, True
        spans = ((la, la.rows_of(la.weight)) for la in own)
        inside = (la for la, s in spans if s.start < here.stop and here.start < s.stop)
        return next(inside, None), False


def as_given(batch: int, rows: Tensor) -> Tensor:
    """Rows [L·B, d] as attention computes them, in the order they were given: [B·L, d]."""
    if not batch:
        return rows
    return rows.reshape(-1, batch, rows.shape[-1]).transpose(0, 1).reshape(rows.shape)
