"""From a test input to each layer's queries, by running the network once without touching it.

The network runs with the weights of a view through `torch.func.functional_call`, in eval mode. The
user's model lends its architecture only: its parameters and buffers are never written to, every
submodule's train/eval mode is put back exactly, and no hook survives, whatever the model raises.

Why it is hard: an activation checkpoint runs its part again when a derivative is taken. So that is
done while all this still holds: it is `then`, which is given the output.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dualform.attention.engine import gather_keys, looks_up
from dualform.attention.used import GraphUses
from dualform.attention.view import View, layers_named
from dualform.errors import QueryError
from dualform.layers import ROOT_NAME, find_layers, kinds, layer_by_layer
from dualform.layers.uses import tensors_in as tensors_in
from dualform.memory import LayerMemory, Memory

OnLayer = Callable[[str, Tensor, Tensor], Tensor | None]
"""Called with a layer's name, input and output; may return another output."""


Then = Callable[[Any, Mapping[str, Tensor]], Any]
"""Called with the network's output, and the parameters and buffers it ran with."""


def check_architecture(model: nn.Module, memory: Memory) -> None:
    """Refuse a model whose parameters or layers are not the recorded ones, naming the first few."""
    if not isinstance(model, nn.Module):
        raise QueryError(f"the model must be an nn.Module or None, got {type(model).__name__}")
    seen = {name: tuple(p.shape) for name, p in model.named_parameters()}
    recorded = {name: tuple(p.shape) for name, p in memory.parameters.items()}
    differences = [
        f"{name}: model has {seen.get(name, 'no such parameter')}, "
        f"memory has {recorded.get(name, 'no such parameter')}"
        for name in [*recorded, *(name for name in seen if name not in recorded)]
        if seen.get(name) != recorded.get(name)
    ]
    known = {layer.name for layer in find_layers(model)}
    differences += [
        f"{name}: recorded as a layer, but the model has none of that name"
        for name in memory.layers
        if name not in known and has_module(memory.layer(name))
    ]
    if differences:
        shown = "\n  ".join(differences[:5])
        more = f"\n  … and {len(differences) - 5} more" if len(differences) > 5 else ""
        raise QueryError(
            f"this model is not the architecture that was recorded:\n  {shown}{more}\n"
            "Build the model as it was for the recording (its weights do not matter)."
        )


def has_module(layer: LayerMemory) -> bool:
    """Whether a recorded layer is a module, not rows of a parameter that other code uses."""
    own = "weight" if layer.name == ROOT_NAME else f"{layer.name}.weight"
    return layer.weight == own


def check_finite(value: Any, what: str = "the input") -> None:
    """Refuse NaN and infinity: their attention weights would be meaningless."""
    for tensor in tensors_in(value):
        # a sum is finite only if everything in it is: one quick pass, and the slow one if need be
        if not tensor.is_floating_point() or bool(torch.isfinite(tensor.sum())):
            continue
        if not bool(torch.isfinite(tensor).all()):
            bad = int((~torch.isfinite(tensor)).sum())
            raise QueryError(
                f"{what} holds {bad} NaN or infinite numbers of {tensor.numel()} (shape "
                f"{tuple(tensor.shape)}); attention needs finite inputs"
            )


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Eval mode inside; every submodule's own mode back afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        model.eval()
        yield
    finally:
        for module, training in modes:
            module.training = training


def run(
    model: nn.Module,
    view: View,
    inputs: Sequence[Any],
    kwargs: Mapping[str, Any],
    on_layer: OnLayer = lambda name, given, output: None,
    layers: Sequence[str] = (),
    then: Then = lambda output, state: output,
) -> Any:
    """The view's network on some inputs, with a look at the recorded layers on the way.

    Without layers to look at, exactly as the model computes it.
    """
    check_finite([inputs, kwargs])
    state = _state(model, view, inputs, kwargs)
    modules = {layer.name: module for layer, module in find_layers(model).items()}
    with ExitStack() as stack:
        stack.enter_context(evaluating(model))
        if layers:
            stack.enter_context(layer_by_layer())
        for name in modules.keys() & {*layers}:
            # before the user's own hooks: they may change what the layer itself gives
            handle = modules[name].register_forward_hook(
                _hook(name, on_layer), with_kwargs=True, prepend=True
            )
            stack.callback(handle.remove)
        with _fitting(view, inputs, kwargs):
            return _call(model, state, inputs, kwargs, then)


