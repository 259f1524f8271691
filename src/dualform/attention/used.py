"""Queries of weights that have no module of their own: read from the graph of one forward pass.

What a module is given can be looked at by a hook. What attention's packed projections or functional
code multiply with a weight cannot; but a forward pass with gradients on leaves every such input in
the autograd graph, where recording finds it as well, by the same code.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import Node, get_gradient_edge

from dualform.layers.multihead import as_given, batch_in, is_attention, projections
from dualform.layers.uses import Graph, Use, tensors_in
from dualform.memory import LayerMemory


class Uses:
    """Collects what some layers are multiplied with while a network runs with gradients on.

    `state` is what the network runs with; the layers' parameters in it become leaves of the graph.
    """

    def __init__(self, layers: Sequence[LayerMemory], state: Mapping[str, Tensor]) -> None:
        self._layers = layers
        self._found: dict[str, list[tuple[int, Tensor]]] = {layer.name: [] for layer in layers}
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

    def _look(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if self._asking:  # a checkpoint runs its part again
            return
        batch = batch_in(module, args, kwargs)
        for use in projections(args, kwargs, output, self._leaves):
            self._take(use, lambda rows: rows if batch is None else as_given(batch, rows))

    def read(self, output: Any) -> dict[str, list[Tensor]]:
        """What each layer was multiplied with, [n, d_in], use by use, in the order of the uses."""
        for use in Graph(tensors_in(output)).uses(self._leaves):
            if isinstance(use, Use) and use.node not in self._seen:
                self._take(use, lambda rows: rows)
        return {
            name: [rows for _, rows in sorted(uses, key=lambda use: use[0])]
            for name, uses in self._found.items()
        }

    def _take(self, use: Use, ordered: Callable[[Tensor], Tensor]) -> None:
        self._seen.add(use.node)
        layer = self._layer(use)
        if layer is not None and use.key.can_be_read:
            found: Any = use.node
            self._asking = True
            try:
                rows = ordered(use.key.read())
            finally:
                self._asking = False
            self._found[layer.name].append((found._sequence_nr(), rows))

    def _layer(self, use: Use) -> LayerMemory | None:
        """The layer a use is of: the very one, or one of which it is a part (or the reverse)."""
        parameter, start, stop = use.weight.parameter, use.weight.start, use.weight.stop
        own = [la for la in self._layers if (la.kind, la.weight) == (use.kind, parameter)]
        bias = None if use.bias is None else use.bias.parameter
        very = [
            la
            for la in own
            if la.bias == bias and (la.offset, la.offset + la.shape[0]) == (start, stop)
        ]
        inside = [la for la in own if la.offset < stop and start < la.offset + la.shape[0]]
        return next(iter([*very, *inside]), None)
