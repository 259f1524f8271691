"""The accountant beside the training: exact sums, whatever the loop does with its gradients."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

import dualform as df
from dualform.recording import accountant as room
from dualform.recording import sums
from dualform.recording.accountant import Accountant, Handed
from dualform.recording.learned import Learned
from dualform.recording.sums import HELD, Accumulated, combined

Loop = Callable[[SGD], None]
STEPS = 30
EVERY = 10


KEYS_ALONE: dict[str, Any] = {"error_signals": False}
BEYOND_THE_BUDGET: dict[str, Any] = {"layers": [], "step_budget": 0}
"""What was learned is read off the weights, or summed up from the gradients."""


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(autouse=True, params=[KEYS_ALONE, BEYOND_THE_BUDGET], ids=["read off", "summed"])
def way(request: pytest.FixtureRequest) -> dict[str, Any]:
    found: dict[str, Any] = request.param
    Training.options = found
    return found


lent = pytest.mark.parametrize("way", [BEYOND_THE_BUDGET], indirect=True, ids=["summed"])
"""Only what is summed up is lent gradients."""


def network(dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 4)).to(dtype)


class Training:
    """A run recorded without patterns, which keeps its own gradients and weights."""

    options: ClassVar[dict[str, Any]] = {}

    def __init__(self, path: Path, after: Callable[[int, SGD], None], **sgd: Any) -> None:
        self.path, self.after = path, after
        self.model = network()
        self.optimizer = SGD(self.model.parameters(), **({"lr": 0.1, "momentum": 0.9} | sgd))
        self.history = [self.weights()]
        self.lends: list[bool] = []
        self.generator = torch.Generator().manual_seed(1)

    def weights(self) -> dict[str, Tensor]:
        return {n: p.detach().clone() for n, p in self.model.named_parameters()}

    def step(self, number: int) -> None:
        x = torch.randn(5, 6, generator=self.generator, dtype=torch.float64)
        self.model(x).square().mean().backward()
        self.optimizer.step()
        self.after(number, self.optimizer)
        self.history.append(self.weights())

    def record(self, steps: int = STEPS, **options: Any) -> df.Memory:
        options = self.options | {"snapshot_every": EVERY} | options
        with df.record(self.model, self.optimizer, self.path, **options) as recorder:
            for number in range(steps):
                self.step(number)
                accounts = recorder._steps.accountant.accounts.values()
                self.lends.append(any(account.lends for account in accounts))
        return df.Memory.open(self.path)

    def assert_exact(self, memory: df.Memory, bound: float = 1e-12) -> None:
        dual = df.DualForm(self.model, memory)
        assert memory.exact
        assert dual.verify().passed, dual.verify()
        for at in (*range(0, memory.steps, EVERY), memory.steps):
            for name, weight in dual.at(at).weights(dtype=torch.float64).items():
                off = float((weight - self.history[at][name]).abs().max())
                assert off <= bound * float(self.history[at][name].abs().max()), (at, name, off)


def clear(number: int, optimizer: SGD) -> None:
    optimizer.zero_grad()


def zero_in_place(number: int, optimizer: SGD) -> None:
    optimizer.zero_grad(set_to_none=False)


def zero_data(number: int, optimizer: SGD) -> None:
    """An old idiom that torch does not count as a change."""
    for parameter in optimizer.param_groups[0]["params"]:
        parameter.grad.data.zero_()


def let_it_grow(number: int, optimizer: SGD) -> None:
    if number % 4 == 3:
        optimizer.zero_grad()


@pytest.mark.parametrize(
    ("after", "lends"),
    [(clear, True), (zero_in_place, False), (zero_data, False), (let_it_grow, False)],
)
def test_sums_are_exact_whatever_becomes_of_the_gradients(
    tmp_path: Path, after: Callable[[int, SGD], None], lends: bool, way: dict[str, Any]
) -> None:
    training = Training(tmp_path, after, weight_decay=1e-2, lr=0.02)
    memory = training.record()
    training.assert_exact(memory)
    assert not training.lends[0]  # the first one is copied: nothing is known of the loop yet
    assert training.lends[-1] == (lends and way is BEYOND_THE_BUDGET)
    assert memory.remarks == ()


@pytest.mark.parametrize("foreach", [False, True])
@lent
def test_an_optimizer_that_changes_the_gradient_itself_gets_a_copy(
    tmp_path: Path, foreach: bool
) -> None:
    training = Training(tmp_path, clear, nesterov=True, foreach=foreach)
    training.assert_exact(training.record())
    assert training.lends[-1] != foreach


def test_a_gradient_that_is_part_of_a_larger_buffer_is_copied(tmp_path: Path) -> None:
    training = Training(tmp_path, lambda number, optimizer: None)
    parameters = list(training.model.parameters())
    flat = torch.zeros(sum(p.numel() for p in parameters), dtype=torch.float64)

    def into_buffer(number: int, optimizer: SGD) -> None:
        flat.zero_()
        start = 0
        for parameter in parameters:
            parameter.grad = flat[start : start + parameter.numel()].view_as(parameter)
            start += parameter.numel()

    training.after = into_buffer
    training.assert_exact(training.record())


@lent
def test_a_gradient_touched_while_it_is_lent_is_found_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The accountant is kept waiting until the loop has zeroed what it was lent."""
    may_go_on = threading.Event()
    may_go_on.set()
    follow = Accountant._follow

    def slowly(self: Accountant, handed: Handed) -> None:
        may_go_on.wait(timeout=60)
        follow(self, handed)

    monkeypatch.setattr(Accountant, "_follow", slowly)

    def after(number: int, optimizer: SGD) -> None:
        if number == 13:
            optimizer.zero_grad(set_to_none=False)
        else:
            optimizer.zero_grad()
        may_go_on.set()

    training = Training(tmp_path, after)
    step = training.step

    def hold_at_thirteen(number: int) -> None:
        if number == 13:
            may_go_on.clear()
        step(number)

    training.step = hold_at_thirteen  # type: ignore[method-assign]
    memory = training.record()
    assert training.lends[12]
    assert not training.lends[-1]
    assert any("changed in place after the update" in remark for remark in memory.remarks)
    training.assert_exact(memory)
    assert np.isnan(memory.audit_projections("0.weight")[13])


