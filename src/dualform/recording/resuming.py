"""Going on with a memory: is it the same network, and which recorded step is the model?

The log holds a mark of every parameter after every update, so any step is found by equality, to the
bit, under every rule and however patterns are stored. The user's checkpoint may be behind the
memory: later steps are then cut off. Nothing on disk changes before all of that is known.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from dualform.certificate.replay import here
from dualform.errors import RecordingError
from dualform.layers import Layer
from dualform.memory import Memory
from dualform.memory.files import MANIFEST
from dualform.memory.writing import MemoryWriter
from dualform.recording.findings import Findings
from dualform.recording.kept import Keeper
from dualform.recording.states import States
from dualform.recording.tags import Tags
from dualform.recording.updates import Updates
from dualform.recording.watched import Watch

if TYPE_CHECKING:
    from dualform.recording.entry import Options


def reopened(path: Path, undo: ExitStack) -> Resumption | None:
    """Lock the memory at a path to go on with it; None if there is none. `undo` lets go of it."""
    if not (path / MANIFEST).exists():
        return None
    writer = MemoryWriter(path, resume=True)
    undo.callback(writer.release)
    return Resumption(Memory.open(path), writer)


class Resumption:
    """A memory to go on with, locked."""

    def __init__(self, memory: Memory, writer: MemoryWriter) -> None:
        self.memory, self.writer = memory, writer
        self.ended = memory.steps

    @property
    def phases(self) -> list[dict[str, Any]]:
        """What the memory says of its stretches, this one too; those cut off never were."""
        steps = self.memory.steps
        found = [known._asdict() for known in self.memory.phases if known.first_step <= steps]
        return [*found, phase(steps, self.ended)]

    def compare(self, model: nn.Module, watch: Watch, options: Options) -> None:
        """Raise `RecordingError` naming the first difference between model and memory."""
        memory = self.memory
        self._compare_tensors("parameter", dict(model.named_parameters()), memory.parameters)
        self._compare_tensors("buffer", dict(model.named_buffers()), memory.buffers)
        if memory.every != options.every:
            raise self._differs(
                f"every={options.every} was given, and every={memory.every} was recorded there"
            )
        if memory.opened.description.stored != (options.stored or torch.float32):
            raise self._differs("its patterns are stored in another dtype than was asked for now")
        here = {layer.name: site for layer, site in watch.sites.items()}
        for name in memory.layers:
            known, site = memory.layer(name), here.get(name)
            if site is None:
                continue  # a weight that is used past its module comes up again when it is used
            if known.layer != site.layer or known.keep != site.keep:
                raise self._differs(
                    f"layer {name!r} is a {site.layer.kind} layer kept by {site.keep} now; there "
                    f"it is a {known.layer.kind} layer kept by {known.keep}, or of another shape"
                )

    def find(self, watch: Watch, states: States, options: Options) -> int:
        """The step whose weights the model has; the memory is then cut back to it."""
        memory, kept = self.memory, self.memory.kept
        marks, now = memory.marks, states.now()
        steps = (np.flatnonzero((marks[:, 0] == now[0]).all(axis=1)) + 1).tolist()
        initial = (kept.is_kept_as(w.name, 0, w.tensor.detach().cpu()) for w in watch)
        if not memory.steps or all(initial):
            steps.insert(0, 0)
        if not steps:
            raise RecordingError(
                f"the model is none of the {memory.steps + 1} states recorded in {memory.path}, to "
                "the bit. Load the checkpoint of a recorded step (call recorder.flush() where you "
                "save one), in the dtype it was trained in, or record into a new path"
            )
        step = steps[-1]
        if not step and memory.steps and options.resume != "rewind":
            raise RecordingError(
                f"the model is as it was before the first step of {memory.path}: going on from "
                f"there would drop all of the {memory.steps:,} steps recorded. Was its checkpoint "
                "not loaded? Load it into model and optimizer first; or, to begin again on "
                'purpose, pass resume="rewind"'
            )
        self.writer.rewind(step)
        self.memory = Memory.open(memory.path)
        return step

    def restore(self, tags: Tags, findings: Findings, updates: Updates, keeper: Keeper) -> None:
        """Give the parts of a recorder what was known at that step."""
        memory = self.memory
        described = memory.opened.description
        tags.restore(described.tags, described.strings)
        findings.restore(described.remarks, [event._asdict() for event in memory.events])
        updates.restore(list(memory.settings))
        keeper.states.restore(memory.marks)
        digests = [memory.kept.digest(name) for name in memory.parameters]
        keeper.frozen = {i: digest for i, digest in enumerate(digests) if digest is not None}

    def stored_keys(self, layer: Layer) -> Iterable[Tensor]:
        """The keys that are stored once, in their order."""
        if layer.name not in self.memory.layers:
            return ()
        distinct = self.memory.layer(layer.name).distinct
        return () if distinct is None else distinct.stored()

    def _compare_tensors(
        self, what: str, here: Mapping[str, Tensor], there: Mapping[str, Any]
    ) -> None:
        for name in [*there, *here]:
            if name not in here:
                raise self._differs(f"the model lacks the {what} {name!r}")
            if name not in there:
                raise self._differs(f"the model has a {what} {name!r} that was not recorded")
            now, known = here[name], there[name]
            if (now.shape, now.dtype) != (torch.Size(known.shape), known.dtype):
                raise self._differs(
                    f"the {what} {name!r} is {now.dtype} {list(now.shape)} now and "
                    f"{known.dtype} {list(known.shape)} in the memory"
                )
        if list(here) != list(there):
            raise self._differs(f"the model has its {what}s in another order")

    def _differs(self, how: str) -> RecordingError:
        return RecordingError(
            f"{self.memory.path} cannot be gone on with: {how}. Resume with the model and options "
            "it was recorded with, or record into a new path"
        )


def phase(step: int, ended: int | None) -> dict[str, Any]:
    """What the manifest says of a stretch that begins now; bits depend on machine and threads."""
    return {
        "first_step": step,
        "began": "started" if ended is None else "resumed",
        "when": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "rewound_from": ended if ended is not None and ended > step else None,
        **here(),
    }
