"""In which steps the gradients of layers recorded with keys alone are noted.

Of every other parameter each gradient's projection is in the log. Where keys alone are kept, under
SGD, those of two steps in a row are, once in a while, with a fingerprint before the first and after
the second: what training looks at and what `verify` may ask for is said here, once.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

NOTED_EVERY = 61
"""Once in so many of the steps with patterns, beginning with the first. A prime: a layer that is
used in every k-th step has its turn, too."""


def begins(step: int, every: int) -> bool:
    """Whether a step is the first of two that are noted; `every`: which steps have patterns."""
    return step % (NOTED_EVERY * every) == 0


def are_noted(steps: int, every: int) -> NDArray[np.bool_]:
    """Which of the first steps are."""
    found: NDArray[np.bool_] = np.arange(steps) % (NOTED_EVERY * every) < 2
    return found
