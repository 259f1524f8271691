"""Large weights: their gradients are looked at in parts, and nothing gets past that for long."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD

import dualform as df
from dualform.memory.following import AGREEING
from dualform.recording.audit import LARGE, PARTS, ParameterAudit
from dualform.recording.audits import Audits, see_patterns
from dualform.recording.fingerprints import FINGERPRINT_EVERY
from dualform.recording.rows import Rows

ROWS, WIDTH, OUT = 320, 256, 4


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)


def network(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    assert ROWS * WIDTH >= LARGE
    return nn.Sequential(nn.Linear(WIDTH, ROWS), nn.Tanh(), nn.Linear(ROWS, OUT)).to(dtype)


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    steps: int,
    edit: Callable[[int, Tensor], None] = lambda step, gradient: None,
    accumulate: int = 1,
) -> None:
    first = next(model.parameters())
    for step in range(steps):
        for _ in range(accumulate):
            inputs = torch.randn(9, WIDTH, dtype=first.dtype)
            F.cross_entropy(model(inputs), torch.randint(0, OUT, (9,))).backward()
        assert first.grad is not None
        edit(step, first.grad)
        optimizer.step()
        optimizer.zero_grad()


def record_edited(
    path: Path, edit: Callable[[int, Tensor], None], steps: int, lr: float = 0.1
) -> None:
    model = network()
    optimizer = SGD(model.parameters(), lr=lr, momentum=0.9)
    with df.record(model, optimizer, path):
        train(model, optimizer, steps, edit)


@pytest.mark.parametrize("row", range(0, ROWS, 45))
def test_a_row_edited_at_every_step_is_found_before_all_parts_had_a_turn(
    row: int, tmp_path: Path
) -> None:
    def edit(step: int, gradient: Tensor) -> None:
        gradient[row] *= 10.0  # so much that it shows along almost any random direction

    with pytest.raises(
        df.AuditError, match=r"step ([0-9]|1[0-5]), parameter .0\.weight.: .* not in the rec"
    ):
        record_edited(tmp_path / "run", edit, PARTS)


@pytest.mark.parametrize("phase", range(PARTS))
def test_edits_that_come_back_every_so_many_steps_are_found(phase: int, tmp_path: Path) -> None:
    def edit(step: int, gradient: Tensor) -> None:
        if step % PARTS == phase:
            gradient[3] *= 10.0

    with pytest.raises(df.AuditError, match=r"parameter .0\.weight.: .* not in the recorded"):
        record_edited(tmp_path / "run", edit, PARTS * PARTS, lr=1e-9)


@pytest.mark.parametrize("row", range(0, ROWS, 45))
def test_a_single_edit_in_a_part_that_was_not_looked_at_is_found_in_the_weights(
    row: int, tmp_path: Path
) -> None:
    def edit(step: int, gradient: Tensor) -> None:
        if step == 2:
            gradient[row] *= -100.0

    with pytest.raises(df.AuditError, match=r"parameter .0\.weight.: (its weights|.* not in the)"):
        record_edited(tmp_path / "run", edit, 3 + FINGERPRINT_EVERY)


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-12), (torch.float32, 1e-4)])
def test_clipped_accumulated_and_carried_gradients_of_large_weights_are_exact(
    dtype: torch.dtype, bound: float, tmp_path: Path
) -> None:
    model = network(dtype)
    both = [
        SGD(model[0].parameters(), lr=0.05, momentum=0.9, weight_decay=1e-3),
        SGD(model[2].parameters(), lr=0.02, nesterov=True, momentum=0.5),
    ]
    with df.record(model, both, tmp_path / "run") as recorder:
        for step in range(3 * PARTS):
            for _ in range(1 + step % 2):
                inputs = torch.randn(9, WIDTH, dtype=dtype)
                F.cross_entropy(model(inputs), torch.randint(0, OUT, (9,))).backward()
            nn.utils.clip_grad_norm_(model[0].parameters(), 0.05 * (1 + step % 3))
            both[0].step()
            both[0].zero_grad()
            if step % 3 == 2:  # the second layer's gradients are carried over two steps
                both[1].step()
                both[1].zero_grad()
        assert recorder.exact
    memory = df.Memory.open(tmp_path / "run")
    certificate = df.DualForm(model, memory).verify()
    assert certificate.passed, str(certificate)
    rebuilt = df.DualForm(network(dtype), memory).to_model()
    pairs = zip(rebuilt.state_dict().values(), model.state_dict().values(), strict=True)
    for ours, real in pairs:
        assert float((ours - real).abs().max() / real.abs().max()) <= bound


@pytest.mark.parametrize("silent", [range(80), range(80, 320), range(0)])
def test_the_factor_is_told_by_rows_that_have_a_gradient(silent: range, tmp_path: Path) -> None:
    """Some units never fire: a part of silent rows alone would be explained by any factor."""
    model = network(torch.float64)
    gate = torch.ones(ROWS, dtype=torch.float64)
    gate[list(silent)] = 0.0
    optimizer = SGD(model.parameters(), lr=0.3)
    with df.record(model, optimizer, tmp_path / "run"):
        for _ in range(2 * PARTS + 1):
            hidden = torch.tanh(model[0](torch.randn(9, WIDTH, dtype=torch.float64))) * gate
            F.cross_entropy(model[2](hidden), torch.randint(0, OUT, (9,))).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.01)
            optimizer.step()
            optimizer.zero_grad()
    certificate = df.DualForm(model, tmp_path / "run").verify()
    assert certificate.passed, str(certificate)
    log = df.Memory.open(tmp_path / "run").log("0.weight")
    assert (log.kappa < 0.5).all()


@pytest.mark.parametrize("accumulate", [1, 3])
def test_gradients_of_lower_precision_raise_no_alarm(accumulate: int, tmp_path: Path) -> None:
    """Under autocast the weights move by a rounded gradient, not by what the patterns sum to."""
    model = network()
    optimizer = SGD(model.parameters(), lr=0.05, momentum=0.9)
    with df.record(model, optimizer, tmp_path / "run") as recorder:
        for _ in range(2 * FINGERPRINT_EVERY + 1):
            for _ in range(accumulate):
                with torch.autocast("cpu", torch.bfloat16):
                    outputs = model(torch.rand(32, WIDTH))
                    loss = F.cross_entropy(outputs, torch.randint(0, OUT, (32,))) / accumulate
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        assert recorder.exact
    assert df.DualForm(model, tmp_path / "run").verify().passed


def test_sizes_taken_late_are_those_of_the_patterns(tmp_path: Path) -> None:
    """Gradients that are never reset: their patterns' places are in use for others by then."""
    model = network()
    optimizer = SGD(model.parameters(), lr=0.01)
    expected, seen = 0.0, list[float]()
    with df.record(model, optimizer, tmp_path / "run", segment_bytes=1 << 16) as recorder:
        audit = recorder._parameters.by_name["0.weight"].audit
        for _ in range(12):  # every step is a segment, and the ring holds three
            inputs = torch.randn(9, WIDTH)
            outputs = model[0](inputs)
            outputs.register_hook(lambda g: seen.append(float(g.norm())))
            model[2](model[1](outputs)).square().sum().backward()
            many = 1 + len(inputs) ** 0.5 / AGREEING
            expected += many * seen[-1] * float(inputs.norm()) / WIDTH**0.5
            optimizer.step()  # and no reset: the gradient goes on accumulating
        assert audit.gross == pytest.approx(expected, rel=1e-5)


