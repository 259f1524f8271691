"""Weights that are used past their modules: found in the autograd graph once a forward returns.

`capture.py` sees every call of an `nn.Linear` or `nn.Embedding`. What multiplies with a weight in
another way is seen here: attention's projections each time an `nn.MultiheadAttention` returns, by
reading the few nodes between its outputs and its inputs; functional code (`F.linear(x, weight)`,
`x @ weight.T`) each time the outermost module returns, by reading the whole graph. That costs, so
it is done in the first step, and goes on only where something was found or may still come: networks
that call all their layers as modules pay for a single step.

Nothing is missed silently. A weight that is also used in a way without patterns (by an embedding
bag, inside a compiled function) is accounted for step by step, with a warning that says so; one
that begins to be used so only later fails the audit, or, of a layer whose keys alone are kept, is
warned of when these are next compared with its gradient.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.nn.modules import module as torch_module

from dualform.layers import Layer, NamePatterns, is_chosen
from dualform.layers.embedding import without_padding
from dualform.layers.multihead import as_given, batch_in, is_attention, projections
from dualform.layers.naming import identity_of, identity_of_use, layer_of
from dualform.layers.uses import Graph, Unknown, Use, in_transform, tensors_in
from dualform.recording.capture import Capture, running_pass, will_accumulate
from dualform.recording.parameters import Parameters, Watched
from dualform.recording.sink import Sink

REASONS = {
    "choice": "was chosen only in part by layers=",
    "EmbeddingBackward0": "is looked up as an embedding, sparse or scaled by frequency",
    "EmbeddingBagBackward0": "is looked up by an embedding bag",
    "CompiledFunctionBackward": "is used inside a compiled function",
    "checkpoint": "is used inside an activation checkpoint whose inputs cannot be read",
}

WITHOUT_PATTERNS = (nn.Embedding, nn.EmbeddingBag, nn.RNNBase, nn.RNNCellBase, nn.Bilinear)
"""Modules whose matrices are not multiplied with an input that could be read from the graph."""

Leaves = dict[Node, tuple[str, tuple[int, ...]]]


class GraphCapture:
    """Reports uses of weights that the module engine does not see, in the same way as it does."""

    def __init__(
        self,
        model: nn.Module,
        layers: dict[Layer, nn.Module],
        parameters: Parameters,
        capture: Capture,
        sink: Sink,
        chosen: NamePatterns,
    ) -> None:
        self._model = model
        self._chosen = chosen
        self._layers = layers
        self._parameters = parameters
        self._capture = capture
        self._sink = sink
        self._known = {identity_of(layer): layer for layer in reversed(list(layers))}
        self._seen, self._read_before = object(), object()  # marks on nodes
        self._depth = threading.local()
        self._found = False  # functional uses: then every graph is read
        self._fused = parameters_in(model, nn.RNNBase)
        self._suspects = self._find_suspects()
        for module in model.modules():
            if is_attention(module):
                capture.others[id(module)] = _Attention(self, module)
        self._handles = [
            torch_module.register_module_forward_pre_hook(self._enter),
            torch_module.register_module_forward_hook(self._leave, always_call=True),
        ]
        capture.mark = self._mark

    def remove(self) -> None:
        """Stop reading whole graphs; leaves no hook behind."""
        for handle in self._handles:
            handle.remove()
            # torch's handle forgets this one of its own tables
            always = getattr(torch_module, "_global_forward_hooks_always_called", {})
            always.pop(handle.id, None)
        self._handles = []
        self._capture.mark = None

    def next_step(self) -> None:
        """A step is over. After the first, whole graphs are read only if there is a reason to."""
        if self._handles and not self._found:
            self._suspects = [w for w in self._suspects if w.coverage == "untrained"]
            if not self._suspects:
                self.remove()

    def _find_suspects(self) -> list[Watched]:
        """Matrices that no known module uses in its own way: functional code must be meant."""
        known = {layer.weight for layer in self._layers}
        known |= parameters_in(self._model, *WITHOUT_PATTERNS, nn.MultiheadAttention)
        return [
            w
            for w in self._parameters
            if w.parameter.dim() == 2 and w.parameter.requires_grad and w.name not in known
        ]

    # -- the outermost module ---------------------------------------------------------------------

    def _enter(self, module: nn.Module, args: Any) -> None:
        self._depth.now = getattr(self._depth, "now", 0) + 1

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        depth = getattr(self._depth, "now", 1) - 1
        self._depth.now = max(0, depth)  # a forward pass may have begun before the recording
        if depth > 0 or not self._handles:
            return
        self._read(output)

    def _read(self, output: Any) -> None:
        ends = [t for t in tensors_in(output) if t.grad_fn is not None]
        if not ends or in_transform():
            return
        leaves: Leaves = {
            self._capture.node(w.parameter): (w.name, tuple(w.shape))
            for w in self._parameters
            if w.parameter.requires_grad and w.name not in self._fused
        }
        # in the order they were made: that is how calls are counted
        graph = Graph(ends, lambda node: self._read_before in _marks(node))
        for use in sorted(graph.uses(leaves), key=_when):
            if self._is_seen(use):
                continue
            if isinstance(use, Unknown):
                self._without_patterns(use.parameter, use.name)
            else:
                self._found = True
                self.follow(use)
        for end in ends:
            if end.grad_fn is not None:  # an output may be the next call's input
                _marks(end.grad_fn)[self._read_before] = True

    def _mark(self, node: Node) -> None:
        """Remember, as long as the graph lives, that a use was seen.

        The next call of a module may be fed with what this one returned, or with any part of it:
        its graph then holds this one's.
        """
        _marks(node)[self._seen] = True

    def _is_seen(self, use: Use | Unknown) -> bool:
        """Whether the module engine, or a look at an attention, has this use already."""
        return any(self._seen in _marks(node) for node in use.nodes)

    # -- one use ----------------------------------------------------------------------------------

    def follow(self, use: Use, batch: int | None = None) -> None:
        """Report the patterns of a use when a backward pass goes through it.

        `batch`: rows are those of an attention that was given this many examples, batch first.
        """
        if self._handles:
            self._mark(use.node)
        if use.key.is_lost:  # legal as long as nothing goes back through it: an evaluation
            return
        if not use.key.can_be_read:
            self._without_patterns(use.weight.parameter, "checkpoint")
            return
        layer = self._layer(use)
        if not self._capture.wants(layer) or layer not in self._layers:
            return
        self._capture.is_used_past_its_module(layer)
        context = self._capture.context(layer)
        watched = self._parameters.of_layer(layer)
        nodes = [self._capture.node(w.parameter) for w in watched if w.parameter.requires_grad]
        # no reference to `use` below: a node that held itself would never be freed
        saved, flipped, padding, capture = use.key, use.flipped, use.padding, self._capture
        shape: list[tuple[int, ...]] = []

        def unfold(error_signals: tuple[Tensor | None, ...]) -> None:
            if error_signals[0] is not None and error_signals[0].shape[-1:] == (
                layer.out_features,
            ):
                shape[:] = [tuple(error_signals[0].shape[:-1])]

        def backward(error_signals: tuple[Tensor | None, ...]) -> None:
            error_signal = error_signals[0]
            if error_signal is None or not capture.wants(layer):
                return
            if any(map(will_accumulate, nodes)):
                key = saved.read()
                rows = error_signal.detach().mT if flipped else error_signal.detach()
                leading = shape[0] if shape else tuple(rows.shape[:-1])
                pair = (key, without_padding(rows.reshape(len(key), -1), key[:, 0], padding))
                if batch is not None:
                    pair = as_given(batch, pair[0]), as_given(batch, pair[1])
                    leading = leading[::-1]
                capture.on_patterns(layer, *pair, leading, context, running_pass())

        if use.unfolded is not None:
            use.unfolded.register_prehook(unfold)
        use.end.register_prehook(backward)

    def leaves_of(self, module: nn.Module) -> Leaves:
        """The nodes of a module's own trained parameters."""
        watched = (self._parameters.of(p) for p in module.parameters() if p.requires_grad)
        return {self._capture.node(w.parameter): (w.name, tuple(w.shape)) for w in watched}

    def _layer(self, use: Use) -> Layer:
        """The layer a use is of; a new one if these rows and this bias were never seen together."""
        identity = identity_of_use(use)
        layer = self._known.get(identity)
        if layer is None:
            watched = self._parameters.by_name[use.weight.parameter]
            taken = {known.name for known in self._known.values()}
            layer = layer_of(use, self._model, tuple(watched.shape), taken)
            self._known[identity] = layer
            if not is_chosen(layer.name, self._chosen):
                self._without_patterns(layer.weight, "choice")
            is_open = watched.coverage in ("untrained", "patterns") or watched.keys_alone
            if is_open and not watched.by_steps:
                self._layers[layer] = self._model
                self._parameters.add(layer)
        return layer

    # -- what has no patterns -----------------------------------------------------------------

    def _without_patterns(self, name: str, reason: str) -> None:
        """A parameter that should have patterns is used in a way that gives none: by steps, then.

        With it every layer of that weight, and their biases. Once it has patterns it is too late:
        the audit will say so.
        """
        watched = self._parameters.by_name[name]
        if watched.coverage != "untrained" or watched.by_steps or not watched.layers:
            if not watched.layers:
                watched.by_steps = True
            return
        taken = {la.name: None for la in watched.layers if la in self._layers}
        todo = [watched]
        while todo:
            part = todo.pop()
            if part.by_steps:
                continue
            part.by_steps = True
            for layer in [la for la in part.layers if la.weight == part.name]:
                self._capture.forget(layer)
                if self._layers.pop(layer, None) is not None:
                    self._sink.rewind(layer)
                todo += self._parameters.of_layer(layer)
        used = REASONS.get(reason, f"is used by {reason}, which has no patterns")
        warnings.warn(
            f"dualform: {name!r} (layer {', '.join(taken) or 'none'}) {used}; it is accounted for "
            "step by step, without patterns",
            stacklevel=2,
        )


class _Attention:
    """What to do when a certain `nn.MultiheadAttention` returns."""

    def __init__(self, graph: GraphCapture, module: nn.Module) -> None:
        self._graph = graph
        self._module = module

    def __call__(self, args: Any, kwargs: Mapping[str, Any], output: Any) -> None:
        if in_transform() or all(t.grad_fn is None for t in tensors_in(output)):
            return
        batch = batch_in(self._module, args, kwargs)
        for use in projections(args, kwargs, output, self._graph.leaves_of(self._module)):
            self._graph.follow(use, batch)


def parameters_in(model: nn.Module, *kinds: type[nn.Module]) -> set[str]:
    """The names of all parameters in modules of some kinds."""
    modules = (m for m in model.modules() if isinstance(m, kinds))
    inside = {id(p) for module in modules for p in module.parameters()}
    return {name for name, p in model.named_parameters() if id(p) in inside}


def _marks(node: Any) -> dict[object, bool]:
    """What can be written on a node: it lives as long as the node, whoever holds it."""
    marks: dict[object, bool] = node.metadata
    return marks


def _when(use: Use | Unknown) -> int:
    node: Any = use.node
    return int(node._sequence_nr())
