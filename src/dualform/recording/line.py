"""One line of the log: what the optimizers did with every parameter at one step."""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from dualform.recording.watched import Flags, Reals


@dataclass(eq=False, slots=True)
class Line:
    """An entry per parameter; nothing is written into it once it is in the log."""

    moved: Flags
    setting: NDArray[np.int32]
    fresh: Flags
    """The optimizer remembered nothing of the parameter before."""
    carried: Flags
    """The gradient still held what it held at the end of the step before."""
    kappa: Reals
    explained: Flags
    seen: Reals
    mark: NDArray[np.uint32]
    state_mark: NDArray[np.uint32]

    @classmethod
    def blank(cls, count: int) -> Line:
        """Begin the line of a step at which nothing has happened yet."""
        no, none = np.zeros((4, count), bool), np.full((2, count), np.nan)
        marks = np.zeros((2, count), np.uint32)
        setting = np.full(count, -1, np.int32)
        return cls(no[0], setting, no[1], no[2], none[0], no[3], none[1], marks[0], marks[1])

    def clear(self, among: Flags) -> None:
        """Write down of some parameters that nothing has happened to them."""
        blank = Line.blank(len(among))
        for f in fields(self):
            np.copyto(getattr(self, f.name), getattr(blank, f.name), where=among)


def stacked(lines: list[Line]) -> dict[str, NDArray[np.generic]]:
    """The lines of a segment as the log's columns, [steps, parameters]."""
    names = [f.name for f in fields(Line)] if lines else []
    return {name: np.stack([getattr(line, name) for line in lines]) for name in names}
