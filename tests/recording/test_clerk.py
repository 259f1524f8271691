"""The clerk beside the training: what it copies cannot change meanwhile, and no thread is left."""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

import dualform as df
from dualform.recording import clerk as room
from dualform.recording import intake
from dualform.recording.clerk import Clerk
from dualform.recording.one_core import keep_to_one_core


@pytest.fixture(autouse=True)
def everything_is_for_the_clerk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "LITTLE", -1)
    monkeypatch.setattr(intake, "LIGHT", 0)
    monkeypatch.setattr(intake, "TOGETHER", 0)


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 4)).double()


def sgd(model: nn.Module) -> SGD:
    return SGD(model.parameters(), lr=0.1, momentum=0.9)


def clerks() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name == "dualform-clerk"]


def test_a_batch_that_is_filled_anew_in_place_is_kept_as_it_was(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(1)
    given = torch.randn(20, 5, 6, generator=generator, dtype=torch.float64)
    batch, model = torch.empty(5, 6, dtype=torch.float64), network()
    optimizer = sgd(model)
    with df.record(model, optimizer, tmp_path / "run"):
        for rows in given:
            batch.copy_(rows)
            model(batch).square().mean().backward()
            batch.zero_()
            optimizer.step()
            optimizer.zero_grad()
    memory = df.Memory.open(tmp_path / "run")
    keys = memory.layer("0").keys
    assert torch.equal(keys, given.reshape(-1, 6))
    assert df.DualForm(model, memory).verify(given[0]).passed


def test_an_input_changed_amid_the_backward_pass_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, batch = nn.Linear(6, 4).double(), torch.ones(5, 6, dtype=torch.float64)
    used, give = threading.Event(), room.Clerk.give
    model.weight.register_post_accumulate_grad_hook(lambda _: used.set())

    def change_it_first(clerk: Clerk, work: Callable[..., None], *args: Any) -> None:
        def late(*args: Any) -> None:
            if "keep" in work.__name__:
                assert used.wait(60)
                batch.add_(1)  # as a hook of the user's might, while the clerk is at it
            work(*args)

        give(clerk, late, *args)

    monkeypatch.setattr(room.Clerk, "give", change_it_first)
    with (
        pytest.raises(df.RecordingError, match="changed in place during the backward pass"),
        df.record(model, sgd(model), tmp_path / "run"),
    ):
        model(batch).square().mean().backward()
    assert not clerks()


def test_a_batch_may_be_filled_anew_as_soon_as_a_backward_pass_is_broken_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, batch = network(), torch.ones(5, 6, dtype=torch.float64)
    optimizer, filled, give = sgd(model), threading.Event(), room.Clerk.give

    def when_it_is_filled(clerk: Clerk, work: Callable[..., None], *args: Any) -> None:
        def late(*args: Any) -> None:
            if "keep" in work.__name__:
                assert filled.wait(60)
            work(*args)

        give(clerk, late, *args)

    def break_off(_: Tensor) -> None:
        raise ValueError("out of memory")

    monkeypatch.setattr(room.Clerk, "give", when_it_is_filled)
    with df.record(model, optimizer, tmp_path / "run") as recorder:
        hidden = model[0](batch)
        output = model[2](hidden)
        hidden.register_hook(break_off)
        with pytest.raises(ValueError, match="out of memory"):
            (output.square().mean() + model[0](batch).square().mean()).backward()
        batch.normal_(generator=torch.Generator().manual_seed(1))
        filled.set()
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
        assert recorder.exact
    memory = df.Memory.open(tmp_path / "run")
    assert torch.equal(memory.layer("0").keys, batch)
    assert df.DualForm(model, memory).verify(batch).passed


def test_a_tag_that_does_not_fit_is_an_error_of_the_backward_pass(tmp_path: Path) -> None:
    model = network()
    with (
        pytest.raises(df.RecordingError, match="leading shape"),
        df.record(model, sgd(model), tmp_path / "run") as recorder,
    ):
        recorder.tag(label=[1, 2, 3])
        model(torch.ones(5, 6, dtype=torch.float64)).sum().backward()
    assert not clerks()


def test_what_a_job_raises_comes_out_of_the_next_wait_and_later_jobs_are_left_undone() -> None:
    clerk, done = Clerk(), []
    clerk.give(done.append, 1)
    clerk.give(int, "one")
    clerk.give(done.append, 2)
    with pytest.raises(ValueError, match="one"):
        clerk.wait()
    clerk.give(done.append, 3)
    clerk.wait()
    clerk.close()
    assert done == [1, 3]
    assert not clerks()


def test_only_so_many_jobs_wait_at_a_time() -> None:
    clerk, go_on, done = Clerk(), threading.Event(), []
    clerk.give(go_on.wait, 60)
    for number in range(room.WAITING - 1):
        clerk.give(done.append, number)
    assert not done
    threading.Timer(0.05, go_on.set).start()
    clerk.give(done.append, "more")
    assert done[: room.WAITING - 1] == list(range(room.WAITING - 1))
    clerk.close()
    assert done[-1] == "more"


def test_a_job_for_later_waits_for_another_one_and_keeps_its_place() -> None:
    clerk, done = Clerk(), []
    clerk.later(done.append, 1)
    clerk.then(done.append, 2)
    clerk.wait(even_for_later=False)
    assert not done
    clerk.give(done.append, 3)
    clerk.wait()
    assert done == [1, 2, 3]
    clerk.later(done.append, 4)
    clerk.wait()
    assert done == [1, 2, 3, 4]
    clerk.later(done.append, 5)
    clerk.close()
    assert done == [1, 2, 3, 4, 5]


def test_jobs_are_done_in_the_order_they_come_whichever_way_that_is() -> None:
    clerk, busy, go_on, done = Clerk(), threading.Event(), threading.Event(), []

    def block() -> None:
        busy.set()
        assert go_on.wait(60)

    clerk.later(list)
    clerk.give(block)
    assert busy.wait(60)
    clerk.give(done.append, 1)  # while the clerk is at its last job
    clerk.later(done.append, 2)
    clerk.then(done.append, 3)
    clerk.give(done.append, 4)
    go_on.set()
    clerk.wait()
    clerk.close()
    assert done == [1, 2, 3, 4]


def test_no_more_than_a_few_jobs_wait_for_later() -> None:
    clerk, enough = Clerk(), threading.Event()
    for _ in range(room.WAITING):
        clerk.later(list)
    clerk.later(enough.set)
    assert enough.wait(60)
    clerk.close()


def test_what_a_job_for_later_raises_comes_out_of_a_wait() -> None:
    clerk = Clerk()
    clerk.later(int, "one")
    with pytest.raises(ValueError, match="one"):
        clerk.wait()
    clerk.close()


def test_a_job_for_later_survives_ctrl_c_on_its_way() -> None:
    clerk, done = Clerk(), []
    clerk.give(list)
    clerk.wait()
    words, clerk._words = clerk._words, Interrupted()
    clerk.later(done.append, 1)
    with pytest.raises(KeyboardInterrupt):
        clerk.wait()
    with pytest.raises(KeyboardInterrupt):
        clerk.give(done.append, 2)
    clerk._words = words
    clerk.give(done.append, 3)
    clerk.wait()
    clerk.close()
    assert done == [1, 2, 3]


class Interrupted(queue.SimpleQueue[Any]):
    """Ctrl-C comes before anything is put."""

    def put(self, *args: Any) -> None:  # type: ignore[override]
        raise KeyboardInterrupt


def test_training_waits_where_too_many_jobs_wait_for_later() -> None:
    clerk, busy, go_on, done = Clerk(), threading.Event(), threading.Event(), []
    clerk.later(busy.set)
    clerk.give(go_on.wait, 60)
    assert busy.wait(60)
    while clerk.waiting:  # until it has taken the second one, too
        time.sleep(0.001)
    for number in range(2 * room.WAITING):
        clerk.later(done.append, number)
    assert not done
    threading.Timer(0.05, go_on.set).start()
    clerk.later(done.append, "more")
    assert done == [*range(2 * room.WAITING), "more"]
    clerk.close()


def test_a_clerk_with_jobs_for_later_takes_small_ones_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "LITTLE", 10)
    clerk = Clerk()
    assert not clerk.is_for(5)
    clerk.later(list)
    assert clerk.is_for(5)
    clerk.close()


