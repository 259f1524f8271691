"""Predicting where all parameters are is predicting it of each of them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dualform.recording.audit import ParameterAudit
from dualform.recording.predictions import Predictions

SHAPES = ((9, 6), (9,), (4, 9), (4,))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
def test_predictions_of_all_are_those_of_each(dtype: torch.dtype) -> None:
    def watch() -> list[ParameterAudit]:
        generator = torch.Generator().manual_seed(3)
        return [ParameterAudit(torch.ones(s, dtype=dtype), None, generator) for s in SHAPES]

    each, together = watch(), watch()
    drawn = torch.Generator().manual_seed(4)
    predictions = Predictions(together)
    transition = (0.999, -0.1, 0.001, 0.9, -0.1, 1.0)
    for _ in range(20):
        gradients = [torch.randn(shape, generator=drawn, dtype=dtype) for shape in SHAPES]
        sketched = predictions.follow(gradients, transition)
        assert sketched is not None
        for audit, other, gradient, number in zip(each, together, gradients, sketched, strict=True):
            audit.look_at(gradient)
            audit.advance(transition)
            assert np.allclose(audit.weights, other.weights, rtol=0, atol=1e-14)
            assert np.allclose(audit.momentum, other.momentum, rtol=0, atol=1e-14)
            assert number == pytest.approx(audit.sketched, abs=1e-14)
            assert audit.travel == pytest.approx(other.travel, rel=1e-12)
            assert audit.initial_share == other.initial_share
    before = [audit.weights.copy() for audit in together]
    odd = [gradient.to(torch.bfloat16) for gradient in gradients]
    assert predictions.follow(odd, transition) is None
    assert all(map(np.array_equal, before, (audit.weights for audit in together)))
