"""What is published as measured: whole, made by one version of things, and what the page says."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

import paper_images
from dualform import charts

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "experiments" / "results" / "images"
PAGE = (ROOT / "docs" / "paper.md").read_text(encoding="utf-8")


def runs() -> list[dict[str, Any]]:
    return [json.loads(path.read_text(encoding="utf-8")) for path in RESULTS.glob("*-seed*.json")]


def summary() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((RESULTS / "summary.json").read_text(encoding="utf-8"))
    return found


def test_every_run_of_the_plan_is_there_and_none_was_quick() -> None:
    made = {
        (r["settings"]["experiment"], r["settings"]["preset"], r["settings"]["seed"])
        for r in runs()
    }
    planned = {
        (experiment.name, preset, seed)
        for experiment, preset, seeds in paper_images.PLAN
        for seed in range(seeds)
    }
    assert made == planned
    assert not any(run["settings"]["quick"] for run in runs())
    assert len({json.dumps(run["versions"], sort_keys=True) for run in runs()}) == 1


def test_the_summary_is_that_of_the_runs() -> None:
    votes = [
        run["results"]["table 1"]["5000"]["layers"]["layer2"]["both, if right"]
        for run in runs()
        if (run["settings"]["experiment"], run["settings"]["preset"]) == ("mnist_single", "authors")
    ]
    entry = summary()["mnist_single"]["authors"]["table 1"]["5000"]["layers"]["layer2"]
    mean = sum(votes) / len(votes)
    std = (sum((vote - mean) ** 2 for vote in votes) / (len(votes) - 1)) ** 0.5
    assert entry["both, if right"]["runs"] == len(votes) == 5
    assert entry["both, if right"]["mean"] == pytest.approx(mean, abs=0.006)
    assert entry["both, if right"]["std"] == pytest.approx(std, abs=0.006)


@pytest.mark.parametrize("steps", ["5000", "3000"])
def test_table_1_on_the_page_is_the_measured_one(steps: str) -> None:
    of_seeds = [
        run["results"]["table 1"][steps]["layers"]
        for run in runs()
        if (run["settings"]["experiment"], run["settings"]["preset"]) == ("mnist_single", "authors")
    ]
    for number, layer in enumerate(("layer0", "layer1", "layer2")):
        cells = [
            charts.printed([layers[layer][question] for layers in of_seeds])
            for question in paper_images.QUESTIONS
        ]
        line = f"| {number} | {int(steps):,} | {' | '.join(cells)} |"
        assert line in PAGE


def test_every_figure_is_on_the_page_and_none_is_missing() -> None:
    shown = set(re.findall(r"results/images/figures/([\w-]+)\.svg", PAGE))
    drawn = {path.stem for path in (RESULTS / "figures").glob("*.svg")}
    assert shown == drawn == {path.stem for path in (RESULTS / "figures").glob("*.png")}


def test_what_is_published_is_small() -> None:
    assert sum(path.stat().st_size for path in RESULTS.rglob("*.*")) < 15_000_000
