"""Every way a layer is used, rebuilt: shapes, sharing, odd loops, neighbours that have no patterns.

Each case is a network and a loop under one demanding learning rule (momentum, dampening, decay,
clipping by norm, unless the case is about something else). Norms are kept by examples, and have to
be rebuilt as well.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_
from torch.optim import SGD
from torch.utils.checkpoint import checkpoint

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


class Recurrent(nn.Module):
    """One cell, used once per position, and a readout."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.readout = nn.Linear(4 + 5, 5), nn.Linear(5, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        state = inputs.new_zeros(inputs.shape[0], 5)
        for position in range(inputs.shape[1]):
            state = torch.tanh(self.cell(torch.cat([inputs[:, position], state], dim=1)))
        return self.readout(state)


class Tied(nn.Module):
    """Two linear modules with one weight."""

    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(5, 5, bias=bias), nn.Linear(5, 5, bias=bias)
        self.two.weight = self.one.weight

    def forward(self, inputs: Tensor) -> Tensor:
        return self.two(torch.tanh(self.one(inputs)))


class TwoNames(nn.Module):
    """One module, reachable under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 5)
        self.again = nn.ModuleDict({"same": self.first})

    def forward(self, inputs: Tensor) -> Tensor:
        return self.again["same"](torch.tanh(self.first(inputs)))


class Checkpointed(nn.Module):
    """Part of the forward pass is repeated in the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.foot, self.body, self.head = nn.Linear(4, 4), mlp(4, 6, 5), nn.Linear(5, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(checkpoint(self.body, self.foot(inputs), use_reentrant=False))


class Tokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.norm = nn.LayerNorm(6)
        self.head = nn.Linear(6, 4)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.norm(self.embedding(ids)))


class Scaled(nn.Module):
    """A bare parameter (0-dimensional) beside a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.scale = nn.Linear(4, 3), nn.Parameter(torch.tensor(0.7))
        self.unused = nn.Parameter(torch.zeros(2))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.fc(inputs) * self.scale


class Branches(nn.Module):
    """Two layers of which some steps use one, some the other, some both."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.calls = nn.Linear(4, 3), nn.Linear(4, 3), 0

    def forward(self, inputs: Tensor) -> Tensor:
        self.calls += 1
        used = [(self.left,), (self.right,), (self.left, self.right)][self.calls % 3]
        return sum(branch(inputs) for branch in used)


def token_loss(model: nn.Module, generator: torch.Generator) -> Tensor:
    ids = torch.randint(0, 11, (3, 5), generator=generator)
    return F.cross_entropy(model(ids).flatten(0, 1), ids.flatten() % 4)


def uneven_loss(model: nn.Module, generator: torch.Generator) -> Tensor:
    size = int(torch.randint(1, 9, (), generator=generator))
    return model(normal(model, generator, size, 4)).square().mean()


def loss_with_an_empty_batch(model: nn.Module, generator: torch.Generator) -> Tensor:
    some = model(normal(model, generator, 5, 4)).square().mean()
    return some + model(normal(model, generator, 0, 4)).square().sum()


def several_losses(model: nn.Module, generator: torch.Generator) -> Tensor:
    outputs = model(normal(model, generator, 6, 4))
    return outputs[:, 0].square().mean() + 3 * outputs[1:].abs().mean() - outputs[0, 1].cos()


def loss_with_evaluation(model: nn.Module, generator: torch.Generator) -> Tensor:
    model.eval()
    with torch.no_grad():
        model(normal(model, generator, 20, 4))
    with torch.inference_mode():
        model(normal(model, generator, 20, 4))
    model.train()
    model(normal(model, generator, 9, 4))  # differentiable, never differentiated
    return model(normal(model, generator, 6, 4)).square().mean()


