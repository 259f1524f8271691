"""Every parameter of the model, and what is summed for it, in arrays of all rows of all parameters.

A parameter of shape [rows, …] has a direction v; its gradient's product with v is one number per
row, and so is what its patterns sum to, Σ δ (x·v). A vector has no direction: each entry is a row.
All rows of all parameters lie one after the other, so that one comparison serves them all:

    E      what the patterns in `.grad` sum to, by rows      (float64, filled by the worker)
    gross  how large the rounding of its terms is, by parameter (Σ u ‖δ‖ ‖x‖)
    narrow whether some products behind it were made in fewer bits than the parameter has
    seen   what the gradient itself gives, by rows            (read just before an update)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from itertools import chain
from math import prod
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
BY_HAND = "is moved by hand, by a rule that is not known"

FIRST_BYTES = 1 << 20
"""About how large a part's first region is."""

Reals = NDArray[np.float64]
Flags = NDArray[np.bool_]


class LayerCall(NamedTuple):
    """One call of a layer, gone through by one backward pass."""

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


Settled = tuple[int, list[LayerCall]]
"""What the update of a step has consumed of one layer."""


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
    uses: list[Settled] = field(default_factory=list)
    was_used: bool = False
    """Whether a backward pass ever went through it."""
    is_news: bool = True
    """Whether no segment has told of it yet."""
    is_given: bool = True
    """Whether its keys may come again: they are inputs that training never computed."""

    def __post_init__(self) -> None:
        pairs = {"weight": self.weight, "bias": self.bias}
        self.parameters = {role: w for role, w in pairs.items() if w is not None}
        """Its parameters by the role that each plays."""
        self.indices = [w.index for w in self.parameters.values()]
        self.places = {role: w.place_of(self.layer) for role, w in self.parameters.items()}
        """Where its rows of each lie among the rows of all parameters."""

    def widths(self) -> dict[str, tuple[int, torch.dtype]]:
        """The parts of its rows: how wide they are, and of which type."""
        layer, dtype = self.layer, self.weight.tensor.dtype
        width = self.kind.key_width(layer)
        keys = {"keys": (width, self.kind.key_dtype or dtype)} if width else {}
        if self.keep == "examples":
            shapes = {role: self.kind.shape_of(layer, role) for role in self.parameters}
            return {role: (prod(shape), dtype) for role, shape in shapes.items()} | keys
        if self.keep == "keys":
            return keys
        return keys | {"error_signals": (layer.out_features, dtype)}

    def drop_pending(self) -> None:
        """Take back the rows that no update has consumed."""
        self.pending = []
        for region in self.parts.values():
            region.rows = self.settled


@dataclass(eq=False)
class Watched:
    """A parameter: its place among the rows of all parameters, its direction, its layers."""

    index: int
    name: str
    tensor: Tensor
    place: slice
    v: Tensor | None
    sites: list[Site] = field(default_factory=list)
    by_examples: bool = False
    """Whether what examples wrote explains it: then its gradient is kept for its bits."""
    why: str = "no layer with patterns uses it"
    """Why it is kept as values, where it is."""
    is_news: bool = False
    """Whether how it is kept has changed since the last segment."""

    def __post_init__(self) -> None:
        self.nature = nature_of(self.tensor)
        """Its shape and dtype when recording began."""
        self.is_small = self.tensor.numel() <= SMALL

    def place_of(self, layer: Layer) -> slice:
        """Where the rows (or entries) of it that a layer uses lie among all rows."""
        own = layer.rows_of(self.name)
        return slice(self.place.start + own.start, self.place.start + own.stop)


class Members:
    """Every module and parameter of a model, and where it is held: a loop may put other parameters
    in place of some."""

    def __init__(self, model: nn.Module, parameters: Sequence[Watched]) -> None:
        self._model, self._parameters = model, parameters
        self.replaced = 0
        """How many other objects were found in place of parameters so far."""
        self._look()

    def _look(self) -> None:
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


