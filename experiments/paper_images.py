"""All image experiments of the paper: `make paper-images`, or `make paper-images-quick`.

Runs every experiment with every preset and seed, two at a time, then puts the numbers of all runs
together: means and standard deviations beside the paper's numbers in `summary.json`, and the
figures that are about several runs or all inputs. Single examples are drawn by their own runs.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

import dualform
import mnist_fashion_continual
import mnist_fashion_joint
import mnist_single
from dualform import charts
from figures import NAMES, save
from runs import (
    Experiment,
    Job,
    Run,
    options,
    perform_all,
    planned,
    refuse_unwritable,
    start,
    versions,
    write,
)
from training import LAYERS, PRESETS

SINGLE, JOINT = mnist_single.EXPERIMENT, mnist_fashion_joint.EXPERIMENT
CONTINUAL = mnist_fashion_continual.EXPERIMENT

PLAN: list[tuple[Experiment, str, int]] = [
    (CONTINUAL, "authors", 2),
    (SINGLE, "authors", 5),
    (CONTINUAL, "vanilla", 1),
    (JOINT, "authors", 1),
    (SINGLE, "vanilla", 1),
    (JOINT, "vanilla", 1),
]
"""How many seeds of what; the longest runs first."""

QUICK_PLAN: list[tuple[Experiment, str, int]] = [
    (CONTINUAL, "quick", 1),
    (SINGLE, "quick", 1),
    (JOINT, "quick", 1),
]

QUESTIONS = ("target, if wrong", "output, if wrong", "both, if right")

PAPER_TABLE_1 = {
    "layer0": [(17.2, 2.7), (49.5, 1.5), (75.1, 0.0)],
    "layer1": [(18.0, 2.9), (52.9, 2.9), (78.8, 0.8)],
    "layer2": [(20.6, 2.6), (60.1, 4.5), (84.7, 1.1)],
}
"""Percent, mean and standard deviation of 5 runs, in the order of the questions."""

PAPER_ACCURACY = {
    "single": {"mnist": 97},
    "joint": {"mnist": 97, "fashion": 87},
    "continual": {"mnist": 45, "fashion": 85},
    "continual, after the first task": {"mnist": 97},
}


def main() -> None:
    """Run what is missing, then summarise and draw."""
    parser = options(__doc__)
    given = parser.parse_args()
    jobs = all_jobs(given)
    refuse_unwritable(parser, jobs[0][1])
    numbers = perform_all(jobs, given.jobs, given.again)
    summarise(jobs[0][1], numbers)
    print(f"numbers and figures are in {jobs[0][1].results}")


def all_jobs(given: argparse.Namespace) -> list[Job]:
    """Every run of the plan."""
    return [
        (experiment, planned(experiment, given, preset, seed))
        for experiment, preset, seeds in (QUICK_PLAN if given.quick else PLAN)
        for seed in range(seeds)
    ]


# Several runs in one number -----------------------------------------------------------------------


def of_runs(
    numbers: Sequence[dict[str, Any]], experiment: Experiment, preset: str
) -> list[dict[str, Any]]:
    """The results of every run of an experiment with a preset, by seed."""
    runs = [
        one
        for one in numbers
        if (one["settings"]["experiment"], one["settings"]["preset"]) == (experiment.name, preset)
    ]
    return [one["results"] for one in sorted(runs, key=lambda one: one["settings"]["seed"])]


def listed(entries: Sequence[Any]) -> Any:
    """The same nest of dictionaries with a list of all runs' numbers in place of each number."""
    if isinstance(entries[0], dict):
        shared = [key for key in entries[0] if all(key in entry for entry in entries)]
        return {key: listed([entry[key] for entry in entries]) for key in shared}
    return list(entries)


def together(values: Any) -> Any:
    """The same nest with mean and sample standard deviation in place of each list of numbers."""
    if isinstance(values, dict):
        return {key: together(value) for key, value in values.items()}
    if not all(isinstance(value, int | float) for value in values):
        return values if len(values) > 1 else values[0]
    std = round(float(np.std(values, ddof=1)), 4) if len(values) > 1 else None
    return {"mean": round(float(np.mean(values)), 4), "std": std, "runs": len(values)}


