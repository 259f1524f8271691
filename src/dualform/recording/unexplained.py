"""What the audit says of a step that it cannot account for, and where its arithmetic ends.

A run in float64 that diverges goes through sizes that are numbers, while their squares are not any
more. The audit is made of squares: beyond 1e154 norms and bounds are infinite, and an infinite
bound would let anything through, a factor κ that is no number included. `verify` has fourth powers,
the variances of second moments: beyond 1e77 those are. So whatever is larger than `LARGEST` is
refused as what it is, divergence, before it is compared. The rest is room for sums over steps, and
for what an update makes of such a gradient.
"""

from __future__ import annotations

from math import inf

import numpy as np
from numpy.typing import NDArray

LARGEST = 1e70
"""No gradient, and no bound of one, may be as large as this."""

NOT_FINITE = "its gradient is not finite (NaN or infinite)"

TOO_LARGE = (
    f"its gradient, or the patterns it is the sum of, are larger than {LARGEST:.0e}: training "
    "diverges, and nothing of this size can be compared. Would a smaller learning rate, or "
    "clipping, keep it from that?"
)

WEIGHTS_NOT_FINITE = (
    "its weights are not finite (NaN or infinite), or the learning rule puts them nowhere finite: "
    "training has diverged, or they were changed outside optimizer.step()"
)

WEIGHTS_TOO_LARGE = (
    "its weights, or what moved them, are so large that their squares are not finite: training has "
    "diverged, and whether they are where the learning rule puts them cannot be told"
)


class Unexplained(Exception):
    """A step that the recorded patterns and the learning rule do not account for."""


class Diverged(Unexplained):
    """A step that nothing can account for: numbers that are none, or too large to be compared."""


def refuse_diverging(
    seen: NDArray[np.float64], expected: NDArray[np.float64], sizes: tuple[float, ...]
) -> None:
    """Raise `Diverged` unless a gradient and what it should be, of these sizes, can be compared."""
    if not all(size < LARGEST for size in sizes):  # NaN is not
        finite = np.isfinite(seen).all() and np.isfinite(expected).all()
        raise Diverged(TOO_LARGE if finite else NOT_FINITE)


def refuse_diverged(off: float, bound: float) -> None:
    """Raise `Diverged` unless it can be told whether weights that far off are within their bound.

    An infinite bound would take anything.
    """
    if not off < inf:
        raise Diverged(WEIGHTS_NOT_FINITE)
    if not bound < inf:
        raise Diverged(WEIGHTS_TOO_LARGE)


def quietly() -> np.errstate:
    """Without numpy's warnings of overflows: what comes of them is looked at, and refused."""
    return np.errstate(over="ignore", invalid="ignore")


@quietly()
def refuse_nowhere(weights: NDArray[np.float64]) -> None:
    """Raise `Diverged` unless W v and its square are finite: all it can be asked by itself."""
    squared = float(weights.dot(weights))
    if not squared < inf:
        refuse_diverged(float(np.abs(weights).max(initial=0.0)), squared)
