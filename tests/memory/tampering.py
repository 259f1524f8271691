"""Changing a recorded memory on disk so that every checksum and hash still matches.

A forger with full knowledge of the format: tensors are edited in place, the crc32 of every block
and the manifest's own seal are computed anew, so `Memory.check()` has nothing to object to. What is
left to find the lie is arithmetic. Tests of `verify` use it through

    zero_error_signals(run, step=7)            the error signals of one step, in one layer or in all
    scale_learning_rate(run, step=7, factor=1.01)
    drop_clipping(run, step=7)                 κ = 1: as if the gradient had not been clipped
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
from torch import Tensor

BLOCK = 4 << 20
TYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip


def read_manifest(run: Path) -> dict[str, Any]:
    """The manifest as it stands, unchecked."""
    manifest: dict[str, Any] = json.loads((Path(run) / "manifest.json").read_text())["manifest"]
    return manifest


def write_manifest(run: Path, manifest: dict[str, Any]) -> None:
    """Write a manifest with a seal that matches, whatever it says."""
    content = json.dumps(manifest, separators=(",", ":"), sort_keys=True)
    sealed = {"manifest": manifest, "crc32": zlib.crc32(content.encode())}
    (Path(run) / "manifest.json").write_text(json.dumps(sealed, sort_keys=True))


def reseal(run: Path) -> None:
    """Compute sizes and checksums of all files anew, as they are now, and seal the manifest."""
    manifest = read_manifest(run)
    entries = [(Path(run) / "initial.safetensors", manifest["initial"])]
    for kind in ("segments", "snapshots"):
        entries += [(Path(run) / kind / entry["file"], entry) for entry in manifest[kind]]
    for path, entry in entries:
        if path.is_file():
            data = path.read_bytes()
            sizes = [size for size, _ in entry["blocks"]]
            if sum(sizes) != len(data):
                sizes = [min(BLOCK, len(data) - at) for at in range(0, len(data), BLOCK)]
            starts = [sum(sizes[:i]) for i in range(len(sizes))]
            entry["blocks"] = [
                [size, zlib.crc32(data[at : at + size])]
                for at, size in zip(starts, sizes, strict=True)
            ]
    write_manifest(run, manifest)


def header(path: Path) -> tuple[dict[str, Any], int]:
    """A safetensors file's entries and where its data begins."""
    with open(path, "rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        return json.loads(file.read(length)), 8 + length


def edit_tensor(path: Path, name: str, change: Callable[[Tensor], None]) -> None:
    """Let `change` write to one tensor of a file, in place; reseals nothing."""
    entries, data = header(path)
    entry = entries[name]
    low, high = entry["data_offsets"]
    with open(path, "r+b") as file:
        file.seek(data + low)
        raw = bytearray(file.read(high - low))
        change(torch.frombuffer(raw, dtype=TYPES[entry["dtype"]]).view(entry["shape"]))
        file.seek(data + low)
        file.write(raw)


def replace_tensors(path: Path, tensors: dict[str, Tensor | None]) -> None:
    """Rewrite a file with some tensors replaced, added or (None) left out; reseals nothing."""
    metadata = header(path)[0].get("__metadata__")
    kept: dict[str, Tensor | None] = dict(safetensors.torch.load_file(path))
    kept = {name: t for name, t in kept.items() if not name.startswith("padding/")} | tensors
    whole = {name: t.clone().contiguous() for name, t in kept.items() if t is not None}
    safetensors.torch.save_file(whole, path, metadata)


def segment_of(run: Path, step: int) -> tuple[Path, int]:
    """The segment file that holds a step, and the step's place in it."""
    for entry in read_manifest(run)["segments"]:
        row = step - entry["first_step"]
        if 0 <= row < entry["steps"]:
            return Path(run) / "segments" / entry["file"], row
    raise ValueError(f"no committed segment holds step {step}")


def zero_error_signals(path: str | Path, step: int, layer: str | None = None) -> None:
    """The error signals of one step become zero, in one layer or in all of them."""
    run = Path(path)
    file, _ = segment_of(run, step)
    layers = json.loads(header(file)[0]["__metadata__"]["dualform"])["layers"]
    tensors = safetensors.torch.load_file(file)
    changed = 0
    for name, entry in layers.items():
        if layer is not None and name != layer:
            continue
        rows = tensors[f"patterns/{entry['table']}/step"] == step
        changed += int(rows.sum())

        def zero(signals: Tensor, rows: Tensor = rows) -> None:
            signals[rows] = 0

        edit_tensor(file, f"error_signals/{name}", zero)
    if not changed:
        raise ValueError(f"step {step} has no patterns of {layer or 'any layer'} to tamper with")
    reseal(run)


def scale_learning_rate(path: str | Path, step: int, factor: float) -> None:
    """The learning rates logged for one step, of all groups, times `factor`."""
    run = Path(path)
    file, row = segment_of(run, step)

    def scale(settings: Tensor) -> None:
        settings[row, :, 0] *= factor

    edit_tensor(file, "log/hyperparameters", scale)
    reseal(run)


def drop_clipping(path: str | Path, step: int) -> None:
    """The factor logged for one step becomes 1 for every parameter that was updated."""
    run = Path(path)
    file, row = segment_of(run, step)
    applied = safetensors.torch.load_file(file)["log/applied"][row].bool()

    def forget(kappa: Tensor) -> None:
        if not np.any((kappa[row][applied] != 1).numpy()):
            raise ValueError(f"step {step} was not clipped; there is nothing to tamper with")
        kappa[row, applied] = 1.0

    edit_tensor(file, "log/kappa", forget)
    reseal(run)
