"""Loops that are odd but legitimate, and slips that must not go unnoticed or lose anything."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.recording.runs import (
    backward,
    batch,
    plain,
    proved,
    state_of,
    update,
    verified,
)
from torch import Tensor, nn
from torch.optim import SGD, AdamW

from dualform.certificate.replay import at
from dualform.certificate.report import KEPT
from dualform.errors import AuditError, RecordingError
from dualform.memory import Memory
from dualform.recording import record

STEPS = 8
Loop = Callable[[Any, Any, int], Any]


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)


def keys_of(*numbers: int) -> Tensor:
    return torch.cat([batch(number)[0] for number in numbers])


# -- loops, and the keys of the first layer that a reader of the loop expects ----------------------


def masked_micro_batches(model: Any, optimizer: Any, step: int) -> list[int]:
    """One of two writes nothing, and was not thrown away."""
    for weight in (0.0, 1.0):
        (weight * F.cross_entropy(model(batch(step)[0]), batch(step)[1])).backward()
    optimizer.step()
    return [step, step]


def thrown_away_by_zeroing(model: Any, optimizer: Any, step: int) -> list[int]:
    backward(model, step)
    optimizer.zero_grad(set_to_none=False)
    backward(model, step + 9)
    optimizer.step()
    return [step + 9]


def a_pass_inside_another(model: Any, optimizer: Any, step: int) -> list[int]:
    """Its gradients are there when the outer one goes on; nothing was thrown away."""
    hidden = model[1](model[0](batch(step)[0]))
    inner = model(batch(step + 9)[0]).mean()
    hidden.register_hook(lambda _: inner.backward())
    F.cross_entropy(model[2](hidden), batch(step)[1]).backward()
    optimizer.step()
    return [step + 9, step]


def weights_alone(model: Any, optimizer: Any, step: int) -> list[int]:
    inputs, labels = batch(step)
    weights = [model[0].weight, model[2].weight]
    F.cross_entropy(model(inputs), labels).backward(inputs=weights if step % 2 else None)
    optimizer.step()
    return [step]


def layers_in_passes_of_their_own(model: Any, optimizer: Any, step: int) -> list[int]:
    F.cross_entropy(model(batch(step + 9)[0]), batch(step)[1]).backward(
        inputs=list(model[0].parameters())
    )
    backward(model, step)
    optimizer.step()
    return [step + 9, step]


def gradients_made_in_inference_mode(model: Any, optimizer: Any, step: int) -> list[int]:
    backward(model, step)
    with torch.inference_mode():
        for p in model.parameters():
            p.grad = p.grad * 0.5
    optimizer.step()
    return [step]


def gradients_always_in_one_place(model: Any, optimizer: Any, step: int) -> list[int]:
    places = model.__dict__.setdefault("places", {})
    backward(model, step)
    for p in model.parameters():
        p.grad = places.setdefault(id(p), torch.empty_like(p)).copy_(p.grad).data
    optimizer.step()
    return [step]


def hooks_of_its_own(model: Any, optimizer: Any, step: int) -> list[int]:
    output = model(batch(step)[0])
    output.register_hook(lambda g: g * torch.linspace(0.1, 1, 4))
    F.cross_entropy(output, batch(step)[1]).backward()
    optimizer.step()
    return [step]


def transforms(model: Any, optimizer: Any, step: int) -> list[int]:
    torch.func.jacrev(model)(batch(step)[0][0])
    backward(model, step)
    optimizer.step()
    return [step]


def a_skipped_update(model: Any, optimizer: Any, step: int) -> list[int]:
    backward(model, step + 50)
    optimizer.zero_grad(set_to_none=False)
    backward(model, step)
    optimizer.step()
    return [step]


def autocast(model: Any, optimizer: Any, step: int) -> list[int]:
    with torch.autocast("cpu", torch.bfloat16):
        loss = F.cross_entropy(model(batch(step)[0]), batch(step)[1])
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.05 if step % 2 else 1.0)
    optimizer.step()
    return []


LOOPS = (
    masked_micro_batches, thrown_away_by_zeroing, a_pass_inside_another, weights_alone,
    layers_in_passes_of_their_own, gradients_made_in_inference_mode, gradients_always_in_one_place,
    hooks_of_its_own, transforms, a_skipped_update, autocast,
)  # fmt: skip


@pytest.mark.parametrize("keep", ["auto", "keys"])
@pytest.mark.parametrize("kind", [SGD, AdamW])
@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.__name__)
def test_every_pattern_that_was_used_is_there_and_no_other(
    loop: Loop, kind: Any, keep: str, tmp_path: Path
) -> None:
    model = plain()
    optimizer = kind(model.parameters(), lr=0.05)
    expected: list[int] = []
    states = {0: state_of(model)}
    with record(model, tmp_path / "run", keep=keep):
        for step in range(STEPS):
            expected += loop(model, optimizer, step)
            optimizer.zero_grad()
            states[step + 1] = state_of(model)
    if keep == "keys":
        memory = Memory.open(tmp_path / "run")
        found = verified(memory, model)
        assert found.passed, found
        assert found.verdict == KEPT
    else:
        memory = proved(tmp_path / "run", model, states)
    assert memory.remarks == ()
    if keep == "keys" and loop is masked_micro_batches:  # what wrote nothing is left out there
        expected = expected[::2]
    if expected:
        assert torch.equal(memory.layer("0").keys, keys_of(*expected))


@pytest.mark.parametrize("spike", [1.0, 50.0])
@pytest.mark.parametrize("kind", [SGD, AdamW])
def test_one_large_batch_under_autocast_and_clipping_leaves_every_factor_right(
    kind: Any, spike: float, tmp_path: Path
) -> None:
    model = plain()
    optimizer = kind(model.parameters(), lr=0.05)
    factors = []
    with record(model, tmp_path / "run"):
        for step in range(40):
            with torch.autocast("cpu", torch.bfloat16):
                loss = F.cross_entropy(model(batch(step)[0]), batch(step)[1])
            (loss * (spike if step == 5 else 1.0)).backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            factors.append(min(1.0, float(0.1 / (norm + 1e-6))))
            optimizer.step()
            optimizer.zero_grad()
    memory = proved(tmp_path / "run", model)
    kappa = torch.from_numpy(memory.log("0.weight").kappa)
    assert torch.allclose(kappa, torch.tensor(factors).double(), rtol=1e-2)


# -- a bias whose patterns cancel ------------------------------------------------------------------


def test_a_bias_whose_patterns_cancel_is_clipped_like_the_others(tmp_path: Path) -> None:
    """Before a batch norm a bias has a gradient of rounding alone."""
    model = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))
    optimizer = SGD(model.parameters(), lr=1.0)
    with record(model, tmp_path / "run"):
        for step in range(STEPS):
            backward(model, step)
            nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            if step % 3 != 1:
                optimizer.step()
            optimizer.zero_grad(set_to_none=False)
    memory = proved(tmp_path / "run", model)
    assert memory.layer("0").rows == memory.layer("3").rows == 5 * memory.steps
    kappa = [memory.log(name).kappa for name in ("0.bias", "3.weight")]
    assert (kappa[0] == kappa[1]).all()


# -- buffers and dtypes ----------------------------------------------------------------------------


class Averaging(nn.Module):
    """Puts a new tensor in the place of its buffer at every call."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(6, 4)
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, inputs: Tensor) -> Tensor:
        output: Tensor = self.fc(inputs)
        self.mean = 0.9 * self.mean + 0.1 * output.detach().mean(0)
        return output - self.mean


