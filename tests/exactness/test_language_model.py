"""The whole of it, end to end: a small transformer language model, trained as they are trained.

Tied embeddings, learned positions, dropout, gradient clipping, accumulation over micro-batches, a
schedule with warm-up, momentum, weight decay that norms are exempt from, evaluation inside the loop
on torch's fused path. Weights are rebuilt from initial state, log and patterns alone, at the end
and at earlier steps; training and evaluation give the same bits with and without the recorder.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_
from torch.optim import SGD
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.checkpoint import checkpoint

import dualform

nested = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")  # the model's own

STEPS, MICROBATCHES = 12, 2
TOKENS, LENGTH, WIDTH = 17, 7, 12


class LanguageModel(nn.Module):
    """Predicts the next token; the last matrix is the embedding's."""

    def __init__(self, checkpointed: bool = False) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(TOKENS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.dropout = nn.Dropout(0.1)
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 20, 0.1, batch_first=True)
        self.body = nn.TransformerEncoder(layer, 2)
        self.head = nn.Linear(WIDTH, TOKENS, bias=False)
        self.head.weight = self.tokens.weight
        self.checkpointed = checkpointed

    def forward(self, tokens: Tensor, padding: Tensor | None = None) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.dropout(self.tokens(tokens) + self.places(places))
        if padding is not None:
            return self.head(self.body(x, src_key_padding_mask=padding))
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], dtype=x.dtype)
        for layer in self.body.layers:
            if self.checkpointed:
                x = checkpoint(layer, x, mask, use_reentrant=False)
            else:
                x = layer(x, src_mask=mask, is_causal=True)
        return self.head(x)


def loss_of(model: nn.Module, generator: torch.Generator) -> Tensor:
    text = torch.randint(0, TOKENS, (4, LENGTH + 1), generator=generator)
    return F.cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())


def optimizer_of(model: nn.Module) -> tuple[SGD, LambdaLR]:
    matrices = [p for p in model.parameters() if p.dim() == 2]
    others = [p for p in model.parameters() if p.dim() != 2]
    groups = [{"params": matrices, "weight_decay": 0.05}, {"params": others}]
    optimizer = SGD(groups, lr=0.2, momentum=0.9)
    return optimizer, LambdaLR(optimizer, lambda s: min(1.0, (s + 1) / 4) * 0.9**s)


def evaluate(model: nn.Module) -> Tensor:
    """What the model says of a padded batch, in eval mode: torch computes it in one kernel."""
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(0, TOKENS, (3, LENGTH), generator=generator)
    padding = torch.arange(LENGTH) >= torch.tensor([[LENGTH], [4], [2]])
    model.eval()
    with torch.no_grad():
        x = model.dropout(model.tokens(tokens))
        inside = model.body(x, src_key_padding_mask=padding)
        logits = model(tokens, padding)
    model.train()
    assert not inside[padding].any()  # only the fused path leaves zeros there
    return logits


def train(run: Any, *, record: bool = True) -> list[Tensor]:
    optimizer, schedule = optimizer_of(run.model)
    said: list[Tensor] = []

    def steps(recorder: dualform.Recorder | None) -> None:
        for number in range(STEPS):
            for part in range(MICROBATCHES):
                if recorder is not None:
                    first = 4 * (MICROBATCHES * number + part)
                    recorder.tag(example=list(range(first, first + 4)), half=number // 6)
                (run.loss() / MICROBATCHES).backward()
            clip_grad_norm_(run.model.parameters(), 0.7)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            said.append(evaluate(run.model))
            run.keep()

    torch.manual_seed(11)  # for dropout
    if record:
        with run.recording(optimizer) as recorder:
            steps(recorder)
    else:
        run.kept = {0: run.weights()}
        steps(None)
    return said


def seeded(dtype: torch.dtype, **options: Any) -> nn.Module:
    torch.manual_seed(5)
    return LanguageModel(**options).to(dtype)


@nested
@pytest.mark.parametrize(
    ("dtype", "checkpointed"),
    [
        pytest.param(torch.float64, False, id="float64"),
        pytest.param(torch.float32, True, id="float32, checkpointed"),
        pytest.param(torch.float64, True, id="float64, checkpointed", marks=pytest.mark.long),
        pytest.param(torch.float32, False, id="float32", marks=pytest.mark.long),
    ],
)
def test_a_language_model_is_rebuilt_from_its_memory(
    dtype: torch.dtype, checkpointed: bool, new_run: Any, certify: Any, tmp_path: Path
) -> None:
    run = new_run(seeded(dtype, checkpointed=checkpointed), loss_of, dtype)
    said = train(run)
    memory = certify(run)  # float64: 1e-12, at the end and at five earlier steps
    matrices = {n: p for n, p in memory.parameters.items() if len(p.shape) == 2}
    assert {p.keep for p in matrices.values()} == {"patterns"}
    assert memory.parameters["tokens.weight"].layers == ("tokens", "head")
    assert {p.keep for n, p in memory.parameters.items() if "norm" in n} == {"examples"}
    attended = {f"body.layers.{i}.self_attn.{part}_proj" for i in (0, 1) for part in ("in", "out")}
    assert attended <= set(memory.layers)
    assert len(memory.layer("tokens")) == STEPS * MICROBATCHES * 4 * LENGTH
    plain = new_run(seeded(dtype, checkpointed=checkpointed), loss_of, dtype)
    for recorded, unrecorded in zip(said, train(plain, record=False), strict=True):
        assert torch.equal(recorded, unrecorded)
    for step in range(STEPS + 1):
        for name, weight in plain.kept[step].items():
            assert torch.equal(weight, run.kept[step][name])


@nested
def test_a_language_model_can_be_asked(new_run: Any, certify: Any) -> None:
    run = new_run(seeded(torch.float64), loss_of, torch.float64)
    train(run)
    dual = dualform.DualForm(run.model, certify(run))
    tokens = torch.randint(0, TOKENS, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    assert dual.verify(tokens).passed
    attention = dual.attend(tokens)
    assert set(attention) == {name for name in dual.memory.layers if "norm" not in name}
    for name, spotlight in attention.items():
        expected = (2 * LENGTH, 1) if name == "tokens" else None
        if expected:
            assert spotlight.queries.shape == expected
        assert len(spotlight.top(3)) == 3 * len(spotlight.queries)
    run.model.eval()
    logits = run.model(tokens).detach()
    target = torch.zeros_like(logits)
    target[1, LENGTH - 1, 4] = 1.0
    split = dual.contribute(tokens, target=target)
    assert split.layer == "head"
    assert abs(split.total - float(logits[1, LENGTH - 1, 4])) <= 1e-12
    without, only = dual.without(half=1), dual.only(half=1)
    views = [dual, dual.without(), without, only]
    whole, nothing, less, rest = (view.weights(torch.float64) for view in views)
    for name, weight in whole.items():
        off = less[name] + rest[name] - weight - nothing[name]
        assert float(off.abs().max()) <= 1e-12
    earlier = dual.at(6).to_model()
    for name, weight in earlier.named_parameters():
        assert torch.allclose(weight, run.kept[6][name], rtol=0, atol=1e-12)
