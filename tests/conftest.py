"""What tests of several rooms need."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="session")
def tampering() -> ModuleType:
    """The forger's tools, which live with the tests of the format."""
    path = Path(__file__).parent / "memory" / "tampering.py"
    spec = importlib.util.spec_from_file_location("tampering", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
