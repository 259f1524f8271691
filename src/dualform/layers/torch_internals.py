"""Every private name of torch that dualform uses, in one place, each with what happens without it.

torch has no public way to ask which backward pass is running, whether a node is about to be gone
through, or what a node has saved. Each name below may be missing in another version of torch: then
its fallback answers on the safe side (a copy too many, a key held too long, a use that is not
looked at). What training calls for every layer of every step is torch's own, without a wrapper.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.autograd.graph import Node
from torch.nn.modules import module as torch_module
from torch.utils.hooks import RemovableHandle


def _of(name: str, fallback: Callable[..., Any]) -> Callable[..., Any]:
    """The function of that name in torch's C++ part, or the fallback."""
    found: Any = torch._C
    for part in name.split("."):
        found = getattr(found, part, None)
    return found if callable(found) else fallback


running_pass: Callable[[], int] = _of("_current_graph_task_id", lambda: -1)
"""torch's number of the backward pass running in this thread; -1: none is (or it cannot say)."""

keeps_graph: Callable[[], bool] = _of("_autograd._get_current_graph_task_keep_graph", lambda: True)
"""Whether the running pass leaves its graph to be gone through again. Unknown: it may."""

hooks_on_saving: Callable[[bool], Any] = _of(
    "_autograd._top_saved_tensors_default_hooks", lambda ignored: ()
)
"""The hooks that what autograd saves goes through now (a checkpoint's, `save_on_cpu`'s); None:
it is saved as it is. Unknown (before torch 2.8): there may be some, so inputs are copied."""

functorch_level: Callable[[], int | None] = _of("_functorch.maybe_current_level", lambda: None)
"""How many `torch.func` transforms are under way; None: none is."""

_will_execute = _of("_will_engine_execute_node", lambda node: True)


def will_run(node: Node) -> bool:
    """Whether the running backward pass will go through this node: of a leaf, add to its `.grad`.
    Unknown: it is taken to, and the audit finds patterns that are in no gradient."""
    try:
        return bool(_will_execute(node))
    except RuntimeError:  # torch.autograd.grad asked for this very leaf: nothing is added to it
        return False


def at_end_of_pass(callback: Callable[[], None]) -> bool:
    """Have a function called when the running backward pass ends; False if torch has no way."""
    queue = getattr(getattr(Variable, "_execution_engine", None), "queue_callback", None)
    if queue is not None:
        queue(callback)
    return queue is not None


def version_of(tensor: Tensor) -> int:
    """How often a tensor was changed in place; -1 where torch does not count (inference mode)."""
    try:
        return tensor._version
    except (RuntimeError, AttributeError):
        return -1


def is_compiled(module: nn.Module) -> bool:
    """Whether torch.compile stands in for a module, by any of its three ways."""
    own = vars(module)
    return (
        type(module).__name__ == "OptimizedModule"
        or own.get("_compiled_call_impl") is not None
        or hasattr(own.get("forward"), "_torchdynamo_orig_callable")
    )


def take_away(handle: RemovableHandle) -> None:
    """Remove a global hook, and what torch's handle forgets of it in the tables beside."""
    handle.remove()
    for name in ("_global_forward_hooks_with_kwargs", "_global_forward_hooks_always_called"):
        getattr(torch_module, name, {}).pop(handle.id, None)


def saved_input(node: Node, name: str) -> Tensor | Callable[[], Tensor] | None:
    """The input of a product as its node has saved it (`mat1`, `indices`), or what brings it where
    an activation checkpoint has left a promise; None if there is no way to it. Neither refers to
    the node: one whose hook held itself would never be freed. Raises torch's RuntimeError if the
    input was changed in place."""
    raw = getattr(node, f"_raw_saved_{name}", None)
    unpack = getattr(raw, "unpack_hook", None)
    if unpack is not None:
        return partial(_brought, unpack, getattr(raw, "data", None))
    tensor = getattr(node, f"_saved_{name}", None)
    return detached(tensor) if isinstance(tensor, Tensor) else None


def detached(tensor: Tensor, dtype: torch.dtype | None = None, *, copy: bool = False) -> Tensor:
    """Cut a tensor off what made it; whether training computed it is still to be seen."""
    made = tensor.detach().to(dtype or tensor.dtype, copy=copy)
    return made.requires_grad_(tensor.requires_grad)


def _brought(bring: Callable[[Any], Tensor], promise: Any) -> Tensor:
    """Have a promise kept. A checkpoint gives each tensor out once in a backward pass and forgets
    it; the node will want it as well, so while it is asked here it is kept from forgetting."""
    if running_pass() == -1 or not isinstance(getattr(promise, "handles", None), dict):
        return detached(bring(promise))
    promise.handles = _Lasting(promise.handles)
    try:
        return detached(bring(promise))
    finally:
        promise.handles = dict(promise.handles)


class _Lasting(dict[Any, Any]):
    """What a checkpoint knows of a tensor in each backward pass; None would mean: given out."""

    def __setitem__(self, backward: Any, handle: Any) -> None:
        if handle is not None:
            super().__setitem__(backward, handle)


def fact_of(node: Node, name: str, fallback: Any = None) -> Any:
    """A plain fact that a node has saved: `alpha`, `dim0`, `split_sizes`, `padding_idx`, ..."""
    return getattr(node, f"_saved_{name}", fallback)


def shape_of_output(node: Node) -> tuple[int, ...] | None:
    """The shape of what a node gave in the forward pass; None if torch does not say."""
    known: Any = getattr(node, "_input_metadata", ())
    return tuple(known[0].shape) if len(known) == 1 else None


def sequence_number(node: Any) -> int:
    """The place of a node in the order in which the graph was made; 0 for all if unknown."""
    return int(getattr(node, "_sequence_nr", int)())


_lock = threading.Lock()
_before: list[bool] = []


@contextmanager
def layer_by_layer() -> Iterator[None]:
    """Switch off torch's fused evaluation of `nn.TransformerEncoder`: it calls no module and gives
    zeros at padding. The switch, which is one for all threads, is then put back."""
    with _lock:
        _before.append(torch.backends.mha.get_fastpath_enabled())
        torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        with _lock:  # the last to leave finds what the first has met
            torch.backends.mha.set_fastpath_enabled(_before.pop())
