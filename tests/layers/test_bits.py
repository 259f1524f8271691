"""`Kind.gradient` gives the very bits of torch's backward pass: 0 entries differ, in every case."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from dualform.layers import kinds

in_both = pytest.mark.parametrize("dtype", [torch.float32, torch.float64])

SIZES = [(32, 20, 64, 48), (128, 1, 40, 30), (3, 5, 7, 5), (4, 3, 8, 1), (4, 3, 1, 8), (1, 1, 9, 9)]
"""Examples, positions, inputs, outputs."""


def check(watched: Any, case: str = "") -> None:
    found = watched.gradients()
    trained = {n: p.grad for n, p in watched.model.named_parameters() if p.grad is not None}
    assert found.keys() == trained.keys()
    off = {name: int((found[name] != grad).sum()) for name, grad in trained.items()}
    assert not any(off.values()), (case, off)


def inputs(b: int, n: int, i: int, dtype: torch.dtype) -> dict[str, Tensor]:
    made = {
        "rows": torch.randn(b * n, i),
        "columns": torch.randn(i, b * n).t(),
        "rows with gaps": torch.randn(b * n, 2 * i)[:, :i],
        "every other column": torch.randn(b * n, 2 * i)[:, ::2],
        "one vector": torch.randn(i),
        "positions": torch.randn(b, n, i),
        "positions first": torch.randn(n, b, i).transpose(0, 1),
        "channels first": torch.randn(b, i, n).transpose(1, 2),
        "permuted": torch.randn(i, b, n).permute(1, 2, 0),
        "repeated": torch.randn(1, 1, i).expand(b, n, i),
        "heads": torch.randn(b, n, 2, i),
        "heads, positions first": torch.randn(n, b, 2, i).transpose(0, 1),
    }
    return {name: x.to(dtype) for name, x in made.items()}


def signals(shape: torch.Size, dtype: torch.dtype) -> dict[str, Tensor]:
    lead = shape[:-1]
    made = {
        "row by row": torch.randn(shape),
        "column by column": torch.randn(shape[::-1]).permute(*range(len(shape))[::-1]),
        "repeated": torch.randn(*(1 for _ in lead), shape[-1]).expand(shape),
        "repeated sum": torch.randn(()).expand(shape),
    }
    return {name: g.to(dtype) for name, g in made.items()}


@in_both
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("size", SIZES)
def test_a_linear_layer(watch: Any, size: tuple[int, ...], bias: bool, dtype: torch.dtype) -> None:
    b, n, i, o = size
    model = nn.Linear(i, o, bias=bias).to(dtype)
    for name, x in inputs(b, n, i, dtype).items():
        for how, signal in signals(model(x).shape, dtype).items():
            model.zero_grad()
            with watch(model) as seen:
                model(x).backward(signal)
            assert seen.names == {"model"}, name
            assert seen.uses[0].shape == tuple(x.shape[:-1])
            check(seen, f"{name}, error signal {how}")


class Functional(nn.Module):
    def __init__(self, use: Callable[[nn.Linear, Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.fc, self.use = nn.Linear(16, 16), nn.Linear(16, 9), use
        self.two = nn.Parameter(torch.randn(16, 9))

    def forward(self, x: Tensor) -> Tensor:
        return self.use(self, self.first(x).tanh())


USES: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "F.linear": lambda m, x: F.linear(x, m.fc.weight, m.fc.bias),
    "F.linear without bias": lambda m, x: F.linear(x, m.fc.weight),
    "F.linear, transposed": lambda m, x: F.linear(x.transpose(0, 1), m.fc.weight, m.fc.bias),
    "x @ W.T": lambda m, x: x @ m.fc.weight.T,
    "x @ W.T + b": lambda m, x: x @ m.fc.weight.T + m.fc.bias,
    "x @ W": lambda m, x: x @ m.two,
    "x @ W, transposed": lambda m, x: x.transpose(0, 1) @ m.two + m.fc.bias,
    "addmm": lambda m, x: torch.addmm(m.fc.bias, x.flatten(0, 1), m.two),
    "addmm with W.t()": lambda m, x: torch.addmm(m.fc.bias, x.flatten(0, 1), m.fc.weight.t()),
    "rows of W": lambda m, x: torch.cat([x @ m.fc.weight[4:].T, x @ m.fc.weight[:4].T], -1),
    "module and function": lambda m, x: (
        m.fc(x) + F.linear(x.flip(1), m.fc.weight, m.fc.bias).tanh()
    ),
    "module twice": lambda m, x: m.fc(x) + m.fc(x.flip(1)).tanh() + m.fc(x[:, :2].sin()).sum(),
    "one view of W, used twice": lambda m, x: (lambda w: (x @ w).tanh() + x.sin() @ w)(
        m.fc.weight.T
    ),
    "in a checkpoint": lambda m, x: checkpoint(  # type: ignore[no-any-return]
        lambda y: F.linear(m.first(y).tanh(), m.fc.weight, m.fc.bias), x, use_reentrant=False
    ),
}


@in_both
@pytest.mark.parametrize("of_sum", [True, False])
@pytest.mark.parametrize("name", USES)
def test_functional_code(watch: Any, name: str, of_sum: bool, dtype: torch.dtype) -> None:
    model = Functional(USES[name]).to(dtype)
    with watch(model) as seen:
        for _ in range(3):  # accumulated
            y = model(torch.randn(6, 10, 16, dtype=dtype))
            (y.sum() if of_sum else y.square().mean()).backward()
    assert not seen.values
    check(seen)


class Attention(nn.Module):
    def __init__(self, need_weights: bool, cross: str, **options: Any) -> None:
        super().__init__()
        self.attn = nn.MultiheadAttention(16, 4, **options)
        self.head = nn.Linear(16, 3)
        self.need_weights, self.cross = need_weights, cross

    def forward(self, x: Tensor) -> Tensor:
        more = torch.cat([x, x.flip(0)], 1 if self.attn.batch_first else 0).sin()
        k, v = {"self": (x, x), "cross": (more, more), "three": (more, more.cos())}[self.cross]
        return self.head(self.attn(x, k, v, need_weights=self.need_weights)[0])  # type: ignore[no-any-return]


@in_both
@pytest.mark.parametrize("options", [{}, {"bias": False}, {"add_bias_kv": True}, {"dropout": 0.2}])
@pytest.mark.parametrize("cross", ["self", "cross", "three"])
@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("batch_first", [True, False])
def test_packed_attention(
    watch: Any,
    batch_first: bool,
    need_weights: bool,
    cross: str,
    options: dict[str, Any],
    dtype: torch.dtype,
) -> None:
    model = Attention(need_weights, cross, batch_first=batch_first, **options).to(dtype)
    with watch(model) as seen:
        model(torch.randn(5, 7, 16, dtype=dtype)).square().mean().backward()
    for name in ("bias_k", "bias_v"):
        if getattr(model.attn, name) is not None:
            getattr(model.attn, name).grad = None  # values
    check(seen)
    assert {use.shape for use in seen.uses} <= {(5, 7), (5, 14), (10, 7)}


@in_both
@pytest.mark.parametrize("padding", [None, 3])
@pytest.mark.parametrize("shape", [(40,), (8, 30), (2, 3, 50)])
def test_an_embedding(
    watch: Any, shape: tuple[int, ...], padding: int | None, dtype: torch.dtype
) -> None:
    model = nn.Embedding(11, 24, padding_idx=padding).to(dtype)
    for kind in (torch.int64, torch.int32):
        for transposed in (False, True):
            model.zero_grad()
            tokens = torch.randint(0, 11, shape).to(kind)
            with watch(model) as seen:
                (
                    model(tokens.mT if transposed and len(shape) > 1 else tokens).sin()
                ).sum().backward()
            check(seen)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.norm = nn.Embedding(13, 24), nn.Linear(24, 24)
        self.head = nn.Linear(24, 13, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.norm(self.embedding(tokens)).tanh())  # type: ignore[no-any-return]


@in_both
def test_an_embedding_and_a_head_with_one_weight(watch: Any, dtype: torch.dtype) -> None:
    model, tokens = Tied().to(dtype), torch.randint(0, 13, (6, 20))
    with watch(model) as seen:
        for _ in range(2):
            F.cross_entropy(model(tokens).flatten(0, 1), tokens.roll(1, 1).flatten()).backward()
    check(seen)
    assert [use.layer.name for use in seen.uses[:3]] == ["head", "norm", "embedding"]


@pytest.mark.parametrize("shape", [(60, 16), (6, 10, 16)])
@pytest.mark.parametrize("times", [1, 3])
def test_autocast(watch: Any, shape: tuple[int, ...], times: int) -> None:
    """In one region uses share a cast of the weight: they add up in bfloat16, then are cast."""
    model = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16))
    with watch(model) as seen:
        with torch.autocast("cpu", torch.bfloat16):
            x = torch.randn(shape)
            for _ in range(times):
                x = model(x)
        x.float().square().mean().backward()
    assert {use.keys.dtype for use in seen.uses} == {torch.bfloat16}
    assert {use.signals.dtype for use in seen.uses} == {torch.bfloat16}
    check(seen)


def test_autocast_past_modules(watch: Any) -> None:
    model = Functional(lambda m, x: F.linear(x, m.fc.weight, m.fc.bias) + x @ m.two)
    with watch(model) as seen:
        with torch.autocast("cpu", torch.bfloat16):
            y = model(torch.randn(6, 10, 16))
        y.float().square().mean().backward()
    assert {use.keys.dtype for use in seen.uses} == {torch.bfloat16}
    check(seen)


@pytest.mark.parametrize("model", [nn.Linear(16, 16), nn.Sequential(nn.Linear(16, 16), nn.Tanh())])
def test_low_precision(watch: Any, model: nn.Module) -> None:
    for dtype in (torch.bfloat16, torch.float16):
        model.to(dtype).zero_grad()
        with watch(model) as seen:
            model(torch.randn(20, 16, dtype=dtype)).float().square().mean().backward()
        check(seen)


NORMS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "LayerNorm": (lambda: nn.LayerNorm(12), (6, 5, 12)),
    "LayerNorm of [B, d]": (lambda: nn.LayerNorm(12), (6, 12)),
    "LayerNorm of two dimensions": (lambda: nn.LayerNorm((5, 12)), (6, 3, 5, 12)),
    "LayerNorm without bias": (lambda: nn.LayerNorm(12, bias=False), (6, 5, 12)),
    "RMSNorm": (lambda: nn.RMSNorm(12), (6, 5, 12)),
    "GroupNorm": (lambda: nn.GroupNorm(3, 12), (6, 12, 4, 4)),
    "GroupNorm of [B, C]": (lambda: nn.GroupNorm(3, 12), (6, 12)),
    "BatchNorm1d": (lambda: nn.BatchNorm1d(12), (6, 12)),
    "BatchNorm1d of [B, C, L]": (lambda: nn.BatchNorm1d(12), (6, 12, 5)),
    "BatchNorm2d": (lambda: nn.BatchNorm2d(12), (6, 12, 4, 4)),
}


@pytest.mark.parametrize("name", NORMS)
def test_what_examples_wrote_into_a_norm_adds_up_to_its_gradient(watch: Any, name: str) -> None:
    build, shape = NORMS[name]
    model = build().double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter))
    with watch(model, by_examples=lambda layer: True) as seen:
        model(torch.randn(shape, dtype=torch.float64) + 3).tanh().square().sum().backward()
    (use,) = seen.uses
    written = kinds.of(use.layer.kind).examples(use.layer, use.keys, use.signals)
    for role, parameter in model.named_parameters():
        assert len(written[role]) == shape[0]
        torch.testing.assert_close(written[role].sum(0), parameter.grad, rtol=1e-12, atol=1e-12)
