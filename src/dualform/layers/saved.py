"""What a node of an autograd graph has saved: at hand, or computed anew when it is asked for.

An activation checkpoint keeps nothing of its inside. It leaves a promise in each node, and runs its
part of the network once more when the backward pass reaches the first of them. With the promise one
can ask for the tensor just before the node itself does.

Why it is hard: a checkpoint gives each tensor out once and forgets it, and the node would then find
nothing. So while it is asked here, it is kept from forgetting.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor
from torch.autograd.graph import Node

from dualform.layers import torch_internals


def saved_input(node: Node, name: str) -> Tensor | Callable[[], Tensor] | None:
    """The input of a product as its node has saved it, or a function that brings it; None if there
    is no way to it. Neither refers to the node: one whose hook held itself would never be freed.

    Raises RuntimeError if it was changed in place: torch will refuse a backward pass there.
    """
    promise = torch_internals.promise_of(node, name)
    if promise is not None:
        return partial(_brought, *promise)
    tensor = torch_internals.saved(node, name)
    return None if tensor is None else tensor.detach()


def _brought(bring: Callable[[Any], Tensor], promise: Any) -> Tensor:
    """Have a promise kept, at the cost of running what is inside the checkpoint."""
    lends = isinstance(getattr(promise, "handles", None), dict)
    if not lends or torch_internals.running_pass() == -1:  # then all of it is for us alone
        return bring(promise).detach()
    promise.handles = _Lasting(promise.handles)
    try:
        return bring(promise).detach()
    finally:
        promise.handles = dict(promise.handles)


class _Lasting(dict[Any, Any]):
    """What a checkpoint knows of a tensor in each backward pass; None would mean: given out."""

    def __setitem__(self, backward: Any, handle: Any) -> None:
        if handle is not None:
            super().__setitem__(backward, handle)
