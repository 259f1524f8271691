"""What cannot be looked into is refused by name, before training begins or at first use.

Patterns are seen where a weight meets its input. A fused recurrent kernel, a compiled function or a
parametrization hides that meeting; a reentrant activation checkpoint shows it in a backward pass of
its own, whose patterns would belong to no micro-batch. Their gradients are still exact, so whoever
wants them accounted for step by step can have that: by choosing with `layers=` the layers that are
to have patterns, and leaving these out. Nothing is left out without having been asked for.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn
from torch.nn.utils import parametrize

from dualform.errors import RecordingError
from dualform.layers import ROOT_NAME, Layer, NamePatterns, find_layers, is_chosen

LAYERS = (nn.Linear, nn.Embedding, nn.MultiheadAttention)
"""Modules that have patterns, as long as nothing is done to their weights."""


def refuse_opaque(model: nn.Module, chosen: NamePatterns) -> None:
    """Raise `RecordingError` naming the first module that hides its patterns, if it is chosen."""
    for name, why in opaque_modules(model):
        inside = {
            f"{name}.{inner}".strip(".") for inner, _ in model.get_submodule(name).named_modules()
        }
        if chosen is None or any(is_chosen(one or ROOT_NAME, chosen) for one in inside):
            raise RecordingError(f"module {name or ROOT_NAME!r} {why}. {_what_to_do(model)}")


def opaque_modules(model: nn.Module) -> Iterator[tuple[str, str]]:
    """Every module with trained parameters that hides its patterns: its name, and why."""
    for name, module in model.named_modules():
        why = _reason(module)
        if why is not None and any(p.requires_grad for p in module.parameters()):
            yield name, why


def _reason(module: nn.Module) -> str | None:
    if _is_compiled(module):
        return (
            "is compiled (torch.compile), which hides what its layers are given: record and train "
            "the module as it was before compiling"
        )
    if isinstance(module, nn.RNNBase):
        return (
            f"is an nn.{type(module).__name__}, whose fused kernel hides what its weights are "
            "multiplied with"
        )
    if isinstance(module, LAYERS) and _is_parametrized(module):
        return (
            "has a parametrized weight (weight_norm, spectral_norm, pruning, ...): what is trained "
            "is not what meets the input. Remove the parametrization before recording"
        )
    return None


def _is_compiled(module: nn.Module) -> bool:
    forward = vars(module).get("forward")
    return (
        type(module).__name__ == "OptimizedModule"
        or getattr(module, "_compiled_call_impl", None) is not None
        or hasattr(forward, "_torchdynamo_orig_callable")
    )


def _is_parametrized(module: nn.Module) -> bool:
    """By `torch.nn.utils.parametrize`, or by a hook of `torch.nn.utils` that sets the weight."""
    hooks = module._forward_pre_hooks.values()
    return parametrize.is_parametrized(module) or any(
        type(hook).__module__.startswith("torch.nn.utils.") for hook in hooks
    )


def _what_to_do(model: nn.Module) -> str:
    hidden = [name for name, _ in opaque_modules(model)]
    names = [
        layer.name
        for layer in find_layers(model)
        if not any(not h or layer.name == h or layer.name.startswith(f"{h}.") for h in hidden)
    ]
    listed = ", ".join(f'"{name}"' for name in names[:6]) + (", ..." if len(names) > 6 else "")
    return (
        "Or choose the layers that are to have patterns, without it: "
        f"layers=[{listed}]; it is then accounted for step by step, exactly, without patterns"
    )


def refuse_reentrant(layer: Layer) -> None:
    """Raise `RecordingError`: a layer was called inside a backward pass, and differentiated."""
    raise RecordingError(
        f"layer {layer.name!r} was called inside a running backward pass and differentiated there, "
        "as a reentrant activation checkpoint does: its patterns would belong to no micro-batch. "
        "Use torch.utils.checkpoint.checkpoint(..., use_reentrant=False), or choose with layers= "
        "the layers that are to have patterns, without those inside the checkpoint"
    )


def refuse_parametrized(layer: Layer, what: str) -> None:
    """Raise `RecordingError`: a layer's weight or bias is no parameter of its module any more."""
    raise RecordingError(
        f"layer {layer.name!r}: its {what} was a parameter when recording began and is none now "
        "(weight_norm, spectral_norm, pruning or another parametrization, applied since?), so what "
        "is trained is not what meets the input. Apply it after the recording has ended; or apply "
        "it before, and choose with layers= the layers that are to have patterns, without this one"
    )
