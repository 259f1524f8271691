"""The hooks: where keys and error signals are seen.

One global forward hook looks at every call of a recorded layer; a hook on the graph's node that
made the output then receives the error signal in the backward pass, together with the key it
belongs to. Hooks on the modules themselves would switch off torch's fast path of
`nn.TransformerEncoder`; full backward hooks see the output after an activation in place. A pattern
exists only if its gradient really reaches the parameter's `.grad`: `torch.autograd.grad` for a
saliency map leaves none.

The layer's input is held as it is where autograd refuses to go on if it is changed in place before
the backward pass. Elsewhere such a change is legal, so the key is copied at the call: where
autograd saves nothing (a frozen weight), a copy (positions that do not lie in one piece), or what
hooks on saved tensors make of it (an activation checkpoint, `save_on_cpu`).

Why it is hard: both hooks run for every layer of every step on the training thread, so each line of
them is paid for; and they must leave nothing behind, not even a key that a kept loss keeps alive.
Weights used past their modules are found by `walk.py`, which hands on what it sees here.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node, get_gradient_edge
from torch.nn.modules import module as torch_module

from dualform.layers import kinds, opaque, torch_internals
from dualform.layers.kinds import Kind
from dualform.layers.layer import Layer
from dualform.layers.torch_internals import (
    hooks_on_saving,
    is_view,
    keeps_graph,
    running_pass,
    will_run,
)
from dualform.layers.walk import GraphWalk

OnUse = Callable[[Layer, Tensor, Tensor, tuple[int, ...], Any, int], None]
"""Called with layer, keys, error signals, leading shape, context and layout, for every use that the
running backward pass goes through. Keys and error signals are rows (of a layer kept by examples as
they were given) and may be part of a graph: use them under `torch.no_grad`."""


@dataclass(eq=False, slots=True)
class CallSite:
    """Where a recorded layer is called: its module, and its parameters as they were at last."""

    layer: Layer
    kind: Kind
    module: nn.Module
    by_examples: bool
    casts: bool
    """Whether its key is what the product multiplied with: under autocast the input, rounded."""
    below_views: bool
    refuses: Callable[[nn.Module], str | None] | None
    is_on: bool = True
    weight: Tensor | None = None
    nodes: tuple[Node, ...] = ()
    """The graph's nodes that add to the `.grad` of those of its parameters that are trained."""


