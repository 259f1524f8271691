"""What a manifest says of the recorded model: layers, parameters, buffers, columns, remarks.

Read with suspicion: a manifest may be damaged, of a newer kind, or made by hand. Whatever is not
what it should be raises one of `files.WRONG` here, and the memory is not opened.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, TypeVar

import torch

from dualform.layers import Layer
from dualform.layers.kinds import KINDS as LAYER_KINDS
from dualform.layers.kinds import parameter_shape
from dualform.learning_rules import ADAPTIVE, SGD, AdaptiveRule
from dualform.memory.files import count, numbered_file, text
from dualform.memory.segments import Segment
from dualform.memory.tensor_files import WrittenFile

COVERAGES = ("patterns", "steps", "accumulated", "untrained")

KINDS = ("int", "float", "bool", "string")
T = TypeVar("T")


@dataclass(frozen=True)
class Parameter:
    """A parameter of the recorded model and how its training is accounted for.

    `coverage` is "patterns" (every pattern known), "steps" (its gradient kept at every step),
    "accumulated" (its learned part kept every so many steps) or "untrained".
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    coverage: str
    layers: tuple[str, ...] = ()
    role: str | None = None
    eps: float = 0.0
    """The relative rounding of the arithmetic that made its gradients (autocast: a coarser one)."""
    accumulated_since: int | None = None
    stored_eps: float = 0.0
    """The rounding of the patterns its learned part was summed from, where those are gone."""
    rule: str = SGD
    """The learning rule that moved it: "sgd", or one of the adaptive ones ("adam", …)."""
    is_noted_in_part: bool = False
    """Whether its gradients were looked at in some steps only: `noted.py` says in which."""

    @property
    def adaptive(self) -> AdaptiveRule | None:
        """The learning rule, where its steps are not scalars: Adam and its relatives."""
        return ADAPTIVE.get(self.rule)

    @property
    def height(self) -> int:
        """d0: how many rows it has as the matrix [d0, rest] that fingerprints look at."""
        return self.shape[0] if self.shape else 1

    @property
    def width(self) -> int:
        """How many columns it has as that matrix."""
        return prod(self.shape[1:])

    @property
    def layer(self) -> str | None:
        """The layer that uses it (the first, where several share it)."""
        return self.layers[0] if self.layers else None


@dataclass(frozen=True)
class DescribedLayer:
    """A recorded layer: the dtype it trained in, the one its patterns are stored in, and whether
    they are whole or keys alone."""

    layer: Layer
    dtype: torch.dtype
    stored: torch.dtype
    error_signals: bool = True

    @property
    def name(self) -> str:
        return self.layer.name


@dataclass(frozen=True)
class Buffer:
    """A buffer of the recorded model: "recorded" if training changed it, else "constant"."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    coverage: str


@dataclass(frozen=True)
class Phase:
    """One stretch of a memory that was recorded in one go.

    `began` is "started" or "resumed", `when` a date and time in UTC. `rewound_from` is the step the
    memory ended at, where later steps were dropped; `momentum` says whether momentum buffers were
    "carried over", "replaced" by those of a new optimizer, or whether there were "none".
    """

    first_step: int
    began: str
    when: str
    rewound_from: int | None = None
    momentum: str = "none"

    @classmethod
    def from_json(cls, entry: dict[str, Any]) -> Phase:
        known, since = (text(entry["began"]), text(entry["momentum"])), entry["rewound_from"]
        if known[0] not in ("started", "resumed"):
            raise ValueError(f"a phase {known[0]!r} is not known to this dualform")
        rewound_from = None if since is None else count(since)
        first_step, when = count(entry["first_step"]), text(entry["when"])
        return cls(first_step, known[0], when, rewound_from, known[1])


@dataclass(frozen=True)
class Conversion:
    """A time when this memory was made from another: `source` is the SHA-256 of its manifest."""

    when: str
    what: str
    source: str

    @classmethod
    def from_json(cls, entry: dict[str, Any]) -> Conversion:
        return cls(text(entry["when"]), text(entry["what"]), text(entry["source"]))


class Description:
    """The manifest's content, each part what it should be."""

    def __init__(self, manifest: dict[str, Any]) -> None:
        self.steps = count(manifest["steps"])
        self.closed = bool(manifest["closed"])
        self.exact = bool(manifest["exact"])
        self.layers = _by_name((_layer(e) for e in manifest["layers"]), lambda la: la.name)
        self.parameters = _by_name(
            (_parameter(e, self.layers) for e in manifest["parameters"]), lambda p: p.name
        )
        self.buffers = _by_name((_buffer(e) for e in manifest["buffers"]), lambda b: b.name)
        self.columns = {text(name): text(kind) for name, kind in manifest["columns"]}
        self.remarks = tuple(text(r) for r in manifest["remarks"])
        self.environment = {str(k): v for k, v in manifest["environment"].items()}
        self.initial = WrittenFile.from_json(manifest["initial"])
        self.snapshots = {count(e["step"]): numbered_file(e) for e in manifest["snapshots"]}
        self.every = count(manifest.get("every", 1))
        self.phases = tuple(Phase.from_json(entry) for entry in manifest.get("phases", ()))
        self.conversions = tuple(map(Conversion.from_json, manifest.get("conversions", ())))

    def agree(self, segments: Sequence[Segment]) -> None:
        """Raise unless the parts fit each other."""
        if self.columns.get("step") != "int" or not set(self.columns.values()) <= set(KINDS):
            raise ValueError("the columns are not of known kinds")
        for described in self.layers.values():
            layer = described.layer
            height, width = parameter_shape(layer.kind, layer.in_features, layer.out_features)
            inside: dict[str, tuple[int, tuple[int, ...]]] = {
                layer.weight: (layer.offset + height, (width,))
            }
            if layer.bias is not None:
                inside[layer.bias] = layer.bias_offset + layer.out_features, ()
            for name, (end, rest) in inside.items():
                rows, *columns = self.parameters[name].shape or (0,)
                if tuple(columns) != rest or end > rows:
                    raise ValueError(f"layer {layer.name!r} does not fit its parameter {name!r}")
                if not described.error_signals and self.parameters[name].coverage == "patterns":
                    raise ValueError(f"{name!r} lacks the error signals of layer {layer.name!r}")
        if not self.every:
            raise ValueError("no step at all is said to be recorded")
        expected = 0
        for segment in segments:
            if segment.first_step != expected or not segment.is_consistent:
                raise ValueError(f"segment {segment.path.name} does not follow the one before")
            expected = segment.end
        if expected != self.steps:
            raise ValueError(f"the segments hold {expected} steps, not {self.steps}")


