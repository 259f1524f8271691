"""How far patterns' shares in a parameter can be told apart, and why no further.

Under SGD a step's patterns enter the weights with one number each; under Adam and its relatives
entry by entry, given what torch remembered. Of rules that are not linear in their gradients, and of
parameters kept as values, only the whole is known: its last kept state, or a replay from there.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from dualform.certificate.replay import Record
from dualform.learning_rules import rule_of

LINEAR, ENTRYWISE = "linear", "entry by entry"


class Reach(NamedTuple):
    """`LINEAR` or `ENTRYWISE`; or nothing, and why."""

    how: str
    why: str = ""

    def __bool__(self) -> bool:
        return bool(self.how)


def reach(record: Record, at: int) -> Reach:
    """Find how the patterns of a parameter can be told apart in its state after `at` updates."""
    memory, known, log = record.memory, record.known, record.log
    kept = {memory.layer(name).keep for name in known.layers}
    if not kept & {"patterns", "examples"}:
        return Reach("", known.why or "no pattern wrote into it")
    path = memory.path_to(known.name, at)
    moved = path[log.moved[path]]
    settings = [memory.settings[place] for place in np.unique(log.setting[moved])]
    rules = [rule_of(setting.path) for setting in settings]
    for setting, rule in zip(settings, rules, strict=True):
        if rule is None:
            unknown = f"{setting.path} is not linear in its gradients, as far as is known"
            return Reach("", known.why or unknown)
    if all(rule is not None and rule.is_linear for rule in rules):
        return Reach(LINEAR)
    if not record.explained[moved].all():
        step = int(moved[~record.explained[moved]][0])
        why = record.cause(step)
        rule = rule_of(memory.settings[log.setting[step]].path)
        name = "its rule" if rule is None else rule.name
        return Reach(
            "",
            f"{name} divides by what it remembers of earlier gradients, and that of step {step} is "
            f"not explained by patterns: {why}. at(step={step}) can be asked",
        )
    return Reach(ENTRYWISE)
