"""The manifest of a memory that was made from another: the source's own words, where they hold.

Whatever a reader has to know is said here: how parameters are covered now, how exact the patterns
were that are gone, and, in remarks, what can no longer be asked.
"""

from __future__ import annotations

import hashlib
from datetime import UTC, datetime
from typing import Any

import torch

from dualform.attention import Verification
from dualform.compaction.choices import Choices
from dualform.memory.copying import SourceMemory
from dualform.memory.files import canonical

OWN_COLUMNS = ("step", "position", "microbatch", "call")


def converted_manifest(
    source: SourceMemory,
    choices: Choices,
    columns: frozenset[str],
    certificate: Verification | None,
) -> dict[str, Any]:
    """The source's own words, changed where it is now another memory.

    `columns` still have a value somewhere. Fewer patterns can be checked less sharply, so what the
    source's certificate found has to go with them.
    """
    manifest = source.manifest
    entries = {entry["name"]: dict(entry) for entry in manifest["layers"]}
    for name in choices.layers:
        if name in choices.narrowed:
            entries[name]["stored"] = str(choices.narrowed[name]).removeprefix("torch.")
        if name in choices.without_error_signals:
            entries[name]["error_signals"] = False
    parameters = [
        _parameter(source, entry) if entry["name"] in choices.summed else entry
        for entry in manifest["parameters"]
    ]
    kept = columns | frozenset(OWN_COLUMNS)
    remarks = [*source.recorded_remarks, *_remarks(source, choices)]
    if certificate is not None and certificate.failures:
        failed = ", ".join(f"{c.parameter} ({c.kind})" for c in certificate.failures)
        remarks.append(f"the memory that this one was made from did not verify: {failed}")
    now = {
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "what": choices.describe(source) or "as it is",
        "source": hashlib.sha256(canonical(source.manifest)).hexdigest(),
    }
    return manifest | {
        "layers": [entries[name] for name in choices.layers],
        "parameters": parameters,
        "columns": [pair for pair in manifest["columns"] if pair[0] in kept],
        "conversions": [*manifest.get("conversions", ()), now],
        "exact": source.exact and (certificate is None or certificate.passed),
        "remarks": remarks,
    }


def _parameter(source: SourceMemory, entry: dict[str, Any]) -> dict[str, Any]:
    """A parameter whose patterns are gone: how it is covered now, and how exact those were."""
    name = entry["name"]
    writers = [source.layer(n) for n in source.layers]
    writers = [layer for layer in writers if name in (layer.weight, layer.bias)]
    changed = {
        "eps": max([entry["eps"], *(float(torch.finfo(la.dtype).eps) for la in writers)]),
        "stored_eps": max(la.stored_eps for la in writers),
    }
    return entry | changed | {"coverage": "accumulated", "accumulated_since": 0, "layers": []}


def _remarks(source: SourceMemory, choices: Choices) -> list[str]:
    said = []
    if choices.without_error_signals:
        names = [name for name in choices.layers if name in choices.without_error_signals]
        said.append(f"the error signals of {', '.join(names)} were dropped after recording")
    if gone := [name for name in source.layers if name not in choices.layers]:
        said.append(f"the patterns of {', '.join(gone)} were dropped after recording")
    return said
