"""torch's fused evaluation of `nn.TransformerEncoder`, switched off while layers are looked at.

In eval mode torch may compute a whole encoder layer in one kernel, calling none of its modules, and
gives zeros at positions that a padding mask leaves out, where the layers one by one give numbers
that nobody uses. So both sides of a comparison are taken without it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_lock = threading.Lock()
_before: list[bool] = []


@contextmanager
def layer_by_layer() -> Iterator[None]:
    """No fused evaluation inside; the switch, which is one for all threads, is then put back."""
    with _lock:
        _before.append(torch.backends.mha.get_fastpath_enabled())
        torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        with _lock:  # the last to leave finds what the first has met
            torch.backends.mha.set_fastpath_enabled(_before.pop())
