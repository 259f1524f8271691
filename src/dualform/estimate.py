"""How large a memory will be, before training starts: measured, not modelled.

Two steps of a copy are recorded into a temporary directory, and what they took on disk is carried
on to all steps. Only what does not grow with every step is known by its rule: kept states are at
most 1/16 of what is recorded, besides the first and the last, small values a tenth, fingerprints
come every 64 steps. How many examples there are, if inputs come again, has to be said.
"""

from __future__ import annotations

import copy
import random
import shutil
import tempfile
import warnings
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from html import escape
from math import ceil
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.filesize import decimal
from torch import nn
from torch.optim import Optimizer

from dualform.errors import DualFormError
from dualform.layers import find_layers, of
from dualform.layers.uses import tensors_in
from dualform.memory import LayerMemory, Memory
from dualform.memory.content import rows_name
from dualform.memory.files import local_path
from dualform.recording import record
from dualform.recording.kept import SHARE, SMALL_SHARE
from dualform.recording.sink import SEGMENT_BYTES, SETS
from dualform.recording.updates import ANCHOR
from dualform.table import Table

STEPS = 2
WORDS = ("auto", "keys", "values")  # measured besides the `keep` asked for
COLUMNS = ("layer", "kept", "rows", "bytes/row", "MB")
PARTS = {"keys": "keys", "error_signals": "error signals"}


