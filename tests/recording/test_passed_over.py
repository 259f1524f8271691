"""Keys alone: few gradients are looked at; what else changes weights is found all the same."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

import dualform as df
from dualform.memory.noted import NOTED_EVERY, are_noted
from dualform.recording.edits import Entries
from dualform.recording.node_hooks import hook_early
from dualform.recording.passed_over import PassedOver

STEPS = 2 * NOTED_EVERY + 10
LATE = NOTED_EVERY + 20
"""A step that nobody looks at."""


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


class Loop:
    """A run recorded with keys alone; `edit` is what it does to itself just before an update."""

    def __init__(
        self,
        path: Path,
        edit: Callable[[Loop, int], None] = lambda loop, step: None,
        *,
        dtype: torch.dtype = torch.float64,
        **sgd: Any,
    ) -> None:
        torch.manual_seed(0)
        self.path, self.edit = path, edit
        self.model = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 4)).to(dtype)
        self.optimizer = SGD(self.model.parameters(), **({"lr": 0.05, "momentum": 0.9} | sgd))
        self.generator = torch.Generator().manual_seed(1)
        self.dtype = dtype

    def batch(self) -> Tensor:
        return torch.randn(5, 6, generator=self.generator).to(self.dtype)

    def update(self, step: int) -> None:
        self.model(self.batch()).square().mean().backward()
        self.edit(self, step)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def record(self, steps: int = STEPS, **options: Any) -> df.Memory:
        options = {"error_signals": False} | options
        with df.record(self.model, self.optimizer, self.path, **options) as recorder:
            self.recorder = recorder
            for step in range(recorder.steps, steps):
                self.update(step)
        return df.Memory.open(self.path)

    @property
    def weight(self) -> Tensor:
        return self.model.get_parameter("2.weight")

    @property
    def buffer(self) -> Tensor:
        found: Tensor = self.optimizer.state[self.weight]["momentum_buffer"]
        return found

    def refused_with(self, message: str, **options: Any) -> df.Memory:
        with pytest.raises(df.AuditError, match=message):
            self.record(**options)
        memory = df.Memory.open(self.path)
        assert not memory.exact
        return memory


# -- what is looked at -----------------------------------------------------------------------------


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_gradients_of_two_steps_in_sixty_one_are_noted(tmp_path: Path, momentum: float) -> None:
    loop = Loop(tmp_path, momentum=momentum, weight_decay=1e-2)
    memory = loop.record()
    assert memory.exact
    for name in memory.parameters:
        known = ~np.isnan(memory.audit_projections(name))
        np.testing.assert_array_equal(known, are_noted(STEPS, 1))
    stops = {fingerprint.step for fingerprint in memory.fingerprints}
    assert {NOTED_EVERY, NOTED_EVERY + 2, 2 * NOTED_EVERY, 2 * NOTED_EVERY + 2} <= stops
    certificate = df.DualForm(loop.model, memory).verify(loop.batch())
    assert certificate.passed, certificate


def test_where_every_third_step_is_recorded_they_are_three_times_as_far_apart(
    tmp_path: Path,
) -> None:
    loop = Loop(tmp_path)
    memory = loop.record(3 * NOTED_EVERY + 5, every=3)
    known = ~np.isnan(memory.audit_projections("0.weight"))
    assert list(np.flatnonzero(known)) == [0, 1, 3 * NOTED_EVERY, 3 * NOTED_EVERY + 1]
    assert df.DualForm(loop.model, memory).verify().passed


def test_no_gradient_is_held_on_to(tmp_path: Path) -> None:
    """What a loop throws away is free at once: the next gradients lie where these did."""
    seen: list[weakref.ref[Tensor]] = []

    def edit(loop: Loop, step: int) -> None:
        gc.collect()
        assert not [one for one in seen if one() is not None]
        seen[:] = [weakref.ref(p.grad) for p in loop.model.parameters() if p.grad is not None]

    loop = Loop(tmp_path, edit)
    assert df.DualForm(loop.model, loop.record(NOTED_EVERY + 5)).verify().passed


def test_most_steps_are_read_as_a_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = []
    read = PassedOver.read

    def counted(self: PassedOver, *args: Any) -> bool:
        answers.append(read(self, *args))
        return answers[-1]

    monkeypatch.setattr(PassedOver, "read", counted)
    Loop(tmp_path).record()
    assert sum(answers) >= STEPS - 10


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_honest_runs_in_lower_precision_pass(tmp_path: Path, dtype: torch.dtype) -> None:
    for number, sgd in enumerate(({}, {"momentum": 0.0, "weight_decay": 0.01}, {"nesterov": True})):
        loop = Loop(tmp_path / str(number), dtype=dtype, **sgd)  # type: ignore[arg-type]
        memory = loop.record(4 * NOTED_EVERY)
        assert memory.exact, memory.remarks
        certificate = df.DualForm(loop.model, memory).verify()
        assert certificate.passed, certificate


def test_a_run_that_was_resumed_amid_a_stretch_goes_on_exactly(tmp_path: Path) -> None:
    for stop in (NOTED_EVERY, NOTED_EVERY + 1, NOTED_EVERY + 2, LATE):
        loop = Loop(tmp_path / str(stop))
        loop.record(stop)
        memory = loop.record(resume=True)
        assert memory.steps == STEPS
        assert memory.exact
        assert df.DualForm(loop.model, memory).verify().passed


# -- what is changed between updates ---------------------------------------------------------------


def at(step: int, change: Callable[[Loop], None]) -> Callable[[Loop, int], None]:
    def edit(loop: Loop, now: int) -> None:
        if now == step:
            with torch.no_grad():
                change(loop)

    return edit


EDITS: dict[str, Callable[[Loop], None]] = {
    "one row": lambda loop: loop.weight[1].add_(1e-6),
    "a clamp": lambda loop: loop.weight.clamp_(-0.1, 0.1),
    "a bias": lambda loop: loop.model.get_parameter("0.bias").mul_(1.01),
    "other weights": lambda loop: loop.model.load_state_dict(
        {name: value + 1 for name, value in loop.model.state_dict().items()}
    ),  # type: ignore[dict-item, return-value]
}


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("edit", EDITS)
def test_an_edit_is_found_before_the_next_update(
    tmp_path: Path, edit: str, momentum: float
) -> None:
    loop = Loop(tmp_path, at(LATE, EDITS[edit]), momentum=momentum)
    message = rf"step {LATE}, .*changed in place between its update of step {LATE - 1} and that of"
    memory = loop.refused_with(message)
    assert memory.steps == LATE


@pytest.mark.parametrize(
    "change",
    [
        lambda loop: loop.buffer.mul_(0.5),
        lambda loop: loop.optimizer.state[loop.weight].update(momentum_buffer=loop.buffer * 0.5),
    ],
    ids=["in place", "another"],
)
def test_changed_momentum_is_found_before_the_next_update(
    tmp_path: Path, change: Callable[[Loop], None]
) -> None:
    loop = Loop(tmp_path, at(LATE, change))
    message = rf"step {LATE}, parameter '2\.weight': .*remembers of it \(momentum_buffer\)"
    loop.refused_with(message)


def test_with_warnings_an_edit_is_a_remark_and_recording_goes_on(tmp_path: Path) -> None:
    loop = Loop(tmp_path, at(LATE, EDITS["one row"]))
    with pytest.warns(UserWarning, match=rf"step {LATE}.*changed in place"):
        memory = loop.record(audit="warn")
    assert memory.steps == STEPS
    assert not memory.exact
    assert len(memory.remarks) == 1


def exchange_and_put_back(loop: Loop) -> None:
    """As for an evaluation with averaged weights."""
    own = {name: value.clone() for name, value in loop.model.state_dict().items()}
    loop.model.load_state_dict({name: 0 * value for name, value in own.items()})
    loop.model(loop.batch())
    loop.model.load_state_dict(own)


def load_again(loop: Loop) -> None:
    """The same state under other names."""
    loop.optimizer.load_state_dict(loop.optimizer.state_dict())


def new_tensors(loop: Loop) -> None:
    """Weights that are as they were, elsewhere."""
    for parameter in loop.model.parameters():
        parameter.data = parameter.data.clone()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("change", [exchange_and_put_back, load_again, new_tensors])
def test_weights_that_are_put_back_are_no_error(
    tmp_path: Path, change: Callable[[Loop], None], dtype: torch.dtype
) -> None:
    loop = Loop(tmp_path, lambda loop, step: change(loop) if step % 7 == 3 else None, dtype=dtype)
    memory = loop.record()
    assert memory.exact
    said = ["put back" in remark for remark in memory.remarks]  # once, if a counter has moved
    assert said == ([True] if change is exchange_and_put_back else [])
    assert df.DualForm(loop.model, memory).verify().passed


def test_weights_exchanged_while_they_are_written_down_are_found(tmp_path: Path) -> None:
    def edit(loop: Loop, step: int) -> None:
        if step == LATE:
            exchange_and_put_back(loop)
            own = {name: value.clone() for name, value in loop.model.state_dict().items()}
            loop.optimizer.zero_grad()
            loop.model.load_state_dict({name: 0 * value for name, value in own.items()})
            loop.recorder.flush()

    Loop(tmp_path, edit).refused_with(rf"step {LATE}, .*changed in place .* and now")


# -- what torch does not count ---------------------------------------------------------------------


def clamp_past_torch(loop: Loop) -> None:
    for parameter in loop.model.parameters():
        parameter.data.mul_(0.999)


@pytest.mark.parametrize(
    ("first", "found"), [(1, 2), (2, NOTED_EVERY + 2), (NOTED_EVERY + 1, NOTED_EVERY + 2)]
)
def test_what_a_loop_does_past_torch_at_every_step_is_found_within_one_round(
    tmp_path: Path, first: int, found: int
) -> None:
    loop = Loop(tmp_path, lambda loop, step: clamp_past_torch(loop) if step >= first else None)
    memory = loop.refused_with(rf"step {found}, .*its weights are .* away")
    assert memory.steps >= found


def test_settings_changed_by_a_later_hook_are_found(tmp_path: Path) -> None:
    """What the log says of the step is not what the optimizer did."""

    def slow_down(optimizer: Any, args: Any, kwargs: Any) -> None:
        optimizer.param_groups[0]["lr"] = 0.01

    def speed_up(optimizer: Any, args: Any, kwargs: Any) -> None:
        optimizer.param_groups[0]["lr"] = 0.05

    def edit(loop: Loop, step: int) -> None:
        if step == 5:
            loop.optimizer.register_step_pre_hook(slow_down)
            loop.optimizer.register_step_post_hook(speed_up)

    Loop(tmp_path, edit).refused_with(rf"step {NOTED_EVERY + 2}, .*its weights are .* away")


# -- parameters that fare differently --------------------------------------------------------------


def test_two_optimizers_in_turns(tmp_path: Path) -> None:
    loop = Loop(tmp_path)
    first = SGD(loop.model[0].parameters(), lr=0.05, momentum=0.9)
    second = SGD(loop.model[2].parameters(), lr=0.02, weight_decay=0.1)
    with df.record(loop.model, [first, second], tmp_path, error_signals=False):
        for step in range(STEPS):
            loop.model(loop.batch()).square().mean().backward()
            (first, second)[step % 2].step()
            first.zero_grad()
            second.zero_grad()
    memory = df.Memory.open(tmp_path)
    assert memory.exact, memory.remarks
    assert df.DualForm(loop.model, memory).verify().passed


def test_a_layer_that_comes_late_and_rests_now_and_then(tmp_path: Path) -> None:
    def rest(loop: Loop, step: int) -> None:
        for parameter in loop.model[2].parameters():
            if step < 5 or step % 61 in (0, 60):
                parameter.grad = None

    loop = Loop(tmp_path, rest)
    memory = loop.record()
    assert memory.exact, memory.remarks
    assert df.DualForm(loop.model, memory).verify().passed


def test_some_layers_have_error_signals(tmp_path: Path) -> None:
    """No routine fits; what each parameter is asked stays its own."""
    loop = Loop(tmp_path)
    memory = loop.record(error_signals=["0"])
    assert not np.isnan(memory.audit_projections("0.weight")).any()
    known = ~np.isnan(memory.audit_projections("2.weight"))
    np.testing.assert_array_equal(known, are_noted(STEPS, 1))
    assert df.DualForm(loop.model, memory).verify().passed


def test_what_is_read_as_a_whole_knows_the_same_of_every_parameter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An edit is found whether the step before was read as a whole or in full."""
    monkeypatch.setattr(PassedOver, "of", lambda *args: None)
    loop = Loop(tmp_path, at(LATE, EDITS["one row"]))
    loop.refused_with(rf"step {LATE}, .*changed in place")


