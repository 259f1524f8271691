"""What is kept of a pattern, and in how many bits: the choices given to `record`.

Training decides how exact patterns can be; storage only decides what of it stays. A network that
trains in 16 bits is stored as it is, whatever was asked for: rounding to another 16-bit type would
lose something and save nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch

from dualform.errors import RecordingError
from dualform.layers import Layer
from dualform.layers.kinds import key_width
from dualform.recording.regions import Region

DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}
"""What patterns can be stored in; the first is exact."""

TOKENS = torch.int64
"""What the keys of an embedding are stored in: little beside an error signal of any width."""


@dataclass(frozen=True)
class Storage:
    """How patterns are stored: "float32" as trained (float64 stays float64), or in 16 bits.

    `error_signals` are name patterns of the layers whose error signals are kept: "*" for all.
    """

    dtype: str = "float32"
    error_signals: tuple[str, ...] = ("*",)

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise RecordingError(
                f"dtype={self.dtype!r} was given; expected one of {', '.join(DTYPES)}: what keys "
                "and error signals are stored in (training is not touched by it)"
            )

    def check(self, layers: Iterable[Layer], others: Iterable[str] = ()) -> None:
        """Raise if a name pattern means none of the layers there are, or of others to come."""
        names = [*(layer.name for layer in layers), *others]
        for pattern in self.error_signals:
            if pattern != "*" and not any(fnmatchcase(name, pattern) for name in names):
                raise RecordingError(
                    f"error_signals={pattern!r} names no layer; there are "
                    f"{', '.join(names) or 'none'}. Expected True, False, or name patterns such as "
                    '"fc*"'
                )

    def keeps_error_signals(self, layer: Layer) -> bool:
        """Whether a layer's error signals are kept, or its keys alone."""
        return any(fnmatchcase(layer.name, pattern) for pattern in self.error_signals)

    def dtype_of(self, trained: torch.dtype) -> torch.dtype:
        """What the patterns of a layer are stored in, given the dtype of its weight."""
        return trained if self.dtype == "float32" or trained.itemsize <= 2 else DTYPES[self.dtype]

    def places(self, layer: Layer, trained: torch.dtype, rows: int) -> tuple[Region, Region | None]:
        """Room for keys and error signals of a layer; None if its keys alone are kept."""
        stored = self.dtype_of(trained)
        width = key_width(layer.kind, layer.in_features)
        if layer.kind == "embedding":
            keys = Region(width, TOKENS, rows)
        else:
            keys = Region(width, trained, rows, stored)
        if not self.keeps_error_signals(layer):
            return keys, None
        return keys, Region(layer.out_features, trained, rows, stored)

    def bytes_in_buffers(self, layer: Layer, trained: torch.dtype) -> int:
        """What a pattern takes until it is written: as much as in training."""
        return sum(Storage("float32", self.error_signals).bytes_per_pattern(layer, trained))

    def bytes_per_pattern(self, layer: Layer, trained: torch.dtype) -> tuple[int, int]:
        """What a key and an error signal take on disk, as long as 16 bits hold them."""
        stored = self.dtype_of(trained)
        width = key_width(layer.kind, layer.in_features)
        key = width * (TOKENS if layer.kind == "embedding" else stored).itemsize
        if not self.keeps_error_signals(layer):
            return key, 0
        scale = 4 if stored == torch.float16 and stored != trained else 0
        return key, layer.out_features * stored.itemsize + scale


def chosen(error_signals: bool | str | Iterable[str]) -> tuple[str, ...]:
    """What `error_signals=` means, as name patterns."""
    if isinstance(error_signals, bool):
        return ("*",) if error_signals else ()
    listed = (error_signals,) if isinstance(error_signals, str) else error_signals
    patterns = tuple(listed) if isinstance(listed, Iterable) else (None,)
    if not all(isinstance(pattern, str) for pattern in patterns):
        raise RecordingError(
            f"error_signals={error_signals!r} was given; expected True, False, or name patterns of "
            'layers, such as ["fc*"]'
        )
    return tuple(map(str, patterns))
