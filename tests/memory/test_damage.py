"""Damaged bytes never become numbers: whatever reads them raises, and nothing else goes wrong."""

from __future__ import annotations

import contextlib
import json
import shutil
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.memory.samples import Sample, description, questions, read_all, write

from dualform.errors import DualFormError, MemoryFileError
from dualform.memory import Memory, MemoryWriter
from dualform.memory.fields import seal, unseal
from dualform.memory.files import LINES, MANIFEST
from dualform.memory.liveness import PROGRESS
from dualform.memory.tensor_files import CHECKSUM_BLOCK


def answers(run: Path, allowed: type[Exception] = MemoryFileError) -> dict[str, Any]:
    """Every answer that is not refused; any other exception is a failure."""
    try:
        memory = Memory.open(run)
    except MemoryFileError:
        return {}
    found = {}
    for name, ask in questions(memory):
        with contextlib.suppress(allowed):
            found[name] = ask()
    return found


def flip(path: Path, bit: int) -> None:
    content = bytearray(path.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)


@pytest.mark.parametrize("name", [MANIFEST, LINES])
def test_any_flipped_bit_of_a_text_is_found(tmp_path: Path, name: str) -> None:
    write(tmp_path / "run", (1, 2))
    path = tmp_path / "run" / name
    sound, rng = path.read_bytes(), np.random.default_rng(0)
    for bit in rng.integers(0, 8 * len(sound), 300).tolist():
        flip(path, bit)
        with pytest.raises(MemoryFileError):
            Memory.open(tmp_path / "run")
        path.write_bytes(sound)
    for bit in range(8 * len(sound) - 24, 8 * len(sound)):
        flip(path, bit)
        with pytest.raises(MemoryFileError):
            Memory.open(tmp_path / "run")
        path.write_bytes(sound)


def test_any_flipped_bit_of_a_run_that_died_is_found(tmp_path: Path) -> None:
    write(tmp_path / "run", (1, 2), closed=False)
    path = tmp_path / "run" / LINES
    sound = path.read_bytes()
    for bit in [*range(8 * len(sound) - 80, 8 * len(sound)), *range(0, 8 * len(sound), 77)]:
        flip(path, bit)
        with pytest.raises(MemoryFileError):
            Memory.open(tmp_path / "run")
        path.write_bytes(sound)


@pytest.mark.parametrize("stored", ["float32", "float16"])
def test_flipped_bits_give_the_same_numbers_or_an_error(tmp_path: Path, stored: str) -> None:
    write(tmp_path / "run", (2, 3), stored=stored)
    sound = answers(tmp_path / "run")
    rng = np.random.default_rng(1)
    found = 0
    for path in sorted((tmp_path / "run").rglob("*")):
        if not path.is_file():
            continue
        content = path.read_bytes()
        for bit in rng.integers(0, 8 * len(content), 12).tolist():
            flip(path, bit)
            seen = answers(tmp_path / "run")
            assert all(sound[name] == value for name, value in seen.items()), (path, bit)
            found += seen.keys() != sound.keys()
            if path.suffix == ".safetensors":
                with pytest.raises(MemoryFileError, match="do not match their checksum"):
                    Memory.open(tmp_path / "run").check()
            path.write_bytes(content)
    assert found


def test_a_flipped_bit_is_found_by_each_way_to_read_it(tmp_path: Path) -> None:
    """Blocks are apart here, so one question after the other meets the damage or does not."""
    sample = Sample(rows=40_000)
    writer = MemoryWriter(tmp_path / "run")
    writer.begin(description())
    writer.commit(sample.content(2))
    writer.end(closed=True)
    writer.release()
    memory = Memory.open(tmp_path / "run")
    segment = memory.opened.segments[0]
    place = segment.file.places["rows/tags/weight"]
    path, low = segment.path, place.start + 4 * 6 * 1000
    assert place.stop - place.start < CHECKSUM_BLOCK < segment.bytes
    flip(path, 8 * low + 30)
    memory = Memory.open(tmp_path / "run")
    with pytest.raises(MemoryFileError, match="rows/tags/weight"):
        memory.layer("tags").read("weight", 1000, 1001)
    with pytest.raises(MemoryFileError, match="Restore the file from a copy"):
        memory.layer("tags").read("weight", 1000, 1001)  # nor the second time
    assert sum(segment.file._verified) < len(segment.blocks)


def test_only_blocks_that_are_touched_are_read(tmp_path: Path) -> None:
    sample = Sample(rows=100_000)
    writer = MemoryWriter(tmp_path / "run")
    writer.begin(description())
    writer.commit(sample.content(3))
    writer.end(closed=True)
    writer.release()
    memory = Memory.open(tmp_path / "run")
    file = memory.opened.segments[0].file
    before = sum(file._verified)
    memory.layer("fc1").read("error_signals", 0, 10)
    assert sum(file._verified) == before + 1 < len(file._verified)