def loss_with_saliency(model: nn.Module, generator: torch.Generator) -> Tensor:
    """torch.autograd.grad for inputs and for parameters leaves nothing in `.grad`."""
    inputs = normal(model, generator, 6, 4).requires_grad_()
    outputs = model(inputs)
    torch.autograd.grad(outputs.sum(), inputs, retain_graph=True)
    torch.autograd.grad(outputs.sum(), list(model.parameters()), retain_graph=True)
    torch.autograd.grad(model(inputs).square().sum(), model[0].weight)
    return outputs.square().mean()


def loss_of_inputs_that_need_gradients(model: nn.Module, generator: torch.Generator) -> Tensor:
    return model(normal(model, generator, 6, 4).requires_grad_()).square().mean()


def detached_loss(model: nn.Module, generator: torch.Generator) -> Tensor:
    """The first layers are cut off from half of the loss."""
    hidden = model[:2](normal(model, generator, 6, 4))
    return (model[2:](hidden) + model[2:](hidden.detach().flip(0))).square().mean()


def view_loss(model: nn.Module, generator: torch.Generator) -> Tensor:
    """Inputs that are not contiguous, expanded, transposed."""
    inputs = normal(model, generator, 4, 3, 5).transpose(0, 2)
    return (model(inputs) + model(normal(model, generator, 1, 1, 4).expand(5, 3, 4))).abs().mean()


CASES: dict[str, tuple[Callable[[], nn.Module], Loss]] = {
    "a plain network": (lambda: mlp(4, 6, 3), square_loss_on(6, 4)),
    "a deep network": (lambda: mlp(4, 6, 6, 6, 6, 6, 3), square_loss_on(6, 4)),
    "a single layer as the whole model": (lambda: nn.Linear(4, 3), square_loss_on(6, 4)),
    "a single output": (lambda: mlp(4, 1), square_loss_on(6, 4)),
    "a single input": (lambda: mlp(1, 5, 2), square_loss_on(6, 1)),
    "batches of one": (lambda: mlp(4, 6, 3), square_loss_on(1, 4)),
    "inputs with positions": (lambda: mlp(4, 6, 3), square_loss_on(3, 5, 4)),
    "inputs of four dimensions": (lambda: mlp(4, 6, 3), square_loss_on(2, 3, 2, 4)),
    "inputs of one dimension": (lambda: mlp(4, 6, 3), square_loss_on(4)),
    "inputs that are views": (lambda: mlp(4, 6, 3), view_loss),
    "inputs that need gradients": (lambda: mlp(4, 6, 3), loss_of_inputs_that_need_gradients),
    "uneven batches": (lambda: mlp(4, 6, 3), uneven_loss),
    "an empty batch beside a full one": (lambda: mlp(4, 6, 3), loss_with_an_empty_batch),
    "no biases": (lambda: mlp(4, 6, 3, bias=False), square_loss_on(6, 4)),
    "a layer used at every position": (Recurrent, square_loss_on(3, 4, 4)),
    "a weight shared by two layers": (lambda: Tied(bias=True), square_loss_on(6, 5)),
    "a weight shared by two layers without biases": (
        lambda: Tied(bias=False),
        square_loss_on(6, 5),
    ),
    "a module under two names": (TwoNames, square_loss_on(6, 5)),
    "in-place activations": (
        lambda: nn.Sequential(
            nn.Linear(4, 6), nn.ReLU(inplace=True), nn.Linear(6, 5), nn.LeakyReLU(inplace=True)
        ),
        square_loss_on(6, 4),
    ),
    "in-place dropout": (
        lambda: nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.3, inplace=True), nn.Linear(6, 2)),
        square_loss_on(6, 4),
    ),
    "layers unused in some steps": (Branches, square_loss_on(6, 4)),
    "several losses": (lambda: mlp(4, 6, 3), several_losses),
    "part of the loss detached": (lambda: mlp(4, 6, 3), detached_loss),
    "evaluation inside the loop": (lambda: mlp(4, 6, 3), loss_with_evaluation),
    "torch.autograd.grad inside the loop": (lambda: mlp(4, 6, 3), loss_with_saliency),
    "activation checkpointing": (Checkpointed, square_loss_on(6, 4)),
    "layer norm beside": (
        lambda: nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 3)),
        square_loss_on(2, 3, 4),
    ),
    "batch norm beside": (
        lambda: nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3)),
        square_loss_on(6, 4),
    ),
    "a convolution beside": (
        lambda: nn.Sequential(nn.Conv1d(2, 3, 2), nn.Flatten(), nn.Linear(9, 3)),
        square_loss_on(5, 2, 4),
    ),
    "an embedding beside": (Tokens, token_loss),
    "a bare parameter beside": (Scaled, square_loss_on(6, 4)),
}


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


