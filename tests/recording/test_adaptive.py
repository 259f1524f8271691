"""Recording under Adam and its relatives: what is kept, found and refused, and resuming."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adagrad, Adam, AdamW, RMSprop

import dualform as df

KINDS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": lambda p: AdamW(p, lr=3e-3, weight_decay=0.1),
    "AdamW, fused": lambda p: AdamW(p, lr=3e-3, fused=True),
    "Adam, coupled, amsgrad": lambda p: Adam(p, lr=3e-3, weight_decay=0.1, amsgrad=True),
    "RMSprop, momentum": lambda p: RMSprop(p, lr=1e-3, momentum=0.8),
    "Adagrad": lambda p: Adagrad(p, lr=1e-2),
}
each_kind = pytest.mark.parametrize("kind", KINDS)


def network(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.LayerNorm(8), nn.Linear(8, 3)).to(dtype)


def train(model: nn.Module, optimizer: Any, steps: int, seed: int = 0, start: int = 0) -> None:
    dtype = next(model.parameters()).dtype
    for step in range(start, start + steps):
        generator = torch.Generator().manual_seed(1000 * seed + step)
        inputs = torch.randn(6, 5, generator=generator, dtype=torch.float64).to(dtype)
        labels = torch.randint(0, 3, (6,), generator=generator)
        nn.functional.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
        optimizer.zero_grad()


def assert_rebuilt(model: nn.Module, path: Path) -> df.Memory:
    memory = df.Memory.open(path)
    certificate = df.DualForm(model, memory).verify()
    assert certificate.passed, repr(certificate)
    return memory


@each_kind
def test_training_is_the_same_bit_for_bit(kind: str, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    one, other = network(), network()
    train(one, KINDS[kind](one.parameters()), 40)
    optimizer = KINDS[kind](other.parameters())
    with df.record(other, optimizer, tmp_path / "run"):
        train(other, optimizer, 40)
    for mine, theirs in zip(one.parameters(), other.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_a_state_is_kept_as_often_as_its_share_allows(tmp_path: Path) -> None:
    kept = {}
    for share in (1.0, 0.01):
        model = network()
        optimizer = Adam(model.parameters())
        with df.record(model, optimizer, tmp_path / str(share), state_share=share):
            train(model, optimizer, 200)
        kept[share] = assert_rebuilt(model, tmp_path / str(share)).states("0.weight").steps
    assert kept[1.0] == tuple(range(16, 200, 16))
    assert 0 < len(kept[0.01]) < len(kept[1.0])


def test_weights_are_kept_with_the_state_only_where_they_enter_it(tmp_path: Path) -> None:
    for decay, there in ((0.0, False), (0.1, True)):
        model = network()
        optimizer = Adam(model.parameters(), weight_decay=decay)
        with df.record(model, optimizer, tmp_path / str(decay)):
            train(model, optimizer, 20)
        states = df.Memory.open(tmp_path / str(decay)).states("0.weight")
        assert ("weights" in states.at(16)) is there


# What is found -----------------------------------------------------------------------------------


def test_an_optimizer_that_does_something_else_is_found_at_its_first_step(tmp_path: Path) -> None:
    model = network()
    optimizer = Adam(model.parameters())
    optimizer.register_step_post_hook(lambda *_: model[0].weight.data.mul_(1.001))
    with (
        pytest.raises(df.AuditError, match=r"'0.weight': an update of its weights"),
        df.record(model, optimizer, tmp_path / "run"),
    ):
        train(model, optimizer, 2)


def fresh_state(model: nn.Module) -> dict[str, Any]:
    """Of another AdamW, after one step."""
    other = copy.deepcopy(model)
    optimizer = AdamW(other.parameters())
    train(other, optimizer, 1)
    return optimizer.state_dict()


EDITS: dict[str, tuple[Callable[[nn.Module, Any], Any], str]] = {
    "weights": (lambda m, o: m[0].weight.detach().mul_(1.001), "'0.weight': it was changed in"),
    "a clamp": (lambda m, o: m[3].bias.detach().clamp_(max=0.01), "'3.bias': it was changed in"),
    "another model loaded": (
        lambda m, o: m.load_state_dict({n: 1.01 * t for n, t in m.state_dict().items()}),
        "it was changed in",
    ),
    "second moments": (
        lambda m, o: o.state[m[0].weight]["exp_avg_sq"].mul_(1.01),
        r"'0.weight': what the optimizer remembers of it \(exp_avg_sq\) was changed",
    ),
    "a count": (
        lambda m, o: o.state[m[2].bias]["step"].add_(1),
        r"'2.bias': what the optimizer remembers of it \(step\) was changed",
    ),
    "a count replaced": (
        lambda m, o: o.state[m[2].bias].update(step=torch.tensor(3.0)),
        r"remembers of it \(step\) was changed",
    ),
    "the optimizer loaded": (
        lambda m, o: o.load_state_dict(fresh_state(m)),
        r"remembers of it \(step, exp_avg, exp_avg_sq\) was changed",
    ),
}


@pytest.mark.parametrize("fused", [False, True], ids=["", "fused"])
@pytest.mark.parametrize("edit", EDITS)
def test_what_is_changed_by_hand_between_two_updates_is_found_before_the_next(
    edit: str, fused: bool, tmp_path: Path
) -> None:
    change, said = EDITS[edit]
    model = network()
    optimizer = AdamW(model.parameters(), fused=fused)
    with (
        pytest.raises(df.AuditError, match=said) as raised,
        df.record(model, optimizer, tmp_path / "run"),
    ):
        train(model, optimizer, 9)
        change(model, optimizer)
        train(model, optimizer, 20, start=9)
    assert "between its update of step 8 and that of step 9" in str(raised.value)
    memory = df.Memory.open(tmp_path / "run")
    assert not memory.exact  # its last weights are not those that it explains
    assert memory.steps == 9
    assert any("changed" in remark for remark in memory.remarks)


def test_with_warnings_only_an_edit_makes_the_memory_inexact(tmp_path: Path) -> None:
    model = network()
    optimizer = AdamW(model.parameters())
    with df.record(model, optimizer, tmp_path / "run", audit="warn"):
        train(model, optimizer, 9)
        model[0].weight.detach().mul_(1.001)
        with pytest.warns(UserWarning, match="this run is not exact.*changed in place between"):
            train(model, optimizer, 20, start=9)
    memory = df.Memory.open(tmp_path / "run")
    assert not memory.exact
    assert memory.steps == 29
    assert len([r for r in memory.remarks if "changed in place" in r]) == 1


def test_weights_loaded_after_recording_began_are_found_at_the_first_update(tmp_path: Path) -> None:
    model, other = network(), network()
    optimizer = AdamW(model.parameters())
    with (
        pytest.raises(df.AuditError, match="changed in place between recording began and"),
        df.record(model, optimizer, tmp_path / "run"),
    ):
        model.load_state_dict({n: 1.01 * t for n, t in other.state_dict().items()})
        train(model, optimizer, 1)


def square_network() -> nn.Sequential:
    """Rows as many as a multiple of 64: evenly spaced entries would all be of one column."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(5, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 3)
    )


