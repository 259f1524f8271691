"""How large a memory will be, before training starts: measured, not modelled.

Two steps of a copy are recorded into a temporary directory, with learning rate 0, and what they
took on disk is carried on to all steps. So nothing here knows the format; only what does not grow
with every step is known by its rule: kept states are at most 1/16 of what is recorded besides the
first and the last, small values a tenth, fingerprints come every 64 steps, and inputs that come
again are stored once, which two steps cannot show: how many there are is to be said (`examples`).
"""

from __future__ import annotations

import copy
import html
import random
import shutil
import tempfile
import warnings
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import ceil
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.filesize import decimal
from torch import Tensor, nn
from torch.optim import Optimizer

from dualform.errors import DualFormError
from dualform.layers import find_layers, of
from dualform.memory import LayerMemory, Memory
from dualform.memory.content import REFERENCES, rows_name
from dualform.memory.files import local_path
from dualform.recording.entry import record
from dualform.recording.kept import SHARE, SMALL_SHARE
from dualform.recording.sink import SEGMENT_BYTES, SETS
from dualform.recording.updates import ANCHOR
from dualform.recording.watched import SMALL
from dualform.table import Table

STEPS = 2
WORDS = ("auto", "keys", "values")
"""The `keep=` that are compared with the one asked for."""


@dataclass(frozen=True)
class LayerEstimate:
    """One layer's rows: how many, and the bytes of each part (keys, error signals, …)."""

    name: str
    keep: str
    patterns_per_step: int
    patterns: int
    parts: Mapping[str, int]

    @property
    def bytes_on_disk(self) -> int:
        """Bytes of all its rows; inputs that come again count once."""
        return sum(self.parts.values())


@dataclass(frozen=True)
class Estimate:
    """What recording a run will take: bytes on disk, by layer and by part, and RAM for buffers.

    Example:
        >>> import dualform
        >>> from torch import nn
        >>> estimate = dualform.estimate(nn.Linear(784, 10), batch=128, steps=3000)
        >>> estimate.layers[0].patterns, round(estimate.bytes_on_disk / 1e9, 1)
        (384000, 1.2)
    """

    batch: int
    steps: int
    layers: tuple[LayerEstimate, ...]
    parts: Mapping[str, int]
    """Bytes by what they are for; they add up to `bytes_on_disk`."""
    buffer_bytes: int
    """The most RAM the recorder's buffers take."""
    by_keep: Mapping[str, int] = field(default_factory=dict)
    """Bytes on disk for other choices of `keep`."""
    remarks: tuple[str, ...] = ()
    free_bytes: int | None = None

    @property
    def bytes_on_disk(self) -> int:
        """The size of the whole memory, in bytes."""
        return sum(self.parts.values())

    @property
    def fits(self) -> bool | None:
        """Whether the free space at the path holds it; None if no path was given."""
        return None if self.free_bytes is None else self.bytes_on_disk <= self.free_bytes

    @property
    def table(self) -> Table:
        """One line per layer: the bytes of its rows."""
        layers = self.layers
        columns: dict[str, Any] = {
            "layer": [layer.name for layer in layers],
            "kept": [layer.keep for layer in layers],
            "rows/step": [layer.patterns_per_step for layer in layers],
            "rows": [f"{layer.patterns:,}" for layer in layers],
            "bytes/row": [f"{la.bytes_on_disk / max(1, la.patterns):,.0f}" for la in layers],
            "on disk": [decimal(layer.bytes_on_disk) for layer in layers],
        }
        return Table(columns, "rows of patterns, in bytes")

    def to_dict(self) -> dict[str, Any]:
        """Everything in plain values, fit for `json.dumps`; sizes in bytes."""
        layers = [vars(la) | {"bytes_on_disk": la.bytes_on_disk} for la in self.layers]
        own = {"bytes_on_disk": self.bytes_on_disk, "layers": layers, "fits": self.fits}
        return vars(self) | own | {"remarks": list(self.remarks)}

    def __repr__(self) -> str:
        return "\n".join([self._head, repr(self.table), *(f"  {line}" for line in self._lines())])

    def _repr_html_(self) -> str:
        lines = "".join(f"<li>{html.escape(line)}</li>" for line in self._lines())
        return f"<p><b>{html.escape(self._head)}</b></p>{self.table._repr_html_()}<ul>{lines}</ul>"

    @property
    def _head(self) -> str:
        size = decimal(self.bytes_on_disk)
        return f"{size} on disk for {self.steps:,} steps of {self.batch:,} examples"

    def _lines(self) -> Iterator[str]:
        yield from (f"{name}: {decimal(size)}" for name, size in self.parts.items() if size)
        yield from (f'with keep="{word}": {decimal(n)}' for word, n in self.by_keep.items())
        yield f"RAM for the recorder's buffers: at most {decimal(self.buffer_bytes)}"
        yield from self.remarks
        if self.free_bytes is not None:
            verdict = "enough" if self.fits else "NOT ENOUGH: train fewer steps, or choose another"
            yield f"free on that disk: {decimal(self.free_bytes)}, {verdict}"


