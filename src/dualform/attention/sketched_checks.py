"""What can be checked of a parameter of which only the learned part is kept: one number per step.

Training wrote down u·(grad v) of every gradient it used, and W v and m v now and then. By the
learning rule the first must lead from one of the second to the next: u·W v is a number that follows
the same recursion as every entry of W. Nothing of it depends on the learned part that is kept, nor
on the weights that were written down with it, so a learning rate that is not what it was, a step
that is missing or a gradient that is another one shows.

Of layers recorded with keys alone it is noted in some steps only, two in a row, and which those are
is known beforehand (`memory/noted.py`): between their fingerprints this is checked, and nothing is
said of the others. That they are there is checked, too.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from operator import attrgetter

import numpy as np
import torch
from torch import Tensor

from dualform.attention.rounding import (
    DOUBLE,
    buffer_sizes,
    drift,
    entries_size,
    stretches,
    unmoved,
)
from dualform.attention.verification import Check
from dualform.attention.view import View
from dualform.memory.following import rms
from dualform.memory.noted import are_noted

SUM_ROUNDINGS = 16.0
"""How many roundings of float64 the sums that are compared, fingerprints for one, may show."""

DEVIATIONS = 24.0
"""How many standard deviations of accumulated rounding the one number may be off by."""

PRODUCT = 16.0
"""How many roundings of its own size a gradient's projection, a sum in its precision, may show."""


def check_sketched(
    view: View, name: str, rebuilt: Tensor | None, eps: float, smallest: float
) -> list[Check]:
    """u·W v from each fingerprint to the next, by what was noted of the gradients in between.

    Residual: the difference over the root mean square of W v, where it is worst. `rebuilt` are the
    weights in the end, where they are known: how large they are, nothing else.
    """
    memory = view.memory
    noted = memory.audit_projections(name)[: view.at]
    known = [f for f in memory.fingerprints if f.step <= view.at and name in f.values]
    if not known:
        return []
    probe, sketch = memory.probe(name).double(), memory.sketch(name).double()
    start, buffer = memory.initial(name).double(), memory.initial_momentum(name)
    start = start.reshape(-1, len(probe))
    weight, momentum = float(sketch @ (start @ probe)), 0.0
    if buffer is not None:
        momentum = float(sketch @ (buffer.double().reshape(start.shape) @ probe))
    size = max(rms(f.values[name].double()) for f in known)
    size = max(size, entries_size(probe, start, rebuilt))
    summed = SUM_ROUNDINGS * DOUBLE * max(rms(start.abs() @ probe.abs()), size)
    # What was noted of a gradient is all of it: scaled already, with what was carried into it.
    log = replace(view.log(name), kappa=np.ones(view.at), first=np.arange(view.at))
    seen, unknown = np.nan_to_num(noted), np.isnan(noted) & log.applied
    # A remark says so where a gradient was changed by the loop before it could be noted.
    excused = any(f"{name!r}: a gradient was changed in place" in r for r in memory.remarks)
    due = ~np.zeros_like(unknown)
    if memory.parameters[name].is_noted_in_part:
        due = are_noted(view.at, memory.every) & log.applied
    typical = rms(torch.from_numpy(noted[~np.isnan(noted)]))
    stops = np.array([f.step for f in known], dtype=np.int64)
    buffers = buffer_sizes(log, seen, weight, momentum)
    for one, following in pairwise(known if unknown.any() else ()):  # what led there is not known
        if name in one.momentum:
            here = slice(one.step, following.step)
            buffers[here] = np.maximum(buffers[here], rms(one.momentum[name].double()))
    bounds = drift(
        log,
        stops,
        eps=eps,
        gradient_eps=eps,
        size=size,
        gross=PRODUCT * np.maximum(np.abs(seen), typical),
        anchored=True,
        buffers=buffers,
    ).bound(DEVIATIONS)[:, 0]
    worst = Check(name, "fingerprints", 0.0, eps)
    first = 0
    for stretch, at_stop, bound in zip(stretches(log, stops), known, bounds.tolist(), strict=True):
        here = slice(first, at_stop.step)
        added = stretch.steps.T @ seen[here]
        (ww, wm), (mw, mm) = stretch.whole.tolist()
        moved = ww * weight + wm * momentum + float(added[0])
        carried = mw * weight + mm * momentum + float(added[1])
        now = float(sketch @ at_stop.values[name].double())
        is_known = not unknown[here].any()
        is_missing = not is_known and not excused and bool(due[here].any())
        if is_known or is_missing:
            lost = unmoved(torch.tensor(now - weight), size, at_stop.step - first, eps)
            scale = rms(at_stop.values[name].double()) or size or 1.0
            allowed = (bound + 4 * float(lost) + summed + smallest) / scale
            off = float("inf") if is_missing else abs(moved - now) / scale
            check = Check(name, "fingerprints", off, allowed, at_stop.step)
            worst = max([worst, check], key=attrgetter("severity"))
        weight, first = now, at_stop.step
        if name in at_stop.momentum:
            momentum = float(sketch @ at_stop.momentum[name].double())
        else:
            momentum = carried if is_known else 0.0  # there is none
    return [worst]