@lent
def test_a_loop_that_begins_to_zero_gradients_behind_torchs_back_is_seen_through(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each parcel is one step: the accountant reads a gradient only after it was zeroed."""
    monkeypatch.setattr(room, "PARCEL_BYTES", 1)

    def clear_then_zero(number: int, optimizer: SGD) -> None:
        (clear if number < 13 else zero_data)(number, optimizer)

    training = Training(tmp_path, clear_then_zero)
    memory = training.record()
    assert training.lends[12]
    assert not training.lends[-1]
    assert any("changed in place after the update" in remark for remark in memory.remarks)
    training.assert_exact(memory)


def test_words_that_ctrl_c_kept_from_being_said_block_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(room, "PARCEL_BYTES", 1)
    training = Training(tmp_path, clear)
    options = training.options | {"snapshot_every": EVERY}
    with df.record(training.model, training.optimizer, tmp_path, **options) as recorder:
        accountant = recorder._steps.accountant
        for number in range(12):
            training.step(number)
            if number in (3, 5, 7, 8):
                accountant._told += 1
    training.assert_exact(df.Memory.open(tmp_path))


def test_gradients_of_any_size_are_held_in_little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sums, "HELD_BYTES", 1000)
    for size, rows in ((1, HELD), (100, 2), (250, 1), (10_000, 1)):
        learned = Accumulated.nothing(torch.zeros(size))
        for _ in range(5):
            learned.hold((1.0, 0.0, 0.0, 0.0, -1.0, 0.0), torch.ones(size))
        assert len(learned._gradients) == rows
        learned.fold()
        assert torch.equal(learned.weights, torch.full((size,), -5.0).double())


@pytest.mark.filterwarnings("ignore:dualform")
def test_a_memory_that_is_not_exact_is_gone_on_with_from_the_right_share(tmp_path: Path) -> None:
    """One parameter was edited; the others, under decay, stay what the rule makes of them."""

    def edit(number: int, optimizer: SGD) -> None:
        optimizer.zero_grad()
        if number == 5:
            with torch.no_grad():
                optimizer.param_groups[0]["params"][-1].add_(1.0)

    training = Training(tmp_path, edit, weight_decay=0.05)
    training.record(steps=10, audit="warn")
    memory = training.record(steps=3, audit="warn", resume=True)
    assert not memory.exact
    for check in df.DualForm(training.model, memory).verify().checks:
        assert check.passed or check.parameter == "2.bias"


def test_what_the_accountant_meets_is_raised_where_training_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: Any, transition: Any, gradient: Any) -> None:
        raise MemoryError("no room")

    training = Training(tmp_path, clear)
    monkeypatch.setattr(Accumulated, "hold", fail)
    with pytest.raises(df.RecordingError, match=r"accounting .* failed: MemoryError\('no room'\)"):
        training.record(**BEYOND_THE_BUDGET, error_signals=True)
    assert "dualform-accountant" not in {t.name for t in threading.enumerate()}
    assert not df.Memory.open(tmp_path).closed


def test_weights_changed_behind_the_optimizers_back_are_found(
    tmp_path: Path, way: dict[str, Any]
) -> None:
    def edit(number: int, optimizer: SGD) -> None:
        optimizer.zero_grad()
        if number == 20:
            with torch.no_grad():
                optimizer.param_groups[0]["params"][0].add_(1e-3)

    found = "its weights are .* away" if way is BEYOND_THE_BUDGET else "it was changed in place"
    with pytest.raises(df.AuditError, match=rf"'0\.weight': {found}"):
        Training(tmp_path, edit).record(steps=60)


def test_little_is_held_where_gradients_are_large(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(room, "HELD_BYTES", 500)
    most = []
    fold = Accumulated.fold

    def count(self: Accumulated) -> None:
        most.append(self.held)
        fold(self)

    monkeypatch.setattr(Accumulated, "fold", count)
    training = Training(tmp_path, clear)
    training.assert_exact(training.record(**BEYOND_THE_BUDGET, error_signals=True))
    assert max(most) == 1


def test_the_thread_ends_with_the_recording(tmp_path: Path) -> None:
    training = Training(tmp_path, clear)
    before = threading.active_count()
    training.record(steps=3)
    assert threading.active_count() == before


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_process_that_leaves_the_block_waits_for_nobody(tmp_path: Path) -> None:
    training = Training(tmp_path, clear)
    options = training.options | {"snapshot_every": EVERY}
    with df.record(training.model, training.optimizer, tmp_path, **options) as recorder:
        for number in range(4):
            training.step(number)
        if (child := os.fork()) == 0:
            recorder.__exit__(None, None, None)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        assert status == 0
        for number in range(4, 12):
            training.step(number)
    training.assert_exact(df.Memory.open(tmp_path))


def test_what_was_learned_is_that_of_the_commit_however_late_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The writer takes W less W_0, and training has moved on by then."""
    may_go_on = threading.Event()
    part = Learned.part

    def late(self: Learned) -> Tensor:
        assert threading.current_thread().name != "dualform-writer" or may_go_on.wait(timeout=60)
        return part(self)

    monkeypatch.setattr(Learned, "part", late)

    def after(number: int, optimizer: SGD) -> None:
        optimizer.zero_grad()
        if number == EVERY + 4:
            may_go_on.set()

    training = Training(tmp_path, after)
    training.assert_exact(training.record())
    assert may_go_on.is_set()


@lent
def test_no_parcel_is_left_lying(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The accountant hears of every one, by the next update at the latest."""
    monkeypatch.setattr(room, "PARCEL_BYTES", 1)
    told = []
    wake = Accountant.wake

    def wake_and_tell(self: Accountant) -> None:
        if self.is_due:
            told.append("parcel")
        wake(self)

    monkeypatch.setattr(Accountant, "wake", wake_and_tell)
    training = Training(tmp_path, clear)
    training.assert_exact(training.record())
    assert len(told) >= STEPS - 2


def test_parameters_that_move_in_changing_company_are_predicted_all_the_same(
    tmp_path: Path,
) -> None:
    """Some of them have no gradient now and then: who moves at once differs from step to step."""

    def after(number: int, optimizer: SGD) -> None:
        optimizer.zero_grad()
        for turn, parameter in enumerate(optimizer.param_groups[0]["params"]):
            parameter.requires_grad_(turn >= 2 or (number // 3) % 3 != turn)

    training = Training(tmp_path, after)
    memory = training.record()
    training.assert_exact(memory)
    assert df.DualForm(training.model, memory).verify().passed


# -- the end always has its sums -------------------------------------------------------------------


@pytest.mark.parametrize("flush", [False, True])
def test_the_end_has_its_sums_where_the_last_step_was_committed_without_them(
    tmp_path: Path, flush: bool
) -> None:
    """Every step fills a segment here, and sums are too large to go with every one."""
    training = Training(tmp_path, clear)
    options = training.options | {"segment_bytes": 1, "snapshot_every": 100}
    with df.record(training.model, training.optimizer, tmp_path, **options) as recorder:
        for number in range(7):
            training.step(number)
            if flush and number == 4:
                recorder.flush()
    memory = df.Memory.open(tmp_path)
    assert list(memory.learned_steps("0.weight")) == ([5, 7] if flush else [7])
    assert memory.fingerprints[-1].step == memory.steps == 7
    memory.check()
    dual = df.DualForm(training.model, memory)
    assert dual.verify().passed
    for at in (5, 7) if flush else (7,):
        for name, weight in dual.at(at).weights(dtype=torch.float64).items():
            assert torch.allclose(weight, training.history[at][name], rtol=0, atol=1e-13)
    with df.record(training.model, training.optimizer, tmp_path, resume=True, **options):
        training.step(7)
    memory = df.Memory.open(tmp_path)
    assert memory.steps == 8
    assert df.DualForm(training.model, memory).verify().passed


# -- the sums themselves ---------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 7, (1 << 14) + 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_folding_many_steps_at_once_is_taking_them_one_by_one(
    size: int, dtype: torch.dtype
) -> None:
    rng = np.random.default_rng(3)
    learned = Accumulated.nothing(torch.zeros(size))
    weights, momentum = torch.zeros(size).double(), torch.zeros(size).double()
    for _ in range(4):
        for step in range(HELD):
            ww, wm, mw, mm, nw, nm = rng.normal(scale=0.7, size=6).tolist()
            gradient = torch.from_numpy(rng.normal(size=size)).to(dtype) if step % 3 else None
            learned.hold((ww, wm, mw, mm, nw, nm), gradient)
            added = 0 if gradient is None else gradient.double()
            weights, momentum = (
                ww * weights + wm * momentum + nw * added,
                mw * weights + mm * momentum + nm * added,
            )
        learned.fold()
        rounding = 1e-13 if dtype == torch.float64 else 1e-6  # of what the steps held add up to
        for ours, theirs in ((learned.weights, weights), (learned.momentum, momentum)):
            assert float((ours - theirs).abs().max()) <= rounding * float(theirs.abs().max() + 1)


def test_nothing_held_is_nothing_changed() -> None:
    whole, factors = combined([])
    assert np.array_equal(whole, np.eye(2))
    assert factors == []
    learned = Accumulated(torch.ones(3), torch.ones(3))
    learned.fold()
    assert torch.equal(learned.weights, torch.ones(3).double())
