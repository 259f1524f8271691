"""Rules that go entry by entry (Adam and its relatives): how much of each step is in the weights.

Given what torch remembered (the preconditioner), every step is linear in its gradient, and

    W_S = ρ ⊙ W_0 + σ ⊙ m_0 + Σ_r D_r ⊙ G_r

follows from the rule's own factors, from the last step to the first (`Way`):

    D_r = κ_r (ρ nw + σ nm + carried_{r+1} D_{r+1})        ρ, σ ← ρ ww + σ mw,  ρ wm + σ mm

Why it is hard: factors are as large as the parameter, and what torch remembers can only be made
anew forward. So a stretch between two kept states is replayed forward in chunks whose factors fit
into memory, and the chunks are gone through backward.

D_r is taken as it was: it depends on all patterns, and would be another had some been left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dualform.certificate.replay import Record, Replay
from dualform.learning_rules import Classes, Factors, Rule, Setting, rule_of

HELD = 1 << 28
"""How many bytes of factors are held at once, about."""

State = tuple[Tensor, dict[str, Any]]


class Way:
    """One parameter's updates on the way to a state, from the last to the first, each with D_r.

    Once all were asked for, `weights` and `momentum` say how much of W_0 and m_0 is in the state.
    With `average` [at + 1] all of it is of Σ_s average[s] W_s, the mean of the states on the way.
    """

    def __init__(
        self, record: Record, at: int, known: Classes, average: NDArray[np.float64] | None = None
    ) -> None:
        self.record, self.at, self._known, self._average = record, at, known, average
        shape, share = record.known.shape, 1.0 if average is None else 0.0
        self.weights = torch.full(shape, share, dtype=torch.float64)
        self.momentum = torch.zeros(shape, dtype=torch.float64)
        self._entered = at + 1
        self._later: Tensor | None = None

    def __iter__(self) -> Iterator[tuple[int, Tensor]]:
        memory, name = self.record.memory, self.record.known.name
        kept, state = memory.kept.steps(name), self.at
        while state:
            state, steps = self.record.way_back(state, kept)
            yield from self._stretch(state, [s for s in steps if self.record.log.moved[s]])
        self._enter(0)

    def rule(self, step: int) -> tuple[Rule, Setting]:
        """The rule of a step, and its settings."""
        setting = self.record.memory.settings[int(self.record.log.setting[step])]
        rule = rule_of(setting.path)
        assert rule is not None
        return rule, setting

    def initial(self) -> tuple[Tensor, Tensor | None]:
        """What is left of W_0 and of m_0 (None if there was none); after all steps were asked."""
        kept, name = self.record.memory.kept, self.record.known.name
        log, state = self.record.log, kept.state(name, 0)
        rules = (self.rule(int(step))[0] for step in np.flatnonzero(log.moved)[:1])
        remembered = next((state.get(rule.momentum or "") for rule in rules), None)
        weights = self.weights * kept.weights(name, 0).double()
        return weights, None if remembered is None else self.momentum * remembered.double()

    def _stretch(self, start: int, steps: Sequence[int]) -> Iterator[tuple[int, Tensor]]:
        """Replay some steps from a kept state on; give them in the opposite order."""
        size = max(1, HELD // max(1, 4 * 8 * self.weights.numel()))
        kept, name = self.record.memory.kept, self.record.known.name
        begins: list[State] = [(kept.weights(name, start), kept.state(name, start))]
        replay = Replay(self.record, torch.float64, self._known, {})
        chunks = [steps[low : low + size] for low in range(0, len(steps), size)]
        for chunk in chunks[:-1]:
            for done in replay.run(start, chunk, begins[-1]):
                weights, state = done.weights, done.state
            begins.append((weights.clone(), {n: _copied(v) for n, v in state.items()}))
        for chunk, begin in zip(reversed(chunks), reversed(begins), strict=False):
            for step, factors in reversed(list(self._factors(replay, start, chunk, begin))):
                yield step, self._back(step, factors)

    def _factors(
        self, replay: Replay, start: int, steps: Sequence[int], begin: State
    ) -> Iterator[tuple[int, Factors]]:
        """What each step's rule does to W and m, as torch remembered it then."""
        before = {n: _copied(v) for n, v in begin[1].items()}
        for done in replay.run(start, steps, begin):
            rule, setting = self.rule(done.step)
            seen = {**done.state, **{n: before[n] for n in rule.before if n in before}}
            yield done.step, rule.factors(setting, seen, bool(self.record.log.fresh[done.step]))
            before = {n: _copied(done.state[n]) for n in rule.before if n in done.state}

    def _back(self, step: int, f: Factors) -> Tensor:
        """Go back by one step; give D of that step."""
        log = self.record.log
        self._enter(step + 1)
        here = self.weights * f.nw + self.momentum * f.nm
        if self._later is not None:
            here = here + self._later
        here = here * float(np.nan_to_num(log.kappa[step]))
        self._later = here if log.carried[step] else None
        self.weights, self.momentum = (
            self.weights * f.ww + self.momentum * f.mw,
            self.weights * f.wm + self.momentum * f.mm,
        )
        if log.fresh[step]:
            self.momentum = torch.zeros_like(self.momentum)  # what was before has ended there
        return here

    def _enter(self, since: int) -> None:
        """The weights after `since` updates, and after later ones, have their part in a mean."""
        if self._average is not None:
            self.weights = self.weights + float(self._average[since : self._entered].sum())
        self._entered = since


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value
