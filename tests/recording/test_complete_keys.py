"""What is kept is what trained the weights: no use is missed silently, nothing unused is kept."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

import dualform as df
from dualform.memory.noted import NOTED_EVERY

KEYS_ALONE = pytest.mark.parametrize(
    "options", [{}, {"error_signals": False}], ids=["patterns", "keys alone"]
)
BOTH = {"SGD": lambda p: SGD(p, lr=0.01, momentum=0.9), "AdamW": lambda p: AdamW(p, lr=1e-3)}
Loss = Callable[[nn.Module, int, Tensor], Tensor]
"""Given the model, the step and a batch."""


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)).double()


def batch(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def assert_whole(model: nn.Module, path: Path, **rows: int) -> df.Memory:
    """The memory is exact, and its layers have so many keys."""
    memory = df.Memory.open(path)
    certificate = df.DualForm(model, memory).verify()
    assert memory.exact
    assert certificate.passed, certificate
    assert {name: len(memory.layer(name).keys) for name in rows} == rows
    return memory


class Twice(nn.Module):
    """A layer that is used twice, with another one in between."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.a(self.b(self.a(x)).tanh())
        return out


@KEYS_ALONE
@pytest.mark.parametrize("rule", BOTH)
def test_a_layer_used_twice_keeps_its_patterns_if_optimizers_move_amid_the_backward_pass(
    tmp_path: Path, options: dict[str, Any], rule: str
) -> None:
    """Between its two uses its gradient is not there yet, which does not mean thrown away."""
    weights = []
    for path in (None, tmp_path / "run"):
        torch.manual_seed(0)
        model = Twice().double()
        optimizers = [BOTH[rule]([p]) for p in model.parameters()]
        handles = []
        for optimizer in optimizers:

            def move(parameter: Tensor, optimizer: Optimizer = optimizer) -> None:
                optimizer.step()
                optimizer.zero_grad()

            parameter = optimizer.param_groups[0]["params"][0]
            handles.append(parameter.register_post_accumulate_grad_hook(move))
        if path is None:
            for _ in range(10):
                model(batch(5, 4)).square().mean().backward()
        else:
            with df.record(model, optimizers, path, **options):
                for _ in range(10):
                    model(batch(5, 4)).square().mean().backward()
        weights.append([p.detach().clone() for p in model.parameters()])
    assert all(map(torch.equal, *weights))
    memory = assert_whole(model, tmp_path / "run", a=100, b=50)
    assert memory.remarks == ()


@KEYS_ALONE
def test_uses_that_begin_later_are_kept(tmp_path: Path, options: dict[str, Any]) -> None:
    """Self-attention first, then attention to something else: projections of their own."""
    model = nn.MultiheadAttention(12, 3, batch_first=True).double()
    optimizer = SGD(model.parameters(), lr=0.1)
    with df.record(model, optimizer, tmp_path / "run", **options):
        for step in range(12):
            x = batch(4, 3, 12)
            y = x if step < 6 else batch(4, 5, 12)
            model(x, y, y)[0].square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    rows = {"in_proj": 72, "in_proj_q": 72, "in_proj_kv": 120, "out_proj": 144}
    assert_whole(model, tmp_path / "run", **rows)