def test_an_edit_of_all_columns_but_one_is_found(tmp_path: Path) -> None:
    model = square_network()
    optimizer = AdamW(model.parameters())
    with (
        pytest.raises(df.AuditError, match=r"'2.weight': it was changed in place between"),
        df.record(model, optimizer, tmp_path / "run"),
    ):
        train(model, optimizer, 3)
        model[2].weight.detach()[:, 1:].mul_(0.5)
        train(model, optimizer, 3)


def test_an_edit_after_the_last_update_is_found_at_the_end(tmp_path: Path) -> None:
    model = network()
    optimizer = AdamW(model.parameters())
    with (
        pytest.raises(df.AuditError, match="between its update of step 5 and now"),
        df.record(model, optimizer, tmp_path / "run"),
    ):
        train(model, optimizer, 6)
        model[0].weight.detach().mul_(1.001)
    memory = df.Memory.open(tmp_path / "run")
    assert (memory.steps, memory.exact) == (6, False)


def test_weights_are_not_flushed_while_others_are_in_their_place(tmp_path: Path) -> None:
    model = network()
    optimizer = AdamW(model.parameters())
    with df.record(model, optimizer, tmp_path / "run", audit="warn") as recorder:
        train(model, optimizer, 6)
        model[0].weight.detach().mul_(1.001)
        with pytest.warns(UserWarning, match="between its update of step 5 and now"):
            recorder.flush()
        assert not recorder.exact


