"""What tests of several rooms need."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result


@pytest.fixture
def ask(place: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """A question to the command line, in the directory that a test's own `place` has made."""
    from dualform.cli import main

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
