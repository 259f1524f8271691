"""What could not be explained, and what else is worth a remark.

A gradient that no patterns account for is found before the optimizer moves, so under
`audit="raise"` recording stops with everything before it exact. Weights that are not where the rule
puts them are found later, while a step is being written down: that is raised only once nothing can
be lost by it. Under `audit="warn"` the run goes on; the parameter concerned is kept as values from
there on, and an event says why.
"""

from __future__ import annotations

import warnings
from typing import Any

from dualform.errors import AuditError
from dualform.recording.watched import BY_HAND, Watch, Watched, listed

MOST = 100
"""How many remarks are kept."""


class Findings:
    """Remarks for people, events for the certificate."""

    def __init__(self, audit: str) -> None:
        self.is_strict = audit == "raise"
        self.remarks: list[str] = []
        self.events: list[dict[str, Any]] = []
        self._fresh: dict[str, Any] = {}
        self._trouble: str | None = None

    def remark(self, sentence: str) -> None:
        """Keep a sentence with the memory, once."""
        if sentence not in self.remarks and len(self.remarks) < MOST:
            self.remarks.append(sentence)
            self._fresh.setdefault("remarks", []).append(sentence)

    def warn(self, sentence: str) -> None:
        """Keep a remark, and warn of it, once."""
        if sentence not in self.remarks:
            self.remark(sentence)
            warnings.warn(f"dualform: {sentence}", stacklevel=2)

    def event(self, step: int, what: str, why: str, parameters: list[str], **more: int) -> None:
        """Write down that something happened before the update of a step."""
        found = {"step": step, "what": what, "why": why, "parameters": parameters, **more}
        self.events.append(found)
        self._fresh.setdefault("events", []).append(found)

    def stop(self, sentence: str) -> None:
        """Raise now if the audit is strict: the optimizer has not moved, nothing is lost."""
        if self.is_strict:
            raise AuditError(
                f'{sentence}. Recording stopped before the update; audit="warn" goes on, and keeps '
                "this parameter as values. See docs/recording.md."
            )
        self.warn(sentence)

    def stop_later(self, sentence: str) -> None:
        """Raise at the next occasion at which nothing can be lost; warn if the audit is lenient."""
        if self.is_strict:
            self._trouble = self._trouble or sentence
            self.remark(sentence)
        else:
            self.warn(sentence)

    def raise_trouble(self) -> None:
        """Raise what was put off."""
        trouble, self._trouble = self._trouble, None
        if trouble is not None:
            raise AuditError(
                f'{trouble}. Recording stopped; audit="warn" goes on. See docs/recording.md.'
            )

    def say_values(self, watch: Watch) -> None:
        """Say what has become values, once per reason: a warning if its layer has patterns."""
        found: dict[str, list[Watched]] = {}
        for w in watch.unsaid:
            if w.tensor.requires_grad and not watch.resolved[w.index]:
                found.setdefault(w.why, []).append(w)
        watch.unsaid = []
        for why, values in found.items():
            is_surprise = why != BY_HAND and any(w.sites for w in values)
            say = self.warn if is_surprise else self.remark
            say(f"{listed([w.name for w in values])}: {why}; kept as values, without patterns")

    def news(self) -> dict[str, Any]:
        """What has come since the last segment."""
        fresh, self._fresh = self._fresh, {}
        return fresh

    def restore(self, remarks: list[str], events: list[dict[str, Any]]) -> None:
        """Go on with what a resumed memory holds."""
        self.remarks, self.events = list(remarks), list(events)
