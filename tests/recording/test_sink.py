"""The ring of buffers: how much memory it takes, and that training waits for a slow disk."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.memory.runs import python, rebuild
from torch import nn

import dualform as df
from dualform.memory import Memory
from dualform.recording.ring import BufferSet, Region
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
    before = memory_use("VmRSS")
    started = time.monotonic()
    with df.record(model, optimizer, sys.argv[1] + "/run", segment_bytes=8 << 20) as recorder:
        for step in range(192):
            update(step, 100 + step * 3)  # uneven and growing
        loop = time.monotonic() - started
    largest = (100 + 191 * 3) * 512 * 4
    print(json.dumps({
        "peak": memory_use("VmHWM") - before,
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
    assert seen["peak"] < seen["bound"] + 16 * MEGABYTE, seen
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
