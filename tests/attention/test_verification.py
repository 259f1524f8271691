"""The certificate, as a `DualForm` asks for it: of a view, with its model, with inputs."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dualform

ROOM = 2.0
"""Honest residuals stay below their bound divided by this."""


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
def test_an_honest_run_passes_with_room_to_spare(train: Any, dtype: torch.dtype) -> None:
    run = train(steps=80, dtype=dtype, nesterov=True, clip=0.1, warm=5)
    certificate = run.dual.verify(run.inputs[:4])
    assert certificate.passed, certificate
    outputs = [check for check in certificate.checks if check.kind == "outputs"]
    assert len(outputs) == 1
    for check in certificate.checks:
        assert check.residual * ROOM <= check.bound or check.residual == 0, check


def test_another_model_fails_and_the_memory_is_not_blamed(run: Any) -> None:
    other = type(run.model)().double()
    other.load_state_dict(run.model.state_dict())
    assert dualform.DualForm(other, run.path).verify().passed
    with torch.no_grad():
        other.fc2.weight[3, 4] += 1e-9
    certificate = dualform.DualForm(other, run.path).verify()
    assert not certificate.passed
    assert [check.parameter for check in certificate.failures] == ["fc2.weight"]
    assert all(verdict.passed for verdict in certificate.verdicts.values())
    assert "agrees with itself" in repr(certificate)
    with pytest.raises(dualform.QueryError, match="does not explain"):
        certificate.raise_if_failed()
    retrained = type(run.model)().double()
    assert not dualform.DualForm(retrained, run.path).verify(run.inputs[:2]).passed


def test_nan_in_the_model_fails(run: Any) -> None:
    other = type(run.model)().double()
    other.load_state_dict(run.model.state_dict())
    with torch.no_grad():
        other.fc1.bias[0] = float("nan")
    certificate = dualform.DualForm(other, run.path).verify()
    assert not certificate.passed
    json.dumps(certificate.to_dict(), allow_nan=False)


def test_earlier_steps_verify_without_the_model_of_the_end(run: Any) -> None:
    other = type(run.model)().double()  # as good as any: its weights are of no step
    for step in (0, 1, 15):
        assert dualform.DualForm(other, run.path).at(step).verify().passed
    with pytest.raises(dualform.QueryError, match="without inputs"):
        run.dual.at(15).verify(run.inputs)
    with pytest.raises(dualform.QueryError, match="nothing was ever trained to be it"):
        run.dual.without(label=1).verify()


def test_shared_repeated_and_normed_layers_are_covered(train: Any) -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(6, 6)
            self.norm = nn.LayerNorm(6)
            self.up = nn.Linear(6, 4, bias=False)
            self.tied = nn.Linear(6, 4)
            self.tied.weight = self.up.weight

        def forward(self, x: Tensor) -> Tensor:
            h = self.norm(self.inner(torch.relu(self.inner(x))))
            output: Tensor = self.up(h) + self.tied(h)
            return output

    for options in ({}, {"keep": {"norm": "values", "*": "auto"}}):
        run = train(Mixed, steps=40, options=options)
        certificate = run.dual.verify(run.inputs[:3])
        assert certificate.passed, certificate
        assert {c.parameter for c in certificate.checks if c.kind == "weights"} == set(
            run.history[0]
        )


def test_the_certificate_reads_well_and_travels(run: Any) -> None:
    certificate = run.dual.verify(run.inputs[:2])
    text = repr(certificate)
    for words in ("PASSED", "fc1.weight", "fingerprints", "steps", "sha256 memory", "outputs"):
        assert words in text
    assert set(certificate.hashes) == {"memory"}
    found = json.loads(json.dumps(certificate.to_dict(), allow_nan=False))
    assert found["passed"] is True
    assert all(check.residual <= check.bound for check in certificate.checks)
    assert list(certificate.table["parameter"]) == list(run.memory.parameters)
    certificate.raise_if_failed()


def test_progress_is_reported_to_the_end(train: Any) -> None:
    run, seen = train(dtype=torch.float32), list[tuple[int, int]]()
    run.dual.verify(every_step=True, progress=lambda done, total: seen.append((done, total)))
    assert len({total for _, total in seen}) == 1
    assert seen[-1][0] == seen[-1][1]
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("trained", [torch.float32, torch.float64], ids=["float32", "float64"])
def test_patterns_stored_in_16_bits_pass_within_rounding_and_say_why(
    train: Any, dtype: str, trained: torch.dtype
) -> None:
    run = train(steps=80, dtype=trained, clip=0.1, options={"dtype": dtype})
    certificate = run.dual.verify(run.inputs[:4])
    assert certificate.passed, certificate
    assert certificate.verdict == "within rounding"
    assert f"rows are stored in {dtype}" in repr(certificate)


def test_questions_to_16_bits_have_the_same_answers_up_to_rounding(
    train: Any, difference: Any
) -> None:
    whole, half = (
        train(steps=40, dtype=torch.float32, options={"dtype": d}) for d in ("float32", "float16")
    )
    x = whole.inputs[:1]
    for name, spotlight in whole.dual.attend(x).items():
        assert difference(half.dual.attend(x)[name].weights, spotlight.weights) < 2e-3
    ours, theirs = (r.dual.contribute(x, target=1) for r in (half, whole))
    assert abs(ours.total - theirs.total) < 1e-6 * abs(theirs.primal)
    assert abs(ours.shares["patterns"] - theirs.shares["patterns"]) < 5e-3
    assert abs(ours.shares["not explained by patterns"]) < 5e-3
    assert difference(half.dual(x, by="patterns"), half.dual(x)) < 1e-6
    for name, weight in half.dual.without(label=1).weights().items():
        assert difference(weight, whole.dual.without(label=1).weights()[name]) < 1e-2
