"""What is left of a recording that ended otherwise than planned. Real processes, really killed."""

from __future__ import annotations

import os
import random
import re
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import safetensors.torch
from tests.memory.runs import Trainers, assert_equal, assert_sound, rebuild, trainers

from dualform import MemoryFileError
from dualform.memory import Memory
from dualform.recording.interrupts import Interrupts

SMALL = 6000
"""Bytes per segment: a commit every few steps."""

TIMES = int(os.environ.get("DUALFORM_TORTURE", "300"))
"""How often the long tests do what they do; `make torture` asks for thousands."""


@pytest.fixture(scope="module")
def server() -> Iterator[Trainers]:
    with trainers() as running:
        yield running


def wait_until_started(path: Path) -> None:
    started = Path(f"{path}.started")
    while not started.exists():
        time.sleep(0.001)


def lost_steps(memory: Memory) -> int:
    """The number of lost steps that the memory speaks of."""
    (remark,) = memory.remarks
    assert f"{memory.steps} steps are committed" in remark
    found = re.search(r"the (\d+) steps after them are lost", remark)
    assert found or "no further step was completed" in remark
    return int(found[1]) if found else 0


def kill_and_look(server: Trainers, path: Path, delay: float, segment_bytes: int) -> Memory:
    process = server.start(path, segment_bytes=segment_bytes)
    wait_until_started(path)
    time.sleep(delay)
    os.kill(process, signal.SIGKILL)
    assert server.wait(process) == -signal.SIGKILL
    memory = Memory.open(path)
    assert not memory.closed
    assert not memory.is_being_recorded
    assert_sound(memory)
    return memory


def test_a_run_killed_at_any_moment_opens_says_what_it_lost_and_is_exact(
    server: Trainers, tmp_path: Path
) -> None:
    chance = random.Random(1)
    steps, lost = [], []
    for number in range(100):
        path = tmp_path / str(number)
        segment_bytes = chance.choice([1, SMALL, 10 * SMALL])
        memory = kill_and_look(server, path, chance.uniform(0, 0.15), segment_bytes)
        steps.append(memory.steps)
        lost.append(lost_steps(memory))
        shutil.rmtree(path)
    assert max(steps) > 3
    assert len(set(steps)) > 3
    assert max(lost) > 0


@pytest.mark.long
def test_hundreds_of_killed_runs(server: Trainers, tmp_path: Path) -> None:
    chance = random.Random(2)
    for number in range(TIMES):
        path = tmp_path / str(number)
        kill_and_look(server, path, chance.uniform(0, 0.6), chance.choice([1, SMALL, 20 * SMALL]))
        shutil.rmtree(path)


def test_a_run_killed_at_every_single_write_of_its_first_commits(
    server: Trainers, tmp_path: Path
) -> None:
    """Not at random: at each system call of the beginning, two commits, a snapshot, and the end."""
    committed = set()
    for call in range(1, 200):
        path = tmp_path / str(call)
        code = server.wait(server.start(path, steps=8, segment_bytes=SMALL, die_at=call))
        if code == 0:
            break
        assert code == -signal.SIGKILL
        if not (path / "manifest.json").exists():
            with pytest.raises(MemoryFileError, match=r"not there|died before the first commit"):
                Memory.open(path)
            continue
        memory = Memory.open(path)
        assert_sound(memory)
        committed.add(memory.steps)
        assert memory.closed or lost_steps(memory) <= 8 - memory.steps
    assert code == 0, "the run has more writes than were tried"
    assert call > 40
    assert {0, 8} < committed


def test_a_killed_run_is_recorded_over_only_on_request(server: Trainers, tmp_path: Path) -> None:
    path = tmp_path / "run"
    kill_and_look(server, path, 0.05, SMALL)
    assert server.wait(server.start(path, steps=3)) != 0
    assert not Memory.open(path).closed
    assert server.wait(server.start(path, steps=3, overwrite=True)) == 0
    memory = Memory.open(path)
    assert (memory.steps, memory.remarks) == (3, ())
    assert_sound(memory)


