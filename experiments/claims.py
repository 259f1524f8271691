"""What `docs/paper.md` says in words about the runs, each sentence with what makes it true.

Numbers are put on the page by `page.py`; words are not. Every claim here is a passage of the page,
word for word, and a condition on the measured numbers: after new runs, `page.py` names those that
do not hold any more.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

from paper_images import CONTINUAL, JOINT, PAPER_TABLE_1, QUESTIONS, SINGLE
from published import LAYER, TASKS, Measured, mean

Claims = dict[str, bool]


def broken(m: Measured) -> list[str]:
    """The claims that do not hold."""
    return [claim for claim, holds in claims(m).items() if not holds]


def unsaid(m: Measured, page: str) -> list[str]:
    """The claims that are not on the page."""
    plain = " ".join(re.sub(r"<!--.*?-->|[*`]", "", page).split())
    return [claim for claim in claims(m) if claim not in plain]


def claims(m: Measured) -> Claims:
    """Passages of the page, and whether they hold."""
    return _of_all(m) | _of_single(m) | _of_joint(m) | _of_continual(m)


def order(example: dict[str, Any], layer: str) -> list[Any]:
    """The classes with the largest totals: `3` in a single task, `("mnist", 3)` among two."""
    groups = [tuple(one[:-1]) for one in example[layer]["largest totals"]]
    return [group[0] if len(group) == 1 else group for group in groups]


def strongest(example: dict[str, Any], layer: str) -> list[tuple[str, int]]:
    """Task and label of the strongest examples."""
    return [(one["task"], one["label"]) for one in example[layer]["strongest examples"]]


def _of_all(m: Measured) -> Claims:
    joint = {task: of["trained network"] for task, of in m.joint["accuracy"].items()}
    after = m.continual["after both, as trained"]
    ours = m.of(SINGLE)["table 1"]["5000"]["layers"]
    near = []
    for layer, row in PAPER_TABLE_1.items():
        for question, (paper, std) in zip(QUESTIONS, row, strict=True):
            if std:
                near.append(abs(mean(ours[layer][question]) - paper) < 1.2 * std)
    right = [mean(ours[layer]["both, if right"]) for layer in LAYER]
    made = Counter((run["settings"]["experiment"], run["settings"]["preset"]) for run in m.runs)
    names = [experiment.name for experiment in (SINGLE, JOINT, CONTINUAL)]
    return {
        "5 single, 1 joint, 2 continual runs of authors, one of each of vanilla": (
            [made[name, "authors"] for name in names] == [5, 1, 2]
            and [made[name, "vanilla"] for name in names] == [1, 1, 1]
        ),
        "certificate: passed": m.single["certificate"]["passed"],
        "stay one to two points below the paper's 97 / 87": (
            0.5 < 97 - joint["mnist"] < 2.5 and 0.5 < 87 - joint["fashion"] < 2.5
        ),
        "our networks keep a little more of MNIST than the paper's": min(after["mnist"]) > 45,
        "are a point better on Fashion-MNIST": 0.5 < mean(after["fashion"]) - 85 < 1.5,
        "every mean lies within about one standard deviation of the paper's": all(near),
        "Late layers vote better than the first": right[0] < right[1] < right[2],
        "the votes follow its output rather than the target": all(
            mean(ours[layer]["output, if wrong"]) > mean(ours[layer]["target, if wrong"])
            for layer in LAYER
        ),
    }


def _of_single(m: Measured) -> Claims:
    six, three = (m.single["examples"][f"single-{name}"] for name in ("six", "three"))
    time = m.single["strongest over time"]
    last, lengths = time["in the last fifth"], time["mean length of keys"]
    parts = time["percent of the strongest"]
    recurring = m.single["recurring examples"]
    joint = m.joint["recurring examples"]
    most = (recurring["layer1"][0], recurring["layer2"][0])
    same = {of["layer2"][0]["example"] for of in joint.values()} | {one["example"] for one in most}
    among = [label for layer in LAYER for _, label in strongest(three, layer)]
    return {
        "the 6s get most attention in total in layers 1 and 2, yet the single strongest pattern "
        "there is a 0": all(
            order(six, layer)[0] == 6 and strongest(six, layer)[0][1] == 0 for layer in LAYER[1:]
        ),
        "here the 0s get more in total than the 6s": order(six, "layer0")[:2] == [0, 6],
        "the 3s get most in total in every layer, though a 5 and an 8 are among the strongest": (
            all(order(three, layer)[0] == 3 for layer in LAYER) and {5, 8} <= set(among)
        ),
        "Layer 0 knows no time, as it should": abs(last["layer0"] - 20) < 1,
        "recent patterns are not the more important ones": (
            last["layer1"] < 15 and last["layer2"] < 15
        ),
        "with a slight rise towards the end": all(
            parts[layer][-1] > min(parts[layer][10:]) + 0.5 for layer in LAYER[1:]
        ),
        "In layer 1 that is where keys are longest": (
            0 < lengths["layer1"].index(max(lengths["layer1"])) < 5
        ),
        "in layer 2 the length of keys does not explain it: the last patterns are as long": (
            abs(lengths["layer2"][-1] - max(lengths["layer2"])) < 0.015
        ),
        "one training image, a heavy 0": {one["label"] for one in most} == {0},
        "the same image": len(same) == 1,
        "in layer 0 of this run no image recurs": recurring["layer0"][0]["percent of inputs"] < 5,
        "votes become nearly arbitrary": all(
            row["both, if right"] < 35 for row in m.single["weighted by error size"].values()
        ),
    }


def _of_joint(m: Measured) -> Claims:
    boot, dress, sandal = (
        m.joint["examples"][f"joint-{name}"] for name in ("boot", "dress", "sandal")
    )
    share = {
        task: [found[layer]["of the 500 strongest patterns"] for layer in LAYER]
        for task, found in m.joint["attention across tasks"].items()
    }
    dressed = strongest(dress, "layer2")
    zero = m.joint["recurring examples"]["mnist"]["layer2"][0]["example"]
    shown = [one["example"] for one in dress["layer2"]["strongest examples"]]
    return {
        "hardly any in layer 0, where raw images are compared, and more in later layers": all(
            of[0] < 1 < of[1] < of[2] for of in share.values()
        ),
        "among all twenty classes, late layers do not vote better": all(
            of["layer2"]["label is the output, if right"]
            < of["layer0"]["label is the output, if right"]
            for of in m.joint["votes"].values()
        ),
        "coats are the raw image's favourite in total, later layers correct that to ankle boots": [
            order(boot, layer)[0] for layer in LAYER
        ]
        == [("fashion", 4), ("fashion", 9), ("fashion", 9)],
        "the strongest patterns of layer 2 are of MNIST, a 9 (the boots' class number) first": (
            {task for task, _ in strongest(boot, "layer2")} == {"mnist"}
            and strongest(boot, "layer2")[0] == ("mnist", 9)
        ),
        "dresses get most in every layer, trousers come second": all(
            order(dress, layer)[:2] == [("fashion", 3), ("fashion", 1)] for layer in LAYER
        ),
        "here layer 2 has two, the recurring 0 among them": (
            sum(task == "mnist" for task, _ in dressed) == 2 and zero in shown
        ),
        "sneakers get most attention in total, in every layer": all(
            order(sandal, layer)[0] == ("fashion", 7) for layer in LAYER
        ),
        "none has sandals as the favourite of layer 2": (
            "fashion sandal" not in m.joint["favourites of right sandals"]["layer2"]
        ),
        "here they are two 0s and a 4": sorted(strongest(sandal, "layer2"))
        == [("mnist", 0), ("mnist", 0), ("mnist", 4)],
        "In layer 0 the largest |α| are negative": all(
            one["weight"] < 0 for one in sandal["layer0"]["strongest examples"]
        ),
    }


def _of_continual(m: Measured) -> Claims:
    examples = m.first(CONTINUAL)["examples"]
    one, dress, seven = (examples[f"continual-{name}"] for name in ("one", "dress", "seven"))
    masks, part = m.continual["masked in layers"], m.continual["masked in part"]["0.3"]
    vanilla = m.of(CONTINUAL, "vanilla")
    routed, after = m.continual["routed by attention"], m.continual["after both, as trained"]
    boots, digits = ("fashion", 9), [strongest(one, layer) for layer in LAYER]
    late = [each for layer in LAYER[1:] for each in strongest(dress, layer)]
    return {
        "in layer 0 the 1s get most attention and dresses, class 3, come second": (
            order(one, "layer0")[:2] == [("mnist", 1), ("fashion", 3)]
        ),
        "from layer 1 on dresses are first": all(
            order(one, layer)[0] == ("fashion", 3) for layer in LAYER[1:]
        ),
        "The strongest single patterns are no dresses": all(
            task == "mnist" for layer in digits for task, _ in layer
        ),
        "dresses get most in every layer; from layer 1 on the strongest single patterns are of "
        "MNIST, 3s and the recurring 0": (
            all(order(dress, layer)[0] == ("fashion", 3) for layer in LAYER)
            and set(late) == {("mnist", 3), ("mnist", 0)}
        ),
        "the 7s get most in every layer, with ankle boots close behind in layers 1 and 2": (
            all(order(seven, layer)[0] == ("mnist", 7) for layer in LAYER)
            and all(order(seven, layer)[1] == boots for layer in LAYER[1:])
        ),
        "Masked, the first task is back": mean(m.continual["second task masked"]["mnist"]) > 95,
        "Without momentum (vanilla) both are": (
            abs(vanilla["second task masked"]["mnist"][0] - vanilla["travelled back"]["mnist"][0])
            < 0.05
        ),
        "neither task is lost": (
            mean(routed["mnist"]) > 95 and abs(mean(routed["fashion"]) - mean(after["fashion"])) < 1
        ),
        "a mask of strength 0.3 in all layers does slightly better": all(
            0 < mean(part[task]) - mean(masks["1"][task]) < 5 for task in TASKS
        ),
        "masking one class destroys the network": all(
            mean(m.continual["one class of the second task masked"][task]) < 15 for task in TASKS
        ),
    }
