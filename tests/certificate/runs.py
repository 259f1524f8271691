"""Training runs to certify: small nets on random data, recorded; every knob that tests turn."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

from dualform.memory import Memory
from dualform.recording import record

EXAMPLES = 256
"""How many different inputs there are: they come again."""


@dataclass
class Run:
    """What a run is, and after `train` what it came to."""

    kind: type[Optimizer] = torch.optim.SGD
    settings: dict[str, Any] = field(default_factory=lambda: {"lr": 0.05, "momentum": 0.9})
    widths: tuple[int, ...] = (20, 24, 24, 6)
    steps: int = 140
    batch: int = 16
    clip: float = 0.0
    spikes: tuple[int, ...] = ()
    autocast: bool = False
    dtype: torch.dtype = torch.float32
    options: dict[str, Any] = field(default_factory=dict)
    edit: Callable[[nn.Module, int], None] = lambda model, step: None
    """Called between the backward pass and the update."""

    def model(self, seed: int = 0) -> nn.Module:
        torch.manual_seed(seed)
        layers: list[nn.Module] = []
        for width, following in zip(self.widths, self.widths[1:], strict=False):
            layers += [nn.Linear(width, following), nn.Tanh()]
        return nn.Sequential(*layers[:-1]).to(self.dtype)

    def batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        generator = torch.Generator().manual_seed(5)
        inputs = torch.randn(EXAMPLES, self.widths[0], generator=generator)
        labels = (
            inputs @ torch.randn(self.widths[0], self.widths[-1], generator=generator)
        ).argmax(1)
        for _ in range(self.steps):
            chosen = torch.randint(0, EXAMPLES, (self.batch,), generator=generator)
            yield inputs[chosen].to(self.dtype), labels[chosen]

    def train(self, path: Path) -> Run:
        """Record the run; `kappa` is what clipping multiplied each step's gradient by."""
        torch.set_num_threads(1)
        self.path, self.trained = path, self.model()
        self.kappa: list[float] = []
        self.weights = [self.state()]
        optimizer = self.kind(self.trained.parameters(), **self.settings)  # type: ignore[call-arg]
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "dualform")
            with record(self.trained, path, **self.options):
                for step, (x, y) in enumerate(self.batches()):
                    with torch.autocast("cpu", torch.bfloat16, enabled=self.autocast):
                        loss = F.cross_entropy(self.trained(x), y)
                    (loss * (50.0 if step in self.spikes else 1.0)).backward()
                    self.edit(self.trained, step)
                    self.kappa.append(self._clip())
                    optimizer.step()
                    optimizer.zero_grad()
                    self.weights.append(self.state())
        return self

    def _clip(self) -> float:
        if not self.clip:
            return 1.0
        norm = nn.utils.clip_grad_norm_(self.trained.parameters(), self.clip)
        return min(1.0, self.clip / (float(norm) + 1e-6))

    def state(self) -> dict[str, Tensor]:
        return {name: p.detach().clone() for name, p in self.trained.named_parameters()}

    @property
    def memory(self) -> Memory:
        return Memory.open(self.path)
