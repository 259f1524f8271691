"""Honest runs stay well within the bounds, of every size and under every rule."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.certificate import tampering
from tests.certificate.runs import Run

from dualform.certificate import Verification, verify
from dualform.certificate.report import BITS, LITTLE, ROUNDED
from dualform.errors import QueryError

WELL_WITHIN = 0.6
SGD, ADAMW = torch.optim.SGD, torch.optim.AdamW
CREEPING = {"lr": 1e-5, "momentum": 0.999, "weight_decay": 1e-4}

RUNS: dict[str, Run] = {
    "SGD": Run(),
    "AdamW": Run(ADAMW, {"lr": 1e-3}),
    "a big batch that creeps": Run(settings=CREEPING, batch=512),
    "a step of 1e-10": Run(settings=CREEPING | {"lr": 1e-10}, batch=512),
    "a step of 2": Run(settings={"lr": 2.0}),
    "nesterov, hardly any friction": Run(
        settings={"lr": 0.5, "momentum": 0.99, "nesterov": True}, clip=0.1
    ),
    "maximize, dampened": Run(
        settings={"lr": 0.01, "momentum": 0.9, "dampening": 0.3, "maximize": True}
    ),
    "a batch of one": Run(batch=1),
    "a batch of one, AdamW": Run(ADAMW, {"lr": 1e-3}, batch=1),
    "three wide": Run(widths=(20, 3, 2, 6)),
    "three wide, Adagrad": Run(torch.optim.Adagrad, {"lr": 0.05}, widths=(20, 3, 2, 6)),
    "20 layers": Run(widths=(20, *[128] * 19, 6), steps=40),
    "20 layers, AdamW": Run(ADAMW, {"lr": 1e-3}, widths=(20, *[128] * 19, 6), steps=20),
    "clipped": Run(clip=0.1),
    "float64": Run(dtype=torch.float64),
    "bfloat16": Run(dtype=torch.bfloat16),
    "bfloat16 autocast": Run(autocast=True),
    "bfloat16 autocast, AdamW": Run(ADAMW, {"lr": 1e-3}, autocast=True),
}

FAR = {
    "a step of 1e-10": {LITTLE},
    "20 layers": {LITTLE},
    "a batch of one": {BITS},
    "a batch of one, AdamW": {BITS},
    "bfloat16": {BITS, LITTLE},
    "bfloat16 autocast": {BITS, LITTLE},
    "bfloat16 autocast, AdamW": {BITS, ROUNDED},
}
"""On another machine: where what was learned is hardly more than rounding, it certifies little."""

TORCH_RULES: dict[str, dict[str, Any]] = {
    "SGD": {"lr": 0.05, "momentum": 0.9},
    "Adam": {"lr": 1e-3}, "AdamW": {"lr": 1e-3}, "NAdam": {"lr": 1e-3}, "RAdam": {"lr": 1e-3},
    "Adamax": {"lr": 1e-3}, "Adagrad": {"lr": 1e-2}, "Adadelta": {"lr": 1.0},
    "RMSprop": {"lr": 1e-3}, "ASGD": {"lr": 1e-2}, "Rprop": {"lr": 1e-4},
}  # fmt: skip
"""Every deterministic class of torch.optim that takes vectors and matrices alike."""


def severity(found: Verification) -> dict[str, float]:
    """How far each kind of check is on its way to the bound, at most."""
    worst: dict[str, float] = {}
    for check in found.checks:
        worst[check.kind] = max(worst.get(check.kind, 0.0), check.severity)
    return worst


@pytest.mark.parametrize("name", RUNS)
def test_an_honest_run_is_certified_here_and_elsewhere(name: str, tmp_path: Path) -> None:
    run = RUNS[name].train(tmp_path / "run")
    here = verify(run.memory, run.trained)
    assert here.passed, repr(here)
    assert here.verdict == BITS, repr(here)
    assert max(severity(here).values()) <= WELL_WITHIN, severity(here)
    forged = tampering.forge(
        run.path, tmp_path / "far", tampering.shuffle_rows, tampering.elsewhere
    )
    far = verify(forged, run.trained)
    assert not far.failures, repr(far)
    assert far.verdict in FAR.get(name, {ROUNDED}), repr(far)
    assert max(severity(far).values()) <= WELL_WITHIN, severity(far)


@pytest.mark.parametrize("stored", ["float16", pytest.param("bfloat16", marks=pytest.mark.long)])
@pytest.mark.parametrize("rule", TORCH_RULES)
def test_every_rule_keeps_to_the_bounds_in_16_bits(rule: str, stored: str, tmp_path: Path) -> None:
    run = Run(getattr(torch.optim, rule), TORCH_RULES[rule], steps=80, options={"dtype": stored})
    run.train(tmp_path / "run")
    found = verify(run.memory, run.trained)
    assert not found.failures, repr(found)
    assert found.verdict == ROUNDED or (found.verdict == LITTLE and stored == "bfloat16")
    assert max(severity(found).values()) <= WELL_WITHIN, severity(found)


@pytest.mark.long
@pytest.mark.parametrize("stored", ["float32", "float16"])
@pytest.mark.parametrize("rule", ["SGD", "AdamW"])
def test_3000_steps_are_certified(rule: str, stored: str, tmp_path: Path) -> None:
    options = {"dtype": stored}
    run = Run(getattr(torch.optim, rule), TORCH_RULES[rule], steps=3000, options=options)
    run.train(tmp_path / "run")
    found = verify(run.memory, run.trained, every_step=stored == "float32")
    assert found.passed, repr(found)
    assert found.verdict == (BITS if stored == "float32" else ROUNDED)
    assert max(severity(found).values()) <= WELL_WITHIN, severity(found)


def test_what_certifies_little_never_passes(tmp_path: Path) -> None:
    """Learned less than rounding: only bits can tell what wrote it."""
    run = Run(settings={"lr": 1e-9, "momentum": 0.9}).train(tmp_path / "run")
    assert verify(run.memory, run.trained).verdict == BITS
    forged = tampering.forge(
        run.path, tmp_path / "far", tampering.shuffle_rows, tampering.elsewhere
    )
    found = verify(forged, run.trained)
    assert not found.failures
    assert found.verdict == LITTLE
    assert not found.passed
    assert found.to_dict()["passed"] is False
    assert "FAILED" in repr(found)
    assert any(f"0.weight: {LITTLE}" in line for line in found.blame())
    with pytest.raises(QueryError, match="certifies little"):
        found.raise_if_failed()
