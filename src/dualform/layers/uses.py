"""Weights at work in an autograd graph: every product of a parameter with an input, found.

A module's hook sees only calls of that module. `nn.MultiheadAttention` multiplies with slices of
one packed parameter, and functional code with any weight it can reach; but whatever wrote it, each
product leaves a node in the graph, with the input saved in it and the parameter at the end of a
few views (transposed, split, cast). Reading the graph changes nothing.

Why it is hard: the same product leaves different traces (a bias inside the product's node or
added afterwards, positions flattened before it and unfolded after it), and a product must never be
counted twice or taken for something it is not. Whatever is not recognised is reported as such:
guessing would only be found out by the audit.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from dualform.layers.parts import VIEWS, Part, dim_of, signed, viewed
from dualform.layers.saved import Saved

Edge = tuple[Node, int]
"""A node and which of its inputs."""

UNFOLDED = frozenset({"ViewBackward0", "UnsafeViewBackward0", "SqueezeBackward4"})
"""What gives the rows of a product the leading shape of its input."""

TOKENS = (torch.int64, torch.int32)
"""What tokens come in; an index of another type means something else."""

PRODUCTS = {
    ("AddmmBackward0", 2): ("mat1", False),
    ("MmBackward0", 1): ("self", False),
    ("MmBackward0", 0): ("mat2", True),
    ("BmmBackward0", 1): ("self", False),
    ("BmmBackward0", 0): ("mat2", True),
    ("MvBackward0", 0): ("vec", False),
    ("DotBackward0", 0): ("tensor", False),
    ("DotBackward0", 1): ("self", False),
}
"""Nodes that multiply, and as which of their inputs a weight: where the key is, if as columns."""

BARE = frozenset({"MmBackward0", "BmmBackward0", "DotBackward0"})
"""Those to which a bias may be added afterwards."""

Leaves = Mapping[Node, tuple[str, tuple[int, ...]]]
"""Parameters at the ends of a graph: their nodes, with name and shape."""


@dataclass(frozen=True, eq=False)
class Use:
    """One product of a weight (some rows of a parameter) with an input, and its bias.

    `kind` is the kind of layer it makes. `key` gives the input [n, d_in] (of a look-up the tokens,
    [n, 1]); an activation checkpoint computes it anew when it is asked. A hook on `end` gets the
    error signal [..., d_out] (`flipped`: transposed) before anything is added to the gradient of
    weight or bias, one on `unfolded` its leading shape. `padding` is a token that writes nothing.
    """

    kind: str
    weight: Part
    bias: Part | None
    node: Node
    end: Node
    unfolded: Node | None
    key: Saved
    flipped: bool
    edges: tuple[Edge, ...]
    padding: int | None = None

    @property
    def parameter(self) -> str:
        return self.weight.parameter

    @property
    def nodes(self) -> list[Node]:
        """By which it may be known: an output's own node is one of them."""
        unfolded = [] if self.unfolded is None else [self.unfolded]
        return [self.node, *unfolded, *(node for node, _ in self.edges)]


@dataclass(frozen=True, eq=False)
class Unknown:
    """A use of a parameter that is not a product with an input: which node, and its name."""

    parameter: str
    node: Node
    unfolded: Node | None

    @property
    def name(self) -> str:
        return str(self.node.name())

    @property
    def nodes(self) -> list[Node]:
        return [self.node, *([] if self.unfolded is None else [self.unfolded])]


