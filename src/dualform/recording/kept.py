"""What is kept beside patterns: the very bits of weights and states at some steps; marks at all.

    snapshots       weights and what the optimizer remembers: at the start, at the end, where
                    something was found, and in between as at most 1/16 of the bytes recorded
    small values    parameters without patterns of up to 4,096 entries, and buffers, after every
                    update, as long as this stays within a tenth of the bytes recorded
    fingerprints    W v and m v every 64 steps: the worker takes them from copies of the state, and
                    asks of linear rules whether the weights are where the rule puts them
    marks           two numbers per parameter after every update

Why it is hard: a copy must be of one moment, though loops exchange weights for an evaluation; so
the training thread copies, and all arithmetic is the worker's. And a finding that recurs at every
step must not write a snapshot at every step.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.optim import Optimizer

from dualform.certificate.bounds import Along, Motion, walk
from dualform.certificate.marks import Marks, Words, remembered
from dualform.certificate.walking import projected
from dualform.learning_rules import Setting, rule_of
from dualform.learning_rules.sgd import linear_factors
from dualform.recording.findings import Findings
from dualform.recording.line import Line
from dualform.recording.watched import SMALL, Flags, Reals, Watch, Watched
from dualform.recording.worker import Worker

SHARE, SMALL_SHARE = 1 / 16, 1 / 10
"""How much of what is recorded snapshots, and small values, may take."""

Kept = tuple[str, str, int, Any]
"""What ("weights", "state.exp_avg", "buffer", …), whose, after how many updates, the value."""


def is_kept(value: Any) -> bool:
    """Whether what an optimizer remembers can be kept: a tensor, or a plain number."""
    return value is None or isinstance(value, Tensor | bool | int | float | str)


@dataclass(frozen=True)
class Before:
    """The last fingerprint, from which the next one is reached."""

    step: int
    parameters: list[Watched]
    along: Reals
    momentum: Reals
    size: Reals


class States:
    """Who moves each parameter, and marks of weights and of what optimizers remember."""

    def __init__(self, watch: Watch, optimizers: Iterable[Optimizer]) -> None:
        self._watch = watch
        self.owner: list[Optimizer | None] = [None] * len(watch)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                for p in group["params"]:
                    w = watch.by_id.get(id(p))
                    if w is not None and self.owner[w.index] is None:
                        self.owner[w.index] = optimizer
        self._weights = Marks([[w.tensor] for w in watch.parameters])
        self._states = Marks([[] for _ in watch.parameters])
        self._owners = list({id(o): o for o in self.owner if o is not None}.values())
        self._known: list[Any] = []
        self._last: Words = np.zeros(0, np.int32)
        self._numbers = np.zeros((2, len(watch)), np.uint32)
        self._history: dict[int, int] = {}
        self.shaken = np.zeros(len(watch), bool)

    def take_over(self, optimizer: Optimizer, watched: list[Watched]) -> list[Optimizer]:
        """Give parameters to another optimizer; return those that have none any more."""
        earlier = {id(o): o for w in watched if (o := self.owner[w.index]) is not None}
        for w in watched:
            self.owner[w.index] = optimizer
        self._owners = list({id(o): o for o in self.owner if o is not None}.values())
        return [o for o in earlier.values() if all(o is not left for left in self._owners)]

    def state(self, w: Watched) -> dict[str, Any]:
        """What the optimizer remembers of a parameter."""
        owner = self.owner[w.index]
        return {} if owner is None else dict(owner.state.get(w.tensor) or {})

    def take(self) -> None:
        """Take the marks of this moment: an update was made."""
        self._follow_states()
        self._last = self._weights.sampled()
        states = self._states.sampled()
        self._numbers = np.stack([self._weights.numbers(self._last), self._states.numbers(states)])

    def remember(self, step: int) -> NDArray[np.uint32]:
        """Give the marks as last taken, [2, P]: they are those after so many updates."""
        self._history[self._key()] = step
        return self._numbers

    def _key(self) -> int:
        return hash(self._numbers.tobytes())

    def _follow_states(self) -> None:
        """Look the states' tensors up again where an optimizer has new ones."""
        known = [(o, id(o.state), len(o.state)) for o in self._owners]
        tensors = self._states.tensors
        if known != self._known or not tensors:
            self._known = known
            found = [remembered(self.state(w)) for w in self._watch.parameters]
            self._states = Marks(found)

    @np.errstate(over="ignore", invalid="ignore")
    def changed(self) -> Flags:
        """Which weights differ from when marks were last taken.

        By more than adding something and taking it away again leaves: of loops that do so between
        two updates (an attack on the weights, say) `shaken` says whose last bits are others.
        """
        now = self._weights.sampled()
        self.shaken = np.zeros(len(self._watch), bool)
        if now.shape != self._last.shape:
            return np.ones(len(self._watch), bool)
        if now.tobytes() == self._last.tobytes():
            return self.shaken
        off, size = self._weights.apart(self._last, now)
        found: Flags = ~(off <= 16 * self._watch.u * size)
        self.shaken = (off != 0) & ~found
        return found

    def exchanged(self) -> Flags:
        """Of which parameters an optimizer was given another memory since marks were last taken.

        Only looked at where its state is another object, as `load_state_dict` leaves it.
        """
        before = self._known
        self._follow_states()
        if before == self._known:
            return np.zeros(len(self._watch), bool)
        found: Flags = self.state_numbers() != self._numbers[1]
        return found

    def find(self, marks: NDArray[np.uint32]) -> list[int]:
        """The places in recorded marks of weights, [steps, P], that are those of now."""
        now = self._weights.numbers(self._weights.sampled())
        return [int(i) for i in np.flatnonzero((marks == now).all(axis=1))]

    def state_numbers(self) -> NDArray[np.uint32]:
        """The marks of what optimizers remember now."""
        self._follow_states()
        return self._states.numbers(self._states.sampled())

    def restore(self, weights: NDArray[np.uint32], states: NDArray[np.uint32]) -> None:
        """Know the marks of the steps that a resumed memory holds."""
        for i in range(len(weights)):
            self._history[hash(np.stack([weights[i], states[i]]).tobytes())] = i + 1

    def restored(self) -> int | None:
        """The step whose marks weights and states have now, if they have been such before."""
        self._follow_states()
        now = self._weights.numbers(self._weights.sampled())
        states = self._states.numbers(self._states.sampled())
        return self._history.get(hash(np.stack([now, states]).tobytes()))


