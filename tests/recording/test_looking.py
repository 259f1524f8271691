"""Looking at all gradients together is looking at each of them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from dualform.recording.audit import ParameterAudit
from dualform.recording.audits import Audits

SHAPES = ((300, 250), (300,), (20, 300), (20,), (260, 260))


def gradients(dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES]


def audits(dtype: torch.dtype, silent: slice) -> tuple[Audits, list[ParameterAudit]]:
    """Of parameters whose patterns sum to something else in every row, and to nothing in some."""
    generator = torch.Generator().manual_seed(1)
    found = [ParameterAudit(torch.zeros(s, dtype=dtype), None, generator) for s in SHAPES]
    common, draw = Audits(found), np.random.default_rng(2)
    for audit in found:
        audit.expected[:] = draw.normal(size=audit.expected.shape)
    found[0].expected[silent] = 0.0
    return common, found


WAYS: dict[str, Callable[[list[Tensor]], list[Tensor]]] = {
    "as they are": lambda given: given,
    "transposed in memory": lambda given: [g.t().contiguous().t() for g in given],
    "with a graph": lambda given: [g.requires_grad_() for g in given],
    "of another precision": lambda given: [g.double() if g.dim() == 2 else g for g in given],
    "all of 16 bits": lambda given: [g.bfloat16() for g in given],
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_together_is_one_by_one(dtype: torch.dtype, way: str) -> None:
    silent = slice(0, 40)
    (common, together), (_, apart) = audits(dtype, silent), audits(dtype, silent)
    given = WAYS[way](gradients(dtype))
    parts = set()
    for step in range(40):
        common.look_at(dict(reversed(list(enumerate(given)))), step)
        for one, other, gradient in zip(together, apart, given, strict=True):
            other.look_at(gradient, step)
            assert one._seen == other._seen
            off = np.abs(one.projected - other.projected).max()
            assert off <= 8 * torch.finfo(dtype).eps  # a product may be summed in another order
        parts.add((together[0]._seen.start, together[0]._seen.stop))
    assert len(parts) == 15  # two of sixteen are silent: then all rows are looked at
    assert (None, None) in parts


def test_some_of_the_gradients_leave_the_others_alone() -> None:
    common, found = audits(torch.float64, slice(0, 0))
    given = gradients(torch.float64)
    found[0].projected[:] = 7.0
    common.look_at({1: given[1], 3: given[3]}, 5)
    assert (found[0].projected == 7.0).all()
    assert np.array_equal(found[1].projected, given[1].numpy())
