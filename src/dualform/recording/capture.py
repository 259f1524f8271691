"""The hooks: where keys and error signals are seen.

One global forward hook looks at every call of a recorded layer; a hook on the graph's node that
made the output then receives the error signal in the backward pass, together with the key it
belongs to. Why so:

* A hook on the modules themselves would switch off torch's fast path of `nn.TransformerEncoder`,
  and evaluation inside the loop would no longer be bit-identical.
* The node is that of the output before any in-place activation; full backward hooks see the one
  after it. What a user's own hook on the output makes of the error signal has happened by then. And
  it costs less than half of what a hook on the tensor does. Where only keys are of interest, there
  is a way that costs a quarter of that (`node_hooks.py`).
* A pattern exists only if its gradient really reaches the parameter's `.grad`. A forward pass that
  is never differentiated, or `torch.autograd.grad` for a saliency map, leaves none.

The layer's input is held as it is where autograd refuses to go on if it is changed in place before
the backward pass. Elsewhere such a change is legal, so the key is copied at the call (`copies.py`):
where autograd saves nothing (a frozen weight), a copy (positions that do not lie in one piece), or
what hooks on saved tensors make of it (an activation checkpoint, `save_on_cpu`).

Nothing is left behind: `remove` takes the one global hook away, and a node's hook does nothing
once the capture is over.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node, get_gradient_edge
from torch.nn.modules import module as torch_module

from dualform.layers import Layer, as_patterns, flattened, is_recordable, leading_shape
from dualform.layers.embedding import without_padding
from dualform.recording.copies import Copies
from dualform.recording.node_hooks import hook_early
from dualform.recording.opaque import refuse_parametrized

OnPatterns = Callable[[Layer, Tensor, Tensor, tuple[int, ...], Any, int], None]
"""Called with layer, keys [n, d_in], error signals [n, d_out], leading shape, context, backward."""

is_any_autocast_on: Callable[[], bool]
is_any_autocast_on = getattr(torch._C, "_is_any_autocast_enabled", lambda: True)
"""Four times as quick as asking about one device, and hardly ever is there any."""

hooks_on_saving: Callable[[bool], Any]
hooks_on_saving = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", lambda _: ())
"""The hooks that what autograd saves goes through now; None: it is saved as it is. Before torch 2.8
that cannot be asked, and there may always be some. Inside a backward pass they are those of a
checkpoint that computes its part once more: through that graph no pass ever goes."""

running_pass: Callable[[], int] = torch._C._current_graph_task_id
"""torch's number of the backward pass that is running in this thread; -1: none is."""

is_graph_kept: Callable[[], bool]
is_graph_kept = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", lambda: True)
"""Whether the backward pass now running leaves its graph to be gone through once more."""

OnCall = Callable[[Any, Any, Any], None]
"""Called with a module's positional and keyword arguments, and what it returned."""


_nature = attrgetter("requires_grad", "dtype", "device")


@dataclass(eq=False, slots=True)
class Site:
    """Where a recorded layer is called: its module, and its parameters as they were at last."""

    layer: Layer
    module: nn.Module
    padding: int | None
    is_given: bool
    """Whether no key of it was ever computed by training."""
    is_alone: bool
    """Whether its keys are kept without error signals."""
    is_known: bool = False
    """Whether a backward pass has come to it since its parameters became what they are."""
    weight: Tensor | None = None
    bias: Tensor | None = None
    nature: tuple[Any, ...] = ()
    nodes: tuple[Node, ...] = ()
    """The graph's nodes that add to the `.grad` of those that are trained."""


