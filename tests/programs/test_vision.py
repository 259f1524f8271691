"""pytorch/examples: mnist, vae, dcgan."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.programs.proving import certified, recorded
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Adadelta, Adam
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset

import dualform


class Net(nn.Module):
    """Two convolutions, two linear layers, and log-probabilities."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 4, 3), nn.Conv2d(4, 6, 3)
        self.dropout1, self.dropout2 = nn.Dropout(0.25), nn.Dropout(0.5)
        self.fc1, self.fc2 = nn.Linear(6 * 4 * 4, 12), nn.Linear(12, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.conv2(F.relu(self.conv1(x))))
        x = torch.flatten(self.dropout1(F.max_pool2d(x, 2)), 1)
        return F.log_softmax(self.fc2(self.dropout2(F.relu(self.fc1(x)))), dim=1)


class Mnist:
    """Adadelta, its rate lowered after every epoch; a test after every epoch."""

    def __init__(self) -> None:
        self.images, self.labels = torch.rand(40, 1, 12, 12), torch.randint(10, (40,))
        self.model = Net()

    def train(self) -> None:
        data = TensorDataset(self.images, self.labels)
        loader = DataLoader(data, batch_size=8, shuffle=True)
        optimizer = Adadelta(self.model.parameters(), lr=1.0)
        scheduler = StepLR(optimizer, step_size=1, gamma=0.7)
        for _ in range(3):
            self.model.train()
            for images, labels in loader:
                optimizer.zero_grad()
                F.nll_loss(self.model(images), labels).backward()
                optimizer.step()
            self.test()
            scheduler.step()

    def test(self) -> float:
        self.model.eval()
        with torch.no_grad():
            return float(F.nll_loss(self.model(self.images), self.labels))


def test_mnist(tmp_path: Path) -> None:
    program, memory = recorded(Mnist, tmp_path / "run")
    dual = certified(program.model, memory, program.images[:4], steps=15, values=["conv*"])
    assert memory.layers == ("fc1", "fc2")
    assert memory.layer("fc1").rows == 3 * 40
    split = dual.contribute(program.images[:1], target=3, layer="fc2")
    assert abs(split.residual) <= 1e-6 * sum(abs(share) for share in split.shares.values())


class Autoencoder(nn.Module):
    """It draws noise in every forward pass, in evaluations as well, and returns three tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc21, self.fc22 = nn.Linear(20, 12), nn.Linear(12, 3), nn.Linear(12, 3)
        self.fc3, self.fc4 = nn.Linear(3, 12), nn.Linear(12, 20)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h = F.relu(self.fc1(x.view(-1, 20)))
        mu, logvar = self.fc21(h), self.fc22(h)
        z = mu + torch.randn_like(mu) * torch.exp(0.5 * logvar)
        return torch.sigmoid(self.fc4(F.relu(self.fc3(z)))), mu, logvar


class Vae:
    def __init__(self) -> None:
        self.images = torch.rand(32, 1, 4, 5)
        self.model = Autoencoder()

    def train(self) -> None:
        loader = DataLoader(TensorDataset(self.images), batch_size=8, shuffle=True)
        optimizer = Adam(self.model.parameters(), lr=1e-2)
        for _ in range(4):
            self.model.train()
            for (images,) in loader:
                optimizer.zero_grad()
                self.loss(images).backward()
                optimizer.step()
            self.model.eval()
            with torch.no_grad():
                self.loss(self.images)

    def loss(self, images: Tensor) -> Tensor:
        again, mu, logvar = self.model(images)
        apart = F.binary_cross_entropy(again, images.view(-1, 20), reduction="sum")
        return apart - 0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp())


def test_vae(tmp_path: Path) -> None:
    program, memory = recorded(Vae, tmp_path / "run")
    dual = certified(program.model, memory, steps=16)
    assert dual.attend(program.images[:3])["fc4"].weights.shape == (3, 4 * 32)


def test_outputs_of_a_vae_are_compared_under_the_same_noise(tmp_path: Path) -> None:
    program, memory = recorded(Vae, tmp_path / "run")
    dual, then = dualform.DualForm(program.model, memory), torch.get_rng_state()
    assert dual.verify(program.images[:3]).passed
    assert torch.equal(torch.get_rng_state(), then)


class Generator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.main = nn.Sequential(
            nn.ConvTranspose2d(5, 8, 4, bias=False),
            nn.BatchNorm2d(8),
            nn.ReLU(inplace=True),
            nn.ConvTranspose2d(8, 1, 4, 2, 1, bias=False),
            nn.Tanh(),
        )

    def forward(self, noise: Tensor) -> Tensor:
        return self.main(noise)


class Discriminator(nn.Module):
    """As dcgan's, with a linear layer at its end."""

    def __init__(self) -> None:
        super().__init__()
        self.main = nn.Sequential(
            nn.Conv2d(1, 6, 4, 2, 1, bias=False),
            nn.LeakyReLU(0.2, inplace=True),
            nn.Conv2d(6, 8, 4, 2, 1, bias=False),
            nn.BatchNorm2d(8),
            nn.LeakyReLU(0.2, inplace=True),
            nn.Flatten(),
            nn.Linear(8 * 2 * 2, 1),
            nn.Sigmoid(),
        )

    def forward(self, images: Tensor) -> Tensor:
        return self.main(images).view(-1, 1).squeeze(1)


class Dcgan:
    """Two models and their optimizers, in turn."""

    def __init__(self, which: str) -> None:
        self.generator, self.discriminator = Generator(), Discriminator()
        both = nn.ModuleList([self.generator, self.discriminator])
        self.model: nn.Module = {"discriminator": self.discriminator, "both": both}[which]
        self.images = torch.rand(32, 1, 8, 8) * 2 - 1

    def train(self) -> None:
        loader = DataLoader(TensorDataset(self.images), batch_size=8, shuffle=True)
        settings = {"lr": 2e-4, "betas": (0.5, 0.999)}
        critic = Adam(self.discriminator.parameters(), **settings)
        maker = Adam(self.generator.parameters(), **settings)
        criterion = nn.BCELoss()
        for _ in range(3):
            for (images,) in loader:
                self.discriminator.zero_grad()
                label = torch.ones(len(images))
                criterion(self.discriminator(images), label).backward()
                made = self.generator(torch.randn(len(images), 5, 1, 1))
                label.fill_(0)
                criterion(self.discriminator(made.detach()), label).backward()
                critic.step()
                self.generator.zero_grad()
                label.fill_(1)
                criterion(self.discriminator(made), label).backward()
                maker.step()


@pytest.mark.parametrize("which", ["discriminator", "both"])
def test_dcgan(which: str, tmp_path: Path) -> None:
    program, memory = recorded(lambda: Dcgan(which), tmp_path / "run")
    inputs = (program.images[:4],) if which == "discriminator" else ()
    convolutions = ["main.0.weight", "main.2.weight"]
    if which == "both":
        convolutions = ["0.main.0.weight", "0.main.3.weight", "1.main.0.weight", "1.main.2.weight"]
    certified(program.model, memory, *inputs, steps=12, values=convolutions)
    head = memory.layers[-1]
    assert memory.layer(head).rows == 12 * 2 * 8  # what only the generator used is not its own
    query = torch.randn(1, 32)
    dual = certified(program.model, memory, steps=12, values=convolutions)
    weights = dual.attend(queries=query, layers=head)[head].weights
    assert weights.shape == (1, memory.layer(head).rows)
