"""Tables computed once per layer: kept in RAM while a memory is open, and beside it on disk.

Norms of keys, sums of keys by group, learned matrices by group: each takes a pass over the layer,
and answers questions for ever after. They go to `derived/` in the memory's directory if that saves
real work and takes little room: at most a sixteenth of the keys they were made from.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from hashlib import blake2b
from weakref import WeakKeyDictionary

from torch import Tensor

from dualform.memory import LayerMemory

KEPT = 12
"""How many tables are kept in RAM per layer, at most; and how many bytes of them: 512 MB."""

BYTES_KEPT = 1 << 29

WORTH_KEEPING = 1 << 24
"""Bytes of keys from which on a table is worth a file: less is read again faster."""

SHARE = 16
"""A table on disk may have this part of the bytes of the keys it was made from."""

LAYOUT = 1
"""To be raised with every change in what a table holds or means: older ones are then not found."""

Tensors = Mapping[str, Tensor]

_tables: WeakKeyDictionary[LayerMemory, dict[str, Tensors]] = WeakKeyDictionary()


def kept(
    layer: LayerMemory, about: str, build: Callable[[], Tensors], *, on_disk: bool | None = None
) -> Tensors:
    """The table `about` something, from RAM or disk, or built now.

    `on_disk` True or False overrules whether it is worth a file.
    """
    tables = _tables.setdefault(layer, {})
    if about not in tables:
        found = _load(layer, about)
        if found is None:
            found = build()
            worth = _is_worth_keeping(layer, found) if on_disk is None else on_disk
            if layer.derived is not None and worth:
                layer.derived.save(_name(layer, about), found, about=_in_full(layer, about))
        tables[about] = found
        while len(tables) > 1 and (
            len(tables) > KEPT or sum(map(_bytes, tables.values())) > BYTES_KEPT
        ):
            del tables[next(iter(tables))]
    return tables[about]


def _load(layer: LayerMemory, about: str) -> Tensors | None:
    if layer.derived is None:
        return None
    return layer.derived.load(_name(layer, about), about=_in_full(layer, about))


def _in_full(layer: LayerMemory, about: str) -> str:
    return f"{layer.name}: {about} (layout {LAYOUT})"


def _name(layer: LayerMemory, about: str) -> str:
    kind = "".join(c for c in about.split(" ")[0].lower() if c.isalnum())
    return f"{kind}-{blake2b(_in_full(layer, about).encode(), digest_size=12).hexdigest()}"


def _is_worth_keeping(layer: LayerMemory, tensors: Tensors) -> bool:
    keys = layer.rows * layer.in_features * layer.stored.itemsize
    return keys >= WORTH_KEEPING and _bytes(tensors) <= keys / SHARE


def _bytes(tensors: Tensors) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())
