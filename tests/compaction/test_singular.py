"""Equivalent memories of low rank (Remark 3.4): what they write, what they lose, what they refuse.

The reference is computed another way: singular values of W − (initial part), by numpy, from the
weights that the source rebuilds.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.compaction.sources import Net, Tied, record
from tests.memory.tampering import edit_tensor, read_manifest, reseal, write_manifest
from torch import Tensor

import dualform as df

Change = Callable[[Tensor], None]


def learned(path: Path, name: str) -> np.ndarray[Any, Any]:
    """W minus its initial part, by the dual form's own account of nothing learned."""
    dual = df.DualForm(None, path)
    difference = dual.weights(torch.float64)[name] - dual.without().weights(torch.float64)[name]
    return difference.numpy()


def last_segment(path: Path) -> Path:
    return path / "segments" / str(read_manifest(path)["segments"][-1]["file"])


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("rank") / "source"
    record(path)
    return path


@pytest.fixture(scope="module")
def compacted(source: Path) -> Path:
    """The first layer alone, at rank 2."""
    path = source.parent / "compacted"
    df.compact(source, path, rank={"fc1": 2})
    return path


@pytest.mark.parametrize("rank", [6, 7, 1000])
def test_at_full_rank_nothing_is_lost(source: Path, rank: int, tmp_path: Path) -> None:
    made = df.compact(source, tmp_path / "full", rank={"fc1": rank})
    assert made.passed, made
    assert max(made.difference.values()) <= 1e-12
    assert made.left_out["fc1.weight"] <= 1e-12
    assert df.Memory.open(tmp_path / "full").layer("fc1").rows == 6


@pytest.mark.parametrize("rank", [1, 2, 4])
def test_what_is_lost_are_the_singular_values_left_out(
    source: Path, rank: int, tmp_path: Path
) -> None:
    made = df.compact(source, tmp_path / "low", rank=rank)
    assert made.passed, made
    before, after = (
        df.DualForm(None, p).weights(torch.float64) for p in (source, tmp_path / "low")
    )
    for name in ("fc1.weight", "fc2.weight", "fc3.weight"):
        sizes = np.linalg.svd(learned(source, name), compute_uv=False)
        lost = np.sqrt((sizes[rank:] ** 2).sum() / (sizes**2).sum())
        assert made.left_out[name] == pytest.approx(lost, abs=1e-12)
        off = (before[name] - after[name]).numpy()
        assert np.linalg.norm(off, 2) == pytest.approx(sizes[rank:][:1].sum(), abs=1e-12)
        bias = name.replace("weight", "bias")
        assert float((before[bias] - after[bias]).abs().max()) <= 1e-12


def test_keys_are_of_length_one_and_signals_are_written_along_them(compacted: Path) -> None:
    layer = df.Memory.open(compacted).layer("fc1")
    assert layer.keys.shape == (2, 6)
    assert torch.allclose(layer.keys @ layer.keys.T, torch.eye(2, dtype=torch.float64), atol=1e-12)
    sizes = layer.error_signals.norm(dim=1)
    expected = np.linalg.svd(learned(compacted.parent / "source", "fc1.weight"), compute_uv=False)
    assert np.allclose(sizes.numpy(), expected[:2], rtol=1e-12)


