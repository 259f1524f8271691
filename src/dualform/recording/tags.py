"""Naming the patterns: example ids, labels, tasks, anything, in whatever array they come.

A tag is one value per example ([B]), one per example and position ([B, L]), or one for all. It is
matched against the leading shape of each layer's input, so a wrong length is an error at the layer
and step where it happens, not a shifted column found weeks later.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, NoReturn

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn.modules import module as torch_module

from dualform.errors import RecordingError
from dualform.memory.files import NO_VALUE

RESERVED = ("step", "position", "microbatch", "call", "rank")

ARGUMENTS = ("layers", "strength")
"""What masks take besides columns: a tag of that name could not be asked for."""

KINDS = {"i": "int", "u": "int", "b": "bool", "f": "float", "U": "string", "O": "string"}
"""What a column is called, by numpy's letter for its type."""


Context = tuple["Tag | None", int, int]
"""What is true of an input when it is fed, and may no longer be when it is differentiated: its tag,
how many updates there had been, and a number that rises from one forward call to the next."""


@dataclass(eq=False, slots=True)
class Tag:
    """The columns given by one call of `recorder.tag`, as stored: int64 or float64."""

    columns: dict[str, NDArray[Any]]
    update: int
    """How many updates there had been when it was given: no tag outlives the next one."""
    has_fitted: bool = False
    misfit: tuple[str, str, tuple[int, ...]] | None = None
    """A column that did not fit, and need not, of which layer and leading shape."""

    def must_have_fitted(self) -> None:
        """Raise if a backward pass went through layers, and the tag fits none of them."""
        if self.misfit is not None and not self.has_fitted:
            self.refuse(*self.misfit)

    def refuse(self, column: str, layer: str, shape: tuple[int, ...]) -> NoReturn:
        """Raise: a column cannot be laid over patterns of this leading shape."""
        raise RecordingError(
            f"the tag {column!r} has shape {list(self.columns[column].shape)}, but layer "
            f"{layer!r} saw an input of leading shape {list(shape)} ({prod(shape)} patterns). "
            "Expected one value per example ([B]), one per example and position ([B, L]), or a "
            "single value for all. Call recorder.tag(...) with the batch that is about to be fed. "
            "A model that is fed sequence first ([L, B, d]) takes tags of shape [L, B]; where its "
            "layers see different L (an encoder and a decoder), no one tag fits all: feed it batch "
            "first, or give a single value for all"
        )

    def fits(self, layer: str, shape: tuple[int, ...], must_fit: bool, moves: int) -> bool:
        """Whether this is the tag of patterns of this leading shape, fed after so many updates;
        raise if it must be, and is not."""
        wrong = next((n for n, values in self.columns.items() if not _fits(values, shape)), None)
        if wrong is not None and not must_fit:
            self.misfit = wrong, layer, shape
            return False
        if self.update != moves:
            raise RecordingError(
                f"layer {layer!r} saw a batch of leading shape {list(shape)} that was not tagged, "
                "though earlier batches were. Call recorder.tag(...) for every batch, before the "
                "model is called"
            )
        if wrong is not None:
            self.refuse(wrong, layer, shape)
        self.has_fitted = True
        return True

    def spread(self, shape: tuple[int, ...]) -> dict[str, NDArray[Any]]:
        """One value per pattern for every column."""
        fit = {name: values for name, values in self.columns.items() if _fits(values, shape)}
        return {name: _spread(values, shape) for name, values in fit.items()}


def _fits(values: NDArray[Any], shape: tuple[int, ...]) -> bool:
    """Whether `values` can be laid over patterns of a leading shape."""
    if values.ndim == 1:
        return (shape[:1] or (1,)) == values.shape
    is_pooled = shape == values.shape[:1]
    return values.ndim == 0 or is_pooled or values.shape == shape[:2] or shape == (values.size,)


