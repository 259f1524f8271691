"""Small deterministic trainings to be recorded, killed, damaged and compared with.

Every step's batch depends on the step alone, so the same run can be trained again without a
recorder and any recorded state compared with the real one. `rebuild` is the plainest possible
reading of a memory: initial part plus the sum over all patterns, in float64.

As a script this is a server that has torch loaded and forks a training process for every line it
reads, so that dozens of real processes can be started and killed in seconds.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import dualform as df
from dualform.learning_rules import coefficients
from dualform.memory import Memory

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = os.environ | {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)]),
}
TASKS = ("first", "second", "dritte Aufgabe ü")


def make_model() -> tuple[nn.Module, torch.optim.Optimizer]:
    generator = torch.Generator().manual_seed(7)
    model = nn.Sequential(
        nn.BatchNorm1d(6), nn.Linear(6, 9), nn.ReLU(), nn.LayerNorm(9), nn.Linear(9, 4)
    ).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.rand(parameter.shape, generator=generator, dtype=torch.float64))
    return model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-3)


def batch(step: int) -> tuple[Tensor, Tensor, Tensor]:
    """(example, input, label) of a step: uneven, and depending on the step alone."""
    generator = torch.Generator().manual_seed(1000 + step)
    size = 3 + (step * 5) % 7
    example = torch.randint(0, 100, (size,), generator=generator)
    inputs = torch.randn(size, 6, generator=generator, dtype=torch.float64)
    return example, inputs, torch.randint(0, 4, (size,), generator=generator)


def update(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    _, inputs, labels = batch(step)
    nn.functional.cross_entropy(model(inputs), labels).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    optimizer.zero_grad()


def train(
    path: str | Path,
    steps: int,
    *,
    after_step: Callable[[int], Any] = lambda step: None,
    **options: Any,
) -> nn.Module:
    """Record a run; returns the trained model. `after_step(k)`: k updates have been made."""
    model, optimizer = make_model()
    with df.record(model, optimizer, path, **options) as recorder:
        for step in range(steps):
            example, _, label = batch(step)
            recorder.tag(
                example=example, label=label, task=TASKS[step // 4 % 3], weight=label / 3.0
            )
            update(model, optimizer, step)
            after_step(step + 1)
    return model


class Reference:
    """The same training without a recorder: weights and buffers after any number of updates."""

    def __init__(self) -> None:
        self._model, self._optimizer = make_model()
        self._states = [self._state()]

    def _state(self) -> dict[str, Tensor]:
        return {name: value.detach().clone() for name, value in self._model.state_dict().items()}

    def after(self, steps: int) -> dict[str, Tensor]:
        while len(self._states) <= steps:
            update(self._model, self._optimizer, len(self._states) - 1)
            self._states.append(self._state())
        return self._states[steps]


@functools.cache
def reference() -> Reference:
    return Reference()


def rebuild(memory: Memory, at: int) -> dict[str, Tensor]:
    """Every parameter after `at` updates, from initial state, log and patterns alone."""
    rebuilt = {}
    for name, parameter in memory.parameters.items():
        c = coefficients(memory.log(name), at)
        total = c.initial * memory.initial(name).double()
        if (momentum := memory.initial_momentum(name)) is not None:
            total = total + c.momentum * momentum.double()
        if parameter.coverage == "patterns":
            for layer in map(memory.layer, parameter.layers):
                strength = torch.from_numpy(c.per_pattern(layer.patterns["step"]))
                values = layer.error_signals.double() * strength[:, None]
                weight = parameter.role == "weight"
                total = total + (values.T @ layer.keys.double() if weight else values.sum(0))
        elif parameter.coverage != "untrained":
            total = total + memory.learned(name, at)
        rebuilt[name] = total
    return rebuilt


def assert_equal(
    seen: dict[str, Tensor], expected: dict[str, Tensor], bound: float = 1e-12
) -> None:
    for name, value in seen.items():
        off = float((value - expected[name]).abs().max())
        assert off <= bound * max(1.0, float(expected[name].abs().max())), (name, off)


def assert_sound(memory: Memory, expected: dict[str, Tensor] | None = None) -> None:
    """All checksums hold, the rebuilt state is the real one, and so are the fingerprints.

    `expected`: other weights than those of the undisturbed run. (Buffers are compared with that one
    all the same: an interrupted step may have changed them in the model.)
    """
    memory.check()
    undisturbed = reference().after(memory.steps)
    known = undisturbed if expected is None else expected
    assert_equal(rebuild(memory, memory.steps), known)
    assert_equal({name: memory.buffer(name) for name in memory.buffers}, undisturbed)
    if memory.fingerprints:
        last = memory.fingerprints[-1]
        assert last.step == memory.steps
        for name, seen in last.values.items():
            expected_print = known[name].reshape(len(seen), -1) @ memory.probe(name)
            assert_equal({name: seen}, {name: expected_print})


# -- processes -------------------------------------------------------------------------------------


def python(code: str, *arguments: object, timeout: float = 100) -> subprocess.CompletedProcess[str]:
    """Run a piece of Python in a process of its own."""
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        env=ENVIRONMENT, capture_output=True, text=True, timeout=timeout, check=False,
    )  # fmt: skip


class Trainers:
    """A server that forks training processes; see `_serve`."""

    def __init__(self) -> None:
        self._server = subprocess.Popen(
            [sys.executable, __file__],
            env=ENVIRONMENT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    def _say(self, **request: Any) -> Any:
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.write(json.dumps(request) + "\n")
        self._server.stdin.flush()
        return json.loads(self._server.stdout.readline())

    def start(self, path: Path, **request: Any) -> int:
        """Start a training process; returns its id."""
        return int(self._say(path=str(path), **request))

    def wait(self, process: int) -> int:
        """Wait for a training process to end; returns its exit code, negative for a signal."""
        return int(self._say(wait=process))

    def stop(self) -> None:
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.close()
        self._server.wait(timeout=20)
        self._server.stdout.close()


@contextlib.contextmanager
def trainers() -> Iterator[Trainers]:
    server = Trainers()
    try:
        yield server
    finally:
        server.stop()


def _serve() -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as directory:
        train(directory, 2)  # torch loads half of itself at the first step of an optimizer
    for line in sys.stdin:
        request = json.loads(line)
        if "wait" in request:
            _, status = os.waitpid(request["wait"], 0)
            answer = os.waitstatus_to_exitcode(status)
        else:
            answer = os.fork()
            if answer == 0:
                os._exit(_run(**request))
        print(answer, flush=True)


def _run(
    path: str,
    steps: int = 1 << 30,
    die_at: int = 0,
    fail_at: int = 0,
    terminate: str = "default",
    **options: Any,
) -> int:
    """One training process: 0 if it came to its end, 3 if it was interrupted, 1 after an error.

    `die_at`: killed at the n-th system call that writes; `fail_at`: an exception after n steps.
    """
    import signal

    import safetensors.torch

    signal.signal(signal.SIGINT, signal.default_int_handler)
    if terminate == "exit":
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(4))
    if die_at:
        _count_down(die_at)
    model, optimizer = make_model()
    code = 0
    try:
        with df.record(model, optimizer, path, **options) as recorder:
            Path(path + ".started").touch()
            for step in range(steps):
                example, _, label = batch(step)
                recorder.tag(
                    example=example, label=label, task=TASKS[step // 4 % 3], weight=label / 3.0
                )
                update(model, optimizer, step)
                if step + 1 == fail_at:
                    raise ZeroDivisionError
    except KeyboardInterrupt:
        code = 3
    except SystemExit as ending:
        code = int(str(ending.code))
    except ZeroDivisionError:
        code = 5
    safetensors.torch.save_file(model.state_dict(), path + ".model.safetensors")
    return code


def _count_down(calls: int) -> None:
    """kill -9 at the n-th call that changes something on disk."""
    import signal

    left = [calls]

    def deadly(call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*args, **kwargs)

        return counted

    for name in ("write", "fsync", "replace", "open", "mkdir"):
        setattr(os, name, deadly(getattr(os, name)))


if __name__ == "__main__":
    _serve()
