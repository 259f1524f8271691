"""What training has added to a parameter, read off its weights: W less what is left of W_0 and m_0.

The initial ones lie in a file, and the difference is taken in float64. Where it is only to be
written, that is the writer's work, and training makes no more than a copy of its weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from dualform.memory.files import INITIAL, TensorFile


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
