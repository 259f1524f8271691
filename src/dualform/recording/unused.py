"""Patterns that no update was made by, and gradients whose patterns are not here.

What a backward pass brings is only written into weights if an optimizer uses the gradient. In loops
of several optimizers it may be used some steps later, or never: what the pass for a GAN's generator
adds to its discriminator is thrown away before the next one. As long as the gradient is there, its
patterns are kept; once it is gone, or recording ends, they are taken back as far as they were not
committed. So a gradient that outlives a recording has no patterns in the one that resumes it.
"""

from __future__ import annotations

from torch.optim import Optimizer

from dualform.layers import Layer
from dualform.recording.capture import running_pass
from dualform.recording.clerk import Clerk
from dualform.recording.findings import Findings
from dualform.recording.parameters import Parameters, Watched, is_reset, parameters_of
from dualform.recording.sink import Sink
from dualform.recording.steps import Steps


class Unused:
    """Takes back what no update will ever be made by."""

    def __init__(
        self,
        parameters: Parameters,
        steps: Steps,
        sink: Sink,
        findings: Findings,
        clerk: Clerk,
        every: int,
    ) -> None:
        self._parameters, self._steps, self._sink = parameters, steps, sink
        self._findings, self._clerk, self._every = findings, clerk, every
        self._began = steps.step
        self._left_over = [w for w in parameters if self._began and w.had_gradient and w.keys_alone]

    def drop(self) -> None:
        """A step is over: take back the patterns of the layers it has passed by."""
        given = self._steps.given()
        for layer in self._sink.patterns_of_step():
            self._drop(layer, given)

    def _drop(self, layer: Layer, given: set[Watched]) -> None:
        """Take back a layer's patterns of this step if no update will ever be made by them.

        One may be, by a gradient that is carried over, or that this very backward pass is still
        computing: an optimizer may move amid it.
        """
        parts = self._parameters.of_layer(layer)
        if not any(map(self._steps.moved, parts)):
            running = running_pass()
            if running != -1 and any(part.backward == running for part in parts):
                return
            self._clerk.wait()
            if given.isdisjoint(parts):
                self._sink.rewind(layer)
                for part in parts:
                    part.passed_by = self._steps.step
                return
            if all(is_reset(p.parameter.grad) or not p.audit.is_finite for p in parts):
                self._findings.dropped += self._sink.rewind(layer) + self._take_back(layer)
                return
        if self._every > 1 and not any(map(self._steps.needs_patterns, parts)):
            self._sink.rewind(layer)  # of a gradient that will count as unrecorded

    def drop_at_the_end(self) -> None:
        """Recording is over: a gradient that is still there will be used by nothing recorded."""
        for layer in self._sink.patterns_of_step():
            self._sink.rewind(layer)  # of a step that was never completed
        for layer in self._sink.layers():
            self._findings.dropped += self._take_back(layer)

    def _take_back(self, layer: Layer) -> int:
        parts = {part.index for part in self._parameters.of_layer(layer)}
        return self._sink.take_back(layer, parts)

    def look_for_left_over(self, optimizer: Optimizer) -> None:
        """A resumed run's first updates: is one made by a gradient from before it was resumed?

        Where error signals are kept, the audit finds out. Keys alone would silently be missing.
        """
        if not self._left_over:
            return
        moving = set(map(self._parameters.of, parameters_of(optimizer)))
        for watched in [w for w in self._left_over if w in moving]:
            self._left_over.remove(watched)
            is_new = watched.audit.first >= self._began or is_reset(watched.parameter.grad)
            is_passed = watched.coverage != "untrained" or watched.backward != -1
            if is_passed and not is_new:  # else it is said that there are no patterns at all
                reason = (
                    "its gradient held something already when the run was resumed, and what made "
                    "that is not recorded: call optimizer.zero_grad() before the first backward "
                    "pass."
                )
                self._findings.incomplete_keys(self._steps.step, watched, reason)
