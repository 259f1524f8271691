"""A recorded layer, as everything outside this room knows it: names and sizes, no module.

It is what a memory's file says of a layer: plain values, not to be trusted when read back. Its
weight is rows `offset` to `offset + shape[0]` of a parameter, its bias the entries from
`bias_offset` on: a packed projection is several layers in one parameter.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from dualform.errors import MemoryFileError

Fact = bool | int | float | str | None
"""What a kind may keep of a layer besides: a plain value that JSON keeps as it is."""

_TYPES: dict[str, Any] = dict.fromkeys(("name", "kind", "weight"), str) | {"bias": str | None}
_TYPES |= dict.fromkeys(("in_features", "out_features", "offset", "bias_offset"), int)
_TYPES |= {"shape": list, "details": Mapping}


@dataclass(frozen=True)
class Layer:
    """One recorded layer. `in_features` of an embedding is its number of tokens; `shape` is that of
    the weight, or of the rows of it that are this layer's; `details` are what its kind needs."""

    name: str
    kind: str
    weight: str
    bias: str | None
    in_features: int
    out_features: int
    shape: tuple[int, ...]
    offset: int = 0
    bias_offset: int = 0
    details: tuple[tuple[str, Fact], ...] = ()

    def __hash__(self) -> int:
        return hash(self.name)  # it is looked up at every use, and a string knows its hash

    @property
    def parameters(self) -> tuple[str, ...]:
        return (self.weight,) if self.bias is None else (self.weight, self.bias)

    def rows_of(self, parameter: str) -> slice:
        """Which rows of its weight, or entries of its bias, are the layer's."""
        if parameter == self.weight:
            return slice(self.offset, self.offset + self.shape[0])
        if parameter == self.bias:
            return slice(self.bias_offset, self.bias_offset + self.out_features)
        raise KeyError(f"layer {self.name!r} has no parameter {parameter!r}")

    def detail(self, name: str, default: Fact = None) -> Any:
        """A fact that its kind keeps of it, by name."""
        return dict(self.details).get(name, default)

    def to_json(self) -> dict[str, Any]:
        """Plain values, for a file."""
        return asdict(self) | {"shape": list(self.shape), "details": dict(self.details)}

    @classmethod
    def from_json(cls, found: Any) -> Layer:
        """The layer a file tells of; raises `MemoryFileError` where it does not fit."""
        for name, expected in _TYPES.items():
            value = found.get(name, ...) if isinstance(found, Mapping) else ...
            numbers = value if isinstance(value, list) else [value] if expected is int else []
            facts = value.values() if isinstance(value, Mapping) else ()
            is_right = isinstance(value, expected) and value != []
            is_right &= all(type(n) is int and n >= 0 for n in numbers)
            if not is_right or not all(isinstance(fact, Fact) for fact in facts):
                raise MemoryFileError(
                    f"a layer is described as {str(found)[:200]}; its {name!r} is missing or not "
                    "what it should be. The file is damaged or was made by hand: copy it anew"
                )
        plain = {"shape": tuple(found["shape"]), "details": tuple(found["details"].items())}
        return cls(**{name: found[name] for name in _TYPES} | plain)
