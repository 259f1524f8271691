"""What is said of parameters that patterns do not explain, or that nothing seems to move."""

from __future__ import annotations

from collections.abc import Callable

from dualform.errors import RecordingError
from dualform.recording.findings import Findings
from dualform.recording.states import States
from dualform.recording.trial import BY_HAND
from dualform.recording.watched import Watch, Watched, listed


def say_values(watch: Watch, findings: Findings) -> None:
    """Say what has become values, once per reason: a warning if its layer has patterns."""
    found: dict[str, list[Watched]] = {}
    for w in watch.unsaid:
        if w.tensor.requires_grad and not watch.resolved[w.index]:
            found.setdefault(w.why, []).append(w)
    watch.unsaid = []
    for why, values in found.items():
        is_surprise = why != BY_HAND and any(w.sites for w in values)
        say = findings.warn if is_surprise else findings.remark
        say(f"{listed([w.name for w in values])}: {why}; kept as values, without patterns")


def say_unmoved(watch: Watch, states: States, findings: Findings) -> None:
    """Say what has a gradient, but no optimizer, when the first step is over."""
    left = [w.name for w in watch if w.tensor.grad is not None and not states.owner[w.index]]
    if left:
        findings.remark(
            f"{listed(left)}: has a gradient, but no optimizer moved it in the first step"
        )


def find_hand(states: States) -> Callable[[], None]:
    """Watch, from pass to pass until an optimizer is seen, for a loop that moves weights itself."""
    seen: list[bytes] = []

    def a_pass_begins() -> None:
        marks = states.now()[0].tobytes()
        if marks not in seen[-1:]:
            seen.append(marks)
        if len(seen) > 2:  # SAM moves them once
            raise RecordingError(
                "the weights change from pass to pass, but no optimizer was seen to step. Where "
                "the loop moves them itself, write it inside `with recorder.update():`"
            )

    return a_pass_begins
