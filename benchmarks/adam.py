"""What asking a run by AdamW costs, against asking the same of a run by SGD.

    OMP_NUM_THREADS=1 python benchmarks/adam.py [--asked 150]

MLP 784-800-800-10, batch 128, float32, one thread, as in `recording.py` (which has what recording
AdamW costs). Two runs of `--asked` steps each, one by AdamW and one by SGD with momentum, are asked
the same questions in turn: what the patterns of the first layer contributed to one output, what
every label wrote (ten matrices, in one sweep), the weights without a label once those are known,
and the whole certificate.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import dualform
from recording import BATCH, IMAGES, MLP, Contender, adamw


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--asked", type=int, default=150, help="steps of the runs that are asked")
    parser.add_argument("--path", default=None, help="where to record; default: a temporary place")
    options, _ = parser.parse_known_args()
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(1)
    images = torch.rand(IMAGES, 784, generator=generator)
    labels = torch.randint(0, 10, (IMAGES,), generator=generator)
    directory = Path(tempfile.mkdtemp(prefix="dualform-bench-", dir=options.path))
    try:
        asked = torch.randint(0, IMAGES, (options.asked, BATCH), generator=generator)
        compare_questions(directory, images, labels, asked)
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def train(path: Path, contender: Contender, images: Tensor, labels: Tensor, some: Tensor) -> None:
    with dualform.record(contender.model, path) as recorder:
        for batch in some:
            recorder.tag(example=batch, label=labels[batch])
            nn.functional.cross_entropy(contender.model(images[batch]), labels[batch]).backward()
            contender.optimizer.step()
            contender.optimizer.zero_grad()


def compare_questions(directory: Path, images: Tensor, labels: Tensor, asked: Tensor) -> None:
    by_adam = Contender("AdamW", MLP._replace(optimizer=adamw))
    contenders = {"SGD": Contender("SGD"), "AdamW": by_adam}
    for name, contender in contenders.items():
        train(directory / name, contender, images, labels, asked)
    image = images[:1]
    questions: dict[str, Callable[[dualform.DualForm], Any]] = {
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
    duals = {n: dualform.DualForm(c.model, directory / n) for n, c in contenders.items()}
    for question, ask in questions.items():
        seconds = {name: timed(lambda d=dual, a=ask: a(d)) for name, dual in duals.items()}
        line = {
            "bench": f"AdamW / SGD: {question}",
            "ratio": round(seconds["AdamW"] / seconds["SGD"], 3),
            "target": None,
            "ok": None,
            "seconds": {name: round(value, 2) for name, value in seconds.items()},
            "steps": len(asked),
        }
        print(json.dumps(line), flush=True)


def timed(run: Callable[[], Any]) -> float:
    """CPU time of this thread: a noisy machine disturbs it least."""
    start = time.thread_time()
    run()
    return time.thread_time() - start


if __name__ == "__main__":
    main()
