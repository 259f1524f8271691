"""The settings of an update: which class took the step, and by which numbers.

They are read for every parameter group at every update, on the training thread. Why it is hard: a
setting may change at any update (a schedule, an optimizer that counts in its group), the same
number may be another float or the same tensor with another value, and reading must cost a
microsecond or two when nothing changed. Replaying to the bit needs types as well: a learning rate
held by a float32 tensor rounds otherwise than a Python float.
"""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

from dualform.errors import MemoryFileError

NOT_SETTINGS = {"params", "param_names"}
"""What a parameter group holds besides settings."""

REMEMBERED = 256
"""How many groups are remembered as they were last read."""


@dataclass(frozen=True, eq=False)
class Setting:
    """One parameter group as it was at an update: the class's path, its numbers, its defaults.

    `left_out` names what cannot be kept as JSON; a rule that needs it cannot be replayed.
    """

    path: str
    group: dict[str, Any]
    defaults: dict[str, Any]
    left_out: tuple[str, ...] = ()

    def __getitem__(self, name: str) -> Any:
        return self.group[name]

    @property
    def rate(self) -> float | Tensor:
        """The learning rate to compute with: one held by a tensor rounds to its own precision."""
        rate: float | Tensor = self.group["lr"]
        return rate

    def number(self, name: str, default: float = 0.0) -> float:
        """A setting as a plain number; what is absent or None is the default."""
        value = self.group.get(name)
        return default if value is None else float(value)

    def to_json(self) -> dict[str, Any]:
        """Everything in plain values, types and dtypes kept; of the defaults, what differs."""
        own = {
            name: value
            for name, value in self.defaults.items()
            if name not in self.group or _text(self.group[name]) != _text(value)
        }
        return {
            "path": self.path,
            "group": {name: _to_json(value) for name, value in self.group.items()},
            "defaults": {name: _to_json(value) for name, value in own.items()},
            "without_default": [name for name in self.group if name not in self.defaults],
            "left_out": list(self.left_out),
        }

    @classmethod
    def from_json(cls, given: Any) -> Setting:
        """Read what `to_json` wrote."""
        try:
            group, own = ({n: _from_json(v) for n, v in given[k].items()} for k in _DICTS)
            shared = {n: v for n, v in group.items() if n not in given["without_default"]}
            path, left_out = given["path"], tuple(given["left_out"])
            if not isinstance(path, str) or not all(isinstance(name, str) for name in left_out):
                raise TypeError("path and left_out are text")
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise MemoryFileError(
                f"an optimizer's settings in this memory cannot be read ({error!r}): "
                f"{given!r:.200}. The file is damaged or was written by another program"
            ) from error
        return cls(path, group, shared | own, left_out)


_DICTS = ("group", "defaults")
_PLAIN = {type(None), bool, int, float, str}


class SeenSettings:
    """Every setting an optimizer's groups have had, once, in the order they were first seen.

    `settings` is the list a memory keeps; `index` finds a group's place in it.
    """

    def __init__(self, settings: Iterable[Setting] = ()) -> None:
        self.settings = list(settings)
        self._places = {_key(s): i for i, s in enumerate(self.settings)}
        self._last: dict[int, tuple[list[Any], int]] = {}

    def index(self, optimizer: Optimizer, group: dict[str, Any]) -> int:
        """Find the place of the group's settings as they are now; new ones are appended."""
        if id(group) in self._last:
            before, place = self._last[id(group)]
            before[2]["params"] = group["params"]  # one list is equal to itself at once
            try:
                if before == [type(optimizer), optimizer.defaults, group]:
                    return place  # tensors were compared by value: what is remembered are copies
            except (RuntimeError, ValueError):  # tensors of several entries have no truth
                pass
        setting = read_setting(optimizer, group)
        place = self._places.setdefault(_key(setting), len(self.settings))
        if place == len(self.settings):
            self.settings.append(setting)
        if len(self._last) >= REMEMBERED:
            self._last.clear()
        copied = {name: _copy(value) for name, value in group.items() if name != "params"}
        self._last[id(group)] = [type(optimizer), dict(optimizer.defaults), copied], place
        return place