@pytest.mark.parametrize("light", [0, 1 << 40])
@pytest.mark.parametrize("together", [0, 1, 2, 3])
def test_whichever_way_jobs_are_given_the_memory_is_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, light: int, together: int
) -> None:
    monkeypatch.setattr(intake, "LIGHT", light)
    monkeypatch.setattr(intake, "TOGETHER", together)
    batch = torch.randn(5, 6, generator=torch.Generator().manual_seed(1)).double()
    model, plain = network(), network()
    with df.record(model, optimizer := sgd(model), tmp_path / "run"):
        train(model, optimizer, batch)
    train(plain, sgd(plain), batch)
    assert all(map(torch.equal, model.parameters(), plain.parameters()))
    memory = df.Memory.open(tmp_path / "run")
    assert torch.equal(memory.layer("0").keys, batch.repeat(7, 1))
    assert df.DualForm(model, memory).verify(batch).passed


def train(model: nn.Module, optimizer: SGD, batch: Tensor) -> None:
    for _ in range(7):
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def test_a_quiet_wait_forgets_what_a_job_has_raised() -> None:
    clerk = Clerk()
    clerk.give(int, "one")
    clerk.wait(quietly=True)
    clerk.wait()
    clerk.close()


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_in_a_forked_process_jobs_are_done_at_once() -> None:
    clerk = Clerk()
    clerk.give(list)
    clerk.wait()
    child = os.fork()
    if not child:
        done: list[int] = []
        clerk.later(done.append, 1)
        clerk.give(done.append, 2)
        clerk.wait()
        clerk.close()
        os._exit(0 if done == [1, 2] else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    clerk.close()


def test_a_thread_that_keeps_to_one_core_leaves_the_others_theirs() -> None:
    seen: dict[str, int] = {}

    def look(name: str) -> None:
        seen[name] = torch.get_num_threads()

    def beside() -> None:
        keep_to_one_core()
        look("beside")

    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        for target, args in ((beside, ()), (look, ("later",))):
            thread = threading.Thread(target=target, args=args)
            thread.start()
            thread.join()
        look("training")
    finally:
        torch.set_num_threads(before)
    assert seen == {"beside": 1, "later": 3, "training": 3}
