"""A run that is resumed equals one that was never interrupted, wherever its checkpoint stands.

Every test trains the same batches twice: once in one go, and once in parts with checkpoints
(state_dict copies) in between. Weights must come out the same to the last bit, and so must what
the two memories hold.
"""

from __future__ import annotations

import copy
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from click.testing import CliRunner
from tests.memory.runs import TASKS, Trainers, assert_sound, make_model, reference, trainers
from tests.memory.runs import batch as small_batch
from tests.memory.runs import update as small_update
from torch import Tensor, nn

import dualform as df
from dualform.cli import main
from dualform.layers import find_layers
from dualform.recording import matching, walking
from dualform.recording.parameters import Parameters

SMALL = 6000
"""Bytes per segment: a commit every few steps."""

SGD = dict[str, Any]
PLAIN: SGD = {"lr": 0.1}
MOMENTUM: SGD = {"lr": 0.05, "momentum": 0.9, "weight_decay": 1e-3}
NESTEROV: SGD = {"lr": 0.05, "momentum": 0.8, "nesterov": True, "weight_decay": 1e-2}
DAMPENED: SGD = {"lr": 0.05, "momentum": 0.9, "dampening": 0.3, "maximize": True}
RULES = {"plain": PLAIN, "momentum": MOMENTUM, "nesterov": NESTEROV, "dampened": DAMPENED}


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def the_same_probes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Factors κ are measured along random probes: two recordings agree to the last bit only so."""
    real = np.random.SeedSequence
    monkeypatch.setattr(np.random, "SeedSequence", lambda: real(5))


def network() -> nn.Sequential:
    """Linear layers, step-level parameters (norms), buffers (BatchNorm)."""
    return nn.Sequential(
        nn.BatchNorm1d(6), nn.Linear(6, 9), nn.Tanh(), nn.LayerNorm(9), nn.Linear(9, 4)
    ).double()


@dataclass
class Training:
    """A training whose every step depends on its number alone, with a checkpoint of every step."""

    sgd: SGD
    dtype: torch.dtype = torch.float64
    clip: float | None = None
    microbatches: int = 1
    layers: Callable[[], nn.Module] = network
    tags: Callable[[int], dict[str, Any]] = lambda step: {
        "example": np.arange(5) + step,
        "task": "early" if step < 12 else "late",
    }
    kept: dict[int, tuple[dict[str, Any], dict[str, Any]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.model = self.new_model()
        self.new_optimizer(**self.sgd)
        self.keep(0)

    def new_model(self) -> nn.Module:
        torch.manual_seed(3)
        return self.layers().to(self.dtype)

    def new_optimizer(self, **sgd: Any) -> None:
        self.optimizer = torch.optim.SGD(self.model.parameters(), **sgd)

    def keep(self, step: int) -> None:
        self.kept[step] = copy.deepcopy((self.model.state_dict(), self.optimizer.state_dict()))

    def load(self, step: int) -> None:
        """The checkpoint of a step, in a model and an optimizer of their own."""
        self.model = self.new_model()
        self.new_optimizer(**self.sgd)
        model, optimizer = copy.deepcopy(self.kept[step])
        self.model.load_state_dict(model)
        self.optimizer.load_state_dict(optimizer)

    def step(self, number: int, recorder: df.Recorder | None) -> None:
        self.optimizer.zero_grad()
        for part in range(self.microbatches):
            generator = torch.Generator().manual_seed(100 * number + part)
            inputs = torch.randn(5, 6, generator=generator, dtype=torch.float64).to(self.dtype)
            labels = torch.randint(0, 4, (5,), generator=generator)
            if recorder is not None:
                recorder.tag(**self.tags(number))
            nn.functional.cross_entropy(self.model(inputs), labels).backward()
        if self.clip is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        self.optimizer.step()
        self.keep(number + 1)

    def record(self, path: Path, start: int, stop: int, **options: Any) -> df.Memory:
        with df.record(self.model, self.optimizer, path, **options) as recorder:
            assert recorder.steps == start
            for number in range(start, stop):
                self.step(number, recorder)
        return df.Memory.open(path)

    def weights(self) -> dict[str, Tensor]:
        return {name: p.detach().clone() for name, p in self.model.named_parameters()}


def assert_same_content(one: df.Memory, other: df.Memory) -> None:
    """Patterns, columns, log, gradients and buffers are equal to the last bit."""
    assert (one.steps, one.layers, one.columns) == (other.steps, other.layers, other.columns)
    assert one.parameters == other.parameters
    assert one.buffers == other.buffers
    for name in one.layers:
        mine, theirs = one.layer(name), other.layer(name)
        assert torch.equal(mine.keys, theirs.keys)
        assert torch.equal(mine.error_signals, theirs.error_signals)
        for column in one.columns:
            assert mine.patterns[column].tolist() == theirs.patterns[column].tolist(), column
    for name, known in one.parameters.items():
        eps = torch.finfo(known.dtype).eps
        for entry, values in vars(one.log(name)).items():
            # κ is measured only where it could differ from 1 by more than it lately did
            allowed = 8 * eps if entry == "kappa" else 0.0
            assert np.allclose(values, getattr(other.log(name), entry), rtol=allowed, atol=0), entry
        pairs = zip(one.step_gradients(name), other.step_gradients(name), strict=True)
        assert all(s == t and torch.equal(a, b) for (s, a), (t, b) in pairs)
        assert known.coverage != "untrained"
    for name in one.buffers:
        for at in range(one.steps + 1):
            assert torch.equal(one.buffer(name, at), other.buffer(name, at))


def assert_same_fingerprints(one: df.Memory, other: df.Memory) -> None:
    """At all common steps, to the last bit: probes and predictions went on as they were."""
    theirs = {f.step: f for f in other.fingerprints}
    common = [f for f in one.fingerprints if f.step in theirs]
    assert common[-1].step == one.steps
    for seen in common:
        for kind in ("values", "momentum"):
            mine, known = getattr(seen, kind), getattr(theirs[seen.step], kind)
            assert mine.keys() == known.keys()
            assert all(torch.equal(mine[name], known[name]) for name in mine)
    for name in one.parameters:
        assert np.array_equal(one.audit_projections(name), other.audit_projections(name))


def assert_exact(memory: df.Memory, training: Training, steps: int) -> None:
    """The certificate passes, and every `at(step)` is the checkpoint of that step."""
    assert memory.exact
    assert memory.closed
    assert memory.remarks == ()
    memory.check()
    dual = df.DualForm(training.model, memory)
    certificate = dual.verify()
    assert certificate.passed, repr(certificate)
    bound = 1e-12 if training.dtype == torch.float64 else 64 * 1.2e-7
    for at in {0, 1, steps // 4, steps // 2, *(p.first_step for p in memory.phases), steps}:
        rebuilt = dual.at(at).weights(dtype=torch.float64)
        for name, value in rebuilt.items():
            checkpoint = training.kept[at][0][name].double()
            off = float((value - checkpoint).abs().max())
            assert off <= bound * max(1.0, float(checkpoint.abs().max())), (at, name, off)


def check_resumed(
    tmp_path: Path,
    make: Callable[[], Training],
    *,
    first: int = 25,
    back_to: int = 25,
    steps: int = 40,
    **options: Any,
) -> df.Memory:
    """`steps` in one go, against `first` steps, the checkpoint of `back_to`, and the rest."""
    whole = make()
    uninterrupted = whole.record(tmp_path / "whole", 0, steps, **options)
    parts = make()
    parts.record(tmp_path / "parts", 0, first, **options)
    parts.load(back_to)
    consent = True if back_to else "rewind"
    memory = parts.record(tmp_path / "parts", back_to, steps, resume=consent, **options)
    for name, value in whole.model.state_dict().items():
        assert torch.equal(value, parts.model.state_dict()[name]), name
    assert_same_content(memory, uninterrupted)
    assert_same_fingerprints(memory, uninterrupted)
    assert_exact(memory, parts, steps)
    resumed = memory.phases[-1]
    assert (resumed.first_step, resumed.began) == (back_to, "resumed")
    assert resumed.rewound_from == (first if back_to < first else None)
    return memory


# -- the resumed run equals an uninterrupted one ---------------------------------------------------


@pytest.mark.parametrize(
    ("back_to", "segment_bytes"),
    [
        (25, 1),
        (13, 1),
        (0, 1),
        (24, SMALL),
        (13, SMALL),
        (25, 1 << 24),
        (13, 1 << 24),
        (0, 1 << 24),
    ],
)
def test_a_resumed_run_equals_an_uninterrupted_one(
    tmp_path: Path, back_to: int, segment_bytes: int
) -> None:
    """At the end, within a segment, at the boundary of two (every step is one), at the start."""
    check_resumed(
        tmp_path, lambda: Training(MOMENTUM), back_to=back_to, segment_bytes=segment_bytes
    )


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("back_to", [25, 14])
def test_it_does_so_under_every_learning_rule_and_precision(
    tmp_path: Path, rule: str, dtype: torch.dtype, back_to: int
) -> None:
    check_resumed(tmp_path, lambda: Training(RULES[rule], dtype, clip=0.5), back_to=back_to)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_accumulated_micro_batches(tmp_path: Path, dtype: torch.dtype) -> None:
    check_resumed(tmp_path, lambda: Training(NESTEROV, dtype, microbatches=3), back_to=17)


def test_a_long_float32_run_with_its_checkpoint_between_distant_fingerprints(
    tmp_path: Path,
) -> None:
    check_resumed(
        tmp_path, lambda: Training(MOMENTUM, torch.float32), first=160, back_to=131, steps=170
    )


def test_a_run_resumed_twice(tmp_path: Path) -> None:
    whole = Training(MOMENTUM)
    uninterrupted = whole.record(tmp_path / "whole", 0, 40)
    parts = Training(MOMENTUM)
    parts.record(tmp_path / "parts", 0, 20, segment_bytes=SMALL)
    parts.load(11)
    parts.record(tmp_path / "parts", 11, 30, resume=True, segment_bytes=SMALL)
    parts.load(27)
    memory = parts.record(tmp_path / "parts", 27, 40, resume=True)
    assert_same_content(memory, uninterrupted)
    assert_exact(memory, parts, 40)
    assert [(p.first_step, p.began, p.rewound_from) for p in memory.phases] == [
        (0, "started", None),
        (11, "resumed", 20),
        (27, "resumed", 30),
    ]
    parts.load(5)  # before the second phase: it never was
    memory = parts.record(tmp_path / "parts", 5, 40, resume=True)
    assert_same_content(memory, uninterrupted)
    assert [(p.first_step, p.rewound_from) for p in memory.phases] == [(0, None), (5, 40)]


def test_one_script_serves_both_the_first_time_and_the_next(tmp_path: Path) -> None:
    training = Training(MOMENTUM)
    assert training.record(tmp_path / "run", 0, 5, resume=True).steps == 5
    memory = training.record(tmp_path / "run", 5, 9, resume=True)
    assert [p.began for p in memory.phases] == ["started", "resumed"]
    assert_exact(memory, training, 9)


def test_nothing_recorded_after_a_resume_leaves_the_memory_as_it_was(tmp_path: Path) -> None:
    training = Training(MOMENTUM)
    before = training.record(tmp_path / "run", 0, 8)
    after = training.record(tmp_path / "run", 8, 8, resume=True)
    assert_same_content(before, after)
    assert_exact(after, training, 8)


def test_tags_go_on_with_their_kinds_and_strings(tmp_path: Path) -> None:
    training = Training(PLAIN)
    training.record(tmp_path / "run", 0, 20, segment_bytes=SMALL)
    training.load(10)
    training.tags = lambda step: {"example": np.arange(5), "task": "third" if step % 2 else "early"}
    memory = training.record(tmp_path / "run", 10, 16, resume=True)
    seen = memory.layer("1").patterns["task"].reshape(16, 5)[:, 0].tolist()
    assert seen == ["early"] * 10 + ["early", "third"] * 3
    training.tags = lambda step: {"example": np.arange(5), "task": 7}
    with pytest.raises(df.RecordingError, match="'task' was of kind string"):
        training.record(tmp_path / "run", 16, 17, resume=True)


def test_a_column_first_given_after_the_cut_is_forgotten(tmp_path: Path) -> None:
    training = Training(PLAIN)
    training.tags = lambda step: {} if step < 6 else {"late": step}
    training.record(tmp_path / "run", 0, 12)
    training.load(5)
    training.tags = lambda step: {"other": 1.5}
    memory = training.record(tmp_path / "run", 5, 8, resume=True)
    assert "late" not in memory.columns
    assert np.array_equal(
        memory.layer("1").patterns["other"], np.repeat([np.nan, 1.5], [25, 15]), equal_nan=True
    )


def test_a_parameter_first_trained_after_the_cut_is_untrained_again(tmp_path: Path) -> None:
    def freeze(step: int, training: Training) -> None:
        for parameter in training.model[4].parameters():
            parameter.requires_grad_(step >= 6)

    training = Training(PLAIN)
    for path, start, stop in (("whole", 0, 12), ("parts", 0, 10), ("parts", 4, 12)):
        training.load(start)
        model, optimizer = training.model, training.optimizer
        with df.record(model, optimizer, tmp_path / path, resume=path == "parts") as recorder:
            for step in range(start, stop):
                freeze(step, training)
                training.step(step, recorder)
            recorder.flush()
    memory = df.Memory.open(tmp_path / "parts")
    assert_same_content(memory, df.Memory.open(tmp_path / "whole"))
    assert_exact(memory, training, 12)


# -- phases ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("back_to", [20, 13])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_second_phase_with_a_new_optimizer_stays_exact(
    tmp_path: Path, back_to: int, dtype: torch.dtype
) -> None:
    training = Training(MOMENTUM, dtype)
    training.record(tmp_path / "run", 0, 20)
    training.load(back_to)
    training.new_optimizer(lr=0.2, momentum=0.5, weight_decay=1e-2, nesterov=True)
    memory = training.record(tmp_path / "run", back_to, 35, resume=True)
    assert_exact(memory, training, 35)
    assert memory.phases[-1].momentum == "replaced"
    log = memory.log("1.weight")
    assert np.flatnonzero(log.fresh).tolist() == [0, back_to]
    assert log.lr[back_to - 1 : back_to + 1].tolist() == [0.05, 0.2]


def test_momentum_carried_over_is_said_in_the_phase(tmp_path: Path) -> None:
    training = Training(MOMENTUM)
    training.record(tmp_path / "run", 0, 5)
    memory = training.record(tmp_path / "run", 5, 9, resume=True)
    assert [p.momentum for p in memory.phases] == ["none", "carried over"]
    assert np.flatnonzero(memory.log("1.weight").fresh).tolist() == [0]


def test_masking_the_second_phase_gives_back_the_first_ones_share(tmp_path: Path) -> None:
    """Without decay, and with a fresh optimizer, what the first phase wrote stays as it was."""
    training = Training(PLAIN)
    training.tags = lambda step: {"task": "first" if step < 10 else "second"}
    training.record(tmp_path / "run", 0, 10)
    training.new_optimizer(lr=0.02)
    memory = training.record(tmp_path / "run", 10, 20, resume=True)
    masked = df.DualForm(training.model, memory).without(task="second").weights()
    for name in ("1.weight", "4.bias"):
        assert float((masked[name] - training.kept[10][0][name]).abs().max()) <= 1e-12


# -- parameters whose learned part alone is kept ---------------------------------------------------


def test_accumulated_parameters_go_on_where_their_sum_was_kept(tmp_path: Path) -> None:
    options = {"step_budget": 3000, "snapshot_every": 10}
    training = Training(MOMENTUM)
    memory = training.record(tmp_path / "run", 0, 25, **options)
    since = {p.accumulated_since for p in memory.parameters.values()} - {None}
    assert since
    assert max(filter(None, since)) < 20
    training.load(17)
    with pytest.raises(df.RecordingError, match=r"step 17, .* accumulated .* nearest .*\[12, 20\]"):
        training.record(tmp_path / "run", 17, 18, resume=True, **options)
    assert df.Memory.open(tmp_path / "run").steps == 25
    training.load(20)
    memory = training.record(tmp_path / "run", 20, 40, resume=True, **options)
    certificate = df.DualForm(training.model, memory).verify()
    assert certificate.passed, repr(certificate)
    for at in (20, 30, 40):
        rebuilt = df.DualForm(training.model, memory).at(at).weights()
        for name, value in rebuilt.items():
            assert float((value - training.kept[at][0][name]).abs().max()) <= 1e-12
    training.load(2)  # before anything was accumulated
    memory = training.record(tmp_path / "run", 2, 40, resume=True)
    assert {p.accumulated_since for p in memory.parameters.values()} == {None}
    assert_exact(memory, training, 40)


# -- what is refused, with nothing changed ---------------------------------------------------------


def content_of(path: Path) -> dict[str, bytes]:
    return {
        str(f.relative_to(path)): f.read_bytes()
        for f in sorted(path.rglob("*"))
        if f.is_file() and f.name != "writer.lock"
    }


@pytest.fixture
def recorded(tmp_path: Path) -> Iterator[tuple[Training, Path]]:
    """A run of 20 steps; whatever a test does must leave its files as they are."""
    training = Training(MOMENTUM)
    path = tmp_path / "run"
    training.record(path, 0, 20)
    before = content_of(path)
    yield training, path
    assert content_of(path) == before
    assert df.Memory.open(path).closed


def refused(training: Training, path: Path, match: str, **options: Any) -> None:
    with pytest.raises(df.RecordingError, match=match):
        df.record(training.model, training.optimizer, path, resume=True, **options).__enter__()


def test_other_weights_are_refused(recorded: tuple[Training, Path]) -> None:
    training, path = recorded
    training.load(20)
    with torch.no_grad():
        training.model[1].weight[2, 3] += 1e-6
    refused(training, path, r"not those of any step .* nearest is step 20, where they .* by \d")
    training.load(13)
    with torch.no_grad():
        training.model[3].weight[2] *= 1 + 1e-6
    refused(training, path, r"not those of any step .* steps 0 to 20, .* nearest is step 13, where")


def test_another_runs_momentum_is_refused(recorded: tuple[Training, Path]) -> None:
    training, path = recorded
    for step, other in ((20, 19), (13, 12)):
        training.load(step)
        training.optimizer.load_state_dict(training.kept[other][1])
        refused(training, path, rf"of step {step} .* momentum buffer of '0\.\w+' is neither")
    training.load(20)
    state = training.optimizer.state[training.model[4].bias]
    state["momentum_buffer"] = state["momentum_buffer"] * 1.001
    refused(training, path, r"momentum buffer of '4\.bias' is neither")


def test_another_architecture_is_refused(recorded: tuple[Training, Path]) -> None:
    training, path = recorded
    original = training.model

    def with_model(model: nn.Module, match: str) -> None:
        training.model = model
        training.new_optimizer(**MOMENTUM)
        refused(training, path, match)

    with_model(network().float(), r"'0\.weight' is torch\.float32 \[6\] now and torch\.float64")
    wider = network()
    wider[1] = nn.Linear(6, 8).double()
    with_model(wider, r"'1\.weight' is torch\.float64 \[8, 6\] now and torch\.float64 \[9, 6\]")
    with_model(nn.Sequential(*original[:4]), r"lacks the parameter '4\.weight'")
    with_model(nn.Sequential(*original, nn.Linear(4, 4)), r"has a parameter '5\.weight' that was")
    plain = nn.Sequential(nn.BatchNorm1d(6, track_running_stats=False).double(), *original[1:])
    with_model(plain, r"lacks the buffer '0\.running_mean'")


def test_other_layers_are_refused(recorded: tuple[Training, Path]) -> None:
    training, path = recorded
    refused(training, path, r"layer '4' is recorded there and would not be now", layers=["1"])


def test_overwriting_and_resuming_exclude_each_other(recorded: tuple[Training, Path]) -> None:
    training, path = recorded
    with pytest.raises(df.RecordingError, match=r"overwrite=True and resume=True"):
        df.record(training.model, training.optimizer, path, overwrite=True, resume=True)


def test_without_resume_the_error_offers_it(recorded: tuple[Training, Path]) -> None:
    training, path = recorded
    with pytest.raises(df.RecordingError, match="resume=True to go on"):
        df.record(training.model, training.optimizer, path).__enter__()


def test_a_memory_that_is_being_written_is_refused(tmp_path: Path) -> None:
    training = Training(MOMENTUM)
    with df.record(training.model, training.optimizer, tmp_path / "run") as recorder:
        training.step(0, recorder)
        recorder.flush()
        refused(training, tmp_path / "run", "is being recorded into by another process")
        training.step(1, recorder)
    assert df.Memory.open(tmp_path / "run").steps == 2


def test_a_memory_that_is_not_exact_is_gone_on_with_only_on_request(tmp_path: Path) -> None:
    training = Training(PLAIN)
    path = tmp_path / "run"

    def tamper() -> None:
        with df.record(training.model, training.optimizer, path, audit="warn") as recorder:
            training.step(0, recorder)
            with torch.no_grad():
                training.model[1].weight += 0.1
            training.step(1, recorder)

    with pytest.warns(UserWarning, match="not exact"):
        tamper()
    refused(training, path, r"is not exact \(.*audit=\"warn\"")
    memory = training.record(path, 2, 4, resume=True, audit="warn")
    assert not memory.exact


# -- steps that can hardly be told apart -----------------------------------------------------------


def test_weights_that_did_not_move_belong_to_the_step_that_the_momentum_says(
    tmp_path: Path,
) -> None:
    training = Training({"lr": 0.0, "momentum": 0.9})
    training.record(tmp_path / "run", 0, 20)
    training.load(11)
    memory = training.record(tmp_path / "run", 11, 22, resume=True)
    assert memory.phases[-1].first_step == 11


def test_weights_that_did_not_move_belong_to_the_last_step_for_a_new_optimizer(
    tmp_path: Path,
) -> None:
    training = Training({"lr": 0.0, "momentum": 0.9})
    training.record(tmp_path / "run", 0, 20)
    training.load(11)
    training.new_optimizer(lr=0.1)
    memory = training.record(tmp_path / "run", 20, 24, resume=True)
    assert df.DualForm(training.model, memory).verify().passed


def test_steps_that_rounding_cannot_tell_apart_are_refused_by_name(tmp_path: Path) -> None:
    training = Training({"lr": 1e-8}, torch.float32, layers=lambda: nn.Linear(6, 4))
    training.record(tmp_path / "run", 0, 20)
    training.load(11)
    refused(training, tmp_path / "run", r"could be those of any of the steps 1 to 19 .*flush\(\)")
    training.load(20)  # there a fingerprint tells it to the last digit
    training.record(tmp_path / "run", 20, 22, resume=True)


def test_the_patterns_alone_lead_to_the_step(tmp_path: Path) -> None:
    """Where the log's own projections are not looked at, and where there is nothing else."""
    training = Training(MOMENTUM, torch.float32)
    memory = training.record(tmp_path / "run", 0, 45)
    training.load(31)
    parameters = matching_parameters(training, memory)
    prints = matching._prints(memory, parameters)
    targets = [walking.Target(memory, watched) for watched in parameters]
    found = list(walking.walk(memory, targets, prints[0], prints[-1]))
    assert min(found, key=lambda c: c.distance).step == 31
    assert [c.step for c in found if c.distance <= 1] == [31]


