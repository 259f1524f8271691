"""What tests of several rooms need."""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from click.testing import CliRunner, Result

from dualform.cli import main
from dualform.recording import parameters


@pytest.fixture(scope="session", autouse=True)
def probes() -> Iterator[None]:
    """The same probes in every run of the tests; DUALFORM_TEST_SEED draws others."""
    seed = int(os.environ.get("DUALFORM_TEST_SEED", "0"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parameters, "fresh_seed", lambda: seed)
        yield


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
