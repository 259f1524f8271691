"""The ring of buffers: how much memory it takes, and that training waits for a slow disk."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.memory.runs import python, rebuild
from torch import nn

import dualform as df
from dualform.memory import Memory
from dualform.memory.writing import MemoryWriter
from dualform.recording.regions import HUGE, Region
from dualform.recording.ring import BufferSet
from dualform.recording.sink import SETS

MEGABYTE = 1 << 20

SLOW_DISK = """if True:
    import json, os, sys, threading, time
    import torch
    from torch import nn
    import dualform as df

    def memory_use(what):
        with open("/proc/self/status") as file:
            return next(int(line.split()[1]) * 1024 for line in file if line.startswith(what))

    def shared():  # what is given back of it leaves the process, but not the memory
        with open("/proc/self/maps") as file:
            ranges = [line.split()[0].split("-") for line in file if line.split()[1][3] == "s"]
        return sum(int(end, 16) - int(start, 16) for start, end in ranges)

    def layer_of(step):
        return {"one": 0, "in turn": step // 24 % 4}[sys.argv[2]]

    torch.set_num_threads(1)
    model = nn.ModuleList([nn.Linear(256, 256) for _ in range(4)])
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)

    def update(step, size):
        inputs = torch.randn(size, 256)
        model[layer_of(step)](inputs).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    for step in range(0, 96, 24):  # whatever torch itself needs
        update(step, 700)
    with df.record(model, optimizer, sys.argv[1] + "/warm", segment_bytes=1 << 16):
        update(0, 10)

    delay, real_write, waits = float(sys.argv[3]), os.write, []

    def slow_write(descriptor, data):
        if len(data) > 10000:
            time.sleep(delay)
            waits.append(delay)
        return real_write(descriptor, data)

    os.write = slow_write
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # forget the peak so far
    before, mapped = memory_use("VmRSS"), [shared()]
    started = time.monotonic()
    with df.record(model, optimizer, sys.argv[1] + "/run", segment_bytes=8 << 20) as recorder:
        for step in range(192):
            update(step, 100 + step * 3)  # uneven and growing
            mapped.append(shared())
        loop = time.monotonic() - started
    largest = (100 + 191 * 3) * 512 * 4
    print(json.dumps({
        "peak": memory_use("VmHWM") - before + max(mapped) - mapped[0],
        "bound": recorder.buffer_bytes + 3 * largest,
        "loop": loop,
        "slept": sum(waits),
        "total": sum(100 + step * 3 for step in range(192)) * 512 * 4,
    }))
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's /proc")
@pytest.mark.parametrize("layers", ["one", "in turn"])
def test_memory_use_stays_within_the_stated_bound_when_the_disk_is_slow(
    tmp_path: Path, layers: str
) -> None:
    done = python(SLOW_DISK, tmp_path, layers, 0.15)
    assert done.returncode == 0, done.stderr
    seen: dict[str, Any] = json.loads(done.stdout)
    assert seen["total"] > 4 * seen["bound"]
    index = 50 * seen["total"] // (512 * 4)  # of inputs seen, by content
    assert seen["peak"] < seen["bound"] + index + 20 * MEGABYTE, seen  # what the rest needs
    assert seen["loop"] > 0.6 * seen["slept"] > 0, "training did not wait for the disk"
    memory = Memory.open(tmp_path / "run")
    memory.check()
    assert memory.steps == 192
    assert (memory.closed, memory.remarks) == (True, ())


def test_a_region_keeps_its_rows_when_it_grows() -> None:
    region = Region(3, torch.float32, 1)
    rows = torch.arange(300_000 * 3.0).view(-1, 3)
    for low in range(0, len(rows), 7_919):
        region.append(rows[low : low + 7_919])
    (seen,) = region.tensor_bytes("x").pieces
    assert torch.equal(torch.frombuffer(seen, dtype=torch.float32).view(-1, 3), rows)
    assert region.touched == region.bytes
    region.rows = 10
    region.trim()
    assert region.touched == 120
    region.append(rows[10:20])
    (seen,) = region.tensor_bytes("x").pieces
    assert torch.equal(torch.frombuffer(seen, dtype=torch.float32).view(-1, 3), rows[:20])