def estimate(
    model: nn.Module,
    inputs: Any = None,
    *,
    steps: int,
    batch: int | None = None,
    optimizer: Optimizer | Iterable[Optimizer] | type[Optimizer] | None = None,
    keep: str | Mapping[str, str] = "auto",
    dtype: str = "float32",
    every: int = 1,
    examples: int | None = None,
    path: str | Path | None = None,
) -> Estimate:
    """Say how many bytes recording this training will take, by recording two steps of a copy.

    Example:
        >>> import dualform
        >>> from torch import nn
        >>> model = nn.Sequential(nn.Linear(784, 800), nn.ReLU(), nn.Linear(800, 10))
        >>> dualform.estimate(model, batch=128, steps=3000).layers[1].patterns
        384000

    Args:
        inputs: a sample batch as the model takes it: a tensor, a tuple, or a dict of keyword
            arguments, examples along the first dimension. Without it one is assumed, from the
            first layer: one row per example.
        steps: how many updates.
        batch: examples per update, all micro-batches together; that of `inputs` by default.
        optimizer: the one (or those) that will train the model, or a class; AdamW by default.
        keep, dtype, every: as given to `record`.
        examples: how many different examples there are, if they come again as they are: keys that
            are the network's inputs are stored once. Without it all are taken to be new.
        path: where the memory will go: then `fits` says whether it fits there.
    """
    if not isinstance(model, nn.Module):
        raise DualFormError(f"expected a torch.nn.Module, got {type(model).__name__}")
    for name, value in {
        "steps": steps,
        "batch": batch,
        "every": every,
        "examples": examples,
    }.items():
        needed = name in ("steps", "every")
        if (needed or value is not None) and (type(value) is not int or value < 1):
            raise DualFormError(f"{name}={value!r} was given; expected a whole number from 1 up")
    remarks, assumed = [], inputs is None
    if assumed:
        inputs, said = _assumed(model, batch)
        remarks.append(said)
    if optimizer is None:
        optimizer = torch.optim.AdamW
        remarks.append("no optimizer was given: AdamW is assumed")
    sizes = [t.shape[0] for t in _tensors(inputs) if t.dim()]
    if not sizes:
        raise DualFormError("the inputs hold no tensor with examples along its first dimension")
    plan = _Plan(sizes[0], batch or sizes[0], steps, every, examples)
    asked = keep if isinstance(keep, str) else "as asked"
    found: dict[str, _Extrapolated] = {}
    with _random_state_kept(), tempfile.TemporaryDirectory(prefix="dualform-") as place:
        for word in dict.fromkeys([asked, *WORDS]):
            run = Path(place) / word
            try:
                said_so = _record(
                    model, optimizer, inputs, keep if word == asked else word, dtype, plan, run
                )
            except Exception as error:
                if not assumed or isinstance(error, DualFormError):
                    raise
                raise DualFormError(
                    f"{remarks[0]}, but the model cannot be run on it ({error!r:.200}). Give a "
                    "sample batch as inputs"
                ) from error
            remarks += said_so if word == asked else []
            found[word] = plan.extrapolated(Memory.open(run))
    own = found[asked]
    if examples is None and own.recurring:
        remarks.append(
            f"all keys of {', '.join(own.recurring)} are taken to be new; if examples come again "
            "as they are, say how many there are (examples): they are stored once"
        )
    return Estimate(
        plan.batch,
        steps,
        own.layers,
        own.parts,
        SETS * (SEGMENT_BYTES + own.bytes_per_step),
        {word: sum(other.parts.values()) for word, other in found.items()},
        tuple(remarks),
        None if path is None else _free_bytes(local_path(path)),
    )


# Two steps of a copy ------------------------------------------------------------------------------


