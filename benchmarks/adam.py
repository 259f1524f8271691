"""What exactness under AdamW costs: recording against plain training, questions against SGD's.

    OMP_NUM_THREADS=1 python benchmarks/adam.py [--steps 3000] [--asked 150]

MLP 784-800-800-10, batch 128, float32, one thread, as in `recording.py`: plain training by AdamW
and recorded training by AdamW take turns, a chunk of steps at a time. Then two runs of `--asked`
steps each, one by AdamW and one by SGD with momentum, are asked the same questions in turn: what
the patterns of the first layer contributed to one output, what every label wrote (ten matrices, in
one sweep), the weights without a label once those are known, and the whole certificate.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import dualform as df
from recording import BATCH, CLOCKS, IMAGES, Contender, Recorded, measure

TARGETS = {"main-thread CPU": 1.20, "wall": 1.20}


def by_adam(contender: Contender) -> Contender:
    contender.optimizer = torch.optim.AdamW(contender.model.parameters(), lr=1e-3)  # type: ignore[assignment]
    return contender


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--chunk", type=int, default=150)
    parser.add_argument("--asked", type=int, default=150, help="steps of the runs that are asked")
    parser.add_argument("--path", default=None, help="where to record; default: a temporary place")
    options, _ = parser.parse_known_args()
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(1)
    images = torch.rand(IMAGES, 784, generator=generator)
    labels = torch.randint(0, 10, (IMAGES,), generator=generator)
    directory = Path(tempfile.mkdtemp(prefix="dualform-bench-", dir=options.path))
    try:
        shape = (max(1, options.steps // options.chunk), options.chunk, BATCH)
        batches = torch.randint(0, IMAGES, shape, generator=generator)
        compare_recording(directory / "run", images, labels, batches)
        shutil.rmtree(directory / "run")
        asked = torch.randint(0, IMAGES, (options.asked, BATCH), generator=generator)
        compare_questions(directory, images, labels, asked)
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def compare_recording(path: Path, images: Tensor, labels: Tensor, batches: Tensor) -> None:
    plain = by_adam(Contender("plain"))
    recorded = by_adam(Recorded("dualform"))
    assert isinstance(recorded, Recorded)
    rows = []
    with df.record(recorded.model, recorded.optimizer, path) as recorder:
        recorded.recorder = recorder
        plain.chunk(images, labels, batches[0][:30])
        before = measure(lambda: plain.chunk(images, labels, batches[0]))
        for chunk in batches:
            cost = measure(lambda some=chunk: recorded.chunk(images, labels, some))
            after = measure(lambda some=chunk: plain.chunk(images, labels, some))
            pairs = zip(cost, before, after, strict=True)
            rows.append([2 * c / (a + b) for c, a, b in pairs])
            before = after
    for clock, values in zip(CLOCKS, zip(*rows, strict=True), strict=True):
        ratio, target = statistics.median(values), TARGETS.get(clock)
        report(
            f"AdamW: dualform / plain training, {clock}",
            ratio,
            target,
            range=[round(min(values), 3), round(max(values), 3)],
            chunks=len(values),
        )
    memory = df.Memory.open(path)
    kept = len(memory.states("0.weight").steps)
    states = kept * 2 * sum(p.numel() * 4 for p in recorded.model.parameters())
    report(
        "AdamW: bytes of kept optimizer states / all bytes on disk",
        states / memory.bytes_on_disk,
        None,
        states=kept,
        steps=memory.steps,
    )


def train(path: Path, contender: Contender, images: Tensor, labels: Tensor, some: Tensor) -> None:
    with df.record(contender.model, contender.optimizer, path) as recorder:
        for batch in some:
            recorder.tag(example=batch, label=labels[batch])
            nn.functional.cross_entropy(contender.model(images[batch]), labels[batch]).backward()
            contender.optimizer.step()
            contender.optimizer.zero_grad()


def compare_questions(directory: Path, images: Tensor, labels: Tensor, asked: Tensor) -> None:
    contenders = {"SGD": Contender("SGD"), "AdamW": by_adam(Contender("AdamW"))}
    for name, contender in contenders.items():
        train(directory / name, contender, images, labels, asked)
    image = images[:1]
    questions: dict[str, Callable[[df.DualForm], Any]] = {
        "contributions of the first layer's patterns": lambda dual: dual.contribute(
            image, target=3, layer="0"
        ),
        "what every label wrote, ten matrices a layer": lambda dual: dual.without(
            label=1
        ).weights(),
        "the weights without another label, from those": lambda dual: dual.without(
            label=2
        ).weights(),
        "the certificate": lambda dual: dual.verify(),
    }
    duals = {n: df.DualForm(c.model, directory / n) for n, c in contenders.items()}
    for question, ask in questions.items():
        seconds = {name: timed(lambda d=dual, a=ask: a(d)) for name, dual in duals.items()}
        report(
            f"AdamW / SGD: {question}",
            seconds["AdamW"] / seconds["SGD"],
            None,
            seconds={name: round(value, 2) for name, value in seconds.items()},
            steps=len(asked),
        )


def timed(run: Callable[[], Any]) -> float:
    """CPU time of this thread: a noisy machine disturbs it least."""
    start = time.thread_time()
    run()
    return time.thread_time() - start


def report(bench: str, ratio: float, target: float | None, **more: Any) -> None:
    ok = None if target is None else ratio <= target
    line = {"bench": bench, "ratio": round(ratio, 3), "target": target, "ok": ok}
    print(json.dumps(line | more), flush=True)


if __name__ == "__main__":
    main()
