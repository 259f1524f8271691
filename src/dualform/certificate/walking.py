"""One parameter on its way along v: its gradients' sums, and W v from fingerprint to fingerprint.

Every step's patterns are compared with what training saw of the gradient; under a rule with scalars
only, (W v, m v) is carried from each fingerprint (or kept state) through the rule to the next.
Beside the rows their signed sum is carried: of it is known what 16 bits lost at every step, so it
is as sharp as if rows were exact. What events on record break is not walked: then the share that
patterns do not explain is what is missing where they alone lead from the start of the run.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from dualform.certificate.bounds import (
    DOUBLE,
    LOST,
    ROUNDING,
    SUM,
    Along,
    Motion,
    Off,
    Reals,
    root_mean_square,
    sum_bound,
    walk,
)
from dualform.certificate.replay import Record
from dualform.certificate.report import Check
from dualform.certificate.sums import Chain, Explained, Sums
from dualform.learning_rules import linear_steps, rule_of
from dualform.memory import Memory

TINY = 1e-300


def worst(checks: Sequence[Check]) -> list[Check]:
    """Keep the worst of some checks of one kind."""
    return [max(checks, key=lambda check: check.severity)] if checks else []


def projected(tensor: Tensor, v: Tensor | None) -> tuple[Reals, Reals]:
    """Look at a tensor along v in float64, row by row; and the size of each row."""
    full = tensor.double()
    if v is None:
        flat = full.reshape(-1).numpy()
        return flat, np.abs(flat)
    rows = full.flatten(1)
    size = torch.linalg.vector_norm(rows, dim=1) / max(1, rows.shape[1]) ** 0.5
    return (rows @ v).numpy(), size.numpy()


class Points:
    """Where a parameter is known along v: its fingerprints, and its kept states."""

    def __init__(self, memory: Memory, record: Record) -> None:
        self._memory, self._record = memory, record
        self.name = record.known.name
        self._v, self.signs = memory.direction(self.name), memory.signs(self.name)
        self._kept = set(memory.kept.steps(self.name))
        steps, values = memory.kept.fingerprints(self.name)
        self._prints = {
            int(s): Along(*values[i].numpy()) for i, s in reversed(list(enumerate(steps)))
        }
        self.disturbed = {e.step for e in record.events if e.what != "unexplained"}
        self.steps = sorted(self._kept | set(self._prints))

    def summed(self, found: Along | None) -> Along | None:
        """Append the rows' signed sum."""
        if found is None:
            return None
        W, m, size, _ = found
        m_size = np.append(np.full_like(m, root_mean_square(m)), np.linalg.norm(m))
        whole = np.append(W, self.signs @ W), np.append(m, self.signs @ m)
        return Along(*whole, np.append(size, np.linalg.norm(size)), m_size)

    def kept(self, step: int) -> Along | None:
        """See a kept state along v."""
        if step not in self._kept:
            return None
        W, size = projected(self._memory.kept.weights(self.name, step), self._v)
        momentum = self._memory.kept.state(self.name, step).get("momentum_buffer")
        m = projected(momentum, self._v)[0] if isinstance(momentum, Tensor) else np.zeros_like(W)
        return Along(W, m, size)

    def ending(self, step: int) -> Along | None:
        """Where an update led to; after something happened there, a kept state does not say."""
        if (found := self._prints.get(step)) is not None:
            return found
        return None if step in self.disturbed else self.kept(step)

    def beginning(self, step: int) -> Along | None:
        """Where the next update starts from."""
        if step in self.disturbed:
            back = self._record.back.get(step)
            return self.kept(step) or (None if back is None else self.ending(back))
        found = self._prints.get(step)
        return self.kept(step) if found is None else found

    def compared(self) -> list[Check]:
        """Compare kept weights with fingerprints of the same moment: sums of equal terms."""
        found = []
        for step in self._kept & set(self._prints) - self.disturbed:
            kept, seen = self.kept(step), self._prints[step]
            assert kept is not None
            off, size = _largest(kept.W - seen.W), _largest(kept.size) + TINY
            found.append(Check(self.name, "fingerprints", off / size, DOUBLE * 64, step))
        return worst(found)