class Keeper:
    """Keeps states, small values, buffers and fingerprints until the next segment takes them."""

    def __init__(
        self, watch: Watch, states: States, model: nn.Module, worker: Worker, findings: Findings
    ) -> None:
        self._watch, self.states, self._worker, self._findings = watch, states, worker, findings
        self._buffers = Buffers(model, findings)
        self.kept: list[Kept] = []
        self.recorded = 0
        """How many bytes of rows were recorded so far."""
        self.due = False
        self._bytes, self._small_bytes = 0, 0
        self._found: set[str] = set()
        self._history: list[tuple[Line, Reals | None]] = []
        self._before: Before | None = None
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
            size += self._put("weights", w.name, step, w.tensor)
            for name, value in self.states.state(w).items() if states else ():
                if is_kept(value):
                    size += self._put(f"state.{name}", w.name, step, value)
        return size

    def begin(self, step: int) -> None:
        """Keep everything as it is: before the first update, or changed after the last one."""
        self.snapshot(step, self._watch.parameters)
        for name, value in self._buffers.changes():
            self._put("buffer", name, step, value)

    def take(self) -> list[Kept]:
        """Hand over what was kept since the last segment."""
        kept, self.kept = self.kept, []
        return kept

    def describe_buffers(self) -> list[dict[str, Any]]:
        """The manifest's entries for buffers."""
        return self._buffers.describe()

    def found(self, watched: list[Watched], step: int) -> None:
        """Keep parameters where something was found; if it recurs, only within the share."""
        if any(w.name not in self._found for w in watched) or self._has_room(watched):
            self._found |= {w.name for w in watched}
            self._bytes += self.snapshot(step, watched)

    def _has_room(self, watched: Iterable[Watched]) -> bool:
        size = sum(w.tensor.nbytes * 2 for w in watched)
        return self._bytes + size <= self.recorded * SHARE

    def after_step(self, line: Line, seen: Reals | None) -> None:
        """Remember the line until the next fingerprint."""
        self._trained |= line.moved
        self._history.append((line, None if seen is None else seen.copy()))

    def after_update(self, step: int, line: Line) -> None:
        """Take marks, and keep small values: they are those after so many updates."""
        self.states.take()
        small = self._small_bytes <= self.recorded * SMALL_SHARE
        for index in np.flatnonzero(line.moved & ~self._watch.resolved) if small else ():
            w = self._watch.parameters[index]
            if w.is_small:
                self._small_bytes += self.snapshot(step, [w], states=False)
        for name, value in self._buffers.changes(small):
            self._small_bytes += self._put("buffer", name, step, value)

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
        watch = self._watch
        chosen = [w for w in watch.parameters if self._trained[w.index]]
        keep = keep or self.due or self._has_room(chosen)
        copies: dict[str, Tensor] = {}
        if keep:
            begin = len(self.kept)
            self._bytes += self.snapshot(step, chosen)
            for name, value in self._buffers.changes():
                self._put("buffer", name, step, value)
            for what, name, _, value in self.kept[begin:]:
                copies[f"{what} {name}"] = value
        else:
            for w in chosen:
                copies[f"weights {w.name}"] = w.tensor.detach().to("cpu", copy=True)
                momentum = self.states.state(w).get("momentum_buffer")
                if isinstance(momentum, Tensor):
                    copies[f"state.momentum_buffer {w.name}"] = momentum.to("cpu", copy=True)
        self.due = False
        history, self._history = self._history, []
        if self._findings.has_edits_since(step - len(history)):
            history = []
        self._worker.do(self._compare, step, chosen, copies, history, settings)

    # -- the worker's thread --------------------------------------------------------------------

    def _compare(
        self,
        step: int,
        chosen: list[Watched],
        copies: dict[str, Tensor],
        history: list[tuple[Line, Reals | None]],
        settings: list[Setting],
    ) -> None:
        """Take the fingerprint of a copied state; is it where the rule leads from the last one?"""
        rows = len(self._watch.owner)
        now = Before(step, chosen, np.zeros(rows), np.zeros(rows), np.zeros(rows))
        for w in chosen:
            along, size = projected(copies[f"weights {w.name}"], w.v)
            now.along[w.place], now.size[w.place] = along, size
            momentum = copies.get(f"state.momentum_buffer {w.name}")
            if momentum is not None:
                now.momentum[w.place] = projected(momentum, w.v)[0]
            found = np.stack([along, now.momentum[w.place], size])
            self.kept.append(("fingerprint", w.name, step, torch.from_numpy(found)))
        before, self._before = self._before, now
        if before is None or not history or any(seen is None for _, seen in history):
            return
        if step - before.step != len(history):
            return
        self._walk(before, now, history, settings)

    def _walk(
        self,
        before: Before,
        now: Before,
        history: list[tuple[Line, Reals | None]],
        settings: list[Setting],
    ) -> None:
        watch = self._watch
        for w in before.parameters:
            i, here = w.index, w.place
            lines = [(line, seen) for line, seen in history if line.moved[i]]
            used = {int(line.setting[i]) for line, _ in lines}
            rules = [rule_of(settings[place].path) for place in used]
            if not all(rule is not None and rule.is_linear for rule in rules):
                continue
            motions = [
                Motion(
                    linear_factors(settings[line.setting[i]], bool(line.fresh[i]), w.tensor.dtype),
                    0.0 if seen is None else seen[here],
                )
                for line, seen in lines
            ]
            start = Along(before.along[here], before.momentum[here], before.size[here])
            end = Along(now.along[here], now.momentum[here], now.size[here])
            off = walk(start, end, motions, float(watch.u[i]))
            if np.isfinite(end.W).all() and not (off.room_W >= off.W).all():
                self._findings.stop_later(
                    f"{w.name!r} is not where its learning rule puts it: something changed it "
                    f"between its updates of steps {before.step} and {now.step - 1}"
                )


class Buffers:
    """The model's buffers (running statistics), as they were when they were last kept."""

    def __init__(self, model: nn.Module, findings: Findings) -> None:
        self._model, self._findings = model, findings
        self._places = {
            name: (model.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2])
            for name, _ in model.named_buffers()
        }
        self._last: dict[str, Tensor] = {}

    def changes(self, with_large: bool = True) -> list[tuple[str, Tensor]]:
        """Every buffer that differs from when it was last asked for.

        By its content: torch does not count what a batch norm does to its running statistics.
        """
        found = []
        for name, (module, own) in list(self._places.items()):
            now, last = module._buffers.get(own), self._last.get(name)
            if last is not None and (now is None or nature(now) != nature(last)):
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
                    found.append((name, self._last[name]))
        return found

    def describe(self) -> list[dict[str, Any]]:
        """The manifest's entries."""
        return [
            {
                "name": name,
                "shape": list(buffer.shape),
                "dtype": str(buffer.dtype).removeprefix("torch."),
            }
            for name, buffer in self._model.named_buffers()
        ]


def nature(tensor: Tensor) -> tuple[torch.Size, torch.dtype]:
    """What of a buffer the memory's description says."""
    return tensor.shape, tensor.dtype
