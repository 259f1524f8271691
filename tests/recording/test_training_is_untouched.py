"""Training, evaluation and the random state are the same to the bit, recorded or not.

And when the block ends, in whatever way, nothing of the recorder is left: no hook, no thread.
"""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from torch.nn.utils import clip_grad_norm_
from torch.optim import SGD
from torch.utils.checkpoint import checkpoint

from dualform.errors import RecordingError
from dualform.memory import Memory
from dualform.recording import Recorder, record


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        block = nn.TransformerEncoderLayer(8, 2, 12, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(block, 2)
        self.head = nn.Linear(8, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(self.encoder(inputs))[:, 0]


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 6), nn.Dropout(0.2), nn.ReLU(inplace=True))
        self.head = nn.Linear(6, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(checkpoint(self.body, inputs, use_reentrant=False)[:, 0])


def mlp() -> nn.Module:
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(40, 16),
        nn.BatchNorm1d(16),
        nn.ReLU(inplace=True),
        nn.Dropout(0.3),
        nn.Linear(16, 3),
    )


MODELS: dict[str, Callable[[], nn.Module]] = {
    "mlp with dropout and batch norm": mlp,
    "transformer encoder": Encoder,
    "activation checkpointing": Checkpointed,
}
RULES: dict[str, dict[str, Any]] = {
    "plain": {"lr": 0.1},
    "momentum and decay": {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.01},
    "foreach nesterov": {"lr": 0.05, "momentum": 0.9, "nesterov": True, "foreach": True},
    "fused": {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.01, "fused": True},
}


def everything_of_a_run(build: Callable[[], nn.Module], rule: dict[str, Any], memory: Any) -> Any:
    """Train, evaluate in the loop, and give back all there is: losses, weights, buffers, RNGs."""
    torch.manual_seed(1)
    np.random.seed(2)  # noqa: NPY002
    random.seed(3)
    model = build()
    optimizer = SGD(model.parameters(), **rule)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=3)
    evaluation = torch.randn(6, 5, 8)
    seen: list[Tensor] = []
    context = record(model, memory) if memory else contextlib.nullcontext()
    with context as recorder:
        for _ in range(8):
            inputs = torch.randn(7, 5, 8) * random.uniform(0.5, 1.5)
            labels = torch.from_numpy(np.random.randint(0, 3, 7))  # noqa: NPY002
            if recorder is not None:
                recorder.tag(label=labels, task="a")
            loss = nn.functional.cross_entropy(model(inputs), labels)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            seen.append(clip_grad_norm_(model.parameters(), 0.5))
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            seen.append(loss.detach())
            model.eval()
            with torch.no_grad():
                seen.append(model(evaluation))
            with torch.inference_mode():
                seen.append(model(evaluation).clone())
            seen.append(model(evaluation).detach())
            model.train()
    state = {**model.state_dict(), **{f"seen {i}": t for i, t in enumerate(seen)}}
    for i, parameter in enumerate(model.parameters()):
        state |= {f"{i} {n}": v for n, v in optimizer.state[parameter].items() if v is not None}
    generators = torch.get_rng_state(), np.random.get_state(), random.getstate()  # noqa: NPY002
    return state, generators


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")
@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True")
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("model", MODELS)
def test_every_bit_is_the_same_with_and_without_the_recorder(
    model: str, rule: str, tmp_path: Path
) -> None:
    plain, plain_generators = everything_of_a_run(MODELS[model], RULES[rule], None)
    recorded, generators = everything_of_a_run(MODELS[model], RULES[rule], tmp_path / "run")
    assert plain.keys() == recorded.keys()
    different = [name for name in plain if not torch.equal(plain[name], recorded[name])]
    assert not different
    assert torch.equal(plain_generators[0], generators[0])
    assert all(
        np.array_equal(a, b) for a, b in zip(plain_generators[1], generators[1], strict=True)
    )
    assert plain_generators[2] == generators[2]


# Nothing is left ----------------------------------------------------------------------------------


def hooks_in_torch(model: nn.Module, *optimizers: torch.optim.Optimizer) -> int:
    """How many hooks there are anywhere a recorder could have put one."""
    everywhere = [
        getattr(torch_module, name) for name in dir(torch_module) if name.startswith("_global_")
    ]
    everywhere += [
        value
        for module in model.modules()
        for name, value in vars(module).items()
        if "hooks" in name
    ]
    everywhere += [p._backward_hooks or {} for p in model.parameters()]
    everywhere += [p._post_accumulate_grad_hooks or {} for p in model.parameters()]
    everywhere += [
        value
        for optimizer in optimizers
        for name, value in vars(optimizer).items()
        if "hooks" in name
    ]
    return sum(len(held) for held in everywhere if isinstance(held, dict))


def raising(error: BaseException) -> Any:
    def end(model: Any, optimizer: Any, recorder: Recorder) -> None:
        raise error

    return end


def between_backward_and_step(model: Any, optimizer: Any, recorder: Recorder) -> None:
    model(torch.randn(3, 4)).sum().backward()
    raise KeyboardInterrupt


def in_the_closure(model: Any, optimizer: Any, recorder: Recorder) -> None:
    optimizer.step(lambda: 1 / 0)


