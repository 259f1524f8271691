"""Which layer's output is split into contributions, and along which direction.

A recorded example is asked at one layer: its last keys are the queries, the target counts the
layer's own outputs. A new input runs through the network once, with gradients on: what each layer
receives are its queries, and d(target)/d(layer output) is the direction. Layers that are modules
are looked at by hooks (`targets.Traced`); weights that are used without one, attention's packed
projections or functional code, by the nodes they leave in the autograd graph (`used.GraphUses`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dualform.attention import queries as asking
from dualform.attention.contribution import (
    Contribution,
    Target,
    asked,
    asked_by_examples,
    contribution,
)
from dualform.attention.targets import Aim, Call, Traced, aim, is_margin
from dualform.attention.used import GraphUses
from dualform.attention.view import View
from dualform.errors import QueryError
from dualform.layers import kinds
from dualform.layers.torch_internals import version_of
from dualform.memory import LayerMemory


class OneInput(NamedTuple):
    """A view, its architecture, and one input as the model takes it."""

    view: View
    model: nn.Module
    inputs: Sequence[Any]
    kwargs: Mapping[str, Any]


def of_example(
    view: View, example: Any, target: Aim, layer: str | None, label: int | None
) -> Contribution:
    """What patterns wrote into the outputs of one layer for a recorded example."""
    memory = view.memory
    if not memory.layers:
        raise QueryError(f"{memory.path} holds no patterns, so nothing was written")
    known = memory.layer(layer if layer is not None else memory.layers[-1])
    known.need_error_signals("a contribution")
    rows = asking.example_queries(view, known, example)
    shape = (known.out_features,) if len(rows) == 1 else (len(rows), known.out_features)
    outputs = torch.zeros(shape)
    if is_margin(target):
        outputs = view.output(known, rows).reshape(shape)
    direction, name = aim(target, label, outputs, f"layer {known.name!r}")
    name = f"{name} of layer {known.name} for example {example!r}"
    direction = direction.reshape(len(rows), known.out_features)
    return contribution(view, known, asked(known, rows, direction), Target(name, first_order=False))


def of_input(given: OneInput, target: Aim, layer: str | None, label: int | None) -> Contribution:
    """What patterns wrote into an output of the model for a new input."""
    memory = given.view.memory
    if layer is not None and memory.layer(layer).keep == "keys":
        memory.layer(layer).need_error_signals("a contribution")
    names = memory.layers if layer is None else (layer,)
    traced = Traced()

    def through_calls(
        output: Any, state: Mapping[str, Tensor]
    ) -> tuple[str, Target, list[Tensor]] | None:
        value, name = _aimed(output, target, label)
        produced = traced.layer_of(output)
        chosen = layer if layer is not None else produced
        if chosen is None or chosen not in traced.calls:
            return None
        _must_stay(memory.layer(chosen), state)
        told = Target(f"{name} of the model", first_order=chosen != produced)
        return chosen, told, traced.slopes(chosen, value)

    view, model, inputs, kwargs = given
    with torch.enable_grad():
        found = asking.run(model, view, inputs, kwargs, traced.on_layer, names, through_calls)
    if found is None:
        functional = [name for name in names if name not in traced.calls]
        return _through_uses(given, functional, layer, target, label)
    chosen, told, slopes = found
    return _through_calls(view, traced.calls[chosen], memory.layer(chosen), slopes, told)


def _aimed(output: Any, target: Aim, label: int | None) -> tuple[Tensor, str]:
    """The number that is split up, and what it is called."""
    if not isinstance(output, Tensor):
        raise QueryError(
            f"the model returns a {type(output).__name__}; contribute needs a tensor of outputs"
        )
    direction, name = aim(target, label, output, "the model's output")
    return (output * direction.to(output)).sum(), name


def _through_calls(
    view: View, calls: Sequence[Call], layer: LayerMemory, slopes: Sequence[Tensor], target: Target
) -> Contribution:
    """Along g = d(target)/d(layer output): one-hot where the layer's output is the model's."""
    kind = kinds.of(layer.kind)
    outputs = torch.cat([kind.error_signals(call.output) for call in calls])
    directions = torch.cat([kind.error_signals(slope) for slope in slopes])
    primal = float((outputs.double() * directions.double()).sum())
    if not layer.key_width:
        own = [asked_by_examples(layer, c.given, s) for c, s in zip(calls, slopes, strict=True)]
        along = {
            role: torch.stack([one.along[role] for one in own]).sum(0) for role in own[0].along
        }
        _must_be(layer, view, along, primal)
        return contribution(view, layer, own[0]._replace(along=along), target, primal)
    rows = torch.cat([kind.keys(call.given) for call in calls])
    asking.check_finite(rows, f"what layer {layer.name!r} receives for this input")
    return contribution(view, layer, asked(layer, rows, directions), target, primal)


def _must_stay(layer: LayerMemory, state: Mapping[str, Tensor]) -> None:
    """Refuse where the model changes a layer's weight while it answers: it began as a copy."""
    if any(version_of(state[name]) > 0 for name in layer.layer.parameters):
        raise QueryError(
            f"the model changes {layer.weight!r} while it answers (max_norm of an embedding, say), "
            f"so what patterns wrote is not what layer {layer.name!r} gives. Name another layer"
        )


def _must_be(layer: LayerMemory, view: View, along: Mapping[str, Tensor], primal: float) -> None:
    """Refuse where a layer answers by more than its weights: batch norms know running statistics,
    and examples wrote into them by the statistics of their batch."""
    pairs = [(layer.weight, "weight"), (layer.bias, "bias")]
    own = [(view.weights[n].double()[layer.rows_of(n)] * along[role]) for n, role in pairs if n]
    total, size = (float(sum(f(part) for part in own)) for f in (Tensor.sum, Tensor.norm))
    if abs(total - primal) > 1e-3 * (size + abs(primal)):
        raise QueryError(
            f"layer {layer.name!r} normalises this input by running statistics, which no example "
            "wrote, so what examples wrote does not add up to its output. Name another layer"
        )


def _through_uses(
    given: OneInput, names: Sequence[str], layer: str | None, target: Aim, label: int | None
) -> Contribution:
    """The same for a weight that is used without its module being called."""
    view, model, inputs, kwargs = given

    def split(output: Any, uses: GraphUses) -> Contribution:
        value, name = _aimed(output, target, label)
        produced = uses.layer_of(output)
        chosen = layer if layer is not None else produced
        if chosen is None:
            raise QueryError(
                "no recorded layer's output is the model's output as it stands, so no layer's "
                "contributions add up to it; name a layer for contributions to first order: "
                f"layer=one of {', '.join(view.memory.layers)}"
            )
        known = view.memory.layer(chosen)
        known.need_error_signals("a contribution")
        _must_stay(known, uses.state)
        rows, slopes = uses.slopes(chosen, value)
        asking.check_finite(rows, f"what layer {chosen!r} receives for this input")
        primal = float((uses.output(known, rows).double() * slopes.double()).sum())
        told = Target(f"{name} of the model", first_order=chosen != produced)
        return contribution(view, known, asked(known, rows, slopes), told, primal)

    found: Contribution = asking.run_with_uses(model, view, inputs, kwargs, names, split)
    return found