def test_outputs_by_patterns_are_those_of_the_rebuilt_weights(
    compacted: Path, source: Path
) -> None:
    net = Net().double()
    x = torch.randn(5, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    dual = df.DualForm(net, compacted)
    assert float((dual(x) - dual(x, by="patterns")).abs().max()) <= 1e-12
    split = dual.contribute(x[:1], target=1, layer="fc1")
    assert abs(split.residual) <= 1e-12
    assert "of no example" in split.caption
    whole = df.DualForm(net, source).contribute(x[:1], target=1)
    ours = dual.contribute(x[:1], target=1)
    assert abs(ours.residual) <= 1e-12
    assert whole.shares.keys() == ours.shares.keys()


def test_a_shared_weight_is_compacted_layer_by_layer_or_not_at_all(tmp_path: Path) -> None:
    record(tmp_path / "tied", Tied)
    with pytest.raises(df.RecordingError, match="'two' shares its weight"):
        df.compact(tmp_path / "tied", tmp_path / "no", rank={"one": 2})
    made = df.compact(tmp_path / "tied", tmp_path / "full", rank=6)
    assert max(made.difference.values()) <= 1e-12
    low = df.compact(tmp_path / "tied", tmp_path / "low", rank=2)
    assert low.passed, low
    assert low.left_out["one.weight"] > 1e-3


def test_in_float32_the_rounding_is_part_of_what_is_stated(tmp_path: Path) -> None:
    record(tmp_path / "source", precision=torch.float32)
    for i, choices in enumerate(({"rank": 9}, {"rank": 9, "dtype": "float16"}, {"rank": 2})):
        made = df.compact(tmp_path / "source", tmp_path / str(i), **choices)
        assert made.passed, made
        assert made.after is not None
        bound = [1e-6, 2e-3, 1.0][i]
        assert max(made.left_out.values()) <= bound
        for name in made.left_out:  # with what is stated, nothing but training's own rounding
            assert made.after.residual(name, "left out") <= 1e-6


# What it cannot answer any more -------------------------------------------------------------------


def test_every_question_about_examples_labels_or_steps_is_refused(compacted: Path) -> None:
    dual, memory = df.DualForm(None, compacted), df.Memory.open(compacted)
    spotlight = dual.attend(queries={"fc1": torch.ones(1, 6)})["fc1"]
    asked: list[Callable[[], Any]] = [
        lambda: spotlight.top(2, by="label"),
        lambda: spotlight.sum_by("label"),
        lambda: spotlight.by_example(),
        lambda: spotlight.over("step"),
        lambda: memory.layer("fc1").patterns["step"],
        lambda: memory.layer("fc1").patterns.select(label=1),
        lambda: dual.attend(example=3),
        lambda: dual.contribute(example=3, target=0, layer="fc1"),
    ]
    for ask in asked:
        with pytest.raises(df.QueryError, match="compacted: of no example, label or step"):
            ask()


def test_only_the_first_and_the_last_step_are_known(compacted: Path, source: Path) -> None:
    dual = df.DualForm(None, compacted)
    with pytest.raises(df.QueryError, match="forgets when something was learned"):
        dual.at(7)
    for name, weight in dual.at(0).weights(torch.float64).items():
        assert torch.equal(weight, df.DualForm(None, source).at(0).weights(torch.float64)[name])
    assert dual.at(20).weights().keys() == dual.weights().keys()


def test_every_place_that_shows_them_says_what_they_are(compacted: Path) -> None:
    memory = df.Memory.open(compacted)
    dual = df.DualForm(None, memory)
    spotlight = dual.attend(queries={"fc1": torch.ones(1, 6)})["fc1"]
    certificate = dual.verify()
    assert "compacted" in repr(memory)
    assert "compacted to rank 2" in " ".join(memory.remarks)
    for shown in (
        repr(memory.layer("fc1")),
        repr(memory.layer("fc1").patterns),
        repr(dual),
        repr(spotlight),
        spotlight.top(2).caption,
    ):
        assert "singular vectors of what was learned" in shown
    assert spotlight.top(2).columns == ("rank", "pattern", "weight")
    assert "leaving out of what was learned: fc1.weight" in repr(certificate)
    assert certificate.to_dict()["compacted"].keys() == {"fc1.weight"}
    assert memory.parameters["fc1.weight"].left_out == certificate.compacted["fc1.weight"]
    with pytest.raises(df.QueryError, match="kept one by one in its layers"):
        memory.learned("fc1.weight", 20)


def test_masks_leave_what_is_compacted_as_it_is(compacted: Path, source: Path) -> None:
    dual, whole = df.DualForm(None, compacted), df.DualForm(None, source)
    masked, expected = dual.without(label=1), whole.without(label=1)
    assert "fc1.weight" in repr(masked)
    for name, weight in masked.weights(torch.float64).items():
        same = dual if name.startswith("fc1") else expected
        assert float((weight - same.weights(torch.float64)[name]).abs().max()) <= 1e-12
    dropped = dual.without(label=1, unresolved="drop").weights(torch.float64)["fc1.weight"]
    initial = whole.without().weights(torch.float64)["fc1.weight"]
    assert float((dropped - initial).abs().max()) <= 1e-12


def test_a_mask_needs_a_layer_with_patterns(source: Path, tmp_path: Path) -> None:
    df.compact(source, tmp_path / "all", rank=2)
    with pytest.raises(df.QueryError, match="every layer"):
        df.DualForm(None, tmp_path / "all").without(label=1)


# The certificate can fail -------------------------------------------------------------------------


def _scale(tensor: Tensor) -> None:
    tensor[0] *= 1.0001


def _zero(tensor: Tensor) -> None:
    tensor[1] = 0


@pytest.mark.parametrize("change", [_scale, _zero])
@pytest.mark.parametrize("tensor", ["keys/fc1", "error_signals/fc1", "left_out/fc1.weight"])
def test_tampering_with_what_is_left_is_found(
    compacted: Path, tensor: str, change: Change, tmp_path: Path
) -> None:
    forged = Path(shutil.copytree(compacted, tmp_path / "forged"))
    edit_tensor(last_segment(forged), tensor, change)
    reseal(forged)
    df.Memory.open(forged).check()
    certificate = df.DualForm(None, forged).verify()
    assert ("fc1.weight", "left out") in {(c.parameter, c.kind) for c in certificate.failures}


def test_another_model_is_found(compacted: Path, source: Path) -> None:
    net = df.DualForm(Net().double(), source).to_model()
    dual = df.DualForm(net, compacted)
    assert dual.verify().passed
    with torch.no_grad():
        net.get_parameter("fc1.weight")[0, 0] += 1e-6
    found = dual.verify().failures
    assert {(check.parameter, check.kind) for check in found} == {("fc1.weight", "left out")}


def _layer(manifest: dict[str, Any], name: str = "fc1") -> dict[str, Any]:
    return next(entry for entry in manifest["layers"] if entry["name"] == name)


def _parameter(manifest: dict[str, Any], name: str) -> dict[str, Any]:
    return next(entry for entry in manifest["parameters"] if entry["name"] == name)


FORGERIES: list[Callable[[dict[str, Any]], Any]] = [
    lambda m: _layer(m).pop("rank"),
    lambda m: _layer(m).update(rank=1),
    lambda m: _layer(m).update(rank=-1),
    lambda m: _layer(m).update(rank="2"),
    lambda m: _layer(m, "fc2").update(rank=50),
    lambda m: _layer(m).update(error_signals=False),
    lambda m: _parameter(m, "fc1.weight").update(coverage="patterns"),
    lambda m: _parameter(m, "fc1.bias").update(coverage="patterns"),
    lambda m: _parameter(m, "fc1.weight").update(left_out=-1.0),
    lambda m: _parameter(m, "fc1.weight").update(left_out_most="much"),
    lambda m: _parameter(m, "fc1.weight").update(stored_eps=None),
    lambda m: m.update(conversions=[{"when": "now"}]),
    lambda m: m["segments"][0]["rows"].update(fc1=1),
]


@pytest.mark.parametrize("forge", FORGERIES)
def test_a_manifest_that_contradicts_itself_is_not_opened(
    compacted: Path, forge: Callable[[dict[str, Any]], Any], tmp_path: Path
) -> None:
    forged = Path(shutil.copytree(compacted, tmp_path / "forged"))
    manifest = read_manifest(forged)
    forge(manifest)
    write_manifest(forged, manifest)
    with pytest.raises(df.MemoryFileError):
        df.Memory.open(forged)


# Going on from there ------------------------------------------------------------------------------


def test_what_is_compacted_stays_as_it_is_when_the_rest_is_converted(
    compacted: Path, tmp_path: Path
) -> None:
    made = df.compact(compacted, tmp_path / "again", dtype="bfloat16", rank=2)
    assert made.passed, made
    ours, theirs = df.Memory.open(tmp_path / "again"), df.Memory.open(compacted)
    assert torch.equal(ours.layer("fc1").error_signals, theirs.layer("fc1").error_signals)
    assert ours.parameters["fc1.weight"] == theirs.parameters["fc1.weight"]
    assert len(ours.conversions) == 2
    for choices in ({"rank": 1}, {"rank": {"fc1": 1}}, {"layers": "fc2"}, {"error_signals": False}):
        with pytest.raises(df.RecordingError, match="compacted already"):
            df.compact(compacted, tmp_path / "no", **choices)


def test_a_converted_memory_is_not_recorded_into(compacted: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(compacted, tmp_path / "copy"))
    net = Net().double()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    recorder = df.record(net, optimizer, copy, resume=True)
    with pytest.raises(df.RecordingError, match="made from another memory"), recorder:
        pass


def test_a_last_segment_without_steps_is_no_obstacle(tmp_path: Path) -> None:
    """A commit for the sums alone, at the end: patterns may not be in it."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(40, 30), torch.nn.LayerNorm(30)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with df.record(model, optimizer, tmp_path / "run", segment_bytes=400, step_budget=0):
        for _ in range(4):
            model(torch.randn(3, 40, dtype=torch.float64))[:, 0].sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert read_manifest(tmp_path / "run")["segments"][-1]["steps"] == 0
    for rank in (2, 30):
        made = df.compact(tmp_path / "run", tmp_path / "small", rank=rank, overwrite=True)
        assert made.passed, made
        assert df.Memory.open(tmp_path / "small").layer("0").rows == min(rank, 12)
    assert max(made.difference.values()) <= 1e-12
