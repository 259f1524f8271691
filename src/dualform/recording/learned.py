"""What training has added to a parameter, read off its weights: W less what is left of W_0 and m_0.

The initial ones lie in a file, and the difference is taken in float64. Where it is only to be
written, that is the writer's work, and training makes no more than a copy of its weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.optim import Optimizer

from dualform.learning_rules import momentum_buffer
from dualform.memory.files import INITIAL, TensorFile
from dualform.recording.parameters import Watched
from dualform.recording.sums import Accumulated


@dataclass(frozen=True)
class Learned:
    """A parameter or its buffer, and how much of the initial weights and momentum is in it.

    `path` is that of the memory, which holds the initial ones.
    """

    path: Path
    name: str
    tensor: Tensor
    of_weights: float
    of_momentum: float

    def copied(self) -> Learned:
        """The same of a copy, whatever training does next."""
        copy = self.tensor.detach().to("cpu", copy=True)
        return Learned(self.path, self.name, copy, self.of_weights, self.of_momentum)

    def part(self) -> Tensor:
        """What was learned, float64."""
        initial = TensorFile(self.path / INITIAL)
        before = self.of_weights * initial.tensor(f"parameters/{self.name}").double()
        rest = self.tensor.detach().cpu() - before
        if self.of_momentum and f"momentum/{self.name}" in initial.names:
            rest = rest - self.of_momentum * initial.tensor(f"momentum/{self.name}").double()
        return rest


@dataclass(frozen=True)
class ReadingOff:
    """Reads off parameters, and the buffers of these optimizers, what training has added so far.

    The audits must have followed every update.
    """

    path: Path
    optimizers: Sequence[Optimizer]

    def weights(self, watched: Watched) -> Learned:
        """Of a parameter."""
        ww, wm, _, _ = watched.audit.initial_share
        return Learned(self.path, watched.name, watched.parameter, ww, wm)

    def both(self, watched: Watched) -> Accumulated:
        """Of a parameter and its momentum buffer."""
        _, _, mw, mm = watched.audit.initial_share
        momentum = Learned(self.path, watched.name, self.buffer(watched), mw, mm)
        return Accumulated(self.weights(watched).part(), momentum.part())

    def buffer(self, watched: Watched) -> Tensor:
        """Its momentum buffer, zeros if it has none."""
        buffers = (momentum_buffer(o, watched.parameter) for o in self.optimizers)
        found = next((b for b in buffers if b is not None), None)
        return torch.zeros_like(watched.parameter) if found is None else found
