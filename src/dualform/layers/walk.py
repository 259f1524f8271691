"""Weights that are used past their modules: found in the autograd graph once a forward returns.

`capture.py` sees every call of a recorded module. What multiplies with a weight in another way is
seen here: attention's projections each time an `nn.MultiheadAttention` returns, by reading the few
nodes between its outputs and its inputs; functional code (`F.linear(x, weight)`, `x @ weight.T`)
each time the outermost module returns, by reading the whole graph. That costs, so it is done in the
first step, and goes on only where something was found or may still come: networks that call all
their layers as modules pay for a single step.

Nothing is missed silently. A weight that is also used in a way without patterns (by an embedding
bag, by einsum, inside a compiled function) becomes values, with the reason; one that begins to be
used so only later fails the audit.

Why it is hard: a graph may hold earlier calls' graphs, and uses that the modules' hook has seen
already; and reading it must leave nothing behind that keeps it alive.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from dualform.layers import kinds, opaque
from dualform.layers import torch_internals as internals
from dualform.layers.finding import is_attention
from dualform.layers.layer import Layer
from dualform.layers.naming import NOT_READ, free_name, layer_of
from dualform.layers.saved import SavedInput
from dualform.layers.uses import Graph, Leaves, OtherUse, Product, tensors_in

if TYPE_CHECKING:
    from dualform.layers.capture import Capture

READ = ("linear", "transposed", "embedding")
"""The kinds of layers whose uses can be read from a graph."""


class GraphWalk:
    """Reports uses of weights that the modules' hook does not see, in the same way as it does."""

    def __init__(self, capture: Capture) -> None:
        self._capture, self._model = capture, capture.model
        self._known = {replace(la, name=""): la for la in reversed(list(capture.layers))}
        self._seen, self._read_before = object(), object()  # marks on nodes
        self._depth = threading.local()
        self._found = False  # functional uses: then every graph is read
        self._fused = self._inside(nn.RNNBase)
        own = self._inside(*NOT_READ, nn.MultiheadAttention)
        matrices = {name for name, p in self._trained() if p.dim() == 2}
        self._suspects = matrices - own - {layer.weight for layer in capture.layers}
        """Matrices that no module uses in its own way: functional code must be meant."""
        self.is_reading = False
        """Whether whole graphs are read, so that what was seen has to be marked."""
        self._handles: list[Any] = []

    def start(self) -> None:
        """Begin to read the graph of every outermost module's call."""
        self._handles = [
            torch_module.register_module_forward_pre_hook(self._enter),
            torch_module.register_module_forward_hook(self._leave, always_call=True),
        ]
        self.is_reading = True

    def remove(self) -> None:
        """Stop reading whole graphs; leaves no hook behind."""
        for handle in self._handles:
            internals.take_away(handle)
        self._handles, self.is_reading = [], False

    def next_step(self) -> None:
        """A step is over: go on only if functional uses were found, or may still come."""
        self._suspects -= {layer.weight for layer in self._capture.layers}
        if not self._found and not self._suspects:
            self.remove()

    def attentions(self) -> dict[int, Callable[[Any, Any, Any], None]]:
        """What is to be done when each `nn.MultiheadAttention` returns, by identity."""
        found = filter(is_attention, self._model.modules())
        return {id(module): partial(self._attended, module) for module in found}

    def mark(self, node: Any) -> None:
        """Remember, as long as the graph lives, that a use was seen: the next call of a module may
        be fed with what this one returned, and its graph then holds this one's."""
        internals.marks_of(node)[self._seen] = True

    def _inside(self, *modules: type[nn.Module]) -> set[str]:
        """The names of all parameters in modules of some classes."""
        found = (m for m in self._model.modules() if isinstance(m, modules))
        inside = {id(p) for module in found for p in module.parameters()}
        return {name for name, p in self._model.named_parameters() if id(p) in inside}

    def _trained(self) -> Iterator[tuple[str, nn.Parameter]]:
        for name, p in self._model.named_parameters():
            is_lazy = isinstance(p, nn.parameter.UninitializedParameter)
            if p.requires_grad and p.is_leaf and not is_lazy:  # else functional_call stands in
                yield name, p

    # -- when a module returns ---------------------------------------------------------------

    def _enter(self, module: nn.Module, args: Any) -> None:
        self._depth.now = getattr(self._depth, "now", 0) + 1

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        depth = getattr(self._depth, "now", 1) - 1
        self._depth.now = max(0, depth)  # a forward pass may have begun before the recording
        ends = [] if depth > 0 else [t for t in tensors_in(output) if t.grad_fn is not None]
        if not ends or internals.running_pass() != -1 or internals.functorch_level() is not None:
            return
        graph = Graph(ends, lambda node: self._read_before in internals.marks_of(node))
        leaves: Leaves = {
            self._capture.node_of(p): (name, tuple(p.shape))
            for name, p in self._trained()
            if name not in self._fused
        }
        # in the order they were made: that is how calls are counted
        for use in sorted(graph.uses(leaves), key=lambda use: internals.sequence_number(use.node)):
            if any(n is not None and self._seen in internals.marks_of(n) for n in use.nodes):
                continue
            if isinstance(use, Product):
                self._found = True
                self._follow(use)
            elif self._is_ours(use):
                self._capture.make_values(use.parameter, opaque.reason_of(use.node.name()))
        for end in ends:
            if end.grad_fn is not None:  # an output may be the next call's input
                internals.marks_of(end.grad_fn)[self._read_before] = True

    def _is_ours(self, use: OtherUse) -> bool:
        """Whether a use without patterns matters: others are values, or their kind sees to it."""
        own = [layer for layer in self._capture.layers if use.parameter in layer.parameters]
        return use.parameter in self._suspects or any(layer.kind in READ for layer in own)

    def _attended(self, module: nn.MultiheadAttention, args: Any, kwargs: Any, output: Any) -> None:
        """An attention returns: follow every product with its parameters.

        Inside, positions come first; given the batch first, rows are put back into the order of the
        inputs, so that tags and neighbours fit.
        """
        ends = [t for t in tensors_in(output) if t.grad_fn is not None]
        if not ends or internals.functorch_level() is not None:
            return
        own = {id(p) for p in module.parameters()}
        trained = [(name, p) for name, p in self._trained() if id(p) in own]
        if internals.running_pass() != -1:
            for name, _ in trained if internals.hooks_on_saving(True) is None else ():
                self._capture.make_values(name, opaque.REENTRANT)
            return
        given = {t.grad_fn for t in tensors_in([args, kwargs])}
        query: Tensor = args[0] if args else kwargs["query"]
        batch = query.shape[0] if module.batch_first and query.dim() == 3 else 0
        leaves = {self._capture.node_of(p): (name, tuple(p.shape)) for name, p in trained}
        for use in Graph(ends, given.__contains__).uses(leaves):
            if isinstance(use, Product):
                self._follow(use, batch, positions_first=module.batch_first)

    # -- one use ---------------------------------------------------------------

    def _follow(self, use: Product, batch: int = 0, *, positions_first: bool = False) -> None:
        """Report the patterns of a use when a backward pass goes through it.

        `batch`: rows are those of an attention that was given this many examples, batch first.
        """
        if self.is_reading:
            self.mark(use.node)
        saved, capture = SavedInput(use.node, use.saved), self._capture
        if saved.is_lost:  # legal as long as nothing goes back through it: an evaluation
            return
        if not saved.can_be_read:
            capture.make_values(use.weight.parameter, opaque.IN_CHECKPOINT)
            return
        layer = self._layer(use, positions_first)
        if not capture.is_on(layer):
            return
        context, kind, by_examples = capture.context(), kinds.of(layer.kind), capture.by_examples
        parameters = (self._model.get_parameter(name) for name in layer.parameters)
        nodes = [capture.node_of(p) for p in parameters if p.requires_grad]
        unfolded = None if use.unfolded is None else internals.shape_of_output(use.unfolded)
        # no reference to `use` below: a node whose hook held it would never be freed

        def backward(signals: tuple[Tensor | None, ...]) -> None:
            signal = signals[0]
            if (
                signal is None
                or not capture.is_on(layer)
                or not any(map(internals.will_run, nodes))
            ):
                return
            key, signal = saved.read(), signal.detach()
            if not internals.keeps_graph():
                saved.forget()
            keys, rows, _ = kind.rows(layer, key, signal)
            shape = tuple(signal.shape[:-1])
            if unfolded is not None and unfolded[-1:] == (layer.out_features,):
                shape = unfolded[:-1]
            layout = kind.layout(key, signal)
            if batch:
                keys, rows, shape = as_given(batch, keys), as_given(batch, rows), shape[::-1]
            if by_examples(layer):
                keys, rows = keys.view(*shape, -1), rows.view(*shape, -1)
            capture.on_use(layer, keys, rows, shape, context, layout)

        use.end.register_prehook(backward)

    def _layer(self, use: Product, positions_first: bool) -> Layer:
        """The layer a use is of; a new one if these rows and this bias were never seen together."""
        shape = self._model.get_parameter(use.weight.parameter).shape
        layer = layer_of(use, self._model, shape, positions_first=positions_first)
        identity = replace(layer, name="")
        if identity not in self._known:
            layer = replace(layer, name=free_name(layer, {la.name for la in self._known.values()}))
            self._known[identity] = layer
            if not self._capture.are_values & set(layer.parameters):
                self._capture.add(layer)
        return self._known[identity]


def as_given(batch: int, rows: Tensor) -> Tensor:
    """Rows [L·B, d] as attention computes them, in the order they were given: [B·L, d]."""
    return rows.reshape(-1, batch, rows.shape[-1]).transpose(0, 1).reshape(rows.shape)