@each_kind
def test_a_gradient_changed_by_a_later_hook_is_found(kind: str, tmp_path: Path) -> None:
    model = network()
    optimizer = KINDS[kind](model.parameters())

    def clip(*_: Any) -> None:
        model[0].weight.grad.clamp_(-1e-4, 1e-4)

    with (
        pytest.raises(df.AuditError, match=r"'0.weight': its gradient was changed in place after"),
        df.record(model, optimizer, tmp_path / "run"),
    ):
        train(model, optimizer, 3)
        optimizer.register_step_pre_hook(clip)
        train(model, optimizer, 3, start=3)


@each_kind
def test_gradients_may_be_reset_by_a_hook_and_states_hold_more(kind: str, tmp_path: Path) -> None:
    model = network()
    optimizer = KINDS[kind](model.parameters())
    optimizer.register_step_post_hook(lambda o, *_: o.zero_grad(set_to_none=False))
    with df.record(model, optimizer, tmp_path / "run"):
        for start in range(0, 6, 2):
            train(model, optimizer, 2, start=start)
            optimizer.state[model[0].weight]["of my own"] = torch.full((2,), float(start))
    assert_rebuilt(model, tmp_path / "run")


@each_kind
def test_what_changes_no_weight_is_no_edit(kind: str, tmp_path: Path) -> None:
    """Evaluating, averaging, exchanging, schedules, saving, freezing, a state emptied."""
    model = network()
    optimizer = KINDS[kind](model.parameters())
    averaged = torch.optim.swa_utils.AveragedModel(model)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.99)
    with df.record(model, optimizer, tmp_path / "run"):
        for start in range(0, 12, 2):
            train(model, optimizer, 2, start=start)
            averaged.update_parameters(model)
            schedule.step()
            saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
            optimizer.load_state_dict(saved[1])  # the same again
            model.load_state_dict(averaged.module.state_dict())  # exchanged for an evaluation ...
            model.eval()
            with torch.no_grad():
                model(torch.randn(3, 5))
            model.train()
            model.load_state_dict(saved[0])  # ... and put back
            model[0].weight.requires_grad_(start == 4)
            optimizer.zero_grad(set_to_none=False)
        if "Adagrad" not in kind:  # it has its sums from the beginning
            optimizer.state.clear()
        train(model, optimizer, 2, start=20)
    assert_rebuilt(model, tmp_path / "run")


def test_weights_edited_through_data_are_found_by_verify(tmp_path: Path) -> None:
    model = network()
    optimizer = AdamW(model.parameters())
    with df.record(model, optimizer, tmp_path / "run"):
        train(model, optimizer, 9)
        model[0].weight.data[2, 3] += 1e-3
        train(model, optimizer, 20, start=9)
    certificate = df.DualForm(None, tmp_path / "run").verify()
    assert not certificate.passed
    assert {check.parameter for check in certificate.failures} == {"0.weight"}


def test_an_edited_gradient_is_found_at_once(tmp_path: Path) -> None:
    model = network()
    optimizer = AdamW(model.parameters())
    with (
        pytest.raises(df.AuditError, match="is not in the recorded patterns"),
        df.record(model, optimizer, tmp_path / "run"),
    ):
        model(torch.randn(6, 5)).sum().backward()
        model[0].weight.grad[0] += 0.1
        optimizer.step()


# What is refused ---------------------------------------------------------------------------------


def test_gaps_between_recorded_steps_are_refused(tmp_path: Path) -> None:
    model = network()
    with (
        pytest.raises(df.RecordingError, match="Record with every=1"),
        df.record(model, Adam(model.parameters()), tmp_path / "run", every=3),
    ):
        pass


def test_moments_of_16_bits_are_refused(tmp_path: Path) -> None:
    model = network(torch.bfloat16)
    with (
        pytest.raises(df.RecordingError, match="rounded to 16 bits at every step"),
        df.record(model, Adam(model.parameters()), tmp_path / "run"),
    ):
        pass


@pytest.mark.parametrize("share", [0, -1, 1.5, "much"])
def test_a_share_is_a_share(tmp_path: Path, share: Any) -> None:
    model = network()
    with pytest.raises(df.RecordingError, match="state_share"):
        df.record(model, Adam(model.parameters()), tmp_path / "run", state_share=share)