def _by_name(things: Iterable[T], name: Callable[[T], str]) -> dict[str, T]:
    found: dict[str, T] = {}
    for thing in things:
        if name(thing) in found:
            raise ValueError(f"{name(thing)!r} occurs twice")
        found[name(thing)] = thing
    return found


def _layer(entry: dict[str, Any]) -> DescribedLayer:
    if entry["kind"] not in LAYER_KINDS:
        raise ValueError(f"layers of kind {entry['kind']!r} are not known to this dualform")
    layer = Layer(
        text(entry["name"]),
        entry["kind"],
        text(entry["weight"]),
        None if entry["bias"] is None else text(entry["bias"]),
        count(entry["in_features"]),
        count(entry["out_features"]),
        count(entry.get("offset", 0)),  # memories of before 0.2 know whole parameters only
        count(entry.get("bias_offset", 0)),
    )
    dtype = _dtype(entry["dtype"])
    stored = _dtype(entry.get("stored", entry["dtype"]))
    narrow = stored in (torch.float16, torch.bfloat16) and dtype.itemsize > stored.itemsize
    if not dtype.is_floating_point or (stored != dtype and not narrow):
        raise ValueError(f"patterns of {dtype} are said to be stored in {stored}")
    kept = entry.get("error_signals", True)
    if type(kept) is not bool:
        raise TypeError(f"error_signals of {layer.name!r} are neither kept nor not: {kept!r}")
    return DescribedLayer(layer, dtype, stored, kept)


def _parameter(entry: dict[str, Any], layers: Mapping[str, Any]) -> Parameter:
    if entry["coverage"] not in COVERAGES or entry["role"] not in ("weight", "bias", None):
        raise ValueError(
            f"{entry['name']!r} is {entry['role']!r}, covered by {entry['coverage']!r}"
        )
    since = entry["accumulated_since"]
    return Parameter(
        text(entry["name"]),
        tuple(map(count, entry["shape"])),
        _dtype(entry["dtype"]),
        entry["coverage"],
        tuple(text(name) for name in entry["layers"] if name in layers),  # others: never used
        entry["role"],
        float(entry["eps"]),
        None if since is None else count(since),
        _size(entry.get("stored_eps", 0.0)),
        _rule(entry.get("rule", SGD)),
        entry.get("is_noted_in_part", False) is True,
    )


def _rule(name: Any) -> str:
    if name != SGD and name not in ADAPTIVE:
        raise ValueError(f"the learning rule {name!r} is not known to this dualform")
    return text(name)


def _size(value: Any) -> float:
    if not isinstance(value, int | float) or not 0 <= value < float("inf"):
        raise ValueError(f"{value!r} is no size: expected a finite number, not negative")
    return float(value)


def _buffer(entry: dict[str, Any]) -> Buffer:
    if entry["coverage"] not in ("recorded", "constant"):
        raise ValueError(f"buffer {entry['name']!r} is covered by {entry['coverage']!r}")
    shape = tuple(map(count, entry["shape"]))
    return Buffer(text(entry["name"]), shape, _dtype(entry["dtype"]), entry["coverage"])


def _dtype(name: Any) -> torch.dtype:
    dtype = getattr(torch, str(name), None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"unknown dtype {name!r}")
    return dtype
