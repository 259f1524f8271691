"""A converted memory is a whole memory: it rebuilds the same network, of every kind of source."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from tests.compaction.sources import SOURCES, Attending, Net, Tied, not_exact, record
from tests.memory.runs import make_model
from tests.memory.tampering import (
    edit_tensor,
    read_manifest,
    replace_tensors,
    reseal,
    zero_error_signals,
)
from torch import Tensor, nn

import dualform as df
from dualform.memory.copying import SourceMemory

LOSSLESS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "keys alone": {"error_signals": False},
}
SIXTEEN_BITS: dict[str, dict[str, Any]] = {"float16": {"dtype": "float16"}} | {
    "bfloat16, keys alone": {"dtype": "bfloat16", "error_signals": False}
}
MODELS: dict[str, Callable[[], nn.Module]] = {"tied": Tied, "packed": Attending}


def relative(one: Tensor, other: Tensor) -> float:
    one, other = one.detach().double(), other.detach().double()
    if not other.numel():
        return 0.0
    return float((one - other).abs().max()) / (float(other.abs().max()) or 1.0)


def weights(path: Path, at: int | None = None) -> dict[str, Tensor]:
    dual = df.DualForm(None, path)
    return (dual if at is None else dual.at(at)).weights(torch.float64)


def segment_ends(path: Path) -> list[int]:
    return [segment.end for segment in SourceMemory.reopen(path).segments]


each_kind = pytest.mark.parametrize("kind", list(SOURCES))


@each_kind
@pytest.mark.parametrize("how", [*LOSSLESS, *SIXTEEN_BITS])
def test_every_kind_of_memory_can_be_converted_and_verifies(
    kind: str, how: str, recorded: Any, contents: Any, tmp_path: Path
) -> None:
    source, path = recorded(kind), tmp_path / "converted"
    before = contents(source)
    choices = (LOSSLESS | SIXTEEN_BITS)[how]
    if how == "bfloat16, keys alone" and kind == "float16":
        with pytest.raises(df.RecordingError, match="stored in float16 already"):
            df.compact(source, path, **choices)
        return
    made = df.compact(source, path, **choices)
    assert contents(source) == before
    assert made.passed, made
    memory = df.Memory.open(path)
    memory.check()
    original = df.Memory.open(source)
    assert (memory.steps, memory.closed) == (original.steps, original.closed)
    assert memory.phases == original.phases
    assert set(original.remarks) <= set(memory.remarks)
    if how in LOSSLESS:
        assert max(made.difference.values()) <= 1e-12
    expected = weights(source)
    for name, weight in weights(path).items():
        assert relative(weight, expected[name]) <= max(1e-12, 1.01 * made.difference[name])
    for name in original.buffers:
        assert torch.equal(memory.buffer(name), original.buffer(name))


@each_kind
def test_time_travel_to_segment_ends_survives_the_loss_of_error_signals(
    kind: str, recorded: Any, tmp_path: Path
) -> None:
    source, path = recorded(kind), tmp_path / "converted"
    made = df.compact(source, path, error_signals=False)
    assert all(p.coverage != "patterns" for p in df.Memory.open(path).parameters.values())
    assert made.after is not None
    for end in [0, *segment_ends(source)]:
        try:
            expected = weights(source, end)
        except df.QueryError:  # the source itself keeps it only now and then
            assert kind == "accumulated"
            continue
        for name, weight in weights(path, end).items():
            assert relative(weight, expected[name]) <= 1e-12, (name, end)


@pytest.mark.parametrize("asked", ["fc1", ["fc2", "fc1"], ["fc2", "fc[13]"]])
def test_error_signals_that_were_never_there_are_refused_by_name(
    asked: Any, recorded: Any, tmp_path: Path
) -> None:
    source = recorded("keys alone")  # of all layers but fc2
    with pytest.raises(df.RecordingError, match="keys alone; layers with error signals: fc2"):
        df.compact(source, tmp_path / "converted", error_signals=asked)
    assert not (tmp_path / "converted").exists()
    for well in ("fc*", ["fc2"], True):
        df.compact(source, tmp_path / "converted", error_signals=well, overwrite=True)
        assert df.Memory.open(tmp_path / "converted").layer("fc2").has_error_signals


def test_steps_between_segment_ends_are_refused_by_name(recorded: Any, tmp_path: Path) -> None:
    source, path = recorded("several segments"), tmp_path / "converted"
    df.compact(source, path, layers=["fc1", "fc3"])
    ends = segment_ends(source)
    between = next(s for s in range(1, ends[-1]) if s not in ends)
    with pytest.raises(df.QueryError, match=f"step {between} is not among them"):
        weights(path, between)


def test_learned_parts_are_kept_as_often_as_asked_for(recorded: Any, tmp_path: Path) -> None:
    source = recorded("several segments")
    df.compact(source, tmp_path / "few", error_signals=False, snapshot_every=7)
    kept = df.Memory.open(tmp_path / "few").learned_steps("fc1.weight")
    assert set(kept) < set(segment_ends(source))
    assert max(kept) == 20
    gaps = [b - a for a, b in zip([0, *kept], list(kept)[:-1], strict=False)]
    assert all(gap >= 7 for gap in gaps)
    assert df.DualForm(None, tmp_path / "few").verify().passed
    for wrong in (0, 1.5, True):
        with pytest.raises(df.RecordingError, match="snapshot_every"):
            df.compact(source, tmp_path / "no", snapshot_every=wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("precision", [torch.float32, torch.float64])
def test_patterns_are_those_of_a_recording_in_that_dtype(
    dtype: str, precision: torch.dtype, tmp_path: Path
) -> None:
    record(tmp_path / "wide", precision=precision)
    record(tmp_path / "narrow", precision=precision, dtype=dtype)
    df.compact(tmp_path / "wide", tmp_path / "converted", dtype=dtype)
    ours, theirs = df.Memory.open(tmp_path / "converted"), df.Memory.open(tmp_path / "narrow")
    for name in theirs.layers:
        assert ours.layer(name).stored == theirs.layer(name).stored
        for kind in ("keys", "error_signals"):
            assert torch.equal(getattr(ours.layer(name), kind), getattr(theirs.layer(name), kind))
    for name, weight in weights(tmp_path / "converted").items():
        # the factor of a clipped gradient is measured, along a direction of each recording's own
        assert relative(weight, weights(tmp_path / "narrow")[name]) <= 3e-5


def test_inputs_that_recur_are_still_stored_once(recorded: Any, tmp_path: Path) -> None:
    source = df.Memory.open(recorded("recurring inputs")).layer("fc1")
    df.compact(recorded("recurring inputs"), tmp_path / "converted", dtype="bfloat16")
    ours = df.Memory.open(tmp_path / "converted").layer("fc1")
    assert source.distinct is not None
    assert ours.distinct is not None
    assert ours.distinct.rows == source.distinct.rows == 40
    assert torch.equal(ours.keys, source.keys.bfloat16().double())


def test_what_16_bits_cannot_hold_stays_as_it_was_and_is_reported(tmp_path: Path) -> None:
    class Loud(Net):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(torch.cat([x[:, :5], x[:, 5:] * 1e6], 1))

    record(tmp_path / "wide", Loud, precision=torch.float32)
    made = df.compact(tmp_path / "wide", tmp_path / "converted", dtype="float16")
    assert made.passed, made
    assert any("cannot hold" in remark and "fc1" in remark for remark in made.remarks)
    wide, ours = df.Memory.open(tmp_path / "wide"), df.Memory.open(tmp_path / "converted")
    assert torch.equal(ours.layer("fc1").keys, wide.layer("fc1").keys)
    assert not torch.equal(ours.layer("fc3").keys, wide.layer("fc3").keys)


def test_the_coordinates_of_patterns_stay(recorded: Any, tmp_path: Path) -> None:
    source, path = recorded("norms, buffers, strings"), tmp_path / "converted"
    df.compact(source, path, layers="4", dtype="bfloat16")
    ours, theirs = df.Memory.open(path).layer("4"), df.Memory.open(source).layer("4")
    assert ours.patterns.names == theirs.patterns.names
    for column in theirs.patterns.names:
        assert ours.patterns[column].tolist() == theirs.patterns[column].tolist()
    with pytest.raises(df.QueryError, match="no layer '1'"):
        df.Memory.open(path).layer("1")


@pytest.mark.parametrize("kind", ["several segments", "tied", "packed", "keys alone"])
@pytest.mark.parametrize("choices", [{"dtype": "float16"}, {"layers": "some"}])
def test_a_mask_and_its_complement_still_add_up(
    kind: str, choices: dict[str, Any], recorded: Any, tmp_path: Path
) -> None:
    source, path = recorded(kind), tmp_path / "converted"
    if "layers" in choices:
        kept = {"tied": ["one", "two"], "packed": ["attn*"]}.get(kind, ["fc2"])
        choices = {"layers": kept}
    df.compact(source, path, **choices)
    dual = df.DualForm(None, path)
    whole, nothing = dual.weights(torch.float64), dual.without().weights(torch.float64)
    for where in ({"label": [1, 2]}, {"step": slice(3, 11)}, {"task": "task 1"}):
        without, only = dual.without(**where).weights(torch.float64), dual.only(**where)
        for name, weight in only.weights(torch.float64).items():
            assert relative(without[name] + weight, whole[name] + nothing[name]) <= 1e-12


def test_a_model_runs_and_verifies_with_the_converted_memory(tmp_path: Path) -> None:
    for kind, model in MODELS.items():
        shape = (3, 6) if kind == "packed" else (6,)
        net = record(tmp_path / kind, model, shape=shape)
        x = torch.randn(5, *shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        for i, choices in enumerate(({"error_signals": False}, {"dtype": "float16"})):
            path = tmp_path / f"{kind} {i}"
            df.compact(tmp_path / kind, path, **choices)
            dual = df.DualForm(net, path)
            certificate = dual.verify(x)
            assert certificate.passed, certificate
            bound = 1e-12 if "dtype" not in choices else 1e-2
            assert relative(dual.to_model()(x), net(x)) <= bound
            assert relative(dual(x, by="patterns"), net(x)) <= bound


def test_a_memory_that_is_not_exact_stays_so(tmp_path: Path) -> None:
    not_exact(tmp_path / "edited")
    made = df.compact(tmp_path / "edited", tmp_path / "converted", error_signals=["fc2"])
    memory = df.Memory.open(tmp_path / "converted")
    assert not made.passed
    assert not memory.exact
    assert set(df.Memory.open(tmp_path / "edited").remarks) <= set(memory.remarks)
    assert max(made.difference.values()) <= 1e-12


def test_an_unknown_learning_rule_leaves_the_loss_unmeasured_and_says_so(tmp_path: Path) -> None:
    net = Net()
    optimizer = torch.optim.Adamax(net.parameters())
    recorder = df.record(net, optimizer, tmp_path / "adam", audit="warn")
    with pytest.warns(UserWarning, match="not exact"), recorder:  # noqa: PT031
        net(torch.randn(4, 6)).square().sum().backward()
        optimizer.step()
    made = df.compact(tmp_path / "adam", tmp_path / "converted", dtype="float16")
    assert made.after is None
    assert not made.passed
    assert any("cannot be measured" in remark for remark in made.remarks)
    assert "NOT VERIFIED" in repr(made)
    keys = df.Memory.open(tmp_path / "adam").layer("fc1").keys
    assert torch.equal(
        df.Memory.open(tmp_path / "converted").layer("fc1").keys, keys.half().float()
    )
    with pytest.raises(df.QueryError, match="not known"):
        df.compact(tmp_path / "adam", tmp_path / "no", error_signals=False)
    assert not (tmp_path / "no").exists()


def test_a_memory_without_a_single_step_can_be_converted(tmp_path: Path) -> None:
    model, optimizer = make_model()
    with df.record(model, optimizer, tmp_path / "empty"):
        pass
    made = df.compact(tmp_path / "empty", tmp_path / "converted", dtype="float16")
    assert df.Memory.open(tmp_path / "converted").steps == 0
    assert made.passed


def test_a_last_segment_without_steps_is_no_obstacle(tmp_path: Path) -> None:
    """A commit for the sums alone, at the end: patterns may not be in it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(40, 30), nn.LayerNorm(30)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with df.record(model, optimizer, tmp_path / "run", segment_bytes=400, step_budget=0):
        for _ in range(4):
            model(torch.randn(3, 40, dtype=torch.float64))[:, 0].sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert read_manifest(tmp_path / "run")["segments"][-1]["steps"] == 0
    made = df.compact(tmp_path / "run", tmp_path / "keys", error_signals=False)
    assert made.passed, made
    assert max(made.difference.values()) <= 1e-12