def matching_parameters(training: Training, memory: df.Memory) -> Parameters:
    directions = {n: (memory.probe(n), memory.sketch(n)) for n in memory.parameters}
    model = training.model
    return Parameters(model, find_layers(model), [training.optimizer], directions)


# -- patterns in 16 bits ---------------------------------------------------------------------------


@pytest.mark.parametrize("stored", ["float16", "bfloat16"])
@pytest.mark.parametrize("rule", RULES)
def test_a_memory_in_16_bits_is_gone_on_with_from_any_step(
    tmp_path: Path, stored: str, rule: str
) -> None:
    """Between distant fingerprints, where only patterns and log lead to the step."""
    training = Training(RULES[rule], torch.float32)
    before = training.record(tmp_path / "run", 0, 45, dtype=stored)
    assert [f.step for f in before.fingerprints] == [45]
    for step in (44, 30, 12, 3):
        training.load(step)
        training.record(tmp_path / "run", step, step + 1, dtype=stored, resume=True)
        training.load(step + 1)
        memory = training.record(tmp_path / "run", step + 1, step + 1, dtype=stored, resume=True)
        assert df.DualForm(training.model, memory).verify().passed


@pytest.mark.parametrize("stored", ["float16", "bfloat16"])
def test_in_16_bits_wrong_weights_and_wrong_momentum_are_refused_all_the_same(
    tmp_path: Path, stored: str
) -> None:
    training = Training(MOMENTUM, torch.float32)
    training.record(tmp_path / "run", 0, 45, dtype=stored)
    options: dict[str, Any] = {"dtype": stored, "resume": True}
    training.load(30)
    _, training.kept[30][1]["state"] = None, training.kept[29][1]["state"]
    training.load(30)
    with pytest.raises(df.RecordingError, match=r"step 30 .*momentum buffer of .* is neither"):
        training.record(tmp_path / "run", 30, 30, **options)
    for edit in (1e-3, 1e-4):
        training.load(20)
        with torch.no_grad():
            next(iter(training.model.parameters())).mul_(1 + edit)
        with pytest.raises(df.RecordingError, match="not those of any step"):
            training.record(tmp_path / "run", 20, 20, **options)


