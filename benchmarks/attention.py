"""What asking costs: dualform against the ways one would otherwise do it, in one process.

    OMP_NUM_THREADS=1 python benchmarks/attention.py [--patterns 384000] [--large]

A memory of 384,000 keys of width 800, recorded from a real training run (an MLP on images made up
of ten classes), asked with queries that are hidden activations of new images. Contenders take turns
and are compared by CPU time (wall time where several threads are compared); the ratio is the median
over the turns. Every contender's answer is compared with dualform's before its time counts.

- *gemv*, *sgemm*: one streamed product with all keys and nothing else, in float32, by torch.
- *reading*: the sum of all keys, by torch: every byte once, and hardly anything else.
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
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

if os.path.exists("/proc/cpuinfo") and "avx512f" in Path("/proc/cpuinfo").read_text("utf-8"):
    os.environ.setdefault("OPENBLAS_CORETYPE", "SKYLAKEX")  # before OpenBLAS is loaded: see above

import numpy as np
import torch
from asking.contenders import (
    WIDTH,
    Asked,
    K,
    agree,
    faiss_index,
    queries_for,
    recorded,
)
from asking.measuring import (
    PeakWatch,
    fast,
    in_turns,
    private_megabytes,
    report,
    row,
    without_loops,
)
from torch import Tensor


def one_query(asked: Asked, turns: int) -> None:
    agree(asked)
    limit = {"gemv": asked.limit, "authors": asked.authors, "torch": asked.torch}
    limit["reading"] = asked.read
    ways = limit | {"plain": without_loops(asked.everything), "plain top": without_loops(asked.top)}
    if fast():
        ways |= {"fast": asked.everything, "fast top": asked.top}
    times = in_turns(ways, turns)
    what = "1 query, top 500, per class, sums by class, per example, over time"
    if fast():
        report(f"{what}: gemv alone / ours, with fast", times, "gemv", "fast", least=0.8)
        report(f"{what}: reading the keys / ours, with fast", times, "reading", "fast")
        report(f"{what}: the authors' way / ours, with fast", times, "authors", "fast", least=2.5)
        report("1 query, top 500: gemv alone / ours, with fast", times, "gemv", "fast top")
        report("1 query, top 500: torch / ours, with fast", times, "torch", "fast top")
    report(f"{what}: gemv alone / ours", times, "gemv", "plain")
    report(f"{what}: the authors' way / ours", times, "authors", "plain")
    report("1 query, top 500: gemv alone / ours", times, "gemv", "plain top")


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


def class_sums(path: Path, queries: Tensor, some: int) -> None:
    """Table 1: sums by class for 10,000 queries; the authors' loop is timed for a few of them."""
    few = Asked(path, queries[:some])
    asked = Asked(path, queries)
    asked.read()  # keys in RAM and mapped, as they are for the authors' loop
    authors = in_turns({"authors": few.authors_sums}, 1)["authors"][0][0] * len(queries) / some
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