def test_a_buffer_that_is_replaced_is_followed(tmp_path: Path) -> None:
    model = Averaging()
    optimizer, states = SGD(model.parameters(), lr=0.1), {0: state_of(model)}
    with record(model, tmp_path / "run"):
        for step in range(STEPS):
            update(model, optimizer, step)
            states[step + 1] = state_of(model)
    proved(tmp_path / "run", model, states)


def grown(model: Any) -> None:
    model.mean = torch.zeros(7)


def taken_away(model: Any) -> None:
    del model.mean


def in_another_dtype(model: Any) -> None:
    model.mean = model.mean.double()


@pytest.mark.filterwarnings("ignore:dualform")
@pytest.mark.parametrize("under_way", [False, True], ids=["", "with an exception under way"])
@pytest.mark.parametrize(
    "change", [grown, taken_away, in_another_dtype, nn.Module.half, nn.Module.double]
)
@pytest.mark.parametrize("goes_on", [False, True], ids=["at the end", "in mid-run"])
def test_nothing_is_lost_when_buffers_or_dtypes_change(
    change: Callable[[nn.Module], Any], goes_on: bool, under_way: bool, tmp_path: Path
) -> None:
    model = Averaging()
    optimizer, states = SGD(model.parameters(), lr=0.1, momentum=0.9), {0: state_of(model)}

    def train() -> None:
        with record(model, tmp_path / "run"):
            for step in range(STEPS):
                update(model, optimizer, step)
                states[step + 1] = state_of(model)
            change(model)
            if goes_on:
                dtype = model.fc.weight.dtype
                model.fc(batch(99, dtype=dtype)[0]).square().mean().backward()
                optimizer.step()
            if under_way:
                raise ZeroDivisionError

    is_cast = change in (nn.Module.half, nn.Module.double)
    if is_cast and goes_on:
        with pytest.raises(RecordingError, match=r"'fc.weight' is .* expected torch.float32"):
            train()
    elif under_way:
        with pytest.raises(ZeroDivisionError):
            train()
    else:
        train()
    memory = proved(tmp_path / "run", None, states if is_cast else None)
    assert memory.closed
    assert memory.steps == STEPS + (goes_on and not is_cast)
    assert any("fc.weight, fc.bias: became" in text for text in memory.remarks) == is_cast
    for step in range(STEPS):
        assert torch.equal(at(memory, "fc.weight", step), states[step]["fc.weight"])
        assert torch.equal(memory.buffer("mean", step), states[step]["mean"])


