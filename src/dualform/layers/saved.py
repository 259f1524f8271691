"""What a node of an autograd graph has saved: at hand, or computed anew when it is asked for.

An activation checkpoint keeps nothing of its inside. It leaves a promise in each node, and runs its
part of the network once more when the backward pass reaches the first of them. Whoever holds the
promise can ask for the tensor just before the node itself does.

Why it is hard: a checkpoint gives each tensor out once and forgets it, and the node would then find
nothing. So while it is asked here, it is kept from forgetting.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node


class Saved:
    """The input of a product as its node has saved it, as rows [n, d]: of tokens [n, 1].

    `flipped`: saved as columns. Holds no reference to the node: one that held itself would never be
    freed.
    """

    def __init__(
        self,
        tensor: Tensor | None,
        bring: Any = None,
        promise: Any = None,
        *,
        flipped: bool = False,
        tokens: bool = False,
        sizes: tuple[int, int] | None = None,
        lost: RuntimeError | None = None,
    ) -> None:
        self._tensor, self._bring, self._promise = tensor, bring, promise
        self._flipped, self._tokens, self._sizes = flipped, tokens, sizes
        self._lost = None if lost is None else str(lost)

    @classmethod
    def by(
        cls,
        node: Node,
        name: str,
        *,
        flipped: bool = False,
        tokens: bool = False,
        factor: int | None = None,
    ) -> Saved:
        """What a node has saved under a name; `factor`: by which of its inputs it multiplies it."""
        raw = getattr(node, f"_raw_saved_{name}")
        sizes = None if factor is None else _fitting(node, factor)
        if raw.unpack_hook is None:
            try:
                tensor = getattr(node, f"_saved_{name}").detach()
            except RuntimeError as error:  # it was changed in place since
                return cls(None, flipped=flipped, tokens=tokens, sizes=sizes, lost=error)
            return cls(tensor, flipped=flipped, tokens=tokens)
        promise = getattr(raw, "data", None)
        return cls(None, raw.unpack_hook, promise, flipped=flipped, tokens=tokens, sizes=sizes)

    @property
    def is_lost(self) -> bool:
        """Whether it was changed in place: torch will refuse a backward pass through the node."""
        return self._lost is not None

    @property
    def can_be_read(self) -> bool:
        """Whether there is a way to it; there may be none in other versions of torch.

        What is lost is an error for whoever reads it, as it is for torch.
        """
        return self._tensor is not None or self._promise is not None or self.is_lost

    @property
    def width(self) -> int | None:
        """How long the rows are; None if that cannot be told yet."""
        if self._tensor is None:
            return None if self._sizes is None else self._sizes[0]
        return self._tensor.shape[-2 if self._flipped else -1]

    @property
    def batch(self) -> int | None:
        """Of how many matrices they are the rows; None if that cannot be told yet."""
        if self._tensor is None:
            return None if self._sizes is None else self._sizes[1]
        return self._tensor.shape[:-2].numel()

    def read(self) -> Tensor:
        """The rows; from a checkpoint inside a backward pass, or at the cost of running it."""
        if self._lost is not None:
            raise RuntimeError(self._lost)
        tensor = self._brought() if self._tensor is None else self._tensor
        if self._tokens:
            return tensor.reshape(-1, 1)
        rows = tensor.mT if self._flipped else tensor
        return rows.reshape(-1, rows.shape[-1])

    def _brought(self) -> Tensor:
        promise = self._promise
        lends = isinstance(getattr(promise, "handles", None), dict)
        if not lends or torch._C._current_graph_task_id() == -1:  # then all of it is for us alone
            return self._bring(promise).detach()  # type: ignore[no-any-return]
        promise.handles = _Lasting(promise.handles)
        try:
            return self._bring(promise).detach()  # type: ignore[no-any-return]
        finally:
            promise.handles = dict(promise.handles)


def _fitting(node: Node, factor: int) -> tuple[int, int] | None:
    """How long rows must be, and of how many matrices, to be multiplied by an input of a node.

    A promise does not tell; the node that the other factor comes from does, in most versions of
    torch. As the first factor it is multiplied along its last dimension, else along the one before.
    """
    before, number = node.next_functions[factor]
    known = getattr(before, "_input_metadata", ())
    if number >= len(known):
        return None
    shape = torch.Size(known[number].shape)
    return shape[-1 if factor == 0 else max(-2, -len(shape))], shape[:-2].numel()


class _Lasting(dict[Any, Any]):
    """What a checkpoint knows of a tensor in each backward pass; None would mean: given out."""

    def __setitem__(self, backward: Any, handle: Any) -> None:
        if handle is not None:
            super().__setitem__(backward, handle)
