"""Are the gradients what their patterns sum to, and by which factor?

Asked just before an optimizer moves: if the answer is no, nothing has happened yet that a memory
could not account for.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch import Tensor
from torch.optim import Optimizer

from dualform.recording.audits import Audits
from dualform.recording.findings import Findings
from dualform.recording.lending import Account
from dualform.recording.parameters import Watched, is_reset, version_of
from dualform.recording.unexplained import Unexplained
from dualform.recording.whereabouts import Transition

if TYPE_CHECKING:
    from dualform.recording.routine import Routine

CLEAR = 1e3
"""How far above its rounding a parameter's pattern sum must be to tell the factor κ itself."""

SHARE_OF_CLEAR = 1 / 4
"""Of what a gradient may be off by: within that, a parameter that tells κ clearly takes another's
that tells it better."""


@dataclass(eq=False, slots=True)
class Move:
    """What one optimizer is about to do with one parameter."""

    watched: Watched
    kappa: float
    first: int
    fresh: bool
    group: int
    transition: Transition | None
    account: Account | None = None
    gradient: Tensor | None = None
    """What the account is to count, or, without an account, what may be stored."""
    original: tuple[Tensor, int] | None = None
    """What the account is to count as it lies in `.grad`, and how often it was changed in place."""
    unrecorded: bool = False
    """Whether patterns play no part in it, though the parameter has some."""
    version: int = -1
    """How often the parameter was changed in place before, where nothing predicts it."""
    is_followed: bool = True
    """Whether the gradient is looked at; if not, what is learned is read off the weights."""


@dataclass(slots=True)
class Reading:
    """What an optimizer is about to do, read just before it does it."""

    optimizer: Optimizer
    unscale: float
    settings: list[tuple[float, ...]] = field(default_factory=list)
    moves: list[Move] = field(default_factory=list)
    resolved: list[tuple[Move, Tensor, int]] = field(default_factory=list)
    """The moves by gradients that have patterns, and how often each was changed in place."""
    routine: Routine | None = None
    """Instead of moves: who knows them, where the step is like the last."""

    @property
    def changed(self) -> Iterator[Watched]:
        """Of which parameters under adaptive rules the gradient was changed since: not by the
        optimizer itself, and not by a hook that resets it once the update is made.

        SGD may use the gradient's own memory (with nesterov); its weights are predicted.
        """
        if self.unscale == 1.0 and getattr(self.optimizer, "grad_scale", None) is None:
            for move, gradient, version in self.resolved:
                adaptive = move.watched.rule is not None
                if adaptive and version_of(gradient) != version and not is_reset(gradient):
                    yield move.watched


def explain(reading: Reading, audits: Audits, step: int, findings: Findings) -> None:
    """Find the factor κ of every gradient that has patterns."""
    if not reading.resolved:
        return
    audits.look_at({move.watched.index: gradient for move, gradient, _ in reading.resolved}, step)
    plain = audits.are_plain()
    for move, gradient, _ in reading.resolved:
        watched = move.watched
        if not plain[watched.index]:
            try:
                move.kappa = watched.audit.explain() * reading.unscale
            except Unexplained as reason:
                findings.unexplained_gradient(step, watched, str(reason))
                watched.audit.look_at(gradient)  # the prediction may go on
    _share_factors([move for move, _, _ in reading.resolved])


def _share_factors(resolved: Sequence[Move]) -> None:
    """Give κ to parameters whose own patterns cannot tell it, from the one that tells it best.

    Patterns may cancel to nothing but rounding (a bias before BatchNorm): any factor explains such
    a gradient, but what each of its patterns wrote depends on the right one. Clipping and unscaling
    act on all parameters of a group alike. One that is told clearly, too, gives way only where the
    difference is what its own rounding makes: a probe may have met little of a large batch's sum.
    """
    if len({m.kappa for m in resolved}) <= 1:
        return
    clear = [m for m in resolved if m.watched.audit.clarity >= CLEAR]
    for move in resolved:
        alike = [m for m in clear if m.group == move.group] or clear
        if not alike:
            continue
        best, audit = max(alike, key=lambda m: m.watched.audit.clarity), move.watched.audit
        share = SHARE_OF_CLEAR if move in clear else 1.0
        if audit.allows(move.kappa, best.kappa, share):
            move.kappa = best.kappa
