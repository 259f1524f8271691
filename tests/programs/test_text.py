"""pytorch/examples: word_language_model, by an optimizer and by hand."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.programs.proving import alone, certified, draws, recorded, started, the_same_weights
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import AdamW

import dualform

pytestmark = pytest.mark.filterwarnings(  # said by torch of every encoder fed sequence first
    "ignore:enable_nested_tensor is True:UserWarning"
)

WORDS, WIDTH = 17, 12


class Transformer(nn.Transformer):
    """An encoder under a causal mask, sequence first; of nn.Transformer's decoder nothing is used
    but its name, which is given to the last layer."""

    def __init__(self) -> None:
        super().__init__(d_model=WIDTH, nhead=2, dim_feedforward=20, num_encoder_layers=2)
        self.input_emb = nn.Embedding(WORDS, WIDTH)
        self.decoder = nn.Linear(WIDTH, WORDS)
        angles = torch.arange(30)[:, None] * torch.exp(-torch.arange(0, WIDTH, 2) * 0.7)
        places = torch.stack([angles.sin(), angles.cos()], dim=2).flatten(1)
        self.register_buffer("places", places[:, None])
        self.src_mask: Tensor | None = None

    def forward(self, words: Tensor) -> Tensor:  # type: ignore[override]
        if self.src_mask is None or len(self.src_mask) != len(words):
            self.src_mask = torch.log(torch.tril(torch.ones(len(words), len(words))))
        x = self.input_emb(words) * math.sqrt(WIDTH)
        x = F.dropout(x + self.places[: len(words)], 0.2, self.training)
        return F.log_softmax(self.decoder(self.encoder(x, mask=self.src_mask)), dim=-1)


class LanguageModel:
    """A corpus in columns, cut into stretches; the last one is shorter."""

    stretch = 6

    def __init__(self) -> None:
        self.corpus = torch.randint(WORDS, (40, 4))
        self.model = Transformer()

    def train(self, recorder: Any = None) -> None:
        optimizer = AdamW(self.model.parameters(), lr=1e-3)
        for _ in range(2):
            self.model.train()
            for start in range(0, len(self.corpus) - 1, self.stretch):
                optimizer.zero_grad()
                self.loss(start).backward()
                nn.utils.clip_grad_norm_(self.model.parameters(), 0.25)
                optimizer.step()
            self.evaluate()

    def loss(self, start: int) -> Tensor:
        length = min(self.stretch, len(self.corpus) - 1 - start)
        words = self.corpus[start : start + length]
        following = self.corpus[start + 1 : start + 1 + length].reshape(-1)
        return F.nll_loss(self.model(words).view(-1, WORDS), following)

    @torch.no_grad()
    def evaluate(self) -> float:
        self.model.eval()
        starts = range(0, len(self.corpus) - 1, self.stretch)
        return float(sum(self.loss(start) for start in starts))


class ByHand(LanguageModel):
    """The same without an optimizer: weights are moved in the loop."""

    def train(self, recorder: Any = None) -> None:
        rate = 0.5
        for _ in range(2):
            self.model.train()
            for start in range(0, len(self.corpus) - 1, self.stretch):
                self.model.zero_grad()
                self.loss(start).backward()
                nn.utils.clip_grad_norm_(self.model.parameters(), 0.25)
                if recorder is None:
                    self.move(rate)
                else:
                    with recorder.update():
                        self.move(rate)
            self.evaluate()
            rate /= 4

    def move(self, rate: float) -> None:
        for p in self.model.parameters():
            if p.grad is not None:
                p.data.add_(p.grad, alpha=-rate)


def test_word_language_model(tmp_path: Path) -> None:
    program, memory = recorded(LanguageModel, tmp_path / "run")
    certified(program.model, memory, program.corpus[:6], steps=14)
    assert memory.layer("decoder").rows == 2 * 39 * 4


def test_word_language_model_moved_by_hand(tmp_path: Path) -> None:
    plain, then = alone(ByHand)
    program = started(ByHand)
    with dualform.record(program.model, tmp_path / "run") as recorder:
        program.train(recorder)
    assert draws() == then
    the_same_weights(program.model, plain.model)
    memory = dualform.Memory.open(tmp_path / "run")
    certified(program.model, memory, program.corpus[:6], steps=14, values=["*"])
    assert memory.layer("decoder").rows == 2 * 39 * 4
