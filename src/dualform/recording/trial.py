"""Does a copy of one parameter, moved by the same class, go where training went?

That is what replaying needs of an optimizer: it is deterministic and treats each parameter by
itself. torch's own do. Of a class from elsewhere the first two updates are replayed at once; where
they differ by more than rounding (a global norm, a step size shared by all parameters), its
parameters are kept as values.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor
from torch.optim import Optimizer

from dualform.certificate.bounds import ROUNDING
from dualform.learning_rules import OneParameter, Setting, rule_of
from dualform.learning_rules.settings import path_of
from dualform.recording.findings import Findings
from dualform.recording.kept import is_kept
from dualform.recording.watched import BY_HAND, Watch, Watched

TRIALS = 2
KEPT_STATES_ONLY = {"torch.optim.lbfgs.LBFGS", "torch.optim.sparse_adam.SparseAdam"}


class ByHand(Optimizer):
    """The loop itself, where it moves parameters in `with recorder.update():`."""

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        super().__init__(parameters, {})


HAND = path_of(ByHand)
ALONE = (
    "cannot be replayed parameter by parameter: what it does to one depends on others, on chance "
    "or on several gradients"
)


class Trial:
    """The first updates of every optimizer that is not torch's own."""

    def __init__(self, watch: Watch, findings: Findings) -> None:
        self._watch, self._findings = watch, findings
        self._done: dict[str, int] = {}
        self._path = HAND
        """By which class the update that is under way is made."""
        self._copies: list[tuple[Watched, Setting, OneParameter, Tensor]] = []

    def begin(self, optimizer: Optimizer, moving: list[Watched], settings: list[Setting]) -> None:
        """Copy what an update of a class from elsewhere starts from."""
        self._copies = []
        path = self._path = settings[0].path
        if path == HAND:
            self._make_values(moving, BY_HAND)
        elif path in KEPT_STATES_ONLY:
            self._make_values(moving, f"{path} {ALONE}")
        elif not path.startswith("torch.optim.") and self._done.get(path, 0) < TRIALS:
            self._done[path] = self._done.get(path, 0) + 1
            for w, setting in zip(moving, settings, strict=True):
                state, classes = optimizer.state.get(w.tensor) or {}, {path: type(optimizer)}
                copy = OneParameter(w.tensor, state, classes, w.tensor.dtype)
                assert w.tensor.grad is not None
                self._copies.append((w, setting, copy, w.tensor.grad.detach().clone()))

    def end(self) -> None:
        """Take the same update with copies; parameters that go elsewhere are values."""
        if self._path != HAND and rule_of(self._path) is None:
            self._findings.remark(
                f"{self._path} is not known to be linear in its gradients: verify, at and attend "
                "work; contributions and masks do not reach what it moved"
            )
        copies, self._copies = self._copies, []
        if not all(_goes_there(*copied) for copied in copies):
            self._make_values([w for w, *_ in copies], f"{copies[0][1].path} {ALONE}")

    def _make_values(self, watched: list[Watched], why: str) -> None:
        for w in watched:
            if self._watch.resolved[w.index]:
                self._watch.make_values(w, why)


def _goes_there(w: Watched, setting: Setting, copy: OneParameter, gradient: Tensor) -> bool:
    actual, before = w.tensor.detach(), copy.weights.clone()
    try:
        copy.step(setting, gradient, fresh=not copy.state)
    except Exception:  # whatever a class from elsewhere raises when it is alone
        return False
    if not all(map(is_kept, copy.state.values())):  # lists of tensors, say: not kept
        return False
    room = 64 * ROUNDING[actual.dtype] * actual.abs().amax() + 1e-4 * (actual - before).abs().amax()
    return bool(((copy.weights - actual).abs() <= room).all())