class Watch:
    """All parameters of a model, in the order it names them."""

    def __init__(self, model: nn.Module) -> None:
        named = list(model.named_parameters())
        heights = [p.shape[0] if p.dim() > 1 else p.numel() for _, p in named]
        self.starts = np.cumsum([0, *heights])[:-1]
        self.rows = np.array(heights, np.int64)
        self.owner = np.repeat(np.arange(len(named)), heights)
        self.parameters: list[Watched] = []
        for index, (name, p) in enumerate(named):
            place = slice(int(self.starts[index]), int(self.starts[index]) + heights[index])
            v = direction(index, p[0].numel()).to(p) if p.dim() > 1 else None
            self.parameters.append(Watched(index, name, p, place, v))
        self.members = Members(model, self.parameters)
        rows, count = sum(heights), len(named)
        self.signs = np.concatenate(
            [np.zeros(0), *(signs(i, height) for i, height in enumerate(heights))]
        )
        self.u = np.array([ROUNDING[p.dtype] for _, p in named])
        self.E, self.seen, self.gross = np.zeros(rows), np.zeros(rows), np.zeros(count)
        self.carried, self.unknown, self.narrow, self.resolved = np.zeros((4, count), bool)
        self.sites: dict[Layer, Site] = {}
        self.unsaid: list[Watched] = []
        """Parameters that have become values, of which no remark has said so yet."""

    def __iter__(self) -> Iterator[Watched]:
        return iter(self.parameters)

    def __len__(self) -> int:
        return len(self.parameters)

    def named(self, name: str) -> Watched:
        """The parameter of that name."""
        return next(w for w in self.parameters if w.name == name)

    def held(self, optimizer: Optimizer) -> Iterator[Watched]:
        """The parameters of the model that an optimizer has."""
        for group in optimizer.param_groups:
            for p in group["params"]:
                if (w := self.members.by_id.get(id(p))) is not None:
                    yield w

    def converted(self) -> str:
        """Say which parameters the loop has put into another dtype, or shape; "" if none."""
        found = [w for w in self.parameters if (w.tensor.shape, w.tensor.dtype) != w.nature]
        if not found:
            return ""
        (shape, dtype), first = found[0].nature, found[0]
        return (
            f"{listed([w.name for w in found])}: became of another dtype or shape; {first.name!r} "
            f"is {first.tensor.dtype} {[*first.tensor.shape]} now, expected {dtype} {[*shape]}, as "
            "when recording began"
        )

    def refuse_converted(self) -> None:
        """Stop before anything is trained in another dtype, or shape, than the memory has."""
        if said := self.converted():
            raise RecordingError(
                f"{said}. It was converted while being recorded: every update before is in the "
                "memory. Convert the model before dualform.record, or record again into a new path"
            )

    def among(self, watched: Iterable[Watched]) -> Flags:
        """Flag some of the parameters."""
        found = np.zeros(len(self), bool)
        found[[w.index for w in watched]] = True
        return found

    def project(self, moving: Flags) -> None:
        """Read g v of all gradients that are about to be used into `seen`."""
        found: list[Tensor] = []
        for w, is_moving in zip(self.parameters, moving.tolist(), strict=True):
            gradient = w.tensor.grad
            if not is_moving or gradient is None:
                continue
            if gradient.layout is not torch.strided:
                gradient = torch.full_like(w.tensor, torch.nan)
            if w.v is not None:
                gradient = torch.mv(gradient if gradient.ndim == 2 else gradient.flatten(1), w.v)
            found.append(gradient if gradient.ndim == 1 else gradient.reshape(-1))
        if len({part.device for part in found}) > 1:
            found = [part.cpu() for part in found]
        if found:
            self.seen[moving[self.owner]] = torch.cat(found).detach().double().cpu().numpy()

    def fold(self, rows: Reals) -> Reals:
        """Sums over the rows of every parameter."""
        if not len(rows):
            return np.zeros(len(self))
        found: Reals = np.add.reduceat(rows, self.starts)
        return found

    def add(self, layer: Layer, word: str) -> bool:
        """Make a place for a layer's rows; False if it is to be kept as values."""
        weight = self.named(layer.weight)
        bias = None if layer.bias is None else self.named(layer.bias)
        site = Site(layer, kinds.of(layer.kind), word, weight, bias)
        self.unsaid = [w for w in self.unsaid if w.name not in layer.parameters]
        for w in site.parameters.values():
            if word == "values":
                w.why = f"keep= asks for values of layer {layer.name!r}"
                continue
            w.sites.append(site)
            w.by_examples |= word == "examples" and w.is_small
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

    def make_values(self, w: Watched, why: str, *, is_said: bool = False) -> None:
        """From here on no pattern explains a parameter: its kept states alone say what it was."""
        self.resolved[w.index], w.why = False, why
        w.is_news = True
        if not is_said:
            self.unsaid.append(w)

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

    def forget(self, gone: Flags) -> None:
        """Clear what was summed for gradients that are empty now: the loop threw it away."""
        self.E[gone[self.owner]] = 0.0
        self.gross[gone] = 0.0
        for flags in (self.carried, self.unknown, self.narrow):
            flags &= ~gone


@dataclass(eq=False, slots=True)
class Line:
    """An entry per parameter; nothing is written into it once it is in the log."""

    moved: Flags
    setting: NDArray[np.int32]
    fresh: Flags
    """The optimizer remembered nothing of the parameter before."""
    carried: Flags
    """The gradient still held what it held at the end of the step before."""
    kappa: Reals
    explained: Flags
    seen: Reals
    mark: NDArray[np.uint32]
    state_mark: NDArray[np.uint32]

    @classmethod
    def blank(cls, count: int) -> Line:
        """Begin the line of a step at which nothing has happened yet."""
        no, none = np.zeros((4, count), bool), np.full((2, count), np.nan)
        marks = np.zeros((2, count), np.uint32)
        setting = np.full(count, -1, np.int32)
        return cls(no[0], setting, no[1], no[2], none[0], no[3], none[1], marks[0], marks[1])

    def clear(self, among: Flags) -> None:
        """Write down of some parameters that nothing has happened to them."""
        blank = Line.blank(len(among))
        for f in fields(self):
            np.copyto(getattr(self, f.name), getattr(blank, f.name), where=among)


def stacked(lines: list[Line]) -> dict[str, NDArray[np.generic]]:
    """The lines of a segment as the log's columns, [steps, parameters]."""
    names = [f.name for f in fields(Line)] if lines else []
    return {name: np.stack([getattr(line, name) for line in lines]) for name in names}


def listed(names: list[str]) -> str:
    """Name the first three, and say how many more there are."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def is_empty(gradient: Tensor | None) -> bool:
    """Whether a gradient is None, or zeros all over: then the next pass begins anew."""
    if gradient is None:
        return True
    if gradient.is_sparse or gradient.layout is not torch.strided:
        return False
    if gradient.is_contiguous() and gradient.view(-1)[:8].any():  # so it is nearly always
        return False
    return not gradient.any()
