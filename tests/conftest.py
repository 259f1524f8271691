"""What tests of several rooms need."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from click.testing import CliRunner, Result

from dualform.cli import main


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


@pytest.fixture
def ask(place: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """A question to the command line, in the directory that a test's own `place` has made."""
    monkeypatch.chdir(place)
    return lambda *args: CliRunner().invoke(main, [str(a) for a in args])


@pytest.fixture
def ask_json(ask: Callable[..., Result]) -> Callable[..., Any]:
    """The same, answered in JSON."""

    def parsed(*args: Any) -> Any:
        result = ask(*args, "--json")
        assert result.exit_code == 0, result.stderr
        return json.loads(result.stdout)

    return parsed
