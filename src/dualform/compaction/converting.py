"""`compact`: read a memory, write a smaller one beside it, and measure what that cost.

The order: every byte of the source is checked, the source is verified, room on the disk is made
sure of, then segment after segment is written anew, the manifest last. What the new memory rebuilds
is compared with what the source does. At no time is more than one segment, and a few matrices as
large as the layers, in RAM.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.filesize import decimal
from torch import Tensor

from dualform.attention import DualForm, Verification
from dualform.attention.view import View
from dualform.compaction.choices import Choices, choose
from dualform.compaction.compaction import Compaction
from dualform.compaction.describing import converted_manifest
from dualform.compaction.rewriting import Rewriting
from dualform.compaction.sums import LearnedSums
from dualform.errors import DualFormError, QueryError, RecordingError
from dualform.layers import NamePatterns
from dualform.memory import Memory
from dualform.memory.copying import MemoryCopy, SourceMemory
from dualform.memory.files import MANIFEST, local_path

Progress = Callable[[int, int], None]
STAGES, STAGE = 4, 1000
SAME = 1e-9
"""How far two float64 sums of the same patterns may be apart, of the parameter's size."""

HEADERS = 1 << 16
"""About what a file takes besides its tensors."""


def compact(
    memory: Memory | str | Path,
    destination: str | Path,
    *,
    layers: NamePatterns = None,
    error_signals: bool | str | Sequence[str] = True,
    dtype: str | None = None,
    snapshot_every: int = 1,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> Compaction:
    """Write a smaller memory made from a recorded one, and measure the loss. The source stays.

    `layers` and `error_signals` name what is kept, as in `record`; of other layers and parameters
    the learned part stays, at segment ends at least `snapshot_every` steps apart. `dtype` puts
    patterns into 16 bits.

    Example:
        >>> import dualform as df
        >>> df.compact("runs/digits", "runs/half", dtype="float16")        # doctest: +SKIP
    """
    source = SourceMemory.reopen(memory.path if isinstance(memory, Memory) else Path(memory))
    path = local_path(destination)
    _refuse_destination(source, path, overwrite)
    choices = choose(source, layers, error_signals, dtype)
    gone = sorted(choices.summed)
    if gone and source.every > 1:
        raise RecordingError(
            f"{source.path} holds the patterns of one of every {source.every} steps; summing up "
            f"those of {gone[0]!r}, with gaps between them, is not possible. Keep all layers and "
            "error signals (dtype= may still be given)"
        )
    for name in gone:
        rule = source.parameters[name].rule
        if source.parameters[name].adaptive is not None:
            raise RecordingError(
                f"{name!r} was trained by the rule {rule!r}, whose preconditioner is replayed from "
                "the patterns themselves; summing them up is not possible. Keep its layer as it is "
                "(dtype= may still be given)"
            )
    ends = _kept_ends(source, snapshot_every)
    stages = _Stages(progress)
    source.check(stages.next())
    before, weights, reason = _certified(source, stages.next())
    conversion = _Conversion(source, choices, ends, weights, before)
    conversion.refuse_full_disk(path)
    with MemoryCopy(path, overwrite=overwrite) as copy:
        conversion.write(copy, stages.next())
    made = Memory.open(path)
    last = stages.next()
    after, rebuilt, _ = _certified(made, last)
    last(1, 1)
    return Compaction(
        source.path,
        path,
        choices.describe(source) or "as it is",
        source.bytes_on_disk,
        made.bytes_on_disk,
        {n: _difference(weight, rebuilt[n]) for n, weight in weights.items() if n in rebuilt},
        before,
        after,
        (*made.remarks, *reason, *conversion.kept_wide),
    )


class _Stages:
    """Progress through several passes, as one."""

    def __init__(self, progress: Progress | None) -> None:
        self._progress, self._stage = progress, -1

    def next(self) -> Progress:
        self._stage += 1
        start = self._stage * STAGE

        def report(done: int, total: int) -> None:
            if self._progress is not None:
                self._progress(start + STAGE * done // max(1, total), STAGES * STAGE)

        return report


def _refuse_destination(source: SourceMemory, path: Path, overwrite: bool) -> None:
    """The source is never touched, and nothing is lost that was there."""
    here, there = source.path.resolve(), path.resolve()
    if here == there or here in there.parents or there in here.parents:
        raise RecordingError(
            f"{path} was given as the destination, but the memory to be converted is {source.path}:"
            " it is never changed. Choose a directory of its own for the new one"
        )
    if (path / MANIFEST).exists() and not overwrite:
        raise RecordingError(
            f"{path} already holds a memory; nothing was touched. Choose another path, or pass "
            "overwrite=True (--overwrite) to delete that memory first"
        )


def _certified(
    memory: Memory, progress: Progress
) -> tuple[Verification | None, dict[str, Tensor], list[str]]:
    """The memory's certificate and its weights in float64, or why there are none."""
    try:
        certificate = DualForm(None, memory).verify(progress=progress)
        return certificate, View(memory, memory.steps).weights, []
    except QueryError as error:
        return None, {}, [f"the loss cannot be measured: {error}"]


def _kept_ends(source: SourceMemory, snapshot_every: int) -> frozenset[int]:
    """The segment ends at which learned parts are kept: so many steps apart, and the last."""
    if type(snapshot_every) is not int or snapshot_every < 1:
        raise RecordingError(
            f"snapshot_every={snapshot_every!r} was given; expected after how many steps, at the "
            "least, what parameters without patterns have learned is kept again: 1 or more"
        )
    kept, last = set(), 0
    for segment in source.segments:
        if segment.end - last >= snapshot_every or segment.end == source.steps:
            kept.add(segment.end)
            last = segment.end
    return frozenset(kept)


class _Conversion:
    """A memory being written anew: the choices, the sums that take the patterns' place."""

    def __init__(
        self,
        source: SourceMemory,
        choices: Choices,
        ends: frozenset[int],
        weights: dict[str, Tensor],
        certificate: Verification | None,
    ) -> None:
        self._source, self._choices, self._ends = source, choices, ends
        self._weights, self._certificate = weights, certificate
        self._view = View(source, source.steps)
        self._rewriting = Rewriting(source, choices)
        self._sums = LearnedSums(self._view, source, choices.summed)

    @property
    def kept_wide(self) -> list[str]:
        """Sentences about what 16 bits could not hold."""
        return [
            f"16 bits cannot hold {count} tensors of layer {name}: they are stored as trained"
            for name, count in self._rewriting.kept_wide.items()
        ]

    def refuse_full_disk(self, path: Path) -> None:
        """Raise unless the disk has room for about what will be written."""
        source = self._source
        kept = [source.initial_file, *(file for _, file in source.snapshot_files())]
        needed = sum(file.expected.bytes for file in kept if file.expected is not None)
        shapes = [source.parameters[name].shape for name in self._choices.summed]
        needed += len(self._ends) * sum(8 * torch.Size(shape).numel() for shape in shapes)
        for segment in source.segments:
            needed += self._rewriting.planned_bytes(segment) + HEADERS
        place = path.absolute()
        while not place.exists():
            place = place.parent
        free = shutil.disk_usage(place).free
        if needed > free:
            raise RecordingError(
                f"the new memory takes about {decimal(needed)}, but only {decimal(free)} are free "
                f"at {place}; nothing was written. Free some space, or choose another disk"
            )

    def write(self, copy: MemoryCopy, progress: Progress) -> None:
        """Write all of the new memory."""
        source, choices = self._source, self._choices
        copy.copy_initial(source.initial_file)
        for done, segment in enumerate(source.segments):
            progress(done, len(source.segments))
            added: dict[str, Any] = {f"sizes/{n}": s for n, s in self._sums.advance().items()}
            if segment.end in self._ends:
                learned = {name: self._sums.learned(name) for name in sorted(choices.summed)}
                added |= {f"learned/{name}": part for name, part in learned.items()}
            if segment.end == source.steps and segment.steps:  # one without steps may follow
                self._refuse_other_sums()
            copy.add_segment(*self._rewriting.rewritten(segment, added))
        for step, file in source.snapshot_files():
            copy.copy_snapshot(step, file)
        manifest = converted_manifest(source, choices, self._rewriting.columns, self._certificate)
        copy.finish(manifest, closed=source.closed, trained=source.trained)
        progress(1, 1)

    def _refuse_other_sums(self) -> None:
        """What takes the patterns' place must be all that they, and whatever else, account for."""
        for name in sorted(self._choices.summed):
            if name not in self._weights:
                continue
            whole = self._view.base(name) + self._sums.learned(name)
            if _difference(self._weights[name], whole) > SAME:
                raise DualFormError(
                    f"the patterns of {name!r} do not add up to what the memory rebuilds of it; "
                    "this dualform cannot convert it. Nothing was kept of the new memory"
                )


def _difference(one: Tensor, other: Tensor) -> float:
    """max|W − W'| / max|W|."""
    if not one.numel():
        return 0.0
    size = float(one.abs().max())
    return float((one - other).abs().max()) / (size or 1.0)
