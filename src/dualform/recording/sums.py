"""What training has added to a parameter, as one sum: [L, Lm] ← M [L, Lm] + N G, in float64.

Where patterns or gradients are not kept one by one, this is what is left of them. M and N are the
learning rule's scalars, G the gradients as the optimizer used them; the weights themselves never
enter, so the sum can be compared with them.

Why it is hard: a pass over two float64 sums per step would cost more than the training of many a
layer. The rule is linear, so several steps are held and folded in at once, a few thousand entries
at a time, so that everything between reading and writing stays in the processor's cache. What the
steps held add up to is summed in the precision of training (float32 at least): it is a small part
of the weights, so its rounding is a small part of what every update rounds off the weights anyway.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dualform.recording.whereabouts import Transition

HELD = 16
"""How many gradients are held before they are folded in."""

HELD_BYTES = 64 << 20
"""Gradients are folded before they take more than this (one step's may)."""

BLOCK = 1 << 16
"""How many entries are folded at a time."""


class Accumulated:
    """A parameter's learned part and that of its momentum buffer, float64."""

    def __init__(self, weights: Tensor, momentum: Tensor) -> None:
        self._shape = weights.shape
        self._state = torch.stack([weights.reshape(-1).double(), momentum.reshape(-1).double()])
        self._held: list[tuple[Transition, bool]] = []  # and whether there is a gradient
        self._gradients = torch.empty(0, self._state.shape[1])  # those held, one below the other
        self._rows = 0  # how many

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
        return self._rows * self._gradients.shape[1] * self._gradients.element_size()

    def hold(self, transition: Transition, gradient: Tensor | None) -> None:
        """One more step, by a gradient; None: the rule acts on what is there, nothing is added.

        It is copied. Held on to, it would keep torch from using its memory again, and every step
        would have its gradients in another place, which no cache knows.
        """
        if gradient is not None:
            dtype = torch.float64 if gradient.dtype == torch.float64 else torch.float32
            if self._rows == len(self._gradients) or dtype != self._gradients.dtype:
                self.fold()
            if not len(self._gradients) or dtype != self._gradients.dtype:
                length = self._state.shape[1]
                most = HELD_BYTES // max(1, length * dtype.itemsize)
                self._gradients = torch.empty(max(1, min(HELD, most)), length, dtype=dtype)
            self._gradients[self._rows].copy_(gradient.reshape(-1))
            self._rows += 1
        self._held.append((transition, gradient is not None))

    def fold(self) -> None:
        """Put the steps held into the sums."""
        whole, factors = combined([transition for transition, _ in self._held])
        added = [f for f, (_, by) in zip(factors, self._held, strict=True) if by]
        gradients = self._gradients[: self._rows]
        self._held, self._rows = [], 0
        if not added and np.array_equal(whole, np.eye(2)):
            return
        turn = torch.from_numpy(whole)
        factor = torch.from_numpy(np.array(added).reshape(-1, 2).T).to(gradients.dtype)
        for start in range(0, self._state.shape[1], BLOCK):
            here = slice(start, start + BLOCK)
            part, state = factor @ gradients[:, here], self._state[:, here]
            state.copy_(torch.addmm(part.double(), turn, state))


def combined(
    steps: list[Transition],
) -> tuple[NDArray[np.float64], list[NDArray[np.float64]]]:
    """The product of all M, [2, 2], and what each step's gradient is multiplied by, [2] each."""
    whole, factors = np.eye(2), []
    for ww, wm, mw, mm, nw, nm in reversed(steps):
        factors.append(whole @ np.array([nw, nm]))
        whole = whole @ np.array([[ww, wm], [mw, mm]])
    return whole, factors[::-1]
