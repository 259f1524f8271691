"""How large a memory will be, before the first step is trained.

A memory holds every key and every error signal, so its size is known in advance: patterns per step
× steps × (d_in + d_out), plus columns and the learning rule's log. What is not known without
running the model is how many patterns a layer sees per example (positions, several calls); a sample
batch tells. The small change (headers, page boundaries, fingerprints) is estimated; tests compare
the sum with real recordings.
"""

from __future__ import annotations

import html
import math
import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.filesize import decimal
from torch import Tensor, nn, optim

from dualform.errors import DualFormError
from dualform.layers import Layer, NamePatterns, chosen_names, find_layers, is_chosen
from dualform.layers.naming import possible_names, usual_projections
from dualform.learning_rules import HYPERPARAMETERS
from dualform.memory.files import local_path
from dualform.memory.tensor_files import CHECKSUM_BLOCK, PAGE
from dualform.recording.commits import SNAPSHOT_SHARE
from dualform.recording.counting import Calls, count_calls, names_of_trained, trained_by
from dualform.recording.entry import SNAPSHOT_EVERY, STATE_SHARE, STEP_BUDGET
from dualform.recording.fingerprints import FINGERPRINT_EVERY
from dualform.recording.opaque import refuse_opaque
from dualform.recording.optimizer_state import bytes_of_states
from dualform.recording.sink import SEGMENT_BYTES, SETS
from dualform.recording.storage import Storage, chosen
from dualform.table import Table

LOG_BYTES = 8 + 8 + 8 + 4 + 1 + 1
"""Per step and parameter: kappa, projection, first, group, applied, fresh."""

REFERENCE_BYTES = 4
"""Per pattern of a layer whose keys may recur: which of the stored ones it has."""


@dataclass(frozen=True)
class LayerEstimate:
    """One layer's patterns: how many, and how many bytes of keys and error signals."""

    name: str
    in_features: int
    out_features: int
    patterns_per_step: int
    patterns: int
    bytes_per_pattern: int
    bytes_of_keys: int
    bytes_of_error_signals: int

    @property
    def bytes_on_disk(self) -> int:
        """Bytes of keys and error signals of all its patterns; keys that recur count once."""
        return self.bytes_of_keys + self.bytes_of_error_signals