def test_capturable_and_muon_are_refused(tmp_path: Path) -> None:
    model = nn.Linear(3, 2, bias=False)
    for optimizer, why in (
        (Adam(model.parameters(), capturable=True), "capturable=True"),
        (torch.optim.Muon(model.parameters()), "matrix iteration in bfloat16"),
    ):
        with (
            pytest.raises(df.AuditError, match=why),
            df.record(model, optimizer, tmp_path / "run"),
        ):
            pass


def test_patterns_cannot_be_summed_up_but_put_into_16_bits(tmp_path: Path) -> None:
    model = network()
    optimizer = Adam(model.parameters())
    with df.record(model, optimizer, tmp_path / "run"):
        train(model, optimizer, 40)
    for less in ({"layers": ["3"]}, {"error_signals": ["3"]}):
        with pytest.raises(df.RecordingError, match=r"'0\.\w+' was .* replayed from the patterns"):
            df.compact(tmp_path / "run", tmp_path / "low", **less)
    made = df.compact(tmp_path / "run", tmp_path / "half", dtype="float16")
    assert made.after is not None
    assert made.after.passed, repr(made.after)


# Without patterns --------------------------------------------------------------------------------


def test_layers_with_keys_alone_are_taken_from_their_weights(tmp_path: Path) -> None:
    model = network(torch.float64)
    optimizer = AdamW(model.parameters(), lr=3e-3)
    with df.record(model, optimizer, tmp_path / "run", error_signals=["3"]):
        train(model, optimizer, 40)
    memory = assert_rebuilt(model, tmp_path / "run")
    assert memory.parameters["0.weight"].coverage == "accumulated"
    dual = df.DualForm(model, memory)
    assert len(dual.attend(torch.randn(1, 5).double(), layers="0")["0"].top(3)) == 3
    assert abs(dual.contribute(torch.randn(1, 5).double(), target=1).residual) <= 1e-12
    first = dual.at(0).weights()["0.weight"]
    assert torch.equal(first, memory.initial("0.weight"))


def test_gradients_beyond_the_budget_give_way_to_the_weights(tmp_path: Path) -> None:
    model = network(torch.float64)
    optimizer = Adam(model.parameters(), lr=3e-3, weight_decay=0.1)
    with df.record(model, optimizer, tmp_path / "run", step_budget=64 * 2 * 10, snapshot_every=20):
        train(model, optimizer, 60)
    memory = assert_rebuilt(model, tmp_path / "run")
    assert memory.parameters["2.weight"].coverage == "accumulated"
    dual = df.DualForm(model, memory)
    for at in (5, 10, 20, 40, 60):
        assert dual.at(at).weights()["2.weight"].shape == (8,)


# Resuming ----------------------------------------------------------------------------------------


@each_kind
def test_a_run_resumed_with_its_optimizer_goes_on_as_if_nothing_had_been(
    kind: str, tmp_path: Path
) -> None:
    torch.set_num_threads(1)
    model = network(torch.float64)
    optimizer = KINDS[kind](model.parameters())
    with df.record(model, optimizer, tmp_path / "run") as recorder:
        train(model, optimizer, 23)
        recorder.flush()
        saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        train(model, optimizer, 8, start=23)
    model = network(torch.float64)
    optimizer = KINDS[kind](model.parameters())
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    with df.record(model, optimizer, tmp_path / "run", resume=True) as recorder:
        assert recorder.steps == 23
        train(model, optimizer, 20, seed=1, start=23)
    memory = assert_rebuilt(model, tmp_path / "run")
    assert 23 in memory.states("0.weight").steps
    rebuilt = df.DualForm(model, memory).weights(dtype=torch.float64)
    for name, parameter in model.named_parameters():
        assert (rebuilt[name] - parameter.detach()).abs().max() <= 1e-12


@each_kind
def test_a_run_resumed_with_a_new_optimizer_is_rebuilt_as_well(kind: str, tmp_path: Path) -> None:
    model = network(torch.float64)
    optimizer = KINDS[kind](model.parameters())
    with df.record(model, optimizer, tmp_path / "run"):
        train(model, optimizer, 20)
    optimizer = KINDS[kind](model.parameters())
    with df.record(model, optimizer, tmp_path / "run", resume=True):
        train(model, optimizer, 20, start=20)
    memory = assert_rebuilt(model, tmp_path / "run")
    dual = df.DualForm(model, memory)
    rebuilt = dual.weights(dtype=torch.float64)
    for name, parameter in model.named_parameters():
        assert (rebuilt[name] - parameter.detach()).abs().max() <= 1e-12
    split = dual.contribute(torch.randn(1, 5).double(), target=1)
    assert abs(split.residual) <= 1e-12


