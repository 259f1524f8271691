"""What was asked for, as what becomes of every layer and every parameter.

Why it is hard: layers share parameters. A parameter is known by patterns only as long as every
layer that wrote into it keeps its error signals; as soon as one does not, what it learned has to be
kept as a sum.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from dualform.errors import RecordingError
from dualform.layers import NamePatterns, chosen_names, is_chosen
from dualform.memory.copying import SourceMemory

DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Choices:
    """What becomes of a memory. Layers and parameters are named as in the memory."""

    layers: tuple[str, ...]
    """Those that stay, in their own order."""
    without_error_signals: frozenset[str] = frozenset()
    """Of those, the ones that lose their error signals now."""
    narrowed: Mapping[str, torch.dtype] = field(default_factory=dict)
    """Of those, the ones whose patterns are put into 16 bits now."""
    summed: frozenset[str] = frozenset()
    """The parameters whose learned part is kept as a sum from now on."""

    def describe(self, memory: SourceMemory) -> str:
        """The choices in words; empty if nothing changes."""
        said = []
        for dtype in dict.fromkeys(self.narrowed.values()):
            names = [name for name, narrow in self.narrowed.items() if narrow == dtype]
            said.append(f"{', '.join(names)} to {str(dtype).removeprefix('torch.')}")
        if self.without_error_signals:
            names = [name for name in self.layers if name in self.without_error_signals]
            said.append(f"without the error signals of {', '.join(names)}")
        if gone := [name for name in memory.layers if name not in self.layers]:
            said.append(f"without the patterns of {', '.join(gone)}")
        return "; ".join(said)


def choose(
    memory: SourceMemory,
    layers: NamePatterns,
    error_signals: bool | str | Sequence[str],
    dtype: str | None,
) -> Choices:
    """What was asked for, checked; `RecordingError` says what cannot be had."""
    kept = tuple(chosen_names(memory.layers, layers, "layers"))
    whole = [name for name in kept if memory.layer(name).has_error_signals]
    alone = frozenset(whole) - frozenset(_with_error_signals(memory, error_signals))
    dropped = frozenset(memory.layers) - frozenset(kept)
    lost = {
        parameter
        for name in dropped | alone
        for parameter in (memory.layer(name).weight, memory.layer(name).bias)
        if parameter is not None and memory.parameters[parameter].coverage == "patterns"
    }
    return Choices(kept, alone, _narrowed(memory, kept, dtype), frozenset(lost))


def _with_error_signals(memory: SourceMemory, asked: bool | str | Sequence[str]) -> Sequence[str]:
    if isinstance(asked, bool):
        return memory.layers if asked else ()
    if not asked:
        return ()
    found = chosen_names(memory.layers, asked, "error_signals")
    has = [name for name in memory.layers if memory.layer(name).has_error_signals]
    for pattern in [asked] if isinstance(asked, str) else asked:
        if not any(is_chosen(name, pattern) for name in has):
            raise RecordingError(
                f"error_signals={pattern!r} was given, but of what it names {memory.path} holds "
                f"keys alone; layers with error signals: {', '.join(has) or 'none'}. Name those "
                "that are to keep theirs, or False for none"
            )
    return found


def _narrowed(
    memory: SourceMemory, kept: Sequence[str], dtype: str | None
) -> dict[str, torch.dtype]:
    """The layers whose patterns are still in a wider type than the one asked for."""
    if dtype is not None and dtype not in ("float32", *DTYPES):
        raise RecordingError(
            f"dtype={dtype!r} was given; expected one of float32 (as trained), "
            f"{', '.join(DTYPES)}: what keys and error signals are to be stored in"
        )
    found: dict[str, torch.dtype] = {}
    for name in kept if dtype is not None else ():
        layer = memory.layer(name)
        if layer.dtype.itemsize <= 2:
            continue  # trained in 16 bits: stays as it is
        stored = str(layer.stored).removeprefix("torch.")
        if layer.stored == layer.dtype:
            if dtype in DTYPES:
                found[name] = DTYPES[dtype]
        elif stored != dtype:
            raise RecordingError(
                f"dtype={dtype!r} was given, but the patterns of layer {name!r} are stored in "
                f"{stored} already. What that lost does not come back, and another type would lose "
                "more and save nothing: leave out dtype, or convert the memory it was made from"
            )
    return found
