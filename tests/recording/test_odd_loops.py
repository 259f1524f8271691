"""Loops that are odd but legitimate, and slips that must not go unnoticed."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD

import dualform as df
from dualform.recording.intake import is_zero


def net(dtype: torch.dtype = torch.float64) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 4)).to(dtype)


def batch(
    seed: int = 0, size: int = 24, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(24, 8, generator=generator, dtype=dtype)
    return inputs, torch.randint(0, 4, (24,), generator=generator)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    inputs, labels = batch(seed)
    F.cross_entropy(model(inputs), labels).backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_bias_whose_patterns_cancel_is_clipped_like_the_others(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4)).to(
        dtype
    )
    optimizer = SGD(model.parameters(), lr=1.0)
    inputs, labels = batch(dtype=dtype)
    with df.record(model, optimizer, tmp_path) as recorder:
        recorder.tag(label=labels)
        hidden = model[0](inputs)
        hidden.retain_grad()
        F.cross_entropy(model[3](model[2](model[1](hidden))), labels).backward()
        whole = model[3].weight.grad.clone()
        nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        factor = float((model[3].weight.grad / whole).mean())
        optimizer.step()
    dual = df.DualForm(model, tmp_path)
    wrote = (
        dual.only(label=1).weights(dtype=torch.float64)["0.bias"]
        - dual.without().weights(dtype=torch.float64)["0.bias"]
    )
    truth = -factor * hidden.grad[labels == 1].sum(0).double()
    bound = 1e-12 if dtype == torch.float64 else 1e-5
    assert float((wrote - truth).abs().max() / truth.abs().max()) <= bound


def test_a_parameter_moved_by_an_optimizer_not_given_is_noticed(tmp_path: Path) -> None:
    model = net()
    given, other = SGD(model[0].parameters(), lr=0.1), SGD(model[2].parameters(), lr=0.2)
    with (
        pytest.raises(df.AuditError, match=r"'2.weight'.*None of the optimizers given trains it"),
        df.record(model, given, tmp_path),
    ):
        for seed in range(70):
            inputs, labels = batch(seed)
            F.cross_entropy(model(inputs), labels).backward()
            given.step()
            other.step()
            model.zero_grad()
    assert not df.Memory.open(tmp_path).exact


class Averaging(nn.Module):
    """Puts a new tensor in the place of its buffer at every call."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 4).double()
        self.register_buffer("mean", torch.zeros(4, dtype=torch.float64))

    def forward(self, inputs: Tensor) -> Tensor:
        output: Tensor = self.fc(inputs)
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * output.detach().mean(0)
        return output - self.mean


def test_a_buffer_that_is_replaced_is_followed(tmp_path: Path) -> None:
    model = Averaging()
    optimizer = SGD(model.parameters(), lr=0.1)
    kept = []
    with df.record(model, optimizer, tmp_path):
        for seed in range(5):
            step(model, optimizer, seed)
            kept.append(model.mean.clone())
    memory = df.Memory.open(tmp_path)
    for at, value in enumerate(kept, start=1):
        assert torch.equal(memory.buffer("mean", at), value)
    assert df.DualForm(model, memory).verify(batch()[0]).passed


def test_running_statistics_are_those_of_the_step_when_optimizers_take_turns(
    tmp_path: Path,
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 6), nn.BatchNorm1d(6), nn.Linear(6, 4)).double()
    first = SGD([*model[0].parameters(), *model[1].parameters()], lr=0.1)
    second = SGD(model[2].parameters(), lr=0.1)
    kept = []
    with df.record(model, [first, second], tmp_path):
        for seed in range(6):
            step(model, (first, second)[seed % 2], seed)
            model.zero_grad()
            kept.append(model[1].running_mean.clone())
    memory = df.Memory.open(tmp_path)
    assert memory.steps == 6
    for at, value in enumerate(kept, start=1):
        assert torch.equal(memory.buffer("1.running_mean", at), value), at


