"""What is asked of a parameter's gradient."""

from __future__ import annotations

import pytest
import torch

from dualform.recording.parameters import apart, is_reset


@pytest.mark.parametrize("shape", [(), (1,), (10,), (800, 784), (784, 800), (10, 800), (3, 4, 64)])
def test_only_zeros_count_as_reset(shape: tuple[int, ...]) -> None:
    gradient = torch.zeros(shape)
    assert is_reset(None)
    assert is_reset(gradient)
    for place in (0, gradient.numel() // 2, gradient.numel() - 1):
        gradient.zero_().view(-1)[place] = -1e-30
        assert not is_reset(gradient)


@pytest.mark.parametrize(("rows", "width"), [(800, 784), (800, 800), (512, 512), (4096, 1024)])
def test_the_entries_looked_at_first_are_of_many_columns(rows: int, width: int) -> None:
    """Else the first layer's gradient would be read to its end wherever images have dark edges."""
    looked_at = torch.arange(0, rows * width, apart(rows * width, width))
    assert 60 <= len(looked_at) <= 65
    assert len(set((looked_at % width).tolist())) == len(looked_at)
