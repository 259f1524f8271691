"""What was kept beside the patterns: weights, what optimizers remember, gradients, buffers.

One mechanism for all of them: the very bits of something, and after how many updates it was so. A
*kept state* is a parameter's weights with what its optimizer remembered of it then, all of one
segment; where a step was kept twice (an edit was found), the later state counts.

Why it is hard: parameters are kept at different steps, some after every update, and there may be
thousands of segments. So the lines say what is where, and only the file that has it is opened.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dualform.errors import QueryError
from dualform.memory.description import Buffer, Parameter
from dualform.memory.segments import Segment

State = dict[str, Any]
"""What an optimizer remembers of one parameter: tensors and plain numbers, by torch's own names."""


class Kept:
    """What was kept of parameters, by name and number of updates. Tensors are mapped: clone them
    before editing.

    Example:
        >>> kept = df.Memory.open("runs/digits").kept          # doctest: +SKIP
        >>> kept.steps("fc1.weight")                           # doctest: +SKIP
        (0, 320, 600)
        >>> kept.state("fc1.weight", 600).keys()               # doctest: +SKIP
        dict_keys(['momentum_buffer'])
    """

    def __init__(
        self,
        segments: Sequence[Segment],
        parameters: Mapping[str, Parameter],
        buffers: Mapping[str, Buffer],
    ) -> None:
        self._segments, self._parameters, self._buffers = segments, parameters, buffers
        self._known: dict[tuple[str, str], dict[int, Segment]] = {}

    def steps(self, parameter: str) -> tuple[int, ...]:
        """After how many updates its state was kept, ascending."""
        return tuple(self._where("weights", parameter))

    def last(self, parameter: str, at: int) -> int:
        """The last kept state at or before `at` updates."""
        steps = self.steps(parameter)
        place = bisect_right(steps, at)
        if not place:
            raise QueryError(
                f"no state of {parameter!r} was kept at or before step {at}; those kept are of "
                f"{_some(steps)}. Ask for a later step"
            )
        return steps[place - 1]

    def weights(self, parameter: str, step: int) -> Tensor:
        """The parameter after so many updates; `QueryError` unless that was kept."""
        return self._tensor("weights", parameter, step, self._segment(parameter, step))

    def state(self, parameter: str, step: int) -> State:
        """What the optimizer remembered of it then, as it was; empty if there was nothing."""
        segment = self._segment(parameter, step)
        found: State = dict(segment.plain.get((parameter, step), {}))
        for what in segment.kept_names(parameter):
            if what.startswith("state."):
                for _, value in segment.kept(what, parameter, step):
                    found[what.removeprefix("state.")] = value
        return found

    def gradient_steps(self, parameter: str) -> tuple[int, ...]:
        """In which updates its gradient was kept as it was, ascending."""
        return tuple(self._where("gradient", parameter))

    def gradient(self, parameter: str, step: int) -> Tensor | None:
        """The gradient of an update as the optimizer got it; None if it was not kept."""
        segment = self._where("gradient", parameter).get(step)
        return None if segment is None else self._tensor("gradient", parameter, step, segment)

    def fingerprints(self, parameter: str) -> tuple[NDArray[np.int64], Tensor]:
        """Steps [k], and W v, m v and the size of rows then: float64 [k, 3, height].

        Where an edit was found there are two of one step: before and after it.
        """
        known = self._known_parameter(parameter)
        shape, steps, prints = (3, known.height), [], []
        for segment in self._segments:
            listed = segment.kept_steps("fingerprint", known.index)
            found = list(segment.kept("fingerprint", parameter)) if listed else []
            if sorted({step for step, _ in found}) != listed:
                raise segment.wrong(f"the fingerprints of {parameter!r} are not those it lists")
            for step, value in found:
                if tuple(value.shape) != shape or value.dtype != torch.float64:
                    raise segment.wrong(f"{parameter!r} has fingerprints of {tuple(value.shape)}")
                steps.append(step)
                prints.append(value)
        none = torch.empty(0, *shape, dtype=torch.float64)
        return np.array(steps, np.int64), torch.stack(prints) if prints else none

    def buffer(self, name: str, at: int) -> Tensor:
        """A buffer after so many updates: as it was when it last changed."""
        if name not in self._buffers:
            raise QueryError(
                f"there is no buffer {name!r}; there are {', '.join(self._buffers) or 'none'}"
            )
        where = self._where("buffer", name)
        step = max((step for step in where if step <= at), default=None)
        if step is None:
            raise QueryError(f"buffer {name!r} was kept of {_some(tuple(where))}, not by step {at}")
        return self._there("buffer", name, step, where[step])

    def _where(self, what: str, name: str) -> dict[int, Segment]:
        """Which segment has what was kept at a step, ascending: the last, if several do."""
        if (what, name) not in self._known:
            of = name if what == "buffer" else self._known_parameter(name).index
            found = {step: s for s in self._segments for step in s.kept_steps(what, of)}
            self._known[what, name] = dict(sorted(found.items()))
        return self._known[what, name]

    def _segment(self, parameter: str, step: int) -> Segment:
        where = self._where("weights", parameter)
        if step not in where:
            raise QueryError(
                f"the state of {parameter!r} after {step} updates was not kept; those kept are of "
                f"{_some(tuple(where))}. Others can be rebuilt from the one before"
            )
        return where[step]

    def _tensor(self, what: str, name: str, step: int, segment: Segment) -> Tensor:
        known, found = self._parameters[name], self._there(what, name, step, segment)
        if tuple(found.shape) != known.shape or found.dtype != known.dtype:
            seen = f"{found.dtype} {tuple(found.shape)}"
            raise segment.wrong(f"{what} of {name!r}: {seen}, expected {known.dtype} {known.shape}")
        return found

    def _there(self, what: str, name: str, step: int, segment: Segment) -> Tensor:
        for _, value in segment.kept(what, name, step):
            return value
        raise segment.wrong(f"it does not hold what its line lists of {name!r}, step {step}")

    def _known_parameter(self, name: str) -> Parameter:
        if name not in self._parameters:
            raise QueryError(
                f"there is no parameter {name!r}; there are {', '.join(self._parameters)}"
            )
        return self._parameters[name]


def _some(steps: Sequence[int]) -> str:
    """A few of many steps, for a message."""
    if len(steps) <= 8:
        return f"steps {', '.join(map(str, steps))}" if steps else "no step"
    return f"{len(steps)} steps from {steps[0]} to {steps[-1]}"
