"""Weights used past their modules: attention's projections, functional code, mixed uses; rebuilt.

Each case trains under a demanding rule in float64 and is rebuilt from patterns twice (by hand and
by `DualForm`), at several steps, to 1e-12; and the same training without the recorder gives the
same bits.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules import module as torch_module
from torch.nn.utils import clip_grad_norm_
from torch.optim import SGD
from torch.utils.checkpoint import checkpoint

import dualform as df
from dualform.attention.queries import queries_of

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
        output = hidden @ self.two + (self.two.T @ hidden[0].T).mean()
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
    "W @ x": lambda fc, x: fc.weight @ x[0].T,
    "rows of W": lambda fc, x: torch.cat([x @ fc.weight[2:].T, x @ fc.weight[:2].T], -1),
    "module and function": module_and_function,
    "einsum": lambda fc, x: torch.einsum("bld,ed->ble", x, fc.weight),
    "einsum and a bias": lambda fc, x: torch.einsum("bld,ed->ble", x, fc.weight) + fc.bias,
    "einsum, the weight first": lambda fc, x: torch.einsum("ed,bd->be", fc.weight, x[:, 0]),
    "einsum with W.T": lambda fc, x: torch.einsum("bld,de->ble", x, fc.weight.T),
    "einsum with rows of W": lambda fc, x: torch.einsum("bld,ed->ble", x, fc.weight[1:4]),
    "tensordot": lambda fc, x: torch.tensordot(x, fc.weight, ([2], [1])),
    "bmm": lambda fc, x: torch.bmm(x, fc.weight.T.expand(len(x), 8, 5)),
    "bmm and a bias": lambda fc, x: x.bmm(fc.weight.T[None].expand(len(x), 8, 5)) + fc.bias[None],
    "bmm, the weight first": lambda fc, x: torch.bmm(fc.weight.expand(len(x), 5, 8), x.mT),
    "a matrix with one dimension more": lambda fc, x: x @ fc.weight.T[None],
    "W times a vector": lambda fc, x: torch.stack([torch.mv(fc.weight, row) for row in x[:, 0]]),
    "W.T times a vector": lambda fc, x: fc.weight.T.mv(x[0, 0, :5]) + (x @ fc.weight.T).sum(),
}

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


def hooks() -> list[int]:
    return [
        len(v) for n, v in vars(torch_module).items() if n.startswith("_global_") and "hooks" in n
    ]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
@pytest.mark.parametrize("name", CASES)
def test_every_matrix_has_patterns_and_is_rebuilt(
    name: str, dtype: torch.dtype, new_run: Any, certify: Any
) -> None:
    before = hooks()
    run = new_run(seeded(CASES[name], dtype), loss_of, dtype)
    train(run)
    assert hooks() == before
    memory = certify(run)
    trained = {n for n, p in memory.parameters.items() if p.coverage != "untrained"}
    matrices = {n for n in trained if len(memory.parameters[n].shape) == 2}
    assert matrices
    assert {memory.parameters[n].coverage for n in matrices} == {"patterns"}
    dual = df.DualForm(run.model, memory)
    twin = dual.to_model()
    for parameter, weight in run.weights().items():
        assert torch.allclose(twin.get_parameter(parameter), weight, rtol=1e-4, atol=1e-6)
    everything, nothing = dual.without(), dual.only()
    for parameter, weight in dual.weights(torch.float64).items():
        parts = [d.weights(torch.float64)[parameter] for d in (everything, nothing)]
        assert torch.allclose(sum(parts), weight + parts[0], atol=1e-12)
    unrecorded = new_run(seeded(CASES[name], dtype), loss_of, dtype)
    train(unrecorded, record=False)
    for parameter, weight in unrecorded.weights().items():
        assert torch.equal(weight, run.kept[STEPS][parameter])


def test_the_layers_are_named_after_what_they_are(new_run: Any, certify: Any) -> None:
    expected = {
        "self-attention": {"attn.in_proj", "attn.out_proj", "head"},
        "cross-attention": {"attn.in_proj_q", "attn.in_proj_kv", "attn.out_proj"},
        "attention with three inputs": {
            *(f"attn.in_proj_{part}" for part in "qkv"),
            "attn.out_proj",
        },
        "attention with widths of its own": {
            *(f"attn.{part}_proj" for part in "qkv"),
            "attn.out_proj",
        },
        "bare parameters": {"packed[0:3]", "packed[3:6]", "packed[6:9]", "weight"},
        "F.linear": {"first", "fc"},
        "x @ W.T": {"first", "fc.weight"},
        "module and function": {"first", "fc", "fc.weight"},
    }
    for name, layers in expected.items():
        run = new_run(seeded(CASES[name]), loss_of, torch.float64, overwrite=True)
        train(run)
        assert set(df.Memory.open(run.path).layers) == layers, name


def test_an_attentions_patterns_are_tagged_like_its_inputs(tmp_path: Path) -> None:
    model = seeded(SelfAttention)
    optimizer = SGD(model.parameters(), lr=0.1)
    inputs = torch.randn(4, 3, 8, dtype=torch.float64)
    with df.record(model, optimizer, tmp_path / "run") as recorder:
        recorder.tag(example=[10, 11, 12, 13])
        model(inputs).square().mean().backward()
        optimizer.step()
    memory = df.Memory.open(tmp_path / "run")
    for name in ("attn.in_proj", "attn.out_proj", "head"):
        patterns = memory.layer(name).patterns
        assert patterns["example"].tolist() == [10 + i // 3 for i in range(12)]
        assert patterns["position"].tolist() == [0, 1, 2] * 4
    assert torch.equal(memory.layer("attn.in_proj").keys, inputs.flatten(0, 1))


PRODUCTS: dict[str, Callable[[nn.Linear, Tensor], Tensor]] = {
    name: USES[name] for name in ("einsum", "einsum and a bias", "tensordot", "bmm")
} | {"bmm of the first position": lambda fc, x: x[:, :1].bmm(fc.weight.T.expand(len(x), 8, 5))}


@pytest.mark.parametrize("batch", [4, 1])
@pytest.mark.parametrize("name", PRODUCTS)
def test_a_products_patterns_are_tagged_like_its_inputs(
    name: str, batch: int, tmp_path: Path
) -> None:
    model = seeded(lambda: Functional(PRODUCTS[name]))
    optimizer = SGD(model.parameters(), lr=0.1)
    inputs = torch.randn(batch, 3, 8, dtype=torch.float64)
    with df.record(model, optimizer, tmp_path / "run") as recorder:
        recorder.tag(example=list(range(10, 10 + batch)))
        output = model(inputs)["outputs"][0]
        output.square().mean().backward()
        optimizer.step()
    layer = df.Memory.open(tmp_path / "run").layer("fc" if "bias" in name else "fc.weight")
    positions = output.shape[1]
    assert layer.patterns["example"].tolist() == [10 + i // positions for i in range(len(layer))]
    hidden = torch.tanh(df.DualForm(model, tmp_path / "run").at(step=0).to_model().first(inputs))
    assert torch.equal(layer.keys, hidden[:, :positions].flatten(0, 1))


@pytest.mark.parametrize(
    "use",
    [
        lambda fc, x: torch.einsum("bld,ed->elb", x, fc.weight),  # rows in another order
        lambda fc, x: torch.einsum("bld,bed->ble", x, fc.weight.expand(len(x), 5, 8).cos()),
        lambda fc, x: x.flatten(0, 1) @ fc.weight.reshape(8, 5),  # other rows than the weight's
        lambda fc, x: [fc.weight.T, fc.weight.reshape(-1)][0].sum() + x,
    ],
)
def test_a_product_of_another_kind_is_covered_step_by_step(
    use: Callable[[nn.Linear, Tensor], Tensor], new_run: Any, certify: Any
) -> None:
    run = new_run(seeded(lambda: Functional(use)), loss_of, torch.float64)
    with pytest.warns(UserWarning, match="'fc.weight' .*step by step, without patterns"):
        train(run)
    assert certify(run).parameters["fc.weight"].coverage == "steps"


def test_a_weight_that_is_returned_through_a_view_is_covered_step_by_step(
    new_run: Any, certify: Any
) -> None:
    class Returned(nn.Linear):
        def forward(self, x: Tensor) -> Any:
            return super().forward(x), self.weight.T

    def loss(model: nn.Module, generator: torch.Generator) -> Tensor:
        x = torch.randn(4, 3, 8, generator=generator, dtype=torch.float64)
        output, view = model(x)
        return output.square().mean() + view.square().sum()

    run = new_run(seeded(lambda: Returned(8, 5)), loss, torch.float64)
    with pytest.warns(UserWarning, match="'weight' .*step by step, without patterns"):
        train(run)
    assert certify(run).parameters["weight"].coverage == "steps"


def test_a_network_of_modules_keeps_no_hook_for_graphs_after_the_first_step(
    tmp_path: Path,
) -> None:
    model = seeded(lambda: nn.Sequential(nn.Linear(8, 5), nn.ReLU(), nn.Linear(5, 3)))
    optimizer = SGD(model.parameters(), lr=0.1)
    before = hooks()
    with df.record(model, optimizer, tmp_path / "run"):
        for step in range(2):
            loss_of(model, torch.Generator().manual_seed(step)).backward()
            optimizer.step()
            optimizer.zero_grad()
        during = hooks()
        assert sum(during) - sum(before) == 2  # the module engine's one hook, in two tables
    assert hooks() == before


def test_queries_of_weights_without_a_module_are_read_from_the_graph(
    new_run: Any, certify: Any
) -> None:
    run = new_run(seeded(SelfAttention), loss_of, torch.float64)
    train(run)
    memory = certify(run)
    dual = df.DualForm(run.model, memory)
    inputs = torch.randn(2, 3, 8, dtype=torch.float64)
    before = {n: p.requires_grad for n, p in run.model.named_parameters()}
    attention = dual.attend(inputs)
    keys = memory.layer("attn.in_proj").keys
    expected = inputs.flatten(0, 1) @ keys.T
    assert torch.allclose(attention["attn.in_proj"].weights, expected, rtol=1e-12, atol=1e-12)
    # out_proj: what its queries give, as attention over its patterns, is what the module returns
    rows = queries_of(run.model, dual._view, (inputs,), {}, ["attn.out_proj"])["attn.out_proj"]
    by_patterns = dual._view.dual_output(memory.layer("attn.out_proj"), rows)
    run.model.eval()
    returned = run.model.attn(inputs, inputs, inputs)[0].flatten(0, 1)
    assert torch.allclose(by_patterns, returned, rtol=1e-12, atol=1e-12)
    # a packed projection, as attention over its patterns
    packed = memory.layer("attn.in_proj")
    projected = F.linear(inputs, run.model.attn.in_proj_weight, run.model.attn.in_proj_bias)
    literally = dual._view.dual_output(packed, inputs.flatten(0, 1))
    assert torch.allclose(literally, projected.flatten(0, 1), rtol=1e-12, atol=1e-12)
    assert {n: p.requires_grad for n, p in run.model.named_parameters()} == before
    assert dual.verify(inputs).passed


class Returned(nn.Module):
    """A weight used by a function, whose result is the network's."""

    def __init__(self, use: Callable[[nn.Linear, Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.fc, self.use = nn.Linear(8, 8), nn.Linear(8, 5), use

    def forward(self, x: Tensor) -> Tensor:
        return self.use(self.fc, torch.tanh(self.first(x)))


ASKED: dict[str, tuple[Callable[[], nn.Module], str | None]] = {
    "self-attention": (SelfAttention, "head"),
    "self-attention, positions first": (lambda: SelfAttention(batch_first=False), "head"),
    "cross-attention": (CrossAttention, None),
    "bare parameters": (OwnMatrix, "weight"),
} | {
    name: (lambda use=USES[name]: Returned(use), last)
    for name, last in [
        ("F.linear", "fc"),
        ("F.linear without the bias", "fc.weight"),
        ("x @ W.T + b", "fc"),
        ("W @ x", "fc.weight"),
        ("rows of W", None),
        ("einsum and a bias", "fc"),
        ("bmm and a bias", "fc"),
        ("bmm, the weight first", "fc.weight"),
        ("W times a vector", None),
    ]
}


@pytest.mark.parametrize("case", ASKED)
def test_patterns_of_weights_without_a_module_contribute_to_a_new_input(
    new_run: Any, certify: Any, case: str
) -> None:
    """Against G = d(target)/dW by plain autograd: Σ g·(W q) = ⟨G, W⟩, Σ (δ·g)(x·q) = δᵀGx."""
    build, last = ASKED[case]
    run = new_run(seeded(build), loss_of, torch.float64)
    train(run)
    memory = certify(run)
    dual = df.DualForm(run.model, memory)
    inputs = torch.randn(1, 3, 8, dtype=torch.float64)
    twin = dual.to_model().eval()
    aim = torch.randn(twin(inputs).shape, dtype=torch.float64)
    value = (twin(inputs) * aim).sum()
    value.backward()
    for name in memory.layers:
        layer = memory.layer(name)
        split = dual.contribute(inputs, target=aim, layer=name)
        total, values = 0.0, torch.zeros(layer.rows, dtype=torch.float64)
        for parameter in filter(None, (layer.weight, layer.bias)):
            own = twin.get_parameter(parameter)
            rows, factors = layer.rows_of(parameter), dual._view.row_coefficients(layer, parameter)
            assert own.grad is not None
            assert factors is not None
            total += float((own.grad * own.detach())[rows].sum())
            written = layer.error_signals @ own.grad[rows]
            written = written if parameter == layer.bias else (written * layer.keys).sum(1)
            values += torch.from_numpy(factors) * written
        assert split.first_order == (name != last)
        assert abs(split.total - total) <= 1e-11
        assert abs(split.residual) <= 1e-11
        assert torch.allclose(split.values, values, rtol=0, atol=1e-12)
    if last is not None:
        whole = dual.contribute(inputs, target=aim)
        assert whole.layer == last
        assert abs(whole.total - value.item()) <= 1e-11


def test_rows_of_a_shared_parameter_contribute_to_their_own_outputs_only(
    new_run: Any, certify: Any
) -> None:
    run = new_run(seeded(CrossAttention), loss_of, torch.float64)
    optimizer = SGD(run.model.parameters(), **RULE)
    with run.recording(optimizer) as recorder:
        for step in range(STEPS):
            recorder.tag(example=[4 * step + i for i in range(4)])
            run.loss().backward()
            optimizer.step()
            optimizer.zero_grad()
            run.keep()
    memory = certify(run)
    dual = df.DualForm(run.model, memory)
    for name in ("attn.in_proj_q", "attn.in_proj_kv"):
        layer = memory.layer(name)
        rows = 3 if name.endswith("q") else 6
        split = dual.contribute(example=5, layer=name, target=torch.ones(rows, layer.out_features))
        assert abs(split.residual) <= 1e-12 * max(1.0, abs(split.primal))
        assert not any("written by" in share for share in split.shares)


class Encoder(nn.Module):
    """What torch evaluates in one fused kernel, with padding as nested tensors."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 12, 0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)

    def forward(self, x: Tensor, src_key_padding_mask: Tensor | None = None) -> Tensor:
        return self.encoder(x, src_key_padding_mask=src_key_padding_mask)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")  # the model's own
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
def test_an_encoder_with_padding_can_be_verified_and_asked(
    dtype: torch.dtype, new_run: Any, certify: Any
) -> None:
    run = new_run(seeded(Encoder, dtype), loss_of, dtype)
    train(run)
    memory = certify(run)
    inputs = torch.randn(4, 3, 8, dtype=dtype)
    mask = torch.tensor([[False, False, True], [False, True, True], [False] * 3, [False] * 3])
    dual = df.DualForm(run.model, memory)
    assert torch.backends.mha.get_fastpath_enabled()
    verification = dual.verify(inputs, src_key_padding_mask=mask)
    assert verification.passed, repr(verification)
    attention = dual.attend(inputs, src_key_padding_mask=mask)
    for spotlight in attention.values():
        assert spotlight.weights.shape == (12, spotlight._memory.rows)
    by_patterns = dual(inputs, src_key_padding_mask=mask, by="patterns")
    assert torch.backends.mha.get_fastpath_enabled()
    run.model.eval()
    with torch.no_grad():
        fused = run.model(inputs, src_key_padding_mask=mask)
        assert torch.allclose(dual(inputs, src_key_padding_mask=mask), fused, atol=1e-5)
    kept = ~mask
    assert torch.allclose(by_patterns[kept], fused[kept], atol=1e-5)
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        assert dual.verify(inputs, src_key_padding_mask=mask).passed
        assert not torch.backends.mha.get_fastpath_enabled()
    finally:
        torch.backends.mha.set_fastpath_enabled(True)


def test_queries_inside_a_checkpoint_are_found(new_run: Any, certify: Any) -> None:
    run = new_run(seeded(Checkpointed), loss_of, torch.float64)
    train(run)
    memory = certify(run)
    inputs = torch.randn(2, 3, 8, dtype=torch.float64)
    attention = df.DualForm(run.model, memory).attend(inputs)
    keys = memory.layer("layer.self_attn.in_proj").keys
    found = attention["layer.self_attn.in_proj"].weights  # two calls
    assert torch.allclose(found[:6], inputs.flatten(0, 1) @ keys.T, rtol=1e-12, atol=1e-12)
    assert len(found) == 12
    for name, calls in {"attn.attn.in_proj": 1, "attn.attn.out_proj": 1, "fc": 1}.items():
        assert len(attention[name].queries) == 6 * calls, name


def test_a_checkpoint_backward_twice_counts_twice(new_run: Any, certify: Any) -> None:
    run = new_run(seeded(Checkpointed), loss_of, torch.float64)
    optimizer = SGD(run.model.parameters(), **RULE)
    with run.recording(optimizer):
        for _ in range(STEPS):
            loss = run.loss()
            loss.backward(retain_graph=True)
            (2 * loss).backward()
            run.loss().backward()
            optimizer.step()
            optimizer.zero_grad()
            run.keep()
    memory = certify(run)
    patterns = memory.layer("attn.attn.in_proj").patterns
    assert patterns.values("microbatch") == [0, 1, 2]
    assert patterns.values("call") == [0]
    assert memory.layer("layer.self_attn.in_proj").patterns.values("call") == [0, 1]


def test_a_forward_pass_that_is_never_differentiated_is_no_call(tmp_path: Path) -> None:
    model = seeded(SelfAttention)
    optimizer = SGD(model.parameters(), lr=0.1)
    with df.record(model, optimizer, tmp_path / "run"):
        for _ in range(3):
            x = torch.randn(4, 3, 8, dtype=torch.float64)
            model(x)
            loss = model(x).square().mean()
            model(x)
            (loss + model(x).cos().mean()).backward()
            optimizer.step()
            optimizer.zero_grad()
    memory = df.Memory.open(tmp_path / "run")
    for name in memory.layers:
        patterns = memory.layer(name).patterns
        assert patterns.values("call") == [0, 1]
        assert (patterns["call"] == 0).sum() == (patterns["call"] == 1).sum() == 36


def test_what_is_kept_elsewhere_until_the_backward_pass_is_read_from_there(
    new_run: Any, certify: Any
) -> None:
    """Hooks on saved tensors, such as those that move them to another device."""

    def loss(model: nn.Module, generator: torch.Generator) -> Tensor:
        with torch.autograd.graph.save_on_cpu():
            return loss_of(model, generator)

    run = new_run(seeded(CASES["module and function"]), loss, torch.float64)
    train(run)
    memory = certify(run)
    assert {p.coverage for p in memory.parameters.values()} == {"patterns"}


def test_recurrent_cells_have_patterns(new_run: Any, certify: Any) -> None:
    class Cells(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.LSTMCell(8, 5), nn.GRUCell(5, 4)

        def forward(self, x: Tensor) -> Tensor:
            state, last = None, None
            for position in range(x.shape[1]):
                state = self.one(x[:, position], state)
                last = self.two(state[0], last)
            return last

    run = new_run(seeded(Cells), loss_of, torch.float64)
    train(run)
    memory = certify(run)
    assert {p.coverage for p in memory.parameters.values()} == {"patterns"}
    assert set(memory.layers) == {f"{c}.weight_{w}" for c in ("one", "two") for w in ("ih", "hh")}
    assert memory.layer("one.weight_hh").patterns.values("call") == [0, 1, 2]
