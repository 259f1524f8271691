"""The rules whose contributions are possible: linear in the gradients, given what torch remembers.

Every other deterministic class replays (`replaying.py`) without being known here; what it learned
is rebuilt and verified, but cannot be shared among patterns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from dualform.learning_rules import adadelta, adagrad, adam, nadam, rmsprop, sgd
from dualform.learning_rules.factors import Factors
from dualform.learning_rules.settings import Setting


@dataclass(frozen=True)
class Rule:
    """A rule's name, what torch calls its momentum, and its factors.

    `before` names what `factors` needs as torch remembered it before the step, not after it.
    """

    name: str
    momentum: str | None
    factors: Callable[[Setting, Mapping[str, Any], bool], Factors]
    is_linear: bool = False
    before: tuple[str, ...] = ()


RULES: Mapping[str, Rule] = {
    "torch.optim.sgd.SGD": Rule("SGD", "momentum_buffer", sgd.factors, is_linear=True),
    "torch.optim.adam.Adam": Rule("Adam", "exp_avg", adam.factors),
    "torch.optim.adamw.AdamW": Rule("AdamW", "exp_avg", adam.factors),
    "torch.optim.nadam.NAdam": Rule("NAdam", "exp_avg", nadam.factors),
    "torch.optim.rmsprop.RMSprop": Rule("RMSprop", "momentum_buffer", rmsprop.factors),
    "torch.optim.adagrad.Adagrad": Rule("Adagrad", None, adagrad.factors),
    "torch.optim.adadelta.Adadelta": Rule(
        "Adadelta", None, adadelta.factors, before=("acc_delta",)
    ),
}


def rule_of(path: str) -> Rule | None:
    """Find the rule of a class; None where contributions are not possible."""
    return RULES.get(path)
