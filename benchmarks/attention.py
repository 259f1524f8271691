"""What asking costs: dualform against the ways one would otherwise do it, in one process.

    OMP_NUM_THREADS=1 python benchmarks/attention.py [--patterns 384000] [--large]

A memory of 384,000 keys of width 800, recorded from a real training run (an MLP on images made up
of ten classes), asked with queries that are hidden activations of new images. Contenders take turns
and are compared by CPU time (wall time where several threads are compared); the ratio is the median
over the turns. Every contender's answer is compared with dualform's before its time counts.

- *gemv*, *sgemm*: one streamed product with all keys and nothing else, by torch; what a machine can
  do at best.
- *the authors' way*: the paper's code, given these keys: a product per step of training, absolute
  values, `index_add` per example, full sorts, class by class.
- *torch*: the whole product, then `topk`. *numpy*: the same by numpy.
- *faiss*: `IndexFlatIP` with its BLAS threshold lowered from 128,000 to 20, and
  OPENBLAS_CORETYPE set: on virtual machines the wheel's OpenBLAS may take kernels for processors of
  twenty years ago, and would be several times slower. Skipped where faiss is not installed.

Without the extra `fast` (numba), rows with compiled loops are left out; the others are measured
with `DUALFORM_FAST=0` as well. `--large` adds 4,000,000 patterns (of width 128, 2 GB).
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

if os.path.exists("/proc/cpuinfo") and "avx512f" in Path("/proc/cpuinfo").read_text("utf-8"):
    os.environ.setdefault("OPENBLAS_CORETYPE", "SKYLAKEX")  # before OpenBLAS is loaded: see above

import numpy as np
import torch
from torch import Tensor, nn

import dualform as df
from dualform.attention import compiled

WIDTH, BATCH, EXAMPLES, CLASSES, K = 800, 128, 20_000, 10, 500
LAYER = "2"
Timed = dict[str, list[tuple[float, float]]]


# What is asked, and of what ----------------------------------------------------------------------


def images(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Images of ten classes, each a mean and forty directions to vary in."""
    shape = torch.Generator().manual_seed(1)
    means = torch.rand(CLASSES, 784, generator=shape)
    directions = 0.15 * torch.randn(CLASSES, 40, 784, generator=shape)
    labels = torch.randint(0, CLASSES, (count,), generator=generator)
    varied = torch.bmm(torch.randn(count, 1, 40, generator=generator), directions[labels])[:, 0]
    noise = 0.05 * torch.randn(count, 784, generator=generator)
    return (means[labels] + varied + noise).clamp(0, 1), labels


