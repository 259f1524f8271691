"""The door: `dualform.record`, which checks what it is given and makes a `Recorder`."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dualform.errors import RecordingError
from dualform.memory.files import local_path
from dualform.recording.recorder import Recorder
from dualform.recording.sink import SEGMENT_BYTES

STORED = {"float32": None, "float16": torch.float16, "bfloat16": torch.bfloat16}
"""What patterns can be stored in; float32 is as training has them."""

CHOICES = {"audit": ("raise", "warn"), "resume": (True, False, "rewind"), "dtype": tuple(STORED)}

NEW_CALL = "Write dualform.record(model, path): optimizers are found as they step"


@dataclass(frozen=True)
class Options:
    """What a recording was asked to be."""

    keep: str | Mapping[str, str] = "auto"
    tags: Callable[..., Mapping[str, Any]] | None = None
    stored: torch.dtype | None = None
    every: int = 1
    resume: bool | str = False
    overwrite: bool = False
    audit: str = "raise"
    segment_bytes: int = SEGMENT_BYTES


def record(
    model: nn.Module,
    path: str | Path,
    *others: Any,
    keep: str | Mapping[str, str] = "auto",
    tags: Callable[..., Mapping[str, Any]] | None = None,
    dtype: str | torch.dtype = "float32",
    every: int = 1,
    resume: bool | str = False,
    overwrite: bool = False,
    audit: str = "raise",
) -> Recorder:
    """Record a training run into a memory at `path`; wrap the loop in it and change nothing else.

    Any optimizer that moves the model's parameters meanwhile is found when it steps.

    Example:
        >>> with dualform.record(model, "runs/digits") as recorder:   # doctest: +SKIP
        ...     for example, image, label in loader:
        ...         recorder.tag(example=example, label=label)
        ...         loss_fn(model(image), label).backward()
        ...         optimizer.step(); optimizer.zero_grad()

    Args:
        keep: how finely each layer's memory can say who wrote it: "patterns" (every key and error
            signal), "keys" (attention only), "examples" (what each example wrote, in sum) or
            "values" (kept states alone); or a mapping from name patterns to these words, of which
            the first that fits counts: {"head": "patterns", "*": "values"}. "auto" keeps linear
            layers and embeddings by patterns, gains and biases of norms by examples.
        tags: where a trainer owns the loop, so that there is no place for `recorder.tag`: a
            function of the model's own inputs that returns the tags of that batch,
            `tags=lambda input_ids, labels, **_: {"label": labels}`.
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
    if isinstance(path, nn.Module) and isinstance(model, (str, os.PathLike)):
        raise RecordingError("model and path are exchanged. Write dualform.record(model, path)")
    if others or not isinstance(path, (str, os.PathLike)):
        seen = ", ".join(type(given).__name__ for given in (path, *others))
        raise RecordingError(f"expected one path after the model, got {seen}. {NEW_CALL}")
    if not isinstance(model, nn.Module):
        raise RecordingError(f"expected a torch.nn.Module to record, got {type(model).__name__}")
    dtype = str(dtype).removeprefix("torch.")
    for name, given in {"audit": audit, "resume": resume, "dtype": dtype}.items():
        if given not in CHOICES[name]:
            words = ", ".join(map(repr, CHOICES[name]))
            raise RecordingError(f"{name}={given!r} was given; expected one of {words}")
    if tags is not None and not callable(tags):
        raise RecordingError(
            f"tags={type(tags).__name__} was given; expected a function of the model's inputs, as "
            'in tags=lambda x, **_: {"label": x["label"]}, or call recorder.tag(...) in the loop'
        )
    if overwrite and resume:
        raise RecordingError(
            "overwrite=True and resume=True were both given: one deletes the memory, the other "
            "goes on with it. Choose one"
        )
    if not isinstance(every, int) or isinstance(every, bool) or every < 1:
        raise RecordingError(f"every={every!r} was given; expected a whole number, at least 1")
    options = Options(keep, tags, STORED[dtype], every, resume, overwrite, audit)
    return Recorder(model, local_path(path), options)
