"""What patterns wrote into a parameter under Adam and its relatives: sums with elementwise factors.

Given the preconditioner, W_S = ρ_0 ⊙ W_0 + σ_0 ⊙ m_0 + Σ_r D_r ⊙ G_r, where D_r says of every entry
how much of step r's gradient is in it. Two ways lead there:

- *forward*, as training did: (W, m) of any part of the sum follow the rule's own recursion, driven
  by that part's gradient. One sweep gives the initial part and what every group of patterns wrote
  (`written`): masks are sums of those matrices from then on;
- *backward*: (ρ, σ) from the last step to the first give D_r itself, which single patterns need:
  what pattern t wrote along a direction g for a query q is  δ_tᵀ [(g qᵀ) ⊙ D_r] x_t  (`along`).

D_r is taken as it was: it depends on all patterns, and would be another had some been left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dualform.attention import engine
from dualform.layers.kinds import multiply
from dualform.memory import LayerMemory, Memory
from dualform.memory.replay import Part, Replay, Taken


@dataclass(frozen=True)
class Initial:
    """What no pattern wrote into a parameter, float64: of W_0, of m_0, of gradients kept whole."""

    weights: Tensor
    momentum: Tensor | None
    by_steps: Tensor | None


def initial(
    memory: Memory, parameter: str, at: int, average: engine.Reals | None = None
) -> Initial:
    """The initial state's share after `at` updates, and what gradients without patterns wrote."""
    replay = Replay(memory, parameter, at)
    begun, buffer = memory.initial(parameter).double(), memory.initial_momentum(parameter)
    resolved = bool(replay.gradients.writers)
    if resolved and buffer is None and not replay.couples and average is None:
        return Initial(replay.shrunk * begun, None, None)
    way = Factors(replay, average, gradients=not resolved)
    by_steps = None if resolved else torch.zeros(replay.shape, dtype=torch.float64)
    for done, factor, number in way:
        if by_steps is not None:
            by_steps.addcmul_(factor, done.gradient, value=number)
    momentum = None if buffer is None else way.momentum * buffer.double()
    return Initial(way.weights * begun, momentum, by_steps)


def written(
    memory: Memory,
    layer: LayerMemory,
    parameter: str,
    at: int,
    groups: Sequence[engine.Reals | None],
    average: engine.Reals | None = None,
) -> Tensor:
    """What groups of a layer's patterns wrote into its rows of a parameter, [groups, …], float64.

    A group is a weight for every pattern; None is all of them.
    """
    replay = Replay(memory, parameter, at)
    own = layer.rows_of(parameter)
    if len(groups) == 1 and average is None:
        return _written_forward(replay, layer, groups[0])[own][None]
    shape = (own.stop - own.start, *replay.shape[1:])
    parts = torch.zeros(len(groups), *shape, dtype=torch.float64)
    for done, factor, number in Factors(replay, average):
        rows = replay.gradients.rows(layer.name, done.step)
        for part, group in zip(parts, groups, strict=True):
            if group is None or group[rows].any():
                driven = replay.gradients.part(layer, done.step, group)
                part.addcmul_(factor[own], driven, value=number)
    return parts


def _written_forward(replay: Replay, layer: LayerMemory, group: engine.Reals | None) -> Tensor:
    part = Part(torch.zeros(replay.shape, dtype=torch.float64))
    alone = list(replay.gradients.writers) == [layer.name]
    for done in replay.forward():
        rows = replay.gradients.rows(layer.name, done.step)
        if group is None and alone:
            part.take(done, done.gradient)
        elif rows.start == rows.stop or (group is not None and not group[rows].any()):
            part.take(done, None)
        else:
            driven = torch.zeros(replay.shape, dtype=torch.float64)
            driven[layer.rows_of(replay.name)] = replay.gradients.part(layer, done.step, group)
            part.take(done, driven)
    return part.weights


class Factors:
    """D_r of every update, from the last to the first: how much of it is in each entry.

    A tensor, valid until the next is asked for, and a number to be multiplied with it. Once all
    were asked for, `weights` and `momentum` say how much of W_0 and m_0 is. With `average`
    [at + 1] all of it is of Σ_s average[s] W_s instead of W. Updates come with their gradient only
    if that is asked for: half as much is then held at once, and more of it replayed twice.
    """

    def __init__(
        self, replay: Replay, average: engine.Reals | None = None, *, gradients: bool = False
    ) -> None:
        self._replay, self._average, self._gradients = replay, average, gradients
        share = 1.0 if average is None else 0.0
        self.weights = torch.full(replay.shape, share, dtype=torch.float64)
        self.momentum = torch.zeros(replay.shape, dtype=torch.float64)
        self._entered = replay.at + 1

    def __iter__(self) -> Iterator[tuple[Taken, Tensor, float]]:
        for done in self._replay.backward(gradients=self._gradients):
            self._enter(done.step + 1)
            factor, number = done.rule.back(self.weights, self.momentum)
            yield done, factor, number
            if done.fresh:
                self.momentum.zero_()  # what was remembered before has ended there
        self._enter(0)

    def _enter(self, since: int) -> None:
        """The weights after `since` updates, and after later ones, have their part in a mean."""
        if self._average is not None:
            self.weights += float(self._average[since : self._entered].sum())
        self._entered = since


def along(
    memory: Memory,
    layer: LayerMemory,
    parameter: str,
    at: int,
    direction: Tensor,
    average: engine.Reals | None = None,
) -> engine.Reals:
    """What each pattern wrote into a parameter along a direction of the layer's rows of it: [T].

    δ_tᵀ [H ⊙ D_r] x_t for H = Σ g qᵀ, in one pass over the patterns, whatever the number of
    queries behind H.
    """
    replay = Replay(memory, parameter, at)
    own, found = layer.rows_of(parameter), np.zeros(layer.rows)
    is_weight = parameter == layer.weight
    for done, factor, number in Factors(replay, average):
        keys, signals, rows = replay.gradients.patterns(layer, done.step)
        looked = direction * factor[own]
        if is_weight:
            looked = multiply(layer.kind, looked, keys)
            values = (looked * signals).sum(1)
        else:
            values = signals @ looked
        found[rows] += number * float(replay.log.kappa[done.step]) * values.numpy()
    return found


def outputs(
    memory: Memory,
    layer: LayerMemory,
    writer: LayerMemory,
    at: int,
    weights: engine.Reals,
    queries: Tensor,
    average: engine.Reals | None = None,
) -> Tensor:
    """Σ_r (D_r ⊙ Σ_{t in r} w_t δ_t ⊗ x_t) q, what a layer's patterns answer: [n, rows of them].

    For a weight that several layers share, `writer` is the one whose patterns are meant; the answer
    counts the rows of its own.
    """
    replay = Replay(memory, layer.weight, at)
    own = writer.rows_of(layer.weight)
    output = torch.zeros(len(queries), writer.out_features, dtype=torch.float64)
    for done, factor, number in Factors(replay, average):
        rows = replay.gradients.rows(writer.name, done.step)
        if rows.start == rows.stop or not weights[rows].any():
            continue
        driven = replay.gradients.part(writer, done.step, weights)
        output += number * multiply(writer.kind, driven.mul_(factor[own]), queries)
    return output
