"""What each pattern wrote under rules that go entry by entry, against a replay written by hand.

The replay goes forward, in float64, and knows neither the memory's log nor torch's optimizers: only
what the test itself saw of every step (error signals, keys, the factor of clipping, what torch
remembered). A pattern's share of the weights is carried along by each rule as textbooks write it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.attention.rules import Rule, Share, State, adadelta, adagrad, adam, nadam, rmsprop
from torch import Tensor, nn
from torch.nn import functional as F

import dualform

STEPS, BATCH, CLIP = 24, 5, 0.6
LAYERS = ("0", "3")
OPTIM = torch.optim
RULES: dict[str, tuple[Callable[[Any], OPTIM.Optimizer], Rule]] = {
    "AdamW": (
        lambda p: OPTIM.AdamW(p, lr=4e-3, betas=(0.8, 0.99), weight_decay=0.1),
        adam(4e-3, 0.8, 0.99, 0.1, coupled=False, amsgrad=False),
    ),
    "Adam, coupled decay": (
        lambda p: OPTIM.Adam(p, lr=4e-3, weight_decay=0.05),
        adam(4e-3, 0.9, 0.999, 0.05, coupled=True, amsgrad=False),
    ),
    "AMSGrad": (
        lambda p: OPTIM.Adam(p, lr=4e-3, amsgrad=True),
        adam(4e-3, 0.9, 0.999, 0.0, coupled=True, amsgrad=True),
    ),
    "NAdam": (
        lambda p: OPTIM.NAdam(p, lr=4e-3, weight_decay=0.02),
        nadam(4e-3, 0.9, 0.999, 4e-3, 0.02),
    ),
    "RMSprop": (
        lambda p: OPTIM.RMSprop(p, lr=1e-3, momentum=0.7, weight_decay=0.02, centered=True),
        rmsprop(1e-3, 0.7, 0.02, centered=True),
    ),
    "Adagrad": (
        lambda p: OPTIM.Adagrad(p, lr=2e-2, lr_decay=0.05),
        adagrad(2e-2, 0.05),
    ),
    "Adadelta": (
        lambda p: OPTIM.Adadelta(p, lr=0.7, weight_decay=0.02),
        adadelta(0.7, 0.02),
    ),
}


@dataclass
class Seen:
    """What the test itself saw of a run: of every step, of every layer, of every parameter."""

    model: nn.Module
    path: Path
    inputs: Tensor
    first: dict[str, Tensor]
    first_states: dict[str, State]
    rows: list[dict[str, tuple[Tensor, Tensor]]] = field(default_factory=list)
    factors: list[float] = field(default_factory=list)
    states: list[dict[str, State]] = field(default_factory=list)

    @property
    def dual(self) -> dualform.DualForm:
        return dualform.DualForm(self.model, self.path)


def states_of(model: nn.Module, optimizer: OPTIM.Optimizer) -> dict[str, State]:
    named = {name: optimizer.state.get(p, {}) for name, p in model.named_parameters()}
    return {
        name: {key: v.clone() if isinstance(v, Tensor) else v for key, v in state.items()}
        for name, state in named.items()
    }


def train(path: Path, make: Callable[[Any], OPTIM.Optimizer], warm: int) -> Seen:
    torch.set_num_threads(1)
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.LayerNorm(6), nn.Linear(6, 3)).double()
    optimizer = make(model.parameters())
    rows: dict[str, tuple[Tensor, Tensor]] = {}

    def see(name: str) -> Any:
        def hook(module: nn.Module, given: Any, output: Tensor) -> None:
            key = given[0].detach().clone()
            output.register_hook(lambda signal: rows.update({name: (key, signal.clone())}))

        return hook

    handles = [model[int(name)].register_forward_hook(see(name)) for name in LAYERS]

    def step() -> float:
        x, y = torch.randn(BATCH, 4).double(), torch.randint(0, 3, (BATCH,))
        F.cross_entropy(model(x), y).backward()
        norm = float(nn.utils.clip_grad_norm_(model.parameters(), CLIP))
        optimizer.step()
        optimizer.zero_grad()
        return min(1.0, CLIP / (norm + 1e-6))

    for _ in range(warm):
        step()
    first = {name: p.detach().clone() for name, p in model.named_parameters()}
    seen = Seen(model, path, torch.randn(3, 4).double(), first, states_of(model, optimizer))
    with dualform.record(model, path):
        for _ in range(STEPS):
            seen.factors.append(step())
            seen.rows.append(dict(rows))
            seen.states.append(states_of(model, optimizer))
    for handle in handles:
        handle.remove()
    return seen


def carried(seen: Seen, rule: Rule, name: str, share: Share, gradient: Any, at: int) -> Tensor:
    """A share of a parameter after `at` updates; `gradient(s)` is its own gradient at step s."""
    before = seen.first_states[name]
    for s in range(at):
        share = rule(share, seen.factors[s] * gradient(s), seen.states[s][name], before)
        before = seen.states[s][name]
    return share[0]


def initial_part(seen: Seen, rule: Rule, name: str, at: int) -> tuple[Tensor, Tensor]:
    """What is left of W_0, and of what the momentum was."""
    W, state = seen.first[name], seen.first_states[name]
    m = state.get("exp_avg", state.get("momentum_buffer", torch.zeros_like(W)))
    nothing = torch.zeros_like(W)
    return (
        carried(seen, rule, name, (W, nothing), lambda s: nothing, at),
        carried(seen, rule, name, (nothing, m), lambda s: nothing, at),
    )


def wrote(seen: Seen, rule: Rule, layer: str, row: int, at: int) -> tuple[Tensor, Tensor]:
    """What one pattern is in weight and bias of its layer."""
    own, place = divmod(row, BATCH)
    key, signal = (rows[place] for rows in seen.rows[own][layer])
    found = []
    for role, gradient in (("weight", torch.outer(signal, key)), ("bias", signal)):
        nothing = torch.zeros_like(gradient)
        at_step = lambda s, g=gradient, n=nothing: g if s == own else n  # noqa: E731
        share = (nothing, nothing)
        found.append(carried(seen, rule, f"{layer}.{role}", share, at_step, at))
    return found[0], found[1]


@pytest.mark.parametrize(
    ("warm", "at"), [(0, 17), (5, STEPS)], ids=["fresh, an earlier step", "warm"]
)
@pytest.mark.parametrize("name", RULES)
def test_every_share_is_what_the_rule_carries_along_by_hand(
    tmp_path: Path, name: str, warm: int, at: int
) -> None:
    make, rule = RULES[name]
    seen = train(tmp_path / "run", make, warm)
    view = seen.dual.at(at)
    query = view.attend(seen.inputs[:1], layers="3")["3"].queries[0]
    split = view.contribute(seen.inputs[:1], target=1)
    chosen = np.random.default_rng(0).choice(STEPS * BATCH, 8, replace=False)
    for row in (0, at * BATCH - 1, *chosen):
        weight, bias = wrote(seen, rule, "3", int(row), at)
        assert float(split.values[row]) == pytest.approx(
            float(weight[1] @ query + bias[1]), abs=1e-13
        )
    (weight, momentum), (bias, of_bias) = (
        initial_part(seen, rule, f"3.{role}", at) for role in ("weight", "bias")
    )
    assert split.shares["initial weights"] == pytest.approx(float(weight[1] @ query), abs=1e-12)
    assert split.shares["initial bias"] == pytest.approx(float(bias[1]), abs=1e-12)
    remembered = float(momentum[1] @ query + of_bias[1])
    assert split.shares.get("initial momentum", 0.0) == pytest.approx(remembered, abs=1e-12)
    assert abs(split.shares["not explained by patterns"]) <= 1e-12
    assert abs(split.residual) <= 1e-12


@pytest.mark.parametrize("name", RULES)
def test_a_layer_further_down_is_split_along_its_gradient(tmp_path: Path, name: str) -> None:
    make, rule = RULES[name]
    seen = train(tmp_path / "run", make, warm=0)
    split = seen.dual.contribute(seen.inputs[:1], target=2, layer="0")
    hidden = seen.model[0](seen.inputs[:1]).detach().requires_grad_()
    along = torch.autograd.grad(seen.model[1:](hidden)[0, 2], hidden)[0][0]
    for row in (0, 33, STEPS * BATCH - 1):
        weight, bias = wrote(seen, rule, "0", row, STEPS)
        expected = along @ (weight @ seen.inputs[0] + bias)
        assert float(split.values[row]) == pytest.approx(float(expected), abs=1e-13)


@pytest.mark.parametrize("name", RULES)
def test_a_mask_takes_away_what_its_patterns_carry(tmp_path: Path, name: str) -> None:
    make, rule = RULES[name]
    seen = train(tmp_path / "run", make, warm=3)
    rows = np.zeros(STEPS * BATCH, bool)
    rows[[3, 40, 77]] = True
    whole = seen.dual.weights(torch.float64)
    left = seen.dual.without(rows, layers="3").weights(torch.float64)
    parts = [wrote(seen, rule, "3", int(row), STEPS) for row in np.flatnonzero(rows)]
    for place, role in enumerate(("weight", "bias")):
        expected = sum(part[place] for part in parts)
        off = whole[f"3.{role}"] - left[f"3.{role}"] - expected
        assert float(off.abs().max()) <= 1e-13
