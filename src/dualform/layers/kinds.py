"""The kinds of layers: the one interface by which everything outside asks what a layer means.

A pattern has a key x and an error signal δ, and what it wrote into the weight is an outer product.
Which way round, and what a module's input has to do with keys at all, is the kind's own business:
one file per kind, known by name in a registry. Nothing outside this room compares a kind's name.

Why it is hard: `gradient` has to give the very bits of torch's backward pass, so it must be torch's
own operation on the same numbers in the same order.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Set
from math import prod
from typing import ClassVar

import torch
from torch import Tensor, nn

from dualform.errors import MemoryFileError, QueryError
from dualform.layers.layer import Fact, Layer
from dualform.layers.torch_internals import is_compiled

Shape = tuple[int, ...]


class Kind(ABC):
    """What a kind of layer does with its input, its patterns and its weight. `keys` and `signals`
    are rows, [n, key width] and [n, d_out]; `v` is a direction of the weight's flattened rows."""

    name: ClassVar[str]
    words: ClassVar[tuple[str, ...]] = ("patterns", "keys", "examples", "values")  # of keep=
    key_dtype: ClassVar[torch.dtype | None] = None
    """int64 where keys are tokens; None: that of the product (bfloat16 under autocast)."""
    tags_must_fit: ClassVar[bool] = True  # else a tag may fit no use of the layer

    # -- a module, and what it is given ---------------------------------------------------------

    @abstractmethod
    def recognises(self, module: nn.Module) -> bool:
        """Whether a module is a layer of this kind, and does nothing else with its input."""

    def layer(self, module: nn.Module, name: str, weight: str, bias: str | None) -> Layer:
        """Describe a module that is recognised, given what it and its parameters are called."""
        shape, facts = tuple(module.weight.shape), tuple(self.facts(module).items())  # type: ignore[arg-type]
        widths = prod(shape[1:]), shape[0]
        return Layer(name, self.name, weight, bias, *widths, shape, details=facts)

    def facts(self, module: nn.Module) -> dict[str, Fact]:
        """What the kind has to know of a module besides."""
        return {}

    def refuses(self, module: nn.Module) -> str | None:
        """Say why a call of the module has no patterns, as it is set now; None: it has."""
        return None

    def keep(self, layer: Layer) -> str:
        """What keep="auto" means for a layer."""
        return "patterns"

    def key_width(self, layer: Layer) -> int:
        """How many numbers a key is kept as."""
        return layer.in_features

    def shape_of(self, layer: Layer, role: str) -> Shape:
        """The shape of (the layer's rows of) its parameter: role "weight" or "bias"."""
        return layer.shape if role == "weight" else (layer.out_features,)

    def keys(self, given: Tensor) -> Tensor:
        """What the layer was given, as keys or queries: [..., d] -> [n, d]."""
        return given if given.dim() == 2 else given.reshape(-1, given.shape[-1])

    def error_signals(self, signal: Tensor) -> Tensor:
        """An error signal (or an output) by patterns: [..., d_out] -> [n, d_out]."""
        return signal if signal.dim() == 2 else signal.reshape(-1, signal.shape[-1])

    def leading(self, given: Tensor) -> Shape:
        """How the patterns of one call lie: [B], [B, L], ...: what tags are laid over."""
        return tuple(given.shape[:-1])

    def rows(self, layer: Layer, given: Tensor, signal: Tensor) -> tuple[Tensor, Tensor, Shape]:
        """Keys, error signals and leading shape of one use: views wherever that is possible."""
        return self.keys(given), self.error_signals(signal), self.leading(given)

    def has_tags(self, layer: Layer, keys: Tensor, shape: Shape, lengths: Set[int]) -> bool:
        """Whether patterns of one use belong to the examples of the batch, and get their tags;
        `lengths`: how many positions examples have in other layers."""
        return True

    def layout(self, given: Tensor, signal: Tensor) -> int:
        """How what is not contiguous lies in memory, if `gradient` needs that; 0: no matter."""
        return 0

    # -- patterns and the weight ----------------------------------------------------------------

    def attention(self, queries: Tensor, keys: Tensor) -> Tensor:
        """α = x · q of every query with every key: [nq, ·], [b, ·] -> [nq, b]."""
        raise self._has_no_keys()

    def write(self, matrix: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Add what patterns write to (their rows of) a weight, in place; returns it."""
        raise self._has_no_keys()

    def multiply(self, matrix: Tensor, queries: Tensor) -> Tensor:
        """The layer's output for a weight, without its bias: [n, d_out]."""
        raise self._has_no_keys()

    def gradient(
        self, layer: Layer, role: str, keys: Tensor, signals: Tensor, shape: Shape, layout: int = 0
    ) -> Tensor:
        """The gradient of one use as torch computes it, to the bit, in the dtype of the rows.

        Uses of one weight in one pass are added in the order in which the pass goes through them,
        in the dtype of the product where they share a cast; `.grad` gets their sum, once."""
        raise self._has_no_keys()

    def along(self, layer: Layer, keys: Tensor, signals: Tensor, v: Tensor) -> Tensor:
        """The rows of the weight's gradient times a direction: [height]."""
        raise self._has_no_keys()

    def gross(self, keys: Tensor, signals: Tensor) -> float:
        """How large the terms of `along` are, all rows together: ‖δ‖ ‖x‖ / √width."""
        raise self._has_no_keys()

    def sizes(self, layer: Layer, keys: Tensor, signals: Tensor, v: Tensor) -> Tensor:
        """Row by row, the square root of the sum of squares of the terms of `along`: [height]."""
        raise self._has_no_keys()

    def examples(self, layer: Layer, given: Tensor, signal: Tensor) -> dict[str, Tensor]:
        """What each example wrote, by role: [B, *shape]; "keys", if there are any: [B, width]."""
        raise self._has_no_keys("rows by example")

    def _has_no_keys(self, what: str = "keys") -> QueryError:
        return QueryError(
            f"a layer of kind {self.name!r} was asked for what only {what} can give; it keeps one "
            f"of {', '.join(self.words)}. Leave it out"
        )


def is_plain(module: nn.Module, kind: type[nn.Module]) -> bool:
    """Whether a module computes what its class of torch computes: no forward of its own, no
    parametrized weight, none without a shape yet, no compiled call."""
    weight, own = module._parameters.get("weight"), vars(module).keys()
    return (
        isinstance(module, kind)
        and type(module).forward is kind.forward
        and isinstance(weight, nn.Parameter)
        and not isinstance(weight, nn.parameter.UninitializedParameter)
        and not own & {"forward", "bias"}  # replaced on this very module, by pruning
        and not is_compiled(module)
    )


_kinds: dict[str, Kind] = {}


def register(kind: Kind) -> Kind:
    """Make a kind known by its name; of two with one name the later holds."""
    _kinds[kind.name] = kind
    return kind


def of(name: str) -> Kind:
    """The kind of that name."""
    if name not in _kinds:
        raise MemoryFileError(
            f"a layer of kind {name!r} was found; known are {', '.join(_kinds)}. Register the kind "
            "it was recorded with first: dualform.layers.register(kind)"
        )
    return _kinds[name]


def recognised(module: nn.Module) -> Kind | None:
    """The kind of layer a module is; None if it is none, or does something else besides."""
    known = reversed(_kinds.values())  # one that was added may be finer than ours
    return next((kind for kind in known if module._parameters and kind.recognises(module)), None)
