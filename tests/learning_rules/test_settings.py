"""Settings are read at every update, keep their types, and cost nothing where nothing changed."""

from __future__ import annotations

import json
import timeit
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from dualform.errors import MemoryFileError
from dualform.learning_rules import SeenSettings, Setting, class_path, read_setting


def parameters() -> list[nn.Parameter]:
    return [nn.Parameter(torch.randn(3, 3)) for _ in range(3)]


def test_settings_that_come_again_are_one() -> None:
    optimizer = torch.optim.SGD(parameters(), lr=0.1, momentum=0.9)
    group, seen = optimizer.param_groups[0], SeenSettings()
    places = []
    for lr in (0.1, 0.1, 0.2, 0.1):
        group["lr"] = lr
        places.append(seen.index(optimizer, group))
    assert places == [0, 0, 1, 0]
    again = SeenSettings(Setting.from_json(s.to_json()) for s in seen.settings)
    assert again.index(optimizer, group) == 0


@pytest.mark.parametrize("foreign", [False, True])
def test_a_learning_rate_held_by_a_tensor_is_compared_by_value(foreign: bool) -> None:
    lr = torch.tensor(0.1)
    optimizer = torch.optim.AdamW(parameters(), lr=lr)
    if foreign:
        optimizer.param_groups[0]["mask"] = torch.ones(3)  # tensors of several entries
    seen, group = SeenSettings(), optimizer.param_groups[0]
    assert [seen.index(optimizer, group) for _ in range(2)] == [0, 0]
    lr.fill_(0.2)
    assert seen.index(optimizer, group) == 1
    assert float(seen.settings[0]["lr"]) == pytest.approx(0.1)
    assert seen.settings[1].left_out == (("mask",) if foreign else ())


def test_a_list_changed_in_place_is_another_setting() -> None:
    optimizer = torch.optim.SGD(parameters(), lr=0.1)
    group, seen = optimizer.param_groups[0], SeenSettings()
    group["ratios"] = [1.0, 2.0]
    seen.index(optimizer, group)
    group["ratios"][0] = 3.0
    assert seen.index(optimizer, group) == 1
    assert seen.settings[0]["ratios"] == [1.0, 2.0]


def test_two_optimizers_and_other_classes_are_told_apart() -> None:
    seen = SeenSettings()
    for make in (torch.optim.Adam, torch.optim.AdamW, torch.optim.Adam):
        optimizer = make(parameters(), lr=0.1, weight_decay=0.0)
        seen.index(optimizer, optimizer.param_groups[0])
    paths = [s.path for s in seen.settings]
    assert paths == ["torch.optim.adam.Adam", "torch.optim.adamw.AdamW"]


def test_types_and_dtypes_survive_a_file() -> None:
    group: dict[str, Any] = {
        "none": None, "flag": True, "whole": 1, "real": 0.1, "text": "a", "pair": (0.9, [1, 2.0]),
        "lr": torch.tensor(0.1), "double": torch.tensor(0.1, dtype=torch.float64),
        "count": torch.tensor(3), "one": torch.tensor([0.5]), "endless": float("inf"),
        "numpy": np.float32(0.1), "dict": {"a": (1,)},
    }  # fmt: skip
    optimizer = torch.optim.SGD([{"params": parameters(), **group, "f": print}], lr=1.0)
    optimizer.param_groups[0]["initial_lr"] = 0.3
    setting = read_setting(optimizer, optimizer.param_groups[0])
    read = Setting.from_json(json.loads(json.dumps(setting.to_json(), allow_nan=False)))
    assert setting.left_out == read.left_out == ("f",)
    for found, wanted in ((read.group, setting.group), (read.defaults, setting.defaults)):
        assert list(found) == list(wanted)
        for name, value in wanted.items():
            assert type(found[name]) is type(value), name
            if isinstance(value, Tensor):
                assert (found[name].dtype, found[name].shape) == (value.dtype, value.shape)
            assert found[name] == value, name
    assert "initial_lr" not in read.defaults


@pytest.mark.parametrize("given", [None, {}, {"path": 3}, [1], {"path": "a", "group": {"x": {}}}])
def test_damaged_settings_are_refused(given: Any) -> None:
    with pytest.raises(MemoryFileError, match="settings in this memory cannot be read"):
        Setting.from_json(given)


def test_a_subclass_that_changes_nothing_is_torchs_own_rule() -> None:
    class Same(torch.optim.SGD):
        def __init__(self, params: Any) -> None:
            super().__init__(params, lr=0.5)

    class Other(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            return super().step(closure)

    class Inside(torch.optim.Adam):
        def _init_group(self, *args: Any) -> Any:
            return super()._init_group(*args)

    for _ in range(2):  # torch wraps `step` when the first is made
        assert class_path(Same) == "torch.optim.sgd.SGD"
        assert class_path(Other).endswith("Other")
        assert class_path(Inside).endswith("Inside")
        Same(parameters()), Other(parameters(), lr=0.1), Inside(parameters())
    assert class_path(torch.optim.AdamW) == "torch.optim.adamw.AdamW"


def test_reading_what_did_not_change_costs_a_microsecond_or_two() -> None:
    optimizer = torch.optim.AdamW(parameters(), lr=1e-3)
    group, seen = optimizer.param_groups[0], SeenSettings()
    seen.index(optimizer, group)
    taken = min(timeit.repeat(lambda: seen.index(optimizer, group), number=2000, repeat=7)) / 2000
    assert taken < 10e-6  # 0.4 where nothing else runs
