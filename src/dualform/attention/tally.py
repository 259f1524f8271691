"""One pass over all patterns, collecting what `verify` compares with what training saw.

Training left three traces of itself that patterns and log must explain: a number u·(grad v) for
every step, the fingerprints W v and m v at every commit, and the weights at the end. Here the
patterns are summed into the same quantities in one streamed pass: Σ δ (x·v) along the probe v, put
together step by step (for the first) and from fingerprint to fingerprint (for the second).
"""

from __future__ import annotations

from math import sqrt

import numpy as np
import torch
from torch import Tensor

from dualform.attention import engine
from dualform.attention.rounding import Stretch, stretches
from dualform.attention.view import View
from dualform.learning_rules import ParameterLog
from dualform.memory import LayerMemory


class Tally:
    """The sums of one parameter: per step, and between the stops where it was fingerprinted."""

    def __init__(self, view: View, parameter: str, stops: engine.Rows) -> None:
        memory = view.memory
        self.parameter = parameter
        self.log: ParameterLog = view.log(parameter)
        self.probe = memory.probe(parameter).double()
        self.sketch = memory.sketch(parameter).double()
        self.stops = stops
        self.stretches = stretches(self.log, stops)
        self.slots = _slots(self.stretches, view.at)
        self.projections = np.zeros(view.at)  # Σ (u·δ)(x·v) of each step
        self.gross = np.zeros(view.at)  # Σ ‖δ‖‖x‖|v|: what the rounding of that sum scales with
        self.squares = np.zeros(view.at)  # Σ (‖δ‖‖x‖|v|)²: the same where the parts are of any sign
        self.largest = np.zeros(view.at)  # Σ max|δ| max|x|: the same for single entries
        self.written = torch.zeros(len(stops), 2, len(self.sketch), dtype=torch.float64)

    def add(self, steps: engine.Rows, signals: Tensor, along: Tensor, sizes: Tensor) -> None:
        """Error signals [b, d0], keys along v [b], and the keys' sizes ‖x‖|v| and max|x| [2, b]."""
        count = len(self.projections)
        projected = (signals @ self.sketch) * along
        self.projections += np.bincount(steps, projected.numpy(), count)
        lengths = (signals.norm(dim=1) * sizes[0]).numpy()
        self.gross += np.bincount(steps, lengths, count)
        self.squares += np.bincount(steps, lengths**2, count)
        if signals.shape[1]:
            largest = signals.abs().amax(1) * sizes[1]
            self.largest += np.bincount(steps, largest.numpy(), count)
        moved = signals * along[:, None]
        for stretch, factors in self.slots:
            reached = torch.from_numpy(stretch[steps])
            for state in range(2):
                factor = torch.from_numpy(factors[steps, state])
                if bool((factor != 0).any()):
                    self.written[:, state].index_add_(0, reached, moved * factor[:, None])

    def applied_projections(self) -> engine.Reals:
        """u·(grad v) of every step by the patterns: carried over and scaled as training did."""
        total = np.concatenate([[0.0], np.cumsum(self.projections)])
        steps = np.arange(len(self.projections))
        own = np.where(
            self.log.first == steps, self.projections, total[steps + 1] - total[self.log.first]
        )
        result: engine.Reals = np.where(self.log.applied, self.log.kappa * own, 0.0)
        return result


def tally(
    view: View, stops: engine.Rows, *, rebuild: bool, progress: engine.Progress | None = None
) -> tuple[dict[str, Tally], dict[str, Tensor]]:
    """Every trained parameter's sums; with `rebuild`, every parameter in float64 besides."""
    memory = view.memory
    tallies = {
        name: Tally(view, name, stops)
        for name, known in memory.parameters.items()
        if known.coverage in ("patterns", "steps")
    }
    rebuilt = {name: view.base(name) for name in memory.parameters} if rebuild else {}
    total = sum(memory.layer(name).rows for name in memory.layers)
    done = 0
    for name in memory.layers:
        layer = memory.layer(name)
        steps: engine.Rows = layer.patterns["step"]
        factors = {
            parameter: view.row_coefficients(layer, parameter) if rebuild else None
            for parameter in (layer.weight, layer.bias)
            if parameter is not None
        }
        for part in engine.scan(layer, steps < view.at):
            _add_block(layer, part, steps[part.rows], tallies)
            for parameter, factor in factors.items():
                if factor is not None:
                    values = part.error_signals * torch.from_numpy(factor[part.rows])[:, None]
                    is_weight = parameter == layer.weight
                    written = values.T @ part.keys if is_weight else values.sum(0)
                    rebuilt[parameter] = rebuilt[parameter] + written
            done += len(part.rows)
            if progress is not None:
                progress(done, total)
    for name in tallies:
        if memory.parameters[name].coverage == "steps":
            _add_gradients(view, tallies[name])
    return tallies, rebuilt


def _add_block(
    layer: LayerMemory, part: engine.Scanned, steps: engine.Rows, tallies: dict[str, Tally]
) -> None:
    if layer.weight in tallies:
        sums = tallies[layer.weight]
        typical = float(sums.probe.norm()) / sqrt(max(1, len(sums.probe)))
        sizes = torch.stack([part.keys.norm(dim=1) * typical, part.keys.abs().amax(1)])
        sums.add(steps, part.error_signals, part.keys @ sums.probe, sizes)
    if layer.bias is not None and layer.bias in tallies:
        sums = tallies[layer.bias]
        constant = sums.probe.expand(len(steps))
        sizes = torch.stack([constant.abs(), torch.ones(len(steps), dtype=torch.float64)])
        sums.add(steps, part.error_signals, constant, sizes)


def _add_gradients(view: View, sums: Tally) -> None:
    """A parameter without patterns: every step's gradient counts as one pattern."""
    typical = float(sums.probe.norm()) / sqrt(max(1, len(sums.probe)))
    for step, gradient in view.memory.step_gradients(sums.parameter):
        if step < view.at:
            matrix = gradient.double().reshape(len(sums.sketch), -1)
            projected = (matrix @ sums.probe)[None, :]
            size = float(matrix.norm()) * typical / max(float(projected.norm()), 1e-300)
            largest = float(matrix.abs().max()) / max(float(projected.abs().max()), 1e-300)
            sizes = torch.tensor([[size], [largest]], dtype=torch.float64)
            one = torch.ones(1, dtype=torch.float64)
            sums.add(np.array([step]), projected, one, sizes)


def _slots(found: list[Stretch], steps: int) -> list[tuple[engine.Rows, engine.Reals]]:
    """Which stretch each step's patterns act in, and how: one slot, or several where they overlap.

    They overlap only where gradients were carried over a commit.
    """
    slots: list[tuple[engine.Rows, engine.Reals, engine.Rows]] = []
    for index, stretch in enumerate(found):
        reach = slice(stretch.first, stretch.first + len(stretch.steps))
        free = next((slot for slot in slots if not slot[2][reach].any()), None)
        if free is None:
            free = np.zeros(steps, np.int64), np.zeros((steps, 2)), np.zeros(steps, np.int64)
            slots.append(free)
        free[0][reach], free[1][reach], free[2][reach] = index, stretch.steps, 1
    return [(numbers, factors) for numbers, factors, _ in slots]
