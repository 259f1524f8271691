"""What recording costs: plain training, dualform, and the naive ways, side by side in one process.

    OMP_NUM_THREADS=1 python benchmarks/recording.py [--steps 3000]

MLP 784-800-800-10, batch 128, and, where hooks weigh most, twenty layers of width 128, batch 32;
float32, SGD with momentum or AdamW, one training thread. All contenders take turns, a chunk of
steps at a time, so that a noisy machine disturbs them alike; the ratio of a chunk is taken against
the mean of the plain chunks before and after it, and the median over chunks is printed. Audit and
checksums are included, and each chunk of a recording waits until everything is on disk before its
clock stops.

Where a network happens to lie in memory makes it faster or slower than an equal one, by 1 or 2 % on
the machine this was written on. So the chunks are those of several recordings, each with networks
of its own, made in turns one or the other first, and warmed up by a chunk that does not count.
Bytes are those of one more recording, sustained over `--steps` steps.
"""

from __future__ import annotations

import argparse
import itertools
import json
import pickle
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import dualform

Times = dict[str, list[tuple[float, ...]]]
"""Of every contender and chunk: its ratios to plain training, by the `CLOCKS`."""

CLOCKS = ("main-thread CPU", "wall", "total CPU")
IMAGES = 10_000


class Job(NamedTuple):
    """What is trained: layers of these sizes with ReLUs between, so many examples at a time."""

    sizes: tuple[int, ...]
    batch: int
    optimizer: Callable[[Any], torch.optim.Optimizer]

    @property
    def numbers(self) -> int:
        """In the keys and error signals of one example, but for the inputs, which recur and are
        stored once."""
        return sum(self.sizes[1:-1]) + sum(self.sizes[1:])


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=3e-3, momentum=0.9)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3)


MLP = Job((784, 800, 800, 10), 128, sgd)
DEEP = Job((*[128] * 20, 10), 32, sgd)
BATCH = MLP.batch


class Way(NamedTuple):
    """A way to record: what it is called, `record`'s options, what it should cost at most.

    `bytes`: what is kept of one example, besides its input, which is stored once; `most`: how many
    bytes per example and step it should take at most, everything on disk included. `recordings`:
    over how many of them the chunks are spread; `times`: how many times as many chunks as of other
    ways, where what is to be told is small beside what the machine's other users make of it.
    """

    name: str
    options: dict[str, Any]
    targets: dict[str, float]
    bytes: int | None = None
    most: int | None = None
    recordings: int = 6
    times: int = 1
    job: Job = MLP


MAIN = CLOCKS[0]
KEPT_BESIDE = 1.07
"""Bytes on disk over those of rows: states kept on the way are up to a sixteenth of these."""

WAYS = (
    Way("float32", {}, dict(zip(CLOCKS, (1.12, 1.20, 1.32), strict=True)), 4 * MLP.numbers),
    Way(
        "float16",
        {"dtype": "float16"},
        dict(zip(CLOCKS, (1.13, 1.20, 1.45), strict=True)),
        2 * MLP.numbers + 4 * len(MLP.sizes[1:]),
        6900,
    ),
    Way("keys of all layers alone", {"keep": "keys"}, {MAIN: 1.07}, recordings=12, times=2),
    Way("AdamW", {}, {MAIN: 1.18}, job=MLP._replace(optimizer=adamw)),
    Way("20 layers of width 128", {}, {MAIN: 1.50}, job=DEEP),
    Way("20 layers, AdamW", {}, {MAIN: 1.35}, job=DEEP._replace(optimizer=adamw)),
    Way("20 layers, keys alone", {"keep": "keys"}, {MAIN: 1.35}, job=DEEP),
)


