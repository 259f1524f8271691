"""Patterns of every k-th step: what the others wrote is one sum per parameter, and all adds up.

W_S = a W_0 + h m_0 + Σ_{recorded} c δ x + U_S, with U from the gradients of the other steps alone.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from tests.memory import tampering
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_
from torch.optim import SGD

import dualform as df
from dualform.cli import main
from dualform.learning_rules import coefficients

STEPS, KEPT = 23, 5


def network(dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Linear(6, 8), nn.Tanh(), nn.LayerNorm(8), nn.Linear(8, 5), nn.ReLU(), nn.Linear(5, 3)
    ).to(dtype)


class Training:
    """A run that keeps the weights of every step, and every gradient as it was applied."""

    def __init__(self, dtype: torch.dtype = torch.float64, **sgd: Any) -> None:
        self.model = network(dtype)
        self.dtype = dtype
        self.optimizers = [SGD(self.model.parameters(), **({"lr": 0.1} | sgd))]
        self.generator = torch.Generator().manual_seed(7)
        self.history = [self.weights()]
        self.gradients: list[dict[str, Tensor]] = []
        self.inputs: list[Tensor] = []

    def weights(self) -> dict[str, Tensor]:
        return {n: p.detach().clone() for n, p in self.model.named_parameters()}

    def backward(self, scale: float = 1.0) -> None:
        x = torch.randn(7, 6, generator=self.generator, dtype=torch.float64).to(self.dtype)
        labels = torch.randint(0, 3, (7,), generator=self.generator)
        self.inputs.append(x)
        (scale * F.cross_entropy(self.model(x), labels)).backward()

    def update(self, *optimizers: SGD) -> None:
        for optimizer in optimizers or self.optimizers:
            optimizer.step()
        self.gradients.append(
            {n: p.grad.clone() for n, p in self.model.named_parameters() if p.grad is not None}
        )
        for optimizer in optimizers or self.optimizers:
            optimizer.zero_grad()
        self.history.append(self.weights())


Loop = Callable[[Training, int], None]


def plain(training: Training, step: int) -> None:
    training.backward()
    training.update()


def clipped(training: Training, step: int) -> None:
    training.backward()
    clip_grad_norm_(training.model.parameters(), 0.1)
    training.update()


def micro_batches(training: Training, step: int) -> None:
    for _ in range(3):
        training.backward(1 / 3)
    training.update()


CASES: dict[str, tuple[dict[str, Any], Loop]] = {
    "plain": ({}, plain),
    "momentum and decay": ({"momentum": 0.9, "weight_decay": 0.02, "lr": 0.05}, plain),
    "dampening": ({"momentum": 0.8, "dampening": 0.4, "weight_decay": 0.02}, plain),
    "nesterov": ({"momentum": 0.9, "nesterov": True, "weight_decay": 0.02, "lr": 0.05}, plain),
    "foreach nesterov": ({"momentum": 0.9, "nesterov": True, "foreach": True, "lr": 0.05}, plain),
    "clipping": ({"momentum": 0.9}, clipped),
    "micro-batches": ({"momentum": 0.9, "lr": 0.05}, micro_batches),
}


def record(
    training: Training, path: Path, every: int, loop: Loop = plain, steps: int = STEPS, **more: Any
) -> df.Memory:
    options = {"every": every, "snapshot_every": KEPT} | more
    with df.record(training.model, training.optimizers, path, **options):
        for step in range(steps):
            loop(training, step)
    shutil.rmtree(path / "snapshots", ignore_errors=True)
    return df.Memory.open(path)


def off(one: Tensor, other: Tensor) -> float:
    """max |one - other| / max |other|."""
    return float((one.double() - other.double()).abs().max()) / max(float(other.abs().max()), 1e-30)


def by_hand(memory: df.Memory, gradients: list[dict[str, Tensor]], name: str, at: int) -> Tensor:
    """U by its definition: the unrecorded steps' gradients with their coefficients."""
    log = memory.log(name)
    log = type(log)(**{**vars(log), "kappa": np.ones(len(log))})
    factors = coefficients(log, at).steps
    total = torch.zeros(memory.parameters[name].shape, dtype=torch.float64)
    for step in range(at):
        if memory.is_unrecorded(name)[step]:
            total += float(factors[step]) * gradients[step][name].double()
    return total


