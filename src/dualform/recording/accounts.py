"""Accounting for what has no patterns: other trained parameters, and buffers.

A norm's gain, an embedding, a parameter used in functional code: its gradient is kept as the
optimizer used it, step by step, as long as the byte budget lasts. Beyond it only the learned part
is kept: L follows [L, Lm] ← M [L, Lm] + N G in float64, from the gradients alone, and is written
down every so many steps. Buffers (running statistics) are written down whenever they changed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dualform.errors import RecordingError
from dualform.recording.audit import Transition

logger = logging.getLogger("dualform")

SMALL_BUFFER = 1 << 16
"""Up to this many elements a buffer is compared by value at every step, a larger one by version."""


@dataclass
class Accumulated:
    """A parameter's learned part and that of its momentum buffer, float64."""

    weights: Tensor
    momentum: Tensor

    def advance(self, transition: Transition, gradient: Tensor) -> None:
        ww, wm, mw, mm, nw, nm = transition
        exact = gradient.double()
        moved = ww * self.weights + wm * self.momentum + nw * exact
        self.momentum = mw * self.weights + mm * self.momentum + nm * exact
        self.weights = moved


class StepAccounts:
    """Gradients of parameters without patterns, within a budget of bytes."""

    def __init__(self, budget: int) -> None:
        self._left = budget
        self._states: dict[str, Accumulated] = {}
        self.since: dict[str, int] = {}

    def restore(self, name: str, kept: int, since: int | None, state: Accumulated | None) -> None:
        """A resumed run: so many bytes are kept of a parameter, or its learned part since then."""
        self._left -= kept
        if state is not None and since is not None:
            self._states[name], self.since[name] = state, since

    def keep(
        self,
        step: int,
        gradients: Mapping[str, Tensor],
        transitions: Mapping[str, Transition],
        learned_now: Callable[[str], Accumulated],
    ) -> dict[str, Tensor]:
        """Called after the update: the gradients to be stored with this step.

        The others are accumulated. The first time the budget does not suffice, the learned part so
        far is taken from the parameter itself (`learned_now`); from then on from gradients alone.
        """
        stored = {}
        for name, gradient in gradients.items():
            size = gradient.numel() * gradient.element_size()
            if name in self._states:
                self._states[name].advance(transitions[name], gradient)
            elif size <= self._left:
                self._left -= size
                stored[name] = gradient
            else:
                logger.warning(
                    "dualform: the step budget is used up; %s is accumulated from step %d on",
                    name,
                    step,
                )
                self._states[name] = learned_now(name)
                self.since[name] = step
        return stored

    def learned(self) -> dict[str, Tensor]:
        """The learned part of every accumulated parameter now."""
        return {name: state.weights.clone() for name, state in self._states.items()}


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
