"""Every kind of recorded memory, recorded once; and what a directory holds, to the byte."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tests.compaction.sources import SOURCES

Recorded = Callable[[str], Path]


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    """`recorded("tied")`: a memory of that kind; never to be changed."""
    place = tmp_path_factory.mktemp("sources")

    def source(kind: str) -> Path:
        path = place / kind
        if not path.exists():
            torch.set_num_threads(1)
            SOURCES[kind](path)
        return path

    return source


@pytest.fixture
def contents() -> Callable[[Path], dict[str, bytes]]:
    """Everything in a directory, to see whether something was touched."""

    def read(path: Path) -> dict[str, bytes]:
        return {str(f): f.read_bytes() if f.is_file() else b"" for f in sorted(path.rglob("*"))}

    return read
