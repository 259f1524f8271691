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
from dualform.certificate.gradients import Sum, Sums
from dualform.certificate.replay import Record, Stretch
from dualform.certificate.report import Check
from dualform.learning_rules import linear_steps, rule_of


class Walker:
    """Looks at one parameter along v, from point to point."""

    def __init__(self, record: Record) -> None:
        memory, self.known = record.memory, record.known
        self._record, self._log, self._memory = record, record.log, memory
        self._u = bounds.ROUNDING[self.known.dtype]
        self._sums, self._v = Sums(memory, self.known.name), memory.direction(self.known.name)
        self._signs = memory.signs(self.known.name)
        steps, prints = memory.kept.fingerprints(self.known.name)
        disturbed = {e.step for e in record.events if e.what != "unexplained"}
        found = {int(s): Along(*p.numpy()) for s, p in zip(steps, prints, strict=True)}
        self._prints = {s: p for s, p in found.items() if s not in disturbed}
        self._kept = set(memory.kept.steps(self.known.name))
        self._seen: dict[int, Along] = {}
        used = np.unique(self._log.setting[self._log.moved])
        rules = [rule_of(memory.settings[place].path) for place in used.tolist()]
        self.is_linear = bool(rules) and all(rule and rule.is_linear for rule in rules)
        self._checks: dict[str, Check] = {}
        self.room = 0.0
        """The bounds of all ways together, of the rows' signed sum by row."""
        self._explained, self._learned = np.zeros((2, self.known.height + 1))

    @property
    def learned(self) -> float:
        """How far the parameter went, as the root mean square of rows."""
        return root_mean_square(self._learned[:-1])

    @property
    def remainder(self) -> float:
        """The share of what was learned that patterns do not explain, along v."""
        return root_mean_square((self._learned - self._explained)[:-1]) / (self.learned + TINY)

    def run(self) -> list[Check]:
        """Go through the whole run; give the worst check of each kind."""
        memory, name = self._memory, self.known.name
        points = sorted((self._kept | self._prints.keys()) - self._record.back.keys())
        path = set(memory.path_to(name, memory.steps).tolist())
        log, settings = self._log, memory.settings
        self._factors = linear_steps(log, settings, self.known.dtype) if self.is_linear else []
        left = set(np.flatnonzero(log.moved & self._record.explained).tolist())
        for point in points[1:]:
            way = self._record.stretch(point, points)
            self._walk(way, is_on_path=path.issuperset(way.steps))
            left -= set(way.steps)
        for step in sorted(left):
            self._look(step, self._sums.of(step))
        return list(self._checks.values())

    def _walk(self, way: Stretch, *, is_on_path: bool) -> None:
        begin, end, motions = self._at(way.start), self._at(way.stop), []
        for step in way.steps:
            gv, room = np.zeros((2, self.known.height + 1))
            if self._log.moved[step] and self._record.explained[step]:
                gv, room = self._look(step, self._sums.of(step))
            if self._log.moved[step] and self.is_linear:
                motions.append(Motion(self._factors[step], gv, room))
        off = bounds.walk(begin, end, motions, self._u) if self.is_linear else None
        if is_on_path:
            self._learned = end.W - self._at(0).W
            if off is not None:
                self._explained += off.reached - begin.W
            elif not way.broken:
                self._explained += end.W - begin.W
        if off is not None and motions and not way.broken and np.isfinite(end.W).all():
            self.room += float(off.room_W[-1]) / max(1, self.known.height) ** 0.5
            self._compare(off, end, way)

    def _look(self, step: int, found: Sum) -> tuple[Reals, Reals]:
        """Compare a step's sum with what training saw; give it and its room, for a motion."""
        whole = float(self._signs @ found.gv) - float(found.lost[0])
        bound = float(bounds.sum_bound(np.asarray(found.gross)))
        if self.known.keep == "examples":  # of them it is not known what 16 bits lost
            bound += bounds.LOST * abs(float(found.lost[1]))
        if self._log.explained[step]:
            off = abs(whole - float(self._log.seen[step]))
            self._note("steps", off, bound, bound / (bounds.SUM * self._u), step)
        return np.append(found.gv, whole), np.append(found.room, bound)

    def _compare(self, off: Off, end: Along, way: Stretch) -> None:
        found = [(off.W, off.room_W, end.size), (off.m, off.room_m, np.abs(end.m))]
        for away, room, size in found[: 1 if way.is_replaced else 2]:
            worst = int(np.argmax(np.where(np.isfinite(away), away / (room + TINY), np.inf)))
            scale = float(size.max()) + TINY
            self._note("fingerprints", float(away[worst]), float(room[worst]), scale, way.stop)

    def _note(self, kind: str, off: float, bound: float, size: float, step: int) -> None:
        check = Check(self.known.name, kind, off / size, bound / size, step)
        if kind not in self._checks or check.severity > self._checks[kind].severity:
            self._checks[kind] = check

    def _at(self, step: int) -> Along:
        """Where the parameter was: by the kept state, which must agree with the fingerprint."""
        if step not in self._seen:
            found = self._prints.get(step)
            if step in self._kept or found is None:
                seen = self._kept_at(step)
                if found is not None and len(seen.W):
                    off, scale = np.abs(seen.W - found.W).max(), float(seen.size.max()) + TINY
                    self._note("fingerprints", float(off), bounds.DOUBLE * scale, scale, step)
                found = seen
            W, m, size, _ = found
            m_size = np.append(np.full_like(m, root_mean_square(m)), np.linalg.norm(m))
            whole = np.append(W, self._signs @ W), np.append(m, self._signs @ m)
            self._seen[step] = Along(*whole, np.append(size, np.linalg.norm(size)), m_size)
        return self._seen[step]

    def _kept_at(self, step: int) -> Along:
        kept, name = self._memory.kept, self.known.name
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
