"""The door: `dualform.record`, which checks what it is given and makes a `Recorder`."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from torch import nn
from torch.optim import Optimizer

from dualform.errors import RecordingError
from dualform.layers import NamePatterns
from dualform.memory.files import local_path
from dualform.recording.recorder import Recorder
from dualform.recording.sink import SEGMENT_BYTES
from dualform.recording.storage import Storage, chosen

STEP_BUDGET = 1 << 30
STATE_SHARE = 0.125
SNAPSHOT_EVERY = 1000


def record(
    model: nn.Module,
    optimizers: Optimizer | Iterable[Optimizer],
    path: str | Path,
    *,
    layers: NamePatterns = None,
    error_signals: bool | str | Iterable[str] = True,
    dtype: str = "float32",
    every: int = 1,
    audit: str = "raise",
    overwrite: bool = False,
    resume: bool | str = False,
    step_budget: int = STEP_BUDGET,
    state_share: float = STATE_SHARE,
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
        layers: the layers whose patterns are kept, by name or pattern ("fc1", ["encoder.*"]); all
            by default, [] for none. Other trained parameters are accounted for step by step; so
            are, if they are left out here, modules that would otherwise be refused (compiled ones,
            fused recurrent ones).
        error_signals: of which layers they are kept: True, False, or name patterns such as
            ["fc*"]. Keys alone are enough to `attend`; the parameters of such layers are accounted
            for step by step, without patterns.
        dtype: what patterns are stored in. "float32" keeps them exactly as training had them
            (float64 stays float64); "float16" and "bfloat16" take half the bytes, and `verify`
            measures what that loses. Training itself is the same.
        every: keep the patterns of every so many steps only: 0, k, 2k, … What the other steps wrote
            is one sum per parameter, from their gradients, kept every `snapshot_every` steps.
        audit: "raise" stops at the first step that cannot be explained; "warn" goes on, and the
            memory remembers that it is not exact.
        overwrite: delete a memory that is already at `path`.
        resume: go on with the memory at `path` from the step whose weights the model has, dropping
            recorded steps after it; where there is no memory yet, one is begun. Dropping all of
            them, for a model as it was before the first, takes `resume="rewind"`.
        step_budget: bytes for gradients of parameters without patterns (norms, for one), which
            are kept step by step; beyond it only their learned part is, every `snapshot_every`
            steps.
        state_share: what an adaptive optimizer (Adam, …) remembers is kept whenever it is at most
            this share of what was recorded since the last time, and always at the start.
        segment_bytes: how much is collected per commit. Buffers take at most 3 × (this + the bytes
            of the largest step).
    """
    if not isinstance(path, (str, os.PathLike)):
        raise RecordingError(f"expected a path for the memory, got {type(path).__name__}")
    if not isinstance(model, nn.Module):
        raise RecordingError(f"expected a torch.nn.Module to record, got {type(model).__name__}")
    if audit not in ("raise", "warn"):
        raise RecordingError(f'audit={audit!r} was given; expected "raise" or "warn"')
    if resume not in (True, False, "rewind"):
        raise RecordingError(f'resume={resume!r} was given; expected True, False or "rewind"')
    if overwrite and resume:
        raise RecordingError(
            "overwrite=True and resume=True were both given: one deletes the memory, the other "
            "goes on with it. Choose one"
        )
    for name, value, least in (
        ("step_budget", step_budget, 0),
        ("snapshot_every", snapshot_every, 1),
        ("segment_bytes", segment_bytes, 1),
        ("every", every, 1),
    ):
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise RecordingError(
                f"{name}={value!r} was given; expected a whole number, at least {least}"
            )
    if not isinstance(state_share, int | float) or not 0 < state_share <= 1:
        raise RecordingError(
            f"state_share={state_share!r} was given; expected a share of what is recorded, more "
            "than 0 and at most 1"
        )
    listed = list(optimizers) if isinstance(optimizers, Iterable) else [optimizers]
    if not listed or not all(isinstance(o, Optimizer) for o in listed):
        raise RecordingError(
            "expected a torch optimizer or a list of them, got "
            f"{[type(o).__name__ for o in listed] if listed else 'none'}"
        )
    return Recorder(
        model,
        listed,
        local_path(path),
        layers=layers,
        audit=audit,
        every=every,
        overwrite=overwrite,
        resume=resume,
        step_budget=step_budget,
        state_share=float(state_share),
        snapshot_every=snapshot_every,
        segment_bytes=segment_bytes,
        storage=Storage(dtype, chosen(error_signals)),
    )
