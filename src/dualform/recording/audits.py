"""All parameters' audits at once: sums of patterns, gradients and predictions in common arrays.

A network has many small parameters, and asking each of them a dozen questions at every step would
cost more than the answers. What all are asked is computed here in a few operations over all rows;
whoever does not give the usual answer is then looked at alone, in `audit.py`.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from dualform.layers.kinds import write
from dualform.recording.audit import ParameterAudit
from dualform.recording.looking import Together, is_plain, squares
from dualform.recording.rows import Rows
from dualform.recording.unexplained import quietly
from dualform.recording.whereabouts import EPSILON, Transition, advance_along

TALL = 1 << 18
"""From this many error signals on, their two sums are taken one after the other."""


class Audits:
    """All parameters' audits: what is done to each of them at every step, done at once.

    They keep their numbers in common arrays; a network has many small parameters.
    """

    def __init__(self, audits: Sequence[ParameterAudit]) -> None:
        self._audits, self._moving = list(audits), list(audits)
        self.have_seen = False
        """Whether there are patterns whose sizes may still have to be taken."""
        self._waiting: list[tuple[ParameterAudit | None, ParameterAudit | None, Rows]] = []
        rows = [len(audit.sketch) for audit in audits]
        self._alike = all(rows) and not any(audit.entrywise for audit in audits)
        self.rows = sum(rows)
        self._starts = np.cumsum([0, *rows])[:-1]
        self._weights, self._momentum, self._expected, self._projected = (
            np.zeros(sum(rows)) for _ in range(4)
        )
        self._products = np.zeros(sum(rows))
        for audit, start, length in zip(audits, self._starts.tolist(), rows, strict=True):
            part = slice(start, start + length)
            audit.place(
                *(a[part] for a in (self._weights, self._momentum)),
                *(a[part] for a in (self._expected, self._projected)),
            )
        self._together = Together(self._audits, self._expected, self._projected)
        self._sketch = np.concatenate([np.empty(0), *(audit.sketch for audit in audits)])

    def see(
        self,
        weight: ParameterAudit | None,
        bias: ParameterAudit | None,
        keys: Tensor,
        error_signals: Tensor,
        rows: Rows,
        *,
        later: bool = False,
    ) -> None:
        """Patterns on their way to the gradients of a layer, and their copies.

        `later`: where the copies are exact they are looked at by `catch_up`, those of all layers in
        one go: amid a backward pass, which has just filled the processor's caches, everything takes
        twice as long.
        """
        self.have_seen = True
        if error_signals.dtype != rows.dtype or keys.dtype != rows.keys.dtype:
            see_patterns(weight, bias, keys, error_signals, rows)
        elif later:
            self._waiting.append((weight, bias, rows))
        else:
            see_patterns(weight, bias, rows.keys, rows.error_signals, rows)

    def look_at(self, gradients: Mapping[int, Tensor], step: int) -> None:
        """Look at gradients, by their parameters' numbers: at all of them at once, if it is all."""
        if self._alike and len(gradients) == len(self._audits):
            in_order = [gradients[number] for number in range(len(self._audits))]
            self._together.look_at(in_order, step)
        else:
            for number, gradient in gradients.items():
                self._audits[number].look_at(gradient, step)

    @property
    def are_behind(self) -> bool:
        """Whether patterns wait to be looked at."""
        return bool(self._waiting)

    @quietly()
    def catch_up(self) -> None:
        """Look at the patterns that wait for it."""
        waiting, self._waiting = self._waiting, []
        for weight, bias, rows in waiting:
            see_patterns(weight, bias, rows.keys, rows.error_signals, rows)

    def are_plain(self) -> list[bool]:
        """Whether each gradient last looked at is what its patterns sum to, by the factor 1.

        The usual case: where the answer is no, `explain` finds out more.
        """
        if not self._alike:
            return [False] * len(self._audits)
        sums = squares(self._expected, self._projected - self._expected, self._starts)
        return list(map(is_plain, self._audits, sums))

    def explain(self, gradients: Sequence[Tensor], step: int) -> bool:
        """Whether all gradients, in the parameters' order, are plain; if so, until `complete` is
        called, nothing but `expected` may be used of what they are along the probes."""
        return self._together.explain(gradients, step)

    def complete(self) -> None:
        """Put what `explain` has seen where it belongs."""
        self._together.complete()

    def __len__(self) -> int:
        return len(self._audits)

    def sketched(self) -> list[float]:
        """u·(grad v) of every parameter, for the log."""
        if not self._alike:
            return [audit.sketched for audit in self._audits]
        products = np.multiply(self._sketch, self._projected, out=self._products)
        found: list[float] = np.add.reduceat(products, self._starts).tolist()
        return found

    def advance(self, transition: Transition) -> None:
        """The same step of the learning rule for all of them."""
        change, pull = advance_along(self._weights, self._momentum, self._projected, transition)
        moved = np.add.reduceat(change * change + pull * pull, self._starts)
        for audit, much in zip(self._moving, moved.tolist(), strict=True):
            audit.count(transition, much)

    def settle(self, step: int) -> None:
        """Take the sizes of patterns of earlier steps, before their place is used for others."""
        for audit in self._audits:
            audit.settle(step)
        self.have_seen = any(audit.has_unsized for audit in self._audits)

    def leave(self, audit: ParameterAudit) -> None:
        """Where its weights should be is followed elsewhere from now on: that it takes with it."""
        self._moving[self._audits.index(audit)] = copy.copy(audit)  # moves on, to no effect
        audit.weights, audit.momentum = audit.weights.copy(), audit.momentum.copy()

    @property
    def are_alike(self) -> bool:
        """Whether `advance`, and `explain`, may be used."""
        return self._alike


