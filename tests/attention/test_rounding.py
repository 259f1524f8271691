"""The bounds of `verify` go with the size of what they are for, however large that is."""

from __future__ import annotations

from math import inf, nan, sqrt

import numpy as np
import pytest
import torch

from dualform.attention.rounding import drift, entries_size
from dualform.attention.verification import Check
from dualform.learning_rules import ParameterLog
from dualform.memory.following import rms

STEPS = 12


@pytest.mark.parametrize("anchored", [True, False])
@pytest.mark.parametrize("exponent", [-100, 300, 400, 600, 900])
def test_drift_scales_with_what_drifts(exponent: int, anchored: bool) -> None:
    sizes = np.random.default_rng(1).uniform(1.0, 2.0, STEPS)

    def bounds(unit: float) -> np.ndarray:
        found = drift(
            ParameterLog.constant(STEPS, lr=0.1, momentum=0.9, weight_decay=0.01),
            np.array([5, STEPS]),
            eps=1e-16,
            gradient_eps=1e-16,
            size=0.7 * unit,
            gross=sizes * unit,
            anchored=anchored,
            buffers=sizes * unit,
            stored=1e-3 * sizes * unit,
        )
        return found.bound(4.0)

    unit = 2.0**exponent
    np.testing.assert_allclose(bounds(unit) / unit, bounds(1.0), rtol=1e-12)


@pytest.mark.parametrize("size", [1e-100, 1.0, 1e120, 1e160, 1e300])
def test_sizes_are_measured_where_squares_overflow(size: float) -> None:
    matrix = torch.full((3, 4), size, dtype=torch.float64)
    assert rms(matrix) == pytest.approx(size)
    assert entries_size(torch.ones(4, dtype=torch.float64), matrix) == pytest.approx(sqrt(4) * size)


def test_sizes_of_what_is_no_number_are_none() -> None:
    assert rms(torch.tensor([1.0, inf])) == inf
    assert np.isnan(rms(torch.tensor([1.0, nan])))
    assert rms(torch.zeros(0)) == 0.0


@pytest.mark.parametrize("residual", [0.0, 1.0, nan, inf])
@pytest.mark.parametrize("bound", [inf, nan])
def test_a_bound_that_is_no_number_is_kept_to_by_nothing(residual: float, bound: float) -> None:
    check = Check("weight", "weights", residual, bound)
    assert not check.passed
    assert check.severity == inf
    assert check.to_dict()["bound"] is None
