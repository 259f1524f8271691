"""What recording a transformer costs, against plain training, side by side in one process.

    OMP_NUM_THREADS=1 python benchmarks/transformer.py [--rounds 16]

Four encoder layers (d = 128, feed-forward 512, 4 heads), batch 32 × 128 positions: 4,096 patterns
per layer and step, kept in float16 with row-scaled error signals; SGD with momentum, one training
thread. Plain and recorded training take turns, two steps at a time, in one sustained recording, and
each turn of the recorded one waits until everything is on disk before its clock stops.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import tempfile
from pathlib import Path

import torch
from torch import Tensor, nn

import dualform
from recording import CLOCKS, measure

WORDS, WIDTH, BATCH, LENGTH = 64, 128, 32, 128
STEPS_PER_TURN = 2
TARGET = 1.12


class Model(nn.Module):
    """Tokens in, logits out."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(self.encoder(self.embedding(tokens)))
        return logits


class Contender:
    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = Model()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9)
        self.recorder: dualform.Recorder | None = None

    def turn(self, tokens: Tensor) -> None:
        for batch in tokens:
            if self.recorder is not None:
                self.recorder.tag(example=torch.arange(BATCH))
            logits = self.model(batch[:, :-1])
            nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten()).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        if self.recorder is not None:
            self.recorder.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=16)
    parser.add_argument("--path", default=None, help="where to record; default: a temporary place")
    options, _ = parser.parse_known_args()
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(1)
    shape = (options.rounds, STEPS_PER_TURN, BATCH, LENGTH + 1)
    rounds = torch.randint(0, WORDS, shape, generator=generator)
    directory = Path(tempfile.mkdtemp(prefix="dualform-bench-", dir=options.path))
    plain, recorded = Contender(), Contender()
    ratios = []
    try:
        run = directory / "run"
        with dualform.record(recorded.model, run, dtype="float16") as recorder:
            recorded.recorder = recorder
            for contender in (recorded, plain):  # buffers and graphs are looked at once
                contender.turn(rounds[0])
            before = measure(lambda: plain.turn(rounds[0]))
            for tokens in rounds:
                cost = measure(lambda some=tokens: recorded.turn(some))
                after = measure(lambda some=tokens: plain.turn(some))
                pairs = zip(cost, before, after, strict=True)
                ratios.append([2 * c / (a + b) for c, a, b in pairs])
                before = after
        memory = dualform.Memory.open(run)
        patterns = sum(memory.layer(name).rows for name in memory.layers)
        numbers = sum(
            memory.layer(n).rows * (memory.layer(n).in_features + memory.layer(n).out_features)
            for n in memory.layers
            if memory.layer(n).kind == "linear"
        )
        size = memory.bytes_on_disk
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    for column, clock in enumerate(CLOCKS):
        values = sorted(row[column] for row in ratios)
        target = TARGET if clock == "main-thread CPU" else None
        ratio = statistics.median(values)
        line = {
            "bench": f"transformer, float16: dualform / plain training, {clock}",
            "ratio": round(ratio, 3),
            "target": target,
            "ok": None if target is None else ratio <= target,
            "range": [round(values[0], 3), round(values[-1], 3)],
            "chunks": len(values),
            "patterns": patterns,
        }
        print(json.dumps(line), flush=True)
    line = {
        "bench": "transformer, float16: bytes on disk / 2 bytes per number",
        "ratio": round(size / (2 * numbers), 4),
        "target": None,
        "ok": None,
    }
    print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
