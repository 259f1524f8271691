"""The runs whose numbers are published: what `docs/paper.md` is written and checked from.

Numbers of several runs are kept as lists, so that tables print them as figures do: a mean that was
rounded for `summary.json` may fall on the other side of a half.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from paper_images import CONTINUAL, JOINT, SINGLE, listed, of_runs
from runs import RESULTS
from training import LAYERS

LAYER = tuple(LAYERS)
TASKS = ("mnist", "fashion")


class Measured:
    """All runs of the plan: each number as the list of its runs, and single runs' own."""

    def __init__(self, folder: Path = RESULTS) -> None:
        files = sorted(folder.glob("*-seed*.json"))
        self.runs = [json.loads(path.read_text(encoding="utf-8")) for path in files]
        if not self.runs:
            raise SystemExit(f"no runs in {folder}; make them first: make paper-images")

    def of(self, experiment: Any, preset: str = "authors") -> Any:
        """Every number of an experiment, as the list of its runs'."""
        return listed(of_runs(self.runs, experiment, preset))

    def first(self, experiment: Any) -> Any:
        """What was measured of the first seed only."""
        return of_runs(self.runs, experiment, "authors")[0]

    @cached_property
    def single(self) -> Any:
        return self.first(SINGLE)

    @cached_property
    def joint(self) -> Any:
        return self.first(JOINT)

    @cached_property
    def continual(self) -> Any:
        return self.of(CONTINUAL)


def mean(runs: Sequence[float]) -> float:
    """Of several runs."""
    return sum(runs) / len(runs)
