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

from dualform.layers.saved import Saved

Edge = tuple[Node, int]
"""A node and which of its inputs."""

SAME = frozenset({"ToCopyBackward0", "AliasBackward0", "CloneBackward0"})
UNFOLDED = frozenset({"ViewBackward0", "UnsafeViewBackward0", "SqueezeBackward4"})
"""What gives the rows of a product the leading shape of its input."""

WHOLE = (1 << 63) - 1

TOKENS = (torch.int64, torch.int32)
"""What tokens come in; an index of another type means something else."""

Leaves = Mapping[Node, tuple[str, tuple[int, ...]]]
"""Parameters at the ends of a graph: their nodes, with name and shape."""


@dataclass(frozen=True)
class Part:
    """Some rows of a parameter, perhaps transposed, as the graph knows them."""

    parameter: str
    start: int
    stop: int
    transposed: bool = False
    is_vector: bool = False


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
                vectors.append((leaf, Part(name, 0, shape[0] if shape else 1, is_vector=True)))
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
                seen = part if node is leaf else _viewed(node, number, part)
                if user.name() in VIEWS and seen is not None:
                    todo.append((user, seen))
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
        bias: Part | None = None
        edges: list[Edge] = [(node, slot)]
        flipped = name == "MmBackward0" and slot == 0  # the weight comes first: W x
        if name == "AddmmBackward0" and slot == 2:
            if found._saved_alpha != 1 or found._saved_beta != 1:
                return None
            key = Saved.by(node, "mat1")
            bias = _source(node.next_functions[0], leaves)
            edges.append((node, 0))
        elif name == "MmBackward0":
            key = Saved.by(node, "mat2", flipped=True) if flipped else Saved.by(node, "self")
        else:
            return None
        linear = part.transposed is not flipped
        unfolded, end = None if flipped else self._only_user(node, UNFOLDED), node
        if bias is None and name == "MmBackward0" and not flipped:
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


def _look_up(node: Any, slot: int, part: Part) -> Use | None:
    if slot or part.transposed or node._saved_sparse or node._saved_scale_grad_by_freq:
        return None
    tokens, padding = Saved.by(node, "indices", tokens=True), _signed(node._saved_padding_idx)
    edges = ((node, 0),)
    return Use("embedding", part, None, node, node, None, tokens, False, edges, padding)


def _indexed(node: Any, slot: int, part: Part) -> Use | None:
    """A look-up by indexing, `weight[tokens]`: one index, of whole numbers, into the rows."""
    name = "indices" if node.name() == "IndexBackward0" else "index"
    raw = getattr(node, f"_raw_saved_{name}")
    several = raw if isinstance(raw, tuple) else (raw,)
    if slot or part.transposed or len(several) != 1 or several[0].unpack_hook is not None:
        return None
    index = getattr(node, f"_saved_{name}")
    index = index[0] if isinstance(index, tuple) else index
    if index.dtype not in TOKENS or (name == "index" and _dim(node._saved_dim, part)):
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
    part: Part | None = Part(name, 0, shape[0] if shape else 1, is_vector=True)
    if len(shape) != 1:
        return None
    for view, output in reversed(path):
        part = None if part is None else _viewed(view, output, part)
    return part


def _viewed(node: Node, number: int, part: Part) -> Part | None:
    """What a view (its output of that number) makes of a part; None if it is not rows of it."""
    return VIEWS[node.name()](node, number, part)


def _flip(node: Any, number: int, part: Part) -> Part | None:
    if part.is_vector:
        return None
    return Part(part.parameter, part.start, part.stop, not part.transposed)


def _transpose(node: Any, number: int, part: Part) -> Part | None:
    dims = {_dim(node._saved_dim0, part), _dim(node._saved_dim1, part)}
    return part if len(dims) == 1 else _flip(node, number, part)


def _permute(node: Any, number: int, part: Part) -> Part | None:
    dims = [_dim(d, part) for d in node._saved_dims]
    return part if dims == sorted(dims) else _flip(node, number, part)


def _split(node: Any, number: int, part: Part) -> Part | None:
    sizes = getattr(node, "_saved_split_sizes", None)
    if sizes is None:
        size = int(node._saved_split_size)
        return _rows(node, part, size * number, size * (number + 1))
    start = sum(map(int, sizes[:number]))
    return _rows(node, part, start, start + int(sizes[number]))


def _slice(node: Any, number: int, part: Part) -> Part | None:
    if int(node._saved_step) != 1:
        return None
    length = part.stop - part.start
    start, stop = int(node._saved_start), int(node._saved_end)
    start, stop = (n + length if n < 0 else n for n in (_signed(start), _signed(stop)))
    dim = _dim(node._saved_dim, part)
    if dim != _rows_dim(part):  # columns: only all of them
        return part if start == 0 and stop >= node._saved_self_sym_sizes[dim] else None
    return _rows(node, part, max(0, start), stop)


def _rows(node: Any, part: Part, start: int, stop: int) -> Part | None:
    if _dim(node._saved_dim, part) != _rows_dim(part):
        return None
    stop = min(part.start + stop, part.stop)
    if part.start + start > stop:
        return None
    return Part(part.parameter, part.start + start, stop, part.transposed, part.is_vector)


def _rows_dim(part: Part) -> int:
    return 1 if part.transposed else 0


def _signed(number: int) -> int:
    """Torch keeps negative numbers in unsigned ones in some of what it saves."""
    return number - (1 << 64) if number > WHOLE else number


def _dim(dim: int, part: Part) -> int:
    return _signed(int(dim)) % (1 if part.is_vector else 2)


VIEWS: dict[str, Callable[[Any, int, Part], Part | None]] = {
    "TBackward0": _flip,
    "TransposeBackward0": _transpose,
    "PermuteBackward0": _permute,
    "SplitBackward0": _split,
    "SplitWithSizesBackward0": _split,
    "SliceBackward0": _slice,
} | {name: lambda node, number, part: part for name in SAME}


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
