"""Networks that use weights past their modules: attention, functional code, checkpoints, chains."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_
from torch.optim import SGD
from torch.utils.checkpoint import checkpoint

STEPS = 6
RULE = {"lr": 0.05, "momentum": 0.9, "dampening": 0.3, "weight_decay": 0.02}


class SelfAttention(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.attn = nn.MultiheadAttention(8, 2, **{"batch_first": True, "dropout": 0.1, **options})
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.attn(x, x, x, need_weights=False)[0])


class CrossAttention(nn.Module):
    """Queries of one length, keys and values of another; at times three different inputs."""

    def __init__(self, three: bool = False, **options: Any) -> None:
        super().__init__()
        self.attn = nn.MultiheadAttention(8, 2, batch_first=True, **options)
        self.three = three
        self.widths = options.get("kdim", 8), options.get("vdim", 8)

    def forward(self, x: Tensor) -> Tensor:
        wide = torch.cat([x, x.flip(1)], 1)
        keys, values = (wide.repeat(1, 1, 2)[..., :width] for width in self.widths)
        if self.widths == (8, 8) and not self.three:
            values = keys
        return self.attn(x, keys, values)[0]


class BothWays(nn.Module):
    """One attention, called with itself and with something else."""

    def __init__(self) -> None:
        super().__init__()
        self.attn = nn.MultiheadAttention(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        one = self.attn(x, x, x)[0]
        return self.attn(query=one, key=x, value=x)[0] + self.attn(x[:, 0], x[:, 0], x[:, 0])[0][0]


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerDecoderLayer(8, 2, 12, dropout=0.1, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x, torch.cat([x, x], 1).cos())


class Functional(nn.Module):
    """A layer that is never called: its weight is used by a function."""

    def __init__(self, use: Callable[[nn.Linear, Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.fc, self.use = nn.Linear(8, 8), nn.Linear(8, 5), use

    def forward(self, x: Tensor) -> dict[str, list[Tensor]]:
        return {"outputs": [self.use(self.fc, torch.tanh(self.first(x)))]}


class OwnMatrix(nn.Module):
    """Bare parameters: a packed one used by rows, a whole one with a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.packed = nn.Parameter(torch.randn(9, 8) / 3)
        self.weight, self.bias = nn.Parameter(torch.randn(4, 3) / 3), nn.Parameter(torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        one, two = self.packed[:6].split([3, 3])
        gate = torch.sigmoid(x @ self.packed[-3:].T)
        return F.linear(F.linear(x, one) * gate + x @ two.T, self.weight, self.bias)


class Transposed(nn.Module):
    """Matrices of shape [d_in, d_out], used as they are; the way of GPT-2's Conv1D among them."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.bias = nn.Parameter(torch.randn(8, 5) / 3), nn.Parameter(torch.zeros(5))
        self.two, self.three = nn.Parameter(torch.randn(5, 4) / 2), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.addmm(self.bias, x.flatten(0, 1), self.one).view(*x.shape[:-1], 5).tanh()
        output = hidden @ self.two
        return self.three(
            torch.sin(output) @ self.three.weight
            + x @ self.one @ self.two[:, :4] @ (self.three.weight)
        )


class Checkpointed(nn.Module):
    """Attention, functional code and modules inside activation checkpoints, one in another."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(8, 2, 12, 0.1, batch_first=True)
        self.attn, self.fc = SelfAttention(), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = checkpoint(self.layer, x, use_reentrant=False)
        hidden = checkpoint(self._inside, x.sin(), use_reentrant=False)
        return checkpoint(lambda h: torch.tanh(h @ self.fc.weight.T), hidden, use_reentrant=False)

    def _inside(self, x: Tensor) -> Tensor:
        again = checkpoint(lambda y: self.attn(y).cos(), x, use_reentrant=False)
        return F.linear(again, self.fc.weight, self.fc.bias)


def module_and_function(fc: nn.Linear, x: Tensor) -> Tensor:
    return fc(x) + F.linear(x.flip(1), fc.weight, fc.bias).tanh() + x.cos() @ fc.weight.T


class Chained(nn.ModuleList):
    """Parts that are called one after the other, outside any forward; the inside of one is kept."""

    def __init__(self) -> None:
        super().__init__([Functional(module_and_function), Functional(module_and_function)])
        self.attn = nn.MultiheadAttention(8, 2, batch_first=True)


def loss_of_a_chain(model: Chained, generator: torch.Generator) -> Tensor:
    x = torch.randn(4, 3, 8, generator=generator, dtype=torch.float64)
    x = x.to(model.attn.in_proj_weight)
    one, two = model[0], model[1]
    first = one(model.attn(x, x, x)[0].tanh())["outputs"][0]
    second = two(F.pad(first, (0, 3)) + x)["outputs"][0]
    return two(F.pad(second + first, (3, 0)))["outputs"][0].square().mean()


USES: dict[str, Callable[[nn.Linear, Tensor], Tensor]] = {
    "F.linear": lambda fc, x: F.linear(x, fc.weight, fc.bias),
    "F.linear without the bias": lambda fc, x: F.linear(x, fc.weight),
    "F.linear on a transposed input": lambda fc, x: F.linear(x.transpose(0, 1), fc.weight, fc.bias),
    "x @ W.T": lambda fc, x: x @ fc.weight.T,
    "x @ W.T + b": lambda fc, x: x @ fc.weight.T + fc.bias,
    "matrices": lambda fc, x: torch.addmm(fc.bias, x.flatten(0, 1), fc.weight.t()),
    "rows of W": lambda fc, x: torch.cat([x @ fc.weight[2:].T, x @ fc.weight[:2].T], -1),
    "module and function": module_and_function,
}

WITHOUT_PATTERNS: dict[str, Callable[[nn.Linear, Tensor], Tensor]] = {
    "einsum and a bias": lambda fc, x: torch.einsum("bld,ed->ble", x, fc.weight) + fc.bias,
    "einsum, the weight first": lambda fc, x: torch.einsum("ed,bd->be", fc.weight, x[:, 0]),
    "einsum with W.T": lambda fc, x: torch.einsum("bld,de->ble", x, fc.weight.T),
    "einsum with rows of W": lambda fc, x: torch.einsum("bld,ed->ble", x, fc.weight[1:4]),
    "bmm and a bias": lambda fc, x: x.bmm(fc.weight.T[None].expand(len(x), 8, 5)) + fc.bias[None],
    "bmm, the weight first": lambda fc, x: torch.bmm(fc.weight.expand(len(x), 5, 8), x.mT),
    "a matrix with one dimension more": lambda fc, x: x @ fc.weight.T[None],
    "W times a vector": lambda fc, x: torch.stack([torch.mv(fc.weight, row) for row in x[:, 0]]),
    "W.T times a vector": lambda fc, x: fc.weight.T.mv(x[0, 0, :5]) + (x @ fc.weight.T).sum(),
    "W @ x": lambda fc, x: fc.weight @ x[0].T,
    "einsum": lambda fc, x: torch.einsum("bld,ed->ble", x, fc.weight),
    "tensordot": lambda fc, x: torch.tensordot(x, fc.weight, ([2], [1])),
    "bmm": lambda fc, x: torch.bmm(x, fc.weight.T.expand(len(x), 8, 5)),
    "rows in another order": lambda fc, x: torch.einsum("bld,ed->elb", x, fc.weight),
    "reshaped": lambda fc, x: x.flatten(0, 1) @ fc.weight.reshape(8, 5),
    "not multiplied at all": lambda fc, x: fc.weight.T.sum() + x,
}
"""Ways to use a weight that are not read from the graph: their weights are values."""


CASES: dict[str, Callable[[], nn.Module]] = {
    "self-attention": SelfAttention,
    "self-attention, positions first": lambda: SelfAttention(batch_first=False),
    "self-attention without biases": lambda: SelfAttention(bias=False),
    "self-attention with more": lambda: SelfAttention(add_bias_kv=True, add_zero_attn=True),
    "cross-attention": CrossAttention,
    "attention with three inputs": lambda: CrossAttention(three=True),
    "attention with widths of its own": lambda: CrossAttention(kdim=5, vdim=7),
    "attention both ways": BothWays,
    "an encoder layer": lambda: nn.TransformerEncoderLayer(8, 2, 12, 0.1, batch_first=True),
    "a decoder layer": Decoder,
    "bare parameters": OwnMatrix,
    "matrices used untransposed": Transposed,
    "inside checkpoints": Checkpointed,
    "a chain of calls": Chained,
} | {name: lambda use=use: Functional(use) for name, use in USES.items()}


def in_a_checkpoint(use: Callable[[nn.Linear, Tensor], Tensor]) -> nn.Module:
    return Functional(lambda fc, x: checkpoint(use, fc, x, use_reentrant=False))


CASES |= {
    f"{name}, in a checkpoint": lambda use=use: in_a_checkpoint(use) for name, use in USES.items()
}


def loss_of(model: nn.Module, generator: torch.Generator) -> Tensor:
    if isinstance(model, Chained):
        return loss_of_a_chain(model, generator)
    dtype = next(model.parameters()).dtype
    output = model(torch.randn(4, 3, 8, generator=generator, dtype=torch.float64).to(dtype))
    return (output["outputs"][0] if isinstance(output, dict) else output).square().mean()


def train(run: Any, *, record: bool = True) -> None:
    optimizer = SGD(run.model.parameters(), **RULE)

    def steps() -> None:
        for _ in range(STEPS):
            run.loss().backward()
            clip_grad_norm_(run.model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
            run.keep()

    if record:
        with run.recording(optimizer):
            steps()
    else:
        run.kept = {0: run.weights()}
        steps()


def seeded(build: Callable[[], nn.Module], dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(5)
    return build().to(dtype)