def test_a_run_cannot_be_resumed_under_another_rule(tmp_path: Path) -> None:
    model = network()
    optimizer = AdamW(model.parameters())
    with df.record(model, optimizer, tmp_path / "run"):
        train(model, optimizer, 5)
    with (
        pytest.raises(df.RecordingError, match="trained by the rule 'sgd' now and was by 'adam'"),
        df.record(model, SGD(model.parameters(), lr=0.1), tmp_path / "run", resume=True),
    ):
        pass


@pytest.mark.parametrize("kind", ["AdamW", "Adam, coupled, amsgrad", "RMSprop, momentum"])
def test_the_estimate_counts_what_is_kept(kind: str, tmp_path: Path) -> None:
    model = network()
    optimizer = KINDS[kind](model.parameters())
    said = df.estimate(model, batch=6, steps=200, optimizer=optimizer, state_share=0.1)
    with df.record(model, optimizer, tmp_path / "run", state_share=0.1):
        train(model, optimizer, 200)
    memory = df.Memory.open(tmp_path / "run")
    taken = sum(
        sum(t.numel() * 4 for t in memory.states(name).at(step).values() if t.dim())
        for name in memory.parameters
        for step in memory.states(name).steps
    )
    assert said.parts["optimizer states"] == pytest.approx(taken, rel=0.35)
    assert df.estimate(model, batch=6, steps=200).parts["optimizer states"] == 0


def test_a_bias_whose_patterns_cancel_is_kept_step_by_step(tmp_path: Path) -> None:
    """Before BatchNorm a bias gets nothing but rounding, and Adam moves it by that all the same."""
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
    optimizer = AdamW(model.parameters(), lr=3e-3)
    with df.record(model, optimizer, tmp_path / "run"):
        train(model, optimizer, 60)
    memory = assert_rebuilt(model, tmp_path / "run")
    assert memory.parameters["0.bias"].coverage == "steps"
    assert memory.parameters["0.weight"].coverage == "patterns"
    assert memory.parameters["3.bias"].coverage == "patterns"
    assert any("'0.bias' cancel to rounding" in remark for remark in memory.remarks)
    rebuilt = df.DualForm(model, memory).weights(dtype=torch.float64)
    off = (rebuilt["0.bias"] - model[0].bias.detach()).abs().max()
    assert off <= 1e-5 * model[0].bias.detach().abs().max()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
@each_kind
def test_a_checkpoint_between_fingerprints_is_found_by_replaying(
    kind: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    torch.set_num_threads(1)
    model = network(dtype)
    optimizer = KINDS[kind](model.parameters())
    with df.record(model, optimizer, tmp_path / "run"):
        train(model, optimizer, 37)
        saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        train(model, optimizer, 30, start=37)
    model = network(dtype)
    optimizer = KINDS[kind](model.parameters())
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    with df.record(model, optimizer, tmp_path / "run", resume=True) as recorder:
        assert recorder.steps == 37
        train(model, optimizer, 20, seed=1, start=37)
    assert_rebuilt(model, tmp_path / "run")


def test_with_keys_alone_a_checkpoint_between_fingerprints_is_told_where_to_go(
    tmp_path: Path,
) -> None:
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))
    optimizer = AdamW(model.parameters(), lr=3e-3)
    options: dict[str, Any] = {"error_signals": False}
    with df.record(model, optimizer, tmp_path / "run", **options) as recorder:
        train(model, optimizer, 5)
        recorder.flush()
        flushed = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        train(model, optimizer, 4, start=5)
        between = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        train(model, optimizer, 3, start=9)
        recorder.flush()
        train(model, optimizer, 80, start=12)
    model.load_state_dict(between[0])
    optimizer.load_state_dict(between[1])
    message = (
        r"that they can be compared with.*\(keys alone do not\).* can be resumed from are "
        r"steps \[5, 12\], .*recorder\.flush\(\)"
    )
    with (
        pytest.raises(df.RecordingError, match=message),
        df.record(model, optimizer, tmp_path / "run", resume=True, **options),
    ):
        pass
    model.load_state_dict(flushed[0])
    optimizer.load_state_dict(flushed[1])
    with df.record(model, optimizer, tmp_path / "run", resume=True, **options) as resumed:
        assert resumed.steps == 5
        train(model, optimizer, 4, start=5)
    assert_rebuilt(model, tmp_path / "run")


