"""Weights that are used past their modules: found in the autograd graph once a forward returns.

Attention's projections are seen each time an `nn.MultiheadAttention` returns, by reading the few
nodes between its outputs and its inputs; functional code (`F.linear(x, weight)`, `x @ weight.T`)
each time the outermost module returns, by reading the whole graph. That costs, so it is done in the
first step, and goes on only where something was found or may still come.

Nothing is missed silently. A weight that is also used in a way without patterns (by an embedding
bag, by einsum, inside a compiled function) becomes values, with the reason; one that begins to be
used so only later fails the audit.

Why it is hard: a graph may hold earlier calls' graphs, and uses that the modules' hook has seen
already; and reading it must leave nothing behind that keeps it alive.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.autograd.graph import Node, get_gradient_edge
from torch.nn.modules import module as torch_module

from dualform.layers import finding
from dualform.layers import torch_internals as internals
from dualform.layers.layer import Layer
from dualform.layers.uses import Graph, Use, tensors_in

if TYPE_CHECKING:
    from dualform.layers.capture import Capture

READ = ("linear", "transposed", "embedding")  # the kinds whose uses can be read from a graph


class GraphWalk:
    """Reports uses of weights that the modules' hook does not see, in the same way as it does."""

    def __init__(self, capture: Capture) -> None:
        self._capture, self._model = capture, capture.model
        self._known = {replace(la, name=la.weight): la for la in reversed(list(capture.layers))}
        self._seen, self._read_before = object(), object()  # marks on nodes
        self._depth = threading.local()
        self._found = False  # functional uses: then every graph is read
        matrices = {n for n, p in self._trained(*finding.OWN_WAY) if p.dim() == 2}
        self._suspects = matrices - {layer.weight for layer in capture.layers}
        """Matrices that no module uses in its own way: functional code must be meant."""
        self.handles: list[Any] = []  # while they hang, what was seen has to be marked

    def start(self) -> None:
        """Begin to read the graph of every outermost call."""
        self.handles = [
            torch_module.register_module_forward_pre_hook(self._enter),
            torch_module.register_module_forward_hook(self._leave, always_call=True),
        ]

    def remove(self) -> None:
        """Stop reading whole graphs; leaves no hook behind."""
        for handle in self.handles:
            internals.take_away(handle)
        self.handles = []

    def next_step(self) -> None:
        """A step is over: go on only if functional uses were found, or may still come."""
        self._suspects -= {layer.weight for layer in self._capture.layers}
        if not self._found and not self._suspects:
            self.remove()

    def attentions(self) -> dict[int, Callable[[Any, Any, Any, Any], None]]:
        """What is to be done when each `nn.MultiheadAttention` returns, by identity."""
        return {id(m): self._attended for m in filter(finding.is_attention, self._model.modules())}

    def mark(self, node: Any) -> None:
        """Remember, as long as the graph lives, that a use was seen."""
        node.metadata[self._seen] = True

    def _trained(self, *but: type[nn.Module]) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters that are trained, without those in modules of some classes."""
        found = finding.parameters_outside(self._model, *but)
        return ((name, p) for name, p in found if p.requires_grad and p.is_leaf)

    # -- when a module returns ---------------------------------------------------------------

    def _enter(self, module: nn.Module, args: Any) -> None:
        self._depth.now = getattr(self._depth, "now", 0) + 1

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        depth = getattr(self._depth, "now", 1) - 1
        self._depth.now = max(0, depth)  # a forward pass may have begun before the recording
        if depth > 0 or internals.running_pass() != -1:
            return
        ends = [t for t in tensors_in(output) if t.grad_fn is not None]
        self._found |= self._read(ends, self._was_read, self._trained(nn.RNNBase))
        node: Any
        for node in (end.grad_fn for end in ends):  # an output may be the next call's input
            node.metadata[self._read_before] = True

    def _was_read(self, node: Any) -> bool:
        return self._read_before in node.metadata

    def _attended(self, module: nn.MultiheadAttention, args: Any, kwargs: Any, output: Any) -> None:
        """An attention returns: follow every product with its parameters. Inside, positions come
        first; given the batch first, rows are put back into that order, so that tags fit."""
        inside = {id(p) for p in module.parameters()}
        own = [(name, p) for name, p in self._trained() if id(p) in inside]
        ends = [t for t in tensors_in(output) if t.grad_fn is not None]
        if internals.running_pass() == -1:
            query: Tensor = args[0] if args else kwargs["query"]
            batch = query.shape[0] if module.batch_first and query.dim() == 3 else 0
            given = {t.grad_fn for t in tensors_in([args, kwargs])}
            self._read(ends, given.__contains__, own, batch)
        elif ends and internals.hooks_on_saving(True) is None:
            for name, _ in own:
                self._capture.make_values(name, finding.REENTRANT)

    def _read(
        self,
        ends: list[Tensor],
        is_end: Callable[[Node], bool],
        parameters: Iterable[tuple[str, nn.Parameter]],
        batch: int = 0,
    ) -> bool:
        """Follow the uses of some parameters in a graph; whether there were any with patterns."""
        found = False
        if not ends or internals.functorch_level() is not None:
            return found
        leaves = {get_gradient_edge(p).node: (name, tuple(p.shape)) for name, p in parameters}
        uses = Graph(ends, is_end).uses(leaves)
        # in the order they were made: that is how calls are counted
        for use in sorted(uses, key=lambda use: internals.sequence_number(use.node)):
            nodes: list[Any] = [use.node, use.unfolded, use.end]  # an output's is one of them
            if any(self._seen in node.metadata for node in nodes if node is not None):
                continue
            if use.layer is not None:
                self._follow(use, use.layer, batch)
                found = True
            elif use.parameter in self._suspects or any(
                use.parameter in layer.parameters and layer.kind in READ
                for layer in self._capture.layers
            ):  # of other layers their kind sees to it
                self._capture.make_values(use.parameter, finding.OTHER_USE.format(use.node.name()))
        return found

    def _follow(self, use: Use, layer: Layer, batch: int) -> None:
        """Have the patterns of a use reported when a backward pass goes through it."""
        if self.handles:
            self.mark(use.node)
        try:
            key = internals.saved_input(use.node, use.saved)
        except RuntimeError:  # legal as long as nothing goes back through it: an evaluation
            return
        if key is None:
            self._capture.make_values(use.parameter, finding.IN_CHECKPOINT)
            return
        if layer not in self._known:  # these rows and this bias were never seen together
            taken = {known.name for known in self._known.values()}
            self._known[layer] = finding.named(layer, self._model, taken)
            self._capture.add(self._known[layer])
        self._capture.hang(self._known[layer], use, key, batch)
