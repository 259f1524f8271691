"""Products that look like those of a layer at first sight: other sizes tell that they are not.

A weight that is square, or an input with one row, fits where it does not belong. Such a weight is
values; training goes on, and its weights are those of training. The same becomes of each inside an
activation checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils.checkpoint import checkpoint

import dualform

pytestmark = pytest.mark.filterwarnings("ignore:dualform. 'weight'")

Product = Callable[[Tensor, Tensor], Tensor]

in_a_checkpoint_or_not = pytest.mark.parametrize(
    "checkpointed", [False, True], ids=["plain", "checkpointed"]
)


class Functional(nn.Module):
    def __init__(self, product: Product, rows: int, columns: int, checkpointed: bool) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.weight = nn.Parameter(torch.randn(rows, columns, generator=generator).double())
        self.product, self.checkpointed = product, checkpointed

    def forward(self, inputs: Tensor) -> Tensor:
        if not self.checkpointed:
            return self.product(inputs, self.weight)
        inside = lambda given: self.product(given, self.weight)  # noqa: E731
        output: Tensor = checkpoint(inside, inputs, use_reentrant=False)
        return output


def recorded(
    product: Product,
    weight: tuple[int, int],
    sizes: list[tuple[int, ...]],
    path: Path,
    checkpointed: bool = False,
) -> dualform.Memory:
    """Train with inputs of these sizes, one after the other; the weights are those of training."""
    generator = torch.Generator().manual_seed(5)
    model = Functional(product, *weight, checkpointed)
    optimizer = SGD(model.parameters(), lr=0.05, momentum=0.9)
    with dualform.record(model, path) as recorder:
        for size in sizes:
            recorder.tag(example=list(range(size[0])))
            inputs = torch.randn(size, generator=generator, dtype=torch.float64)
            optimizer.zero_grad()
            model(inputs).tanh().square().sum().backward()
            optimizer.step()
    memory = dualform.Memory.open(path)
    rebuilt = dualform.DualForm(Functional(product, *weight, checkpointed), memory).weights()[
        "weight"
    ]
    assert torch.equal(rebuilt, model.weight.detach())
    assert dualform.DualForm(model, memory).verify(every_step=True).passed
    return memory


@in_a_checkpoint_or_not
@pytest.mark.parametrize(
    ("product", "weight", "size"),
    [
        (lambda x, w: torch.einsum("nod,od->no", x, w), (3, 3), (4, 3, 3)),
        (lambda x, w: torch.einsum("oihb,oi->o", x, w), (2, 2), (2, 2, 3, 3)),
        (lambda x, w: torch.bmm(x, w.view(2, 2, 2)).view(-1, 2), (2, 4), (2, 5, 2)),
        (lambda x, w: torch.bmm(x, w.unsqueeze(1)).view(-1, 3), (3, 3), (3, 5, 1)),
        (lambda x, w: x @ w.expand(3, 3).transpose(0, 1), (3, 3), (5, 3)),
        (lambda x, w: x @ w.expand(3, 3).permute(1, 0), (3, 3), (5, 3)),
        (lambda x, w: x @ w[1:2].expand(3, 4), (2, 4), (5, 3)),
        (lambda x, w: w.unsqueeze(0)[torch.zeros(3, dtype=torch.int64)] * x.sum(), (3, 3), (3, 1)),
        (lambda x, w: w.expand(3, 3, 2)[torch.tensor([0, 2, 1])] * x.sum(), (3, 2), (3, 1)),
        (lambda x, w: x @ w[3:].T, (3, 4), (5, 4)),
    ],
)
def test_a_product_that_only_looks_like_a_layer_makes_values(
    product: Product,
    weight: tuple[int, int],
    size: tuple[int, ...],
    checkpointed: bool,
    tmp_path: Path,
) -> None:
    memory = recorded(product, weight, [size] * 3, tmp_path / "run", checkpointed)
    assert memory.layers == ()
    assert memory.parameters["weight"].keep == "values"


@in_a_checkpoint_or_not
@pytest.mark.parametrize(
    ("product", "weight"),
    [
        (lambda x, w: x @ w.T, (3, 3)),
        (lambda x, w: x @ w, (3, 3)),
        (lambda x, w: x @ w.T, (1, 3)),
        (lambda x, w: torch.nn.functional.linear(x, w), (2, 3)),
    ],
)
def test_a_layer_keeps_its_patterns_in_steps_with_one_example_or_one_position(
    product: Product, weight: tuple[int, int], checkpointed: bool, tmp_path: Path
) -> None:
    sizes = [(4, 2, 3), (1, 1, 3), (1, 2, 3), (4, 1, 3)]
    memory = recorded(product, weight, sizes, tmp_path / "run", checkpointed)
    assert memory.layers == ("weight",)
    assert memory.layer("weight").rows == 8 + 1 + 2 + 4


def test_a_product_inside_a_checkpoint_can_be_asked_like_any_other_layer(tmp_path: Path) -> None:
    product = lambda x, w: x @ w.T  # noqa: E731
    queries = torch.randn(2, 5, 3, generator=torch.Generator().manual_seed(8)).double()
    found = []
    for inside in (False, True):
        memory = recorded(product, (4, 3), [(6, 2, 3)] * 2, tmp_path / f"{inside}", inside)
        dual = dualform.DualForm(Functional(product, 4, 3, inside), memory)
        found.append(dual.attend(queries)["weight"].weights)
    assert found[0].shape == (10, 24)
    assert torch.equal(*found)