def read_setting(optimizer: Optimizer, group: Mapping[str, Any]) -> Setting:
    """Read one parameter group as it is now."""
    found, left_out = _kept(group)
    return Setting(class_path(type(optimizer)), found, _kept(optimizer.defaults)[0], left_out)


def _kept(values: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Copy what can be kept as JSON; name what cannot."""
    settings = {name: value for name, value in values.items() if name not in NOT_SETTINGS}
    kept = {name: _copy(value) for name, value in settings.items() if _is_kept(value)}
    return kept, tuple(name for name in settings if name not in kept)


def class_path(kind: type[Optimizer]) -> str:
    """Name the class whose rule is in force: torch's own, where a subclass changes nothing of it.

    torch wraps `step` anew in every class it is called of, so functions are compared unwrapped.
    """
    for known in kind.__mro__:
        if known.__module__.startswith("torch.optim") and known is not Optimizer:
            own = [n for n, f in vars(known).items() if inspect.isfunction(f) and n != "__init__"]
            same = (_unwrapped(kind, n) is _unwrapped(known, n) for n in {*own, "step"})
            return path_of(known) if all(same) else path_of(kind)
    return path_of(kind)


def path_of(kind: type) -> str:
    """Name a class by module and qualified name."""
    return f"{kind.__module__}.{kind.__qualname__}"


def _unwrapped(kind: type, name: str) -> Any:
    return inspect.unwrap(getattr(kind, name))


def _copy(value: Any) -> Any:
    """Copy what could change in place."""
    if isinstance(value, Tensor):
        return value.detach().cpu().clone()
    if isinstance(value, list):
        return [_copy(v) for v in value]
    if isinstance(value, dict):
        return {name: _copy(v) for name, v in value.items()}
    return value


def _is_kept(value: Any) -> bool:
    if type(value) in _PLAIN:
        return True
    if isinstance(value, list | tuple):
        return type(value) in (list, tuple) and all(map(_is_kept, value))
    if isinstance(value, dict):
        return all(isinstance(n, str) and _is_kept(v) for n, v in value.items())
    if isinstance(value, Tensor):
        return value.numel() == 1 and not value.is_complex()
    return isinstance(value, bool | int | float | str | np.bool_ | np.number)


def _key(setting: Setting) -> str:
    return _text([setting.path, setting.group, setting.defaults])


def _text(value: Any) -> str:
    """Turn a setting into text, which differs where value or type of a number do."""
    return json.dumps(value, default=_to_json)


def _to_json(value: Any) -> Any:
    if isinstance(value, Tensor):
        dtype = str(value.dtype).removeprefix("torch.")
        return {"tensor": _to_json(value.item()), "dtype": dtype, "shape": list(value.shape)}
    if isinstance(value, np.generic) and type(value) is not np.float64:
        return {"numpy": _to_json(value.item()), "dtype": value.dtype.name}
    if isinstance(value, tuple):
        return {"tuple": [_to_json(v) for v in value]}
    if isinstance(value, list):
        return [_to_json(v) for v in value]
    if isinstance(value, dict):
        return {"dict": {name: _to_json(v) for name, v in value.items()}}
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"float": str(float(value))}
    return value


def _from_json(given: Any) -> Any:
    if isinstance(given, list):
        return [_from_json(v) for v in given]
    if not isinstance(given, dict):
        return given
    if "tuple" in given:
        return tuple(_from_json(v) for v in given["tuple"])
    if "tensor" in given:
        dtype = getattr(torch, given["dtype"])
        return torch.tensor(_from_json(given["tensor"]), dtype=dtype).reshape(given["shape"])
    if "numpy" in given:
        return np.dtype(given["dtype"]).type(_from_json(given["numpy"]))
    if "dict" in given:
        return {name: _from_json(v) for name, v in given["dict"].items()}
    return float(given["float"])
