"""Rules that divide by what they remember of earlier gradients: Adam and its relatives.

Such a rule is the recursion of `sgd.py` with tensors in place of scalars, entry by entry:

    W ← ww W + wm m + nw g          m ← mw W + mm m + nm g          g = κ Σ_t δ_t ⊗ x_t

where some of the six factors hold the *preconditioner* P, made of second moments (Adam's
η / (√v̂ + ε)). Given P, W is a sum over patterns again: exact and complete. P itself depends on all
patterns, and is taken as it was: an accounting of the run, no counterfactual.

Why it is hard: P is as large as the parameter, at every step. It is not stored. The second moments
are kept now and then (`memory/states.py`) and *replayed* in between: `advance` takes them one step
further, by the gradient that the patterns sum to, exactly as torch does. (They cannot be taken back
a step: dividing by β₂ again and again loses two digits in a hundred steps of float32.)
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Number = float | Tensor
ONLY_WITH = {"max_exp_avg_sq": "amsgrad", "momentum_buffer": "momentum", "grad_avg": "centered"}
"""What is remembered only where a setting asks for it."""

State = dict[str, Tensor]
"""What an optimizer remembers of one parameter: tensors of its shape, and single numbers."""


class Factor(NamedTuple):
    """plain + scaled · P, entry by entry."""

    plain: float
    scaled: float = 0.0


NONE, ONE = Factor(0.0), Factor(1.0)


class Elementwise(NamedTuple):
    """One step of a rule, entry by entry; `scale` is P, up to a number.

    Where m is first moved, and W then by `after` · P · m and its own ww.plain alone (Adam), all of
    it takes half the passes over the parameter.
    """

    scale: Tensor
    ww: Factor = ONE
    wm: Factor = NONE
    mw: Factor = NONE
    mm: float = 1.0
    nw: Factor = NONE
    nm: Factor = NONE
    after: float | None = None

    def factor(self, name: str) -> Number:
        """ww, wm, mw, nw or nm: a number where all entries fare alike, else a tensor."""
        chosen: Factor = getattr(self, name)
        return self.scale * chosen.scaled + chosen.plain if chosen.scaled else chosen.plain

    def move(self, weights: Tensor, momentum: Tensor, gradient: Tensor | None) -> None:
        """(W, m) one step further, in place; None is a gradient of zeros."""
        if self.after is not None:
            _scale(momentum, self.mm)
            _add(momentum, weights, self.mw.plain)
            if gradient is not None:
                _add(momentum, gradient, self.nm.plain)
            _scale(weights, self.ww.plain)
            weights.addcmul_(self.scale, momentum, value=self.after)
            return
        parts = [(weights, self.ww, self.mw), (momentum, self.wm, Factor(self.mm))]
        if gradient is not None:
            parts.append((gradient, self.nw, self.nm))
        moved = [self._sum([(part, f) for part, f, _ in parts])]
        moved.append(self._sum([(part, f) for part, _, f in parts]))
        weights.copy_(moved[0])
        momentum.copy_(moved[1])

    def back(self, weights: Tensor, momentum: Tensor) -> tuple[Tensor, float]:
        """Given what W and m after the step are in W at the end: how much of its gradient is.

        A tensor and a number to be multiplied with it. `weights` and `momentum` become, in place,
        what W and m before the step are in it.
        """
        if self.after is not None:
            reached = momentum.addcmul_(self.scale, weights, value=self.after)  # of m, moved
            _scale(weights, self.ww.plain)
            _add(weights, reached, self.mw.plain)
            if self.nm.plain == 0 or self.mm == 0:
                found = reached * self.nm.plain
                momentum.mul_(self.mm)
                return found, 1.0
            momentum.mul_(self.mm)
            return momentum, self.nm.plain / self.mm
        found = self._sum([(weights, self.nw), (momentum, self.nm)])
        before = self._sum([(weights, self.ww), (momentum, self.mw)])
        momentum.copy_(self._sum([(weights, self.wm), (momentum, Factor(self.mm))]))
        weights.copy_(before)
        return found, 1.0

    def _sum(self, parts: Sequence[tuple[Tensor, Factor]]) -> Tensor:
        total = torch.zeros_like(self.scale)
        scaled = [(part, f.scaled) for part, f in parts if f.scaled]
        for part, number in scaled:
            total.add_(part, alpha=number)
        if scaled:
            total.mul_(self.scale)
        for part, f in parts:
            _add(total, part, f.plain)
        return total

    @property
    def reach(self) -> Tensor:
        """How much of a gradient will have reached W in the end, about: P for Adam."""
        acting = max(1.0 - self.mm, 1e-3)
        number = (
            abs(self.nw.scaled)
            + (abs(self.wm.scaled * self.nm.plain) + abs(self.wm.plain * self.nm.scaled)) / acting
        )
        return self.scale * number


def _scale(total: Tensor, number: float) -> None:
    if number != 1.0:
        total.mul_(number)


def _add(total: Tensor, part: Tensor, number: float) -> None:
    if number:
        total.add_(part, alpha=number)


class AdaptiveRule(ABC):
    """One optimizer class: its settings, what it remembers, and what one step does."""

    name: ClassVar[str]
    settings: ClassVar[tuple[str, ...]]
    """What a step depends on, in the order it is logged in."""
    tensors: ClassVar[tuple[str, ...]]
    """What it may remember entry by entry, as named in torch's state; `momentum` is one of them."""
    numbers: ClassVar[tuple[str, ...]] = ("step",)
    """What it remembers as single numbers."""
    momentum: ClassVar[str | None] = None
    second: ClassVar[str]
    """Which of the tensors holds the second moments."""

    @abstractmethod
    def fading(self, settings: Settings) -> tuple[float, float]:
        """How much of the second moments stays at a step, and how much of g² comes in."""

    @abstractmethod
    def read(self, group: Mapping[str, Any]) -> tuple[float, ...]:
        """One parameter group's settings now, in the order of `settings`."""

    @abstractmethod
    def advance(
        self, state: State, settings: Settings, gradient: Tensor, weights: Tensor | None
    ) -> Elementwise:
        """Take what is remembered one step further, in place; what the step does to W and m.

        `gradient` is κ Σ δ ⊗ x; `weights` are those before the step, needed where decay is coupled.
        """

    def couples(self, settings: NDArray[np.float64]) -> bool:
        """Whether weights enter the gradient at any of these steps [S, k]: coupled decay."""
        decays = settings[:, self.settings.index("weight_decay")] != 0
        if "decoupled" in self.settings:
            decays = decays & (settings[:, self.settings.index("decoupled")] == 0)
        return bool(decays.any())

    def shrink(self, settings: Settings) -> float:
        """What decoupled decay multiplies the weights by."""
        if not settings.values.get("decoupled") or not settings["weight_decay"]:
            return 1.0
        return settings.held(1 - settings.rate * settings["weight_decay"])

    def condition(self, state: State, settings: Settings) -> Number:
        """How much P magnifies the roundings of what it is made of: 1, unless moments cancel."""
        return 1.0

    def remembered(self, settings: Mapping[str, float]) -> tuple[str, ...]:
        """The tensors that are there with these settings."""
        return tuple(n for n in self.tensors if settings.get(ONLY_WITH.get(n, ""), 1.0))

    def fresh(self, shape: torch.Size | tuple[int, ...], settings: Settings) -> State:
        """What a new optimizer remembers before its first step."""
        state = {name: torch.zeros(shape, dtype=torch.float64) for name in self.tensors}
        return state | {"step": torch.zeros(())}

    def is_new(self, state: State) -> bool:
        """Whether this is what an optimizer remembers that has not made a step yet."""
        return not state

    def found(self, remembered: Mapping[str, Any] | None) -> State | None:
        """What an optimizer remembers of a parameter now, as its own tensors; None if nothing."""
        if not remembered:
            return None
        names = (*self.tensors, *self.numbers)
        kept = {name: remembered[name] for name in names if name in remembered}
        return {n: v if isinstance(v, Tensor) else torch.tensor(float(v)) for n, v in kept.items()}


