"""Naming the patterns: example ids, labels, tasks, anything, in whatever array they come.

A tag is one value per example ([B]), one per example and position ([B, L]), or one for all. It is
matched against the leading shape of each layer's input, so a wrong length is an error at the layer
and step where it happens, not a shifted column found weeks later.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dualform.errors import RecordingError
from dualform.memory.files import NO_VALUE

RESERVED = ("step", "position", "microbatch", "call", "rank")

ARGUMENTS = ("layers", "strength", "unresolved")
"""What masks take besides columns: a tag of that name could not be asked for."""

KINDS = {"i": "int", "u": "int", "b": "bool", "f": "float", "U": "string", "O": "string"}
"""What a column is called, by numpy's letter for its type."""


@dataclass(eq=False, slots=True)
class Tag:
    """The columns given by one call of `recorder.tag`, as stored: int64 or float64.

    They may be tensors until somebody asks for them, which is seldom the training thread.
    """

    given: dict[str, NDArray[Any] | Tensor]
    update: int
    microbatch: int
    _columns: dict[str, NDArray[Any]] | None = None
    _fits: set[tuple[int, ...]] = field(default_factory=set)

    @property
    def columns(self) -> dict[str, NDArray[Any]]:
        """By name, as arrays."""
        if self._columns is None:
            self._columns = {
                name: values.numpy() if isinstance(values, Tensor) else values
                for name, values in self.given.items()
            }
        return self._columns

    def check(self, layer: str, shape: tuple[int, ...]) -> None:
        """Raise unless every column can be laid over patterns of this leading shape."""
        if shape in self._fits:
            return
        for name, values in self.columns.items():
            if not _fits(values, shape):
                raise RecordingError(
                    f"the tag {name!r} has shape {list(values.shape)}, but layer {layer!r} saw an "
                    f"input of leading shape {list(shape)} ({prod(shape)} patterns). Expected one "
                    "value per example ([B]), one per example and position ([B, L]), or a single "
                    "value for all. Call recorder.tag(...) with the batch that is about to be fed. "
                    "A model that is fed sequence first ([L, B, d]) takes tags of shape [L, B]; "
                    "where its layers see different L (an encoder and a decoder), no one tag fits "
                    "all: feed it batch first, or give a single value for all"
                )
        self._fits.add(shape)

    def is_of(self, tokens: Tensor, shape: tuple[int, ...]) -> bool:
        """Whether tokens that were looked up are those of the batch, one or more per example.

        Positions are looked up once for all examples: 0, 1, 2, ... in order, or in another shape.
        Their patterns belong to no example, and get no tag.
        """
        if not all(_fits(values, shape) for values in self.columns.values()):
            return False
        in_order = torch.arange(len(tokens)).to(tokens)
        return not (len(shape) == 1 and len(tokens) > 1 and torch.equal(tokens[:, 0], in_order))

    def spread(self, shape: tuple[int, ...]) -> dict[str, NDArray[Any]]:
        """One value per pattern for every column."""
        laid = {name: _spread(values, shape) for name, values in self.columns.items()}
        return {name: values for name, values in laid.items() if values is not None}

    def positions(self, shape: tuple[int, ...]) -> int:
        """How many patterns each example has in an input of this leading shape."""
        rows = prod(shape)
        if len(shape) == 1:  # [B·L] flattened by the model: a [B, L] tag knows better
            for values in self.columns.values():
                if values.ndim == 2 and values.size == rows:
                    return int(values.shape[1])
        return rows // shape[0] if shape and shape[0] else 1


Context = tuple["Tag | None", bool, int, bool]
"""What is true of an input when it is fed, and may no longer be when it is differentiated.

Its tag; whether that is stale; which call it is; whether it was fed amid a backward pass. A plain
tuple: there is one for every call of every layer.
"""


class Visit(NamedTuple):
    """One backward pass through one use of one layer.

    `call` rises from one forward call to the next, of any layer; `numbered` counts.
    """

    step: int
    microbatch: int
    call: int
    shape: tuple[int, ...]
    tag: Tag | None


