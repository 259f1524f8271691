"""Averages of the weights over training: exponential ones, and plain means (EMA, SWA).

`torch.optim.swa_utils.AveragedModel` keeps such an average beside a model. It is linear in the
weights of the steps, E = Σ_s w_s W_s, and each of those is linear in what patterns wrote; so the
average has a dual form of its own, with the same patterns and other coefficients. All that is
needed are the w_s, and those follow from how the average was kept.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dualform.errors import QueryError


@dataclass(frozen=True)
class Averaging:
    """How an average was kept: `update_parameters` after updates start, start + every, …

    The first call copies the weights; then E ← decay · E + (1 − decay) · W, or, without a decay,
    the mean of all copies so far.
    """

    decay: float | None
    start: int
    every: int

    def last(self, at: int) -> int:
        """After how many updates the average was last kept: its buffers are the model's of then."""
        return at - (at - self.start) % self.every

    def weights(self, at: int) -> NDArray[np.float64]:
        """w_s for the weights after s updates, s = 0 … at: they add up to 1."""
        calls = np.arange(self.start, at + 1, self.every)
        if not len(calls):
            raise QueryError(
                f"averaged(...) begins after {self.start} updates, but this view has seen {at}: "
                "there is nothing to average yet"
            )
        found, count = np.zeros(at + 1), len(calls)
        if self.decay is None:
            found[calls] = 1.0 / count
        else:
            found[calls] = (1.0 - self.decay) * self.decay ** np.arange(count - 1.0, -1.0, -1.0)
            found[calls[0]] = self.decay ** (count - 1.0)
        return found


def averaging(decay: float | None, start: int, every: int) -> Averaging:
    """Refuse what is no average."""
    if decay is not None and not 0.0 <= decay < 1.0:
        raise QueryError(f"averaged(decay={decay!r}): expected a number from 0 up to, not with, 1")
    for name, value, least in (("start", start, 0), ("every", every, 1)):
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise QueryError(
                f"averaged({name}={value!r}): expected a whole number of updates, {least} or more"
            )
    return Averaging(None if decay is None else float(decay), start, every)
