"""Times of several contenders, taken in turns; memory of our own; one JSON line per row."""

from __future__ import annotations

import json
import os
import resource
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from dualform.attention import compiled

Timed = dict[str, list[tuple[float, float]]]


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
    """Whether the extra `fast` is there."""
    return compiled._compiled() is not None
