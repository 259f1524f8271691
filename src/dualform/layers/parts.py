"""A parameter seen through views: which of its rows, and whether it is transposed.

Between a parameter and the product it is part of, code may transpose, split, slice or cast it. Each
leaves a node in the graph that says what was done.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from torch.autograd.graph import Node

from dualform.layers.torch_internals import fact_of


@dataclass(frozen=True)
class Part:
    """Some rows of a parameter: `dims` are "rc" (rows, columns), "cr", or "r" of a vector."""

    parameter: str
    start: int
    stop: int
    dims: str

    @property
    def rows(self) -> int:
        return self.stop - self.start


def signed(number: int) -> int:
    """torch keeps negative numbers in unsigned ones in some of what it saves."""
    return number - (1 << 64) if number >= 1 << 63 else number


def _dim(node: Node, part: Part, name: str = "dim") -> str:
    """Which of a part's dimensions a node means."""
    return part.dims[signed(int(fact_of(node, name, 0))) % len(part.dims)]


def _same(node: Node, number: int, part: Part) -> Part:
    return part


def _flip(node: Node, number: int, part: Part) -> Part:
    return replace(part, dims=part.dims[::-1])


def _transpose(node: Node, number: int, part: Part) -> Part:
    changes = _dim(node, part, "dim0") != _dim(node, part, "dim1")
    return _flip(node, number, part) if changes else part


def _permute(node: Node, number: int, part: Part) -> Part:
    dims = [signed(int(d)) % len(part.dims) for d in fact_of(node, "dims", ())]
    return replace(part, dims="".join(part.dims[d] for d in dims))


def _split(node: Node, number: int, part: Part) -> Part | None:
    sizes = fact_of(node, "split_sizes")
    if sizes is None:
        size = int(fact_of(node, "split_size", 0))
        return _rows(node, part, size * number, size * (number + 1))
    start = sum(map(int, sizes[:number]))
    return _rows(node, part, start, start + int(sizes[number]))


def _slice(node: Node, number: int, part: Part) -> Part | None:
    if int(fact_of(node, "step", 0)) != 1:
        return None
    start, stop = (signed(int(fact_of(node, name, 0))) for name in ("start", "end"))
    if _dim(node, part) != "r":  # columns: only all of them
        columns = fact_of(node, "self_sym_sizes", (0, 0))[part.dims.index("c")]
        return part if start == 0 and stop >= columns else None
    start, stop = (n + part.rows if n < 0 else n for n in (start, stop))
    return _rows(node, part, max(0, start), stop)


def _rows(node: Node, part: Part, start: int, stop: int) -> Part | None:
    stop = min(part.start + stop, part.stop)
    if _dim(node, part) != "r" or part.start + start >= stop:
        return None
    return replace(part, start=part.start + start, stop=stop)


VIEWS: Mapping[str, Callable[[Node, int, Part], Part | None]] = {
    "TBackward0": _flip,
    "TransposeBackward0": _transpose,
    "PermuteBackward0": _permute,
    "SplitBackward0": _split,
    "SplitWithSizesBackward0": _split,
    "SliceBackward0": _slice,
    "ToCopyBackward0": _same,
    "AliasBackward0": _same,
    "CloneBackward0": _same,
}
"""What a view (its output of that number) makes of a part; None if it is not rows of it."""
