"""A parameter seen through views: which of its rows, and which dimension is which.

Between a parameter and the product it is part of, code may transpose, split, slice, unsqueeze or
expand it; `torch.einsum` does several of these one after the other. Each leaves a node in the graph
that says what was done, though not always the shape that came of it: after a reshape only the order
of rows and columns is known, and whoever finds the product has to compare sizes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from torch.autograd.graph import Node

SAME = frozenset({"ToCopyBackward0", "AliasBackward0", "CloneBackward0"})

WHOLE = (1 << 63) - 1


@dataclass(frozen=True)
class Part:
    """Some rows of a parameter, as the graph knows them.

    `dims` says what each dimension is: "r" rows, "c" columns, "1" a single one, "b" copies. A "?"
    in front: only the order is known, there may be more dimensions of length 1.
    """

    parameter: str
    start: int
    stop: int
    dims: str = "rc"

    @property
    def is_vector(self) -> bool:
        return "c" not in self.dims

    @property
    def transposed(self) -> bool:
        return not self.is_vector and self.dims.index("c") < self.dims.index("r")

    @property
    def order(self) -> str:
        """Rows and columns in the order they come."""
        return "".join(d for d in self.dims if d in "rc")

    def sizes(self, columns: int) -> tuple[int, int]:
        """How long the two dimensions are, in their order; `columns` are the parameter's."""
        rows = self.stop - self.start
        return (columns, rows) if self.transposed else (rows, columns)


def viewed(node: Node, number: int, part: Part) -> Part | None:
    """What a view (its output of that number) makes of a part; None if it is not rows of it."""
    if part.dims.startswith("?") and node.name() not in SAME:
        return None
    return VIEWS[node.name()](node, number, part)


def signed(number: int) -> int:
    """Torch keeps negative numbers in unsigned ones in some of what it saves."""
    return number - (1 << 64) if number > WHOLE else number


def dim_of(dim: int, part: Part) -> int:
    return signed(int(dim)) % len(part.dims)


def _flip(node: Any, number: int, part: Part) -> Part:
    return replace(part, dims=part.dims[::-1])


def _transpose(node: Any, number: int, part: Part) -> Part:
    dims = list(part.dims)
    one, other = dim_of(node._saved_dim0, part), dim_of(node._saved_dim1, part)
    dims[one], dims[other] = dims[other], dims[one]
    return replace(part, dims="".join(dims))


def _permute(node: Any, number: int, part: Part) -> Part:
    return replace(part, dims="".join(part.dims[dim_of(d, part)] for d in node._saved_dims))


def _unsqueeze(node: Any, number: int, part: Part) -> Part:
    place = signed(int(node._saved_dim)) % (len(part.dims) + 1)
    return replace(part, dims=part.dims[:place] + "1" + part.dims[place:])


def _squeeze(node: Any, number: int, part: Part) -> Part | None:
    place = dim_of(node._saved_dim, part)
    if part.dims[place] == "1":
        return replace(part, dims=part.dims[:place] + part.dims[place + 1 :])
    return part if node._saved_self_sym_sizes[place] != 1 else None


def _reshape(node: Any, number: int, part: Part) -> Part | None:
    return None if "b" in part.dims else replace(part, dims="?" + part.order)


def _expand(node: Any, number: int, part: Part) -> Part | None:
    kept = part.dims.lstrip("1")
    return None if part.is_vector or "1" in kept or "b" in kept else replace(part, dims="b" + kept)


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
    start, stop = (n + length if n < 0 else n for n in (signed(start), signed(stop)))
    dim = dim_of(node._saved_dim, part)
    if part.dims[dim] != "r":  # columns: only all of them
        return part if start == 0 and stop >= node._saved_self_sym_sizes[dim] else None
    return _rows(node, part, max(0, start), stop)


def _rows(node: Any, part: Part, start: int, stop: int) -> Part | None:
    if part.dims[dim_of(node._saved_dim, part)] != "r":
        return None
    stop = min(part.start + stop, part.stop)
    if part.start + start > stop:
        return None
    return replace(part, start=part.start + start, stop=stop)


VIEWS: dict[str, Callable[[Any, int, Part], Part | None]] = {
    "TBackward0": _flip,
    "TransposeBackward0": _transpose,
    "PermuteBackward0": _permute,
    "UnsqueezeBackward0": _unsqueeze,
    "SqueezeBackward1": _squeeze,
    "ViewBackward0": _reshape,
    "UnsafeViewBackward0": _reshape,
    "ReshapeAliasBackward0": _reshape,
    "ExpandBackward0": _expand,
    "SplitBackward0": _split,
    "SplitWithSizesBackward0": _split,
    "SliceBackward0": _slice,
} | {name: lambda node, number, part: part for name in SAME}
