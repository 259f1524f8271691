"""The committed segments of a memory, read as one long run.

A segment holds whole steps: their patterns, the patterns' columns, the optimizer's log, and the
fingerprints of every parameter after its last step. (A segment of no steps adds sums to the one
before.) Everything read here is compared with what the manifest says of it: a segment in another's
place, a column too short, a step that lies elsewhere is an error that names the file, never a wrong
number.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dualform.errors import MemoryFileError
from dualform.memory.files import SEGMENTS, WRONG, TensorFile, count, numbered_file, text

LOG_TYPES = {
    "applied": torch.uint8,
    "kappa": torch.float64,
    "first": torch.int64,
    "fresh": torch.uint8,
    "group": torch.int32,
    "projection": torch.float64,
    "unrecorded": torch.uint8,
}
"""What the log keeps of every step and parameter, [S, P]."""

OPTIONAL = {"unrecorded"}
"""Missing where it would be all zeros."""


INTEGERS = (torch.int8, torch.int16, torch.int32)
"""What int64 columns may be stored in."""

REFERENCES = "key_references"
"""What says, pattern by pattern, which of a layer's different keys it has."""


def scales_of(kind: str) -> str:
    """What the scales of narrow rows are called: `error_signal_scales`."""
    return f"{kind.removesuffix('s')}_scales"


