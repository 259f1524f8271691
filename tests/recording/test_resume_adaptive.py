"""Resuming under Adam and its relatives: what was changed is refused, and nothing is lost."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.memory.tampering import read_manifest, replace_tensors, reseal
from torch import nn
from torch.optim import SGD, Adadelta, Adagrad, Adam, AdamW, NAdam, Optimizer, RMSprop

import dualform as df

KINDS: dict[str, Callable[[Any], Optimizer]] = {
    "AdamW": lambda p: AdamW(p, lr=3e-3, weight_decay=0.1),
    "Adam, coupled, amsgrad": lambda p: Adam(p, lr=3e-3, weight_decay=0.1, amsgrad=True),
    "NAdam": lambda p: NAdam(p, lr=3e-3),
    "RMSprop, centred, momentum": lambda p: RMSprop(p, lr=1e-3, momentum=0.8, centered=True),
    "Adagrad": lambda p: Adagrad(p, lr=1e-2),
    "Adadelta": lambda p: Adadelta(p, lr=0.5),
}
each_kind = pytest.mark.parametrize("kind", KINDS)
STATE_KEPT = 16  # the first step at which a state is kept, and so known bit by bit
WHERE = {"at a flush": 23, "between fingerprints": 37, "at a kept state": STATE_KEPT}
STEPS = 50


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def network(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.LayerNorm(8), nn.Linear(8, 3)).to(dtype)


def train(model: nn.Module, optimizer: Any, steps: int, start: int = 0) -> None:
    dtype = next(model.parameters()).dtype
    for step in range(start, start + steps):
        generator = torch.Generator().manual_seed(step)
        inputs = torch.randn(6, 5, generator=generator, dtype=torch.float64).to(dtype)
        labels = torch.randint(0, 3, (6,), generator=generator)
        nn.functional.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
        optimizer.zero_grad()


Checkpoint = tuple[dict[str, Any], dict[str, Any]]


def recorded(kind: str, dtype: torch.dtype, path: Path, at: int, *, flush: bool) -> Checkpoint:
    model = network(dtype)
    optimizer = KINDS[kind](model.parameters())
    with df.record(model, optimizer, path, state_share=1.0) as recorder:
        train(model, optimizer, at)
        if flush:
            recorder.flush()
        saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        train(model, optimizer, STEPS - at, start=at)
    return saved


def loaded(
    kind: str, dtype: torch.dtype, saved: Checkpoint
) -> tuple[nn.Sequential, Optimizer, dict[str, Any]]:
    """Model and optimizer of a checkpoint; the optimizer's state of the first weight."""
    model = network(dtype)
    optimizer = KINDS[kind](model.parameters())
    model.load_state_dict(copy.deepcopy(saved[0]))
    optimizer.load_state_dict(copy.deepcopy(saved[1]))
    return model, optimizer, optimizer.state[model[0].weight]


def content(path: Path) -> dict[str, str]:
    files = (f for f in sorted(path.rglob("*")) if f.is_file() and f.suffix != ".lock")
    return {f.name: hashlib.sha256(f.read_bytes()).hexdigest() for f in files}


def assert_refused(model: nn.Module, optimizer: Optimizer, path: Path, match: str) -> None:
    before = content(path)
    with (
        pytest.raises(df.RecordingError, match=match),
        df.record(model, optimizer, path, resume=True),
    ):
        pass
    assert content(path) == before
    assert df.Memory.open(path).steps == STEPS


BIT_BY_BIT = ("AdamW", "Adam, coupled, amsgrad")  # the second keeps weights as well


@pytest.mark.parametrize(
    ("where", "dtype", "kind"),
    [
        *(("at a flush", torch.float32, kind) for kind in KINDS),
        *(("between fingerprints", torch.float32, kind) for kind in KINDS),
        *(("between fingerprints", torch.float64, kind) for kind in KINDS),
        *(("at a kept state", torch.float32, kind) for kind in BIT_BY_BIT),
    ],
    ids=str,
)
def test_a_changed_checkpoint_is_refused_by_what_was_changed(
    where: str, dtype: torch.dtype, kind: str, tmp_path: Path
) -> None:
    at, path = WHERE[where], tmp_path / "run"
    saved = recorded(kind, dtype, path, at, flush=where == "at a flush")
    states = list(loaded(kind, dtype, saved)[2])
    assert len(states) >= 2
    for name in states:
        model, optimizer, state = loaded(kind, dtype, saved)
        if name == "step":
            state[name] += 1
            said = rf"step {at} of .* remembers of '0.weight' .*'step' is {at + 1} and was {at}"
        elif state[name].dim():
            state[name] *= 1.01
            said = rf"step {at} of .* remembers of '0.weight' .*: {name} differs by 0.0\d+ of the"
        else:
            state[name] *= 1.01
            said = rf"remembers of '0.weight' .*: '{name}' is"
        assert_refused(model, optimizer, path, said)
    for edit in ("all of it", "the largest entry"):
        model, optimizer, _ = loaded(kind, dtype, saved)
        weight = model[0].weight.detach()
        place = weight.abs().argmax()
        if edit == "all of it":
            weight *= 1 + 1e-4
        else:
            weight.view(-1)[place] *= 1 + 1e-4
        said = rf"The nearest is step {at}, where '0.weight' does not agree: weights differ by"
        assert_refused(model, optimizer, path, said)
    model, optimizer, _ = loaded(kind, dtype, saved)
    with df.record(model, optimizer, path, resume=True) as recorder:
        assert recorder.steps == at
        train(model, optimizer, STEPS - at, start=at)
    certificate = df.DualForm(model, path).verify()
    assert certificate.passed, repr(certificate)