class _Asked(nn.Module):
    """A model, and what is done with its output while it has the weights of a view."""

    def __init__(self, model: nn.Module, then: Callable[[Any], Any]) -> None:
        super().__init__()
        self.model, self.then = model, then

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        return self.then(self.model(*inputs, **kwargs))


def _call(
    model: nn.Module,
    state: Mapping[str, Tensor],
    inputs: Sequence[Any],
    kwargs: Mapping[str, Any],
    then: Then,
) -> Any:
    own = {f"model.{name}": tensor for name, tensor in state.items()}
    asked = _Asked(model, lambda output: then(output, state))
    return torch.func.functional_call(asked, own, tuple(inputs), dict(kwargs))


@contextmanager
def _fitting(view: View, inputs: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[None]:
    """Say it plainly if the model cannot take inputs of their dtype; what else it raises is its."""
    try:
        yield
    except (RuntimeError, TypeError) as error:
        known = {parameter.dtype for parameter in view.memory.parameters.values()}
        given = {t.dtype for t in tensors_in([inputs, kwargs]) if t.is_floating_point()}
        if not given - known or not known:
            raise
        raise QueryError(
            f"the model could not be run on inputs of {_listed(given)}: {error}. It was recorded "
            f"in {_listed(known)}; convert the inputs to that"
        ) from error


def _listed(dtypes: set[torch.dtype]) -> str:
    return " and ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))


def run_by_patterns(
    model: nn.Module, view: View, inputs: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """The same, with every recorded layer computed literally as attention over its patterns.

    Weights that are used without a module of their own (attention's packed projections) take part
    as rebuilt.
    """

    def attend(name: str, given: Tensor, output: Tensor) -> Tensor:
        layer = view.memory.layer(name)
        rows = kinds.of(layer.kind).keys(given).to("cpu", torch.float64)
        return view.dual_output(layer, rows).reshape(output.shape).to(output)

    return run(model, view, inputs, kwargs, attend, layers_named(view.memory, None))


def tensors_of(view: View) -> dict[str, Tensor]:
    """Parameters and buffers of a view as the network uses them: own dtype, buffers as recorded.

    Always copies: the caller may train on them, and the view stays as it is.
    """
    parameters, memory = view.memory.parameters, view.memory
    state = {n: w.to(parameters[n].dtype, copy=True) for n, w in view.weights.items()}
    at = view.at if view.averaging is None else view.averaging.last(view.at)
    for name in memory.buffers:
        state[name] = memory.buffer(name, at).clone()
    return state


def queries_of(
    model: nn.Module,
    view: View,
    inputs: Sequence[Any],
    kwargs: Mapping[str, Any],
    layers: Sequence[str],
) -> dict[str, Tensor]:
    """What each layer receives for these inputs, one row per query, calls in order: [n, d_in]."""
    received: dict[str, list[Tensor]] = {name: [] for name in layers}
    own = {name: kinds.of(view.memory.layer(name).kind) for name in layers}

    def collect(name: str, given: Tensor, output: Tensor) -> None:
        received[name].append(own[name].keys(given))

    with torch.no_grad():
        run(model, view, inputs, kwargs, collect, layers)
    unseen = [name for name, rows in received.items() if not rows]
    if unseen:
        received |= run_with_uses(model, view, inputs, kwargs, unseen, lambda _, uses: uses.read())
    for name, rows in received.items():
        if not rows:
            raise QueryError(
                f"layer {name!r} is not used for this input, so it has no queries; "
                "name the layers you want with layers=[...]"
            )
    queries = {name: torch.cat(rows) for name, rows in received.items()}
    for name, rows_of_layer in queries.items():
        check_finite(rows_of_layer, f"what layer {name!r} receives for this input")
    return queries


def run_with_uses(
    model: nn.Module,
    view: View,
    inputs: Sequence[Any],
    kwargs: Mapping[str, Any],
    layers: Sequence[str],
    then: Callable[[Any, GraphUses], Any],
) -> Any:
    """The same with gradients on; `then` is also given what the graph knows of these layers."""
    state = _state(model, view, inputs, kwargs)
    uses = GraphUses([view.memory.layer(name) for name in layers], state)

    def look(output: Any, _: Mapping[str, Tensor]) -> Any:
        uses.look(output)
        return then(output, uses)

    with ExitStack() as stack:
        stack.enter_context(evaluating(model))
        stack.enter_context(layer_by_layer())
        for handle in uses.watch(model):
            stack.callback(handle.remove)
        with torch.enable_grad():
            return _call(model, state, inputs, kwargs, look)


def _state(
    model: nn.Module, view: View, inputs: Sequence[Any], kwargs: Mapping[str, Any]
) -> dict[str, Tensor]:
    """Parameters and buffers of the view for a forward pass on these inputs."""
    device = next((t.device for t in tensors_in([inputs, kwargs])), torch.device("cpu"))
    state = {name: buffer.clone() for name, buffer in model.named_buffers()}
    for name, tensor in tensors_of(view).items():
        state[name] = tensor.to(device)
    return state


def example_rows(view: View, layer: LayerMemory, example: Any) -> Any:
    """The patterns of a recorded example's last visit: its row, or one per call and position.

    A visit is one backward pass: the last micro-batch of the last step that held the example.
    """
    patterns = layer.patterns
    if not isinstance(example, str) and np.ndim(example):
        raise QueryError(f"example={example!r}: one recorded example is asked for at a time")
    chosen = patterns.select(example=example) & (patterns["step"] < view.at)
    rows = chosen.nonzero()[0]
    if not len(rows):
        raise QueryError(
            f"example {example!r} was not seen by layer {layer.name!r} in the first {view.at} steps"
        )
    for name in ("step", "microbatch"):
        if name in patterns.names:
            when = patterns[name][rows]
            rows = rows[when == when.max()]
    # A batch may hold the example twice: the later one overwrites the earlier, place by place.
    places = [patterns[name][rows] for name in ("call", "position") if name in patterns.names]
    last: dict[tuple[Any, ...], int] = {}
    for i, row in enumerate(rows.tolist()):
        last[tuple(column[i] for column in places)] = row
    return torch.tensor(sorted(last.values())).numpy()


def example_queries(view: View, layer: LayerMemory, example: Any) -> Tensor:
    """A recorded example as queries: the keys of its last visit, [n, d_in]."""
    return gather_keys(layer, example_rows(view, layer, example))


def given_queries(layer: LayerMemory, queries: Any) -> Tensor:
    """Queries handed over as they are, checked: [n, d_in] or [d_in]; tokens of any shape."""
    try:
        tensor = torch.as_tensor(queries)
    except (TypeError, ValueError, RuntimeError):
        tensor = None
    if tensor is None or tensor.is_complex():
        raise QueryError(
            f"the queries for layer {layer.name!r} are of {getattr(tensor, 'dtype', type(queries))}"
            f"; expected real numbers, [n, {layer.in_features}]"
        )
    if looks_up(layer):
        return _given_tokens(layer, tensor)
    if tensor.ndim == 0 or tensor.shape[-1] != layer.in_features:
        raise QueryError(
            f"the queries for layer {layer.name!r} have shape {tuple(tensor.shape)}, but its keys "
            f"have width {layer.in_features}; expected [n, {layer.in_features}]"
        )
    check_finite(tensor, f"the query for layer {layer.name!r}")
    return kinds.of(layer.kind).keys(tensor)


def _given_tokens(layer: LayerMemory, tokens: Tensor) -> Tensor:
    """Queries of an embedding: tokens of any shape."""
    whole = not tokens.is_floating_point() and not tokens.is_complex()
    if not whole or bool(((tokens < 0) | (tokens >= layer.in_features)).any()):
        raise QueryError(
            f"the queries for layer {layer.name!r} are of {tokens.dtype} and shape "
            f"{tuple(tokens.shape)}; it looks up tokens, so expected are whole numbers from 0 to "
            f"{layer.in_features - 1}"
        )
    return kinds.of(layer.kind).keys(tokens)


def _hook(name: str, on_layer: OnLayer) -> Callable[..., Tensor | None]:
    def hook(
        module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor
    ) -> Tensor | None:
        return on_layer(name, args[0] if args else kwargs["input"], output)

    return hook