def test_weights_of_no_step_are_refused(tmp_path: Path) -> None:
    model = network()
    optimizer = AdamW(model.parameters(), lr=3e-3)
    with df.record(model, optimizer, tmp_path / "run"):
        train(model, optimizer, 20)
    model[0].weight.data[1] += 0.01
    with (
        pytest.raises(df.RecordingError, match="not those of any step"),
        df.record(model, optimizer, tmp_path / "run", resume=True),
    ):
        pass


@each_kind
def test_parameters_may_be_given_to_an_adaptive_optimizer_later(kind: str, tmp_path: Path) -> None:
    """Layer by layer: each has its own count, from its first update on."""
    torch.set_num_threads(1)
    plain, model = network(torch.float64), network(torch.float64)
    for net, path in ((plain, None), (model, tmp_path / "run")):
        optimizer = KINDS[kind](net[3].parameters())
        with nullcontext() if path is None else df.record(net, optimizer, path):
            train(net, optimizer, 20)
            net.zero_grad()
            optimizer.add_param_group({"params": [*net[0].parameters(), *net[2].parameters()]})
            train(net, optimizer, 20, start=20)
    for mine, theirs in zip(plain.parameters(), model.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    memory = assert_rebuilt(model, tmp_path / "run")
    dual = df.DualForm(model, memory)
    rebuilt = dual.weights(dtype=torch.float64)
    for name, parameter in model.named_parameters():
        assert (rebuilt[name] - parameter.detach()).abs().max() <= 1e-12, name
    begun = dual.at(20).weights(dtype=torch.float64)
    assert torch.equal(begun["0.weight"], memory.initial("0.weight"))
    assert abs(dual.contribute(torch.randn(1, 5).double(), target=1).residual) <= 1e-12


def test_gradients_from_before_a_parameter_was_given_to_an_optimizer_are_refused(
    tmp_path: Path,
) -> None:
    """Nobody was to use them, so the patterns behind them were not kept."""
    model = network()
    optimizer = AdamW(model[3].parameters())
    with (
        pytest.raises(df.AuditError, match=r"'0.weight': .* from step 0, .* no optimizer had it"),
        df.record(model, optimizer, tmp_path / "run"),
    ):
        train(model, optimizer, 5)
        optimizer.add_param_group({"params": list(model[0].parameters())})
        train(model, optimizer, 1)
    assert df.Memory.open(tmp_path / "run").steps == 5


def test_a_parameter_does_not_change_its_rule(tmp_path: Path) -> None:
    model = network()
    one, other = SGD(model[0].parameters(), lr=0.1), AdamW(model[3].parameters())
    with (
        pytest.raises(df.RecordingError, match=r"'0.weight' was trained by SGD and is now given"),
        df.record(model, [one, other], tmp_path / "run"),
    ):
        for step in range(3):
            if step == 2:
                one.param_groups.clear()
                other.add_param_group({"params": list(model[0].parameters())})
            model(torch.randn(6, 5)).square().mean().backward()
            for optimizer in (other, one):
                optimizer.step()
                optimizer.zero_grad()
    assert df.Memory.open(tmp_path / "run").steps == 2


def test_an_adaptive_optimizer_may_sit_out_whole_segments(tmp_path: Path) -> None:
    model = network(torch.float64)
    often, seldom = SGD(model[0].parameters(), lr=0.05), AdamW(model[3].parameters(), lr=3e-3)
    with df.record(model, [often, seldom], tmp_path / "run", segment_bytes=3000):
        for step in range(40):
            model(torch.randn(6, 5).double()).square().mean().backward()
            (seldom if step % 20 == 19 else often).step()
            model.zero_grad()
    memory = assert_rebuilt(model, tmp_path / "run")
    assert int(memory.adaptive_log("3.weight").applied.sum()) == 2
    rebuilt = df.DualForm(model, memory).weights(dtype=torch.float64)
    for name, parameter in model.named_parameters():
        assert (rebuilt[name] - parameter.detach()).abs().max() <= 1e-12, name
