"""What every parameter looks like along its probe, written down every so many steps.

Fingerprints are how a memory verifies against itself: between two of them, patterns and log must
carry W v and m v from the one to the other. The closer they are, the smaller an error is found.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from torch.optim import Optimizer

from dualform.learning_rules import momentum_buffer
from dualform.recording.parameters import Parameters, Watched

FINGERPRINT_EVERY = 48
"""Most steps between one fingerprint and the next."""

Array = np.ndarray[Any, Any]


class Fingerprints:
    """The fingerprints taken since the last commit."""

    def __init__(self, parameters: Parameters, optimizers: Sequence[Optimizer]) -> None:
        self._parameters = parameters
        self._optimizers = optimizers
        self._taken: list[tuple[int, dict[str, Array], dict[str, Array]]] = []
        self.last = 0
        """The number of updates when the last one was taken."""

    def take(self, step: int, compare: Callable[[Watched, Array], None]) -> None:
        """Project every parameter and its momentum buffer (NaN where there is none).

        `compare` is given each parameter's fingerprint to compare it with what was predicted.
        """
        weights, momenta = {}, {}
        for watched in self._parameters:
            weights[watched.name] = projected = watched.audit.project(watched.parameter)
            compare(watched, projected)
            buffers = (momentum_buffer(o, watched.parameter) for o in self._optimizers)
            buffer = next((b for b in buffers if b is not None), None)
            momenta[watched.name] = (
                np.full_like(projected, np.nan) if buffer is None else watched.audit.project(buffer)
            )
        self._taken.append((step, weights, momenta))
        self.last = step

    def collect(self) -> tuple[Array, dict[str, Array], dict[str, Array]]:
        """Steps [k], and per parameter W v and m v [k, d0]; begins anew."""
        taken, self._taken = self._taken, []
        names = self._parameters.by_name if taken else ()
        return (
            np.array([step for step, _, _ in taken], np.int64),
            {name: np.stack([weights[name] for _, weights, _ in taken]) for name in names},
            {name: np.stack([momenta[name] for _, _, momenta in taken]) for name in names},
        )
