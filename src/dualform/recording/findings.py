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

STOPPED = (
    '. Recording stopped before the update; audit="warn" goes on, and keeps this parameter as '
    "values. See docs/recording.md."
)

STOPPED_LATER = '. Recording stopped; audit="warn" goes on. See docs/recording.md.'

MOST = 100
"""How many remarks are kept."""


class Findings:
    """Remarks for people, events for the certificate. `news` are those not yet in a segment."""

    def __init__(self, audit: str) -> None:
        self.is_strict = audit == "raise"
        self.remarks: list[str] = []
        self.events: list[dict[str, Any]] = []
        self._written = [0, 0]
        self._trouble: str | None = None

    def remark(self, sentence: str) -> None:
        """Keep a sentence with the memory, once."""
        if sentence not in self.remarks and len(self.remarks) < MOST:
            self.remarks.append(sentence)

    def warn(self, sentence: str) -> None:
        """Keep a remark, and warn of it, once."""
        if sentence not in self.remarks:
            self.remark(sentence)
            warnings.warn(f"dualform: {sentence}", stacklevel=2)

    def event(self, step: int, what: str, why: str, parameters: list[str], **more: int) -> None:
        """Write down that something happened before the update of a step."""
        found = {"step": step, "what": what, "why": why, "parameters": parameters, **more}
        self.events.append(found)

    def stop(self, sentence: str) -> None:
        """Raise now if the audit is strict: the optimizer has not moved, nothing is lost."""
        if self.is_strict:
            raise AuditError(sentence + STOPPED)
        self.warn(sentence)

    def stop_later(self, sentence: str) -> None:
        """Raise at the next occasion at which nothing can be lost; warn if the audit is lenient."""
        if self.is_strict and self._trouble is None:
            self._trouble = sentence
        self.warn(sentence) if not self.is_strict else self.remark(sentence)

    def raise_trouble(self) -> None:
        """Raise what was put off."""
        trouble, self._trouble = self._trouble, None
        if trouble is not None:
            raise AuditError(trouble + STOPPED_LATER)

    def news(self) -> dict[str, Any]:
        """What has come since the last segment."""
        remarks, events = self._written
        self._written = [len(self.remarks), len(self.events)]
        found = {"remarks": self.remarks[remarks:], "events": self.events[events:]}
        return {name: listed for name, listed in found.items() if listed}

    def restore(self, remarks: list[str], events: list[dict[str, Any]]) -> None:
        """Go on with what a resumed memory holds."""
        self.remarks, self.events = list(remarks), list(events)
        self._written = [len(self.remarks), len(self.events)]