def by_the_audit(model: Any, optimizer: Any, recorder: Recorder) -> None:
    model(torch.randn(3, 4)).sum().backward()
    model[0].weight.grad[0] += 1
    optimizer.step()


def by_a_wrong_tag(model: Any, optimizer: Any, recorder: Recorder) -> None:
    recorder.tag(label=[1, 2])
    model(torch.randn(3, 4)).sum().backward()


ENDINGS: dict[str, Any] = {
    "normally": lambda *_: None,
    "by an exception": raising(ZeroDivisionError()),
    "by Ctrl-C": raising(KeyboardInterrupt()),
    "by sys.exit": raising(SystemExit()),
    "between backward and step": between_backward_and_step,
    "in the closure": in_the_closure,
    "by the audit": by_the_audit,
    "by a wrong tag": by_a_wrong_tag,
    "with half the model": lambda model, *_: model.half(),
    "with twice the model": lambda model, *_: model.double(),
    "in float16, by an exception": lambda model, *_: model.half().undefined(),
}


@pytest.mark.parametrize("ending", ENDINGS)
def test_no_hook_and_no_thread_survives(ending: str, tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2))
    optimizer = SGD(model.parameters(), lr=0.1)
    before, threads = hooks_in_torch(model, optimizer), threading.active_count()
    raised = None
    try:
        with record(model, tmp_path / "run") as recorder:
            assert hooks_in_torch(model, optimizer) > before
            for _ in range(3):
                model(torch.randn(3, 4)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            ENDINGS[ending](model, optimizer, recorder)
    except BaseException as error:
        raised = error
    assert (raised is None) == (
        ending in ("normally", "with half the model", "with twice the model")
    )
    assert hooks_in_torch(model, optimizer) == before
    assert threading.active_count() == threads
    memory = Memory.open(tmp_path / "run")
    assert memory.steps == 3
    assert memory.closed
    memory.check()


def test_a_recording_that_cannot_begin_leaves_no_hook(tmp_path: Path) -> None:
    (tmp_path / "letter.txt").write_text("not a memory")
    model = nn.Linear(4, 2)
    optimizer = SGD(model.parameters(), lr=0.1)
    before, threads = hooks_in_torch(model, optimizer), threading.active_count()
    with (
        pytest.raises(RecordingError, match="letter"),
        record(model, tmp_path),
    ):
        pass
    assert hooks_in_torch(model, optimizer) == before
    assert threading.active_count() == threads


def test_a_graph_made_inside_the_block_can_be_differentiated_after_it(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 2))
    optimizer = SGD(model.parameters(), lr=0.1)
    with record(model, tmp_path / "run"):
        model(torch.randn(3, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        late = model(torch.randn(3, 4)).sum()
    late.backward()
    optimizer.step()
    memory = Memory.open(tmp_path / "run")
    assert memory.steps == 1
    assert len(memory.layer("0")) == 3


def test_a_recorder_is_used_once_and_tags_only_inside(tmp_path: Path) -> None:
    model = nn.Linear(4, 2)
    recorder = record(model, tmp_path / "run")
    with pytest.raises(RecordingError, match="was called before the recording"):
        recorder.tag(label=[1])
    with pytest.warns(UserWarning, match="nothing was recorded: no optimizer moved"), recorder:
        pass
    with (
        pytest.raises(RecordingError, match="used before; call"),
        recorder,
    ):
        pass
    with pytest.raises(RecordingError, match="was called after the recording"):
        recorder.tag(label=[1])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"model": torch.nn.functional.linear}, "expected a torch.nn.Module to record, got"),
        ({"tags": {"label": 1}}, "tags=dict was given; expected a function of the model's inputs"),
        ({"audit": "never"}, "audit='never' was given; expected one of 'raise', 'warn'"),
        ({"path": None}, "expected one path after the model, got NoneType"),
        ({"path": "s3://bucket/run"}, "looks like a URL; expected a directory"),
        ({"dtype": "int8"}, "dtype='int8' was given; expected one of 'float32', 'float16'"),
        ({"resume": "yes"}, "resume='yes' was given; expected one of True, False"),
        ({"resume": True, "overwrite": True}, "overwrite=True and resume=True were both given"),
    ],
)
def test_wrong_arguments_are_refused_at_once(arguments: dict[str, Any], message: str) -> None:
    model = nn.Linear(4, 2)
    given = {"model": model, "path": "x"} | arguments
    with pytest.raises(RecordingError, match=message):
        record(**given)


def test_the_call_of_old_is_refused_by_one_sentence_that_shows_the_new_one(tmp_path: Path) -> None:
    model = nn.Linear(4, 2)
    optimizer = SGD(model.parameters(), lr=0.1)
    for old in ((optimizer, tmp_path), ([optimizer], tmp_path), (optimizer,)):
        with pytest.raises(RecordingError, match=r"Write dualform\.record\(model, path\)"):
            record(model, *old)  # type: ignore[arg-type]
    with pytest.raises(RecordingError, match="model and path are exchanged"):
        record(tmp_path, model)  # type: ignore[arg-type]