@pytest.mark.parametrize("every", [2, 3, 7])
@pytest.mark.parametrize("case", list(CASES))
def test_recorded_and_unrecorded_steps_add_up_to_the_weights(
    tmp_path: Path, case: str, every: int
) -> None:
    sgd, loop = CASES[case]
    training = Training(**sgd)
    memory = record(training, tmp_path, every, loop)
    assert memory.exact
    assert memory.every == every
    dual = df.DualForm(training.model, memory)
    verification = dual.verify(torch.cat(training.inputs[:2]))
    assert verification.passed, verification
    for at in (0, 1, KEPT, 2 * KEPT, 4 * KEPT, STEPS):
        for name, weight in dual.at(at).weights(dtype=torch.float64).items():
            assert off(weight, training.history[at][name]) <= 1e-12, (at, name)
    for name, known in memory.parameters.items():
        if known.coverage == "patterns":
            moved = memory.is_unrecorded(name)
            assert moved.tolist() == [step % every != 0 for step in range(STEPS)]
            if loop is plain and not sgd.get("foreach"):  # which changes the gradients we kept
                expected = by_hand(memory, training.gradients, name, STEPS)
                assert off(memory.unrecorded(name, STEPS)[0], expected) <= 1e-12
    for name in memory.layers:
        steps = set(memory.layer(name).patterns["step"].tolist())
        assert steps == set(range(0, STEPS, every))


@pytest.mark.parametrize("every", [2, 7])
@pytest.mark.parametrize("case", ["plain", "momentum and decay", "nesterov", "clipping"])
def test_in_float32_it_does_so_up_to_rounding(tmp_path: Path, case: str, every: int) -> None:
    sgd, loop = CASES[case]
    training = Training(torch.float32, **sgd)
    memory = record(training, tmp_path, every, loop, steps=200, snapshot_every=50)
    dual = df.DualForm(training.model, memory)
    assert dual.verify(training.inputs[0]).passed, dual.verify(training.inputs[0])
    for at in (50, 100, 200):
        for name, weight in dual.at(at).weights(dtype=torch.float64).items():
            # √S roundings of eps/2 each, a few of them per step, momentum lets each act ten times
            bound = 64 * torch.finfo(torch.float32).eps * at**0.5
            assert off(weight, training.history[at][name]) <= bound, (at, name)


def test_training_is_the_same_to_the_last_bit(tmp_path: Path) -> None:
    recorded, alone = (Training(torch.float32, momentum=0.9, weight_decay=1e-3) for _ in range(2))
    record(recorded, tmp_path, 3)
    for step in range(STEPS):
        plain(alone, step)
    for name, weight in alone.weights().items():
        assert torch.equal(weight, recorded.weights()[name])


def test_info_tells_how_much_was_recorded(tmp_path: Path) -> None:
    record(Training(), tmp_path, 3, steps=4)
    shown = CliRunner().invoke(main, ["info", str(tmp_path)], env={"COLUMNS": "200"}).output
    assert "of one of every 3 steps" in shown
    assert "every pattern of 0, one of every 3 steps; the others as a sum" in shown
    plain = json.loads(CliRunner().invoke(main, ["info", str(tmp_path), "--json"]).output)
    assert plain["every"] == 3
    assert {p["every"] for p in plain["parameters"] if p["coverage"] == "steps"} == {1}


def test_between_the_kept_sums_the_nearest_are_named(tmp_path: Path) -> None:
    training = Training(momentum=0.9)
    memory = record(training, tmp_path, 3)
    dual = df.DualForm(training.model, memory)
    with pytest.raises(df.QueryError, match=r"step 13 is not among them, the nearest are \[10, 15"):
        dual.at(13).weights()
    assert "one of every 3 steps was recorded" in repr(dual)


