"""The audit: what cannot be explained is said at once, at its step, by name. Nothing else is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_, clip_grad_value_
from torch.optim import SGD

import dualform as df
from dualform.learning_rules import ParameterLog, hyperparameters, transitions
from dualform.recording.audit import ParameterAudit
from dualform.recording.fingerprints import FINGERPRINT_EVERY
from dualform.recording.rows import Rows
from dualform.recording.unexplained import Unexplained
from dualform.recording.whereabouts import ANCHOR, Transition

STEPS = 6
TAMPERED = 3
"""The step at which the loops below do something they should not."""


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)


def network(dtype: torch.dtype = torch.float32) -> nn.Module:
    return nn.Sequential(
        nn.Linear(6, 8), nn.ReLU(), nn.LayerNorm(8), nn.Linear(8, 5), nn.Tanh(), nn.Linear(5, 3)
    ).to(dtype)


def loss_of(model: nn.Module) -> Tensor:
    inputs = torch.randn(7, 6, dtype=next(model.parameters()).dtype)
    return F.cross_entropy(model(inputs), torch.randint(0, 3, (7,)))


Tamper = Callable[[nn.Module, torch.optim.Optimizer], None]
GRADIENT_EDITS: dict[str, tuple[str, Tamper]] = {}


def edit(name: str, parameter: str) -> Callable[[Tamper], Tamper]:
    """A tampering with gradients between backward and step, and where it must be seen first."""

    def enter(tamper: Tamper) -> Tamper:
        GRADIENT_EDITS[name] = parameter, tamper
        return tamper

    return enter


@edit("one entry edited by hand", "3.weight")
def _(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model[3].weight.grad[2, 4] += 0.01


@edit("one bias entry edited by hand", "5.bias")
def _(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model[5].bias.grad[1] *= 1.01


@edit("one row zeroed", "0.weight")
def _(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    row = model[0].weight.grad.norm(dim=1).argmax()
    model[0].weight.grad[row] = 0


@edit("clipping by value", "0.weight")
def _(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    clip_grad_value_(model.parameters(), 1e-3)


@edit("noise", "0.weight")
def _(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for parameter in model.parameters():
        parameter.grad += 1e-3 * torch.randn_like(parameter)


@edit("the sign instead of the gradient", "0.weight")
def _(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for parameter in model.parameters():
        parameter.grad.sign_()


@edit("decay added to the gradient by hand", "0.weight")
def _(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for parameter in model.parameters():
        parameter.grad += 0.01 * parameter.detach()


@edit("a gradient that is not a number", "3.weight")
def _(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model[3].weight.grad[0, 0] = float("nan")


@edit("an infinite gradient", "5.bias")
def _(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model[5].bias.grad[0] = float("inf")


@edit("a penalty on the weights in the loss", "3.weight")
def _(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model[3].weight.square().sum().backward()


@edit("a weight used outside its layer", "5.weight")
def _(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    F.linear(torch.randn(3, 5).to(model[5].weight), model[5].weight).sum().backward()


@edit("a gradient penalty through the backward pass", "0.weight")
def _(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    inputs = torch.randn(4, 6).to(model[0].weight).requires_grad_()
    (slope,) = torch.autograd.grad(model(inputs).square().sum(), inputs, create_graph=True)
    slope.square().sum().backward()


@edit("part of a layer's gradients thrown away", "0.weight")
def _(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model[0].weight.grad = None
    loss_of(model).backward()


@edit("a backward pass for a weight without its bias", "3.bias")
def _(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    loss_of(model).backward(inputs=[model[3].weight])


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    path: Path,
    *,
    tamper: Tamper | None = None,
    after: Tamper | None = None,
    steps: int = STEPS,
    **options: Any,
) -> df.Recorder:
    """A loop that tampers with gradients (`tamper`) or with anything (`after` the step)."""
    with df.record(model, optimizer, path, **options) as recorder:
        for step in range(steps):
            loss_of(model).backward()
            if tamper is not None and step == TAMPERED:
                tamper(model, optimizer)
            optimizer.step()
            optimizer.zero_grad()
            if after is not None and step == TAMPERED:
                after(model, optimizer)
    return recorder


dtypes = pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32], ids=["float64", "float32"]
)


@dtypes
@pytest.mark.parametrize("name", GRADIENT_EDITS)
def test_a_gradient_the_patterns_do_not_explain_stops_the_run(
    name: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    parameter, tamper = GRADIENT_EDITS[name]
    model = network(dtype)
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    with pytest.raises(df.AuditError, match=rf"^step {TAMPERED}, parameter '{parameter}': .*") as e:
        train(model, optimizer, tmp_path / "run", tamper=tamper)
    assert 'audit="warn" would go on' in str(e.value)
    memory = df.Memory.open(tmp_path / "run")
    assert memory.steps == TAMPERED
    assert any("AuditError" in remark for remark in memory.remarks)


@pytest.mark.parametrize("name", GRADIENT_EDITS)
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
def test_audit_warn_goes_on_and_the_memory_is_not_called_exact(name: str, tmp_path: Path) -> None:
    parameter, tamper = GRADIENT_EDITS[name]
    model = network()
    optimizer = SGD(model.parameters(), lr=0.1)
    with pytest.warns(UserWarning, match=rf"not exact. step {TAMPERED}, parameter '{parameter}'"):
        recorder = train(model, optimizer, tmp_path / "run", tamper=tamper, audit="warn")
    memory = df.Memory.open(tmp_path / "run")
    assert not recorder.exact
    assert not memory.exact
    assert memory.steps == STEPS
    assert memory.closed
    assert any(r.startswith(f"step {TAMPERED}, parameter '{parameter}'") for r in memory.remarks)


def test_the_message_of_an_edited_gradient_says_how_much_and_what_would_be_fine(
    tmp_path: Path,
) -> None:
    model = network()
    with pytest.raises(df.AuditError, match=r"\d% of its gradient is not in the .* patterns") as e:
        train(
            model,
            SGD(model.parameters(), lr=0.1),
            tmp_path / "run",
            tamper=lambda m, o: clip_grad_value_(m.parameters(), 1e-4),
        )
    for word in (
        "clipped by value",
        "noise",
        "edited by hand",
        "clipping by norm",
        "accumulation",
        "weight_decay",
        "create_graph",
        "backward(inputs=...)",
    ):
        assert word in str(e.value)
    assert "zero_grad" not in str(e.value)  # it is not the first step


def test_backward_passes_for_whole_layers_or_in_steps_of_their_own_are_accounted_for(
    tmp_path: Path,
) -> None:
    model = network()
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    weights = [model[0].weight, model[3].weight, model[5].weight]
    with df.record(model, optimizer, tmp_path / "run"):
        for step in range(STEPS):
            if step % 2:
                loss_of(model).backward(inputs=weights)
            else:
                loss_of(model).backward(inputs=list(model[3].parameters()))
                loss_of(model).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert df.DualForm(model, tmp_path / "run").verify().passed


@pytest.mark.parametrize("resumed", [False, True])
def test_a_gradient_left_over_from_before_recording_is_named(resumed: bool, tmp_path: Path) -> None:
    model = network()
    optimizer = SGD(model.parameters(), lr=0.1)
    if resumed:
        train(model, optimizer, tmp_path / "run")
    loss_of(model).backward()
    with pytest.raises(df.AuditError, match=r"(?s)When recording began.*call optimizer.zero_grad"):
        train(model, optimizer, tmp_path / "run", resume=resumed)


def test_a_gradient_left_over_that_is_reset_in_time_does_no_harm(tmp_path: Path) -> None:
    model = network()
    optimizer = SGD(model.parameters(), lr=0.1)
    loss_of(model).backward()
    with df.record(model, optimizer, tmp_path / "run") as recorder:
        optimizer.zero_grad()
        loss_of(model).backward()
        optimizer.step()
    assert recorder.exact


@pytest.mark.parametrize("edit", [float("nan"), float("inf")])
def test_a_gradient_that_is_no_number_is_called_so(edit: float, tmp_path: Path) -> None:
    model = network()
    with pytest.raises(df.AuditError, match="not finite"):
        train(
            model,
            SGD(model.parameters(), lr=0.1),
            tmp_path / "run",
            tamper=lambda m, o: m[0].weight.grad.fill_(edit),
        )


def test_a_loss_that_is_no_number_is_noticed(tmp_path: Path) -> None:
    model = network()
    with pytest.raises(df.AuditError, match=r"step 3, parameter .* is not finite"):
        train(
            model,
            SGD(model.parameters(), lr=0.1),
            tmp_path / "run",
            tamper=lambda m, o: (loss_of(m) * float("nan")).backward(),
        )


def test_a_tiny_edit_is_found_in_float64(tmp_path: Path) -> None:
    def tamper(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        model[3].weight.grad[2, 4] += 1e-9

    model = network(torch.float64)
    with pytest.raises(df.AuditError, match=r"step 3, parameter '3.weight'"):
        train(model, SGD(model.parameters(), lr=0.1), tmp_path / "run", tamper=tamper)


# Heads of one or two outputs: along one direction their gradient is a number or two ---------------

HEAD_EDITS: dict[str, Callable[[nn.Parameter], Any]] = {
    "one entry edited by hand": lambda weight: weight.grad[0, 4].add_(0.01),
    "clipping by value": lambda weight: clip_grad_value_([weight], 1e-2),
    "noise": lambda weight: weight.grad.add_(1e-3 * torch.randn_like(weight)),
    "the sign instead of the gradient": lambda weight: weight.grad.sign_(),
    "decay added to the gradient by hand": lambda weight: weight.grad.add_(0.01 * weight.detach()),
    "a penalty on the weights in the loss": lambda weight: weight.square().sum().backward(),
    "not a number": lambda weight: weight.grad[0, 0].fill_(float("nan")),
    "another gradient altogether": lambda weight: weight.grad.copy_(torch.randn_like(weight)),
}


def train_head(
    model: nn.Module,
    path: Path,
    tamper: Callable[[nn.Linear], Any] | None = None,
    *,
    clip: float | None = None,
    steps: int = STEPS,
) -> df.Memory:
    """A regression whose last layer is tampered with."""
    optimizer = SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-3)
    with df.record(model, optimizer, path):
        for step in range(steps):
            inputs = torch.randn(9, 6, dtype=model[-1].weight.dtype)
            (model(inputs) - 1).square().mean().backward()
            if tamper is not None and step == TAMPERED:
                tamper(model[-1])
            if clip is not None:
                clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()
    return df.Memory.open(path)


def regression(outputs: int, dtype: torch.dtype) -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, outputs)).to(dtype)


@dtypes
@pytest.mark.parametrize("outputs", [1, 2])
@pytest.mark.parametrize("name", HEAD_EDITS)
def test_a_head_of_one_or_two_outputs_hides_no_edit(
    name: str, outputs: int, dtype: torch.dtype, tmp_path: Path
) -> None:
    with pytest.raises(df.AuditError, match=rf"^step {TAMPERED}, parameter '2.weight': .*"):
        train_head(
            regression(outputs, dtype), tmp_path / "run", lambda m: HEAD_EDITS[name](m.weight)
        )


@dtypes
@pytest.mark.parametrize("outputs", [1, 2])
@pytest.mark.parametrize("clip", [None, 1e-3])
def test_a_head_of_one_or_two_outputs_raises_no_alarm_when_honest(
    clip: float | None, outputs: int, dtype: torch.dtype, tmp_path: Path
) -> None:
    memory = train_head(regression(outputs, dtype), tmp_path / "run", clip=clip, steps=60)
    assert memory.exact
    kappa = memory.log("2.weight").kappa
    assert kappa.max() < 0.5 if clip else abs(kappa - 1.0).max() < torch.finfo(dtype).eps * 8


def test_an_edit_of_a_gradient_that_is_one_number_is_a_factor_and_the_dual_form_holds(
    tmp_path: Path,
) -> None:
    model = regression(1, torch.float64)
    memory = train_head(model, tmp_path / "run", lambda head: head.bias.grad.add_(0.01))
    assert memory.exact
    assert memory.log("2.bias").kappa[TAMPERED] != 1.0
    rebuilt = df.DualForm(model, memory).weights(torch.float64)["2.bias"]
    assert torch.allclose(rebuilt, model[2].bias, rtol=1e-12)


@dtypes
def test_no_factor_makes_a_gradient_of_patterns_that_sum_to_nothing(dtype: torch.dtype) -> None:
    bias = nn.Parameter(torch.zeros(1, dtype=dtype))
    audit = ParameterAudit(bias, None, torch.Generator().manual_seed(0))
    rounding = torch.tensor([0.1 * audit.eps], dtype=dtype)
    audit.see(rounding, Rows(0, torch.ones(1, 1), torch.ones(1, 1)), audit.eps)
    audit.look_at(2 * rounding)
    assert audit.explain() == pytest.approx(1.0, abs=2)
    audit.look_at(torch.tensor([0.3], dtype=dtype))
    with pytest.raises(Unexplained, match="of its gradient is not in the recorded patterns"):
        audit.explain()


# Weights ------------------------------------------------------------------------------------------

WEIGHT_EDITS: dict[str, tuple[str, Tamper]] = {}


def weight_edit(name: str, parameter: str) -> Callable[[Tamper], Tamper]:
    def enter(tamper: Tamper) -> Tamper:
        WEIGHT_EDITS[name] = parameter, tamper
        return tamper

    return enter


@weight_edit("one weight set by hand", "3.weight")
def _(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    with torch.no_grad():
        model[3].weight[1, 1] += 0.1


@weight_edit("one weight set through .data", "5.weight")
def _(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model[5].weight.data[0, 0] = 3.0


@weight_edit("a norm set by hand", "2.weight")
def _(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model[2].weight.data.mul_(1.5)


@weight_edit("weights kept to a norm", "0.weight")
def _(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model[0].weight.data.renorm_(2, 0, 0.1)


@weight_edit("an older checkpoint loaded", r"\d\.(weight|bias)")
def _(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model.load_state_dict({name: v * 0.5 for name, v in model.state_dict().items()})


@weight_edit("a second optimizer nobody told of", r"\d\.(weight|bias)")
def _(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    loss_of(model).backward()
    SGD(model.parameters(), lr=0.1).step()
    model.zero_grad()


@weight_edit("momentum buffers edited", r"\d\.(weight|bias)")
def _(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for state in optimizer.state.values():
        state["momentum_buffer"].mul_(-3)


@dtypes
@pytest.mark.parametrize("name", WEIGHT_EDITS)
def test_a_weight_changed_outside_the_step_is_found_within_a_few_steps(
    name: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    parameter, tamper = WEIGHT_EDITS[name]
    model = network(dtype)
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    with pytest.raises(df.AuditError, match=rf"parameter '{parameter}': its weights are ") as e:
        train(
            model, optimizer, tmp_path / "run", after=tamper, steps=TAMPERED + FINGERPRINT_EVERY + 2
        )
    found = int(str(e.value).split()[1].strip(","))
    assert TAMPERED < found <= TAMPERED + FINGERPRINT_EVERY + 1
    memory = df.Memory.open(tmp_path / "run")
    assert not memory.exact
    assert memory.closed


def test_a_weight_changed_after_the_last_step_is_said_and_nothing_is_lost(tmp_path: Path) -> None:
    model = network()
    optimizer = SGD(model.parameters(), lr=0.1)
    with pytest.raises(df.AuditError, match=r"parameter '0.weight': its weights are"):
        train(
            model,
            optimizer,
            tmp_path / "run",
            after=lambda m, o: m[0].weight.data.add_(1.0),
            steps=TAMPERED + 1,
        )
    memory = df.Memory.open(tmp_path / "run")
    assert memory.steps == TAMPERED + 1
    assert memory.closed
    assert not memory.exact
    memory.check()


def test_a_replaced_optimizer_is_noticed_at_the_end(tmp_path: Path) -> None:
    model = network()
    first, then = (SGD(model.parameters(), lr=0.1) for _ in range(2))

    def train_with_both() -> None:
        with df.record(model, first, tmp_path / "run"):
            for optimizer in (first, then):
                loss_of(model).backward()
                optimizer.step()
                optimizer.zero_grad()

    with pytest.raises(df.AuditError, match=r"Was it changed outside optimizer\.step"):
        train_with_both()


def test_audit_warn_goes_on_after_a_changed_weight(tmp_path: Path) -> None:
    model = network()
    optimizer = SGD(model.parameters(), lr=0.1)
    with pytest.warns(UserWarning, match=r"not exact. .* parameter '3.weight'"):
        train(
            model,
            optimizer,
            tmp_path / "run",
            after=WEIGHT_EDITS["one weight set by hand"][1],
            steps=TAMPERED + FINGERPRINT_EVERY + 2,
            audit="warn",
        )
    memory = df.Memory.open(tmp_path / "run")
    assert memory.steps == TAMPERED + FINGERPRINT_EVERY + 2
    assert not memory.exact
    assert sum("'3.weight'" in remark for remark in memory.remarks) == 1


# What is refused at the start ---------------------------------------------------------------------


class MySGD(SGD):
    pass


@pytest.mark.parametrize("kind", [torch.optim.Adamax, torch.optim.RAdam, torch.optim.LBFGS, MySGD])
def test_an_optimizer_whose_rule_is_not_known_is_refused(kind: Any, tmp_path: Path) -> None:
    model = network()
    with (
        pytest.raises(df.AuditError, match=rf"{kind.__name__}; its learning rule is not known"),
        df.record(model, kind(model.parameters(), lr=0.1), tmp_path / "run"),
    ):
        pass
    assert not (tmp_path / "run" / "manifest.json").exists()


@pytest.mark.parametrize("kind", [torch.optim.Adamax, MySGD])
def test_audit_warn_keeps_keys_and_error_signals_under_any_optimizer(
    kind: Any, tmp_path: Path
) -> None:
    model = network()
    with pytest.warns(UserWarning, match=f"the learning rule of {kind.__name__} is not known"):
        train(model, kind(model.parameters(), lr=0.01), tmp_path / "run", audit="warn")
    memory = df.Memory.open(tmp_path / "run")
    assert not memory.exact
    assert memory.steps == STEPS
    assert len(memory.layer("0")) == 7 * STEPS


def test_a_trained_parameter_outside_the_model_is_refused(tmp_path: Path) -> None:
    model, criterion = network(), nn.Linear(3, 2)
    both = SGD([*model.parameters(), *criterion.parameters()], lr=0.1)
    with (
        pytest.raises(df.RecordingError, match=r"a parameter of shape \[2, 3\] that is not in"),
        df.record(model, both, tmp_path / "run"),
    ):
        pass


def test_a_parameter_from_outside_added_later_is_refused(tmp_path: Path) -> None:
    model, criterion = network(), nn.Linear(3, 2)
    with pytest.raises(df.RecordingError, match=r"nn.ModuleList\(\[model, criterion\]\)"):
        train(
            model,
            SGD(model.parameters(), lr=0.1),
            tmp_path / "run",
            tamper=lambda m, o: o.add_param_group({"params": criterion.parameters()}),
        )
    assert df.Memory.open(tmp_path / "run").steps == TAMPERED


def test_a_sparse_gradient_is_refused_by_name(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Embedding(5, 4, sparse=True), nn.Linear(4, 2))
    optimizer = SGD(model.parameters(), lr=0.1)
    with df.record(model, optimizer, tmp_path / "run"):
        model(torch.tensor([1, 2])).sum().backward()
        with pytest.raises(df.RecordingError, match=r"parameter '0.weight' has a sparse gradient"):
            optimizer.step()


def test_a_complex_parameter_is_refused_by_name(tmp_path: Path) -> None:
    model = nn.Linear(4, 2, dtype=torch.complex64)
    with (
        pytest.raises(df.RecordingError, match=r"parameter 'weight' has dtype torch.complex64"),
        df.record(model, SGD(model.parameters(), lr=0.1), tmp_path / "run"),
    ):
        pass


# What is fine -------------------------------------------------------------------------------------


def test_editing_the_gradient_of_a_parameter_without_patterns_is_accounted_for(
    tmp_path: Path,
) -> None:
    model = network(torch.float64)
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    train(
        model,
        optimizer,
        tmp_path / "run",
        tamper=lambda m, o: m[2].weight.grad.clamp_(-1e-3, 1e-3),
    )
    memory = df.Memory.open(tmp_path / "run")
    assert memory.exact
    rebuilt = df.DualForm(model, memory).weights(torch.float64)["2.weight"]
    assert torch.allclose(rebuilt, model[2].weight, rtol=1e-12)


def test_a_weight_used_in_a_way_without_patterns_is_accounted_for_step_by_step(
    tmp_path: Path,
) -> None:
    class Functional(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(6, 3)

        def forward(self, inputs: Tensor) -> Tensor:
            return torch.einsum("bi,oi->ob", inputs, self.fc.weight).T + self.fc.bias

    model = Functional()
    optimizer = SGD(model.parameters(), lr=0.1)
    with pytest.warns(UserWarning, match=r"'fc.weight' \(layer fc\) is used by"):
        train(model, optimizer, tmp_path / "run")
    memory = df.Memory.open(tmp_path / "run")
    assert memory.exact
    assert memory.layers == ()
    assert memory.parameters["fc.weight"].coverage == "steps"
    assert torch.allclose(df.DualForm(model, memory).weights()["fc.weight"], model.fc.weight)


def test_a_layer_called_by_keyword_is_seen(tmp_path: Path) -> None:
    class ByKeyword(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(6, 3)

        def forward(self, inputs: Tensor) -> Tensor:
            return self.fc(input=inputs)

    model = ByKeyword()
    train(model, SGD(model.parameters(), lr=0.1), tmp_path / "run")
    memory = df.Memory.open(tmp_path / "run")
    assert memory.exact
    assert len(memory.layer("fc")) == 7 * STEPS


# No false alarms ----------------------------------------------------------------------------------


def batches(size: int, scale: float = 1.0) -> Callable[[nn.Module, torch.Generator], Tensor]:
    def loss(model: nn.Module, generator: torch.Generator) -> Tensor:
        inputs = torch.randn(size, 12, generator=generator) * scale
        labels = torch.randint(0, 4, (size,), generator=generator)
        return F.cross_entropy(model(inputs), labels)

    return loss


def times(factor: float) -> Callable[[nn.Module, torch.Generator], Tensor]:
    return lambda model, generator: factor * batches(16)(model, generator)


def confident(model: nn.Module, generator: torch.Generator) -> Tensor:
    """A network that is sure: error signals range over forty orders of magnitude."""
    inputs = torch.randn(8, 12, generator=generator)
    labels = torch.randint(0, 4, (8,), generator=generator)
    outputs = model(inputs)
    return F.cross_entropy(outputs + 80 * F.one_hot(labels, 4), labels)


def cancelling(model: nn.Module, generator: torch.Generator) -> Tensor:
    """Large patterns whose sum is nearly nothing."""
    inputs = torch.randn(8, 12, generator=generator)
    outputs = model(inputs)
    return 1000 * (outputs - model(inputs + 1e-4)).sum()


QUIET: dict[str, tuple[dict[str, Any], Callable[[nn.Module, torch.Generator], Tensor]]] = {
    "plain": ({"lr": 0.1}, batches(16)),
    "heavy momentum": ({"lr": 0.01, "momentum": 0.99}, batches(16)),
    "heavy momentum and nesterov": (
        {"lr": 0.01, "momentum": 0.99, "nesterov": True, "weight_decay": 1e-4},
        batches(16),
    ),
    "a large learning rate": ({"lr": 2.0}, batches(16)),
    "a large learning rate with momentum": ({"lr": 0.5, "momentum": 0.9}, batches(4)),
    "batches of one": ({"lr": 0.05, "momentum": 0.9}, batches(1)),
    "tiny gradients": ({"lr": 0.1, "momentum": 0.9}, times(1e-12)),
    "gradients near the smallest number": ({"lr": 1e20}, times(1e-30)),
    "gradients below the smallest number": ({"lr": 0.1}, times(1e-40)),
    "huge gradients": ({"lr": 1e-20, "momentum": 0.9}, times(1e18)),
    "a confident network": ({"lr": 0.1, "momentum": 0.9}, confident),
    "patterns that cancel": ({"lr": 1e-3, "momentum": 0.9}, cancelling),
    "weights that shrink by decay": ({"lr": 0.1, "weight_decay": 0.1}, times(1e-3)),
    "weights that shrink to nothing": ({"lr": 0.5, "weight_decay": 0.5}, times(0.0)),
    "large inputs": ({"lr": 1e-6, "momentum": 0.9}, batches(16, scale=1e4)),
    "small inputs": ({"lr": 1.0, "momentum": 0.9}, batches(16, scale=1e-6)),
}


def run_quietly(name: str, steps: int, path: Path, clip: float | None) -> None:
    options, loss_of_batch = QUIET[name]
    model = nn.Sequential(
        nn.Linear(12, 24),
        nn.ReLU(),
        nn.LayerNorm(24),
        nn.Linear(24, 16),
        nn.Tanh(),
        nn.Linear(16, 4),
    )
    optimizer = SGD(model.parameters(), **options)
    generator = torch.Generator().manual_seed(1)
    with df.record(model, optimizer, path, segment_bytes=1 << 20) as recorder:
        for _ in range(steps):
            loss_of_batch(model, generator).backward()
            if clip is not None:
                clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()
    memory = df.Memory.open(path)
    assert recorder.exact
    assert memory.exact
    assert memory.steps == steps
    assert memory.remarks == ()


@pytest.mark.parametrize("name", QUIET)
def test_honest_training_raises_no_alarm(name: str, tmp_path: Path) -> None:
    run_quietly(name, 200, tmp_path / "run", clip=None)


@pytest.mark.long
@pytest.mark.parametrize("clip", [None, 0.01], ids=["unclipped", "clipped"])
@pytest.mark.parametrize("name", QUIET)
def test_thousands_of_honest_steps_raise_no_alarm(
    name: str, clip: float | None, tmp_path: Path
) -> None:
    run_quietly(name, 3000, tmp_path / "run", clip)


# Rounding that always goes the same way -----------------------------------------------------------


class SilentUnits:
    """Weights without a gradient, under a decay too small for float32, and their audit."""

    def __init__(self, *, lr: float, momentum: float = 0.0, live_columns: int = 0) -> None:
        self.generator = torch.Generator().manual_seed(2)
        self.weight = nn.Parameter(torch.randn(40, 6, generator=self.generator))
        self.live_columns = live_columns
        self.optimizer = SGD([self.weight], lr=lr, momentum=momentum, weight_decay=1e-4)
        self.audit = ParameterAudit(self.weight, None, self.generator)
        self.steps = 0

    def train(self, steps: int) -> None:
        fresh, then = (self._transition(fresh) for fresh in (True, False))
        gradient = torch.zeros_like(self.weight)
        live = gradient[:, : self.live_columns]
        for _ in range(steps):
            if self.live_columns:
                live.normal_(generator=self.generator)
            self.weight.grad = gradient
            self.audit.look_at(gradient)
            self.optimizer.step()
            self.audit.advance(then if self.steps else fresh)
            self.steps += 1
            if self.steps % FINGERPRINT_EVERY == 0:
                self.audit.compare(self.weight)

    def _transition(self, fresh: bool) -> Transition:
        settings = hyperparameters(self.optimizer.param_groups[0])
        matrix, vector = transitions(ParameterLog.single(settings, fresh=fresh, kappa=1.0))
        ww, wm, mw, mm = matrix[0].ravel().tolist()
        nw, nm = vector[0].tolist()
        return ww, wm, mw, mm, nw, nm


@pytest.mark.parametrize(("lr", "momentum", "live_columns"), [(5e-4, 0.0, 0), (5e-5, 0.9, 2)])
def test_a_decay_that_float32_loses_at_every_step_raises_no_alarm(
    lr: float, momentum: float, live_columns: int
) -> None:
    units = SilentUnits(lr=lr, momentum=momentum, live_columns=live_columns)
    before = units.weight[:, live_columns:].detach().clone()
    units.train(20_000)
    units.audit.compare(units.weight)
    assert (units.weight[:, live_columns:] == before).any()  # some did not decay at all


def test_a_change_after_prediction_started_again_is_found_in_any_row() -> None:
    for row in (0, 20, 39):
        units = SilentUnits(lr=5e-4)
        units.train(3 * ANCHOR)
        assert units.audit.steps < ANCHOR
        units.weight.data[row] += 1e-3
        with pytest.raises(Unexplained, match=r"its weights are .* away"):
            units.train(ANCHOR + FINGERPRINT_EVERY)


def test_prediction_starts_again_only_from_weights_that_passed() -> None:
    units = SilentUnits(lr=5e-4)
    assert ANCHOR % FINGERPRINT_EVERY == 0
    units.train(ANCHOR - 1)
    units.weight.data[39] += 1e-3
    with pytest.raises(Unexplained):
        units.train(1)
    assert units.audit.steps == ANCHOR  # due, but not done
    with pytest.raises(Unexplained):
        units.audit.compare(units.weight)


def test_a_change_after_hundreds_of_honest_steps_is_found_within_a_few(tmp_path: Path) -> None:
    model = network()
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    edited = 2 * ANCHOR + 3

    def train_and_edit() -> None:
        with df.record(model, optimizer, tmp_path / "run"):
            for step in range(edited + FINGERPRINT_EVERY + 2):
                loss_of(model).backward()
                optimizer.step()
                optimizer.zero_grad()
                if step == edited:
                    model[3].weight.data[1, 1] += 0.01

    with pytest.raises(df.AuditError, match=r"parameter '3.weight': its weights are ") as e:
        train_and_edit()
    assert edited < int(str(e.value).split()[1].strip(",")) <= edited + FINGERPRINT_EVERY + 1


@pytest.mark.long
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_silent_units_are_recorded_for_tens_of_thousands_of_steps(
    momentum: float, tmp_path: Path
) -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    model[0].bias.data[:4] = -50.0
    optimizer = SGD(model.parameters(), lr=5e-4, weight_decay=1e-4, momentum=momentum)
    inputs = torch.randn(127, 4, 6)
    with df.record(model, optimizer, tmp_path / "run"):
        for step in range(20_000):
            model(inputs[step % 127]).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert df.Memory.open(tmp_path / "run").exact
