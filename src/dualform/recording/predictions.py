"""Where several parameters should be by now, followed at once in arrays that their audits share.

Parameter by parameter a step is two dozen small calls, each of which holds the interpreter's lock,
that training may be waiting for. Here they are a dozen for all of them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from dualform.recording.audit import ParameterAudit
from dualform.recording.looking import can_be_read
from dualform.recording.whereabouts import Transition, advance_along


class Predictions:
    """The predictions of some audits, each of some rows, from here on in common arrays."""

    def __init__(self, audits: Sequence[ParameterAudit]) -> None:
        self.audits = audits
        rows = [len(audit.sketch) for audit in audits]
        self._starts = np.cumsum([0, *rows])[:-1]
        self._weights = np.concatenate([audit.weights for audit in audits])
        self._momentum = np.concatenate([audit.momentum for audit in audits])
        self._sketch = np.concatenate([audit.sketch for audit in audits])
        for audit, start, length in zip(audits, self._starts.tolist(), rows, strict=True):
            audit.weights = self._weights[start : start + length]
            audit.momentum = self._momentum[start : start + length]
        self._projected = torch.empty(sum(rows), dtype=torch.float64)
        self._places = torch.split(self._projected, rows)
        self._probes = [audit.probe64.to(audit.probe.dtype) for audit in audits]  # on the CPU
        self._products = [p.new_empty(n) for p, n in zip(self._probes, rows, strict=True)]

    @property
    def hold(self) -> bool:
        """Whether the audits still share these arrays: others may have taken some of them over."""
        return all(audit.weights.base is self._weights for audit in self.audits)

    def follow(self, gradients: Sequence[Tensor], transition: Transition) -> list[float] | None:
        """The same step of the learning rule for all, by their gradients: u·(grad v) of each.

        None, and nothing is done, if one of the gradients cannot be read as it lies there.
        """
        if not all(map(can_be_read, gradients, self.audits)):
            return None
        seen = [
            gradient if len(probe) == 1 else torch.mv(gradient, probe, out=product)
            for gradient, probe, product in zip(
                gradients, self._probes, self._products, strict=True
            )
        ]
        torch._foreach_copy_(self._places, seen)
        projected = self._projected.numpy()
        sketched: list[float] = np.add.reduceat(self._sketch * projected, self._starts).tolist()
        change, pull = advance_along(self._weights, self._momentum, projected, transition)
        moved = np.add.reduceat(change * change + pull * pull, self._starts).tolist()
        for audit, much in zip(self.audits, moved, strict=True):
            audit.count(transition, much)
        return sketched
