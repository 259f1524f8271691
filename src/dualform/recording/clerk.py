"""A thread beside training that copies patterns and sums them up, in the order they come.

Amid a backward pass the training thread only says what there is to do; the copying of rows, the
audit's sums over them and the bookkeeping are done here, while torch computes the next gradient.

Why it is hard: the rows are the training loop's own tensors. They may be written over as soon as
the backward pass has returned (a batch that is filled anew in the same place), so it does not
return before everything it gave is done. (One that an exception breaks off cannot wait; what it
gave is thrown away with its gradients. If those are used after all, it is an error that tensors
were changed before they were copied. What waits for another job holds on to its tensors until
there is one.) And whatever the clerk works on belongs to it until `wait`: the training thread waits
before it looks at patterns, sums or predictions.
"""

from __future__ import annotations

import _thread
import queue
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from dualform.recording import forks
from dualform.recording.one_core import keep_to_one_core
from dualform.recording.unexplained import quietly

Job = tuple[Callable[..., None], tuple[Any, ...]]
"""What to do, and with what."""

LITTLE = 1 << 14
"""A job about so many numbers takes less time than waking the clerk: an idle one is left alone."""

WAITING = 4
"""How many jobs may have been given, and twice as many may wait to be; then training waits, so that
no more tensors are held on to than these."""


class Clerk:
    """Does one job after the other, in a thread that begins with the first.

    A job that fails is told of by the next `wait`; those given before that are left undone.
    """

    def __init__(self) -> None:
        self._jobs: deque[Job] = deque()
        self._words: queue.SimpleQueue[int | _thread.LockType | None] = queue.SimpleQueue()
        self._given = self._done = 0  # words to look for jobs, by their numbers
        self._trouble: BaseException | None = None
        self._thread: threading.Thread | None = None
        self._forks = forks.count

    def is_for(self, numbers: int) -> bool:
        """Whether a job about so many numbers is for the clerk, and not done sooner than told."""
        return numbers > LITTLE or self._done != self._given or bool(self._jobs)

    def give(self, work: Callable[..., None], *args: Any) -> None:
        """One more job. In a process forked since there is no clerk: it is done at once."""
        self._jobs.append((work, args))
        if self._given - self._done >= WAITING:
            self.wait()
        else:
            self._bring()

    def help(self, work: Callable[..., None], *args: Any) -> None:
        """One more job, now, however many wait: once in a while."""
        self._jobs.append((work, args))
        self._bring()

    def later(self, work: Callable[..., None], *args: Any) -> None:
        """One more job, which may wait until another is given: the two wake the clerk only once.

        By then training is amid a backward pass and can do without the interpreter's lock.
        """
        self._jobs.append((work, args))
        if len(self._jobs) > 2 * WAITING:
            self.wait()
        elif len(self._jobs) > WAITING:
            self._bring()

    @property
    def waiting(self) -> int:
        """How many jobs wait for another one."""
        return len(self._jobs)

    def then(self, work: Callable[..., None], *args: Any) -> None:
        """After what was given; at once if all of that is done."""
        if self._jobs:
            self.later(work, *args)
        elif self._done == self._given:
            work(*args)
        else:
            self.give(work, *args)

    def wait(self, *, quietly: bool = False, even_for_later: bool = True) -> None:
        """Until all that was given is done; raises what one of the jobs has raised.

        Quietly: if something else is being raised already, that is forgotten.
        """
        if even_for_later:
            self._bring()
        if self._done != self._given and forks.count == self._forks:
            lock = _thread.allocate_lock()
            lock.acquire()
            self._words.put(lock)
            lock.acquire()
        if self._trouble is not None:
            self._jobs.clear()
            trouble, self._trouble = self._trouble, None
            if not quietly:
                raise trouble

    def _bring(self) -> None:
        """Tell the clerk to look for jobs. They stay where they are until it takes them, all in one
        line: wherever Ctrl-C strikes, the next one to ask finds them, in the order they came.
        """
        if not self._jobs:
            return
        if forks.count != self._forks:
            self._do_all()
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="dualform-clerk", daemon=True)
            self._thread.start()
        self._given += 1
        self._words.put(self._given)

    def _do_all(self) -> None:
        while self._jobs:
            work, args = self._jobs.popleft()
            work(*args)

    def close(self) -> None:
        """End the thread; what was given is done first."""
        self._bring()
        if self._thread is not None and forks.count == self._forks:
            self._words.put(None)
            self._thread.join()
            self._thread = None

    @quietly()
    def _work(self) -> None:
        keep_to_one_core()
        torch.set_grad_enabled(False)  # of this thread alone
        while (word := self._words.get()) is not None:
            if not isinstance(word, int):
                word.release()
                continue
            try:
                if self._trouble is None:
                    self._do_all()
            except BaseException as error:
                self._trouble = error
            finally:
                self._done = word  # by number: Ctrl-C may have kept one from being put
