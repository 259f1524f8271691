"""A training program run twice, alone and recorded by one line, and what its memory must answer.

The programs beside this file have the structure of ones that people really run, in a size that
takes a second: what matters is who steps the weights, when, and what the loop does in between.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

import dualform
from dualform.certificate.report import BITS, KEPT
from dualform.layers import layer_by_layer


class Program(Protocol):
    """What is trained, and its training; made anew for every run."""

    model: nn.Module

    def train(self) -> None: ...


def started(make: Callable[[], Any]) -> Any:
    """A program as it is when its script begins, every global generator at its own beginning."""
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002
    torch.manual_seed(0)
    return make()


def draws() -> tuple[float, float, float]:
    """The next random number of each generator: other ones, if recording drew any itself."""
    return random.random(), float(np.random.rand()), float(torch.rand(()))  # noqa: NPY002


def alone(make: Callable[[], Program]) -> tuple[Any, tuple[float, float, float]]:
    """The program without dualform, and what comes next of the random numbers."""
    program = started(make)
    program.train()
    return program, draws()


def recorded(make: Callable[[], Program], path: Path, **options: Any) -> tuple[Any, Any]:
    """The program recorded, and its memory; weights and random numbers are those of it alone."""
    plain, then = alone(make)
    program = started(make)
    with dualform.record(program.model, path, **options) as recorder:
        program.train()
    assert draws() == then
    the_same_weights(program.model, plain.model)
    memory = dualform.Memory.open(path)
    assert memory.steps == recorder.steps
    return program, memory


def the_same_weights(model: nn.Module, expected: nn.Module) -> None:
    for name, tensor in expected.state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor), name


def certified(
    model: nn.Module,
    memory: Any,
    *inputs: Any,
    steps: int,
    verdict: str = BITS,
    values: Iterable[str] = (),
    **kwargs: Any,
) -> Any:
    """The memory has so many steps, verifies with this model, and each layer attends as it should.

    `values` names, by pattern, exactly those parameters of which kept states alone are known; the
    verdict of all others is `verdict`. With inputs, outputs by attention must be the model's.
    """
    assert memory.steps == steps
    memory.check()
    dual = dualform.DualForm(model, memory)
    found = dual.verify(*inputs, every_step=True, **kwargs)
    assert found.passed, found
    assert not inputs or [c for c in found.checks if c.kind == "outputs"]
    verdicts = {name: v.verdict for name, v in found.verdicts.items()}
    expected = {
        name: KEPT if any(fnmatchcase(name, pattern) for pattern in values) else verdict
        for name in memory.parameters
    }
    assert verdicts == expected
    for pattern in values:
        assert any(fnmatchcase(name, pattern) for name in verdicts), pattern
    if inputs or kwargs:
        attends(dual, model, memory, inputs, kwargs)
    return dual


def ends_before_other_weights(
    program: Any, memory: Any, *inputs: Any, steps: int, best: int | None, **kwargs: Any
) -> Any:
    """Weights put in when training is over are no update, and no error: a remark says of which
    recorded step they are, and the memory ends with the network that the last update left."""
    (remark,) = [said for said in memory.remarks if "after its last update" in said]
    assert f"last update, {steps}," in remark
    which = "those of no recorded step" if best is None else f"those after update {best}"
    assert remark.endswith(which)
    dual = dualform.DualForm(program.model, memory)
    if best is not None:
        then = dual.at(best)
        weights = then.weights()
        for name, weight in program.model.named_parameters():
            assert torch.equal(weights[name], weight), name
        attends(then, program.model, memory, inputs, kwargs)
    return certified(dual.to_model(), memory, *inputs, steps=steps, **kwargs)


def attends(
    dual: Any, model: nn.Module, memory: Any, inputs: Any, kwargs: Mapping[str, Any]
) -> None:
    """Queries are what each module receives; weights are key · query."""
    given = received(model, inputs, kwargs)
    attention = dual.attend(*inputs, **kwargs)
    assert len(attention), "no layer attends"
    compared = 0
    for name, spotlight in attention.items():
        layer = memory.layer(name)
        if name in given and given[name].is_floating_point():
            query = given[name].reshape(-1, layer.in_features)
            torch.testing.assert_close(spotlight.queries, query, rtol=1e-4, atol=1e-5)
        elif name in given:
            tokens = given[name].reshape(-1, 1)
            same = tokens == layer.keys[spotlight.rows].reshape(1, -1)
            assert torch.equal(spotlight.weights.bool(), same), name
            compared += 1
            continue
        keys, queries = layer.keys[spotlight.rows].double(), spotlight.queries.double()
        sizes = queries.norm(dim=1)[:, None] * keys.norm(dim=1)
        off = (spotlight.weights - queries @ keys.T).abs()
        assert bool((off <= 1e-12 * sizes).all()), name
        compared += 1
    assert compared == len(attention)


def received(model: nn.Module, inputs: Any, kwargs: Mapping[str, Any]) -> dict[str, Tensor]:
    """What every Linear and Embedding that is called once is given, in eval mode."""
    seen: dict[str, list[Tensor]] = {}
    handles = [
        module.register_forward_pre_hook(
            lambda _, args, name=name: seen.setdefault(name, []).append(args[0])
        )
        for name, module in model.named_modules()
        if isinstance(module, (nn.Linear, nn.Embedding))
    ]
    modes = {module: module.training for module in model.modules()}
    model.eval()
    with torch.no_grad(), layer_by_layer():
        model(*inputs, **kwargs)
    for module, mode in modes.items():
        module.training = mode
    for handle in handles:
        handle.remove()
    return {name: calls[0] for name, calls in seen.items() if len(calls) == 1}
