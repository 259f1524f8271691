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
from collections.abc import Iterable, Iterator
from math import sqrt

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dualform.attention import engine
from dualform.attention.rounding import Stretch, stretches
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
        self._directions = {
            name: (memory.probe(name).double(), memory.sketch(name).double())
            for name in self._parameters
        }
        self._states: dict[Key, Tensor] = {}
        self._pending: dict[tuple[Key, int], Tensor] = {}
        self._done = 0

    def advance(self) -> dict[str, NDArray[np.float64]]:
        """Take in the next segment; how large its patterns were, step by step: [3, S].

        Of their sum along the probe; of its parts, as if of any sign; of the most an entry got.
        """
        index, segment = self._done, self._memory.segments[self._done]
        sizes = {name: _Sizes(segment) for name in self._parameters}
        for key, layer in self._writers(segment):
            self._read(index, segment, key, layer, sizes[key[1]])
        keys = {key for key, _ in self._pending} | self._states.keys()
        for key in keys:
            (ww, wm), (mw, mm) = self._stretches[key[1]][index].whole.tolist()
            written = self._pending.pop((key, index), None)
            state = self._states.get(key)
            if state is not None:
                weight, momentum = state
                state = torch.stack([ww * weight + wm * momentum, mw * weight + mm * momentum])
                state = state if written is None else state.add_(written)
            else:
                state = written
            if state is not None:
                self._states[key] = state
        self._done += 1
        heights = {name: self._memory.parameters[name].height for name in self._parameters}
        return {name: found.measured(heights[name]) for name, found in sizes.items()}

    def _writers(self, segment: Segment) -> Iterator[tuple[Key, LayerMemory]]:
        for name in self._memory.layers:
            layer = self._memory.layer(name)
            for parameter in (layer.weight, layer.bias):
                if parameter in self._stretches and segment.rows(name):
                    yield (name, parameter), self._memory.layer_in(segment, name)

    def _read(
        self, index: int, segment: Segment, key: Key, layer: LayerMemory, sizes: _Sizes
    ) -> None:
        """Add up a segment's patterns of a layer for every stretch they act in."""
        parameter = key[1]
        is_weight = parameter == layer.weight
        probe, sketch = self._directions[parameter]
        sketch = sketch[layer.rows_of(parameter)]
        steps: NDArray[np.int64] = layer.patterns["step"]
        acting = {
            later: stretch
            for later, stretch in enumerate(self._stretches[parameter])
            if later >= index and stretch.first < segment.end
        }
        for part in engine.scan(layer, keys=is_weight):
            of_step, signals = steps[part.rows], part.error_signals
            keys = part.keys if is_weight else torch.ones(len(signals), 1, dtype=torch.float64)
            sizes.add(of_step, signals, keys, probe, sketch)
            for later, stretch in acting.items():
                factors = _factors(stretch, of_step)
                for state in range(2):
                    if factors[:, state].any():
                        values = signals * torch.from_numpy(factors[:, state])[:, None]
                        total = values.T @ keys if is_weight else values.sum(0)
                        self._add(key, later, state, total)

    def _add(self, key: Key, stretch: int, state: int, total: Tensor) -> None:
        if (key, stretch) not in self._pending:
            self._pending[key, stretch] = torch.zeros(2, *total.shape, dtype=torch.float64)
        self._pending[key, stretch][state] += total

    def learned(self, parameter: str) -> Tensor:
        """The learned part of a parameter after the last segment taken in, float64."""
        total = torch.zeros(self._memory.parameters[parameter].shape, dtype=torch.float64)
        for (name, written), state in self._states.items():
            if written == parameter:
                total[self._memory.layer(name).rows_of(parameter)] += state[0]
        return total

    def learned_by(self, layer: LayerMemory) -> Tensor:
        """What one layer's patterns have written into its weight, float64 [d_out, d_in]."""
        state = self._states.get((layer.name, layer.weight))
        if state is not None:
            return state[0]
        return torch.zeros(layer.out_features, layer.in_features, dtype=torch.float64)


class _Sizes:
    """How large the patterns of each step of a segment were: what bounds of rounding grow with."""

    def __init__(self, segment: Segment) -> None:
        self._first = segment.first_step
        self._sums: dict[str, NDArray[np.float64]] = defaultdict(lambda: np.zeros(segment.steps))

    def add(
        self, steps: NDArray[np.int64], signals: Tensor, keys: Tensor, probe: Tensor, sketch: Tensor
    ) -> None:
        if not signals.numel() or not keys.numel():
            return
        typical = float(probe.norm()) / sqrt(len(probe))
        for name, numbers in (
            ("projection", (signals @ sketch) * (keys @ probe)),
            ("squares", (signals.norm(dim=1) * keys.norm(dim=1) * typical).square()),
            ("largest", signals.abs().amax(1) * keys.abs().amax(1)),
        ):
            sums = self._sums[name]
            sums += np.bincount(steps - self._first, numbers.numpy(), len(sums))

    def measured(self, height: int) -> NDArray[np.float64]:
        """[3, S]; `height` is how many entries a projection of the parameter has."""
        spread = np.sqrt(self._sums["squares"] / max(height, 1))
        return np.stack([spread + np.abs(self._sums["projection"]), spread, self._sums["largest"]])


def _factors(stretch: Stretch, steps: NDArray[np.int64]) -> NDArray[np.float64]:
    """How much of each pattern is in W and in m at the stretch's end: [n, 2]."""
    place = steps - stretch.first
    inside = (place >= 0) & (place < len(stretch.steps))
    found: NDArray[np.float64] = np.zeros((len(steps), 2))
    found[inside] = stretch.steps[place[inside]]
    return found