def recorded(path: Path, patterns: int, width: int, **options: Any) -> nn.Sequential:
    """Train and record the keys of the second layer."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(784, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=3e-3, momentum=0.9)
    generator = torch.Generator().manual_seed(2)
    inputs, labels = images(EXAMPLES, generator)
    settings = {"layers": [LAYER], "error_signals": False, "step_budget": 0} | options
    with df.record(model, optimizer, path, **settings) as recorder:
        for step in range(patterns // BATCH):
            batch = torch.randint(0, EXAMPLES, (BATCH,), generator=generator)
            task = "first" if step < patterns // BATCH // 2 else "second"
            recorder.tag(example=batch, label=labels[batch], task=task)
            nn.functional.cross_entropy(model(inputs[batch]), labels[batch]).backward()
            optimizer.step()
            optimizer.zero_grad()
    return model


def queries_for(model: nn.Sequential, count: int) -> Tensor:
    with torch.no_grad():
        hidden: Tensor = model[:2](images(count, torch.Generator().manual_seed(3))[0])
    return hidden


# Measuring ----------------------------------------------------------------------------------------


def in_turns(contenders: dict[str, Callable[[], Any]], turns: int) -> Timed:
    """(CPU, wall) seconds of every contender, one after the other, several times."""
    times: Timed = {name: [] for name in contenders}
    for run in contenders.values():
        run()
    for _ in range(turns):
        for name, run in contenders.items():
            cpu, wall = time.process_time(), time.perf_counter()
            run()
            times[name].append((time.process_time() - cpu, time.perf_counter() - wall))
    return times


def report(
    bench: str,
    times: Timed,
    over: str,
    under: str,
    *,
    least: float | None = None,
    clock: int = 0,
    scale: float = 1.0,
    **facts: Any,
) -> None:
    """One row: how many times as long `over` takes as `under`; at least `least` is asked for."""
    pairs = zip(times[over], times[under], strict=True)
    ratios = sorted(scale * one[clock] / other[clock] for one, other in pairs)
    row(bench, statistics.median(ratios), least, ratios, **facts)


def row(bench: str, ratio: float, least: float | None, ratios: list[float], **facts: Any) -> None:
    line = {
        "bench": f"attention, {bench}",
        "ratio": round(ratio, 3),
        "target": least,
        "at_least": True,
        "ok": None if least is None else ratio >= least,
        "range": [round(min(ratios), 3), round(max(ratios), 3)],
        **facts,
    }
    print(json.dumps(line), flush=True)


@contextmanager
def plain() -> Iterator[None]:
    """Without compiled loops."""
    before = os.environ.get("DUALFORM_FAST")
    os.environ["DUALFORM_FAST"] = "0"
    try:
        yield
    finally:
        os.environ.pop("DUALFORM_FAST")
        if before is not None:
            os.environ["DUALFORM_FAST"] = before


def without_loops(run: Callable[[], Any]) -> Callable[[], Any]:
    def wrapped() -> Any:
        with plain():
            return run()

    return wrapped


# The contenders -----------------------------------------------------------------------------------


class Asked:
    """One memory and one set of queries, asked in every way there is."""

    def __init__(self, path: Path, queries: Tensor) -> None:
        self.memory = df.Memory.open(path)
        self.layer = self.memory.layer(LAYER)
        self.queries = queries
        self.keys = [b.keys for b in self.layer.blocks(4096, error_signals=False)]
        patterns = self.layer.patterns
        self.labels = torch.from_numpy(patterns["label"])
        self.examples = torch.from_numpy(patterns["example"])

    def spotlight(self, queries: Tensor | None = None) -> df.Spotlight:
        asked = self.queries if queries is None else queries
        return df.DualForm(None, self.memory).attend(queries=asked, layers=LAYER)[LAYER]

    def limit(self) -> None:
        """One product of all keys with all queries, streamed, its result thrown away."""
        for block in self.keys:
            if len(self.queries) == 1:
                torch.mv(block, self.queries[0])
            else:
                torch.mm(self.queries, block.T)

    def sgemm(self) -> None:
        """A product in the shape that suits a machine best."""
        square = self._square
        torch.mm(square, square)

    _square = torch.rand(2048, 2048)

    def top(self) -> df.Table:
        return self.spotlight().top(K)

    def everything(self) -> list[df.Table]:
        """Top patterns in all and per class, sums by class, per example and over time."""
        spotlight = self.spotlight()
        tables = [spotlight.top(K), spotlight.top(K, by="label"), spotlight.sum_by("label")]
        return [*tables, spotlight.by_example(), spotlight.over("step")]

    def torch(self) -> tuple[Tensor, Tensor]:
        found = torch.cat([self.queries @ block.T for block in self.keys], dim=1).topk(K)
        return found.values, found.indices

    def numpy(self) -> Any:
        keys, asked = self.keys, self.queries.numpy()
        weights = np.concatenate([asked @ block.numpy().T for block in keys], axis=1)
        best = np.argpartition(weights, -K, axis=1)[:, -K:]
        return np.take_along_axis(weights, best, axis=1)

    def authors(self) -> list[Tensor]:
        """The paper's code on these keys: chunks of a step, |α|, index_add, full sorts."""
        parts = [
            (self.queries @ block[low : low + BATCH].T).abs()
            for block in self.keys
            for low in range(0, len(block), BATCH)
        ]
        weights = torch.cat(parts, dim=1)
        per_example = torch.zeros(len(self.queries), EXAMPLES)
        per_example.index_add_(1, self.examples, weights)
        ordered = torch.sort(weights, dim=1, descending=True)
        answers = [ordered.values[:, :K], per_example]
        for label in range(CLASSES):
            inside = weights[:, self.labels == label]
            answers += [inside.sum(1), torch.sort(inside, dim=1, descending=True).values[:, :K]]
        return answers

    def authors_sums(self) -> Tensor:
        """Only what Table 1 needs: sums of |α| by class."""
        sums = torch.zeros(len(self.queries), CLASSES)
        start = 0
        for block in self.keys:
            for low in range(0, len(block), BATCH):
                weights = (self.queries @ block[low : low + BATCH].T).abs()
                sums.index_add_(1, self.labels[start : start + weights.shape[1]], weights)
                start += weights.shape[1]
        return sums


