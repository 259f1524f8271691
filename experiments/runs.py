"""How an experiment is run: each preset and seed once, two at a time, one memory each, then gone.

A run's numbers are one JSON file with the command that makes it again, its settings and the
versions of what made it. A run whose file is there is not repeated; one that was interrupted while
it was measured is measured from its memory, one that was interrupted in training begins anew. A
memory of some gigabytes lives in the scratch directory only as long as it is needed.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from queue import Empty
from typing import Any

import numpy
import torch
from rich.filesize import decimal
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

import dualform
from data import DataError
from training import PRESETS, Phase, Report, estimate, train

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results" / "images"
SCRATCH = HERE.parent / "runs" / "images"
QUICK = SCRATCH / "quick" / "results"
"""Numbers of quick runs are not the paper's: they never mix with those that are published."""


@dataclass(frozen=True)
class Run:
    """One training run of one experiment: with which rule, from which seed, how long."""

    experiment: str
    preset: str
    seed: int
    steps: tuple[int, ...]
    """Of each phase."""
    quick: bool = False
    results: str = str(RESULTS)
    scratch: str = str(SCRATCH)
    keep: bool = False
    """Whether the memory stays when all is measured."""

    @property
    def name(self) -> str:
        return f"{self.experiment}-{self.preset}-seed{self.seed}"

    @property
    def memory(self) -> Path:
        return Path(self.scratch) / f"{self.name}-{'+'.join(map(str, self.steps))}"

    @property
    def file(self) -> Path:
        return Path(self.results) / f"{self.name}.json"

    @property
    def command(self) -> str:
        steps = " ".join(map(str, self.steps))
        how = "--quick" if self.quick else f"--preset {self.preset}"
        return f"python experiments/{self.experiment}.py {how} --seeds {self.seed} --steps {steps}"

    @property
    def draws(self) -> bool:
        """Whether figures are drawn: of the first seed of what the authors ran."""
        return self.seed == 0 and self.preset in ("authors", "quick")

    @property
    def settings(self) -> dict[str, Any]:
        return {
            "experiment": self.experiment,
            "preset": self.preset,
            "rule": PRESETS[self.preset]._asdict(),
            "seed": self.seed,
            "steps": list(self.steps),
            "quick": self.quick,
        }


@dataclass(frozen=True)
class Experiment:
    """A kind of run: its training in phases, and what is measured afterwards, fit for JSON."""

    name: str
    steps: tuple[int, ...]
    quick_steps: tuple[int, ...]
    phases: Callable[[tuple[int, ...]], list[Phase]]
    measure: Callable[[Run, Report], dict[str, Any]]


def finished(run: Run) -> dict[str, Any] | None:
    """The numbers of a run that was finished with the same settings before."""
    try:
        known = json.loads(run.file.read_text(encoding="utf-8"))
    except (FileNotFoundError, json.JSONDecodeError):
        return None
    return known if known.get("settings") == run.settings else None


def perform(experiment: Experiment, run: Run, report: Report) -> dict[str, Any]:
    """Train, record, measure, write the numbers, delete the memory."""
    known = finished(run)
    if known is not None:
        return known
    started, cpu = time.time(), time.process_time()
    phases = experiment.phases(run.steps)
    run.memory.parent.mkdir(parents=True, exist_ok=True)
    expected, free = estimate(phases), shutil.disk_usage(run.memory.parent).free
    if expected > free:
        raise OSError(
            f"{run.name} would take {decimal(expected)}, but only {decimal(free)} are free at "
            f"{run.memory.parent}; name another directory with --scratch"
        )
    train(run.memory, PRESETS[run.preset], phases, run.seed, report)
    trained_at = time.time()
    memory = dualform.Memory.open(run.memory)
    numbers = {
        "settings": run.settings,
        "command": run.command,
        "versions": versions(),
        "bytes": {"estimated": expected, "on disk": memory.bytes_on_disk},
        "results": experiment.measure(run, report),
        "seconds": {
            "training": round(trained_at - started, 1),
            "measuring": round(time.time() - trained_at, 1),
            "of CPU time": round(time.process_time() - cpu, 1),
        },
    }
    write(run.file, numbers)
    if not run.keep:
        discard(run.memory)
    return numbers


def discard(memory: Path) -> None:
    """Delete a memory and the weights beside it."""
    shutil.rmtree(memory, ignore_errors=True)
    for weights in memory.parent.glob(f"{memory.name}-after-*.safetensors"):
        weights.unlink()


def versions() -> dict[str, str]:
    """What a run was made with."""
    return {
        "dualform": dualform.__version__,
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "python": platform.python_version(),
    }


