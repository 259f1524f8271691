"""A run that is resumed equals one that was never interrupted, wherever its checkpoint stands.

The same batches are trained twice: in one go, and in parts with checkpoints in between. Weights
must come out the same to the last bit, and so must what the two memories hold.
"""

from __future__ import annotations

import contextlib
import copy
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.recording.rules import Lion
from tests.recording.runs import (
    MOMENTUM,
    Training,
    backward,
    network,
    plain,
    proved,
    state_of,
    verified,
)
from torch import nn
from torch.optim import SGD, Adagrad, AdamW

from dualform.certificate.report import BITS, KEPT, ROUNDED
from dualform.errors import RecordingError
from dualform.memory import Memory
from dualform.recording import record

KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "SGD": (SGD, MOMENTUM),
    "AdamW": (AdamW, {"lr": 0.01}),
    "Adagrad": (Adagrad, {"lr": 0.05}),
    "Lion": (Lion, {"lr": 0.003}),
}
STORED = {"float32": BITS, "float16": ROUNDED, "bfloat16": ROUNDED}
FIRST, STEPS = 20, 26


def assert_same_content(one: Memory, other: Memory) -> None:
    """Patterns, columns, log and buffers are equal to the last bit."""
    assert (one.steps, one.layers, one.columns) == (other.steps, other.layers, other.columns)
    assert one.parameters == other.parameters
    for name in one.layers:
        mine, theirs = one.layer(name), other.layer(name)
        if mine.keep == "patterns":
            assert torch.equal(mine.keys, theirs.keys)
            assert torch.equal(mine.error_signals, theirs.error_signals)
        for column in one.columns:
            assert mine.patterns[column].tolist() == theirs.patterns[column].tolist(), column
    for name in one.parameters:
        mine, theirs = dict(vars(one.log(name))), vars(other.log(name))
        for one_setting, other_setting in zip(mine.pop("setting"), theirs["setting"], strict=True):
            assert one.settings[one_setting].group == other.settings[other_setting].group
        for entry, values in mine.items():
            here = mine["explained"] if entry in ("carried", "kappa") else slice(None)
            room = 1e-6 if entry == "kappa" else 0.0  # sums depend on where rows lie in memory
            same = np.allclose(values[here], theirs[entry][here], rtol=room, atol=0, equal_nan=True)
            assert same, entry
    for name in one.buffers:
        for step in range(one.steps + 1):
            assert torch.equal(one.buffer(name, step), other.buffer(name, step))


def check_resumed(
    place: Path, make: Callable[[], Training], back_to: int, verdict: str = BITS, **options: Any
) -> Memory:
    """All steps in one go, against `FIRST` of them, the checkpoint of `back_to`, and the rest."""
    whole, parts = make(), make()
    uninterrupted = whole.record(place / "whole", 0, STEPS, **options)
    parts.record(place / "parts", 0, FIRST, **options)
    parts.load(back_to)
    resume = True if back_to else "rewind"
    memory = parts.record(place / "parts", back_to, STEPS, resume=resume, **options)
    for name, value in whole.model.state_dict().items():
        assert torch.equal(value, parts.model.state_dict()[name]), name
    assert_same_content(memory, uninterrupted)
    assert [r for r in memory.remarks if "not known to be linear" not in r] == []
    if verdict == BITS:
        parts.proved(place / "parts")
    elif verdict == KEPT:
        assert verified(memory, parts.model).passed
    last = memory.phases[-1]
    assert (last.first_step, last.began) == (back_to, "resumed")
    assert last.rewound_from == (FIRST if back_to < FIRST else None)
    return memory


@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("back_to", [FIRST, 13, 0])
def test_a_resumed_run_equals_an_uninterrupted_one(
    kind: str, stored: str, back_to: int, tmp_path: Path
) -> None:
    check_resumed(tmp_path, lambda: Training(*KINDS[kind]), back_to, STORED[stored], dtype=stored)


@pytest.mark.parametrize("segment_bytes", [1, 6000])
@pytest.mark.parametrize("back_to", [FIRST, 19, 7])
def test_it_does_so_within_segments_and_between_them(
    back_to: int, segment_bytes: int, tmp_path: Path
) -> None:
    make = lambda: Training(clip=0.5)  # noqa: E731
    check_resumed(tmp_path, make, back_to, segment_bytes=segment_bytes)


@pytest.mark.parametrize("options", [{"keep": "keys"}, {"every": 3}, {"keep": "values"}])
def test_it_does_so_where_there_are_no_patterns(options: dict[str, Any], tmp_path: Path) -> None:
    check_resumed(tmp_path, lambda: Training(layers=plain), 13, KEPT, **options)