@each_kind
def test_a_resumed_run_is_bit_for_bit_the_one_that_was_not_interrupted(
    kind: str, tmp_path: Path
) -> None:
    plain = network()
    train(plain, KINDS[kind](plain.parameters()), STEPS)
    saved = recorded(kind, torch.float32, tmp_path / "run", 37, flush=False)
    model, optimizer, _ = loaded(kind, torch.float32, saved)
    with df.record(model, optimizer, tmp_path / "run", resume=True):
        train(model, optimizer, STEPS - 37, start=37)
    for mine, theirs in zip(plain.parameters(), model.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_a_checkpoint_of_steps_that_moved_nothing_is_told_by_its_count(tmp_path: Path) -> None:
    """A schedule that begins at a learning rate of zero: weights stay, and are counted."""
    model = network()
    optimizer = Adam(model.parameters(), lr=0.0)
    with df.record(model, optimizer, tmp_path / "run"):
        train(model, optimizer, 2)
        saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        train(model, optimizer, 3, start=2)
        optimizer.param_groups[0]["lr"] = 1e-3
        train(model, optimizer, 20, start=5)
    model = network()
    optimizer = Adam(model.parameters(), lr=0.0)
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    with df.record(model, optimizer, tmp_path / "run", resume=True) as recorder:
        assert recorder.steps == 2


def test_the_old_optimizer_may_come_back_after_a_new_one(tmp_path: Path) -> None:
    """Resumed with a new Adagrad, whose sums were kept; then again from the checkpoint before."""
    path = tmp_path / "run"
    saved = recorded("Adagrad", torch.float32, path, 23, flush=True)
    model = loaded("Adagrad", torch.float32, saved)[0]
    optimizer = KINDS["Adagrad"](model.parameters())
    with df.record(model, optimizer, path, resume=True) as recorder:
        assert recorder.steps == 23
        train(model, optimizer, STEPS - 23, start=23)
    assert df.DualForm(model, path).verify().passed
    model, optimizer, _ = loaded("Adagrad", torch.float32, saved)
    with df.record(model, optimizer, path, resume=True) as recorder:
        assert recorder.steps == 23
        train(model, optimizer, 5, start=23)
    assert df.DualForm(model, path).verify().passed


def test_a_memory_without_fingerprints_of_states_is_compared_by_replaying(tmp_path: Path) -> None:
    """As older versions wrote them."""
    path = tmp_path / "run"
    saved = recorded("AdamW", torch.float32, path, 23, flush=True)
    for entry in read_manifest(path)["segments"]:
        file = path / "segments" / entry["file"]
        names = [f"state_fingerprints/exp_avg_sq/{n}" for n in saved[0]]
        names += [f"state_fingerprints/step/{n}" for n in saved[0]]
        replace_tensors(file, dict.fromkeys(names))
    reseal(path)
    assert not df.Memory.open(path).fingerprints[0].states
    model, optimizer, state = loaded("AdamW", torch.float32, saved)
    state["exp_avg_sq"][2, 3] *= 1.01
    assert_refused(model, optimizer, path, "step 23 .*'0.weight' .*: exp_avg_sq differs by")
    model, optimizer, _ = loaded("AdamW", torch.float32, saved)
    with df.record(model, optimizer, path, resume=True) as recorder:
        assert recorder.steps == 23


def test_two_optimizers_of_different_rules_are_both_compared(tmp_path: Path) -> None:
    path = tmp_path / "run"

    def both(model: nn.Sequential) -> list[Optimizer]:
        return [
            SGD(model[0].parameters(), lr=0.05, momentum=0.9),
            AdamW([*model[2].parameters(), *model[3].parameters()], lr=3e-3),
        ]

    def steps(model: nn.Sequential, optimizers: list[Optimizer], first: int, last: int) -> None:
        for step in range(first, last):
            generator = torch.Generator().manual_seed(step)
            model(torch.randn(6, 5, generator=generator)).square().mean().backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()

    model = network()
    optimizers = both(model)
    with df.record(model, optimizers, path):
        steps(model, optimizers, 0, 20)
        saved = copy.deepcopy((model.state_dict(), [o.state_dict() for o in optimizers]))
        steps(model, optimizers, 20, STEPS)
    for edited, said in (("SGD", "0.weight"), ("AdamW", "3.weight"), ("nothing", "")):
        model = network()
        optimizers = both(model)
        model.load_state_dict(copy.deepcopy(saved[0]))
        for optimizer, state in zip(optimizers, copy.deepcopy(saved[1]), strict=True):
            optimizer.load_state_dict(state)
        if edited == "SGD":
            optimizers[0].state[model[0].weight]["momentum_buffer"] *= 1.01
        elif edited == "AdamW":
            optimizers[1].state[model[3].weight]["exp_avg_sq"] *= 1.01
        if said:
            assert_refused(model, optimizers, path, rf"step 20 .*{said}")  # type: ignore[arg-type]
    with df.record(model, optimizers, path, resume=True) as recorder:
        assert recorder.steps == 20
        steps(model, optimizers, 20, 40)
    assert df.DualForm(model, path).verify().passed


def test_a_frozen_parameter_is_compared_with_how_it_began(tmp_path: Path) -> None:
    path = tmp_path / "run"

    def both() -> tuple[nn.Sequential, Optimizer]:
        model = network()
        model[0].weight.requires_grad_(False)
        return model, AdamW(model.parameters(), lr=3e-3)

    model, optimizer = both()
    with df.record(model, optimizer, path):
        train(model, optimizer, 37)
        saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        train(model, optimizer, STEPS - 37, start=37)
    for edited in (True, False):
        model, optimizer = both()
        model.load_state_dict(copy.deepcopy(saved[0]))
        optimizer.load_state_dict(copy.deepcopy(saved[1]))
        if edited:
            model[0].weight.detach()[2, 3] += 1e-4
            assert_refused(model, optimizer, path, "nearest is step 37, where '0.weight' does not")
    with df.record(model, optimizer, path, resume=True) as recorder:
        assert recorder.steps == 37


def test_steps_that_cannot_be_told_apart_are_refused(tmp_path: Path) -> None:
    """Weights that hardly move, and a new optimizer, whose count says nothing."""
    path = tmp_path / "run"
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(5, 3))
    optimizer = Adam(model.parameters(), lr=2e-8)
    with df.record(model, optimizer, path):
        train(model, optimizer, 30)
        saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        train(model, optimizer, STEPS - 30, start=30)
    model.load_state_dict(saved[0])
    optimizer = Adam(model.parameters(), lr=2e-8)
    assert_refused(model, optimizer, path, r"could be those of any of the steps .*flush\(\)")
    optimizer.load_state_dict(saved[1])
    with df.record(model, optimizer, path, resume=True) as recorder:
        assert recorder.steps == 30


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
@pytest.mark.parametrize("flush", [True, False], ids=["flushed", ""])
@pytest.mark.parametrize("of", ["weights", "exp_avg_sq"])
def test_what_is_not_finite_is_not_resumed(
    of: str, flush: bool, value: float, tmp_path: Path
) -> None:
    saved = recorded("AdamW", torch.float32, tmp_path, 23, flush=flush)
    model, optimizer, state = loaded("AdamW", torch.float32, saved)
    changed = model[0].weight.detach() if of == "weights" else state[of]
    changed.view(-1)[3] = value
    assert_refused(model, optimizer, tmp_path, rf"'0.weight': its {of} is not finite")
    changed.fill_(value)
    assert_refused(model, optimizer, tmp_path, rf"'0.weight': its {of} is not finite")


