"""Every loop in every mode: training is untouched, and the memory is what a naive recorder keeps."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from dualform.memory import Memory
from dualform.recording import record

_spec = importlib.util.spec_from_file_location("loops", Path(__file__).parent / "loops.py")
assert _spec is not None
assert _spec.loader is not None
loops = sys.modules.setdefault("loops", importlib.util.module_from_spec(_spec))
_spec.loader.exec_module(loops)


class Lion(Optimizer):
    """A rule that dualform does not know: the sign of a mean."""

    def __init__(
        self, params: Any, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.99)
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            b1, b2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["m"] = torch.zeros_like(p)
                m = state["m"]
                p.add_((m * b1 + p.grad * (1 - b1)).sign(), alpha=-group["lr"])
                m.mul_(b2).add_(p.grad, alpha=1 - b2)
        return loss


SGD = (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9})
MODES: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {
    "float32": (*SGD, {}),
    "float16": (*SGD, {"dtype": "float16"}),
    "keys": (*SGD, {"keep": "keys"}),
    "every=3": (*SGD, {"every": 3}),
    "AdamW": (torch.optim.AdamW, {"lr": 0.01}, {}),
    "unknown rule": (Lion, {"lr": 0.003}, {}),
}


def make(loop: str, kind: Any, settings: dict[str, Any]) -> Any:
    torch.manual_seed(3)
    if loop == "gan":
        model = nn.Module()
        model.generator = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 7))
        model.critic = nn.Sequential(nn.Linear(7, 8), nn.Tanh(), nn.Linear(8, 1))
        parts = [model.generator, model.critic]
    else:
        model = nn.Sequential(
            nn.Linear(7, 9), nn.Tanh(), nn.Linear(9, 8), nn.Tanh(), nn.Linear(8, 4)
        )
        parts = [model[0], model[2:]] if loop == "two_in_turn" else [model]
    optimizers = [kind(part.parameters(), **settings) for part in parts]
    return loops.Training(model, optimizers, remark={"settings": settings})


def run(
    loop: str, kind: Any, settings: dict[str, Any], path: Path | None, options: dict[str, Any]
) -> Any:
    training = make(loop, kind, settings)
    training.naive = loops.Naive(training.model)
    steps = loops.LOOPS[loop](training)
    if path is None:
        for _ in steps:
            training.naive.next()
        return training
    with record(training.model, training.optimizers, path, **options) as recorder:
        training.tag = recorder.tag
        for _ in steps:
            training.naive.next()
        training.recorder = recorder
    return training


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("loop", loops.LOOPS)
def test_the_memory_is_what_a_naive_recorder_keeps(loop: str, mode: str, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    kind, settings, options = MODES[mode]
    alone = run(loop, kind, settings, None, {})
    training = run(loop, kind, settings, tmp_path / "run", options)
    for name, p in training.model.named_parameters():
        assert torch.equal(p, alone.model.get_parameter(name)), name
    naive, memory = training.naive, Memory.open(tmp_path / "run")
    memory.check()
    assert memory.steps == naive.step
    every = options.get("every", 1)
    for name, rows in naive.rows.items():
        rows = [row for row in rows if row[0] % every == 0]
        layer = memory.layer(name)
        keys = torch.cat([k for _, k, _ in rows])
        steps = torch.cat([torch.full((len(k),), s) for s, k, _ in rows])
        assert layer.patterns["step"].tolist() == steps.tolist()
        exact = options.get("dtype") is None
        bound = 0.0 if exact else 2.0**-10
        assert (layer.keys - keys).abs().max() <= bound * keys.abs().max()
        if options.get("keep") != "keys":
            signals = torch.cat([d for _, _, d in rows])
            off = (layer.error_signals - signals).abs().amax(1)
            assert (off <= bound * signals.abs().amax(1)).all()
