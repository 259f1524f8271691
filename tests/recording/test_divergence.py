"""Runs in float64 that diverge: said as what it is, with all that was recorded before still good.

Numbers beyond 1e154 have squares that are not finite. Warnings are errors in these tests, numpy's
of overflows included.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf, nan
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam

import dualform as df
from dualform.recording.audit import ParameterAudit
from dualform.recording.audits import Audits
from dualform.recording.looking import is_plain
from dualform.recording.rows import Rows
from dualform.recording.unexplained import LARGEST, Diverged, Unexplained, refuse_diverged
from dualform.recording.whereabouts import largest_row

DIVERGES = "training diverges|is not finite"


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def network(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4)).double()


def diverge(
    model: nn.Module,
    path: Path,
    *,
    lr: float,
    power: int = 2,
    momentum: float = 0.0,
    steps: int = 60,
    **options: Any,
) -> df.Recorder:
    """Each step makes the loss larger than its square, until it is not finite."""
    inputs = torch.randn(32, 8, dtype=torch.float64)
    optimizer = SGD(model.parameters(), lr=lr, momentum=momentum)
    with df.record(model, optimizer, path, **options) as recorder:
        for _ in range(steps):
            optimizer.zero_grad()
            loss = model(inputs).abs().pow(power).mean()
            loss.backward()
            optimizer.step()
            if not torch.isfinite(loss):
                break
    return recorder


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("power", [2, 3])
@pytest.mark.parametrize("seed", [5, 7, 8, 9, 11])
def test_divergence_stops_a_recording_whose_steps_before_verify(
    seed: int, power: int, momentum: float, tmp_path: Path
) -> None:
    model = network(seed)
    with pytest.raises(df.AuditError, match=DIVERGES):
        diverge(model, tmp_path / "run", lr=1 + 0.3 * seed, power=power, momentum=momentum)
    memory = df.Memory.open(tmp_path / "run")
    assert memory.exact
    assert memory.steps > 1
    dual = df.DualForm(model, memory)
    certificate = dual.verify()
    assert certificate.passed, certificate
    assert all(torch.isfinite(w).all() for w in dual.at(step=1).weights().values())
    assert dual.attend(torch.ones(1, 8, dtype=torch.float64))["0"].top(1)
    for name in memory.parameters:
        assert np.isfinite(memory.log(name).kappa).all()


@pytest.mark.parametrize("seed", [5, 9, 11])
def test_another_weight_of_such_a_run_is_found(seed: int, tmp_path: Path) -> None:
    model = network(seed)
    with pytest.raises(df.AuditError, match=DIVERGES):
        diverge(model, tmp_path / "run", lr=1 + 0.3 * seed, power=3)
    with torch.no_grad():
        place = int(model[1].weight.abs().argmax())
        model[1].weight.view(-1)[place] *= 1 + 1e-9
    failures = df.DualForm(model, tmp_path / "run").verify().failures
    assert [(check.parameter, check.kind) for check in failures] == [("1.weight", "weights")]


@pytest.mark.parametrize("seed", [5, 9, 11])
def test_with_warnings_a_diverging_run_goes_on_and_its_log_has_no_factor_that_is_no_number(
    seed: int, tmp_path: Path
) -> None:
    model = network(seed)
    with pytest.warns(UserWarning, match=f"not exact.*({DIVERGES})"):
        recorder = diverge(model, tmp_path / "run", lr=1 + 0.3 * seed, audit="warn")
    memory = df.Memory.open(tmp_path / "run")
    assert not memory.exact
    assert any("diverge" in remark or "not finite" in remark for remark in memory.remarks)
    for name in memory.parameters:
        assert len(memory.log(name).kappa) == recorder.steps
        assert np.isfinite(memory.log(name).kappa).all()
    assert not df.DualForm(model, memory).verify().passed
    earlier = df.DualForm(model, memory).at(step=2)
    assert all(torch.isfinite(w).all() for w in earlier.weights().values())
    assert not earlier.verify().failures


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("power", [2, 3])
@pytest.mark.parametrize("seed", [5, 7, 8, 9, 11])
def test_with_keys_alone_divergence_is_said_and_what_was_kept_before_has_no_failures(
    seed: int, power: int, momentum: float, tmp_path: Path
) -> None:
    model = network(seed)
    options: dict[str, Any] = {"error_signals": False, "snapshot_every": 2}
    with pytest.raises(df.AuditError, match=r"its weights, or what|its weights are not finite"):
        diverge(
            model, tmp_path / "run", lr=1 + 0.3 * seed, power=power, momentum=momentum, **options
        )
    memory = df.Memory.open(tmp_path / "run")
    assert not memory.exact
    dual = df.DualForm(model, memory)
    assert not dual.verify().passed
    earlier = dual.at(step=2)
    assert not earlier.verify().failures
    assert earlier.attend(torch.ones(1, 8, dtype=torch.float64))["0"].top(1)


def test_keys_are_not_taken_for_missing_where_a_gradient_is_not_finite(tmp_path: Path) -> None:
    model = network(0)
    optimizer = SGD(model.parameters(), lr=0.1)
    with (
        pytest.raises(df.AuditError, match=r"step 0, parameter .* its gradient is not finite"),
        df.record(model, optimizer, tmp_path / "run", error_signals=False),
    ):
        (model(torch.randn(3, 8, dtype=torch.float64)).sum() * inf).backward()
        optimizer.step()


# Large, and as exact as anything ----------------------------------------------------------------


def train(
    path: Path, size: float, optimizer_of: Callable[..., Any], tamper: Callable[[nn.Module], None]
) -> nn.Module:
    """Three steps by gradients of about this size; something is done before the last."""
    model = network(1)
    optimizer = optimizer_of(model.parameters())
    with df.record(model, optimizer, path):
        for step in range(3):
            optimizer.zero_grad()
            (model(torch.randn(5, 8, dtype=torch.float64)).sum() * size).backward()
            if step == 2:
                tamper(model)
            optimizer.step()
    return model


def nothing(model: nn.Module) -> None:
    pass


def edit(model: nn.Module) -> None:
    gradient = model[1].weight.grad
    gradient.view(-1)[int(gradient.abs().argmax())] *= 1 + 1e-9


RULES: dict[str, Callable[..., Any]] = {
    "sgd": lambda p: SGD(p, lr=1e-65),
    "momentum": lambda p: SGD(p, lr=1e-65, momentum=0.9),
    "adam": lambda p: Adam(p, lr=1e-3),
}


@pytest.mark.parametrize("rule", RULES)
def test_gradients_of_1e65_are_explained_and_edits_of_them_found(rule: str, tmp_path: Path) -> None:
    model = train(tmp_path / "honest", 1e65, RULES[rule], nothing)
    certificate = df.DualForm(model, tmp_path / "honest").verify()
    assert certificate.passed, certificate
    with pytest.raises(df.AuditError, match=r"step 2, parameter '1.weight': .* of its gradient is"):
        train(tmp_path / "edited", 1e65, RULES[rule], edit)


@pytest.mark.parametrize("size", [1e75, 1e145, 1e160, 1e200, 1e300])
def test_gradients_too_large_to_be_compared_are_refused_as_divergence(
    size: float, tmp_path: Path
) -> None:
    for number, tamper in enumerate((nothing, edit)):
        with pytest.raises(df.AuditError, match=r"step 0, .* larger than 1e\+70: training div"):
            train(tmp_path / f"run{number}", size, RULES["sgd"], tamper)


# One parameter alone ----------------------------------------------------------------------------


def audited(scale: float, rows: int = 6) -> tuple[ParameterAudit, Tensor]:
    """An audit that has seen patterns of this size, squared, and the gradient they sum to."""
    generator = torch.Generator().manual_seed(1)
    audit = ParameterAudit(torch.zeros(rows, 5, dtype=torch.float64), None, generator)
    Audits([audit])
    keys = scale * torch.randn(7, 5, generator=generator, dtype=torch.float64)
    signals = scale * torch.randn(7, rows, generator=generator, dtype=torch.float64)
    gradient = signals.T @ keys
    part = gradient.reshape(-1) if audit.entrywise else signals.T @ (keys @ audit.probe)
    audit.see(part, Rows(0, keys, signals), torch.finfo(torch.float64).eps)
    return audit, gradient


@pytest.mark.parametrize("rows", [1, 6])
@pytest.mark.parametrize("exponent", [*range(-70, 160, 10), 34, 36, 76, 77, 78, 153, 154])
@pytest.mark.parametrize("factor", [1.0, 0.37, 1 + 1e-9, nan, inf])
def test_a_factor_is_finite_and_right_or_refused(exponent: int, rows: int, factor: float) -> None:
    with np.errstate(over="ignore", invalid="ignore"):
        audit, gradient = audited(10.0**exponent, rows)
        seen = gradient * factor
        audit.look_at(seen)
        try:
            kappa = audit.explain()
        except Unexplained:
            assert not np.isfinite(factor) or exponent >= 34
        else:
            assert np.isfinite(kappa)
            assert kappa == pytest.approx(factor, rel=1e-13)
            assert float(seen.abs().max()) < LARGEST


@pytest.mark.parametrize(
    "sums", [(inf, 0.0, 0.0), (inf, inf, inf), (1.0, nan, 0.0), (1.0, 0.0, nan), (1e150, 0.0, 0.0)]
)
def test_sums_that_overflow_are_never_plain(sums: tuple[float, float, float]) -> None:
    audit, _ = audited(1.0)
    assert not is_plain(audit, sums)
    assert is_plain(audit, (1.0, 0.0, 0.0))


def test_a_bound_without_end_lets_no_weights_through() -> None:
    for off, bound in ((nan, 1.0), (inf, 1.0), (1.0, inf), (0.0, nan), (0.0, inf)):
        with pytest.raises(Diverged, match="training has diverged"):
            refuse_diverged(off, bound)
    refuse_diverged(2.0, 1.0)  # that far off is another matter


def test_weights_beyond_float32_are_measured() -> None:
    for size in (1e-3, 1e20, 1e39, 1e140):
        rows = torch.full((3, 4), size, dtype=torch.float64)
        assert largest_row(rows) == pytest.approx(size, rel=1e-6)