def agree(asked: Asked) -> None:
    """Nobody is compared before everybody gives the same answer (in float32)."""
    mine = asked.top()["weight"].reshape(len(asked.queries), -1)
    for other in (asked.torch()[0].numpy(), np.sort(asked.numpy(), axis=1)[:, ::-1]):
        assert np.allclose(mine, other, rtol=1e-4), "the contenders give different answers"
    sums = asked.spotlight().sum_by("label")["absolute"].reshape(-1, CLASSES)
    assert np.allclose(sums, asked.authors_sums().numpy(), rtol=1e-3)


# The rows -----------------------------------------------------------------------------------------


def one_query(asked: Asked, turns: int) -> None:
    agree(asked)
    limit = {"gemv": asked.limit, "authors": asked.authors, "torch": asked.torch}
    ways = limit | {"plain": without_loops(asked.everything), "plain top": without_loops(asked.top)}
    if fast():
        ways |= {"fast": asked.everything, "fast top": asked.top}
    times = in_turns(ways, turns)
    what = "1 query, top 500, per class, sums by class, per example, over time"
    if fast():
        report(f"{what}: gemv alone / ours, with fast", times, "gemv", "fast", least=0.8)
        report(f"{what}: the authors' way / ours, with fast", times, "authors", "fast", least=2.5)
        report("1 query, top 500: gemv alone / ours, with fast", times, "gemv", "fast top")
        report("1 query, top 500: torch / ours, with fast", times, "torch", "fast top")
    report(f"{what}: gemv alone / ours", times, "gemv", "plain")
    report(f"{what}: the authors' way / ours", times, "authors", "plain")
    report("1 query, top 500: gemv alone / ours", times, "gemv", "plain top")


def short_keys(asked: Asked, turns: int) -> None:
    if not fast():
        return
    expected = asked.top()
    started = time.process_time()
    made = df.DualForm(None, asked.memory).prepare(LAYER)
    built = time.process_time() - started
    found = asked.top()
    assert np.array_equal(found["pattern"], expected["pattern"])
    assert np.array_equal(found["weight"], expected["weight"])
    times = in_turns(
        {"float32": asked.torch, "ours": asked.top, "exact": lambda: asked.spotlight()._held},
        turns,
    )
    facts = {"bytes": int(made["bytes"][0]), "built_in_cpu_seconds": round(built, 2)}
    what = "1 query, exact top 500 by short keys"
    report(f"{what}: float32 scan and topk / ours", times, "float32", "ours", least=2.0, **facts)
    report(f"{what}: our own float64 scan / ours", times, "exact", "ours")


