"""The numbers of `docs/paper.md`, from the runs that were made: `make paper-images` ends with this.

    python experiments/page.py             put the numbers of experiments/results/images on the page
    python experiments/page.py --check     only say what on it is not what was measured

On the page, `<!--name-->` and `<!--/-->` stand around every number or table that was measured: what
is between them is written here. What the text says in words is a claim: it stays as it is, and is
checked. A claim that does not hold any more is named, for someone to write another sentence.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from claims import broken
from dualform import charts
from paper_images import (
    CONTINUAL,
    JOINT,
    PAPER_ACCURACY,
    PAPER_TABLE_1,
    QUESTIONS,
    SINGLE,
)
from published import LAYER, TASKS, Measured, mean

PAGE = Path(__file__).resolve().parents[1] / "docs" / "paper.md"
FIELD = re.compile(r"<!--([\w-]+)-->(.*?)<!--/-->", re.DOTALL)


def whole(values: Sequence[float], between: str = " / ") -> str:
    """Percentages without decimals."""
    return between.join(charts.printed(value, 0) for value in values)


def row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |\n"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    body = [row(*cells) for cells in rows]
    return "".join(["\n", row(*head), "|" + "---|" * len(head) + "\n", *body])


# The tables ---------------------------------------------------------------------------------------


def accuracies(m: Measured) -> str:
    """Accuracies of all experiments beside the paper's."""
    paper = PAPER_ACCURACY
    found = []
    for preset in ("authors", "vanilla"):
        single, joint = m.of(SINGLE, preset)["accuracy"], m.of(JOINT, preset)["accuracy"]
        continual = m.of(CONTINUAL, preset)
        after = continual["after both, as trained"]
        found.append(
            [
                single["trained network"],
                single["dual form at step 3000"],
                joint["mnist"]["trained network"],
                joint["fashion"]["trained network"],
                continual["after the first task, as trained"]["mnist"],
                after["mnist"],
                after["fashion"],
            ]
        )
    named = [
        ("single task, 5,000 steps", paper["single"]["mnist"]),
        ("the same after 3,000 steps", paper["single"]["mnist"]),
        ("joint: MNIST", paper["joint"]["mnist"]),
        ("joint: Fashion-MNIST", paper["joint"]["fashion"]),
        ("continual: MNIST after the first task", 97),
        ("continual: MNIST after both", paper["continual"]["mnist"]),
        ("continual: Fashion-MNIST after both", paper["continual"]["fashion"]),
    ]
    rows = [
        [name, str(of_paper), charts.printed(authors), charts.printed(vanilla)]
        for (name, of_paper), authors, vanilla in zip(named, *found, strict=True)
    ]
    return table(["", "paper", "authors", "vanilla"], rows)


def table_1(m: Measured) -> str:
    """Table 1, ours after 5,000 and 3,000 steps."""
    rows = []
    for place, layer in enumerate(LAYER):
        paper = [charts.printed({"mean": a, "std": b}) for a, b in PAPER_TABLE_1[layer]]
        rows.append([str(place), "paper", *paper])
        for steps in ("5000", "3000"):
            ours = m.of(SINGLE)["table 1"][steps]["layers"][layer]
            cells = [charts.printed(ours[question]) for question in QUESTIONS]
            rows.append([str(place), f"{int(steps):,}", *cells])
    return table(["layer", "steps", *QUESTIONS], rows)


def across(m: Measured) -> str:
    """Attention across tasks in joint training."""
    kinds = {
        "of the 500 strongest patterns": "patterns of the other task among the 500 strongest",
        "inputs with one among their 3 strongest examples": (
            "inputs with one among their 3 strongest examples"
        ),
    }
    names = {"mnist": "MNIST", "fashion": "Fashion-MNIST"}
    rows = [
        [names[task],
         *(" / ".join(charts.printed(found[layer][kind]) for layer in LAYER) for kind in kinds)]
        for task, found in m.joint["attention across tasks"].items()
    ]  # fmt: skip
    return table(["inputs", *kinds.values()], rows)