def interrupt(server: Trainers, path: Path, delay: float, number: int, **request: str) -> Memory:
    """Signal a run that is under way; the memory must be closed and be what the model became."""
    process = server.start(path, segment_bytes=SMALL, **request)
    wait_until_started(path)
    time.sleep(delay)
    os.kill(process, number)
    # Python drops an exception that strikes inside a weak reference's callback: ask once more then
    again = threading.Timer(20.0, os.kill, (process, number))
    again.start()
    try:
        assert server.wait(process) in (3, 4)
    finally:
        again.cancel()
    memory = Memory.open(path)
    assert memory.closed
    assert memory.remarks[0].startswith("the training loop was ended by ")
    # the forward pass of a step that was never made moves the model's running averages
    assert all(r.startswith("buffers changed after the last") for r in memory.remarks[1:])
    assert len(memory.remarks) <= 2
    model = safetensors.torch.load_file(f"{path}.model.safetensors")
    memory.check()
    assert_equal(rebuild(memory, memory.steps), model)
    assert_sound(memory, model)
    return memory


def test_ctrl_c_at_any_moment_commits_everything_that_is_complete(
    server: Trainers, tmp_path: Path
) -> None:
    chance = random.Random(3)
    steps = []
    for number in range(40):
        path = tmp_path / str(number)
        memory = interrupt(server, path, chance.uniform(0, 0.1), signal.SIGINT)
        steps.append(memory.steps)
        shutil.rmtree(path)
    assert len(set(steps)) > 3


@pytest.mark.long
def test_hundreds_of_interrupted_runs(server: Trainers, tmp_path: Path) -> None:
    chance = random.Random(4)
    for number in range(TIMES):
        path = tmp_path / str(number)
        interrupt(server, path, chance.uniform(0, 0.2), signal.SIGINT)
        shutil.rmtree(path)


def test_a_handler_that_exits_on_sigterm_closes_the_memory(
    server: Trainers, tmp_path: Path
) -> None:
    chance = random.Random(5)
    for number in range(8):
        path = tmp_path / str(number)
        interrupt(server, path, chance.uniform(0, 0.1), signal.SIGTERM, terminate="exit")


def test_sigterm_without_a_handler_leaves_what_was_committed(
    server: Trainers, tmp_path: Path
) -> None:
    path = tmp_path / "run"
    process = server.start(path, segment_bytes=SMALL)
    wait_until_started(path)
    time.sleep(0.1)
    os.kill(process, signal.SIGTERM)
    assert server.wait(process) == -signal.SIGTERM
    memory = Memory.open(path)
    lost_steps(memory)
    assert_sound(memory)


def test_an_exception_in_the_loop_commits_everything_before_it(
    server: Trainers, tmp_path: Path
) -> None:
    path = tmp_path / "run"
    assert server.wait(server.start(path, fail_at=17, segment_bytes=SMALL)) == 5
    memory = Memory.open(path)
    assert memory.steps == 17
    assert memory.closed
    assert memory.remarks == ("the training loop was ended by ZeroDivisionError",)
    assert_sound(memory)


@pytest.fixture
def interrupts() -> Iterator[Interrupts]:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    watching = Interrupts()
    watching.install()
    try:
        yield watching
    finally:
        watching.remove()
        signal.signal(signal.SIGINT, before)


def test_ctrl_c_comes_at_the_end_of_the_outermost_block_that_holds_it(
    interrupts: Interrupts,
) -> None:
    done: list[str] = []

    def work() -> None:
        with interrupts.held():
            with interrupts.held():
                signal.raise_signal(signal.SIGINT)
                done.append("inner")
            done.append("outer")
        done.append("after")

    with pytest.raises(KeyboardInterrupt):
        work()
    assert done == ["inner", "outer"]


def test_an_exception_in_a_block_that_holds_ctrl_c_does_not_hold_it_forever(
    interrupts: Interrupts,
) -> None:
    with pytest.raises(ZeroDivisionError), interrupts.held():
        raise ZeroDivisionError
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
