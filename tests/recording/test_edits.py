"""Weights and optimizers that a loop changes between updates: a remainder begins, or a rewind."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.recording.rules import Lion
from tests.recording.runs import backward, network, plain, proved, state_of, update, verified
from torch import nn
from torch.optim import SGD, Adam, AdamW

from dualform.certificate.replay import at
from dualform.certificate.report import BITS
from dualform.errors import AuditError, QueryError, RecordingError
from dualform.memory import Memory
from dualform.recording import record

EDITED, STEPS = 7, 12
KINDS: dict[str, Callable[..., Any]] = {
    "SGD": lambda p: SGD(p, lr=0.05, momentum=0.9),
    "AdamW, fused": lambda p: AdamW(p, lr=0.01, fused=True),
    "Adam": lambda p: Adam(p, lr=0.01, weight_decay=0.1),
    "Lion": lambda p: Lion(p, lr=0.01),
}
each_kind = pytest.mark.parametrize("kind", KINDS)
Change = Callable[[Any, Any], Any]


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def set_row(model: Any, optimizer: Any) -> None:
    model[0].weight.detach()[1] = 0.5


def loaded(model: Any, optimizer: Any) -> None:
    model.load_state_dict({name: 1.1 * p for name, p in model.state_dict().items()})


def reset(model: Any, optimizer: Any) -> None:
    torch.manual_seed(9)
    model[2].reset_parameters()


def remembered(model: Any, optimizer: Any) -> None:
    for value in optimizer.state[model[0].weight].values():
        if isinstance(value, torch.Tensor) and value.dim():
            value.mul_(1.5)
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


EDITS: dict[str, tuple[Change, set[str]]] = {
    "a row set by hand": (set_row, {"0.weight"}),
    "through .data": (lambda m, o: m[2].weight.data.mul_(1.5), {"2.weight"}),
    "a clamp": (lambda m, o: m[2].bias.detach().clamp_(max=0.01), {"2.bias"}),
    "one entry of a small bias": (lambda m, o: m[2].bias.data[3].add_(1e-3), {"2.bias"}),
    "a layer made anew": (reset, {"2.weight", "2.bias"}),
    "another model loaded": (loaded, {"0.weight", "0.bias", "2.weight", "2.bias"}),
    "the optimizer's state loaded": (remembered, {"0.weight"}),
}


def train(
    path: Path, kind: str, change: Change, at_step: int = EDITED, **options: Any
) -> tuple[Any, dict[int, dict[str, torch.Tensor]]]:
    model = plain()
    optimizer = KINDS[kind](model.parameters())
    states = {0: state_of(model)}
    with record(model, path, **options):
        for step in range(STEPS):
            if step == at_step:
                change(model, optimizer)
            update(model, optimizer, step)
            states[step + 1] = state_of(model)
        if at_step == STEPS:
            change(model, optimizer)
    return model, states


@pytest.mark.parametrize("keep", ["auto", "keys"])
@each_kind
@pytest.mark.parametrize("edit", EDITS)
def test_an_edit_between_two_updates_begins_a_remainder(
    edit: str, kind: str, keep: str, tmp_path: Path
) -> None:
    change, edited = EDITS[edit]
    model, states = train(tmp_path / "run", kind, change, keep=keep)
    memory = Memory.open(tmp_path / "run")
    (event,) = memory.events
    assert (event.step, event.what, set(event.parameters)) == (EDITED, "edited", edited)
    (remark,) = (r for r in memory.remarks if "remainder" in r)
    assert all(name in remark for name in sorted(edited)[:1])
    found = verified(memory, model)
    assert found.passed, found
    if keep == "auto":
        for name in memory.parameters:
            assert found.verdicts[name].verdict == BITS
            for step, state in states.items():
                if name in edited and step == EDITED:  # as it was edited, not as the update left it
                    continue
                assert torch.equal(at_if_known(memory, name, step, state[name]), state[name])


def at_if_known(memory: Memory, name: str, step: int, otherwise: torch.Tensor) -> torch.Tensor:
    """The stretch just before an edit is not walked: its weights may be unknown, never wrong."""
    if step < EDITED and memory.kept.last(name, step) == 0 != step:
        ways = at, (memory, name, step, {"tests.recording.rules.Lion": Lion})
        with contextlib.suppress(QueryError):
            return ways[0](*ways[1])
        return otherwise
    return at(memory, name, step, {"tests.recording.rules.Lion": Lion})


@each_kind
def test_a_memory_ends_before_an_edit_after_the_last_update(kind: str, tmp_path: Path) -> None:
    _, states = train(tmp_path / "run", kind, set_row, at_step=STEPS)
    memory = Memory.open(tmp_path / "run")
    assert not memory.events
    (remark,) = [r for r in memory.remarks if "after its last update" in r]
    assert f"{STEPS}, where this memory ends: its weights are those of no recorded step" in remark
    assert verified(memory).passed
    known = {"tests.recording.rules.Lion": Lion}
    for step in (STEPS - 1, STEPS):
        assert torch.equal(at(memory, "0.weight", step, known), states[step]["0.weight"])


@each_kind
@pytest.mark.parametrize("way", ["with the optimizer", "load_state_dict", "data"])
def test_the_best_weights_put_back_at_the_end_spoil_nothing(
    way: str, kind: str, tmp_path: Path
) -> None:
    model = network()
    optimizer = KINDS[kind](model.parameters())
    states = {0: state_of(model)}
    with record(model, tmp_path / "run"):
        for step in range(STEPS):
            update(model, optimizer, step)
            states[step + 1] = state_of(model)
            if step == 4:
                best = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        if way == "data":
            for name, p in model.named_parameters():
                p.data.copy_(best[0][name])
        else:
            model.load_state_dict(best[0])
        if way == "with the optimizer":
            optimizer.load_state_dict(best[1])
        optimizer.zero_grad()
        optimizer.step()  # without a gradient it moves nothing
    memory = proved(tmp_path / "run", None, states)
    assert not memory.events
    assert any(
        f"{STEPS}, where this memory ends: its weights are those after update 5" in r
        for r in memory.remarks
    )


@each_kind
def test_a_clamp_after_every_update_leaves_the_last_weights_to_ask(
    kind: str, tmp_path: Path
) -> None:
    """There is no room to keep every state: what the last update left could not be rebuilt."""
    model = plain()
    optimizer = KINDS[kind](model.parameters())
    with record(model, tmp_path / "clamped"):
        for step in range(STEPS):
            update(model, optimizer, step)
            for p in model.parameters():
                p.data.clamp_(-0.2, 0.2)
    memory = Memory.open(tmp_path / "clamped")
    assert verified(memory, model).passed
    for name, p in model.named_parameters():
        assert torch.equal(at(memory, name, STEPS, {"tests.recording.rules.Lion": Lion}), p)


@each_kind
def test_restored_weights_and_states_are_a_rewind(kind: str, tmp_path: Path) -> None:
    model = network()
    optimizer = KINDS[kind](model.parameters())
    states = {0: state_of(model)}
    with record(model, tmp_path / "run"):
        for step in range(STEPS):
            if step == 4:
                best = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
            if step == 9:
                model.load_state_dict(best[0])
                optimizer.load_state_dict(best[1])
            update(model, optimizer, step)
            states[step + 1] = state_of(model)
    memory = Memory.open(tmp_path / "run")
    rewinds = [e for e in memory.events if e.what == "rewind"]
    assert [(e.step, e.to) for e in rewinds] == [(9, 4)]
    assert memory.path_to("1.weight", STEPS).tolist() == [0, 1, 2, 3, 9, 10, 11]
    assert any("put back to what they were after 4 updates" in r for r in memory.remarks)
    found = verified(memory, model)
    assert found.passed, found
    for step in (*range(5), 10, 11, 12):
        rebuilt = at(memory, "1.weight", step, {"tests.recording.rules.Lion": Lion})
        assert torch.equal(rebuilt, states[step]["1.weight"]), step


@each_kind
def test_a_replaced_optimizer_is_followed(kind: str, tmp_path: Path) -> None:
    model = plain()
    states = {0: state_of(model)}
    first = SGD(model.parameters(), lr=0.1, momentum=0.9)
    with record(model, tmp_path / "run"):
        for step in range(STEPS):
            if step == EDITED:
                first = KINDS[kind](model.parameters())
            update(model, first, step)
            states[step + 1] = state_of(model)
    memory = proved(tmp_path / "run", model, states)
    assert {(e.step, e.what) for e in memory.events} == {(EDITED, "replaced")}


def test_an_optimizer_that_was_not_given_is_found_by_its_first_step(tmp_path: Path) -> None:
    model = plain()
    given, other = SGD(model[0].parameters(), lr=0.1), AdamW(model[2].parameters(), lr=0.01)
    states = {0: state_of(model)}
    with record(model, tmp_path / "run"):
        for step in range(STEPS):
            backward(model, step)
            given.step()
            other.step()
            model.zero_grad()
            states[step + 1] = state_of(model)
    memory = Memory.open(tmp_path / "run")
    assert memory.steps in (STEPS, STEPS + 1)
    assert verified(memory, model).passed


@each_kind
def test_what_changes_no_weight_is_no_edit(kind: str, tmp_path: Path) -> None:
    """Evaluating, averaging, exchanging, schedules, saving, freezing."""
    model = plain()
    optimizer = KINDS[kind](model.parameters())
    averaged = torch.optim.swa_utils.AveragedModel(model)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.99)
    states = {0: state_of(model)}
    with record(model, tmp_path / "run"):
        for step in range(STEPS):
            update(model, optimizer, step)
            states[step + 1] = state_of(model)
            averaged.update_parameters(model)
            schedule.step()
            saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
            optimizer.load_state_dict(saved[1])  # the same again
            model.load_state_dict(averaged.module.state_dict())  # exchanged for an evaluation ...
            with torch.no_grad():
                model.eval()(torch.randn(3, 6))
            model.train().load_state_dict(saved[0])  # ... and put back
            model[0].weight.requires_grad_(step % 3 == 0)
            optimizer.zero_grad(set_to_none=False)
    memory = proved(tmp_path / "run", model, states)
    assert not memory.events


def test_an_optimizer_wrapped_around_another_adds_edits(tmp_path: Path) -> None:
    """A lookahead: every third step weights go half the way back to where they were."""

    class Lookahead(torch.optim.Optimizer):
        def __init__(self, inner: Any) -> None:
            super().__init__([p for g in inner.param_groups for p in g["params"]], {})
            self.inner, self.count = inner, 0
            self.slow = [p.detach().clone() for p in self.param_groups[0]["params"]]

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            self.inner.step()
            self.count += 1
            if self.count % 3 == 0:
                for slow, p in zip(self.slow, self.param_groups[0]["params"], strict=True):
                    p.copy_(slow.lerp_(p, 0.5))

    model = plain()
    optimizer = Lookahead(SGD(model.parameters(), lr=0.1))
    with record(model, tmp_path / "run"):
        for step in range(STEPS):
            update(model, optimizer, step)
    memory = Memory.open(tmp_path / "run")
    assert memory.steps == STEPS
    assert {e.step for e in memory.events if e.what == "edited"} == {3, 6, 9, 12}
    assert verified(memory, model).passed


class SAM(torch.optim.Optimizer):
    """Gradients are those of weights that were moved uphill; another optimizer uses them."""

    def __init__(self, parameters: Any, inner: Callable[[Any], Any]) -> None:
        super().__init__(parameters, {})
        self.inner = inner(self.param_groups[0]["params"])

    @torch.no_grad()
    def step(self, closure: Any) -> None:  # type: ignore[override]
        parameters = self.param_groups[0]["params"]
        torch.enable_grad()(closure)()
        for p in parameters:
            self.state[p]["uphill"] = 0.05 * p.grad
            p.add_(self.state[p]["uphill"])
        torch.enable_grad()(closure)()
        for p in parameters:
            p.sub_(self.state[p]["uphill"])
        self.inner.step()


@pytest.mark.parametrize("beside", [False, True], ids=["alone", "beside another optimizer"])
@each_kind
def test_an_optimizer_that_calls_its_closure_twice_around_another_changes_nothing(
    kind: str, beside: bool, tmp_path: Path
) -> None:
    model = network()
    optimizer = SAM(model[int(beside) * 3 :].parameters(), KINDS[kind])
    other = [SGD(model[:3].parameters(), lr=0.1)] if beside else []
    states = {0: state_of(model)}

    def closure() -> None:
        model[3:].zero_grad()
        backward(model, step)

    with record(model, tmp_path / "run"):
        for step in range(STEPS):
            model.zero_grad()
            if beside:
                backward(model, step)
                other[0].step()
            optimizer.step(closure)
            states[step + 1] = state_of(model)
    memory = Memory.open(tmp_path / "run")
    assert memory.steps == STEPS
    assert {e.what for e in memory.events} <= {"shaken"}
    assert not any("SAM" in remark for remark in memory.remarks)
    found = verified(memory, model)
    assert found.passed, found
    for step, state in states.items():
        rebuilt = at(memory, "4.weight", step, {"tests.recording.rules.Lion": Lion})
        assert (rebuilt - state["4.weight"]).abs().max() < 1e-5


def test_a_change_through_a_parametrization_of_rules_is_found_at_the_next_fingerprint(
    tmp_path: Path,
) -> None:
    """A hook that changes weights inside the optimizer's own step: no rule leads there."""
    model = plain()
    optimizer = SGD(model.parameters(), lr=0.1)
    optimizer.register_step_post_hook(lambda *_: model[0].weight.data.mul_(1.001))

    def train() -> None:
        with record(model, tmp_path / "run"):
            for step in range(140):
                update(model, optimizer, step)

    with pytest.raises(AuditError, match=r"'0.weight' is not where its learning rule puts it"):
        train()


