"""Adam with only W − W_0 kept: weights that have shrunk far below W_0 are verified as they are."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Adam

import dualform as df

WAYS: dict[str, dict[str, Any]] = {
    "keys alone": {"error_signals": False},
    "no layer": {"layers": [], "step_budget": 0},
}


@pytest.fixture(scope="module", params=WAYS)
def shrunk(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[nn.Linear, Path, float]:
    """A layer trained to answer nothing, where it is recorded, and the largest entry of W_0."""
    torch.manual_seed(0)
    model = nn.Linear(4, 8).double()
    optimizer = Adam(model.parameters(), lr=0.01)
    path = tmp_path_factory.mktemp("shrunk") / "run"
    begun = float(model.weight.detach().abs().max())
    with df.record(model, optimizer, path, **WAYS[request.param]):
        for _ in range(300):
            optimizer.zero_grad()
            model(torch.randn(5, 4, dtype=torch.float64)).square().sum().backward()
            optimizer.step()
    assert float(model.weight.detach().abs().max()) < 1e-5 * begun
    return model, path, begun


def test_weights_that_have_shrunk_pass_with_room_to_spare(
    shrunk: tuple[nn.Linear, Path, float],
) -> None:
    model, path, _ = shrunk
    certificate = df.DualForm(model, path).verify(torch.randn(3, 4, dtype=torch.float64))
    assert certificate.passed, certificate
    for check in certificate.checks:
        assert check.residual * 1.5 <= check.bound, check


@pytest.mark.parametrize("share", [1e-9, 1e-13])
def test_another_weight_is_found_by_its_share_of_the_initial_ones(
    shrunk: tuple[nn.Linear, Path, float], share: float
) -> None:
    model, path, begun = shrunk
    other = nn.Linear(4, 8).double()
    other.load_state_dict(model.state_dict())
    with torch.no_grad():
        other.weight[3, 2] += share * begun
    failures = df.DualForm(other, path).verify().failures
    assert {(check.parameter, check.kind) for check in failures} == {("weight", "weights")}


@pytest.mark.parametrize("share", [1e-9, 1e-12])
def test_another_learned_part_is_found_by_its_share_of_the_initial_weights(
    shrunk: tuple[nn.Linear, Path, float], tampering: Any, tmp_path: Path, share: float
) -> None:
    _, path, begun = shrunk
    shutil.copytree(path, tmp_path / "forged")
    file, _ = tampering.segment_of(tmp_path / "forged", 299)

    def edit(learned: Tensor) -> None:
        learned.view(-1)[-2] += share * begun  # of the last that was kept

    tampering.edit_tensor(file, "learned/weight", edit)
    tampering.reseal(tmp_path / "forged")
    memory = df.Memory.open(tmp_path / "forged")
    memory.check()  # every checksum matches
    failures = df.DualForm(None, memory).verify().failures
    assert {(check.parameter, check.kind) for check in failures} == {("weight", "fingerprints")}


def test_weights_that_are_no_numbers_fail(shrunk: tuple[nn.Linear, Path, float]) -> None:
    _, path, _ = shrunk
    other = nn.Linear(4, 8).double()
    nn.init.constant_(other.weight, torch.nan)
    failures = df.DualForm(other, path).verify().failures
    assert ("weight", "weights") in {(check.parameter, check.kind) for check in failures}
