"""What a node of an autograd graph has saved: at hand, or computed anew when it is asked for.

An activation checkpoint keeps nothing of its inside. It leaves a promise in each node, and runs its
part of the network once more when the backward pass reaches the first of them. With the promise one
can ask for the tensor just before the node itself does.

Why it is hard: a checkpoint gives each tensor out once and forgets it, and the node would then find
nothing. So while it is asked here, it is kept from forgetting.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.autograd.graph import Node

from dualform.layers import torch_internals


class SavedInput:
    """The input of a product as its node has saved it. Holds no reference to the node: a node whose
    hook held itself would never be freed."""

    def __init__(self, node: Node, name: str) -> None:
        self._tensor: Tensor | None = None
        self.is_lost = False
        """Whether it was changed in place: torch will refuse a backward pass through the node."""
        self._promise = torch_internals.promise_of(node, name)
        if self._promise is None:
            try:
                tensor = torch_internals.saved(node, name)
                self._tensor = None if tensor is None else tensor.detach()
            except RuntimeError:
                self.is_lost = True

    @property
    def can_be_read(self) -> bool:
        """Whether there is a way to it; there may be none in other versions of torch."""
        return self._tensor is not None or self._promise is not None

    def read(self) -> Tensor:
        """The tensor; from a checkpoint inside a backward pass, or at the cost of running it."""
        if self._tensor is not None:
            return self._tensor
        assert self._promise is not None
        bring, promise = self._promise
        lends = isinstance(getattr(promise, "handles", None), dict)
        if not lends or torch_internals.running_pass() == -1:  # then all of it is for us alone
            return bring(promise).detach()
        promise.handles = _Lasting(promise.handles)
        try:
            return bring(promise).detach()
        finally:
            promise.handles = dict(promise.handles)

    def forget(self) -> None:
        """Let go of it: the graph is not gone through again, but a kept loss may hold the hook."""
        self._tensor = self._promise = None


class _Lasting(dict[Any, Any]):
    """What a checkpoint knows of a tensor in each backward pass; None would mean: given out."""

    def __setitem__(self, backward: Any, handle: Any) -> None:
        if handle is not None:
            super().__setitem__(backward, handle)
