"""Weights used past their modules: attention's projections, functional code, mixed uses; rebuilt.

Each case trains under a demanding rule in float64 and is rebuilt from patterns twice (by hand and
by `DualForm`), at several steps, to 1e-12; and the same training without the recorder gives the
same bits.
"""

from __future__ import annotations

import warnings
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


class CheckpointedFunction(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn, self.fc = SelfAttention(), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = checkpoint(self.attn, x, use_reentrant=False)
        return checkpoint(lambda h: torch.tanh(h @ self.fc.weight.T), hidden, use_reentrant=False)


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
    "a chain of calls": Chained,
} | {name: lambda use=use: Functional(use) for name, use in USES.items()}


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


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
def test_what_a_checkpoint_hides_is_accounted_for_by_steps_and_said(
    dtype: torch.dtype, new_run: Any, certify: Any
) -> None:
    run = new_run(seeded(CheckpointedFunction, dtype), loss_of, dtype)
    with pytest.warns(UserWarning, match="inside an activation checkpoint"):
        train(run)
    memory = certify(run)
    assert memory.parameters["attn.attn.in_proj_weight"].coverage == "steps"
    assert memory.parameters["attn.head.weight"].coverage == "patterns"
    assert memory.parameters["fc.weight"].coverage == "steps"


class TiedWords(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.body, self.head = nn.Linear(6, 6), nn.Linear(6, 11)
        self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(torch.tanh(self.body(self.embedding(ids))))


def test_a_weight_that_is_also_an_embedding_is_accounted_for_by_steps_and_said(
    new_run: Any, certify: Any
) -> None:
    def words(model: nn.Module, generator: torch.Generator) -> Tensor:
        ids = torch.randint(0, 11, (3, 5), generator=generator)
        return F.cross_entropy(model(ids).flatten(0, 1), ids.flatten())

    run = new_run(seeded(TiedWords), words, torch.float64)
    with pytest.warns(UserWarning, match=r"'embedding.weight' \(layer head\).*as an embedding"):
        train(run)
    memory = certify(run)
    assert memory.layers == ("body",)
    assert {p.coverage for n, p in memory.parameters.items() if "body" in n} == {"patterns"}


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


def test_a_layer_whose_forward_is_compiled_is_accounted_for_by_steps(
    new_run: Any, certify: Any
) -> None:
    model = seeded(lambda: nn.Sequential(nn.Linear(8, 5), nn.Tanh(), nn.Linear(5, 3)))
    model[2].forward = torch.compile(model[2].forward, backend="aot_eager")
    run = new_run(model, loss_of, torch.float64)
    with warnings.catch_warnings(record=True):
        warnings.simplefilter("always")
        train(run)
    memory = df.Memory.open(run.path)
    assert memory.exact
    assert {n: p.coverage for n, p in memory.parameters.items()} == {
        "0.weight": "patterns",
        "0.bias": "patterns",
        "2.weight": "steps",
        "2.bias": "steps",
    }


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
    with pytest.raises(df.QueryError, match=r"'attn.in_proj' is rows of 'attn.in_proj_weight'"):
        dual.contribute(inputs[:1], target=torch.ones(1, 3, 3), layer="attn.in_proj")


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
