"""keep=: how finely each layer's memory can say who wrote it; training is always the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.recording.runs import state_of, verified
from torch import nn
from torch.nn import functional as F
from torch.optim import SGD, AdamW

from dualform.certificate.report import BITS, KEPT, LITTLE, ROUNDED
from dualform.errors import RecordingError
from dualform.memory import Memory
from dualform.recording import record


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


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


def start(kind: Any = SGD) -> tuple[Tagger, Any]:
    torch.manual_seed(0)
    model = Tagger()
    settings = {"lr": 0.1, "momentum": 0.9} if kind is SGD else {"lr": 1e-3}
    return model, kind(model.parameters(), weight_decay=1e-3, **settings)


def train(model: nn.Module, optimizer: Any, steps: range, recorder: Any = None) -> None:
    for step in steps:
        torch.manual_seed(step)
        tokens, labels = torch.randint(0, 11, (3, 4)), torch.randint(0, 5, (3, 4))
        if recorder is not None:
            recorder.tag(example=[3 * step, 3 * step + 1, 3 * step + 2], token=tokens)
        F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten()).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()


LINEAR = {
    "embed", "block.linear1", "block.linear2", "block.self_attn.in_proj",
    "block.self_attn.out_proj", "head",
}  # fmt: skip
NORMS = {"block.norm1", "block.norm2"}
CHOICES: dict[str, tuple[dict[str, Any], dict[str, str]]] = {
    "auto": ({}, dict.fromkeys(LINEAR, "patterns") | dict.fromkeys(NORMS, "examples")),
    "patterns": (
        {"keep": "patterns"}, dict.fromkeys(LINEAR, "patterns") | dict.fromkeys(NORMS, "examples"),
    ),
    "float16": (
        {"dtype": "float16"},
        dict.fromkeys(LINEAR, "patterns") | dict.fromkeys(NORMS, "examples"),
    ),
    "keys": ({"keep": "keys"}, dict.fromkeys(LINEAR, "keys")),
    "values": ({"keep": "values"}, {}),
    "the head": ({"keep": {"head": "patterns", "*": "values"}}, {"head": "patterns"}),
    "keys of the block": (
        {"keep": {"block.*": "keys", "*": "auto"}},
        {n: "keys" if n.startswith("block") else "patterns" for n in LINEAR},
    ),
    "attention": (
        {"keep": {"*.self_attn.*": "patterns", "*": "values"}},
        {n: "patterns" for n in LINEAR if "attn" in n},
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", [SGD, AdamW])
@pytest.mark.parametrize("name", CHOICES)
def test_a_transformer_is_the_same_and_verified_whatever_is_kept(
    name: str, kind: Any, tmp_path: Path
) -> None:
    options, expected = CHOICES[name]
    plain, optimizer = start(kind)
    train(plain, optimizer, range(12))
    model, optimizer = start(kind)
    with record(model, tmp_path / "run", **options) as recorder:
        train(model, optimizer, range(12), recorder)
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    memory = Memory.open(tmp_path / "run")
    assert {layer: memory.layer(layer).keep for layer in memory.layers} == expected
    found = verified(memory, model)
    assert not found.failures, found
    for parameter, verdict in found.verdicts.items():
        keep = memory.parameters[parameter].keep
        best = (BITS, ROUNDED, LITTLE) if name == "float16" else (BITS,)
        assert verdict.verdict in ((KEPT,) if keep in ("values", "keys") else best), found
        assert keep != "values" or memory.parameters[parameter].why


@pytest.mark.parametrize("name", CHOICES)
@pytest.mark.parametrize("checkpoint", [5, 9])
def test_a_transformer_is_gone_on_with_whatever_is_kept(
    name: str, checkpoint: int, tmp_path: Path
) -> None:
    options, _ = CHOICES[name]
    whole, optimizer = start()
    with record(whole, tmp_path / "whole", **options) as recorder:
        train(whole, optimizer, range(14), recorder)
    model, optimizer = start()
    with record(model, tmp_path / "run", **options) as recorder:
        train(model, optimizer, range(checkpoint), recorder)
        saved = state_of(model), optimizer.state_dict()
        momenta = {i: v["momentum_buffer"].clone() for i, v in saved[1]["state"].items()}
        train(model, optimizer, range(checkpoint, 9), recorder)
    model, optimizer = start()
    model.load_state_dict(saved[0])
    state = {i: {"momentum_buffer": v} for i, v in momenta.items()}
    optimizer.load_state_dict(saved[1] | {"state": state})
    with record(model, tmp_path / "run", resume=True, **options) as recorder:
        assert recorder.steps == checkpoint
        train(model, optimizer, range(checkpoint, 14), recorder)
    memory, other = Memory.open(tmp_path / "run"), Memory.open(tmp_path / "whole")
    assert not verified(memory, model).failures
    assert set(memory.layers) == set(other.layers)
    for layer in memory.layers:
        ours, theirs = memory.layer(layer), other.layer(layer)
        assert ours.keep == theirs.keep
        if ours.keep in ("patterns", "keys"):
            assert torch.equal(ours.keys, theirs.keys)
        for column in ("step", "example", "token", "position"):
            assert (ours.patterns[column] == theirs.patterns[column]).all()


@pytest.mark.parametrize(
    ("before", "now"),
    [
        ({}, {"dtype": "float16"}),
        ({}, {"keep": "keys"}),
        ({"keep": {"head": "patterns", "*": "keys"}}, {}),
    ],
)
def test_other_options_than_before_are_refused_by_name(
    before: dict[str, Any], now: dict[str, Any], tmp_path: Path
) -> None:
    model, optimizer = start()
    with record(model, tmp_path / "run", **before):
        train(model, optimizer, range(3))
    with (
        pytest.raises(RecordingError, match=r"cannot be gone on with: (layer|its patterns)"),
        record(model, tmp_path / "run", resume=True, **now),
    ):
        pass
    assert Memory.open(tmp_path / "run").steps == 3


@pytest.mark.parametrize(
    ("keep", "message"),
    [
        ("haed", "'haed'"),
        ({"haed": "patterns"}, r"'haed'.* matches no layer.*head"),
        ({"head": "pattern"}, r"'head': 'pattern'"),
        ({3: "keys"}, "pattern of names"),
        (3, "keep=3 was given"),
        ({"block.norm1": "keys"}, r"'block.norm1' is of kind"),
        ("smallest", "comes later"),
    ],
)
def test_a_choice_that_cannot_be_is_refused_before_anything_is_written(
    keep: Any, message: str, tmp_path: Path
) -> None:
    model, _ = start()
    with (
        pytest.raises(RecordingError, match=message),
        record(model, tmp_path / "run", keep=keep),
    ):
        pass
    assert not (tmp_path / "run").exists()


def test_a_directory_may_have_a_colon_in_its_name(tmp_path: Path) -> None:
    model, optimizer = start()
    with record(model, tmp_path / "2024-01-01 12:30" / "s3:"):
        train(model, optimizer, range(2))
    assert Memory.open(tmp_path / "2024-01-01 12:30" / "s3:").steps == 2
