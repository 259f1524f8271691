"""Every loop in every mode: training is untouched, rows are those of a naive recorder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.recording import loops
from tests.recording.rules import Lion
from tests.recording.runs import verified
from torch import nn
from torch.optim import SGD, AdamW

from dualform.attention import DualForm
from dualform.certificate.report import BITS, KEPT, ROUNDED
from dualform.errors import QueryError
from dualform.memory import Memory
from dualform.recording import record

MOMENTUM = {"lr": 0.05, "momentum": 0.9}
MODES: dict[str, tuple[Any, dict[str, Any], dict[str, Any], str]] = {
    "float32": (SGD, MOMENTUM, {}, BITS),
    "float16": (SGD, MOMENTUM, {"dtype": "float16"}, ROUNDED),
    "keys": (SGD, MOMENTUM, {"keep": "keys"}, KEPT),
    "every=3": (SGD, MOMENTUM, {"every": 3}, KEPT),
    "AdamW": (AdamW, {"lr": 0.01}, {}, BITS),
    "unknown rule": (Lion, {"lr": 0.003}, {}, BITS),
}
"""The rule, its settings, what is asked of the recorder, and what `verify` can say of it."""


def make(loop: str, kind: Any, settings: dict[str, Any]) -> loops.Training:
    torch.manual_seed(3)
    model: Any = nn.Sequential(
        nn.Linear(7, 9), nn.Tanh(), nn.Linear(9, 8), nn.Tanh(), nn.Linear(8, 4)
    )
    parts = [model[0], model[2:]] if loop == "two_in_turn" else [model]
    if loop == "gan":
        model = nn.Module()
        model.generator = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 7))
        model.critic = nn.Sequential(nn.Linear(7, 8), nn.Tanh(), nn.Linear(8, 1))
        parts = [model.generator, model.critic]
    optimizers = [kind(part.parameters(), **settings) for part in parts]
    return loops.Training(model, optimizers, settings=settings)


def run(training: loops.Training, loop: str) -> loops.Training:
    training.naive = loops.Naive(training.model)
    for _ in loops.LOOPS[loop](training):
        training.naive.next()
    return training


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("loop", loops.LOOPS)
def test_the_memory_is_what_a_naive_recorder_keeps(loop: str, mode: str, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    kind, settings, options, verdict = MODES[mode]
    alone = run(make(loop, kind, settings), loop)
    training = make(loop, kind, settings)
    with record(training.model, tmp_path / "run", **options) as recorder:
        training.tag = recorder.tag
        run(training, loop)
    for name, p in training.model.named_parameters():
        assert torch.equal(p, alone.model.get_parameter(name)), name
    memory = Memory.open(tmp_path / "run")
    memory.check()
    compare(memory, training.naive, 0.0 if memory.layer(memory.layers[0]).stored_eps == 0 else 1e-3)
    found = verified(memory, training.model)
    assert found.passed, found
    moved_back = loop == "sam" and verdict == BITS  # up to rounding: no bits can be expected
    expected = ROUNDED if moved_back else verdict
    verdicts = {v.verdict for v in found.verdicts.values()}
    assert expected in verdicts
    assert verdicts <= {expected, BITS if expected == ROUNDED else expected}
    ask(memory, training.model, loop)


def ask(memory: Memory, model: nn.Module, loop: str) -> None:
    """Attention is key · query; contributions and the remainder add up, or are refused by name."""
    dual, early = DualForm(model, memory, optimizer=Lion), {"step": slice(0, 7)}
    for name in memory.layers:
        layer = memory.layer(name)
        query, keys = torch.randn(1, layer.in_features), layer.keys.double()
        spotlight = dual.attend(queries=query, layers=name)[name]
        assert torch.allclose(spotlight.weights[0], keys @ query[0].double(), atol=1e-9)
        if memory.layer(name).keep == "keys" or "Lion" in str(memory.settings):
            with pytest.raises(QueryError, match=r"keys alone are kept|cannot be told apart"):
                dual.without(layers=name)
            continue
        if loop != "gan":  # its two networks have no forward pass together
            split = dual.contribute(torch.randn(1, 7), target=2, layer=name)
            size = sum(abs(share) for share in split.shares.values())
            assert abs(split.residual) <= 1e-6 * size, name
        views = dual.without(layers=name, **early), dual.only(layers=name, **early)
        parts, whole = (
            [d.weights(torch.float64) for d in ds]
            for ds in (views, (dual, dual.without(layers=name)))
        )
        for n in memory.parameters:
            off = parts[0][n] + parts[1][n] - whole[0][n] - whole[1][n]
            assert off.abs().max() <= 1e-12 * (1 + sum(w[n].abs().max() for w in [*parts, *whole]))


def compare(memory: Memory, naive: loops.Naive, bound: float) -> None:
    """The rows of every layer are those of a recorder of twenty lines."""
    assert memory.steps == naive.step
    for name, rows in naive.rows.items():
        rows = [row for row in rows if row[0] % memory.every == 0]
        layer = memory.layer(name)
        keys = torch.cat([k for _, k, _ in rows])
        steps = torch.cat([torch.full((len(k),), s) for s, k, _ in rows])
        assert layer.patterns["step"].tolist() == steps.tolist()
        assert (layer.keys - keys).abs().max() <= bound * keys.abs().max()
        if layer.keep == "patterns":
            signals = torch.cat([d for _, _, d in rows])
            off = (layer.error_signals - signals).abs().amax(1)
            assert (off <= bound * signals.abs().amax(1)).all()
