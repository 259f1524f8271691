"""From a target ("output 7") to a direction at every layer's output: the derivative, by autograd.

A contribution splits one number. For the layer that produces the model's output the direction is
the target itself; for a layer further down it is d(target)/d(layer output). Zeros added to a
layer's output collect that derivative: they change nothing, need no access to the layer, and see a
layer that is used several times, also through its own later uses.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dualform.attention.queries import check_finite
from dualform.errors import QueryError
from dualform.layers.torch_internals import running_pass

Aim = int | str | Tensor | Sequence[float]
"""What may be split up: an output, `"margin"`, or a direction over the outputs."""


class Call:
    """One use of a layer in a forward pass: what it was given, what it returned, and a probe."""

    def __init__(self, given: Tensor, output: Tensor) -> None:
        self.given = given.detach()
        self.output = output.detach()
        self.probe = torch.zeros_like(output, requires_grad=True)
        self.returned = output + self.probe
        self.version = self.returned._version


class Traced:
    """The recorded layers of one forward pass, each output carrying a probe of zeros.

    The gradient with respect to the probe is the total derivative of the target with respect to
    that output, also through later uses of the same layer.
    """

    def __init__(self) -> None:
        self.calls: dict[str, list[Call]] = {}

    def on_layer(self, name: str, given: Tensor, output: Tensor) -> Tensor:
        call = Call(given, output)
        if running_pass() == -1:  # else a checkpoint runs its part again
            self.calls.setdefault(name, []).append(call)
        return call.returned

    def slopes(self, layer: str, value: Tensor) -> list[Tensor]:
        """d(value)/d(the layer's output), call by call."""
        calls = self.calls[layer]
        if not all(call.returned.requires_grad for call in calls):
            raise QueryError(
                f"layer {layer!r} runs where torch computes no derivative (under torch.no_grad, or "
                "in a checkpoint with use_reentrant=True), so its contributions are not known; "
                "name another layer, or use use_reentrant=False"
            )
        return list(
            torch.autograd.grad(value, [call.probe for call in calls], materialize_grads=True)
        )

    def layer_of(self, output: Tensor) -> str | None:
        """The layer that returned this very tensor, unchanged since."""
        for name, calls in self.calls.items():
            last = calls[-1]
            if len(calls) == 1 and last.returned is output and last.version == output._version:
                return name
        return None


def is_margin(target: Aim) -> bool:
    return isinstance(target, str) and target == "margin"


def index_of(given: Any) -> Any:
    """A whole number of numpy's or torch's (`output.argmax()`, `labels[3]`) as Python's own."""
    if isinstance(given, Tensor):
        scalar = given.ndim == 0 and not (given.is_floating_point() or given.is_complex())
        return int(given) if scalar and given.dtype != torch.bool else given
    scalar = isinstance(given, np.ndarray) and given.ndim == 0 and given.dtype.kind in "iu"
    return int(given) if scalar or isinstance(given, np.integer) else given


def aim(target: Aim, label: int | None, outputs: Tensor, what: str) -> tuple[Tensor, str]:
    """The direction a target means over these outputs, and what it is called."""
    if is_margin(target):
        return margin(outputs, label, what)
    return direction_of(target, tuple(outputs.shape), what), name_of(target)


def direction_of(target: Aim, shape: tuple[int, ...], what: str) -> Tensor:
    """The direction a target means over outputs of this shape, one input at a time."""
    width = shape[-1] if shape else 1
    single = torch.Size(shape).numel() == width
    if isinstance(target, int) and not isinstance(target, bool):
        if not single:
            raise QueryError(
                f"{what} has shape {list(shape)}: target={target} names one output of one input. "
                "Give one input at a time, or a target of the output's own shape"
            )
        if not 0 <= target < width:
            raise QueryError(
                f"target={target} is out of range: {what} has outputs 0 to {width - 1}"
            )
        one_hot = torch.zeros(width, dtype=torch.float64)
        one_hot[target] = 1.0
        return one_hot.reshape(shape)
    if isinstance(target, str):
        raise QueryError(
            f'target={target!r}: expected a class index, "margin", or numbers over the outputs'
        )
    try:
        direction = torch.as_tensor(target, dtype=torch.float64).detach().cpu()
    except (TypeError, ValueError, RuntimeError) as error:
        raise QueryError(
            f"target={target!r}: expected a class index, or numbers over the outputs"
        ) from error
    if direction.ndim == 0 and shape:
        raise QueryError(f"target={target!r}: expected a class index, or numbers over the outputs")
    if tuple(direction.shape) != shape and not (single and tuple(direction.shape) == (width,)):
        raise QueryError(
            f"the target has shape {list(direction.shape)}, but {what} has shape {list(shape)}; "
            "give one input at a time, or a target of the output's own shape"
        )
    check_finite(direction, "the target")
    return direction.reshape(shape)


def margin(outputs: Tensor, label: int | None, what: str) -> tuple[Tensor, str]:
    """The direction of a margin over one input's outputs, and what it is called.

    The true class minus the best other; without a label, the predicted minus the runner-up.
    """
    line = outputs.detach().reshape(-1).double().cpu()
    width = int(outputs.shape[-1]) if outputs.ndim else 1
    if len(line) != width or width < 2:
        raise QueryError(
            f'target="margin" compares two outputs of one input, but {what} has shape '
            f"{list(outputs.shape)}; give one input at a time"
        )
    if label is not None and not 0 <= label < width:
        raise QueryError(f"label={label} is out of range: {what} has outputs 0 to {width - 1}")
    best = int(line.argmax()) if label is None else int(label)
    others = line.clone()
    others[best] = -torch.inf
    other = int(others.argmax())
    direction = torch.zeros(width, dtype=torch.float64)
    direction[best], direction[other] = 1.0, -1.0
    why = "predicted − runner-up" if label is None else "true − best other"
    return direction.reshape(outputs.shape), f"the margin, output {best} − output {other} ({why})"


def name_of(target: Any) -> str:
    return f"output {target}" if isinstance(target, int) else "a weighted sum of outputs"
