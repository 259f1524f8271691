"""A training run that keeps its own accounts: what patterns and initial state are in the weights.

The ledger sees keys and error signals with hooks of its own, and carries both parts forward by the
rule as textbooks write it. What is left of the network when they are taken away is the remainder.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from tests.attention.rules import Rule, adam, sgd
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, AdamW, Optimizer

import dualform

BATCH = 6
LAYERS = ("0", "2")
RULES: dict[str, tuple[Callable[[nn.Module], Optimizer], Rule, str]] = {
    "SGD": (
        lambda net: SGD(net.parameters(), lr=0.1, momentum=0.8, weight_decay=0.03),
        sgd(0.1, 0.8, 0.03),
        "momentum_buffer",
    ),
    "AdamW": (
        lambda net: AdamW(net.parameters(), lr=4e-3, weight_decay=0.1),
        adam(4e-3, 0.9, 0.999, 0.1, coupled=False, amsgrad=False),
        "exp_avg",
    ),
}
"""How an optimizer is made, its rule, and what it calls its momentum."""

Part = dict[str, tuple[Tensor, Tensor]]
"""A share of the weights and of the momentum, of every parameter."""


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3)).double()


class Ledger:
    """Initial part and patterns' part of every parameter, carried forward."""

    def __init__(self, model: nn.Module, rule: Rule) -> None:
        self.model, self.rule, self.rows = model, rule, dict[str, tuple[Tensor, Tensor]]()
        first = self.copy()
        self.initial: Part = {n: (w, torch.zeros_like(w)) for n, w in first.items()}
        self.patterns: Part = {n: (torch.zeros_like(w),) * 2 for n, w in first.items()}
        self.weights = [first]
        for name in LAYERS:
            model.get_submodule(name).register_forward_hook(self._see(name))

    def _see(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, given: Any, output: Tensor) -> None:
            if output.requires_grad:
                key = given[0].detach().clone()
                output.register_hook(lambda d: self.rows.update({name: (key, d.clone())}))

        return hook

    def copy(self) -> dict[str, Tensor]:
        return {n: p.detach().clone() for n, p in self.model.named_parameters()}

    def moved(self, optimizer: Optimizer, unknown: tuple[str, ...] = ()) -> None:
        """An update; of parameters whose names begin so, no pattern is known to have made it."""
        for name, p in self.model.named_parameters():
            layer, role = name.split(".")
            key, signal = self.rows[layer]
            own = signal.T @ key if role == "weight" else signal.sum(0)
            nothing, state = torch.zeros_like(own), optimizer.state[p]
            known = nothing if name.startswith(unknown) else own
            self.initial[name] = self.rule(self.initial[name], nothing, state, {})
            self.patterns[name] = self.rule(self.patterns[name], known, state, {})
        self.weights.append(self.copy())

    def forget_momentum(self) -> None:
        """Another optimizer takes over: what the last one remembered is gone."""
        for part in (self.initial, self.patterns):
            part.update({name: (W, torch.zeros_like(m)) for name, (W, m) in part.items()})

    def mark(self) -> tuple[Part, Part, dict[str, Tensor]]:
        """Where the parts are now."""
        return dict(self.initial), dict(self.patterns), self.copy()

    def go_back(self, mark: tuple[Part, Part, dict[str, Tensor]]) -> None:
        """The state at a mark was restored: so it is after as many updates as there were."""
        self.initial, self.patterns, self.weights[-1] = dict(mark[0]), dict(mark[1]), mark[2]

    def output(self, part: Part, x: Tensor, target: int, weights: dict[str, Tensor]) -> float:
        """What a part gives one output of the network with these weights."""
        hidden = torch.tanh(x @ weights["0.weight"].T + weights["0.bias"])[0]
        return float(part["2.weight"][0][target] @ hidden + part["2.bias"][0][target])


class Training:
    """A network, its optimizer and its batches; the ledger knows what patterns explain of it."""

    def __init__(self, path: Path, rule: str = "SGD", **options: Any) -> None:
        torch.manual_seed(0)
        torch.set_num_threads(1)
        self.make, way, self.momentum = RULES[rule]
        self.model = network()
        self.optimizer = self.make(self.model)
        self.path, self.options = path, options
        self.ledger, self._batches = Ledger(self.model, way), batches()

    def recording(self) -> dualform.Recorder:
        self.recorder = dualform.record(self.model, self.path, **self.options)
        return self.recorder

    def backward(self) -> None:
        self.optimizer.zero_grad()
        x, y = next(self._batches)
        self.recorder.tag(label=y)
        F.cross_entropy(self.model(x), y).backward()

    def step(self, unknown: tuple[str, ...] = ()) -> None:
        self.backward()
        self.optimizer.step()
        self.ledger.moved(self.optimizer, unknown)

    @property
    def dual(self) -> dualform.DualForm:
        return dualform.DualForm(self.model, self.path)


def batches() -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(3)
    while True:
        x = torch.randn(BATCH, 5, generator=generator, dtype=torch.float64)
        yield x, torch.randint(0, 3, (BATCH,), generator=generator)
