"""A gradient that patterns do not explain is said before the update, by name; nothing else is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.recording.runs import proved, recording, state_of, verified
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_, clip_grad_value_
from torch.optim import SGD, Adam, AdamW

from dualform.certificate.replay import at
from dualform.certificate.report import BITS
from dualform.errors import AuditError
from dualform.memory import Memory
from dualform.recording import record

STEPS, TAMPERED = 8, 3
Tamper = Callable[[Any], Any]


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)


def network(dtype: torch.dtype = torch.float32) -> Any:
    return nn.Sequential(
        nn.Linear(6, 8), nn.ReLU(), nn.LayerNorm(8), nn.Linear(8, 5), nn.Tanh(), nn.Linear(5, 3)
    ).to(dtype)


def loss_of(model: nn.Module) -> Tensor:
    inputs = torch.randn(7, 6, dtype=next(model.parameters()).dtype)
    return F.cross_entropy(model(inputs), torch.randint(0, 3, (7,)))


def all_of(change: Callable[[Any], Any]) -> Tamper:
    return lambda model: [change(p) for p in model.parameters()]


def gradient_penalty(model: Any) -> None:
    inputs = torch.randn(4, 6, dtype=model[0].weight.dtype).requires_grad_()
    (slope,) = torch.autograd.grad(model(inputs).square().sum(), inputs, create_graph=True)
    slope.square().sum().backward()


def partly_thrown_away(model: Any) -> None:
    model[0].weight.grad = None
    loss_of(model).backward()


def largest_row_zeroed(model: Any) -> None:
    model[0].weight.grad[model[0].weight.grad.norm(dim=1).argmax()] = 0


EDITS: dict[str, tuple[str, Tamper]] = {
    "one entry edited by hand": ("3.weight", lambda m: m[3].weight.grad[2, 4].add_(0.01)),
    "one bias entry edited by hand": ("5.bias", lambda m: m[5].bias.grad[1].mul_(1.01)),
    "a norm's entry edited by hand": ("2.weight", lambda m: m[2].weight.grad[1].mul_(1.01)),
    "one row zeroed": ("0.weight", largest_row_zeroed),
    "clipping by value": ("0.weight", lambda m: clip_grad_value_(m.parameters(), 1e-3)),
    "noise": ("0.weight", all_of(lambda p: p.grad.add_(1e-3 * torch.randn_like(p)))),
    "signs": ("0.weight", all_of(lambda p: p.grad.sign_())),
    "decay by hand": ("0.weight", all_of(lambda p: p.grad.add_(0.01 * p.detach()))),
    "not a number": ("3.weight", lambda m: m[3].weight.grad[0, 0].fill_(float("nan"))),
    "infinite": ("5.bias", lambda m: m[5].bias.grad[0].fill_(float("inf"))),
    "a penalty on the weights": ("3.weight", lambda m: m[3].weight.square().sum().backward()),
    "a weight used outside its layer": (
        "5.weight",
        lambda m: F.linear(torch.randn(3, 5).to(m[5].weight), m[5].weight).sum().backward(),
    ),
    "a gradient penalty through the backward pass": ("0.weight", gradient_penalty),
    "part of a layer's gradients thrown away": ("0.weight", partly_thrown_away),
    "a tiny edit": ("3.weight", lambda m: m[3].weight.grad[2, 4].add_(1e-9)),
}
FLOAT64_ONLY = ("a tiny edit",)
dtypes = pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["64", "32"])


def train(
    model: Any, path: Path, tamper: Tamper | None = None, kind: Any = SGD, **options: Any
) -> dict[int, dict[str, Tensor]]:
    """A loop that tampers with gradients at one step."""
    optimizer, states = kind(model.parameters(), lr=0.05), {0: state_of(model)}
    with record(model, path, **options):
        for step in range(STEPS):
            loss_of(model).backward()
            if tamper is not None and step == TAMPERED:
                tamper(model)
            optimizer.step()
            optimizer.zero_grad()
            states[step + 1] = state_of(model)
    return states


@dtypes
@pytest.mark.parametrize("name", EDITS)
def test_a_gradient_the_patterns_do_not_explain_stops_the_run(
    name: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    if name in FLOAT64_ONLY and dtype != torch.float64:
        pytest.skip("lost in rounding")
    parameter, tamper = EDITS[name]
    model = network(dtype)
    with pytest.raises(AuditError, match=rf"'{parameter}'.* step {TAMPERED}\b") as raised:
        train(model, tmp_path / "run", tamper)
    assert 'audit="warn" goes on' in str(raised.value)
    memory = proved(tmp_path / "run", model, {TAMPERED: state_of(model)})
    assert memory.steps == TAMPERED
    assert memory.remarks == ("the training loop was ended by AuditError",)


@pytest.mark.filterwarnings("ignore:dualform")
@pytest.mark.parametrize("kind", [SGD, AdamW])
@pytest.mark.parametrize("name", [name for name in EDITS if name not in FLOAT64_ONLY])
def test_with_warnings_that_one_parameter_is_values_and_the_rest_stays_exact(
    name: str, kind: Any, tmp_path: Path
) -> None:
    parameter, tamper = EDITS[name]
    model = network()
    states = train(model, tmp_path / "run", tamper, kind, audit="warn")
    memory = Memory.open(tmp_path / "run")
    assert (memory.steps, memory.closed) == (STEPS, True)
    edited = {n for e in memory.events if e.what == "unexplained" for n in e.parameters}
    assert parameter in edited
    if name in ("not a number", "infinite"):  # from there on there are no numbers
        assert torch.equal(at(memory, parameter, TAMPERED), states[TAMPERED][parameter])
        return
    found = verified(memory, model)
    assert found.passed, found
    for other, known in memory.parameters.items():
        assert (known.keep == "values") == (other in edited)
        if other in edited:
            assert f"not explained at step {TAMPERED}" in known.why
            assert any(other in remark for remark in memory.remarks)
            assert torch.equal(at(memory, other, TAMPERED), states[TAMPERED][other])
        else:
            assert found.verdicts[other].verdict == BITS
            assert torch.equal(at(memory, other, STEPS - 1), states[STEPS - 1][other])
    if name in ("one entry edited by hand", "a penalty on the weights"):
        assert edited == {parameter}


KEYS_EDITS: dict[str, tuple[set[str], Tamper | None]] = {
    "nothing": (set(), None),
    "clipping": (set(), lambda m: clip_grad_norm_(m.parameters(), 1e-3)),
    "a penalty": ({"3.weight"}, lambda m: m[3].weight.square().sum().backward()),
    "a use outside": ({"5.weight"}, EDITS["a weight used outside its layer"][1]),
    "two edits": (
        {"0.bias", "3.weight"},
        lambda m: [p.grad[1].add_(1) for p in (m[0].bias, m[3].weight)],
    ),
    "diverged": (set(), lambda m: m[3].weight.grad[0, 0].fill_(float("inf"))),
}


@pytest.mark.filterwarnings("ignore:dualform")
@pytest.mark.parametrize("keep", ["keys", {"0": "keys", "3": "keys", "5": "keys", "*": "patterns"}])
@pytest.mark.parametrize("name", KEYS_EDITS)
def test_of_keys_alone_it_is_said_once_that_they_are_not_all(
    name: str, keep: Any, tmp_path: Path
) -> None:
    edited, tamper = KEYS_EDITS[name]
    model = network()
    optimizer = SGD(model.parameters(), lr=1e-3)
    with record(model, tmp_path / "run", keep=keep, audit="warn"):
        for step in range(140):
            for _ in range(1 + step % 3):
                loss_of(model).backward()
            if tamper is not None and step >= 60:
                tamper(model)
            optimizer.step()
            optimizer.zero_grad()
    memory = Memory.open(tmp_path / "run")
    said = [r for r in memory.remarks if "are not all that wrote into" in r]
    assert {p for p in memory.parameters if any(f"into {p!r}" in r for r in said)} == edited
    assert len(said) == len(edited)
    assert name == "diverged" or verified(memory, model).passed


def test_sums_of_some_passes_say_nothing_of_keys(tmp_path: Path) -> None:
    """Gradients of several steps, where only some of the passes are summed."""
    model = network()
    first, second = SGD(model[:3].parameters(), lr=1e-3), SGD(model[3:].parameters(), lr=1e-3)
    with record(model, tmp_path / "run", keep="keys"):
        for step in range(200):
            loss_of(model).backward()
            first.step()
            if step % 3 == 0:
                second.step()
                second.zero_grad()
            first.zero_grad()
    assert Memory.open(tmp_path / "run").remarks == ()


def test_the_message_says_how_much_and_what_may_have_been(tmp_path: Path) -> None:
    with pytest.raises(AuditError, match=r"^0\.\d+ of the gradient of '0.weight'") as raised:
        train(network(), tmp_path / "run", lambda m: clip_grad_value_(m.parameters(), 1e-5))
    for word in ("clipped by value", "edited", "penalty", "used outside its layer"):
        assert word in str(raised.value)


@pytest.mark.parametrize("resumed", [False, True])
@pytest.mark.parametrize("is_reset", [False, True])
def test_a_gradient_left_over_from_before_recording(
    resumed: bool, is_reset: bool, tmp_path: Path
) -> None:
    model = network()
    optimizer = SGD(model.parameters(), lr=0.1)

    def run(resume: bool = False) -> None:
        with record(model, tmp_path / "run", resume=resume):
            if is_reset:
                optimizer.zero_grad()
            loss_of(model).backward()
            optimizer.step()

    if resumed:
        optimizer.zero_grad()
        run()
        optimizer.zero_grad()
    loss_of(model).backward()
    if is_reset:
        run(resumed)
        proved(tmp_path / "run", model)
    else:
        with pytest.raises(AuditError, match=r"(?s)when recording began.*optimizer.zero_grad\(\)"):
            run(resumed)


# Heads of one or two outputs: along one direction their gradient is a number or two ---------------


def regression(outputs: int, dtype: torch.dtype) -> Any:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, outputs)).to(dtype)


def train_head(model: Any, path: Path, tamper: Tamper | None = None, clip: float = 0.0) -> Memory:
    optimizer = SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-3)
    with record(model, path):
        for step in range(30):
            inputs = torch.randn(9, 6, dtype=model[0].weight.dtype)
            (model(inputs) - 1).square().mean().backward()
            if tamper is not None and step == TAMPERED:
                tamper(model[2].weight)
            if clip:
                clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()
    return Memory.open(path)


HEAD_EDITS: dict[str, Tamper] = {
    "one entry": lambda w: w.grad[0, 4].add_(0.01),
    "clipping by value": lambda w: clip_grad_value_([w], 1e-2),
    "noise": lambda w: w.grad.add_(1e-3 * torch.randn_like(w)),
    "signs": lambda w: w.grad.sign_(),
    "decay by hand": lambda w: w.grad.add_(0.01 * w.detach()),
    "a penalty": lambda w: w.square().sum().backward(),
    "not a number": lambda w: w.grad[0, 0].fill_(float("nan")),
    "another gradient": lambda w: w.grad.copy_(torch.randn_like(w)),
}


@dtypes
@pytest.mark.parametrize("outputs", [1, 2])
@pytest.mark.parametrize("name", HEAD_EDITS)
def test_a_head_of_one_or_two_outputs_hides_no_edit(
    name: str, outputs: int, dtype: torch.dtype, tmp_path: Path
) -> None:
    model = regression(outputs, dtype)
    with pytest.raises(AuditError, match=rf"'2.weight'.*step {TAMPERED}"):
        train_head(model, tmp_path / "run", HEAD_EDITS[name])


@dtypes
@pytest.mark.parametrize("outputs", [1, 2])
@pytest.mark.parametrize("clip", [0.0, 1e-3])
def test_an_honest_head_raises_no_alarm(
    clip: float, outputs: int, dtype: torch.dtype, tmp_path: Path
) -> None:
    model = regression(outputs, dtype)
    kappa = train_head(model, tmp_path / "run", clip=clip).log("2.weight").kappa
    assert kappa.max() < 0.5 if clip else (kappa == 1.0).all()
    assert verified(tmp_path / "run", model).passed


# No false alarms ----------------------------------------------------------------------------------


def batches(size: int, scale: float = 1.0, factor: float = 1.0) -> Callable[..., Tensor]:
    def loss(model: nn.Module, generator: torch.Generator) -> Tensor:
        inputs = torch.randn(size, 12, generator=generator) * scale
        labels = torch.randint(0, 4, (size,), generator=generator)
        return factor * F.cross_entropy(model(inputs), labels)

    return loss


def confident(model: nn.Module, generator: torch.Generator) -> Tensor:
    """A network that is sure: error signals range over forty orders of magnitude."""
    labels = torch.randint(0, 4, (8,), generator=generator)
    outputs = model(torch.randn(8, 12, generator=generator))
    return F.cross_entropy(outputs + 80 * F.one_hot(labels, 4), labels)


def cancelling(model: nn.Module, generator: torch.Generator) -> Tensor:
    """Large patterns whose sum is nearly nothing."""
    inputs = torch.randn(8, 12, generator=generator)
    return 1000 * (model(inputs) - model(inputs + 1e-4)).sum()


QUIET: dict[str, tuple[dict[str, Any], Callable[..., Tensor]]] = {
    "plain": ({"lr": 0.1}, batches(16)),
    "heavy momentum": ({"lr": 0.01, "momentum": 0.99, "nesterov": True}, batches(16)),
    "a large learning rate": ({"lr": 1.0}, batches(16)),
    "batches of one": ({"lr": 0.05, "momentum": 0.9}, batches(1)),
    "tiny gradients": ({"lr": 0.1, "momentum": 0.9}, batches(16, factor=1e-12)),
    "gradients near the smallest number": ({"lr": 1e20}, batches(16, factor=1e-30)),
    "gradients below the smallest number": ({"lr": 0.1}, batches(16, factor=1e-40)),
    "huge gradients": ({"lr": 1e-20, "momentum": 0.9}, batches(16, factor=1e18)),
    "a confident network": ({"lr": 0.1, "momentum": 0.9}, confident),
    "patterns that cancel": ({"lr": 1e-3, "momentum": 0.9}, cancelling),
    "weights that shrink by decay": ({"lr": 0.1, "weight_decay": 0.1}, batches(16, factor=1e-3)),
    "weights that shrink to nothing": ({"lr": 0.5, "weight_decay": 0.5}, batches(16, factor=0.0)),
    "a decay that float32 loses": ({"lr": 5e-5, "weight_decay": 1e-4}, batches(16, factor=1e-6)),
    "large inputs": ({"lr": 1e-6, "momentum": 0.9}, batches(16, scale=1e4)),
    "small inputs": ({"lr": 1.0, "momentum": 0.9}, batches(16, scale=1e-6)),
}


def run_quietly(name: str, steps: int, path: Path, clip: float) -> None:
    settings, loss = QUIET[name]
    model = nn.Sequential(
        nn.Linear(12, 24), nn.ReLU(), nn.LayerNorm(24), nn.Linear(24, 16), nn.Tanh(),
        nn.Linear(16, 4),
    )  # fmt: skip
    optimizer, generator = SGD(model.parameters(), **settings), torch.Generator().manual_seed(1)
    with recording(model, optimizer, path, segment_bytes=1 << 20):
        for _ in range(steps):
            loss(model, generator).backward()
            if clip:
                clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()
    memory = Memory.open(path)
    assert (memory.steps, memory.remarks, memory.events) == (steps, (), ())
    assert {p.keep for p in memory.parameters.values()} == {"patterns", "examples"}


@pytest.mark.parametrize("clip", [0.0, 0.01])
@pytest.mark.parametrize("name", QUIET)
def test_honest_training_raises_no_alarm(name: str, clip: float, tmp_path: Path) -> None:
    run_quietly(name, 150, tmp_path / "run", clip)


@pytest.mark.long
@pytest.mark.parametrize("name", QUIET)
def test_thousands_of_honest_steps_raise_no_alarm(name: str, tmp_path: Path) -> None:
    run_quietly(name, 3000, tmp_path / "run", 0.0)


# Divergence ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("power", [2, 3])
@pytest.mark.parametrize("seed", [5, 7, 9])
def test_divergence_stops_a_recording_whose_steps_before_are_good(
    seed: int, power: int, tmp_path: Path
) -> None:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4)).double()
    inputs = torch.randn(32, 8, dtype=torch.float64)
    optimizer = SGD(model.parameters(), lr=1 + 0.3 * seed, momentum=0.9)

    def diverge() -> None:
        with record(model, tmp_path / "run"):
            for _ in range(60):
                optimizer.zero_grad()
                model(inputs).abs().pow(power).mean().backward()
                optimizer.step()

    with pytest.raises(AuditError, match=r"not finite at step \d+: the training diverged"):
        diverge()
    memory = Memory.open(tmp_path / "run")
    assert memory.steps > 1
    assert torch.isfinite(at(memory, "1.weight", 1)).all()
    assert all(np.isfinite(memory.log(name).kappa).all() for name in memory.parameters)


@pytest.mark.parametrize("kind", [SGD, Adam])
@pytest.mark.parametrize("size", [1e65, 1e120])
def test_gradients_however_large_are_explained_and_edits_of_them_found(
    kind: Any, size: float, tmp_path: Path
) -> None:
    def run(path: Path, factor: float) -> None:
        model: Any = network(torch.float64)
        optimizer = kind(model.parameters(), lr=1e-3 / size if kind is SGD else 1e-3)
        with record(model, path):
            for _ in range(3):
                (model(torch.randn(5, 6, dtype=torch.float64)).sum() * size).backward()
                model[5].weight.grad.view(-1)[3] *= factor
                optimizer.step()
                optimizer.zero_grad()
        assert verified(path, model).passed

    run(tmp_path / "honest", 1.0)
    with pytest.raises(AuditError, match=r"'5.weight'"):
        run(tmp_path / "edited", 1 + 1e-6)
