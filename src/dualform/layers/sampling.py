"""How many patterns each layer will see in a step, told by feeding the model one sample batch."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from dualform.errors import DualFormError
from dualform.layers.choosing import NamePatterns, chosen_names
from dualform.layers.linear import Layer, find_layers

Calls = list[tuple[int, ...]]
"""The leading shapes of a layer's inputs in one step, one per call."""


def trained_layers(model: nn.Module, chosen: NamePatterns) -> dict[Layer, nn.Module]:
    """The recordable layers that were chosen and of which anything is trained."""
    found = find_layers(model)
    names = chosen_names((layer.name for layer in found), chosen, "layers")
    return {
        layer: module
        for layer, module in found.items()
        if layer.name in names and any(p.requires_grad for p in module.parameters(recurse=False))
    }


def count_calls(
    model: nn.Module, layers: Mapping[Layer, nn.Module], inputs: Any, batch: int
) -> tuple[dict[Layer, Calls], set[Layer]]:
    """The leading shape of every call of every layer, scaled from the sample to the batch.

    And the layers that are fed with what training does not compute: the inputs.
    """
    positional, named = _as_arguments(inputs)
    given_layers = set(layers)
    seen: dict[Layer, Calls] = {layer: [] for layer in layers}
    sample = next((t.shape[0] for t in [*positional, *named.values()] if _has_rows(t)), 0)
    if not sample:
        raise DualFormError(
            "the sample inputs hold no tensor with examples along its first dimension; give a "
            "batch as the model takes it: a tensor, a tuple of them, or a dict of keyword arguments"
        )

    def hook(layer: Layer) -> Any:
        def count(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            given = args[0] if args else kwargs["input"]
            if given.requires_grad:
                given_layers.discard(layer)
            first, *rest = given.shape[:-1] or (1,)
            seen[layer].append((math.ceil(first * batch / sample), *rest))

        return count

    with ExitStack() as stack:
        stack.enter_context(_undisturbed(model))
        for layer, module in layers.items():
            handle = module.register_forward_pre_hook(hook(layer), with_kwargs=True)
            stack.callback(handle.remove)
        copies = {name: buffer.clone() for name, buffer in model.named_buffers()}
        torch.func.functional_call(model, copies, positional, named)
    return {layer: shapes for layer, shapes in seen.items() if shapes}, given_layers


def _as_arguments(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    return (tuple(inputs), {}) if isinstance(inputs, (tuple, list)) else ((inputs,), {})


def _has_rows(value: Any) -> bool:
    return isinstance(value, Tensor) and value.ndim > 0 and value.shape[0] > 0


@contextmanager
def _undisturbed(model: nn.Module) -> Iterator[None]:
    """Eval mode; every module's mode and the random states are put back."""
    modes = [(module, module.training) for module in model.modules()]
    devices = {p.device for p in model.parameters() if p.device.type == "cuda"}
    state = random.getstate()
    try:
        with torch.enable_grad(), torch.random.fork_rng(devices=list(devices)):
            model.eval()
            yield
    finally:
        random.setstate(state)
        for module, training in modes:
            module.training = training
