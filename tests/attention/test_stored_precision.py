"""Memories in 16 bits: `verify` measures what that lost, and still finds every forgery."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import dualform as df

EXPECTED = {"float32": 1e-5, "float16": 3e-3, "bfloat16": 3e-2}
"""The residual of the weights that an honest run of this size stays below."""

SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {"momentum": 0.0, "weight_decay": 0.0, "clip": None},
    "clipped": {"clip": 0.1},
    "heavy momentum": {"momentum": 0.99, "lr": 0.02},
    "full batches": {"batch": 40, "lr": 0.01, "momentum": 0.0},
}


@pytest.mark.parametrize("trained", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("rule", SETTINGS)
def test_honest_runs_pass_and_say_what_was_lost(
    train: Any, rule: str, dtype: str, trained: torch.dtype
) -> None:
    run = train(steps=150, dtype=trained, options={"dtype": dtype}, **SETTINGS[rule])
    certificate = run.dual.verify(run.inputs[:4])
    assert certificate.passed, certificate
    for check in certificate.checks:
        assert check.residual * 3 <= check.bound, check
    weights = [c.residual for c in certificate.checks if c.kind == "weights"]
    assert 1e-7 < max(weights) < EXPECTED[dtype]
    assert f"stored in {dtype}: fc1, fc2, fc3" in repr(certificate)
    assert json.loads(json.dumps(certificate.to_dict()))["stored"]["fc1"] == dtype


def test_exact_storage_is_held_to_the_bounds_it_always_was(train: Any) -> None:
    whole, half = (
        train(steps=60, dtype=torch.float32, options={"dtype": d}) for d in ("float32", "float16")
    )
    strict, loose = whole.dual.verify(), half.dual.verify()
    assert not strict.stored
    assert "stored in" not in repr(strict)
    for name in whole.memory.parameters:
        assert strict.bound(name) < 1e-4 < loose.bound(name)
        assert strict.bound(name, "steps") == 128 * torch.finfo(torch.float32).eps
    half_path = half.path
    assert not df.DualForm(whole.model, half_path).verify().failures, "the same network"


def forged(run: Any, tmp_path: Path) -> Path:
    copy = tmp_path / "forged"
    shutil.copytree(run.path, copy)
    return copy


@pytest.fixture(scope="session", params=["float16", "bfloat16"])
def narrow(train: Any, request: pytest.FixtureRequest) -> Any:
    options = {"dtype": request.param, "segment_bytes": 1 << 16}
    return train(steps=120, dtype=torch.float32, clip=0.1, options=options)


@pytest.mark.parametrize("step", [0, 61, 119])
@pytest.mark.parametrize("layer", [None, "fc2"])
def test_error_signals_taken_away_are_found(
    narrow: Any, tampering: Any, tmp_path: Path, layer: str | None, step: int
) -> None:
    path = forged(narrow, tmp_path)
    tampering.zero_error_signals(path, step, layer)
    for model in (narrow.model, None):
        assert not df.DualForm(model, path).verify().passed


@pytest.mark.parametrize("step", [0, 61, 119])
def test_dropped_clipping_is_found(narrow: Any, tampering: Any, tmp_path: Path, step: int) -> None:
    path = forged(narrow, tmp_path)
    tampering.drop_clipping(path, step)
    assert not df.DualForm(narrow.model, path).verify().passed


def test_keys_and_scales_edited_in_one_step_are_found(
    train: Any, tampering: Any, tmp_path: Path
) -> None:
    run = train(steps=40, dtype=torch.float32, options={"dtype": "float16"})
    for name in ("keys/fc2", "error_signal_scales/fc2"):
        path = forged(run, tmp_path / name.replace("/", "-"))
        file, _ = tampering.segment_of(path, 7)

        def grow(rows: torch.Tensor) -> None:
            rows[7 * 8 : 8 * 8] *= 1.2

        tampering.edit_tensor(file, name, grow)
        tampering.reseal(path)
        df.Memory.open(path).check()
        failures = df.DualForm(run.model, path).verify().failures
        assert {"fc2.weight"} <= {check.parameter for check in failures}


def test_questions_have_the_same_answers_up_to_rounding(train: Any, difference: Any) -> None:
    whole, half = (
        train(steps=40, dtype=torch.float32, options={"dtype": d}) for d in ("float32", "float16")
    )
    x = whole.inputs[:1]
    for name, spotlight in whole.dual.attend(x).items():
        assert difference(half.dual.attend(x)[name].weights, spotlight.weights) < 2e-3
    ours, theirs = (r.dual.contribute(x, target=1) for r in (half, whole))
    assert abs(ours.total - theirs.total) < 5e-3 * abs(theirs.primal) + 5e-3
    assert difference(half.dual(x, by="patterns"), half.dual(x)) < 1e-5
    for name, weight in half.dual.without(label=1).weights().items():
        assert difference(weight, whole.dual.without(label=1).weights()[name]) < 1e-2


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("error_signal_scales/fc2", None),
        ("error_signal_scales/fc2", lambda t: t.half()),
        ("error_signal_scales/fc2", lambda t: t[:-1]),
        ("error_signal_scales/fc2", lambda t: -t),
        ("error_signal_scales/fc2", lambda t: t * float("inf")),
        ("error_signal_scales/fc2", lambda t: t * float("nan")),
        ("error_signals/fc2", lambda t: t.bfloat16()),
        ("error_signals/fc2", lambda t: t.double()),
        ("keys/fc2", lambda t: t.to(torch.int16)),
    ],
)
def test_tensors_that_are_not_what_they_should_be_are_refused(
    train: Any, tampering: Any, tmp_path: Path, name: str, value: Any
) -> None:
    run = train(steps=3, dtype=torch.float32, options={"dtype": "float16"})
    path = forged(run, tmp_path)
    file, _ = tampering.segment_of(path, 0)
    from safetensors.torch import load_file

    changed = None if value is None else value(load_file(file)[name])
    tampering.replace_tensors(file, {name: changed})
    tampering.reseal(path)
    layer = df.Memory.open(path).layer("fc2")
    with pytest.raises(df.MemoryFileError, match=name.split("/")[0]):
        list(layer.blocks())


@pytest.mark.parametrize("stored", ["float64", "int16", "half a float", 16, None])
def test_a_manifest_with_an_impossible_storage_is_refused(
    train: Any, tampering: Any, tmp_path: Path, stored: Any
) -> None:
    path = forged(train(steps=2, dtype=torch.float32), tmp_path)
    manifest = tampering.read_manifest(path)
    manifest["layers"][0]["stored"] = stored
    tampering.write_manifest(path, manifest)
    with pytest.raises(df.MemoryFileError):
        df.Memory.open(path)
