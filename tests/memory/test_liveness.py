"""The lock goes with its recorder, whatever processes were forked meanwhile."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.memory.runs import ENVIRONMENT, python

from dualform import RecordingError
from dualform.memory import Memory
from dualform.memory.liveness import Progress, WriterLock, _own_files

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")

RECORD = """if True:
    import os, signal, sys, time
    import torch
    from torch import nn
    import dualform as df

    torch.set_num_threads(1)
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def update(inputs):
        model(inputs).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
"""

WITH_WORKERS = """
    from torch.utils.data import DataLoader

    loader = DataLoader(
        torch.randn(8, 2), batch_size=4, num_workers=1, persistent_workers=True,
        multiprocessing_context="fork",
    )
    for attempt in range(3):
        with df.record(model, optimizer, sys.argv[1], overwrite=attempt > 0):
            for inputs in loader:
                update(inputs)
        assert loader._iterator._workers[0].is_alive()
        memory = df.Memory.open(sys.argv[1])
        assert (memory.steps, memory.closed, memory.is_being_recorded) == (2, True, False)
"""

KILLED = """
    with df.record(model, optimizer, sys.argv[1]) as recorder:
        update(torch.randn(3, 2))
        recorder.flush()
        ready, say = os.pipe()
        child = os.fork()
        if child == 0:
            os.write(say, b"x")
            signal.pause()
        os.read(ready, 1)
        print(child, flush=True)
        signal.pause()
"""


def test_a_path_is_free_after_the_block_though_workers_live_on(tmp_path: Path) -> None:
    done = python(RECORD + WITH_WORKERS, tmp_path / "run")
    assert done.returncode == 0, done.stderr


def test_a_killed_recorder_is_not_kept_alive_by_its_workers(tmp_path: Path) -> None:
    path = tmp_path / "run"
    with subprocess.Popen(
        [sys.executable, "-c", RECORD + KILLED, path],
        env=ENVIRONMENT, stdout=subprocess.PIPE, text=True,
    ) as recorder:  # fmt: skip
        assert recorder.stdout is not None
        worker = int(recorder.stdout.readline())
        try:
            assert Memory.open(path).is_being_recorded
            recorder.kill()
            recorder.wait()
            os.kill(worker, 0)  # it is still there
            memory = Memory.open(path)
            assert not memory.is_being_recorded
            assert (memory.steps, memory.closed) == (1, False)
            WriterLock(path).release()
        finally:
            os.kill(worker, signal.SIGKILL)


def test_a_forked_process_neither_holds_nor_releases_the_lock(tmp_path: Path) -> None:
    lock, progress = WriterLock(tmp_path), Progress(tmp_path)
    progress.set(3)
    if (child := os.fork()) == 0:
        with contextlib.suppress(BaseException):
            progress.set(99)
            lock.release()
            progress.close()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert WriterLock.is_held(tmp_path)
    assert Progress.read(tmp_path) == 3
    with pytest.raises(RecordingError, match="another process"):
        WriterLock(tmp_path)
    lock.release()
    lock.release()
    progress.close()
    assert not WriterLock.is_held(tmp_path)


def test_locks_that_are_gone_are_not_remembered(tmp_path: Path) -> None:
    before = len(_own_files)
    for _ in range(20):
        WriterLock(tmp_path).release()
    assert len(_own_files) <= before + 1
