"""Accounting beside the training: sums and predictions are followed by a thread of their own.

Of a parameter whose gradients are only summed up, the training thread hands over each gradient with
the learning rule's scalars, and goes on. The accountant projects it (for the log, and for the
prediction of where the weights are), holds a copy, and folds what it holds into the sums.

Why it is hard: the gradient handed over is the training loop's own tensor, and it is lent, not
copied (`lending.py`), where the loop's habit allows. That is learned first. A parameter's first
gradient is copied; if, at the next step, it lies untouched and is no longer `p.grad`, the loop
throws gradients away, and the next ones are lent. Should a lent one have been touched, what was
read of it cannot be trusted. The sum is then taken from the weights themselves, as they are now, a
remark says so, and that parameter's gradients are copied from there on.

Memory: besides the sums (16 bytes per entry of a parameter), the gradients of `WAITING` + 2 parcels
(one step each, unless `PARCEL_BYTES` hold more), and those held to be folded: of `HELD` steps, or
as many as `HELD_BYTES` hold.
"""

from __future__ import annotations

import _thread
import queue
import threading
from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dualform.errors import RecordingError
from dualform.recording import forks
from dualform.recording.audit import ParameterAudit
from dualform.recording.lending import Account, Loans, Lot, can_be_lent, natures
from dualform.recording.one_core import keep_to_one_core
from dualform.recording.parameters import Watched, is_reset, version_of
from dualform.recording.predictions import Predictions
from dualform.recording.ring import StepRecord
from dualform.recording.sums import HELD, HELD_BYTES, Accumulated
from dualform.recording.unexplained import quietly
from dualform.recording.whereabouts import Transition, advance_along, as_matrix

WAITING = 2
"""How many parcels may wait for the accountant; then training waits."""

PARCEL_BYTES = 1 << 20
"""Small gradients are handed over several steps at once: waking a thread costs more than they."""

MOVING = 16
"""How many sets of parameters that move at once are remembered: of several optimizers, say."""


class Update(NamedTuple):
    """What an optimizer did with one parameter.

    A `gradient` counts in the sum; `original` is the training loop's own, and its version when it
    was read. `projected` is the gradient along the probe, if that is known.
    """

    account: Account
    transition: Transition
    gradient: Tensor | None
    original: tuple[Tensor, int] | None
    projected: NDArray[np.float64] | None


class Routinely(NamedTuple):
    """What an optimizer did with all that it trains, where all of it is lent."""

    lot: Lot
    transitions: Sequence[Transition]


class Handed(NamedTuple):
    """What an optimizer did in one step."""

    number: int
    did: list[Update] | Routinely
    record: StepRecord
    unscale: float

    @property
    def updates(self) -> list[Update]:
        if isinstance(self.did, list):
            return self.did
        lot, transitions = self.did
        each = zip(lot.accounts, transitions, lot.gradients, strict=True)
        return [Update(*one, None, None) for one in each]


class Pause(NamedTuple):
    """Everything before it is to be done; folded, if asked for. Then the lock is let go of."""

    lock: _thread.LockType
    fold: bool


Job = Pause | str | Callable[[], None]
"""What wakes the accountant: "look" what was handed over, a pause, something else, the "end"."""


