"""A memory written by hand, with everything a segment can hold, and the numbers that went into it.

`write(path)` writes segments of random rows through `MemoryWriter` and returns the `Truth`: what a
reader has to find. `read_all` asks a memory for everything there is, as one flat dict.
"""

# ruff: noqa: B023 (a question is asked before the next one is made)

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dualform.errors import DualFormError
from dualform.layers import Layer, of
from dualform.learning_rules import read_setting
from dualform.memory import Memory, MemoryWriter, SegmentContent, environment
from dualform.memory.content import LOG, use_table
from dualform.memory.narrowing import narrowed

LAYERS = [
    (Layer("fc1", "linear", "fc1.weight", "fc1.bias", 6, 4, (4, 6)), "patterns"),
    (Layer("a/b%2F", "linear", "a/b.weight", None, 4, 3, (3, 4)), "keys"),
    (Layer("tokens", "embedding", "tokens.weight", None, 9, 5, (9, 5)), "patterns"),
    (Layer("tags", "linear", "tags.weight", "tags.bias", 3, 2, (2, 3)), "examples"),
]
PARAMETERS = {
    "fc1.weight": (4, 6), "fc1.bias": (4,), "a/b.weight": (3, 4), "tokens.weight": (9, 5),
    "tags.weight": (2, 3), "tags.bias": (2,), "scale": (), "steps": (2, 2, 2),
}  # fmt: skip


@dataclass
class Truth:
    """What was written, layer by layer and step by step."""

    keys: dict[str, list[Tensor]] = field(default_factory=dict)
    signals: dict[str, list[Tensor]] = field(default_factory=dict)
    written: dict[str, list[Tensor]] = field(default_factory=dict)
    step: dict[str, list[int]] = field(default_factory=dict)
    label: dict[str, list[Any]] = field(default_factory=dict)
    log: dict[str, list[np.ndarray]] = field(default_factory=dict)
    kept: dict[tuple[str, int], dict[str, Any]] = field(default_factory=dict)
    gradients: dict[tuple[str, int], Tensor] = field(default_factory=dict)
    buffers: dict[int, Tensor] = field(default_factory=dict)
    prints: dict[str, list[tuple[int, Tensor]]] = field(default_factory=dict)


def description(stored: str = "float32", **changes: Any) -> dict[str, Any]:
    keep = {name: word for layer, word in LAYERS for name in (layer.weight, layer.bias) if name}
    return {
        "every": 1,
        "stored": stored,
        "parameters": [
            {
                "name": name, "shape": list(shape), "dtype": "float32",
                "keep": keep.get(name, "values"), "why": "",
            }
            for name, shape in PARAMETERS.items()
        ],
        "buffers": [{"name": "mean", "shape": [3], "dtype": "float32"}],
        "environment": environment(),
        "phases": [{"first_step": 0, "began": "started", "when": "2026-11-19T06:00:00Z"}],
        **changes,
    }  # fmt: skip