@pytest.mark.filterwarnings("ignore:dualform")
@pytest.mark.parametrize("audit", ["raise", "warn"])
@pytest.mark.parametrize(("edited", "steps"), [(20, 200), (80, 200), (20, 30)])
def test_one_entry_of_a_large_matrix_is_found_at_the_next_fingerprint(
    edited: int, steps: int, audit: str, tmp_path: Path
) -> None:
    """Marks see some sixty entries; a fingerprint sees all, from the first step to the last."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 300), nn.Tanh(), nn.Linear(300, 4))
    optimizer = SGD(model.parameters(), lr=0.05, momentum=0.9)
    found_at = min(edited // 64 * 64 + 64, steps)

    def train() -> None:
        with record(model, tmp_path / "run", audit=audit):
            for step in range(steps):
                if step == edited:
                    model[0].weight.data[17, 3] += 0.05
                update(model, optimizer, step)

    if audit == "raise":
        with pytest.raises(AuditError, match=r"'0.weight' is not where its learning rule puts it"):
            train()
    else:
        train()
    memory = Memory.open(tmp_path / "run")
    assert [(e.step, e.what, e.parameters) for e in memory.events] == [
        (found_at, "edited", ("0.weight",))
    ]
    assert memory.events[0].why in memory.remarks
    found = verified(memory, model)
    assert found.passed, found
    if found_at < memory.steps:
        assert "but for 1 of" in found.verdicts["0.weight"].why
    assert torch.equal(at(memory, "0.weight", memory.steps), model[0].weight)


def test_a_tied_pair_of_networks_is_told_apart(tmp_path: Path) -> None:
    """Two models at once, each with its own recorder."""
    models = [nn.Linear(4, 2), nn.Linear(4, 2)]
    one, two = (SGD(m.parameters(), lr=0.1, momentum=0.9) for m in models)
    with record(models[0], tmp_path / "1"), record(models[1], tmp_path / "2"):
        for step in range(4):
            (models[0](torch.randn(3, 4)).sum() + models[1](torch.randn(2, 4)).sum()).backward()
            one.step()
            if step % 2:
                two.step()
            one.zero_grad()
            two.zero_grad()
    for name, model, steps in (("1", models[0], 4), ("2", models[1], 2)):
        assert proved(tmp_path / name, model).steps == steps


# -- other objects in place of parameters ----------------------------------------------------------


def in_place_of(model: Any, optimizer: Any, place: int, name: str, new: torch.Tensor) -> None:
    """Another object of the same name, in the module and in the optimizer."""
    old, parameter = getattr(model[place], name), nn.Parameter(new)
    setattr(model[place], name, parameter)
    for group in optimizer.param_groups:
        group["params"] = [parameter if p is old else p for p in group["params"]]


def a_new_weight(model: Any, optimizer: Any) -> None:
    in_place_of(model, optimizer, 2, "weight", torch.linspace(-1, 1, 36).view(4, 9))


def a_new_bias(model: Any, optimizer: Any) -> None:
    in_place_of(model, optimizer, 2, "bias", torch.ones(4))


def lying_otherwise(model: Any, optimizer: Any) -> None:
    in_place_of(model, optimizer, 2, "weight", torch.linspace(-1, 1, 36).view(9, 4).t())


def in_a_group_of_its_own(model: Any, optimizer: Any) -> None:
    model[2].weight = nn.Parameter(torch.linspace(-1, 1, 36).view(4, 9))
    optimizer.add_param_group({"params": [model[2].weight]})


def the_same_numbers(model: Any, optimizer: Any) -> None:
    in_place_of(model, optimizer, 2, "weight", model[2].weight.detach().clone())


def all_moved(model: Any, optimizer: Any) -> None:
    """As `model.to(...)` does where torch is asked for new objects."""
    for place in (0, 2):
        for name in ("weight", "bias"):
            new = 1.1 * getattr(model[place], name).detach()
            in_place_of(model, optimizer, place, name, new)


REPLACED: dict[str, tuple[Change, set[str]]] = {
    "a weight": (a_new_weight, {"2.weight"}),
    "a bias": (a_new_bias, {"2.bias"}),
    "lying otherwise": (lying_otherwise, {"2.weight"}),
    "a group of its own": (in_a_group_of_its_own, {"2.weight"}),
    "the same numbers": (the_same_numbers, {"2.weight"}),
    "every one": (all_moved, {"0.weight", "0.bias", "2.weight", "2.bias"}),
}


@pytest.mark.parametrize("keep", ["auto", "values"])
@each_kind
@pytest.mark.parametrize("how", REPLACED)
def test_another_object_in_place_of_a_parameter_is_an_edit_and_recorded_on(
    how: str, kind: str, keep: str, tmp_path: Path
) -> None:
    if how == "lying otherwise" and "fused" in kind:
        pytest.skip("fused kernels round by the place in memory, which a memory does not keep")
    change, edited = REPLACED[how]
    model, states = train(tmp_path / "run", kind, change, keep=keep)
    memory = Memory.open(tmp_path / "run")
    assert memory.steps == STEPS
    if how != "the same numbers" or kind != "Lion":  # its state is made before the update
        assert [(e.step, e.what) for e in memory.events] == [(EDITED, "edited")]
        assert set(memory.events[0].parameters) == edited
    found = verified(memory, model)
    assert found.passed, found
    for name in memory.parameters if keep == "auto" else ():
        assert found.verdicts[name].verdict == BITS
        for step, state in states.items():
            if name not in edited or step != EDITED:
                assert torch.equal(at_if_known(memory, name, step, state[name]), state[name])


@each_kind
def test_a_memory_ends_before_the_last_object_in_place_of_a_parameter(
    kind: str, tmp_path: Path
) -> None:
    _, states = train(tmp_path / "run", kind, a_new_weight, at_step=STEPS)
    memory = Memory.open(tmp_path / "run")
    assert not memory.events
    assert any("after its last update" in remark for remark in memory.remarks)
    assert verified(memory).passed
    known = {"tests.recording.rules.Lion": Lion}
    assert torch.equal(at(memory, "2.weight", STEPS, known), states[STEPS]["2.weight"])


@pytest.mark.parametrize("before_the_pass", [True, False])
@pytest.mark.parametrize("new", [torch.zeros(4, 9).double(), torch.zeros(5, 9)], ids=["f64", "5"])
def test_an_object_of_another_kind_in_place_of_a_parameter_is_refused(
    new: torch.Tensor, before_the_pass: bool, tmp_path: Path
) -> None:
    model = plain()
    optimizer, states = SGD(model.parameters(), lr=0.05, momentum=0.9), {0: state_of(model)}
    with (
        pytest.raises(RecordingError, match=r"2\.weight.*record again into a new path"),
        record(model, tmp_path / "run"),
    ):
        for step in range(STEPS):
            update(model, optimizer, step)
            states[step + 1] = state_of(model)
        if not before_the_pass:
            backward(model, STEPS)
        in_place_of(model, optimizer, 2, "weight", new)
        if before_the_pass:
            torch.nn.functional.linear(torch.ones(1, 9).to(new), model[2].weight).sum().backward()
            model[0](torch.ones(1, 6)).sum().backward()
        optimizer.step()
    assert proved(tmp_path / "run", None, states).steps == STEPS


def test_a_module_in_place_of_another_is_refused_before_its_update(tmp_path: Path) -> None:
    model = plain()
    optimizer, states = SGD(model.parameters(), lr=0.05, momentum=0.9), {0: state_of(model)}
    with (
        pytest.raises(AuditError, match=r"2\.weight.*not explained by its patterns"),
        record(model, tmp_path / "run"),
    ):
        for step in range(STEPS):
            update(model, optimizer, step)
            states[step + 1] = state_of(model)
        model[2] = nn.Linear(9, 4)
        update(model, SGD(model.parameters(), lr=0.05, momentum=0.9), STEPS)
    memory = proved(tmp_path / "run", None, None, verdict=None)
    assert memory.steps == STEPS
