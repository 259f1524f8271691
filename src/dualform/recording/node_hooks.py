"""A hook on a node of the autograd graph, put there by few calls.

`Node.register_prehook` makes an ordered dictionary, a weak reference and a handle, in Python: two
microseconds in a loop of nothing else, twenty amid training, where all that code and data has to
come from far away. torch's own way to carry the hooks of a tensor over to its node takes any
dictionary, and makes nothing. What differs: such a hook is called before those that a user puts on
the tensor, with the error signal as it is before them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node

Hook = Callable[[Tensor | None], None]
"""Called with the error signal of the node's first output."""


class _Carriers(threading.local):
    """A tensor of each thread's own: hooks are on it only until they are carried over."""

    def __init__(self) -> None:
        self.tensor: Any = torch.empty(0)


_carriers = _Carriers()


def hook_early(node: Node, hook: Hook) -> None:
    """Have a hook called when a backward pass gets to this node, before all others."""
    carry: Any = getattr(node, "_register_hook_dict", None)
    if carry is None:
        node.register_prehook(lambda error_signals: hook(error_signals[0]))
        return
    carrier = _carriers.tensor
    try:
        carrier._backward_hooks = {0: hook}
        carry(carrier)
    finally:
        carrier._backward_hooks = None