def masks(m: Measured) -> str:
    """What masks undo."""
    both = [m.continual, m.of(CONTINUAL, "vanilla")]
    at = {
        "as trained, after the first task": ["after the first task, as trained"],
        "as trained, after both": ["after both, as trained"],
        "the same by the dual form": ["after both, dual form"],
        "travelled back, `at(3000)`": ["travelled back"],
        'second task masked, `without(task="fashion")`': ["second task masked"],
        "… in layer 0 only": ["masked in layers", "0"],
        "… in layer 1 only": ["masked in layers", "1"],
        "… in layer 2 only": ["masked in layers", "2"],
        "… in layers 0 and 1": ["masked in layers", "0+1"],
        "… in layers 1 and 2": ["masked in layers", "1+2"],
        "… in layers 0 and 2": ["masked in layers", "0+2"],
        "… at strength 0.3": ["masked in part", "0.3"],
        "… at strength 0.5": ["masked in part", "0.5"],
        "first task masked": ["first task masked"],
        "routed by attention": ["routed by attention"],
        "**only the class of dresses masked**": ["one class of the second task masked"],
    }
    rows = []
    for name, keys in at.items():
        authors, vanilla = both
        for key in keys:
            authors, vanilla = authors[key], vanilla[key]
        ours = [charts.printed(authors[task]) for task in TASKS]
        rows.append([name, *ours, " / ".join(charts.printed(vanilla[task]) for task in TASKS)])
    return table(["network", "MNIST", "Fashion-MNIST", "vanilla"], rows)


# The numbers in the text --------------------------------------------------------------------------


def fields(m: Measured) -> dict[str, str]:
    """What stands between the marks of the page, by name."""
    return {
        "accuracies": accuracies(m),
        "table-1": table_1(m),
        "across": across(m),
        "masks": masks(m),
        "minutes": f"{sum(run['seconds']['of CPU time'] for run in m.runs) / 60:.0f}",
        **_of_single(m),
        **_of_joint(m),
        **_of_continual(m),
    }


def _of_single(m: Measured) -> dict[str, str]:
    votes = m.of(SINGLE)["table 1"]
    sized, time = m.single["weighted by error size"], m.single["strongest over time"]
    vanilla = m.of(SINGLE, "vanilla")["table 1"]["5000"]["layers"]
    recurring = m.single["recurring examples"]
    return {
        "residual": whole([100 * m.single["certificate"]["largest residual over bound"]]),
        "right-5000": charts.printed([mean(votes["5000"]["layers"]["layer0"]["both, if right"])]),
        "right-3000": charts.printed([mean(votes["3000"]["layers"]["layer0"]["both, if right"])]),
        "table-1-vanilla": "; ".join(
            " / ".join(charts.printed(vanilla[layer][question]) for question in QUESTIONS)
            for layer in LAYER
        ),
        "sized-right": whole([sized[layer]["both, if right"] for layer in LAYER], ", "),
        "sized-spread": whole(
            [sized[layer]["spread of the error's size"] for layer in LAYER], ", "
        ),
        "last-fifth": whole([time["in the last fifth"][layer] for layer in LAYER]),
        "early": whole([_early(m, layer) for layer in LAYER[1:]], " and "),
        "recurring": whole(
            [recurring[layer][0]["percent of inputs"] for layer in LAYER[1:]], " and "
        ),
        "recurring-0": charts.printed(recurring["layer0"][0]["percent of inputs"]),
        "recurring-length": f"{recurring['layer2'][0]['mean length of its keys, relative']:.1f}",
        "longer": whole([100 * max(time["mean length of keys"]["layer1"]) - 100]),
    }