class Segment:
    """One committed segment; its file is opened when it is first asked for something."""

    def __init__(self, directory: Path, entry: dict[str, Any]) -> None:
        self.written = numbered_file(entry)
        self.path = directory / SEGMENTS / self.written.file
        self.first_step = count(entry["first_step"])
        self.steps = count(entry["steps"])
        self._rows = {text(name): count(rows) for name, rows in entry["rows"].items()}
        self._file: TensorFile | None = None
        self._tables: dict[str, int] = {}

    @property
    def is_consistent(self) -> bool:
        """Whether its numbers of steps and patterns go together."""
        return self.steps > 0 or not self._rows

    @property
    def end(self) -> int:
        """The number of updates after this segment's last step."""
        return self.first_step + self.steps

    @property
    def file(self) -> TensorFile:
        if self._file is None:
            file = TensorFile(self.path, self.written)
            self._read_metadata(file.metadata)
            self._file = file
        return self._file

    def _read_metadata(self, metadata: dict[str, Any]) -> None:
        try:
            seen = (count(metadata["first_step"]), count(metadata["steps"]))
            layers = metadata["layers"]
            rows = {text(name): count(layer["rows"]) for name, layer in layers.items()}
            self._tables = {name: count(layer["table"]) for name, layer in layers.items()}
        except WRONG as error:
            raise self._wrong(f"it does not say what it holds ({error!r})") from error
        if seen != (self.first_step, self.steps) or rows != self._rows:
            raise self._wrong(
                f"it holds {seen[1]} steps from step {seen[0]} on with {sum(rows.values())} "
                f"patterns, the manifest says {self.steps} from step {self.first_step} on with "
                f"{sum(self._rows.values())}"
            )

    def _wrong(self, why: str) -> MemoryFileError:
        return MemoryFileError(f"{self.path} is damaged or belongs to another memory: {why}")

    def fingerprint_steps(self) -> list[int]:
        """The numbers of updates after which parameters were fingerprinted; the last is `end`."""
        steps = [int(s) for s in self.file.array("fingerprint_steps")]
        if not self.steps and not steps:
            return []
        rising = all(a < b for a, b in itertools.pairwise([self.first_step, *steps]))
        if not steps or not rising or steps[-1] != self.end:
            raise MemoryFileError(
                f"{self.path}: fingerprints of steps {steps} are not this segment's"
            )
        return steps

    def rows(self, layer: str) -> int:
        """How many patterns of a layer are in this segment."""
        return self._rows.get(layer, 0)

    def tensor(self, kind: str, layer: str, width: int, dtypes: Sequence[torch.dtype]) -> Tensor:
        """`keys` or `error_signals` of a layer as stored, in one of some dtypes: [rows, width].

        Of keys that are referred to, only those that no earlier segment had.
        """
        name, rows = f"{kind}/{layer}", self.rows(layer)
        if kind == "keys" and self._refers(layer):
            stored = self.file.tensor(name)
            rows = min(rows, stored.shape[0] if stored.dim() else 0)
        tensor = self.file.tensor(name, (rows, width))
        if tensor.dtype not in dtypes:
            raise self._wrong(
                f"{kind}/{layer} has type {tensor.dtype}, expected {' or '.join(map(str, dtypes))}"
            )
        return tensor

    def _refers(self, layer: str) -> bool:
        return f"{REFERENCES}/{layer}" in self.file.names

    def references(self, layer: str) -> NDArray[np.int32] | None:
        """Which of the layer's different keys each pattern has; None if keys are stored each."""
        if not self._refers(layer):
            return None
        return self.file.array(f"{REFERENCES}/{layer}", (self.rows(layer),), torch.int32)

    def tokens(self, layer: str, known: int) -> Tensor:
        """The keys of an embedding of so many tokens: int64, [rows, 1]."""
        tokens = self.file.tensor(f"keys/{layer}", (self.rows(layer), 1), torch.int64)
        if len(tokens) and (int(tokens.min()) < 0 or int(tokens.max()) >= known):
            raise self._wrong(f"keys/{layer} holds tokens outside of 0 to {known - 1}")
        return tokens

    def scales(self, kind: str, layer: str) -> Tensor:
        """What each row of a layer's narrow `kind` is to be multiplied by: float32, [rows]."""
        name = f"{scales_of(kind)}/{layer}"
        scales = self.file.tensor(name, (self.rows(layer),), torch.float32)
        if not bool((scales.isfinite() & (scales >= 0)).all()):
            raise self._wrong(f"{name} holds numbers that are no sizes: negative or not finite")
        return scales

    def column(self, layer: str, name: str, dtype: torch.dtype) -> NDArray[Any] | None:
        """A stored column of a layer's rows; None where this segment has no such column.

        `dtype` is int64 or float64; integers may be stored in fewer bits.
        """
        file = self.file
        stored = f"patterns/{self._tables.get(layer, 0)}/{name}"
        if stored not in file.names:
            if name == "step":
                raise self._wrong(f"the patterns of layer {layer!r} have no steps")
            return None
        column = file.tensor(stored, (self.rows(layer),))
        if column.dtype != dtype and not (dtype == torch.int64 and column.dtype in INTEGERS):
            raise self._wrong(f"the column {name!r} has type {column.dtype}, expected {dtype}")
        values: NDArray[Any] = column.to(dtype).numpy()
        if name == "step":
            self._compare_steps(values, f"patterns of layer {layer!r}")
        return values

    def strings(self, column: str) -> list[str]:
        """The strings a column met first in this segment, in the order of their codes."""
        stored = f"strings/{column}"
        if stored not in self.file.names:
            return []
        try:
            strings = json.loads(self.file.array(stored, dtype=torch.uint8).tobytes())
            return [text(s) for s in strings]
        except WRONG as error:
            raise self._wrong(f"the strings of column {column!r} cannot be read") from error

    def events(
        self, kind: str, name: str, shape: Sequence[int], dtype: torch.dtype | None = None
    ) -> Iterator[tuple[int, Tensor]]:
        """`gradients` or `buffers` stored step by step: (step, value)."""
        if f"{kind}/{name}/step" not in self.file.names:
            return
        steps = self.file.array(f"{kind}/{name}/step", dtype=torch.int64)
        if steps.ndim != 1 or (np.diff(steps) <= 0).any():
            raise self._wrong(f"the {kind} of {name!r} are not in the order of their steps")
        self._compare_steps(steps, f"{kind} of {name!r}")
        values = self.file.tensor(f"{kind}/{name}/value", (len(steps), *shape), dtype)
        yield from zip(steps.tolist(), values, strict=True)

    def _compare_steps(self, steps: NDArray[Any], what: str) -> None:
        if len(steps) and not (self.first_step <= steps.min() and steps.max() < self.end):
            raise self._wrong(
                f"{what} belong to steps {steps.min()} to {steps.max()}, outside of its own "
                f"{self.first_step} to {self.end - 1}"
            )

    def log_array(self, name: str, parameters: int) -> NDArray[Any]:
        """One of `LOG_TYPES`, [S, P]."""
        if not self.steps:
            return np.zeros((0, parameters))
        if name in OPTIONAL and f"log/{name}" not in self.file.names:
            return np.zeros((self.steps, parameters), np.uint8)
        return self.file.array(f"log/{name}", (self.steps, parameters), LOG_TYPES[name])

    def log(self, index: int, parameters: int, settings: int) -> dict[str, NDArray[Any]]:
        """The log of the parameter at this place in the manifest's list of them, array by array.

        `settings` is how many its learning rule has: [S, settings], under that name.
        """
        columns = {name: self.log_array(name, parameters)[:, index] for name in LOG_TYPES}
        if not self.steps:
            return columns | {"settings": np.zeros((0, settings))}
        known = self.file.array("log/hyperparameters", dtype=torch.float64)
        applied = columns["applied"].astype(bool)
        group = np.where(applied, columns["group"], 0)
        first = np.where(applied, columns["first"], 0)
        if known.ndim != 3 or len(known) != self.steps:
            raise self._wrong(f"its log of hyper-parameters has shape {known.shape}")
        if known.shape[2] < settings and applied.any():
            raise self._wrong(f"its log of hyper-parameters has shape {known.shape}")
        if ((group < 0) | (group >= known.shape[1])).any():
            raise self._wrong("its log names a parameter group that is not there")
        if (applied & (columns["unrecorded"] != 0) & (columns["kappa"] != 0)).any():
            raise self._wrong("its log gives patterns a part in a step that was not recorded")
        if ((first < 0) | (first > np.arange(self.first_step, self.end))).any():
            raise self._wrong("its log takes patterns from steps that were still to come")
        of_step = np.full((self.steps, settings), np.nan)
        width = min(settings, known.shape[2])  # its rule may have more, where it sat all steps out
        of_step[:, :width] = known[np.arange(self.steps), group, :width]
        return columns | {"settings": of_step}
