"""Going on with a memory that is already there: `record(..., resume=True)`.

The memory is locked, the model compared with what was recorded, the step found whose weights it has
(`matching.py`), the memory cut back to that step, and everything the recorder would know by then
restored: from the log, the manifest and the model itself. The run goes on as if it had never been
interrupted.

Why it is hard: nothing may change on disk before it is certain that the model belongs to the
memory, and the optimizer's momentum is as much part of the run as the weights. Carried over, it
must be the recorded one. A new optimizer has none; its first step then finds no buffer and is
logged as `fresh`, which is exactly what happens to the old buffer's share: it ends there.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from dualform.errors import RecordingError
from dualform.layers import Layer
from dualform.learning_rules import SGD, ParameterLog, transitions
from dualform.memory import Memory, Phase
from dualform.memory.files import MANIFEST
from dualform.memory.rewinding import Cut, Remainder, ReopenedMemory
from dualform.memory.writing import MemoryWriter
from dualform.recording.accounts import StepAccounts
from dualform.recording.buffers import BufferWatch
from dualform.recording.findings import Findings
from dualform.recording.fingerprints import states_fingerprint
from dualform.recording.matching import find_step, kept_sums
from dualform.recording.parameters import Parameters, Watched
from dualform.recording.sums import Accumulated
from dualform.recording.tags import RESERVED, Tags
from dualform.recording.walking import known_log

logger = logging.getLogger("dualform")


def started(parameters: Parameters) -> list[dict[str, Any]]:
    """The manifest's list of phases of a memory that begins now."""
    momentum = "carried over" if any(w.momentum is not None for w in parameters) else "none"
    return [asdict(Phase(0, "started", _now(), momentum=momentum))]


def reopen(path: Path, undo: ExitStack) -> Resumption | None:
    """Lock the memory at a path to go on with it; None if there is none. `undo` lets go of it."""
    if not (path / MANIFEST).exists():
        return None
    writer = MemoryWriter(path, resume=True)
    undo.callback(writer.release)
    return Resumption(ReopenedMemory.reopen(path), writer)


