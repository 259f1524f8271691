"""Weights at work in an autograd graph: every product of a parameter with an input, found.

`nn.MultiheadAttention` multiplies with slices of one packed parameter, and functional code with any
weight it can reach; but whatever wrote it, each product leaves a node in the graph, with the input
saved in it and the parameter at the end of a few views: transposed, split, sliced, cast.

Why it is hard: the same product leaves different traces (a bias inside the product's node or
added afterwards, positions flattened before it and unfolded after it). What is not recognised is
reported as such: products of more than two dimensions (einsum, bmm), or with the weight first.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import Node

from dualform.layers.embedding import PADDING
from dualform.layers.layer import Layer
from dualform.layers.torch_internals import fact_of, shape_of_output

Edge = tuple[Node, int]  # a node and which of its inputs
Leaves = Mapping[Node, tuple[str, tuple[int, ...]]]
"""Parameters at the ends of a graph: their nodes, with name and shape."""

COPIES = ("ToCopyBackward0", "AliasBackward0", "CloneBackward0")
VIEWS: dict[str, tuple[str, ...]] = dict.fromkeys(COPIES, ()) | {
    "TBackward0": (),
    "TransposeBackward0": ("dim0", "dim1"),
    "PermuteBackward0": ("dims",),
    "SplitBackward0": ("dim", "split_size"),
    "SplitWithSizesBackward0": ("dim", "split_sizes"),
    "SliceBackward0": ("dim", "start", "end", "step"),
}
"""What may lie between a parameter and a product, and what such a node says of itself."""
UNFOLDED = {"ViewBackward0", "UnsafeViewBackward0", "SqueezeBackward4"}
"""What gives the rows of a product the leading shape of its input."""
PRODUCTS = {
    ("AddmmBackward0", 2, "cr"): ("linear", "mat1"),
    ("AddmmBackward0", 2, "rc"): ("transposed", "mat1"),
    ("MmBackward0", 1, "cr"): ("linear", "self"),
    ("MmBackward0", 1, "rc"): ("transposed", "self"),
    ("EmbeddingBackward0", 0, "rc"): ("embedding", "indices"),
}
"""A node, its input, how that shows a weight: the kind of layer, what the node calls the key."""
USUAL = {"alpha": 1, "beta": 1, "sparse": False, "scale_grad_by_freq": False}
"""What such nodes have to say of themselves if they say it."""


@dataclass(frozen=True)
class Part:
    """Some rows of a parameter: `dims` are "rc" (rows, columns), "cr", or "r" of a vector; ""
    stands for anything else that is made of it."""

    parameter: str
    shape: tuple[int, ...]
    start: int
    stop: int
    dims: str

    def through(self, view: Node, number: int) -> Part:
        """What a view (its output of that number) shows of it."""
        facts = [fact_of(view, fact) for fact in VIEWS[view.name()]]
        other = replace(self, dims="")
        if None in facts or not self.dims:
            return other
        match view.name(), facts:
            case "TBackward0", _:
                return replace(self, dims=self.dims[::-1])
            case "TransposeBackward0", [one, two]:
                return replace(self, dims=self.dims[:: -1 if (one - two) % 2 else 1])
            case "PermuteBackward0", [dims]:
                return replace(self, dims=self.dims[:: -1 if dims[0] % 2 else 1])
            case "SplitBackward0", [dim, size]:
                start, stop, step = size * number, size * (number + 1), 1
            case "SplitWithSizesBackward0", [dim, sizes]:
                start, stop, step = sum(sizes[:number]), sum(sizes[: number + 1]), 1
            case "SliceBackward0", [dim, start, stop, step]:
                rows = self.stop - self.start
                start, stop = (n + rows * (n < 0) for n in map(signed, (start, stop)))
            case _:  # a copy
                return self
        start, stop = self.start + max(0, start), min(self.start + stop, self.stop)
        are_rows = self.dims[dim % len(self.dims)] == "r" and step == 1 and start < stop
        return replace(self, start=start, stop=stop) if are_rows else other


@dataclass(frozen=True, eq=False)
class Use:
    """One use of some rows of a parameter: a product with an input, and its bias; or a look-up.

    `layer` is the layer it makes, called after its weight; None: it has no patterns. The key is
    saved in `node` under the name `saved`; a hook on `end` gets the error signal before weight or
    bias get their gradients; `unfolded` gives the rows their leading shape.
    """

    parameter: str
    node: Node
    end: Node
    unfolded: Node | None
    layer: Layer | None = None
    saved: str = ""

    @property
    def shape(self) -> tuple[int, ...] | None:
        """The shape of its output, if that was unfolded."""
        found = None if self.unfolded is None else shape_of_output(self.unfolded)
        return found if found and self.layer and found[-1] == self.layer.out_features else None


class Graph:
    """The part of an autograd graph between some tensors and the leaves, or where it is to end."""

    def __init__(self, tensors: Iterable[Tensor], is_end: Callable[[Node], bool]) -> None:
        self._users: dict[Node, list[tuple[Node, int, int]]] = {}
        stack = [t.grad_fn for t in tensors if t.grad_fn is not None]
        self._ends, seen = set(stack), set()
        while stack:
            node = stack.pop()
            if node in seen or is_end(node):
                continue
            seen.add(node)
            for slot, (before, number) in enumerate(node.next_functions):
                if before is not None:
                    self._users.setdefault(before, []).append((node, slot, number))
                    stack.append(before)

    def uses(self, leaves: Leaves) -> Iterator[Use]:
        """Every use of the parameters at these leaves; a bias comes with its product."""
        parts: dict[Edge, Part] = {}
        for leaf, (name, shape) in leaves.items():
            dims = {1: "r", 2: "rc"}.get(len(shape), "")
            parts.update(self._consumers(leaf, Part(name, shape, 0, sum(shape[:1]), dims)))
        taken: set[Edge] = set()
        for edge, part in parts.items():
            end, (layer, saved) = edge[0], _product(*edge, part)
            if layer is None:
                continue
            unfolded = None if saved == "indices" else self._only_user(end, UNFOLDED)
            for place in self._sums(end, saved, unfolded):
                bias = parts.get(place)
                if bias and bias.dims == "r" and bias.stop - bias.start == layer.out_features:
                    layer = replace(layer, bias=bias.parameter, bias_offset=bias.start)
                    end, taken = place[0], taken | {place}
                    break
            taken.add(edge)
            yield Use(part.parameter, edge[0], end, unfolded, layer, saved)
        for edge in parts.keys() - taken:
            node = edge[0]
            yield Use(parts[edge].parameter, node, node, self._only_user(node, UNFOLDED))

    def _consumers(self, leaf: Node, whole: Part) -> Iterator[tuple[Edge, Part]]:
        """Find who uses a parameter, through views of it, and which part of it."""
        todo = [(leaf, whole)]
        while todo:
            node, part = todo.pop()
            for user, slot, number in self._users.get(node, ()):
                seen = part if node is leaf else part.through(node, number)
                is_view = user.name() in VIEWS
                todo += [(user, seen)] * is_view
                if not is_view or user in self._ends:  # what becomes of an end is not known
                    yield (user, slot), replace(seen, dims="") if is_view else seen

    def _sums(self, node: Node, saved: str, unfolded: Node | None) -> list[Edge]:
        """Where a bias may be added to a product: by its own node, or by the one that follows."""
        if saved != "self":
            return [(node, 0)] * (saved == "mat1")
        added = self._only_user(unfolded or node, {"AddBackward0"})
        if added is None or fact_of(added, "alpha", 1) != 1:
            return []
        return [(added, 0), (added, 1)]

    def _only_user(self, node: Node, names: Collection[str]) -> Node | None:
        users = self._users.get(node, ())
        return users[0][0] if len(users) == 1 and users[0][0].name() in names else None


def _product(node: Node, slot: int, part: Part) -> tuple[Layer | None, str]:
    """The layer that a part of a weight makes where it goes; under which name the key is saved."""
    kind, saved = PRODUCTS.get((node.name(), slot, part.dims), ("", ""))
    if not kind or any(fact_of(node, fact, usual) != usual for fact, usual in USUAL.items()):
        return None, saved
    shape, name = (part.stop - part.start, part.shape[1]), part.parameter
    widths = shape[::-1] if kind == "linear" else shape
    padded = ((PADDING, signed(fact_of(node, "padding_idx", -1))),) * (kind == "embedding")
    return Layer(name, kind, name, None, *widths, shape, part.start, details=padded), saved


def signed(number: Any) -> int:
    """torch keeps negative numbers in unsigned ones in some of what it saves."""
    return int(number) - (1 << 64) if number >= 1 << 63 else int(number)


def tensors_in(value: Any, depth: int = 6) -> Iterator[Tensor]:
    """Every tensor in containers and in objects with fields."""
    if isinstance(value, Tensor):
        yield value
    elif depth and not isinstance(value, (nn.Module, type, str)):
        if not isinstance(value, (Mapping, list, tuple, set, frozenset)):
            value = getattr(value, "__dict__", None) or ()
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from tensors_in(item, depth - 1)
