"""The door: `dualform.record`, which checks what it is given and makes a `Recorder`."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from torch import nn
from torch.optim import Optimizer

from dualform.errors import RecordingError
from dualform.recording.recorder import Recorder
from dualform.recording.sink import SEGMENT_BYTES

STEP_BUDGET = 1 << 30
SNAPSHOT_EVERY = 1000


def record(
    model: nn.Module,
    optimizers: Optimizer | Iterable[Optimizer],
    path: str | Path,
    *,
    audit: str = "raise",
    overwrite: bool = False,
    step_budget: int = STEP_BUDGET,
    snapshot_every: int = SNAPSHOT_EVERY,
    segment_bytes: int = SEGMENT_BYTES,
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
        audit: "raise" stops at the first step that cannot be explained; "warn" goes on, and the
            memory remembers that it is not exact.
        overwrite: delete a memory that is already at `path`.
        step_budget: bytes for gradients of parameters without patterns (norms, embeddings), which
            are kept step by step; beyond it only their learned part is, every `snapshot_every`
            steps.
        segment_bytes: how much is collected per commit. Buffers take at most 3 × (this + the bytes
            of the largest step).
    """
    if not isinstance(path, (str, os.PathLike)):
        raise RecordingError(f"expected a path for the memory, got {type(path).__name__}")
    if not isinstance(model, nn.Module):
        raise RecordingError(f"expected a torch.nn.Module to record, got {type(model).__name__}")
    if audit not in ("raise", "warn"):
        raise RecordingError(f'audit={audit!r} was given; expected "raise" or "warn"')
    for name, value in (
        ("step_budget", step_budget + 1),
        ("snapshot_every", snapshot_every),
        ("segment_bytes", segment_bytes),
    ):
        if value < 1:
            raise RecordingError(f"{name} must be positive")
    listed = list(optimizers) if isinstance(optimizers, Iterable) else [optimizers]
    if not listed or not all(isinstance(o, Optimizer) for o in listed):
        raise RecordingError(
            "expected a torch optimizer or a list of them, got "
            f"{[type(o).__name__ for o in listed] if listed else 'none'}"
        )
    return Recorder(
        model,
        listed,
        Path(path),
        audit=audit,
        overwrite=overwrite,
        step_budget=step_budget,
        snapshot_every=snapshot_every,
        segment_bytes=segment_bytes,
    )
