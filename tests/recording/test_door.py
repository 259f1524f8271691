"""One line in anybody's training code: who moves the model, how it is tagged, begun and ended."""

from __future__ import annotations

import copy
import gc
import subprocess
import sys
import textwrap
import threading
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.recording.runs import backward, batch, plain, proved, state_of, update
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, AdamW

import dualform
from dualform import Memory, RecordingError, record
from dualform.certificate.report import BITS, KEPT

STEPS = 12

# -- whoever steps the model's parameters ----------------------------------------------------------


class MyAdamW(AdamW):
    """A subclass without a step of its own."""


class Prepared(torch.optim.Optimizer):
    """What accelerate hands out: a wrapper that was never set up as an optimizer."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.optimizer = inner
        self.param_groups = inner.param_groups

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.optimizer.step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)


OPTIMIZERS: dict[str, Any] = {
    "plain": lambda p: AdamW(p, lr=0.01),
    "subclassed": lambda p: MyAdamW(p, lr=0.01),
    "wrapped": lambda p: Prepared(SGD(p, lr=0.05, momentum=0.9)),
    "with a schedule": lambda p: SGD(p, lr=0.05, momentum=0.9, nesterov=True),
}


@pytest.mark.parametrize("born", ["before", "inside"])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_an_optimizer_is_found_by_its_step(kind: str, born: str, tmp_path: Path) -> None:
    model = plain()
    optimizer = OPTIMIZERS[kind](model.parameters()) if born == "before" else None
    other = plain()
    of_other = SGD(other.parameters(), lr=0.1)
    states = {0: state_of(model)}
    with record(model, tmp_path / "run") as recorder:
        optimizer = optimizer or OPTIMIZERS[kind](model.parameters())
        for step in range(STEPS):
            assert recorder.steps == step
            update(other, of_other, step)  # another model's optimizer never counts
            update(model, optimizer, step)
            states[step + 1] = state_of(model)
            assert recorder.steps == step + 1
    memory = proved(tmp_path / "run", model, states)
    assert memory.steps == STEPS
    assert not memory.events
    assert not memory.remarks
    bare = plain()
    optimizer = OPTIMIZERS[kind](bare.parameters())
    for step in range(STEPS):
        update(bare, optimizer, step)
    for name, p in bare.named_parameters():
        assert torch.equal(p, dict(model.named_parameters())[name])


@pytest.mark.parametrize("rule", [lambda p: SGD(p, lr=0.05, momentum=0.9), AdamW])
def test_what_an_optimizer_remembers_of_the_time_before_is_the_initial_part(
    rule: Any, tmp_path: Path
) -> None:
    model = plain()
    optimizer = rule(model.parameters())
    for step in range(5):
        update(model, optimizer, step)
    states = {0: state_of(model)}
    with record(model, tmp_path / "run"):
        for step in range(70):  # past the first fingerprint
            update(model, optimizer, step)
            states[step + 1] = state_of(model)
    memory = proved(tmp_path / "run", model, states)
    assert not memory.events


def test_two_optimizers_in_turn_make_one_step(tmp_path: Path) -> None:
    model = plain()
    one, two = SGD(model[0].parameters(), lr=0.1), AdamW(model[2].parameters(), lr=0.01)
    states = {0: state_of(model)}
    with record(model, tmp_path / "run"):
        for step in range(STEPS):
            backward(model, step)
            one.step()
            two.step()
            model.zero_grad()
            states[step + 1] = state_of(model)
    assert proved(tmp_path / "run", model, states).steps == STEPS


def test_what_no_optimizer_moves_is_said_when_the_first_step_is_over(tmp_path: Path) -> None:
    model = plain()
    optimizer = SGD(model[2].parameters(), lr=0.1)
    with record(model, tmp_path / "run") as recorder:
        for step in range(3):
            update(model, optimizer, step)
    (remark,) = recorder.remarks
    assert remark.startswith("0.weight, 0.bias: has a gradient, but no optimizer moved it")


def test_a_recording_of_no_step_says_so(tmp_path: Path) -> None:
    model, other = plain(), plain()
    optimizer = SGD(other.parameters(), lr=0.1)
    with (
        pytest.warns(UserWarning, match="nothing was recorded: no optimizer moved a parameter"),
        record(model, tmp_path / "run"),
    ):
        update(other, optimizer, 0)
    assert Memory.open(tmp_path / "run").steps == 0


# -- updates by hand -------------------------------------------------------------------------------


def by_hand(model: nn.Module) -> None:
    for p in model.parameters():
        p.data.add_(p.grad, alpha=-0.05)  # type: ignore[arg-type]


def test_updates_by_hand_are_recorded_by_values(tmp_path: Path) -> None:
    model, bare = plain(), plain()
    states = {0: state_of(model)}
    with record(model, tmp_path / "run") as recorder:
        for step in range(STEPS):
            recorder.tag(label=batch(step)[1])
            backward(model, step)
            with recorder.update():
                by_hand(model)
            model.zero_grad()
            states[step + 1] = state_of(model)
            backward(bare, step)
            by_hand(bare)
            bare.zero_grad()
    assert all(
        torch.equal(a, b) for a, b in zip(bare.parameters(), model.parameters(), strict=True)
    )
    memory = proved(tmp_path / "run", model, verdict=KEPT)
    assert memory.steps == STEPS
    for step in memory.kept.steps("0.weight"):
        assert torch.equal(memory.kept.weights("0.weight", step), states[step]["0.weight"])
    (remark,) = recorder.remarks
    assert remark.startswith("0.weight, 0.bias, 2.weight and 1 more: is moved by hand")
    dual = dualform.DualForm(model, memory)
    query = batch(99)[0][:1]
    assert dual.attend(query)["0"].top(3).columns
    with pytest.raises(dualform.QueryError, match="by hand"):
        dual.contribute(query, target=1)


def test_an_optimizer_or_a_backward_pass_inside_the_block_is_an_error(tmp_path: Path) -> None:
    model = plain()
    optimizer = SGD(model.parameters(), lr=0.05)
    with record(model, tmp_path / "run") as recorder:
        for step in range(2):
            backward(model, step)
            with recorder.update():
                by_hand(model)
            model.zero_grad()
        backward(model, 2)
        step_inside = pytest.raises(RecordingError, match="An optimizer's step needs no block")
        with step_inside, recorder.update():
            optimizer.step()
        block_inside = pytest.raises(RecordingError, match="or another block began")
        with block_inside, recorder.update(), recorder.update():
            by_hand(model)
        model.zero_grad()
        too_late = pytest.raises(RecordingError, match=r"Call backward\(\) before the block")
        with too_late, recorder.update():
            backward(model, 3)
            by_hand(model)
    assert recorder.steps == 2


@pytest.mark.filterwarnings("ignore:dualform")
def test_a_block_of_updates_that_raises_ends_as_a_broken_off_update(tmp_path: Path) -> None:
    model = plain()
    with record(model, tmp_path / "run") as recorder:
        for step in range(6):
            backward(model, step)
            if step == 3:
                with pytest.raises(ZeroDivisionError), recorder.update():
                    model[0].weight.data.add_(1.0)
                    raise ZeroDivisionError
            with recorder.update():
                by_hand(model)
            model.zero_grad()
    memory = proved(tmp_path / "run", model, verdict=None)
    assert memory.steps == 6
    assert [(e.step, e.what) for e in memory.events] == [(3, "edited")]


def test_weights_that_move_without_an_optimizer_are_an_error_that_names_the_block(
    tmp_path: Path,
) -> None:
    model = plain()
    with (
        pytest.raises(RecordingError, match=r"inside `with recorder.update\(\):`"),
        record(model, tmp_path / "run"),
    ):
        for step in range(5):
            backward(model, step)
            by_hand(model)
            model.zero_grad()
    assert step == 2


# -- tags= -----------------------------------------------------------------------------------------


class Classifier(nn.Module):
    """A model that is given its labels, as those of trainers are, and computes its own loss."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.head = nn.Embedding(11, 8), nn.Linear(8, 4)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        logits = self.head(self.words(input_ids).mean(1))
        return {"logits": logits} if labels is None else {"loss": F.cross_entropy(logits, labels)}