def test_a_converted_memory_is_not_recorded_into(recorded: Any, tmp_path: Path) -> None:
    df.compact(recorded("several segments"), tmp_path / "converted", layers="fc1")
    net = Net().double()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    recorder = df.record(net, optimizer, tmp_path / "converted", resume=True)
    with pytest.raises(df.RecordingError, match="made from another memory"), recorder:
        pass


def test_tensors_that_are_not_known_are_carried_over_byte_by_byte(
    recorded: Any, tmp_path: Path
) -> None:
    source = Path(shutil.copytree(recorded("several segments"), tmp_path / "source"))
    entry = read_manifest(source)["segments"][1]
    file = source / "segments" / entry["file"]
    rows = entry["rows"]["fc1"]
    extra = {
        "novelty/fc1": torch.arange(rows),
        "novelty/fc2": torch.arange(entry["rows"]["fc2"]),
        "novelty/fc1.weight": torch.arange(3.0),
        "something": torch.tensor([7], dtype=torch.uint8),
    }
    replace_tensors(file, extra)
    reseal(source)
    df.compact(source, tmp_path / "converted", dtype="float16", layers=["fc1", "fc3"])
    made = (
        tmp_path
        / "converted"
        / "segments"
        / read_manifest(tmp_path / "converted")["segments"][1]["file"]
    )
    found = safetensors.torch.load_file(made)
    for name in ("novelty/fc1", "novelty/fc1.weight", "something"):
        assert torch.equal(found[name], extra[name])
    assert "novelty/fc2" not in found


