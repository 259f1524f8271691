"""What was kept beside the patterns: weights, what optimizers remember, gradients, buffers.

One mechanism for all of them: the very bits of something, and after how many updates it was so. A
*kept state* is a parameter's weights with what its optimizer remembered of it then, all of one
segment; where a step was kept twice (an edit was found), the later state counts.

Why it is hard: there may be thousands of segments, and some parameters are kept after every update.
So the lines say what is where, and only the file that has it is opened.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Mapping
from typing import Any, NoReturn

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dualform.errors import QueryError
from dualform.memory.fields import damaged, named
from dualform.memory.segments import OpenedMemory, Segment

DIGEST = "digest"


class Kept:
    """What was kept of parameters, by name and number of updates. Tensors are mapped: clone them
    before editing.

    Example:
        >>> kept = dualform.Memory.open("runs/digits").kept      # doctest: +SKIP
        >>> kept.steps("fc1.weight"), kept.last("fc1.weight", 400)   # doctest: +SKIP
        ((0, 320, 600), 320)
    """

    def __init__(self, opened: OpenedMemory) -> None:
        self._opened, known = opened, opened.description
        self._described: dict[str, Any] = {**known.parameters, **known.buffers}
        self._known: dict[tuple[str, str], dict[int, Segment]] = {}
        self._of_users: Mapping[str, Tensor] = {}
        self._checked: dict[str, str] = {}

    def steps(self, parameter: str) -> tuple[int, ...]:
        """After how many updates its state was kept, ascending."""
        return tuple(self._where("weights", parameter) or self._where(DIGEST, parameter))

    def digest(self, parameter: str) -> str | None:
        """The digest of a large parameter that was never trained: of its weights nothing else is
        kept. None for all others."""
        is_kept = self._where("weights", parameter) or not self._where(DIGEST, parameter)
        return None if is_kept else str(self._plain(DIGEST, parameter, 0))

    def use_model(self, named: Mapping[str, Tensor]) -> None:
        """Take the parameters of a model where a digest alone is kept."""
        self._of_users, self._checked = named, {}

    def is_kept_as(self, parameter: str, step: int, tensor: Tensor) -> bool:
        """Whether a tensor has the very bits that were kept of a parameter at a step."""
        if step not in self.steps(parameter):
            return False
        if step == 0 and (digest := self.digest(parameter)) is not None:
            return digest_of(tensor) == digest
        return torch.equal(self.weights(parameter, step), tensor)

    def last(self, name: str, at: int, *, what: str = "weights") -> int:
        """The last step at or before `at` after which it was kept."""
        steps = tuple(self._where(what, name))
        place = bisect_right(steps, at)
        return steps[place - 1] if place else self._refuse(what, name, at)

    def weights(self, parameter: str, step: int) -> Tensor:
        """The parameter after so many updates; `QueryError` unless that was kept."""
        if step == 0 and (digest := self.digest(parameter)) is not None:
            return self._of_model(parameter, digest)
        return self._tensor("weights", parameter, step)

    def state(self, parameter: str, step: int) -> dict[str, Any]:
        """What the optimizer remembered of it then, by torch's own names; empty if nothing."""
        if step == 0 and self.digest(parameter) is not None:
            return {}
        segment = self._segment("weights", parameter, step)
        return {
            what.removeprefix("state."): value
            for what in segment.keeps[parameter]
            if what.startswith("state.")
            for _, value in segment.kept(what, parameter, step)
        }

    def gradient_steps(self, parameter: str) -> tuple[int, ...]:
        """In which updates its gradient was kept as it was, ascending."""
        return tuple(self._where("gradient", parameter))

    def gradient(self, parameter: str, step: int) -> Tensor | None:
        """The gradient of an update as the optimizer got it; None if it was not kept."""
        is_kept = step in self._where("gradient", parameter)
        return self._tensor("gradient", parameter, step) if is_kept else None

    def fingerprints(self, parameter: str) -> tuple[NDArray[np.int64], Tensor]:
        """Steps [k], and W v, m v and the size of rows then: float64 [k, 3, height]. Where an edit
        was found there are two of one step: before and after it."""
        shape = (3, named(self._opened.description.parameters, parameter, "parameter").height)
        steps, prints = [], [torch.empty(0, *shape, dtype=torch.float64)]
        for segment in self._opened.segments:
            for step, value in segment.kept("fingerprint", parameter):
                steps.append(step)
                prints.append(_checked(value, shape, torch.float64, segment)[None])
        return np.array(steps, np.int64), torch.cat(prints)

    def buffer(self, name: str, at: int) -> Tensor:
        """A buffer after so many updates: as it was when it last changed."""
        return self._tensor("buffer", name, self.last(name, at, what="buffer"))

    def _of_model(self, parameter: str, digest: str) -> Tensor:
        """A parameter that was never trained, of the model that was handed over."""
        given = self._of_users.get(parameter)
        if given is not None and parameter not in self._checked:
            self._checked[parameter] = digest_of(given)
        if given is None or self._checked[parameter] != digest:
            lacks = "hand over a model that has it" if given is None else "the model's is another"
            raise QueryError(
                f"{parameter!r} was not trained, so of its weights a digest alone is kept, and "
                f"{lacks}: expected DualForm(model, memory) with the weights it had in training"
            )
        return given.detach().cpu()

    def _plain(self, what: str, name: str, step: int) -> Any:
        *_, (_, value) = self._segment(what, name, step).kept(what, name, step)
        return value

    def _where(self, what: str, name: str) -> dict[int, Segment]:
        """Which segment has what was kept at a step, ascending: the last, if several do."""
        if (what, name) not in self._known:
            named(self._described, name, "parameter or buffer")
            found = {
                step: segment
                for segment in self._opened.segments
                for _, steps in segment.keeps.get(name, {}).get(what, ())
                for step in steps
            }
            self._known[what, name] = dict(sorted(found.items()))
        return self._known[what, name]

    def _segment(self, what: str, name: str, step: int) -> Segment:
        return self._where(what, name).get(step) or self._refuse(what, name, step)

    def _refuse(self, what: str, name: str, step: int) -> NoReturn:
        steps = tuple(self._where(what, name))
        place = bisect_right(steps, step)
        near = ", ".join(map(str, steps[max(0, place - 4) : place + 4])) or "no"
        raise QueryError(
            f"what {name!r} was after {step} updates was not kept; it was after {near} (those "
            "around it). Parameters can be rebuilt from the one before"
        )

    def _tensor(self, what: str, name: str, step: int) -> Tensor:
        known, segment = self._described[name], self._segment(what, name, step)
        *_, (_, value) = segment.kept(what, name, step)
        return _checked(value, known.shape, known.dtype, segment)


def digest_of(tensor: Tensor) -> str:
    """SHA-256 of a tensor's bytes."""
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.sha256(flat.numpy().data).hexdigest()


def _checked(value: Any, shape: tuple[int, ...], dtype: torch.dtype, segment: Segment) -> Tensor:
    if not isinstance(value, Tensor) or (tuple(value.shape), value.dtype) != (shape, dtype):
        is_tensor = isinstance(value, Tensor)
        seen = f"{value.dtype} {tuple(value.shape)}" if is_tensor else f"{value!r:.100}"
        raise damaged(segment.path, f"it keeps {seen}, expected {dtype} {shape}")
    return value
