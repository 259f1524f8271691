"""Leaving out, or keeping only, what some patterns wrote: row weights in front of every value.

A mask multiplies each pattern's value by a number: `without(A)` by 1 − strength on A, `only(A)` by
1 on A and 0 elsewhere. Several masks multiply. It is not retraining and not unlearning: the
patterns that stay keep the values they wrote while the others were there, and contributions are
large and cancel, so dropping one side of a cancellation can wreck a network that retraining would
keep.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dualform.errors import QueryError
from dualform.memory import LayerMemory, Memory

FINER = ("position",)
"""Columns that tell apart what one row of an example holds together."""


@dataclass(frozen=True)
class Mask:
    """One `without` or `only`: which patterns, and what becomes of the others."""

    only: bool
    rows: NDArray[np.bool_] | None = None
    where: Mapping[str, Any] = field(default_factory=dict)
    strength: float = 1.0
    layers: tuple[str, ...] | None = None
    """The layers it is about; None is all of them."""

    def concerns(self, layer: str) -> bool:
        """Whether the layer's patterns are masked at all."""
        return self.layers is None or layer in self.layers

    def is_finer(self, layer: LayerMemory) -> bool:
        """Whether it asks about parts of examples, of which the layer keeps sums alone."""
        if layer.keep != "examples":
            return False
        return any(name in FINER or not layer.patterns.values(name) for name in self.where)

    def weights(self, layer: LayerMemory) -> NDArray[np.float64]:
        """The number each of the layer's patterns is multiplied by: [T]."""
        if not self.concerns(layer.name) or self.is_finer(layer):
            return np.ones(layer.rows)
        chosen = self._select(layer)
        return np.where(chosen, 1.0, 0.0) if self.only else np.where(chosen, 1 - self.strength, 1.0)

    def check(self, memory: Memory) -> None:
        """Refuse at once what could only fail later, layer by layer."""
        if not np.isfinite(self.strength):
            raise QueryError(
                f"strength={self.strength!r}: expected a finite number, 1 takes all of it away"
            )
        if self.layers is not None and not self.layers:
            raise QueryError(f"layers=[] names no layer; recorded are: {', '.join(memory.layers)}")
        concerned = [memory.layer(name) for name in self.layers or memory.layers]
        if concerned and all(layer.keep == "keys" for layer in concerned):
            concerned[0].need_error_signals(f"{self}")
        for layer in concerned:
            if not self.is_finer(layer):
                self._select(layer)

    def _select(self, layer: LayerMemory) -> NDArray[np.bool_]:
        if self.rows is not None and len(self.rows) != layer.rows:
            raise QueryError(
                f"a mask by boolean array has {len(self.rows)} entries, but layer {layer.name!r} "
                f"has {layer.rows} patterns; every layer needs one entry per pattern. "
                "Use conditions on columns instead, such as label=7 or step=slice(0, 100)."
            )
        return layer.patterns.select(self.rows, **self.where)

    def __str__(self) -> str:
        conditions = [f"{name}={_short(value)}" for name, value in self.where.items()]
        if self.rows is not None:
            conditions.insert(0, f"<{int(np.sum(self.rows))} of {len(self.rows)} patterns>")
        if not self.only and self.strength != 1:
            conditions.append(f"strength={self.strength:g}")
        if self.layers is not None:
            conditions.append(f"layers={_short(list(self.layers))}")
        return f"{'only' if self.only else 'without'}({', '.join(conditions) or 'everything'})"


def columns_of(masks: tuple[Mask, ...], layer: LayerMemory) -> tuple[str, ...] | None:
    """The columns that decide what masks do to a layer's patterns; None if it is not columns."""
    concerned = [mask for mask in masks if mask.concerns(layer.name) and not mask.is_finer(layer)]
    if any(mask.rows is not None for mask in concerned):
        return None
    return tuple(sorted({column for mask in concerned for column in mask.where}))


def row_weights(masks: tuple[Mask, ...], layer: LayerMemory) -> NDArray[np.float64]:
    """All masks together: the factor of each of the layer's patterns, [T]."""
    product = np.ones(layer.rows)
    for mask in masks:
        product *= mask.weights(layer)
    return product


def as_rows(rows: Any) -> NDArray[np.bool_] | None:
    """A mask's boolean array, checked."""
    if rows is None:
        return None
    array = np.asarray(rows)
    if array.dtype != bool or array.ndim != 1:
        raise QueryError(
            f"a mask's rows must be a one-dimensional boolean array, got {array.dtype} of shape "
            f"{array.shape}; for pattern columns write conditions, such as label=7"
        )
    return array


def as_strength(strength: Any) -> float:
    """A mask's strength as a number."""
    with suppress(TypeError, ValueError):
        if 0.0 <= float(strength) <= 1.0:
            return float(strength)
    raise QueryError(f"strength={strength!r}: expected a number from 0 to 1, which takes all away")


def _short(value: Any) -> str:
    if isinstance(value, slice):
        bounds = (value.start, value.stop) + (() if value.step is None else (value.step,))
        return f"slice({', '.join(map(str, bounds))})"
    text = repr(value.tolist() if isinstance(value, np.ndarray) else value)
    return text if len(text) <= 40 else f"{text[:37]}..."
