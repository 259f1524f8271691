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
from typing import Any

import pytest
import safetensors.torch
import torch
from tests.recording.runs import (
    Trainers,
    backward,
    network,
    plain,
    proved,
    recording,
    state_of,
    trainers,
    update,
    verified,
)
from torch.optim import SGD

from dualform.certificate.replay import at
from dualform.errors import MemoryFileError, RecordingError
from dualform.memory import Memory
from dualform.recording import record

SMALL = 20_000
"""Bytes per segment: a commit every few steps."""

TIMES = int(os.environ.get("DUALFORM_TORTURE", "100"))
"""How often the long tests do what they do; `make torture` asks for thousands."""

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")


@pytest.fixture(scope="module")
def server() -> Iterator[Trainers]:
    with trainers() as running:
        yield running


class Reference:
    """The same training without a recorder."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        self.model = network()
        self.optimizer = SGD(self.model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-3)
        self.states = [state_of(self.model)]

    def after(self, steps: int) -> dict[str, torch.Tensor]:
        while len(self.states) <= steps:
            update(self.model, self.optimizer, len(self.states) - 1)
            self.states.append(state_of(self.model))
        return self.states[steps]


@pytest.fixture(scope="module")
def reference() -> Reference:
    return Reference()


def wait_until_started(path: Path) -> None:
    while not Path(f"{path}.started").exists():
        time.sleep(0.001)


def made_updates(path: Path) -> int:
    """How many updates the process has made, by its own account."""
    return Path(f"{path}.updates").stat().st_size


def lost_steps(memory: Memory) -> int:
    """The number of lost steps that the memory speaks of."""
    (remark,) = memory.remarks
    committed = "1 step is" if memory.steps == 1 else f"{memory.steps} steps are"
    assert f"{committed} committed" in remark
    if "no further step" in remark:
        return 0
    found = re.search(r"the (\d+) steps? after that (is|are) lost", remark)
    assert found, remark
    return int(found[1])


def kill_and_look(
    server: Trainers, path: Path, delay: float, segment_bytes: int, reference: Reference
) -> Memory:
    process = server.start(path, segment_bytes=segment_bytes)
    wait_until_started(path)
    time.sleep(delay)
    os.kill(process, signal.SIGKILL)
    assert server.wait(process) == -signal.SIGKILL
    memory = Memory.open(path)
    assert not memory.closed
    assert not memory.is_being_recorded
    made = made_updates(path)
    assert memory.steps + lost_steps(memory) in (made, made + 1)
    memory.check()
    if memory.steps:
        assert verified(memory).passed
        proved(path, None, {memory.steps: reference.after(memory.steps)}, verdict=None)
    return memory


def many(
    server: Trainers, place: Path, times: int, most: float, reference: Reference
) -> list[Memory]:
    chance, found = random.Random(times), []
    for number in range(times):
        path = place / str(number)
        size = chance.choice([1, SMALL, 20 * SMALL])
        found.append(kill_and_look(server, path, chance.uniform(0, most), size, reference))
        shutil.rmtree(path)
    return found


def test_a_run_killed_at_any_moment_opens_says_what_it_lost_and_is_exact(
    server: Trainers, tmp_path: Path, reference: Reference
) -> None:
    found = many(server, tmp_path, 30, 0.3, reference)
    assert len({memory.steps for memory in found}) > 3


@pytest.mark.long
def test_hundreds_of_killed_runs(server: Trainers, tmp_path: Path, reference: Reference) -> None:
    many(server, tmp_path, TIMES, 0.6, reference)


def test_a_killed_run_is_recorded_over_only_on_request(
    server: Trainers, tmp_path: Path, reference: Reference
) -> None:
    path = tmp_path / "run"
    kill_and_look(server, path, 0.05, SMALL, reference)
    assert server.wait(server.start(path, steps=3)) == 1
    assert not Memory.open(path).closed
    assert server.wait(server.start(path, steps=3, overwrite=True)) == 0
    memory = proved(path, None, {3: reference.after(3)})
    assert (memory.steps, memory.remarks) == (3, ())


def test_a_killed_run_is_gone_on_with(
    server: Trainers, tmp_path: Path, reference: Reference
) -> None:
    for number, delay in enumerate((0.05, 0.15, 0.25)):
        path = tmp_path / str(number)
        steps = kill_and_look(server, path, delay, SMALL, reference).steps
        start = steps // 2
        whole = Reference()
        whole.after(start)
        resume = True if start else "rewind"
        with recording(whole.model, whole.optimizer, path, resume=resume) as recorder:
            assert recorder.steps == start
            for step in range(start, start + 5):
                recorder.tag(example=range(5), task="late")
                update(whole.model, whole.optimizer, step)
        memory = proved(path, whole.model, {start + 5: reference.after(start + 5)})
        assert (memory.closed, memory.remarks) == (True, ())


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
    assert len(memory.remarks) == 1
    assert memory.steps - made_updates(path) in (0, 1)
    model = safetensors.torch.load_file(f"{path}.model.safetensors")
    assert verified(path).passed
    for name in memory.parameters:
        assert torch.equal(memory.kept.weights(name, memory.steps), model[name])
    return memory


@pytest.mark.parametrize(("number", "how"), [(signal.SIGINT, ""), (signal.SIGTERM, "exit")])
def test_ctrl_c_at_any_moment_commits_everything_that_is_complete(
    number: int, how: str, server: Trainers, tmp_path: Path
) -> None:
    chance, steps = random.Random(3), set()
    for turn in range(20):
        path = tmp_path / str(turn)
        steps.add(interrupt(server, path, chance.uniform(0, 0.2), number, terminate=how).steps)
    assert len(steps) > 3


@pytest.mark.long
def test_hundreds_of_interrupted_runs(server: Trainers, tmp_path: Path) -> None:
    chance = random.Random(4)
    for number in range(TIMES):
        interrupt(server, tmp_path / str(number), chance.uniform(0, 0.4), signal.SIGINT)


def test_sigterm_without_a_handler_leaves_what_was_committed(
    server: Trainers, tmp_path: Path, reference: Reference
) -> None:
    path = tmp_path / "run"
    process = server.start(path, segment_bytes=SMALL)
    wait_until_started(path)
    time.sleep(0.1)
    os.kill(process, signal.SIGTERM)
    assert server.wait(process) == -signal.SIGTERM
    memory = Memory.open(path)
    assert memory.steps + lost_steps(memory) - made_updates(path) in (0, 1)


# -- exceptions ------------------------------------------------------------------------------------


def stopping(*_: Any) -> None:
    raise StopIteration


@pytest.mark.parametrize("keep", ["auto", "keys"])
@pytest.mark.parametrize("when", ["in the loop", "before the update", "after the update"])
@pytest.mark.parametrize("fused", [False, True])
def test_an_exception_commits_everything_before_it(
    when: str, fused: bool, keep: str, tmp_path: Path
) -> None:
    model = plain()
    optimizer = SGD(model.parameters(), lr=0.05, momentum=0.9, fused=fused)
    states = {0: state_of(model)}

    def train() -> None:
        with record(model, tmp_path / "run", keep=keep):
            for step in range(20):
                if step == 10 and when == "before the update":
                    optimizer.register_step_pre_hook(stopping)
                if step == 10 and when == "after the update":
                    optimizer.register_step_post_hook(stopping)
                backward(model, step)
                if step == 10 and when == "in the loop":
                    stopping()
                optimizer.step()
                optimizer.zero_grad()
                states[step + 1] = state_of(model)

    with pytest.raises(StopIteration):
        train()
    memory = Memory.open(tmp_path / "run")
    assert memory.closed
    assert memory.remarks[0] == "the training loop was ended by StopIteration"
    assert memory.steps == 10
    assert len(memory.remarks) - 1 == (when == "after the update")  # the model has moved once more
    assert not memory.events
    assert verified(memory, None if when == "after the update" else model).passed
    assert memory.layer("0").rows == 5 * memory.steps


def test_an_update_that_fails_half_way_leaves_an_exact_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The buffers have taken the gradient in, and no weight has moved."""
    model = plain()
    optimizer = SGD(model.parameters(), lr=0.05, momentum=0.9, foreach=True)
    add, calls = torch._foreach_add_, 0

    def fail(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 2 * 20:
            raise MemoryError("no room")
        return add(*args, **kwargs)

    monkeypatch.setattr(torch, "_foreach_add_", fail)
    with pytest.raises(MemoryError), record(model, tmp_path / "run"):
        for step in range(30):
            update(model, optimizer, step)
            last = state_of(model)
    monkeypatch.undo()
    memory = Memory.open(tmp_path / "run")
    assert memory.steps == 20
    assert verified(memory, model).passed
    for name in memory.parameters:
        assert torch.equal(at(memory, name, 20), last[name])


def test_a_full_disk_is_said_and_what_was_committed_is_safe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = plain()
    optimizer = SGD(model.parameters(), lr=0.05)

    def full(*_: Any) -> int:
        raise OSError(28, "No space left on device")

    def train() -> None:
        with recording(model, optimizer, tmp_path / "run", segment_bytes=2000) as recorder:
            for step in range(100):
                update(model, optimizer, step)
                if step == 10:
                    recorder.flush()
                    monkeypatch.setattr(os, "write", full)
                    monkeypatch.setattr(os, "pwrite", full)
                    monkeypatch.setattr(os, "writev", full)
                    monkeypatch.setattr(os, "pwritev", full)

    with pytest.raises(RecordingError, match=r"No space left on device.*The 11 steps .* are safe"):
        train()
    monkeypatch.undo()
    assert Memory.open(tmp_path / "run").steps >= 11


# -- other processes, other threads ----------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork.*")
@pytest.mark.parametrize("does", ["flush", "train", "leave"])
def test_a_forked_process_that_goes_on_waits_for_nobody(tmp_path: Path, does: str) -> None:
    model = plain()
    optimizer = SGD(model.parameters(), lr=0.1)
    with recording(model, optimizer, tmp_path / "run", segment_bytes=2000) as recorder:
        for step in range(20):
            update(model, optimizer, step)
        child = os.fork()
        if child == 0:
            signal.alarm(60)  # rather than hang
            status = 1
            try:
                if does == "train":
                    for step in range(60):
                        update(model, optimizer, step)
                    status = 0
                elif does == "leave":
                    recorder.__exit__(None, None, None)
                    status = 0
                else:
                    recorder.flush()
            except RecordingError as error:
                status = 0 if "forked" in str(error) else 2
            finally:
                os._exit(status)
        assert os.waitpid(child, 0)[1] == 0
        for step in range(5):
            update(model, optimizer, step)
    assert proved(tmp_path / "run", model).steps == 25


def test_ctrl_c_is_the_main_threads_though_training_runs_in_another(tmp_path: Path) -> None:
    model = plain()
    optimizer = SGD(model.parameters(), lr=0.1)
    done = threading.Event()

    def loop() -> None:
        optimizer.register_step_pre_hook(lambda *_: signal.raise_signal(signal.SIGINT))
        update(model, optimizer, 0)
        done.set()

    thread = threading.Thread(target=loop)
    with pytest.raises(KeyboardInterrupt), record(model, tmp_path / "run"):
        thread.start()
        thread.join()
        done.wait(60)
    thread.join()
    assert done.is_set()
    assert Memory.open(tmp_path / "run").steps == 1


def test_what_is_no_memory_is_said_to_be_none(tmp_path: Path) -> None:
    with pytest.raises(MemoryFileError):
        Memory.open(tmp_path)
