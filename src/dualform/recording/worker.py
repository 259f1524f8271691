"""One thread beside training, which does what it is given, in order.

What goes wrong in it is raised where it is waited for. There are two: the worker proper (of which
the rest of this page speaks), and the writer of `sink.py`.

Copying rows and summing them on the training thread would cost it 13 % on the paper's network; here
that work runs while the backward pass goes on. The worker is waited for in four places, and nowhere
else: where a pass begins, where it ends, before an update, and at a commit.

Why it is hard: torch hands large operations to a team of threads, one team for every thread that
asks, and a team of the worker's would fight with training's own; so the worker keeps to one core.
A forked process (a DataLoader's worker) has no worker: nothing there is recorded (`recorder.py`).
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from dualform.errors import DualFormError, RecordingError

Job = Callable[..., Any]


class Worker:
    """A thread with a queue. `do` hands over a job, `wait` returns when all jobs are done."""

    def __init__(self, name: str) -> None:
        self._jobs: queue.SimpleQueue[tuple[Any, ...] | threading.Lock | None] = queue.SimpleQueue()
        self._trouble: BaseException | None = None
        self._is_busy = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def do(self, job: Job, *arguments: Any) -> None:
        """Hand over a job; it runs after those handed over before."""
        self._is_busy = True
        self._jobs.put((job, *arguments))

    def wait(self) -> None:
        """Return when every job is done; raise what the first failed one raised."""
        if self._is_busy:
            done = threading.Lock()
            done.acquire()
            self._jobs.put(done)
            done.acquire()  # once the thread has released it
            self._is_busy = False
        if self._trouble is not None:
            trouble, self._trouble = self._trouble, None
            if isinstance(trouble, DualFormError) or not isinstance(trouble, Exception):
                raise trouble
            raise RecordingError(
                f"what a backward pass brought could not be recorded: {trouble!r}. Training itself "
                "is not at fault; keep that layer as values (keep=), and please report this"
            ) from trouble

    def close(self) -> KeyboardInterrupt | None:
        """Let the thread do its jobs and end, whatever Ctrl-C says; return the interrupt that came.

        May be called again.
        """
        self._jobs.put(None)
        interrupt = None
        while self._thread.is_alive():
            try:
                self._thread.join()
            except KeyboardInterrupt as error:
                interrupt = error
        return interrupt

    def _run(self) -> None:
        keep_to_one_core()
        torch.set_grad_enabled(False)
        np.seterr(over="ignore", invalid="ignore")  # numbers of a run that diverges
        while (job := self._jobs.get()) is not None:
            if not isinstance(job, tuple):
                job.release()
            elif self._trouble is None:
                try:
                    job[0](*job[1:])
                except BaseException as error:
                    self._trouble = error


def keep_to_one_core() -> None:
    """Let torch use one core in the calling thread, and as many as before in all others.

    torch applies the number to the calling thread and to threads that begin later; for those a
    thread of its own puts it back.
    """
    usual = torch.get_num_threads()
    if usual > 1:
        torch.set_num_threads(1)
        last = threading.Thread(target=torch.set_num_threads, args=(usual,))
        last.start()
        last.join()