def many_queries(asked: Asked, turns: int) -> None:
    count, flops = len(asked.queries), 2.0 * len(asked.queries) * asked.layer.rows * WIDTH
    agree(asked)
    ways: dict[str, Callable[[], Any]] = {"sgemm": asked.sgemm, "gemm of keys": asked.limit}
    ways |= {"plain": without_loops(asked.top), "torch": asked.torch, "numpy": asked.numpy}
    if fast():
        ways["fast"] = asked.top
        ways["fast by label"] = lambda: asked.spotlight().top(K, by="label")
    index = faiss_index(asked)
    if index is not None:
        ways["faiss"] = lambda: index.search(asked.queries.numpy(), K)
        theirs = np.sort(index.search(asked.queries.numpy(), K)[0], axis=1)[:, ::-1]
        mine = asked.top()["weight"].reshape(count, -1)
        assert np.allclose(mine, theirs, rtol=1e-4)
    times = in_turns(ways, turns)
    scale = flops / (2 * 2048.0**3)  # the limit's multiplications, brought to the question's
    what = f"{count} queries, top 500"
    if fast():
        report(
            f"{what}: sgemm's speed / ours, with fast", times, "sgemm", "fast",
            least=0.75, scale=scale,
        )  # fmt: skip
        report(f"{what}: torch / ours, with fast", times, "torch", "fast")
        report(f"{what}: numpy / ours, with fast", times, "numpy", "fast")
        report(f"{what} per class: sgemm's speed / ours, with fast", times, "sgemm",
               "fast by label", scale=scale)  # fmt: skip
        if index is not None:
            report(f"{what}: faiss / ours, with fast", times, "faiss", "fast", least=1.0)
    report(f"{what}: sgemm's speed / ours", times, "sgemm", "plain", least=0.6, scale=scale)
    report(f"{what}: the same product of keys alone / ours", times, "gemm of keys", "plain")
    if index is not None:
        report(f"{what}: faiss / ours", times, "faiss", "plain")


def faiss_index(asked: Asked) -> Any:
    try:
        import faiss
    except ImportError:
        return None
    faiss.omp_set_num_threads(1)
    faiss.cvar.distance_compute_blas_threshold = 20
    index = faiss.IndexFlatIP(WIDTH)
    for block in asked.keys:
        index.add(block.numpy())
    return index


def class_sums(path: Path, queries: Tensor, some: int) -> None:
    """Table 1: sums by class for 10,000 queries; the authors' loop is timed for a few of them."""
    few = Asked(path, queries[:some])
    authors = in_turns({"authors": few.authors_sums}, 1)["authors"][0][0] * len(queries) / some
    shutil.rmtree(path / "derived", ignore_errors=True)
    asked = Asked(path, queries)
    started = time.process_time()
    asked.spotlight().sum_by("label")
    whole = time.process_time() - started
    facts = {"authors_timed_queries": some}
    row(
        "10,000 queries, sums by class: the authors' loop / ours, table included",
        authors / whole, 1000.0, [authors / whole], **facts,
    )  # fmt: skip
    again = in_turns({"ours": lambda: asked.spotlight().sum_by("label")}, 3)["ours"]
    ratios = [authors / cpu for cpu, _ in again]
    row("10,000 queries, sums by class: the authors' loop / ours, table known",
        statistics.median(ratios), None, ratios, **facts)  # fmt: skip


def narrow_keys(path: Path, queries: Tensor, turns: int) -> None:
    """Keys stored in 16 bits, against converting them all and multiplying."""
    asked = Asked(path, queries[:1])
    asked.keys = []
    stored = [b.narrow_keys for b in asked.layer.blocks(4096, error_signals=False)]

    def convert() -> Any:
        weights = [block.float() @ queries[0] for block in stored if block is not None]
        return torch.cat(weights).topk(K)

    ways = {"convert": convert, "plain": without_loops(asked.top)}
    if fast():
        ways["fast"] = asked.top
    times = in_turns(ways, turns)
    what = "1 query, 16-bit keys, top 500: convert, multiply, topk / ours"
    if fast():
        report(f"{what}, with fast", times, "convert", "fast")
    report(what, times, "convert", "plain")


def threads(asked: Asked, turns: int) -> None:
    """Wall time of one thread over that of two."""
    if (os.cpu_count() or 1) < 2:
        return

    def by(count: int, run: Callable[[], Any]) -> Callable[[], Any]:
        def wrapped() -> Any:
            torch.set_num_threads(count)
            try:
                return run()
            finally:
                torch.set_num_threads(1)

        return wrapped

    ways = {f"{n}": by(n, asked.top) for n in (1, 2)}
    times = in_turns(ways, turns)
    count = len(asked.queries)
    plural = "1 query" if count == 1 else f"{count} queries"
    report(f"{plural}, top 500: 1 thread / 2 threads, wall", times, "1", "2", clock=1)


