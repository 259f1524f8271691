"""What a commit carries besides patterns and log: fingerprints, sums, snapshots, a description."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from dualform.recording.fingerprints import FINGERPRINT_EVERY, Fingerprints
from dualform.recording.learned import Learned
from dualform.recording.parameters import Parameters
from dualform.recording.sink import Extras
from dualform.recording.steps import Steps
from dualform.recording.tags import Tags

SNAPSHOT_SHARE = 1000
"""Weights are kept whenever this many times their size has been written since the last time."""


class Commits:
    """Gathers what goes with the steps committed; knows when which part of it is due."""

    def __init__(
        self,
        steps: Steps,
        parameters: Parameters,
        fingerprints: Fingerprints,
        tags: Tags,
        description: Callable[[], dict[str, Any]],
        *,
        snapshot_every: int,
        segment_bytes: int,
    ) -> None:
        self._steps, self._parameters = steps, parameters
        self._fingerprints, self._tags = fingerprints, tags
        self._description = description
        self._snapshot_every, self._segment_bytes = snapshot_every, segment_bytes
        self._model_bytes = sum(
            w.parameter.numel() * w.parameter.element_size() for w in parameters
        )
        self._written_since_snapshot = 0
        self._sums_kept = -1  # the step at which they last were
        self.flushing = self.ended = False

    def go_on(self) -> None:
        """A resumed run: everything is on disk as it is at this step."""
        self._fingerprints.last = self._sums_kept = self._steps.step

    @property
    def is_due(self) -> bool:
        """Whether a commit is due at this step for the sums it carries."""
        return self._steps.accounts.any and self._steps.step % self._snapshot_every == 0

    @property
    def owes_sums(self) -> bool:
        """Whether a commit is due for the sums alone: the last one was made without them."""
        return (
            (self.ended or self.flushing)
            and self._steps.accounts.any
            and self._sums_kept != self._steps.step
        )

    def gather(self, written: int) -> Extras:
        """Everything that goes with the steps up to now; `written`: the bytes of the new ones."""
        self._steps.clerk.wait()
        self._steps.accountant.settle()
        if self._fingerprints.last != self._steps.step:
            self._take_fingerprint()
        else:  # weights are about to be written down: they may have been changed since
            self._steps.look_for_edits()
            self._fingerprints.look_again(self._steps.compare)
        return Extras(
            *self._fingerprints.collect(),
            self._sums(),
            self._tags.new_strings(),
            dict(self._tags.kinds),
            self._description(),
            self._snapshot(written),
        )

    def keep_up(self) -> None:
        """A step is over: take a fingerprint if the last one was long ago, or one is asked for."""
        is_old = self._steps.step - self._fingerprints.last >= FINGERPRINT_EVERY
        if is_old or self._steps.needs_fingerprint:
            self._take_fingerprint()

    def _take_fingerprint(self) -> None:
        self._steps.clerk.wait()
        self._steps.accountant.catch_up()
        self._steps.look_for_edits()
        self._fingerprints.take(self._steps.step, self._steps.compare)

    def _sums(self) -> dict[str, Tensor | Learned]:
        """Accumulated parts: every `snapshot_every` steps, when flushed, and always if small."""
        due = self.ended or self.flushing or self.is_due
        if not due and self._steps.accounts.bytes > self._segment_bytes // 8:
            return {}
        self._sums_kept = self._steps.step
        return self._steps.accounts.sums()

    def _snapshot(self, written: int) -> dict[str, Tensor] | None:
        """All weights, at the end and whenever they are small beside what was written since."""
        self._written_since_snapshot += written
        due = self._written_since_snapshot >= SNAPSHOT_SHARE * self._model_bytes
        if not due and not self.ended:
            return None
        self._written_since_snapshot = 0
        return {w.name: w.parameter.detach().to("cpu", copy=True) for w in self._parameters}