def _record(
    model: nn.Module,
    optimizer: Any,
    inputs: Any,
    keep: str | Mapping[str, str],
    dtype: str,
    plan: _Plan,
    path: Path,
) -> list[str]:
    """Record two steps with learning rate 0; give what the recorder remarked."""
    listed = optimizer if isinstance(optimizer, (type, Optimizer)) else list(optimizer)
    net, own = copy.deepcopy((model, listed))
    if isinstance(own, type):
        own = own([p for p in net.parameters() if p.requires_grad])
    optimizers = [own] if isinstance(own, Optimizer) else own
    for group in (group for o in optimizers for group in o.param_groups):
        group["lr"] = group.get("lr", 0.0) * 0 + 1e-3  # of a schedule it may be 0 at first

    def loss() -> Tensor:
        for o in optimizers:
            o.zero_grad()
        outputs = [t for t in _tensors(_called(net, inputs)) if t.requires_grad]
        if not outputs:
            raise DualFormError("nothing that the model returns can be trained: no gradient")
        total = sum((t.float() * torch.rand(t.shape[-1:], device=t.device)).square().mean() for t in outputs)
        total.backward()
        return total

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with record(net, optimizers, path, keep=keep, dtype=dtype, audit="warn") as recorder:
            for _ in range(STEPS):
                recorder.tag(example=plan.largest_example, label=0)
                if len(optimizers) == 1:
                    optimizers[0].step(loss)
                    continue
                loss()
                for o in optimizers:
                    o.step()
    return list(recorder.remarks)


def _called(model: nn.Module, inputs: Any) -> Any:
    if isinstance(inputs, Mapping):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, (tuple, list)) else model(inputs)


def _tensors(found: Any) -> Iterator[Tensor]:
    """All tensors of floats or tokens in whatever models take and return."""
    if isinstance(found, Tensor):
        yield found
    elif isinstance(found, Mapping):
        yield from (t for value in found.values() for t in _tensors(value))
    elif isinstance(found, (tuple, list)):
        yield from (t for value in found for t in _tensors(value))
    elif hasattr(found, "__dataclass_fields__"):
        yield from _tensors(vars(found))


def _assumed(model: nn.Module, batch: int | None) -> tuple[Tensor, str]:
    """Make a batch up from the first layer with keys; say so."""
    if batch is None:
        raise DualFormError(
            "neither inputs nor batch were given; expected a sample batch, or how many examples "
            "an update sees"
        )
    for layer, module in find_layers(model).items():
        kind, weight = of(layer.kind), module.get_parameter("weight")
        if kind.key_width(layer):
            if kind.key_dtype is not None:
                made = torch.randint(layer.in_features, (batch, 1), device=weight.device)
            else:
                made = torch.randn(batch, layer.in_features).to(weight)
            said = f"inputs of shape {list(made.shape)} are assumed, from layer {layer.name!r}"
            return made, f"{said}: one row per example"
    raise DualFormError(
        "this model has no layer to assume inputs from. Give a sample batch as inputs"
    )


@contextmanager
def _random_state_kept() -> Iterator[None]:
    """Draw what a model may draw without moving anybody's random numbers on."""
    states = random.getstate(), np.random.get_state()  # noqa: NPY002 (models may use it)
    with torch.random.fork_rng():
        try:
            yield
        finally:
            random.setstate(states[0])
            np.random.set_state(states[1])  # noqa: NPY002


# Carried on to all steps --------------------------------------------------------------------------


@dataclass(frozen=True)
class _Extrapolated:
    """What a memory of all steps takes."""

    layers: tuple[LayerEstimate, ...]
    parts: Mapping[str, int]
    recurring: tuple[str, ...]
    bytes_per_step: int