@both_dtypes
@pytest.mark.parametrize("name", CASES)
def test_the_weights_of_every_step_are_rebuilt(
    name: str, dtype: torch.dtype, new_run: Any, certify: Any
) -> None:
    build, loss_of = CASES[name]
    run = new_run(seeded(build, dtype), loss_of, dtype)
    train(run, SGD(run.model.parameters(), **RULE), lambda: run.loss().backward())
    memory = certify(run)
    kinds = (nn.Linear, nn.Embedding, nn.LayerNorm, nn.BatchNorm1d)
    known = {n for n, m in run.model.named_modules() if type(m) in kinds}
    assert set(memory.layers) <= {n or "model" for n in known}
    assert memory.layers


# Attention's packed projections -------------------------------------------------------------------


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        block = nn.TransformerEncoderLayer(8, 2, 12, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(block, 2, enable_nested_tensor=False)
        self.head = nn.Linear(8, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(self.encoder(inputs))


@both_dtypes
def test_a_transformer_encoder_is_rebuilt_with_its_attention(
    dtype: torch.dtype, new_run: Any, certify: Any
) -> None:
    run = new_run(seeded(Encoder, dtype), square_loss_on(2, 3, 8), dtype)
    optimizer = SGD(run.model.parameters(), **RULE)
    train(run, optimizer, lambda: run.loss().backward())
    memory = certify(run)
    assert set(memory.layers) == {
        *(f"encoder.layers.{i}.linear{j}" for i in (0, 1) for j in (1, 2)),
        *(f"encoder.layers.{i}.norm{j}" for i in (0, 1) for j in (1, 2)),
        *(f"encoder.layers.{i}.self_attn.{part}_proj" for i in (0, 1) for part in ("in", "out")),
        "head",
    }
    kept = {name: p.keep for name, p in memory.parameters.items()}
    assert kept["encoder.layers.0.self_attn.in_proj_weight"] == "patterns"
    assert kept["encoder.layers.0.self_attn.out_proj.bias"] == "patterns"
    assert kept["encoder.layers.0.norm1.weight"] == "examples"
    assert kept["encoder.layers.1.linear2.bias"] == "patterns"


# Running statistics ------------------------------------------------------------------------------


@contextlib.contextmanager
def batch_norm_run(run: Any) -> Any:
    kept = {0: {n: b.clone() for n, b in run.model.named_buffers()}}
    optimizer = SGD(run.model.parameters(), **RULE)
    with run.recording(optimizer):
        for step in range(STEPS):
            run.loss().backward()
            optimizer.step()
            optimizer.zero_grad()
            run.keep()
            kept[step + 1] = {n: b.clone() for n, b in run.model.named_buffers()}
    yield kept


@both_dtypes
def test_running_statistics_are_those_of_the_step(
    dtype: torch.dtype, new_run: Any, certify: Any
) -> None:
    build, loss_of = CASES["batch norm beside"]
    run = new_run(seeded(build, dtype), loss_of, dtype)
    with batch_norm_run(run) as kept:
        memory = certify(run)
        for at, buffers in kept.items():
            for name, value in buffers.items():
                assert torch.equal(memory.buffer(name, at), value)