class Walker:
    """Carries one parameter along v through all steps, window by window."""

    def __init__(self, memory: Memory, record: Record) -> None:
        self.record, self.log, self.known = record, record.log, record.known
        self.points = Points(memory, record)
        self._signs, self._u = self.points.signs, ROUNDING[self.known.dtype]
        self._chain = Chain(self.log, self.known.height)
        linear = np.array(
            [(r := rule_of(s.path)) is not None and r.is_linear for s in memory.settings]
        )
        used = self.log.setting[self.log.moved]
        self.is_linear = bool(len(used)) and bool(linear[used].all())
        self._factors = (
            linear_steps(self.log, memory.settings, self.known.dtype) if self.is_linear else []
        )
        self._on_path = set(memory.path_to(self.known.name, memory.steps).tolist())
        self._begin = self._z = self.points.summed(self.points.beginning(0))
        self._since, self._motions, self._is_whole = 0, list[Motion](), self._begin is not None
        self.walked = self.ways = 0
        self.room = 0.0
        """The bounds of all walks together, of the rows' signed sum by row."""
        self._steps: Check | None = None
        self._worst_step = -1.0
        self._prints: Check | None = None

    @property
    def checks(self) -> list[Check]:
        """The worst of each kind."""
        prints = [*([] if self._prints is None else [self._prints]), *self.points.compared()]
        return [*([] if self._steps is None else [self._steps]), *worst(prints)]

    def take(self, sums: Sums) -> None:
        """Go through a window of steps."""
        for step in range(sums.first, sums.first + len(sums.gross)):
            if step in self.points.steps or step in self.points.disturbed:
                self._arrive(step)
            found = self._chain.take(sums, step)
            if self.log.moved[step]:
                self._step(found, step)

    def _step(self, found: Explained, step: int) -> None:
        is_explained = bool(self.record.explained[step])
        seen = float(self.log.seen[step])
        whole = float(self._signs @ found.gv) - float(found.lost[0])
        bound = float(sum_bound(np.asarray(found.gross)))
        if self.known.keep == "examples":  # of them it is not known what 16 bits lost
            bound += LOST * abs(float(found.lost[1]))
        if is_explained and self.log.explained[step] and np.isfinite(seen):
            off = abs(whole - seen)
            severity = off / bound
            if not severity <= self._worst_step:
                size, self._worst_step = max(found.gross, bound / SUM) / self._u, severity
                self._steps = Check(self.known.name, "steps", off / size, bound / size, step)
        if not self.is_linear:
            return
        gv = np.append(found.gv, whole) if is_explained else np.zeros(self.known.height + 1)
        motion = Motion(self._factors[step], gv, np.append(found.room, bound))
        self._is_whole &= is_explained
        self._motions.append(motion)
        if self._z is not None and step in self._on_path:
            ww, wm, mw, mm, nw, nm = map(float, motion.factors)
            W, m = self._z.W, self._z.m
            self._z = self._z._replace(W=ww * W + wm * m + nw * gv, m=mw * W + mm * m + nm * gv)

    def _arrive(self, step: int) -> None:
        """Compare with where the parameter was; go on from there."""
        end = self.points.summed(self.points.ending(step))
        if self._motions and self.is_linear:
            self.ways += 1
            if self._begin is not None and end is not None and self._is_whole:
                self.walked += 1
                self._compare(walk(self._begin, end, self._motions, self._u), end, step)
        if end is not None or step in self.points.disturbed:
            self._motions, self._is_whole = [], True
            self._begin = self.points.summed(self.points.beginning(step))

    def _compare(self, off: Off, end: Along, step: int) -> None:
        self.room += float(off.room_W[-1]) / max(1, self.known.height) ** 0.5
        for away, room, size in ((off.W, off.room_W, end.size), (off.m, off.room_m, np.abs(end.m))):
            if np.isfinite(end.W).all() and len(away):
                place = int(np.argmax(np.where(np.isfinite(away), away / (room + TINY), np.inf)))
                scale = _largest(size) + TINY
                check = Check(
                    self.known.name,
                    "fingerprints",
                    float(away[place]) / scale,
                    float(room[place]) / scale,
                    step,
                )
                if self._prints is None or not check.severity <= self._prints.severity:
                    self._prints = check

    def finish(self, steps: int) -> None:
        """Come to the end of the run."""
        self._arrive(steps)

    def learned(self, end: Along, begin: Along) -> float:
        """How far the parameter went, as the root mean square of rows."""
        return root_mean_square(end.W - begin.W)

    def remainder(self, steps: int) -> float:
        """The share of what was learned that patterns do not explain, along v."""
        end, begin = self.points.ending(steps), self.points.beginning(0)
        if self._z is None or end is None or begin is None:
            return 0.0
        return root_mean_square(end.W - self._z.W[:-1]) / (self.learned(end, begin) + TINY)


def _largest(rows: Reals) -> float:
    return float(np.abs(rows).max()) if rows.size else 0.0
