"""Which optimizers are known, by which rule, and why others are refused.

The exact class is asked for: a subclass may have changed the update.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from dualform.errors import RecordingError
from dualform.learning_rules.adadelta import Adadelta
from dualform.learning_rules.adagrad import Adagrad
from dualform.learning_rules.adam import Adam
from dualform.learning_rules.adaptive import AdaptiveRule
from dualform.learning_rules.nadam import NAdam
from dualform.learning_rules.rmsprop import RMSprop
from dualform.learning_rules.sgd import HYPERPARAMETERS, hyperparameters

SGD = "sgd"
ADAPTIVE: Mapping[str, AdaptiveRule] = {
    rule.name: rule for rule in (Adam(), NAdam(), RMSprop(), Adagrad(), Adadelta())
}
"""The adaptive rules by the name a memory knows them by."""

RULES: Mapping[type[Optimizer], str] = {
    torch.optim.SGD: SGD,
    torch.optim.Adam: "adam",
    torch.optim.AdamW: "adam",
    torch.optim.NAdam: "nadam",
    torch.optim.RMSprop: "rmsprop",
    torch.optim.Adagrad: "adagrad",
    torch.optim.Adadelta: "adadelta",
}

REFUSED = {
    "Muon": "it turns the whole gradient by a matrix iteration in bfloat16, which is not kept; "
    "there are no coefficients, entry by entry, that would lead to its weights",
}
"""Why some of torch's optimizers cannot be explained pattern by pattern."""

FLAGS = {
    "capturable": "its learning rate and counts live on the device and may change inside a graph "
    "without the recorder seeing it",
    "differentiable": "its update is itself part of an autograd graph",
}
"""Why some options cannot be: what the update did is then not what the settings say."""


def rule_of(optimizer: Optimizer) -> str:
    """The name of the optimizer's learning rule; `RecordingError` says why if it has none here."""
    kind = type(optimizer)
    rule = RULES.get(kind)
    if rule is None:
        why = "its learning rule is not known to dualform, so what it does with a pattern cannot be"
        why += " told"
        if kind.__module__.startswith("torch.optim"):
            why = REFUSED.get(kind.__name__, why)
        raise RecordingError(
            f"the optimizer is a {kind.__module__}.{kind.__qualname__}; {why}. "
            "Known, with all their options: torch.optim.SGD, Adam, AdamW, NAdam, RMSprop, "
            'Adagrad, Adadelta. With audit="warn" keys and error signals are recorded all the '
            "same: enough for the attention of recorded examples, not for rebuilding the network."
        )
    for flag, why in FLAGS.items():
        if any(group.get(flag) for group in optimizer.param_groups):
            raise RecordingError(
                f"the optimizer is a {kind.__qualname__} with {flag}=True: {why}. Use {flag}=False"
            )
    return rule


def adaptive_rule_of(optimizer: Optimizer) -> AdaptiveRule | None:
    """The optimizer's rule if it is an adaptive one; None for SGD, and for what is not known."""
    return ADAPTIVE.get(RULES.get(type(optimizer), ""))


def settings_of(optimizer: Optimizer, group: dict[str, Any]) -> tuple[float, ...]:
    """One parameter group's settings now, in the order of the rule's own names."""
    rule = adaptive_rule_of(optimizer)
    return hyperparameters(group) if rule is None else rule.read(group)


def names_of_settings(rule: str) -> tuple[str, ...]:
    """What a rule's settings are called, in the order they are logged in."""
    return HYPERPARAMETERS if rule == SGD else ADAPTIVE[rule].settings


def momentum_buffer(optimizer: Optimizer, parameter: Tensor) -> Tensor | None:
    """The optimizer's momentum buffer of a parameter, None where it has not made one."""
    state = optimizer.state.get(parameter)
    rule = adaptive_rule_of(optimizer)
    name = "momentum_buffer" if rule is None else rule.momentum
    buffer = None if state is None or name is None else state.get(name)
    return buffer if isinstance(buffer, Tensor) else None


def unknown_rule(optimizers: Iterable[Optimizer]) -> tuple[str, str] | None:
    """The first optimizer whose learning rule is not known: its name, and what to say of it."""
    for optimizer in optimizers:
        try:
            rule_of(optimizer)
        except RecordingError as error:
            return type(optimizer).__name__, str(error)
    return None
