"""Accounting for trained parameters without patterns: which gradients are kept, which summed up.

A norm's gain, an embedding, a parameter used in functional code: its gradient is kept as the
optimizer used it, step by step, as long as the byte budget lasts. Beyond it only the learned part
is kept, and written down every so many steps: `sums.py` says how, `accountant.py` who does it.

The gradients of layers recorded with keys alone may be as large as the layer's patterns, and nobody
will ask who wrote what. What they learned is read off the weights from the start, W less the share
that is left of W_0 and m_0, and no account is opened for them. That it was the gradients that put
them there is audited now and then (`complete_keys.py`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from torch import Tensor

from dualform.recording.accountant import Accountant
from dualform.recording.audits import Audits
from dualform.recording.learned import Learned
from dualform.recording.lending import Account
from dualform.recording.parameters import Watched
from dualform.recording.sums import Accumulated

logger = logging.getLogger("dualform")


class StepAccounts:
    """Gradients of parameters without patterns, within a budget of bytes; then their sums."""

    def __init__(
        self,
        budget: int,
        audits: Audits,
        accountant: Accountant,
        learned: Callable[[Watched], Learned],
    ) -> None:
        self._left = budget
        self._learned = learned
        self._audits = audits
        self._accountant = accountant
        self.since: dict[str, int] = {}
        """From which step on only the learned part of each parameter without patterns is kept."""
        self.stated: dict[str, Watched] = {}
        """Those of them that no sum follows: it is read off the weights."""
        self.pass_over = False
        """Whether SGD moves any of these: its gradients are looked at only now and then."""
        self.unrecorded: list[str] = []
        """Parameters with patterns, of which some steps are summed up."""

    def restore(
        self, watched: Watched, kept: int, since: int | None, state: Accumulated | None
    ) -> None:
        """A resumed run: so many bytes are kept of a parameter, or its learned part since then."""
        self._left -= kept
        if since is None:
            return
        if watched.rule is not None or watched.keys_alone:
            self._state(watched, since)
        elif state is not None:
            self.since[watched.name] = since
            self._open(watched, state)

    def account(self, watched: Watched, step: int) -> Account | None:
        """The account that sums up a parameter; None while its gradients are kept."""
        if watched.name not in self.since and watched.keys_alone:
            self._state(watched, step)
        return self._accountant.accounts.get(watched.name)

    def unrecorded_account(self, watched: Watched) -> Account:
        """The account that sums up what the steps without patterns wrote into a parameter."""
        if watched.name not in self.unrecorded:
            self.restore_unrecorded(watched, Accumulated.nothing(watched.parameter))
        return self._accountant.accounts[watched.name]

    def restore_unrecorded(self, watched: Watched, state: Accumulated) -> None:
        """A resumed run: what the steps without patterns wrote so far."""
        self.unrecorded.append(watched.name)
        self._open(watched, state, lendable=False)

    def keep(
        self,
        step: int,
        watched: Watched,
        gradient: Tensor,
        learned_now: Callable[[Watched], Accumulated],
    ) -> dict[str, Tensor]:
        """Called after the update: the gradient, if it is to be stored with this step.

        The first time the budget does not suffice, the learned part so far is taken from the
        parameter itself (`learned_now`); from then on from gradients alone.
        """
        size = gradient.numel() * gradient.element_size()
        if size <= self._left:
            self._left -= size
            return {watched.name: gradient}
        logger.warning(
            "dualform: the step budget is used up; %s is accumulated from step %d on",
            watched.name,
            step,
        )
        if watched.rule is not None:
            self._state(watched, step)
        else:
            self.since[watched.name] = step
            self._open(watched, learned_now(watched))
        return {}

    def _state(self, watched: Watched, since: int) -> None:
        self.since[watched.name] = since
        self.stated[watched.name] = watched
        watched.is_read_off = True
        self.pass_over |= watched.rule is None

    @property
    def any(self) -> bool:
        """Whether there is a sum of any kind."""
        return bool(self._accountant.accounts or self.stated)

    def _open(self, watched: Watched, state: Accumulated | None, *, lendable: bool = True) -> None:
        self._audits.leave(watched.audit)
        self._accountant.open(watched, state, lendable=lendable)

    @property
    def bytes(self) -> int:
        """What all sums take."""
        accounts = self._accountant.accounts
        summed = [name for name in self.since if name not in self.stated]
        counted = [*summed, *self.unrecorded, *self.unrecorded]  # these have two
        own = [w.parameter.numel() for w in self.stated.values()]
        return 8 * sum([*own, *(accounts[name].watched.parameter.numel() for name in counted)])

    def sums(self) -> dict[str, Tensor | Learned]:
        """Every sum now, under the name it is stored by; the accounts must be settled."""
        found: dict[str, Tensor | Learned] = {}
        for name in self.since:
            stated = self.stated.get(name)
            found[f"learned/{name}"] = (
                self._sum(name).weights.clone()
                if stated is None
                else self._learned(stated).copied()
            )
        for name in self.unrecorded:
            found[f"unrecorded/{name}"] = self._sum(name).weights.clone()
            found[f"unrecorded_momentum/{name}"] = self._sum(name).momentum.clone()
        return found

    def _sum(self, name: str) -> Accumulated:
        found = self._accountant.accounts[name].sum
        assert found is not None
        return found