def test_what_does_not_verify_is_not_laundered(recorded: Any, tmp_path: Path) -> None:
    forged = Path(shutil.copytree(recorded("float32"), tmp_path / "forged"))
    zero_error_signals(forged, step=7, layer="fc2")
    for i, choices in enumerate(({"error_signals": False}, {"layers": "fc3"})):
        made = df.compact(forged, tmp_path / str(i), **choices)
        assert made.before is not None
        assert not made.before.passed
        assert not made.passed
        memory = df.Memory.open(tmp_path / str(i))
        assert not memory.exact
        assert any("did not verify: fc2.weight" in remark for remark in memory.remarks)
        assert not df.compact(memory, tmp_path / f"{i} again").passed


def test_tampering_with_a_learned_part_is_found(recorded: Any, tmp_path: Path) -> None:
    path = tmp_path / "converted"
    df.compact(recorded("float32"), path, error_signals=False)
    last = path / "segments" / read_manifest(path)["segments"][-1]["file"]

    def change(learned: Tensor) -> None:
        learned[2, 3] += 1e-3

    edit_tensor(last, "learned/fc1.weight", change)
    reseal(path)
    certificate = df.DualForm(None, path).verify()
    assert {check.parameter for check in certificate.failures} == {"fc1.weight"}


def test_what_comes_back_prints_well_and_is_json(recorded: Any, tmp_path: Path) -> None:
    made = df.compact(
        recorded("float32"), tmp_path / "converted", dtype="bfloat16", layers=["fc1", "fc2"]
    )
    text = repr(made)
    for part in ("to bfloat16", "without the patterns of fc3", "PASSED", "before", "remark"):
        assert part in text
    assert json.loads(json.dumps(made.to_dict(), allow_nan=False))["passed"] is True
    assert made.table["parameter"].tolist() == list(made.difference)
    assert made.bytes_after == df.Memory.open(tmp_path / "converted").bytes_on_disk
    (conversion,) = df.Memory.open(tmp_path / "converted").conversions
    assert conversion.what == made.what
    assert conversion.source == df.Memory.open(recorded("float32")).hashes["manifest"]
