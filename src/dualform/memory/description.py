"""What a memory says of the recorded model: parameters, layers, buffers, columns, remarks.

The manifest says what was known when recording began; what came to be known later (a layer that was
first used, a new setting, a remark) stands in the line of the segment that it came with. None of it
is trusted: what is not as it should be raises one of `fields.WRONG`, and nothing is opened.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from typing import Any, NamedTuple

import torch

from dualform.layers import Layer
from dualform.memory.fields import chosen, count, dtype, exactly, shape, texts

KEEP = ("patterns", "keys", "examples", "values")
"""How finely a parameter's memory can say who wrote it."""

COLUMN_KINDS = ("int", "float", "bool", "string")
OWN_COLUMNS = ("position", "microbatch", "call")
"""What every pattern has besides its step and its tags."""

_LISTS, _NAMES = ("settings", "layers", "events", "remarks"), ("columns", "strings", "coverage")


@dataclass(frozen=True)
class Parameter:
    """A parameter of the model: how it is kept (`KEEP`), and why, if that was not asked for; its
    place in the log; the layers that it belongs to."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    keep: str
    why: str
    index: int
    layers: tuple[str, ...] = ()

    @property
    def height(self) -> int:
        """How many rows it has as the matrix that directions look at; a vector's entries are."""
        return self.shape[0] if self.shape else 1

    @property
    def width(self) -> int:
        """How many columns it has as that matrix."""
        return prod(self.shape[1:])


class Buffer(NamedTuple):
    """A buffer of the recorded model."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype


class Phase(NamedTuple):
    """One time that recording began: "started" or "resumed", when (UTC), and from which step. The
    memory had come to `rewound_from`; on threads, machine and torch the last bits depend."""

    first_step: int
    began: str
    when: str
    rewound_from: int | None
    threads: int = 0
    machine: str = ""
    torch: str = ""


class Event(NamedTuple):
    """What happened to parameters by other means than an update that patterns explain, after `step`
    updates. A "rewind" put back the state after `to` updates."""

    step: int
    parameters: tuple[str, ...]
    what: str
    why: str
    to: int | None


class Description:
    """Everything a memory says of its model, after the lines that were added."""

    def __init__(self, manifest: dict[str, Any]) -> None:
        self.closed, self.every = exactly(bool, manifest["closed"]), count(manifest["every"])
        self.stored = dtype(manifest["stored"])
        if not self.every or not self.stored.is_floating_point:
            raise ValueError(f"every {self.every} steps, rows in {self.stored}")
        self.parameters: dict[str, Parameter] = {}
        for index, entry in enumerate(exactly(list, manifest["parameters"])):
            parameter = Parameter(*_tensor(entry), *_kept_as(entry), index)
            if self.parameters.setdefault(parameter.name, parameter) is not parameter:
                raise ValueError(f"{parameter.name!r} occurs twice")
        self.buffers = {b.name: b for b in map(_tensor, exactly(list, manifest["buffers"]))}
        self.environment = exactly(dict, manifest["environment"])
        self.phases = tuple(map(_phase, exactly(list, manifest["phases"])))
        self.layers: dict[str, tuple[Layer, str]] = {}
        """And what is kept of each: "patterns", "keys" or "examples"."""
        self.tags: dict[str, str] = {}
        self.strings: dict[str, list[str]] = {}
        self.events: list[Event] = []
        self.remarks = texts(manifest.get("remarks", []))
        self.settings: list[Any] = []
        """As JSON: a schedule brings one for every step, and few readers want them."""

    @property
    def columns(self) -> dict[str, str]:
        """The kind of every column: `step`, then what was tagged, then what uses say."""
        return {"step": "int", **self.tags, **dict.fromkeys(OWN_COLUMNS, "int")}

    def add(self, news: dict[str, Any]) -> None:
        """Take in what a line says that the ones before did not."""
        lists = {what: exactly(list, news.get(what, [])) for what in _LISTS}
        names = {what: exactly(dict, news.get(what, {})).items() for what in _NAMES}
        self.settings += lists["settings"]
        for entry in lists["layers"]:
            self._add_layer(exactly(dict, entry))
        for name, kind in names["columns"]:
            if name in (*OWN_COLUMNS, "step") or self.tags.get(name, kind) != kind:
                raise ValueError(f"a column {name!r} of kind {kind!r:.50}")
            self.tags[name] = chosen(kind, COLUMN_KINDS)
        for name, strings in names["strings"]:
            self.strings.setdefault(name, []).extend(texts(strings))
        for name, entry in names["coverage"]:
            keep, why = _kept_as(entry)
            self.parameters[name] = replace(self.parameters[name], keep=keep, why=why)
        self.events += [self._event(entry) for entry in lists["events"]]
        self.remarks += [_remark(entry) for entry in lists["remarks"]]

    def _add_layer(self, entry: dict[str, Any]) -> None:
        keep = chosen(entry["keep"], KEEP[:3])
        layer = Layer.from_json({k: v for k, v in entry.items() if k != "keep"})
        if self.layers.setdefault(layer.name, (layer, keep)) != (layer, keep):
            raise ValueError(f"layer {layer.name!r} is described twice, and differently")
        for name in layer.parameters:
            known, rows = self.parameters[name], layer.rows_of(name)
            entries = prod(layer.shape) if name == layer.weight else 0
            if rows.stop > known.height or entries > prod(known.shape):
                raise ValueError(f"layer {layer.name!r} is no part of {name!r}")
            layers = tuple(dict.fromkeys((*known.layers, layer.name)))
            self.parameters[name] = replace(known, layers=layers)

    def _event(self, entry: dict[str, Any]) -> Event:
        step, to, names = count(entry["step"]), entry.get("to"), texts(entry["parameters"])
        if not self.parameters.keys() >= set(names):
            raise ValueError(f"an event of parameters {names!r:.100}")
        if (to is not None and count(to) > step) or (entry["what"] == "rewind") != (to is not None):
            raise ValueError(f"a {entry['what']!r:.50} of step {step} to {to}")
        what, why = texts([entry["what"], entry["why"]])
        return Event(step, tuple(names), what, why, to)


def _tensor(entry: dict[str, Any]) -> Buffer:
    return Buffer(exactly(str, entry["name"]), shape(entry["shape"]), dtype(entry["dtype"]))


def _kept_as(entry: dict[str, Any]) -> tuple[str, str]:
    return chosen(entry["keep"], KEEP), exactly(str, entry.get("why", ""))


def _phase(entry: dict[str, Any]) -> Phase:
    first, rewound = count(entry["first_step"]), entry.get("rewound_from")
    rewound = None if rewound is None else count(rewound)
    began, threads = chosen(entry["began"], ("started", "resumed")), count(entry.get("threads", 0))
    when, *where = texts([entry["when"], entry.get("machine", ""), entry.get("torch", "")])
    return Phase(first, began, when, rewound, threads, *where)


def _remark(entry: Any) -> str:
    """Read a sentence, or one of a step, [step, sentence], which a rewind takes back."""
    if type(entry) is list:
        step, entry = entry
        count(step)
    return exactly(str, entry)
