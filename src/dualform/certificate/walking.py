"""One parameter along v: its gradients' sums, and W v from one known point to the next.

Every step's patterns are compared with what training saw of the gradient; under a rule with scalars
only, (W v, m v) of the rows and of their signed sum is carried from each fingerprint or kept state
through the rule to the next. What no walk explains of the way from the first point to the last is
the remainder.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from dualform.certificate import bounds
from dualform.certificate.bounds import TINY, Along, Motion, Reals, root_mean_square
from dualform.certificate.gradients import Sums
from dualform.certificate.replay import Record, Stretch
from dualform.certificate.report import Check
from dualform.learning_rules import linear_steps, rule_of


class Walker:
    """One parameter along v, followed from point to point.

    `checks`: the worst of each kind. `room`: the bounds of all ways together. `learned`: how far
    the parameter went, as the root mean square of rows. `remainder`: the share of that which
    patterns do not explain.
    """

    def __init__(self, record: Record) -> None:
        memory, log, self._name = record.memory, record.log, record.known.name
        self._record, self._kept, self._sums = record, memory.kept, Sums(memory, self._name)
        paths = {memory.settings[place].path for place in np.unique(log.setting[log.moved])}
        rules = [rule_of(path) for path in paths]
        self.is_linear = bool(rules) and all(rule and rule.is_linear for rule in rules)
        linear = linear_steps(log, memory.settings, record.known.dtype) if self.is_linear else []
        self._factors, self._u = linear, bounds.ROUNDING[record.known.dtype]
        self.checks: dict[str, Check] = {}
        disturbed = {e.step for e in record.events if e.what != "unexplained"}
        found = zip(*self._kept.fingerprints(self._name), strict=True)
        prints = {int(s): Along(*p.numpy()) for s, p in found if int(s) not in disturbed}
        steps = sorted({*self._kept.steps(self._name), *prints} - record.back.keys())
        self._points = {step: self._at(step, prints.get(step)) for step in steps}
        path = set(memory.path_to(self._name, memory.steps).tolist())
        left = set(np.flatnonzero(log.moved & record.explained).tolist())
        self.room, rest = 0.0, np.zeros(record.known.height + 1)
        for step in steps[1:]:
            way = record.stretch(step, self._points)
            left -= set(way.steps)
            unexplained = self._walk(way)
            rest += unexplained if path.issuperset(way.steps) else 0.0
        for step in sorted(left):
            self._compare(step)
        learned = self._points[steps[-1]].W - self._points[steps[0]].W
        self.learned = root_mean_square(learned[:-1])
        self.remainder = root_mean_square(rest[:-1]) / (self.learned + TINY)

    def _walk(self, way: Stretch) -> Reals:
        """Compare what a way leads to, by the rule, with its end; give what it does not explain."""
        record, motions = self._record, list[Motion]()
        start, end = self._points[way.start], self._points[way.stop]
        for step in (step for step in way.steps if record.log.moved[step]):
            seen = self._compare(step) if record.explained[step] else (0.0, 0.0)
            if self.is_linear:
                motions.append((self._factors[step], *seen))
        if not self.is_linear:
            return (end.W - start.W) * bool(way.broken)
        reached = bounds.walk(start, end, motions, self._u)
        if motions and not way.broken and np.isfinite(end.W).all():
            self.room += float(reached.room_W[-1]) / max(1, record.known.height) ** 0.5
            self._keep("fingerprints", end.W - reached.W, reached.room_W, end.size, way.stop)
            if way.stop not in record.replaced:
                self._keep("fingerprints", end.m - reached.m, reached.room_m, end.m, way.stop)
        return end.W - reached.W

    def _compare(self, step: int) -> tuple[Reals, Reals]:
        """Compare a step's sum with what training saw; give G v and its room, for a motion."""
        gv, room = self._sums.of(step).numpy()
        if self._record.log.explained[step]:
            off, size = gv[-1:] - self._record.log.seen[step], room[-1:] / bounds.SUM / self._u
            self._keep("steps", off, room[-1:], size, step)
        return gv, room

    def _keep(self, kind: str, off: Reals, room: Reals, size: Reals, step: int) -> None:
        """Keep the worst check of each kind."""
        check = Check.of_rows(self._name, kind, off, room, size, step)
        if kind not in self.checks or check.severity > self.checks[kind].severity:
            self.checks[kind] = check

    def _at(self, step: int, found: Along | None) -> Along:
        """Find where it was: by the kept state, which must agree with the fingerprint."""
        kept, v, signs = self._kept, self._sums.v, self._sums.signs
        if found is None or step in kept.steps(self._name):
            W, size = projected(kept.weights(self._name, step), v)
            momentum = kept.state(self._name, step).get("momentum_buffer")
            m = projected(momentum, v)[0] if isinstance(momentum, Tensor) else np.zeros_like(W)
            if found is not None and len(W):
                room = np.full_like(W, bounds.DOUBLE * size.max())
                self._keep("fingerprints", W - found.W, room, size, step)
        else:
            W, m, size, _ = found
        m_size = np.append(np.full_like(m, root_mean_square(m)), np.linalg.norm(m))
        whole = np.append(W, signs @ W), np.append(m, signs @ m)
        return Along(*whole, np.append(size, np.linalg.norm(size)), m_size)


def projected(tensor: Tensor, v: Tensor | None) -> tuple[Reals, Reals]:
    """Project a tensor onto v in float64, row by row; give the size of each row as well."""
    full = tensor.double()
    if v is None:
        flat = full.reshape(-1).numpy()
        return flat, np.abs(flat)
    rows = full.flatten(1)
    size = torch.linalg.vector_norm(rows, dim=1) / max(1, rows.shape[1]) ** 0.5
    return (rows @ v.double().cpu()).numpy(), size.numpy()
