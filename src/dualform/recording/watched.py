"""Every parameter of the model, and what is summed for it, in arrays of all rows of all parameters.

A parameter of shape [rows, …] has a direction v; its gradient's product with v is one number per
row, and so is what its patterns sum to, Σ δ (x·v). A vector has no direction: each entry is a row.
All rows of all parameters lie one after the other, so that one comparison serves them all:

    E      what the patterns in `.grad` sum to, by rows      (float64, filled by the worker)
    gross  how large the rounding of its terms is, by parameter (Σ u ‖δ‖ ‖x‖)
    seen   what the gradient itself gives, by rows            (read just before an update)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain
from operator import is_
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.optim import Optimizer

from dualform.certificate.bounds import ROUNDING
from dualform.certificate.marks import nature_of
from dualform.errors import RecordingError
from dualform.layers import Kind, Layer, kinds
from dualform.memory.directions import direction, signs
from dualform.recording.regions import Region
from dualform.recording.tags import Tag

SMALL = 1 << 12
"""Up to this many entries a parameter without patterns is kept after every update."""

KEYS_ALONE = "its layer keeps keys alone"

FIRST_BYTES = 1 << 20
"""About how large a part's first region is."""

Reals = NDArray[np.float64]
Flags = NDArray[np.bool_]


class LayerCall(NamedTuple):
    """One call of a layer, gone through by one backward pass."""

    step: int
    """-1: no update has consumed it."""
    number: int
    """Which backward pass of the run."""
    call: int
    order: int
    """As the how-manieth of all layers its pass arrived at it."""
    code: int
    """The dtype of the product, as a place in `COMPUTED_IN`."""
    rows: int
    tag: Tag | None
    shape: tuple[int, ...]
    layout: int


@dataclass(eq=False)
class Site:
    """A recorded layer: where its rows lie, which of them an update has consumed."""

    layer: Layer
    kind: Kind
    keep: str
    weight: Watched
    bias: Watched | None
    parts: dict[str, Region] = field(default_factory=dict)
    settled: int = 0
    pending: list[LayerCall] = field(default_factory=list)
    """Uses whose rows no update has consumed: they lie behind the settled ones."""
    uses: list[LayerCall] = field(default_factory=list)
    was_used: bool = False
    """Whether a backward pass ever went through it."""
    is_news: bool = True
    """Whether no segment has told of it yet."""
    is_given: bool = True
    """Whether its keys may come again: they are inputs that training never computed."""

    def __post_init__(self) -> None:
        pairs = ("weight", self.weight), ("bias", self.bias)
        self.parameters = [(role, w) for role, w in pairs if w is not None]
        """Its parameters with the role that each plays."""
        self.indices = [w.index for _, w in self.parameters]

    def widths(self) -> dict[str, tuple[int, torch.dtype]]:
        """The parts of its rows: how wide they are, and of which type."""
        layer, dtype = self.layer, self.weight.tensor.dtype
        width = self.kind.key_width(layer)
        keys = {"keys": (width, self.kind.key_dtype or dtype)} if width else {}
        if self.keep == "examples":
            own = {role: (w.rows_of(layer).numel(), dtype) for role, w in self.parameters}
            return own | keys
        if self.keep == "keys":
            return keys
        return keys | {"error_signals": (layer.out_features, dtype)}

    def drop_pending(self) -> None:
        """Take back the rows that no update has consumed."""
        self.pending = []
        for region in self.parts.values():
            region.cut(self.settled)


@dataclass(eq=False)
class Watched:
    """A parameter: its place among the rows of all parameters, its direction, its layers."""

    index: int
    name: str
    tensor: Tensor
    place: slice
    v: Tensor | None
    seen: Tensor
    """Where the product of its gradient with v is put."""
    sites: list[Site] = field(default_factory=list)
    why: str = "no layer with patterns uses it"
    """Why it is kept as values, where it is."""
    is_news: bool = False
    """Whether how it is kept has changed since the last segment."""

    def __post_init__(self) -> None:
        self.nature = nature_of(self.tensor)
        """Its shape and dtype when recording began."""

    def rows_of(self, layer: Layer) -> Tensor:
        """The rows (or entries) of it that a layer uses."""
        return self.tensor.detach()[layer.rows_of(self.name)]

    def place_of(self, layer: Layer) -> slice:
        """Where those lie among the rows of all parameters."""
        own = layer.rows_of(self.name)
        return slice(self.place.start + own.start, self.place.start + own.stop)

    @property
    def is_converted(self) -> bool:
        """Whether it has another dtype, or shape, than the memory says."""
        return nature_of(self.tensor) != self.nature

    @property
    def became(self) -> str:
        """What it was converted to."""
        shape, dtype = nature_of(self.tensor)
        is_cast = dtype != self.nature[1]
        return str(dtype).removeprefix("torch.") if is_cast else f"of shape {list(shape)}"

    @property
    def is_small(self) -> bool:
        return self.tensor.numel() <= SMALL

    @property
    def by_examples(self) -> bool:
        """Whether what examples wrote explains it: then its gradient is kept for its bits."""
        return any(s.keep == "examples" for s in self.sites) and self.is_small


