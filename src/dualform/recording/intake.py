"""Patterns on their way in: what must be seen amid the backward pass, and what may wait a little.

Whether a gradient was thrown away since the last pass can only be seen before this one adds to it,
and a tag that does not fit should be an error at the layer where it happens. Everything else, the
copying above all, is left to the clerk (`clerk.py`). Tensors of another device than the CPU are
copied at once: what is computed there is in order only with the thread that computes it.
"""

from __future__ import annotations

from functools import partial

from torch import Tensor
from torch.autograd import Variable

from dualform.errors import RecordingError
from dualform.layers import Layer
from dualform.recording.clerk import Clerk
from dualform.recording.findings import Findings
from dualform.recording.gradients import Gradients
from dualform.recording.opaque import refuse_reentrant
from dualform.recording.parameters import Parameters, Watched
from dualform.recording.rows import Rows
from dualform.recording.sink import Sink
from dualform.recording.steps import Steps
from dualform.recording.tags import Context, Tag, Visit, refuse_untagged

TOGETHER = 3
"""How many jobs wake the clerk at once: each time it may get in the way of the next hook."""

LIGHT = 1 << 23
"""A layer of fewer products is soon passed: the clerk would only wake to get in the way of the next
one's hook."""


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
        self._backwards: dict[int, int] = {}
        self._awaited = -1  # the backward pass that will not return before the clerk is done
        self._latest: Layer | None = None  # whose patterns came
        self._last: set[Layer] = set()  # whose patterns were the last of a backward pass
        self._changed: dict[int, str] = {}  # backward passes whose tensors were, and what to say

    def next_step(self) -> None:
        self._backwards, self._changed = {}, {}
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
        step = self._steps.step
        if backward not in self._backwards:
            self._steps.accountant.make_room()
        tag = self._checked(layer, keys, shape, context, step)
        dropped, anew = self._gradients.notice(layer, backward, step)
        self._findings.dropped += dropped
        microbatch = self._backwards.setdefault(backward, len(self._backwards))
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
            return
        change = self._gradients.change_of_trained(layer, trained)
        if change is not None:
            self._findings.unexplained_gradient(step, trained[0], change)
        for watched in trained:
            watched.seen = step
        visit = Visit(step, microbatch, context.call, shape, tag)
        patterns = layer, keys, error_signals, visit, trained, anew
        on_cpu = keys.is_cpu and error_signals.is_cpu
        if on_cpu and self._clerk.is_for(keys.numel() + error_signals.numel()):
            if self._awaited != backward:
                Variable._execution_engine.queue_callback(partial(self._end, backward))
                self._awaited = backward
            versions = keys._version, error_signals._version
            give = self._clerk.later if self._may_wait(layer, keys) else self._clerk.give
            give(self._keep_later, *patterns, backward, versions)
            self._latest = layer
        else:
            self._clerk.wait()
            self._keep(*patterns)

    def _may_wait(self, layer: Layer, keys: Tensor) -> bool:
        """Whether there will be other jobs to wake the clerk for, soon enough for this one."""
        if layer in self._last:
            return False
        return self._clerk.waiting < TOGETHER or keys.numel() * layer.out_features < LIGHT

    def _checked(
        self, layer: Layer, keys: Tensor, shape: tuple[int, ...], context: Context, step: int
    ) -> Tag | None:
        """The tag of the patterns, if they have one; raises if it is not theirs."""
        tag = context.tag
        if context.inside:
            refuse_reentrant(layer)
        if tag is None or (layer.kind == "embedding" and not tag.is_of(keys, shape)):
            return None
        if context.stale:
            refuse_untagged(layer.name, shape, step)
        tag.check(layer.name, shape)
        return tag

    def _keep(
        self,
        layer: Layer,
        keys: Tensor,
        error_signals: Tensor,
        visit: Visit,
        trained: list[Watched],
        anew: list[Watched],
        *,
        later: bool = True,
    ) -> None:
        """Copy the patterns, and tell the audits of them."""
        forget(anew, visit.step)
        kept = self._sink.append(layer, keys, error_signals, visit)
        if audits := {w.name: w.audit for w in trained if w.resolved}:
            rows = Rows(visit.step, *kept, layer)
            weight, bias = audits.get(layer.weight), audits.get(layer.bias or "")
            self._parameters.audits.see(weight, bias, keys, error_signals, rows, later=later)

    def _keep_later(
        self,
        layer: Layer,
        keys: Tensor,
        error_signals: Tensor,
        visit: Visit,
        trained: list[Watched],
        anew: list[Watched],
        backward: int,
        versions: tuple[int, int],
    ) -> None:
        """The same on the clerk's thread: were the tensors left alone meanwhile?"""
        self._keep(layer, keys, error_signals, visit, trained, anew, later=False)
        if versions != (keys._version, error_signals._version):
            self._changed[backward] = (
                f"layer {layer.name!r}: its input or its error signal was changed in place during "
                f"the backward pass of step {visit.step}, while it was being copied (by a hook?); "
                "patterns are read until backward() returns: change tensors after it"
            )

    def _end(self, backward: int) -> None:
        """A backward pass is about to return.

        One that was broken off by an exception never gets here: its tensors are the loop's again
        at once. If its gradients are used after all, the audit looks at what was copied.
        """
        self._clerk.wait()
        if self._latest is not None:
            self._last.add(self._latest)
        message = self._changed.pop(backward, None)
        if message is not None:
            raise RecordingError(message)


def forget(anew: list[Watched], step: int) -> None:
    """The gradients of these begin anew: what was seen before is not in them."""
    for watched in anew:
        watched.audit.forget(step)
