"""Who may write where, and what is on disk afterwards."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import safetensors
import safetensors.torch
import torch
from tests.memory.runs import (
    assert_sound,
    make_model,
    python,
    reference,
    train,
    trainers,
    update,
)
from torch import nn

import dualform as df
from dualform import RecordingError
from dualform.memory import Memory
from dualform.memory.liveness import Progress, WriterLock
from dualform.memory.tensor_files import TensorFile, tensor_bytes, write_tensor_file
from dualform.memory.writing import MemoryWriter

Contents = Callable[[Path], dict[str, bytes]]


# -- whose directory it is -------------------------------------------------------------------------


def test_two_recorders_of_one_process_cannot_share_a_directory(tmp_path: Path) -> None:
    model, optimizer = make_model()
    with df.record(model, optimizer, tmp_path / "run"):
        for overwrite in (False, True):
            with pytest.raises(RecordingError, match=r"already holds|being recorded into"):
                train(tmp_path / "run", 1, overwrite=overwrite)
        for step in range(3):
            update(model, optimizer, step)
    memory = Memory.open(tmp_path / "run")
    assert memory.steps == 3
    assert_sound(memory)


def test_two_processes_cannot_share_a_directory(tmp_path: Path) -> None:
    path = tmp_path / "run"
    with trainers() as server:
        process = server.start(path, segment_bytes=1)
        while not Path(f"{path}.started").exists():
            time.sleep(0.001)
        with pytest.raises(RecordingError, match="another process"):
            MemoryWriter(path, overwrite=True)
        assert Memory.open(path).is_being_recorded
        os.kill(process, 9)
        server.wait(process)
    assert not Memory.open(path).is_being_recorded
    assert_sound(Memory.open(path))


def test_a_reader_that_looks_does_not_turn_a_recorder_away(tmp_path: Path) -> None:
    code = """if True:
        import sys, time
        from pathlib import Path
        from dualform.memory.liveness import WriterLock
        end = time.monotonic() + 2
        Path(sys.argv[1], "looking").touch()
        while time.monotonic() < end:
            WriterLock.is_held(Path(sys.argv[1]))
    """
    import threading

    WriterLock(tmp_path).release()
    reader = threading.Thread(target=python, args=(code, tmp_path))
    reader.start()
    while not (tmp_path / "looking").exists():
        time.sleep(0.01)
    for _ in range(300):
        WriterLock(tmp_path).release()
    reader.join()


def test_a_foreign_directory_is_left_alone(tmp_path: Path, contents: Contents) -> None:
    def make(name: str, content: bytes) -> None:
        path = tmp_path / "mine" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)

    for name, content in (
        ("thesis.tex", b"years of work"),
        ("segments/photo.jpg", b"holiday"),
        ("segments/000000.safetensors/inside", b"a directory of that name"),
        ("snapshots", b"a file"),
        ("manifest.json", b'{"name": "a web page"}'),
    ):
        make(name, content)
        before = contents(tmp_path)
        for overwrite in (False, True):
            with pytest.raises(RecordingError, match="nothing was touched"):
                train(tmp_path / "mine", 1, overwrite=overwrite)
            assert contents(tmp_path) == before
        shutil.rmtree(tmp_path / "mine")


def test_an_existing_memory_is_left_alone_without_overwrite(run: Path, contents: Contents) -> None:
    before = contents(run)
    with pytest.raises(RecordingError, match="overwrite=True"):
        train(run, 1)
    assert contents(run) == before
    (run / "manifest.json").unlink()
    before = contents(run)
    with pytest.raises(RecordingError, match="overwrite=True"):
        train(run, 1)
    assert contents(run) == before
    train(run, 2, overwrite=True)
    memory = Memory.open(run)
    assert memory.steps == 2
    assert_sound(memory)
    assert len(list((run / "segments").iterdir())) == 1


def test_a_damaged_memory_can_be_recorded_over(run: Path) -> None:
    manifest = run / "manifest.json"
    manifest.write_bytes(manifest.read_bytes()[:-40])
    train(run, 2, overwrite=True)
    assert_sound(Memory.open(run))


def test_the_remains_of_a_run_without_a_commit_are_no_obstacle(tmp_path: Path) -> None:
    (tmp_path / "segments").mkdir()
    (tmp_path / "progress").write_bytes(bytes(16))
    (tmp_path / "initial.safetensors").write_bytes(b"half")
    train(tmp_path, 2)
    assert_sound(Memory.open(tmp_path))


def test_a_directory_that_cannot_be_made_is_an_error_of_recording(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(RecordingError, match="cannot be used as the directory of a memory"):
        train(tmp_path / "file" / "run", 1)
    with pytest.raises(RecordingError, match="cannot be used as the directory of a memory"):
        train(tmp_path / "file", 1)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_read_only_directory_is_an_error_of_recording(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run").chmod(0o500)
    with pytest.raises(RecordingError, match="Permission denied"):
        train(tmp_path / "run", 1)


def test_the_directory_is_free_again_after_a_recording_that_could_not_begin(tmp_path: Path) -> None:
    class Sparse(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(2, 2)
            self.register_buffer("odd", torch.eye(2).to_sparse())

    model = Sparse()
    with pytest.raises((RecordingError, RuntimeError)):
        df.record(model, torch.optim.SGD(model.parameters()), tmp_path / "run").__enter__()
    assert not WriterLock.is_held(tmp_path / "run")
    train(tmp_path / "run", 1)


# -- what is on disk -------------------------------------------------------------------------------


def test_every_file_is_an_ordinary_safetensors_file(recorded: Path) -> None:
    files = sorted(recorded.rglob("*.safetensors"))
    assert {f.parent.name for f in files} == {"run", "segments", "snapshots"}
    for path in files:
        tensors = safetensors.torch.load_file(path)
        assert tensors
        assert path.stat().st_size % 4096 == 0
        ours = TensorFile(path)
        for name, value in tensors.items():
            if not name.startswith("padding/"):
                assert torch.equal(ours.tensor(name), value)
    for name, value in safetensors.torch.load_file(files[0]).items():
        if name.startswith("parameters/"):
            assert torch.equal(value, reference().after(0)[name.removeprefix("parameters/")])


def test_large_tensors_lie_at_page_boundaries(recorded: Path) -> None:
    from tests.memory.tampering import header

    entries, data = header(recorded / "segments" / "000000.safetensors")
    starts = [e["data_offsets"][0] for n, e in entries.items() if n.startswith(("keys", "error"))]
    assert starts
    assert not any((data + start) % 4096 for start in starts)


@pytest.mark.parametrize("direct", [True, False])
def test_tensors_of_every_type_and_size_come_back(tmp_path: Path, direct: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    values: dict[str, torch.Tensor] = {
        "scalar": torch.tensor(3),
        "nothing": torch.empty(0, 5),
        "one page": torch.randn(1024, generator=generator),
        "several stages": torch.randn(700_001, generator=generator),
        "turned": torch.randn(30, 40, generator=generator).T,
        "complex": torch.randn(3, 2, dtype=torch.complex64, generator=generator),
        "ü/…": torch.arange(3),
    }
    for dtype in (torch.float16, torch.bfloat16, torch.int8, torch.uint8, torch.bool, torch.int16):
        values[str(dtype)] = torch.ones(5, dtype=dtype)
    path = tmp_path / "a.safetensors"
    written = write_tensor_file(
        path, [tensor_bytes(n, v) for n, v in values.items()], {"a": 1}, direct=direct
    )
    file = TensorFile(path, written)
    file.check()
    assert file.metadata == {"a": 1}
    assert file.names == set(values)
    for name, value in values.items():
        assert torch.equal(file.tensor(name, value.shape, value.dtype), value)


def test_a_buffer_of_complex_numbers_comes_back(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    turns = torch.polar(torch.ones(3), torch.arange(3.0))
    model.register_buffer("turns", turns.clone())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with df.record(model, optimizer, tmp_path):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    memory = Memory.open(tmp_path)
    assert torch.equal(memory.buffer("turns"), turns)


@pytest.mark.skipif(not os.access("/dev/shm", os.W_OK), reason="no /dev/shm")
def test_a_file_system_without_direct_writing_serves_as_well() -> None:
    path = Path("/dev/shm") / f"dualform-test-{os.getpid()}"
    try:
        train(path, 6, segment_bytes=1)
        assert_sound(Memory.open(path))
    finally:
        shutil.rmtree(path, ignore_errors=True)


def test_nothing_recorded_is_a_memory_too(tmp_path: Path) -> None:
    train(tmp_path / "none", 0)
    memory = Memory.open(tmp_path / "none")
    assert (memory.steps, memory.closed, memory.layers, memory.remarks) == (0, True, (), ())
    assert memory.fingerprints == ()
    assert set(memory.hashes) == {"initial", "log", "manifest"}
    assert "none" in repr(memory)
    assert_sound(memory)
    with pytest.raises(df.QueryError, match="no layer 'fc'"):
        memory.layer("fc")


def test_steps_without_patterns_are_a_memory_too(tmp_path: Path) -> None:
    class Gain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gain = nn.Parameter(torch.ones(3))

    model = Gain()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with df.record(model, optimizer, tmp_path):
        for _ in range(3):
            model.gain.sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    memory = Memory.open(tmp_path)
    memory.check()
    assert memory.layers == ()
    assert torch.allclose(memory.learned("gain", 3), torch.full((3,), -0.3, dtype=torch.float64))
    with pytest.raises(df.QueryError, match="holds 0 to 3"):
        memory.learned("gain", 4)


def test_many_small_segments_with_few_open_files(tmp_path: Path) -> None:
    train(tmp_path / "run", 150, segment_bytes=1)
    assert len(Memory.open(tmp_path / "run").fingerprints) == 150
    code = """if True:
        import resource, sys
        import torch
        from tests.memory.runs import rebuild
        from dualform.memory import Memory
        rebuild(Memory.open(sys.argv[2]), 1)
        resource.setrlimit(resource.RLIMIT_NOFILE, (40, 40))
        memory = Memory.open(sys.argv[1])
        memory.check()
        memory.fingerprints
        rebuild(memory, memory.steps)
    """
    train(tmp_path / "warm", 1)
    done = python(code, tmp_path / "run", tmp_path / "warm")
    assert done.returncode == 0, done.stderr
    assert_sound(Memory.open(tmp_path / "run"))


def test_how_steps_are_cut_into_segments_does_not_matter(tmp_path: Path) -> None:
    memories = []
    for index, size in enumerate((1, 7_000, 1 << 26)):
        train(tmp_path / str(index), 20, segment_bytes=size)
        memories.append(Memory.open(tmp_path / str(index)))
        assert_sound(memories[-1])
    assert len({len(m.fingerprints) for m in memories}) == 3
    for name in memories[0].layers:
        layers = [m.layer(name) for m in memories]
        assert len({len(layer) for layer in layers}) == 1
        for other in layers[1:]:
            assert torch.equal(layers[0].keys, other.keys)
            assert torch.equal(layers[0].error_signals, other.error_signals)
            for column in layers[0].patterns.names:
                assert np.array_equal(layers[0].patterns[column], other.patterns[column])


def test_a_slow_run_commits_by_the_clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dualform.recording.sink.COMMIT_SECONDS", 0.05)
    train(tmp_path / "run", 4, after_step=lambda step: time.sleep(0.06))
    assert len(Memory.open(tmp_path / "run").fingerprints) >= 3


def test_progress_that_is_damaged_is_not_believed(tmp_path: Path) -> None:
    progress = Progress(tmp_path)
    progress.set(41)
    assert Progress.read(tmp_path) == 41
    progress.close()
    (tmp_path / "progress").write_bytes(b"\xff" * 16)
    assert Progress.read(tmp_path) is None
    (tmp_path / "progress").write_bytes(b"\x01")
    assert Progress.read(tmp_path) is None
    (tmp_path / "progress").unlink()
    assert Progress.read(tmp_path) is None


# -- a disk that is full ---------------------------------------------------------------------------

FULL_DISK = """if True:
    import resource, signal, sys
    from pathlib import Path
    import dualform as df
    from tests.memory.runs import make_model, update, train
    where, during = Path(sys.argv[1]), sys.argv[2]
    train(where / "warm", 1)
    model, optimizer = make_model()
    step = 0
    if during == "beginning":
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))
    try:
        with df.record(model, optimizer, where / "run", segment_bytes=20_000) as recorder:
            while step < 400:
                update(model, optimizer, step)
                step += 1
                if step == 12:
                    recorder.flush()
                    limit = {"segment": 9000, "everything": 1}[during]
                    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    except df.RecordingError as error:
        print(error)
        if during != "beginning":  # raised right after an update: it has been made
            step = recorder.steps
            optimizer.zero_grad()
    while step < 20:
        update(model, optimizer, step)
        step += 1
    print("trained", step, model[1].weight.sum().item())
"""


@pytest.mark.parametrize("during", ["beginning", "segment", "everything"])
def test_a_full_disk_ends_the_recording_and_not_the_training(tmp_path: Path, during: str) -> None:
    done = python(FULL_DISK, tmp_path, during)
    assert done.returncode == 0, done.stderr
    message, trained = done.stdout.splitlines()
    assert "File too large" in message
    _, steps, total = trained.split()
    expected = float(reference().after(int(steps))["1.weight"].sum())
    assert float(total) == pytest.approx(expected, rel=1e-12)
    if during == "beginning":
        with pytest.raises(df.MemoryFileError):
            Memory.open(tmp_path / "run")
        train(tmp_path / "run", 2)
        return
    assert "12 steps committed before are safe" in message
    memory = Memory.open(tmp_path / "run")
    assert memory.steps == 12
    assert not memory.closed
    assert "lost" in memory.remarks[-1]
    assert_sound(memory)
    orphans = {f.name for f in (tmp_path / "run" / "segments").iterdir()}
    assert len(orphans) == len(memory.fingerprints)