# -- what must not go wrong in silence -------------------------------------------------------------


def test_a_forgotten_checkpoint_does_not_cost_the_memory(tmp_path: Path) -> None:
    training = Training(MOMENTUM)
    before = training.record(tmp_path / "run", 0, 12)
    training.load(0)
    with pytest.raises(df.RecordingError, match=r'all of the 12 steps.*resume="rewind"'):
        training.record(tmp_path / "run", 0, 5, resume=True)
    assert_same_content(before, df.Memory.open(tmp_path / "run"))
    training.load(1)  # a checkpoint that is behind needs no ceremony, however far
    training.record(tmp_path / "run", 1, 3, resume=True)
    training.load(0)
    memory = training.record(tmp_path / "run", 0, 5, resume="rewind")
    assert_exact(memory, training, 5)
    assert [(p.began, p.rewound_from) for p in memory.phases] == [("started", None), ("resumed", 3)]
    with pytest.raises(df.RecordingError, match="resume='yes' was given; expected"):
        df.record(training.model, training.optimizer, tmp_path / "run", resume="yes")


def test_a_memory_without_steps_is_gone_on_with_as_it_is(tmp_path: Path) -> None:
    training = Training(PLAIN)
    training.record(tmp_path / "run", 0, 0)
    assert training.record(tmp_path / "run", 0, 3, resume=True).steps == 3


