"""Torch's own optimizer takes the steps again, for a copy of one parameter.

An optimizer is made as unpickling makes it: no constructor runs, the class is given its group, its
defaults and what it remembered. So any deterministic class that treats each parameter by itself
replays, to the very bits, without being known here. Nothing named in a file is imported:
`torch.optim`'s classes are known by name, any other is handed in.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dualform.learning_rules.settings import Setting, class_path, path_of

Classes = Mapping[str, type[Optimizer]]
State = dict[str, Any]
"""What an optimizer remembers of one parameter: tensors, plain numbers, None."""


def classes(extra: Iterable[type[Optimizer]] | type[Optimizer] | None = None) -> Classes:
    """Name the classes that can replay: torch's, and those handed in (by their bare names too)."""
    known = {}
    for kind in vars(torch.optim).values():
        if isinstance(kind, type) and issubclass(kind, Optimizer) and kind is not Optimizer:
            known[path_of(kind)] = kind
    for kind in [extra] if isinstance(extra, type) else extra or ():
        known |= {kind.__qualname__.rpartition(".")[2]: kind, path_of(kind): kind}
        known.setdefault(class_path(kind), kind)
    return known


def class_of(path: str, known: Classes) -> type[Optimizer] | None:
    """Find the class a setting names; one handed in may have moved to another module."""
    bare = path.rpartition(".")[2]
    if path.startswith("torch.optim."):
        found = getattr(torch.optim, bare, None)
        return known.get(path) or (found if isinstance(found, type) else None)
    return known.get(path) or known.get(bare)


def optimizer_of_one(
    kind: type[Optimizer], setting: Setting, parameter: Tensor, state: State | None
) -> Optimizer:
    """Make an optimizer of one parameter that remembers `state`, as unpickling would make it."""
    optimizer = kind.__new__(kind)
    remembered: defaultdict[Tensor, State] = defaultdict(dict)
    if state:
        remembered[parameter] = state
    group = {**_own(setting.group, parameter), "params": [parameter]}
    defaults = _own(setting.defaults, parameter)
    optimizer.__setstate__({"defaults": defaults, "state": remembered, "param_groups": [group]})
    return optimizer


class OneParameter:
    """A copy of one parameter, moved step by step by the class that moved it in training.

    `weights` and `state` are valid until the next step. In another dtype than training's, what is
    remembered as tensors of the parameter's shape is converted; counters keep their dtype.
    """

    def __init__(
        self, weights: Tensor, state: Mapping[str, Any], known: Classes, dtype: torch.dtype
    ) -> None:
        self._parameter = nn.Parameter(weights.detach().to(dtype, copy=True), requires_grad=False)
        self._state = {name: converted(value, dtype) for name, value in state.items()}
        self._known = known
        self._optimizer: Optimizer | None = None
        self._setting: Setting | None = None

    @property
    def weights(self) -> Tensor:
        """The parameter as it is now."""
        return self._parameter.data

    @property
    def state(self) -> State:
        """What the optimizer remembers of it now."""
        return self._state

    def step(self, setting: Setting, gradient: Tensor, *, fresh: bool) -> None:
        """Take one step by this gradient, which may be overwritten."""
        if fresh:
            self._state = {}
        if self._optimizer is None or self._setting is None or setting.path != self._setting.path:
            kind = class_of(setting.path, self._known)
            if kind is None:
                raise LookupError(setting.path)
            self._optimizer = optimizer_of_one(kind, setting, self._parameter, self._state)
        elif setting is not self._setting:
            self._optimizer.param_groups[0].update(_own(setting.group, self._parameter))
        self._setting = setting
        if fresh:
            self._optimizer.state.clear()
        self._parameter.grad = gradient
        self._optimizer.step()
        self._state = self._optimizer.state[self._parameter]


def converted(value: Any, dtype: torch.dtype) -> Any:
    """Copy what an optimizer remembers into another precision; counters keep their own."""
    if not isinstance(value, Tensor):
        return value
    own = dtype if value.is_floating_point() and value.dim() else value.dtype
    return value.detach().to(own, copy=True)


def _own(values: Mapping[str, Any], parameter: Tensor) -> dict[str, Any]:
    """Copy settings, since an optimizer may change them; the CPU has no capturable steps."""
    found = {n: v.clone() if isinstance(v, Tensor) else v for n, v in values.items()}
    if found.get("capturable") and parameter.device.type == "cpu":
        found["capturable"] = False
    return found
