"""What an optimizer's update does, from top to bottom: this is the file to read for one step.

    before   settings are read; every gradient is compared with what its patterns sum to; weights
             and states are compared with their marks: was anything changed since the last update?
    …        torch moves the weights
    after    the patterns of the layers that moved are settled: they belong to this step
    close    every optimizer has moved (or one is about to move again): marks, and the line of the
             log is appended. From here on the step counts, and nothing is written into it again.

The optimizers are those seen so far to move a parameter of the model; so the first step stays open
until one of them moves again. Where one optimizer's step runs inside another's (SAM, lookahead),
the inner one is the rule; what the outer one adds is an edit.

Why it is hard: each parameter may fare differently. It may be skipped, moved by another optimizer
than its neighbour, given a gradient that an earlier update has used already, or edited by the loop.
Whatever patterns do not explain begins a remainder at a kept state; nothing here computes one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch.optim import Optimizer

from dualform.errors import RecordingError
from dualform.learning_rules import SeenSettings, Setting
from dualform.recording.findings import Findings
from dualform.recording.gradients import Comparison, explain
from dualform.recording.kept import Keeper
from dualform.recording.optimizers import closure_of, skips, unscaled
from dualform.recording.passes import Passes
from dualform.recording.trial import Trial
from dualform.recording.watched import KEYS_ALONE, Flags, Line, Watch, Watched, listed

ANCHOR = 64
"""How many steps lie between fingerprints, and between sums where keys alone are kept."""


@dataclass
class OpenStep:
    """A step that is not over yet."""

    line: Line
    is_known: Flags
    """Of which parameters it is written down whether their gradient was carried over."""
    moved: list[Optimizer] = field(default_factory=list)
    is_seen: bool = True
    """Whether all its gradients were compared with sums."""
    scales: dict[int, float] = field(default_factory=dict)
    """By what fused optimizers multiplied gradients themselves."""


@dataclass
class Running:
    """An update under way: how often its gradients were looked at, and what it is about to move."""

    optimizer: Optimizer
    calls: int = 0
    moving: list[Watched] = field(default_factory=list)


class Updates:
    """The updates of all optimizers, gathered into steps."""

    def __init__(
        self,
        watch: Watch,
        passes: Passes,
        keeper: Keeper,
        findings: Findings,
        every: int,
    ) -> None:
        self.watch, self.passes, self.keeper, self.findings = watch, passes, keeper, findings
        self.every, self.step, self.first = every, 0, 0
        self.settings, self._listed = SeenSettings(), 0
        passes.on_begin = self._before_any
        self._moved_to: list[bytes] = []
        self.on_step: Callable[[Line], None] = lambda line: None
        self._trial = Trial(watch, findings)
        self._running: list[Running] = []
        self._wrappers: set[int] = set()
        self._now = OpenStep(Line.blank(0), np.zeros(0, bool))

    def begin(self, step: int) -> None:
        """Begin the first step of this recording: that where a resumed memory ends, or 0."""
        self.first = step
        self._go_on(step)

    def _go_on(self, step: int) -> None:
        self.step, count = step, len(self.watch)
        self._now = OpenStep(Line.blank(count), np.zeros(count, bool))
        self._record(step)

    def restore(self, settings: list[Setting]) -> None:
        """Go on with the settings that a resumed memory lists."""
        self.settings, self._listed = SeenSettings(settings), len(settings)

    def news(self) -> dict[str, Any]:
        """The settings that have come since the last segment."""
        fresh, self._listed = self.settings.settings[self._listed :], len(self.settings.settings)
        return {"settings": [setting.to_json() for setting in fresh]}

    @property
    def is_open(self) -> bool:
        """Whether an optimizer's step is running."""
        return bool(self._running)

    @property
    def is_moving(self) -> bool:
        """Whether the optimizer's step that is running was found to move anything."""
        return any(running.moving for running in self._running)

    def is_running(self, optimizer: Optimizer | None) -> bool:
        """Whether this optimizer's step is running."""
        return any(running.optimizer is optimizer for running in self._running)

    @property
    def is_under_way(self) -> bool:
        """Whether an optimizer has moved in a step that is not closed yet."""
        return bool(self._now.moved)

    def _record(self, step: int) -> None:
        """Have passes kept, and summed, if they may belong to a step that is to be recorded."""
        self.passes.is_recording = step % self.every == 0
        keeps_patterns = bool(self.watch.resolved.any())
        self.passes.is_summing = self.passes.is_recording and (keeps_patterns or step % ANCHOR == 0)

    def holds(self, optimizer: Optimizer) -> bool:
        """Whether an optimizer holds a parameter of the model."""
        return any(True for _ in self.watch.held(optimizer))

    # -- before the update ----------------------------------------------------------------------

    def _before_any(self) -> None:
        """A pass begins, and no optimizer was seen yet: does the loop move weights itself?"""
        marks = self.keeper.states.now()[0].tobytes()
        if marks not in self._moved_to[-1:]:
            self._moved_to.append(marks)
        if len(self._moved_to) > 2:  # SAM moves them once
            raise RecordingError(
                "the weights change from pass to pass, but no optimizer was seen to step. Where "
                "the loop moves them itself, write it inside `with recorder.update():`"
            )

    def before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        """Look at the gradients: now or, given a closure, after its last backward pass."""
        self.watch.refuse_converted()
        if self._running and self._running[-1].optimizer is optimizer:
            self.break_off()
        for outer in self._running:
            self._unwrap(outer)
        running = Running(optimizer)
        self._running.append(running)
        if id(optimizer) in self._wrappers:
            return None
        closure = closure_of(args, kwargs)
        if closure is None:
            self.look(running)
            return None

        def closure_then_look() -> Any:
            loss = closure()
            self.look(running)
            return loss

        if len(args) > 1:
            return (args[0], closure_then_look, *args[2:]), kwargs
        return args, {**kwargs, "closure": closure_then_look}

    def _unwrap(self, outer: Running) -> None:
        """One step runs inside another: the inner one is the rule; for it the line begins anew."""
        optimizer, states = outer.optimizer, self.keeper.states
        self._wrappers.add(id(optimizer))
        states.take_over(None, [w for w in self.watch if states.owner[w.index] is optimizer])
        self._forget([outer])
        outer.moving = []

    def _forget(self, updates: list[Running]) -> Flags:
        """Take back from the line what updates were about to move; return what that is."""
        found = self.watch.among(w for running in updates for w in running.moving)
        self._now.line.clear(found)
        self._now.is_known[found] = False
        return found

    def break_off(self) -> bool:
        """An exception ended an update: of what it was moving nothing is known."""
        broken = self.watch.among(w for running in self._running for w in running.moving)
        self._running.clear()
        if not self.is_under_way:
            self._go_on(self.step)
        is_edited = self.find_edits(broken=broken)
        if is_edited:
            self.keeper.states.take()
        return is_edited

    def end(self) -> Flags:
        """Close the last step; find what was changed after it: by an update that was broken off,
        by best or averaged weights put in. The memory ends before that."""
        states, broken = self.keeper.states, self._forget(self._running)
        self._running.clear()
        if self.is_under_way:
            self.close_step()
        changed = states.changed() | (states.differ() if broken.any() else False)
        back = states.step_of_weights() if changed.any() else self.step
        others = [self.watch.parameters[i] for i in np.flatnonzero(changed)]
        if back is None and any(w.name in self.keeper.lost for w in others):
            # as after every update (a clamp, say): what the last one left could not be rebuilt
            self._edited(others, self.step)
            changed[:] = False
        elif back != self.step:
            which = "its weights are those of no recorded step"
            if back is not None:
                which = f"its weights are those after update {back}"
                values = changed & ~self.watch.resolved
                kept = [self.watch.parameters[i] for i in np.flatnonzero(values)]
                self.keeper.keep(back, kept, "")
            self.findings.remark(
                f"the model was changed after its last update, {self.step}, where this memory "
                f"ends: {which}"
            )
        return changed

    @np.errstate(over="ignore", invalid="ignore")  # numbers of a run that diverges
    def look(self, running: Running) -> None:
        """Read settings and gradients of everything that an optimizer is about to move."""
        self.passes.finish()
        self.passes.on_begin = None
        running.moving, optimizer = [], running.optimizer
        running.calls += 1
        if skips(optimizer):
            return
        moving, places, fresh = self._read(optimizer)
        if not moving:
            return
        indices = [w.index for w in moving]
        if running.calls == 1:
            moved, held = self._now.line.moved, self.watch.held(optimizer)
            # rows of a layer settle at once, so none of its parameters may have moved before them
            beside = (i for w in moving for site in w.sites if site.pending for i in site.indices)
            is_over = self.is_under_way and (
                optimizer in self._now.moved
                or any(moved[w.index] for w in held)
                or any(moved[i] for i in beside)
            )
            self.find_edits(is_over)
            if is_over:
                self.close_step()
            self._follow_owners(optimizer, moving)
        line = self._now.line
        line.moved[indices], line.setting[indices], line.fresh[indices] = True, places, fresh
        among = self.watch.among(moving)
        self._now.is_seen &= self.passes.is_summing
        if self.passes.is_summing:
            self.watch.project(among)
        if (scale := unscaled(optimizer)) != 1.0:
            self._now.scales |= dict.fromkeys(indices, scale)
        self._trial.begin(optimizer, moving, [self.settings.settings[i] for i in places])
        self._explain(among, scale)
        by_examples = [w for w in moving if w.by_examples and line.explained[w.index]]
        self.keeper.keep_gradients(self.step, by_examples, scale)
        running.moving = moving  # unless the audit stopped the update

    def _read(self, optimizer: Optimizer) -> tuple[list[Watched], list[int], list[bool]]:
        """Find what an optimizer is about to move, by which of the settings, and of which of it
        nothing is remembered."""
        moving: list[Watched] = []
        places: list[int] = []
        by_id = self.watch.members.by_id
        for group in optimizer.param_groups:
            found = (by_id.get(id(p)) for p in group["params"] if p.grad is not None)
            own = [w for w in found if w is not None]
            moving += own
            places += [self.settings.index(optimizer, group)] * len(own) if own else []
        held = optimizer.state.items()
        known = {id(p) for p, own in held for value in own.values() if value is not None}
        fresh = [id(w.tensor) not in known for w in moving]
        return moving, places, fresh

    def find_edits(self, is_over: bool = False, broken: Flags | None = None) -> bool:
        """Find what was changed since the last update: after this step, if it has moved in it."""
        states = self.keeper.states
        changed = states.changed()
        changed = changed if broken is None else changed | broken
        if changed.any():
            after = (self._now.line.moved | is_over) & self.is_under_way
            for edited, step in ((changed & ~after, self.step), (changed & after, self.step + 1)):
                if edited.any():
                    self._write_down_edit(edited, step)
        if states.shaken.any():
            told = [e["parameters"] for e in self.findings.events if e["what"] == "shaken"]
            names = [self.watch.parameters[i].name for i in np.flatnonzero(states.shaken)]
            if names := [name for name in names if not any(name in known for known in told)]:
                why = "something was added between updates and taken away again"
                self.findings.event(self.step, "shaken", why, names)
        return bool(changed.any())

    def _write_down_edit(self, changed: Flags, step: int) -> None:
        """Something was changed: put back to a recorded step, or a remainder begins here."""
        back = self.keeper.states.restored()
        if back == step:  # an update was broken off before it began
            return
        if back is not None:
            self.keeper.is_edited = True
            self.findings.remark(
                f"before step {step} weights and optimizer were put back to what they were "
                f"after {back} updates; what was learned since then is not part of the network"
            )
            names = [w.name for w in self.watch]
            self.findings.event(step, "rewind", "a recorded state was restored", names, to=back)
            return
        self._edited([self.watch.parameters[i] for i in np.flatnonzero(changed)], step)

    def _edited(self, edited: list[Watched], step: int) -> None:
        """Keep what was changed between two updates: from here on there is a remainder."""
        self.keeper.is_edited = True
        names = [w.name for w in edited]
        if not any(event["what"] == "edited" for event in self.findings.events):
            self.findings.remark(
                f"{listed(names)}: changed between updates, first before step {step}; what such "
                "changes wrote is part of the remainder"
            )
        self.findings.event(step, "edited", "changed between two updates", names)
        self.keeper.found(edited, step)

    def _follow_owners(self, optimizer: Optimizer, moving: list[Watched]) -> None:
        """Find whether another optimizer moves these parameters from now on."""
        states = self.keeper.states
        replaced = [w for w in moving if states.owner[w.index] is not optimizer]
        if not replaced:
            return
        if changed := self.keeper.thaw(replaced):
            self._edited(changed, self.step)
        had_another = any(states.owner[w.index] is not None for w in replaced)
        states.take_over(optimizer, replaced)
        is_warm = any(map(states.state, replaced))
        why = f"from here on another {type(optimizer).__name__} moves it"
        is_first = self.step == self.first
        if not had_another and (is_first or states.is_resumed):
            if is_first and (self.step or is_warm):
                self.keeper.begin(self.step, replaced)
            if states.are_as_begun(replaced):
                return
            if not is_first:  # what it moves was not moved since
                self.keeper.keep(self.step, replaced)
                self.keeper.is_edited = True
            why = "resumed with another optimizer's state"
            self.findings.remark(
                f"resumed at step {self.first} with another state of the optimizer than it had "
                "there: what it remembered is part of the remainder"
            )
        elif had_another or is_warm:
            self.keeper.keep(self.step, replaced)
            self.keeper.is_edited = True
        else:
            return
        self.findings.event(self.step, "replaced", why, [w.name for w in replaced])

    def _explain(self, moving: Flags, scale: float) -> None:
        """Write down κ, and which parameters their patterns explain."""
        watch, line = self.watch, self._now.line
        if not self.passes.is_summing or self.step % self.every:
            watch.unknown[moving] = True
            return
        resolved = moving & watch.resolved
        found = explain(watch, resolved)
        self._refuse(moving, found)
        if self.step % ANCHOR == 0:
            self._compare_keys(moving)
        resolved = moving & watch.resolved
        explained = found.is_explained & resolved
        np.copyto(line.kappa, np.where(explained, found.kappa * scale, np.nan), where=resolved)
        np.copyto(line.explained, explained, where=moving)
        np.copyto(line.seen, watch.fold(watch.signs * watch.seen) * scale, where=moving)

    def _compare_keys(self, moving: Flags) -> None:
        """Say whose keys, kept alone, are not all that its gradient comes from."""
        watch = self.watch
        alone = moving & ~watch.unknown & [w.why == KEYS_ALONE for w in watch]
        if not alone.any():
            return
        found = explain(watch, alone)
        for i in np.flatnonzero(alone & ~found.is_explained & np.isfinite(found.off)):
            w = watch.parameters[i]
            layers = " and ".join(repr(site.layer.name) for site in w.sites)
            self.findings.remark(
                f"the keys of layer {layers} are not all that wrote into {w.name!r} (a penalty on "
                "weights, or a use outside the layer, say): attention does not see the rest"
            )

    def _refuse(self, moving: Flags, found: Comparison) -> None:
        """Stop, or warn, where patterns do not explain a gradient."""
        watch = self.watch
        bad = moving & watch.resolved & ~found.is_explained
        if self.every > 1:  # a gradient may hold one of a step that was not recorded
            bad &= ~watch.unknown
        for w in (watch.parameters[i] for i in np.flatnonzero(bad)):
            if not any(site.was_used for site in w.sites):
                watch.make_values(
                    w,
                    "got a gradient, though its layer was never called (it is used directly, "
                    "compiled or transformed)",
                )
                continue
            sentence = found.why(watch, w, self.step)
            self.findings.stop(sentence)
            self.findings.event(self.step, "unexplained", sentence, [w.name])
            why = f"its gradient was not explained at step {self.step}"
            watch.make_values(w, why, is_said=True)
        self.keeper.due |= bool(bad.any())

    # -- after the update -----------------------------------------------------------------------

    @np.errstate(over="ignore", invalid="ignore")
    def after(self, optimizer: Optimizer) -> None:
        """The optimizer has moved: its patterns are settled; what `.grad` holds now is carried."""
        running = self._running.pop()
        if id(optimizer) in self._wrappers:  # what it adds to the inner one's update is an edit
            if self.find_edits(is_over=True):
                self.keeper.states.take()
            return
        moving = running.moving if running.calls else self._unseen(optimizer)
        if not moving:
            return
        watch, line, moved = self.watch, self._now.line, self.watch.among(moving)
        if running.calls > 1:
            for w in (w for w in moving if watch.resolved[w.index]):
                watch.make_values(w, "its optimizer calls its closure several times in a step")
        self._settle(moved)
        self._trial.end()
        line.explained &= watch.resolved
        if self.passes.is_summing:
            np.copyto(watch.E, watch.seen, where=moved[watch.owner])
            watch.gross *= np.where(moved & (np.abs(line.kappa) < 1.0), np.abs(line.kappa), 1.0)
        self._now.moved.append(optimizer)
        self.keeper.after_update(self.step + 1, line)  # later passes may move buffers
        owners = self.keeper.states.owners
        if self.step > self.first and all(o in self._now.moved for o in owners):
            self.close_step()
        elif not self.passes.is_recording:  # the next pass may be the next step's
            self._record(self.step + 1)

    def _unseen(self, optimizer: Optimizer) -> list[Watched]:
        """A closure was given and never called: nothing is known of the gradients."""
        found = [w for w in self.watch.held(optimizer) if w.tensor.grad is not None]
        indices = [w.index for w in found]
        self._now.line.moved[indices] = self.watch.unknown[indices] = True
        why = "its optimizer never called its closure"
        self.findings.event(self.step, "unexplained", why, [w.name for w in found])
        return found

    def _settle(self, moved: Flags) -> None:
        """The rows of the layers that moved belong to this step; their gradients hold them on."""
        watch, now = self.watch, self._now
        own = set(np.flatnonzero(moved).tolist())
        settled = [*own]
        for site in watch.sites.values():
            if not site.pending or own.isdisjoint(site.indices):
                continue
            if self.step % self.every:
                site.drop_pending()
                watch.unknown[site.indices] = True
                continue
            settled += site.indices
            site.uses.append((self.step, site.pending))
            for call in site.pending:
                site.settled += call.rows
            site.pending = []
        held = np.where(now.is_known, now.line.carried, watch.carried)  # from the last step on
        now.line.carried[settled] = held[settled]
        now.is_known[settled] = watch.carried[settled] = True

    def close_step(self) -> None:
        """Every optimizer has moved: the step counts once its line is in the log."""
        now, keeper, watch = self._now, self.keeper, self.watch
        np.copyto(now.line.carried, watch.carried, where=~now.is_known)
        watch.carried |= watch.unknown  # what a gradient holds is carried on, recorded or not
        self.step += 1
        now.moved.clear()
        now.line.mark[:], now.line.state_mark[:] = keeper.states.remember(self.step)
        for i, scale in now.scales.items():
            watch.seen[watch.parameters[i].place] *= scale
        keeper.after_step(now.line, watch.seen if now.is_seen else None)
        self.on_step(now.line)
        self._go_on(self.step)
        if self.step == self.first + 1:
            owner = keeper.states.owner
            left = [w.name for w in watch if w.tensor.grad is not None and not owner[w.index]]
            if left:
                self.findings.remark(
                    f"{listed(left)}: has a gradient, but no optimizer moved it in the first step"
                )
        if watch.unsaid:
            self.findings.say_values(watch)
