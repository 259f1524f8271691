"""Tables computed from a memory and kept beside it: sums, norms.

    run/derived/<first digits of the manifest's hash>/<name>.safetensors

Nothing here is part of the memory. Any of it may be deleted at any time and is computed again when
it is next needed; where the directory cannot be written to, it simply is not kept. Readers build
it, several at once if they like: a file appears whole, by an atomic rename, or not at all. A table
belongs to one state of the manifest and is looked for under that state's hash, so one that has gone
stale is never found; whoever writes the next one takes it away. And none is believed without its
checksum, which covers names, types, shapes and the version that computed it as well as the numbers.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import re
import threading
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dualform.errors import MemoryFileError
from dualform.memory.checksums import crc32
from dualform.memory.files import DERIVED, canonical
from dualform.memory.tensor_files import TensorFile, tensor_bytes, write_tensor_file
from dualform.version import __version__

STATE = re.compile(r"[0-9a-f]{16}", re.ASCII)
"""What the directory of one state of the manifest is called."""

FILE = re.compile(r"[a-z0-9][a-z0-9-]{0,100}\.(safetensors|[0-9]+-[0-9]+\.tmp)", re.ASCII)
"""What a table's file is called, finished or being written."""

_logger = logging.getLogger("dualform")


class Derived:
    """The derived tables of a memory in one state; `keep=False` only reads what is there."""

    def __init__(self, run: Path, manifest: dict[str, Any], *, keep: bool = True) -> None:
        self._run, self._manifest, self._keep = run, manifest, keep

    @cached_property
    def _hash(self) -> str:
        return hashlib.sha256(canonical(self._manifest)).hexdigest()

    @property
    def path(self) -> Path:
        """Where the tables of this state lie, if there are any."""
        return self._run / DERIVED / self._hash[:16]

    def load(self, name: str, *, about: str) -> dict[str, Tensor] | None:
        """A table by its name, None if there is none that can be believed.

        `about` says in full what the table is of; a name is only its digest.
        """
        path = self.path / f"{name}.safetensors"
        if not path.is_file():
            return None
        try:
            file = TensorFile(path)
            tensors = {n: file.tensor(n) for n in sorted(file.names)}
            sound = file.metadata.get("seal") == self._seal(tensors, about)
        except (MemoryFileError, OSError, TypeError, ValueError) as error:
            _logger.warning("%s cannot be read (%s); it is computed again", path, error)
            return None
        if not sound:
            _logger.warning("%s does not match its checksum; it is computed again", path)
            return None
        return tensors

    def save(self, name: str, tensors: Mapping[str, Tensor], *, about: str) -> bool:
        """Keep a table; False where that is not possible, which does no harm."""
        if not self._keep:
            return False
        temporary = self.path / f"{name}.{os.getpid()}-{threading.get_ident()}.tmp"
        plain = {n: t.detach().cpu().contiguous() for n, t in tensors.items()}
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._drop_stale()
            metadata = {"about": about, "seal": self._seal(plain, about)}
            listed = [tensor_bytes(n, t) for n, t in plain.items()]
            try:
                write_tensor_file(temporary, listed, metadata, direct=False)
                os.replace(temporary, self.path / f"{name}.safetensors")
            finally:
                with contextlib.suppress(OSError):
                    temporary.unlink()
        except OSError as error:  # read-only, full, or taken away just now by a new recording
            _logger.info("%s is not kept: %s", self.path / name, error)
            return False
        return True

    def _seal(self, tensors: Mapping[str, Tensor], about: str) -> dict[str, Any]:
        """The checksum of everything that matters, to be compared as a whole."""
        described = [[n, str(t.dtype), list(t.shape)] for n, t in sorted(tensors.items())]
        text = json.dumps([self._hash, __version__, about, described])
        sums = {n: _crc(t) for n, t in sorted(tensors.items())}
        return {"text": crc32(text.encode()), "tensors": sums}

    def _drop_stale(self) -> None:
        """Take away what belongs to other states of this memory."""
        for entry in self.path.parent.iterdir():
            if entry != self.path and STATE.fullmatch(entry.name) and not entry.is_symlink():
                _remove(entry)


def foreign(run: Path) -> Iterator[str]:
    """Whatever lies in the place of derived tables and is none: it is not ours to delete."""
    place = run / DERIVED
    if not (place.exists() or place.is_symlink()):
        return
    if place.is_symlink() or not place.is_dir():
        yield DERIVED
        return
    for state in place.iterdir():
        if not STATE.fullmatch(state.name) or state.is_symlink() or not state.is_dir():
            yield f"{DERIVED}/{state.name}"
            continue
        for entry in state.iterdir():
            if not FILE.fullmatch(entry.name) or entry.is_dir():
                yield f"{DERIVED}/{state.name}/{entry.name}"


def clear(run: Path) -> None:
    """Delete every derived table of a memory, and nothing else."""
    place = run / DERIVED
    if place.is_dir() and not place.is_symlink():
        for state in place.iterdir():
            if STATE.fullmatch(state.name) and not state.is_symlink():
                _remove(state)
        with contextlib.suppress(OSError):
            place.rmdir()


def _remove(state: Path) -> None:
    with contextlib.suppress(OSError):  # another reader may be doing the same
        for entry in state.iterdir():
            if FILE.fullmatch(entry.name):
                entry.unlink(missing_ok=True)
        state.rmdir()


def _crc(tensor: Tensor) -> int:
    if not tensor.numel():
        return 0
    flat: Any = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
    return crc32(memoryview(flat))