def test_masks_leave_unrecorded_steps_alone_and_add_up(tmp_path: Path) -> None:
    training = Training(momentum=0.9, weight_decay=0.01)
    memory = record(training, tmp_path, 3)
    dual = df.DualForm(training.model, memory)
    whole, nothing = dual.weights(torch.float64), dual.without().weights(torch.float64)
    chosen = {"step": slice(0, 12)}
    without, only = dual.without(**chosen), dual.only(**chosen)
    for name, weight in whole.items():
        both = without.weights(torch.float64)[name] + only.weights(torch.float64)[name]
        assert off(both, weight + nothing[name]) <= 1e-12
        if memory.parameters[name].coverage == "patterns":
            kept = memory.unrecorded(name, STEPS)[0]
            dropped = dual.without(unresolved="drop").weights(torch.float64)[name]
            assert off(nothing[name] - dropped, kept) <= 1e-12
    assert "kept: what unrecorded steps wrote" in repr(without)
    assert "dropped: what unrecorded steps wrote" in repr(dual.without(unresolved="drop"))


def test_contributions_name_what_unrecorded_steps_wrote(tmp_path: Path) -> None:
    training = Training(momentum=0.9)
    memory = record(training, tmp_path, 4)
    dual = df.DualForm(training.model, memory)
    x = training.inputs[0][:1]
    contribution = dual.contribute(x, target=1)
    assert abs(contribution.residual) <= 1e-12
    share = contribution.shares["unrecorded steps"]
    hidden = training.model[:-1](x)[0].detach()
    weights, _ = memory.unrecorded("5.weight", STEPS)
    biases, _ = memory.unrecorded("5.bias", STEPS)
    assert share == pytest.approx(float(weights[1] @ hidden + biases[1]), abs=1e-12)
    assert abs(share) > 1e-3
    assert off(dual(x), training.model(x).detach()) <= 1e-12
    assert off(dual(x, by="patterns"), training.model(x).detach()) <= 1e-12


# -- gradients that do not keep to a step --------------------------------------------------------


def two_optimizers(training: Training) -> None:
    first, last = training.model[0], nn.ModuleList(list(training.model)[1:])
    training.optimizers = [
        SGD(first.parameters(), lr=0.1, momentum=0.9),
        SGD(last.parameters(), lr=0.1, momentum=0.9),
    ]


@pytest.mark.parametrize("every", [2, 3])
@pytest.mark.parametrize("period", [2, 3, 4])
def test_gradients_carried_over_steps_count_as_unrecorded(
    tmp_path: Path, every: int, period: int
) -> None:
    """The second optimizer moves every so many steps, by all gradients since it last did."""
    training = Training()
    two_optimizers(training)
    one, two = training.optimizers

    def loop(training: Training, step: int) -> None:
        training.backward()
        training.update(*([one, two] if step % period == period - 1 else [one]))

    memory = record(training, tmp_path, every, loop)
    dual = df.DualForm(training.model, memory)
    assert dual.verify(training.inputs[0]).passed, dual.verify(training.inputs[0])
    for at in (KEPT, 2 * KEPT, STEPS):
        for name, weight in dual.at(at).weights(dtype=torch.float64).items():
            assert off(weight, training.history[at][name]) <= 1e-12, (at, name)
    assert set(memory.layer("0").patterns["step"].tolist()) == set(range(0, STEPS, every))
    assert "5" not in memory.layers or not memory.layer("5").rows  # all of it was carried over


def test_one_whose_gradients_are_reset_in_between_is_recorded_where_it_moves(
    tmp_path: Path,
) -> None:
    training = Training(momentum=0.9)
    two_optimizers(training)
    one, two = training.optimizers

    def loop(training: Training, step: int) -> None:
        training.backward()
        if step % 2:  # thrown away: the second optimizer sits this one out
            two.zero_grad()
            training.update(one)
        else:
            training.update(one, two)

    memory = record(training, tmp_path, 4, loop)
    dual = df.DualForm(training.model, memory)
    assert dual.verify(training.inputs[0]).passed, dual.verify(training.inputs[0])
    for name, weight in dual.weights(dtype=torch.float64).items():
        assert off(weight, training.history[-1][name]) <= 1e-12, name
    assert set(memory.layer("5").patterns["step"].tolist()) == set(range(0, STEPS, 4))


def test_skipped_steps_count_for_neither(tmp_path: Path) -> None:
    training = Training(momentum=0.9)

    def loop(training: Training, step: int) -> None:
        training.backward()
        if step % 3 == 1:  # as a loss scaler does that met an overflow
            training.optimizers[0].zero_grad()
            training.backward()
        training.update()

    memory = record(training, tmp_path, 2, loop)
    dual = df.DualForm(training.model, memory)
    assert dual.verify(training.inputs[0]).passed, dual.verify(training.inputs[0])
    for name, weight in dual.weights(dtype=torch.float64).items():
        assert off(weight, training.history[-1][name]) <= 1e-12, name
    assert memory.layer("0").rows == 7 * len(range(0, STEPS, 2))