def write(path: Path, numbers: Any) -> None:
    """JSON, in one go: a file is whole or not there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(numbers, indent=1, ensure_ascii=False)
    temporary = path.with_suffix(".tmp")
    temporary.write_text(f"{text}\n", encoding="utf-8")
    os.replace(temporary, path)


# Several runs at a time ---------------------------------------------------------------------------

Job = tuple[Experiment, Run]


def perform_all(jobs: Sequence[Job], workers: int, again: bool = False) -> list[dict[str, Any]]:
    """All runs, so many at a time in processes of one thread each, with a progress bar each.

    Runs that were finished before are not repeated, unless asked for `again`.
    """
    for _, run in jobs:
        if again:
            run.file.unlink(missing_ok=True)
        elif finished(run) is not None:
            print(f"{run.name}: finished before, see {run.file}")
    waiting = [(experiment, run) for experiment, run in jobs if finished(run) is None]
    for experiment, run in waiting:
        expected = estimate(experiment.phases(run.steps))
        print(f"{run.name}: about {decimal(expected)} on disk while it runs")
    if waiting:
        _in_processes(waiting, workers)
    done = [finished(run) for _, run in jobs]
    return [numbers for numbers in done if numbers is not None]


def _in_processes(jobs: Sequence[Job], workers: int) -> None:
    context = multiprocessing.get_context("spawn")
    pool_of = partial(ProcessPoolExecutor, mp_context=context, initializer=_one_thread)
    columns = TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn()
    with (
        context.Manager() as manager,
        pool_of(workers, max_tasks_per_child=1) as pool,  # a run leaves its RAM behind
        Progress(*columns, disable=not sys.stderr.isatty()) as progress,
    ):
        reports = manager.Queue()
        bars = {run.name: progress.add_task(run.name, total=1, start=False) for _, run in jobs}
        pending: set[Future[float]] = {
            pool.submit(_perform, experiment, run, reports) for experiment, run in jobs
        }
        while pending:
            done, pending = wait(pending, timeout=0.2, return_when=FIRST_COMPLETED)
            _show(reports, progress, bars)
            for future in done:
                future.result()  # an error in a run ends them all
        _show(reports, progress, bars)


def _show(reports: Any, progress: Progress, bars: dict[str, Any]) -> None:
    while True:
        try:
            name, what, done, total = reports.get_nowait()
        except Empty:
            return
        progress.start_task(bars[name])
        text = f"{name}: {what}"
        progress.update(bars[name], description=text, completed=done, total=total)
        if done == total and not sys.stderr.isatty():
            print(text, flush=True)


def _one_thread() -> None:
    torch.set_num_threads(1)


def _perform(experiment: Experiment, run: Run, reports: Any) -> float:
    def report(what: str, done: int, total: int) -> None:
        reports.put((run.name, what, done, total))

    started = time.time()
    perform(experiment, run, report)
    seconds = time.time() - started
    report(f"finished in {seconds:.0f} s", 1, 1)
    return seconds


# The command line ---------------------------------------------------------------------------------


def options(about: str) -> argparse.ArgumentParser:
    """The options that every command line here has."""
    parser = argparse.ArgumentParser(description=about.partition("\n\n")[0])
    add = parser.add_argument
    add(
        "--quick", action="store_true", help="few and larger steps: shapes, not the paper's numbers"
    )
    add(
        "--jobs", type=from_on(1), default=2, metavar="N",
        help="runs at a time, a thread each (default: 2)",
    )  # fmt: skip
    add("--again", action="store_true", help="repeat runs that were finished before")
    add("--keep", action="store_true", help="do not delete the memories (gigabytes each)")
    add("--results", metavar="DIR",
        help="directory for numbers and figures (default: experiments/results/images, "
        "and with --quick runs/images/quick/results)")  # fmt: skip
    add("--scratch", metavar="DIR",
        help="directory for memories while they are needed (default: runs/images)")  # fmt: skip
    return parser


def from_on(least: int) -> Callable[[str], int]:
    """A whole number of a command line that is not below the least one."""

    def whole(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            number = least - 1
        if number < least:
            raise argparse.ArgumentTypeError(f"{text!r}: expected a whole number from {least} on")
        return number

    return whole


def refuse_unwritable(parser: argparse.ArgumentParser, run: Run) -> None:
    """Hours of training are not for a place where nothing can be kept."""
    for option, folder in (("--results", run.results), ("--scratch", run.scratch)):
        try:
            Path(folder).mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder):
                pass
        except OSError as error:
            parser.error(
                f"argument {option}: {folder} cannot be written ({error.strerror}); "
                "name another directory"
            )


def planned(
    experiment: Experiment,
    given: argparse.Namespace,
    preset: str,
    seed: int,
    steps: Sequence[int] | None = None,
) -> Run:
    """A run as a command line asks for it."""
    usual = experiment.quick_steps if given.quick else experiment.steps
    results, scratch = (QUICK, SCRATCH / "quick") if given.quick else (RESULTS, SCRATCH)
    return Run(
        experiment.name,
        "quick" if given.quick else preset,
        seed,
        tuple(steps or usual),
        given.quick,
        given.results or str(results),
        given.scratch or str(scratch),
        given.keep,
    )


def start(command: Callable[[], None]) -> None:
    """Run a command; what a user can mend, or asked for, ends it in words, not in a traceback."""
    try:
        command()
    except KeyboardInterrupt:
        sys.exit("interrupted: the same command goes on with what is not finished")
    except DataError as missing:
        sys.exit(str(missing))


def main(experiment: Experiment, about: str) -> None:
    """Run one experiment as its command line says, and print its numbers."""
    parser = options(about)
    add, usual = parser.add_argument, " ".join(map(str, experiment.steps))
    add("--preset", choices=["authors", "vanilla"], default="authors",
        help="learning rule: SGD with momentum as the authors' code has it (default), or without; "
        "--quick has one of its own")  # fmt: skip
    add("--seeds", type=from_on(0), nargs="+", default=[0], metavar="N",
        help="a run from each of these random seeds (default: 0, whose run draws the "
        "figures)")  # fmt: skip
    add("--steps", type=from_on(1), nargs="+", metavar="N",
        help=f"training steps of each phase (default: {usual}, fewer with --quick)")  # fmt: skip
    given = parser.parse_args()
    if given.steps and len(given.steps) != len(experiment.steps):
        parser.error(
            f"argument --steps: {len(given.steps)} given; expected {len(experiment.steps)}, "
            "the steps of each phase"
        )
    seeds = dict.fromkeys(given.seeds)  # twice the same would be one memory written twice at once
    runs = [planned(experiment, given, given.preset, seed, given.steps) for seed in seeds]
    refuse_unwritable(parser, runs[0])
    for numbers in perform_all([(experiment, run) for run in runs], given.jobs, given.again):
        print(json.dumps(numbers["results"], indent=1, ensure_ascii=False))
