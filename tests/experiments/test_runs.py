"""A run is made once, continued or begun anew when interrupted, and leaves no memory behind."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import dualform
import runs
import training
from runs import Experiment, Run

STEPS = 3


def small_task() -> training.Task:
    """Random pixels with labels, in the form of a data set."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(300, 784, generator=generator)
    labels = torch.randint(0, 10, (300,), generator=generator)
    pictures = torch.zeros(300, 28, 28, dtype=torch.uint8).numpy()
    return training.Task(
        "small", images, labels, torch.arange(300), images, labels, pictures, pictures
    )


def phases(steps: tuple[int, ...]) -> list[training.Phase]:
    return [training.Phase((small_task(),), count) for count in steps]


class Measured:
    """Counts how often it is asked to measure, and fails the first so many times."""

    def __init__(self, failures: int = 0) -> None:
        self.calls, self.failures = 0, failures

    def __call__(self, run: Run, report: training.Report) -> dict[str, Any]:
        self.calls += 1
        if self.calls <= self.failures:
            raise KeyboardInterrupt
        return {"steps": dualform.Memory.open(run.memory).steps}


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(
        "small", "authors", 0, (STEPS, 2), False, str(tmp_path / "results"), str(tmp_path / "runs")
    )


def silent(what: str, done: int, total: int) -> None:
    pass


def trainings(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The paths of all recordings that are begun from now on."""
    begun: list[Path] = []
    real = dualform.record

    def counting(model: Any, path: Path, **more: Any) -> Any:
        begun.append(path)
        return real(model, path, **more)

    monkeypatch.setattr(dualform, "record", counting)
    return begun


def test_a_finished_run_is_not_repeated_and_leaves_only_its_numbers(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, measured = trainings(monkeypatch), Measured()
    experiment = Experiment("small", (STEPS, 2), (1, 1), phases, measured)
    first = runs.perform(experiment, run, silent)
    assert runs.perform(experiment, run, silent) == json.loads(json.dumps(first))
    assert (len(begun), measured.calls) == (1, 1)
    assert list(Path(run.scratch).iterdir()) == []
    known = json.loads(run.file.read_text(encoding="utf-8"))
    assert known["results"] == {"steps": STEPS + 2}
    assert set(known["versions"]) == {"dualform", "torch", "numpy", "python"}
    assert known["command"] == (
        "python experiments/small.py --preset authors --seeds 0 --steps 3 2"
    )
    error = abs(known["bytes"]["estimated"] / known["bytes"]["on disk"] - 1)
    assert error < 0.5


@pytest.mark.parametrize("other", [{"steps": (STEPS, 3)}, {"preset": "vanilla"}, {"seed": 1}])
def test_numbers_made_with_other_settings_do_not_count(run: Run, other: dict[str, Any]) -> None:
    experiment = Experiment("small", (STEPS, 2), (1, 1), phases, Measured())
    runs.perform(experiment, run, silent)
    changed = replace(run, **other)
    changed.file.parent.mkdir(parents=True, exist_ok=True)
    changed.file.write_text(run.file.read_text(encoding="utf-8"), encoding="utf-8")
    assert runs.finished(run) is not None
    assert runs.finished(changed) is None


def test_a_run_interrupted_while_measuring_is_measured_from_its_memory(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = trainings(monkeypatch)
    experiment = Experiment("small", (STEPS, 2), (1, 1), phases, Measured(failures=1))
    with pytest.raises(KeyboardInterrupt):
        runs.perform(experiment, run, silent)
    assert runs.perform(experiment, run, silent)["results"] == {"steps": STEPS + 2}
    assert len(begun) == 1


def test_a_run_interrupted_in_training_begins_anew_and_ends_the_same(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Stop(Exception):
        pass

    def stopping(what: str, done: int, total: int) -> None:
        raise Stop

    kept = replace(run, keep=True)
    experiment = Experiment("small", (STEPS, 2), (1, 1), phases, Measured())
    with pytest.raises(Stop):
        runs.perform(experiment, kept, stopping)
    assert not training.is_trained(kept.memory, STEPS + 2)
    runs.perform(experiment, kept, silent)
    other = replace(kept, scratch=f"{run.scratch}-other", results=f"{run.results}-other")
    runs.perform(experiment, other, silent)
    for step in (STEPS, STEPS + 2):
        one, two = (training.trained(r.memory, step).state_dict() for r in (kept, other))
        assert all(torch.equal(one[name], two[name]) for name in one)


def test_a_run_that_does_not_fit_on_the_disk_is_refused(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = trainings(monkeypatch)
    experiment = Experiment("small", (10**9, 1), (1, 1), phases, Measured())
    with pytest.raises(OSError, match="--scratch"):
        runs.perform(experiment, replace(run, steps=(10**9, 1)), silent)
    assert begun == []


def test_the_tags_name_each_pattern(run: Run) -> None:
    training.train(run.memory, training.PRESETS["authors"], phases((4,)), 0, silent)
    patterns = dualform.Memory.open(run.memory).layer("layer0").patterns
    task = small_task()
    assert set(patterns["task"]) == {"small"}
    assert (task.labels[patterns["example"]].numpy() == patterns["label"]).all()
    first = patterns["example"][: 2 * training.BATCH]  # 300 examples: no one twice in two batches
    assert len(set(first.tolist())) == 2 * training.BATCH


def test_the_authors_images_are_40_053_of_60_000() -> None:
    try:
        task = training.task("mnist")
    except RuntimeError as missing:
        pytest.skip(f"no MNIST: {missing}")
    assert len(task.labels) == len(set(task.examples.tolist())) == 40_053
    assert len(task.test_labels) == 10_000
    shade = task.pictures[task.examples[7]].reshape(-1).astype(float)
    slope = (task.images[7].max() - task.images[7].min()) / (shade.max() - shade.min())
    assert torch.allclose(
        task.images[7], (torch.from_numpy(shade).float() * slope + task.images[7].min()), atol=1e-5
    )
