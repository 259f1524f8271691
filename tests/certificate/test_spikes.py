"""No silent wrong number: a batch with a gradient 50 times the usual leaves later steps right.

Under bfloat16 autocast the worst that rounding may do to a sum is large. If it is taken from an
earlier step that was a spike, any κ is "within rounding", also 1 where clipping left 0.05.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from tests.certificate.runs import Run

from dualform.certificate import at, verify
from dualform.certificate.report import BITS, NOT

RULES = {
    "SGD": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9}),
    "plain SGD": (torch.optim.SGD, {"lr": 0.05}),
    "AdamW": (torch.optim.AdamW, {"lr": 1e-3}),
}


@pytest.mark.parametrize("stored", ["float32", "float16"])
@pytest.mark.parametrize("autocast", [True, False], ids=["autocast", "float32"])
@pytest.mark.parametrize("clip", [0.1, 0.0])
@pytest.mark.parametrize("rule", RULES)
def test_every_factor_is_right_after_a_spike(
    rule: str, clip: float, autocast: bool, stored: str, tmp_path: Path
) -> None:
    kind, settings = RULES[rule]
    run = Run(
        kind,  # type: ignore[arg-type]
        settings,
        steps=40,
        clip=clip,
        spikes=(9, 10, 30),
        autocast=autocast,
        options={"dtype": stored},
    ).train(tmp_path / "run")
    memory = run.memory
    assert min(run.kappa) < 0.2 or not clip
    for name in memory.parameters:
        log = memory.log(name)
        assert log.explained.all()
        assert np.abs(log.kappa / run.kappa - 1).max() <= (2e-3 if autocast else 1e-6), name
        exact = np.array(run.kappa) == 1.0
        assert (log.kappa[exact] == 1.0).all()
    found = verify(memory, run.trained, every_step=True)
    assert found.verdict != NOT, repr(found)
    assert not found.failures, repr(found)
    if stored == "float32" and rule != "plain SGD":
        assert found.verdict == BITS, "κ was known well enough for marks to find the very number"
    for step in (8, 10, 11, 20, 31, 40):
        for name, actual in run.weights[step].items():
            learned = float((actual - run.weights[0][name]).norm())
            off = float((at(memory, name, step) - actual).norm())
            assert off <= (0.05 if stored == "float16" else 1e-5) * learned, (name, step)