def _spread(values: NDArray[Any], shape: tuple[int, ...]) -> NDArray[Any]:
    """`values` repeated over patterns of a leading shape that they fit."""
    rows = prod(shape)
    if values.ndim == 0:
        return np.full(rows, values[()])
    if values.ndim == 1 or values.shape == shape[:2] or shape == (values.size,):
        return np.repeat(values.ravel(), rows // max(1, values.size))
    # a value per position, a pooled layer
    return np.full(rows, np.nan if values.dtype.kind == "f" else NO_VALUE, values.dtype)


class TagColumns:
    """The tags of a segment, laid over the rows of its uses; uses with the same tag and leading
    shape share their rows."""

    def __init__(self, kinds: dict[str, str]) -> None:
        self._kinds, self._total = kinds, 0
        self._laid: dict[tuple[int, tuple[int, ...]], tuple[int, Tag]] = {}

    def place(self, tag: Tag | None, shape: tuple[int, ...]) -> int:
        """Say where the rows of a use begin in the columns; -1: it has no tag."""
        if tag is None:
            return -1
        if (id(tag), shape) not in self._laid:
            self._laid[id(tag), shape] = self._total, tag
            self._total += prod(shape)
        return self._laid[id(tag), shape][0]

    def columns(self) -> dict[str, NDArray[Any]]:
        """One value per row for every column; what a tag does not give is blank."""
        laid = [(tag.spread(shape), prod(shape)) for (_, shape), (_, tag) in self._laid.items()]
        found = {}
        for name in {name for spread, _ in laid for name in spread}:
            is_float = self._kinds[name] == "float"
            blank, dtype = (np.nan, np.float64) if is_float else (NO_VALUE, np.int64)
            found[name] = np.concatenate(
                [spread.get(name, np.full(n, blank, dtype)) for spread, n in laid]
            )
        return found


def positions(tag: Tag | None, shape: tuple[int, ...]) -> int:
    """Count the patterns of each example in an input of this leading shape."""
    rows = prod(shape)
    if len(shape) == 1 and tag is not None:  # [B·L], flattened: a [B, L] tag knows better
        for values in tag.columns.values():
            if values.ndim == 2 and values.size == rows:
                return int(values.shape[1])
    return rows // shape[0] if shape and shape[0] else 1


class Tags:
    """Which tag is in force. Turns what users pass to `recorder.tag`, or what the function they
    gave as `tags=` returns, into stored columns; remembers kinds and strings."""

    def __init__(self, function: Callable[..., Any] | None) -> None:
        self.kinds: dict[str, str] = {}
        self.moves = 0
        """How many updates there have been, of any optimizer: a tag holds until the next."""
        self._function, self._is_asked = function, False
        self._now: Tag | None = None
        self._open: dict[int, list[Tag]] = {}
        """With tags=: those of the calls of the model that are under way, by thread."""
        self._calls = 0
        self._codes: dict[str, dict[str, int]] = {}
        self._written: dict[str, int] = {}

    def restore(self, kinds: dict[str, str], strings: dict[str, list[str]]) -> None:
        """A resumed run: the columns there are, and the strings already written."""
        self.kinds = dict(kinds)
        self._codes = {n: {s: code for code, s in enumerate(known)} for n, known in strings.items()}
        self._written = {name: len(known) for name, known in strings.items()}
        self._now = Tag({}, -1) if kinds else None  # that of no batch to come

    def context(self) -> Context:
        """What is true of a forward call."""
        self._calls += 1
        if self._function is None:
            return self._now, self.moves, self._calls
        under_way = self._open.get(threading.get_ident(), [])
        return next(reversed(under_way), self._now), self.moves, self._calls

    def moved(self) -> None:
        """An optimizer has moved: no tag outlives that, nor one of a call that raised."""
        self.moves += 1
        self._open.clear()

    def give(self, columns: dict[str, Any]) -> None:
        """From here on a tag is in force."""
        if self._function is not None:
            raise RecordingError(
                "recorder.tag(...) was called, though tags= names the patterns already; use one of "
                "the two"
            )
        self._now = Tag(self._made(columns), self.moves)

    def follow(self, model: nn.Module) -> list[Any]:
        """Hang up the hooks that ask the user's function whenever the model is called.

        One before a call is not given its keywords, so a batch's tag is filled in when the call
        returns; no pass goes back through it before.
        """
        function = self._function
        if function is None:
            return []

        def called(module: nn.Module, args: Any) -> None:
            if module is model and torch.is_grad_enabled():
                self._open.setdefault(threading.get_ident(), []).append(Tag({}, self.moves))

        def returned(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            own = self._open.get(threading.get_ident())
            if module is model and own and torch.is_grad_enabled():
                columns, self._is_asked = asked(function, args, kwargs), True
                own.pop().columns.update(self._made(columns))
                self._now = Tag({}, -1)  # what is fed past the model's own call has none

        before = torch_module.register_module_forward_pre_hook(called)
        return [before, torch_module.register_module_forward_hook(returned, with_kwargs=True)]

    def must_be_asked(self) -> None:
        """Raise where tags= is given, and the first update is there without its being called."""
        if self.moves <= 1 and self._function is not None and not self._is_asked:
            raise RecordingError(
                "tags= was never called: it is called with the inputs of the very model that is "
                "recorded, and only parts of that were called. Record the part that is called, or "
                "call recorder.tag(...) with every batch"
            )

    def _made(self, columns: dict[str, Any]) -> dict[str, NDArray[Any]]:
        """One call's columns, checked against each other and against earlier calls."""
        if columns.keys() != self.kinds.keys():
            self._check_names(columns)
        stored = {name: self._store(name, value) for name, value in columns.items()}
        sizes = {name: kept.shape[0] for name, kept in stored.items() if kept.shape}
        if len(set(sizes.values())) > 1:
            listed = ", ".join(f"{name}: {size}" for name, size in sizes.items())
            raise RecordingError(f"the tags do not describe one batch; their lengths are {listed}")
        return stored

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

    def news(self) -> dict[str, Any]:
        """The columns, and the strings met since the last segment in the order of their codes."""
        known, self._written = self._written, {n: len(codes) for n, codes in self._codes.items()}
        fresh = {name: list(codes)[known.get(name, 0) :] for name, codes in self._codes.items()}
        strings = {name: listed for name, listed in fresh.items() if listed}
        return {"columns": dict(self.kinds), "strings": strings}

    def _store(self, name: str, value: Any) -> NDArray[Any]:
        if isinstance(value, torch.Tensor):
            is_plain = value.dtype is torch.int64 and value.is_cpu and value.dim() <= 2
            is_plain = is_plain and value.layout is torch.strided
            if is_plain and self.kinds.get(name) == "int":  # the usual case
                return value.clone().numpy()
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


def asked(function: Callable[..., Any], args: Any, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Ask a user's tags= what the batch is that the model was given."""
    given = [type(value).__name__ for value in args]
    given += [f"{name}={type(value).__name__}" for name, value in kwargs.items()]
    try:
        found = function(*args, **kwargs)
    except Exception as error:
        raise RecordingError(
            f"tags= raised {type(error).__name__}: {error}. It is called with the model's own "
            f"inputs, here ({', '.join(given)}), and returns the tags of that batch, as in "
            'tags=lambda input_ids, labels, **_: {"label": labels}'
        ) from error
    if not isinstance(found, Mapping):
        raise RecordingError(
            f"tags= returned a {type(found).__name__}; expected a dict from the names of tags to "
            'their values, such as {"label": labels}'
        )
    return dict(found)