def test_asking_all_parameters_at_once_gives_the_answers_each_would_give() -> None:
    generator = torch.Generator().manual_seed(1)
    shapes = [(ROWS, WIDTH), (ROWS,), (12, 5), (7,)]
    parameters = [torch.randn(*shape, generator=generator) for shape in shapes]
    alone = [ParameterAudit(p, None, torch.Generator().manual_seed(2)) for p in parameters]
    shared = [ParameterAudit(p, None, torch.Generator().manual_seed(2)) for p in parameters]
    together = Audits(shared)
    transition = (0.99, -0.009, 0.0, 0.9, -0.01, 1.0)
    for step in range(9):
        keys = {width: torch.randn(6, width, generator=generator) for width in (WIDTH, 5)}
        signals = {rows: torch.randn(6, rows, generator=generator) for rows in (ROWS, 12, 7)}
        for audits in (alone, shared):
            for audit in audits:
                audit.forget(step)
            for weight, bias, x, e in (
                (audits[0], audits[1], keys[WIDTH], signals[ROWS]),
                (audits[2], None, keys[5], signals[12]),
                (None, audits[3], keys[5], signals[7]),
            ):
                see_patterns(weight, bias, x, e, Rows(step, x, e))
            gradients = (
                signals[ROWS].T @ keys[WIDTH],
                signals[ROWS].sum(0),
                signals[12].T @ keys[5],
                signals[7].sum(0) * (1.0 if step % 2 else 0.5),
            )
            for audit, gradient in zip(audits, gradients, strict=True):
                audit.look_at(gradient, step)
        assert together.are_plain() == [audit.explain() == 1.0 for audit in alone]
        assert shared[3].explain() == (1.0 if step % 2 else pytest.approx(0.5))
        together.advance(transition)
        for one, other in zip(alone, shared, strict=True):
            one.advance(transition)
            assert np.array_equal(one.weights, other.weights)
            assert np.array_equal(one.momentum, other.momentum)
            assert one.travel == pytest.approx(other.travel, rel=1e-12)
            assert one.path == pytest.approx(other.path, rel=1e-12)
            assert one.sketched == other.sketched


@pytest.mark.parametrize("rule", ["SGD", "Adam"])
def test_an_edit_of_any_rows_of_a_gradient_is_found_while_recording(
    tmp_path: Path, rule: str
) -> None:
    """Under SGD by the weights, at the next fingerprint; under Adam nothing predicts them."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(300, 400), nn.ReLU(), nn.Linear(400, 5))
    parameters = model.parameters()
    optimizer = SGD(parameters, lr=0.1) if rule == "SGD" else torch.optim.Adam(parameters)
    found = "gradient is not in the recorded" if rule == "Adam" else "away from where the learning"

    def run() -> None:
        with df.record(model, optimizer, tmp_path / "run") as recorder:
            for step in range(40):
                model(torch.randn(16, 300)).square().mean().backward()
                if step == 20:
                    weight = model[0].weight.grad
                    assert isinstance(weight, torch.Tensor)
                    weight[0:20].zero_()  # rows of the first of sixteen parts: not its turn
                optimizer.step()
                optimizer.zero_grad()
            recorder.flush()

    with pytest.raises(df.AuditError, match=found):
        run()
    assert df.Memory.open(tmp_path / "run").steps == (20 if rule == "Adam" else 40)
