"""What the tests of this room share: a capture that writes down what it hears."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from dualform.layers import Capture, Layer, find_layers, of, torch_internals


def global_hooks() -> dict[str, int]:
    """How many global hooks on modules there are, by torch's table: none of ours may stay."""
    tables = vars(torch_module).items()
    return {n: len(t) for n, t in tables if n.startswith("_global_") and isinstance(t, dict)}


class Seen(NamedTuple):
    layer: Layer
    keys: Tensor
    signals: Tensor
    shape: tuple[int, ...]
    context: Any
    layout: int
    running: int


class Watch:
    """Captures a model; `with Watch(model) as seen:` and train."""

    def __init__(self, model: nn.Module, *, by_examples: Any = None, wants: bool = True) -> None:
        self.model, self.wants, self.fed = model, wants, 0
        self.uses: list[Seen] = []
        self.values: dict[str, str] = {}
        self.new: list[Layer] = []
        self.capture = Capture(
            model,
            find_layers(model),
            on_use=self._use,
            on_new_layer=self._new,
            on_values=self.values.__setitem__,
            context=self._context,
            by_examples=by_examples or (lambda layer: "patterns" not in of(layer.kind).words),
        )

    def _use(self, layer: Layer, keys: Tensor, signals: Tensor, *rest: Any) -> None:
        with torch.no_grad():  # as a recorder keeps them: row by row
            one, two = (
                torch.empty(t.shape, dtype=t.dtype).copy_(t.detach()) for t in (keys, signals)
            )
        running = torch_internals.running_pass()
        self.uses.append(Seen(layer, one, two, *rest, running))

    def _new(self, layer: Layer) -> bool:
        self.new.append(layer)
        return self.wants

    def _context(self) -> int:
        self.fed += 1
        return self.fed

    def __enter__(self) -> Watch:
        self.capture.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.capture.remove()

    @property
    def names(self) -> set[str]:
        return {use.layer.name for use in self.uses}

    def of(self, name: str) -> list[Seen]:
        return [use for use in self.uses if use.layer.name == name]

    def gradients(self) -> dict[str, Tensor]:
        """Every gradient as its patterns give it: uses summed per pass, passes in turn."""
        parameters = dict(self.model.named_parameters())
        found: dict[str, Tensor] = {}
        for running in dict.fromkeys(use.running for use in self.uses):
            sums: dict[tuple[str, torch.dtype], Tensor] = {}
            for use in (use for use in self.uses if use.running == running):
                layer, kind = use.layer, of(use.layer.kind)
                for role, name in zip(("weight", "bias"), layer.parameters, strict=False):
                    rest = use.keys, use.signals, use.shape, use.layout
                    own = kind.gradient(layer, role, *rest)
                    whole = torch.zeros(parameters[name].shape, dtype=own.dtype)
                    whole[layer.rows_of(name)] = own
                    place = name, own.dtype
                    sums[place] = sums[place] + whole if place in sums else whole
            per_pass: dict[str, Tensor] = {}
            for (name, _), total in sums.items():
                total = total.to(parameters[name].dtype)
                per_pass[name] = per_pass[name] + total if name in per_pass else total
            for name, total in per_pass.items():
                found[name] = found[name] + total if name in found else total
        return found


def from_patterns(uses: list[Seen], shapes: dict[str, tuple[int, ...]]) -> dict[str, Tensor]:
    """Every gradient in float64, by `Kind.write`."""
    found = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in shapes.items()}
    for use in uses:
        layer, signals = use.layer, use.signals.double()
        if "patterns" not in of(layer.kind).words:
            wrote = of(layer.kind).examples(layer, use.keys.double(), signals)
            for role, name in zip(("weight", "bias"), layer.parameters, strict=False):
                found[name] += wrote[role].sum(0)
            continue
        keys = use.keys if use.keys.dtype == torch.int64 else use.keys.double()
        of(layer.kind).write(found[layer.weight][layer.rows_of(layer.weight)], keys, signals)
        if layer.bias is not None:
            found[layer.bias][layer.rows_of(layer.bias)] += signals.sum(0)
    return found


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def watch() -> type[Watch]:
    return Watch


@pytest.fixture
def rebuilt() -> Callable[[list[Seen], dict[str, tuple[int, ...]]], dict[str, Tensor]]:
    return from_patterns
