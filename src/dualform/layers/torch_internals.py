"""Every private name of torch that dualform uses, in one place, each with what happens without it.

torch has no public way to ask which backward pass is running, whether a node is about to be gone
through, or what a node has saved. Each name below may be missing in another version of torch: then
its fallback answers on the safe side (a copy too many, a key held too long, a use that is not
looked at), and the tests run the room with every one of them taken away.

Functions that training calls for every layer of every step are torch's own, without a wrapper.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Variable
from torch.autograd.graph import Node
from torch.nn.modules import module as torch_module
from torch.utils.hooks import RemovableHandle


def _of(owner: object, name: str, fallback: Callable[..., Any]) -> Callable[..., Any]:
    """torch's function of that name (`a.b` for one in a module of its own), or the fallback."""
    found: Any = owner
    for part in name.split("."):
        found = getattr(found, part, None)
    return found if callable(found) else fallback


running_pass: Callable[[], int] = _of(torch._C, "_current_graph_task_id", lambda: -1)
"""torch's number of the backward pass running in this thread; -1: none is (or it cannot say)."""

keeps_graph: Callable[[], bool] = _of(
    torch._C, "_autograd._get_current_graph_task_keep_graph", lambda: True
)
"""Whether the running pass leaves its graph to be gone through again. Unknown: it may."""

hooks_on_saving: Callable[[bool], Any] = _of(
    torch._C, "_autograd._top_saved_tensors_default_hooks", lambda ignored: ()
)
"""The hooks that what autograd saves goes through now (a checkpoint's, `save_on_cpu`'s); None:
it is saved as it is. Unknown (before torch 2.8): there may be some, so inputs are copied."""

functorch_level: Callable[[], int | None] = _of(
    torch._C, "_functorch.maybe_current_level", lambda: None
)
"""How many `torch.func` transforms are under way; None: none is."""

is_view: Callable[[Tensor], bool] = _of(Tensor, "_is_view", lambda tensor: False)
"""Whether a tensor is a view of another one, which autograd keeps track of."""

_will_execute: Callable[[Node], bool] | None
_will_execute = getattr(torch._C, "_will_engine_execute_node", None)


def will_run(node: Node) -> bool:
    """Whether the running backward pass will go through this node: of a leaf, add to its `.grad`.

    Unknown: it is taken to. A pass for `torch.autograd.grad` then looks like any other, and the
    audit finds patterns that are in no gradient.
    """
    if _will_execute is None:
        return True
    try:
        return _will_execute(node)
    except RuntimeError:  # torch.autograd.grad asked for this very leaf: nothing is added to it
        return False


def at_end_of_pass(callback: Callable[[], None]) -> bool:
    """Have a function called when the running backward pass ends; False if torch has no way."""
    queue = getattr(getattr(Variable, "_execution_engine", None), "queue_callback", None)
    if queue is None:
        return False
    queue(callback)
    return True


def version_of(tensor: Tensor) -> int:
    """How often a tensor was changed in place; -1 where torch does not count (inference mode)."""
    try:
        return tensor._version
    except (RuntimeError, AttributeError):
        return -1


def take_away(handle: RemovableHandle) -> None:
    """Remove a global hook, and what torch's handle forgets of it in the tables beside."""
    handle.remove()
    for name in ("_global_forward_hooks_with_kwargs", "_global_forward_hooks_always_called"):
        getattr(torch_module, name, {}).pop(handle.id, None)


def global_hooks() -> dict[str, int]:
    """How many global hooks on modules there are, by torch's table: none of ours may stay."""
    tables = vars(torch_module).items()
    return {n: len(t) for n, t in tables if n.startswith("_global_") and isinstance(t, Mapping)}


def saved(node: Node, name: str) -> Tensor | None:
    """What a node has saved under a name (`mat1`, `indices`); None if that cannot be read.

    Raises the RuntimeError torch would raise if it was changed in place or is freed already.
    """
    found = getattr(node, f"_saved_{name}", None)
    return found if isinstance(found, Tensor) else None


def promise_of(node: Node, name: str) -> tuple[Callable[[Any], Tensor], Any] | None:
    """How to get at what a hook on saving took in place of the tensor (an activation checkpoint's
    promise): a function and what to give it. None if autograd has saved the tensor itself, or if
    torch cannot say (then `saved` is asked, which is right but for a checkpoint's)."""
    raw = getattr(node, f"_raw_saved_{name}", None)
    unpack = getattr(raw, "unpack_hook", None)
    return None if unpack is None else (unpack, getattr(raw, "data", None))


def fact_of(node: Node, name: str, fallback: Any = None) -> Any:
    """A plain fact that a node has saved: `alpha`, `dim0`, `split_sizes`, `padding_idx`, ..."""
    return getattr(node, f"_saved_{name}", fallback)


def marks_of(node: Any) -> dict[object, object]:
    """What can be written on a node: it lives as long as the node, whatever holds that."""
    found: dict[object, object] = node.metadata
    return found


def shape_of_output(node: Node) -> tuple[int, ...] | None:
    """The shape of what a node gave in the forward pass; None if torch does not say."""
    known: Any = getattr(node, "_input_metadata", ())
    return tuple(known[0].shape) if len(known) == 1 else None


def sequence_number(node: Any) -> int:
    """The place of a node in the order in which the graph was made; 0 for all if unknown."""
    asked = getattr(node, "_sequence_nr", None)
    return int(asked()) if asked is not None else 0
