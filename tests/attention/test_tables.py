"""Tables that questions need: in RAM while a memory is open, and nowhere else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import dualform

EVERYTHING = 16


def answers(dual: dualform.DualForm, inputs: torch.Tensor) -> list[Any]:
    """Questions that tables answer: norms, key sums, group matrices."""
    spotlight = dual.attend(inputs[:EVERYTHING])["fc1"]
    masked = dual.without(label=1).weights(torch.float64)
    return [
        spotlight.top(3)["weight"],
        spotlight.sum_by("label")["sum"],
        *(masked[name].numpy() for name in sorted(masked)),
    ]


def files(path: Path) -> dict[Path, tuple[int, int]]:
    found = {file: file.stat() for file in path.rglob("*")}
    return {file: (stat.st_size, stat.st_mtime_ns) for file, stat in found.items()}


def test_asking_writes_nothing(run: Any) -> None:
    before = files(run.path)
    dual = dualform.DualForm(run.model, run.path)
    answers(dual, run.inputs)
    assert dual.verify(run.inputs).passed
    assert files(run.path) == before


def test_tables_are_found_again_and_change_no_bit(
    run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    dual = dualform.DualForm(run.model, run.path)
    first = answers(dual, run.inputs)
    again = answers(dual, run.inputs)
    assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("patterns were read again")

    monkeypatch.setattr(dualform.LayerMemory, "blocks", refuse)
    assert torch.isfinite(dual.without(label=2)(run.inputs)).all()
