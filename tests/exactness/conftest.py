"""What the exactness tests share: a run that keeps its own checkpoints, and a rebuild by hand.

The rebuild is written down twice on purpose. `rebuilt_by_hand` knows nothing of `DualForm`: it
takes the weights and the momentum that were kept before the first update, log and patterns from the
memory, and adds them up in the plainest way there is.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from math import sqrt
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import dualform
from dualform.certificate.replay import at as weights_at
from dualform.learning_rules import coefficients

FLOAT64_BOUND = 1e-12

FLOAT32_ROUNDINGS = 8
"""How many roundings the bound of `float32_bound` allows for where one is the least possible."""

PATTERNS = ("patterns", "examples")
"""How parameters are kept whose patterns' shares are known."""


@dataclass
class Run:
    """One recorded training run: the model, its losses, and checkpoints kept by the test."""

    model: nn.Module
    loss_of: Callable[[nn.Module, torch.Generator], Tensor]
    path: Path
    dtype: torch.dtype
    options: dict[str, Any] = field(default_factory=dict)
    generator: torch.Generator = field(default_factory=lambda: torch.Generator().manual_seed(7))
    kept: dict[int, dict[str, Tensor]] = field(default_factory=dict)
    recorder: dualform.Recorder | None = None

    def loss(self) -> Tensor:
        """The loss of the next batch."""
        return self.loss_of(self.model, self.generator)

    @contextlib.contextmanager
    def recording(self, *optimizers: torch.optim.Optimizer) -> Iterator[dualform.Recorder]:
        self.kept = {0: self.weights()}
        with dualform.record(self.model, self.path, **self.options) as self.recorder:
            yield self.recorder

    def keep(self) -> None:
        """Keep the weights as they are after one more update."""
        self.kept[len(self.kept)] = self.weights()

    def weights(self) -> dict[str, Tensor]:
        return {name: p.detach().clone() for name, p in self.model.named_parameters()}

    def float32_bound(self, name: str, at: int, eps: float) -> float:
        """Relative to max |W|: what honest arithmetic with this eps may lose in `at` updates.

        Every update rounds the weight once, by eps/2 of its size; √S of those add up like a random
        walk. Every gradient is off by about eps of itself, so the sum by about eps of the path the
        weights have travelled. `FLOAT32_ROUNDINGS` of either are allowed: a gradient is a matrix
        product, its factor κ is measured, and a step of SGD multiplies and adds several times.
        """
        size = float(self.kept[at][name].abs().max())
        moves = (
            float((self.kept[s + 1][name] - self.kept[s][name]).abs().max()) for s in range(at)
        )
        return FLOAT32_ROUNDINGS * eps * (sqrt(at) + sum(moves) / max(size, 1e-30))


def rebuilt_by_hand(
    memory: dualform.Memory, at: int, *, patterns: bool = True
) -> dict[str, Tensor]:
    """Every parameter whose patterns are known after `at` updates, in float64: W_0, m_0, log and
    patterns, added up. The rule is SGD. Without `patterns`: what is left of W_0 and m_0."""
    known = [p.name for p in memory.parameters.values() if p.keep in PATTERNS]
    return {name: _parameter_by_hand(memory, name, at, patterns) for name in known}


def _parameter_by_hand(memory: dualform.Memory, name: str, at: int, patterns: bool) -> Tensor:
    known, path = memory.parameters[name], memory.path_to(name, at)
    coefficient = coefficients(memory.log(name), memory.settings, path, known.dtype)
    weight = coefficient.initial * memory.kept.weights(name, 0).double()
    momentum = memory.kept.state(name, 0).get("momentum_buffer")
    if momentum is not None:
        weight = weight + coefficient.momentum * momentum.double()
    for layer in map(memory.layer, known.layers if patterns else ()):
        of_step = torch.from_numpy(coefficient.per_pattern(layer.patterns["step"]))[:, None]
        rows, role = layer.rows_of(name), "weight" if name == layer.weight else "bias"
        if layer.keep == "examples":
            wrote = (layer.read(role, 0, layer.rows).double() * of_step).sum(0)
            weight[rows] += wrote.view(weight[rows].shape)
            continue
        values = layer.error_signals.double() * of_step
        if role == "bias":
            weight[rows] += values.sum(0)
            continue
        keys = layer.keys.double()
        if layer.kind == "embedding":  # the key written out: a one at the token's place
            keys = F.one_hot(layer.keys[:, 0], layer.in_features).double()
        weight[rows] += values.T @ keys if layer.kind == "linear" else keys.T @ values
    return weight


