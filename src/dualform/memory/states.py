"""What an adaptive optimizer remembered of a parameter, kept now and then in the segments.

`states/exp_avg_sq/fc1.weight` and its like hold, for some steps, what the optimizer remembered just
before its update: where replaying begins (`learning_rules/adaptive.py`). `states/weights/…` are the
weights then, kept where decay is coupled, since they enter the second moments. The first step of a
recording, or of what was resumed, always has one, unless the optimizer remembered nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property

import numpy as np
import torch

from dualform.errors import MemoryFileError
from dualform.learning_rules import State
from dualform.memory.description import Parameter
from dualform.memory.segments import Segment

WEIGHTS = "weights"


class States:
    """The kept states of one parameter, by step: of what was remembered just before its update."""

    def __init__(self, parameter: Parameter, segments: Sequence[Segment]) -> None:
        rule = parameter.adaptive
        self._parameter, self._segments = parameter, segments
        self._tensors = () if rule is None else (*rule.tensors, WEIGHTS)
        self._numbers = () if rule is None else rule.numbers

    @cached_property
    def steps(self) -> tuple[int, ...]:
        """At which steps there is one, ascending."""
        return tuple(self._places)

    @cached_property
    def _places(self) -> dict[int, Segment]:
        found: dict[int, Segment] = {}
        name = f"step/{self._parameter.name}"
        for segment in self._segments if self._numbers else ():
            found |= {step: segment for step, _ in segment.events("states", name, ())}
        return found

    def at(self, step: int) -> State:
        """What was remembered before the update of a step, in float64; single numbers as they are.

        `weights` are among them where they were kept.
        """
        segment = self._places[step]
        state: State = {}
        for name in (*self._tensors, *self._numbers):
            full = f"states/{name}/{self._parameter.name}"
            if f"{full}/step" not in segment.file.names:
                continue
            steps = segment.file.array(f"{full}/step", dtype=torch.int64)
            place = int(np.searchsorted(steps, step))
            if place == len(steps) or int(steps[place]) != step:
                if name == WEIGHTS:  # decay was not coupled then
                    continue
                raise MemoryFileError(
                    f"{segment.path} is damaged: {full} is not of the steps the others are of"
                )
            number = name in self._numbers
            shape = (len(steps), *(() if number else self._parameter.shape))
            value = segment.file.tensor(f"{full}/value", shape)[place]
            state[name] = value.clone() if number else value.double()
        return state

    def __iter__(self) -> Iterator[tuple[int, State]]:
        return ((step, self.at(step)) for step in self.steps)
