"""What the exactness tests share: a run that keeps its own checkpoints, and a rebuild by hand.

The rebuild is written down twice on purpose. `rebuilt_by_hand` knows nothing of `DualForm`: it
takes initial weights, initial momentum, log and patterns from the memory and adds them up in the
plainest way there is.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from math import sqrt
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import dualform as df
from dualform.learning_rules import coefficients

FLOAT64_BOUND = 1e-12


FLOAT32_ROUNDINGS = 8
"""How many roundings the bound of `float32_bound` allows for where one is the least possible."""


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
    recorder: df.Recorder | None = None

    def loss(self) -> Tensor:
        """The loss of the next batch."""
        return self.loss_of(self.model, self.generator)

    @contextlib.contextmanager
    def recording(self, *optimizers: torch.optim.Optimizer) -> Iterator[df.Recorder]:
        self.kept = {0: self.weights()}
        with df.record(self.model, optimizers, self.path, **self.options) as self.recorder:
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


def rebuilt_by_hand(memory: df.Memory, at: int) -> dict[str, Tensor]:
    """Every parameter after `at` updates, in float64, from W_0, m_0, log and patterns alone."""
    return {name: _parameter_by_hand(memory, name, at) for name in memory.parameters}


def _parameter_by_hand(memory: df.Memory, name: str, at: int) -> Tensor:
    parameter = memory.parameters[name]
    coefficient = coefficients(memory.log(name), at)
    weight = coefficient.initial * memory.initial(name).double()
    momentum = memory.initial_momentum(name)
    if momentum is not None:
        weight = weight + coefficient.momentum * momentum.double()
    for layer in map(memory.layer, parameter.layers):
        of_step = torch.from_numpy(coefficient.per_pattern(layer.patterns["step"]))
        values = layer.error_signals.double() * of_step[:, None]
        if parameter.role == "bias":
            weight[layer.bias_offset : layer.bias_offset + layer.out_features] += values.sum(0)
            continue
        keys = layer.keys.double()
        if layer.kind == "embedding":  # the key written out: a one at the token's place
            keys = F.one_hot(layer.keys[:, 0], layer.in_features).double()
        wrote = values.T @ keys if layer.kind == "linear" else keys.T @ values
        weight[layer.offset : layer.offset + len(wrote)] += wrote
    for step, gradient in memory.step_gradients(name):
        if step < at:
            weight = weight + coefficient.steps[step] * gradient.double()
    return weight


def relative_difference(one: Tensor, other: Tensor) -> float:
    """max |one - other| / max |other|."""
    if not one.numel():
        return 0.0
    off = float((one.double() - other.double()).abs().max())
    return off / max(float(other.abs().max()), 1e-30) if off else off


def assert_rebuilds(run: Run, memory: df.Memory) -> None:
    """Both rebuilds meet the checkpoints of the run, at the end and at earlier steps."""
    last = len(run.kept) - 1
    assert memory.steps == last
    assert memory.exact
    for at in sorted({0, 1, last // 3, last // 2 + 1, last - 1, last}):
        by_hand = rebuilt_by_hand(memory, at)
        by_dual_form = df.DualForm(run.model, memory).at(at).weights(dtype=torch.float64)
        for name, checkpoint in run.kept[at].items():
            bound = FLOAT64_BOUND
            if run.dtype != torch.float64:
                eps = max(memory.parameters[name].eps, torch.finfo(run.dtype).eps)
                bound = run.float32_bound(name, at, eps)
            for rebuilt in (by_hand, by_dual_form):
                off = relative_difference(rebuilt[name], checkpoint)
                assert off <= bound, f"{name} after {at} updates: {off:.2e}, bound {bound:.2e}"


def reopened_without_snapshots(path: Path) -> df.Memory:
    """The memory at a path, once its weight snapshots are gone."""
    shutil.rmtree(path / "snapshots", ignore_errors=True)
    memory = df.Memory.open(path)
    assert memory.snapshot_steps == ()
    return memory


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
def certify() -> Callable[..., df.Memory]:
    """Assert that a run can be rebuilt from its memory, snapshots deleted; give the memory.

    Unless told otherwise, the certificate of `verify` has to pass as well: no false alarms.
    """

    def check(run: Run, *, verify: bool = True) -> df.Memory:
        memory = reopened_without_snapshots(run.path)
        memory.check()
        assert_rebuilds(run, memory)
        if verify:
            verification = df.DualForm(run.model, memory).verify()
            assert verification.passed, repr(verification)
        return memory

    return check


@pytest.fixture
def by_hand() -> Callable[[df.Memory, int], dict[str, Tensor]]:
    return rebuilt_by_hand


@pytest.fixture
def off_by() -> Callable[[Tensor, Tensor], float]:
    return relative_difference