def scaling(directory: Path, sizes: list[int], width: int) -> None:
    """Cost per pattern and peak memory, each size in a process of its own."""
    base: dict[str, float] = {}
    for rows in sizes:
        command = [sys.executable, "-W", "ignore", __file__, "--one-size", str(rows)]
        command += ["--width", str(width), "--path", str(directory)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        found = json.loads(done.stdout)
        base = base or found
        ratio = found["seconds"] / rows / (base["seconds"] / sizes[0])
        row(
            f"{rows:,} patterns of width {width}, 64 queries, top 500: CPU per pattern / at "
            f"{sizes[0]:,}",
            ratio, None, [ratio], extra_megabytes=round(found["extra_megabytes"], 1),
        )  # fmt: skip
        extra = found["extra_megabytes"]
        row(f"{rows:,} patterns: 100 MB / extra memory while asking", 100 / max(extra, 1.0),
            1.0, [100 / max(extra, 1.0)])  # fmt: skip


def one_size(directory: Path, rows: int, width: int) -> None:
    """Record so many patterns, then ask in a fresh state and watch private memory."""
    torch.set_num_threads(1)
    path = directory / f"size-{rows}"
    model = recorded(path, rows, width)
    queries = queries_for(model, 64)
    asked = Asked(path, queries)
    asked.keys = []
    asked.spotlight(queries[:9]).top(1)  # norms, compiled loops
    before = private_megabytes()
    with PeakWatch() as watch:
        started = time.process_time()
        asked.top()
        seconds = time.process_time() - started
    shutil.rmtree(path)
    print(json.dumps({"seconds": seconds, "extra_megabytes": watch.peak - before}))


def private_megabytes() -> float:
    """Memory of our own; pages of files that are only mapped do not count."""
    with open("/proc/self/status", encoding="utf-8") as status:
        for line in status:
            if line.startswith("RssAnon"):
                return int(line.split()[1]) / 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


class PeakWatch:
    """The most private memory seen while something runs."""

    def __enter__(self) -> PeakWatch:
        import threading

        self.peak, self._done = private_megabytes(), threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._done.wait(0.002):
            self.peak = max(self.peak, private_megabytes())

    def __exit__(self, *exception: Any) -> None:
        self._done.set()
        self._thread.join()


def fast() -> bool:
    return compiled._compiled() is not None


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--patterns", type=int, default=384_000)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--path", default=None, help="where to record; default: a temporary place")
    parser.add_argument("--large", action="store_true", help="4,000,000 patterns as well")
    parser.add_argument("--one-size", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--width", type=int, default=WIDTH, help=argparse.SUPPRESS)
    options, _ = parser.parse_known_args()
    torch.set_num_threads(1)
    if options.one_size:
        one_size(Path(options.path), options.one_size, options.width)
        return
    directory = Path(tempfile.mkdtemp(prefix="dualform-bench-", dir=options.path))
    try:
        path = directory / "float32"
        model = recorded(path, options.patterns, WIDTH)
        queries = queries_for(model, 10_000)
        one_query(Asked(path, queries[:1]), options.turns)
        threads(Asked(path, queries[:1]), options.turns)
        short_keys(Asked(path, queries[:1]), options.turns)
        many_queries(Asked(path, queries[:256]), max(2, options.turns - 2))
        threads(Asked(path, queries[:256]), max(2, options.turns - 3))
        class_sums(path, queries, 32)
        shutil.rmtree(path)
        narrow = directory / "float16"
        recorded(narrow, options.patterns // 3, WIDTH, dtype="float16")
        narrow_keys(narrow, queries, options.turns)
        shutil.rmtree(narrow)
        scaling(directory, [100_096, 1_000_064, *([4_000_000] if options.large else [])], 128)
    finally:
        shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    main()
