"""What a manifest says of the run: optimizers, layers, parameters and pattern columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch.optim import Optimizer

from dualform.errors import RecordingError
from dualform.layers import Layer
from dualform.learning_rules import names_of_settings, rule_of
from dualform.memory.writing import environment
from dualform.recording.parameters import Parameters
from dualform.recording.storage import Storage

OWN_COLUMNS = {"position": "int", "microbatch": "int", "call": "int"}


def describe(
    optimizers: Sequence[Optimizer],
    parameters: Parameters,
    layers: Sequence[Layer],
    kinds: Mapping[str, str],
    accumulated_since: Mapping[str, int],
    storage: Storage,
) -> dict[str, Any]:
    """The manifest's entries on what was recorded; layers in the order of their first use."""
    columns = {"step": "int"} | dict(kinds) | OWN_COLUMNS
    return {
        "environment": environment(),
        "optimizers": [_describe_optimizer(o) for o in optimizers],
        "columns": [[name, kind] for name, kind in columns.items()],
        "layers": [_describe_layer(layer, parameters, storage) for layer in layers],
        "parameters": [w.describe(accumulated_since.get(w.name)) for w in parameters],
    }


def _describe_optimizer(optimizer: Optimizer) -> dict[str, Any]:
    try:
        rule = rule_of(optimizer)
    except RecordingError:
        rule = None
    return {
        "class": f"{type(optimizer).__module__}.{type(optimizer).__qualname__}",
        "rule": rule,
        "settings": [] if rule is None else list(names_of_settings(rule)),
    }


def _describe_layer(layer: Layer, parameters: Parameters, storage: Storage) -> dict[str, Any]:
    dtype = parameters.by_name[layer.weight].dtype
    stored = storage.dtype_of(dtype)
    return layer._asdict() | {
        "dtype": str(dtype).removeprefix("torch."),
        "stored": str(stored).removeprefix("torch."),
        "error_signals": storage.keeps_error_signals(layer),
    }
