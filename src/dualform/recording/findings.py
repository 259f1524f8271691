"""What of a run could not be explained, and what else is worth saying of it.

A gradient that no patterns account for is found before the optimizer has moved, so recording can
stop with everything before it exact. Weights that are not where the rule puts them are found after,
in the middle of writing a step down: that is raised only once nothing can be lost by it.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping

from dualform.errors import AuditError
from dualform.recording.parameters import Watched

STOPPED = ' Recording stopped here; audit="warn" would go on with a memory that is not exact.'

LEFT_OVER = (
    " When recording began, its gradient held something already, and no pattern accounts for that: "
    "call optimizer.zero_grad() before the first backward pass."
)

MOST_REMARKS = 100
MOST_NAMES = 8


class Findings:
    """Whether all is explained so far, and the remarks that the memory will carry."""

    def __init__(self, *, strict: bool) -> None:
        self._strict = strict
        self._trouble: str | None = None
        self._remarks: list[str] = []
        self._incomplete: dict[str, None] = {}  # parameters of which keys may be missing
        self._incomplete_keys = ""
        self._put_back = False
        self._first_step = 0
        self.exact = True
        self.dropped = 0
        """How many patterns of skipped steps were dropped."""

    @property
    def remarks(self) -> tuple[str, ...]:
        """What was dropped or could not be explained so far, in sentences."""
        dropped = f"{self.dropped} patterns of skipped steps were dropped"
        incomplete, others = self._incomplete_keys, list(self._incomplete)[1:]
        if others:
            more = f" and {len(others) - MOST_NAMES} more" if len(others) > MOST_NAMES else ""
            incomplete += f". The same goes for {', '.join(others[:MOST_NAMES])}{more}"
        own = [*([incomplete] if incomplete else []), *([dropped] if self.dropped else [])]
        return (*self._remarks, *own)

    def restore(self, step: int, exact: bool, remarks: tuple[str, ...]) -> None:
        """A resumed run: the step it goes on from, and what was found before."""
        self._first_step = step
        self.exact = exact and self.exact
        self._remarks[:0] = remarks

    def remark(self, message: str) -> None:
        if len(self._remarks) < MOST_REMARKS:
            self._remarks.append(message)

    def unexplained_gradient(self, step: int, watched: Watched, reason: str) -> None:
        message = f"step {step}, parameter {watched.name!r}: {reason}"
        if step == self._first_step and watched.had_gradient:
            message += LEFT_OVER
        if self._strict:  # the optimizer has not moved yet: what is recorded so far stays exact
            raise AuditError(message + STOPPED)
        self.not_exact(message)

    def incomplete_keys(self, step: int, watched: Watched, reason: str) -> None:
        """Of the first parameter it is said in full: there, keys alone are kept."""
        if not self._incomplete:
            self._incomplete_keys = (
                f"step {step}, parameter {watched.name!r}: {reason} Error signals are not kept, so "
                "the weights are accounted for all the same; but if keys are missing, attention "
                "misses them"
            )
            message = f"dualform: keys may be missing. {self._incomplete_keys}"
            warnings.warn(message, stacklevel=2)
        self._incomplete[watched.name] = None

    def put_back(self, watched: Mapping[Watched, int | None]) -> None:
        """Weights of keys alone were changed in place between updates, and put back, it seems."""
        found = ((w.name, step) for w, step in watched.items() if not w.resolved)
        name, step = next(found, ("", None))
        if name and not self._put_back:
            since = "recording began" if step is None else f"its update of step {step}"
            self._put_back = True
            self.remark(
                f"parameter {name!r}: it was changed in place after {since}, and some of its "
                "entries, looked at before the next update, are what they were: put back, as after "
                "an evaluation with other weights. Whether all of them are is not known; error "
                "signals would tell"
            )

    def changed_by_hand(self, step: int, watched: Watched, reason: str) -> None:
        """Found before the next update; but weights or state are not the last one's any more."""
        message = f"step {step}, parameter {watched.name!r}: {reason}"
        self.not_exact(message)
        if self._strict:
            raise AuditError(message + STOPPED)

    def unexplained_weights(self, step: int, watched: Watched, reason: str) -> None:
        message = f"step {step}, parameter {watched.name!r}: {reason}"
        if watched.coverage == "untrained":
            message += (
                " None of the optimizers given trains it: keep what something else changes (an "
                "averaged copy, a teacher) out of the model given to record."
            )
        if self._strict and self._trouble is None:
            self._trouble = message
        self.not_exact(message)

    def raise_trouble(self) -> None:
        """Raise what a comparison of the weights found, once nothing can be lost by it."""
        message, self._trouble = self._trouble, None
        if message is not None:
            raise AuditError(message + STOPPED)

    def not_exact(self, message: str) -> None:
        if self.exact and not self._strict:
            warnings.warn(f"dualform: this run is not exact. {message}", stacklevel=2)
        self.exact = False
        self.remark(message)