def test_files_that_are_cut_short_or_gone_are_named(tmp_path: Path) -> None:
    write(tmp_path / "run")
    path = tmp_path / "run" / "segments" / "000001.safetensors"
    content = path.read_bytes()
    for broken in (content[:-1], content + b"\0", b""):
        path.write_bytes(broken)
        with pytest.raises(MemoryFileError, match="000001"):
            Memory.open(tmp_path / "run")
    path.unlink()
    with pytest.raises(MemoryFileError, match=r"000001.*deleted"):
        Memory.open(tmp_path / "run")
    path.mkdir()
    with pytest.raises(MemoryFileError, match="000001"):
        Memory.open(tmp_path / "run")


def test_lines_that_are_missing_exchanged_or_of_another_memory_are_found(tmp_path: Path) -> None:
    write(tmp_path / "run", (2, 2, 2), closed=False)
    write(tmp_path / "other", (2, 2, 2), closed=False)
    path = tmp_path / "run" / LINES
    lines = path.read_bytes().splitlines(keepends=True)
    other = (tmp_path / "other" / LINES).read_bytes().splitlines(keepends=True)
    for wrong in (
        [lines[0], lines[2]], lines[1:], [lines[1], lines[0], lines[2]], [lines[0], lines[0]],
        [lines[0], other[1], lines[2]], other, [*lines, lines[2]], [lines[0], b"\n", lines[1]],
    ):  # fmt: skip
        path.write_bytes(b"".join(wrong))
        with pytest.raises(MemoryFileError):
            Memory.open(tmp_path / "run")


def test_lines_that_a_closed_memory_lacks_are_missed(tmp_path: Path) -> None:
    write(tmp_path / "run", (2, 2, 2))
    path = tmp_path / "run" / LINES
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:2]))
    with pytest.raises(MemoryFileError, match="truncated"):
        Memory.open(tmp_path / "run")


def test_two_segments_cannot_change_places(tmp_path: Path) -> None:
    write(tmp_path / "run", (2, 2))
    one, two = sorted((tmp_path / "run" / "segments").iterdir())
    shutil.copy(one, tmp_path / "kept")
    shutil.copy(two, one)
    shutil.copy(tmp_path / "kept", two)
    with pytest.raises(MemoryFileError):
        list(read_all(Memory.open(tmp_path / "run")))


# -- a forger who knows the format: every seal and checksum is right -------------------------------


def forge(run: Path, change: Callable[[dict[str, Any]], None], name: str = LINES) -> None:
    """Change what the manifest or every line says, and seal it again."""
    manifest, _ = unseal("manifest", (run / MANIFEST).read_bytes())
    after = before = zlib.crc32(manifest["run"].encode())
    if name == MANIFEST:
        change(manifest)
        (run / MANIFEST).write_bytes(seal("manifest", manifest))
        return
    written = b""
    for known in (run / LINES).read_bytes().splitlines(keepends=True):
        entry, before = unseal("segment", known, before)
        change(entry)
        line = seal("segment", entry, after)
        after, written = int(line[9 : line.index(b",")]), written + line
    (run / LINES).write_bytes(written)


HOSTILE = [
    None, True, -1, 0, 1, 3, 1 << 61, 1 << 63, 1 << 80, 10**4000, 0.5, float("nan"), "", "x",
    "../x", "000000.safetensors", [], [[]], [1], [[1, 2]], [[-1, 2]], [[1 << 70, 1]], [None], {},
    {"x": 1}, {"fc1": 2.0}, [[[[0, 1, 1]], [[0, 1 << 30, 1]]]],
    {"fc1": -1}, {"fc1": 1 << 60}, {"fc1": "x"}, [[[[0, 1 << 60, 1]], [[0, 1 << 60, 1]]]],
    [[[[0, 2, 0]], [[0, 1, 1]]]], [{}], [{"keep": "patterns"}], [["a", "b"]], "float32",
    "complex64",
    [{"name": "w", "shape": [1 << 60, 1 << 60], "dtype": "float32", "keep": "values"}],
    [{"step": 1, "what": "rewind", "why": "", "parameters": ["fc1.weight"], "to": 9}],
    [[9, "fc1.weight", "x", 1]], [[1, "fc1.weight", "x", {"float": "1e999"}]],
]  # fmt: skip


