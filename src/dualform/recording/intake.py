"""Patterns on their way in: what must be seen amid the backward pass, and what may wait a little.

Whether a gradient was thrown away since the last pass can only be seen before this one adds to it.
In the usual loop one look at all parameters tells, as the pass begins: none has a gradient. Then
everything else, the copying above all, is left to the clerk (`clerk.py`), and what it finds wrong
(a tag that does not fit) is raised before `backward()` returns. Tensors of another device than the
CPU are copied at once: what is computed there is in order only with the thread that computes it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import repeat
from operator import attrgetter, is_
from typing import Any, NamedTuple

from torch import Tensor
from torch.autograd import Variable

from dualform.errors import RecordingError
from dualform.layers import Layer
from dualform.recording.clerk import Clerk
from dualform.recording.findings import Findings
from dualform.recording.gradients import Gradients
from dualform.recording.lending import places_of
from dualform.recording.opaque import refuse_reentrant
from dualform.recording.parameters import Parameters, Watched
from dualform.recording.rows import Rows
from dualform.recording.sink import Sink
from dualform.recording.steps import Steps
from dualform.recording.tags import Context, Tag, Visit, refuse_untagged

gradient_in, is_trained = attrgetter("grad"), attrgetter("requires_grad")

TOGETHER = 3
"""How many jobs wake the clerk at once: each time it may get in the way of the next hook."""

FIRST, ZEROS = 256, b"\x00\x80"
"""How many bytes are looked at first; the bytes of zeros, those with a sign included."""

LIGHT = 1 << 23
"""A layer of fewer products is soon passed: the clerk would only wake to get in the way of the next
one's hook."""


@dataclass(eq=False, slots=True)
class Pass:
    """A backward pass: torch's number of it, the step it is part of, and which pass of that.

    It `is_simple` where all is known before it begins: no parameter has a gradient, every one will
    get one, and nothing has come in this step that could have been thrown away since. It
    `is_awaited` if it will not return before the clerk is done.
    """

    number: int
    step: int
    microbatch: int
    is_simple: bool
    is_awaited: bool = False


class Noted(NamedTuple):
    """What is known of patterns before they are copied, and whose gradients begin with them."""

    visit: Visit
    trained: list[Watched]
    anew: list[Watched]