def test_a_forgotten_tag_is_found_after_a_resume_as_it_is_before(tmp_path: Path) -> None:
    training = Training(PLAIN)
    training.record(tmp_path / "run", 0, 6)
    with (
        pytest.raises(df.RecordingError, match=r"at step 6 that was not tagged, though earlier"),
        df.record(training.model, training.optimizer, tmp_path / "run", resume=True),
    ):
        training.step(6, None)
    assert df.Memory.open(tmp_path / "run").steps == 6
    untagged = Training(PLAIN)
    for start, stop in ((0, 3), (3, 5)):
        with df.record(untagged.model, untagged.optimizer, tmp_path / "free", resume=True):
            for number in range(start, stop):
                untagged.step(number, None)
    assert df.Memory.open(tmp_path / "free").steps == 5


def test_every_resume_is_told_whether_it_trained_or_not(tmp_path: Path) -> None:
    training = Training(PLAIN)
    training.record(tmp_path / "run", 0, 6)
    for _ in range(2):
        training.record(tmp_path / "run", 6, 6, resume=True)
    memory = training.record(tmp_path / "run", 6, 9, resume=True)
    assert [(p.first_step, p.began) for p in memory.phases] == [
        (0, "started"), (6, "resumed"), (6, "resumed"), (6, "resumed"),
    ]  # fmt: skip
    training.load(4)
    memory = training.record(tmp_path / "run", 4, 5, resume=True)
    assert [(p.first_step, p.rewound_from) for p in memory.phases] == [(0, None), (4, 9)]