@pytest.mark.parametrize("of", ["weights", "exp_avg_sq"])
def test_a_parameter_whose_gradients_were_summed_up_later_is_compared(
    of: str, tmp_path: Path
) -> None:
    model = network()
    optimizer = AdamW(model.parameters(), lr=3e-3)
    norm_bytes = 2 * 8 * 4
    with df.record(model, optimizer, tmp_path / "run", step_budget=40 * norm_bytes):
        train(model, optimizer, 33)
        saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        train(model, optimizer, STEPS - 33, start=33)
    known = df.Memory.open(tmp_path / "run").parameters["2.weight"]
    assert 33 < (known.accumulated_since or 0) < STEPS
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    changed = model[2].weight.detach() if of == "weights" else optimizer.state[model[2].weight][of]
    honest = changed.clone()
    changed.mul_(1.5)
    assert_refused(model, optimizer, tmp_path / "run", "2.weight")
    changed.copy_(honest)
    with df.record(model, optimizer, tmp_path / "run", resume=True):
        train(model, optimizer, 3, start=33)
    memory = df.Memory.open(tmp_path / "run")
    assert memory.steps == 36
    assert df.DualForm(model, memory).verify().passed


def test_a_parameter_that_no_optimizer_has_any_more_is_named(tmp_path: Path) -> None:
    saved = recorded("AdamW", torch.float32, tmp_path, 23, flush=True)
    model, _, _ = loaded("AdamW", torch.float32, saved)
    optimizer = AdamW(model[0].parameters(), lr=3e-3, weight_decay=0.1)
    assert_refused(model, optimizer, tmp_path, "is in none of the optimizers now .give it to one")