def paths(value: Any, prefix: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place in a nested value."""
    found = [prefix] if prefix else []
    if isinstance(value, dict):
        for key in value:
            found += paths(value[key], (*prefix, key))
    if isinstance(value, list):
        for index in range(min(2, len(value))):
            found += paths(value[index], (*prefix, index))
    return found


def put(value: Any, path: tuple[Any, ...], new: Any) -> None:
    for key in path[:-1]:
        value = value[key]
    value[path[-1]] = new


@pytest.mark.parametrize("name", [MANIFEST, LINES])
def test_hostile_fields_are_refused_or_harmless(tmp_path: Path, name: str) -> None:
    write(tmp_path / "run", (2, 1))
    kept = {n: (tmp_path / "run" / n).read_bytes() for n in (MANIFEST, LINES)}
    line = json.loads(kept[name].splitlines()[0])
    entry = line["manifest" if name == MANIFEST else "segment"]
    rng = np.random.default_rng(0)
    places = paths(entry)
    for _ in range(700):
        place = places[rng.integers(len(places))]
        value = HOSTILE[rng.integers(len(HOSTILE))]
        done: list[int] = []

        def change(
            entry: dict[str, Any], place: Any = place, value: Any = value, done: list[int] = done
        ) -> None:
            if not done:  # the first line alone
                put(entry, place, value)
                done.append(1)

        try:
            forge(tmp_path / "run", change, name)
        except ValueError:  # numbers too long to be written
            continue
        answers(tmp_path / "run", DualFormError)
        for n, content in kept.items():
            (tmp_path / "run" / n).write_bytes(content)


def test_hostile_headers_are_refused(tmp_path: Path) -> None:
    write(tmp_path / "run", (2,))
    run = tmp_path / "run"
    path = run / "segments" / "000000.safetensors"
    sound = path.read_bytes()
    (length,) = struct.unpack("<Q", sound[:8])
    entries = json.loads(sound[8 : 8 + length])
    rng = np.random.default_rng(0)
    values = [
        None, "F32", "I64", "U8", "X", [], [0], [0, 0], [0, 1 << 60], [-8, 8], [8, 0], 1 << 63, {},
        [1 << 62, 1 << 62], [3, 7], "BOOL", "BF16", [4, 4], [2, 8], [1.5, 2],
    ]  # fmt: skip
    names = [n for n in entries if not n.startswith(("padding", "__"))]
    for attempt in range(500):
        changed = json.loads(json.dumps(entries))
        name = names[rng.integers(len(names))]
        field = ("dtype", "shape", "data_offsets")[rng.integers(3)]
        changed[name][field] = values[rng.integers(len(values))]
        if attempt % 5 == 0:
            changed[name] = values[rng.integers(len(values))]
        text = json.dumps(changed, separators=(",", ":")).encode()[:length].ljust(length)
        content = sound[:8] + text + sound[8 + length :]
        if attempt == 0:
            content = struct.pack("<Q", 1 << 62) + sound[8:]
        if attempt == 1:
            content = sound[:8] + b"[" * length + sound[8 + length :]
        path.write_bytes(content)

        def reseal(entry: dict[str, Any], content: bytes = content) -> None:
            start = 0
            for block in entry["blocks"]:
                block[1] = zlib.crc32(content[start : start + block[0]])
                start += block[0]

        forge(run, reseal)
        answers(run, DualFormError)


def test_tensors_that_say_what_cannot_be_are_refused(tmp_path: Path) -> None:
    """Numbers in columns and logs, changed one by one in the file, and sealed again."""
    write(tmp_path / "run", (2, 2), stored="float16")
    run = tmp_path / "run"
    segment = Memory.open(run).opened.segments[1]
    places = [
        segment.file.places[name]
        for name in segment.file.places
        if name.startswith(("columns/", "log/", "kept/")) or "references" in name
    ]
    path, rng = segment.path, np.random.default_rng(0)
    sound = path.read_bytes()
    lines = (run / LINES).read_bytes()
    for _ in range(400):
        place = places[rng.integers(len(places))]
        content = bytearray(sound)
        if place.stop > place.start:
            at = int(rng.integers(place.start, place.stop))
            content[at] ^= int(rng.integers(1, 256))
        path.write_bytes(content)

        def reseal(entry: dict[str, Any], content: bytes = bytes(content)) -> None:
            if entry["file"] == path.name:
                start = 0
                for block in entry["blocks"]:
                    block[1] = zlib.crc32(content[start : start + block[0]])
                    start += block[0]

        forge(run, reseal)
        answers(run, DualFormError)
        path.write_bytes(sound)
        (run / LINES).write_bytes(lines)


def test_what_is_no_memory_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(MemoryFileError, match="not there"):
        Memory.open(tmp_path / "none")
    with pytest.raises(MemoryFileError, match="it is not a memory"):
        Memory.open(tmp_path)
    (tmp_path / MANIFEST).write_text('{"manifest": {"format": "dualform memory", "schema": 1}}')
    with pytest.raises(MemoryFileError, match="schema version 1"):
        Memory.open(tmp_path)
    (tmp_path / MANIFEST).write_text("{}")
    with pytest.raises(MemoryFileError, match="not the manifest of a dualform memory"):
        Memory.open(tmp_path)


def test_a_damaged_progress_is_not_believed(tmp_path: Path) -> None:
    write(tmp_path / "run", (3,), closed=False)
    path = tmp_path / "run" / PROGRESS
    sound = path.read_bytes()
    assert "no further step was completed" in Memory.open(tmp_path / "run").remarks[-1]
    for bit in range(64):
        flip(path, bit)
        assert "is not known" in Memory.open(tmp_path / "run").remarks[-1]
        path.write_bytes(sound)


def test_no_number_is_executed_or_imported(tmp_path: Path) -> None:
    write(tmp_path / "run", (1,))

    def change(entry: dict[str, Any]) -> None:
        entry["news"]["settings"][0]["path"] = "os.system"

    forge(tmp_path / "run", change)
    memory = Memory.open(tmp_path / "run")
    assert memory.settings[0].path == "os.system"  # a name, and nothing was done with it
    assert torch.is_tensor(memory.layer("fc1").keys)