class Intake:
    """Takes the patterns of one use of a layer after the other."""

    def __init__(
        self,
        parameters: Parameters,
        steps: Steps,
        sink: Sink,
        findings: Findings,
        clerk: Clerk,
    ) -> None:
        self._parameters, self._steps, self._sink = parameters, steps, sink
        self._findings, self._clerk = findings, clerk
        self._gradients = Gradients(parameters, sink, clerk)
        self._all = [watched.parameter for watched in parameters]
        self._passes: dict[int, Pass] = {}
        self._pass: Pass | None = None  # that the last patterns came from
        self._latest: Layer | None = None  # whose patterns came
        self._last: set[Layer] = set()  # whose patterns were the last of a backward pass
        self._changed: dict[tuple[int, Layer], str] = {}  # tensors that were amid a pass
        self.had_many = False
        """Whether there ever was a step of several backward passes: what was seen of one is asked
        for in the next, to tell a gradient of zeros from one that was thrown away."""

    def next_step(self) -> None:
        self._passes, self._pass, self._changed = {}, None, {}
        self._gradients.next_step()

    def take(
        self,
        layer: Layer,
        keys: Tensor,
        error_signals: Tensor,
        shape: tuple[int, ...],
        context: Context,
        backward: int,
    ) -> None:
        """Patterns that the backward pass now running is about to add to a layer's gradients."""
        current = self._pass
        if current is None or current.number != backward:
            current = self._begin(backward)
        for_clerk = (
            keys.is_cpu
            and error_signals.is_cpu
            and self._clerk.is_for(keys.numel() + error_signals.numel())
        )
        if for_clerk and current.is_simple:
            self._send(self._note_and_keep, layer, keys, error_signals, current, shape, context)
            return
        if not for_clerk:
            self._clerk.wait()
            keys = keys.detach()
        noted = self._note(layer, keys, current, shape, context)
        if noted is not None and for_clerk:
            self._send(self._keep_later, layer, keys, error_signals, current, noted)
        elif noted is not None:
            self._keep(layer, keys, error_signals, noted)

    def _begin(self, backward: int) -> Pass:
        """The backward pass that patterns come from now: another than the last ones did."""
        found = self._passes.get(backward)
        if found is None:
            is_clear = all(map(is_, map(gradient_in, self._all), repeat(None)))
            self._steps.accountant.make_room(() if is_clear else places_of(self._all))
            number, is_first = len(self._passes), not self._passes
            self.had_many = self.had_many or not is_first
            self._clerk.wait(even_for_later=not is_first)
            is_simple = (
                is_first
                and is_clear
                and self._steps.is_recorded
                and all(map(is_trained, self._all))
            )
            if is_first and is_clear:
                self._steps.complete_keys.clear_at = self._steps.step
            found = Pass(backward, self._steps.step, number, is_simple)
            self._passes[backward] = found
        else:  # another one ran inside of it
            self._clerk.wait()
            found.is_simple = False
        if self._parameters.audits.are_behind:
            self._parameters.audits.catch_up()  # with what earlier passes brought
        self._pass = found
        return found

    def _send(
        self,
        work: Callable[..., None],
        layer: Layer,
        keys: Tensor,
        error_signals: Tensor,
        current: Pass,
        *noted: Any,
    ) -> None:
        """Have the clerk do it, before the backward pass returns."""
        if not current.is_awaited:
            Variable._execution_engine.queue_callback(partial(self._end, current.number))
            current.is_awaited = True
        versions = keys._version, error_signals._version
        give = self._clerk.later if self._may_wait(layer, keys) else self._clerk.give
        give(work, layer, keys, error_signals, versions, current, *noted)
        self._latest = layer

    def _note(
        self, layer: Layer, keys: Tensor, current: Pass, shape: tuple[int, ...], context: Context
    ) -> Noted | None:
        """Look at the layer's gradients before the pass adds to them, and note what comes.

        None if the step's patterns are not kept.
        """
        step = current.step
        tag = self._checked(layer, keys, shape, context, step)
        dropped, anew = self._gradients.notice(layer, current.number, step)
        if dropped:
            self._findings.dropped += dropped
            held = self._sink.patterns_of_step()
            self._changed = {k: v for k, v in self._changed.items() if k[1] in held}
        trained = []
        for watched in self._parameters.of_layer(layer):
            if watched.parameter.requires_grad:
                trained.append(watched)
            else:
                watched.passed_by = step
        if not self._steps.is_recorded:
            self._clerk.wait()
            forget(anew, step)
            for watched in trained:
                watched.audit.uses += 1
            return None
        change = self._gradients.change_of_trained(layer, trained)
        if change is not None:
            self._findings.unexplained_gradient(step, trained[0], change)
        for watched in trained:
            watched.seen = step
        return Noted(Visit(step, current.microbatch, context[2], shape, tag), trained, anew)

    def _note_and_keep(
        self,
        layer: Layer,
        keys: Tensor,
        error_signals: Tensor,
        versions: tuple[int, int],
        current: Pass,
        shape: tuple[int, ...],
        context: Context,
    ) -> None:
        """Both on the clerk's thread, of a simple pass: there is nothing to look at."""
        step, number = current.step, current.number
        tag = self._checked(layer, keys, shape, context, step)
        trained = list(self._parameters.of_layer(layer))
        anew = [watched for watched in trained if watched.backward != number]
        for watched in trained:
            watched.backward, watched.seen = number, step
        self._gradients.change_of_trained(layer, trained)
        visit = Visit(step, current.microbatch, context[2], shape, tag)
        noted = Noted(visit, trained, anew)
        self._keep_later(layer, keys, error_signals, versions, current, noted)

    def _may_wait(self, layer: Layer, keys: Tensor) -> bool:
        """Whether there will be other jobs to wake the clerk for, soon enough for this one."""
        if layer in self._last:
            return False
        return self._clerk.waiting < TOGETHER or keys.numel() * layer.out_features < LIGHT

    def _checked(
        self, layer: Layer, keys: Tensor, shape: tuple[int, ...], context: Context, step: int
    ) -> Tag | None:
        """The tag of the patterns, if they have one; raises if it is not theirs."""
        tag, is_stale, _, is_inside = context
        if is_inside:
            refuse_reentrant(layer)
        if tag is None or (layer.kind == "embedding" and not tag.is_of(keys, shape)):
            return None
        if is_stale:
            refuse_untagged(layer.name, shape, step)
        tag.check(layer.name, shape)
        return tag

    def _keep(
        self,
        layer: Layer,
        keys: Tensor,
        error_signals: Tensor,
        noted: Noted,
        *,
        later: bool = True,
    ) -> None:
        """Copy the patterns, and tell the audits of them."""
        visit, trained, anew = noted
        forget(anew, visit.step)
        kept = self._sink.append(layer, keys, error_signals, visit)
        silent = [w for w in trained if w.is_silent and not w.resolved]
        if silent and not writes_nothing(layer, keys, error_signals):
            for watched in silent:
                watched.is_silent = False
        # error signals that are not kept can be looked at now or never
        is_due = self._steps.complete_keys.is_due(visit.step)
        asked = (w for w in trained if w.resolved or is_due or w.coverage == "untrained")
        if audits := {w.name: w.audit for w in asked}:
            later = later and all(w.resolved for w in trained)
            rows = Rows(visit.step, *kept, layer)
            weight, bias = audits.get(layer.weight), audits.get(layer.bias or "")
            self._parameters.audits.see(weight, bias, keys, error_signals, rows, later=later)

    def _keep_later(
        self,
        layer: Layer,
        keys: Tensor,
        error_signals: Tensor,
        versions: tuple[int, int],
        current: Pass,
        noted: Noted,
    ) -> None:
        """The same on the clerk's thread: were the tensors left alone meanwhile?"""
        self._keep(layer, keys, error_signals, noted, later=False)
        if versions != (keys._version, error_signals._version):
            self._changed[current.number, layer] = (
                f"layer {layer.name!r}: its input or its error signal was changed in place during "
                f"the backward pass of step {current.step}, while it was being copied (by a hook?)"
                "; patterns are read until backward() returns: change tensors after it"
            )

    def _end(self, backward: int) -> None:
        """A backward pass is about to return.

        One that was broken off by an exception never gets here: its tensors are the loop's again
        at once. If its gradients are used after all, `refuse_changed` has the last word.
        """
        self._clerk.wait()
        if self._latest is not None:
            self._last.add(self._latest)
        for number, layer in self._changed:
            if number == backward:
                raise RecordingError(self._changed.pop((number, layer)))

    def refuse_changed(self) -> None:
        """Raise if what an optimizer is about to use has patterns that were changed.

        They are those of a pass that was broken off, and whose gradients were not thrown away.
        """
        for message in self._changed.values():
            raise RecordingError(message)


def forget(anew: list[Watched], step: int) -> None:
    """The gradients of these begin anew: what was seen before is not in them."""
    for watched in anew:
        watched.forget(step)


def writes_nothing(layer: Layer, keys: Tensor, error_signals: Tensor) -> bool:
    """Whether all keys are zero, or all error signals. (A token is a name, not a number.)"""
    return is_zero(error_signals) or (layer.kind != "embedding" and is_zero(keys))


def is_zero(rows: Tensor) -> bool:
    """Whether there are only zeros; the first bytes nearly always tell, and sooner than torch."""
    if rows.is_cpu and rows.is_contiguous():
        first = ctypes.string_at(rows.data_ptr(), min(FIRST, rows.numel() * rows.element_size()))
        if first.strip(ZEROS):
            return False
    return not bool(rows[:1].any()) and not bool(rows.any())
