"""What was asked for, as what becomes of every layer and every parameter.

Why it is hard: layers share parameters. A parameter is known by patterns only as long as every
layer that wrote into it keeps its error signals; as soon as one does not, what it learned has to be
kept as a sum. A compacted layer forgets when its patterns came, so its bias is kept as a sum, too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from dualform.errors import RecordingError
from dualform.layers import NamePatterns, chosen_names, is_chosen
from dualform.memory.copying import SourceMemory

DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}
Rank = int | Mapping[str, int] | None
"""One rank for all layers, or one for each name pattern."""


@dataclass(frozen=True)
class Choices:
    """What becomes of a memory. Layers and parameters are named as in the memory."""

    layers: tuple[str, ...]
    """Those that stay, in their own order."""
    without_error_signals: frozenset[str] = frozenset()
    """Of those, the ones that lose their error signals now."""
    narrowed: Mapping[str, torch.dtype] = field(default_factory=dict)
    """Of those, the ones whose patterns are put into 16 bits now."""
    ranks: Mapping[str, int] = field(default_factory=dict)
    """Of those, the ones that are compacted now."""
    summed: frozenset[str] = frozenset()
    """The parameters whose learned part is kept as a sum from now on."""
    compacted: frozenset[str] = frozenset()
    """The weights of the compacted layers."""

    def describe(self, memory: SourceMemory) -> str:
        """The choices in words; empty if nothing changes."""
        said = []
        for dtype in dict.fromkeys(self.narrowed.values()):
            names = [name for name, narrow in self.narrowed.items() if narrow == dtype]
            said.append(f"{', '.join(names)} to {str(dtype).removeprefix('torch.')}")
        for rank in dict.fromkeys(self.ranks.values()):
            names = [name for name, kept in self.ranks.items() if kept == rank]
            said.append(f"{', '.join(names)} compacted to rank {rank}")
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
    rank: Rank,
) -> Choices:
    """What was asked for, checked; `RecordingError` says what cannot be had."""
    kept = tuple(chosen_names(memory.layers, layers, "layers"))
    whole = [name for name in kept if memory.layer(name).has_error_signals]
    alone = frozenset(whole) - frozenset(_with_error_signals(memory, error_signals))
    ranks = _ranks(memory, whole, alone, rank)
    dropped = frozenset(memory.layers) - frozenset(kept)
    _refuse_compacted(memory, dropped | alone)
    changed = dropped | alone | ranks.keys()
    compacted = frozenset(memory.layer(name).weight for name in ranks)
    lost = {
        parameter
        for name in changed
        for parameter in (memory.layer(name).weight, memory.layer(name).bias)
        if parameter is not None and memory.parameters[parameter].coverage == "patterns"
    }
    _refuse_half(memory, ranks, compacted)
    return Choices(
        kept, alone, _narrowed(memory, kept, dtype), ranks, frozenset(lost) - compacted, compacted
    )


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


def _ranks(
    memory: SourceMemory, whole: Sequence[str], alone: frozenset[str], rank: Rank
) -> dict[str, int]:
    """The rank of every layer that is to be compacted; one pattern's rank replaces one before."""
    if rank is None:
        return {}
    asked = dict(rank) if isinstance(rank, Mapping) else {"*": rank}
    for value in asked.values():
        if type(value) is not int or value < 1:
            raise RecordingError(
                f"rank={value!r} was given; expected how many patterns a layer may have, at least "
                "1, or one number for each name of a layer, such as {'fc1': 16}"
            )
    found: dict[str, int] = {}
    for pattern, value in asked.items():
        for name in chosen_names(memory.layers, pattern, "rank") if pattern != "*" else whole:
            layer = memory.layer(name)
            resolved = memory.parameters[layer.weight].coverage == "patterns"
            if name in whole and name not in alone and resolved and layer.kind == "linear":
                found[name] = value
            elif layer.rank is not None and pattern == "*" and layer.rank <= value:
                continue  # it is as small as that already
            elif layer.rank is not None:
                raise _as_it_is(memory, name)
            elif pattern != "*":
                raise RecordingError(
                    f"rank={value} was given for layer {name!r}, which has no (or no whole) "
                    "patterns to be compacted: an equivalent memory is made of keys and error "
                    "signals that account for the whole weight"
                )
    if not found and not memory.compacted:
        raise RecordingError(f"rank={rank!r} was given, but {memory.path} has nothing to compact")
    return found


def _refuse_compacted(memory: SourceMemory, changed: frozenset[str]) -> None:
    for name in memory.compacted:
        if name in changed:
            raise _as_it_is(memory, name)


def _as_it_is(memory: SourceMemory, name: str) -> RecordingError:
    return RecordingError(
        f"layer {name!r} of {memory.path} is compacted already and can only be kept as it is: "
        "convert the memory that it was compacted from instead"
    )


def _refuse_half(memory: SourceMemory, ranks: Mapping[str, int], compacted: frozenset[str]) -> None:
    """A weight is compacted in all its layers or in none: half of one has no step to be of."""
    for name in memory.layers:
        layer = memory.layer(name)
        shared = layer.weight in compacted or layer.bias in compacted
        if shared and name not in ranks:
            raise RecordingError(
                f"layer {name!r} shares its weight {layer.weight!r} with a layer that is to be "
                "compacted; give a rank to all of them, or to none"
            )


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
        if layer.dtype.itemsize <= 2 or layer.rank is not None:
            continue  # trained in 16 bits, or compacted: stays as it is
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
