"""One weight used several times in a pass: torch adds up as it arrives, and so does a replay."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, AdamW

from dualform.certificate import Verification, verify
from dualform.certificate.report import BITS, LITTLE, ROUNDED
from dualform.memory import Memory
from dualform.recording import record

STEPS, WIDTH, WORDS = 12, 12, 13


class Shared(nn.Module):
    """Layers of which some use the same weight, as each case has it."""

    def __init__(self, use: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.use = use
        self.fc, self.readout = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        self.words, self.attention = nn.Embedding(WORDS, WIDTH), nn.MultiheadAttention(WIDTH, 3)
        self.readout.weight = self.words.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.use(self, tokens)


def module_and_function(m: Any, tokens: Tensor) -> Tensor:
    return m.readout(F.linear(m.fc(m.words(tokens)).tanh(), m.fc.weight))  # type: ignore[no-any-return]


def three_uses_of_two_layers(m: Any, tokens: Tensor) -> Tensor:
    x = F.linear(m.fc(m.words(tokens)).tanh(), m.fc.weight, m.fc.bias).tanh()
    return m.readout(m.fc(x).cos() + x)  # type: ignore[no-any-return]


def embedding_and_a_head_used_twice(m: Any, tokens: Tensor) -> Tensor:
    x = m.fc(m.words(tokens)).tanh()
    return m.readout((m.readout(x) @ m.words.weight).tanh() + x)  # type: ignore[no-any-return]


def several_embeddings_of_one_table(m: Any, tokens: Tensor) -> Tensor:
    x = m.words(tokens) * m.words(tokens.roll(1, 1)) + F.embedding(tokens, m.words.weight)
    return m.readout(m.fc(x))  # type: ignore[no-any-return]


def attention_called_in_both_ways(m: Any, tokens: Tensor) -> Tensor:
    x = m.words(tokens)
    for query, key, value in ((x, x, x), (x.sin(), x, x), (x, x.cos(), x), (x, x, x)):
        x = m.attention(query, key, value)[0] + m.attention(x, x, x)[0]
    return m.readout(x)  # type: ignore[no-any-return]


def inside_and_outside_of_autocast(m: Any, tokens: Tensor) -> Tensor:
    x = m.fc(m.words(tokens)).tanh()
    with torch.autocast("cpu", torch.bfloat16):
        y = F.linear(m.fc(x).tanh(), m.fc.weight)
    return m.readout(F.linear(y.float(), m.fc.weight))  # type: ignore[no-any-return]


def views_used_twice(m: Any, tokens: Tensor) -> Tensor:
    x, weight = m.words(tokens), m.fc.weight.T
    return m.readout((x @ weight).tanh() + x.sin() @ weight + m.fc(x.cos()))  # type: ignore[no-any-return]


def regions_of_autocast(m: Any, tokens: Tensor) -> Tensor:
    x = m.words(tokens)
    for _ in range(3):
        with torch.autocast("cpu", torch.bfloat16):
            x = m.fc(x.float()).tanh()
    return m.readout(x.float())  # type: ignore[no-any-return]


def trained(use: Callable[[Any, Tensor], Tensor], rule: Any, path: Path) -> Verification:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = Shared(use)
    optimizer = rule(model.parameters(), lr=0.05)
    with record(model, path):
        for _ in range(STEPS):
            for tokens in torch.randint(0, WORDS, (2, 6, 9)):
                loss = F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return verify(Memory.open(path), model, every_step=True)


@pytest.mark.parametrize("rule", [SGD, AdamW])
@pytest.mark.parametrize(
    "use",
    [
        module_and_function,
        three_uses_of_two_layers,
        embedding_and_a_head_used_twice,
        several_embeddings_of_one_table,
        attention_called_in_both_ways,
        inside_and_outside_of_autocast,
    ],
)
def test_layers_that_share_a_weight_are_certified_to_the_bit(
    use: Callable[[Any, Tensor], Tensor], rule: Any, tmp_path: Path
) -> None:
    certificate = trained(use, rule, tmp_path / "run")
    assert certificate.verdict == BITS, certificate


@pytest.mark.parametrize("rule", [SGD, AdamW])
@pytest.mark.parametrize("use", [views_used_twice, regions_of_autocast])
def test_uses_that_may_meet_on_their_way_are_certified_within_rounding(
    use: Callable[[Any, Tensor], Tensor], rule: Any, tmp_path: Path
) -> None:
    certificate = trained(use, rule, tmp_path / "run")
    assert certificate.verdicts["fc.weight"].verdict in (ROUNDED, LITTLE), certificate
    assert "a view or a cast" in certificate.verdicts["fc.weight"].why
    assert not certificate.failures


def test_a_factor_is_not_measured_where_casts_may_have_met(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Shared(regions_of_autocast)
    optimizer, factors = SGD(model.parameters(), lr=0.05), []
    with record(model, tmp_path / "run"):
        for tokens in torch.randint(0, WORDS, (STEPS, 6, 9)):
            F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
            norm = float(nn.utils.clip_grad_norm_(model.parameters(), 0.1))
            factors.append(0.1 / (norm + 1e-6))
            optimizer.step()
            optimizer.zero_grad()
    log = Memory.open(tmp_path / "run").log("fc.weight")
    assert np.abs(log.kappa / factors - 1).max() < 1e-6