class Graph:
    """The part of an autograd graph between some tensors and the leaves, or where it is to end."""

    def __init__(
        self, tensors: Iterable[Tensor], is_end: Callable[[Node], bool] = lambda node: False
    ) -> None:
        self._users: dict[Node, list[tuple[Node, int, int]]] = {}
        stack = [t.grad_fn for t in tensors if t.grad_fn is not None]
        self._ends = set(stack)
        seen: set[Node] = set()
        while stack:
            node = stack.pop()
            if node in seen or is_end(node):
                continue
            seen.add(node)
            for slot, (before, number) in enumerate(node.next_functions):
                if before is None:
                    continue
                users = self._users.get(before)
                if users is None:
                    self._users[before] = [(node, slot, number)]
                    stack.append(before)
                else:
                    users.append((node, slot, number))

    def uses(self, leaves: Leaves) -> Iterator[Use | Unknown]:
        """Every use of the parameters at these leaves: products, and what is none of them.

        A leaf is a parameter's node with its name and shape. Vectors are biases: they come with
        the product they are added to, or as unknown.
        """
        added: set[Edge] = set()
        vectors = []
        for leaf, (name, shape) in leaves.items():
            if leaf not in self._users:
                continue
            if len(shape) != 2:
                vectors.append((leaf, Part(name, 0, shape[0] if shape else 1, "r")))
                continue
            for node, slot, part in self._consumers(leaf, Part(name, 0, shape[0])):
                use = None if part is None else self._use(node, slot, part, shape[1], leaves)
                if use is None:
                    yield Unknown(name, node, None)
                    continue
                added.update(use.edges[1:])
                yield use
        for leaf, vector in vectors:
            for node, slot, _ in self._consumers(leaf, vector):
                if (node, slot) not in added:
                    yield Unknown(vector.parameter, node, self._only_user(node, UNFOLDED))

    def _consumers(self, leaf: Node, whole: Part) -> Iterator[tuple[Node, int, Part | None]]:
        """Who uses a parameter, through views of it: node, input, and which part of it."""
        todo: list[tuple[Node, Part]] = [(leaf, whole)]
        while todo:
            node, part = todo.pop()
            for user, slot, number in self._users.get(node, ()):
                seen = part if node is leaf else viewed(node, number, part)
                if user.name() in VIEWS and seen is not None:
                    todo.append((user, seen))
                    if user in self._ends:  # what becomes of it is not known
                        yield user, slot, None
                else:
                    yield user, slot, seen

    def _use(self, node: Node, slot: int, part: Part, columns: int, leaves: Leaves) -> Use | None:
        """The product or look-up a node is, if it is one; `columns` are those of the parameter."""
        if node.name() == "EmbeddingBackward0":
            return _look_up(node, slot, part)
        if node.name() in ("IndexBackward0", "IndexSelectBackward0"):
            return _indexed(node, slot, part)
        return self._product(node, slot, part, columns, leaves)

    def _product(
        self, node: Node, slot: int, part: Part, columns: int, leaves: Leaves
    ) -> Use | None:
        found: Any = node
        name = node.name()
        if (name, slot) not in PRODUCTS:
            return None
        saved, flipped = PRODUCTS[name, slot]
        key = Saved.by(node, saved, flipped=flipped, factor=slot)
        first = slot == 0  # the weight comes first: W x
        if name == "DotBackward0" and 1 not in part.sizes(columns):
            return None  # only what torch.tensordot makes of one input and one output
        if part.dims.startswith("?") and key.width != part.sizes(columns)[1 if first else 0]:
            return None
        if not _is_whole_in(name, part, key):
            return None
        bias: Part | None = None
        edges: list[Edge] = [(node, slot)]
        if name == "AddmmBackward0":
            if found._saved_alpha != 1 or found._saved_beta != 1:
                return None
            bias = _source(node.next_functions[0], leaves)
            edges.append((node, 0))
        linear = part.transposed is not first
        unfolded, end = None if first else self._only_user(node, UNFOLDED), node
        if name == "BmmBackward0" and "b" not in part.dims:  # the one batch is torch.einsum's
            unfolded = None if first else self._unfolded(node, part)
            if unfolded is None:
                return None
        if bias is None and name in BARE and not first:
            top = node if unfolded is None else unfolded
            bias, edge = self._added(top, leaves)
            if edge is not None:
                edges.append(edge)
                end = edge[0]  # the bias gets its gradient before the product's turn comes
        outputs = part.stop - part.start if linear else columns
        if bias is not None and bias.stop - bias.start != outputs:
            return None
        kind = "linear" if linear else "transposed"
        return Use(kind, part, bias, node, end, unfolded, key, flipped, tuple(edges))

    def _unfolded(self, node: Node, part: Part) -> Node | None:
        """The node by which `torch.einsum` gives its result, if its rows are in the input's order.

        It unfolds the rows, permutes dimensions, and drops those of length 1.
        """
        if not _gives_rows(node, part):
            return None
        top = self._only_user(node, UNFOLDED)
        permuted: Any = None if top is None else self._only_user(top, ("PermuteBackward0",))
        if permuted is None:
            return top
        last: Any = self._only_user(permuted, UNFOLDED)
        if last is None:
            return None
        sizes = last._saved_self_sym_sizes
        order = [int(d) for d, size in zip(permuted._saved_dims, sizes, strict=True) if size != 1]
        return last if order == sorted(order) else None

    def _only_user(self, node: Node, names: Collection[str]) -> Node | None:
        users = self._users.get(node, ())
        return users[0][0] if len(users) == 1 and users[0][0].name() in names else None

    def _added(self, node: Node, leaves: Leaves) -> tuple[Part | None, Edge | None]:
        """A bias that is added to the result of a product, and by which input of which node."""
        added: Any = self._only_user(node, ("AddBackward0",))
        if added is None or added._saved_alpha != 1:
            return None, None
        for slot, edge in enumerate(added.next_functions):
            if edge[0] is not None and edge[0] is not node:
                bias = _source(edge, leaves)
                if bias is not None:
                    return bias, (added, slot)
        return None, None