class Sample:
    """Makes segment after segment, and remembers what is in them."""

    def __init__(self, seed: int = 0, stored: str = "float32", rows: int = 5) -> None:
        self.rng = np.random.default_rng(seed)
        self.truth, self.steps, self.rows, self.calls = Truth(), 0, rows, 0
        self.stored = getattr(torch, stored)
        self.distinct: list[Tensor] = []
        self.optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1, momentum=0.9)

    def random(self, *shape: int) -> Tensor:
        return torch.from_numpy(self.rng.standard_normal(shape).astype(np.float32))

    def content(self, steps: int) -> SegmentContent:
        first, self.steps = self.steps, self.steps + steps
        content = SegmentContent(first, steps)
        if first == 0:
            content.news["layers"] = [{**layer.to_json(), "keep": word} for layer, word in LAYERS]
            content.news["columns"] = {"label": "int", "task": "string", "weight": "float"}
            content.news["settings"] = [
                read_setting(self.optimizer, self.optimizer.param_groups[0]).to_json()
            ]
        content.news["strings"] = {"task": [f"task {first}"]}
        self.add_rows(content)
        self.add_log(content)
        for step in (first, self.steps) if first == 0 else (self.steps,):
            self.add_kept(content, step)
        return content

    def add_rows(self, content: SegmentContent) -> None:
        parts: dict[str, dict[str, list[Tensor]]] = {}
        uses: dict[str, list[list[int]]] = {}
        labels: list[int] = []
        for step in range(content.first_step, content.first_step + content.steps):
            start = len(labels)
            n = self.rows
            labels += self.rng.integers(0, 5, n).tolist()
            for layer, word in LAYERS:
                if layer.name == "tokens" and step % 2:
                    continue
                self.calls += 1
                tagged = start if layer.name != "a/b%2F" else -1
                positions = n if layer.name == "tokens" else 1
                line = [step, 0, self.calls, self.calls, 1, n, positions, tagged, int(step % 3)]
                uses.setdefault(layer.name, []).append(line)
                for part, rows in self.rows_of(layer, word, n).items():
                    parts.setdefault(layer.name, {}).setdefault(part, []).append(rows)
                self.truth.step.setdefault(layer.name, []).extend([step] * n)
                known = labels[start:] if tagged >= 0 else [None] * n
                self.truth.label.setdefault(layer.name, []).extend(known)
        for layer, lines in uses.items():
            shape = (1, self.rows) if layer == "tokens" else (self.rows,)
            content.uses[layer] = use_table(lines, [shape] * len(lines))
        if labels:
            code = content.first_step and len(self.truth.kept) and self.codes
            self.codes = (code or 0) + 1
            content.tags = {
                "label": np.array(labels),
                "task": np.full(len(labels), self.codes - 1),
                "weight": np.array(labels) / 8,
            }
        for layer, _ in LAYERS:
            if layer.name in parts:
                content.rows[layer.name] = self.packed(layer.name, parts[layer.name])
                if self.stored != torch.float32 and layer.name == "fc1":
                    count = len(uses["fc1"])
                    content.lost["fc1"] = {"fc1.weight": np.full((count, 2), 1e-3)}

    def rows_of(self, layer: Layer, word: str, n: int) -> dict[str, Tensor]:
        kind = of(layer.kind)
        if kind.key_dtype is not None:
            keys = torch.from_numpy(self.rng.integers(0, layer.in_features, (n, 1)))
        elif layer.name == "fc1" and self.distinct and self.rng.random() < 0.5:
            known = torch.cat(self.distinct)
            keys = known[torch.from_numpy(self.rng.integers(0, len(known), n))]
        else:
            keys = self.random(n, layer.in_features)
        if layer.name == "fc1":
            self.distinct.append(keys)
        found = {"keys": keys}
        if word == "patterns":
            found["error_signals"] = self.random(n, layer.out_features) * 1e-6
        if word == "examples":
            found["weight"] = self.random(n, layer.shape[0] * layer.shape[1])
            found["bias"] = self.random(n, layer.out_features)
        return found

    def packed(self, layer: str, parts: dict[str, list[Tensor]]) -> list[Any]:
        found: list[tuple[str, Any]] = []
        for part, pieces in parts.items():
            rows = torch.cat(pieces)
            if rows.dtype == torch.float32 and self.stored != torch.float32:
                scaled = part != "keys" and self.stored == torch.float16
                made = narrowed(rows, self.stored, scaled=scaled)
                assert made is not None
                narrow, scales = made
                if scales is not None:
                    found.append((f"{part}.scales", scales))
                    rows_back = narrow.float() * scales[:, None]
                else:
                    rows_back = narrow.float()
            else:
                narrow, rows_back = rows, rows
            to = {"keys": self.truth.keys, "error_signals": self.truth.signals}.get(part)
            name = layer if to is not None else f"{layer}/{part}"
            (self.truth.written if to is None else to).setdefault(name, []).append(rows_back)
            if layer == "fc1" and part == "keys":
                narrow, references = self.folded(narrow)
                found.append(("keys.references", references))
            found.append((part, narrow))
        return found

    def folded(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        known = self.__dict__.setdefault("known", {})
        fresh, references = [], []
        for row in rows:
            key = row.view(torch.uint8).numpy().tobytes()
            if key not in known:
                known[key] = len(known)
                fresh.append(row)
            references.append(known[key])
        kept = torch.stack(fresh) if fresh else rows[:0]
        return kept, torch.tensor(references, dtype=torch.int32)

    def add_log(self, content: SegmentContent) -> None:
        size = (content.steps, len(PARAMETERS))
        for name, dtype in LOG.items():
            if name == "setting":
                values: np.ndarray = np.zeros(size, np.int32)
            elif dtype == torch.float64:
                values = self.rng.standard_normal(size)
            else:
                high = 2 if dtype == torch.uint8 else 1 << 32
                values = self.rng.integers(0, high, size, dtype=np.uint64)
                values = values.astype(torch.zeros(0, dtype=dtype).numpy().dtype)
            content.log[name] = values
            self.truth.log.setdefault(name, []).append(values)

    def add_kept(self, content: SegmentContent, step: int) -> None:
        for name, shape in PARAMETERS.items():
            weights, momentum = self.random(*shape), self.random(*shape)
            state = {"momentum_buffer": momentum, "count": step, "rate": float("inf"), "a/b": None}
            content.kept.append(("weights", name, step, weights))
            content.kept += [(f"state.{key}", name, step, value) for key, value in state.items()]
            self.truth.kept[name, step] = {"weights": weights, **state}
            height = shape[0] if shape else 1
            prints = self.random(3, height).double()
            content.kept.append(("fingerprint", name, step, prints))
            self.truth.prints.setdefault(name, []).append((step, prints))
        if content.steps:
            gradient = self.random(2)
            last = content.first_step + content.steps - 1
            content.kept.append(("gradient", "tags.bias", last, gradient))
            self.truth.gradients["tags.bias", last] = gradient
        mean = self.random(3)
        content.kept.append(("buffer", "mean", step, mean))
        self.truth.buffers[step] = mean


def write(
    path: Path, segments: tuple[int, ...] = (4, 3, 5), *, closed: bool = True, **options: Any
) -> Truth:
    """Write a whole memory of segments of so many steps."""
    sample = Sample(**options)
    writer = MemoryWriter(path)
    try:
        writer.begin(description(options.get("stored", "float32")))
        for steps in segments:
            writer.commit(sample.content(steps))
            writer.progress.set(sample.steps)
        writer.end(closed=closed)
    finally:
        writer.release()
    return sample.truth


Question = tuple[str, Callable[[], Any]]


def read_all(memory: Memory) -> Iterator[tuple[str, Any]]:
    """Everything a memory can be asked for, by name; tensors and arrays as bytes."""
    for name, ask in questions(memory):
        yield name, ask()


def questions(memory: Memory) -> Iterator[Question]:
    """What can be asked, one by one: what is wrong with one answer is not with the next."""
    yield "about", lambda: (
        memory.steps, memory.closed, memory.every, str(memory.parameters), str(memory.buffers),
        memory.layers, memory.columns, memory.phases, str(memory.environment), memory.events,
    )  # fmt: skip
    yield "remarks", lambda: memory.remarks
    yield "settings", lambda: str(memory.settings)
    for name in memory.parameters:
        yield from of_parameter(memory, name)
    for step in range(min(memory.steps, 20) + 1):
        yield f"buffer {step}", lambda: raw(memory.buffer("mean", step))
        yield f"marks {step}", lambda: step and memory.marks[step - 1].tobytes()
    for name in memory.layers:
        yield from of_layer(memory, name)


def of_parameter(memory: Memory, name: str) -> Iterator[Question]:
    kept = memory.kept
    yield f"log {name}", lambda: {f: getattr(memory.log(name), f).tobytes() for f in LOG}
    for step in listed(lambda: kept.steps(name)):
        yield f"weights {name} {step}", lambda: raw(kept.weights(name, step))
        yield f"state {name} {step}", lambda: {k: raw(v) for k, v in kept.state(name, step).items()}
    for step in listed(lambda: kept.gradient_steps(name)):
        yield f"gradient {name} {step}", lambda: raw(kept.gradient(name, step))
    yield f"steps {name}", lambda: kept.fingerprints(name)[0].tobytes()
    yield f"prints {name}", lambda: raw(kept.fingerprints(name)[1])
    yield f"direction {name}", lambda: (raw(memory.direction(name)), memory.signs(name).tobytes())
    yield f"path {name}", lambda: memory.path_to(name, min(memory.steps, 20)).tolist()


def of_layer(memory: Memory, name: str) -> Iterator[Question]:
    try:
        layer = memory.layer(name)
    except DualFormError:
        return
    words = {"patterns": ("keys", "error_signals"), "keys": ("keys",)}
    for part in words.get(layer.keep, ("keys", "weight", "bias")):
        yield f"rows {name} {part}", lambda: raw(layer.read(part, 0, layer.rows))
        yield f"last {name} {part}", lambda: raw(layer.read(part, layer.rows - 1, layer.rows))
    uses = ("step", "microbatch", "call", "order", "dtype", "rows", "positions", "layout")
    yield f"uses {name}", lambda: [getattr(layer.uses, c).tobytes() for c in uses]
    yield f"shapes {name}", lambda: [layer.uses.shape_of(i) for i in range(len(layer.uses))]
    for column in layer.patterns.names:
        yield f"column {name} {column}", lambda: repr(layer.patterns[column].tolist())
    for parameter in layer.layer.parameters:
        yield f"lost {name} {parameter}", lambda: layer.lost(parameter).tobytes()


def listed(ask: Callable[[], tuple[int, ...]]) -> tuple[int, ...]:
    try:
        return ask()
    except DualFormError:
        return ()


def raw(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return repr(value)
    flat = value.contiguous().reshape(-1)
    return str(value.dtype), tuple(value.shape), flat.view(torch.uint8).numpy().tobytes()
