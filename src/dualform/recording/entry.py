"""The door: `dualform.record`, which checks what it is given and makes a `Recorder`."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torch.optim import Optimizer

from dualform.errors import RecordingError
from dualform.memory.files import local_path
from dualform.recording.recorder import Recorder
from dualform.recording.sink import SEGMENT_BYTES

STORED = {"float32": None, "float16": torch.float16, "bfloat16": torch.bfloat16}
"""What patterns can be stored in; float32 is as training has them."""

CHOICES = {"audit": ("raise", "warn"), "resume": (True, False, "rewind"), "dtype": tuple(STORED)}


@dataclass(frozen=True)
class Options:
    """What a recording was asked to be."""

    keep: str | Mapping[str, str] = "auto"
    stored: torch.dtype | None = None
    every: int = 1
    resume: bool | str = False
    overwrite: bool = False
    audit: str = "raise"
    segment_bytes: int = SEGMENT_BYTES


def record(
    model: nn.Module,
    optimizers: Optimizer | Iterable[Optimizer],
    path: str | Path,
    *,
    keep: str | Mapping[str, str] = "auto",
    dtype: str = "float32",
    every: int = 1,
    resume: bool | str = False,
    overwrite: bool = False,
    audit: str = "raise",
) -> Recorder:
    """Record a training run into a memory at `path`; wrap the loop in it and change nothing else.

    Example:
        >>> with df.record(model, optimizer, "runs/digits") as recorder:   # doctest: +SKIP
        ...     for example, image, label in loader:
        ...         recorder.tag(example=example, label=label)
        ...         loss_fn(model(image), label).backward()
        ...         optimizer.step(); optimizer.zero_grad()

    Args:
        optimizers: the optimizer, or a list of all that train this model.
        keep: how finely each layer's memory can say who wrote it: "patterns" (every key and error
            signal), "keys" (attention only), "examples" (what each example wrote, in sum) or
            "values" (kept states alone); or a mapping from name patterns to these words, of which
            the first that fits counts: {"head": "patterns", "*": "values"}. "auto" keeps linear
            layers and embeddings by patterns, gains and biases of norms by examples.
        dtype: what patterns are stored in. "float32" keeps them as training had them (float64 stays
            float64); "float16" and "bfloat16" take half the bytes. Training itself is the same.
        every: keep the patterns of every so many steps only: 0, k, 2k, … What the other steps wrote
            is part of the remainder.
        resume: go on with the memory at `path` from the step whose weights the model has, dropping
            recorded steps after it; where there is no memory yet, one is begun. Dropping all of
            them, for a model as it was before the first, takes `resume="rewind"`.
        overwrite: delete a memory that is already at `path`.
        audit: "raise" stops before the first update that patterns cannot explain; "warn" goes on,
            and keeps that parameter as values.
    """
    if not isinstance(path, (str, os.PathLike)):
        raise RecordingError(f"expected a path for the memory, got {type(path).__name__}")
    if not isinstance(model, nn.Module):
        raise RecordingError(f"expected a torch.nn.Module to record, got {type(model).__name__}")
    for name, given in {"audit": audit, "resume": resume, "dtype": dtype}.items():
        if given not in CHOICES[name]:
            words = ", ".join(map(repr, CHOICES[name]))
            raise RecordingError(f"{name}={given!r} was given; expected one of {words}")
    if overwrite and resume:
        raise RecordingError(
            "overwrite=True and resume=True were both given: one deletes the memory, the other "
            "goes on with it. Choose one"
        )
    if not isinstance(every, int) or isinstance(every, bool) or every < 1:
        raise RecordingError(f"every={every!r} was given; expected a whole number, at least 1")
    listed = list(optimizers) if isinstance(optimizers, Iterable) else [optimizers]
    if not listed or not all(isinstance(o, Optimizer) for o in listed):
        raise RecordingError(
            "expected a torch optimizer or a list of them, got "
            f"{[type(o).__name__ for o in listed] if listed else 'none'}"
        )
    options = Options(keep, STORED[dtype], every, resume, overwrite, audit)
    return Recorder(model, listed, local_path(path), options)