def see_patterns(
    weight: ParameterAudit | None,
    bias: ParameterAudit | None,
    keys: Tensor,
    error_signals: Tensor,
    rows: Rows,
) -> None:
    """Tell a layer's weight and bias (where they are trained) of patterns on their way to `.grad`.

    The bias's key is the constant 1, so one product serves both: [1, x·v]ᵀ δ.
    """
    either = weight or bias
    if either is None:
        return
    eps = EPSILON[error_signals.dtype]
    precise = either.probe.dtype
    if rows.layer.kind != "linear":
        _see_transposed(weight, bias, keys, error_signals.to(precise), rows, eps)
        return
    if keys.dtype != precise or error_signals.dtype != precise:
        keys, error_signals = keys.to(precise), error_signals.to(precise)
    ones_and_keys = either.ones_and(keys.shape[0])
    if weight is None or weight.entrywise:
        sums = ones_and_keys[:1] @ error_signals
        if weight is not None:
            weight.see((error_signals.T @ keys).reshape(-1), rows, eps, rows.layer.offset)
    else:
        torch.mv(keys, weight.probe, out=ones_and_keys[1])
        if error_signals.numel() < TALL:
            sums = torch.mm(ones_and_keys, error_signals)
        else:  # for a product of two rows with many, torch has no good kernel
            sums = torch.stack([error_signals.sum(0), torch.mv(error_signals.T, ones_and_keys[1])])
        weight.see(sums[1], rows, eps, rows.layer.offset)
    if bias is not None:
        bias.see(sums[0], rows, eps, rows.layer.bias_offset)


def _see_transposed(
    weight: ParameterAudit | None,
    bias: ParameterAudit | None,
    keys: Tensor,
    error_signals: Tensor,
    rows: Rows,
    eps: float,
) -> None:
    """The same where the key is on the side of the weight's rows: Σ x (δ·v)."""
    if weight is not None:
        along = error_signals if weight.entrywise else (error_signals @ weight.probe)[:, None]
        part = error_signals.new_zeros(rows.layer.height, along.shape[1])
        if rows.layer.kind != "embedding":
            keys = keys.to(part.dtype)
        weight.see(
            write(rows.layer.kind, part, keys, along).reshape(-1), rows, eps, rows.layer.offset
        )
    if bias is not None:
        bias.see(error_signals.sum(0), rows, eps, rows.layer.bias_offset)
