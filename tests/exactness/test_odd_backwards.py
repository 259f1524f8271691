"""Odd ways to go backward, odd precisions, optimizers in odd places: rebuilt all the same."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import SGD

import dualform

STEPS = 10
RULE = {"lr": 0.05, "momentum": 0.9, "dampening": 0.3, "weight_decay": 0.02}

Loss = Callable[[nn.Module, torch.Generator], Tensor]


def normal(model: nn.Module, generator: torch.Generator, *shape: int) -> Tensor:
    dtype = next(model.parameters()).dtype
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


def mlp(*widths: int, bias: bool = True) -> nn.Sequential:
    layers: list[nn.Module] = []
    for one, two in itertools.pairwise(widths):
        layers += [nn.Linear(one, two, bias=bias), nn.Tanh()]
    return nn.Sequential(*layers[:-1])


def square_loss_on(*shape: int) -> Loss:
    return lambda model, generator: model(normal(model, generator, *shape)).square().mean()


class Tied(nn.Module):
    """Two linear modules with one weight."""

    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(5, 5, bias=bias), nn.Linear(5, 5, bias=bias)
        self.two.weight = self.one.weight

    def forward(self, inputs: Tensor) -> Tensor:
        return self.two(torch.tanh(self.one(inputs)))


both_dtypes = pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32], ids=["float64", "float32"]
)


def train(run: Any, optimizer: SGD, backward: Callable[[], None], clip: float | None = 0.5) -> None:
    with run.recording(optimizer):
        for _ in range(STEPS):
            backward()
            if clip:
                clip_grad_norm_(run.model.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()
            run.keep()


def seeded(build: Callable[[], nn.Module], dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(5)
    return build().to(dtype)


# Odd ways to go backward --------------------------------------------------------------------------

BACKWARDS: dict[str, Callable[[Any], None]] = {}


def backward(name: str) -> Callable[[Callable[[Any], None]], Callable[[Any], None]]:
    def enter(function: Callable[[Any], None]) -> Callable[[Any], None]:
        BACKWARDS[name] = function
        return function

    return enter


@backward("several backward passes")
def _(run: Any) -> None:
    run.loss().backward()
    (run.loss() * 0.5).backward()
    (-run.loss() * 0.1).backward()


@backward("several backward passes through one graph")
def _(run: Any) -> None:
    loss = run.loss()
    loss.backward(retain_graph=True)
    (2 * loss).backward(retain_graph=True)
    loss.square().backward()


@backward("two losses of one forward pass, backward one by one")
def _(run: Any) -> None:
    outputs = run.model(normal(run.model, run.generator, 6, 4))
    outputs[:, 0].square().mean().backward(retain_graph=True)
    outputs[:3].abs().mean().backward()


@backward("torch.autograd.backward on two losses at once")
def _(run: Any) -> None:
    torch.autograd.backward([run.loss(), run.loss()])


@backward("a vector-Jacobian product")
def _(run: Any) -> None:
    outputs = run.model(normal(run.model, run.generator, 6, 4))
    outputs.backward(gradient=torch.full_like(outputs, 0.1))


@backward("create_graph")
def _(run: Any) -> None:
    run.loss().backward(create_graph=True)
    for parameter in run.model.parameters():
        parameter.grad.detach_()


@backward("forward passes first, backward passes later and in another order")
def _(run: Any) -> None:
    losses = [run.loss() for _ in range(3)]
    for loss in reversed(losses):
        loss.backward()


@backward("gradients for the weights only")
def _(run: Any) -> None:
    weights = [p for p in run.model.parameters() if p.dim() == 2]
    for _ in range(2):
        run.loss().backward(inputs=weights)


@backward("gradients for the last layer only, now and then for all")
def _(run: Any) -> None:
    run.loss().backward(inputs=list(run.model[2].parameters()))
    if len(run.kept) % 3 == 0:
        run.loss().backward()


@backward("the first micro-batch all zeros")
def _(run: Any) -> None:
    """Its keys are zero: the weight's gradient is zeros, the bias's is not."""
    run.model(run.model[0].weight.new_zeros(5, 4)).sum().backward()
    run.loss().backward()


@backward("the first micro-batch without any error signal")
def _(run: Any) -> None:
    (run.loss() * 0.0).backward()
    run.loss().backward()


@backward("no_grad and enable_grad nested")
def _(run: Any) -> None:
    with torch.no_grad():
        run.loss()
        with torch.enable_grad():
            loss = run.loss()
    loss.backward()


@backward("a backward pass that breaks half-way and is repeated")
def _(run: Any) -> None:
    def give_up(error_signal: Tensor) -> None:
        raise ZeroDivisionError

    hidden = torch.tanh(run.model[0](normal(run.model, run.generator, 6, 4)))
    hidden.register_hook(give_up)
    with contextlib.suppress(ZeroDivisionError):
        run.model[2](hidden).square().mean().backward()
    run.model.zero_grad()
    run.loss().backward()


@backward("gradients scaled by a hook on the parameter")
def _(run: Any) -> None:
    hooks = [p.register_hook(lambda gradient: 0.3 * gradient) for p in run.model.parameters()]
    run.loss().backward()
    for hook in hooks:
        hook.remove()


@both_dtypes
@pytest.mark.parametrize("name", BACKWARDS)
@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True:UserWarning")
def test_odd_backward_passes_are_rebuilt(
    name: str, dtype: torch.dtype, new_run: Any, certify: Any
) -> None:
    run = new_run(seeded(lambda: mlp(4, 6, 3), dtype), square_loss_on(6, 4), dtype)
    train(run, SGD(run.model.parameters(), **RULE), lambda: BACKWARDS[name](run))
    certify(run)


# Skipped steps where layers share -----------------------------------------------------------------


@both_dtypes
@pytest.mark.parametrize("bias", [True, False], ids=["own biases", "no biases"])
def test_a_skipped_step_leaves_nothing_of_a_shared_weight(
    bias: bool, dtype: torch.dtype, new_run: Any, certify: Any
) -> None:
    run = new_run(seeded(lambda: Tied(bias), dtype), square_loss_on(6, 5), dtype)
    optimizer = SGD(run.model.parameters(), **RULE)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    with run.recording(optimizer):
        for batch in range(STEPS):
            loss = run.loss() * (float("inf") if batch in (0, 4) else 1.0)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            if batch not in (0, 4):
                run.keep()
    memory = certify(run)
    assert all(len(memory.layer(name)) == 6 * (STEPS - 2) for name in ("one", "two"))


# Lower precision ----------------------------------------------------------------------------------


@pytest.mark.parametrize("clip", [None, 0.5, 0.05], ids="clip {}".format)
@pytest.mark.parametrize("batch_shape", [(16, 4), (4, 4, 4)], ids=["matrix", "positions"])
def test_autocast_to_bfloat16_is_rebuilt_to_bfloat16_precision(
    batch_shape: tuple[int, ...], clip: float | None, new_run: Any, certify: Any
) -> None:
    """Weights stay float32, but every gradient is the sum of bfloat16 products: eps = 2⁻⁷."""

    def loss_of(model: nn.Module, generator: torch.Generator) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            outputs = model(normal(model, generator, *batch_shape))
        return outputs.float().square().mean()

    run = new_run(seeded(lambda: mlp(4, 6, 3), torch.float32), loss_of, torch.float32)
    train(run, SGD(run.model.parameters(), **RULE), lambda: run.loss().backward(), clip)
    memory = certify(run)
    for layer in map(memory.layer, memory.layers):
        assert {layer.uses.dtype_of(use) for use in range(len(layer.uses))} == {torch.bfloat16}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
def test_a_network_of_16_bits_is_rebuilt_to_its_own_precision(
    dtype: torch.dtype, new_run: Any, certify: Any
) -> None:
    run = new_run(seeded(lambda: mlp(4, 6, 3), dtype), square_loss_on(6, 4), dtype)
    train(run, SGD(run.model.parameters(), **RULE), lambda: run.loss().backward(), None)
    memory = certify(run, verdict="bit for bit")
    assert memory.layer("0").dtype == dtype


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
def test_a_clipped_network_of_16_bits_reaches_the_bits_or_certifies_little(
    dtype: torch.dtype, new_run: Any, certify: Any
) -> None:
    """Where the last places of a clipping factor are not known, there are few places at all."""
    run = new_run(seeded(lambda: mlp(4, 6, 3), dtype), square_loss_on(6, 4), dtype)
    train(run, SGD(run.model.parameters(), **RULE), lambda: run.loss().backward())
    certificate = dualform.DualForm(run.model, certify(run, verify=False)).verify()
    assert certificate.verdict in ("bit for bit", "within rounding, certifies little")
    assert certificate.passed == (certificate.verdict == "bit for bit")
    assert not certificate.failures


# Optimizers that step inside the backward pass ----------------------------------------------------


@both_dtypes
def test_an_optimizer_per_parameter_stepping_inside_the_backward_pass_is_rebuilt(
    dtype: torch.dtype, new_run: Any, by_hand: Any, off_by: Any
) -> None:
    run = new_run(seeded(lambda: mlp(4, 6, 5, 3), dtype), square_loss_on(6, 4), dtype)
    optimizers = {p: SGD([p], **RULE) for p in run.model.parameters()}

    def step(parameter: Tensor) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in run.model.parameters():
        parameter.register_post_accumulate_grad_hook(step)
    with run.recording(*optimizers.values()):
        for _ in range(STEPS):
            run.loss().backward()
    memory = dualform.Memory.open(run.path)
    for rebuilt in (by_hand(memory, memory.steps), dualform.DualForm(run.model, memory).weights()):
        for name, weight in run.weights().items():
            assert off_by(rebuilt[name], weight) <= (1e-12 if dtype == torch.float64 else 1e-5)


@pytest.mark.filterwarnings("ignore:dualform. nothing was recorded")
def test_a_run_without_a_single_step_is_the_initial_network(new_run: Any) -> None:
    run = new_run(seeded(lambda: mlp(4, 6, 3), torch.float32), square_loss_on(6, 4), torch.float32)
    with run.recording(SGD(run.model.parameters(), **RULE)):
        run.loss().backward()
    memory = dualform.Memory.open(run.path)
    assert (memory.steps, memory.closed) == (0, True)
    for name, weight in dualform.DualForm(run.model, memory).weights().items():
        assert torch.equal(weight, run.model.get_parameter(name))
