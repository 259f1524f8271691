"""Section 5.2: the network trained on MNIST alone. Table 1, and Figures 3a–5, 8, 10a and 11–13.

    python experiments/mnist_single.py --seeds 0 1 2 3 4     Table 1: 5 runs of 5,000 steps
    python experiments/mnist_single.py --preset vanilla      the same without momentum

Expected (authors): 97.3 % after 5,000 steps, 96.5 % after 3,000; the votes of layer 2 are right for
85 % of the inputs that the network has right, those of layer 0 for 75 %.
"""

from __future__ import annotations

from typing import Any

import numpy as np

import dualform
from figures import Example, draw, draw_recurring
from runs import Experiment, Run, main, start
from training import Phase, Report, task, trained
from votes import (
    accuracy,
    error_norms,
    first,
    key_lengths,
    predicted,
    recurring,
    split,
    steps_of_the_strongest,
    table1,
    weighted_votes,
)

STEPS = 5_000
QUICK_STEPS = 600
EARLIER = 0.6
"""Table 1 is also reported after this part of the training: 3,000 steps, as the text says."""

INPUTS = 10_000
QUICK_INPUTS = 1_000
"""Test images asked about, from the first on."""

LOOKED_AT = 200
"""Test images of which the 500 strongest patterns are listed, to see when they were met."""

PARTS = 20
"""Parts of the training, for the same."""


def phases(steps: tuple[int, ...]) -> list[Phase]:
    """One phase: MNIST."""
    return [Phase((task("mnist"),), steps[0])]


def measure(run: Run, report: Report) -> dict[str, Any]:
    """Accuracies, Table 1 twice; of the first seed also the certificate, side notes and figures."""
    mnist, (steps,) = task("mnist"), run.steps
    count = QUICK_INPUTS if run.quick else INPUTS
    images, labels = mnist.test_images[:count], mnist.test_labels[:count]
    model = trained(run.memory, steps)
    dual = dualform.DualForm(model, run.memory)
    parts = 6 if run.draws else 2

    report("Table 1", 0, parts)
    earlier = round(EARLIER * steps)
    before = dual.at(earlier)
    found: dict[str, Any] = {
        "accuracy": {
            "trained network": accuracy(model, images, labels),
            "dual form": accuracy(dual, images, labels),
            f"dual form at step {earlier}": accuracy(before, images, labels),
        },
        "table 1": {str(steps): table1(dual, images, labels)},
    }
    report(f"Table 1 after {earlier} steps", 1, parts)
    found["table 1"][str(earlier)] = table1(before, images, labels)
    if not run.draws:
        return found
    report("certificate", 2, parts)
    found["certificate"] = certificate(dual, images[:256])
    report("attention times the error's size", 3, parts)
    found["weighted by error size"] = weighted(dual, images, labels)
    report("when, and which", 4, parts)
    found["strongest over time"] = over_time(dual, images[:LOOKED_AT], steps)
    found["recurring examples"] = which(dual, images[:LOOKED_AT])
    draw_recurring(run, "single-recurring", found["recurring examples"], {"mnist": mnist})
    report("figures", 5, parts)
    found["examples"] = examples(run, dual, images, labels)
    report("figures", 6, parts)
    return found


def certificate(dual: dualform.DualForm, images: Any) -> dict[str, Any]:
    """Whether the memory explains the network, and how closely, in relative terms."""
    verified = dual.verify(images)
    return {
        "passed": verified.passed,
        "verdict": verified.verdict,
        "largest residual over bound": max(check.severity for check in verified.checks),
    }


def weighted(dual: dualform.DualForm, images: Any, labels: Any) -> dict[str, Any]:
    """The side note of Section 5.2: votes by |α|·‖δ‖ instead of |α|."""
    target, output, attention = labels.numpy(), predicted(dual, images), dual.attend(images)
    return {
        name: split(weighted_votes(dual.memory.layer(name), spotlight.queries), target, output)
        | {"spread of the error's size": spread(dual.memory.layer(name))}
        for name, spotlight in attention.items()
    }


def spread(layer: dualform.LayerMemory) -> float:
    """Percent of all ‖δ‖ that the largest tenth of the patterns has: 10 if all are alike."""
    norms = np.sort(error_norms(layer))
    return round(100 * float(norms[-len(norms) // 10 :].sum() / norms.sum()), 1)


def over_time(dual: dualform.DualForm, images: Any, steps: int) -> dict[str, Any]:
    """When the 500 strongest patterns were met: percent of them in each part of the training."""
    found = {
        name: steps_of_the_strongest(spotlight, 500, steps, PARTS)
        for name, spotlight in dual.attend(images).items()
    }
    return {
        "steps": steps,
        "parts": PARTS,
        "percent of the strongest": found,
        "in the last fifth": {name: round(sum(p[-PARTS // 5 :]), 2) for name, p in found.items()},
        "mean length of keys": {name: lengths(dual.memory.layer(name), steps) for name in found},
    }


def lengths(layer: dualform.LayerMemory, steps: int) -> list[float]:
    """The mean ‖key‖ of each part of the training, relative to that of all of it."""
    norms, part = key_lengths(layer), layer.patterns["step"] * PARTS // steps
    means = np.bincount(part, norms, PARTS) / np.bincount(part, minlength=PARTS)
    return [round(float(mean), 3) for mean in means / norms.mean()]


def which(dual: dualform.DualForm, images: Any) -> dict[str, Any]:
    """The training examples that recur among the strongest, and how long their keys are."""
    found = {name: recurring(spotlight) for name, spotlight in dual.attend(images).items()}
    for name, listed in found.items():
        layer = dual.memory.layer(name)
        norms = key_lengths(layer)
        for one in listed:
            own = norms[layer.patterns["example"] == one["example"]]
            one["mean length of its keys, relative"] = round(float(own.mean() / norms.mean()), 2)
    return found


def examples(run: Run, dual: dualform.DualForm, images: Any, labels: Any) -> dict[str, Any]:
    """The figures: the first 6 and the first 3 that the network has right."""
    target, output = labels.numpy(), predicted(dual, images)
    chosen = {}
    for name, digit, paper in (("six", 6, "3a, 4, 5, 8"), ("three", 3, "10a, 11, 12, 13")):
        rule = f"the first {digit} of the test set that is classified right"
        place = first((target == digit) & (output == digit), rule)
        chosen[f"single-{name}"] = Example("mnist", place, digit, int(output[place]), rule, paper)
    return draw(run, dual, chosen, {"mnist": task("mnist")})


EXPERIMENT = Experiment("mnist_single", (STEPS,), (QUICK_STEPS,), phases, measure)

if __name__ == "__main__":
    start(lambda: main(EXPERIMENT, __doc__))
