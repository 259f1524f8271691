"""Does a copy of one parameter, moved by the same class, go where training went?

That is what replaying needs of an optimizer: it is deterministic and treats each parameter by
itself. torch's own do. Of a class from elsewhere the first two updates are replayed at once; where
they differ by more than rounding (a global norm, a step size shared by all parameters), its
parameters are kept as values.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from dualform.certificate.bounds import ROUNDING
from dualform.learning_rules import Setting
from dualform.learning_rules.replaying import OneParameter, converted
from dualform.learning_rules.settings import path_of
from dualform.recording.findings import Findings
from dualform.recording.kept import is_kept
from dualform.recording.watched import Watch, Watched

TRIALS = 2
KEPT_STATES_ONLY = {"torch.optim.lbfgs.LBFGS", "torch.optim.sparse_adam.SparseAdam"}


@dataclass(frozen=True)
class Before:
    """A parameter just before an update."""

    watched: Watched
    setting: Setting
    weights: Tensor
    gradient: Tensor
    state: dict[str, Any]


class Trial:
    """The first updates of every optimizer that is not torch's own."""

    def __init__(self, watch: Watch, findings: Findings) -> None:
        self._watch, self._findings = watch, findings
        self._done: dict[str, int] = {}
        self._before: list[Before] = []
        self._kind: type[Optimizer] = Optimizer

    def begin(self, optimizer: Optimizer, moving: list[Watched], settings: list[Setting]) -> None:
        """Copy what an update of a class from elsewhere starts from."""
        self._before = []
        path = settings[0].path if settings else ""
        if path in KEPT_STATES_ONLY:
            self._make_values(moving, path)
        elif path and not path.startswith("torch.optim.") and self._done.get(path, 0) < TRIALS:
            self._done[path] = self._done.get(path, 0) + 1
            self._kind = type(optimizer)
            pairs = zip(moving, settings, strict=True)
            self._before = [self._copy(optimizer, w, setting) for w, setting in pairs]

    def _copy(self, optimizer: Optimizer, w: Watched, setting: Setting) -> Before:
        held = optimizer.state.get(w.tensor) or {}
        state = {name: converted(value, w.tensor.dtype) for name, value in held.items()}
        gradient = w.tensor.grad
        assert gradient is not None
        return Before(w, setting, w.tensor.detach().clone(), gradient.detach().clone(), state)

    def end(self) -> None:
        """Take the same update with copies; parameters that go elsewhere are values."""
        before, self._before = self._before, []
        if before and not all(self._goes_there(b, self._kind) for b in before):
            self._make_values([b.watched for b in before], path_of(self._kind))

    def _make_values(self, watched: list[Watched], path: str) -> None:
        why = (
            f"{path} cannot be replayed parameter by parameter: what it does to one depends on "
            "others, on chance or on several gradients"
        )
        for w in watched:
            if self._watch.resolved[w.index]:
                self._watch.make_values(w, why)
                self._findings.warn(f"{why}. What it moves is kept as values")

    def _goes_there(self, before: Before, kind: type[Optimizer]) -> bool:
        actual = before.watched.tensor.detach()
        try:
            copy = OneParameter(
                before.weights, before.state, {before.setting.path: kind}, actual.dtype
            )
            copy.step(before.setting, before.gradient, fresh=not before.state)
        except Exception:  # whatever a class from elsewhere raises when it is alone
            return False
        if not all(map(is_kept, copy.state.values())):  # lists of tensors, say: not kept
            return False
        moved = (actual - before.weights).abs()
        u = ROUNDING[actual.dtype]
        room = 64 * u * actual.abs().amax() + 1e-4 * moved.amax()
        return bool(((copy.weights - actual).abs() <= room).all())
