"""A recorded memory made smaller: fewer layers, no error signals, 16 bits.

Segment after segment is read back as what it was written from, thinned out, and written anew into
another directory. What is gone is not summed up: a parameter whose patterns go is *values* from
then on, and its kept states say what it learned.

Why it is hard: a certificate must not take for explained what no longer is, nor for exact what was
rounded. So explained gradients and parameters are taken back with the patterns, and what 16 bits
lost is measured use by use, as the recorder's writer measures it. And there is a whole memory at
the end or none: the manifest is written last, and what was cut off before it is taken away.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from rich.filesize import decimal
from torch import Tensor

from dualform.certificate.checks import verify
from dualform.certificate.report import Verification
from dualform.errors import RecordingError
from dualform.memory import LayerMemory, Memory, MemoryWriter, SegmentContent
from dualform.memory.content import ROWS, SCALES
from dualform.memory.files import MANIFEST, SEGMENTS, local_path
from dualform.memory.liveness import PROGRESS, Progress
from dualform.memory.narrowing import lost_in_use, narrowed
from dualform.memory.segments import Segment
from dualform.memory.writing import clear_directory

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}

Callback = Callable[[int, int], None]
Names = str | Iterable[str]
Reals = NDArray[np.float64]
Rows = tuple[Tensor, Tensor]
"""Keys and error signals."""


@dataclass(frozen=True)
class Compaction:
    """A memory made from another: sizes in bytes, and what was lost, in sentences.

    Example:
        >>> small.passed, small.bytes_after / small.bytes_before, small.lost   # doctest: +SKIP
    """

    source: Path
    path: Path
    bytes_before: int
    bytes_after: int
    lost: tuple[str, ...]
    certificate: Verification
    """That of the new memory."""

    @property
    def passed(self) -> bool:
        """Whether the new memory explains what it says it explains."""
        return self.certificate.passed

    def to_dict(self) -> dict[str, Any]:
        """Everything in plain values, fit for `json.dumps`; sizes in bytes."""
        paths = {"source": str(self.source), "path": str(self.path)}
        return vars(self) | paths | {
            "passed": self.passed,
            "lost": list(self.lost),
            "certificate": self.certificate.to_dict(),
        }  # fmt: skip

    def __repr__(self) -> str:
        share = self.bytes_after / max(1, self.bytes_before)
        sizes = f"{decimal(self.bytes_before)} before, {decimal(self.bytes_after)} after"
        said = self.lost or ("nothing was dropped or rounded",)
        lines = [f"{self.path}: {sizes} ({share:.1%})", *(f"  {sentence}" for sentence in said)]
        return "\n".join([*lines, repr(self.certificate)])


def compact(
    source: Memory | str | Path,
    destination: str | Path,
    *,
    layers: Names | None = None,
    error_signals: bool | Names = True,
    dtype: str | None = None,
    overwrite: bool = False,
    progress: Callback | None = None,
) -> Compaction:
    """Write a smaller memory made from a recorded one, say what was lost, verify it.

    The source stays as it is. Names may hold `*`, `?` and `[…]`.

    Example:
        >>> small = dualform.compact("runs/digits", "runs/half", dtype="float16")  # doctest: +SKIP

    Args:
        layers: keep the patterns of these only. Of other layers' parameters, kept states stay.
        error_signals: True keeps them; False keeps keys alone (attention works, contributions do
            not); names keep those of these layers. What examples wrote is not touched.
        dtype: "float16" or "bfloat16" stores patterns in 16 bits.
        overwrite: delete a memory that is already at the destination.
        progress: called with (done, total).
    """
    memory = Memory.open(source.path if isinstance(source, Memory) else source)
    path = local_path(destination)
    _refuse_places(memory, path, overwrite)
    thinning = _Thinning(memory, layers, error_signals, dtype)
    report = progress or (lambda done, total: None)
    existed = path.exists()
    writer = MemoryWriter(path, overwrite=overwrite)
    try:
        writer.begin(thinning.manifest(), write=False)
        for content in map(thinning.content, memory.opened.segments):
            writer.commit(content)
            report(content.first_step + content.steps, 2 * max(1, memory.steps))
        writer.progress.set(Progress.read(memory.path) or 0)
        writer.end(closed=memory.closed, remarks=thinning.sentences())
    except BaseException:
        _take_away(path, existed)
        raise
    finally:
        writer.release()
    made = Memory.open(path)
    certificate = verify(made, progress=lambda done, total: report(total + done, 2 * total))
    report(1, 1)
    sizes = memory.bytes_on_disk, made.bytes_on_disk
    return Compaction(memory.path, path, *sizes, tuple(thinning.sentences()), certificate)


class _Thinning:
    """What becomes of each layer and parameter of a memory, and of every segment."""

    def __init__(
        self, memory: Memory, layers: Names | None, error_signals: bool | Names, dtype: str | None
    ) -> None:
        self._memory, self._stored = memory, _stored(memory, dtype)
        self._narrows = self._stored != memory.opened.description.stored
        whole = [name for name in memory.layers if memory.layer(name).has_error_signals]
        kept = memory.layers if layers is None else _chosen(memory.layers, layers, "layers")
        with_signals = whole if error_signals is True else []
        if not isinstance(error_signals, bool):
            with_signals = _chosen(whole, error_signals, "error_signals")
        self._gone = [name for name in memory.layers if name not in kept]
        self._alone = [name for name in whole if name in kept and name not in with_signals]
        lesser = [memory.layer(name).layer for name in (*self._gone, *self._alone)]
        touched = dict.fromkeys(name for layer in lesser for name in layer.parameters)
        self._values = [name for name in touched if memory.parameters[name].keep != "values"]
        self._held: dict[str, list[bool]] = {}
        """Of keys that recur: which of those stored are in 16 bits."""
        self._wide: dict[str, int] = {}
        self._off: dict[str, Reals] = {}
        """Squares of what each layer's sums lost, and of the sums."""

    def manifest(self) -> dict[str, Any]:
        """Change the source's manifest where the new memory is another one."""
        manifest = self._memory.opened.committed.manifest
        values = {"keep": "values", "why": "its patterns or error signals were dropped afterwards"}
        listed = [p | values if p["name"] in self._values else p for p in manifest["parameters"]]
        return manifest | {"parameters": listed, "stored": _name(self._stored)}

    def content(self, segment: Segment) -> SegmentContent:
        """Read a segment back, without what is not wanted."""
        content = self._memory.opened.content(segment)
        for name in self._gone:
            for of_layers in (content.rows, content.uses, content.lost):
                of_layers.pop(name, None)
        for name in content.rows.keys() & set(self._alone):
            content.lost.pop(name, None)
            content.rows[name] = [
                found for found in content.rows[name] if not found[0].startswith("error_signals")
            ]
        if self._narrows:
            for name in content.rows:
                self._narrow(segment, content, self._memory.layer(name))
        if content.log:
            explained = content.log["explained"].copy()
            explained[:, [self._memory.parameters[name].index for name in self._values]] = 0
            content.log["explained"] = explained
        content.kept = [k for k in content.kept if k[0] != "gradient" or k[1] not in self._values]
        coverage = content.news.get("coverage", {})
        content.news["coverage"] = {n: coverage[n] for n in coverage if n not in self._values}
        layers = [e for e in content.news.get("layers", []) if e["name"] not in self._gone]
        keys = {"keep": "keys"}
        content.news["layers"] = [e | keys if e["name"] in self._alone else e for e in layers]
        return content

    # -- 16 bits ---------------------------------------------------------------------------------

    def _narrow(self, segment: Segment, content: SegmentContent, layer: LayerMemory) -> None:
        """Put a layer's rows into 16 bits, where it was trained in more; measure what was lost."""
        name, parts = layer.name, dict(content.rows[layer.name])
        rounded: dict[str, Tensor] = {}
        for part, rows in list(parts.items()):
            if rows.dtype != layer.dtype or layer.dtype.itemsize <= 2:
                continue
            is_scaled = part != "keys" and self._stored == torch.float16
            made = narrowed(rows, self._stored, scaled=is_scaled)
            if part == "keys" and name in segment.distinct:
                self._held.setdefault(name, []).extend([made is not None] * len(rows))
            if made is None:
                self._wide[name] = self._wide.get(name, 0) + 1
                rounded[part] = rows
                continue
            parts[part], rounded[part] = made[0], made[0].to(layer.dtype)
            if made[1] is not None:
                parts[part + SCALES] = made[1]
                rounded[part] *= made[1][:, None].to(layer.dtype)
        content.rows[name] = list(parts.items())
        if "error_signals" in rounded:
            here = slice(0, segment.rows[name])
            x, d = (layer.read_segment(segment, part, here) for part in ("keys", "error_signals"))
            xs, ds = rounded.get("keys", x), rounded["error_signals"]
            if name in segment.distinct and name in self._held:
                is_held = torch.tensor(self._held[name])[segment.references(name).long()]
                xs = torch.where(is_held[:, None], x.to(self._stored).to(x.dtype), x)
            ends = np.cumsum(content.uses[name][:, ROWS]).tolist()
            uses = [slice(*ends_of) for ends_of in pairwise([0, *ends])]
            content.lost[name] = self._lost(layer, uses, (x, d), (xs, ds))

    def _lost(
        self, layer: LayerMemory, uses: list[slice], exact: Rows, kept: Rows
    ) -> dict[str, Reals]:
        """What was lost of each parameter in every use: [uses, 2]."""
        (x, d), (xs, ds), found = exact, kept, dict[str, Reals]()
        for parameter in layer.layer.parameters:
            v, signs = self._memory.direction(parameter), self._memory.signs(parameter)
            v = None if v is None else v.to(layer.dtype)
            own = layer.layer, parameter, v, signs[layer.rows_of(parameter)]
            off = [lost_in_use(*own, (x[use], d[use]), (xs[use], ds[use])) for use in uses]
            of = [lost_in_use(*own, (x[use], 0 * d[use]), (x[use], d[use])) for use in uses]
            found[parameter] = np.array(off)
            squares = np.square([off, of])[:, :, 1].sum(1)
            self._off[layer.name] = self._off.get(layer.name, np.zeros(2)) + squares
        return found

    # -- what was lost ---------------------------------------------------------------------------

    def sentences(self) -> list[str]:
        """Say what was lost; complete once all contents have been made."""
        said, stored = [], _name(self._stored)
        for what, names in (("patterns", self._gone), ("error signals", self._alone)):
            if names:
                dropped = f"the {what} of {', '.join(names)} were dropped afterwards"
                said.append(f"{dropped}; what they wrote is known from kept states alone")
        if self._narrows:
            shares = [(float(np.sqrt(off / (of or 1.0))), n) for n, (off, of) in self._off.items()]
            share, name = max(shares, default=(0.0, ""))
            off = f": what they sum to is off by at most {share:.1e} of it ({name})" if name else ""
            said.append(f"patterns were put into {stored} afterwards{off}")
        for name, count in self._wide.items():
            said.append(f"{stored} cannot hold {count} tensors of layer {name}: kept as trained")
        return said


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _refuse_places(memory: Memory, path: Path, overwrite: bool) -> None:
    """The source is never touched, and nothing is lost that was there."""
    here, there = memory.path.resolve(), path.resolve()
    if here == there or here in there.parents or there in here.parents:
        raise RecordingError(
            f"{path} was given as the destination, but the memory to be made smaller is "
            f"{memory.path}: it is never changed. Choose a directory of its own for the new one"
        )
    if (path / MANIFEST).exists() and not overwrite:
        raise RecordingError(
            f"{path} already holds a memory; nothing was touched. Choose another path, or pass "
            "overwrite=True (--overwrite) to delete that memory first"
        )
    if memory.is_being_recorded:
        raise RecordingError(f"{memory.path} is still being recorded; end the recording first")


