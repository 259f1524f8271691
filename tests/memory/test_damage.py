"""Damaged, foreign, forged: a memory that is not sound says so, and nothing else ever happens."""

from __future__ import annotations

import contextlib
import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.memory import tampering
from tests.memory.runs import assert_sound, rebuild

from dualform import DualFormError, MemoryFileError, QueryError
from dualform.memory import Memory

Manifest = dict[str, Any]


def read_everything(path: Path) -> Memory:
    """Ask a memory for all it has, without looking at checksums."""
    memory = Memory.open(path)
    assert repr(memory)
    assert memory.bytes_on_disk > 0
    memory.remarks, memory.hashes, memory.columns, memory.environment
    for name in memory.parameters:
        memory.log(name), memory.initial(name), memory.initial_momentum(name), memory.probe(name)
        memory.sketch(name), memory.audit_projections(name), list(memory.step_gradients(name))
        if memory.parameters[name].coverage != "patterns":
            memory.learned(name, memory.steps)
    for name in memory.buffers:
        memory.buffer(name), memory.buffer(name, memory.steps // 2)
    for name in memory.layers:
        layer = memory.layer(name)
        for block in layer.blocks(7):
            assert block.keys is not None
            block.keys.sum()
        for column in layer.patterns.names:
            layer.patterns[column], layer.patterns.values(column)
    for step in memory.snapshot_steps:
        memory.snapshot(step)
    assert len(memory.fingerprints) == len(memory.fingerprints)
    rebuild(memory, memory.steps)
    return memory


def test_the_memory_that_is_damaged_below_is_sound(recorded: Path) -> None:
    memory = read_everything(recorded)
    assert memory.steps == 13
    assert len(memory.fingerprints) > 2
    assert memory.snapshot_steps
    assert_sound(memory)


# -- manifests -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "JSON"),
        (b"{", "JSON"),
        (b"\xff\xfe\x00", "JSON"),
        (b"[" * 100_000, "JSON"),
        (b'{"manifest":' + b"[" * 3000 + b"]" * 3000 + b"}", "JSON|not the manifest"),
        (b"[]", "not the manifest"),
        (b"null", "not the manifest"),
        (b'{"manifest": 3}', "not the manifest"),
        (b'{"manifest": {"format": "something else"}}', "not the manifest"),
        (b'{"manifest": {"format": "dualform memory"}}', "schema version None"),
        (b'{"manifest": {"format": "dualform memory", "schema": 1}}', "checksum"),
        (b'{"manifest": {"format": "dualform memory", "schema": ' + b"9" * 5000 + b"}}", "JSON"),
    ],
)
def test_what_is_no_manifest_is_refused(run: Path, content: bytes, message: str) -> None:
    (run / "manifest.json").write_bytes(content)
    with pytest.raises(MemoryFileError, match=message):
        Memory.open(run)


def test_a_path_that_is_no_memory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "odd" / "manifest.json").mkdir(parents=True)
    for path, message in (
        (tmp_path / "nothing", "not there"),
        (tmp_path / "file", "not a directory"),
        (tmp_path, "holds no manifest"),
        (tmp_path / "odd", "not a file"),
        (Path("a\0b"), "not there"),
    ):
        with pytest.raises(MemoryFileError, match=message):
            Memory.open(path)


def test_another_schema_version_names_the_one_that_can_read_it(run: Path) -> None:
    manifest = tampering.read_manifest(run)
    manifest["schema"] = 2
    manifest["environment"]["dualform"] = "7.8.9"
    tampering.write_manifest(run, manifest)
    with pytest.raises(MemoryFileError, match=r"version 2.*reads version 1.*7\.8\.9"):
        Memory.open(run)
    manifest["environment"] = "not even a dictionary"
    tampering.write_manifest(run, manifest)
    with pytest.raises(MemoryFileError, match="version 2"):
        Memory.open(run)