def fed(step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(0, 11, (5, 7), generator=generator)
    return {"input_ids": ids, "labels": torch.randint(0, 4, (5,), generator=generator)}


@pytest.mark.parametrize("way", ["keywords", "positions"])
def test_a_function_of_the_models_inputs_tags_every_batch(way: str, tmp_path: Path) -> None:
    model = Classifier()
    optimizer = AdamW(model.parameters(), lr=0.01)
    with record(
        model, tmp_path / "run", tags=lambda input_ids, labels, **_: {"label": labels}
    ) as recorder:
        for step in range(STEPS):
            given = fed(step)
            out = model(**given) if way == "keywords" else model(*given.values())
            out["loss"].backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():  # an evaluation without labels is not asked
                model(given["input_ids"])
        with pytest.raises(RecordingError, match="tags= names the patterns already"):
            recorder.tag(label=[1])
    labels = torch.cat([fed(step)["labels"] for step in range(STEPS)])
    memory = Memory.open(tmp_path / "run")
    assert memory.layer("head").patterns["label"].tolist() == labels.tolist()
    assert memory.layer("words").patterns["label"].tolist() == labels.repeat_interleave(7).tolist()
    proved(tmp_path / "run", model)


class Recursive(nn.Module):
    """A model that calls itself, on other inputs, in the middle of its own call."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(1, 6), nn.Linear(6, 4)

    def forward(self, x: Tensor, inner: Tensor | None = None) -> Tensor:
        h = self.first(x).tanh()
        if inner is not None:
            h = h + self(inner).mean()
        return self.last(h)


def test_calls_within_a_call_and_in_threads_each_have_their_own_tags(tmp_path: Path) -> None:
    model = Recursive()
    optimizer = SGD(model.parameters(), lr=0.01)
    with record(model, tmp_path / "run", tags=lambda x, *inner: {"id": x[:, 0]}):
        for step in range(8):
            outs, x = [], torch.arange(4.0)[:, None] + 4 * step
            threads = [
                threading.Thread(target=lambda i=i, x=x, o=outs: o.append(model(x[i], -x[i] - 1)))
                for i in (slice(0, 1), slice(1, 4))
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            torch.cat(outs).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    memory = Memory.open(tmp_path / "run")
    first = memory.layer("first")
    assert first.patterns["id"].tolist() == first.keys[:, 0].tolist()
    assert sorted(memory.layer("last").patterns["id"]) == sorted(first.keys[:, 0].tolist())


@pytest.mark.parametrize(
    ("tags", "message"),
    [
        (lambda x: {}, r"tags= raised TypeError.*own inputs, here \(input_ids=Tensor, labels="),
        (lambda **inputs: inputs["label"], "tags= raised KeyError"),
        (lambda labels, **_: labels, "tags= returned a Tensor; expected a dict"),
    ],
)
def test_a_function_that_cannot_say_the_tags_is_an_error_at_once(
    tags: Any, message: str, tmp_path: Path
) -> None:
    model = Classifier()
    with pytest.raises(RecordingError, match=message), record(model, tmp_path / "run", tags=tags):
        model(**fed(0))["loss"].backward()


def test_a_function_that_is_never_asked_is_an_error_before_the_first_update(tmp_path: Path) -> None:
    model = nn.ModuleDict({"net": plain()})
    optimizer = SGD(model.parameters(), lr=0.05)
    with (
        pytest.raises(RecordingError, match=r"tags= was never called.*only parts of that"),
        record(model, tmp_path / "run", tags=lambda x: {"label": 0}),
    ):
        update(model["net"], optimizer, 0)


def test_a_tag_that_fits_no_layer_is_an_error_at_once(tmp_path: Path) -> None:
    model = nn.Embedding(11, 8)
    with (
        pytest.raises(
            RecordingError, match=r"the tag 'label' has shape \[3\].*leading shape \[5, 7"
        ),
        record(model, tmp_path / "run") as recorder,
    ):
        recorder.tag(label=[1, 2, 3])
        model(fed(0)["input_ids"]).sum().backward()


# -- start and close -------------------------------------------------------------------------------


def test_start_and_close_do_what_the_block_does_and_may_be_called_again(tmp_path: Path) -> None:
    model = plain()
    optimizer = SGD(model.parameters(), lr=0.05)
    recorder = record(model, tmp_path / "run")
    recorder.close()  # not begun: nothing to do
    assert recorder.start() is recorder is recorder.start()
    for step in range(STEPS):
        update(model, optimizer, step)
    recorder.close()
    recorder.close()
    assert proved(tmp_path / "run", model).closed
    with pytest.raises(
        RecordingError, match=r"used before; call dualform.record again, with resume"
    ):
        recorder.start()


def test_closing_while_an_error_is_handled_does_not_hide_it(tmp_path: Path) -> None:
    model = plain()
    optimizer = SGD(model.parameters(), lr=0.05)
    recorder = record(model, tmp_path / "run").start()
    with pytest.raises(ZeroDivisionError):
        try:
            update(model, optimizer, 0)
            raise ZeroDivisionError
        finally:
            recorder.close()
    memory = Memory.open(tmp_path / "run")
    assert memory.steps == 1
    assert "the training loop was ended by ZeroDivisionError" in memory.remarks


def test_a_recorder_left_on_the_model_breaks_no_copy(tmp_path: Path) -> None:
    model: Any = nn.Sequential(OrderedDict(fc=nn.Linear(6, 9), head=nn.Linear(9, 4)))
    optimizer = SGD(model.parameters(), lr=0.05)
    model.recorder = record(model, tmp_path / "run").start()
    for step in range(3):
        update(model, optimizer, step)
        assert copy.deepcopy(model).recorder is model.recorder
    model.recorder.close()
    dual = dualform.DualForm(model, tmp_path / "run")
    assert torch.equal(dual.to_model().head.weight, model.head.weight)


def test_a_second_run_of_a_cell_ends_the_lost_recorder_and_says_how_to_go_on(
    tmp_path: Path,
) -> None:
    model = plain()
    optimizer = SGD(model.parameters(), lr=0.05)
    recorder = record(model, tmp_path / "run").start()
    update(model, optimizer, 0)
    with pytest.raises(RecordingError, match=r"resume=True to go on.*overwrite=True"):
        record(model, tmp_path / "run").start()
    assert recorder.steps == 1
    recorder = record(model, tmp_path / "run", resume=True).start()
    update(model, optimizer, 1)
    del recorder
    gc.collect()
    with record(model, tmp_path / "run", resume=True):
        update(model, optimizer, 2)
    assert proved(tmp_path / "run", model).steps == 3


def test_what_nobody_closed_is_committed_when_python_ends(tmp_path: Path) -> None:
    script = f"""
        import torch, dualform
        model = torch.nn.Linear(3, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        dualform.record(model, {str(tmp_path / "run")!r}).start()
        for _ in range(4):
            model(torch.randn(5, 3)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(script)], check=True)
    memory = Memory.open(tmp_path / "run")
    assert memory.closed
    assert memory.steps == 4
    assert memory.layer("model").rows == 20


# -- what cannot be recorded -----------------------------------------------------------------------


def test_more_than_one_rank_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    with pytest.raises(RecordingError, match=r"model on 2 ranks.*Train on one rank"):
        record(plain(), tmp_path / "run").start()


def test_ranks_that_join_later_are_refused_before_the_first_update(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = plain()
    optimizer = SGD(model.parameters(), lr=0.05)
    with pytest.raises(RecordingError, match="on 2 ranks"), record(model, tmp_path / "run"):
        monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
        update(model, optimizer, 0)


@pytest.mark.filterwarnings("ignore:dualform")
def test_sparse_inputs_are_values_and_one_remark(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 4))
    optimizer = SGD(model.parameters(), lr=0.05)
    with record(model, tmp_path / "run") as recorder:
        for step in range(4):
            x, y = batch(step)
            F.cross_entropy(model(x.to_sparse()), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    memory = proved(tmp_path / "run", model, verdict=BITS)
    assert memory.parameters["0.weight"].keep == "values"
    (remark,) = recorder.remarks
    assert remark.startswith("0.weight, 0.bias: is given a sparse or nested input")


def test_dtypes_of_torch_are_names_too(tmp_path: Path) -> None:
    model = plain()
    optimizer = SGD(model.parameters(), lr=0.05)
    with record(model, tmp_path / "run", dtype=torch.float16):
        update(model, optimizer, 0)
    assert Memory.open(tmp_path / "run").layer("0").stored == torch.float16


# -- asking with the model as the loop left it -----------------------------------------------------


def test_a_model_with_its_best_weights_back_is_said_to_be_that_step(tmp_path: Path) -> None:
    model = plain()
    optimizer = SGD(model.parameters(), lr=0.05, momentum=0.9)
    with record(model, tmp_path / "run"):
        for step in range(STEPS):
            update(model, optimizer, step)
            if step == 4:
                best = state_of(model)
        model.load_state_dict(best)
    dual = dualform.DualForm(model, tmp_path / "run")
    assert "the model given is the network after 5 updates: see at(5)" in repr(dual)
    found = dual.verify()
    assert found.passed
    assert found.model == 5
    assert "the model is the network as it was after 5 updates: ask at(5)" in repr(found)
    x = batch(99)[0]
    with pytest.raises(dualform.QueryError, match=r"after 5. Ask at\(5\).verify"):
        dual.verify(x)
    assert dual.at(5).verify(x).passed
    assert torch.equal(dual.at(5).to_model()(x), model(x))


def test_an_untrained_architecture_is_no_failed_certificate(tmp_path: Path) -> None:
    model = plain()
    optimizer = SGD(model.parameters(), lr=0.05, momentum=0.9)
    with record(model, tmp_path / "run"):
        for step in range(STEPS):
            update(model, optimizer, step)
    torch.manual_seed(9)
    fresh = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 4))
    found = dualform.DualForm(fresh, tmp_path / "run").verify(batch(99)[0])
    assert repr(found).splitlines()[0].endswith("PASSED, bit for bit; the model is another")
    assert "FAILED" not in repr(found)
    before = dualform.DualForm(plain(), tmp_path / "run").verify()  # as it was before training
    assert (before.passed, before.model) == (True, 0)