def test_a_run_resumed_twice_and_then_from_before_both(tmp_path: Path) -> None:
    whole, parts = Training(), Training()
    uninterrupted = whole.record(tmp_path / "whole", 0, STEPS)
    parts.record(tmp_path / "parts", 0, 15, segment_bytes=6000)
    for start, stop in ((11, 20), (18, STEPS)):
        parts.load(start)
        memory = parts.record(tmp_path / "parts", start, stop, resume=True)
    assert_same_content(memory, uninterrupted)
    assert [(p.first_step, p.began, p.rewound_from) for p in memory.phases] == [
        (0, "started", None), (11, "resumed", 15), (18, "resumed", 20),
    ]  # fmt: skip
    parts.load(5)
    memory = parts.record(tmp_path / "parts", 5, STEPS, resume=True)
    assert_same_content(memory, uninterrupted)
    assert [(p.first_step, p.rewound_from) for p in memory.phases] == [(0, None), (5, STEPS)]


def test_one_script_serves_both_the_first_time_and_the_next(tmp_path: Path) -> None:
    training = Training()
    assert training.record(tmp_path / "run", 0, 0, resume=True).steps == 0
    assert training.record(tmp_path / "run", 0, 5, resume=True).steps == 5
    before = Memory.open(tmp_path / "run")
    assert_same_content(before, training.record(tmp_path / "run", 5, 5, resume=True))
    memory = training.record(tmp_path / "run", 5, 9, resume=True)
    assert [p.first_step for p in memory.phases] == [0, 0, 5, 5]
    training.proved(tmp_path / "run")


# -- other optimizers, other states ----------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("back_to", [FIRST, 13])
def test_a_second_phase_with_a_new_optimizer_stays_exact(
    kind: str, back_to: int, tmp_path: Path
) -> None:
    training = Training(*KINDS[kind])
    training.record(tmp_path / "run", 0, FIRST)
    training.load(back_to)
    training.kind = SGD
    training.new_optimizer(lr=0.2, momentum=0.5, nesterov=True)
    memory = training.record(tmp_path / "run", back_to, STEPS, resume=True)
    replaced = [e for e in memory.events if e.what == "replaced"]
    assert {e.step for e in replaced} == {back_to}
    assert any("another state of the optimizer" in remark for remark in memory.remarks)
    training.proved(tmp_path / "run")


def test_the_old_optimizer_may_come_back_after_a_new_one(tmp_path: Path) -> None:
    training = Training(*KINDS["Adagrad"])
    training.record(tmp_path / "run", 0, FIRST)
    for is_new in (True, False):
        training.load(13)
        if is_new:
            training.new_optimizer()
        memory = training.record(tmp_path / "run", 13, STEPS, resume=True)
    assert not memory.events
    training.proved(tmp_path / "run")


def test_of_steps_that_moved_nothing_the_last_is_gone_on_from(tmp_path: Path) -> None:
    """Weights alone say where a model is; another state of the optimizer is said to be that."""
    training = Training(AdamW, {"lr": 0.0}, layers=plain)
    training.record(tmp_path / "run", 0, 12)
    memory = training.record(tmp_path / "run", 12, 14, resume=True)
    assert memory.phases[-1].first_step == 12
    assert not memory.remarks
    training.load(7)
    memory = training.record(tmp_path / "run", 14, 15, resume=True)
    assert any("another state of the optimizer" in remark for remark in memory.remarks)


# -- refusals: nothing on disk has changed ---------------------------------------------------------


@pytest.fixture
def recorded(tmp_path: Path) -> tuple[Training, Path]:
    training = Training()
    training.record(tmp_path / "run", 0, 12)
    return training, tmp_path / "run"


def refused(training: Training, path: Path, message: str, **options: Any) -> None:
    before = {f.name: f.read_bytes() for f in path.rglob("*") if f.is_file()}
    recorder = record(training.model, path, **({"resume": True} | options))
    with pytest.raises(RecordingError, match=message):
        recorder.__enter__()
    assert before == {f.name: f.read_bytes() for f in path.rglob("*") if f.is_file()}


@pytest.mark.parametrize("edit", [1e-3, 1e-6, float("nan")])
def test_weights_of_no_recorded_step_are_refused(
    edit: float, recorded: tuple[Training, Path]
) -> None:
    training, path = recorded
    with torch.no_grad():
        training.model[1].weight.mul_(1 + edit)  # type: ignore[index]
    refused(training, path, "none of the 13 states recorded.*Load the checkpoint")


def wider() -> nn.Module:
    model = network()
    model[4] = nn.Linear(9, 5)
    return model


def with_more() -> nn.Module:
    model = network()
    model.append(nn.Linear(4, 4))
    return model


def renamed() -> nn.Module:
    return nn.ModuleDict({"net": network()})


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        (wider, r"the parameter '4.weight' is torch.float32 \[5, 9\] now and"),
        (with_more, "has a parameter '5.weight' that was not recorded"),
        (renamed, "lacks the parameter '0.weight'"),
        (lambda: network(torch.float64), r"is torch.float64 \[6\] now"),
    ],
)
def test_another_network_is_refused_by_its_first_difference(
    layers: Any, message: str, recorded: tuple[Training, Path]
) -> None:
    _, path = recorded
    refused(Training(layers=layers), path, message)