@dataclass(frozen=True)
class Settings:
    """One step's settings by name, and how arithmetic in the parameter's dtype holds a number."""

    values: Mapping[str, float]
    single: bool
    """Whether numbers are rounded to float32 before they are used, as torch does."""

    def __getitem__(self, name: str) -> float:
        return self.values[name]

    @property
    def rate(self) -> Number:
        """The learning rate to compute with: one given as a tensor keeps its own precision."""
        lr = self.values["lr"]
        return torch.tensor(lr, dtype=torch.float32) if self.values.get("single_lr") else lr

    def held(self, value: Number) -> float:
        return float(np.float32(float(value))) if self.single else float(value)


@dataclass(frozen=True)
class AdaptiveLog:
    """What an optimizer with an adaptive rule did with one parameter; arrays are [steps].

    As in `ParameterLog`; `settings` is [steps, k] in the order of the rule's own names, and `fresh`
    marks a step that found nothing remembered.
    """

    rule: AdaptiveRule
    applied: NDArray[np.bool_]
    kappa: NDArray[np.float64]
    first: NDArray[np.int64]
    fresh: NDArray[np.bool_]
    settings: NDArray[np.float64]

    def __len__(self) -> int:
        return len(self.applied)

    def head(self, steps: int) -> AdaptiveLog:
        """The log of the first `steps` steps."""
        names = ("applied", "kappa", "first", "fresh", "settings")
        return replace(self, **{name: getattr(self, name)[:steps] for name in names})

    def at(self, step: int, dtype: torch.dtype) -> Settings:
        """The settings of one step, for a parameter of this dtype."""
        values = dict(zip(self.rule.settings, self.settings[step].tolist(), strict=True))
        return Settings(values, dtype != torch.float64)


def is_single(lr: Any) -> float:
    """1 where the learning rate is a tensor of float32, whose arithmetic is rounded to that."""
    return float(isinstance(lr, Tensor) and lr.dtype != torch.float64)


def coupled_decay(settings: Settings) -> float:
    """How much of the weights is added to the gradient: 0 where decay is decoupled."""
    decoupled = settings.values.get("decoupled")
    return 0.0 if decoupled else settings.held(settings["weight_decay"])


def loss_gradient(settings: Settings, gradient: Tensor, weights: Tensor | None) -> Tensor:
    """The gradient that enters the moments: its sign by `maximize`, coupled decay added."""
    signed = -gradient if settings["maximize"] else gradient
    decay = coupled_decay(settings)
    if decay == 0:
        return signed
    assert weights is not None, "coupled decay needs the weights before the step"
    return signed.add(weights, alpha=decay)