# -- some entries ----------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(), (1,), (3,), (64, 64), (784, 10), (5, 3, 3, 3)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_entries_follow_their_parameter(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    entries = Entries()
    parameter = nn.Parameter(torch.ones(shape, dtype=dtype))
    before = entries.of(parameter)
    assert entries.of(parameter) == before
    with torch.no_grad():
        parameter.add_(1)
    changed = entries.of(parameter)
    assert changed != before
    parameter.data = parameter.data - 1  # elsewhere
    assert entries.of(parameter) == before
    if len(shape) == 2:
        parameter.data = parameter.data.t()  # not in one piece
        assert entries.of(parameter) == before
        with torch.no_grad():
            parameter.add_(1)
        assert entries.of(parameter) == changed


def test_entries_are_of_many_rows_and_columns() -> None:
    for rows, columns in ((64, 64), (784, 10), (10, 784), (1000, 1000), (3, 4096)):
        parameter = nn.Parameter(torch.arange(float(rows * columns)).double().view(rows, columns))
        some = np.frombuffer(entries_of(parameter), dtype=np.float64).astype(int)
        assert 32 <= len(some) <= 128
        assert len(set(some // columns)) >= min(rows, 30)
        assert len(set(some % columns)) >= min(columns, 30)


def entries_of(parameter: Tensor) -> bytes:
    found = Entries().of(parameter)
    assert isinstance(found, bytes)
    return found


# -- where keys are seen ---------------------------------------------------------------------------


def test_a_hook_that_was_put_there_early_leaves_nothing_behind() -> None:
    """It is called first, once a pass, and held by nobody but the graph."""
    seen: list[str] = []
    layer = nn.Linear(4, 4)

    class Held:
        def __call__(self, error_signal: Tensor | None) -> None:
            assert error_signal is not None
            seen.append(f"early {float(error_signal.sum())}")

    held = Held()
    gone = weakref.ref(held)
    output = layer(torch.ones(2, 4))
    node = output.grad_fn
    hook_early(node, held)
    output.register_hook(lambda error_signal: seen.append("own") or 2 * error_signal)
    node.register_prehook(
        lambda error_signals: seen.append(f"node {float(error_signals[0].sum())}")
    )
    output.relu_()
    loss = output.sum() * 0 + layer.weight.sum() * 0
    del held
    (loss + output.sum()).backward(retain_graph=True)
    count = float((output > 0).sum())
    assert seen == [f"early {count}", "own", f"node {2 * count}"]
    (loss + output.sum()).backward()
    assert len(seen) == 6
    del output, node, loss
    gc.collect()
    assert gone() is None


def test_hooks_are_put_there_early_by_several_threads_at_once() -> None:
    wrong: list[int] = []

    def work(number: int) -> None:
        layer = nn.Linear(3, 3)
        for _ in range(200):
            called: list[int] = []
            output = layer(torch.ones(2, 3))
            hook_early(output.grad_fn, lambda _, called=called: called.append(number))
            output.sum().backward()
            if called != [number]:
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_what_a_loops_own_hook_makes_of_error_signals_is_no_missing_key(tmp_path: Path) -> None:
    """Gradients are compared with what is left after it, in the steps in which they are."""
    loop = Loop(tmp_path)
    forward = loop.model[0].register_forward_hook(
        lambda module, args, output: output.register_hook(lambda e: 0.5 * e) and None
    )
    memory = loop.record()
    forward.remove()
    assert memory.exact
    assert memory.remarks == ()
    assert memory.layer("0").rows == 5 * STEPS
    assert df.DualForm(loop.model, memory).verify().passed


def test_training_is_the_same_to_the_bit(tmp_path: Path) -> None:
    recorded, plain = Loop(tmp_path, dtype=torch.float32), Loop(tmp_path, dtype=torch.float32)
    recorded.record()
    for step in range(STEPS):
        plain.update(step)
    for one, other in zip(recorded.model.parameters(), plain.model.parameters(), strict=True):
        assert torch.equal(one, other)


def test_keys_are_those_of_a_full_recording(tmp_path: Path) -> None:
    """Layers used twice, forward passes that nobody differentiates, passes over a graph again."""

    def update(loop: Loop, step: int) -> None:
        first, second = loop.batch(), loop.batch()
        loop.model(loop.batch())  # nobody's
        loss = loop.model(first).square().mean() + loop.model(second).mean()
        loss.backward(retain_graph=step % 3 == 0)
        if step % 3 == 0:
            loss.backward()
        loop.optimizer.step()
        loop.optimizer.zero_grad()

    memories = []
    for error_signals in (True, False):
        loop = Loop(tmp_path / str(error_signals))
        loop.update = partial(update, loop)  # type: ignore[method-assign]
        memories.append(loop.record(error_signals=error_signals))
    full, alone = memories
    for name in full.layers:
        assert torch.equal(full.layer(name).keys, alone.layer(name).keys)
        for column in ("step", "microbatch", "call"):
            one, other = (memory.layer(name).patterns[column] for memory in memories)
            np.testing.assert_array_equal(one, other)
