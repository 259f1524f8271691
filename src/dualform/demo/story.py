"""The demo's main job, told in chapters: record, certify, look, take away, go back in time.

Written as a user would write it, with public names only. The same seed gives the same numbers, up
to rounding.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dualform
from dualform.demo.chapters import (
    Attended,
    Certified,
    Chapter,
    Digit,
    LayerAttention,
    Masked,
    Moment,
    Recorded,
    TimeTravel,
    Without,
)

TRAINED_ON = 1300
"""The first 1,300 digits train the network; the last 497, by other writers, test it."""
BATCH = 32
LEARNING_RATE, MOMENTUM, WEIGHT_DECAY = 0.05, 0.9, 1e-3
CLIP = 1.0
SHOWN = 8
"""How many of the training digits a layer attended to most are kept for the screen."""

Progress = Callable[[str, int, int], None]
"""Called with (what, done, total)."""


def network() -> nn.Module:
    """The demo's architecture: 64-128-64-10, freshly initialised.

    Example:
        >>> from dualform.demo import network
        >>> sum(p.numel() for p in network().parameters())
        17226
    """
    return nn.Sequential(
        OrderedDict(
            fc1=nn.Linear(64, 128),
            relu1=nn.ReLU(),
            fc2=nn.Linear(128, 64),
            relu2=nn.ReLU(),
            fc3=nn.Linear(64, 10),
        )
    )


def tell(
    path: Path,
    *,
    seed: int = 0,
    steps: int = 1000,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> Iterator[Chapter]:
    """Record a small digit classifier into `path` and look into it, chapter by chapter.

    Example:
        >>> from pathlib import Path
        >>> from dualform.demo import tell
        >>> for chapter in tell(Path("runs/demo")):     # doctest: +SKIP
        ...     chapter.to_dict()
    """
    if steps < 1:
        raise dualform.DualFormError(f"--steps {steps} was given; expected at least one step")
    with _reproducible():
        images, labels = _digits()
        job = _Job(images, labels, path, seed, steps, overwrite, progress or (lambda *_: None))
        yield from job.chapters()


def _digits() -> tuple[Tensor, Tensor]:
    """scikit-learn's bundled 8×8 digits, grey levels from 0 to 1."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise dualform.DualFormError(
            "the demo trains on the digits that come with scikit-learn, which is not installed. "
            'Install it with: pip install "dualform[demo]"'
        ) from error
    digits = load_digits()
    return torch.tensor(digits.data / 16).float(), torch.tensor(digits.target)