def summarise(run: Run, numbers: Sequence[dict[str, Any]]) -> None:
    """Write `summary.json` and draw the figures that are about all of it."""
    summary: dict[str, Any] = {
        "command": f"make paper-images{'-quick' if run.quick else ''}",
        "versions": versions(),
        "paper": {"accuracy": PAPER_ACCURACY, "table 1": paper_table_1()},
    }
    for experiment in (SINGLE, JOINT, CONTINUAL):
        for preset in PRESETS:
            results = of_runs(numbers, experiment, preset)
            if results:
                for one in results:
                    one.pop("examples", None)  # each is in its own run's file
                of = summary.setdefault(experiment.name, {})
                of[preset] = together(listed(results))
    summary["seconds"] = {
        f"{one['settings']['experiment']}-{one['settings']['preset']}-{one['settings']['seed']}": (
            one["seconds"]
        )
        for one in numbers
    }
    write(Path(run.results) / "summary.json", summary)
    main_preset = "quick" if run.quick else "authors"
    draw_single(run, of_runs(numbers, SINGLE, main_preset))
    draw_continual(run, of_runs(numbers, CONTINUAL, main_preset))
    draw_accuracies(run, numbers, main_preset)


def paper_table_1() -> dict[str, dict[str, dict[str, float]]]:
    """The paper's Table 1 in the form of ours."""
    return {
        layer: {
            question: {"mean": mean, "std": std}
            for question, (mean, std) in zip(QUESTIONS, row, strict=True)
        }
        for layer, row in PAPER_TABLE_1.items()
    }


# The figures --------------------------------------------------------------------------------------


def named(layers: dict[str, Any]) -> dict[str, Any]:
    """Numbers by layer, under the names that figures use."""
    return {LAYERS[layer]: numbers for layer, numbers in layers.items()}


def draw_single(run: Run, results: list[dict[str, Any]]) -> None:
    """Table 1; the side note on the error's size; when the strongest patterns were met."""
    table = listed([next(iter(one["table 1"].values()))["layers"] for one in results])
    save(run, "table-1", charts.votes(named(table), paper=named(paper_table_1())))
    first = results[0]
    plain = next(iter(first["table 1"].values()))["layers"]
    sized = {
        layer: {question: row[question] for question in QUESTIONS}
        for layer, row in first["weighted by error size"].items()
    }
    save(
        run,
        "error-size",
        charts.votes(named(sized), paper=named(plain), sources=("by |α|·‖δ‖", "by |α|")),
    )
    time = first["strongest over time"]
    edges = np.linspace(0, time["steps"], time["parts"] + 1).round().astype(int)
    tables = {
        layer: dualform.Table(
            {"from": edges[:-1], "to": edges[1:], "absolute": shares, "patterns": np.diff(edges)}
        )
        for layer, shares in time["percent of the strongest"].items()
    }
    unit = "% of the top 500"
    save(run, "over-time", charts.over_time(tables, layers=LAYERS, unit=unit, height=70))


def draw_continual(run: Run, results: list[dict[str, Any]]) -> None:
    """Accuracies under every mask, and along the strength of one."""
    runs = listed(results)
    conditions = {
        "after the first task": runs["after the first task, as trained"],
        "after both tasks": runs["after both, as trained"],
        "travelled back": runs["travelled back"],
        "second task masked": runs["second task masked"],
        "… in layer 0 only": runs["masked in layers"]["0"],
        "… in layer 1 only": runs["masked in layers"]["1"],
        "… in layer 2 only": runs["masked in layers"]["2"],
        "routed by attention": runs["routed by attention"],
        "only dresses masked": runs["one class of the second task masked"],
    }
    shown = {
        condition: {NAMES[task]: values for task, values in tasks.items()}
        for condition, tasks in conditions.items()
    }
    paper = {
        "after the first task": {"MNIST": 97},
        "after both tasks": {"MNIST": 45, "Fashion-MNIST": 85},
    }
    save(run, "continual-masks", charts.accuracies(shown, paper=paper))
    part = runs["masked in part"]
    curves = {
        NAMES[task]: [part[strength][task] for strength in part] for task in ("mnist", "fashion")
    }
    save(run, "continual-strengths", charts.strengths([float(s) for s in part], curves))


def draw_accuracies(run: Run, numbers: Sequence[dict[str, Any]], preset: str) -> None:
    """Every network's accuracy beside the paper's."""
    single = listed([one["accuracy"] for one in of_runs(numbers, SINGLE, preset)])
    joint = listed([one["accuracy"] for one in of_runs(numbers, JOINT, preset)])
    continual = listed(of_runs(numbers, CONTINUAL, preset))
    found = {
        "single": {"mnist": single["trained network"]},
        "joint": {task: of["trained network"] for task, of in joint.items()},
        "continual, after the first task": continual["after the first task, as trained"],
        "continual": continual["after both, as trained"],
    }
    shown = {
        name: {NAMES[task]: value for task, value in tasks.items()} for name, tasks in found.items()
    }
    paper = {
        name: {NAMES[task]: value for task, value in tasks.items()}
        for name, tasks in PAPER_ACCURACY.items()
    }
    save(run, "accuracies", charts.accuracies(shown, paper=paper))


if __name__ == "__main__":
    start(main)
