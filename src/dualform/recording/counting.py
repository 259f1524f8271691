"""How many patterns each layer will have per step: counted on a sample batch, or assumed.

The model is run on the sample once, with gradients on and nothing differentiated, and its uses of
weights are found as recording finds them: calls of modules by hooks, all others in the graph.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node, get_gradient_edge
from torch.optim import Optimizer

from dualform.errors import DualFormError
from dualform.layers import Layer, NamePatterns, is_chosen, leading_shape
from dualform.layers.fast_path import layer_by_layer
from dualform.layers.naming import identity_of, identity_of_use, layer_of
from dualform.layers.uses import Graph, Use, tensors_in
from dualform.recording.graph import parameters_in
from dualform.recording.parameters import parameters_of

Calls = list[tuple[int, ...]]
"""The leading shapes of a layer's inputs in one step, one per call."""


T = TypeVar("T")


def trained_by(
    optimizer: Optimizer | None, model: nn.Module, layers: dict[Layer, T]
) -> dict[Layer, T]:
    """Those of the layers that the optimizer has a parameter of; all, if it is not known."""
    names = names_of_trained(optimizer, model)
    return {la: value for la, value in layers.items() if not names.isdisjoint(la.parameters)}


def names_of_trained(optimizer: Optimizer | None, model: nn.Module) -> set[str]:
    """The parameters that will move: those that the optimizer has, and that have gradients."""
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    given = set(map(id, trained.values() if optimizer is None else parameters_of(optimizer)))
    return {name for name, parameter in trained.items() if id(parameter) in given}


def count_calls(
    model: nn.Module,
    layers: Mapping[Layer, nn.Module],
    inputs: Any,
    batch: int,
    chosen: NamePatterns = None,
) -> tuple[dict[Layer, Calls], set[Layer]]:
    """The leading shape of every use of every layer, scaled from the sample to the batch.

    And the layers that are fed with what training does not compute: the inputs. `layers` are
    modules; those without one are found, and kept if they are chosen.
    """
    positional, named = _as_arguments(inputs)
    sample = next((t.shape[0] for t in [*positional, *named.values()] if _has_rows(t)), 0)
    if not sample:
        raise DualFormError(
            "the sample inputs hold no tensor with examples along its first dimension; give a "
            "batch as the model takes it: a tensor, a tuple of them, or a dict of keyword arguments"
        )
    count = _Count(layers, batch, sample)
    with _undisturbed(model):
        with ExitStack() as stack:
            for layer, module in layers.items():
                handle = module.register_forward_hook(count.hook(layer), with_kwargs=True)
                stack.callback(handle.remove)
            copies = {name: buffer.clone() for name, buffer in model.named_buffers()}
            output = torch.func.functional_call(model, copies, positional, named)
        count.read(model, output, chosen)  # without hooks: a checkpoint may run its part again
    calls = {layer: shapes for layer, shapes in count.calls.items() if shapes}
    return calls, {la for la in calls if la.kind == "linear" and la not in count.computed}


class _Count:
    """The uses of one forward pass."""

    def __init__(self, layers: Mapping[Layer, nn.Module], batch: int, sample: int) -> None:
        self.calls: dict[Layer, Calls] = {layer: [] for layer in layers}
        self.computed: set[Layer] = set()
        """Layers whose keys training computes, or may have computed."""
        self._batch, self._sample = batch, sample
        self._seen: set[Node] = set()

    def hook(self, layer: Layer) -> Callable[..., None]:
        def count(module: nn.Module, args: Any, kwargs: Any, output: Tensor) -> None:
            given = args[0] if args else kwargs["input"]
            if given.requires_grad:
                self.computed.add(layer)
            shape = leading_shape(layer.kind, given)
            first, *rest = shape or (1,)
            if layer.kind != "embedding" or not first % self._sample:  # else positions, for one
                first = math.ceil(first * self._batch / self._sample)
            self.calls[layer].append((first, *rest))
            if output.grad_fn is not None:
                self._seen.add(output.grad_fn)

        return count

    def read(self, model: nn.Module, output: Any, chosen: NamePatterns) -> None:
        """Add what is in the graph and in no module's call; take out what has no patterns."""
        fused = parameters_in(model, nn.RNNBase)
        trained = {
            name: parameter
            for name, parameter in model.named_parameters()
            if parameter.requires_grad and name not in fused
        }
        leaves = {get_gradient_edge(p).node: (n, tuple(p.shape)) for n, p in trained.items()}
        known = {identity_of(layer): layer for layer in reversed(list(self.calls))}
        unknown = set()
        for use in Graph(tensors_in(output)).uses(leaves):
            if self._seen & {*use.nodes}:
                continue
            if not isinstance(use, Use) or not use.key.can_be_read:
                unknown.add(use.parameter)
                continue
            shape = tuple(trained[use.parameter].shape)
            names = {layer.name for layer in known.values()}
            layer = known.setdefault(identity_of_use(use), layer_of(use, model, shape, names))
            self.computed.add(layer)
            if is_chosen(layer.name, chosen):
                self.calls.setdefault(layer, []).append(self._shape_of(use))
            else:
                unknown.add(layer.weight)
        for layer in [la for la in self.calls if unknown & {*la.parameters}]:
            del self.calls[layer]

    def _shape_of(self, use: Use) -> tuple[int, ...]:
        """Of a use without a module only the number of patterns is known: so many per example."""
        rows = len(use.key.read())
        if rows % self._sample:
            return (math.ceil(rows * self._batch / self._sample),)
        each = rows // self._sample
        return (self._batch, each) if each > 1 else (self._batch,)


def _as_arguments(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    return (tuple(inputs), {}) if isinstance(inputs, (tuple, list)) else ((inputs,), {})


def _has_rows(value: Any) -> bool:
    return isinstance(value, Tensor) and value.ndim > 0 and value.shape[0] > 0


@contextmanager
def _undisturbed(model: nn.Module) -> Iterator[None]:
    """Eval mode with gradients on; every module's mode and the random states are put back."""
    modes = [(module, module.training) for module in model.modules()]
    devices = {p.device for p in model.parameters() if p.device.type == "cuda"}
    state = random.getstate()
    try:
        with (
            torch.enable_grad(),
            torch.random.fork_rng(devices=list(devices)),
            layer_by_layer(),
        ):
            model.eval()
            yield
    finally:
        random.setstate(state)
        for module, training in modes:
            module.training = training
