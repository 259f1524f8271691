"""One segment written anew: what goes, what is put into 16 bits, what is carried over as it is.

A segment is a bag of named tensors. Only those that the choices are about are looked into; all
others, and those that a later version of the format may add, are carried over byte by byte.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from dualform.compaction.choices import Choices
from dualform.memory.copying import SourceMemory
from dualform.memory.fingerprint import STATE_FINGERPRINTS
from dualform.memory.narrowing import narrowed
from dualform.memory.segments import Segment, scales_of
from dualform.memory.tensor_files import TensorBytes, paged_bytes, tensor_bytes

NOT_OF_LAYERS = frozenset(
    {"log", "patterns", "strings", "buffers", "states", "fingerprint_steps"}
    | {"gradients", "learned", "sizes", "unrecorded"}
    | {"fingerprints", "momentum_fingerprints", STATE_FINGERPRINTS}
)
"""Kinds of tensors whose second name is not a layer's, though a layer may be called the same."""

Added = Mapping[str, NDArray[Any] | Tensor]
"""Further tensors of a segment, by name."""


class Rewriting:
    """How the segments of a memory are written anew."""

    def __init__(self, memory: SourceMemory, choices: Choices) -> None:
        self._memory, self._choices = memory, choices
        self.columns = frozenset(
            name.split("/", 2)[2]
            for segment in memory.segments
            for name in segment.file.names
            if name.startswith("patterns/") and int(name.split("/")[1]) in self._tables(segment)
        )
        """The columns that still have a value somewhere."""
        self.kept_wide: dict[str, int] = {}
        """How many segments of a layer could not be put into 16 bits."""

    def _kept_rows(self, segment: Segment) -> dict[str, dict[str, Any]]:
        """What the segment says of the layers whose patterns stay."""
        said = segment.file.metadata["layers"]
        return {n: entry for n, entry in said.items() if n in self._choices.layers}

    def _tables(self, segment: Segment) -> list[int]:
        """The tables of columns that are still in use."""
        return sorted({entry["table"] for entry in self._kept_rows(segment).values()})

    def _carried(self, segment: Segment) -> Iterator[tuple[str, str, str]]:
        """(name, kind, the rest of the name) of the tensors that stay in one form or another."""
        layers, rows = segment.file.metadata["layers"], self._kept_rows(segment)
        tables = self._tables(segment)
        for name in sorted(segment.file.names):
            kind, _, rest = name.partition("/")
            if kind == "patterns":
                stays = int(rest.partition("/")[0]) in tables
            elif kind == "strings":
                stays = rest in self.columns
            elif kind == "unrecorded":  # it is in the sum that takes the patterns' place
                stays = rest not in self._choices.summed
            elif kind in NOT_OF_LAYERS or rest not in layers:
                stays = True
            else:
                alone = rest in self._choices.without_error_signals
                stays = rest in rows and not (alone and kind.startswith("error_signal"))
            if stays:
                yield name, kind, rest

    def _narrows(self, kind: str, layer: str, stored: Tensor) -> bool:
        """Whether a layer's tensor is still in the type of training, and is to be in 16 bits."""
        return (
            kind in ("keys", "error_signals")
            and layer in self._choices.narrowed
            and stored.dim() == 2
            and stored.dtype == self._memory.layer(layer).dtype
        )

    def planned_bytes(self, segment: Segment) -> int:
        """About what the segment will take, without what is added to it."""
        total = 0
        for name, kind, rest in self._carried(segment):
            stored = segment.file.tensor(name)
            itemsize = 2 if self._narrows(kind, rest, stored) else stored.element_size()
            total += stored.numel() * itemsize
        return total

    def rewritten(self, segment: Segment, added: Added) -> tuple[list[TensorBytes], dict[str, Any]]:
        """The tensors of the new segment, and what it says of itself."""
        layers, tables = segment.file.metadata["layers"], self._tables(segment)
        tensors: list[TensorBytes] = []
        for name, kind, rest in self._carried(segment):
            stored = segment.file.tensor(name)
            if kind == "patterns":
                index, _, column = rest.partition("/")
                tensors.append(
                    tensor_bytes(f"patterns/{tables.index(int(index))}/{column}", stored)
                )
            elif self._narrows(kind, rest, stored):
                tensors += self._narrowed(kind, rest, stored)
            elif kind not in NOT_OF_LAYERS and rest in layers:
                tensors.append(paged_bytes(name, stored))
            else:
                tensors.append(tensor_bytes(name, stored))
        tensors += [tensor_bytes(name, value) for name, value in added.items()]
        said = {
            name: entry | {"table": tables.index(entry["table"])}
            for name, entry in self._kept_rows(segment).items()
        }
        return tensors, segment.file.metadata | {"layers": said}

    def _narrowed(self, kind: str, layer: str, stored: Tensor) -> list[TensorBytes]:
        dtype = self._choices.narrowed[layer]
        scaled = kind == "error_signals" and dtype == torch.float16
        found = narrowed(stored, dtype, scaled=scaled)
        if found is None:  # 16 bits cannot hold it: this segment keeps it as it is
            self.kept_wide[layer] = self.kept_wide.get(layer, 0) + 1
            return [paged_bytes(f"{kind}/{layer}", stored)]
        rows, scales = found
        written = [paged_bytes(f"{kind}/{layer}", rows)]
        if scales is not None:
            written.append(paged_bytes(f"{scales_of(kind)}/{layer}", scales))
        return written
