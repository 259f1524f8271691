"""pytorch/examples: gcn and gat, whose layers are products with parameters of their own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.programs.proving import certified, recorded
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Adam

NODES, FEATURES, CLASSES = 30, 9, 4


class GraphConvolution(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.kernel = nn.Parameter(torch.empty(inputs, outputs))
        self.bias = nn.Parameter(torch.zeros(outputs))
        nn.init.xavier_normal_(self.kernel)

    def forward(self, nodes: Tensor, neighbours: Tensor) -> Tensor:
        support = torch.mm(nodes, self.kernel)
        return torch.spmm(neighbours, support) + self.bias


class GCN(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gc1, self.gc2 = GraphConvolution(FEATURES, 8), GraphConvolution(8, CLASSES)

    def forward(self, nodes: Tensor, neighbours: Tensor) -> Tensor:
        x = F.dropout(F.relu(self.gc1(nodes, neighbours)), 0.5, self.training)
        return F.log_softmax(self.gc2(x, neighbours), dim=1)


class GraphAttention(nn.Module):
    """Heads side by side, or averaged; a weight of its own that scores pairs of nodes."""

    def __init__(self, inputs: int, outputs: int, heads: int) -> None:
        super().__init__()
        self.heads, self.width = heads, outputs // heads
        self.W = nn.Parameter(torch.empty(inputs, outputs))
        self.a = nn.Parameter(torch.empty(heads, 2 * self.width, 1))
        nn.init.xavier_normal_(self.W)
        nn.init.xavier_normal_(self.a)

    def forward(self, nodes: Tensor, neighbours: Tensor) -> Tensor:
        h = F.dropout(torch.mm(nodes, self.W), 0.4, self.training)
        h = h.view(len(nodes), self.heads, self.width).permute(1, 0, 2)
        source = torch.matmul(h, self.a[:, : self.width, :])
        target = torch.matmul(h, self.a[:, self.width :, :])
        scores = F.leaky_relu(source + target.mT, 0.2)
        scores = torch.where(neighbours > 0, scores, -9e16 * torch.ones_like(scores))
        shares = F.dropout(F.softmax(scores, dim=-1), 0.4, self.training)
        joined = torch.matmul(shares, h).permute(1, 0, 2)
        return joined.contiguous().view(len(nodes), self.heads * self.width)


class GAT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gat1, self.gat2 = GraphAttention(FEATURES, 8, 2), GraphAttention(8, CLASSES, 1)

    def forward(self, nodes: Tensor, neighbours: Tensor) -> Tensor:
        x = F.elu(self.gat1(nodes, neighbours))
        return F.log_softmax(self.gat2(x, neighbours), dim=1)


class Nodes:
    """All nodes at once in every step; the loss is that of some, and both are tested each time."""

    def __init__(self, model: type[nn.Module], sparse: str = "") -> None:
        self.model = model()
        linked = (torch.rand(NODES, NODES) < 0.1).float() + torch.eye(NODES)
        linked = ((linked + linked.T) > 0).float()
        degree = linked.sum(1).rsqrt()
        nodes = (torch.rand(NODES, FEATURES) < 0.3).float()
        nodes = nodes / nodes.sum(1, keepdim=True).clamp(min=1)
        neighbours = degree[:, None] * linked * degree
        self.given = (
            nodes.to_sparse() if "features" in sparse else nodes,
            neighbours.to_sparse() if "adjacency" in sparse else neighbours,
        )
        self.labels = torch.randint(CLASSES, (NODES,))
        order = torch.randperm(NODES)
        self.trained, self.held_out = order[:20], order[20:]

    def train(self) -> None:
        optimizer = Adam(self.model.parameters(), lr=0.01, weight_decay=5e-4)
        for _ in range(10):
            self.model.train()
            optimizer.zero_grad()
            self.loss(self.trained).backward()
            optimizer.step()
            self.model.eval()
            with torch.no_grad():
                self.loss(self.trained)
                self.loss(self.held_out)

    def loss(self, chosen: Tensor) -> Tensor:
        return F.nll_loss(self.model(*self.given)[chosen], self.labels[chosen])


def nodes_attend_by_their_features(dual: Any, layer: str, given: tuple[Tensor, Tensor]) -> None:
    """No module is called here, so the queries are those of the first layer: what it is given."""
    weights, nodes = dual.attend(*given, layers=layer)[layer].weights, given[0].double()
    expected = (nodes @ nodes.T).repeat(1, 10)
    torch.testing.assert_close(weights, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("sparse", ["", "adjacency"])
def test_gcn(sparse: str, tmp_path: Path) -> None:
    program, memory = recorded(lambda: Nodes(GCN, sparse), tmp_path / "run")
    dual = certified(program.model, memory, *program.given, steps=10, values=["*.bias"])
    nodes_attend_by_their_features(dual, "gc1.kernel", program.given)


def test_gcn_on_sparse_features_trains_on_and_keeps_their_layer_as_values(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match=r"gc1\.kernel.*sparse") as heard:
        program, memory = recorded(lambda: Nodes(GCN, "features adjacency"), tmp_path / "run")
    (remark,) = [said for said in memory.remarks if "gc1.kernel" in said]
    assert len(heard) == 1
    assert remark.startswith("gc1.kernel: ")
    values = ["*.bias", "gc1.kernel"]
    certified(program.model, memory, *program.given, steps=10, values=values)
    assert "sparse" in memory.parameters["gc1.kernel"].why
    assert memory.layer("gc2.kernel").rows == 10 * NODES


def test_gat(tmp_path: Path) -> None:
    program, memory = recorded(lambda: Nodes(GAT), tmp_path / "run")
    dual = certified(program.model, memory, *program.given, steps=10, values=["*.a"])
    nodes_attend_by_their_features(dual, "gat1.W", program.given)