def refuse_untagged(layer: str, shape: tuple[int, ...], step: int) -> None:
    """Raise `RecordingError`: a batch was fed without a tag, though earlier ones had one."""
    raise RecordingError(
        f"layer {layer!r} saw a batch of leading shape {list(shape)} at step {step} that was not "
        "tagged, though earlier batches were. Call recorder.tag(...) for every batch, before the "
        "model is called"
    )


def numbered(visits: Sequence[Visit]) -> tuple[Visit, ...]:
    """The visits of a layer with its uses counted, 0, 1, ..., in the order of the forward calls.

    Counted are those that one backward pass went through: a forward call that was never
    differentiated has left no patterns, and is not one of them.
    """
    uses: dict[tuple[int, int], list[int]] = {}
    for visit in visits:
        uses.setdefault((visit.step, visit.microbatch), []).append(visit.call)
    order = {key: sorted(set(calls)) for key, calls in uses.items()}
    return tuple(v._replace(call=order[v.step, v.microbatch].index(v.call)) for v in visits)


def _fits(values: NDArray[Any], shape: tuple[int, ...]) -> bool:
    """Whether `values` can be laid over patterns of a leading shape."""
    if values.ndim == 1:
        return (shape[:1] or (1,)) == values.shape
    return values.ndim == 0 or _is_per_position(values, shape) or shape == values.shape[:1]


def _is_per_position(values: NDArray[Any], shape: tuple[int, ...]) -> bool:
    return shape[:2] == values.shape or shape == (values.size,)