class Capture:
    """Calls `on_use` for every use of a recorded layer that a backward pass goes through.

    `context` is asked at every forward call and its answer handed on with the patterns: what is
    true of the input when it is fed (its tags) may no longer be when it is differentiated.
    `on_new_layer` is asked whether a layer is wanted that functional code makes of a weight;
    `on_values` hears of parameters that are used in a way without patterns, and why;
    `by_examples` says which layers are handed on as they were given.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: Mapping[Layer, nn.Module],
        *,
        on_use: OnUse,
        on_new_layer: Callable[[Layer], bool],
        on_values: Callable[[str, str], None],
        context: Callable[[], Any],
        by_examples: Callable[[Layer], bool] = lambda layer: False,
    ) -> None:
        self.model = model
        self.layers: dict[Layer, nn.Module | None] = dict(layers)
        """Those of interest, with their modules; None: code past all modules makes it."""
        self.on_use, self.context, self.by_examples = on_use, context, by_examples
        self.are_values: set[str] = set()
        self._wants, self._tell = on_new_layer, on_values
        self._sites: dict[int, CallSite | Callable[[Any, Any, Any], None]] = {}
        self._handle: Any = None
        self._walk = GraphWalk(self)
        self._copies = _Copies()
        self._nodes: dict[int, tuple[Tensor, torch.dtype, torch.device, Node]] = {}

    def start(self) -> None:
        """Hang up the hooks; they hang until `remove`."""
        if self._handle is not None:
            return
        for layer, module in self.layers.items():
            kind = kinds.of(layer.kind)
            if module is not None and kind.recognises(module):
                refuses = None if type(kind).refuses is Kind.refuses else kind.refuses
                is_key = kind.key_dtype is None, kind.hooks_below_views
                site = CallSite(layer, kind, module, self.by_examples(layer), *is_key, refuses)
                self._renew(site)
                self._sites[id(module)] = site
        self._sites.update(self._walk.attentions())
        self._handle = torch_module.register_module_forward_hook(self._forward, with_kwargs=True)
        self._walk.start()

    def remove(self) -> None:
        """Take all hooks away; outputs that are still alive fall silent."""
        if self._handle is not None:
            torch_internals.take_away(self._handle)
        for site in self._sites.values():
            if isinstance(site, CallSite):
                site.is_on = False
        self._walk.remove()
        self._handle, self._sites, self._nodes, self._copies = None, {}, {}, _Copies()

    def next_step(self) -> None:
        """A step is over. After the first, whole graphs are read only if there is a reason to."""
        self._walk.next_step()

    def forget(self, layer: Layer) -> None:
        """Stop looking at a layer."""
        module = self.layers.pop(layer, None)
        site = self._sites.pop(id(module), None)
        if isinstance(site, CallSite):
            site.is_on = False

    def is_on(self, layer: Layer) -> bool:
        """Whether patterns of the layer are still of interest."""
        return self._handle is not None and layer in self.layers

    def add(self, layer: Layer) -> None:
        """Code past all modules has made a layer: look at it if it is wanted."""
        if self._wants(layer):
            self.layers[layer] = None

    def make_values(self, parameter: str, reason: str) -> None:
        """A parameter is used in a way without patterns: say so, once, and forget its layers.

        Their biases then have none either, but for those that other layers have. A bias that is
        itself used so leaves its layer alone: the weight's patterns are complete.
        """
        if parameter in self.are_values:
            return
        self.are_values.add(parameter)
        own = [layer for layer in self.layers if layer.weight == parameter]
        for layer in own:
            self.forget(layer)
        self._tell(parameter, reason)
        for bias in {layer.bias for layer in own if layer.bias is not None}:
            if all(layer.bias != bias for layer in self.layers):
                self.make_values(bias, f"belongs to {parameter!r}, which {reason}")

    def node_of(self, parameter: Tensor) -> Node:
        """The graph's node that adds to this parameter's `.grad`; kept, for asking is slow."""
        known = self._nodes.get(id(parameter))
        nature = parameter.dtype, parameter.device
        if known is None or known[0] is not parameter or known[1:3] != nature:
            known = (parameter, *nature, get_gradient_edge(parameter).node)
            self._nodes[id(parameter)] = known
        return known[3]

    # -- the hot path ---------------------------------------------------------------

    def _forward(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        site = self._sites.get(id(module))
        if site is None:
            return
        if type(site) is not CallSite:
            site(args, kwargs, output)  # type: ignore[operator]
            return
        made_by = getattr(output, "grad_fn", None)
        if made_by is None:
            return
        weight = module._parameters.get("weight")
        if (weight is not site.weight or not site.nodes) and not self._is_renewed(site):
            return
        if running_pass() != -1:  # a checkpoint computes its part once more
            if hooks_on_saving(True) is None:
                self.make_values(site.layer.weight, opaque.REENTRANT)
            return
        if site.refuses is not None and (reason := site.refuses(module)) is not None:
            made_by.register_prehook(partial(self._refused, site, reason))
            return
        is_trained = weight.requires_grad  # type: ignore[union-attr]
        given = args[0] if args else next(iter(kwargs.values()))
        dtype = output.dtype if site.casts else given.dtype
        if (
            not is_trained
            or hooks_on_saving(True) is not None
            or (given.dim() > 2 and not given.is_contiguous())
        ):
            key = self._copies.of(given, dtype)
        elif dtype is not given.dtype:
            key = given.detach().to(dtype)  # the kernel multiplied a rounded input
        else:
            key = given  # with its graph: a call less, and that ends with this one's
        if site.below_views and is_view(output):
            made_by = made_by.next_functions[0][0]
        if self._walk.is_reading:
            self._walk.mark(made_by)
        # of a frozen weight the graph keeps nothing, so it may be gone through any number of times
        held = [key] if is_trained else (key,)
        made_by.register_prehook(partial(self._backward, site, held, self.context()))

    def _refused(self, site: CallSite, reason: str, signals: Any) -> None:
        """A pass goes through a call that has no patterns; evaluating alone does no harm."""
        if any(map(will_run, site.nodes)):
            self.make_values(site.layer.weight, reason)

    def _backward(
        self,
        site: CallSite,
        held: list[Tensor] | tuple[Tensor],
        context: Any,
        signals: tuple[Tensor | None, ...],
    ) -> None:
        """The node that made a layer's output is about to be gone through, backward."""
        signal = signals[0]
        if signal is None or not site.is_on or not held:
            return
        if not will_run(site.nodes[0]) and not self._reaches_another(site):
            return
        key = held[0]
        if type(held) is list and not keeps_graph():
            held.clear()  # the loop may hold on to its loss, and so to this hook
        if signal.requires_grad:
            key, signal = key.detach(), signal.detach()
        try:
            lies_plainly = signal.is_contiguous() and key.is_contiguous()
        except RuntimeError:  # some sparse ones cannot be asked
            lies_plainly = False
        if not lies_plainly and (key.layout is not torch.strided or key.is_nested):
            self.make_values(site.layer.weight, opaque.NOT_STRIDED)
            return
        layout = 0 if lies_plainly else site.kind.layout(key, signal)
        if site.by_examples:
            shape = site.kind.leading(key)
            if signal.dim() < key.dim():  # that of a product below a view
                signal = signal.view(*shape, signal.shape[-1])
            self.on_use(site.layer, key, signal, shape, context, layout)
        else:
            self.on_use(site.layer, *site.kind.rows(site.layer, key, signal), context, layout)

    # -- what is rare ---------------------------------------------------------------

    def _renew(self, site: CallSite) -> None:
        """Look up a layer's parameters anew, and the nodes of those that are trained."""
        found = map(site.module._parameters.get, ("weight", "bias"))
        leaves = [p for p in found if p is not None and p.is_leaf]
        site.weight = site.module._parameters.get("weight")
        site.nodes = tuple(self.node_of(p) for p in leaves if p.requires_grad)

    def _is_renewed(self, site: CallSite) -> bool:
        """Whether parameters that are not those of before, or were frozen, are trained now."""
        weight = site.module._parameters.get("weight")
        if torch_internals.functorch_level() is not None:
            return False
        if weight is None or not weight.is_leaf:
            self.make_values(site.layer.weight, opaque.REPLACED)
            return False
        self._renew(site)
        return bool(site.nodes)

    def _reaches_another(self, site: CallSite) -> bool:
        """Whether the pass adds to a bias alone, or to parameters that were moved since.

        A parameter moved to another device or type has another node.
        """
        if any(map(will_run, site.nodes[1:])):
            return True
        before = site.nodes
        self._renew(site)
        return site.nodes != before and any(map(will_run, site.nodes))


class _Copies:
    """Copies of inputs that may legally be changed in place before the backward pass.

    Layers that are fed the same tensor one after the other share one, as the projections of
    attention: where a checkpoint is to save memory, that counts.
    """

    def __init__(self) -> None:
        self._last: tuple[weakref.ref[Tensor], int, weakref.ref[Tensor]] | None = None

    def of(self, given: Tensor, dtype: torch.dtype) -> Tensor:
        """The tensor as it is now, without its graph; not to be written to."""
        version, last = torch_internals.version_of(given), self._last
        if last is not None and last[0]() is given and version == last[1] != -1:
            known = last[2]()
            if known is not None and known.dtype == dtype:
                return known
        copy = given.detach().to(dtype, copy=True)
        self._last = weakref.ref(given), version, weakref.ref(copy)
        return copy
