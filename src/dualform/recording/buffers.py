"""The model's buffers (running statistics): written down whenever training has changed them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from dualform.errors import RecordingError

SMALL_BUFFER = 1 << 16
"""Up to this many elements a buffer is compared by value at every step, a larger one by version."""


class BufferWatch:
    """The model's buffers: their values when recording began, and every change since."""

    def __init__(self, model: nn.Module) -> None:
        self._places: dict[str, tuple[nn.Module, str]] = {}
        for name, _ in model.named_buffers():
            path, _, own = name.rpartition(".")
            self._places[name] = model.get_submodule(path), own
        self.values = {
            name: module._buffers[own].detach().to("cpu", copy=True)  # type: ignore[union-attr]
            for name, (module, own) in self._places.items()
        }
        self._last = dict(self.values)
        self._seen: dict[str, tuple[int, int]] = {}
        self.changed: set[str] = set()

    def restore(self, values: Mapping[str, Tensor], changed: Collection[str]) -> bool:
        """A resumed run: the values last recorded. False if the model's buffers differ now."""
        same = all(torch.equal(now, values[name]) for name, now in self.values.items())
        self._last, self.changed = dict(values), set(changed)
        return same

    def describe(self) -> list[dict[str, Any]]:
        """The manifest's entries."""
        return [
            {
                "name": name,
                "shape": list(value.shape),
                "dtype": str(value.dtype).removeprefix("torch."),
                "coverage": "recorded" if name in self.changed else "constant",
            }
            for name, value in self.values.items()
        ]

    def changes(self) -> dict[str, Tensor]:
        """Every buffer that differs from when this was last asked, as it is now."""
        changes = {}
        for name, (module, own) in self._places.items():
            buffer = module._buffers.get(own)  # a model may put a new tensor in its place
            if buffer is None:
                raise RecordingError(f"the buffer {name!r} was taken out of the model")
            seen = (id(buffer), buffer._version)
            if buffer.numel() > SMALL_BUFFER and seen == self._seen.get(name):
                continue
            self._seen[name] = seen
            now, known = buffer.detach().cpu(), self._last[name]
            if now.shape != known.shape or now.dtype != known.dtype:
                raise RecordingError(
                    f"the buffer {name!r} was {known.dtype} {list(known.shape)} and is now "
                    f"{now.dtype} {list(now.shape)}; a memory keeps buffers of one type and shape"
                )
            if not torch.equal(now, known):
                self._last[name] = changes[name] = now.clone()
        self.changed |= set(changes)
        return changes
