"""The paper's image experiments, in little: the same shapes as at full size."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import data

EXPERIMENTS = Path(__file__).resolve().parents[2] / "experiments"

pytestmark = pytest.mark.long

Results = dict[str, Any]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where `paper_images.py --quick` left its numbers and figures."""
    try:
        for name in ("mnist", "fashion"):
            data.fetch(data.SETS[name])
    except data.DataError as missing:
        pytest.skip(f"no data: {missing}")
    folder = tmp_path_factory.mktemp("paper")
    places = ["--results", str(folder / "results"), "--scratch", str(folder / "runs")]
    subprocess.run(
        [sys.executable, str(EXPERIMENTS / "paper_images.py"), "--quick", *places], check=True
    )
    assert list((folder / "runs").iterdir()) == []  # memories are deleted when measured
    return folder / "results"


def of(results: Path, experiment: str) -> Results:
    text = (results / f"{experiment}-quick-seed0.json").read_text(encoding="utf-8")
    found: Results = json.loads(text)["results"]
    return found


def test_one_task_is_learned_and_the_dual_form_answers_as_the_network_does(results: Path) -> None:
    accuracy = of(results, "mnist_single")["accuracy"]
    assert accuracy["trained network"] > 92
    assert abs(accuracy["dual form"] - accuracy["trained network"]) < 0.5
    assert of(results, "mnist_single")["certificate"]["passed"] is True


def test_late_layers_vote_better_than_the_first(results: Path) -> None:
    for table in of(results, "mnist_single")["table 1"].values():
        layers = table["layers"]
        right = [layers[name]["both, if right"] for name in ("layer0", "layer1", "layer2")]
        assert right[2] > right[0] + 2
        assert layers["layer2"]["output, if wrong"] > layers["layer2"]["target, if wrong"]


def test_the_size_of_errors_spoils_the_votes(results: Path) -> None:
    found = of(results, "mnist_single")
    plain = next(iter(found["table 1"].values()))["layers"]
    for layer, row in found["weighted by error size"].items():
        assert row["both, if right"] < plain[layer]["both, if right"] - 20


def test_tasks_learned_together_attend_to_each_other_in_late_layers(results: Path) -> None:
    found = of(results, "mnist_fashion_joint")
    assert found["accuracy"]["mnist"]["trained network"] > 88
    assert found["accuracy"]["fashion"]["trained network"] > 78
    for task in ("mnist", "fashion"):
        share = [
            found["attention across tasks"][task][layer]["of the 500 strongest patterns"]
            for layer in ("layer0", "layer1", "layer2")
        ]
        assert share[0] < share[2]
        assert share[0] < 10


def test_the_second_task_is_at_the_expense_of_the_first_and_masking_it_restores_that(
    results: Path,
) -> None:
    found = of(results, "mnist_fashion_continual")
    before = found["after the first task, as trained"]["mnist"]
    after = found["after both, as trained"]
    assert before > 90
    assert after["mnist"] < before - 20
    assert after["fashion"] > 80
    assert found["second task masked"]["mnist"] > before - 4
    assert found["travelled back"]["mnist"] == pytest.approx(before, abs=0.5)
    assert found["routed by attention"]["mnist"] > before - 4
    assert found["routed by attention"]["fashion"] > after["fashion"] - 2
    assert found["one class of the second task masked"]["fashion"] < 40  # it is not unlearning
    assert found["masked in part"]["0.0"] == found["after both, dual form"]
    assert found["masked in part"]["1.0"] == found["second task masked"]


def test_the_summary_and_every_figure_are_there(results: Path) -> None:
    summary = json.loads((results / "summary.json").read_text(encoding="utf-8"))
    assert summary["paper"]["accuracy"]["joint"] == {"mnist": 97, "fashion": 87}
    single = summary["mnist_single"]["quick"]["accuracy"]["trained network"]
    assert single["runs"] == 1
    assert single["mean"] == of(results, "mnist_single")["accuracy"]["trained network"]
    examples = [
        "single-six", "single-three", "joint-boot", "joint-dress", "joint-sandal",
        "continual-one", "continual-seven", "continual-dress",
    ]  # fmt: skip
    expected = {f"{name}-{kind}" for name in examples for kind in ("top500", "totals", "images")}
    expected |= {"single-inputs", "joint-inputs", "continual-inputs", "accuracies", "table-1"}
    expected |= {"single-recurring"}
    expected |= {"error-size", "over-time", "continual-masks", "continual-strengths"}
    for ending in ("svg", "png"):
        drawn = {path.stem for path in (results / "figures").glob(f"*.{ending}")}
        assert drawn == expected