@dataclass(frozen=True)
class Estimate:
    """What recording a run will take: bytes on disk, by layer and by part, and RAM for buffers.

    Example:
        >>> import dualform as df
        >>> from torch import nn
        >>> estimate = df.estimate(nn.Linear(784, 10), batch=128, steps=3000)
        >>> estimate.layers[0].bytes_per_pattern, round(estimate.bytes_on_disk / 1e9, 1)
        (3176, 1.2)
    """

    batch: int
    steps: int
    layers: tuple[LayerEstimate, ...]
    parts: Mapping[str, int]
    """Bytes by what they are for; they add up to `bytes_on_disk`."""
    buffer_bytes: int
    """The most RAM the recorder's buffers take."""
    remarks: tuple[str, ...] = ()
    path: Path | None = None
    free_bytes: int | None = None

    @property
    def bytes_on_disk(self) -> int:
        """The size of the whole memory, in bytes."""
        return sum(self.parts.values())

    @property
    def bytes_per_pattern(self) -> float:
        """Bytes on disk per pattern of any layer, everything included."""
        patterns = sum(layer.patterns for layer in self.layers)
        return self.bytes_on_disk / patterns if patterns else 0.0

    @property
    def fits(self) -> bool | None:
        """Whether the free space at `path` holds it; None if no path was given."""
        return None if self.free_bytes is None else self.bytes_on_disk <= self.free_bytes

    @property
    def table(self) -> Table:
        """One line per layer: keys and error signals only."""
        layers = self.layers
        columns: dict[str, Any] = {
            "layer": [layer.name for layer in layers],
            "d_in → d_out": [f"{layer.in_features} → {layer.out_features}" for layer in layers],
            "patterns/step": [layer.patterns_per_step for layer in layers],
            "patterns": [f"{layer.patterns:,}" for layer in layers],
            "bytes/pattern": [f"{layer.bytes_per_pattern:,}" for layer in layers],
            "on disk": [decimal(layer.bytes_on_disk) for layer in layers],
        }
        return Table(columns, "keys and error signals, in bytes")

    def to_dict(self) -> dict[str, Any]:
        """Everything in plain values, fit for `json.dumps`; sizes in bytes."""
        return {
            "batch": self.batch,
            "steps": self.steps,
            "bytes_on_disk": self.bytes_on_disk,
            "bytes_per_pattern": self.bytes_per_pattern,
            "buffer_bytes": self.buffer_bytes,
            "parts": dict(self.parts),
            "layers": [vars(la) | {"bytes_on_disk": la.bytes_on_disk} for la in self.layers],
            "remarks": list(self.remarks),
            "path": None if self.path is None else str(self.path),
            "free_bytes": self.free_bytes,
            "fits": self.fits,
        }

    def __repr__(self) -> str:
        return "\n".join([self._head(), repr(self.table), *self._lines()])

    def _repr_html_(self) -> str:
        lines = "".join(f"<li>{html.escape(line.strip())}</li>" for line in self._lines())
        head = f"<p><b>{html.escape(self._head())}</b></p>"
        return f"{head}{self.table._repr_html_()}<ul>{lines}</ul>"

    def _head(self) -> str:
        return (
            f"{decimal(self.bytes_on_disk)} on disk for {self.steps:,} steps of "
            f"{self.batch:,} examples; {self.bytes_per_pattern:,.0f} bytes per pattern in all"
        )

    def _lines(self) -> list[str]:
        lines = [f"  {name}: {decimal(size)}" for name, size in self.parts.items() if size]
        lines.append(f"  RAM for the recorder's buffers: at most {decimal(self.buffer_bytes)}")
        lines += [f"  {remark}" for remark in self.remarks]
        if self.free_bytes is not None:
            verdict = "enough" if self.fits else "NOT ENOUGH: train fewer steps, or choose another"
            lines.append(f"  free at {self.path}: {decimal(self.free_bytes)}, {verdict}")
        return lines


def estimate(
    model: nn.Module,
    *,
    batch: int,
    steps: int,
    inputs: Any = None,
    examples: int | None = None,
    tags: int = 2,
    path: str | Path | None = None,
    layers: NamePatterns = None,
    dtype: str = "float32",
    error_signals: bool | str | Iterable[str] = True,
    every: int = 1,
    optimizer: optim.Optimizer | None = None,
    state_share: float = STATE_SHARE,
    step_budget: int = STEP_BUDGET,
    snapshot_every: int = SNAPSHOT_EVERY,
    segment_bytes: int = SEGMENT_BYTES,
) -> Estimate:
    """How many bytes recording this training will take, before you start.

    Example:
        >>> import dualform as df
        >>> from torch import nn
        >>> model = nn.Sequential(nn.Linear(784, 800), nn.ReLU(), nn.Linear(800, 10))
        >>> df.estimate(model, batch=128, steps=3000).layers[1].patterns
        384000

    Args:
        batch: examples per step (all micro-batches of an update together).
        inputs: a sample batch as the model takes it (a tensor, a tuple, or a dict of keyword
            arguments), its examples along the first dimension. The model is run on it once, in eval
            mode, to count the patterns of each layer, and to find those that are no modules.
            Without it, each layer is taken to see one pattern per example, the first one to be fed
            with the inputs, and each attention to be given one input.
        examples: how many different examples there are, if they come again as they are: the keys of
            layers that are fed with them are stored once. Without it, all are taken to be new.
        tags: how many columns `recorder.tag` will be given (example and label: 2).
        path: where the memory will go; the estimate then says whether it fits.
        layers: as given to `record`.
        dtype, error_signals, every: what will be stored of patterns, as `record` takes them.
        optimizer: the one that will train the model: layers it does not have are not counted; what
            Adam and its relatives remember is kept now and then, within `state_share` of the rest.
    """
    counts = {"batch": batch, "steps": steps, "every": every, "examples": examples}
    for name, value in counts.items():
        if value is None and name == "examples":
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise DualFormError(f"{name}={value!r} was given; expected a whole number from 1 up")
    if not isinstance(model, nn.Module):
        raise DualFormError(f"expected a torch.nn.Module, got {type(model).__name__}")
    trained = _trained_layers(model, layers)
    if inputs is None:
        assumed = [la for la in usual_projections(model) if is_chosen(la.name, layers)]
        calls: dict[Layer, Calls] = {layer: [(batch,)] for layer in [*trained, *assumed]}
        given = {layer for layer in list(trained)[:1] if layer.kind == "linear"}
    else:
        calls, given = count_calls(model, trained, inputs, batch, layers)
    calls = trained_by(optimizer, model, calls)
    storage = Storage(dtype, chosen(error_signals))
    storage.check([*trained, *calls])
    sizes = batch, steps, tags, every, step_budget, snapshot_every, segment_bytes
    plan = _Plan(model, names_of_trained(optimizer, model), calls, *sizes, storage)
    plan.given, plan.examples = given, examples
    if optimizer is not None:
        plan.states = bytes_of_states(optimizer, plan.step_bytes, steps, state_share)
    plan.uncalled = [la.name for la in trained_by(optimizer, model, trained) if la not in calls]
    place, free = _free_space(path)
    return Estimate(
        batch,
        steps,
        plan.layers(),
        plan.parts(),
        SETS * (segment_bytes + plan.step_bytes),
        (*plan.remarks(sampled=inputs is not None), *_refused(model, layers)),
        place,
        free,
    )


