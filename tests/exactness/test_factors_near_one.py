"""Clipping that takes next to nothing away: κ is measured beside 1, weights come out to the bit.

Under autocast gradients are rounded to 8 bits, so the sum of patterns alone could not tell 0.9999
from 1. The loop computes the factor itself, as `clip_grad_norm_` does, and every step is compared.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_, get_total_norm
from torch.optim import SGD, AdamW

import dualform

STEPS, ULP = 18, 2.0**-24
WANTED = (0.999, 0.9999, 0.99999, 1 - 16 * ULP, 1 - 4 * ULP, 1 - ULP, 1.0, 1.0001, 1.5)
"""What the limit is, as a share of the norm; above 1 nothing is clipped."""

RULES: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda p: SGD(p, lr=0.1, momentum=0.9),
    "AdamW": lambda p: AdamW(p, lr=0.01),
}


@pytest.mark.parametrize("autocast", [True, False], ids=["autocast", "float32"])
@pytest.mark.parametrize("rule", RULES)
def test_a_factor_next_to_one_is_measured_and_weights_are_rebuilt_to_the_bit(
    rule: str, autocast: bool, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 64), nn.LayerNorm(64), nn.Tanh(), nn.Linear(64, 4))
    optimizer, factors = RULES[rule](model.parameters()), []
    states = [{n: p.detach().clone() for n, p in model.named_parameters()}]
    with dualform.record(model, tmp_path / "run"):
        for step in range(STEPS):
            inputs, labels = torch.randn(32, 6), torch.randint(0, 4, (32,))
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                loss = F.cross_entropy(model(inputs), labels)
            loss.backward()
            norm = get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
            limit = WANTED[step % len(WANTED)] * (float(norm) + 1e-6)
            factors.append(float((limit / (norm + 1e-6)).clamp(max=1.0)))
            clip_grad_norm_(model.parameters(), limit)
            optimizer.step()
            optimizer.zero_grad()
            states.append({n: p.detach().clone() for n, p in model.named_parameters()})
    true = np.array(factors)
    assert (true == 1.0).sum() >= STEPS // len(WANTED) * 2
    assert ((true < 1.0) & (true > 1 - 8 * ULP)).sum() >= STEPS // len(WANTED)
    dual = dualform.DualForm(model, tmp_path / "run")
    for name in dual.memory.parameters:
        kappa = dual.memory.log(name).kappa
        assert np.abs(kappa - true).max() <= 6 * ULP, name
        assert (kappa[true == 1.0] == 1.0).all()
        assert (kappa[true < 1 - 8 * ULP] < 1.0).all()
    for step, state in enumerate(states):
        weights = dual.at(step).weights()
        assert all(torch.equal(weights[name], state[name]) for name in state), step
    assert dual.verify(every_step=True).verdict == "bit for bit"