def test_unfreezing_between_two_backward_passes_of_a_step_is_an_error(tmp_path: Path) -> None:
    model = net()
    optimizer = SGD(model.parameters(), lr=0.1)
    model[0].weight.requires_grad_(False)
    with (
        pytest.raises(df.AuditError, match=r"Freeze and unfreeze between steps"),
        df.record(model, optimizer, tmp_path),
    ):
        inputs, labels = batch()
        F.cross_entropy(model(inputs), labels).backward()
        model[0].weight.requires_grad_(True)
        F.cross_entropy(model(inputs), labels).backward()
        optimizer.step()


def test_another_dtype_in_the_middle_of_a_run_is_an_error_and_loses_nothing(tmp_path: Path) -> None:
    model = net(torch.float32)
    optimizer = SGD(model.parameters(), lr=0.1)
    with (
        pytest.raises(df.RecordingError, match=r"was torch.float32 .* is now torch.float64"),
        df.record(model, optimizer, tmp_path),
    ):
        inputs, labels = batch(dtype=torch.float32)
        F.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
        optimizer.zero_grad()
        model.double()
        step(model, optimizer, 1)
    memory = df.Memory.open(tmp_path)
    assert memory.steps == 1
    assert df.DualForm(None, memory).verify().passed


def test_a_layer_first_met_with_a_zero_gradient_still_gets_its_patterns(tmp_path: Path) -> None:
    model = net()
    optimizer = SGD(model.parameters(), lr=0.1)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    with df.record(model, optimizer, tmp_path):
        optimizer.step()
        for seed in range(3):
            inputs, labels = batch(seed)
            F.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
    memory = df.Memory.open(tmp_path)
    assert {p.coverage for p in memory.parameters.values()} == {"patterns"}
    assert len(memory.layer("0")) == 3 * 24
    assert df.DualForm(model, memory).verify().passed


def test_keys_of_a_layer_with_a_frozen_weight_are_those_it_was_fed(tmp_path: Path) -> None:
    model = nn.Linear(8, 4).double()
    model.weight.requires_grad_(False)
    optimizer = SGD([model.bias], lr=0.1)
    inputs, labels = batch()
    fed = inputs.clone()
    with df.record(model, optimizer, tmp_path):
        loss = F.cross_entropy(model(inputs), labels)
        inputs.zero_()
        loss.backward()
        optimizer.step()
    assert torch.equal(df.Memory.open(tmp_path).layer("model").keys, fed)


def test_function_transforms_inside_the_loop_are_left_alone(tmp_path: Path) -> None:
    model = net()
    optimizer = SGD(model.parameters(), lr=0.1)
    inputs, _ = batch()
    plain = torch.func.jacrev(model)(inputs[0])
    with df.record(model, optimizer, tmp_path):
        assert torch.equal(torch.func.jacrev(model)(inputs[0]), plain)
        step(model, optimizer, 0)
    assert df.Memory.open(tmp_path).steps == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (lambda m, p: (m, None, p), r"expected a torch optimizer"),
        (lambda m, p: (m, SGD(m.parameters(), 0.1), None), r"expected a path"),
        (lambda m, p: (None, SGD([torch.zeros(1)], 0.1), p), r"expected a torch.nn.Module"),
    ],
)
def test_wrong_arguments_are_named(tmp_path: Path, arguments: object, message: str) -> None:
    with pytest.raises(df.RecordingError, match=message):
        df.record(*arguments(net(), tmp_path))  # type: ignore[operator]


def test_one_parameter_may_not_have_two_optimizers(tmp_path: Path) -> None:
    model = net()
    optimizers = [SGD(model.parameters(), 0.1), SGD(model[0].parameters(), 0.1)]
    with (
        pytest.raises(df.RecordingError, match=r"'0.weight' is trained by two"),
        df.record(model, optimizers, tmp_path),
    ):
        pass


def test_a_lazy_module_must_have_seen_a_batch(tmp_path: Path) -> None:
    model = nn.Sequential(nn.LazyLinear(4))
    with (
        pytest.raises(df.RecordingError, match=r"has no shape yet"),
        df.record(model, SGD(model.parameters(), 0.1), tmp_path),
    ):
        pass


