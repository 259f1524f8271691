"""One step at a time: what the optimizers are about to do, what they did, and when a step is over.

Just before an optimizer moves, every gradient it will use is compared with the patterns
(`explaining.py`); just after, the learning rule predicts where the weights are now, for the next
comparison. A step is over when every optimizer has moved, when a new backward pass begins after one
has, or when one moves twice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from torch.optim import Optimizer

from dualform.errors import RecordingError
from dualform.learning_rules import (
    ParameterLog,
    adaptive_rule_of,
    settings_of,
    transitions,
)
from dualform.recording.accountant import Accountant, Update
from dualform.recording.accounts import StepAccounts
from dualform.recording.clerk import Clerk
from dualform.recording.complete_keys import CompleteKeys
from dualform.recording.edits import Edits
from dualform.recording.explaining import Move, Reading, explain
from dualform.recording.findings import Findings
from dualform.recording.learned import Learned, ReadingOff
from dualform.recording.lending import places_of
from dualform.recording.optimizer_state import CANCELLED, OptimizerStates, lost_in_rounding
from dualform.recording.parameters import Parameters, Watched, is_reset, parameters_of, version_of
from dualform.recording.routine import is_fresh
from dualform.recording.routines import Routines
from dualform.recording.sink import StepRecord
from dualform.recording.sums import Accumulated
from dualform.recording.unexplained import Unexplained, quietly, refuse_nowhere
from dualform.recording.whereabouts import Transition, as_matrix, largest_row

CHANGED = (
    "its gradient was changed in place after it was read, before the update was made (by a hook on "
    "optimizer.step?), so what moved the weights is not known. Change it before step() is called"
)


class Steps:
    """The step under way, for all optimizers together.

    `findings` hears of a gradient that is not explained before the optimizer has moved, of weights
    after it has; it may raise, and the step is then not taken as recorded.
    """

    def __init__(
        self,
        parameters: Parameters,
        optimizers: Sequence[Optimizer],
        path: Path,
        *,
        step_budget: int,
        every: int,
        known_rules: bool,
        without_patterns: Callable[[Watched], None],
        findings: Findings,
        clerk: Clerk,
    ) -> None:
        self.step = 0
        self.some_are_untrained = True
        self.stepped: list[Optimizer] = []
        self._parameters = parameters
        self._optimizers = list(optimizers)
        self._reading_off = ReadingOff(path, self._optimizers)
        self._every = every
        self._findings = findings
        self.complete_keys = CompleteKeys(every, findings)
        self.clerk = clerk
        self.accountant = Accountant(self._start_again)
        self.accounts = StepAccounts(step_budget, parameters.audits, self.accountant, self._learned)
        self.states: OptimizerStates | None = None
        self._edits = Edits(optimizers, parameters if known_rules else ())
        self._known_rules = known_rules
        self._without_patterns = without_patterns
        self._record = StepRecord.blank(len(parameters))
        self._stored: dict[str, Tensor] = {}
        self._states: dict[str, Tensor] = {}
        self._pending: Reading | None = None
        self._transitions: dict[tuple[Any, ...], Transition] = {}
        self._routines = Routines(
            parameters.audits, self.accountant, clerk, self._edits, self._transition
        )

    @property
    def is_over(self) -> bool:
        """Whether every optimizer has moved in this step."""
        return len(self.stepped) == len(self._optimizers)

    def has_moved(self, optimizer: Optimizer) -> bool:
        """Whether this step already holds an update of one of the optimizer's parameters."""
        applied = self._record.applied
        return bool(self.stepped) and any(
            applied[self._parameters.of(p).index] for p in parameters_of(optimizer)
        )

    def moved(self, watched: Watched) -> bool:
        return self._record.applied[watched.index]

    def given(self) -> set[Watched]:
        """The parameters that the optimizers have now."""
        return {self._parameters.of(p) for o in self._optimizers for p in parameters_of(o)}

    @property
    def all_moved(self) -> bool:
        """Whether every parameter of the model has moved in this step."""
        return all(self._record.applied)

    @property
    def is_recorded(self) -> bool:
        """Whether the patterns of this step are kept: of every step, or of every k-th."""
        return self.step % self._every == 0

    def needs_patterns(self, watched: Watched) -> bool:
        """Whether the parameter moved in this step, by patterns that are to be kept."""
        i = watched.index
        return self._record.applied[i] and not self._record.unrecorded[i]

    # -- before ---------------------------------------------------------------------------------

    def read(self, optimizer: Optimizer) -> None:
        """Note what the optimizer is about to do, and have the gradients it will use explained.

        The clerk is done with everything.
        """
        self._pending = None
        if self._parameters.audits.are_behind:
            self._parameters.audits.catch_up()
        if bool(getattr(optimizer, "found_inf", 0)):  # a fused optimizer told to skip this one
            return
        scale = getattr(optimizer, "grad_scale", None)  # ... or to unscale by itself
        unscale = 1.0 if scale is None else 1.0 / float(scale)
        if unscale == 1.0 and not self._looks_closely:
            self._pending = self._routines.read(optimizer, self.step)
            if self._pending is not None:
                return
        self._pending = self._read_in_full(optimizer, unscale)

    @property
    def _looks_closely(self) -> bool:
        """Whether anything is to be looked at that is not in every step."""
        follows = self.accounts.pass_over and self.complete_keys.follows(self.step)
        return bool(self.accounts.stated) and (follows or self.complete_keys.asks(self.step))

    @property
    def begins_round(self) -> bool:
        """Whether gradients of keys alone are compared with their patterns in this step or the
        next: with optimizers in turns, that begins while this one is still open."""
        return self.complete_keys.is_due(self.step) or self.complete_keys.is_due(self.step + 1)

    @property
    def needs_fingerprint(self) -> bool:
        """Whether the weights of keys alone are about to be followed, or were, up to here."""
        return self.accounts.pass_over and self.complete_keys.takes_fingerprint(self.step)

    @quietly()
    def _read_in_full(self, optimizer: Optimizer, unscale: float) -> Reading:
        """Parameter by parameter."""
        self._routines.settle()
        if self.accountant.lends:
            self.accountant.look_again(places_of(parameters_of(optimizer)))
        reading = Reading(optimizer, unscale)
        adaptive = adaptive_rule_of(optimizer) if self._known_rules else None
        for group in optimizer.param_groups:
            reading.settings.append(settings_of(optimizer, group) if self._known_rules else ())
            for parameter in group["params"]:
                watched = self._parameters.of(parameter)
                if watched.rule is None and adaptive is not None:
                    watched.join(adaptive)
                if parameter.grad is not None:
                    self._read_parameter(reading, watched, parameter.grad)
        explain(reading, self._parameters.audits, self.step, self._findings)
        self.some_are_untrained = any(w.coverage == "untrained" for w in self._parameters)
        for move in reading.moves if self._known_rules else ():
            changed = self._edits.found(optimizer, move.watched, self.step)
            if changed is not None:
                self._findings.changed_by_hand(self.step, move.watched, changed)
        self._findings.put_back(self._edits.put_back)
        if self.states is not None:
            self.states.before(optimizer, reading.moves, reading.settings, self.step)
        return reading

    def _read_parameter(self, reading: Reading, watched: Watched, gradient: Tensor) -> None:
        if gradient.is_sparse:
            raise RecordingError(
                f"parameter {watched.name!r} has a sparse gradient, which cannot be accounted for; "
                "use a dense one (nn.Embedding(..., sparse=False))"
            )
        if watched.parameter.dtype != watched.dtype or watched.parameter.shape != watched.shape:
            raise RecordingError(
                f"parameter {watched.name!r} was {watched.dtype} {list(watched.shape)} when "
                f"recording began and is now {watched.parameter.dtype} "
                f"{list(watched.parameter.shape)}; end the recording, then record into a new memory"
            )
        is_first = watched.coverage == "untrained"
        if is_first:
            self._decide_coverage(watched, gradient)
        if watched.keys_alone and watched.coverage != "patterns":
            if self._misses_patterns(watched, gradient):
                self._findings.incomplete_keys(self.step, watched, self._passed_by(watched))
            else:
                self.complete_keys.check(watched, gradient, self.step, is_first=is_first)
        state = reading.optimizer.state.get(watched.parameter)
        fresh = not state if watched.rule is not None else is_fresh(state)
        transition = None
        if self._known_rules and watched.rule is None:
            transition = self._transition(reading.settings[-1], fresh, reading.unscale)
        group = len(reading.settings) - 1
        move = Move(watched, reading.unscale, self.step, fresh, group, transition)
        move.version = watched.parameter._version
        reading.moves.append(move)
        if watched.coverage == "patterns":
            self._read_resolved(reading, move, gradient)
        elif self._known_rules:
            move.account = self.accounts.account(watched, self.step)
            if watched.name not in self.accounts.stated:
                move.gradient = gradient
            elif watched.rule is None:
                follows = self.complete_keys.follows(self.step)
                move.is_followed = follows and watched.audit.is_followed
                if is_first and not follows:  # it was to stay as it was until now
                    self.compare(watched, watched.audit.project(watched.parameter))
        if move.account is None:
            if move.gradient is not None:
                move.gradient = gradient.detach().to("cpu", copy=True)
            if move.is_followed and (watched.coverage != "patterns" or move.unrecorded):
                watched.audit.look_at(gradient)
        elif move.gradient is not None:
            changing = reading.unscale != 1.0  # by an optimizer that unscales by itself
            move.original = gradient, version_of(gradient)
            move.gradient = self.accountant.read(move.account, gradient, changing=changing)

    def _read_resolved(self, reading: Reading, move: Move, gradient: Tensor) -> None:
        """A parameter that has patterns, in this step or in others.

        Where not every step is recorded, a gradient counts as recorded only if all of it came in
        this very step: one carried over steps may hold patterns that were not kept.
        """
        watched = move.watched
        move.first = watched.audit.first
        if self._every > 1:
            move.unrecorded = not self.is_recorded or move.first != self.step
            if self._known_rules:
                move.account = self.accounts.unrecorded_account(watched)
        if move.unrecorded:
            move.first, move.kappa, move.gradient = self.step, 0.0, gradient
        else:
            reading.resolved.append((move, gradient, version_of(gradient)))
            if self._misses_patterns(watched, gradient):
                reason = self._passed_by(watched)
                self._findings.unexplained_gradient(self.step, watched, reason)

    def _misses_patterns(self, watched: Watched, gradient: Tensor) -> bool:
        """Whether a gradient is carried over from before its layer had patterns without it."""
        first = watched.audit.first
        return first < self.step and first <= watched.passed_by and not is_reset(gradient)

    def _passed_by(self, watched: Watched) -> str:
        return (
            f"its gradient was carried over from step {watched.audit.first}, and it was frozen at "
            f"step {watched.passed_by}, or no optimizer had it, where its layer had patterns: they "
            "are not in it, or were not kept. Freeze, unfreeze and give parameters to an optimizer "
            "right after an update, with gradients reset."
        )

    def _decide_coverage(self, watched: Watched, gradient: Tensor) -> None:
        """A parameter's first gradient: are there patterns that explain it? Zero needs none."""
        resolvable = watched.layers and watched.resolved and not watched.by_steps
        if watched.keys_alone and watched.backward == -1 and not is_reset(gradient):
            self._without_patterns(watched)
            watched.by_steps = True
        if resolvable and (watched.audit.uses or is_reset(gradient)):
            watched.coverage = "steps" if lost_in_rounding(watched) else "patterns"
            if watched.coverage == "steps":
                self._findings.remark(CANCELLED.format(watched.name))
            return
        watched.coverage = "steps"
        if resolvable:
            self._without_patterns(watched)

    def _transition(self, settings: tuple[float, ...], fresh: bool, unscale: float) -> Transition:
        key = (settings, fresh, unscale)
        if key not in self._transitions:
            if len(self._transitions) > 256:
                self._transitions.clear()
            matrix, vector = transitions(ParameterLog.single(settings, fresh=fresh, kappa=unscale))
            ww, wm, mw, mm = matrix[0].ravel().tolist()
            nw, nm = vector[0].tolist()
            self._transitions[key] = (ww, wm, mw, mm, nw, nm)
        return self._transitions[key]

    # -- after ----------------------------------------------------------------------------------

    def apply(self) -> None:
        """The optimizer has moved: write it down, and predict where the weights are now."""
        reading, self._pending = self._pending, None
        if reading is None:
            return
        if reading.routine is not None:
            offset = self._note_settings(reading)
            reading.routine.write_down(self._record, self.step, offset)
            reading.routine.take(self._record)
            self.stepped.append(reading.optimizer)
            return
        for watched in reading.changed:
            self._findings.unexplained_gradient(self.step, watched, CHANGED)
        self._take(reading, reading.moves)

    @quietly()
    def apply_interrupted(self) -> None:
        """Training ended inside an optimizer's step: take what it did, parameter by parameter."""
        reading, self._pending = self._pending, None
        if reading is None or not self._known_rules:
            return
        self.clerk.wait()
        self.accountant.catch_up()
        self._routines.settle()
        if reading.routine is not None:
            reading.moves, reading.routine = reading.routine.moves(self.step), None
        for move in reading.moves:
            if move.account is not None and move.gradient is not None:
                move.watched.audit.look_at(move.gradient)
        passed = [m for m in reading.moves if not m.is_followed]
        # fused optimizers do not count, and move all of theirs at once
        fused = any(g.get("fused") for g in reading.optimizer.param_groups) and any(
            self._edits.has_other_entries(m.watched) for m in passed
        )
        moves = [m for m in reading.moves if self._was_made(m) or (fused and not m.is_followed)]
        if moves:
            self._take(reading, moves)
        self._edits.note(reading.optimizer, passed, self.step)  # buffers may have been begun with

    def _was_made(self, move: Move) -> bool:
        """Whether an update that was broken off has come to this parameter."""
        parameter, audit = move.watched.parameter, move.watched.audit
        if move.transition is None or not move.is_followed:
            return parameter._version != move.version
        return audit.has_moved(parameter, move.transition)

    def _note_settings(self, reading: Reading) -> int:
        """Write down the settings of all groups; how many other optimizers had before."""
        offset = len(self._record.hyperparameters)
        self._record.hyperparameters.extend(reading.settings)
        return offset

    @quietly()
    def _take(self, reading: Reading, moves: Sequence[Move]) -> None:
        """The moves that were made of those that were read in full."""
        record, offset = self._record, self._note_settings(reading)
        applied, fresh, kappa = record.applied, record.fresh, record.kappa
        first, group, unrecorded = record.first, record.group, record.unrecorded
        for move in moves:
            i = move.watched.index
            applied[i], fresh[i], kappa[i] = True, move.fresh, move.kappa
            first[i], group[i], unrecorded[i] = move.first, offset + move.group, move.unrecorded
        if self._known_rules:
            self._edits.note(reading.optimizer, moves, self.step)
        if self.states is not None:
            self._states |= self.states.after(
                moves, reading.settings, reading.unscale, self._unexplained_update
            )
        if self._known_rules:
            self._account_for(reading, moves)
        for move in moves:
            if not move.is_followed and move.transition is not None:
                record.projection[move.watched.index] = np.nan
                move.watched.audit.pass_over(move.transition)
        # the accountant looks at the gradients that its accounts count
        followed = [m for m in moves if m.is_followed and (m.account is None or m.gradient is None)]
        if followed and self.clerk.is_for(16 * self._parameters.audits.rows):
            self.clerk.later(self._follow, record, followed, reading.unscale)
        elif followed:
            self._follow(record, followed, reading.unscale)
        for move in moves:
            if move.account is None and move.gradient is not None:
                self._stored |= self.accounts.keep(
                    self.step, move.watched, move.gradient, self._learned_now
                )
        self.stepped.append(reading.optimizer)
        if self._known_rules and self.states is None:
            self._routines.learn(reading)

    def _account_for(self, reading: Reading, moves: Sequence[Move]) -> None:
        """Hand over what accounts are to count; keep the gradients of the others, if possible."""
        updates = [
            Update(
                move.account,
                move.transition,
                move.gradient,
                move.original,
                move.watched.audit.projected.copy() if move.gradient is None else None,
            )
            for move in moves
            if move.account is not None and move.transition is not None
        ]
        self.accountant.hand_over(updates, self._record, reading.unscale)

    def _follow(self, record: StepRecord, moves: Sequence[Move], unscale: float) -> None:
        """Write down what the gradients are along the probes, and where that puts the weights."""
        sketched = self._parameters.audits.sketched()
        for move in moves:
            record.projection[move.watched.index] = sketched[move.watched.index] * unscale
        self._advance([move for move in moves if move.account is None])

    def _advance(self, moves: Sequence[Move]) -> None:
        """Predict where the weights are now; at once where all took the same step."""
        audits = self._parameters.audits
        transition = moves[0].transition if moves else None
        if (
            transition is not None
            and len(moves) == len(self._parameters) - len(self.accountant.accounts)
            and audits.are_alike
            and all(move.transition == transition for move in moves)
        ):
            audits.advance(transition)
            return
        for move in moves:
            if move.transition is not None:
                move.watched.audit.advance(move.transition)

    def compare(
        self,
        watched: Watched,
        fingerprint: NDArray[np.float64],
        momentum: NDArray[np.float64] | None = None,
    ) -> None:
        """Compare a parameter, given its fingerprint, with where the learning rule puts it.

        Of keys alone, if they were not followed: begin to, where that is due. `momentum`: m v.
        """
        if not self._known_rules or watched.spoiled or watched.rule is not None:
            return
        audit = watched.audit
        try:
            if audit.is_followed:
                audit.compare(watched.parameter, fingerprint)
                return
            refuse_nowhere(fingerprint)
            if momentum is not None and self.complete_keys.is_due(self.step):
                audit.take_up(watched.parameter, fingerprint, momentum)
        except Unexplained as reason:
            watched.spoiled = True
            self._findings.unexplained_weights(self.step, watched, str(reason))

    def look_for_edits(self) -> None:
        """Before weights are written down: are they, where counters tell, as updates left them?"""
        self._routines.settle()
        for watched, changed in self._edits.found_now() if self._known_rules else ():
            if not watched.spoiled:
                self._unexplained_update(watched, changed)
        self._findings.put_back(self._edits.put_back)

    def _unexplained_update(self, watched: Watched, reason: str) -> None:
        watched.spoiled = True
        self._findings.unexplained_weights(self.step, watched, reason)

    def _learned(self, watched: Watched) -> Learned:
        """What training has added to a parameter so far, read off its weights."""
        self.clerk.wait()
        self._routines.settle()
        return self._reading_off.weights(watched)

    def _learned_now(self, watched: Watched) -> Accumulated:
        """What training has added to a parameter and its momentum buffer so far."""
        self.clerk.wait()
        self._routines.settle()
        return self._reading_off.both(watched)

    def _start_again(self, watched: Watched) -> Accumulated:
        """A gradient was lost to the accounts: go on from weights and buffer as they are."""
        self._findings.remark(
            f"step {self.step}, parameter {watched.name!r}: a gradient was changed in place after "
            "the update, unlike the ones before, or used twice; what was learned up to here is "
            "taken from the weights, and whether anything else has changed them since they were "
            "last compared is not known"
        )
        audit, weights = watched.audit, watched.parameter.detach()
        audit.start_from(audit.project(weights), largest_row(as_matrix(weights)))
        np.copyto(audit.momentum, audit.project(self._reading_off.buffer(watched)))
        return self._learned_now(watched)

    def close(self) -> tuple[StepRecord, dict[str, Tensor], dict[str, Tensor]]:
        """The step is over: its log, and the gradients and optimizer states kept with it."""
        done = self._record, self._stored, self._states
        self._record, self._stored = StepRecord.blank(len(self._parameters)), {}
        self._states = {}
        self.stepped = []
        self.step += 1
        return done