def test_one_layer_in_two_optimizers_of_which_one_moves_every_other_time(tmp_path: Path) -> None:
    """Rows of a layer settle at once, so they belong to no step in which its bias has moved."""
    model = plain()
    weights = SGD([p for p in model.parameters() if p.dim() == 2], lr=0.1, momentum=0.9)
    biases = SGD([p for p in model.parameters() if p.dim() == 1], lr=0.1, momentum=0.5)
    with record(model, tmp_path / "run"):
        for step in range(STEPS):
            backward(model, step)
            weights.step()
            weights.zero_grad()
            if step % 2:
                biases.step()
                biases.zero_grad()
    proved(tmp_path / "run", model)


# -- a base that is not trained --------------------------------------------------------------------


class Adapted(nn.Module):
    """A large layer that is not trained, between two that are."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.inner, self.base = nn.Linear(6, 70), nn.Linear(70, 70)
        self.head = nn.Linear(70, 4)
        self.base.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.base(self.inner(x).tanh()).tanh())


def test_of_a_base_that_is_not_trained_a_digest_is_kept(tmp_path: Path) -> None:
    model = Adapted()
    optimizer = AdamW((p for p in model.parameters() if p.requires_grad), lr=0.01)
    states = {0: state_of(model)}
    with record(model, tmp_path / "run"):
        for step in range(STEPS):
            update(model, optimizer, step)
            states[step + 1] = state_of(model)
    memory = Memory.open(tmp_path / "run")
    assert not any(
        "base.weight" in name
        for s in memory.opened.segments
        for name in s.file.places
        if "kept/weights" in name
    )
    assert memory.kept.digest("base.weight")
    dual, x = dualform.DualForm(model, memory), batch(99)[0]
    assert dual.verify(x, every_step=True).passed
    assert torch.equal(dual(x), model(x))
    assert torch.equal(dual.at(5).weights()["base.weight"], states[5]["base.weight"])
    assert abs(dual.contribute(x[:1], target=1).residual) < 1e-6
    assert dualform.DualForm(None, Memory.open(tmp_path / "run")).verify().passed
    with pytest.raises(dualform.QueryError, match="a digest alone is kept, and hand over a model"):
        dualform.DualForm(None, Memory.open(tmp_path / "run")).weights()
    with torch.no_grad():
        model.base.weight[3, 4] += 1e-3
    other = dualform.DualForm(model, Memory.open(tmp_path / "run"))
    assert [c.parameter for c in other.verify().failures] == ["base.weight"]
    with pytest.raises(dualform.QueryError, match="and the model's is another"):
        other(x)


@pytest.mark.parametrize("edited", [False, True])
def test_a_base_that_is_trained_later_is_kept_from_then_on(edited: bool, tmp_path: Path) -> None:
    model = Adapted()
    optimizer = SGD(model.parameters(), lr=0.05, momentum=0.9)
    states = {0: state_of(model)}
    with record(model, tmp_path / "run") as recorder:
        for step in range(STEPS):
            if step == 6:
                recorder.flush()
                model.base.requires_grad_(True)
                with torch.no_grad():
                    model.base.weight[0, 1] += 1e-3 * edited
            update(model, optimizer, step)
            states[step + 1] = state_of(model)
    memory = proved(tmp_path / "run", model, None if edited else states)
    assert memory.kept.steps("base.weight")[0] == 6 * edited
    for step in (7, STEPS):
        found = dualform.DualForm(model, memory).at(step).weights()["base.weight"]
        assert torch.equal(found, states[step]["base.weight"])


def test_a_base_that_is_not_trained_but_edited_twice_ends_as_it_is(tmp_path: Path) -> None:
    model = Adapted()
    optimizer = SGD((p for p in model.parameters() if p.requires_grad), lr=0.05, momentum=0.9)
    with record(model, tmp_path / "run"):
        for step in range(STEPS):
            update(model, optimizer, step)
            if step in (3, 6):
                model.base.weight.data.mul_(1.5)
    dual, x = dualform.DualForm(model, tmp_path / "run"), batch(99)[0]
    assert dual.verify(every_step=True).passed
    assert torch.equal(dual(x), model(x))


def test_a_run_with_a_base_that_is_not_trained_is_gone_on_with(tmp_path: Path) -> None:
    model = Adapted()
    optimizer = SGD((p for p in model.parameters() if p.requires_grad), lr=0.05, momentum=0.9)
    for first, last in ((0, 5), (5, STEPS)):
        with record(model, tmp_path / "run", resume=True) as recorder:
            assert recorder.steps == first
            for step in range(first, last):
                update(model, optimizer, step)
    memory = Memory.open(tmp_path / "run")
    assert memory.steps == STEPS
    assert dualform.DualForm(model, memory).verify(every_step=True).passed


def test_nodes_that_are_looked_up_in_order_keep_their_tags(tmp_path: Path) -> None:
    """Of a table of positions too, where examples have as many."""
    nodes = nn.Sequential(nn.Embedding(5, 8), nn.Linear(8, 4))
    optimizer = SGD(nodes.parameters(), lr=0.1)
    with record(nodes, tmp_path / "nodes") as recorder:
        recorder.tag(label=[3, 1, 4, 1, 5])
        nodes(torch.arange(5)).square().sum().backward()
        optimizer.step()
    memory = Memory.open(tmp_path / "nodes")
    assert memory.layer("0").patterns["label"].tolist() == [3, 1, 4, 1, 5]

    class Text(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.places = nn.Embedding(9, 8), nn.Embedding(5, 8)
            self.head = nn.Linear(8, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.words(x) + self.places(torch.arange(x.shape[1])))

    text = Text()
    optimizer = SGD(text.parameters(), lr=0.1)
    with record(text, tmp_path / "text") as recorder:
        recorder.tag(label=[3, 1, 4, 1, 5])
        text(torch.randint(9, (5, 5))).square().sum().backward()
        optimizer.step()
    memory = Memory.open(tmp_path / "text")
    assert memory.layer("words").patterns["label"].tolist() == [
        x for x in (3, 1, 4, 1, 5) for _ in "12345"
    ]
    assert set(memory.layer("places").patterns["label"]) == {None}


def test_things_in_each_others_place_are_said_so(tmp_path: Path) -> None:
    model = plain()
    optimizer = SGD(model.parameters(), lr=0.1)
    with record(model, tmp_path / "run") as recorder:
        recorder.tag(label=batch(0)[1])
        update(model, optimizer, 0)
    with pytest.raises(dualform.QueryError, match=r"exchanged. Write DualForm\(model, memory\)"):
        dualform.DualForm(tmp_path / "run", model)  # type: ignore[arg-type]
    dual = dualform.DualForm(model, tmp_path / "run")
    for strength in (3, -0.5, float("nan"), "all"):
        with pytest.raises(dualform.QueryError, match="expected a number from 0 to 1"):
            dual.without(label=1, strength=strength)  # type: ignore[arg-type]


def test_tags_are_asked_for_inside_a_closure_too(tmp_path: Path) -> None:
    """As Lightning trains: the first call of the model is inside the optimizer's step."""
    model = plain()
    optimizer = SGD(model.parameters(), lr=0.05, momentum=0.9)
    with record(model, tmp_path / "run", tags=lambda x: {"first": x[:, 0]}):
        for step in range(4):

            def closure(step: int = step) -> Tensor:
                optimizer.zero_grad()
                x, y = batch(step)
                loss = F.cross_entropy(model(x), y)
                loss.backward()
                return loss

            optimizer.step(closure)  # type: ignore[arg-type]
    layer = proved(tmp_path / "run", model).layer("0")
    assert layer.patterns["first"].tolist() == layer.keys[:, 0].tolist()