def test_every_bit_of_the_manifest_counts(run: Path) -> None:
    path = run / "manifest.json"
    whole = path.read_bytes()
    chance = random.Random(1)
    for _ in range(150):
        place = chance.randrange(len(whole) - 1)
        damaged = bytearray(whole)
        damaged[place] ^= 1 << chance.randrange(8)
        if damaged[place : place + 1] == b"E" and whole[place - 1 : place].isdigit():
            continue  # 2e-16 and 2E-16 are the same number
        path.write_bytes(damaged)
        with pytest.raises(MemoryFileError):
            Memory.open(run)


def every_place(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The way to every value in a JSON document (of lists, the first entry only)."""
    entries: list[Any] = []
    if isinstance(value, dict):
        entries = list(value.items())
    elif isinstance(value, list):
        entries = list(enumerate(value))[:1]
    return [path] * bool(path) + [p for k, v in entries for p in every_place(v, (*path, k))]


def test_a_sealed_manifest_is_still_not_trusted(run: Path) -> None:
    """Every field missing, or another thing: no memory, or one that can be read to the end."""
    original = tampering.read_manifest(run)
    strange = [None, -1, 10**30, float("inf"), float("nan"), "x" * 10, [], {}, True, [[[]]], "../x"]
    places = every_place(original)
    assert len(places) > 60
    for place in places:
        for value in ["missing", *strange]:
            manifest = json.loads(json.dumps(original))
            inner = manifest
            for key in place[:-1]:
                inner = inner[key]
            if value == "missing":
                del inner[place[-1]]
            else:
                inner[place[-1]] = value
            tampering.write_manifest(run, manifest)
            try:
                memory = read_everything(run)
                memory.check()
            except DualFormError:
                continue


@pytest.mark.parametrize("kind", ["segments", "snapshots"])
@pytest.mark.parametrize(
    "name",
    ["../initial.safetensors", "/etc/passwd", "..", "", "a/b.safetensors", "..\\x",
     "000000.safetensors/.", "../../000000.safetensors", "000000.safetensors\0",
     "００００００.safetensors"],
)  # fmt: skip
def test_file_names_in_a_manifest_are_never_followed_elsewhere(
    run: Path, kind: str, name: str
) -> None:
    shutil.copy(run / kind / next((run / kind).iterdir()).name, run.parent / "000000.safetensors")
    manifest = tampering.read_manifest(run)
    manifest[kind][0]["file"] = name
    tampering.write_manifest(run, manifest)
    with pytest.raises(MemoryFileError, match="is not the name of a segment or snapshot"):
        Memory.open(run)


# -- tensor files ----------------------------------------------------------------------------------


def tensor_files(run: Path) -> list[Path]:
    return sorted(run.rglob("*.safetensors"))


def test_a_flipped_bit_is_found_and_the_file_and_tensor_named(run: Path) -> None:
    for path in tensor_files(run):
        entries, data = tampering.header(path)
        names = [n for n in entries if not n.startswith(("__", "padding"))]
        whole = path.read_bytes()
        for name in names[:: max(1, len(names) // 6)] + names[-2:]:
            low, high = entries[name]["data_offsets"]
            if low == high:
                continue
            damaged = bytearray(whole)
            damaged[data + (low + high) // 2] ^= 4
            path.write_bytes(damaged)
            with pytest.raises(MemoryFileError) as caught:
                Memory.open(run).check()
            assert str(path) in str(caught.value)
            assert name in str(caught.value) or "more" in str(caught.value)
            if name.startswith(("keys/", "error_signals/")):
                assert f"(tensor {name})" in str(caught.value)
        path.write_bytes(whole)
    assert_sound(Memory.open(run))


def test_no_damaged_byte_escapes_and_none_does_harm(run: Path) -> None:
    """Random mutations of every file: checked, each is found; unchecked, reading stays civil."""
    chance = random.Random(2)
    files = [f for f in sorted(run.rglob("*")) if f.is_file() and f.name != "writer.lock"]
    for path in files:
        whole = path.read_bytes()
        for round_ in range(25):
            damaged = bytearray(whole)
            if round_ % 5 == 4:  # lengths, too
                damaged = damaged[: chance.randrange(len(whole))]
            else:
                header = chance.random() < 0.6
                for _ in range(chance.choice([1, 1, 1, 8])):
                    place = chance.randrange(min(len(whole), 2500) if header else len(whole))
                    damaged[place] = chance.randrange(256)
            path.write_bytes(damaged)
            with contextlib.suppress(DualFormError):
                read_everything(run)
            if path.name == "progress":
                assert_sound(Memory.open(run))
            elif damaged != whole:
                with pytest.raises(MemoryFileError):
                    Memory.open(run).check()
        path.write_bytes(whole)
    assert_sound(Memory.open(run))


def test_forged_headers_do_no_harm(run: Path) -> None:
    """Mutated headers with all checksums made to match: refused, or read to the end."""
    chance = random.Random(3)
    for path in [run / "initial.safetensors", run / "segments" / "000001.safetensors"]:
        whole = path.read_bytes()
        length = len(json.dumps(tampering.header(path)[0], separators=(",", ":")))
        refused = 0
        for _ in range(150):
            damaged = bytearray(whole)
            for _ in range(chance.choice([1, 2])):
                damaged[chance.randrange(8 + length)] = chance.choice(b'0123456789FI"[],:{}xe- ')
            path.write_bytes(damaged)
            tampering.reseal(run)
            try:
                read_everything(run)
            except DualFormError:
                refused += 1
        assert refused > 50
        path.write_bytes(whole)
    tampering.reseal(run)
    assert_sound(Memory.open(run))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("keys/1", torch.zeros(3, 6, dtype=torch.float64)),
        ("keys/1", None),
        ("error_signals/4", "float32"),
        ("error_signals/4", "bfloat16"),
        ("patterns/0/step", "plus"),
        ("patterns/0/step", "minus"),
        ("patterns/0/step", None),
        ("patterns/0/label", "bfloat16"),
        ("patterns/0/task", "plus"),
        ("strings/task", torch.zeros(5, dtype=torch.uint8)),
        ("strings/task", torch.tensor(list(b"[" * 9000), dtype=torch.uint8)),
        ("strings/task", torch.tensor(list(b"[1, 2]"), dtype=torch.uint8)),
        ("log/kappa", None),
        ("log/kappa", "nan"),
        ("log/kappa", torch.zeros(2, 2, dtype=torch.float64)),
        ("log/group", "plus"),
        ("log/group", "minus"),
        ("log/first", "plus"),
        ("log/first", "minus"),
        ("log/hyperparameters", "nan"),
        ("log/hyperparameters", torch.zeros(1, dtype=torch.float64)),
        ("log/projection", "float32"),
        ("fingerprints/1.weight", torch.zeros(1, dtype=torch.float64)),
        ("gradients/3.weight/step", "minus"),
        ("gradients/3.weight/step", torch.zeros(1, 1, dtype=torch.int64)),
        ("gradients/3.weight/value", torch.zeros(2, dtype=torch.float64)),
        ("buffers/0.running_mean/value", "float32"),
        ("buffers/0.running_mean/step", "plus"),
    ],
)
def test_tensors_that_are_not_what_they_should_be_are_refused(
    run: Path, name: str, value: Any
) -> None:
    path = run / "segments" / "000001.safetensors"
    if isinstance(value, str):
        change: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
            "float32": lambda t: t.float(),
            "bfloat16": lambda t: t.bfloat16(),
            "plus": lambda t: t + 100,
            "minus": lambda t: t - 100,
            "nan": lambda t: t * float("nan"),
        }
        value = change[value](tampering.safetensors.torch.load_file(path)[name])
    tampering.replace_tensors(path, {name: value})
    tampering.reseal(run)
    with pytest.raises(MemoryFileError, match=r"000001\.safetensors|run is damaged|column 'task'"):
        read_everything(run)


def test_initial_values_of_another_shape_are_refused_at_once(run: Path) -> None:
    path = run / "initial.safetensors"
    tampering.replace_tensors(path, {"parameters/1.weight": torch.zeros(2, 2)})
    tampering.reseal(run)
    with pytest.raises(MemoryFileError, match=r"'parameters/1.weight' has shape \[2, 2\]"):
        Memory.open(run)


def test_a_truncated_a_grown_and_a_missing_segment(run: Path) -> None:
    path = run / "segments" / "000001.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    with pytest.raises(MemoryFileError, match=r"000001.*truncated"):
        Memory.open(run)
    path.write_bytes(whole + b"x")
    with pytest.raises(MemoryFileError, match=r"000001.*changed"):
        Memory.open(run)
    path.unlink()
    with pytest.raises(MemoryFileError, match=r"000001.*cannot be opened"):
        Memory.open(run)
    path.mkdir()
    with pytest.raises(MemoryFileError, match="000001"):
        Memory.open(run)


def test_exchanged_segments_are_noticed_even_if_all_checksums_match(run: Path) -> None:
    first, second = (run / "segments" / f"00000{i}.safetensors" for i in (0, 1))
    content = first.read_bytes(), second.read_bytes()
    second.write_bytes(content[0])
    first.write_bytes(content[1])
    with pytest.raises(MemoryFileError):
        Memory.open(run).check()
    tampering.reseal(run)
    with pytest.raises(MemoryFileError, match="belongs to another memory"):
        read_everything(run)


def test_segments_in_the_wrong_order_or_left_out_are_noticed(run: Path) -> None:
    original = tampering.read_manifest(run)
    for segments in (original["segments"][::-1], original["segments"][1:]):
        tampering.write_manifest(run, original | {"segments": segments})
        with pytest.raises(MemoryFileError, match="does not follow the one before"):
            Memory.open(run)


def test_snapshots_may_be_deleted_but_not_damaged(run: Path) -> None:
    memory = Memory.open(run)
    step = memory.snapshot_steps[-1]
    path = run / "snapshots" / f"{step:09d}.safetensors"
    whole = bytearray(path.read_bytes())
    whole[-1] ^= 1
    path.write_bytes(whole)
    with pytest.raises(MemoryFileError, match="snapshots"):
        memory.check()
    shutil.rmtree(run / "snapshots")
    memory = Memory.open(run)
    assert memory.snapshot_steps == ()
    assert_sound(memory)
    with pytest.raises(QueryError, match="no snapshot"):
        memory.snapshot(step)


def test_a_forged_memory_passes_its_checksums_and_is_wrong(run: Path) -> None:
    """What `verify` has to find by arithmetic: see tampering.py."""
    real = rebuild(Memory.open(run), 13)
    for forge in (
        lambda: tampering.zero_error_signals(run, 5),
        lambda: tampering.zero_error_signals(run, 6, "1"),
        lambda: tampering.scale_learning_rate(run, 7, 1.01),
        lambda: tampering.drop_clipping(run, 8),
    ):
        forge()
        memory = Memory.open(run)
        memory.check()
        forged = rebuild(memory, 13)
        assert any(float((forged[n] - real[n]).abs().max()) > 1e-9 for n in real)
        real = forged


def test_numbers_that_are_not_finite_in_a_run_that_is_not_exact_are_not_called_damage(
    run: Path,
) -> None:
    path = run / "segments" / "000001.safetensors"
    tampering.edit_tensor(path, "log/hyperparameters", lambda t: t.fill_(float("nan")))
    manifest = tampering.read_manifest(run) | {"exact": False, "remarks": ["an unknown rule"]}
    tampering.write_manifest(run, manifest)
    tampering.reseal(run)
    with pytest.raises(QueryError, match="an unknown rule"):
        Memory.open(run).log("1.weight")


@pytest.mark.parametrize("field", ["offset", "bias_offset"])
@pytest.mark.parametrize("value", [1, -1, 2**62, "0", None, 0.5])
def test_a_layer_that_reaches_beyond_its_parameter_is_refused(
    run: Path, field: str, value: Any
) -> None:
    manifest = tampering.read_manifest(run)
    manifest["layers"][0][field] = value
    tampering.write_manifest(run, manifest)
    with pytest.raises(MemoryFileError):
        Memory.open(run)


def test_a_memory_that_knows_whole_parameters_only_is_read(run: Path) -> None:
    manifest = tampering.read_manifest(run)
    for layer in manifest["layers"]:
        del layer["offset"], layer["bias_offset"]
    tampering.write_manifest(run, manifest)
    memory = Memory.open(run)
    assert all(memory.layer(name).offset == 0 for name in memory.layers)
