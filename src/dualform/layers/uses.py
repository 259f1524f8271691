"""Weights at work in an autograd graph: every product of a parameter with an input, found.

A module's hook sees only calls of that module. `nn.MultiheadAttention` multiplies with slices of
one packed parameter, and functional code with any weight it can reach; but whatever wrote it, each
product leaves a node in the graph, with the input saved in it and the parameter at the end of a
few views (transposed, split, cast). Reading the graph changes nothing.

Why it is hard: the same product leaves different traces (a bias inside the product's node or
added afterwards, positions flattened before it and unfolded after it), and a product must never be
counted twice or taken for something it is not. What is not recognised is reported as such: products
of more than two dimensions (einsum, bmm), or with the weight first, are not.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import Node

from dualform.layers.parts import VIEWS, Part, signed
from dualform.layers.torch_internals import fact_of

Edge = tuple[Node, int]
"""A node and which of its inputs."""

UNFOLDED = frozenset({"ViewBackward0", "UnsafeViewBackward0", "SqueezeBackward4"})
"""What gives the rows of a product the leading shape of its input."""

PRODUCTS = {("AddmmBackward0", 2): "mat1", ("MmBackward0", 1): "self"}
"""Nodes that multiply with a weight as which of their inputs, and what they call the key."""

Leaves = Mapping[Node, tuple[str, tuple[int, ...]]]
"""Parameters at the ends of a graph: their nodes, with name and shape."""


@dataclass(frozen=True, eq=False)
class Product:
    """One product of a weight (some rows of a parameter) with an input, and its bias; or a look-up.

    `kind` is the kind of layer it makes; the node has saved the key under the name `saved`. A hook
    on `end` gets the error signal before anything is added to the gradient of weight or bias;
    `unfolded` gives the rows their leading shape. `edges` are those by which parameters come in.
    """

    kind: str
    weight: Part
    bias: Part | None
    node: Node
    end: Node
    unfolded: Node | None
    saved: str
    edges: tuple[Edge, ...]
    padding: int | None = None

    @property
    def nodes(self) -> list[Node | None]:
        """By which it may be known: an output's own node is one of them."""
        return [self.node, self.unfolded, *(node for node, _ in self.edges)]


@dataclass(frozen=True, eq=False)
class OtherUse:
    """A use of a parameter that is not a product with an input: which node."""

    parameter: str
    node: Node
    unfolded: Node | None = None

    @property
    def nodes(self) -> list[Node | None]:
        return [self.node, self.unfolded]


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

    def uses(self, leaves: Leaves) -> Iterator[Product | OtherUse]:
        """Every use of the parameters at these leaves: products, and what is none of them.

        All that are not matrices are taken for biases: they come with the product they are added
        to, or as another use.
        """
        added: set[Edge] = set()
        matrices = {leaf: known for leaf, known in leaves.items() if len(known[1]) == 2}
        for leaf, (name, shape) in matrices.items():
            for node, slot, part in self._consumers(leaf, Part(name, 0, shape[0], "rc")):
                use = None if part is None else self._use(node, slot, part, shape[1], leaves)
                if use is not None:
                    added.update(use.edges[1:])
                yield use or OtherUse(name, node)
        for leaf in leaves.keys() - matrices.keys():
            name, shape = leaves[leaf]
            whole = Part(name, 0, shape[0] if shape else 1, "r")
            for node, slot, _ in self._consumers(leaf, whole):
                if (node, slot) not in added:
                    yield OtherUse(name, node, self._only_user(node, UNFOLDED))

    def _consumers(self, leaf: Node, whole: Part) -> Iterator[tuple[Node, int, Part | None]]:
        """Find who uses a parameter, through views of it: node, input, and which part of it."""
        todo: list[tuple[Node, Part]] = [(leaf, whole)]
        while todo:
            node, part = todo.pop()
            for user, slot, number in self._users.get(node, ()):
                seen = part if node is leaf else VIEWS[node.name()](node, number, part)
                if user.name() in VIEWS and seen is not None:
                    todo.append((user, seen))
                    if user in self._ends:  # what becomes of it is not known
                        yield user, slot, None
                else:
                    yield user, slot, seen

    def _use(
        self, node: Node, slot: int, part: Part, columns: int, leaves: Leaves
    ) -> Product | None:
        """The product or look-up a node is, if it is one; `columns` are those of the parameter."""
        name, bias, edges, end = node.name(), None, [(node, slot)], node
        if name == "EmbeddingBackward0":
            return _look_up(node, slot, part)
        saved = PRODUCTS.get((name, slot))
        if saved is None:
            return None
        unfolded = self._only_user(node, UNFOLDED)
        if name == "MmBackward0":
            bias, edge = self._added(node if unfolded is None else unfolded, leaves)
            if edge is not None:
                edges.append(edge)
                end = edge[0]  # the bias gets its gradient before the product's turn comes
        elif fact_of(node, "alpha", 1) == fact_of(node, "beta", 1) == 1:
            bias = _source(node.next_functions[0], leaves)
            edges.append((node, 0))
        else:
            return None
        kind, outputs = ("linear", part.rows) if part.dims == "cr" else ("transposed", columns)
        if bias is not None and bias.rows != outputs:
            return None
        return Product(kind, part, bias, node, end, unfolded, saved, tuple(edges))

    def _only_user(self, node: Node, names: Collection[str]) -> Node | None:
        users = self._users.get(node, ())
        return users[0][0] if len(users) == 1 and users[0][0].name() in names else None

    def _added(self, node: Node, leaves: Leaves) -> tuple[Part | None, Edge | None]:
        """Find a bias that is added to the result of a product: by which input of which node."""
        added = self._only_user(node, ("AddBackward0",))
        if added is not None and fact_of(added, "alpha", 1) == 1:
            for slot, edge in enumerate(added.next_functions):
                bias = None if edge[0] is node else _source(edge, leaves)
                if bias is not None:
                    return bias, (added, slot)
        return None, None


def _look_up(node: Node, slot: int, part: Part) -> Product | None:
    if slot or part.dims != "rc" or fact_of(node, "sparse") or fact_of(node, "scale_grad_by_freq"):
        return None
    padding = signed(int(fact_of(node, "padding_idx", -1)))
    edges, known = ((node, 0),), None if padding < 0 else padding
    return Product("embedding", part, None, node, node, None, "indices", edges, known)


def _source(edge: tuple[Node | None, int], leaves: Leaves) -> Part | None:
    """The vector (or some of its entries) that an edge comes from, through views of it."""
    path: list[tuple[Node, int]] = []
    node, number = edge
    while node is not None and node not in leaves and node.name() in VIEWS:
        path.append((node, number))
        node, number = node.next_functions[0]
    if node is None or node not in leaves or len(leaves[node][1]) != 1:
        return None
    name, shape = leaves[node]
    part: Part | None = Part(name, 0, shape[0], "r")
    for view, output in reversed(path):
        part = None if part is None else VIEWS[view.name()](view, output, part)
    return part


def tensors_in(value: Any, depth: int = 6) -> Iterator[Tensor]:
    """Every tensor in what a module was given or returned: in containers, objects with fields."""
    if isinstance(value, Tensor):
        yield value
    elif depth and not isinstance(value, (nn.Module, type, str)):
        if not isinstance(value, (Mapping, list, tuple, set, frozenset)):
            value = getattr(value, "__dict__", None) or ()
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from tensors_in(item, depth - 1)
