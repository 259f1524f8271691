"""The paper's pictures of single test examples: drawn by `dualform.charts`, kept as SVG and PNG.

For each example: the input; the 500 strongest attention weights of every class and the total of
every class, layer by layer; and the three training images that each layer looks at most. Examples
are chosen by a rule, never by hand: the first of the test set of which something is true.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import dualform
from dualform import charts
from runs import Run
from training import CLASSES, LAYERS, Task
from votes import strongest_examples, totals

NAMES: dict[Any, str] = {"mnist": "MNIST", "fashion": "Fashion-MNIST"} | {
    (task, label): name for task, names in CLASSES.items() for label, name in enumerate(names)
}
"""What figures call tasks and classes."""

PNG_SCALE = 1.5


class Example(NamedTuple):
    """A test image: where it is, what it shows, what the network says, and how it was chosen."""

    task: str
    place: int
    label: int
    output: int
    rule: str
    figures: str
    """The paper's figures of its example of this kind."""

    @property
    def said(self) -> str:
        """Its class and the network's, in words."""
        name = CLASSES[self.task][self.label]
        return f"{name}, classified {'right' if self.output == self.label else f'as {self.output}'}"


def draw(
    run: Run, dual: dualform.DualForm, chosen: Mapping[str, Example], tasks: Mapping[str, Task]
) -> dict[str, Any]:
    """All figures of some examples of a run, and the numbers in them."""
    pictures = [tasks[one.task].test_pictures[one.place] for one in chosen.values()]
    captions = [f"{NAMES[one.task]}\n{one.said}" for one in chosen.values()]
    prefix = next(iter(chosen)).partition("-")[0]
    save(run, f"{prefix}-inputs", charts.images(pictures, captions, size=84))
    return {name: _draw(run, dual, name, one, tasks) for name, one in chosen.items()}


def _draw(
    run: Run, dual: dualform.DualForm, name: str, one: Example, tasks: Mapping[str, Task]
) -> dict[str, Any]:
    """The three figures of one example."""
    asked = tasks[one.task]
    attention = dual.attend(asked.test_images[one.place : one.place + 1])
    by = ("task", "label") if len(tasks) > 1 else ("label",)
    names = NAMES if len(tasks) > 1 else CLASSES[one.task]
    marks: dict[str, Any] = {
        "predicted": one.output,
        "true": (one.task, one.label) if len(tasks) > 1 else one.label,
    }
    shared: dict[str, Any] = {"by": by, "names": names, "layers": LAYERS} | marks
    if len(tasks) > 1:  # as the paper has them: MNIST first
        shared["groups"] = [(of, label) for of in tasks for label in range(10)]
    save(run, f"{name}-top500", charts.top_per_class(attention, 500, **shared))
    save(run, f"{name}-totals", charts.totals_per_class(attention, **shared))
    images = charts.top_images(
        attention,
        {key: each.pictures for key, each in tasks.items()},
        example=("task", "example"),
        label=by,
        names=names,
        layers=LAYERS,
        asked=asked.test_pictures[one.place],
    )
    save(run, f"{name}-images", images)
    return one._asdict() | {layer: numbers(attention[layer], by) for layer in attention}


def numbers(spotlight: dualform.Spotlight, by: tuple[str, ...]) -> dict[str, Any]:
    """What the figures of one layer show: the favourite classes, and the strongest examples."""
    found = {}
    for name, signed in (("largest totals", False), ("largest signed totals", True)):
        sums, groups = totals(spotlight, *by, signed=signed)
        order = sums[0].argsort()[::-1][:3]
        found[name] = [[*groups[i], round(float(sums[0, i]), 1)] for i in order]
    return found | {
        "strongest examples": [
            {key: row[key] for key in ("task", "example", "label", "step")}
            | {"weight": round(row["weight"], 3)}
            for row in strongest_examples(spotlight, 3)[0]
        ],
    }


def draw_recurring(
    run: Run, name: str, recurring: Mapping[str, list[dict[str, Any]]], tasks: Mapping[str, Task]
) -> None:
    """The training image that is among the three strongest of the most inputs, for each layer."""
    most = {layer: found[0] for layer, found in recurring.items()}
    pictures = [tasks[one["task"]].pictures[one["example"]] for one in most.values()]
    captions = [
        f"{LAYERS[layer]}\nin the top 3 of\n{one['percent of inputs']:g} % of inputs"
        for layer, one in most.items()
    ]
    save(run, name, charts.images(pictures, captions, size=84))


def save(run: Run, name: str, chart: Any) -> None:
    """Keep a chart as SVG and PNG among the results."""
    folder = Path(run.results) / "figures"
    folder.mkdir(parents=True, exist_ok=True)
    charts.save(chart, folder / f"{name}.svg")
    charts.save(chart, folder / f"{name}.png", scale=PNG_SCALE)
