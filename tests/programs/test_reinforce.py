"""pytorch/examples: reinforce, whose policy is asked once for every step of an episode."""

from __future__ import annotations

from collections import deque
from pathlib import Path

import torch
from tests.programs.proving import certified, recorded
from torch import Tensor, nn
from torch.distributions import Categorical
from torch.nn import functional as F
from torch.optim import Adam


class Policy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.affine1, self.affine2 = nn.Linear(4, 12), nn.Linear(12, 2)
        self.dropout = nn.Dropout(0.6)
        self.saved_log_probs: list[Tensor] = []
        self.rewards: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        return F.softmax(self.affine2(F.relu(self.dropout(self.affine1(x)))), dim=1)


class Cart:
    """A pole on a cart in four lines: it falls, unless it is pushed the right way."""

    def reset(self) -> Tensor:
        self.state = (torch.rand(4) - 0.5) * 0.1
        return self.state

    def step(self, action: int) -> tuple[Tensor, float, bool]:
        push = torch.tensor([0.0, 0.2, 0.0, -0.3]) * (2 * action - 1)
        self.state = self.state + 0.2 * self.state.roll(-1) * torch.tensor([1.0, 0, 1, 0]) + push
        return self.state, 1.0, bool(self.state.abs().max() > 0.7)


class Reinforce:
    def __init__(self) -> None:
        self.model, self.environment = Policy(), Cart()
        self.lengths: list[int] = []
        self.states: list[Tensor] = []

    def train(self) -> None:
        self.optimizer = Adam(self.model.parameters(), lr=1e-2)
        for _ in range(8):
            state = self.environment.reset()
            for _ in range(10):
                state, reward, is_over = self.environment.step(self.action(state))
                self.model.rewards.append(reward)
                if is_over:
                    break
            self.lengths.append(len(self.model.rewards))
            self.finish_episode()

    def action(self, state: Tensor) -> int:
        self.states.append(state)
        chances = Categorical(self.model(state.unsqueeze(0)))
        action = chances.sample()
        self.model.saved_log_probs.append(chances.log_prob(action))
        return int(action)

    def finish_episode(self) -> None:
        total, returns = 0.0, deque[float]()
        for reward in self.model.rewards[::-1]:
            total = reward + 0.99 * total
            returns.appendleft(total)
        wanted = torch.tensor(list(returns))
        wanted = (wanted - wanted.mean()) / (wanted.std(correction=0) + 1e-6)
        pairs = zip(self.model.saved_log_probs, wanted, strict=True)
        self.optimizer.zero_grad()
        torch.cat([-chance * share for chance, share in pairs]).sum().backward()
        self.optimizer.step()
        self.model.rewards.clear()
        self.model.saved_log_probs.clear()


def test_reinforce(tmp_path: Path) -> None:
    program, memory = recorded(Reinforce, tmp_path / "run")
    dual = certified(program.model, memory, torch.randn(1, 4), steps=8)
    patterns = memory.layer("affine1").patterns
    assert [int((patterns["step"] == s).sum()) for s in range(8)] == program.lengths
    moments = torch.tensor([sum(program.lengths[:s]) for s in patterns["step"]])
    moments += torch.tensor(patterns["call"])  # `call` counts the moments of an episode
    assert torch.equal(memory.layer("affine1").keys, torch.stack(program.states)[moments])
    assert dual.attend(torch.randn(1, 4))["affine1"].weights.shape == (1, sum(program.lengths))
