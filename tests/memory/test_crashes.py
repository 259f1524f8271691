"""Whatever a writer dies of, and when: the memory ends at a commit, and can be gone on with."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.memory.samples import Sample, description, read_all, write

from dualform.errors import MemoryFileError, RecordingError
from dualform.memory import Memory, MemoryWriter
from dualform.memory.files import LINES, MANIFEST
from dualform.memory.liveness import Progress, _open

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")

ACTS = ("replace", "fsync", "write", "unlink", "truncate", "open", "mkdir")
"""What a writer does to a disk: it may die before any of them."""


@contextlib.contextmanager
def dying(at: int, act: Callable[[str, tuple[Any, ...]], None]) -> Iterator[list[str]]:
    """Call `act` before every act from that number on; lists those that were reached."""
    done: list[str] = []

    def wrapped(name: str, call: Any) -> Any:
        def before(*args: Any, **kwargs: Any) -> Any:
            if name != "open" or args[1] & (os.O_WRONLY | os.O_RDWR):
                done.append(name)
                if len(done) - 1 >= at:
                    act(name, args)
            return call(*args, **kwargs)

        return before

    with pytest.MonkeyPatch.context() as patch:
        for name in ACTS:
            patch.setattr(os, name, wrapped(name, getattr(os, name)))
        patch.setattr(Path, "unlink", lambda path, missing_ok=False: _unlink(path, missing_ok))
        yield done


def _unlink(path: Path, missing_ok: bool) -> None:
    try:
        os.unlink(path)
    except FileNotFoundError:
        if not missing_ok:
            raise


def kill(name: str, args: tuple[Any, ...]) -> None:
    come_half_way(name, args)
    os._exit(9)


def come_half_way(name: str, args: tuple[Any, ...]) -> None:
    """What is being written may have come half way."""
    if name == "write":
        half = memoryview(args[1])[: len(args[1]) // 8192 * 4096 or len(args[1]) // 2]
        with contextlib.suppress(OSError):
            os_write(args[0], half)


os_write = os.write


def killed_at_every_act(work: Callable[[], None]) -> Iterator[int]:
    """Do some work in processes that are killed one act later each time, until one is not."""
    for at in range(200):
        if (child := os.fork()) == 0:
            code = 1
            with contextlib.suppress(BaseException), dying(at, kill):
                work()
                code = 0
            os._exit(code)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert status in (0, 9), f"act {at} failed"
        yield at
        if status == 0:
            return
    raise AssertionError("it never came to its end")


def resumed(path: Path, step: int | None = None) -> MemoryWriter:
    writer = MemoryWriter(path, resume=True)
    writer.rewind(Memory.open(path).steps if step is None else step)
    return writer


def without_remarks(memory: Memory) -> dict[str, Any]:
    return {k: v for k, v in read_all(memory) if k not in ("about", "remarks")}


def test_a_commit_that_is_killed_anywhere_is_whole_or_not_there(tmp_path: Path) -> None:
    first, run = tmp_path / "first", tmp_path / "run"
    write(first, (2, 3), closed=False)
    sample = Sample()
    for steps in (2, 3):
        sample.content(steps)
    content = sample.content(4)
    before = without_remarks(Memory.open(first))
    shutil.copytree(first, run)

    def commit() -> None:
        writer = resumed(run)
        writer.commit(content)
        os._exit(0)

    seen = set()
    for _ in killed_at_every_act(commit):
        memory = Memory.open(run)
        assert memory.steps in (5, 9)
        seen.add(memory.steps)
        if memory.steps == 5:
            assert without_remarks(memory) == before
        memory.check()
        writer = resumed(run)
        if memory.steps == 5:
            writer.commit(content)
        writer.end(closed=True)
        writer.release()
        assert Memory.open(run).steps == 9
        Memory.open(run).check()
        names = {entry["file"] for entry in Memory.open(run).opened.committed.entries}
        assert {f.name for f in (run / "segments").iterdir()} == names
        shutil.rmtree(run)
        shutil.copytree(first, run)
    assert seen == {5, 9}


@pytest.mark.parametrize("closed", [True, False])
def test_a_rewind_that_is_killed_anywhere_has_happened_or_not(tmp_path: Path, closed: bool) -> None:
    first, run = tmp_path / "first", tmp_path / "run"
    write(first, (2, 4, 3, 2), closed=closed)
    before = without_remarks(Memory.open(first))
    shutil.copytree(first, tmp_path / "cut")
    resumed(tmp_path / "cut", 4).release()
    after = without_remarks(Memory.open(tmp_path / "cut"))
    assert len(after) < len(before)
    shutil.copytree(first, run)

    def rewind() -> None:
        resumed(run, 4)
        os._exit(0)

    seen = set()
    for _ in killed_at_every_act(rewind):
        memory = Memory.open(run)
        seen.add(memory.steps)
        assert without_remarks(memory) == {11: before, 4: after}[memory.steps]
        memory.check()
        resumed(run, 3).release()
        assert Memory.open(run).steps == 3
        shutil.rmtree(run)
        shutil.copytree(first, run)
    assert seen == {11, 4}


def test_a_beginning_that_is_killed_anywhere_leaves_one_memory_or_none(tmp_path: Path) -> None:
    first, run = tmp_path / "first", tmp_path / "run"
    write(first, (2, 3))
    shutil.copytree(first, run)

    def begin() -> None:
        writer = MemoryWriter(run, overwrite=True)
        writer.begin(description())
        os._exit(0)

    seen = set()
    for _ in killed_at_every_act(begin):
        try:
            memory = Memory.open(run)
            seen.add(memory.steps)
            memory.check()
        except MemoryFileError as error:
            seen.add(-1 if "died before the first commit" in str(error) else -2)
        MemoryWriter(run, overwrite=True).release()
        shutil.rmtree(run)
        shutil.copytree(first, run)
    assert seen == {5, -1, 0}


def test_a_full_disk_costs_one_commit_and_nothing_else(tmp_path: Path) -> None:
    sample = Sample()
    writer = MemoryWriter(tmp_path / "run")
    writer.begin(description())
    writer.commit(sample.content(2))
    content = sample.content(3)

    def fail(name: str, args: tuple[Any, ...]) -> None:
        if name not in ("unlink", "truncate"):
            come_half_way(name, args)
            raise OSError(errno.ENOSPC, "No space left on device")

    at, acts = 0, 1
    while at < acts:
        with dying(at, fail) as done:
            with contextlib.suppress(RecordingError):
                writer.commit(content)
            acts = max(acts, len(done) + 1)
        memory = Memory.open(tmp_path / "run")
        assert memory.opened.committed.is_torn is False
        if memory.steps == 5:  # the directory alone could not be synced
            break
        assert (memory.steps, writer.steps) == (2, 2)
        at += 1
    else:
        writer.commit(content)
    writer.end(closed=True)
    assert at > 3
    writer.release()
    memory = Memory.open(tmp_path / "run")
    assert memory.steps == 5
    memory.check()


def test_a_torn_last_line_is_left_out_and_said(tmp_path: Path) -> None:
    write(tmp_path / "run", (2, 3), closed=False)
    path = tmp_path / "run" / LINES
    whole = path.read_bytes()
    second = whole.index(b"\n") + 1
    for length in (second + 1, second + 40, len(whole) - 2, len(whole) - 1):
        path.write_bytes(whole[:length])
        progress = Progress(tmp_path / "run")
        progress.set(5)
        progress.release()
        memory = Memory.open(tmp_path / "run")
        assert memory.steps == 2
        assert memory.remarks == (
            "the recording did not end normally, while a segment was being committed: 2 steps are "
            "committed, the 3 steps after that are lost",
        )
        resumed(tmp_path / "run").release()
        assert path.read_bytes() == whole[:second]
    path.write_bytes(whole[: second - 10] + whole[second:])
    with pytest.raises(MemoryFileError, match="line 1 of"):
        Memory.open(tmp_path / "run")


@pytest.mark.parametrize(
    ("trained", "said"),
    [
        (3, "no further step was completed"), (4, "the 1 step after that is lost"),
        (7, "the 4 steps after that are lost"), (2, "is not known"),
    ],
)  # fmt: skip
def test_lost_steps_are_counted_to_the_last(tmp_path: Path, trained: int, said: str) -> None:
    path = tmp_path / "run"
    if (child := os.fork()) == 0:
        with contextlib.suppress(BaseException):
            sample, writer = Sample(), MemoryWriter(path)
            writer.begin(description())
            writer.commit(sample.content(3))
            for step in range(trained + 1):
                writer.progress.set(step)
            os.kill(os.getpid(), signal.SIGKILL)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    (remark,) = Memory.open(path).remarks
    assert remark.startswith("the recording did not end normally: 3 steps are committed, ")
    assert said in remark


def test_a_memory_of_one_step_speaks_of_one(tmp_path: Path) -> None:
    write(tmp_path / "run", (1,), closed=False)
    assert "1 step is committed" in Memory.open(tmp_path / "run").remarks[-1]
    assert "1 step, layers" in repr(Memory.open(tmp_path / "run"))


def test_a_memory_is_read_while_it_is_written(tmp_path: Path) -> None:
    sample = Sample()
    writer = MemoryWriter(tmp_path / "run")
    writer.begin(description())
    memory = Memory.open(tmp_path / "run")
    assert (memory.steps, memory.layers, memory.is_being_recorded) == (0, (), True)
    for steps in (2, 1, 3):
        writer.commit(sample.content(steps))
        before, memory = memory, memory.refresh()
        assert memory.steps == before.steps + steps
        assert memory.remarks[-1].startswith("still being recorded")
        dict(read_all(memory))
    writer.end(closed=False, remarks=["the disk was full"])
    writer.release()
    assert Memory.open(tmp_path / "run").remarks[0] == "the disk was full"
    assert not Memory.open(tmp_path / "run").is_being_recorded


def test_the_cost_of_a_commit_does_not_grow(tmp_path: Path) -> None:
    sample = Sample()
    writer = MemoryWriter(tmp_path / "run")
    writer.begin(description())
    manifest = (tmp_path / "run" / MANIFEST).read_bytes()
    sizes = []
    for _ in range(30):
        before = (tmp_path / "run" / LINES).stat().st_size
        writer.commit(sample.content(1))
        sizes.append((tmp_path / "run" / LINES).stat().st_size - before)
        assert (tmp_path / "run" / MANIFEST).read_bytes() == manifest
    writer.release()
    assert max(sizes[1:]) < min(sizes[1:]) + 100


def test_what_is_not_a_memorys_is_never_deleted(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    for options in ({}, {"overwrite": True}, {"resume": True}):
        with pytest.raises(RecordingError, match=r"notes\.txt"):
            MemoryWriter(tmp_path, **options)
    write(tmp_path / "run")
    with pytest.raises(RecordingError, match="already holds a recorded memory"):
        MemoryWriter(tmp_path / "run")
    (tmp_path / "run" / MANIFEST).unlink()
    with pytest.raises(RecordingError, match="is gone"):
        MemoryWriter(tmp_path / "run")
    MemoryWriter(tmp_path / "run", overwrite=True).release()
    assert not list((tmp_path / "run" / "segments").iterdir())


def test_a_forked_process_neither_holds_nor_releases_the_lock(tmp_path: Path) -> None:
    progress = Progress(tmp_path)
    progress.set(3)
    if (child := os.fork()) == 0:
        with contextlib.suppress(BaseException):
            progress.set(99)
            progress.release()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert Progress.is_held(tmp_path)
    assert Progress.read(tmp_path) == 3
    with pytest.raises(RecordingError, match="another process"):
        Progress(tmp_path)
    progress.release()
    progress.release()
    progress.set(4)
    assert Progress.read(tmp_path) == 3
    assert not Progress.is_held(tmp_path)


def test_locks_that_are_gone_are_not_remembered(tmp_path: Path) -> None:
    before = len(_open)
    for _ in range(20):
        Progress(tmp_path).release()
    assert len(_open) <= before + 1
    assert len(os.listdir("/proc/self/fd")) < 200