def _spread(values: NDArray[Any], shape: tuple[int, ...]) -> NDArray[Any] | None:
    """`values` repeated over patterns of a leading shape, None if they do not fit."""
    rows = prod(shape)
    if not _fits(values, shape):
        return None
    if values.ndim == 0:
        return np.full(rows, values[()])
    if values.ndim == 1 or _is_per_position(values, shape):
        return np.repeat(values.ravel(), rows // max(1, values.size))
    # a value per position, a pooled layer
    return np.full(rows, np.nan if values.dtype.kind == "f" else NO_VALUE, values.dtype)


def expand(visits: Sequence[Visit], kinds: dict[str, str]) -> dict[str, NDArray[Any]]:
    """The columns of a run of visits, one value per pattern."""
    rows = [prod(visit.shape) for visit in visits]
    columns: dict[str, NDArray[Any]] = {
        name: np.repeat(np.array([getattr(v, name) for v in visits], np.int64), rows)
        for name in ("step", "microbatch", "call")
    }
    per_example = [v.tag.positions(v.shape) if v.tag else _positions(v.shape) for v in visits]
    if any(p > 1 for p in per_example):
        columns["position"] = np.concatenate(
            [
                np.arange(n, dtype=np.int64) % max(1, p)
                for n, p in zip(rows, per_example, strict=True)
            ]
        )
    spread = [visit.tag.spread(visit.shape) if visit.tag else {} for visit in visits]
    for name in {name for laid in spread for name in laid}:
        is_float = kinds[name] == "float"
        blank, dtype = (np.nan, np.float64) if is_float else (NO_VALUE, np.int64)
        columns[name] = np.concatenate(
            [laid.get(name, np.full(n, blank, dtype)) for laid, n in zip(spread, rows, strict=True)]
        )
    return columns


def _positions(shape: tuple[int, ...]) -> int:
    return prod(shape) // shape[0] if shape and shape[0] else 1


class Tags:
    """Turns what users pass to `recorder.tag` into stored columns; remembers kinds and strings."""

    def __init__(self) -> None:
        self.kinds: dict[str, str] = {}
        self._codes: dict[str, dict[str, int]] = {}
        self._written: dict[str, int] = {}
        self._calls = 0

    def restore(self, kinds: dict[str, str], strings: dict[str, list[str]]) -> None:
        """A resumed run: the columns there are, and the strings already written."""
        self.kinds = dict(kinds)
        self._codes = {n: {s: code for code, s in enumerate(known)} for n, known in strings.items()}
        self._written = {name: len(known) for name, known in strings.items()}

    def forgotten(self) -> Tag | None:
        """What is in force until the first tag after a resume; None if nothing was ever tagged."""
        return Tag({}, -1, self._calls) if self.kinds else None

    def make(self, update: int, columns: dict[str, Any]) -> Tag:
        """One call's columns, checked against each other and against earlier calls."""
        if columns.keys() != self.kinds.keys():
            self._check_names(columns)
        stored: dict[str, NDArray[Any] | Tensor] = {}
        length, differ = -1, False
        for name, value in columns.items():
            stored[name] = kept = self._store(name, value)
            if shape := kept.shape:
                differ = differ or length not in (-1, shape[0])
                length = shape[0]
        if differ:
            sizes = {name: kept.shape[0] for name, kept in stored.items() if kept.shape}
            listed = ", ".join(f"{name}: {size}" for name, size in sizes.items())
            raise RecordingError(f"the tags do not describe one batch; their lengths are {listed}")
        tag = Tag(stored, update, self._calls)
        self._calls += 1
        return tag

    def _check_names(self, columns: dict[str, Any]) -> None:
        """Raise if names are new and cannot be used, or if one that was given before is missing."""
        for name in columns.keys() - self.kinds.keys():
            if name in ARGUMENTS:
                raise RecordingError(
                    f"the tag {name!r} was given, but without(...) and only(...) have an argument "
                    "of that name; choose another name"
                )
            if name in RESERVED:
                raise RecordingError(
                    f"the tag {name!r} was given, but dualform keeps that column itself "
                    f"({', '.join(RESERVED)}); choose another name"
                )
        forgotten = [name for name in self.kinds if name not in columns]
        if forgotten:
            raise RecordingError(
                f"the tag {forgotten[0]!r} was given at earlier steps but not now (given now: "
                f"{', '.join(columns) or 'nothing'}); give every tag at every call, or its column "
                "would silently lack these patterns"
            )

    def new_strings(self) -> dict[str, list[str]]:
        """The strings met since the last call, per column, in the order of their codes."""
        fresh = {
            name: list(codes)[self._written.get(name, 0) :] for name, codes in self._codes.items()
        }
        self._written = {name: len(codes) for name, codes in self._codes.items()}
        return {name: strings for name, strings in fresh.items() if strings}

    def _store(self, name: str, value: Any) -> NDArray[Any] | Tensor:
        if isinstance(value, torch.Tensor):
            is_plain = value.dtype is torch.int64 and value.is_cpu and value.dim() <= 2
            is_plain = is_plain and value.layout is torch.strided
            if is_plain and self.kinds.get(name) == "int":  # the usual case
                return value.clone()
            array = (value if value.is_cpu else value.cpu()).numpy(force=value.requires_grad)
        else:
            array = np.asarray(value)
        if array.ndim > 2:
            raise RecordingError(
                f"the tag {name!r} has shape {list(array.shape)}; expected [B], [B, L] or one value"
            )
        letter = array.dtype.kind
        kind = KINDS.get(letter)
        if kind is None or (kind == "string" and not all(isinstance(v, str) for v in array.flat)):
            raise RecordingError(
                f"the tag {name!r} holds {array.dtype} values; expected numbers, booleans or "
                "strings"
            )
        if self.kinds.setdefault(name, kind) != kind:
            raise RecordingError(
                f"the tag {name!r} was of kind {self.kinds[name]} at earlier steps and is of kind "
                f"{kind} now; keep one kind per column"
            )
        if kind == "string":
            codes = self._codes.setdefault(name, {})
            flat = [codes.setdefault(str(v), len(codes)) for v in array.flat]
            return np.array(flat, np.int64).reshape(array.shape)
        if letter == "u" and array.size and int(array.max()) > np.iinfo(np.int64).max:
            raise RecordingError(
                f"the tag {name!r} holds {int(array.max())}, more than a 64-bit signed integer "
                "takes; give such ids as strings"
            )
        return array.astype(np.float64 if kind == "float" else np.int64)
