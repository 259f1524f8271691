"""What is kept beside patterns: the very bits of weights and states at some steps.

    snapshots       weights and what the optimizer remembers: at the start, at the end, where
                    something was found, and in between as at most 1/16 of the bytes recorded
    small values    parameters without patterns of up to 4,096 entries, and buffers, after every
                    update, as long as this stays within a tenth of the bytes recorded
    fingerprints    W v and m v every 64 steps: the worker takes them from copies of the state, and
                    asks of linear rules whether the weights are where the rule puts them

Why it is hard: a copy must be of one moment, though loops exchange weights for an evaluation; so
the training thread copies, and all arithmetic is the worker's. And a finding that recurs at every
step must not write a snapshot at every step.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dualform.certificate.bounds import Along, Motion, walk
from dualform.certificate.walking import projected
from dualform.learning_rules import Setting, rule_of
from dualform.learning_rules.sgd import linear_factors
from dualform.recording.findings import Findings
from dualform.recording.line import Line
from dualform.recording.states import States
from dualform.recording.watched import SMALL, Reals, Watch, Watched
from dualform.recording.worker import Worker

SHARE, SMALL_SHARE = 1 / 16, 1 / 10
"""How much of what is recorded snapshots, and small values, may take."""

Kept = tuple[str, str, int, Any]
"""What ("weights", "state.exp_avg", "buffer", …), whose, after how many updates, the value."""

History = list[tuple[Line, Reals | None]]
"""Lines of the log since the last fingerprint, with g v of all rows where it was seen."""

Copies = list[tuple[Watched, Tensor, Tensor | None]]
"""Parameters as they were: weights and momentum."""


def is_kept(value: Any) -> bool:
    """Whether what an optimizer remembers can be kept: a tensor, or a plain number."""
    return value is None or isinstance(value, Tensor | bool | int | float | str)


class Keeper:
    """Keeps states, small values, buffers and fingerprints until the next segment takes them."""

    def __init__(
        self, watch: Watch, states: States, model: nn.Module, worker: Worker, findings: Findings
    ) -> None:
        self._watch, self.states, self._worker, self._findings = watch, states, worker, findings
        self._buffers = Buffers(model, findings)
        self.kept: list[Kept] = []
        self.recorded = 0
        """How many bytes of rows were recorded so far, as they are stored."""
        self.due = False
        self.is_edited = False
        """Whether anything but updates changed the state since the last fingerprint."""
        self._bytes, self._small_bytes = 0, 0
        self._found: set[str] = set()
        self._history: History = []
        self._before: tuple[int, dict[Watched, Along]] = -1, {}
        self._trained = np.zeros(len(watch), bool)

    def _put(self, what: str, name: str, step: int, value: Any) -> int:
        if isinstance(value, Tensor):
            value = value.detach().to("cpu", copy=True)
        self.kept.append((what, name, step, value))
        return value.nbytes if isinstance(value, Tensor) else 8

    def snapshot(self, step: int, watched: Iterable[Watched], *, states: bool = True) -> int:
        """Keep the very bits of parameters and of what is remembered of them."""
        size = 0
        for w in watched:
            size += self._put("weights", w.name, step, self.states.weights(w))
            for name, value in self.states.state(w).items() if states else ():
                if is_kept(value):
                    size += self._put(f"state.{name}", w.name, step, value)
        return size

    def keep_all(self, step: int) -> None:
        """Keep everything as it is: before the first update, or changed after the last one."""
        self.snapshot(step, self._watch)
        self._keep_buffers(step)
        self._worker.do(self._begin_history, step, self._copies(self._watch))

    def _keep_buffers(self, step: int, with_large: bool = True) -> int:
        return sum(self._put("buffer", *own) for own in self._buffers.changes(step, with_large))

    def take(self) -> list[Kept]:
        """Hand over what was kept since the last segment."""
        kept, self.kept = self.kept, []
        return kept

    def found(self, watched: list[Watched], step: int) -> None:
        """Keep parameters where something was found; if it recurs, only within the share."""
        if any(w.name not in self._found for w in watched) or self._has_room(watched):
            self._found |= {w.name for w in watched}
            self._bytes += self.snapshot(step, watched)

    def _has_room(self, watched: Iterable[Watched]) -> bool:
        size = sum(w.tensor.nbytes * 2 for w in watched)
        return self._bytes + size <= self.recorded * SHARE

    def after_update(self, step: int, line: Line) -> None:
        """Take marks, and keep small values: they are those after so many updates."""
        self.states.take()
        small = self._small_bytes <= self.recorded * SMALL_SHARE
        for index in np.flatnonzero(line.moved & ~self._watch.resolved) if small else ():
            w = self._watch.parameters[index]
            if w.is_small:
                self._small_bytes += self.snapshot(step, [w], states=False)
        self._small_bytes += self._keep_buffers(step, small)

    def after_step(self, line: Line, seen: Reals | None) -> None:
        """Remember the line until the next fingerprint."""
        self._trained |= line.moved
        self._history.append((line, None if seen is None else seen.copy()))

    def keep_gradients(self, step: int, watched: Iterable[Watched], scale: float) -> None:
        """Keep the gradients of small parameters explained by examples: a replay needs the bits.

        `scale`: by which a fused optimizer multiplies them itself.
        """
        for w in watched:
            if w.tensor.grad is not None:
                gradient = w.tensor.grad if scale == 1.0 else w.tensor.grad * scale
                self._put("gradient", w.name, step, gradient)

    def anchor(self, step: int, settings: list[Setting], *, keep: bool = False) -> None:
        """Copy the state; the worker takes its fingerprint and compares it with the last one."""
        chosen = [w for w in self._watch if self._trained[w.index]]
        if keep or self.due or self._has_room(chosen):
            self._bytes += self.snapshot(step, chosen)
            self._keep_buffers(step)
        self.due = False
        history, self._history = [] if self.is_edited else self._history, []
        self.is_edited = False
        self._worker.do(self._compare, step, self._copies(chosen), history, settings)

    def _copies(self, watched: Iterable[Watched]) -> Copies:
        copies = []
        for w in watched:
            m = self.states.state(w).get("momentum_buffer")
            copied = m.to("cpu", copy=True) if isinstance(m, Tensor) else None
            copies.append((w, self.states.weights(w).to("cpu", copy=True), copied))
        return copies

    # -- the worker's thread --------------------------------------------------------------------

    def _begin_history(self, step: int, copies: Copies) -> None:
        """Take a fingerprint to compare the next one with; the snapshot tells readers of it."""
        self._before = step, {copy[0]: along(*copy) for copy in copies}

    def _compare(
        self, step: int, copies: Copies, history: History, settings: list[Setting]
    ) -> None:
        """Take the fingerprint of a copied state; is it where the rule leads from the last one?"""
        now = {copy[0]: along(*copy) for copy in copies}
        for w, found in now.items():
            fingerprint = torch.from_numpy(np.stack([found.W, found.m, found.size]))
            self.kept.append(("fingerprint", w.name, step, fingerprint))
        (since, before), self._before = self._before, (step, now)
        if step - since != len(history) or any(seen is None for _, seen in history):
            return
        for w, weights, momentum in copies if history else ():
            if w in before and not self._is_reached(w, before[w], now[w], history, settings):
                why = (
                    f"{w.name!r} is not where its learning rule puts it: something changed it "
                    f"between its updates of steps {since} and {step - 1}"
                )
                self._findings.stop_later(why)
                self._findings.event(step, "edited", why, [w.name])
                if w.name not in self._found:
                    self._found.add(w.name)
                    self.kept.append(("weights", w.name, step, weights))
                    if momentum is not None:
                        self.kept.append(("state.momentum_buffer", w.name, step, momentum))

    def _is_reached(
        self, w: Watched, start: Along, end: Along, history: History, settings: list[Setting]
    ) -> bool:
        """Whether a rule with scalars only leads from one fingerprint to the next."""
        motions = list[Motion]()
        for line, seen in history:
            if line.moved[w.index] and seen is not None:
                setting, fresh = settings[line.setting[w.index]], bool(line.fresh[w.index])
                rule = rule_of(setting.path)
                if rule is None or not rule.is_linear:
                    return True
                motions.append((linear_factors(setting, fresh, w.nature[1]), seen[w.place], 0.0))
        reached = walk(start, end, motions, float(self._watch.u[w.index]))
        off = np.abs(end.W - reached.W)
        return bool((reached.room_W >= off).all() or not np.isfinite(end.W).all())


def along(w: Watched, weights: Tensor, momentum: Tensor | None) -> Along:
    """Take the fingerprint of a copy."""
    v = None if w.v is None else w.v.double().cpu()
    W, size = projected(weights, v)
    return Along(W, np.zeros_like(W) if momentum is None else projected(momentum, v)[0], size)


class Buffers:
    """The model's buffers (running statistics), as they were when they were last kept."""

    def __init__(self, model: nn.Module, findings: Findings) -> None:
        self._findings = findings
        self._places = {
            name: (model.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2])
            for name, _ in model.named_buffers()
        }
        self._last: dict[str, Tensor] = {}

    def changes(self, step: int, with_large: bool) -> list[tuple[str, int, Tensor]]:
        """Every buffer that differs from when it was last asked for.

        By its content: torch does not count what a batch norm does to its running statistics.
        """
        found = []
        for name, (module, own) in list(self._places.items()):
            now, last = module._buffers.get(own), self._last.get(name)
            if last is not None and (
                now is None or (now.shape, now.dtype) != (last.shape, last.dtype)
            ):
                del self._places[name]
                what = "was removed" if now is None else f"became {now.dtype} {list(now.shape)}"
                self._findings.remark(
                    f"the buffer {name!r} {what} during training; the memory holds what it was "
                    "before"
                )
            elif now is not None and (with_large or now.numel() <= SMALL):
                now = now.detach().cpu()
                if last is None or not torch.equal(now, last):
                    self._last[name] = now.clone()
                    found.append((name, step, now))
        return found
