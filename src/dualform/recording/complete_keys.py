"""Where keys alone are kept: are they all there are?

The weights are accounted for without patterns there, so nothing else would tell of a use that no
layer's call shows (a weight that is used directly, a module that was compiled). But while training
runs the error signals are at hand. In a layer's first step, and once in a while, its gradient is
compared with its patterns. If there are none the gradient may be that of an earlier step, used
before or not. Then, when it is used the next time, there are other patterns, or it is what it was,
but for a factor.

In such a step, and the one after it, the weights are followed, too: by SGD's rule, these gradients
must lead from the fingerprint before the first of them to the one after the second. Two, so that
what a loop does to its weights between any two updates shows. To look at every gradient would be a
large part of what keys alone cost.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from dualform.memory.noted import begins
from dualform.recording.findings import Findings
from dualform.recording.parameters import Watched, is_reset
from dualform.recording.unexplained import Diverged, Unexplained

SAME = 1e-6
"""Within this part of its size a gradient is a multiple of another."""


class CompleteKeys:
    """Compares gradients with patterns, now and then; `every`: which steps have any."""

    def __init__(self, every: int, findings: Findings) -> None:
        self.clear_at = -1
        """The last step in which there was no gradient at all before its first backward pass."""
        self._every, self._findings = every, findings
        self._suspected: dict[Watched, tuple[int, NDArray[np.float64]]] = {}
        """Parameters whose layers were not called in this step: when they last were, and what the
        gradient was, along the probe."""

    def is_due(self, step: int) -> bool:
        """Whether all gradients of this step are compared."""
        return begins(step, self._every)

    def follows(self, step: int) -> bool:
        """Whether the weights are followed through this step's update."""
        return self.is_due(step) or (step > 0 and self.is_due(step - 1))

    def takes_fingerprint(self, step: int) -> bool:
        """Whether the weights are about to be followed, or were, up to here."""
        return self.is_due(step) or (step > 1 and self.is_due(step - 2))

    def asks(self, step: int) -> bool:
        """Whether any gradient is compared."""
        return self.is_due(step) or (bool(self._suspected) and step % self._every == 0)

    def check(self, watched: Watched, gradient: Tensor, step: int, *, is_first: bool) -> None:
        """A gradient that is about to be used; `is_first`: and never was one before."""
        if step % self._every:
            return
        suspected = self._suspected.pop(watched, None)
        is_due = is_first or self.is_due(step)
        if watched.seen == step:
            if is_due and watched.audit.first == step:  # else it holds what was not looked at
                self._compare(watched, gradient, step)
        elif (is_due or suspected is not None) and not is_reset(gradient):
            watched.audit.look_at(gradient)
            seen, then = suspected or (step, watched.audit.projected)
            is_new = watched.seen == seen and not is_multiple(watched.audit.projected, then)
            if self.clear_at == step or is_new:
                reason = "it has a gradient, and its layer was not called."
                self._findings.incomplete_keys(step, watched, reason)
            elif suspected is None:
                self._suspected[watched] = watched.seen, watched.audit.projected.copy()

    def _compare(self, watched: Watched, gradient: Tensor, step: int) -> None:
        watched.audit.look_at(gradient)
        try:
            watched.audit.explain()
        except Diverged as reason:
            self._findings.unexplained_gradient(step, watched, str(reason))
        except Unexplained as reason:
            self._findings.incomplete_keys(step, watched, str(reason))


def is_multiple(one: NDArray[np.float64], other: NDArray[np.float64]) -> bool:
    """Whether two vectors are one, but for a factor (clipping, say) and rounding."""
    factor = float(one.dot(other)) / max(float(other.dot(other)), 1e-300)
    return float(np.linalg.norm(one - factor * other)) <= SAME * float(np.linalg.norm(one))
