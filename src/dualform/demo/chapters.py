"""What the demo found, chapter by chapter: plain numbers, fit for the screen and for JSON."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Chapter:
    """One part of the story; `to_dict` gives its numbers, fit for `json.dumps`."""

    def to_dict(self) -> dict[str, Any]:
        """The numbers by name, and which chapter it is."""
        return {"chapter": type(self).__name__.lower(), **asdict(self)}


@dataclass(frozen=True)
class Recorded(Chapter):
    """What was trained and what the recorder made of it."""

    seed: int
    steps: int
    batch: int
    learning_rate: float
    momentum: float
    weight_decay: float
    clip: float
    clipped_steps: int
    training_digits: int
    test_digits: int
    training_accuracy: float
    test_accuracy: float
    identical_without_recorder: bool
    layers: dict[str, int]
    megabytes: float


@dataclass(frozen=True)
class Certified(Chapter):
    """Primal = dual: a verdict for every parameter, and outputs by attention against the model's.

    `replayed` says of how many stretches between kept states, and of how many there are.
    """

    passed: bool
    verdict: str
    verdicts: dict[str, str]
    replayed: dict[str, tuple[int, int]]
    residuals: dict[str, float]
    bounds: dict[str, float]


@dataclass(frozen=True)
class Attended(Chapter):
    """A training digit and how much attention its strongest visit got."""

    example: int
    label: int
    step: int
    weight: float
    pixels: list[list[float]]


@dataclass(frozen=True)
class LayerAttention(Chapter):
    """What one layer looked at: single digits, and all patterns summed by class."""

    layer: str
    top: list[Attended]
    sums: list[float]


@dataclass(frozen=True)
class Digit(Chapter):
    """One test digit: what each layer attended to, and what wrote the winning logit."""

    number: int
    example: int
    label: int
    predicted: int
    runner_up: int
    logits: list[float]
    pixels: list[list[float]]
    attention: list[LayerAttention]
    initial: dict[str, float]
    written_by_class: list[float]
    total: float
    primal: float
    residual: float


@dataclass(frozen=True)
class Without(Chapter):
    """One way of leaving something out, and how the network then does on the test digits."""

    name: str
    accuracy: float
    accuracy_on_dropped: float
    accuracy_on_others: float
    predictions: list[int]


@dataclass(frozen=True)
class Masked(Chapter):
    """Parts of the training taken out of the weights, and, to compare, really not trained on."""

    dropped: int
    examples: list[int]
    labels: list[int]
    rows: list[Without]
    retrained: Without


@dataclass(frozen=True)
class Moment(Chapter):
    """The network at one step, rebuilt, against the checkpoint kept there."""

    step: int
    accuracy: float
    checkpoint_accuracy: float
    difference: float


@dataclass(frozen=True)
class TimeTravel(Chapter):
    """The network at earlier steps."""

    moments: list[Moment]
