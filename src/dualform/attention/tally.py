"""One pass over all patterns, collecting what `verify` compares with what training saw.

Training left three traces of itself that patterns and log must explain: a number u·(grad v) for
every step, the fingerprints W v and m v every so many steps, and the weights at the end. Here the
patterns are summed into the same quantities in one streamed pass: Σ δ (x·v) along the probe v, put
together step by step (for the first) and from fingerprint to fingerprint (for the second).

A long run has thousands of fingerprints, each as high as its parameter. So parameters are handed
over one by one, as soon as the pass has met all their patterns, and nothing is held longer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice, takewhile
from math import sqrt

import numpy as np
import torch
from torch import Tensor

from dualform.attention import engine
from dualform.attention.rounding import Stretch, carried, stretches
from dualform.attention.view import View
from dualform.layers.kinds import write
from dualform.learning_rules import ParameterLog
from dualform.memory import Fingerprint, LayerMemory
from dualform.memory.following import rms


class Tally:
    """The sums of one parameter: per step, and between the stops where it was fingerprinted."""

    def __init__(self, view: View, parameter: str) -> None:
        memory = view.memory
        self.parameter = parameter
        self.log: ParameterLog = view.log(parameter)
        self.probe = memory.probe(parameter).double()
        self.sketch = memory.sketch(parameter).double()
        self.seen = memory.audit_projections(parameter)[: view.at]  # u·(grad v), by training
        self.unrecorded = memory.is_unrecorded(parameter)[: view.at]
        known = [f for f in memory.fingerprints if f.step <= view.at and parameter in f.values]
        self.largest_print = max((rms(f.values[parameter]) for f in known), default=0.0)
        if self.unrecorded.any():
            known = _without_unrecorded(view, parameter, known)
        self.fingerprints = known
        """As far as patterns account for them, where that is known."""
        self.stops = np.array([f.step for f in known], dtype=np.int64)
        self.stretches = stretches(self.log, self.stops)
        self.slots = _slots(self.stretches, view.at)
        self.patterns = np.zeros(view.at)  # how many there are in each step
        self.projections = np.zeros(view.at)  # Σ (u·δ)(x·v) of each step
        self.gross = np.zeros(view.at)  # Σ ‖δ‖‖x‖|v|: what the rounding of that sum scales with
        self.squares = np.zeros(view.at)  # Σ (‖δ‖‖x‖|v|)²: the same where the parts are of any sign
        self.largest = np.zeros(view.at)  # Σ max|δ| max|x|: the same for single entries
        # What the patterns wrote into W v and m v on the way to each stop.
        self.written = torch.zeros(2, len(known), len(self.sketch), dtype=torch.float64)

    def add(
        self,
        steps: engine.Rows,
        signals: Tensor,
        along: Tensor,
        sizes: Tensor,
        rows: slice = slice(None),
    ) -> None:
        """Error signals [b, d0], keys along v [b], and the keys' sizes ‖x‖|v| and max|x| [2, b].

        `rows` are those of the parameter that the error signals are for. Where the key is on the
        side of the rows (x δᵀ), the two change places.
        """
        lengths = (signals.norm(dim=1) * sizes[0]).numpy()
        largest = (signals.abs().amax(1) * sizes[1]).numpy() if signals.shape[1] else lengths * 0
        self._count(steps, (signals @ self.sketch[rows]) * along, lengths, largest)
        moved = signals * along[:, None]
        for state, reached, factor in self._acting(steps):
            self.written[state][:, rows].index_add_(0, reached, moved * factor[:, None])

    def add_tokens(
        self, steps: engine.Rows, tokens: Tensor, along: Tensor, sizes: Tensor, rows: slice
    ) -> None:
        """The same where each pattern writes into one row, its token's: [b]."""
        lengths, largest = sizes[0].numpy(), sizes[1].numpy()
        self._count(steps, self.sketch[rows][tokens] * along, lengths, largest)
        for state, reached, factor in self._acting(steps):
            written = self.written[state][:, rows]
            written.index_put_((reached, tokens), along * factor, accumulate=True)

    def _count(
        self, steps: engine.Rows, projected: Tensor, lengths: engine.Reals, largest: engine.Reals
    ) -> None:
        low, high = int(steps.min()), int(steps.max()) + 1  # a block knows a few steps of many
        for sums, numbers in (
            (self.patterns, None),
            (self.projections, projected.numpy()),
            (self.gross, lengths),
            (self.squares, lengths**2),
            (self.largest, largest),
        ):
            sums[low:high] += np.bincount(steps - low, numbers, high - low)

    def _acting(self, steps: engine.Rows) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Whether W (0) or m (1), the stop that patterns of these steps act on, and how much."""
        for stretch, factors in self.slots:
            reached = torch.from_numpy(stretch[steps])
            for state in range(2):
                factor = torch.from_numpy(factors[steps, state])
                if bool((factor != 0).any()):
                    yield state, reached, factor

    def applied_projections(self) -> engine.Reals:
        """u·(grad v) of every step by the patterns: carried over and scaled as training did."""
        seen = self.log.kappa * carried(self.projections, self.log)
        result: engine.Reals = np.where(self.log.applied, seen, 0.0)
        return result

    def as_rounded(self) -> tuple[ParameterLog, engine.Reals, engine.Reals]:
        """What rounding depends on: a log in which unrecorded gradients act like any other.

        With it u·(grad v) of every step, and about the size of an entry of each unrecorded
        gradient (one projection may miss it: at least their root mean square), 0 elsewhere.
        """
        if not self.unrecorded.any():
            return self.log, self.applied_projections(), np.zeros(len(self.log))
        log = replace(self.log, kappa=np.where(self.unrecorded, 1.0, self.log.kappa))
        applied = np.where(self.unrecorded, self.seen, self.applied_projections())
        typical = rms(torch.from_numpy(self.seen[self.unrecorded]))
        sizes = np.where(self.unrecorded, np.maximum(np.abs(self.seen), typical), 0.0)
        return log, applied, sizes


def tallies(
    view: View, rebuilt: dict[str, Tensor], progress: engine.Progress | None = None
) -> Iterator[Tally]:
    """Every trained parameter's sums, once they are complete; no order is promised.

    What the patterns wrote is added to the tensors of `rebuilt` (float64) on the way; a parameter's
    is complete when its sums are handed over.
    """
    memory = view.memory
    counted = {
        name
        for name, known in memory.parameters.items()
        if known.coverage == "patterns" and not view.is_adaptive(name)
    }
    layers = [memory.layer(name) for name in memory.layers]
    layers = [layer for layer in layers if {layer.weight, layer.bias} & counted]
    last = {p: layer.name for layer in layers for p in (layer.weight, layer.bias) if p in counted}
    opened: dict[str, Tally] = {}
    total, done = sum(layer.rows for layer in layers), 0
    for layer in layers:
        own = [p for p in (layer.weight, layer.bias) if p is not None and p in counted]
        opened |= {p: Tally(view, p) for p in own if p not in opened}
        steps: engine.Rows = layer.patterns["step"]
        factors = {p: view.row_coefficients(layer, p) for p in own if p in rebuilt}
        for part in engine.scan(layer, steps < view.at):
            _add_block(layer, part, steps[part.rows], opened)
            for parameter, factor in factors.items():
                if factor is not None:
                    values = part.error_signals * torch.from_numpy(factor[part.rows])[:, None]
                    place = rebuilt[parameter][layer.rows_of(parameter)]
                    if parameter == layer.weight:
                        write(layer.kind, place, part.keys, values)
                    else:
                        place += values.sum(0)
            done += len(part.rows)
            if progress is not None:
                progress(done, total)
        for parameter in own:
            if last[parameter] == layer.name:
                yield opened.pop(parameter)
    for name, known in memory.parameters.items():
        if name in counted and name not in last:
            yield Tally(view, name)
        elif known.coverage == "steps" and not view.is_adaptive(name):
            sums = Tally(view, name)
            _add_gradients(view, sums)
            yield sums


def _add_block(
    layer: LayerMemory, part: engine.Scanned, steps: engine.Rows, tallies: dict[str, Tally]
) -> None:
    if layer.weight in tallies:
        sums = tallies[layer.weight]
        typical = float(sums.probe.norm()) / sqrt(max(1, len(sums.probe)))
        rows, others = part.error_signals, part.keys
        if layer.kind != "linear":
            rows, others = others, rows
        sizes = torch.stack([others.norm(dim=1) * typical, others.abs().amax(1)])
        along = others @ sums.probe
        place = layer.rows_of(layer.weight)
        if layer.kind == "embedding":
            sums.add_tokens(steps, rows[:, 0].long(), along, sizes, place)
        else:
            sums.add(steps, rows, along, sizes, place)
    if layer.bias is not None and layer.bias in tallies:
        sums = tallies[layer.bias]
        constant = sums.probe.expand(len(steps))
        sizes = torch.stack([constant.abs(), torch.ones(len(steps), dtype=torch.float64)])
        sums.add(steps, part.error_signals, constant, sizes, layer.rows_of(layer.bias))


def _add_gradients(view: View, sums: Tally) -> None:
    """A parameter without patterns: every step's gradient counts as one pattern."""
    typical = float(sums.probe.norm()) / sqrt(max(1, len(sums.probe)))
    at_once = max(1, min(engine.BLOCK, (1 << 22) // max(1, len(sums.sketch))))
    kept = takewhile(lambda event: event[0] < view.at, view.memory.step_gradients(sums.parameter))
    while block := list(islice(kept, at_once)):
        projections, sizes = [], []
        for _, gradient in block:
            matrix = gradient.double().reshape(len(sums.sketch), -1)
            projected = matrix @ sums.probe
            size = float(matrix.norm()) * typical / max(float(projected.norm()), 1e-300)
            largest = float(matrix.abs().max()) / max(float(projected.abs().max()), 1e-300)
            projections.append(projected)
            sizes.append((size, largest))
        steps = np.array([step for step, _ in block], dtype=np.int64)
        ones = torch.ones(len(block), dtype=torch.float64)
        sums.add(steps, torch.stack(projections), ones, torch.tensor(sizes, dtype=torch.float64).T)


def _without_unrecorded(
    view: View, parameter: str, fingerprints: Sequence[Fingerprint]
) -> list[Fingerprint]:
    """The fingerprints where U is known, without its share: what patterns have to lead to."""
    memory, found = view.memory, []
    probe = memory.probe(parameter).double()
    kept, moved = memory.unrecorded_steps(parameter), memory.is_unrecorded(parameter)
    for seen in fingerprints:
        if seen.step in kept or not moved[: seen.step].any():
            parts = memory.unrecorded(parameter, seen.step)
            weights, momentum = (p.reshape(len(seen.values[parameter]), -1) @ probe for p in parts)
            own = {parameter: seen.values[parameter].double() - weights}
            buffer = seen.momentum.get(parameter)
            left = {} if buffer is None else {parameter: buffer.double() - momentum}
            found.append(Fingerprint(seen.step, own, left))
    return found


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