def network(job: Job) -> nn.Sequential:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for a, b in itertools.pairwise(job.sizes):
        layers += [nn.Linear(a, b), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


class Contender:
    """A model, its optimizer, and what is done around a step."""

    def __init__(self, name: str, job: Job = MLP) -> None:
        self.name = name
        self.model = network(job)
        self.optimizer = job.optimizer(self.model.parameters())

    def chunk(self, images: Tensor, labels: Tensor, batches: Tensor) -> None:
        for batch in batches:
            self.before(batch, labels[batch])
            loss = nn.functional.cross_entropy(self.model(images[batch]), labels[batch])
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        self.finish()

    def before(self, batch: Tensor, labels: Tensor) -> None: ...

    def finish(self) -> None: ...

    def linears(self) -> list[nn.Linear]:
        return [m for m in self.model if isinstance(m, nn.Linear)]


class Recorded(Contender):
    recorder: dualform.Recorder

    def before(self, batch: Tensor, labels: Tensor) -> None:
        self.recorder.tag(example=batch, label=labels)

    def finish(self) -> None:
        self.recorder.flush()


class Clones(Contender):
    """Lists of CPU clones, as the paper's image code keeps its keys (here: error signals too)."""

    def __init__(self) -> None:
        super().__init__("clones in lists")
        self.kept: list[Tensor] = []
        for layer in self.linears():
            layer.register_forward_hook(
                lambda m, i, o: self.kept.append(i[0].detach().cpu().clone())
            )
            layer.register_full_backward_hook(lambda m, i, o: self.kept.append(o[0].cpu().clone()))

    def finish(self) -> None:
        self.kept.clear()


class Pickles(Contender):
    """A half-precision pickle per step and layer, as the paper's language-model code does."""

    def __init__(self, path: Path) -> None:
        super().__init__("half-precision pickles")
        self.path = path
        path.mkdir()
        self.files: list[Any] = []
        for index, layer in enumerate(self.linears()):
            layer.register_forward_hook(lambda m, i, o, k=index: self.dump(2 * k, i[0]))
            layer.register_full_backward_hook(lambda m, i, o, k=index: self.dump(2 * k + 1, o[0]))

    def dump(self, index: int, tensor: Tensor) -> None:
        if not self.files:
            self.files = [open(self.path / f"{k}.pickle", "wb") for k in range(6)]  # noqa: SIM115
        half = tensor.detach().cpu().half()
        pickle.dump(half, self.files[index], protocol=pickle.HIGHEST_PROTOCOL)

    def finish(self) -> None:
        for file in self.files:
            file.close()
        self.files = []


def assert_identical(model: nn.Module, other: nn.Module) -> None:
    pairs = zip(model.parameters(), other.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs), "the contenders trained different networks"


def clocks() -> tuple[float, float, float]:
    return time.thread_time(), time.perf_counter(), time.process_time()


def measure(run: Callable[[], None]) -> tuple[float, ...]:
    start = clocks()
    run()
    return tuple(b - a for a, b in zip(start, clocks(), strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--chunk", type=int, default=150)
    parser.add_argument(
        "--chunks",
        type=int,
        default=24,
        help="that count, of every way; the naive ones: of its first recording",
    )
    parser.add_argument("--naive", type=int, default=1, help="0: without the naive ways")
    parser.add_argument("--only", default="", help="the ways whose names contain this")
    parser.add_argument("--path", default=None, help="where to record; default: a temporary place")
    options = parser.parse_args()
    torch.set_num_threads(1)
    sustained = options.steps // options.chunk
    directory = Path(tempfile.mkdtemp(prefix="dualform-bench-", dir=options.path))
    try:
        for way in WAYS:
            if options.only not in way.name:
                continue
            times: Times = {}
            data = data_of(way.job, (max(sustained, options.chunks), options.chunk))
            own = data.batches[: options.chunks].repeat(way.times, 1, 1)
            for number, part in enumerate(torch.chunk(own, way.recordings)):
                others: list[Contender] = []
                if way is WAYS[0] and number == 0 and options.naive:
                    others = [Clones(), Pickles(directory / "pickles")]
                some = data._replace(batches=part)
                compare(way, others, directory, some, times, plain_first=number % 2 == 0)
            report_times(way, times)
            if way.bytes is not None:
                some = data._replace(batches=data.batches[:sustained])
                report_bytes(way, sustain(way, directory, some))
    finally:
        shutil.rmtree(directory, ignore_errors=True)


class Data(NamedTuple):
    images: Tensor
    labels: Tensor
    batches: Tensor


def data_of(job: Job, chunks: tuple[int, int]) -> Data:
    """Random images with labels, and which of them each batch of each chunk takes."""
    generator = torch.Generator().manual_seed(1)
    images = torch.rand(IMAGES, job.sizes[0], generator=generator)
    labels = torch.randint(0, 10, (IMAGES,), generator=generator)
    return Data(images, labels, torch.randint(0, IMAGES, (*chunks, job.batch), generator=generator))


def compare(
    way: Way,
    others: list[Contender],
    directory: Path,
    data: Data,
    times: Times,
    *,
    plain_first: bool,
) -> None:
    """Chunks of one recording, of plain training and of other ways to keep it, taking turns."""
    images, labels, batches = data
    one = Contender("plain", way.job) if plain_first else None
    recorded = Recorded("dualform", way.job)
    plain = one or Contender("plain", way.job)
    kept = [recorded, *others]
    run = directory / "run"
    with dualform.record(recorded.model, run, **way.options) as recorder:
        recorded.recorder = recorder
        for contender in (*kept, plain):  # the first steps make room in memory, once
            contender.chunk(images, labels, batches[0])
        before = measure(lambda: plain.chunk(images, labels, batches[0]))
        for chunk in batches:
            for contender in kept:
                cost = measure(lambda c=contender, some=chunk: c.chunk(images, labels, some))
                after = measure(lambda some=chunk: plain.chunk(images, labels, some))
                ratios = tuple(2 * c / (a + b) for c, a, b in zip(cost, before, after, strict=True))
                times.setdefault(contender.name, []).append(ratios)
                before = after
            for other in others:  # the same batches so far: it must be the same network
                assert_identical(recorded.model, other.model)
    shutil.rmtree(run)


def sustain(way: Way, directory: Path, data: Data) -> dualform.Memory:
    """The memory of one recording of all the batches."""
    recorded = Recorded("dualform", way.job)
    run = directory / "sustained"
    shutil.rmtree(run, ignore_errors=True)
    with dualform.record(recorded.model, run, **way.options) as recorder:
        recorded.recorder = recorder
        for chunk in data.batches:
            recorded.chunk(data.images, data.labels, chunk)
    return dualform.Memory.open(run)


def report_times(way: Way, times: Times) -> None:
    for name, rows in times.items():
        for column, clock in enumerate(CLOCKS):
            values = sorted(row[column] for row in rows)
            ratio = statistics.median(values)
            target = way.targets.get(clock) if name == "dualform" else None
            line: dict[str, Any] = {
                "bench": f"{way.name}: {name} / plain training, {clock}",
                "ratio": round(ratio, 3),
                "target": target,
                "ok": None if target is None else ratio <= target,
                "range": [round(values[0], 3), round(values[-1], 3)],
                "chunks": len(values),
            }
            print(json.dumps(line), flush=True)


def report_bytes(way: Way, memory: dualform.Memory) -> None:
    distinct = memory.layer("0").distinct
    assert distinct is not None
    assert way.bytes is not None
    inputs = distinct.rows * way.job.sizes[0] * memory.layer("0").stored.itemsize
    examples = memory.steps * way.job.batch
    per_example = memory.bytes_on_disk / examples
    ratio = memory.bytes_on_disk / (way.bytes * examples + inputs)
    line: dict[str, Any] = {
        "bench": f"{way.name}: bytes on disk / bytes of what is kept, inputs once",
        "ratio": round(ratio, 4),
        "target": KEPT_BESIDE,
        "ok": ratio <= KEPT_BESIDE,
        "bytes per example": round(per_example),
        "steps": memory.steps,
    }
    print(json.dumps(line), flush=True)
    if way.most is not None:
        ratio = (memory.bytes_on_disk - inputs) / examples / way.most
        line = {
            "bench": f"{way.name}: bytes per example and step, inputs aside / {way.most:,}",
            "ratio": round(ratio, 4),
            "target": 1.0,
            "ok": ratio <= 1.0,
            "inputs": distinct.rows,
        }
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