def test_what_is_fed_past_the_models_own_call_must_be_tagged(tmp_path: Path) -> None:
    model = Classifier()
    optimizer = AdamW(model.parameters(), lr=0.01)
    tags = lambda input_ids, labels, **_: {"label": labels}  # noqa: E731
    with (
        pytest.raises(RecordingError, match="that was not tagged, though earlier batches were"),
        record(model, tmp_path / "run", tags=tags),
    ):
        model(**fed(0))["loss"].backward()
        optimizer.step()
        model.head(torch.randn(3, 8)).sum().backward()


def test_what_goes_wrong_while_rows_are_copied_is_said_to_be_the_recorders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dualform.recording.regions import Region

    def full(*_: Any) -> Tensor:
        raise RuntimeError("no memory for that")

    model = plain()
    with (
        pytest.raises(RecordingError, match=r"could not be recorded: RuntimeError\('no memory"),
        record(model, tmp_path / "run"),
    ):
        monkeypatch.setattr(Region, "append", full)
        backward(model, 0)
    monkeypatch.undo()


def test_gradients_of_the_time_before_do_not_stop_updates_by_hand(tmp_path: Path) -> None:
    model = plain()
    backward(model, 0)
    with record(model, tmp_path / "run") as recorder:
        for step in range(3):
            backward(model, step)
            with recorder.update():
                by_hand(model)
            model.zero_grad()
    assert proved(tmp_path / "run", model, verdict=KEPT).steps == 3
