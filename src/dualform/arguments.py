"""What the command line's arguments name: a model to build, an input to read, an example to find.

Each function turns a word of the user's into the object the library takes, or says in one sentence
what is wrong with it. Nothing is unpickled: inputs and checkpoints are safetensors files.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor, nn

import dualform

TAKEN = frozenset(
    {"by", "every_step", "example", "label", "layer", "layers", "progress", "queries", "target"}
)
"""Keyword arguments of `DualForm`'s own verbs, which an input cannot be called."""


def example_id(memory: dualform.Memory, text: str) -> Any:
    """An id as it was tagged: a string where ids are strings, else a number."""
    if "example" not in memory.columns:
        raise dualform.QueryError(
            "this memory was recorded without example ids, so --example has nothing to find; its "
            f"columns are {', '.join(memory.columns)}. Tag them: recorder.tag(example=ids)"
        )
    tables = [memory.layer(name).patterns for name in memory.layers]
    known = [value for table in tables for value in table.values("example")[:1]]
    if not known or isinstance(known[0], str):
        return text
    try:
        return int(text)
    except ValueError:
        raise dualform.QueryError(
            f"--example {text} was given, but the ids of this memory are numbers such as {known[0]}"
        ) from None


def read_input(file: Path | None) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
    """One tensor is the positional argument; several are keyword arguments."""
    if file is None:
        return (), {}
    tensors = _read_tensors(file)
    if len(tensors) == 1:
        return tuple(tensors.values()), {}
    taken = sorted(TAKEN & tensors.keys())
    if taken:
        raise dualform.DualFormError(
            f"{file} holds several tensors, which become keyword arguments by their names, and one "
            f"is called {taken[0]!r}, a word of dualform's own. Ask in Python, with a module that "
            "takes the inputs under other names"
        )
    return (), tensors


def _read_tensors(file: Path) -> dict[str, Tensor]:
    try:
        tensors = safetensors.torch.load_file(file)
    except (OSError, safetensors.SafetensorError) as error:
        raise dualform.DualFormError(
            f"{file} cannot be read as a safetensors file: {error}. Write one with "
            "safetensors.torch.save_file({'input': tensor}, path)"
        ) from error
    if not tensors:
        raise dualform.DualFormError(f"{file} holds no tensor; expected the model's input")
    return tensors


def build_model(spec: str) -> nn.Module:
    """The module that `package.module:factory` makes."""
    module_name, colon, name = spec.partition(":")
    if not (module_name and colon and name):
        raise dualform.DualFormError(
            f"--model {spec} is not of the form package.module:factory, such as "
            "dualform.demo:network"
        )
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        factory: Any = importlib.import_module(module_name)
        for part in name.split("."):
            factory = getattr(factory, part)
        built = factory() if not isinstance(factory, nn.Module) else factory
    except Exception as error:  # whatever the user's own code raises
        raise dualform.DualFormError(
            f"--model {spec} could not be built: {type(error).__name__}: {error}. Expected a "
            "function without arguments that returns the module, in a file that Python can import "
            f"from {os.getcwd()}"
        ) from error
    if not isinstance(built, nn.Module):
        raise dualform.DualFormError(
            f"--model {spec} gave a {type(built).__name__}; expected a torch.nn.Module"
        )
    return built


def trained_model(model: nn.Module, memory: dualform.Memory, weights: Path | None) -> nn.Module:
    """The architecture with the weights training left: a checkpoint's, or the memory's own."""
    if weights is None:
        return dualform.DualForm(model, memory).to_model()
    held = dict(model.named_parameters()) | dict(model.named_buffers())
    given = {name: memory.buffer(name) for name in memory.buffers} | _read_tensors(weights)
    missing = [name for name, _ in model.named_parameters() if name not in given]
    wrong = [n for n in given if n in held and given[n].shape != held[n].shape]
    if missing or wrong:
        raise dualform.DualFormError(
            f"{weights} does not hold this model's weights: {(missing or wrong)[0]!r} is "
            f"{'missing' if missing else 'of another shape'}; expected a saved state_dict()"
        )
    with torch.no_grad():
        for name in given.keys() & held.keys():
            held[name].copy_(given[name])
    return model


@contextmanager
def running(file: Path | None) -> Iterator[None]:
    """While the user's own module runs: what it raises is said in a sentence."""
    try:
        yield
    except (dualform.DualFormError, OSError):
        raise
    except Exception as error:
        if file is None:
            raise
        raise dualform.DualFormError(
            f"the model could not be run on {file}: {type(error).__name__}: {error}"
        ) from error


def target_of(text: str) -> int | str:
    """An output's number, or `margin`."""
    if text == "margin":
        return text
    try:
        return int(text)
    except ValueError:
        raise dualform.QueryError(
            f"--target {text} was given; expected the number of an output, counted from 0, or "
            "margin"
        ) from None


def read_direction(file: Path) -> Tensor:
    """What each output counts for: the one tensor of a file."""
    tensors = _read_tensors(file)
    if len(tensors) != 1:
        raise dualform.DualFormError(
            f"{file} holds {len(tensors)} tensors; --direction takes one, of the output's shape"
        )
    return next(iter(tensors.values()))


def keep_of(given: tuple[str, ...]) -> str | dict[str, str]:
    """What `--keep` asks for: a word for all layers, or `fc*=patterns` for some, in order."""
    pairs = [one.rpartition("=") for one in given]
    if len(pairs) < 2 and not any(equals for _, equals, _ in pairs):
        return given[0] if given else "auto"
    return {layers or "*": word for layers, _, word in pairs}


def condition(memory: dualform.Memory, option: str, text: str) -> dict[str, Any]:
    """What `label=7`, `label=1,7`, `task=fashion` or `step=0:3000` selects, as masks take it."""
    column, equals, value = text.partition("=")
    if not (column and equals and value):
        raise dualform.QueryError(
            f"{option} {text} is not a condition; expected COLUMN=VALUE, such as label=7, "
            f"label=1,7 or step=0:3000; columns are {', '.join(memory.columns)}"
        )
    if column not in memory.columns:
        raise dualform.QueryError(
            f"{option} {text} was given, but there is no column {column!r}; this memory has "
            f"{', '.join(memory.columns)}"
        )
    tables = [memory.layer(name).patterns for name in memory.layers]
    known = [value for table in tables for value in table.values(column)[:1]]
    if not known or isinstance(known[0], str):
        return {column: value.split(",")}
    low, colon, high = value.partition(":")
    try:
        if colon:
            return {column: slice(*(_number(end) if end else None for end in (low, high)))}
        return {column: [_number(part) for part in value.split(",")]}
    except ValueError:
        raise dualform.QueryError(
            f"{option} {text} was given, but {column!r} holds numbers such as {known[0]}; expected "
            f"{column}=1, {column}=1,7 or {column}=0:3000"
        ) from None


def _number(text: str) -> int | float:
    try:
        return int(text)
    except ValueError:
        return float(text)


def largest_output(output: Any) -> int:
    if not isinstance(output, Tensor) or output.numel() != output.shape[-1]:
        raise dualform.QueryError(
            "the model's output is not one row; name the output with --target"
        )
    return int(output.argmax())