@contextmanager
def _reproducible() -> Iterator[None]:
    """One thread, so that sums are added in one order; threads and random state back afterwards."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        torch.set_num_threads(threads)


class _Trained(NamedTuple):
    model: nn.Module
    clipped: int
    checkpoints: dict[int, dict[str, Tensor]]


class _Job:
    """The data, the settings, and one method per chapter."""

    def __init__(
        self,
        images: Tensor,
        labels: Tensor,
        path: Path,
        seed: int,
        steps: int,
        overwrite: bool,
        progress: Progress,
    ) -> None:
        self.images, self.labels = images, labels
        self.test_images, self.test_labels = images[TRAINED_ON:], labels[TRAINED_ON:]
        self.path, self.seed, self.steps = path, seed, steps
        self.overwrite, self.progress = overwrite, progress
        self.moments = sorted({0, *(max(1, steps * n // 100) for n in (2, 10, 30, 60, 100))})

    def chapters(self) -> Iterator[Chapter]:
        trained = self.train("training and recording", self.path)
        dual = dualform.DualForm(trained.model, self.path)
        yield self.recorded(trained, dual)
        yield self.certified(dual)
        examples = self.examples_to_show(trained.model)
        shown: list[Digit] = []
        for example in examples:
            shown.append(self.digit(dual, example, len(shown) + 1))
            yield shown[-1]
        yield self.masked(dual, shown)
        yield self.time_travel(dual, trained.checkpoints)

    def train(self, what: str, path: Path | None, leave_out: int | None = None) -> _Trained:
        """The one training loop: recorded or not, with all digits or without one class."""
        torch.manual_seed(self.seed)
        model = network()
        optimizer = torch.optim.SGD(
            model.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM, weight_decay=WEIGHT_DECAY
        )
        draw = torch.Generator().manual_seed(self.seed)
        clipped, checkpoints = 0, {0: _weights(model)}
        with _recording(model, path, self.overwrite) as tag:
            for step in range(self.steps):
                example = torch.randint(TRAINED_ON, (BATCH,), generator=draw)
                if leave_out is not None:
                    example = example[self.labels[example] != leave_out]
                image, label = self.images[example], self.labels[example]
                tag(example=example, label=label)
                F.cross_entropy(model(image), label).backward()  # type: ignore[no-untyped-call]
                norm = nn.utils.clip_grad_norm_(model.parameters(), CLIP)
                clipped += bool(norm > CLIP)
                optimizer.step()
                optimizer.zero_grad()
                if step + 1 in self.moments:
                    checkpoints[step + 1] = _weights(model)
                self.progress(what, step + 1, self.steps)
        return _Trained(model, clipped, checkpoints)

    def recorded(self, trained: _Trained, dual: dualform.DualForm) -> Recorded:
        plain = self.train("the same training, not recorded", None)
        twin = _weights(plain.model)
        memory = dual.memory
        return Recorded(
            seed=self.seed,
            steps=memory.steps,
            batch=BATCH,
            learning_rate=LEARNING_RATE,
            momentum=MOMENTUM,
            weight_decay=WEIGHT_DECAY,
            clip=CLIP,
            clipped_steps=trained.clipped,
            training_digits=TRAINED_ON,
            test_digits=len(self.test_labels),
            training_accuracy=self.accuracy(trained.model, slice(TRAINED_ON)),
            test_accuracy=self.accuracy(trained.model),
            identical_without_recorder=all(
                torch.equal(twin[name], weight) for name, weight in _weights(trained.model).items()
            ),
            layers={name: memory.layer(name).rows for name in memory.layers},
            megabytes=round(memory.bytes_on_disk / 1e6, 1),
        )

    def certified(self, dual: dualform.DualForm) -> Certified:
        certificate = dual.verify(
            self.test_images, progress=lambda done, total: self.progress("verifying", done, total)
        )
        found = certificate.verdicts
        outputs = [check for check in certificate.checks if check.kind == "outputs"]
        return Certified(
            passed=certificate.passed,
            verdict=certificate.verdict,
            verdicts={name: v.verdict for name, v in found.items()},
            replayed={name: (v.walked, v.ways) for name, v in found.items()},
            residuals={check.parameter: check.residual for check in outputs},
            bounds={check.parameter: check.bound for check in outputs},
        )

    def examples_to_show(self, model: nn.Module) -> list[int]:
        """The surest and the least sure right answer; the two surest mistakes, of two kinds."""
        with torch.no_grad():
            ordered = model(self.test_images).sort(dim=1)
        said = ordered.indices[:, -1]
        margin = ordered.values[:, -1] - ordered.values[:, -2]
        by_margin = margin.argsort(descending=True, stable=True).tolist()
        rights = [i for i in by_margin if said[i] == self.test_labels[i]]
        kinds: dict[tuple[int, int], int] = {}
        for i in by_margin:
            if said[i] != self.test_labels[i]:
                kinds.setdefault((int(self.test_labels[i]), int(said[i])), i)
        chosen = [*rights[:1], *rights[1:][-1:], *list(kinds.values())[:2]]
        return [TRAINED_ON + place for place in chosen]

    def digit(self, dual: dualform.DualForm, example: int, number: int) -> Digit:
        image = self.images[example : example + 1]
        logits = dual(image)[0]
        runner_up, predicted = logits.argsort()[-2:].tolist()
        attention = dual.attend(image)
        contribution = dual.contribute(image, target=predicted)
        return Digit(
            number=number,
            example=example,
            label=int(self.labels[example]),
            predicted=predicted,
            runner_up=runner_up,
            logits=logits.tolist(),
            pixels=_pixels(image),
            attention=[self.look(spotlight) for spotlight in attention.values()],
            initial={k: v for k, v in contribution.shares.items() if k != "patterns"},
            written_by_class=_by_class(contribution.sum_by("label"), "contribution"),
            total=contribution.total,
            primal=contribution.primal,
            residual=contribution.residual,
        )

    def look(self, spotlight: dualform.Spotlight) -> LayerAttention:
        """The training digits a layer attended to most (each by its strongest visit), and sums."""
        visits = spotlight.top(1, by="example").rows()
        visits.sort(key=lambda row: -row["weight"])
        return LayerAttention(
            layer=spotlight.layer,
            top=[
                Attended(
                    row["example"],
                    row["label"],
                    row["step"],
                    row["weight"],
                    _pixels(self.images[row["example"]]),
                )
                for row in visits[:SHOWN]
            ],
            sums=_by_class(spotlight.sum_by("label"), "sum"),
        )

    def masked(self, dual: dualform.DualForm, shown: list[Digit]) -> Masked:
        """One class, a stretch of time, everything; and what retraining without the class gives."""
        dropped, examples = shown[-1].predicted, [digit.example for digit in shown]
        tenth = max(1, self.steps // 10)
        first, last = slice(0, tenth), slice(self.steps - tenth, self.steps)
        views = {
            "as trained": dual,
            f"without(label={dropped})": dual.without(label=dropped),
            f"without(label={dropped}, strength=0.1)": dual.without(label=dropped, strength=0.1),
            f"without(step=slice(0, {tenth}))": dual.without(step=first),
            f"without(step=slice({last.start}, {last.stop}))": dual.without(step=last),
            "without(): nothing learned": dual.without(),
        }
        rows = [self.left(name, view, dropped, examples) for name, view in views.items()]
        again = self.train(f"retraining without the {dropped}s", None, leave_out=dropped)
        retrained = self.left(f"retrained without the {dropped}s", again.model, dropped, examples)
        return Masked(dropped, examples, [digit.label for digit in shown], rows, retrained)

    def left(self, name: str, net: Any, dropped: int, examples: list[int]) -> Without:
        with torch.no_grad():
            right = net(self.test_images).argmax(1) == self.test_labels
            predictions = net(self.images[examples]).argmax(1).tolist()
        is_dropped = self.test_labels == dropped
        return Without(
            name,
            float(right.float().mean()),
            float(right[is_dropped].float().mean()),
            float(right[~is_dropped].float().mean()),
            predictions,
        )

    def time_travel(
        self, dual: dualform.DualForm, kept: dict[int, dict[str, Tensor]]
    ) -> TimeTravel:
        moments, checkpoint = [], network()
        for step, weights in kept.items():
            then = dual.at(step)
            checkpoint.load_state_dict(weights)
            moments.append(
                Moment(
                    step,
                    self.accuracy(then),
                    self.accuracy(checkpoint),
                    _difference(then.weights(torch.float64), weights),
                )
            )
            self.progress("time travel", len(moments), len(kept))
        return TimeTravel(moments)

    def accuracy(self, net: Any, rows: slice = slice(TRAINED_ON, None)) -> float:
        with torch.no_grad():
            right = net(self.images[rows]).argmax(1) == self.labels[rows]
        return float(right.float().mean())


@contextmanager
def _recording(
    model: nn.Module, path: Path | None, overwrite: bool
) -> Iterator[Callable[..., None]]:
    """`dualform.record` where a path is given; where none is, the same loop without it."""
    if path is None:
        yield lambda **columns: None
        return
    with dualform.record(model, path, overwrite=overwrite) as recorder:
        yield recorder.tag


def _weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def _difference(rebuilt: dict[str, Tensor], kept: dict[str, Tensor]) -> float:
    """The largest relative difference over all parameters: max|W − dual| / max|W|."""
    return max(
        float((rebuilt[name] - weight.double()).abs().max() / weight.double().abs().max())
        for name, weight in kept.items()
    )


def _by_class(table: dualform.Table, column: str) -> list[float]:
    found = dict(zip(table["label"].tolist(), table[column].tolist(), strict=True))
    return [float(found.get(label, 0.0)) for label in range(10)]


def _pixels(image: Tensor) -> list[list[float]]:
    grey: list[list[float]] = image.reshape(8, 8).tolist()
    return grey
