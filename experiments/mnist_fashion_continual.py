"""Section 5.4: MNIST first, then Fashion-MNIST: forgetting, and what masks undo of it.

    python experiments/mnist_fashion_continual.py --seeds 0 1        3,000 + 3,000 steps

Figures 10d–f and 20–28, and beyond the paper: accuracies with the second task masked, travelled
back, masked in some layers, masked in part, and masked input by input (routed by attention).

Expected (authors): 96.5 % on MNIST after the first task, about 50 % after the second, 96 % again
with the second task masked; 86 % on Fashion-MNIST; routed by attention 96 and 86 %.
"""

from __future__ import annotations

from typing import Any

import numpy as np

import dualform
from figures import Example, draw
from routing import cosines
from runs import Experiment, Run, main, start
from training import CLASSES, Phase, Report, Task, task, trained
from votes import accuracy, first, percent, predicted, totals

STEPS = 3_000, 3_000
QUICK_STEPS = 500, 500

INPUTS = 10_000
QUICK_INPUTS = 1_000
"""Test images of each task, from the first on."""

LOOKED_AT = 200
"""Test images of which the 500 strongest patterns are listed."""

STRENGTHS = [0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0]
IN_LAYERS = [[0], [1], [2], [0, 1], [1, 2], [0, 2]]

ONE, SEVEN, DRESS = 1, 7, 3


def phases(steps: tuple[int, ...]) -> list[Phase]:
    """Two phases: MNIST, then Fashion-MNIST."""
    return [Phase((task("mnist"),), steps[0]), Phase((task("fashion"),), steps[1])]


def masked(dual: dualform.DualForm, strength: float = 1.0, **where: Any) -> dualform.DualForm:
    """Without a part of what Fashion-MNIST wrote. Not retraining.

    Task and label are both named, always: what each class wrote is then summed up once, for every
    mask here. A strength of 0 is the whole network.
    """
    return dual.without(task="fashion", strength=strength, **({"label": list(range(10))} | where))


def measure(run: Run, report: Report) -> dict[str, Any]:
    """Accuracies on both tasks under every mask; of the first seed figures."""
    tasks = {name: _shortened(task(name), run) for name in ("mnist", "fashion")}
    switch, end = run.steps[0], sum(run.steps)
    dual = dualform.DualForm(trained(run.memory, end), run.memory)
    final = masked(dual, strength=0.0)
    parts = 6

    def both(network: Any) -> dict[str, float]:
        return {
            name: accuracy(network, each.test_images, each.test_labels)
            for name, each in tasks.items()
        }

    report("accuracies", 0, parts)
    found: dict[str, Any] = {
        "after the first task, as trained": both(trained(run.memory, switch)),
        "after both, as trained": both(dual.model),
        "after both, dual form": both(final),
    }
    report("masks", 1, parts)
    found["second task masked"] = both(masked(dual))
    found["first task masked"] = both(dual.without(task="mnist", label=list(range(10))))
    found["masked in layers"] = {
        "+".join(map(str, chosen)): both(masked(dual, layers=[f"layer{i}" for i in chosen]))
        for chosen in IN_LAYERS
    }
    found["masked in part"] = {str(s): both(masked(dual, s)) for s in STRENGTHS}
    found["one class of the second task masked"] = both(masked(dual, label=DRESS))
    report("travelling back", 2, parts)
    found["travelled back"] = both(dual.at(switch))
    report("routing", 3, parts)
    found |= routed(dual, final, tasks)
    report("interference", 4, parts)
    found["interference"] = interference(final, tasks["mnist"])
    report("figures", 5, parts)
    if run.draws:
        found["examples"] = draw(run, final, chosen(dual, final, tasks, switch), tasks)
    report("figures", 6, parts)
    return found


def _shortened(full: Task, run: Run) -> Task:
    count = QUICK_INPUTS if run.quick else INPUTS
    return full._replace(test_images=full.test_images[:count], test_labels=full.test_labels[:count])