class Capture:
    """Calls `on_patterns` for every use of a recorded layer that a backward pass goes through.

    `context` is asked at every forward call and its answer handed on with the patterns: what is
    true of the input when it is fed (its tags) may no longer be when it is differentiated.
    """

    def __init__(
        self,
        layers: Mapping[Layer, nn.Module],
        context: Callable[[Layer], Any],
        on_patterns: OnPatterns,
        keeps_error_signals: Callable[[Layer], bool] = lambda layer: True,
    ) -> None:
        self._sites = {
            id(module): Site(
                layer,
                module,
                getattr(module, "padding_idx", None),
                is_given=layer.kind == "linear",
                is_alone=not keeps_error_signals(layer),
            )
            for layer, module in layers.items()
            if is_recordable(module)  # else it is a weight that other code uses
        }
        self.context = context
        self.on_patterns = on_patterns
        self.needs_error_signals = True
        """Whether those that are not kept may be looked at: then they must be final."""
        self._active, self._copies = True, Copies()
        self._pass, self._is_kept = -1, True  # the last backward pass, and whether its graph is
        self._forgotten: set[Layer] = set()
        self._given = {site.layer for site in self._sites.values() if site.is_given}
        self.others: dict[int, OnCall] = {}
        """Other modules to look at, by identity, and who does."""
        self.mark: Callable[[Node], None] | None = None
        """If asked for: told the graph's node of every output seen."""
        self._nodes: dict[int, tuple[Tensor, tuple[torch.dtype, torch.device], Node]] = {}
        for module in layers:
            for parameter in layers[module].parameters():
                if parameter.requires_grad:  # now: inside torch.func transforms it cannot be asked
                    self.node(parameter)
        self._handle = torch_module.register_module_forward_hook(self._forward, with_kwargs=True)

    def forget(self, layer: Layer) -> None:
        """Stop looking at a layer."""
        self._sites = {k: site for k, site in self._sites.items() if site.layer != layer}
        self._forgotten.add(layer)

    def wants(self, layer: Layer) -> bool:
        """Whether patterns of the layer are still of interest."""
        return self._active and layer not in self._forgotten

    def is_used_past_its_module(self, layer: Layer) -> None:
        """A use that no module's call shows: whether its keys were computed is not known."""
        self._given.discard(layer)

    def is_given(self, layer: Layer) -> bool:
        """Whether training never computed any of the layer's keys: they may come again."""
        return layer in self._given

    def node(self, parameter: Tensor) -> Node:
        """The graph's node that adds to this parameter's `.grad`; kept, for asking is slow."""
        known = self._nodes.get(id(parameter))
        nature = parameter.dtype, parameter.device
        if known is None or known[0] is not parameter or known[1] != nature:
            node = get_gradient_edge(parameter).node
            known = parameter, nature, node
            if parameter.is_leaf:  # others come and go
                self._nodes[id(parameter)] = known
        return known[2]

    def remove(self) -> None:
        """Take the hook away; outputs that are still alive fall silent."""
        self._active = False
        self._nodes = {}
        self._handle.remove()
        # torch's handle forgets this one of its own tables
        getattr(torch_module, "_global_forward_hooks_with_kwargs", {}).pop(self._handle.id, None)

    def _forward(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        site = self._sites.get(id(module))
        if site is None:
            other = self.others.get(id(module))
            if other is not None:
                other(args, kwargs, output)
            return
        made_by = output.grad_fn if isinstance(output, Tensor) else None
        if made_by is None:
            return
        parameters = module._parameters
        weight, bias = parameters.get("weight"), parameters.get("bias")
        if weight is None:
            if "weight" not in parameters:
                refuse_parametrized(site.layer, "weight")
            return
        nature = _nature(weight) if bias is None else _nature(weight) + _nature(bias)
        if weight is not site.weight or bias is not site.bias or nature != site.nature:
            if bias is None and site.layer.bias is not None and "bias" not in parameters:
                refuse_parametrized(site.layer, "bias")
            trained = (p for p in (weight, bias) if p is not None and p.requires_grad)
            site.nodes = tuple(map(self.node, trained))
            site.bias, site.nature, site.is_known = bias, nature, False
            site.weight = weight if weight.is_leaf else None  # else it is looked at every time
        if not site.nodes:
            return
        given = args[0] if args else kwargs["input"]
        if site.is_given and given.requires_grad:
            site.is_given = False
            self._given.discard(site.layer)
        key, dtype = given, given.dtype
        if site.layer.kind == "linear":
            is_guarded = weight.requires_grad and (given.dim() < 3 or given.is_contiguous())
            if is_any_autocast_on() and torch.is_autocast_enabled(given.device.type):
                dtype = output.dtype  # the kernel multiplied a rounded input
        else:
            is_guarded = True
        if not is_guarded or (hooks_on_saving(True) is not None and running_pass() == -1):
            key = self._copies.of(given, dtype)
        elif dtype != given.dtype:
            key = given.detach().to(dtype)
        # else as it is, with its graph: that costs a call less, and ends with this one's
        if self.mark is not None:
            self.mark(made_by)
        context = self.context(site.layer)
        # of a frozen weight the graph keeps nothing, so it may be gone through any number of times
        held = [key] if weight.requires_grad else (key,)
        if site.is_alone and site.is_known and not self.needs_error_signals:
            hook_early(made_by, partial(self._backward_early, site, site.nodes, held, context))
        else:
            made_by.register_prehook(partial(self._backward, site, site.nodes, held, context))

    def _backward_early(
        self,
        site: Site,
        nodes: tuple[Node, ...],
        keys: list[Tensor] | tuple[Tensor],
        context: Any,
        error_signal: Tensor | None,
    ) -> None:
        """The same where only keys count: hooks on the output may still change the rest."""
        self._backward(site, nodes, keys, context, (error_signal,))

    def _backward(
        self,
        site: Site,
        nodes: tuple[Node, ...],
        keys: list[Tensor] | tuple[Tensor],
        context: Any,
        error_signals: tuple[Tensor | None, ...],
    ) -> None:
        """The node that made a layer's output is about to be gone through, backward."""
        layer, error_signal = site.layer, error_signals[0]
        if error_signal is None or (self._forgotten and layer in self._forgotten) or not keys:
            return
        if not self._active or not any(map(will_accumulate, nodes)):
            return
        key, kind = keys[0], layer.kind
        running, site.is_known = running_pass(), True
        if running != self._pass:
            self._pass, self._is_kept = running, is_graph_kept()
        if not self._is_kept and isinstance(keys, list):
            keys.clear()  # the loop may hold on to its loss, and so to this hook
        shape: tuple[int, ...]
        if site.padding is not None:
            error_signal = without_padding(error_signal, key.detach(), site.padding)
        size = key.shape
        if kind == "linear" and len(size) == 2 and not error_signal.requires_grad:
            patterns, shape = (key, error_signal), (size[0],)  # the usual case
        else:
            key = key.detach()
            patterns = as_patterns(kind, key), flattened(error_signal)
            shape = leading_shape(kind, key)
        self.on_patterns(layer, *patterns, shape, context, running)


_will_execute = torch._C._will_engine_execute_node


def will_accumulate(node: Node) -> bool:
    """Whether the backward pass now running will add to this parameter's `.grad`."""
    try:
        return bool(_will_execute(node))
    except RuntimeError:  # torch.autograd.grad asked for this very parameter: nothing is added
        return False