def in_another_shape(model: Any) -> None:
    model[0].weight.data = torch.zeros(9, 7)


@pytest.mark.parametrize("keep", ["patterns", "values"])
@pytest.mark.parametrize("change", [nn.Module.half, nn.Module.double, in_another_shape])
def test_what_was_converted_after_its_backward_pass_is_refused_before_the_update(
    change: Callable[[nn.Module], Any], keep: str, tmp_path: Path
) -> None:
    model = plain()
    optimizer, states = AdamW(model.parameters(), lr=0.05), {0: state_of(model)}
    with (
        pytest.raises(RecordingError, match="record again into a new path"),
        record(model, tmp_path / "run", keep=keep),
    ):
        for step in range(STEPS):
            update(model, optimizer, step)
            states[step + 1] = state_of(model)
        backward(model, STEPS)
        change(model)
        optimizer.step()
    memory = proved(tmp_path / "run", None, states if keep == "patterns" else None, verdict=None)
    assert memory.steps == STEPS
    for name in memory.parameters:
        assert torch.equal(memory.kept.weights(name, STEPS), states[STEPS][name])


def test_a_part_that_is_converted_takes_nothing_from_the_rest(tmp_path: Path) -> None:
    """Edits after the last update, and of what was converted since, are not in the memory."""
    model: Any = plain()
    optimizer = SGD(model.parameters(), lr=0.05)
    with record(model, tmp_path / "run") as recorder:
        for step in range(STEPS):
            update(model, optimizer, step)
        last = state_of(model)
        with torch.no_grad():
            model[0].weight.mul_(0.9)
            model[0].double()
            recorder.flush()
            model[2].weight.mul_(0.9)
    memory = proved(tmp_path / "run", None)
    assert not memory.events
    for name in memory.parameters:
        assert torch.equal(at(memory, name, STEPS), last[name])


def test_a_model_that_is_converted_and_back_goes_on(tmp_path: Path) -> None:
    model = plain()
    optimizer, states = SGD(model.parameters(), lr=0.05), {0: state_of(model)}
    with record(model, tmp_path / "run") as recorder:
        for step in range(STEPS):
            update(model, optimizer, step)
            states[step + 1] = state_of(model)
            model.double()(batch(step, dtype=torch.float64)[0])
            recorder.flush()
            with pytest.raises(RecordingError, match="converted while being recorded"):
                backward(model, step)
            model.float()
    assert proved(tmp_path / "run", model, states).remarks == ()