def test_a_parameter_first_trained_in_an_unrecorded_step_has_patterns_later(tmp_path: Path) -> None:
    training = Training(momentum=0.9)
    training.model[0].requires_grad_(False)

    def loop(training: Training, step: int) -> None:
        if step == 4:
            training.model[0].requires_grad_(True)
        plain(training, step)

    memory = record(training, tmp_path, 3, loop)
    assert memory.parameters["0.weight"].coverage == "patterns"
    dual = df.DualForm(training.model, memory)
    assert dual.verify(training.inputs[0]).passed, dual.verify(training.inputs[0])
    for name, weight in dual.weights(dtype=torch.float64).items():
        assert off(weight, training.history[-1][name]) <= 1e-12, name


# -- proof ---------------------------------------------------------------------------------------


def test_the_audit_still_finds_an_edited_gradient_in_a_recorded_step(tmp_path: Path) -> None:
    def loop(training: Training, step: int) -> None:
        training.backward()
        if step == 9:
            gradient = training.model[0].weight.grad
            gradient[0] += 0.01
        training.update()

    with pytest.raises(df.AuditError, match="step 9"):
        record(Training(), tmp_path, 3, loop)


def test_an_edited_gradient_in_an_unrecorded_step_is_part_of_the_sum(tmp_path: Path) -> None:
    """What the optimizer used is what counts: no pattern has to explain it."""

    def loop(training: Training, step: int) -> None:
        training.backward()
        if step == 10:
            training.model[0].weight.grad[0] += 0.01
        training.update()

    training = Training(momentum=0.9)
    memory = record(training, tmp_path, 3, loop)
    for name, weight in df.DualForm(training.model, memory).weights(torch.float64).items():
        assert off(weight, training.history[-1][name]) <= 1e-12


def test_weights_changed_in_an_unrecorded_step_are_found(tmp_path: Path) -> None:
    def loop(training: Training, step: int) -> None:
        plain(training, step)
        if step == 10:
            with torch.no_grad():
                training.model[0].weight[0] += 0.01

    with pytest.raises(df.AuditError, match=r"'0\.weight': its weights are .* away"):
        record(Training(), tmp_path, 3, loop, steps=60)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_forged_recorded_step_fails_by_its_residual(tmp_path: Path, dtype: torch.dtype) -> None:
    training = Training(dtype, momentum=0.9)
    memory = record(training, tmp_path, 3)
    assert df.DualForm(training.model, memory).verify().passed
    tampering.zero_error_signals(tmp_path, 6, "0")
    checks = df.DualForm(training.model, tmp_path).verify().checks
    (found,) = [c for c in checks if (c.parameter, c.kind) == ("0.weight", "steps")]
    assert found.residual > found.bound
    assert found.step == 6


@pytest.mark.parametrize("tensor", ["unrecorded/0.weight", "unrecorded_momentum/0.weight"])
@pytest.mark.parametrize("step", [9, STEPS - 1])
def test_a_forged_sum_fails(tmp_path: Path, tensor: str, step: int) -> None:
    training = Training(momentum=0.9)
    record(training, tmp_path, 3)
    file, _ = tampering.segment_of(tmp_path, step)
    tampering.edit_tensor(file, tensor, lambda values: values[0].mul_(1.01))
    tampering.reseal(tmp_path)
    verification = df.DualForm(training.model, tmp_path).verify()
    assert not verification.passed


def test_a_log_that_gives_patterns_a_part_in_an_unrecorded_step_is_refused(tmp_path: Path) -> None:
    training = Training()
    record(training, tmp_path, 3)
    file, _ = tampering.segment_of(tmp_path, 7)
    tampering.edit_tensor(file, "log/kappa", lambda values: values.fill_(1.0))
    tampering.reseal(tmp_path)
    with pytest.raises(df.MemoryFileError, match="step that was not recorded"):
        df.DualForm(training.model, tmp_path).verify()


# -- resuming ------------------------------------------------------------------------------------


