"""Inputs that are changed in place before the backward pass, where torch allows it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from tests.recording.runs import verified
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.optim import SGD
from torch.utils.checkpoint import checkpoint

from dualform.memory import Memory
from dualform.recording import record

both = pytest.mark.parametrize("keep", ["patterns", "keys"])


def copied(model: nn.Module, fed: Tensor) -> Tensor:
    """A forward pass of which autograd saves copies."""
    with saved_tensors_hooks(lambda tensor: tensor.clone(), lambda tensor: tensor):
        output: Tensor = model(fed)
    return output


def trained(
    model: nn.Module,
    path: Path,
    fresh: Callable[[], Tensor],
    call: Callable[[nn.Module, Tensor], Tensor] = copied,
    *,
    keep: str = "patterns",
    steps: int = 4,
) -> tuple[Memory, Tensor]:
    """Recorded, with every input changed between forward and backward; and what was fed."""
    optimizer = SGD(model.parameters(), lr=0.01)
    fed = []
    with record(model, optimizer, path, keep=keep):
        for _ in range(steps):
            optimizer.zero_grad()
            inputs = fresh()
            fed.append(inputs.reshape(-1, inputs.shape[-1]).clone())
            output = call(model, inputs)
            inputs.fill_(1)
            output.pow(2).sum().backward()
            optimizer.step()
    memory = Memory.open(path)
    assert not memory.remarks
    assert verified(memory, model).passed
    return memory, torch.cat(fed)


@both
@pytest.mark.parametrize("shape", [(5, 6), (3, 5, 6)])
def test_keys_are_what_was_fed_where_hooks_on_saved_tensors_keep_a_copy(
    tmp_path: Path, shape: tuple[int, ...], keep: str
) -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 4)).double()
    memory, fed = trained(
        model,
        tmp_path,
        lambda: torch.randn(shape, dtype=torch.float64),
        keep=keep,
    )
    assert torch.equal(memory.layer("0").keys, fed)


@both
def test_tokens_are_what_was_fed_where_hooks_on_saved_tensors_keep_a_copy(
    tmp_path: Path, keep: str
) -> None:
    memory, fed = trained(
        nn.Sequential(nn.Embedding(30, 4)).double(),
        tmp_path,
        lambda: torch.randint(0, 30, (5, 1)),
        keep=keep,
    )
    assert torch.equal(memory.layer("0").keys, fed)


@both
def test_keys_that_do_not_lie_in_one_piece_are_what_was_fed(tmp_path: Path, keep: str) -> None:
    """Autograd saves a copy of such an input, and does not mind what becomes of it."""
    memory, fed = trained(
        nn.Sequential(nn.Linear(6, 4)).double(),
        tmp_path,
        lambda: torch.randn(5, 3, 6, dtype=torch.float64).transpose(0, 1),
        lambda model, inputs: model(inputs),
        keep=keep,
    )
    assert torch.equal(memory.layer("0").keys, fed)


class Functional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 6))

    def forward(self, inputs: Tensor) -> Tensor:
        return F.linear(inputs, self.weight)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True)

    def forward(self, inputs: Tensor) -> Tensor:
        output: Tensor = self.attention(inputs, inputs, inputs, need_weights=False)[0]
        return output


@both
@pytest.mark.parametrize(
    ("made", "name"), [(Functional, "weight"), (Attention, "attention.in_proj")]
)
def test_keys_of_uses_past_modules_are_what_was_fed(
    tmp_path: Path, made: Callable[[], nn.Module], name: str, keep: str
) -> None:
    memory, fed = trained(
        made().double(),
        tmp_path,
        lambda: torch.randn(3, 5, 6, dtype=torch.float64),
        keep=keep,
    )
    assert torch.equal(memory.layer(name).keys, fed)


class InPlace(nn.Module):
    """Adds to its hidden state in place: inside a checkpoint torch still gets gradients right."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.seen: list[Tensor] = []

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.first(inputs).tanh().clone()
        if torch._C._current_graph_task_id() == -1:  # not when it is computed once more
            self.seen.append(hidden.detach().clone())
        hidden += self.second(hidden)
        return hidden


@both
def test_keys_inside_a_checkpoint_are_those_before_a_change_in_place(
    tmp_path: Path, keep: str
) -> None:
    model = InPlace().double()
    memory, fed = trained(
        model,
        tmp_path,
        lambda: torch.randn(5, 6, dtype=torch.float64),
        lambda part, inputs: checkpoint(part, inputs.clone(), use_reentrant=False),  # type: ignore[no-any-return]
        keep=keep,
    )
    assert torch.equal(memory.layer("first").keys, fed)
    assert torch.equal(memory.layer("second").keys, torch.cat(model.seen))


class Projections(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(6, 4), nn.Linear(6, 4)

    def forward(self, inputs: Tensor) -> Tensor:
        query = self.q(inputs)
        with torch.no_grad():
            inputs += 1
        output: Tensor = query + self.k(inputs)
        return output


def test_layers_share_a_copy_only_of_the_same_values(tmp_path: Path) -> None:
    memory, fed = trained(
        Projections().double(), tmp_path, lambda: torch.randn(5, 6, dtype=torch.float64)
    )
    assert torch.equal(memory.layer("q").keys, fed)
    assert torch.equal(memory.layer("k").keys, fed + 1)


def test_torch_still_refuses_what_it_guards(tmp_path: Path) -> None:
    model = nn.Linear(6, 4)
    with (
        pytest.raises(RuntimeError, match="modified by an inplace operation"),
        record(model, SGD(model.parameters(), 0.1), tmp_path),
    ):
        inputs = torch.randn(5, 6)
        output = model(inputs)
        inputs.zero_()
        output.sum().backward()


class Spoiling(Functional):
    """Changes its input after it has used it, when it is evaluated."""

    def forward(self, inputs: Tensor) -> Tensor:
        output = super().forward(inputs)
        if not self.training:
            inputs.add_(1)
        return output


def test_an_evaluation_may_change_what_nothing_goes_back_through(tmp_path: Path) -> None:
    model = Spoiling().double()
    optimizer = SGD(model.parameters(), 0.1)
    with record(model, optimizer, tmp_path):
        for _ in range(3):
            model.eval()(torch.randn(5, 6, dtype=torch.float64))  # not under no_grad
            model.train()(torch.randn(5, 6, dtype=torch.float64)).pow(2).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    memory = Memory.open(tmp_path)
    assert memory.layer("weight").rows == 15
    assert verified(memory, model).passed