class Accountant:
    """Follows accounts in a thread that begins with the first update.

    `restart` gives a parameter's learned part by its weights, where a gradient was lost.
    """

    def __init__(self, restart: Callable[[Watched], Accumulated]) -> None:
        self._restart = restart
        self.accounts: dict[str, Account] = {}
        self._handed: deque[Handed] = deque()  # steps, by one operation each
        self._predictions: dict[tuple[ParameterAudit, ...], Predictions] = {}  # who moves at once
        self._jobs: queue.SimpleQueue[Job] = queue.SimpleQueue()
        self._told = self._seen = 0  # of how many parcels the accountant was told, and has looked
        self.is_due = False
        """Whether there is a parcel that the accountant was not told of."""
        self._loans = Loans()
        self._number = 0  # of the last step handed over
        self._taken = 0  # ... whose gradients are taken in: none before it are read any more
        self._parcel_steps = self._parcel_bytes = 0
        self._failure: BaseException | None = None
        self._thread: threading.Thread | None = None
        self._forks = forks.count

    def open(self, watched: Watched, learned: Accumulated | None, *, lendable: bool = True) -> None:
        """Follow a parameter from here on; its gradients are lent only if that may be."""
        parameter = watched.parameter
        size = parameter.numel() * parameter.element_size()
        account = Account(watched, learned, habit_known=not lendable, bytes=size)
        # a new table, not a new entry: the accountant may be going through the old one
        self.accounts = self.accounts | {watched.name: account}

    # -- on the training thread -----------------------------------------------------------------

    def read(self, account: Account, gradient: Tensor, *, changing: bool) -> Tensor:
        """Before the optimizer moves: the gradient to be handed over after it has.

        What is lent already was looked at (`look_again`). `changing`: the optimizer itself is about
        to change it.
        """
        if account.first is not None:
            self._learn_habit(account, gradient)
        lends = account.lends and not changing
        if lends and can_be_lent([gradient], natures([account]), [account.bytes]):
            return gradient
        return gradient.detach().to("cpu", copy=True)

    def borrows(self, lot: Lot) -> bool:
        """Before the optimizer moves: whether all of these are lent, as the ones before them were.

        If not, `read` will see to each of them.
        """
        if self._loans:
            self.look_again(lot.places)
        return lot.is_lendable

    def hand_over(self, updates: list[Update], record: StepRecord, unscale: float) -> None:
        """What an optimizer did, in the step that has this record."""
        if not updates:
            return
        size, accounts, gradients, versions = 0, [], [], []
        for account, _, gradient, read, _ in updates:
            if read is None:
                continue
            size += account.bytes
            original, version = read
            if gradient is original:
                accounts.append(account)
                gradients.append(original)
                versions.append(version)
            elif not account.habit_known and original.is_cpu and gradient is not None:
                account.first = *read, gradient
        places = {gradient.data_ptr() for gradient in gradients}
        lot = Lot(accounts, gradients, versions, places) if accounts else None
        self._put(updates, lot, size, record, unscale)

    def hand_over_routinely(self, did: Routinely, size: int, record: StepRecord) -> None:
        """The same where all of it is lent; `size`: bytes."""
        self._put(did, did.lot, size, record, 1.0)

    def _put(
        self,
        did: list[Update] | Routinely,
        lot: Lot | None,
        size: int,
        record: StepRecord,
        unscale: float,
    ) -> None:
        if forks.count != self._forks:
            return
        if self._failure is not None:
            self._raise_failure()
        if self._thread is None:
            self._start()
        self._number = number = self._number + 1
        if lot is not None:
            self._loans.add(number, lot, record)
        self._handed.append(Handed(number, did, record, unscale))
        self._parcel_bytes += size
        self._parcel_steps += 1
        if self._parcel_steps >= HELD or self._parcel_bytes >= PARCEL_BYTES:
            if self.is_due:
                self.wake()
            self.is_due = True
            self._parcel_steps = self._parcel_bytes = 0

    def wake(self) -> None:
        """Have the accountant see to what was handed over; waits if it is far behind.

        Right after an update training is busy with small things and needs the interpreter's lock;
        amid a forward pass it does not. So this is called as the next one begins, or by the next
        update. Not later: a gradient that is still lent when the backward pass begins keeps the
        next one from its memory, which is in the processor's caches (3 % of a training step).
        """
        if self.is_due and forks.count == self._forks:
            self.is_due = False
            if self._told - self._seen >= WAITING:
                self._wait(fold=False)
                self._told = self._seen  # Ctrl-C may have kept a word from being said
            self._told += 1
            self._jobs.put("look")

    @property
    def lends(self) -> bool:
        """Whether anything is lent now."""
        return bool(self._loans)

    def make_room(self, places: Collection[int]) -> None:
        """Before a backward pass: gradients lent that are done with are let go of.

        As long as the accountant was not even told of the last ones, they need not be looked at:
        they will be before the next update. But one that is still `.grad` (they lie at these
        places) may be about to be added to. It is taken in first; then it has served, unless it was
        emptied in its place, which torch does not always count.
        """
        kept = self._loans.touched(places) if places and self._loans else []
        if kept:
            self._wait(fold=False)
        for account in kept:
            if self._loans.is_touched(account) or is_reset(account.watched.parameter.grad):
                self._start_again(account)
            else:
                account.lends = False
                self._loans.forget(account)
        if self._loans and not self.is_due:
            self.look_again()

    def look_again(self, places: Collection[int] = ()) -> None:
        """Is everything lent as it was, and none of it where gradients lie now?

        What the accountant is done with is over then.
        """
        done = self._taken  # before looking: whatever is untouched now was so when it was read
        if self._loans.are_untouched(places):
            self._loans.end(done)
        else:
            for account in self._loans.touched(places):
                self._start_again(account)

    def _learn_habit(self, account: Account, gradient: Tensor) -> None:
        """The next gradient is there: was the first one left alone, and thrown away?"""
        assert account.first is not None
        (first, version, copy), account.first = account.first, None
        account.habit_known = True
        # a gradient that lies where the first one still does: its memory is used again and again
        elsewhere = first.data_ptr() != gradient.data_ptr()
        untouched = version_of(first) == version and torch.equal(first, copy)  # all: `.data`, too
        account.lends = elsewhere and untouched

    def _start_again(self, account: Account) -> None:
        """A gradient was touched while it was lent: go on from the weights themselves."""
        self._wait(fold=True)
        watched = account.watched
        for record in self._loans.records(account):
            record.projection[watched.index] = np.nan
        account.lends = False
        self._loans.forget(account)
        learned = self._restart(watched)
        account.sum = None if account.sum is None else learned

    def helps(self, work: Callable[[], None]) -> bool:
        """Have something else done, once in a while, before the next `catch_up`; False if nobody
        can be there to do it."""
        if forks.count != self._forks:
            return False
        if self._thread is None:
            self._start()
        self._jobs.put(work)
        return True

    def catch_up(self) -> None:
        """Every prediction is up to date."""
        self._wait(fold=False)
        self.look_again()

    def settle(self) -> None:
        """Every prediction and every sum is up to date, and can be trusted."""
        self._wait(fold=True)
        self.look_again()

    def _wait(self, *, fold: bool) -> None:
        if self._thread is not None and forks.count == self._forks:
            lock = _thread.allocate_lock()
            lock.acquire()
            self._jobs.put(Pause(lock, fold))
            lock.acquire()
        self._raise_failure()

    def close(self) -> None:
        """End the thread; whatever was handed over is done first."""
        if self._thread is not None and forks.count == self._forks:
            self._jobs.put("end")
            self._thread.join()
            self._thread = None

    def _start(self) -> None:
        self._thread = threading.Thread(target=self._work, name="dualform-accountant", daemon=True)
        self._thread.start()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise RecordingError(
                f"accounting for parameters without patterns failed: {self._failure!r}"
            ) from self._failure

    # -- on the accountant's thread -------------------------------------------------------------

    @quietly()
    def _work(self) -> None:
        keep_to_one_core()
        while (job := self._jobs.get()) != "end":
            try:
                while self._handed:
                    handed = self._handed.popleft()
                    if self._failure is None:
                        self._follow(handed)
                    del handed  # gradients are not held on to while waiting for others
                if isinstance(job, Pause) and job.fold:
                    for one in self._sums():
                        one.fold()
                if callable(job) and self._failure is None:
                    job()
            except BaseException as error:
                self._failure = error
            finally:
                if isinstance(job, Pause):
                    job.lock.release()
                elif job == "look":
                    self._seen += 1

    def _follow(self, handed: Handed) -> None:
        number, _, record, unscale = handed
        updates = handed.updates
        if not self._follow_at_once(updates, record, unscale):
            for account, transition, gradient, _, projected in updates:
                audit = account.watched.audit
                if projected is None:
                    assert gradient is not None
                    probe = audit.probe64.to(audit.probe.dtype)
                    matrix = as_matrix(gradient).to(probe.dtype)
                    projected = torch.mv(matrix, probe).double().numpy()
                    record.projection[account.watched.index] = audit.sketch.dot(projected) * unscale
                change, pull = advance_along(audit.weights, audit.momentum, projected, transition)
                audit.count(transition, float(change.dot(change)) + float(pull.dot(pull)))
        for account, transition, gradient, _, _ in updates:
            if account.sum is not None:
                account.sum.hold(transition, gradient)
        self._taken = number
        sums = self._sums()
        full = sum(one.held_bytes for one in sums) >= HELD_BYTES
        for one in sums:
            if full or one.held >= HELD:
                one.fold()

    def _follow_at_once(
        self, updates: Sequence[Update], record: StepRecord, unscale: float
    ) -> bool:
        """The usual case: all by the same step, and gradients as they come. False if it is not."""
        transition = updates[0].transition
        if any(u.gradient is None or u.transition != transition for u in updates):
            return False
        audits = tuple(update.account.watched.audit for update in updates)
        predictions = self._predictions.get(audits)
        if predictions is None or not predictions.hold:
            if not all(len(audit.sketch) for audit in audits):
                return False
            if len(self._predictions) > MOVING:
                self._predictions.clear()
            predictions = self._predictions[audits] = Predictions(audits)
        gradients = [update.gradient for update in updates if update.gradient is not None]
        sketched = predictions.follow(gradients, transition)
        if sketched is None:
            return False
        for update, number in zip(updates, sketched, strict=True):
            record.projection[update.account.watched.index] = number * unscale
        return True

    def _sums(self) -> list[Accumulated]:
        return [a.sum for a in self.accounts.values() if a.sum is not None]