@pytest.mark.parametrize(
    "options",
    [{}, {"every": 2}, {"error_signals": False}, {"layers": []}, {"layers": [], "step_budget": 0}],
)
def test_a_flush_before_the_update_loses_nothing(
    tmp_path: Path, options: dict[str, object]
) -> None:
    model = net()
    optimizer = SGD(model.parameters(), 0.1, momentum=0.9)
    with df.record(model, optimizer, tmp_path, **options) as recorder:  # type: ignore[arg-type]
        for seed in range(5):
            for micro in range(2):
                inputs, labels = batch(10 * seed + micro)
                F.cross_entropy(model(inputs), labels).backward()
                recorder.flush()
            optimizer.step()
            optimizer.zero_grad()
    memory = df.Memory.open(tmp_path)
    recorded = len(range(0, 5, memory.every))
    assert [memory.layer(name).rows for name in memory.layers] == [48 * recorded] * len(
        memory.layers
    )
    df.DualForm(model, memory).verify().raise_if_failed()


def test_a_flush_before_the_update_is_made_good_after_it(tmp_path: Path) -> None:
    model = net()
    optimizer = SGD(model.parameters(), 0.1)
    with df.record(model, optimizer, tmp_path, error_signals=False) as recorder:
        step(model, optimizer, 0)
        F.cross_entropy(model(batch(1)[0]), batch(1)[1]).backward()
        recorder.flush()
        optimizer.step()
        optimizer.zero_grad()
        step(model, optimizer, 2)
        recorder.flush()
        F.cross_entropy(model(batch(3)[0]), batch(3)[1]).backward()
        optimizer.zero_grad()  # thrown away: nothing is under way
        recorder.flush()
        assert df.Memory.open(tmp_path).steps == 3
    assert 2 in df.Memory.open(tmp_path).learned_steps("0.weight")


@pytest.mark.parametrize("options", [{}, {"every": 2}, {"error_signals": False}])
def test_a_flush_between_optimizers_that_take_turns_ends_a_step(
    tmp_path: Path, options: dict[str, object]
) -> None:
    model = net()
    turns = [SGD(model[i].parameters(), 0.1, momentum=0.9) for i in (0, 2)]
    history = []
    with df.record(model, turns, tmp_path, **options) as recorder:  # type: ignore[arg-type]
        for seed in range(6):
            step(model, turns[seed % 2], seed)
            recorder.flush()
            history.append(model[0].weight.detach().clone())
            memory = df.Memory.open(tmp_path)
            assert memory.steps == seed + 1
            df.DualForm(None, memory).verify().raise_if_failed()
    dual = df.DualForm(model, df.Memory.open(tmp_path))
    dual.verify().raise_if_failed()
    for number, weight in enumerate(history):
        rebuilt = dual.at(number + 1).weights(dtype=torch.float64)["0.weight"]
        assert (rebuilt - weight).abs().max() < 1e-12


def test_a_step_skipped_before_a_norm_is_dropped_though_its_bias_has_no_gradient(
    tmp_path: Path,
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 4)).double()
    optimizer = SGD(model.parameters(), 0.1, momentum=0.9)
    with df.record(model, optimizer, tmp_path):
        for seed in range(6):
            inputs, labels = batch(seed)
            F.cross_entropy(model(inputs), labels).backward()
            if seed % 3 != 1:
                optimizer.step()
            optimizer.zero_grad(set_to_none=False)
    memory = df.Memory.open(tmp_path)
    assert memory.steps == 4
    assert memory.layer("0").rows == memory.layer("3").rows == 4 * 24
    df.DualForm(model, memory).verify().raise_if_failed()


@pytest.mark.parametrize("name", ["every", "snapshot_every", "segment_bytes", "step_budget"])
@pytest.mark.parametrize("value", [True, 2.5, "3", None])
def test_counts_must_be_whole_numbers(tmp_path: Path, name: str, value: object) -> None:
    model = net()
    with pytest.raises(df.RecordingError, match=rf"{name}=.* expected a whole number"):
        df.record(model, SGD(model.parameters(), 0.1), tmp_path, **{name: value})  # type: ignore[arg-type]