def relative_difference(one: Tensor, other: Tensor) -> float:
    """max |one - other| / max |other|."""
    if not one.numel():
        return 0.0
    off = float((one.double() - other.double()).abs().max())
    return off / max(float(other.abs().max()), 1e-30) if off else off


def coarsest(memory: dualform.Memory, name: str) -> float:
    """The eps of the coarsest dtype that had a part in a parameter's gradients."""
    known = memory.parameters[name]
    uses = [memory.layer(layer).uses for layer in known.layers]
    dtypes = {known.dtype, *(use.dtype_of(i) for use in uses for i in range(len(use)))}
    return max(torch.finfo(dtype).eps for dtype in dtypes)


def assert_rebuilds(run: Run, memory: dualform.Memory) -> None:
    """The rebuild by hand meets the run's checkpoints up to rounding, at the end and before it.

    So does what `DualForm` calls the initial part and the remainder: patterns explain the rest.
    """
    last = len(run.kept) - 1
    assert memory.steps == last
    for at in sorted({0, 1, last // 3, last // 2 + 1, last - 1, last}):
        by_hand, initial = (rebuilt_by_hand(memory, at, patterns=p) for p in (True, False))
        view = dualform.DualForm(run.model, memory).at(at)
        nothing = without_everything(view) if by_hand else {}
        for name, rebuilt in by_hand.items():
            checkpoint, bound = run.kept[at][name], FLOAT64_BOUND
            if run.dtype != torch.float64:
                bound = run.float32_bound(name, at, coarsest(memory, name))
            remainder = nothing[name] - initial[name] if nothing else torch.zeros(())
            for found in (rebuilt, checkpoint + remainder):
                off = relative_difference(found, checkpoint)
                assert off <= bound, f"{name} after {at} updates: {off:.2e}, bound {bound:.2e}"


def without_everything(view: dualform.DualForm) -> dict[str, Tensor]:
    """Initial part and remainder; nothing where a parameter kept as values cannot be rebuilt."""
    if all(known.keep in PATTERNS for known in view.memory.parameters.values()):
        return view.without().weights(torch.float64)
    try:
        return view.without().weights(torch.float64)
    except dualform.QueryError:
        return {}


def assert_the_very_weights(run: Run, certificate: dualform.Verification) -> None:
    """What is certified *bit for bit* is given as training had it after every single update."""
    memory = dualform.Memory.open(run.path)
    for name, verdict in certificate.verdicts.items():
        if verdict.verdict == "bit for bit" and not verdict.why:
            for at, checkpoint in run.kept.items():
                assert torch.equal(weights_at(memory, name, at), checkpoint[name]), (name, at)


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def new_run(tmp_path: Path) -> Callable[..., Run]:
    """Make a `Run` recorded into the test's own directory."""

    def make(model: nn.Module, loss_of: Any, dtype: torch.dtype, **options: Any) -> Run:
        return Run(model, loss_of, tmp_path / "run", dtype, options)

    return make


@pytest.fixture
def certify() -> Callable[..., dualform.Memory]:
    """Assert that a run can be rebuilt from its memory; give the memory.

    Unless told otherwise, the certificate of `verify` has to pass as well (no false alarms), and
    `verdict`, if it is given, is that of every parameter that has patterns.
    """

    def check(run: Run, *, verify: bool = True, verdict: str = "") -> dualform.Memory:
        memory = dualform.Memory.open(run.path)
        memory.check()
        assert_rebuilds(run, memory)
        if verify:
            certificate = dualform.DualForm(run.model, memory).verify(every_step=True)
            assert certificate.passed, repr(certificate)
            assert_the_very_weights(run, certificate)
            for name, found in certificate.verdicts.items():
                if verdict and memory.parameters[name].keep == "patterns":
                    assert found.verdict == verdict, (name, found)
        return memory

    return check


@pytest.fixture
def by_hand() -> Callable[..., dict[str, Tensor]]:
    return rebuilt_by_hand


@pytest.fixture
def off_by() -> Callable[[Tensor, Tensor], float]:
    return relative_difference
