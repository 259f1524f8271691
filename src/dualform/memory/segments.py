"""The committed segments of a memory, read as one long run.

A segment holds whole steps: their patterns, the patterns' columns, the optimizer's log, and the
fingerprints of every parameter after its last step. This file puts the pieces back in a row.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from dualform.errors import MemoryFileError
from dualform.learning_rules import HYPERPARAMETERS, ParameterLog
from dualform.memory.files import SEGMENTS, TensorFile, WrittenFile, written_file


class Segment:
    """One committed segment; its file is opened when it is first asked for something."""

    def __init__(self, directory: Path, entry: dict[str, Any]) -> None:
        self.written: WrittenFile = written_file(entry, directory)
        self.path = directory / SEGMENTS / self.written.file
        self.first_step = int(entry["first_step"])
        self.steps = int(entry["steps"])
        self._file: TensorFile | None = None

    @property
    def end(self) -> int:
        """The number of updates after this segment's last step."""
        return self.first_step + self.steps

    @property
    def file(self) -> TensorFile:
        if self._file is None:
            self._file = TensorFile(self.path, self.written)
        return self._file

    def rows(self, layer: str) -> int:
        return int(self._layer(layer).get("rows", 0))

    def tensor(self, kind: str, layer: str, width: int) -> Tensor:
        """`keys` or `error_signals` of a layer: [rows, width]."""
        tensor = self.file.tensor(f"{kind}/{layer}")
        expected = (self.rows(layer), width)
        if tuple(tensor.shape) != expected:
            raise MemoryFileError(
                f"{self.path}: {kind} of layer {layer!r} have shape {tuple(tensor.shape)}, "
                f"expected {expected}"
            )
        return tensor

    def column(self, layer: str, name: str) -> NDArray[Any] | None:
        """A stored column of a layer's rows; None where this segment has no such column."""
        stored = f"patterns/{self._layer(layer).get('table', 0)}/{name}"
        if stored not in self.file.names:
            return None
        values = self.file.array(stored)
        if values.shape != (self.rows(layer),):
            raise MemoryFileError(
                f"{self.path}: column {name!r} of layer {layer!r} has shape {values.shape}, "
                f"expected ({self.rows(layer)},)"
            )
        return values

    def strings(self, column: str) -> list[str]:
        """The strings a column met first in this segment, in the order of their codes."""
        stored = f"strings/{column}"
        if stored not in self.file.names:
            return []
        try:
            strings = json.loads(self.file.array(stored).tobytes())
        except ValueError as error:
            raise MemoryFileError(f"{self.path}: the strings of {column!r} are damaged") from error
        return [str(s) for s in strings]

    def events(self, kind: str, name: str) -> Iterator[tuple[int, Tensor]]:
        """`gradients` or `buffers` stored step by step: (step, value)."""
        if f"{kind}/{name}/step" not in self.file.names:
            return
        values = self.file.tensor(f"{kind}/{name}/value")
        for step, value in zip(self.file.array(f"{kind}/{name}/step"), values, strict=True):
            yield int(step), value

    def log(self, index: int) -> ParameterLog:
        """The log of the parameter at this place in the manifest's list."""
        file = self.file
        group = file.array("log/group")[:, index]
        settings = file.array("log/hyperparameters")[np.arange(self.steps), np.maximum(group, 0)]
        return ParameterLog(
            applied=file.array("log/applied")[:, index].astype(bool),
            kappa=file.array("log/kappa")[:, index],
            first=file.array("log/first")[:, index],
            fresh=file.array("log/fresh")[:, index].astype(bool),
            **{name: settings[:, i] for i, name in enumerate(HYPERPARAMETERS)},
        )

    def _layer(self, layer: str) -> dict[str, Any]:
        layers = self.file.metadata.get("layers", {})
        entry = layers.get(layer, {}) if isinstance(layers, dict) else {}
        return entry if isinstance(entry, dict) else {}
