"""Lightning: automatic and manual optimization, a recorder in a callback, averaged weights."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.programs.proving import (
    alone,
    certified,
    draws,
    ends_before_other_weights,
    recorded,
    started,
    the_same_weights,
)
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import dualform

lightning = pytest.importorskip("lightning")

pytestmark = [
    # What Lightning says of every small run on a CPU, and what torch says of Lightning.
    pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*number of training batches"),
]


@pytest.fixture(autouse=True)
def quiet() -> None:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


class Classifier(lightning.LightningModule):  # type: ignore[misc,name-defined]
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(7, 9), nn.Tanh(), nn.Linear(9, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)

    def training_step(self, batch: Any, number: int) -> Tensor:
        x, y = batch
        return F.cross_entropy(self(x), y)

    def validation_step(self, batch: Any, number: int) -> None:
        x, y = batch
        self.log("loss", F.cross_entropy(self(x), y))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)]


class ByHand(Classifier):
    """Manual optimization, with an accumulation of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, number: int) -> None:  # type: ignore[override]
        x, y = batch
        optimizer = self.optimizers()
        self.manual_backward(F.cross_entropy(self(x), y) / 2)
        if number % 2:
            self.clip_gradients(optimizer, gradient_clip_val=0.5)
            optimizer.step()
            optimizer.zero_grad()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class Fit:
    """A module, data and what the trainer is told."""

    def __init__(self, kind: type[Classifier], **settings: Any) -> None:
        self.model, self.settings = kind(), settings
        self.x, self.y = torch.randn(32, 7), torch.randint(4, (32,))

    def train(self, *callbacks: Any) -> None:
        loader = DataLoader(TensorDataset(self.x, self.y), batch_size=8, shuffle=True)
        held_out = DataLoader(TensorDataset(self.x[:8], self.y[:8]), batch_size=8)
        own = [make() for make in self.settings.pop("callbacks", [])]
        self.trainer = lightning.Trainer(
            max_epochs=3,
            accelerator="cpu",
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=[*callbacks, *own],
            **self.settings,
        )
        self.trainer.fit(self.model, loader, held_out)


AUTOMATIC = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5}


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_automatic_optimization(precision: str, tmp_path: Path) -> None:
    settings = AUTOMATIC | {"precision": precision}
    program, memory = recorded(lambda: Fit(Classifier, **settings), tmp_path / "run")
    certified(program.model, memory, program.x[:3], steps=6)
    assert memory.layer("layers.0").rows == 3 * 32


def test_manual_optimization(tmp_path: Path) -> None:
    program, memory = recorded(lambda: Fit(ByHand), tmp_path / "run")
    certified(program.model, memory, program.x[:3], steps=6)
    assert memory.layer("layers.0").rows == 3 * 32


class Past(Classifier):
    """Its training step does not go through its own forward: many do not."""

    def training_step(self, batch: Any, number: int) -> Tensor:
        x, y = batch
        return F.cross_entropy(self.layers(x), y)


def test_a_training_step_past_the_modules_own_forward(tmp_path: Path) -> None:
    program, memory = recorded(lambda: Fit(Past), tmp_path / "run")
    certified(program.model, memory, program.x[:3], steps=12)


def test_tags_that_are_never_asked_for_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(dualform.RecordingError, match=r"tags= was never called"):
        recorded(lambda: Fit(Past), tmp_path / "run", tags=lambda x: {"first": x[:, 0]})


class Recording(lightning.Callback):  # type: ignore[misc,name-defined]
    """A recorder begun and closed by a callback, kept where a training step could reach it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_start(self, trainer: Any, module: Any) -> None:
        module.recorder = dualform.record(module, self.path, tags=lambda x: {"first": x[:, 0]})
        module.recorder.start()

    def on_train_end(self, trainer: Any, module: Any) -> None:
        module.recorder.close()

    def on_exception(self, trainer: Any, module: Any, exception: BaseException) -> None:
        module.recorder.close()


def test_a_recorder_in_a_callback(tmp_path: Path) -> None:
    plain, then = alone(lambda: Fit(Classifier, **AUTOMATIC))
    program = started(lambda: Fit(Classifier, **AUTOMATIC))
    program.train(Recording(tmp_path / "run"))
    assert draws() == then
    the_same_weights(program.model, plain.model)
    memory = dualform.Memory.open(tmp_path / "run")
    dual = certified(program.model, memory, program.x[:3], steps=6)
    layer = memory.layer("layers.0")
    assert torch.equal(layer.keys[:, 0], torch.as_tensor(layer.patterns["first"]).float())
    program.model.recorder.close()  # once more is no error
    twin = dual.at(3).to_model()  # the recorder is not copied with the module
    torch.testing.assert_close(twin(program.x), dual.at(3)(program.x))


def test_a_callback_closes_the_memory_when_training_fails(tmp_path: Path) -> None:
    program = started(lambda: Fit(Classifier, **AUTOMATIC))

    class Failing(lightning.Callback):  # type: ignore[misc,name-defined]
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            if trainer.global_step == 4:
                raise ZeroDivisionError("of the user's own")

    with pytest.raises(ZeroDivisionError, match="of the user's own"):
        program.train(Recording(tmp_path / "run"), Failing())
    certified(program.model, dualform.Memory.open(tmp_path / "run"), steps=4)


DECAY = 0.8


def averaged() -> Any:
    return lightning.pytorch.callbacks.EMAWeightAveraging(decay=DECAY)


@pytest.mark.parametrize("kind", [Classifier, ByHand])
def test_an_exponential_average_put_in_at_the_end(kind: type[Classifier], tmp_path: Path) -> None:
    """Averages take the model's place for every validation, and for good when training is over."""
    program, memory = recorded(lambda: Fit(kind, callbacks=[averaged]), tmp_path / "run")
    steps = program.trainer.global_step
    dual = ends_before_other_weights(program, memory, program.x[:3], steps=steps, best=None)
    average = dual.averaged(decay=DECAY).weights()
    for name, weight in program.model.named_parameters():
        torch.testing.assert_close(average[name], weight, rtol=1e-5, atol=1e-6)


def test_stochastic_weight_averaging(tmp_path: Path) -> None:
    """The mean of what the last two epochs began with; a learning rate of its own meanwhile."""

    def averaging() -> Any:
        callback = lightning.pytorch.callbacks.StochasticWeightAveraging
        return callback(swa_lrs=0.05, swa_epoch_start=2, annealing_epochs=1)

    program, memory = recorded(lambda: Fit(Classifier, callbacks=[averaging]), tmp_path / "run")
    dual = ends_before_other_weights(program, memory, program.x[:3], steps=12, best=None)
    begun = [dual.at(step).weights() for step in (4, 8)]
    for name, weight in program.model.named_parameters():
        mean = (begun[0][name] + begun[1][name]) / 2
        torch.testing.assert_close(mean, weight, rtol=1e-5, atol=1e-6)


class Normed(Classifier):
    """After its last epoch the averages are put in, and one more epoch without an update takes the
    running statistics anew."""

    def __init__(self) -> None:
        super().__init__()
        self.layers.insert(1, nn.BatchNorm1d(9))


def test_stochastic_weight_averaging_of_a_batch_norm(tmp_path: Path) -> None:
    def averaging() -> Any:
        callback = lightning.pytorch.callbacks.StochasticWeightAveraging
        return callback(swa_lrs=0.05, swa_epoch_start=2, annealing_epochs=1)

    program, memory = recorded(lambda: Fit(Normed, callbacks=[averaging]), tmp_path / "run")
    ends_before_other_weights(program, memory, program.x[:3], steps=12, best=None)
