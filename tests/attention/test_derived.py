"""Tables kept beside a memory: they change no answer, survive nothing they should not, and no one
has to care whether they are there."""

from __future__ import annotations

import copy
import logging
import os
import shutil
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import dualform as df
from dualform.attention import tables
from dualform.memory import derived as room

EVERYTHING = 16


@pytest.fixture
def keeping(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep tables of any size, of memories of any size."""
    monkeypatch.setattr(tables, "WORTH_KEEPING", 0)
    monkeypatch.setattr(tables, "SHARE", 1e-9)


@pytest.fixture
def path(run: Any, tmp_path: Path) -> Path:
    copy = tmp_path / "memory"
    shutil.copytree(run.path, copy)
    return copy


def answers(run: Any, path: Path) -> list[Any]:
    """Questions that tables answer: norms, key sums, group matrices."""
    dual = df.DualForm(copy.deepcopy(run.model), path)  # torch lends a model to one thread
    spotlight = dual.attend(run.inputs[:EVERYTHING])["fc1"]
    masked = dual.without(label=1).weights(torch.float64)
    return [
        spotlight.top(3)["weight"],
        spotlight.sum_by("label")["sum"],
        *(masked[name].numpy() for name in sorted(masked)),
    ]


def same(one: list[Any], other: list[Any]) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))


def kept(path: Path) -> list[Path]:
    return sorted((path / room.DERIVED).rglob("*.safetensors"))


def test_small_memories_are_not_given_files(run: Any, path: Path) -> None:
    answers(run, path)
    assert not (path / room.DERIVED).exists()


@pytest.mark.usefixtures("keeping")
def test_tables_are_kept_found_again_and_change_no_bit(
    run: Any, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = answers(run, path)
    names = [file.name.split("-")[0] for file in kept(path)]
    assert {"norms", "key", "learned"} <= set(names)
    before = {file: file.stat().st_mtime_ns for file in kept(path)}
    assert same(first, answers(run, path))  # another opening: from disk
    assert before == {file: file.stat().st_mtime_ns for file in kept(path)}

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("patterns were read again")

    monkeypatch.setattr(df.LayerMemory, "blocks", refuse)
    dual = df.DualForm(run.model, path)
    assert torch.isfinite(dual.without(label=2)(run.inputs)).all()


@pytest.mark.usefixtures("keeping")
def test_they_may_be_deleted_at_any_time(run: Any, path: Path) -> None:
    first = answers(run, path)
    dual = df.DualForm(run.model, path)
    shutil.rmtree(path / room.DERIVED)
    assert same(first, answers(run, path))
    assert kept(path)
    assert dual.verify(run.inputs).passed


@pytest.mark.usefixtures("keeping")
@pytest.mark.parametrize("how", ["a bit", "truncated", "emptied", "another's"])
def test_a_damaged_table_is_not_believed_but_made_again(
    run: Any, path: Path, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    first = answers(run, path)
    for number, file in enumerate(kept(path)):
        content = bytearray(file.read_bytes())
        if how == "a bit":
            content[8 + int.from_bytes(content[:8], "little")] ^= 4  # the first of the numbers
        elif how == "truncated":
            content = content[:-100]
        elif how == "emptied":
            content = bytearray()
        else:
            others = [f for f in kept(path) if f != file]
            content = bytearray(others[number % len(others)].read_bytes())
        file.write_bytes(content)
    with caplog.at_level(logging.WARNING, "dualform"):
        assert same(first, answers(run, path))
    assert "computed again" in caplog.text
    caplog.clear()
    assert same(first, answers(run, path))
    assert "computed again" not in caplog.text  # they were replaced by sound ones


@pytest.mark.usefixtures("keeping")
def test_every_flipped_byte_of_the_numbers_is_noticed(run: Any, path: Path) -> None:
    layer = df.Memory.open(path).layer("fc1")
    store = layer.derived
    assert store is not None
    numbers = torch.arange(6, dtype=torch.float64)
    assert store.save("some-table", {"numbers": numbers}, about="a test")
    file = store.path / "some-table.safetensors"
    content = file.read_bytes()
    start = content.index(numbers.numpy().tobytes())
    for place in range(start, start + 48):
        broken = bytearray(content)
        broken[place] ^= 1
        file.write_bytes(broken)
        assert store.load("some-table", about="a test") is None
    file.write_bytes(content)
    found = store.load("some-table", about="a test")
    assert found is not None
    assert torch.equal(found["numbers"], numbers)
    assert store.load("some-table", about="another test") is None


@pytest.mark.usefixtures("keeping")
def test_where_nothing_can_be_written_everything_still_works(run: Any, path: Path) -> None:
    expected = answers(run, path)
    shutil.rmtree(path / room.DERIVED)
    (path / room.DERIVED).write_text("in the way of a directory, whoever asks")
    assert same(expected, answers(run, path))


@pytest.mark.usefixtures("keeping")
def test_a_full_disk_leaves_no_half_table(
    run: Any, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = answers(run, path)
    shutil.rmtree(path / room.DERIVED)

    def full(*args: Any, **kwargs: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    assert same(expected, answers(run, path))
    assert not list((path / room.DERIVED).rglob("*.*"))


@pytest.mark.usefixtures("keeping")
def test_several_readers_at_once_do_not_disturb_each_other(run: Any, path: Path) -> None:
    expected = answers(run, path)
    shutil.rmtree(path / room.DERIVED)
    found: list[list[Any]] = []
    readers = [threading.Thread(target=lambda: found.append(answers(run, path))) for _ in range(4)]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join()
    assert len(found) == 4
    assert all(same(expected, one) for one in found)
    assert not list((path / room.DERIVED).rglob("*.tmp"))


# Recording over, and going on with, a memory that has them ----------------------------------------


def go_on(run: Any, path: Path, **options: Any) -> None:
    optimizer = torch.optim.SGD(run.model.parameters(), lr=0.2, momentum=0.9, weight_decay=1e-2)
    with df.record(run.model, optimizer, path, **options) as recorder:
        recorder.tag(example=[0, 1], label=[0, 1], task="third")
        run.model(run.inputs[:2]).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.usefixtures("keeping")
def test_going_on_with_a_memory_makes_its_tables_stale_and_the_next_reader_drops_them(
    train: Any,
) -> None:
    run = train(steps=10)
    answers(run, run.path)
    (old,) = {file.parent for file in kept(run.path)}
    go_on(run, run.path, resume=True)
    assert old.exists()
    memory = df.Memory.open(run.path)
    assert memory.steps == 11
    found = answers(run, run.path)
    (new,) = {file.parent for file in kept(run.path)}
    assert new != old
    assert not old.exists()
    shutil.rmtree(run.path / room.DERIVED)
    assert same(found, answers(run, run.path))


@pytest.mark.usefixtures("keeping")
def test_recording_anew_deletes_them(train: Any) -> None:
    run = train(steps=10)
    answers(run, run.path)
    assert kept(run.path)
    go_on(run, run.path, overwrite=True)
    assert not kept(run.path)
    assert df.Memory.open(run.path).steps == 1


@pytest.mark.usefixtures("keeping")
@pytest.mark.parametrize("name", ["notes.txt", "0123456789abcdef/notes.txt", "0123/norms-1.x"])
def test_files_of_others_among_them_are_never_deleted(train: Any, name: str) -> None:
    run = train(steps=4)
    foreign = run.path / room.DERIVED / name
    foreign.parent.mkdir(parents=True)
    foreign.write_text("mine")
    with pytest.raises(df.RecordingError, match="not a memory's"):
        go_on(run, run.path, overwrite=True)
    answers(run, run.path)
    assert foreign.read_text() == "mine"


@pytest.mark.usefixtures("keeping")
def test_while_a_memory_is_being_recorded_nothing_is_kept(train: Any, tmp_path: Path) -> None:
    run = train(steps=4)
    optimizer = torch.optim.SGD(run.model.parameters(), lr=0.1)
    with df.record(run.model, optimizer, tmp_path / "open") as recorder:
        recorder.tag(example=[0, 1], label=[0, 1], task="one")
        run.model(run.inputs[:2]).sum().backward()
        optimizer.step()
        recorder.flush()
        answers(run, tmp_path / "open")
        assert not (tmp_path / "open" / room.DERIVED).exists()
