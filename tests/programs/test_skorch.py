"""skorch: a network fitted like an estimator of scikit-learn, the best weights put back at last."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.programs.proving import (
    alone,
    certified,
    ends_before_other_weights,
    recorded,
    started,
    the_same_weights,
)
from torch import Tensor, nn

import dualform

skorch = pytest.importorskip("skorch")


class Digits(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.output = nn.Linear(6, 10), nn.Linear(10, 3)

    def forward(self, x: Tensor) -> Tensor:
        return torch.softmax(self.output(torch.relu(self.hidden(x))), dim=-1)


class Fit:
    """Held-out labels are the wrong ones, so that the first epoch is the best."""

    def __init__(self, *callbacks: Any) -> None:
        from skorch.callbacks import EarlyStopping
        from skorch.dataset import Dataset
        from skorch.helper import predefined_split

        self.x = np.random.randn(24, 6).astype(np.float32)  # noqa: NPY002
        self.y = self.x[:, :3].argmax(1)
        held_out = Dataset(self.x, (self.y + 1) % 3)
        self.net = skorch.NeuralNetClassifier(
            Digits,
            optimizer=torch.optim.SGD,
            optimizer__momentum=0.9,
            lr=0.1,
            batch_size=8,
            max_epochs=10,
            iterator_train__shuffle=True,
            train_split=predefined_split(held_out),
            callbacks=[*callbacks, EarlyStopping(patience=3, load_best=True)],
            verbose=0,
        )
        self.net.initialize()
        self.model = self.net.module_

    def train(self) -> None:
        self.net.partial_fit(self.x, self.y)


class Recording(skorch.callbacks.Callback):  # type: ignore[misc]
    """Begun with training and closed with it, before or after the best weights are put back."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_begin(self, net: Any, **kwargs: Any) -> None:
        self.recorder_ = dualform.record(net.module_, self.path)
        self.recorder_.start()

    def on_train_end(self, net: Any, **kwargs: Any) -> None:
        self.recorder_.close()


def test_the_best_weights_are_put_back(tmp_path: Path) -> None:
    program, memory = recorded(Fit, tmp_path / "run")
    epochs, best = len(program.net.history), 3
    assert 1 < epochs < 10
    x = torch.from_numpy(program.x[:3])
    ends_before_other_weights(program, memory, x, steps=3 * epochs, best=best)


def test_a_recorder_in_a_callback(tmp_path: Path) -> None:
    plain, _ = alone(Fit)
    program = started(lambda: Fit(("recording", Recording(tmp_path / "run"))))
    program.train()
    the_same_weights(program.model, plain.model)
    memory = dualform.Memory.open(tmp_path / "run")
    steps = 3 * len(program.net.history)
    # This callback comes before the one that puts the best weights back.
    ended = dualform.DualForm(program.model, memory).to_model()
    certified(ended, memory, torch.from_numpy(program.x[:3]), steps=steps)