@dataclass(frozen=True)
class _Plan:
    """How two recorded steps of a sample are carried on to a whole run."""

    sample: int
    batch: int
    steps: int
    every: int
    examples: int | None

    @property
    def recorded(self) -> int:
        """How many steps have their patterns kept."""
        return ceil(self.steps / self.every)

    @property
    def largest_example(self) -> int:
        """The largest id: a column takes what its largest number takes."""
        return (self.examples or self.recorded * self.batch) - 1

    @property
    def patterns(self) -> float:
        """How many rows there will be for each that was recorded."""
        return self.batch / self.sample * self.recorded / STEPS

    def extrapolated(self, memory: Memory) -> _Extrapolated:
        """Carry on what two steps took."""
        sizes: dict[str, int] = defaultdict(int)
        for segment in memory.opened.segments:
            for name in segment.file.names:
                place = segment.file.place(name)
                sizes[name] += place.stop - place.start
        found = [memory.layer(name) for name in memory.layers]
        layers = tuple(self._layer(memory, layer, sizes) for layer in found)
        wide = sum(  # while they are collected, and counted: as in training
            layer.rows * rows.shape[1] * rows.dtype.itemsize
            for layer, known in zip(found, layers, strict=True)
            for rows in (layer.read(part, 0, 0) for part in known.parts)
        )
        by_part: dict[str, float] = defaultdict(float)
        for known in layers:
            for part, size in known.parts.items():
                by_part[NAMES.get(part, "what examples wrote")] += size
        by_part["columns"] = _sum(sizes, "columns/") * self.patterns
        by_part["log"] = _sum(sizes, "log/") * self.steps / STEPS
        by_part |= self._kept(memory, sizes, wide * self.patterns)
        inside = sum(segment.bytes for segment in memory.opened.segments)
        per_file = (inside - sum(sizes.values())) / max(1, len(memory.opened.segments))
        files = 1 + wide * self.patterns // SEGMENT_BYTES
        by_part["headers and lists"] = files * per_file + memory.bytes_on_disk - inside
        recurring = [la.name for la in found if recurs(la)]
        parts = {name: round(size) for name, size in by_part.items()}
        return _Extrapolated(
            layers, parts, tuple(recurring), round(wide * self.batch / self.sample / STEPS)
        )

    def _layer(self, memory: Memory, layer: LayerMemory, sizes: Mapping[str, int]) -> LayerEstimate:
        patterns, prefix = layer.rows * self.patterns, rows_name(layer.name, "")
        parts: dict[str, float] = defaultdict(float)
        for name, size in sizes.items():
            if name.startswith(prefix):
                part = name.removeprefix(prefix)
                share = self.patterns
                if part == "keys" and recurs(layer):
                    stored = sum(s.distinct[layer.name] for s in memory.opened.segments)
                    share = min(self._fresh(layer, stored), patterns) / stored
                parts[part.partition(".")[0]] += size * share
        per_step = round(patterns / self.recorded)
        sums = {part: round(size) for part, size in parts.items()}
        return LayerEstimate(layer.name, layer.keep, per_step, round(patterns), sums)

    def _fresh(self, layer: LayerMemory, stored: int) -> float:
        """How many different keys there will be: of tokens no more than there are."""
        batches = self.recorded * self.batch if self.examples is None else self.examples
        fresh = stored / self.sample * batches
        return min(fresh, layer.in_features) if of(layer.kind).key_dtype is not None else fresh

    def _kept(self, memory: Memory, sizes: Mapping[str, int], wide: float) -> dict[str, float]:
        """States, small values, gradients and fingerprints."""
        kept, first, later, moved, small, large, gradients = memory.kept, 0, 0, 0, 0, 0, 0
        for name in memory.parameters:
            steps = kept.steps(name)
            size = kept.weights(name, steps[0]).nbytes
            first += size + _bytes(kept.state(name, steps[0]))
            gradients += size * len(kept.gradient_steps(name))
            large += size if 1 in steps else 0
            if steps[-1]:
                later += size + _bytes(kept.state(name, steps[-1]))
                moved += size
        for name in memory.buffers:
            buffer = memory.buffer(name, 0)
            first += buffer.nbytes
            if not torch.equal(buffer, memory.buffer(name, 1)):
                small += buffer.nbytes if buffer.numel() <= SMALL else 0
                large += buffer.nbytes if buffer.numel() > SMALL else 0
        anchors = (self.steps - 1) // ANCHOR
        grows = wide * SHARE * ANCHOR / self.steps
        between = 0
        if later and grows:
            fitting = int((grows * anchors - 2 * moved) / later) + 1
            between = max(0, min(anchors + 1 - ceil(2 * moved / grows), fitting))
        every_step = small * self.steps
        every_step += min(large * self.steps, max(large, wide * SMALL_SHARE - every_step))
        return {
            "kept states": first + later * (1 + between),
            "kept at every step": every_step + gradients * self.recorded / STEPS,
            "fingerprints": _sum(sizes, "kept/fingerprint/") * (1 + anchors),
        }


def recurs(layer: LayerMemory) -> bool:
    """Whether the second step brought no new key."""
    if layer.distinct is None:
        return False
    numbers = layer.distinct.references
    return bool(numbers.max() == numbers[: len(numbers) // STEPS].max())


NAMES = {"keys": "keys", "error_signals": "error signals"}


def _sum(sizes: Mapping[str, int], prefix: str) -> int:
    return sum(size for name, size in sizes.items() if name.startswith(prefix))


def _bytes(state: Mapping[str, Any]) -> int:
    return sum(value.nbytes for value in state.values() if isinstance(value, Tensor))


def _free_bytes(place: Path) -> int:
    there = next(p for p in (place.absolute(), *place.absolute().parents) if p.exists())
    return shutil.disk_usage(there).free
