"""Marks say where training was: one changed entry changes its parameter's mark, and no other."""

from __future__ import annotations

import pytest
import torch

from dualform.certificate.marks import Marks, mark_of

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_mark_is_the_parameters_own_and_sees_one_entry(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    wide, turned = torch.randn(100, 30).to(dtype), torch.randn(8, 5).to(dtype).t()
    counts = [torch.zeros(3, dtype=dtype), torch.tensor(3.0), torch.arange(10), torch.zeros(0)]
    owned = [[wide], [], counts, [torch.zeros(0)], [turned]]
    marks = Marks(owned)
    before = marks.sampled()
    found = marks.numbers(before)
    assert found.tolist() == [mark_of(own) for own in owned]
    assert (found != 0).tolist() == [True, False, True, False, True]
    wide[0, 0] += 1
    now = marks.sampled()
    assert (marks.numbers(now) != found).tolist() == [True, False, False, False, False]
    off, size = marks.apart(before, now)
    assert abs(off[0] - 1) < 0.01
    assert not off[1:].any()
    assert size[0] >= off[0] / 2
    wide[0, 0] -= 1
    wide.data = wide.clone()  # other memory, the same numbers
    assert mark_of([wide]) == int(marks.numbers(marks.sampled())[0])