@pytest.mark.parametrize("at", [10, 15])
def test_a_resumed_run_keeps_the_cadence_and_the_sums(tmp_path: Path, at: int) -> None:
    whole, parts = (Training(momentum=0.9, weight_decay=0.01) for _ in range(2))
    expected = record(whole, tmp_path / "whole", 3)
    record(parts, tmp_path / "parts", 3, steps=at)
    with df.record(
        parts.model, parts.optimizers, tmp_path / "parts", every=3, snapshot_every=KEPT, resume=True
    ) as recorder:
        assert recorder.steps == at
        for step in range(at, STEPS):
            plain(parts, step)
    memory = df.Memory.open(tmp_path / "parts")
    for name, known in memory.parameters.items():
        assert torch.equal(parts.weights()[name], whole.weights()[name])
        if known.coverage == "patterns":
            ours, theirs = (m.unrecorded(name, STEPS)[0] for m in (memory, expected))
            assert off(ours, theirs) <= 1e-14
    for name in memory.layers:
        steps = [m.layer(name).patterns["step"].tolist() for m in (memory, expected)]
        assert steps[0] == steps[1]
    assert df.DualForm(parts.model, memory).verify().passed


def test_resuming_elsewhere_or_with_another_cadence_is_refused(tmp_path: Path) -> None:
    training = Training(momentum=0.9)
    record(training, tmp_path, 3, steps=12)
    with (
        pytest.raises(df.RecordingError, match=r"every=2 was given, and one of every 3"),
        df.record(training.model, training.optimizers, tmp_path, every=2, resume=True),
    ):
        pass
    other = Training(momentum=0.9)
    for step in range(11):
        plain(other, step)
    with (
        pytest.raises(
            df.RecordingError, match=r"step 11, where the memory cannot be cut.*\[10, 12"
        ),
        df.record(other.model, other.optimizers, tmp_path, every=3, resume=True),
    ):
        pass


# -- other choices -------------------------------------------------------------------------------


def test_keys_alone_of_every_kth_step(tmp_path: Path) -> None:
    training = Training(momentum=0.9)
    memory = record(training, tmp_path, 3, error_signals=False)
    assert {memory.parameters[n].coverage for n in ("0.weight", "5.bias")} == {"accumulated"}
    dual = df.DualForm(training.model, memory)
    assert dual.verify(training.inputs[0]).passed
    assert memory.layer("0").rows == 7 * len(range(0, STEPS, 3))


def test_patterns_in_16_bits_of_every_kth_step(tmp_path: Path) -> None:
    training = Training(torch.float32, momentum=0.9)
    memory = record(training, tmp_path, 2, dtype="float16", steps=60)
    assert df.DualForm(training.model, memory).verify(training.inputs[0]).passed


def test_such_a_memory_is_put_into_16_bits_afterwards(tmp_path: Path) -> None:
    training = Training(torch.float32, momentum=0.9)
    memory = record(training, tmp_path / "run", 3, steps=24)
    made = df.compact(memory, tmp_path / "half", dtype="float16")
    assert made.after is not None
    assert made.after.passed
    assert 0 < max(made.difference.values()) < 2e-3
    half = df.Memory.open(tmp_path / "half")
    assert (half.every, half.layer("0").stored) == (3, torch.float16)
    dual = df.DualForm(training.model, half)
    assert dual.verify(training.inputs[0]).passed
    for name, weight in dual.to_model().named_parameters():
        whole = training.model.get_parameter(name).detach()
        assert torch.allclose(weight, whole, rtol=0, atol=2e-3 * float(whole.abs().max()))


@pytest.mark.parametrize("less", [{"layers": ["0"]}, {"error_signals": False}])
def test_patterns_with_gaps_between_them_are_not_summed_up(
    tmp_path: Path, less: dict[str, Any]
) -> None:
    record(Training(), tmp_path / "run", 3, steps=4)
    with pytest.raises(df.RecordingError, match=r"one of every 3 steps; summing up .* \(dtype="):
        df.compact(tmp_path / "run", tmp_path / "less", **less)
    assert not (tmp_path / "less").exists()


@pytest.mark.parametrize("every", [0, -1, 1.5])
def test_a_cadence_that_is_none_is_refused(tmp_path: Path, every: Any) -> None:
    training = Training()
    with pytest.raises(df.RecordingError, match="every"):
        df.record(training.model, training.optimizers, tmp_path, every=every)