# How many patterns --------------------------------------------------------------------------------


def _trained_layers(model: nn.Module, chosen: NamePatterns) -> dict[Layer, nn.Module]:
    """The recordable layers that were chosen and of which anything is trained."""
    found, others = find_layers(model), possible_names(model)
    names = chosen_names((la.name for la in found), chosen, "layers", others, none=True)
    return {
        layer: module
        for layer, module in found.items()
        if layer.name in names and any(p.requires_grad for p in module.parameters(recurse=False))
    }


def _refused(model: nn.Module, layers: NamePatterns) -> Iterator[str]:
    try:
        refuse_opaque(model, layers)
    except DualFormError as refusal:
        yield f"cannot be recorded so: {refusal}"


# How many bytes -----------------------------------------------------------------------------------


class _Plan:
    """The arithmetic: what each part of the format takes for this model and this many steps."""

    def __init__(
        self,
        model: nn.Module,
        moving: set[str],
        calls: Mapping[Layer, Calls],
        batch: int,
        steps: int,
        tags: int,
        every: int,
        step_budget: int,
        snapshot_every: int,
        segment_bytes: int,
        storage: Storage,
    ) -> None:
        self.storage = storage
        self.calls, self.batch, self.steps, self.tags = calls, batch, steps, tags
        self.every, self.recorded = every, math.ceil(steps / every)
        self.budget, self.snapshot_every = step_budget, snapshot_every
        self.parameters = dict(model.named_parameters())
        self.buffers = dict(model.named_buffers())
        self.uncalled: list[str] = []
        self.given: set[Layer] = set()
        self.examples: int | None = None
        self.states = 0
        self.moving = _moving_buffers(model)
        used = {name for layer in calls for name in layer.parameters}
        alone = {
            name
            for layer in calls
            if not storage.keeps_error_signals(layer)
            for name in layer.parameters
        }
        trained = {name: p for name, p in self.parameters.items() if name in moving}
        self.unresolved = {name: p for name, p in trained.items() if name not in used}
        self.alone = {name: p for name, p in trained.items() if name in alone}
        self.resolved = {name: p for name, p in trained.items() if name in used - alone}
        events = _size(self.moving.values()) + self._gradients_kept() // steps
        patterns = sum(  # while they are collected: as wide as in training
            sum(map(math.prod, shapes))
            * storage.bytes_in_buffers(layer, self.parameters[layer.weight].dtype)
            for layer, shapes in calls.items()
        )
        self.step_bytes = patterns + events
        average = patterns * self.recorded // steps + events
        self.segments = math.ceil(steps / _steps_per(segment_bytes, average))
        self.segment_bytes = segment_bytes
        if self._summed():  # they are committed every so many steps, too
            self.segments += (steps - 1) // snapshot_every

    def layers(self) -> tuple[LayerEstimate, ...]:
        return tuple(
            LayerEstimate(
                layer.name,
                layer.in_features,
                layer.out_features,
                rows := sum(map(math.prod, shapes)),
                rows * self.recorded,
                sum(self._bytes_per_pattern(layer)),
                self._bytes_of_keys(layer, rows),
                rows * self.recorded * self._bytes_per_pattern(layer)[1],
            )
            for layer, shapes in self.calls.items()
        )

    def _bytes_of_keys(self, layer: Layer, rows: int) -> int:
        """Where keys may recur: those that differ, and a reference per pattern."""
        size, patterns = self._bytes_per_pattern(layer)[0], rows * self.recorded
        if layer not in self.given:
            return size * patterns
        differ = patterns
        if self.examples is not None:
            differ = min(patterns, math.ceil(self.examples * rows / self.batch))
        return size * differ + REFERENCE_BYTES * patterns

    def _bytes_per_pattern(self, layer: Layer) -> tuple[int, int]:
        """Of a key and of an error signal, which may come with a scale."""
        trained = self.parameters[layer.weight].dtype
        return self.storage.bytes_per_pattern(layer, trained)

    def parts(self) -> dict[str, int]:
        return {
            "keys": sum(layer.bytes_of_keys for layer in self.layers()),
            "error signals": sum(layer.bytes_of_error_signals for layer in self.layers()),
            "columns": self._columns(),
            "log": self._log(),
            "step-level parameters": self._gradients_kept() + self._accumulated(),
            "unrecorded steps": self._sums_kept() * self._unrecorded() if self.every > 1 else 0,
            "buffers": self.steps * (_size(self.moving.values()) + 8 * len(self.moving)),
            "optimizer states": self.states,
            "initial state": self._initial(),
            "weight snapshots": self._snapshots() * _pages(_size(self.parameters.values())),
            "fingerprints and headers": self._overhead(),
        }

    def remarks(self, *, sampled: bool) -> Iterator[str]:
        if not sampled and self.calls:
            yield "one pattern per example and layer is assumed; a sample batch (inputs) counts"
        if self.given and self.examples is None:
            yield (
                f"all keys of {', '.join(la.name for la in self.calls if la in self.given)} are "
                "taken to be new; if examples come again, as they are, say how many there are "
                "(examples): they are stored once"
            )
        if self.uncalled:
            yield f"not called for the sample, so without patterns: {', '.join(self.uncalled)}"
        if self.unresolved and self._is_over_budget():
            yield (
                f"the step budget of {decimal(self.budget)} does not hold {self.steps:,} steps of "
                f"{', '.join(self.unresolved)}; beyond it their learned part is kept every "
                f"{self.snapshot_every:,} steps"
            )
        elif self.unresolved:
            yield f"kept step by step, without patterns: {', '.join(self.unresolved)}"
        if self.alone:
            yield f"only their learned part is kept, now and then: {', '.join(self.alone)}"
        if self.every > 1:
            yield (
                f"patterns of {self.recorded:,} of {self.steps:,} steps; what the others write is "
                "one sum per parameter, kept now and then"
            )

    def _columns(self) -> int:
        """Layers whose inputs have the same leading shapes share one table of columns."""
        tables = {tuple(shapes) for shapes in self.calls.values()}
        total = 0
        for shapes in tables:
            positions = any(math.prod(shape) > shape[0] for shape in shapes)
            rows = sum(map(math.prod, shapes)) * self.recorded
            examples = _integer_bytes(self.examples or rows) * self.tags
            own = _integer_bytes(self.steps) + 2  # microbatch and call count to few
            total += rows * (own + examples + positions * _integer_bytes(rows // self.recorded))
        return total

    def _is_over_budget(self) -> bool:
        return self.steps * _size(self.unresolved.values()) > self.budget

    def _gradients_kept(self) -> int:
        return min(self.budget, self.steps * _size(self.unresolved.values()))

    def _accumulated(self) -> int:
        kept = self._sums_kept() * self._sum_bytes(self.alone)
        if not self._is_over_budget():
            return kept + 8 * self.steps * len(self.unresolved)
        return kept + self._sums_kept() * self._sum_bytes(self.unresolved)

    def _sum_bytes(self, parameters: Mapping[str, Tensor]) -> int:
        return sum(8 * p.numel() for p in parameters.values())

    def _unrecorded(self) -> int:
        """Both sums, of the weights and of their momentum."""
        return 2 * self._sum_bytes(self.resolved)

    def _summed(self) -> int:
        """What all sums take."""
        summed = self._sum_bytes(self.alone)
        summed += self._sum_bytes(self.unresolved) if self._is_over_budget() else 0
        return summed + (self._unrecorded() if self.every > 1 else 0)

    def _sums_kept(self) -> int:
        """How often sums are kept: every so many steps, at the end, and always if small."""
        if self._summed() <= self.segment_bytes // 8:
            return self.segments
        return 1 + (self.steps - 1) // self.snapshot_every

    def _log(self) -> int:
        per_parameter = LOG_BYTES + (self.every > 1)
        return self.steps * (per_parameter * len(self.parameters) + 8 * len(HYPERPARAMETERS))

    def _initial(self) -> int:
        projections = sum(8 * (_rows(p) + p.numel() // max(1, _rows(p))) for p in self._all())
        return _pages(_size(self._all()) + projections + _size(self.buffers.values())) + PAGE

    def _snapshots(self) -> int:
        """By what is written, keys that recur included; and one at the end."""
        written = sum(layer.patterns * layer.bytes_per_pattern for layer in self.layers())
        written += self._gradients_kept() + self.steps * _size(self.moving.values())
        every = SNAPSHOT_SHARE * _size(self._all()) * self.segments / max(1, written)
        return 1 + (self.segments - 1) // max(1, math.ceil(every))

    def _overhead(self) -> int:
        """Headers, half a page lost per tensor, fingerprints of W and m, the manifest."""
        header = _pages(200 * (len(self.parameters) * 2 + len(self.calls) * 4 + 20))
        prints = sum(16 * _rows(p) for p in self._all())
        per_segment = header + prints + len(self.calls) * PAGE + 250
        between = prints * (self.steps // FINGERPRINT_EVERY)
        checksums = 12 * (self.recorded * self.step_bytes // CHECKSUM_BLOCK)
        return self.segments * per_segment + between + checksums + 300 * len(self.parameters) + PAGE

    def _all(self) -> list[Tensor]:
        return list(self.parameters.values())


def _moving_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Running statistics: the buffers that training changes at every step."""
    return {
        f"{name}.{key}": buffer
        for name, module in model.named_modules()
        if getattr(module, "track_running_stats", False) and module.training
        for key, buffer in module.named_buffers(recurse=False)
    }


def _steps_per(segment_bytes: int, step_bytes: int) -> int:
    """A segment is committed at the end of the step that fills it."""
    return math.ceil(segment_bytes / step_bytes) if step_bytes else segment_bytes


def _size(tensors: Any) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


def _integer_bytes(largest: int) -> int:
    """What a column of numbers up to this one takes per pattern."""
    return next((size for size in (1, 2, 4) if largest < 1 << (8 * size - 1)), 8)


def _rows(tensor: Tensor) -> int:
    return int(tensor.shape[0]) if tensor.ndim else 1


def _pages(size: int) -> int:
    return size + -size % PAGE


def _free_space(path: str | Path | None) -> tuple[Path | None, int | None]:
    if path is None:
        return None, None
    place = local_path(path)
    there = next(p for p in (place.absolute(), *place.absolute().parents) if p.exists())
    try:
        return place, shutil.disk_usage(there).free
    except OSError as error:
        raise DualFormError(
            f"the free space at {place} cannot be read: {error.strerror}"
        ) from error