@KEYS_ALONE
def test_gradients_that_come_past_all_layers_are_warned_of(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    model = network()
    optimizer = SGD(model.parameters(), lr=0.1)
    parameters = list(model.parameters())

    def train() -> None:
        with df.record(model, optimizer, tmp_path / "run", **options):
            for _ in range(5):
                found = torch.autograd.grad(model(batch(5, 4)).square().mean(), parameters)
                for parameter, gradient in zip(parameters, found, strict=True):
                    parameter.grad = gradient
                optimizer.step()
                optimizer.zero_grad()

    with pytest.warns(UserWarning, match="was never called as a module, yet got a gradient"):
        train()
    memory = assert_whole(model, tmp_path / "run")
    assert not memory.layers


def train_keys(path: Path, rule: str, loss: Loss) -> nn.Module:
    model = network()
    optimizer = BOTH[rule](model.parameters())
    with df.record(model, optimizer, path, error_signals=False):
        for step in range(2 * NOTED_EVERY + 1):
            loss(model, step, batch(5, 4)).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
    return model


@pytest.mark.parametrize("rule", BOTH)
@pytest.mark.parametrize("start", [0, 10], ids=["from the start", "later"])
def test_keys_that_are_not_all_there_are_warned_of_once(
    tmp_path: Path, rule: str, start: int
) -> None:
    def loss(model: nn.Module, step: int, x: Tensor) -> Tensor:
        plain = model(x).square().mean()
        unseen = F.linear(x, model.get_parameter("0.weight")).square().mean()
        return plain + unseen if step >= start else plain

    first = 0 if start == 0 else NOTED_EVERY
    with pytest.warns(UserWarning, match="keys may be missing") as warned:
        model = train_keys(tmp_path / "run", rule, loss)
    memory = assert_whole(model, tmp_path / "run")  # the weights are accounted for all the same
    assert len(warned) == len(memory.remarks) == 1
    assert f"step {first}, parameter '0.weight'" in memory.remarks[0]


@pytest.mark.parametrize("rule", BOTH)
def test_a_layer_that_is_passed_by_from_some_step_on_is_warned_of(
    tmp_path: Path, rule: str
) -> None:
    def loss(model: nn.Module, step: int, x: Tensor) -> Tensor:
        if step < 10:
            return model(x).square().mean()
        weight, bias = model.get_parameter("0.weight"), model.get_parameter("0.bias")
        return model[2](F.linear(x, weight, bias).relu()).square().mean()  # type: ignore[index]

    with pytest.warns(UserWarning, match="keys may be missing"):
        model = train_keys(tmp_path / "run", rule, loss)
    memory = assert_whole(model, tmp_path / "run")
    assert "it has a gradient, and its layer was not called" in memory.remarks[0]


@pytest.mark.parametrize("rule", BOTH)
def test_keys_that_are_all_there_are_not_warned_of(tmp_path: Path, rule: str) -> None:
    """Warnings are errors here."""
    model = train_keys(tmp_path / "run", rule, lambda model, step, x: model(x).square().mean())
    assert assert_whole(model, tmp_path / "run").remarks == ()


@KEYS_ALONE
def test_layers_that_no_optimizer_trains_have_no_patterns(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    """A head alone is trained, and the rest was not frozen: its gradients pile up for nobody."""
    model = network()
    optimizer = SGD(model[2].parameters(), lr=0.1)
    with df.record(model, optimizer, tmp_path / "run", **options):
        for _ in range(20):
            model(batch(5, 4)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert_whole(model, tmp_path / "run", **{"0": 0, "2": 100})


def test_a_gradient_that_another_pass_adds_to_is_taken_in_first(tmp_path: Path) -> None:
    """The discriminator's, in the generator's turn: nothing is lost, so nothing is to be said."""
    critic, maker = network(), nn.Linear(3, 4).double()
    model = nn.ModuleList([critic, maker])
    one, other = SGD(critic.parameters(), lr=0.01, momentum=0.9), SGD(maker.parameters(), lr=0.01)
    with df.record(model, [one, other], tmp_path / "run", error_signals=False):
        for _ in range(40):
            one.zero_grad()
            critic(maker(batch(5, 3)).detach()).square().mean().backward()
            one.step()
            other.zero_grad()
            critic(maker(batch(5, 3))).mean().backward()
            other.step()
    memory = assert_whole(model, tmp_path / "run", **{"1": 200})
    assert all("were dropped" in remark for remark in memory.remarks), memory.remarks


def test_gradients_emptied_behind_torchs_back_are_not_lent(tmp_path: Path) -> None:
    model = network()
    optimizer = SGD(model.parameters(), lr=0.01, momentum=0.9)
    with df.record(model, optimizer, tmp_path / "run", error_signals=False):
        for _ in range(40):
            model(batch(5, 4)).square().mean().backward()
            optimizer.step()
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter.grad.data.zero_()  # not counted as a change
                parameter.grad = None
    assert_whole(model, tmp_path / "run")


@KEYS_ALONE
def test_a_loss_that_is_held_on_to_does_not_hold_on_to_keys(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    """`losses.append(loss)` holds on to the graph's nodes, whose tensors torch gives back."""
    model = network()
    optimizer = SGD(model.parameters(), lr=0.01)
    losses = []
    with df.record(model, optimizer, tmp_path / "run", **options) as recorder:
        for _ in range(8):
            losses.append(model(batch(333, 4)).square().mean())
            losses[-1].backward()
            optimizer.step()
            optimizer.zero_grad()
        recorder.flush()
        gc.collect()
        held = [t for t in gc.get_objects() if type(t) is Tensor and t.shape[:1] == (333,)]
        assert len(held) <= 4  # of the last step, at most
    assert len(losses) == 8


def test_a_graph_that_is_kept_gives_its_patterns_twice(tmp_path: Path) -> None:
    model = network()
    optimizer = SGD(model.parameters(), lr=0.01)
    with df.record(model, optimizer, tmp_path / "run"):
        for _ in range(3):
            loss = model(batch(5, 4)).square().mean()
            loss.backward(retain_graph=True)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    assert_whole(model, tmp_path / "run", **{"0": 30, "2": 30})


@KEYS_ALONE
@pytest.mark.parametrize("start", [3, 4], ids=["at a step that is recorded", "at another"])
def test_a_layer_may_come_to_be_trained_at_any_step(
    tmp_path: Path, options: dict[str, Any], start: int
) -> None:
    model = network()
    model[0].requires_grad_(False)
    optimizer = SGD(model.parameters(), lr=0.01, momentum=0.9)
    with df.record(model, optimizer, tmp_path / "run", every=3, **options):
        for step in range(30):
            if step == start:
                model[0].requires_grad_(True)
            model(batch(5, 4)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    rows = {"0": 45 if start == 3 else 40, "2": 50}
    assert assert_whole(model, tmp_path / "run", **rows).remarks == ()


class Apart(nn.Module):
    """Two layers that have nothing to do with each other."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)


@KEYS_ALONE
@pytest.mark.parametrize("together", [0, 3], ids=["from the start", "later"])
def test_a_gradient_may_wait_for_its_optimizer(
    tmp_path: Path, options: dict[str, Any], together: int
) -> None:
    """A critic that waits for its actor: its patterns come in one step, its update in another."""
    model = Apart().double()
    one, other = (SGD(m.parameters(), lr=0.01, momentum=0.9) for m in (model.a, model.b))
    with df.record(model, [one, other], tmp_path / "run", **options):
        for cycle in range(together + 50):
            for turn in range(1 if cycle < together else 3):
                loss = model.a(batch(5, 4)).square().mean()
                if turn == 0:
                    loss = loss + model.b(batch(5, 4)).square().mean()
                loss.backward()
                one.step()
                one.zero_grad()
            other.step()
            other.zero_grad()
    rows = {"a": 5 * (together + 150), "b": 5 * (together + 50)}
    assert assert_whole(model, tmp_path / "run", **rows).remarks == ()


@KEYS_ALONE
def test_a_graph_that_torch_lets_be_gone_through_twice_gives_its_patterns_twice(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    """Of a frozen weight autograd keeps nothing that it could give back after the first time."""
    model = nn.Sequential(nn.Linear(4, 3)).double()
    model[0].weight.requires_grad_(False)
    optimizer = SGD([model[0].bias], lr=0.01)
    with df.record(model, optimizer, tmp_path / "run", **options):
        for _ in range(4):
            output = model(batch(6, 4))
            output[:3].sum().backward()
            output[3:].square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    memory = assert_whole(model, tmp_path / "run", **{"0": 48})
    assert (memory.log("0.bias").kappa == 1).all()


def test_keys_of_gradients_from_before_an_optimizer_had_them_are_said_to_be_missing(
    tmp_path: Path,
) -> None:
    model = network()
    optimizer = SGD(model[2].parameters(), lr=0.01)

    def train() -> None:
        with df.record(model, optimizer, tmp_path / "run", error_signals=False):
            for step in range(10):
                model(batch(5, 4)).square().mean().backward()
                if step == 5:
                    optimizer.add_param_group({"params": list(model[0].parameters())})
                optimizer.step()
                optimizer.zero_grad()

    with pytest.warns(UserWarning, match=r"keys may be missing.* no optimizer had it"):
        train()
    assert_whole(model, tmp_path / "run", **{"0": 25, "2": 50})


def test_edited_gradients_are_one_warning_and_one_remark(tmp_path: Path) -> None:
    """No key is missing then, but nobody can know that."""
    model = network()
    optimizer = SGD(model.parameters(), lr=0.01)

    def train() -> None:
        with df.record(model, optimizer, tmp_path / "run", error_signals=False):
            for _ in range(3):
                model(batch(5, 4)).square().sum().backward()
                nn.utils.clip_grad_value_(model.parameters(), 1e-3)
                optimizer.step()
                optimizer.zero_grad()

    with pytest.warns(UserWarning, match="keys may be missing") as warned:
        train()
    (remark,) = assert_whole(model, tmp_path / "run").remarks
    assert len(warned) == 1
    assert remark.endswith("The same goes for 0.bias, 2.weight, 2.bias")


def test_weights_that_come_and_go_are_not_taken_for_one_another(tmp_path: Path) -> None:
    """`functional_call` with computed weights: their identities are used again and again."""
    model = network()
    optimizer = SGD(model.parameters(), lr=0.01)
    with df.record(model, optimizer, tmp_path / "run", error_signals=False):
        for step in range(40):
            if step % 2:
                weights = {name: 1.0 * p for name, p in model.named_parameters()}
                output = torch.func.functional_call(model, weights, (batch(5, 4),))
            else:
                output = model(batch(5, 4))
            output.square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert_whole(model, tmp_path / "run", **{"0": 200, "2": 200})


@KEYS_ALONE
@pytest.mark.parametrize("rule", BOTH)
def test_a_frozen_weight_whose_gradient_is_zero_misses_nothing(
    tmp_path: Path, options: dict[str, Any], rule: str
) -> None:
    """Its bias is trained on, so the layer has patterns; the optimizer moves both."""
    model = network()
    optimizer = BOTH[rule](model.parameters())
    with df.record(model, optimizer, tmp_path / "run", **options):
        for step in range(20):
            model[0].weight.requires_grad_(step < 5)
            model(batch(5, 4)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
    assert assert_whole(model, tmp_path / "run", **{"0": 100, "2": 100}).remarks == ()
