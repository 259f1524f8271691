"""What training has added to a parameter, as one sum: [L, Lm] ← M [L, Lm] + N G, in float64.

Where patterns or gradients are not kept one by one, this is what is left of them. M and N are the
learning rule's scalars, G the gradients as the optimizer used them; the weights themselves never
enter, so the sum can be compared with them.

Why it is hard: a pass over two float64 sums per step would cost more than the training of many a
layer. The rule is linear, so several steps are held and folded in at once, and a few thousand
entries at a time, so that everything between reading and writing stays in the processor's cache.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dualform.recording.audit import Transition

HELD = 8
"""How many gradients are held before they are folded in."""

BLOCK = 1 << 14
"""How many entries are folded at a time."""


class Accumulated:
    """A parameter's learned part and that of its momentum buffer, float64."""

    def __init__(self, weights: Tensor, momentum: Tensor) -> None:
        self._shape = weights.shape
        self._state = torch.stack([weights.reshape(-1).double(), momentum.reshape(-1).double()])
        self._held: list[tuple[Transition, Tensor | None]] = []
        self._places: list[Tensor] = []  # for copies of the gradients held

    @classmethod
    def nothing(cls, like: Tensor) -> Accumulated:
        """The sum before the first step."""
        zeros = torch.zeros(like.shape, dtype=torch.float64)
        return cls(zeros, zeros)

    @property
    def weights(self) -> Tensor:
        """L, as far as it is folded; a view."""
        return self._state[0].reshape(self._shape)

    @property
    def momentum(self) -> Tensor:
        """Lm, likewise."""
        return self._state[1].reshape(self._shape)

    @property
    def held(self) -> int:
        """How many steps are held."""
        return len(self._held)

    @property
    def held_bytes(self) -> int:
        """What the gradients held take."""
        return sum(g.numel() * g.element_size() for _, g in self._held if g is not None)

    def hold(self, transition: Transition, gradient: Tensor | None) -> None:
        """One more step, by a gradient; None: the rule acts on what is there, nothing is added.

        It is copied. Held on to, it would keep torch from using its memory again, and every step
        would have its gradients in another place, which no cache knows.
        """
        copy = None
        if gradient is not None:
            copy = self._place(gradient).copy_(gradient.reshape(-1))
        self._held.append((transition, copy))

    def _place(self, gradient: Tensor) -> Tensor:
        number = sum(held is not None for _, held in self._held)
        if number == len(self._places) or self._places[number].dtype != gradient.dtype:
            self._places[number:] = [torch.empty(gradient.numel(), dtype=gradient.dtype)]
        return self._places[number]

    def fold(self) -> None:
        """Put the steps held into the sums."""
        whole, factors = combined([transition for transition, _ in self._held])
        added = [(f, g) for f, (_, g) in zip(factors, self._held, strict=True) if g is not None]
        self._held = []
        if not added and np.array_equal(whole, np.eye(2)):
            return
        factor = torch.from_numpy(np.column_stack([whole, *(f for f, _ in added)]))
        length = self._state.shape[1]
        block = torch.empty(len(added) + 2, min(BLOCK, length), dtype=torch.float64)
        for start in range(0, length, BLOCK):
            here = slice(start, min(start + BLOCK, length))
            part = block[:, : here.stop - start]
            part[:2] = self._state[:, here]
            for row, (_, gradient) in zip(part[2:], added, strict=True):
                row.copy_(gradient[here])
            self._state[:, here] = factor @ part


def combined(
    steps: list[Transition],
) -> tuple[NDArray[np.float64], list[NDArray[np.float64]]]:
    """The product of all M, [2, 2], and what each step's gradient is multiplied by, [2] each."""
    whole, factors = np.eye(2), []
    for ww, wm, mw, mm, nw, nm in reversed(steps):
        factors.append(whole @ np.array([nw, nm]))
        whole = whole @ np.array([[ww, wm], [mw, mm]])
    return whole, factors[::-1]
