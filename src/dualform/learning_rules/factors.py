"""What one step of a rule does to a parameter and its momentum: six factors.

    W ← ww W + wm m + nw g          m ← mw W + mm m + nm g

Scalars under SGD; under Adam and its relatives tensors, entry by entry, that hold the
*preconditioner*: what the rule made of earlier gradients, taken as it was. Given them, weights are
a sum over patterns: an accounting of the run, no counterfactual.
"""

from __future__ import annotations

from typing import NamedTuple, TypeVar

from torch import Tensor

from dualform.learning_rules.settings import Setting

Number = float | Tensor
T = TypeVar("T")


class Factors(NamedTuple):
    """One step, entry by entry: what W and m before it, and its gradient, are in W and m after."""

    ww: Number = 1.0
    wm: Number = 0.0
    mw: Number = 0.0
    mm: Number = 1.0
    nw: Number = 0.0
    nm: Number = 0.0


UNMOVED = Factors()


def sign(setting: Setting) -> float:
    """Tell how the gradient enters: −1 where the rule maximizes."""
    return -1.0 if setting.group.get("maximize") else 1.0


def decay(setting: Setting) -> tuple[float, float]:
    """Give what decoupled decay multiplies the weights by, and what coupled decay adds of them."""
    rate = setting.number("weight_decay")
    if setting.group.get("decoupled_weight_decay"):
        return float(1 - setting.rate * rate), 0.0
    return 1.0, rate
