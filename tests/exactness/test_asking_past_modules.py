"""Questions to weights without a module of their own: queries, contributions, fused encoders."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.exactness import functional
from tests.exactness.functional import (
    RULE,
    STEPS,
    USES,
    Checkpointed,
    CrossAttention,
    OwnMatrix,
    SelfAttention,
    loss_of,
    seeded,
    train,
)
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD

import dualform
from dualform.attention.queries import queries_of
from dualform.learning_rules import coefficients


def test_queries_of_weights_without_a_module_are_read_from_the_graph(
    new_run: Any, certify: Any
) -> None:
    run = new_run(seeded(SelfAttention), loss_of, torch.float64)
    train(run)
    memory = certify(run)
    dual = dualform.DualForm(run.model, memory)
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
        ("rows of W", None),
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
    dual = dualform.DualForm(run.model, memory)
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
            rows, path = layer.rows_of(parameter), memory.path_to(parameter, STEPS)
            log = memory.log(parameter)
            found = coefficients(log, memory.settings, path, torch.float64)
            factors = found.per_pattern(layer.patterns["step"])
            assert own.grad is not None
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
    dual = dualform.DualForm(run.model, memory)
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
    dual = dualform.DualForm(run.model, memory)
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
    attention = dualform.DualForm(run.model, memory).attend(inputs)
    keys = memory.layer("layer.self_attn.in_proj").keys
    found = attention["layer.self_attn.in_proj"].weights  # two calls
    assert torch.allclose(found[:6], inputs.flatten(0, 1) @ keys.T, rtol=1e-12, atol=1e-12)
    assert len(found) == 12
    for name, calls in {"attn.attn.in_proj": 1, "attn.attn.out_proj": 1, "fc": 1}.items():
        assert len(attention[name].queries) == 6 * calls, name


def in_a_checkpoint(use: Callable[[nn.Linear, Tensor], Tensor]) -> nn.Module:
    return Returned(lambda fc, x: functional.checkpoint(use, fc, x, use_reentrant=False))


CHECKPOINTS: dict[str, Callable[[], nn.Module]] = {"one in another": Checkpointed} | {
    name: lambda use=use: in_a_checkpoint(use) for name, use in USES.items()
}


@pytest.mark.parametrize("case", CHECKPOINTS)
def test_a_checkpoint_makes_no_difference_to_an_answer(
    case: str, new_run: Any, certify: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its part runs again when a derivative is taken: the model that lends its architecture has
    other weights, is in training mode (with dropout), and must not be seen in the answer."""
    run = new_run(seeded(CHECKPOINTS[case]), loss_of, torch.float64)
    train(run)
    memory = certify(run)
    torch.manual_seed(99)
    other = CHECKPOINTS[case]().double().train()
    inputs = torch.randn(1, 3, 8, dtype=torch.float64)
    dual = dualform.DualForm(other, memory)
    aim = torch.randn(dual(inputs).shape, dtype=torch.float64)
    weights = [memory.layer(name).weight for name in memory.layers]
    names = [
        name for name, own in zip(memory.layers, weights, strict=True) if weights.count(own) < 2
    ]
    with_it = {name: dual.contribute(inputs, target=aim, layer=name) for name in names}
    attention = dual.attend(inputs)
    assert all(module.training for module in other.modules())
    monkeypatch.setattr(functional, "checkpoint", lambda f, *given, use_reentrant: f(*given))
    for name, split in with_it.items():
        plain = dual.contribute(inputs, target=aim, layer=name)
        assert abs(split.residual) <= 1e-11
        assert abs(split.total - plain.total) <= 1e-11
        assert torch.allclose(split.values, plain.values, rtol=0, atol=1e-12)
    for name, spotlight in dual.attend(inputs).items():
        assert torch.equal(attention[name].queries, spotlight.queries)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # torch's own
def test_a_checkpoint_that_gives_no_derivative_is_refused(new_run: Any) -> None:
    class Reentrant(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head, self.cut = nn.Linear(8, 8), nn.Linear(8, 3), False

        def forward(self, x: Tensor) -> Tensor:
            if not self.cut:
                return self.head(self.body(x).tanh())
            return self.head(functional.checkpoint(self.body, x, use_reentrant=True).tanh())

    run = new_run(seeded(Reentrant), loss_of, torch.float64)
    train(run)
    dual = dualform.DualForm(run.model, run.path)
    run.model.cut = True
    inputs, aim = torch.randn(1, 3, 8, dtype=torch.float64), torch.ones(1, 3, 3)
    assert abs(dual.contribute(inputs, target=aim).residual) <= 1e-11
    with pytest.raises(dualform.QueryError, match="'body' runs where torch computes no derivative"):
        dual.contribute(inputs, target=aim, layer="body")
