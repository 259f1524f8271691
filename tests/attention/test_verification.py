"""Honest runs pass with room to spare; every forgery fails by its residual."""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dualform as df
from dualform.recording import whereabouts
from dualform.recording.fingerprints import FINGERPRINT_EVERY

ROOM = 2.0
"""Honest residuals stay below their bound divided by this."""

RULES: dict[str, dict[str, Any]] = {
    "plain": {"momentum": 0.0, "weight_decay": 0.0, "clip": None},
    "momentum": {"weight_decay": 0.0, "clip": None},
    "heavy momentum": {"momentum": 0.99, "lr": 0.02},
    "nesterov": {"nesterov": True},
    "dampening": {"dampening": 0.3},
    "strong decay": {"momentum": 0.0, "weight_decay": 0.3},
    "decay below resolution": {"momentum": 0.0, "lr": 1e-3, "weight_decay": 1e-6},
    "maximize": {"maximize": True, "lr": 0.01, "clip": 0.05},
    "everything": {"nesterov": True, "weight_decay": 0.05, "clip": 0.1, "warm": 5},
}


def assert_room(certificate: df.Verification) -> None:
    for check in certificate.checks:
        assert check.residual * ROOM <= check.bound, check


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
@pytest.mark.parametrize("rule", RULES)
def test_honest_runs_pass_with_room_to_spare(train: Any, rule: str, dtype: torch.dtype) -> None:
    run = train(steps=200, dtype=dtype, **RULES[rule])
    certificate = run.dual.verify(run.inputs[:4])
    assert certificate.passed, certificate
    assert_room(certificate)


@pytest.mark.long
@pytest.mark.parametrize("rule", RULES)
def test_long_float32_runs_pass_with_room_to_spare(train: Any, rule: str) -> None:
    run = train(steps=3000, dtype=torch.float32, **RULES[rule])
    assert_room(run.dual.verify(run.inputs[:4]))


