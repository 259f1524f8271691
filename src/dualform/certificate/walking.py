"""One parameter along v: its gradients' sums, and W v from one known point to the next.

Every step's patterns are compared with what training saw of the gradient; under a rule with scalars
only, (W v, m v) is carried from each fingerprint or kept state through the rule to the next. Beside
the rows their signed sum is carried: of it is known what 16 bits lost at every step, so it is as
sharp as if rows were exact. What no walk explains of the way from the first point to the last is
the remainder.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from dualform.certificate import bounds
from dualform.certificate.bounds import TINY, Along, Motion, Off, Reals, root_mean_square
from dualform.certificate.gradients import Sums
from dualform.certificate.replay import Record, Stretch
from dualform.certificate.report import Check
from dualform.learning_rules import linear_steps, rule_of


class Walker:
    """Looks at one parameter along v, from point to point."""

    def __init__(self, record: Record) -> None:
        memory, name, log = record.memory, record.known.name, record.log
        self._record, self._sums = record, Sums(memory, name)
        self._v, self._signs = memory.direction(name), memory.signs(name)
        disturbed = {e.step for e in record.events if e.what != "unexplained"}
        found = zip(*memory.kept.fingerprints(name), strict=True)
        self._prints = {int(s): Along(*p.numpy()) for s, p in found if int(s) not in disturbed}
        used = np.unique(log.setting[log.moved]).tolist()
        rules = [rule_of(memory.settings[place].path) for place in used]
        self.is_linear = bool(rules) and all(rule and rule.is_linear for rule in rules)
        linear = linear_steps(log, memory.settings, record.known.dtype) if self.is_linear else []
        self._factors, self._u = linear, bounds.ROUNDING[record.known.dtype]
        self._seen: dict[int, Along] = {}
        self._checks: dict[str, Check] = {}
        self.room = self.learned = self.remainder = 0.0
        """The bounds of all ways together; how far the parameter went, as the root mean square of
        rows; the share of that which patterns do not explain."""

    def run(self) -> list[Check]:
        """Go through the whole run; give the worst check of each kind."""
        record, memory, name = self._record, self._record.memory, self._record.known.name
        points = sorted({*memory.kept.steps(name), *self._prints} - record.back.keys())
        path = set(memory.path_to(name, memory.steps).tolist())
        left = set(np.flatnonzero(record.log.moved & record.explained).tolist())
        learned, explained = np.zeros((2, record.known.height + 1))
        for point in points[1:]:
            way = record.stretch(point, points)
            left -= set(way.steps)
            reached = self._walk(way)
            if path.issuperset(way.steps):
                learned += self._at(way.stop).W - self._at(way.start).W
                explained += reached - self._at(way.start).W
        for step in sorted(left):
            self._look(step)
        self.learned = root_mean_square(learned[:-1])
        self.remainder = root_mean_square((learned - explained)[:-1]) / (self.learned + TINY)
        return list(self._checks.values())

    def _walk(self, way: Stretch) -> Reals:
        """Compare what a way leads to, by the rule, with its end; give W v as it is explained."""
        record, begin, end, motions = self._record, self._at(way.start), self._at(way.stop), []
        for step in (step for step in way.steps if record.log.moved[step]):
            seen = self._look(step) if record.explained[step] else (0.0, 0.0)
            if self.is_linear:
                motions.append(Motion(self._factors[step], *seen))
        if not self.is_linear:
            return begin.W if way.broken else end.W
        off = bounds.walk(begin, end, motions, self._u)
        if motions and not way.broken and np.isfinite(end.W).all():
            self.room += float(off.room_W[-1]) / max(1, record.known.height) ** 0.5
            self._compare(off, end, way)
        return off.reached

    def _look(self, step: int) -> tuple[Reals, Reals]:
        """Compare a step's sum with what training saw; give it and its room, for a motion."""
        found, known, log = self._sums.of(step), self._record.known, self._record.log
        whole = float(self._signs @ found.gv) - float(found.lost[0])
        bound = float(bounds.sum_bound(np.asarray(found.gross)))
        if known.keep == "examples":  # of them it is not known what 16 bits lost
            bound += bounds.LOST * abs(float(found.lost[1]))
        if log.explained[step]:
            off = abs(whole - float(log.seen[step]))
            self._note("steps", off, bound, bound / (bounds.SUM * self._u), step)
        return np.append(found.gv, whole), np.append(found.room, bound)

    def _compare(self, off: Off, end: Along, way: Stretch) -> None:
        found = [(off.W, off.room_W, end.size), (off.m, off.room_m, np.abs(end.m))]
        for away, room, size in found[: 1 if way.is_replaced else 2]:
            worst = int(np.argmax(np.where(np.isfinite(away), away / (room + TINY), np.inf)))
            scale = float(size.max()) + TINY
            self._note("fingerprints", float(away[worst]), float(room[worst]), scale, way.stop)

    def _note(self, kind: str, off: float, bound: float, size: float, step: int) -> None:
        check = Check(self._record.known.name, kind, off / size, bound / size, step)
        if kind not in self._checks or check.severity > self._checks[kind].severity:
            self._checks[kind] = check

    def _at(self, step: int) -> Along:
        """Where the parameter was: by the kept state, which must agree with the fingerprint."""
        if step not in self._seen:
            found, memory = self._prints.get(step), self._record.memory
            if found is None or step in memory.kept.steps(self._record.known.name):
                kept = self._kept_at(step)
                if found is not None and len(kept.W):
                    off, scale = np.abs(kept.W - found.W).max(), float(kept.size.max()) + TINY
                    self._note("fingerprints", float(off), bounds.DOUBLE * scale, scale, step)
                found = kept
            W, m, size, _ = found
            m_size = np.append(np.full_like(m, root_mean_square(m)), np.linalg.norm(m))
            whole = np.append(W, self._signs @ W), np.append(m, self._signs @ m)
            self._seen[step] = Along(*whole, np.append(size, np.linalg.norm(size)), m_size)
        return self._seen[step]

    def _kept_at(self, step: int) -> Along:
        kept, name = self._record.memory.kept, self._record.known.name
        W, size = projected(kept.weights(name, step), self._v)
        momentum = kept.state(name, step).get("momentum_buffer")
        m = projected(momentum, self._v)[0] if isinstance(momentum, Tensor) else np.zeros_like(W)
        return Along(W, m, size)


def projected(tensor: Tensor, v: Tensor | None) -> tuple[Reals, Reals]:
    """Look at a tensor along v in float64, row by row; and the size of each row."""
    full = tensor.double()
    if v is None:
        flat = full.reshape(-1).numpy()
        return flat, np.abs(flat)
    rows = full.flatten(1)
    size = torch.linalg.vector_norm(rows, dim=1) / max(1, rows.shape[1]) ** 0.5
    return (rows @ v.double().cpu()).numpy(), size.numpy()
