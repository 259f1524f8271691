"""Verification: do patterns, log, kept states and weights agree, and which step is the model's?

`judging.py` says it of each parameter by itself. *weights*: the model's are the last kept ones, or
those of another recorded step, or of none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from math import inf

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

from dualform.certificate.judging import UNKNOWN, Judged, is_same
from dualform.certificate.marks import mark_of
from dualform.certificate.replay import Factors, Record
from dualform.certificate.report import ANOTHER, Check, Verification
from dualform.learning_rules import classes
from dualform.memory import Memory


def verify(
    memory: Memory,
    model: nn.Module | None = None,
    *,
    every_step: bool = False,
    optimizer: type[Optimizer] | Iterable[type[Optimizer]] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Verification:
    """Compare everything a memory holds with everything else it holds, and with the model.

    A model that is the network at another recorded step is no failure, and said to be that; one
    that is of no recorded step lends its architecture alone. `optimizer` hands in classes that are
    not torch's. `progress` is called with (done, total).
    """
    names, known, factors = list(memory.parameters), classes(optimizer), Factors()
    judged = dict[str, Judged]()
    for done, name in enumerate(names, 1):
        judged[name] = Judged(Record(memory, name), known, every_step, factors)
        if progress is not None:
            progress(done, len(names))
    for name in names:
        if judged[name].verdict.why.startswith(UNKNOWN):  # the marks of all others are heard now
            judged[name] = Judged(Record(memory, name), known, every_step, factors)
    checks = [check for found in judged.values() for check in found.checks.values()]
    compared = [] if model is None else [compare(memory, name, model) for name in names]
    place: int | str = ""
    if model is not None and not all(check.passed for check in compared):
        own = (c.passed for c in compared if memory.log(c.parameter).moved.any())
        place = ANOTHER if (at := step_of(memory, model)) is None else at
        if place == memory.steps or (place == ANOTHER and any(own)):
            place = ""  # the last one, edited
    checks += compared if place == "" else []
    verdicts = {name: found.verdict for name, found in judged.items()}
    return Verification(memory.steps, verdicts, tuple(checks), memory.hashes, memory.remarks, place)


def step_of(memory: Memory, model: nn.Module) -> int | None:
    """The last recorded step whose weights a model has, by their marks; None if there is none."""
    named, kept = dict(model.named_parameters()), memory.kept
    if named.keys() != memory.parameters.keys():
        return None
    now = {name: named[name].detach().cpu() for name in memory.parameters}
    marks = np.array([mark_of([tensor]) for tensor in now.values()], np.uint32)
    found = np.flatnonzero((memory.marks[:, 0] == marks).all(axis=1))
    if len(found):
        return int(found[-1]) + 1
    return 0 if all(kept.is_kept_as(name, 0, tensor) for name, tensor in now.items()) else None


def compare(memory: Memory, name: str, model: nn.Module) -> Check:
    """Compare the model's weights with the last kept ones, or (of a run that died) with the mark of
    the last update: equal to the bit, or not."""
    kept, last = memory.kept, memory.kept.steps(name)[-1]
    own, off = dict(model.named_parameters()).get(name), inf
    now = torch.empty(0) if own is None else own.detach().cpu()
    if kept.digest(name):
        off = float(not kept.is_kept_as(name, 0, now))
    elif last < memory.steps:
        last, marked = memory.steps, int(memory.marks[-1, 0, memory.parameters[name].index])
        off = float(mark_of([now]) != marked)
    elif is_same(now, end := kept.weights(name, last)):
        off = 0.0
    elif now.shape == end.shape:
        off = float((now.double() - end).abs().max()) / float(end.abs().max() or 1) or 1.0
    return Check(name, "weights", off, 0.0, last)
