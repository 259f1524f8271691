"""Where a new memory may go, and what is left there when writing it is cut off.

The destination is a complete memory or none, whatever happens: an error, Ctrl-C, a full disk, or
`kill -9` between any two calls that change something on disk. The source is never touched.
"""

from __future__ import annotations

import collections
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.compaction.sources import Net, batches, record
from tests.memory.runs import ENVIRONMENT, python
from tests.memory.tampering import read_manifest
from torch.nn import functional as F

import dualform as df

CHOICES: dict[str, Any] = {"dtype": "float16", "layers": ["fc1", "fc2"], "error_signals": "fc1"}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("destinations") / "source"
    record(path)
    return path


# Refusals -----------------------------------------------------------------------------------------


def test_the_source_is_never_the_destination(source: Path, contents: Any, tmp_path: Path) -> None:
    before = contents(source)
    (tmp_path / "link").symlink_to(source)
    for path in (source, source / "inside", source.parent, tmp_path / "link"):
        for overwrite in (False, True):
            with pytest.raises(df.RecordingError, match="never changed"):
                df.compact(source, path, overwrite=overwrite)
    assert contents(source) == before


@pytest.mark.parametrize("place", ["s3://bucket/run", "file:///tmp/run", Path("gs://bucket/run")])
def test_a_url_is_no_destination(
    source: Path, place: str | Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(df.RecordingError, match="looks like a URL; expected a directory"):
        df.compact(source, place)
    with pytest.raises(df.DualFormError, match="looks like a URL; expected a directory"):
        df.estimate(Net(), batch=4, steps=5, path=place)
    assert not list(tmp_path.iterdir())


def test_foreign_files_are_never_touched(source: Path, contents: Any, tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    before = contents(tmp_path)
    for overwrite in (False, True):
        with pytest.raises(df.RecordingError, match=r"thesis\.tex"):
            df.compact(source, tmp_path, overwrite=overwrite)
    assert contents(tmp_path) == before
    (tmp_path / "file").write_text("")
    with pytest.raises(df.RecordingError, match="cannot be used"):
        df.compact(source, tmp_path / "file")


def test_a_memory_is_replaced_only_if_asked_for(
    source: Path, contents: Any, tmp_path: Path
) -> None:
    path = tmp_path / "made"
    df.compact(source, path, dtype="float16")
    before = contents(path)
    with pytest.raises(df.RecordingError, match=r"already holds a memory.*overwrite=True"):
        df.compact(source, path, layers="fc1")
    with pytest.raises(df.RecordingError, match="dtype="):
        df.compact(source, path, dtype="float8", overwrite=True)
    assert contents(path) == before
    df.compact(source, path, layers="fc1", overwrite=True)
    assert df.Memory.open(path).layers == ("fc1",)


def test_a_memory_that_is_being_recorded_is_refused(tmp_path: Path) -> None:
    net = Net().double()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with df.record(net, optimizer, tmp_path / "live") as recorder:
        for inputs, labels in batches(0, 3, (6,)):
            F.cross_entropy(net(inputs), labels).backward()
            optimizer.step()
            optimizer.zero_grad()
        recorder.flush()
        with pytest.raises(df.RecordingError, match="still being recorded"):
            df.compact(tmp_path / "live", tmp_path / "no", dtype="float16")
    assert df.compact(tmp_path / "live", tmp_path / "yes", dtype="float16").passed


@pytest.mark.parametrize("which", ["segment", "initial", "snapshot"])
def test_a_damaged_source_is_refused(source: Path, which: str, tmp_path: Path) -> None:
    broken = Path(shutil.copytree(source, tmp_path / "broken"))
    files = {
        "segment": broken / "segments" / read_manifest(broken)["segments"][-1]["file"],
        "initial": broken / "initial.safetensors",
        "snapshot": next((broken / "snapshots").iterdir()),
    }
    with open(files[which], "r+b") as file:
        file.seek(-9, os.SEEK_END)
        byte = file.read(1)
        file.seek(-9, os.SEEK_END)
        file.write(bytes([byte[0] ^ 1]))
    with pytest.raises(df.MemoryFileError, match="damaged"):
        df.compact(broken, tmp_path / "no", **CHOICES)
    assert not (tmp_path / "no").exists()


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ({"dtype": "float8"}, "float32.*float16, bfloat16"),
        ({"layers": "fc9"}, "matches no layer.*fc1, fc2, fc3"),
        ({"layers": []}, "layers=\\[\\]"),
        ({"error_signals": ["fc9"]}, "matches no layer"),
    ],
)
def test_what_cannot_be_had_is_refused_before_anything_is_read(
    source: Path, choices: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(df.RecordingError, match=message):
        df.compact(source, tmp_path / "no", **choices)
    assert not (tmp_path / "no").exists()


def test_16_bits_do_not_become_more(tmp_path: Path) -> None:
    record(tmp_path / "half", precision=torch.float32, dtype="float16")
    assert df.compact(tmp_path / "half", tmp_path / "same", dtype="float16").passed
    for dtype in ("float32", "bfloat16"):
        with pytest.raises(df.RecordingError, match="does not come back"):
            df.compact(tmp_path / "half", tmp_path / "no", dtype=dtype)


def test_a_full_disk_is_an_error_before_anything_is_written(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = collections.namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**9, 10**9 - 5000, 5000))
    with pytest.raises(df.RecordingError, match=r"takes about .* only 5\.0 kB are free"):
        df.compact(source, tmp_path / "deep" / "down", dtype="float16")
    assert not (tmp_path / "deep").exists()