def resident(region: Region) -> int:
    """What this process has in memory of the mapping that a region lies in."""
    address = region._memory[1].data_ptr()
    inside = False
    with open("/proc/self/smaps") as file:
        for line in file:
            if not line.split()[0].endswith(":"):  # a mapping's own line: its addresses come first
                low, high = (int(part, 16) for part in line.split()[0].split("-"))
                inside = low <= address < high
            elif inside and line.startswith("Rss:"):
                return int(line.split()[1]) * 1024
    raise AssertionError("the region lies in no mapping")


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="needs Linux's /proc")
@pytest.mark.parametrize("size", [HUGE // 2, 4 * HUGE])
def test_trimmed_memory_is_really_given_back(size: int) -> None:
    rows = size // 4096
    region = Region(1024, torch.float32, rows)
    empty = resident(region)
    for _ in range(rows // 8):
        region.append(torch.ones(8, 1024))
    filled = resident(region)
    assert filled - empty > 0.8 * size
    region.rows = 8
    region.trim()
    assert filled - resident(region) > 0.8 * size
    region.rows = rows  # what was given back comes again as zeros
    (seen,) = region.tensor_bytes("x").pieces
    values = torch.frombuffer(seen, dtype=torch.float32).view(rows, 1024)
    assert values[:8].eq(1).all()
    assert values[8:].eq(0).all()


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="needs Linux's /proc")
def test_a_forked_process_gets_none_of_the_rows() -> None:
    """Else every page would be copied when it is next written to, for as long as workers live."""
    region = Region(1024, torch.float32, 64)
    region.append(torch.ones(64, 1024))
    (seen,) = region.tensor_bytes("x").pieces
    if (child := os.fork()) == 0:
        os._exit(0 if not any(seen[::4096]) and not any(seen[3::4096]) else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert torch.frombuffer(seen, dtype=torch.float32).eq(1).all()


def test_a_cleared_set_forgets_layers_that_were_not_seen() -> None:
    from dualform.layers import Layer

    one, two = (Layer(name, "linear", f"{name}.weight", None, 2, 2) for name in "ab")
    collected = BufferSet()
    for layer in (one, two):
        collected.keys[layer] = Region(2, torch.float32, 5)
        collected.error_signals[layer] = Region(2, torch.float32, 5)
    collected.visits[one] = []
    collected.clear()
    assert set(collected.keys) == set(collected.error_signals) == {one}


def make(width: int = 4) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(width, 5), nn.Tanh(), nn.Linear(5, 2)).double()
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)


def test_steps_larger_than_a_segment_are_one_segment_each(tmp_path: Path) -> None:
    model, optimizer = make()
    with df.record(model, optimizer, tmp_path, segment_bytes=1000):
        for size in (500, 1, 2000, 3):
            model(torch.randn(size, 4, dtype=torch.float64)).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    memory = Memory.open(tmp_path)
    memory.check()
    assert [f.step for f in memory.fingerprints] == [1, 2, 3, 4]
    assert len(memory.layer("0")) == 2504
    for name, value in rebuild(memory, 4).items():
        assert torch.allclose(value, model.get_parameter(name), rtol=1e-12, atol=1e-14)


def test_tiny_steps_do_not_pile_up(tmp_path: Path) -> None:
    """A step of few bytes costs memory all the same: its record counts."""
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with df.record(model, optimizer, tmp_path, segment_bytes=100_000):
        for _ in range(200):
            model(torch.ones(1, 1)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert len(Memory.open(tmp_path).fingerprints) > 2


def test_layers_that_come_and_go_keep_their_rows_apart(tmp_path: Path) -> None:
    model = nn.ModuleList([nn.Linear(3, 2) for _ in range(3)]).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with df.record(model, optimizer, tmp_path, segment_bytes=4000) as recorder:
        for step in range(30):
            layer = model[step // 7 % 3]
            inputs = torch.full((2 + step % 3, 3), float(step), dtype=torch.float64)
            recorder.tag(example=torch.arange(len(inputs)) + 100 * step)
            layer(inputs).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    memory = Memory.open(tmp_path)
    memory.check()
    assert set(memory.layers) == {"0", "1", "2"}
    for name in memory.layers:
        layer_memory = memory.layer(name)
        assert (layer_memory.keys[:, 0].numpy() == layer_memory.patterns["step"]).all()
        assert (layer_memory.patterns["example"] // 100 == layer_memory.patterns["step"]).all()


def test_there_are_three_sets() -> None:
    assert SETS == 3  # said in the docs


# -- the end ---------------------------------------------------------------------------------------


class Unlucky(Exception):
    pass


def raise_unlucky(*_: Any, **__: Any) -> Any:
    raise Unlucky("just so")


def writers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "dualform-writer"]


@pytest.fixture
def no_writer_is_left() -> Iterator[None]:
    assert not writers()
    yield
    assert not writers()


def update(model: nn.Module, optimizer: torch.optim.Optimizer, size: int = 50) -> None:
    model(torch.randn(size, 4, dtype=torch.float64)).mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def assert_holds_steps_of_the_run(path: Path, steps: int) -> Memory:
    memory = Memory.open(path)
    memory.check()
    assert memory.steps == steps
    assert not memory.is_being_recorded
    return memory


@pytest.mark.usefixtures("no_writer_is_left")
def test_a_step_that_cannot_be_closed_leaves_no_thread_and_what_was_committed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run() -> None:
        model, optimizer = make()
        with df.record(model, optimizer, tmp_path) as recorder:
            for _ in range(3):
                update(model, optimizer)
            recorder.flush()
            monkeypatch.setattr("dualform.recording.steps.Steps.close", raise_unlucky)
            update(model, optimizer)

    with pytest.raises(Unlucky):
        run()
    assert_holds_steps_of_the_run(tmp_path, 3)


@pytest.mark.usefixtures("no_writer_is_left")
def test_a_step_that_cannot_be_closed_at_the_very_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two optimizers: the last step is still open when the block ends."""

    def run() -> None:
        model = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 2)).double()
        one, two = (torch.optim.SGD(part.parameters(), lr=0.1) for part in model)
        with df.record(model, [one, two], tmp_path) as recorder:
            for optimizer in (one, two, one):
                model(torch.randn(3, 4, dtype=torch.float64)).mean().backward()
                optimizer.step()
                if optimizer is two:
                    recorder.flush()
            monkeypatch.setattr("dualform.recording.steps.Steps.close", raise_unlucky)

    with pytest.raises(Unlucky):
        run()
    assert_holds_steps_of_the_run(tmp_path, 2)


@pytest.mark.usefixtures("no_writer_is_left")
def test_a_disk_that_fails_leaves_no_thread_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    def run() -> None:
        model, optimizer = make()
        with df.record(model, optimizer, tmp_path, segment_bytes=1000) as recorder:
            for _ in range(2):
                update(model, optimizer)
            recorder.flush()
            monkeypatch.setattr(MemoryWriter, "commit", fail)
            for _ in range(20):
                update(model, optimizer)

    with pytest.raises(df.RecordingError, match="The 2 steps committed before are safe"):
        run()
    memory = assert_holds_steps_of_the_run(tmp_path, 2)
    assert not memory.closed
    assert "writing failed: [Errno 28] No space left on device" in memory.remarks


@pytest.mark.usefixtures("no_writer_is_left")
def test_a_last_commit_that_cannot_be_gathered_keeps_those_handed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run() -> None:
        model, optimizer = make()
        with df.record(model, optimizer, tmp_path, segment_bytes=10_000):
            for size in (500, 500, 1):  # the last one does not fill a segment
                update(model, optimizer, size)
            monkeypatch.setattr("dualform.recording.tags.Tags.new_strings", raise_unlucky)

    with pytest.raises(Unlucky):
        run()
    memory = assert_holds_steps_of_the_run(tmp_path, 2)
    assert not memory.closed
    assert "closing the memory failed: Unlucky: just so" in memory.remarks


@pytest.mark.usefixtures("no_writer_is_left")
def test_a_commit_without_room_can_be_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = make()
    with df.record(model, optimizer, tmp_path) as recorder:
        for _ in range(2 * SETS):
            update(model, optimizer)
            with monkeypatch.context() as patch:
                patch.setattr(BufferSet, "make_room", raise_unlucky)
                with pytest.raises(Unlucky):
                    recorder.flush()
        recorder.flush()
        assert Memory.open(tmp_path).steps == 2 * SETS
    assert assert_holds_steps_of_the_run(tmp_path, 2 * SETS).closed


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_process_that_leaves_the_block_changes_nothing(tmp_path: Path) -> None:
    model, optimizer = make()
    child = -1
    with df.record(model, optimizer, tmp_path) as recorder:
        update(model, optimizer)
        recorder.flush()
        manifest = (tmp_path / "manifest.json").read_bytes()
        if (child := os.fork()) == 0:
            try:
                recorder.__exit__(None, None, None)
            finally:
                os._exit(0 if (tmp_path / "manifest.json").read_bytes() == manifest else 1)
        assert os.waitpid(child, 0)[1] == 0
        assert Memory.open(tmp_path).is_being_recorded
        update(model, optimizer)
    assert assert_holds_steps_of_the_run(tmp_path, 2).closed


def test_a_region_keeps_what_is_laid_out_or_signed_in_another_way() -> None:
    """Transposed rows, rows of another dtype, and rows whose sign torch only takes note of."""
    region = Region(3, torch.float32, 1)
    negated = torch.randn(4, 3, 2)
    negated = torch.view_as_complex(negated).conj().imag
    assert negated.is_neg()
    given = [torch.randn(3, 5).T, torch.randn(2, 3).double(), negated, torch.randn(0, 3)]
    for rows in given:
        assert torch.equal(region.append(rows), rows.float().resolve_neg())
    assert torch.equal(region.filled, torch.cat([rows.float().resolve_neg() for rows in given]))
