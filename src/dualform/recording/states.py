"""Who moves each parameter, and marks: is everything still what the last update left?

Two numbers per parameter after every update, of some sixty entries of its weights and of what its
optimizer remembers (`certificate/marks.py`). They find edits before the next update, and restored
states among all that were recorded.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from torch.optim import Optimizer

from dualform.certificate.marks import Marks, Words, nature_of, remembered
from dualform.recording.watched import Flags, Watch, Watched

Numbers = NDArray[np.uint32]


class States:
    """The owners and marks of all parameters. An owner is found when it first steps."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self.owner: list[Optimizer | None] = [None] * len(watch)
        self.owners: list[Optimizer] = []
        """The optimizers that move parameters, each once."""
        self._weights = Marks([[w.tensor] for w in watch])
        self._states = Marks([[] for _ in watch])
        self._known: list[Any] = []
        self._last: Words = np.zeros(0, np.int32)
        self._numbers = np.zeros((2, len(watch)), np.uint32)
        self._history: dict[bytes, int] = {}
        self._begun: Numbers | None = None
        """The marks of a resumed memory's last step; None if nothing was resumed."""
        self.shaken: Flags = np.zeros(len(watch), bool)

    def take_over(self, optimizer: Optimizer | None, watched: list[Watched]) -> None:
        """Give parameters to another optimizer; one that has none left is forgotten."""
        for w in watched:
            self.owner[w.index] = optimizer
        self._known = []  # so that states are looked up anew
        self.owners = list({id(o): o for o in self.owner if o is not None}.values())

    def weights(self, w: Watched) -> Tensor:
        """A parameter; of one in another dtype, or shape, than the memory says, what it was."""
        return w.tensor.detach() if nature_of(w.tensor) == w.nature else self._weights.seen[w.index]

    def state(self, w: Watched) -> dict[str, Any]:
        """What the optimizer remembers of a parameter."""
        owner = self.owner[w.index]
        return {} if owner is None else dict(owner.state.get(w.tensor) or {})

    def now(self) -> Numbers:
        """The marks of weights and of what optimizers remember, as they are: [2, P]."""
        return self._numbered(self._sampled())

    def _sampled(self) -> Words:
        """Read the entries of weights; look tensors up again where there are new ones."""
        held = (own.values() for owner in self.owners for own in owner.state.values())
        known = [id(value) for own in held for value in own if type(value) is Tensor]
        known.append(self._watch.members.replaced)
        if known != self._known:
            self._known = known
            self._weights.tensors = [w.tensor for w in self._watch]
            self._states = Marks([remembered(self.state(w)) for w in self._watch])
        return self._weights.sampled()

    def _numbered(self, weights: Words) -> Numbers:
        states = self._states.numbers(self._states.sampled())
        if self._begun is not None:  # of what is not moved yet, as a resumed memory says
            states = np.where([o is None for o in self.owner], self._begun[1], states)
        return np.stack([self._weights.numbers(weights), states])

    def take(self) -> None:
        """Take the marks of this moment: an update was made."""
        self._last = self._sampled()
        self._numbers = self._numbered(self._last)

    def remember(self, step: int) -> Numbers:
        """Give the marks as last taken: they are those after so many updates."""
        self._history[self._numbers.tobytes()] = step
        return self._numbers

    def restore(self, marks: NDArray[np.uint32]) -> None:
        """Know the marks of the steps that a resumed memory holds: [steps, 2, P]."""
        self._history |= {numbers.tobytes(): step for step, numbers in enumerate(marks, 1)}
        self._begun = marks[-1] if len(marks) else None

    @property
    def is_resumed(self) -> bool:
        """Whether there are states that a resumed memory tells of."""
        return self._begun is not None

    def are_as_begun(self, watched: list[Watched]) -> bool:
        """Whether optimizers remember of some parameters what a resumed memory says."""
        indices = [w.index for w in watched]
        return self._begun is None or bool((self.now()[1] == self._begun[1])[indices].all())

    def restored(self) -> int | None:
        """The step whose marks weights and states have now, if they have been such before."""
        return self._history.get(self.now().tobytes())

    def differ(self) -> Flags:
        """Which parameters, or what is remembered of them, differ in any sampled bit."""
        return np.asarray((self.now() != self._numbers).any(axis=0))

    def step_of_weights(self) -> int | None:
        """The last step whose weights the model has now, whatever its optimizers remember."""
        now = self.now()[0].tobytes()
        return next((s for m, s in reversed(self._history.items()) if m.startswith(now)), None)

    @np.errstate(over="ignore", invalid="ignore")
    def changed(self) -> Flags:
        """Which parameters differ from when marks were last taken.

        Weights: by more than adding something and taking it away again leaves; of loops that do so
        between two updates (an attack on the weights, say) `shaken` says whose last bits are
        others. What optimizers remember: where it is another object, as `load_state_dict` leaves
        it.
        """
        before, now = self._known, self._sampled()
        self.shaken = found = np.zeros(len(self._watch), bool)
        if now.tobytes() != self._last.tobytes():
            off, size = self._weights.apart(self._last, now)
            found = ~(off <= 16 * self._watch.u * size)
            self.shaken = (off != 0) & ~found
        if before != self._known:
            found = found | (self._numbered(now)[1] != self._numbers[1])
        return found
