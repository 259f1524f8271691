"""The estimate of networks whose layers are not all modules: attention, look-ups, functions."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD
from torch.utils.checkpoint import checkpoint

import dualform as df

TOKENS, WIDTH = 40, 16


class Words(nn.Module):
    """Tied by function, with attention, perhaps inside a checkpoint."""

    def __init__(self, checkpointed: bool = False) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(TOKENS, WIDTH), nn.Embedding(9, WIDTH)
        self.body = nn.TransformerEncoderLayer(WIDTH, 2, 24, 0.1, batch_first=True)
        self.other = nn.Parameter(torch.randn(WIDTH, WIDTH) / 4)
        self.checkpointed = checkpointed

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1]))
        x = checkpoint(self.body, x, use_reentrant=False) if self.checkpointed else self.body(x)
        return F.linear(torch.tanh(x @ self.other), self.tokens.weight)


class Crossed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(TOKENS, WIDTH)
        self.attn = nn.MultiheadAttention(WIDTH, 2, batch_first=True)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        return self.attn(x[:, :3], x, x)[0]


MODELS: dict[str, Callable[[], nn.Module]] = {
    "words": Words,
    "words in a checkpoint": lambda: Words(checkpointed=True),
    "cross-attention": Crossed,
}


def recorded(model: nn.Module, tokens: Tensor, path: Path, **settings: Any) -> df.Memory:
    optimizer = SGD(model.parameters(), lr=0.01, momentum=0.9)
    with df.record(model, optimizer, path, **settings) as recorder:
        for _ in range(60):
            recorder.tag(example=torch.arange(len(tokens)), label=torch.zeros(len(tokens)).long())
            model(tokens).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return df.Memory.open(path)


@pytest.mark.parametrize("settings", [{}, {"dtype": "float16"}, {"layers": ["tok*", "*linear1"]}])
@pytest.mark.parametrize("name", MODELS)
def test_layers_that_are_no_modules_are_found_and_counted(
    name: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    model = MODELS[name]()
    if name == "cross-attention" and "layers" in settings:
        settings = {"layers": "tok*"}
    tokens = torch.randint(0, TOKENS, (8, 9))
    before = {n: p.grad for n, p in model.named_parameters()}
    foretold = df.estimate(model, batch=8, steps=60, inputs=tokens, **settings)
    assert {n: p.grad for n, p in model.named_parameters()} == before
    assert torch.backends.mha.get_fastpath_enabled()
    memory = recorded(model, tokens, tmp_path / "run", **settings)
    assert {la.name: la.patterns for la in foretold.layers} == {
        layer: memory.layer(layer).rows for layer in memory.layers
    }
    assert foretold.bytes_on_disk == pytest.approx(memory.bytes_on_disk, rel=0.03)


def test_positions_are_as_many_whatever_the_batch() -> None:
    tokens = torch.randint(0, TOKENS, (2, 9))
    found = df.estimate(Words(), batch=64, steps=10, inputs=tokens)
    counted = {la.name: la.patterns_per_step for la in found.layers}
    assert counted["tokens"] == counted["tokens.weight"] == counted["other"] == 64 * 9
    assert counted["places"] == 9


def test_a_token_takes_eight_bytes_however_many_there_are() -> None:
    (layer,) = df.estimate(nn.Embedding(50_000, 32), batch=4, steps=10).layers
    assert layer.bytes_per_pattern == 8 + 4 * 32


def test_without_a_sample_attention_is_taken_to_be_given_one_input() -> None:
    found = df.estimate(nn.MultiheadAttention(WIDTH, 2), batch=4, steps=10)
    assert {la.name: la.out_features for la in found.layers} == {
        "out_proj": WIDTH,
        "in_proj": 3 * WIDTH,
    }
    apart = df.estimate(nn.MultiheadAttention(WIDTH, 2, kdim=5, vdim=7), batch=4, steps=10)
    assert {la.name: la.in_features for la in apart.layers} == {
        "out_proj": WIDTH,
        "q_proj": WIDTH,
        "k_proj": 5,
        "v_proj": 7,
    }


def test_it_says_what_recording_will_refuse() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.LSTM(4, 4))
    assert any("'1' is an nn.LSTM" in r for r in df.estimate(model, batch=1, steps=1).remarks)
    chosen = df.estimate(model, batch=1, steps=1, layers="0")
    assert not any("LSTM" in remark for remark in chosen.remarks)