def _early(m: Measured, layer: str) -> float:
    """Percent of the strongest that come from steps 250 to 1,250 of 5,000."""
    parts = m.single["strongest over time"]["percent of the strongest"][layer]
    return float(sum(parts[len(parts) // 20 : len(parts) // 4]))


def _of_joint(m: Measured) -> dict[str, str]:
    votes, boots = m.joint["votes"], m.joint["favourites of right ankle boots"]
    sandals = m.joint["favourites of right sandals"]["layer2"]
    recurring = m.joint["recurring examples"]
    right = "label is the output, if right"
    return {
        "joint-mnist": whole([votes["mnist"][layer][right] for layer in LAYER]),
        "joint-fashion": whole([votes["fashion"][layer][right] for layer in LAYER]),
        "boots-coat": whole([boots["layer0"].get("fashion coat", 0.0)]),
        "boots-0": whole([boots["layer0"]["fashion ankle boot"]]),
        "boots-2": whole([boots["layer2"]["fashion ankle boot"]]),
        "sandals": ", ".join(
            f"{name.removeprefix('fashion ')}s {whole([share])} %"
            for name, share in list(sandals.items())[:2]
        ),
        "joint-recurring-mnist": whole([recurring["mnist"]["layer2"][0]["percent of inputs"]]),
        "joint-recurring-fashion": whole([recurring["fashion"]["layer2"][0]["percent of inputs"]]),
    }


def _of_continual(m: Measured) -> dict[str, str]:
    after, back = m.continual["after both, as trained"], m.continual["travelled back"]
    masked, own = m.continual["second task masked"], m.continual["routed to their own task"]
    vanilla = m.of(CONTINUAL, "vanilla")
    in_1 = m.continual["masked in layers"]["1"]
    wrong = [
        m.continual["interference"][layer][f"favourite label is the {who}, if wrong"]
        for layer in ("layer2", "layer0")
        for who in ("output", "target")
    ]
    return {
        "forgot": " and ".join(charts.printed(value) for value in sorted(after["mnist"])),
        "wrong-output": whole([wrong[0][0]]),
        "wrong-target": whole([wrong[1][0]]),
        "wrong-other-seed": whole([wrong[0][1], wrong[1][1]], " and "),
        "wrong-0": whole([wrong[2][0], wrong[3][0]], " and "),
        "masked": charts.printed(masked["mnist"]),
        "back": charts.printed(back["mnist"]),
        "back-vanilla": charts.printed(vanilla["travelled back"]["mnist"]),
        "own-task": " and ".join(charts.printed(own[task]) for task in TASKS),
        "layer-1": whole([mean(in_1["mnist"])]),
        "layer-1-cost": whole([mean(after["fashion"]) - mean(in_1["fashion"])]),
    }


# The command --------------------------------------------------------------------------------------


def refreshed(page: str, values: dict[str, str]) -> str:
    """The page with the measured numbers between its marks."""
    marked = {match[1] for match in FIELD.finditer(page)}
    if marked != set(values):
        raise ValueError(
            f"the page marks {sorted(marked - set(values))}, which page.py does not know, and does "
            f"not mark {sorted(set(values) - marked)}, which it has"
        )
    return FIELD.sub(lambda match: f"<!--{match[1]}-->{values[match[1]]}<!--/-->", page)


def stale(page: str, values: dict[str, str]) -> list[str]:
    """Which numbers of the page are not those that were measured."""
    return [
        f"{match[1]}: the page has {match[2]!r}, measured is {values.get(match[1])!r}"
        for match in FIELD.finditer(page)
        if match[2] != values.get(match[1])
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Refresh the page, or check it; 1 if something on it is not so."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing, say what is not so")
    given = parser.parse_args(arguments)
    m, page = Measured(), PAGE.read_text(encoding="utf-8")
    values = fields(m)
    wrong = stale(page, values)
    if not given.check:
        PAGE.write_text(refreshed(page, values), encoding="utf-8")
        print(f"{PAGE.name}: {len(wrong)} of {len(values)} numbers and tables were put right")
        wrong = []
    wrong += [f"not so any more, rewrite it: {claim}" for claim in broken(m)]
    print("\n".join(wrong), end="\n" if wrong else "", file=sys.stderr)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
