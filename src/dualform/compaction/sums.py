"""What parameters learned from patterns that are going away: their sums, segment after segment.

The learned part after s updates is Σ_t c_{s,t} δ_t ⊗ x_t, and momentum and decay change every c at
every step. Adding all patterns up again for each segment would read the memory over and over. But
(W, m) follow a recursion: from one segment's end to the next they are multiplied by four numbers
and get the sums of the patterns in between (`stretches`). So one pass is enough, with two matrices
in RAM per parameter and layer, all in float64.

Patterns may act in a later segment than their own, where gradients were carried over a commit; what
they will write there is kept until then.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from math import sqrt

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dualform.attention import engine
from dualform.attention.rounding import Stretch, agreeing, stretches
from dualform.attention.view import View
from dualform.memory.copying import SourceMemory
from dualform.memory.layer import LayerMemory
from dualform.memory.segments import Segment

Key = tuple[str, str]
"""A layer and one of its parameters."""


class LearnedSums:
    """The learned parts of some parameters, after one segment at a time."""

    def __init__(self, view: View, memory: SourceMemory, parameters: Iterable[str]) -> None:
        self._memory = memory
        self._parameters = sorted(parameters)
        ends = np.array([segment.end for segment in memory.segments], np.int64)
        self._stretches: dict[str, list[Stretch]] = {
            name: stretches(view.log(name), ends) for name in self._parameters
        }
        self._probes = {name: memory.probe(name).double() for name in self._parameters}
        self._states: dict[Key, Tensor] = {}
        self._pending: dict[tuple[Key, int], Tensor] = {}
        self._done = 0

    def advance(self) -> dict[str, NDArray[np.float64]]:
        """Take in the next segment; how large its patterns were, step by step: [3, S].

        Of their sum along the probe; of its parts, as if of any sign; of the most an entry got.
        """
        index, segment = self._done, self._memory.segments[self._done]
        sizes = {name: _Sizes(segment) for name in self._parameters}
        for name in self._memory.layers:
            if segment.rows(name):
                layer = self._memory.layer_in(segment, name)
                own = [p for p in (layer.weight, layer.bias) if p in self._stretches]
                for parameter in filter(None, own):
                    sizes[parameter].add(layer, parameter, self._probes[parameter])
                    self._read(index, segment, layer, parameter)
        for key in {key for key, _ in self._pending} | self._states.keys():
            self._move_on(key, index)
        self._done += 1
        heights = {name: self._memory.parameters[name].height for name in self._parameters}
        return {name: found.measured(heights[name]) for name, found in sizes.items()}

    def _move_on(self, key: Key, index: int) -> None:
        """(W, m) at the end of a segment: what they were times four numbers, plus what came in."""
        written, state = self._pending.pop((key, index), None), self._states.get(key)
        if state is not None:
            (ww, wm), (mw, mm) = self._stretches[key[1]][index].whole.tolist()
            weight, momentum = state
            state = torch.stack([ww * weight + wm * momentum, mw * weight + mm * momentum])
            written = state if written is None else written.add_(state)
        if written is not None:
            self._states[key] = written

    def _read(self, index: int, segment: Segment, layer: LayerMemory, parameter: str) -> None:
        """Add up a segment's patterns of a layer for every stretch they act in."""
        is_weight = parameter == layer.weight
        key = layer.name, parameter
        for later, stretch in enumerate(self._stretches[parameter][index:], index):
            if stretch.first >= segment.end:
                continue
            factors = _factors(stretch, layer.patterns["step"])
            for state in range(2):
                if factors[:, state].any():
                    rows = np.ascontiguousarray(factors[:, state])
                    parts = engine.learned(
                        layer, rows if is_weight else None, None if is_weight else rows
                    )
                    total = parts[0 if is_weight else 1]
                    assert total is not None
                    if (key, later) not in self._pending:
                        self._pending[key, later] = torch.zeros(2, *total.shape).double()
                    self._pending[key, later][state] += total

    def learned(self, parameter: str) -> Tensor:
        """The learned part of a parameter after the last segment taken in, float64."""
        total = torch.zeros(self._memory.parameters[parameter].shape, dtype=torch.float64)
        for (name, written), state in self._states.items():
            if written == parameter:
                total[self._memory.layer(name).rows_of(parameter)] += state[0]
        return total


class _Sizes:
    """How large the patterns of each step of a segment were: what bounds of rounding grow with."""

    def __init__(self, segment: Segment) -> None:
        self._first = segment.first_step
        self._sums: dict[str, NDArray[np.float64]] = defaultdict(lambda: np.zeros(segment.steps))

    def add(self, layer: LayerMemory, parameter: str, probe: Tensor) -> None:
        """Take in all patterns of a layer that is one segment long."""
        typical = float(probe.norm()) / sqrt(max(1, len(probe)))
        is_weight = parameter == layer.weight
        steps = layer.patterns["step"] - self._first
        for part in engine.scan(layer, keys=is_weight):
            signals = part.error_signals
            keys = part.keys if is_weight else torch.ones(len(signals), 1, dtype=torch.float64)
            if not signals.numel() or not keys.numel():
                continue
            if is_weight and layer.kind == "embedding":  # a one at the token's place
                keys = torch.ones(len(signals), 1, dtype=torch.float64)
            lengths = signals.norm(dim=1) * keys.norm(dim=1) * typical
            for name, numbers in (
                ("patterns", torch.ones_like(lengths)),
                ("gross", lengths),
                ("squares", lengths.square()),
                ("largest", signals.abs().amax(1) * keys.abs().amax(1)),
            ):
                sums = self._sums[name]
                sums += np.bincount(steps[part.rows], numbers.numpy(), len(sums))

    def measured(self, height: int) -> NDArray[np.float64]:
        """[3, S]; `height` is how many entries a projection of the parameter has."""
        more = agreeing(self._sums["patterns"])
        gross = self._sums["gross"] / sqrt(max(height, 1)) * more
        spread = np.sqrt(self._sums["squares"] / max(height, 1))
        return np.stack([gross, spread, self._sums["largest"] * more])


def _factors(stretch: Stretch, steps: NDArray[np.int64]) -> NDArray[np.float64]:
    """How much of each pattern is in W and in m at the stretch's end: [n, 2]."""
    place = steps - stretch.first
    inside = (place >= 0) & (place < len(stretch.steps))
    found: NDArray[np.float64] = np.zeros((len(steps), 2))
    found[inside] = stretch.steps[place[inside]]
    return found