class Watch:
    """All parameters of a model, in the order it names them."""

    def __init__(self, model: nn.Module) -> None:
        named = list(model.named_parameters())
        heights = [height_of(p) for _, p in named]
        self.starts = np.cumsum([0, *heights])[:-1]
        self.rows = np.array(heights, np.int64)
        self.owner = np.repeat(np.arange(len(named)), heights)
        self.projections = Projections([p for _, p in named], heights)
        self.parameters: list[Watched] = []
        for index, (name, p) in enumerate(named):
            place = slice(int(self.starts[index]), int(self.starts[index]) + heights[index])
            v = direction(index, p[0].numel()) if p.dim() > 1 else None
            at = self.projections.views[index]
            v = None if v is None else v.to(at.dtype).to(p.device)
            self.parameters.append(Watched(index, name, p, place, v, at))
        self.members = Members(model, self.parameters)
        self.by_name = {w.name: w for w in self.parameters}
        rows, count = sum(heights), len(named)
        self.signs = np.concatenate(
            [np.zeros(0), *(signs(i, height) for i, height in enumerate(heights))]
        )
        self.u = np.array([ROUNDING[p.dtype] for _, p in named])
        self.E, self.seen, self.gross = np.zeros(rows), np.zeros(rows), np.zeros(count)
        self.carried, self.unknown = np.zeros(count, bool), np.zeros(count, bool)
        self.resolved = np.zeros(count, bool)
        self.sites: dict[Layer, Site] = {}

    def __iter__(self) -> Iterator[Watched]:
        return iter(self.parameters)

    def __len__(self) -> int:
        return len(self.parameters)

    def held(self, optimizer: Optimizer) -> Iterator[Watched]:
        """The parameters of the model that an optimizer has."""
        for group in optimizer.param_groups:
            for p in group["params"]:
                if (w := self.members.by_id.get(id(p))) is not None:
                    yield w

    def converted(self) -> list[Watched]:
        """The parameters that the loop has put into another dtype, or shape."""
        return [w for w in self.parameters if w.is_converted]

    def refuse_converted(self) -> None:
        """Stop before anything is trained in another dtype, or shape, than the memory has."""
        if found := self.converted():
            (shape, dtype), now = found[0].nature, found[0].tensor
            raise RecordingError(
                f"{listed([w.name for w in found])}: converted while being recorded. "
                f"{found[0].name!r} is {now.dtype} {list(now.shape)} now, expected {dtype} "
                f"{list(shape)}, as when recording began. Every update before is recorded: convert "
                "the model before dualform.record, or record again into a new path"
            )

    def fold(self, rows: Reals) -> Reals:
        """Sums over the rows of every parameter."""
        if not len(rows):
            return np.zeros(len(self))
        found: Reals = np.add.reduceat(rows, self.starts)
        return found

    def add(self, layer: Layer, word: str) -> bool:
        """Make a place for a layer's rows; False if it is to be kept as values."""
        weight = self.by_name[layer.weight]
        bias = None if layer.bias is None else self.by_name[layer.bias]
        site = Site(layer, kinds.of(layer.kind), word, weight, bias)
        for _, w in site.parameters:
            if word == "values":
                w.why = f"keep= asks for values of layer {layer.name!r}"
                continue
            w.sites.append(site)
            self.resolved[w.index] = all(s.keep != "keys" for s in w.sites)
            w.why = w.why if self.resolved[w.index] else KEYS_ALONE
            w.is_news = True
        if word == "values":
            return False
        for part, (width, dtype) in site.widths().items():
            rows = max(1, FIRST_BYTES // max(1, width * dtype.itemsize))
            site.parts[part] = Region(width, dtype, rows)
        self.sites[layer] = site
        return True

    def make_values(self, w: Watched, why: str) -> None:
        """From here on no pattern explains a parameter: its kept states alone say what it was."""
        self.resolved[w.index], w.why = False, why
        w.is_news = True

    def coverage(self, w: Watched) -> dict[str, str]:
        """How finely the memory can say who wrote a parameter, and why no finer."""
        if self.resolved[w.index]:
            by_examples = any(site.keep == "examples" for site in w.sites)
            return {"keep": "examples" if by_examples else "patterns", "why": ""}
        return {"keep": "values", "why": w.why}

    def news(self) -> dict[str, Any]:
        """Layers and coverages that have come since the last segment."""
        fresh = [site for site in self.sites.values() if site.was_used and site.is_news]
        changed = [w for w in self if w.is_news]
        for site in fresh:
            site.is_news = False
        for w in changed:
            w.is_news = False
        return {
            "layers": [site.layer.to_json() | {"keep": site.keep} for site in fresh],
            "coverage": {w.name: self.coverage(w) for w in changed},
        }

    def forget(self, anew: list[Watched]) -> None:
        """Clear what was summed for gradients that are empty now: the loop threw it away."""
        gone = np.zeros(len(self), bool)
        gone[[w.index for w in anew]] = True
        self.E[gone[self.owner]] = 0.0
        self.gross[gone] = 0.0
        self.carried[gone] = self.unknown[gone] = False


class Members:
    """What a model consists of, to see that a loop has put other parameters in place of some."""

    def __init__(self, model: nn.Module, parameters: list[Watched]) -> None:
        self._model, self._parameters = model, parameters
        self.replaced = 0
        """How many other objects were found in place of parameters so far."""
        self._look()

    def _look(self) -> None:
        """Remember every module and parameter, where it is held."""
        both = ((m._modules, m._parameters) for m in self._model.modules())
        self._tables: list[dict[str, Any]] = [table for pair in both for table in pair if table]
        self._found = list(chain.from_iterable(map(dict.values, self._tables)))
        self.by_id = {id(w.tensor): w for w in reversed(self._parameters)}

    def follow(self) -> None:
        """Take up what the loop has put in place of parameters, under the same names."""
        if all(map(is_, chain.from_iterable(map(dict.values, self._tables)), self._found)):
            return
        named = dict(self._model.named_parameters(remove_duplicate=False))
        for w in self._parameters:
            found = named.get(w.name)  # None, or no parameter: pruned or parametrized since, say
            if found is not w.tensor and isinstance(found, nn.Parameter):
                w.tensor, self.replaced = found, self.replaced + 1
        self._look()


class Projections:
    """Where g·v of all parameters goes: one tensor for each dtype and device, fetched at once."""

    def __init__(self, parameters: list[nn.Parameter], heights: list[int]) -> None:
        natures: dict[tuple[torch.dtype, torch.device], list[int]] = {}
        for index, p in enumerate(parameters):
            natures.setdefault((p.dtype, p.device), []).append(index)
        starts = np.cumsum([0, *heights])
        self.views: list[Tensor] = [torch.empty(0)] * len(parameters)
        self._parts: list[tuple[Tensor, NDArray[np.int64] | slice]] = []
        for (dtype, device), members in natures.items():
            found = torch.zeros(sum(heights[i] for i in members), dtype=dtype, device=device)
            begin = 0
            for i in members:
                self.views[i] = found[begin : begin + heights[i]]
                begin += heights[i]
            rows = np.concatenate([np.arange(starts[i], starts[i + 1]) for i in members])
            self._parts.append((found, slice(None) if len(natures) == 1 else rows))

    def fetch(self, out: Reals) -> None:
        """Copy the numbers to the array of all rows."""
        for found, rows in self._parts:
            if found.dtype in (torch.float32, torch.float64) and found.is_cpu:
                out[rows] = found.numpy()
            else:
                out[rows] = found.double().cpu().numpy()


def listed(names: list[str]) -> str:
    """Name the first three, and say how many more there are."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def height_of(parameter: Tensor) -> int:
    """How many rows a parameter's projection has."""
    return parameter.shape[0] if parameter.dim() > 1 else parameter.numel()


def is_empty(gradient: Tensor | None) -> bool:
    """Whether a gradient is None, or zeros all over: then the next pass begins anew."""
    if gradient is None:
        return True
    if gradient.is_sparse or gradient.layout is not torch.strided:
        return False
    if gradient.is_contiguous() and gradient.view(-1)[:8].any():  # so it is nearly always
        return False
    return not gradient.any()
