"""What tests of the recorder share: a training whose every step depends on its number alone.

`Training` keeps what model and optimizer were after every update; `proved` asks a memory to be what
that was. As a script this is a server that forks a training process for every line it reads, so
that dozens of real processes can be started and killed in seconds.
"""

from __future__ import annotations

import contextlib
import copy
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from tests.recording.rules import OWN
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, Optimizer

from dualform.certificate.checks import verify
from dualform.certificate.replay import at
from dualform.certificate.report import Verification
from dualform.learning_rules import classes
from dualform.memory import Memory
from dualform.recording import Recorder, record

ROOT = Path(__file__).resolve().parents[2]
MOMENTUM: dict[str, Any] = {"lr": 0.05, "momentum": 0.9, "weight_decay": 1e-3}


def network(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """Linear layers, norms (kept by examples), buffers."""
    torch.manual_seed(3)
    return nn.Sequential(
        nn.BatchNorm1d(6), nn.Linear(6, 9), nn.Tanh(), nn.LayerNorm(9), nn.Linear(9, 4)
    ).to(dtype)


def plain(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 4)).to(dtype)


def batch(number: int, size: int = 5, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(number)
    inputs = torch.randn(size, 6, generator=generator, dtype=torch.float64).to(dtype)
    return inputs, torch.randint(0, 4, (size,), generator=generator)


def backward(model: nn.Module, number: int, size: int = 5) -> None:
    inputs, labels = batch(number, size, next(model.parameters()).dtype)
    F.cross_entropy(model(inputs), labels).backward()


def update(model: nn.Module, optimizer: Optimizer, number: int) -> None:
    backward(model, number)
    optimizer.step()
    optimizer.zero_grad()


def recording(
    model: nn.Module, optimizers: Any, path: Path, *, segment_bytes: int = 0, **options: Any
) -> Recorder:
    """`dualform.record`, with segments as small as a test wants them."""
    recorder = record(model, path, **options)
    if segment_bytes:
        recorder._options = replace(recorder._options, segment_bytes=segment_bytes)
    return recorder


def state_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def tags(number: int) -> dict[str, Any]:
    return {"example": range(number, number + 5), "task": "early" if number < 12 else "late"}


@dataclass
class Training:
    """A training, and what model and optimizer were after every update."""

    kind: Callable[..., Optimizer] = SGD
    settings: dict[str, Any] = field(default_factory=lambda: MOMENTUM)
    layers: Callable[[], nn.Module] = network
    clip: float | None = None
    kept: dict[int, tuple[dict[str, Any], dict[str, Any]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        torch.set_num_threads(1)
        self.model = self.layers()
        self.new_optimizer()
        self.keep(0)

    def new_optimizer(self, **settings: Any) -> None:
        chosen = settings or copy.deepcopy(self.settings)
        self.optimizer = self.kind(self.model.parameters(), **chosen)

    def keep(self, step: int) -> None:
        self.kept[step] = copy.deepcopy((self.model.state_dict(), self.optimizer.state_dict()))

    def load(self, step: int) -> None:
        """The checkpoint of a step, in a model and an optimizer of their own."""
        self.model = self.layers()
        self.new_optimizer()
        model, optimizer = copy.deepcopy(self.kept[step])
        self.model.load_state_dict(model)
        self.optimizer.load_state_dict(optimizer)

    def step(self, number: int, recorder: Recorder | None = None) -> None:
        if recorder is not None:
            recorder.tag(**tags(number))

        def closure() -> Tensor:
            self.optimizer.zero_grad()
            inputs, labels = batch(number, 5, next(self.model.parameters()).dtype)
            loss = F.cross_entropy(self.model(inputs), labels)
            loss.backward()
            if self.clip is not None:
                nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
            return loss

        self.optimizer.step(closure)  # type: ignore[arg-type]
        self.keep(number + 1)

    def record(self, path: Path, start: int, stop: int, **options: Any) -> Memory:
        with recording(self.model, self.optimizer, path, **options) as recorder:
            assert recorder.steps == start
            for number in range(start, stop):
                self.step(number, recorder)
        return Memory.open(path)

    def proved(self, path: Path, **expected: Any) -> Memory:
        """Ask the memory for every state that this training had."""
        kept = {step: model for step, (model, _) in self.kept.items()}
        return proved(path, self.model, kept, **expected)


def verified(memory: Memory | Path, model: nn.Module | None = None) -> Verification:
    memory = Memory.open(memory) if isinstance(memory, Path) else memory
    return verify(memory, model, every_step=True, optimizer=OWN)


def proved(
    path: Path,
    model: nn.Module | None,
    states: dict[int, dict[str, Tensor]] | None = None,
    *,
    verdict: str | None = "bit for bit",
    off: float = 0.0,
) -> Memory:
    """Checksums hold, `verify` says what is expected, every state is rebuilt."""
    memory = Memory.open(path)
    memory.check()
    found = verified(memory, model)
    assert found.passed, found
    assert verdict is None or found.verdict == verdict, found
    for step, state in (states or {}).items():
        if step > memory.steps:
            continue
        for name in memory.parameters:
            rebuilt = at(memory, name, step, classes(OWN))
            assert float((rebuilt - state[name]).abs().max()) <= off, (step, name)
        for name in memory.buffers:
            assert torch.equal(memory.buffer(name, step), state[name]), (step, name)
    return memory


# -- processes -------------------------------------------------------------------------------------


class Trainers:
    """A server that forks training processes; see `_serve`."""

    def __init__(self) -> None:
        variables = {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}
        self._server = subprocess.Popen(
            [sys.executable, __file__], env=os.environ | variables,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    def _say(self, **request: Any) -> int:
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.write(json.dumps(request) + "\n")
        self._server.stdin.flush()
        return int(json.loads(self._server.stdout.readline()))

    def start(self, path: Path, **request: Any) -> int:
        """Start a training process; return its id."""
        return self._say(path=str(path), **request)

    def wait(self, process: int) -> int:
        """Wait for a training process to end; return its exit code, negative for a signal."""
        return self._say(wait=process)

    def stop(self) -> None:
        self._server.communicate(timeout=20)


@contextlib.contextmanager
def trainers() -> Iterator[Trainers]:
    server = Trainers()
    try:
        yield server
    finally:
        server.stop()


def _serve() -> None:
    torch.set_num_threads(1)
    Training().step(0)  # torch loads half of itself at the first step of an optimizer
    for line in sys.stdin:
        request = json.loads(line)
        if "wait" in request:
            answer = os.waitstatus_to_exitcode(os.waitpid(request["wait"], 0)[1])
        elif (answer := os.fork()) == 0:
            os._exit(_run(**request))
        print(answer, flush=True)


def _run(path: str, steps: int = 1 << 30, terminate: str = "", **options: Any) -> int:
    """One training process: 0 if it came to its end, 3 if it was interrupted, 1 after an error."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if terminate == "exit":
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(4))
    training, code = Training(), 0
    try:
        with recording(training.model, training.optimizer, Path(path), **options) as recorder:
            made = os.open(path + ".updates", os.O_CREAT | os.O_WRONLY)
            Path(path + ".started").touch()
            for number in range(steps):
                recorder.tag(**tags(number))
                update(training.model, training.optimizer, number)
                os.write(made, b".")
    except KeyboardInterrupt:
        code = 3
    except SystemExit as error:
        code = int(error.code or 0)
    except BaseException:
        return 1
    state = {name: p.contiguous() for name, p in training.model.state_dict().items()}
    safetensors.torch.save_file(state, path + ".model.safetensors")
    return code


if __name__ == "__main__":
    _serve()
