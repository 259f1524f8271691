"""The hooks: where keys and error signals are seen.

One global forward hook looks at every call of a recorded layer (hooks on the modules would switch
off torch's fast path of `nn.TransformerEncoder`). A hook on the graph's node that made the output
then receives the error signal in the backward pass, together with the key it belongs to. A pattern
exists only if its gradient really reaches the parameter's `.grad`: `torch.autograd.grad` for a
saliency map leaves none.

The layer's input is held as it is where autograd refuses to go on if it is changed in place, else
copied: where autograd saves nothing (a frozen weight), a copy (positions that do not lie in one
piece), or what hooks on saved tensors make of it (an activation checkpoint, `save_on_cpu`).

Why it is hard: both hooks run for every layer of every step on the training thread, so each line of
them is paid for; and they must leave nothing behind, not even a key that a kept loss keeps alive.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node, get_gradient_edge
from torch.nn.modules import module as torch_module

from dualform.layers import finding, kinds, torch_internals
from dualform.layers.kinds import Kind
from dualform.layers.layer import Layer
from dualform.layers.linear import EXCHANGED
from dualform.layers.torch_internals import hooks_on_saving, keeps_graph, running_pass, will_run
from dualform.layers.uses import UNFOLDED, Use
from dualform.layers.walk import GraphWalk

OnUse = Callable[[Layer, Tensor, Tensor, tuple[int, ...], Any, int], None]
"""Called with layer, keys, error signals, leading shape, context and layout. Both are rows (by
examples: as they were given) and may be part of a graph: use them under `torch.no_grad`."""
Returned = Callable[[nn.Module, Any, Any, Any], None]  # given a module, its arguments, its output
Key = Tensor | Callable[[], Tensor]


@dataclass(eq=False, slots=True)
class CallSite:
    """A recorded layer where it is used, and its parameters as they were at last."""

    layer: Layer
    kind: Kind
    by_examples: bool
    places: list[tuple[nn.Module, str]]  # which modules have its weight and bias, and as what
    is_on: bool = True
    weight: Tensor | None = None
    nature: tuple[torch.dtype, torch.device] | None = None
    nodes: tuple[Node, ...] = ()
    """What adds to the `.grad` of its trained parameters: another where one was moved or cast."""

    def renew(self) -> None:
        """Look up the parameters anew."""
        found = [module._parameters.get(name) for module, name in self.places]
        leaves = [p for p in found if p is not None and p.is_leaf and p.requires_grad]
        self.weight, self.nodes = found[0], tuple(get_gradient_edge(p).node for p in leaves)
        self.nature = None if found[0] is None else (found[0].dtype, found[0].device)


class Capture:
    """Calls `on_use` for every use of a recorded layer that a backward pass goes through.

    `context` is asked at every forward call, since tags may change before the backward pass.
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
        self.are_values = finding.kept_short(model)
        self._wants, self._tell = on_new_layer, on_values
        self._called: dict[int, Returned] = {}
        self._sites: dict[Layer, CallSite] = {}
        self._handle: Any = None
        self._walk = GraphWalk(self)

    def start(self) -> None:
        """Hang up the hooks; they hang until `remove`."""
        if self._handle is not None:
            return
        self._called.update(self._walk.attentions())
        for layer, module in self.layers.items():
            if module is not None and kinds.of(layer.kind).recognises(module):
                self._called[id(module)] = partial(self._returned, self._site(layer, module))
        self._handle = torch_module.register_module_forward_hook(self._forward, with_kwargs=True)
        self._walk.start()

    def remove(self) -> None:
        """Take all hooks away; outputs that are still alive fall silent."""
        if self._handle is not None:
            torch_internals.take_away(self._handle)
        for site in self._sites.values():
            site.is_on = False
        self._walk.remove()
        self._handle, self._called, self._sites = None, {}, {}

    def next_step(self) -> None:
        """A step is over. After the first, whole graphs are read only if there is a reason to."""
        self._walk.next_step()

    def add(self, layer: Layer) -> None:
        """Code past all modules has made a layer: look at it if it is wanted."""
        if not self.are_values & set(layer.parameters) and self._wants(layer):
            self.layers[layer] = None

    def make_values(self, parameter: str, reason: str) -> None:
        """A parameter is used in a way without patterns: say so, once, and forget its layers and
        their biases. A bias that is itself used so leaves its layer: the weight's are complete."""
        if parameter in self.are_values:
            return
        self.are_values.add(parameter)
        own = [layer for layer in self.layers if layer.weight == parameter]
        for layer in own:
            self._called.pop(id(self.layers.pop(layer)), None)
            if layer in self._sites:
                self._sites.pop(layer).is_on = False
        self._tell(parameter, reason)
        for bias in {layer.bias for layer in own if layer.bias is not None}:
            if all(layer.bias != bias for layer in self.layers):
                self.make_values(bias, reason)

    def hang(self, layer: Layer, use: Use, key: Key, batch: int) -> None:
        """Report a use past its module when a pass goes through it; `batch`: of so many examples of
        an attention that was given the batch first."""
        if self._handle is not None and layer in self.layers:
            site = self._sites.get(layer) or self._site(layer, None)
            site.renew()
            with_it = [key], self.context(), use.shape, batch
            use.end.register_prehook(partial(self._backward, site, site.nodes, *with_it))

    def _site(self, layer: Layer, module: nn.Module | None) -> CallSite:
        names = [name.rpartition(".") for name in layer.parameters]
        places = [(self.model.get_submodule(place), own) for place, _, own in names]
        if module is not None:
            places = [(module, "weight"), (module, "bias")]
        site = CallSite(layer, kinds.of(layer.kind), self.by_examples(layer), places)
        return self._sites.setdefault(layer, site)

    def _is_trained(self, site: CallSite) -> bool:
        """Whether parameters that are not those of before, or were frozen, are trained now."""
        if torch_internals.functorch_level() is not None:
            return False
        site.renew()
        if site.weight is None or not site.weight.is_leaf:
            self.make_values(site.layer.weight, finding.REPLACED)
            return False
        return bool(site.nodes)

    # -- the hot path ---------------------------------------------------------------

    def _forward(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        returned = self._called.get(id(module))
        if returned is not None:
            returned(module, args, kwargs, output)

    def _returned(
        self, site: CallSite, module: nn.Module, args: Any, kwargs: Any, output: Any
    ) -> None:
        """A module that is a layer returns."""
        made_by = getattr(output, "grad_fn", None)
        if made_by is None:
            return
        weight: Any = module._parameters.get("weight")
        is_same = weight is site.weight is not None
        is_same = is_same and site.nature == (weight.dtype, weight.device)
        if not (is_same and site.nodes) and not self._is_trained(site):
            return
        if running_pass() != -1:  # a checkpoint computes its part once more
            if hooks_on_saving(True) is None:
                self.make_values(site.layer.weight, finding.REENTRANT)
            return
        if (reason := site.kind.refuses(module)) is not None:
            made_by.register_prehook(partial(self._refused, site, reason))
            return
        is_trained = weight.requires_grad
        key = args[0] if args else next(iter(kwargs.values()))
        dtype = output.dtype if site.kind.key_dtype is None else key.dtype  # as the kernel rounds
        is_guarded = is_trained and hooks_on_saving(True) is None
        if not is_guarded or (key.ndim > 2 and not key.is_contiguous()):
            key = torch_internals.detached(key, dtype, copy=True)
        elif dtype is not key.dtype:
            key = torch_internals.detached(key, dtype)
        shape = None
        if (
            key.ndim != 2 and made_by.name() in UNFOLDED
        ):  # an activation in place would cut it off its product
            made_by, shape = made_by.next_functions[0][0], output.shape
        if self._walk.handles:
            self._walk.mark(made_by)
        # of a frozen weight the graph keeps nothing, so it may be gone through any number of times
        held = [key] if is_trained else (key,)
        hook = partial(self._backward, site, site.nodes, held, self.context(), shape, 0)
        made_by.register_prehook(hook)

    def _refused(self, site: CallSite, reason: str, signals: Any) -> None:
        """A pass goes through a call that has no patterns; evaluating alone does no harm."""
        if any(map(will_run, site.nodes)):
            self.make_values(site.layer.weight, reason)

    def _backward(
        self,
        site: CallSite,
        nodes: tuple[Node, ...],
        held: list[Key] | tuple[Tensor],
        context: Any,
        shape: tuple[int, ...] | None,
        batch: int,
        signals: tuple[Tensor | None, ...],
    ) -> None:
        """A node that makes a layer's output is about to be gone through, backward."""
        signal = signals[0]
        if signal is None or not site.is_on or not held or not any(map(will_run, nodes)):
            return
        key = held[0] if isinstance(held[0], Tensor) else held[0]()
        if type(held) is list and not keeps_graph():
            held.clear()  # the loop may hold on to its loss, and so to this hook
        if signal.requires_grad:
            key, signal = key.detach(), signal.detach()
        if not (key.layout is signal.layout is torch.strided) or key.is_nested:
            self.make_values(site.layer.weight, finding.NOT_STRIDED)
            return
        if batch:  # inside, positions come first
            key, signal = (t.reshape(-1, batch, t.shape[-1]).transpose(0, 1) for t in (key, signal))
        elif shape is not None:
            key, signal = key.reshape(*shape[:-1], key.shape[-1]), signal.reshape(shape)
        layout = 0
        if not (signal.is_contiguous() and key.is_contiguous()):
            layout = site.kind.layout(key, signal) + EXCHANGED * (batch > 0)
        if site.by_examples:
            self.on_use(site.layer, key, signal, site.kind.leading(key), context, layout)
        else:
            rows, signal, over = site.kind.rows(site.layer, key, signal)
            if key.requires_grad and not rows.requires_grad:  # a copy
                rows.requires_grad_()
            self.on_use(site.layer, rows, signal, over, context, layout)