# Cut off ------------------------------------------------------------------------------------------


def test_the_disk_filling_up_while_writing_leaves_nothing(source: Path, tmp_path: Path) -> None:
    code = """
import resource, signal, sys
import dualform as df
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (9000, 9000))
try:
    df.compact(sys.argv[1], sys.argv[2], dtype="float16")
except df.RecordingError as error:
    print(error)
"""
    done = python(code, source, tmp_path / "no")
    assert "cannot be used as the directory of a memory" in done.stdout, done.stderr
    assert not (tmp_path / "no").exists()


def test_ctrl_c_at_any_moment_leaves_nothing(source: Path, contents: Any, tmp_path: Path) -> None:
    before = contents(source)
    calls: list[tuple[int, int]] = []
    df.compact(source, tmp_path / "whole", progress=lambda *at: calls.append(at), **CHOICES)
    assert calls == sorted(calls)
    assert all(0 <= done <= total for done, total in calls)
    writing = [i for i, (done, total) in enumerate(calls) if total // 2 <= done < 3 * total // 4]
    assert len(writing) > 3
    existing = tmp_path / "existing"
    existing.mkdir()
    for i in [0, writing[0] - 1, *writing]:
        left = [i]

        def interrupt(done: int, total: int, left: list[int] = left) -> None:
            left[0] -= 1
            if left[0] < 0:
                raise KeyboardInterrupt

        for path in (tmp_path / "interrupted", existing):
            left[0] = i
            with pytest.raises(KeyboardInterrupt):
                df.compact(source, path, progress=interrupt, **CHOICES)
        assert not (tmp_path / "interrupted").exists()
        assert list(existing.iterdir()) == []
    assert contents(source) == before


KILLED = """
import json, os, sys
import torch
import dualform as df
from tests.memory.runs import _count_down

torch.set_num_threads(1)
source, place, choices = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
df.compact(source, place + "/whole", **choices)
n = ended = 0
while not ended:
    n += 1
    child = os.fork()
    if child == 0:
        _count_down(n)
        df.compact(source, f"{place}/{n}", **choices)
        os._exit(0)
    ended = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
print(n)
"""


def test_kill_9_at_any_call_leaves_a_whole_memory_or_none(contents: Any, tmp_path: Path) -> None:
    source = tmp_path / "source"
    record(source, steps=7)
    before = contents(source)
    done = subprocess.run(
        [sys.executable, "-c", KILLED, str(source), str(tmp_path), json.dumps(CHOICES)],
        env=ENVIRONMENT, capture_output=True, text=True, timeout=200, check=True,
    )  # fmt: skip
    deaths = int(done.stdout) - 1
    assert deaths > 20
    assert contents(source) == before
    expected = df.DualForm(None, tmp_path / "whole").weights(torch.float64)
    whole = 0
    for n in range(1, deaths + 2):
        path = tmp_path / str(n)
        try:
            memory = df.Memory.open(path)
        except df.MemoryFileError:
            assert not (path / "manifest.json").exists()
            continue
        whole += 1
        memory.check()
        for name, weight in df.DualForm(None, memory).weights(torch.float64).items():
            assert torch.equal(weight, expected[name])
    assert 1 <= whole <= 6  # the one that lived, and those killed after the manifest was in place
    dead = next(p for p in map(tmp_path.joinpath, map(str, range(deaths, 0, -1))) if _segments(p))
    with pytest.raises(df.RecordingError, match=r"manifest\.json that explains them is gone"):
        df.compact(source, dead, **CHOICES)
    assert df.compact(source, dead, overwrite=True, **CHOICES).passed


def _segments(path: Path) -> bool:
    return not (path / "manifest.json").exists() and any((path / "segments").glob("*"))