def test_a_forgotten_checkpoint_does_not_cost_the_memory(recorded: tuple[Training, Path]) -> None:
    training, path = recorded
    training.load(0)
    refused(training, path, r'all of the 12 steps.*resume="rewind"')
    memory = training.record(path, 0, 5, resume="rewind")
    assert [(p.began, p.rewound_from) for p in memory.phases] == [
        ("started", None), ("resumed", 12),
    ]  # fmt: skip
    training.proved(path)


def test_without_resume_the_error_offers_it(recorded: tuple[Training, Path]) -> None:
    training, path = recorded
    refused(training, path, "resume=True", resume=False)


def test_a_memory_that_is_being_written_is_refused(tmp_path: Path) -> None:
    training = Training()
    with record(training.model, tmp_path / "run") as recorder:
        training.step(0, recorder)
        recorder.flush()
        with pytest.raises(RecordingError, match="is being recorded into"):
            record(training.model, tmp_path / "run", resume=True).__enter__()
        training.step(1, recorder)
    assert training.proved(tmp_path / "run").steps == 2


# -- tags, files -----------------------------------------------------------------------------------


def test_tags_go_on_with_their_kinds_and_strings(recorded: tuple[Training, Path]) -> None:
    training, path = recorded
    training.load(10)
    with record(training.model, path, resume=True) as recorder:
        recorder.tag(example=range(5), task="third")
        training.step(10)
        recorder.tag(example=range(5), task="early")
        training.step(11)
        with pytest.raises(RecordingError, match="'task' was of kind string"):
            recorder.tag(example=range(5), task=7)
    tasks = Memory.open(path).layer("1").patterns["task"].reshape(12, 5)[:, 0].tolist()
    assert tasks == ["early"] * 10 + ["third", "early"]


def test_a_forgotten_tag_is_found_after_a_resume_as_it_is_before(
    recorded: tuple[Training, Path],
) -> None:
    training, path = recorded
    with (
        pytest.raises(RecordingError, match="that was not tagged, though earlier"),
        record(training.model, path, resume=True),
    ):
        training.step(12)
    assert Memory.open(path).steps == 12


class Power(Exception):
    """The power went off."""


def test_a_crash_at_any_point_of_going_back_leaves_the_memory_before_or_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Raises at each file operation of the cut in turn; afterwards all are tried once more."""
    training, seen, done = Training(layers=plain), set(), False
    for call in range(1, 100):
        path, left = tmp_path / str(call), [call]
        training.load(0)
        training.record(path, 0, 12, segment_bytes=6000)
        training.load(7)

        def counted(inner: Any, left: list[int] = left) -> Any:
            def operation(*args: Any, **kwargs: Any) -> Any:
                left[0] -= 1
                if left[0] == 0:
                    raise Power
                return inner(*args, **kwargs)

            return operation

        with monkeypatch.context() as patch:
            for name in ("write", "fsync", "replace", "ftruncate", "pwrite", "unlink", "mkdir"):
                patch.setattr(os, name, counted(getattr(os, name)))
            recorder = record(training.model, path, resume=True)
            with contextlib.suppress(Power):
                recorder.__enter__()
                done = True
        if done:
            recorder.__exit__(None, None, None)
        memory = Memory.open(path)
        seen.add(memory.steps)
        assert not memory.is_being_recorded
        assert verified(memory).passed
        training.record(path, 7, 9, resume=True)
        training.proved(path)
        if done:
            break
    assert done
    assert call > 3
    assert seen <= {7, 12}


@pytest.mark.parametrize("kind", [SGD, AdamW])
@pytest.mark.parametrize("optimizers", [1, 2])
def test_what_is_not_moved_at_first_after_a_resume_has_the_same_optimizer(
    optimizers: int, kind: Any, tmp_path: Path
) -> None:
    """A critic's turn, a layer frozen at times: nobody moves it until the fourth step."""
    settings = {"lr": 0.01} if kind is AdamW else MOMENTUM

    def made() -> tuple[nn.Sequential, list[Any]]:
        model = plain()
        parts = [model] if optimizers == 1 else [model[0], model[2]]
        return model, [kind(part.parameters(), **settings) for part in parts]

    model, moving = made()
    states = {0: state_of(model)}
    for first, last in ((0, 2), (2, 3), (3, 9)):
        checkpoint = copy.deepcopy((model.state_dict(), [o.state_dict() for o in moving]))
        model, moving = made()
        model.load_state_dict(checkpoint[0])
        for optimizer, state in zip(moving, checkpoint[1], strict=True):
            optimizer.load_state_dict(state)
        with record(model, tmp_path / "run", resume=True) as recorder:
            for step in range(first, last):
                is_turn = step in (0, 1, 6, 8)
                model[2].requires_grad_(is_turn)
                backward(model, step)
                for optimizer in moving if is_turn else moving[:1]:
                    optimizer.step()
                    optimizer.zero_grad()
                states[recorder.steps] = state_of(model)
    memory = proved(tmp_path / "run", model, states)
    assert not memory.events
    assert not memory.remarks
