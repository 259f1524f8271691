"""What an optimizer's update does, from top to bottom: this is the file to read for one step.

    before   settings are read; every gradient is compared with what its patterns sum to; weights
             and states are compared with their marks: was anything changed since the last update?
    …        torch moves the weights
    after    the patterns of the layers that moved are settled: they belong to this step
    close    every optimizer has moved (or one is about to move again): marks, and the line of the
             log is appended. From here on the step counts, and nothing is written into it again.

The optimizers are those that hold a parameter of the model. Where one optimizer's step runs inside
another's (SAM, lookahead), the inner one is the rule; what the outer one adds is an edit.

Why it is hard: each parameter may fare differently. It may be skipped, moved by another optimizer
than its neighbour, given a gradient that an earlier update has used already, or edited by the loop.
Whatever patterns do not explain begins a remainder at a kept state; nothing here computes one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

from dualform.certificate.bounds import sum_bound
from dualform.learning_rules import SeenSettings, Setting, class_path, rule_of
from dualform.recording.findings import Findings
from dualform.recording.gradients import Explained, explain, is_multiple, sharpen, single
from dualform.recording.kept import Keeper
from dualform.recording.line import Line
from dualform.recording.passes import Passes
from dualform.recording.trial import Trial
from dualform.recording.watched import Flags, Watch, Watched

ANCHOR = 64
"""How many steps lie between fingerprints, and between sums where keys alone are kept."""


class Updates:
    """The updates of all optimizers, gathered into steps."""

    def __init__(
        self,
        watch: Watch,
        passes: Passes,
        keeper: Keeper,
        findings: Findings,
        optimizers: list[Optimizer],
        every: int,
    ) -> None:
        self.watch, self.passes, self.keeper, self.findings = watch, passes, keeper, findings
        self.optimizers, self.every, self.step = list(optimizers), every, 0
        self.settings = SeenSettings()
        self.on_step: Callable[[Line], None] = lambda line: None
        self._moved: list[Optimizer] = []
        self._open: list[Optimizer] = []
        self._calls = 0
        self._moving: list[Watched] = []
        self._trial = Trial(watch, findings)
        self._settled_passes: dict[int, int] = {}
        self._kinds: set[type] = set()
        self._is_seen, self._is_known = True, np.zeros(0, bool)
        self._shaken, self._broken = np.zeros((2, len(watch)), bool)
        self._wrappers: set[int] = set()
        self._listed = 0
        self.line = Line.blank(0)

    def go_on(self, step: int) -> None:
        """Begin at a step: 0, or where a resumed memory ends."""
        self.step = step
        self.begin_line()

    @property
    def is_open(self) -> bool:
        """Whether an optimizer's step is running."""
        return bool(self._open)

    def news(self) -> dict[str, Any]:
        """The settings that have come since the last segment."""
        fresh, self._listed = self.settings.settings[self._listed :], len(self.settings.settings)
        return {"settings": [setting.to_json() for setting in fresh]}

    def restore(self, settings: list[Setting]) -> None:
        """Go on with the settings that a resumed memory lists."""
        self.settings, self._listed = SeenSettings(settings), len(settings)

    @property
    def is_under_way(self) -> bool:
        """Whether an optimizer has moved in a step that is not closed yet."""
        return bool(self._moved)

    def begin_line(self) -> None:
        """Begin the log's line of the next step."""
        self.line = Line.blank(len(self.watch))
        self._settled_passes = {}
        self._is_seen = True
        self._is_known = np.zeros(len(self.watch), bool)
        self._record(self.step)

    def _record(self, step: int) -> None:
        """Have passes kept, and summed, if they may belong to a step that is to be recorded."""
        self.passes.is_recording = step % self.every == 0
        keeps_patterns = bool(self.watch.resolved.any())
        self.passes.is_summing = self.passes.is_recording and (keeps_patterns or step % ANCHOR == 0)

    def holds(self, optimizer: Optimizer) -> bool:
        """Whether an optimizer holds a parameter of the model."""
        known = self.watch.by_id
        return any(id(p) in known for group in optimizer.param_groups for p in group["params"])

    # -- before the update ----------------------------------------------------------------------

    def before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        """Look at the gradients: now or, given a closure, after its last backward pass."""
        if self._open and self._open[-1] is optimizer:
            self.break_off()
        for outer in self._open:  # one step runs inside another: the outer one only wraps
            if outer in self.optimizers:
                self.optimizers.remove(outer)
        self._open.append(optimizer)
        self._calls, self._moving = 0, []
        if id(optimizer) in self._wrappers:
            return None
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is None:
            self._calls = 1
            self.look(optimizer)
            return None

        def closure_then_look() -> Any:
            loss = closure()
            self._calls += 1
            self.look(optimizer)
            return loss

        if len(args) > 1:
            return (args[0], closure_then_look, *args[2:]), kwargs
        return args, {**kwargs, "closure": closure_then_look}

    def break_off(self) -> None:
        """An exception ended an update: of what it was moving nothing is known."""
        self._open.clear()
        self._broken[[w.index for w in self._moving]] = True
        self._moving = []
        if not self._moved:
            self.begin_line()

    @np.errstate(over="ignore", invalid="ignore")  # numbers of a run that diverges
    def look(self, optimizer: Optimizer) -> None:
        """Read settings and gradients of everything that this optimizer is about to move."""
        self.passes.finish()
        watch, by_id = self.watch, self.watch.by_id
        places, fresh, moving = [], [], []
        if skips(optimizer):
            self._moving = []
            return
        if self._calls == 1:
            is_over = self._moves_again(optimizer)
            self.find_edits(is_over)
            if is_over:
                self.close_step()
        line = self.line
        is_summing = self.passes.is_summing
        self._is_seen &= is_summing
        for group in optimizer.param_groups:
            place = -1
            for p in group["params"]:
                gradient, w = p.grad, by_id.get(id(p))
                if gradient is None or w is None:
                    continue
                if place < 0:
                    place = self.settings.index(optimizer, group)
                places.append(place)
                moving.append(w)
                fresh.append(remembers_nothing(optimizer.state.get(p)))
                if is_summing:
                    project(gradient, w)
        indices = [w.index for w in moving]
        if self._calls == 1:
            self._follow_owners(optimizer, moving)
        line.moved[indices], line.fresh[indices], line.setting[indices] = True, fresh, places
        self._write_carried(indices)
        if is_summing:
            watch.projections.fetch(watch.seen)
        self._explain(optimizer, indices)
        explained = self.line.explained
        by_examples = [w for w in moving if w.by_examples and explained[w.index]]
        self.keeper.keep_gradients(self.step, by_examples, unscaled(optimizer))
        self._trial.begin(optimizer, moving, [self.settings.settings[i] for i in places])
        self._moving = moving  # unless the audit stopped the update

    def _moves_again(self, optimizer: Optimizer) -> bool:
        """Whether an optimizer is about to move what has moved in this step: then it is over."""
        if not self._moved:
            return False
        moved, by_id = self.line.moved, self.watch.by_id
        held = (by_id.get(id(p)) for group in optimizer.param_groups for p in group["params"])
        return optimizer in self._moved or any(w and moved[w.index] for w in held)

    def _follow_owners(self, optimizer: Optimizer, moving: list[Watched]) -> None:
        """Find who owns the parameters now."""
        owner = self.keeper.states.owner
        replaced = [w for w in moving if owner[w.index] is not optimizer]
        if replaced:
            self._take_over(optimizer, replaced)

    def find_edits(self, is_over: bool) -> bool:
        """Find what was changed since the last update: after this step, if it has moved in it."""
        states = self.keeper.states
        changed = states.changed() | states.exchanged() | self._broken
        self._broken[:] = False
        if changed.any():
            after = (self.line.moved | is_over) & self.is_under_way
            for edited, step in ((changed & ~after, self.step), (changed & after, self.step + 1)):
                if edited.any():
                    self._write_down_edit(edited, step)
        if (states.shaken & ~self._shaken).any():
            names = [self.watch.parameters[i].name for i in np.flatnonzero(states.shaken)]
            why = "something was added between updates and taken away again"
            self.findings.event(self.step, "shaken", why, names)
            self._shaken |= states.shaken
        return bool(changed.any())

    def _write_down_edit(self, changed: Flags, step: int) -> None:
        """Something was changed: put back to a recorded step, or a remainder begins here."""
        edited = [self.watch.parameters[i] for i in np.flatnonzero(changed)]
        back = self.keeper.states.restored()
        if back == step:  # an update was broken off before it began
            return
        if back is not None:
            self.findings.remark(
                f"before step {step} weights and optimizer were put back to what they were "
                f"after {back} updates; what was learned since then is not part of the network"
            )
            names = [w.name for w in self.watch]
            self.findings.event(step, "rewind", "a recorded state was restored", names, to=back)
            return
        names = [w.name for w in edited]
        listed = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        if not any(event["what"] == "edited" for event in self.findings.events):
            self.findings.remark(
                f"{listed}: changed between updates, first before step {step}; what such "
                "changes wrote is part of the remainder"
            )
        self.findings.event(step, "edited", "changed between two updates", names)
        self.keeper.found(edited, step)

    def _take_over(self, optimizer: Optimizer, replaced: list[Watched]) -> None:
        """Another optimizer moves these parameters from now on."""
        earlier = [w for w in replaced if self.keeper.states.owner[w.index] is not None]
        for left in self.keeper.states.take_over(optimizer, replaced):
            if left in self.optimizers:
                self.optimizers.remove(left)
        if optimizer not in self.optimizers:
            self.optimizers.append(optimizer)
        if earlier or any(optimizer.state.get(w.tensor) for w in replaced):
            why = f"from here on another {type(optimizer).__name__} moves it"
            names = [w.name for w in replaced]
            self.findings.event(self.step, "replaced", why, names)
            self.keeper.snapshot(self.step, replaced)

    def _know(self, optimizer: Optimizer, moving: list[Watched]) -> None:
        """Say once of a rule what it cannot be asked for, unless all it moves is values."""
        kind = type(optimizer)
        if kind in self._kinds or not any(self.watch.resolved[w.index] for w in moving):
            return
        self._kinds.add(kind)
        path = class_path(kind)
        if rule_of(path) is None:
            own = path.startswith("torch.optim.")
            given = "" if own else f" (given the class: DualForm(..., optimizer={kind.__name__}))"
            self.findings.remark(
                f"{path} is not known to be linear in its gradients: attend, verify and at "
                f"work{given}; contributions and masks do not reach what it moved"
            )

    def _explain(self, optimizer: Optimizer, indices: list[int]) -> None:
        """Write down κ, and which parameters their patterns explain."""
        watch, line = self.watch, self.line
        moving = np.zeros(len(watch), bool)
        moving[indices] = True
        if not self.passes.is_summing or self.step % self.every:
            watch.unknown[moving] = True
            return
        room = sum_bound(watch.gross)
        found = explain(watch, moving, room)
        for i in np.flatnonzero(single(watch, moving, found.kappa) & found.is_explained):
            found.is_explained[i] = is_multiple(watch.parameters[i], found.kappa[i], room[i])
        sharpen(watch, moving, found)
        self._refuse(moving, found)
        scale = unscaled(optimizer)
        kappa = found.kappa * scale
        resolved = moving & watch.resolved
        line.kappa[resolved] = np.where(found.is_explained, kappa, np.nan)[resolved]
        line.explained[moving] = (found.is_explained & watch.resolved)[moving]
        line.seen[moving] = (watch.fold(watch.signs * watch.seen) * scale)[moving]

    def _refuse(self, moving: Flags, found: Explained) -> None:
        """Stop, or warn, where patterns do not explain a gradient."""
        watch = self.watch
        bad = moving & watch.resolved & ~found.is_explained
        if self.every > 1:  # a gradient may hold one of a step that was not recorded
            bad &= ~watch.unknown
        if self.step % self.every or not bad.any():
            return
        for i in np.flatnonzero(bad):
            w = watch.parameters[i]
            if not any(site.was_used for site in w.sites):
                watch.make_values(w, "its gradient comes from elsewhere than its layer's calls")
                self.findings.warn(
                    f"{w.name!r} got a gradient, though its layer was never called (it is used "
                    "directly, compiled or transformed); it is kept as values, without patterns"
                )
                continue
            size = float(np.linalg.norm(watch.seen[w.place]))
            sentence = self._why(w, float(found.off[i]) / max(size, 1e-300))
            self.findings.stop(sentence)
            self.findings.event(self.step, "unexplained", sentence, [w.name])
            watch.make_values(w, f"its gradient was not explained at step {self.step}")
        self.keeper.due = True

    def _why(self, w: Watched, share: float) -> str:
        """Say what was seen of a gradient that patterns do not explain."""
        if not np.isfinite(share):
            return (
                f"the gradient of {w.name!r}, or its square, is not finite at step {self.step}: the "
                "training diverged"
            )
        if self.watch.unknown[w.index]:
            return (
                f"the gradient of {w.name!r} held something already when recording began, or was "
                f"only partly reset before step {self.step}: call optimizer.zero_grad() before the "
                "first backward pass"
            )
        return (
            f"{share:.2g} of the gradient of {w.name!r} is not explained by its patterns at step "
            f"{self.step}. Common causes: gradients clipped by value or edited, a penalty on "
            "weights in the loss, a weight used outside its layer"
        )

    # -- after the update -----------------------------------------------------------------------

    @np.errstate(over="ignore", invalid="ignore")
    def after(self, optimizer: Optimizer) -> None:
        """The optimizer has moved: its patterns are settled; what `.grad` holds now is carried."""
        self._open.remove(optimizer)
        if self._open:  # it ran inside another's step
            self._wrappers.update(id(outer) for outer in self._open)
        elif id(optimizer) in self._wrappers:
            return  # what it adds to the inner one's update is an edit
        watch, moving = self.watch, self._moving
        self._moving = []
        if self._calls == 0:  # a closure that was never called: nothing is known of the gradients
            moving = self._unseen(optimizer)
        if self._calls > 1:
            for w in (w for w in moving if watch.resolved[w.index]):
                watch.make_values(w, "its optimizer calls its closure several times in a step")
                self.findings.remark(
                    f"{type(optimizer).__name__} calls its closure several times in a step, so "
                    "patterns do not explain it. What it moves is kept as values"
                )
            self.line.explained[[w.index for w in moving]] = False
        if not moving:
            return
        self._settle(moving)
        watch.carried[[w.index for w in moving]] = True
        self._trial.end()
        self._know(optimizer, moving)
        self.line.explained &= watch.resolved
        if self.passes.is_summing:
            moved = np.zeros(len(watch), bool)
            moved[[w.index for w in moving]] = True
            np.copyto(watch.E, watch.seen, where=moved[watch.owner])
            kappa = np.abs(np.nan_to_num(self.line.kappa, nan=1.0))
            watch.gross *= np.where(moved, np.minimum(kappa, 1.0), 1.0)
        self._moved.append(optimizer)
        self.keeper.after_update(self.step + 1, self.line)  # later passes may move buffers
        if all(o in self._moved for o in self.optimizers):
            self.close_step()
        elif not self.passes.is_recording:  # the next pass may be the next step's
            self._record(self.step + 1)

    def _unseen(self, optimizer: Optimizer) -> list[Watched]:
        by_id = self.watch.by_id
        held = [p for g in optimizer.param_groups for p in g["params"] if p.grad is not None]
        found = [by_id[id(p)] for p in held if id(p) in by_id]
        indices = [w.index for w in found]
        self.line.moved[indices] = True
        self.watch.unknown[indices] = True
        self.findings.event(
            self.step,
            "unexplained",
            "its optimizer never called its closure",
            [w.name for w in found],
        )
        return found

    def _settle(self, moving: list[Watched]) -> None:
        """The rows of the layers that moved belong to this step."""
        numbers, watch = self._settled_passes, self.watch
        moved = {w.index for w in moving}
        for site in self.passes.sites.values():
            if not site.pending or moved.isdisjoint(w.index for _, w in site.parameters):
                continue
            if self.step % self.every:
                site.drop_pending()
                watch.unknown[[w.index for _, w in site.parameters]] = True
                continue
            for use in site.pending:
                number = numbers.setdefault(use[1], len(numbers))
                site.uses.append((self.step, number, *use[2:]))
                site.settled += use[4]
            site.pending = []
            indices = [w.index for _, w in site.parameters]
            self._write_carried([i for i in indices if i not in moved])
            watch.carried[indices] = True

    def _write_carried(self, indices: list[int]) -> None:
        """Write down whether gradients still hold what they held at the end of the last step.

        Before their patterns of this step are settled: from then on they hold those.
        """
        fresh = [i for i in indices if not self._is_known[i]]
        self.line.carried[fresh] = self.watch.carried[fresh]
        self._is_known[fresh] = True

    def close_step(self) -> None:
        """Every optimizer has moved: the step counts once its line is in the log."""
        self._moved.clear()
        line, keeper, watch = self.line, self.keeper, self.watch
        np.copyto(line.carried, watch.carried, where=~self._is_known)
        watch.carried |= watch.unknown  # what a gradient holds is carried on, recorded or not
        self.step += 1
        line.mark[:], line.state_mark[:] = keeper.states.remember(self.step)
        keeper.after_step(line, watch.seen if self._is_seen else None)
        self.on_step(line)
        self.begin_line()


def project(gradient: Tensor, w: Watched) -> None:
    """Multiply every row of a gradient with the parameter's direction."""
    if gradient.layout is not torch.strided:
        w.seen.fill_(float("nan"))
    elif w.v is None:
        w.seen.copy_(gradient.reshape(-1))
    else:
        torch.mv(gradient if gradient.dim() == 2 else gradient.flatten(1), w.v, out=w.seen)


def remembers_nothing(state: Any) -> bool:
    """Whether an optimizer remembers nothing of a parameter yet."""
    if state:
        for value in state.values():
            if value is not None:
                return False
    return True


def skips(optimizer: Any) -> bool:
    """Whether a fused optimizer was told by a GradScaler to leave everything as it is."""
    found = getattr(optimizer, "found_inf", None)
    return isinstance(found, Tensor) and bool(found.item())


def unscaled(optimizer: Any) -> float:
    """By how much a fused optimizer multiplies gradients itself: a GradScaler leaves it to it."""
    scale = getattr(optimizer, "grad_scale", None)
    return 1.0 / float(scale) if isinstance(scale, Tensor) else 1.0
