"""What every parameter looks like along its probe, written down every so many steps.

Fingerprints are how a memory verifies against itself: between two of them, patterns and log must
carry W v and m v from the one to the other. The closer they are, the smaller an error is found.
And a run that is resumed from a checkpoint of such a step is known by them to the last digit: its
weights, and all that its optimizer remembers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from torch.optim import Optimizer

from dualform.learning_rules import State, momentum_buffer
from dualform.recording.accountant import Accountant
from dualform.recording.clerk import Clerk
from dualform.recording.parameters import Parameters, Watched

FINGERPRINT_EVERY = 64
"""Most steps between one fingerprint and the next."""

Array = np.ndarray[Any, Any]
Compare = Callable[[Watched, Array, Array | None], None]
"""Given a parameter, W v, and m v if that was looked at."""


class Taken(NamedTuple):
    """One fingerprint: W v and m v by parameter; what else is remembered, by STATE/NAME."""

    step: int
    weights: dict[str, Array]
    momenta: dict[str, Array]
    states: dict[str, Array]


class Fingerprints:
    """The fingerprints taken since the last commit."""

    def __init__(
        self,
        parameters: Parameters,
        optimizers: Sequence[Optimizer],
        clerk: Clerk,
        accountant: Accountant,
    ) -> None:
        self._parameters, self._optimizers = parameters, optimizers
        self._clerk, self._accountant = clerk, accountant
        self._taken: list[Taken] = []
        self.last = 0
        """The number of updates when the last one was taken."""

    def take(self, step: int, compare: Compare) -> None:
        """Project every parameter, and all that is remembered of it (NaN: there is no momentum).

        `compare` is given each parameter's fingerprints to compare it with what was predicted. The
        clerk sees to what is remembered, the accountant to the weights meanwhile, and the training
        thread waits; where there is little to do, or in a forked process, it does all of it.
        """
        seen = Taken(step, {}, {}, {})
        owned = [
            (w, next((o for o in self._optimizers if o.state.get(w.parameter)), None))
            for w in self._parameters
        ]
        numbers = sum(w.parameter.numel() for w, owner in owned if owner is not None)
        weights = partial(_project, seen.weights, self._parameters)
        if self._clerk.is_for(numbers) and all(w.parameter.is_cpu for w, _ in owned):
            self._clerk.help(_remember, seen, owned)
            if self._accountant.helps(weights):
                self._accountant.catch_up()
        else:
            _remember(seen, owned)
        if not seen.weights:
            weights()
        self._clerk.wait()
        for watched in self._parameters:
            compare(watched, seen.weights[watched.name], seen.momenta[watched.name])
        self._taken.append(seen)
        self.last = step

    def look_again(self, compare: Compare) -> None:
        """Compare the weights once more: since the last one was taken there was no update."""
        for watched in self._parameters:
            compare(watched, watched.audit.project(watched.parameter), None)

    def collect(self) -> tuple[Array, dict[str, Array], dict[str, Array], dict[str, Array]]:
        """Steps [k], and W v, m v and those of states [k, d0], by name; begins anew."""
        taken, self._taken = self._taken, []
        names = self._parameters.by_name if taken else ()
        states = {name: values for one in taken for name, values in one.states.items()}
        return (
            np.array([one.step for one in taken], np.int64),
            {name: np.stack([one.weights[name] for one in taken]) for name in names},
            {name: np.stack([one.momenta[name] for one in taken]) for name in names},
            {
                name: np.stack([o.states.get(name, np.full_like(like, np.nan)) for o in taken])
                for name, like in states.items()
            },
        )


def _project(weights: dict[str, Array], parameters: Iterable[Watched]) -> None:
    weights |= {w.name: w.audit.project(w.parameter) for w in parameters}


def _remember(seen: Taken, owned: Sequence[tuple[Watched, Optimizer | None]]) -> None:
    """Project what optimizers remember of their parameters."""
    for watched, owner in owned:
        name, audit = watched.name, watched.audit
        buffer = None if owner is None else momentum_buffer(owner, watched.parameter)
        seen.momenta[name] = (
            np.full(len(audit.sketch), np.nan) if buffer is None else audit.project(buffer)
        )
        if owner is not None and watched.rule is not None:
            state = watched.rule.found(owner.state[watched.parameter]) or {}
            seen.states.update(states_fingerprint(watched, state))


def states_fingerprint(watched: Watched, state: State) -> dict[str, Array]:
    """What an adaptive optimizer remembers of a parameter besides its momentum, along the probe.

    By STATE/NAME; single numbers as they are.
    """
    rule = watched.rule
    assert rule is not None
    return {
        f"{name}/{watched.name}": np.array(float(value))
        if name in rule.numbers
        else watched.audit.project(value)
        for name, value in state.items()
        if name != rule.momentum
    }