@dataclass(frozen=True)
class Estimate:
    """What recording a run will take: bytes on disk, by layer and by part, and RAM for buffers.

    Example:
        >>> found.bytes_on_disk, found.parts["keys"], found.by_keep["keys"]   # doctest: +SKIP
    """

    batch: int
    steps: int
    table: Table
    """One line per layer: how it is kept, and its rows, in MB."""
    parts: Mapping[str, int]
    """Bytes by what they are for; they add up to `bytes_on_disk`."""
    buffer_bytes: int
    """The most RAM the recorder's buffers take."""
    by_keep: Mapping[str, int] = field(default_factory=dict)
    """Bytes on disk with other choices of `keep`."""
    remarks: tuple[str, ...] = ()
    free_bytes: int | None = None

    @property
    def bytes_on_disk(self) -> int:
        """The size of the whole memory, in bytes."""
        return sum(self.parts.values())

    @property
    def fits(self) -> bool | None:
        """Whether the disk holds it; None if no path was given."""
        return None if self.free_bytes is None else self.bytes_on_disk <= self.free_bytes

    def to_dict(self) -> dict[str, Any]:
        """Everything in plain values, fit for `json.dumps`; sizes in bytes."""
        own = {"table": self.table.to_dict(), "fits": self.fits, "remarks": list(self.remarks)}
        return vars(self) | own | {"bytes_on_disk": self.bytes_on_disk}

    def __repr__(self) -> str:
        size = decimal(self.bytes_on_disk)
        lines = [
            f"{size} on disk for {self.steps:,} steps of {self.batch:,} examples",
            repr(self.table),
            *(f"  {name}: {decimal(size)}" for name, size in self.parts.items() if size),
            *(f'  with keep="{word}": {decimal(size)}' for word, size in self.by_keep.items()),
            f"  RAM for the recorder's buffers: at most {decimal(self.buffer_bytes)}",
            *(f"  {remark}" for remark in self.remarks),
        ]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        return f"<pre>{escape(repr(self))}</pre>"


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
        >>> import dualform, torch
        >>> found = dualform.estimate(torch.nn.Linear(784, 10), batch=128, steps=3000)
        >>> found.table["rows"].tolist(), round(found.bytes_on_disk / 1e9, 1)
        ([384000], 1.2)

    Args:
        inputs: a sample batch, as the model takes it: a tensor, a tuple, a dict of keyword
            arguments. Without it one is assumed from the first layer: one row per example.
        batch: examples per update, all micro-batches together; those of `inputs` by default.
        optimizer: the one (or those) that will train the model, or a class; AdamW by default.
        keep, dtype, every: as given to `record`.
        examples: how many different examples there are, if they come again as they are: keys that
            are the network's inputs are stored once. Without it all are taken to be new.
        path: where the memory will go: the estimate then says whether it fits there.
    """
    if not isinstance(model, nn.Module):
        raise DualFormError(f"expected a torch.nn.Module, got {type(model).__name__}")
    counts = {"steps": steps, "every": every, "batch": batch, "examples": examples}
    for name, value in counts.items():
        if (value is not None or name == "steps") and (type(value) is not int or value < 1):
            raise DualFormError(f"{name}={value!r} was given; expected a whole number from 1 up")
    inputs, remarks = _assumed(model, batch) if inputs is None else (inputs, [])
    if optimizer is None:
        optimizer = torch.optim.AdamW
        remarks.append("no optimizer was given: AdamW is assumed")
    if examples is None:
        remarks.append("inputs are taken to be new; if they recur, say how many differ (examples)")
    sample = next((len(tensor) for tensor in tensors_in(inputs) if tensor.dim()), 0)
    if not sample:
        raise DualFormError("the inputs hold no tensor with examples along its first dimension")
    batch, recorded = batch or sample, ceil(steps / every)
    seen, times = examples or recorded * batch, batch / sample * recorded / STEPS
    plan = _Plan(batch, steps, recorded, seen, seen / sample, times)
    rules = [optimizer] if isinstance(optimizer, (type, Optimizer)) else list(optimizer)
    asked, found = keep if isinstance(keep, str) else "as asked", dict[str, Estimate]()
    state = random.getstate()
    with torch.random.fork_rng(), tempfile.TemporaryDirectory(prefix="dualform-") as place:
        for word in dict.fromkeys([asked, *WORDS]):
            run, chosen = Path(place) / word, keep if word == asked else word
            recording = partial(record, path=run, keep=chosen, dtype=dtype, audit="warn")
            plan.train(model, rules, inputs, recording)
            found[word] = plan.carried_on(Memory.open(run))
    random.setstate(state)
    own, free = found.pop(asked), None
    by_keep = {word: other.bytes_on_disk for word, other in found.items()}
    if path is not None:
        there = local_path(path).absolute()
        free = shutil.disk_usage(next(p for p in (there, *there.parents) if p.exists())).free
        verdict = "enough" if own.bytes_on_disk <= free else "NOT ENOUGH"
        remarks.append(f"free on that disk: {decimal(free)}, {verdict}")
    return replace(own, by_keep=by_keep, remarks=(*remarks, *own.remarks), free_bytes=free)


class _Plan(NamedTuple):
    """How two recorded steps of a sample are carried on to a whole run."""

    batch: int
    steps: int
    recorded: int
    """How many steps have their patterns kept."""
    seen: int
    """How many different examples there will be."""
    of_sample: float
    """How many times the sample all examples are."""
    times: float
    """How many rows there will be for each that was recorded."""

    def train(self, model: nn.Module, rules: list[Any], inputs: Any, recording: Any) -> None:
        """Record two steps of a copy."""
        net, own = copy.deepcopy((model, rules))
        trained = [p for p in net.parameters() if p.requires_grad] or list(net.parameters())
        optimizers = [o(trained) if isinstance(o, type) else o for o in own]
        for group in (group for each in optimizers for group in each.param_groups):
            group["lr"] = group.get("lr", 0.0) * 0 + 1e-3  # a schedule's may be 0 at first
        closure = [partial(_pass, net, inputs)] if len(optimizers) == 1 else []  # some need one
        with warnings.catch_warnings(action="ignore"), recording(net) as recorder:
            for _ in range(STEPS):
                recorder.tag(example=self.seen - 1, label=0)  # as wide as the largest
                if not closure:
                    _pass(net, inputs)
                for each in optimizers:
                    each.step(*closure)

    def carried_on(self, memory: Memory) -> Estimate:
        """Carry on what two steps took to all of them."""
        sizes = defaultdict[str, int](int)
        for segment in memory.opened.segments:
            for name, place in segment.file.places.items():
                sizes[name] += place.stop - place.start

        def family(prefix: str) -> int:
            return sum(size for name, size in sizes.items() if name.startswith(prefix))

        parts, lines, wide = defaultdict[str, float](float), list[tuple[Any, ...]](), 0
        for layer in filter(len, map(memory.layer, memory.layers)):
            prefix, total = rows_name(layer.name, ""), 0.0
            for name in [name for name in sizes if name.startswith(prefix)]:
                part, _, beside = name.removeprefix(prefix).partition(".")
                size = sizes[name] * (self.times if beside else self._times(layer, part))
                parts[PARTS.get(part, "what examples wrote")] += size
                total += size
                if not beside:  # while they are collected, and counted: as in training
                    rows = layer.read(part, 0, 0)
                    wide += layer.rows * rows.shape[1] * rows.dtype.itemsize
            count = round(layer.rows * self.times)
            lines.append((layer.name, layer.keep, count, round(total / max(1, count)), total / 1e6))
        parts["columns"] = family("columns/") * self.times
        parts["log"] = family("log/") * self.steps / STEPS
        parts |= self._kept(memory, wide * self.times)
        parts["kept at every step"] += family("kept/gradient/") * self.recorded / STEPS
        parts["fingerprints"] = family("kept/fingerprint/") * ceil(self.steps / ANCHOR)
        parts["headers and lists"] = memory.bytes_on_disk - family("")
        buffers = SETS * (SEGMENT_BYTES + round(wide * self.times / self.recorded))
        sums = {name: round(size) for name, size in parts.items()}
        columns = {name: [line[i] for line in lines] for i, name in enumerate(COLUMNS)}
        table = Table(columns, "rows of patterns on disk")
        return Estimate(self.batch, self.steps, table, sums, buffers, remarks=memory.remarks)

    def _times(self, layer: LayerMemory, part: str) -> float:
        """How many times the bytes of a part there will be: keys that come again count once."""
        if part == "keys" and (distinct := layer.distinct) is not None:
            numbers, half = distinct.references, len(distinct.references) // STEPS
            if numbers[half:].max(initial=-1) <= numbers[:half].max(initial=-1):  # no new ones
                return min(self.of_sample, self.times * layer.rows / distinct.rows)
        return self.times

    def _kept(self, memory: Memory, wide: float) -> dict[str, float]:
        """What kept states take, and what is kept after every update."""
        kept, first, later, moved, small = memory.kept, 0, 0, 0, 0
        for name in memory.parameters:
            steps = kept.steps(name)
            if kept.digest(name):
                continue
            size = kept.weights(name, steps[0]).nbytes
            first += size + sum(t.nbytes for t in tensors_in(kept.state(name, 0)))
            small += size if 1 in steps else 0
            if steps[-1]:
                later += size + sum(t.nbytes for t in tensors_in(kept.state(name, steps[-1])))
                moved += size
        for name in memory.buffers:
            buffer, then = (memory.buffer(name, step) for step in (0, min(1, memory.steps)))
            first += buffer.nbytes
            small += 0 if torch.equal(buffer, then) else buffer.nbytes
        anchors = (self.steps - 1) // ANCHOR
        room = wide * SHARE * anchors * ANCHOR / self.steps - 2 * moved  # as the recorder keeps it
        between = max(0, min(anchors, int(room // later) + 1)) if later else 0
        often = min(small * self.steps, max(small, wide * SMALL_SHARE))
        return {"kept states": first + later * (1 + between), "kept at every step": often}


def _pass(net: nn.Module, inputs: Any) -> Any:
    """Make a loss of whatever the model returns, and gradients of it."""
    net.zero_grad()
    listed = inputs if isinstance(inputs, (tuple, list)) else [inputs]
    try:
        output = net(**inputs) if isinstance(inputs, Mapping) else net(*listed)
    except Exception as error:
        shapes = ", ".join(str(list(tensor.shape)) for tensor in tensors_in(inputs))
        raise DualFormError(
            f"the model cannot be run on inputs of shape {shapes} ({error!r:.200}). Give a sample "
            "batch as inputs, as the model takes it"
        ) from error
    trained = [t for t in tensors_in(output) if t.requires_grad]
    terms = [(t.float() * torch.rand(t.shape[-1:]).to(t.device)).square().mean() for t in trained]
    if not terms:
        raise DualFormError("nothing that the model returns can be trained")
    loss: Any = torch.stack(terms).sum()
    loss.backward()
    return loss


def _assumed(model: nn.Module, batch: int | None) -> tuple[Any, list[str]]:
    """Make a batch up from the first layer that has keys; say so."""
    if batch is None:
        raise DualFormError("neither inputs nor batch were given: give a sample batch, or its size")
    for layer, module in find_layers(model).items():
        kind, weight = of(layer.kind), module.get_parameter("weight")
        if kind.key_width(layer):
            made = torch.randn(batch, layer.in_features).to(weight)
            if kind.key_dtype is not None:
                made = torch.randint(layer.in_features, (batch, 1), device=weight.device)
            said = f"{list(made.shape)} are assumed, from layer {layer.name!r}: one row per example"
            return made, [f"inputs of shape {said}"]
    raise DualFormError("no layer says what inputs look like. Give a sample batch as inputs")
