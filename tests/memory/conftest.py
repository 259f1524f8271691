"""One recorded run that tests may copy and damage."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tests.memory.runs import train


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """13 steps in several segments, with snapshots; never to be changed."""
    path = tmp_path_factory.mktemp("recorded") / "run"
    train(path, 13, segment_bytes=12_000)
    return path


@pytest.fixture
def run(recorded: Path, tmp_path: Path) -> Path:
    """A copy of it, free to be damaged."""
    return Path(shutil.copytree(recorded, tmp_path / "run"))


@pytest.fixture
def contents() -> Callable[[Path], dict[str, bytes]]:
    """Everything in a directory, to see whether something was touched."""

    def read(path: Path) -> dict[str, bytes]:
        return {str(f): f.read_bytes() if f.is_file() else b"" for f in sorted(path.rglob("*"))}

    return read