# -- optimizers that never move, layers never used -------------------------------------------------


@pytest.mark.parametrize("turns", [1, 2, 3])
@pytest.mark.parametrize("keep", ["patterns", "keys"])
def test_patterns_that_no_update_used_are_gone_at_the_end(
    turns: int, keep: str, tmp_path: Path
) -> None:
    """The last passes are the maker's: what they add to the judge's gradients is never used."""
    model: Any = nn.ModuleDict({"maker": nn.Linear(4, 8), "judge": nn.Linear(8, 6)})
    first, second = (SGD(m.parameters(), 0.01) for m in model.values())
    made = []
    with record(model, tmp_path / "run", keep=keep):
        for _ in range(3):
            second.zero_grad()
            made.append(model["maker"](torch.randn(5, 4)).detach())
            model["judge"](made[-1]).pow(2).sum().backward()
            second.step()
            for _ in range(turns):
                first.zero_grad()
                model["judge"](model["maker"](torch.randn(5, 4))).pow(2).sum().backward()
                first.step()
    memory = Memory.open(tmp_path / "run")
    assert torch.equal(memory.layer("judge").keys, torch.cat(made))
    assert memory.layer("maker").rows == 15 * turns
    assert verified(memory, model).passed


def test_a_layer_first_met_with_a_zero_gradient_still_gets_its_patterns(tmp_path: Path) -> None:
    model = plain()
    optimizer = SGD(model.parameters(), lr=0.1)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    with record(model, tmp_path / "run"):
        optimizer.step()
        for step in range(3):
            update(model, optimizer, step)
    memory = proved(tmp_path / "run", model)
    assert {p.keep for p in memory.parameters.values()} == {"patterns"}


def test_a_frozen_weights_keys_are_what_it_was_fed(tmp_path: Path) -> None:
    model = nn.Linear(6, 4)
    model.weight.requires_grad_(False)
    optimizer, (inputs, labels) = SGD([model.bias], lr=0.1), batch(0)
    with record(model, tmp_path / "run"):
        loss = F.cross_entropy(model(inputs), labels)
        inputs.zero_()
        loss.backward()
        optimizer.step()
    assert torch.equal(proved(tmp_path / "run", model).layer("model").keys, batch(0)[0])


def test_unfreezing_between_two_passes_of_a_step_is_said(tmp_path: Path) -> None:
    model = plain()
    optimizer = SGD(model.parameters(), lr=0.1)
    model[0].weight.requires_grad_(False)
    with (
        pytest.raises(AuditError, match=r"'0\.(weight|bias)'"),
        record(model, tmp_path / "run"),
    ):
        backward(model, 0)
        model[0].weight.requires_grad_(True)
        backward(model, 1)
        optimizer.step()


@pytest.mark.filterwarnings("ignore:dualform")
@pytest.mark.parametrize(
    "use",
    [
        lambda m, x: torch.einsum("bi,oi->bo", x, m[0].weight) + m[0].bias,
        lambda m, x: x @ m[0].weight[torch.arange(9)].T + m[0].bias,
    ],
)
def test_weights_used_past_what_has_patterns_are_values_by_name(use: Any, tmp_path: Path) -> None:
    model: Any = plain()
    optimizer, states = SGD(model.parameters(), lr=0.1), {0: state_of(model)}
    with record(model, tmp_path / "run"):
        for step in range(STEPS):
            inputs, labels = batch(step)
            F.cross_entropy(model[2](use(model, inputs)), labels).backward()
            optimizer.step()
            optimizer.zero_grad()
            states[step + 1] = state_of(model)
    memory = Memory.open(tmp_path / "run")
    assert verified(memory, model).passed
    for step in memory.kept.steps("0.weight"):
        assert torch.equal(memory.kept.weights("0.weight", step), states[step]["0.weight"])
    assert memory.parameters["0.weight"].keep == "values"
    assert memory.parameters["2.weight"].keep == "patterns"
    assert any("0.weight" in remark for remark in memory.remarks)
