"""The paper's image classifier, its data, and one recorded training run of it.

A network of two hidden layers is trained on MNIST, on MNIST and Fashion-MNIST together, or on one
after the other. What the authors' code really does differs from the paper's text: SGD has momentum,
gradients are clipped, weights begin as PyTorch has them, and each training set is 40,053 images
(50,000 of the 60,000 by one random choice, then four fifths of those by another).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import dualform
from data import images

BATCH = 128
HIDDEN = 800
LAYERS = {"layer0": "layer 0", "layer1": "layer 1", "layer2": "layer 2"}
"""The linear layers, and what figures call them: as the paper does."""

STORED = "float16"

CLASSES = {
    "mnist": [str(digit) for digit in range(10)],
    "fashion": ["T-shirt", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker",
                "bag", "ankle boot"],
}  # fmt: skip


class Preset(NamedTuple):
    """A learning rule: plain or with momentum, and the norm at which gradients are clipped."""

    lr: float
    momentum: float
    clip: float


PRESETS = {
    "authors": Preset(3e-3, 0.9, 1.0),
    "vanilla": Preset(3e-2, 0.0, 1.0),
    "quick": Preset(1e-2, 0.9, 1.0),
}
"""What the authors' code runs; SGD without momentum at the same effective step; and, for `--quick`,
larger steps, so that a tenth of them is enough to show the same shapes."""


class Task(NamedTuple):
    """A data set: pixels normalised by the training images' mean and standard deviation.

    `examples` are the training images' places in the official file, `pictures` that file's images.
    """

    name: str
    images: Tensor
    labels: Tensor
    examples: Tensor
    test_images: Tensor
    test_labels: Tensor
    pictures: NDArray[np.uint8]
    test_pictures: NDArray[np.uint8]


class Phase(NamedTuple):
    """So many steps on batches drawn from some tasks together."""

    tasks: tuple[Task, ...]
    steps: int


Report = Callable[[str, int, int], None]
"""What a run tells on its way: what it does now, how much of it is done, and of how much."""


@cache
def task(name: str) -> Task:
    """MNIST or Fashion-MNIST with the authors' 40,053 training images."""
    raw = images(name)
    chosen = np.random.RandomState(0x1234).permutation(60_000)[:50_000]
    seen = raw.train_images[chosen].astype(np.float64)
    mean, deviation = seen.mean(), seen.std()
    chosen = chosen[np.random.RandomState(0xC1CAFA52).rand(50_000) > 0.2]

    def normalised(pixels: NDArray[np.uint8]) -> Tensor:
        flat = (pixels.reshape(len(pixels), -1) - mean) / deviation
        return torch.from_numpy(flat.astype(np.float32))

    def numbers(values: NDArray[np.integer]) -> Tensor:
        return torch.from_numpy(values.astype(np.int64))

    return Task(
        name,
        normalised(raw.train_images[chosen]),
        numbers(raw.train_labels[chosen]),
        numbers(chosen),
        normalised(raw.test_images),
        numbers(raw.test_labels),
        raw.train_images,
        raw.test_images,
    )


def network() -> nn.Sequential:
    """784 → 800 → 800 → 10 with ReLUs in between, weights as PyTorch begins them."""
    return nn.Sequential(
        OrderedDict(
            layer0=nn.Linear(784, HIDDEN),
            relu0=nn.ReLU(),
            layer1=nn.Linear(HIDDEN, HIDDEN),
            relu1=nn.ReLU(),
            layer2=nn.Linear(HIDDEN, 10),
        )
    )


def estimate(phases: Sequence[Phase]) -> int:
    """Bytes on disk of the memory to come; images that come again are stored once."""
    steps, seen = sum(phase.steps for phase in phases), {t.name: t for p in phases for t in p.tasks}
    examples = sum(len(each.labels) for each in seen.values())
    sample = next(iter(seen.values())).images[:BATCH]
    found = dualform.estimate(
        network(),
        sample,
        steps=steps,
        optimizer=torch.optim.SGD,
        dtype=STORED,
        examples=min(examples, BATCH * steps),
    )
    return found.bytes_on_disk


def batches(tasks: Sequence[Task], seed: list[int]) -> Iterator[tuple[Tensor, ...]]:
    """Endless batches (images, labels, examples, number of the task), one epoch after another."""
    together = [
        torch.cat([each.images for each in tasks]),
        torch.cat([each.labels for each in tasks]),
        torch.cat([each.examples for each in tasks]),
        torch.cat([torch.full((len(each.labels),), i) for i, each in enumerate(tasks)]),
    ]
    random, order = np.random.default_rng(seed), np.zeros(0, np.int64)
    while True:
        if len(order) < BATCH:
            order = np.concatenate([order, random.permutation(len(together[0]))])
        here, order = torch.from_numpy(order[:BATCH]), order[BATCH:]
        yield tuple(column[here] for column in together)


def train(path: Path, preset: Preset, phases: Sequence[Phase], seed: int, report: Report) -> None:
    """Train the network and record it at `path`; the trained weights are kept beside the memory.

    A run that was trained to its end is not trained again; one that was interrupted begins anew.
    """
    if is_trained(path, sum(phase.steps for phase in phases)):
        return
    torch.manual_seed(seed)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=preset.lr, momentum=preset.momentum)
    done, steps = 0, sum(phase.steps for phase in phases)
    path.parent.mkdir(parents=True, exist_ok=True)
    with dualform.record(model, path, dtype=STORED, overwrite=True) as recorder:
        for place, phase in enumerate(phases):
            names = np.array([each.name for each in phase.tasks])
            stream = batches(phase.tasks, [seed, place])
            for _ in range(phase.steps):
                pixels, labels, examples, of_task = next(stream)
                recorder.tag(example=examples, label=labels, task=names[of_task.numpy()])
                F.cross_entropy(model(pixels), labels).backward()
                nn.utils.clip_grad_norm_(model.parameters(), preset.clip)
                optimizer.step()
                optimizer.zero_grad()
                done += 1
                if done % 10 == 0 or done == steps:
                    report("training", done, steps)
            save_file(dict(model.state_dict()), weights_file(path, done))


def weights_file(path: Path, step: int) -> Path:
    """Where the weights after so many steps are: beside the memory."""
    return path.with_name(f"{path.name}-after-{step}.safetensors")


def is_trained(path: Path, steps: int) -> bool:
    """Whether a memory of a whole run, and its weights, are there."""
    try:
        memory = dualform.Memory.open(path)
    except dualform.MemoryFileError:
        return False
    return memory.closed and memory.steps == steps and weights_file(path, steps).exists()


def trained(path: Path, step: int) -> nn.Sequential:
    """The network as training left it at the end of a phase: not from the memory."""
    model = network()
    model.load_state_dict(load_file(weights_file(path, step)))
    return model