def _is_whole_in(product: str, part: Part, key: Saved) -> bool:
    """Whether a product multiplies with the part as a whole: each matrix of a batch with all of it.

    A batch may also be its rows, one by one: `torch.einsum("od,nod->no", weight, input)`.
    """
    if product != "BmmBackward0":
        return not part.dims.startswith("b")
    if part.dims.startswith("?"):
        return key.batch == 1
    return part.dims[0] in "b1" and len(part.dims) == 3


def _gives_rows(node: Node, part: Part) -> bool:
    """Whether outputs are the last dimension of what `torch.einsum` gives, whatever the input.

    One that comes after them may be of length 1 now, and longer in another step. The weight's own
    dimensions tell: einsum brings them to the order of the result, those it sums over last.
    """
    reshaped = node.next_functions[1][0]
    permuted: Any = None if reshaped is None else reshaped.next_functions[0][0]
    if not part.dims.startswith("?") or permuted is None or permuted.name() != "PermuteBackward0":
        return True
    order = [signed(int(d)) % len(permuted._saved_dims) for d in permuted._saved_dims]
    dims = dict(zip(order, part.dims[1:], strict=True))
    kept, summed = ("r", "c") if part.transposed else ("c", "r")
    return "".join(dims[i] for i in sorted(dims)).find(kept + summed) >= 0


def _look_up(node: Any, slot: int, part: Part) -> Use | None:
    if slot or part.dims != "rc" or node._saved_sparse or node._saved_scale_grad_by_freq:
        return None
    tokens, padding = Saved.by(node, "indices", tokens=True), signed(node._saved_padding_idx)
    edges = ((node, 0),)
    return Use("embedding", part, None, node, node, None, tokens, False, edges, padding)


def _indexed(node: Any, slot: int, part: Part) -> Use | None:
    """A look-up by indexing, `weight[tokens]`: one index, of whole numbers, into the rows."""
    name = "indices" if node.name() == "IndexBackward0" else "index"
    raw = getattr(node, f"_raw_saved_{name}")
    several = raw if isinstance(raw, tuple) else (raw,)
    if slot or part.dims != "rc" or len(several) != 1 or several[0].unpack_hook is not None:
        return None
    index = getattr(node, f"_saved_{name}")
    index = index[0] if isinstance(index, tuple) else index
    if index.dtype not in TOKENS or (name == "index" and dim_of(node._saved_dim, part)):
        return None
    tokens = Saved(index % (part.stop - part.start), tokens=True)  # negative: from the end
    return Use("embedding", part, None, node, node, None, tokens, False, ((node, 0),))


def _source(edge: tuple[Node | None, int], leaves: Leaves) -> Part | None:
    """The vector (or some of its entries) that an edge comes from, through views of it."""
    path: list[tuple[Node, int]] = []
    node, number = edge
    while node is not None and node not in leaves:
        if node.name() not in VIEWS:
            return None
        path.append((node, number))
        node, number = node.next_functions[0]
    if node is None:
        return None
    name, shape = leaves[node]
    part: Part | None = Part(name, 0, shape[0] if shape else 1, "r")
    if len(shape) != 1:
        return None
    for view, output in reversed(path):
        part = None if part is None else viewed(view, output, part)
    return None if part is None or part.dims.lstrip("1") != "r" else part


def tensors_in(value: Any, depth: int = 6) -> Iterator[Tensor]:
    """Every tensor in what a module was given or returned: in containers, objects with fields."""
    if isinstance(value, Tensor):
        yield value
    elif depth and isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item, depth - 1)
    elif depth and isinstance(value, (list, tuple, set, frozenset)):
        for item in value:
            yield from tensors_in(item, depth - 1)
    elif depth and not isinstance(value, (nn.Module, type)):
        yield from tensors_in(getattr(value, "__dict__", None) or (), depth - 1)


def in_transform() -> bool:
    """Whether a `torch.func` transform is under way: its graphs are not the ones to read."""
    return torch._C._functorch.maybe_current_level() is not None
