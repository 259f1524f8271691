"""`nn.MultiheadAttention`: where its projections are in the graph, and in which order its rows are.

It multiplies with its parameters by functions, never calling a module: all of it is found in the
few nodes between its outputs and its inputs. Inside, positions come first; given the batch first,
rows are put back into the order of the inputs, so that tags and neighbours fit.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import Node

from dualform.layers.uses import Graph, Use, tensors_in


def is_attention(module: nn.Module) -> bool:
    """Whether the module computes what `nn.MultiheadAttention` does."""
    return (
        isinstance(module, nn.MultiheadAttention)
        and type(module).forward is nn.MultiheadAttention.forward
        and "forward" not in vars(module)
    )


def projections(
    args: Any,
    kwargs: Mapping[str, Any],
    output: Any,
    leaves: Mapping[Node, tuple[str, tuple[int, ...]]],
) -> Iterator[Use]:
    """Every product with its parameters in one call of an attention."""
    given = {t.grad_fn for t in tensors_in([args, dict(kwargs)])}
    graph = Graph(tensors_in(output), given.__contains__)
    for use in graph.uses(leaves):
        if isinstance(use, Use):
            yield use


def batch_in(module: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> int | None:
    """How many examples a call holds, if the module takes them first; None if it does not."""
    query: Tensor = args[0] if args else kwargs["query"]
    return query.shape[0] if module.batch_first and query.dim() == 3 else None


def as_given(batch: int, rows: Tensor) -> Tensor:
    """Rows [L·B, d] as attention computes them, in the order they were given: [B·L, d]."""
    if not batch:
        return rows
    return rows.reshape(-1, batch, rows.shape[-1]).transpose(0, 1).reshape(rows.shape)