@pytest.mark.parametrize("error_signals", [True, False])
def test_weights_that_vanish_along_the_probe_are_no_false_alarm(
    train: Any, monkeypatch: pytest.MonkeyPatch, error_signals: bool
) -> None:
    """Training makes W larger along few directions; its entries are rounded along all of them."""
    settings = {"steps": 1500, "dtype": torch.float32, **RULES["plain"]}
    history = [weights["fc3.weight"].double() for weights in train(**settings).history[::50]]
    drawn = whereabouts._directions

    def least(rows: int, width: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        probe, sketch = drawn(rows, width, generator)
        if (rows, width) == tuple(history[0].shape):
            probe = torch.linalg.svd(torch.cat(history)).Vh[-1]
        return probe, sketch

    monkeypatch.setattr(whereabouts, "_directions", least)
    run = train(**settings, options={"error_signals": error_signals})
    for model in (run.model, None):
        checks = df.DualForm(model, run.path).verify().checks
        found = [c for c in checks if (c.parameter, c.kind) == ("fc3.weight", "fingerprints")]
        assert max(check.severity for check in found) < 1 / 8


@pytest.mark.parametrize("batch", [64, 2048, 16384])
@pytest.mark.parametrize("seed", range(3))
def test_large_batches_that_agree_are_no_false_alarm(tmp_path: Path, batch: int, seed: int) -> None:
    """Parts of one sign: the sum, and the rounding of every partial sum, is as large as can be."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    with df.record(model, optimizer, tmp_path / "run") as recorder:
        for _ in range(10):
            model(torch.rand(batch, 6) + 1).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            recorder.flush()  # between two fingerprints, that of one step alone
    certificate = df.DualForm(model, tmp_path / "run").verify()
    assert certificate.passed, certificate


def test_bounds_are_not_generous(train: Any) -> None:
    """Bounds are a multiple of what honest runs show, not orders of magnitude beyond."""
    generous = {"weights": 2000, "fingerprints": 200, "steps": 3000}
    for dtype in (torch.float64, torch.float32):
        for check in train(steps=100, dtype=dtype).dual.verify().checks:
            assert check.bound <= generous[check.kind] * check.residual, check


def test_updates_that_creep_are_no_false_alarm(tmp_path: Path) -> None:
    """Full batches and a tiny learning rate: every step is rounded the same way."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    inputs, wanted = torch.randn(32, 8), torch.randn(32, 3)
    with df.record(model, optimizer, tmp_path / "run"):
        for _ in range(1500):
            (model(inputs) - wanted).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    certificate = df.DualForm(model, tmp_path / "run").verify(inputs)
    assert certificate.passed, certificate


@pytest.fixture(scope="session")
def clipped(train: Any) -> dict[torch.dtype, Any]:
    """Runs whose every step is clipped, committed in several segments."""
    options = {"segment_bytes": 1 << 16}
    return {
        dtype: train(steps=120, dtype=dtype, clip=0.1, options=options)
        for dtype in (torch.float64, torch.float32)
    }


def forge(run: Any, tmp_path: Path) -> Path:
    copy = tmp_path / "forged"
    shutil.copytree(run.path, copy)
    return copy


FORGERIES: dict[str, Callable[[Any, Path, int], None]] = {
    "zeroed error signals": lambda tools, path, step: tools.zero_error_signals(path, step),
    "zeroed in one layer": lambda tools, path, step: tools.zero_error_signals(path, step, "fc2"),
    "learning rate 1 % up": lambda tools, path, step: tools.scale_learning_rate(path, step, 1.01),
    "learning rate 1 % down": lambda tools, path, step: tools.scale_learning_rate(path, step, 0.99),
    "clipping dropped": lambda tools, path, step: tools.drop_clipping(path, step),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
@pytest.mark.parametrize("step", [0, 1, 61, 118, 119])
@pytest.mark.parametrize("forgery", FORGERIES)
def test_a_forged_step_fails_by_its_residual(
    clipped: dict[torch.dtype, Any],
    tampering: Any,
    tmp_path: Path,
    forgery: str,
    step: int,
    dtype: torch.dtype,
) -> None:
    run = clipped[dtype]
    path = forge(run, tmp_path)
    FORGERIES[forgery](tampering, path, step)
    memory = df.Memory.open(path)
    memory.check()  # every checksum matches: only arithmetic is left to tell
    for model in (run.model, None):
        certificate = df.DualForm(model, memory).verify()
        assert not certificate.passed, certificate
        assert certificate.failures
        with pytest.raises(df.QueryError, match="does not explain"):
            certificate.raise_if_failed()


@pytest.fixture(scope="session")
def long(train: Any) -> Any:
    """Many float32 steps in one segment: what is pinned down is so by fingerprints within it."""
    return train(steps=1500, dtype=torch.float32, clip=None, lr=0.05, momentum=0, weight_decay=0)


@pytest.mark.parametrize("step", [0, 100, 777, 1499])
def test_one_learning_rate_forged_by_1_percent_in_a_long_run_is_found(
    long: Any, tampering: Any, tmp_path: Path, step: int
) -> None:
    assert long.dual.verify().passed
    path = forge(long, tmp_path)
    tampering.scale_learning_rate(path, step, 1.01)
    for model in (long.model, None):
        failures = df.DualForm(model, path).verify().failures
        assert "fingerprints" in {check.kind for check in failures}
        assert {-(-(step + 1) // FINGERPRINT_EVERY) * FINGERPRINT_EVERY, 1500} & {
            check.step for check in failures
        }


def test_a_parameter_changed_outside_the_optimizer_fails(tmp_path: Path) -> None:
    class Averaged(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.student, self.teacher = nn.Linear(6, 4), nn.Linear(6, 4).requires_grad_(False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            output: torch.Tensor = self.student(x) - self.teacher(x)
            return output

    for rate, name in ((0.0, "still"), (1e-6, "moved")):
        torch.manual_seed(0)
        model = Averaged()
        optimizer = torch.optim.SGD(model.student.parameters(), lr=0.1)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with df.record(model, optimizer, tmp_path / name, audit="warn"):
                for _ in range(70):
                    model(torch.randn(8, 6)).square().mean().backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    with torch.no_grad():
                        if rate:
                            model.teacher.weight.lerp_(model.student.weight, rate)
        certificate = df.DualForm(None, tmp_path / name).verify()
        assert {c.parameter for c in certificate.failures} == (
            {"teacher.weight"} if rate else set()
        )
        assert certificate.passed == (not rate)


def test_another_model_fails_and_the_memory_is_not_blamed(run: Any) -> None:
    other = type(run.model)().double()
    other.load_state_dict(run.model.state_dict())
    assert df.DualForm(other, run.path).verify().passed
    with torch.no_grad():
        other.fc2.weight[3, 4] += 1e-9
    certificate = df.DualForm(other, run.path).verify()
    assert [check.parameter for check in certificate.failures] == ["fc2.weight"]
    assert "agrees with itself" in repr(certificate)
    retrained = type(run.model)().double()
    assert not df.DualForm(retrained, run.path).verify(run.inputs[:2]).passed


def test_nan_in_the_model_fails(run: Any) -> None:
    other = type(run.model)().double()
    other.load_state_dict(run.model.state_dict())
    with torch.no_grad():
        other.fc1.bias[0] = float("nan")
    certificate = df.DualForm(other, run.path).verify()
    assert not certificate.passed
    json.dumps(certificate.to_dict(), allow_nan=False)


def test_earlier_steps_verify_too(run: Any) -> None:
    for step in (0, 1, 15):
        assert run.dual.at(step).verify().passed
    with pytest.raises(df.QueryError, match="without inputs"):
        run.dual.at(15).verify(run.inputs)


def test_shared_repeated_and_step_level_parameters_are_covered(train: Any) -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(6, 6)
            self.norm = nn.LayerNorm(6)
            self.up = nn.Linear(6, 4, bias=False)
            self.tied = nn.Linear(6, 4)
            self.tied.weight = self.up.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.norm(self.inner(torch.relu(self.inner(x))))
            output: torch.Tensor = self.up(h) + self.tied(h)
            return output

    for options in ({}, {"step_budget": 200, "snapshot_every": 10}):
        run = train(Mixed, steps=40, options=options)
        certificate = run.dual.verify(run.inputs[:3])
        assert certificate.passed, certificate
        assert {c.parameter for c in certificate.checks if c.kind == "weights"} == set(
            run.history[0]
        )


def test_the_certificate_reads_well_and_travels(run: Any) -> None:
    certificate = run.dual.verify(run.inputs[:2])
    text = repr(certificate)
    for words in ("PASSED", "fc1.weight", "fingerprints", "steps", "sha256 model", "outputs"):
        assert words in text
    assert set(certificate.hashes) >= {"initial", "log", "model"}
    record = json.loads(json.dumps(certificate.to_dict(), allow_nan=False))
    assert record["passed"] is True
    assert certificate.residual("fc1.weight") <= certificate.bound("fc1.weight")
    assert len(certificate.table) == len(certificate.checks)
    with pytest.raises(df.QueryError, match=r"fc1\.weight"):
        certificate.residual("fc9.weight")
    certificate.raise_if_failed()


def test_progress_is_reported_to_the_end(run: Any) -> None:
    seen: list[tuple[int, int]] = []
    run.dual.verify(progress=lambda done, total: seen.append((done, total)))
    assert seen[-1] == (720, 720)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)


def test_a_run_that_was_not_exact_never_passes(run: Any) -> None:
    memory = run.memory
    memory.exact = False
    certificate = df.DualForm(run.model, memory).verify()
    assert not certificate.passed
    assert not certificate.failures
    assert "could not account for" in repr(certificate)
