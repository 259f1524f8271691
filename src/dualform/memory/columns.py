"""What the columns of all layers have in common: the strings behind their codes, and all values.

A layer's `Patterns` asks here, and not the memory: it would hold on to it, as the memory does to
its layers, and neither would be let go before the garbage collector looks for such rings.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dualform.memory.patterns import Patterns
from dualform.memory.segments import Segment


class Columns:
    """The pattern columns of a memory: `kinds` by name, of all `layers`."""

    def __init__(
        self, segments: Sequence[Segment], kinds: Mapping[str, str], layers: Sequence[str]
    ) -> None:
        self._segments, self._kinds, self._layers = segments, kinds, layers
        self._known: dict[str, list[str]] = {}

    def of(self, layer: str, segments: Sequence[Segment] | None = None) -> Patterns:
        """One layer's columns, in all segments or in some."""
        chosen = self._segments if segments is None else segments
        return Patterns(layer, chosen, self._kinds, self.strings, self.values)

    def strings(self, column: str) -> list[str]:
        """The strings of a column, in the order of their codes."""
        if column not in self._known:
            self._known[column] = [s for seg in self._segments for s in seg.strings(column)]
        return self._known[column]

    def values(self, column: str) -> set[Any]:
        """What a column holds in any of the layers."""
        return {v for layer in self._layers for v in self.of(layer).values(column)}