def _stored(memory: Memory, dtype: str | None) -> torch.dtype:
    """What patterns are to be stored in."""
    now = memory.opened.description.stored
    if dtype is not None and dtype not in DTYPES:
        raise RecordingError(
            f"dtype={dtype!r} was given; expected one of {', '.join(DTYPES)}: what keys and error "
            "signals are to be stored in"
        )
    asked = now if dtype is None else DTYPES[dtype]
    if asked != now and now.itemsize <= 2:
        raise RecordingError(
            f"dtype={dtype!r} was given, but {memory.path} has its patterns in {_name(now)}: what "
            "that lost does not come back. Leave out dtype, or begin with the memory it was made of"
        )
    return asked


def _chosen(known: Iterable[str], asked: Names, argument: str) -> list[str]:
    """Find the layers of these names; `RecordingError` for a name that fits none."""
    known, patterns = list(known), [asked] if isinstance(asked, str) else list(asked)
    for pattern in patterns or [""]:
        if not any(fnmatchcase(name, pattern) for name in known):
            raise RecordingError(
                f"{argument}={asked!r} was given, and {pattern!r} matches no layer that has such; "
                f"these have: {', '.join(known) or 'none'}"
            )
    return [name for name in known if any(fnmatchcase(name, pattern) for pattern in patterns)]


def _take_away(path: Path, existed: bool) -> None:
    """Delete what was written of a memory that did not come to its end."""
    clear_directory(path)
    with contextlib.suppress(OSError):
        (path / SEGMENTS).rmdir()
        (path / PROGRESS).unlink()
        if not existed:
            path.rmdir()