def test_a_checkpoint_from_before_the_budget_ran_out_is_gone_back_to(tmp_path: Path) -> None:
    """Keys alone are accumulated from the start; a norm only where the budget ends."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 6), nn.LayerNorm(6), nn.Linear(6, 4)).double()
    optimizer = SGD(model.parameters(), 0.1)
    options: dict[str, Any] = {"error_signals": False, "step_budget": 5 * 2 * 6 * 8}
    with df.record(model, optimizer, tmp_path, **options) as recorder:
        for seed in range(3):
            step(model, optimizer, seed)
        recorder.flush()
        saved = {name: value.clone() for name, value in model.state_dict().items()}
        for seed in range(3, 8):
            step(model, optimizer, seed)
    assert df.Memory.open(tmp_path).parameters["1.weight"].accumulated_since == 5
    final = {name: value.clone() for name, value in model.state_dict().items()}
    model.load_state_dict(saved)
    with df.record(model, optimizer, tmp_path, resume=True, **options) as recorder:
        assert recorder.steps == 3
        for seed in range(3, 8):
            step(model, optimizer, seed)
    assert all(torch.equal(value, final[name]) for name, value in model.state_dict().items())
    df.DualForm(model, df.Memory.open(tmp_path)).verify().raise_if_failed()


def test_a_layer_of_which_no_pattern_was_kept_can_be_asked(tmp_path: Path) -> None:
    model = net()
    turns = [SGD(model[i].parameters(), 0.1) for i in (0, 2)]
    with df.record(model, turns, tmp_path, every=2):
        for seed in range(4):
            step(model, turns[seed % 2], seed)
    memory = df.Memory.open(tmp_path)
    assert memory.layer("2").rows == 0
    attention = df.DualForm(model, memory).attend(batch()[0])
    assert len(attention["2"].top(3)) == len(attention["2"].top(3, by="step")) == 0
    assert len(attention["2"].sum_by("step")) == 0


def test_freezing_a_weight_whose_gradient_is_carried_over_is_an_error(tmp_path: Path) -> None:
    model = net()
    turns = [SGD([model[0].weight], 0.1), SGD([model[0].bias, *model[2].parameters()], 0.1)]
    with (
        pytest.raises(df.AuditError, match=r"'0.weight': .* from step 1, .* frozen at step 2"),
        df.record(model, turns, tmp_path),
    ):
        for seed, turn in enumerate((0, 1, 1, 0)):
            model[0].weight.requires_grad_(seed != 2)
            step(model, turns[turn], seed)
    df.DualForm(None, df.Memory.open(tmp_path)).verify().raise_if_failed()


def adversaries() -> tuple[nn.ModuleDict, SGD, SGD]:
    torch.manual_seed(0)
    model = nn.ModuleDict({"maker": nn.Linear(4, 8), "judge": nn.Linear(8, 6)}).double()
    return model, SGD(model["maker"].parameters(), 0.01), SGD(model["judge"].parameters(), 0.01)


def noise() -> Tensor:
    return torch.randn(5, 4, dtype=torch.float64)


@pytest.mark.parametrize("error_signals", [True, False])
@pytest.mark.parametrize("turns", [1, 2, 3])
def test_patterns_that_no_update_used_are_gone_at_the_end(
    tmp_path: Path, error_signals: bool, turns: int
) -> None:
    """The last passes are the maker's: what they add to the judge's gradients is never used."""
    model, first, second = adversaries()
    made = []
    with df.record(model, [first, second], tmp_path, error_signals=error_signals):
        for _ in range(3):
            second.zero_grad()
            made.append(model["maker"](noise()).detach())
            model["judge"](made[-1]).pow(2).sum().backward()
            second.step()
            for _ in range(turns):
                first.zero_grad()
                model["judge"](model["maker"](noise())).pow(2).sum().backward()
                first.step()
    memory = df.Memory.open(tmp_path)
    assert memory.exact
    assert torch.equal(memory.layer("judge").keys, torch.cat(made))
    assert memory.layer("maker").rows == 15 * turns
    assert memory.remarks == (f"{15 * turns} patterns of skipped steps were dropped",)
    df.DualForm(model, memory).verify().raise_if_failed()


def test_a_gradient_that_is_carried_over_and_used_keeps_its_patterns(tmp_path: Path) -> None:
    model, first, second = adversaries()
    with df.record(model, [first, second], tmp_path):
        for _ in range(3):
            for _ in range(2):
                first.zero_grad()
                model["judge"](model["maker"](noise())).pow(2).sum().backward()
                first.step()
            second.step()
            second.zero_grad()
    memory = df.Memory.open(tmp_path)
    assert memory.layer("judge").rows == 30
    assert not memory.remarks
    df.DualForm(model, memory).verify().raise_if_failed()


def test_patterns_that_were_committed_stay_though_no_update_used_them(tmp_path: Path) -> None:
    model, first, second = adversaries()
    with df.record(model, [first, second], tmp_path) as recorder:
        for _ in range(2):
            model["judge"](model["maker"](noise())).pow(2).sum().backward()
            first.step()
            first.zero_grad()
            if not df.Memory.open(tmp_path).steps:
                recorder.flush()
    memory = df.Memory.open(tmp_path)
    assert memory.layer("judge").rows == 5
    assert memory.remarks == ("5 patterns of skipped steps were dropped",)
    df.DualForm(model, memory).verify().raise_if_failed()


@pytest.mark.parametrize("passes", [0, 1])
@pytest.mark.parametrize("thrown_away", [True, False])
def test_a_gradient_from_before_a_resumed_run_is_warned_of_where_keys_alone_are_kept(
    tmp_path: Path, passes: int, thrown_away: bool
) -> None:
    model, first, second = adversaries()
    options: dict[str, Any] = {"error_signals": False}
    with df.record(model, [first, second], tmp_path, **options):
        for _ in range(2):
            model["judge"](model["maker"](noise())).pow(2).sum().backward()
            first.step()
            second.step()
            model.zero_grad()
        model["judge"](model["maker"](noise())).pow(2).sum().backward()
        first.step()  # and what the judge would have learned is left over
    assert df.Memory.open(tmp_path).layer("judge").rows == 10
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        with df.record(model, [first, second], tmp_path, resume=True, **options):
            if thrown_away:
                model.zero_grad()
            for _ in range(passes):
                model["judge"](model["maker"](noise())).pow(2).sum().backward()
            second.step()
    assert any("when the run was resumed" in str(w.message) for w in said) is not thrown_away
    remarks = df.Memory.open(tmp_path).remarks
    assert any("call optimizer.zero_grad()" in remark for remark in remarks) is not thrown_away


def test_the_first_token_is_not_taken_for_a_key_of_zeros(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 2)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with df.record(model, optimizer, tmp_path / "run", error_signals=False):
        for _ in range(3):
            model(torch.zeros(6, dtype=torch.int64)).square().sum().backward()
            optimizer.zero_grad(set_to_none=False)  # never used
            model(torch.tensor([3, 1])).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    keys = df.Memory.open(tmp_path / "run").layer("0").keys
    assert torch.as_tensor(keys).flatten().tolist() == [3, 1] * 3


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int64])
def test_zeros_are_told_from_numbers(dtype: torch.dtype) -> None:
    zeros = torch.zeros(3, 400).to(dtype)
    assert is_zero(zeros)
    assert is_zero(-zeros)
    assert is_zero(zeros[:0])
    assert is_zero(zeros.t())
    for row, column in ((0, 0), (0, 399), (2, 399)):
        one = zeros.clone()
        one[row, column] = torch.tensor(128).to(dtype)  # as an integer: a byte that zeros have
        assert not is_zero(one)
        assert not is_zero(one.t())
        assert is_zero(one[:row])
