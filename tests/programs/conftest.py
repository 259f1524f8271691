"""Programs are small: one thread does, and makes every run the same to the bit."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)
