"""Options that meet: attention layers in 16 bits, chosen, with keys alone, resumed."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import SGD

import dualform as df


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)


class Tagger(nn.Module):
    """A little transformer: attention is used functionally, the rest are plain layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.block = nn.TransformerEncoderLayer(8, 2, 12, dropout=0.1, batch_first=True)
        self.head = nn.Linear(8, 5)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.head(self.block(self.embed(tokens)))
        return output


def start(dtype: torch.dtype) -> tuple[Tagger, SGD]:
    torch.manual_seed(0)
    model = Tagger().to(dtype)
    return model, SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3)


def steps(model: nn.Module, optimizer: SGD, numbers: range, recorder: Any = None) -> None:
    for step in numbers:
        torch.manual_seed(step)
        tokens, labels = torch.randint(0, 11, (3, 4)), torch.randint(0, 5, (3, 4))
        if recorder is not None:
            recorder.tag(example=[3 * step, 3 * step + 1, 3 * step + 2], token=tokens)
        F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten()).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()


def same(model: nn.Module, other: nn.Module, bound: float = 0.0) -> None:
    for ours, theirs in zip(model.state_dict().values(), other.state_dict().values(), strict=True):
        assert float((ours - theirs).abs().max()) <= bound


CHOICES: dict[str, dict[str, Any]] = {
    "everything": {},
    "float16": {"dtype": "float16"},
    "bfloat16": {"dtype": "bfloat16"},
    "keys of the block": {"error_signals": "head"},
    "the head": {"layers": "head"},
    "attention": {"layers": "block.self_attn.*"},
    "attention, keys alone": {"layers": "block.self_attn.*", "error_signals": False},
}


@pytest.mark.parametrize("options", CHOICES.values(), ids=CHOICES)
def test_a_transformer_is_the_same_and_verified_whatever_is_kept(
    options: dict[str, Any], tmp_path: Path
) -> None:
    plain, optimizer = start(torch.float64)
    steps(plain, optimizer, range(12))
    model, optimizer = start(torch.float64)
    with df.record(model, optimizer, tmp_path / "run", **options) as recorder:
        steps(model, optimizer, range(12), recorder)
    same(model, plain)
    memory = df.Memory.open(tmp_path / "run")
    certificate = df.DualForm(model, memory).verify()
    assert certificate.passed, str(certificate)
    lossy = "dtype" in options
    same(df.DualForm(Tagger().double(), memory).to_model(), model, 1e-2 if lossy else 1e-12)


@pytest.mark.parametrize("options", CHOICES.values(), ids=CHOICES)
@pytest.mark.parametrize("checkpoint", [5, 9])
def test_a_transformer_is_resumed_whatever_is_kept(
    options: dict[str, Any], checkpoint: int, tmp_path: Path
) -> None:
    whole, optimizer = start(torch.float64)
    with df.record(whole, optimizer, tmp_path / "whole", **options) as recorder:
        steps(whole, optimizer, range(14), recorder)
    model, optimizer = start(torch.float64)
    saved: list[Any] = []
    with df.record(model, optimizer, tmp_path / "run", **options) as recorder:
        steps(model, optimizer, range(checkpoint), recorder)
        recorder.flush()
        saved += [copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())]
        steps(model, optimizer, range(checkpoint, 9), recorder)
    model, optimizer = start(torch.float64)
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    with df.record(model, optimizer, tmp_path / "run", resume=True, **options) as recorder:
        assert recorder.steps == checkpoint
        steps(model, optimizer, range(checkpoint, 14), recorder)
    same(model, whole)
    memory = df.Memory.open(tmp_path / "run")
    assert memory.steps == 14
    certificate = df.DualForm(model, memory).verify()
    assert certificate.passed, str(certificate)
    uninterrupted = df.Memory.open(tmp_path / "whole")
    assert memory.layers == uninterrupted.layers != ()
    for name in memory.layers:
        ours, theirs = memory.layer(name), uninterrupted.layer(name)
        assert torch.equal(ours.keys, theirs.keys)
        assert ours.has_error_signals == theirs.has_error_signals
        assert ours.patterns.names == theirs.patterns.names


@pytest.mark.parametrize(
    ("before", "now"),
    [({}, {"dtype": "float16"}), ({}, {"layers": "head"}), ({}, {"error_signals": False})],
)
def test_other_options_than_before_are_refused_by_name(
    before: dict[str, Any], now: dict[str, Any], tmp_path: Path
) -> None:
    model, optimizer = start(torch.float32)
    with df.record(model, optimizer, tmp_path / "run", **before) as recorder:
        steps(model, optimizer, range(3), recorder)
    with (
        pytest.raises(df.RecordingError, match="layer"),
        df.record(model, optimizer, tmp_path / "run", resume=True, **now),
    ):
        pass
    assert df.Memory.open(tmp_path / "run").steps == 3


def test_a_part_of_an_attention_cannot_be_chosen_and_is_accounted_for_by_steps(
    tmp_path: Path,
) -> None:
    class Cross(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            output: torch.Tensor = self.attention(x, y, y)[0]
            return output

    model = Cross().double()
    optimizer = SGD(model.parameters(), lr=0.1)

    def train() -> None:
        with df.record(model, optimizer, tmp_path / "run", layers="attention.in_proj_q"):
            for _ in range(3):
                x, y = torch.randn(2, 3, 8).double(), torch.randn(2, 4, 8).double()
                model(x, y).square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()

    with pytest.warns(UserWarning, match="chosen only in part"):
        train()
    memory = df.Memory.open(tmp_path / "run")
    assert memory.parameters["attention.in_proj_weight"].coverage == "steps"
    assert df.DualForm(model, memory).verify().passed