# -- after a crash, and during one -----------------------------------------------------------------


@pytest.fixture(scope="module")
def server() -> Iterator[Trainers]:
    with trainers() as running:
        yield running


def small_run_from(path: Path, start: int, stop: int) -> df.Memory:
    """The run of `tests.memory.runs`, resumed from a checkpoint of the undisturbed training."""
    model, optimizer = make_model()
    for step in range(start):
        small_update(model, optimizer, step)
    consent = True if start else "rewind"
    with df.record(model, optimizer, path, resume=consent, segment_bytes=SMALL) as recorder:
        assert recorder.steps == start
        for step in range(start, stop):
            example, _, label = small_batch(step)
            task = TASKS[step // 4 % 3]
            recorder.tag(example=example, label=label, task=task, weight=label / 3.0)
            small_update(model, optimizer, step)
    for name, value in model.state_dict().items():
        assert torch.equal(value, reference().after(stop)[name])
    return df.Memory.open(path)


def test_killed_runs_are_resumed_from_any_checkpoint(server: Trainers, tmp_path: Path) -> None:
    chance = np.random.default_rng(1)
    for number in range(8):
        path = tmp_path / str(number)
        process = server.start(path, segment_bytes=int(chance.choice([1, SMALL, 10 * SMALL])))
        while not Path(f"{path}.started").exists():
            time.sleep(0.001)
        time.sleep(chance.uniform(0.02, 0.15))
        os.kill(process, signal.SIGKILL)
        server.wait(process)
        left = df.Memory.open(path)
        assert not left.closed
        start = int(chance.integers(0, left.steps + 1))
        memory = small_run_from(path, start, start + 7)
        assert_sound(memory)
        assert memory.closed
        assert memory.remarks == ()
        named = {s["file"] for s in memory._manifest["segments"]}
        assert {f.name for f in (path / "segments").iterdir()} == named


class Power(Exception):
    """The power went off."""


def test_a_crash_at_any_point_of_rewinding_leaves_the_memory_before_or_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Raises at each file operation of the cut in turn; afterwards all are tried once more."""
    training = Training(MOMENTUM, layers=lambda: nn.Linear(6, 4))
    seen: set[int] = set()
    for call in range(1, 100):
        path = tmp_path / str(call)
        training.load(0)
        training.record(path, 0, 20, segment_bytes=SMALL)
        training.load(11)
        with monkeypatch.context() as patch:
            left = [call]

            def counted(name: str, inner: Any, left: list[int] = left) -> Any:
                def operation(*args: Any, **kwargs: Any) -> Any:
                    left[0] -= 1
                    if left[0] == 0:
                        raise Power(name)
                    return inner(*args, **kwargs)

                return operation

            for name in ("write", "fsync", "replace", "ftruncate", "pwrite"):
                patch.setattr(os, name, counted(name, getattr(os, name)))
            patch.setattr(Path, "unlink", counted("unlink", Path.unlink))
            patch.setattr(Path, "mkdir", counted("mkdir", Path.mkdir))
            recorder = df.record(training.model, training.optimizer, path, resume=True)
            try:
                recorder.__enter__()
            except Power:
                done = False
            else:
                done = True
        if done:
            recorder.__exit__(None, None, None)
        memory = df.Memory.open(path)
        memory.check()
        seen.add(memory.steps)
        assert memory.steps in (11, 20)
        at = df.DualForm(training.model, memory).weights()
        for name, value in at.items():
            assert float((value - training.kept[memory.steps][0][name]).abs().max()) <= 1e-12
        assert not memory.is_being_recorded
        again = training.record(path, 11, 14, resume=True)
        assert_exact(again, training, 14)
        if done:
            break
    assert done
    assert call > 8
    assert seen == {11, 20}


def test_the_cut_segment_is_checked_before_it_is_copied(tmp_path: Path) -> None:
    training = Training(PLAIN)
    path = tmp_path / "run"
    training.record(path, 0, 12)
    (segment,) = (path / "segments").iterdir()
    data = bytearray(segment.read_bytes())
    data[-3000] ^= 1
    segment.write_bytes(data)
    training.load(7)
    with pytest.raises(df.DualFormError, match=r"damaged|not those of any step"):
        df.record(training.model, training.optimizer, path, resume=True).__enter__()


def test_names_of_files_are_never_used_twice(tmp_path: Path) -> None:
    training = Training(PLAIN)
    path = tmp_path / "run"
    training.record(path, 0, 20, segment_bytes=1)
    training.load(10)
    memory = training.record(path, 10, 15, resume=True, segment_bytes=1)
    names = [entry["file"] for entry in memory._manifest["segments"]]
    assert names == [f"{n:06d}.safetensors" for n in [*range(10), *range(20, 25)]]
    assert sorted(f.name for f in (path / "segments").iterdir()) == sorted(names)
    assert memory.snapshot_steps == tuple(s for s in memory.snapshot_steps if s <= 15)


def test_a_cut_segment_is_readable_without_us(tmp_path: Path) -> None:
    training = Training(PLAIN)
    training.record(tmp_path / "run", 0, 12)
    training.load(7)
    memory = training.record(tmp_path / "run", 7, 9, resume=True)
    first = tmp_path / "run" / "segments" / memory._manifest["segments"][0]["file"]
    tensors = safetensors.torch.load_file(first)
    assert tensors["keys/1"].shape == (35, 6)
    assert tensors["error_signals/4"].shape == (35, 4)
    assert tensors["fingerprint_steps"].tolist() == [7]


def test_info_tells_the_phases(tmp_path: Path) -> None:
    training = Training(MOMENTUM)
    training.record(tmp_path / "run", 0, 6)
    training.load(4)
    training.record(tmp_path / "run", 4, 8, resume=True)
    shown = CliRunner().invoke(main, ["info", str(tmp_path / "run")], env={"COLUMNS": "200"})
    assert shown.exit_code == 0
    assert "started at step 0 (" in shown.output
    assert "resumed at step 4 (" in shown.output
    assert "rewound from step 6, momentum carried over" in shown.output
    plain = json.loads(CliRunner().invoke(main, ["info", str(tmp_path / "run"), "--json"]).output)
    assert [phase["first_step"] for phase in plain["phases"]] == [0, 4]
