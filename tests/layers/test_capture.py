"""What is captured, what is not, and that nothing is left behind."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.layers.conftest import global_hooks
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.func import functional_call
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from dualform.layers import find_layers, reasons_for_values


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def loss_of(model: nn.Module, x: Tensor | None = None) -> Tensor:
    return model(torch.randn(5, 6) if x is None else x).square().mean()  # type: ignore[no-any-return]


def right(seen: Any, rebuilt: Any, *, rtol: float = 1e-4) -> None:
    """Every gradient of a layer that was seen is what its patterns sum to."""
    parameters = dict(seen.model.named_parameters())
    used = {name for use in seen.uses for name in use.layer.parameters}
    found = rebuilt(seen.uses, {name: tuple(parameters[name].shape) for name in used})
    for name, gradient in found.items():
        own = parameters[name].grad
        expected = torch.zeros_like(gradient) if own is None else own.double()
        assert torch.allclose(gradient, expected, rtol=rtol, atol=1e-6), name


# -- which uses -----------------------------------------------------------------------------------


def passes(model: nn.Module) -> None:
    """Many odd ways to go forward and backward; what reaches .grad counts, and only that."""
    loss_of(model).backward()
    model(torch.randn(4, 6))  # never differentiated
    with torch.no_grad():
        model(torch.randn(4, 6))
    with torch.inference_mode():
        model(torch.randn(4, 6))
    x = torch.randn(5, 6, requires_grad=True)
    loss = loss_of(model, x)
    torch.autograd.grad(loss, x, retain_graph=True)
    torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
    loss.backward(retain_graph=True)
    (2 * loss).backward()
    loss_of(model).backward(inputs=list(model[0].parameters()))
    loss_of(model).backward(create_graph=True)
    for parameter in model.parameters():
        parameter.grad = None if parameter.grad is None else parameter.grad.detach()
    torch.autograd.backward([loss_of(model), loss_of(model)])


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph")
def test_patterns_are_those_that_reach_the_gradient(watch: Any, rebuilt: Any) -> None:
    model = mlp()
    with watch(model) as seen:
        passes(model)
    right(seen, rebuilt)
    assert not seen.values
    assert not seen.new
    assert not any(use.keys.requires_grad or use.signals.requires_grad for use in seen.uses)


class Odd(nn.Module):
    """Layers used in every way there is, modules and functions."""

    def __init__(self) -> None:
        super().__init__()
        self.attn = nn.MultiheadAttention(6, 2, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoderLayer(6, 2, 9, batch_first=True)
        self.fc, self.own = nn.Linear(6, 6), nn.Parameter(torch.randn(9, 6) / 3)
        self.two = nn.Linear(6, 6, bias=False)
        self.two.weight = self.fc.weight

    def _inside(self, x: Tensor) -> Tensor:
        return self.two(self.attn(x.sin(), x, x)[0])  # type: ignore[no-any-return]

    def forward(self, x: Tensor) -> dict[str, list[Tensor]]:
        x = torch.relu_(self.fc(self.encoder(self.attn(x, x, x)[0])))
        x = checkpoint(self._inside, x, use_reentrant=False)
        one, two, three = self.own.split([3, 3, 3])
        y = torch.cat([x @ one.T, F.linear(x, two, self.fc.bias[:3])], -1)
        return {"output": [y + F.linear(F.linear(x, three), self.own[:6, :3].detach())]}


def test_all_ways_at_once(watch: Any, rebuilt: Any) -> None:
    model = Odd().double()
    with watch(model) as seen:
        for _ in range(3):
            model(torch.randn(4, 5, 6, dtype=torch.float64))["output"][0].square().sum().backward()
    assert not seen.values
    right(seen, rebuilt, rtol=1e-10)
    assert seen.names == {
        *("attn.in_proj", "attn.in_proj_q", "attn.in_proj_kv", "attn.out_proj", "fc", "two"),
        *("encoder.self_attn.in_proj", "encoder.self_attn.out_proj"),
        *(
            "encoder.linear1",
            "encoder.linear2",
            "encoder.norm1",
            "encoder.norm2",
            "own[0:3]",
            "own[3:6]",
            "own[6:9]",
        ),
    }
    assert {use.shape for use in seen.uses} == {(4, 5)}


def test_a_layer_that_is_not_wanted_is_not_seen(watch: Any) -> None:
    model = Odd()
    with watch(model, wants=False) as seen:
        model(torch.randn(4, 5, 6))["output"][0].sum().backward()
    assert {layer.name for layer in seen.new} >= {"own[0:3]", "attn.in_proj"}
    assert not {layer.name for layer in seen.new} & seen.names


def test_patterns_of_functional_code_by_examples_have_their_leading_shape(watch: Any) -> None:
    model = Odd()
    with watch(model, by_examples=lambda layer: True) as seen:
        model(torch.randn(4, 5, 6))["output"][0].sum().backward()
    assert {use.keys.shape[:2] for use in seen.uses} == {(4, 5)}
    assert {use.signals.shape[:2] for use in seen.uses} == {(4, 5)}


def test_the_context_is_that_of_the_forward_call(watch: Any) -> None:
    model = mlp()
    with watch(model) as seen:
        one, two = loss_of(model), loss_of(model)
        two.backward()
        one.backward()
    assert [use.context for use in seen.of("0")] == [3, 1]


@pytest.mark.parametrize("trained", [["0.weight"], ["0.bias"], ["2.bias"], ["2.weight", "0.bias"]])
def test_frozen_parameters(watch: Any, rebuilt: Any, trained: list[str]) -> None:
    model = mlp()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in trained)
    with watch(model) as seen:
        x = torch.randn(5, 6)
        loss = loss_of(model, x)
        x.zero_() if "0.weight" not in trained else None
        loss.backward()
        for parameter in model.parameters():
            parameter.requires_grad_(True)
        loss_of(model).backward()
    assert len(seen.uses) == len({name[0] for name in trained}) + 2
    for name in trained:
        own = [use for use in seen.uses if name in use.layer.parameters]
        kind = torch.stack([u.signals.T @ u.keys if "w" in name else u.signals.sum(0) for u in own])
        assert torch.allclose(kind.sum(0), model.get_parameter(name).grad, atol=1e-6)


def test_parameters_that_are_replaced_or_moved_are_followed(watch: Any, rebuilt: Any) -> None:
    model = mlp()
    with watch(model) as seen:
        loss_of(model).backward()
        model.double()
        model.zero_grad()
        seen.uses.clear()
        loss_of(model, torch.randn(5, 6, dtype=torch.float64)).backward()
        right(seen, rebuilt)
        model[0].weight = nn.Parameter(torch.randn(8, 6, dtype=torch.float64))
        loss_of(model, torch.randn(5, 6, dtype=torch.float64)).backward()
    assert len(seen.of("0")) == 2
    assert not seen.values


# -- inputs that are changed in place -------------------------------------------------------------


@pytest.mark.parametrize("shape", [(5, 6), (3, 5, 6)])
@pytest.mark.parametrize("how", ["hooks on saving", "a checkpoint", "positions first", "frozen"])
def test_keys_are_what_was_fed(watch: Any, shape: tuple[int, ...], how: str) -> None:
    model, x = nn.Sequential(nn.Linear(6, 4)), torch.randn(shape)
    if how == "positions first":
        x = torch.randn(5, 3, 6).transpose(0, 1)
    fed = x.clone()
    model[0].weight.requires_grad_(how != "frozen")
    kept = saved_tensors_hooks(lambda tensor: tensor.clone(), lambda tensor: tensor)
    with watch(model) as seen:
        with kept if how == "hooks on saving" else contextlib.nullcontext():
            if how == "a checkpoint":
                y = checkpoint(lambda t: model(t.clone()), x, use_reentrant=False)
            else:
                y = model(x)
                x.fill_(1)
        y.square().sum().backward()
    assert torch.equal(seen.uses[0].keys, fed.reshape(-1, 6))


def test_torch_still_refuses_what_it_guards(watch: Any) -> None:
    model, x = mlp(), torch.randn(5, 6)
    with watch(model), pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss = loss_of(model, x)
        x.zero_()
        loss.backward()


def test_layers_fed_the_same_tensor_share_a_copy_only_of_the_same_values(watch: Any) -> None:
    model = nn.ModuleList([nn.Linear(6, 4), nn.Linear(6, 4), nn.Linear(6, 4)])
    for layer in model:
        layer.weight.requires_grad_(False)  # autograd guards nothing: keys are copied
    x = torch.randn(5, 6)
    fed = x.clone()
    with watch(model) as seen:
        y = model[0](x) + model[1](x)
        x += 1
        (y + model[2](x)).sum().backward()
    assert torch.equal(seen.of("0")[0].keys, fed)
    assert torch.equal(seen.of("2")[0].keys, fed + 1)


# -- what has no patterns -------------------------------------------------------------------------


class Using(nn.Module):
    def __init__(self, use: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.fc, self.use = nn.Linear(6, 6), use
        self.own = nn.Parameter(torch.randn(6, 6))

    def forward(self, x: Tensor) -> Tensor:
        return self.use(self, x)


@pytest.mark.parametrize(
    ("use", "values"),
    [
        (lambda m, x: torch.einsum("bd,ed->be", x, m.own).sum() + m.fc(x), {"own"}),
        (lambda m, x: torch.bmm(x[None], m.own[None]) + m.fc(x), {"own"}),
        (lambda m, x: m.own @ x.T + m.fc(x).T[:, :1], {"own"}),
        (lambda m, x: m.fc(x) + m.fc.weight.square().sum(), {"fc.weight", "fc.bias"}),
        (lambda m, x: m.fc(x) + m.fc.bias.square().sum(), {"fc.bias"}),
        (lambda m, x: m.fc(x) + F.embedding_bag(torch.zeros(5, 2).long(), m.own), {"own"}),
        (lambda m, x: m.fc(x) * 1 + m.own[2, 3], {"own"}),
    ],
)  # fmt: skip
def test_a_use_without_patterns_makes_values_by_name(
    watch: Any, use: Any, values: set[str]
) -> None:
    model = Using(use)
    with watch(model) as seen:
        for _ in range(2):
            model(torch.randn(5, 6)).square().sum().backward()
    assert set(seen.values) == values, seen.values
    assert not {use.layer.weight for use in seen.uses} & values


def test_a_reentrant_checkpoint_makes_values(watch: Any) -> None:
    body, head = nn.TransformerEncoderLayer(6, 2, 8, 0.0, batch_first=True), nn.Linear(6, 3)
    model = nn.ModuleList([body, head])
    with watch(model) as seen:
        x = torch.randn(2, 3, 6, requires_grad=True)
        head(checkpoint(body, x, use_reentrant=True)).sum().backward()
    assert seen.names == {"1"}
    weights = {n for n, p in body.named_parameters()}
    assert set(seen.values) >= {f"0.{n}" for n in weights if "proj" in n or "linear" in n}
    assert "use_reentrant=False" in seen.values["0.linear1.weight"]


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("how", ["to_sparse", "to_sparse_csr"])
def test_a_sparse_input_makes_values(watch: Any, how: str) -> None:
    model = nn.Linear(6, 3)
    with watch(model) as seen:
        model(getattr(torch.eye(6), how)()).sum().backward()
    assert set(seen.values) == {"weight", "bias"}
    assert "sparse" in seen.values["weight"]
    assert not seen.uses


def test_weights_computed_from_others_make_values(watch: Any) -> None:
    model, factor = mlp(), torch.ones((), requires_grad=True)
    with watch(model) as seen:
        fast = {name: p * factor for name, p in model.named_parameters()}
        functional_call(model, fast, torch.randn(5, 6)).sum().backward()
    assert not seen.uses
    assert "functional_call" in seen.values["0.weight"]


def test_transforms_are_left_alone(watch: Any) -> None:
    model = mlp()
    with watch(model) as seen:
        parameters = {n: p.detach() for n, p in model.named_parameters()}
        torch.func.grad(lambda p: functional_call(model, p, torch.randn(5, 6)).sum())(parameters)
        torch.func.vmap(model)(torch.randn(4, 5, 6))
    assert not seen.uses
    assert not seen.values


def test_batch_norm_in_evaluation_mode_makes_values(watch: Any) -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6))
    with watch(model, by_examples=lambda layer: layer.name == "1") as seen:
        loss_of(model).backward()
        loss_of(model.eval()).backward()
    assert set(seen.values) == {"1.weight", "1.bias"}
    assert len(seen.of("0")) == 2


def test_why_parameters_are_in_no_layer_is_said_in_words() -> None:
    compiled = nn.Linear(3, 3)
    compiled.compile(backend="eager")
    model = nn.ModuleDict(
        {
            "lstm": nn.LSTM(3, 3),
            "conv": nn.Conv1d(3, 3, 2),
            "fc": nn.Linear(3, 3),
            "norm": nn.utils.parametrizations.weight_norm(nn.Linear(3, 3)),
            "compiled": compiled,
        }
    )
    layers = find_layers(model)
    assert [layer.name for layer in layers] == ["fc"]
    reasons = reasons_for_values(model, layers)
    assert set(reasons) == {n for n, _ in model.named_parameters() if not n.startswith("fc")}
    for name, word in {
        "lstm.weight_ih_l0": "kernel hides",
        "conv.weight": "Conv1d, which no kind",
        "norm.parametrizations.weight.original0": "parametrized",
        "compiled.weight": "compiled",
    }.items():
        assert word in reasons[name], reasons[name]


# -- nothing is left ------------------------------------------------------------------------------


def test_hooks_come_and_go_as_often_as_one_likes(watch: Any) -> None:
    model, before = Odd(), global_hooks()
    seen = watch(model)
    for _ in range(3):
        seen.capture.start()
        seen.capture.start()
        assert global_hooks() != before
        model(torch.randn(4, 5, 6))["output"][0].sum().backward()
        seen.capture.next_step()
        seen.capture.remove()
        seen.capture.remove()
        assert global_hooks() == before
    uses = [use.layer.name for use in seen.uses]
    assert sorted(uses[: len(uses) // 3] * 3) == sorted(uses)


def test_outputs_that_are_alive_fall_silent(watch: Any) -> None:
    model = Odd()
    with watch(model) as seen:
        late = model(torch.randn(4, 5, 6))["output"][0].sum()
    late.backward()
    assert not seen.uses
    with seen:
        late = model(torch.randn(4, 5, 6))["output"][0].sum()
    with seen:
        late.backward()
    assert not {use.layer.name for use in seen.uses} & {"fc", "two"}


@pytest.mark.parametrize(
    "build", [mlp, lambda: nn.Sequential(*mlp()[:1], Using(lambda m, x: x @ m.own))]
)
def test_a_kept_loss_keeps_no_key_alive(watch: Any, build: Callable[[], nn.Module]) -> None:
    model = build() if build is mlp else nn.Sequential(Using(lambda m, x: m.fc(x) @ m.own))
    losses, keys = [], []
    with watch(model) as seen:
        for _ in range(3):
            x = torch.randn(5, 6)
            keys.append(weakref.ref(x))
            losses.append(loss_of(model, x))
            losses[-1].backward()
            del x
        gc.collect()
        assert [key() for key in keys] == [None] * 3
    assert seen.uses


def test_a_capture_and_its_model_are_freed(watch: Any) -> None:
    model = Odd()
    with watch(model) as seen:
        model(torch.randn(4, 5, 6))["output"][0].sum().backward()
    gone = weakref.ref(model), weakref.ref(seen.capture)
    del model, seen
    gc.collect()
    assert [one() for one in gone] == [None, None]


def test_whole_graphs_are_read_in_the_first_step_only(watch: Any) -> None:
    before = global_hooks()
    model = mlp()
    with watch(model) as seen:
        assert sum(global_hooks().values()) > sum(before.values()) + 2
        loss_of(model).backward()
        seen.capture.next_step()
        assert global_hooks()["_global_forward_pre_hooks"] == 0
        loss_of(model).backward()
    assert len(seen.uses) == 4


# -- training is as it was ------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        block = nn.TransformerEncoderLayer(6, 2, 12, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(block, 2)
        self.embed, self.norm = nn.Embedding(9, 6), nn.BatchNorm1d(6)
        self.odd, self.head = Odd(), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        x = self.encoder(x + self.embed((x[..., 0] > 0).long()))
        x = self.odd(torch.relu_(self.norm(self.head(x).mT).mT.contiguous()))["output"][0]
        return x.cos()


@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True")
@pytest.mark.parametrize("by_examples", [False, True])
def test_every_bit_of_training_and_evaluation_is_the_same(watch: Any, by_examples: bool) -> None:
    def run(captured: bool) -> list[Tensor]:
        torch.manual_seed(3)
        model, seen = Block(), []
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        hooked = watch(model, by_examples=lambda layer: by_examples)
        with hooked if captured else contextlib.nullcontext():
            for _ in range(4):
                x = torch.randn(4, 5, 6)
                model.train()(x).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                hooked.capture.next_step()
                with torch.no_grad():
                    seen.append(model.eval()(x))
        return [*seen, *model.state_dict().values(), torch.get_rng_state()]

    for plain, captured in zip(run(False), run(True), strict=True):
        assert torch.equal(plain, captured)


def test_the_fast_path_of_the_transformer_encoder_stays_on(
    watch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    fast, calls = torch._transformer_encoder_layer_fwd, []
    monkeypatch.setattr(
        torch, "_transformer_encoder_layer_fwd", lambda *a: calls.append(1) or fast(*a)
    )
    model = nn.TransformerEncoderLayer(6, 2, 12, batch_first=True).eval()
    with watch(model), torch.no_grad():
        model(torch.randn(4, 5, 6))
    assert calls == [1]
