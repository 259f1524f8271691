"""What is kept beside patterns: the very bits of weights and states at some steps.

    snapshots       weights and what the optimizer remembers: at the start, at the end, where
                    something was found, and in between as at most 1/16 of the bytes recorded
    small values    parameters without patterns of up to 4,096 entries, and buffers, after every
                    update, as long as this stays within a tenth of the bytes recorded
    digests         SHA-256 of large parameters that are not trained, in place of a snapshot
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

from dualform.certificate.bounds import ROUNDING, Along, Motion, projected, walk
from dualform.certificate.marks import nature_of
from dualform.learning_rules import Setting, rule_of
from dualform.learning_rules.sgd import linear_factors
from dualform.memory.content import Kept
from dualform.memory.kept import DIGEST, digest_of
from dualform.recording.findings import Findings
from dualform.recording.states import States
from dualform.recording.watched import SMALL, Flags, Line, Reals, Watch, Watched
from dualform.recording.worker import Worker

SHARE, SMALL_SHARE = 1 / 16, 1 / 10
"""How much of what is recorded snapshots, and small values, may take."""

History = list[tuple[Line, Reals | None]]
"""Lines of the log since the last fingerprint, with g v of all rows where it was seen."""

Copies = list[tuple[Watched, dict[str, Any]]]
"""Parameters as they were: "weights", and what was asked for of "state.momentum_buffer", …"""

MOMENTUM = "momentum_buffer"


def is_kept(value: Any) -> bool:
    """Whether what an optimizer remembers can be kept: a tensor, or a plain number."""
    return value is None or isinstance(value, Tensor | bool | int | float | str)


def copied(value: Any) -> Any:
    """Copy what may change in place."""
    return value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else value


class Keeper:
    """Keeps states, small values, buffers and fingerprints until the next segment takes them."""

    def __init__(
        self, watch: Watch, states: States, model: nn.Module, worker: Worker, findings: Findings
    ) -> None:
        self._watch, self.states, self._worker, self._findings = watch, states, worker, findings
        names = {name: name.rpartition(".")[0] for name, _ in model.named_buffers()}
        self._holders = {name: model.get_submodule(of)._buffers for name, of in names.items()}
        """Where each buffer is held."""
        self._buffers: dict[str, Tensor] = {}
        """What each was when it was last kept."""
        self.kept: list[Kept] = []
        """What no segment has yet."""
        self.recorded = 0
        """How many bytes of rows were recorded so far, as they are stored."""
        self.due = False
        self.is_edited = False
        """Whether anything but updates changed the state since the last fingerprint."""
        self._bytes, self._small_bytes = 0, 0
        self._found: dict[str, bool] = {}
        """Where something was found, and whether it was kept as it was then."""
        self.frozen: dict[int, str] = {}
        """Digests of parameters that no optimizer has moved, by index."""
        self._history: History = []
        self._before = -1, self._along([])

    def _put(self, what: str, name: str, step: int, value: Any) -> int:
        self.kept.append((what, name, step, value))
        return value.nbytes if isinstance(value, Tensor) else 8

    def keep(self, step: int, watched: Iterable[Watched], only: str | None = None) -> int:
        """Keep the very bits of parameters and of what is remembered of them; `only=""`: of their
        weights alone, which is all that is asked of what is never replayed."""
        return self._keep(step, self._copies(watched, only))

    def _keep(self, step: int, copies: Copies) -> int:
        self._found |= {w.name: True for w, _ in copies if w.name in self._found}
        own = ((w.name, *item) for w, found in copies for item in found.items())
        return sum(self._put(what, name, step, value) for name, what, value in own)

    def begin(self, step: int, watched: Iterable[Watched]) -> None:
        """Keep what updates start from; again of those whose optimizer, found when it is about to
        take its first step, remembers something."""
        copies = self._copies(watched)
        self._keep(step, copies)
        self._worker.do(self._begin_history, step, copies)

    def keep_buffers(self, step: int, with_large: bool = True) -> int:
        """Keep the buffers that have changed since they were last kept.

        By their content: torch does not count what a batch norm does to its running statistics.
        """
        size = 0
        for name, holder in list(self._holders.items()):
            now, last = holder.get(name.rpartition(".")[2]), self._buffers.get(name)
            if last is not None and (now is None or nature_of(now) != nature_of(last)):
                del self._holders[name]
                what = "was removed" if now is None else f"became {now.dtype} {[*now.shape]}"
                self._findings.remark(
                    f"the buffer {name!r} {what} during training; the memory holds what it was "
                    "before"
                )
                continue
            if now is None or (now.numel() > SMALL and not with_large):
                continue
            if last is None or not torch.equal(now.detach().cpu(), last):
                self._buffers[name] = copied(now)
                size += self._put("buffer", name, step, self._buffers[name])
        return size

    def freeze(self, watched: Iterable[Watched]) -> list[Watched]:
        """Of what is large and not trained, keep a digest; return the others, to be kept whole."""
        others = []
        for w in watched:
            if w.tensor.requires_grad or w.is_small:
                others.append(w)
            else:
                self.frozen[w.index] = digest_of(w.tensor)
                self._put(DIGEST, w.name, 0, self.frozen[w.index])
        return others

    def thaw(self, watched: Iterable[Watched]) -> list[Watched]:
        """Keep the first state of what an optimizer is about to move after all; return what has
        another state by now."""
        digests = [(w, self.frozen.pop(w.index)) for w in watched if w.index in self.frozen]
        is_same = {w: digest_of(w.tensor) == digest for w, digest in digests}
        self.keep(0, [w for w, same in is_same.items() if same], "")
        return [w for w, same in is_same.items() if not same]

    def found(self, watched: list[Watched], step: int) -> None:
        """Keep parameters where something was found; if it recurs, only within the share."""
        if any(w.name not in self._found for w in watched) or self._has_room(watched):
            self._found |= {w.name: True for w in watched}
            self._bytes += self.keep(step, watched)
        else:
            self._found |= {w.name: False for w in watched}

    @property
    def lost(self) -> set[str]:
        """What was changed when there was no room to keep it: no patterns lead on from there."""
        return {name for name, is_kept in self._found.items() if not is_kept}

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
                self._small_bytes += self.keep(step, [w], "")
        self._small_bytes += self.keep_buffers(step, small)

    def after_step(self, line: Line, seen: Reals | None) -> None:
        """Remember the line until the next fingerprint."""
        self._history.append((line, None if seen is None else seen.copy()))

    def keep_gradients(self, step: int, watched: Iterable[Watched], scale: float) -> None:
        """Keep the gradients of small parameters explained by examples: a replay needs the bits.

        `scale`: by which a fused optimizer multiplies them itself.
        """
        for w in watched:
            if w.tensor.grad is not None:
                gradient = w.tensor.grad if scale == 1.0 else w.tensor.grad * scale
                self._put("gradient", w.name, step, copied(gradient))

    def anchor(
        self, step: int, settings: list[Setting], *, keep: bool = False, but: Flags | None = None
    ) -> None:
        """Copy the state; the worker takes its fingerprint and compares it with the last one.

        `but`: parameters that are not as their last update left them.
        """
        owner, lost = self.states.owner, self.lost
        chosen = [w for w in self._watch if owner[w.index] is not None or w.name in lost]
        is_as_left = but is None or not but.any()
        if but is not None:
            chosen = [w for w in chosen if not but[w.index]]
        is_whole = keep or self.due or self._has_room(chosen)
        copies = self._copies(chosen, only=None if is_whole else MOMENTUM)
        if is_whole:
            self._bytes += self._keep(step, copies)
            if is_as_left:  # buffers come with weights, when others are put in
                self.keep_buffers(step)
        self.due = False
        history, self._history = [] if self.is_edited else self._history, []
        self.is_edited = False
        self._worker.do(self._compare, step, copies, history, settings)

    def _copies(self, watched: Iterable[Watched], only: str | None = None) -> Copies:
        """Copy parameters and what is remembered of them: all that can be kept, or one of it."""
        copies = []
        for w in watched:
            held = {n: v for n, v in self.states.state(w).items() if only in (None, n)}
            own = {f"state.{n}": copied(v) for n, v in held.items() if is_kept(v)}
            copies.append((w, {"weights": copied(self.states.weights(w))} | own))
        return copies

    # -- the worker's thread --------------------------------------------------------------------

    def _begin_history(self, step: int, copies: Copies) -> None:
        """Take a fingerprint to compare the next one with; the snapshot tells readers of it."""
        self._before = step, self._along(copies, self._before[1])

    def _compare(
        self, step: int, copies: Copies, history: History, settings: list[Setting]
    ) -> None:
        """Take the fingerprint of a copied state; is it where the rule leads from the last one?"""
        now = self._along(copies)
        for w, _ in copies:
            fingerprint = torch.from_numpy(np.stack([part[w.place] for part in now[:3]]))
            self.kept.append(("fingerprint", w.name, step, fingerprint))
        (since, before), self._before = self._before, (step, now)
        way = [(line, seen) for line, seen in history if seen is not None]
        if not way or len(way) != step - since:
            return
        elsewhere = self._elsewhere(before, now, way, settings)
        for w, own in copies:
            if not elsewhere[w.index]:
                continue
            why = (
                f"{w.name!r} is not where its learning rule puts it: something changed it "
                f"between its updates of steps {since} and {step - 1}"
            )
            self._findings.stop_later(why)
            self._findings.event(step, "edited", why, [w.name])
            if w.name not in self._found:
                self._found[w.name] = True
                self._keep(step, [(w, own)])

    def _along(self, copies: Copies, others: Along | None = None) -> Along:
        """Take the fingerprint of copies: rows of all parameters; of others as known, or nan."""
        watch = self._watch
        W, m, size = np.full((3, len(watch.owner)), np.nan) if others is None else others[:3]
        for w, own in copies:
            v, momentum = None if w.v is None else w.v.double().cpu(), own.get(f"state.{MOMENTUM}")
            W[w.place], size[w.place] = projected(own["weights"], v)
            m[w.place] = projected(momentum, v)[0] if isinstance(momentum, Tensor) else 0.0
        m_size = np.sqrt(watch.fold(m * m) / np.maximum(1, watch.rows))
        return Along(W, m, size, m_size[watch.owner])

    def _elsewhere(
        self,
        start: Along,
        end: Along,
        history: list[tuple[Line, Reals]],
        settings: list[Setting],
    ) -> Flags:
        """Which parameters no rule with scalars only leads from one fingerprint to the next."""
        watch, found = self._watch, np.zeros(len(self._watch), bool)
        ways: dict[tuple[bytes, torch.dtype], list[Watched]] = {}
        log = np.array([np.where(s.moved, 2 * s.setting + s.fresh, -1) for s, _ in history])
        known = watch.fold(np.isfinite(sum(start[:2]) + sum(end[:2]))) == watch.rows
        for w in watch:  # all that the same settings moved at the same steps, at once
            if known[w.index]:
                ways.setdefault((log[:, w.index].tobytes(), w.nature[1]), []).append(w)
        for (_, dtype), together in ways.items():
            way = log[:, together[0].index]
            steps = np.flatnonzero(way >= 0).tolist()
            rules = [rule_of(settings[way[nth] // 2].path) for nth in steps]
            if not all(rule is not None and rule.is_linear for rule in rules):
                continue
            rows = watch.among(together)[watch.owner]
            made = {n: linear_factors(settings[n // 2], n % 2 == 1, dtype) for n in set(way) - {-1}}
            motions: list[Motion] = [(made[way[n]], history[n][1][rows], 0.0) for n in steps]
            a, b = (Along(*(np.asarray(part)[rows] for part in point)) for point in (start, end))
            reached = walk(a, b, motions, ROUNDING[dtype])
            found[watch.owner[rows][~(reached.room_W >= np.abs(b.W - reached.W))]] = True
        return found
