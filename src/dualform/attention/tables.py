"""Tables computed once per layer, and kept in RAM while a memory is open.

Norms of keys, sums of keys by group, learned matrices by group: each takes a pass over the layer,
and answers all questions after that. Nothing is written to disk.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from weakref import WeakKeyDictionary

from torch import Tensor

from dualform.memory import LayerMemory

KEPT = 12
"""How many tables are kept in RAM per layer, at most; and how many bytes of them: 512 MB."""

BYTES_KEPT = 1 << 29

Tensors = Mapping[str, Tensor]

_tables: WeakKeyDictionary[LayerMemory, dict[str, Tensors]] = WeakKeyDictionary()


def kept(layer: LayerMemory, about: str, build: Callable[[], Tensors]) -> Tensors:
    """The table `about` something, from RAM or built now."""
    tables = _tables.setdefault(layer, {})
    if about not in tables:
        tables[about] = build()
        while len(tables) > 1 and (
            len(tables) > KEPT or sum(map(_bytes, tables.values())) > BYTES_KEPT
        ):
            del tables[next(iter(tables))]
    return tables[about]


def _bytes(tensors: Tensors) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())