class Resumption:
    """A memory that is to be gone on with, locked. Nothing on disk changes before `rewind`."""

    def __init__(self, memory: ReopenedMemory, writer: MemoryWriter) -> None:
        self.memory, self.writer = memory, writer
        self.step = -1
        self.phases: list[dict[str, Any]] = []
        self._left: Remainder | None = None

    @property
    def directions(self) -> dict[str, tuple[Tensor, Tensor]]:
        """The memory's probes and sketches: fingerprints go on along the same directions."""
        known = self.memory
        return {n: (known.probe(n).clone(), known.sketch(n).clone()) for n in known.parameters}

    # -- is it the same network? ----------------------------------------------------------------

    def without_module(self, found: Iterable[Layer]) -> list[Layer]:
        """The layers recorded that are no modules: parameters that other code uses."""
        names = {layer.name for layer in found}
        return [
            Layer(**{name: entry[name] for name in Layer._fields if name in entry})
            for entry in self.memory.layer_entries
            if entry["name"] not in names
        ]

    def compare(
        self, model: nn.Module, layers: Mapping[Layer, Any], *, every: int, strict: bool
    ) -> None:
        """Raise `RecordingError` naming the first difference between model and memory."""
        memory = self.memory
        if memory.conversions:
            raise RecordingError(
                f"{memory.path} cannot be gone on with: it was made from another memory "
                f"({memory.conversions[-1].what}). Resume that one, and convert it again afterwards"
            )
        self._compare_tensors("parameter", dict(model.named_parameters()), memory.parameters)
        self._compare_tensors("buffer", dict(model.named_buffers()), memory.buffers)
        if memory.every != every:
            raise self._differs(
                f"every={every} was given, and one of every {memory.every} steps is recorded there"
            )
        found = {layer.name: layer for layer in layers}
        for name in memory.layers:
            known = memory.layer(name)
            layer = found.get(name)
            if layer is None:
                raise self._differs(f"layer {name!r} is recorded there and would not be now")
            for what in ("kind", "weight", "bias", "in_features", "out_features"):
                here, there = getattr(layer, what), getattr(known, what)
                if here != there:
                    raise self._differs(
                        f"layer {name!r} has {what} {here!r} now and {there!r} in the memory"
                    )
        if strict and not memory.exact:
            raise RecordingError(
                f"{memory.path} is not exact ({'; '.join(memory.remarks[:1])}), and going on could "
                'not make it so. Pass audit="warn" to go on all the same, or record into a new path'
            )

    def _compare_tensors(
        self, what: str, here: Mapping[str, Tensor], there: Mapping[str, Any]
    ) -> None:
        missing = [name for name in there if name not in here]
        added = [name for name in here if name not in there]
        if missing or added:
            said = [f"lacks the {what} {missing[0]!r}"] if missing else []
            said += [f"has a {what} {added[0]!r} that was not recorded"] if added else []
            raise self._differs(f"the model {' and '.join(said)}")
        for name, tensor in here.items():
            known = there[name]
            if (tensor.shape, tensor.dtype) != (torch.Size(known.shape), known.dtype):
                raise self._differs(
                    f"the {what} {name!r} is {tensor.dtype} {list(tensor.shape)} now and "
                    f"{known.dtype} {list(known.shape)} in the memory"
                )
        if list(here) != list(there):
            raise self._differs(f"the model has its {what}s in another order")

    def _compare_entries(self, layers: Sequence[dict[str, Any]]) -> None:
        """What will be recorded of each layer must be what the memory has of it: its dtype, ..."""
        known = {entry["name"]: entry for entry in self.memory.layer_entries}
        for entry in layers:
            there = known.get(entry["name"], entry)
            for what in sorted(entry.keys() | there.keys()):
                if entry.get(what) != there.get(what):
                    raise self._differs(
                        f"layer {entry['name']!r} would be recorded with {what} "
                        f"{entry.get(what)!r}; in the memory it has {there.get(what)!r}"
                    )

    def _differs(self, how: str) -> RecordingError:
        return RecordingError(
            f"{self.memory.path} cannot be gone on with: {how}. Resume with the model and options "
            "it was recorded with, or record into a new path"
        )

    # -- where, and what is left ----------------------------------------------------------------

    def find(self, parameters: Parameters, *, even_the_first: bool) -> int:
        """The step to go on from; what is left of the memory then is known, and nothing changed.

        The very first one is not gone back to unless that is wanted.
        """
        memory = self.memory
        self._compare_rules(parameters)
        refuse_infinite(parameters)
        self.step = step = find_step(memory, parameters)
        if not step and memory.steps and not even_the_first:
            raise RecordingError(
                f"the model is as it was before the first step of {memory.path}: going on from "
                f"there would drop all of the {memory.steps:,} steps recorded. Was its checkpoint "
                "not loaded? Load it into model and optimizer first; or, to begin again on "
                'purpose, pass resume="rewind"'
            )
        self._refuse_accumulated(step)
        momentum = {
            w.name: np.full_like(w.audit.weights, np.nan)
            if w.momentum is None
            else w.audit.momentum
            for w in parameters
        }
        weights = {w.name: w.audit.weights for w in parameters}
        states = {
            name: value
            for w in parameters
            if w.rule is not None
            for name, value in states_fingerprint(w, w.remembered).items()
        }
        self._left = memory.cut_back(Cut(step, weights, momentum, states))
        self._note_phase(parameters)
        return step

    def _compare_rules(self, parameters: Parameters) -> None:
        """A parameter goes on under the learning rule it was trained by."""
        for watched in parameters:
            known = self.memory.parameters[watched.name]
            now = SGD if watched.rule is None else watched.rule.name
            if known.coverage != "untrained" and now != known.rule:
                if watched.name not in parameters.given:
                    raise self._differs(
                        f"parameter {watched.name!r} was trained by the rule {known.rule!r} and is "
                        "in none of the optimizers now (give it to one of that kind, frozen if it "
                        "is to stay as it is)"
                    )
                raise self._differs(
                    f"parameter {watched.name!r} is trained by the rule {now!r} now and was by "
                    f"{known.rule!r}"
                )

    def _refuse_accumulated(self, step: int) -> None:
        """Where only a sum of gradients is known, the steps between are lost for good."""
        summed = kept_sums(self.memory)
        missing = [n for n, (since, there) in summed.items() if since < step and step not in there]
        if missing:
            name, since = missing[0], summed[missing[0]][0]
            kept = [
                s
                for s in set.union(*({since, *there} for since, there in summed.values()))
                if all(s <= since or s in there for since, there in summed.values())
            ]
            near = sorted(sorted(kept, key=lambda s: abs(s - step))[:2])
            raise RecordingError(
                f"the model is at step {step}, where the memory cannot be cut: {name!r} is "
                f"accounted for in accumulated form from step {since} on, which is kept only "
                f"now and then; the nearest possible steps are {near}. Load a checkpoint of one of "
                "those, or record into a new path"
            )

    def _note_phase(self, parameters: Parameters) -> None:
        kept = [p for p in self.memory.phases if p.first_step <= self.step]
        behind = self.memory.steps if self.step < self.memory.steps else None
        carried = any(watched.momentum is not None for watched in parameters)
        momentum = "carried over" if carried else "replaced" if self._had_momentum() else "none"
        resumed = Phase(self.step, "resumed", _now(), behind, momentum)
        self.phases = [asdict(phase) for phase in [*kept, resumed]]

    def _had_momentum(self) -> bool:
        """Whether there were momentum buffers at the step gone on from."""
        memory = self.memory
        logs = [known_log(memory, name) for name in memory.parameters]
        return (
            any(f.momentum for f in memory.fingerprints if f.step <= self.step)
            or any(memory.initial_momentum(name) is not None for name in memory.parameters)
            or any((log.applied & (log.momentum != 0))[: self.step].any() for log in logs if log)
        )

    def rewind(self, description: dict[str, Any]) -> None:
        """Cut the memory back, for good; from here on it is the recorder's."""
        assert self._left is not None
        self._compare_entries(description["layers"])
        dropped = self.memory.steps - self._left.step
        if dropped:
            logger.warning(
                "dualform: the model's weights are those of step %d of %s; the %d steps recorded "
                "after it are dropped",
                self._left.step,
                self.memory.path,
                dropped,
            )
        self.writer.rewind(self._left, description)

    def stored_keys(self, layer: Layer) -> Iterator[Tensor]:
        """The different keys of a layer that the memory holds, now that it has been cut back."""
        memory = Memory.open(self.memory.path)
        if layer.name in memory.layers:
            yield from memory.layer(layer.name).recurring.stored()

    # -- what the recorder would know by now ----------------------------------------------------

    def restore(
        self,
        parameters: Parameters,
        layers: MutableMapping[Layer, Any],
        accounts: StepAccounts,
        tags: Tags,
        buffers: BufferWatch,
        findings: Findings,
    ) -> None:
        """Everything but the model: as it was after `step` updates."""
        self._restore_parameters(parameters)
        for watched in parameters:
            if watched.coverage == "steps":  # as it was found to be, or chosen, when it began
                for layer in watched.layers:
                    if layer.name not in self.memory.layers:  # else its keys are kept, alone
                        layers.pop(layer, None)
        self._restore_accounts(accounts, parameters)
        parameters.initial()  # the momentum buffers held on to are not needed any longer
        self._restore_tags(tags)
        findings.restore(self.step, self.memory.exact, self.memory.recorded_remarks)
        if not self._restore_buffers(buffers):
            findings.remark(
                f"buffers were not as recorded when the run was resumed at step {self.step}; the "
                "memory holds them from the next update on"
            )

    def used(self, layers: Mapping[Layer, Any]) -> list[Layer]:
        """The layers that are in use, in the order of their first one."""
        by_name = {layer.name: layer for layer in layers}
        return [by_name[name] for name in self.memory.layers if name in by_name]

    def _restore_parameters(self, parameters: Parameters) -> None:
        """Coverage, precision and the initial state's share of every parameter."""
        for watched in parameters:
            known = self.memory.parameters[watched.name]
            watched.coverage = self._coverage(watched)
            if watched.coverage == "patterns":
                watched.audit.has_patterns = True
            watched.audit.gradient_eps = max(watched.audit.gradient_eps, known.eps)
            if watched.coverage in ("steps", "accumulated") and watched.rule is None:
                share = _initial_share(self.memory.log(watched.name).head(self.step))
                if np.isfinite(share).all():  # else by a rule that was not known
                    watched.audit.initial_share = share

    def _coverage(self, watched: Watched) -> str:
        """As recorded, for the steps that are left; what is accumulated follows from `since`."""
        applied = self.memory.applied(watched.name)[: self.step]
        if not applied.any():
            return "untrained"
        coverage = self.memory.parameters[watched.name].coverage
        return "steps" if coverage == "accumulated" else coverage

    def _restore_accounts(self, accounts: StepAccounts, parameters: Parameters) -> None:
        """The gradients kept so far count; learned parts go on from where they were kept."""
        memory = self.memory
        for watched in parameters:
            name, known = watched.name, memory.parameters[watched.name]
            if watched.coverage == "patterns" and memory.every > 1:
                sums = memory.unrecorded(name, self.step)
                accounts.restore_unrecorded(watched, Accumulated(*sums))
            if watched.coverage != "steps":
                continue
            since = known.accumulated_since
            kept = sum(g.nbytes for step, g in memory.step_gradients(name) if step < self.step)
            state = None
            since = since if since is not None and since < self.step else None
            if since is not None and watched.rule is None and not watched.keys_alone:
                _, _, mw, mm = watched.audit.initial_share
                initial, buffer = memory.initial(name).double(), memory.initial_momentum(name)
                momentum = torch.zeros_like(initial)
                if watched.momentum is not None:
                    momentum = watched.momentum.detach().cpu().double() - mw * initial
                    momentum -= 0.0 if buffer is None else mm * buffer.double()
                state = Accumulated(memory.learned(name, self.step).clone(), momentum)
            accounts.restore(watched, kept, since, state)

    def _restore_tags(self, tags: Tags) -> None:
        """The columns' kinds, and the codes of their strings."""
        assert self._left is not None
        left = self._left.columns - set(RESERVED)
        kinds = {name: kind for name, kind in self.memory.kinds.items() if name in left}
        segments = len(self._left.segments) + (self._left.cut is not None)
        strings = {n: self.memory.strings(n, segments) for n, k in kinds.items() if k == "string"}
        tags.restore(kinds, strings)

    def _restore_buffers(self, buffers: BufferWatch) -> bool:
        """Their values at the step, so that every later change is seen. False if they differ."""
        assert self._left is not None
        values = {name: self.memory.buffer(name, self.step).clone() for name in self.memory.buffers}
        return buffers.restore(values, self._left.buffers)


def _initial_share(log: ParameterLog) -> tuple[float, float, float, float]:
    """How much of (W_0, m_0) is in (W, m) after these steps: the product of all M."""
    product: NDArray[np.float64] = transitions(log)[0]
    while len(product) > 1:
        if len(product) % 2:
            product = np.concatenate([product, np.eye(2)[None]])
        product = product[1::2] @ product[::2]
    ww, wm, mw, mm = (product[0] if len(product) else np.eye(2)).ravel().tolist()
    return ww, wm, mw, mm


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def refuse_infinite(parameters: Parameters) -> None:
    """Nothing can be compared with what is no number: a bound grows with what it is about."""
    for watched in parameters:
        of = {"weights": watched.parameter} | watched.remembered
        if watched.momentum is not None:
            of["momentum buffer"] = watched.momentum
        for name, value in of.items():
            if isinstance(value, Tensor) and not bool(torch.isfinite(value).all()):
                raise RecordingError(
                    f"parameter {watched.name!r}: its {name} is not finite (NaN or infinite), so "
                    "which step it is of cannot be told; nothing was touched. Load a checkpoint "
                    "from before training broke down"
                )