def routed(
    dual: dualform.DualForm, final: dualform.DualForm, tasks: dict[str, Task]
) -> dict[str, Any]:
    """Each input chooses its own mask: by keys of the first layer, without being told its task."""
    first_layer, without = dual.memory.layer("layer0"), masked(dual)
    accuracies, chosen = {}, {}
    for name, each in tasks.items():  # inputs are layer 0's queries
        alike = cosines(first_layer, each.test_images, "task", ["mnist", "fashion"])
        to_first = alike.argmax(1) == 0
        answer = np.where(
            to_first, predicted(without, each.test_images), predicted(final, each.test_images)
        )
        accuracies[name] = percent(answer == each.test_labels.numpy())
        chosen[name] = percent(to_first == (name == "mnist"))
    return {"routed by attention": accuracies, "routed to their own task": chosen}


def interference(final: dualform.DualForm, mnist: Task) -> dict[str, Any]:
    """Whom MNIST inputs attend to after the second task, in percent, layer by layer."""
    output, target = predicted(final, mnist.test_images), mnist.test_labels.numpy()
    right, few = output == target, mnist.test_images[:LOOKED_AT]
    found = {}
    for layer, spotlight in final.attend(mnist.test_images).items():
        sums, groups = totals(spotlight, "task", "label")
        favourite = np.array(groups, dtype=object)[sums.argmax(1)]
        strongest = final.attend(few, layers=layer)[layer].top(500, sign="absolute")
        found[layer] = {
            "second task among the 500 strongest patterns": percent(strongest["task"] != "mnist"),
            "favourite class is of the second task, if right": percent(
                favourite[right, 0] != "mnist"
            ),
            "favourite class is of the second task, if wrong": percent(
                favourite[~right, 0] != "mnist"
            ),
            "favourite label is the output, if wrong": percent(
                favourite[~right, 1] == output[~right]
            ),
            "favourite label is the target, if wrong": percent(
                favourite[~right, 1] == target[~right]
            ),
        }
    return found


def chosen(
    dual: dualform.DualForm, final: dualform.DualForm, tasks: dict[str, Task], switch: int
) -> dict[str, Example]:
    """A 1 that was right and became a 3; a 7 that stayed right; a dress that is right."""
    found = {}
    target = {name: each.test_labels.numpy() for name, each in tasks.items()}
    output = {name: predicted(final, each.test_images) for name, each in tasks.items()}
    before = predicted(dual.at(switch), tasks["mnist"].test_images) == target["mnist"]
    ones = before & (target["mnist"] == ONE) & (output["mnist"] != ONE)
    became = "was classified right before the second task and is not any more"
    if (ones & (output["mnist"] == DRESS)).any():  # the paper's has become the dresses' class
        ones &= output["mnist"] == DRESS
        became = f"was classified right before the second task and is taken for class {DRESS} now"
    rules = {
        "continual-one": ("mnist", ONE, ones, "10d, 20, 21, 22", became),
        "continual-seven": (
            "mnist",
            SEVEN,
            before & (output["mnist"] == target["mnist"]),
            "10f, 26, 27, 28",
            "is classified right before and after the second task",
        ),
        "continual-dress": (
            "fashion",
            DRESS,
            output["fashion"] == target["fashion"],
            "10e, 23, 24, 25",
            "is classified right",
        ),
    }
    for name, (of, label, condition, figures, which) in rules.items():
        rule = f"the first {CLASSES[of][label]} of the test set that {which}"
        place = first(condition & (target[of] == label), rule)
        found[name] = Example(of, place, label, int(output[of][place]), rule, figures)
    return found


EXPERIMENT = Experiment("mnist_fashion_continual", STEPS, QUICK_STEPS, phases, measure)

if __name__ == "__main__":
    start(lambda: main(EXPERIMENT, __doc__))
