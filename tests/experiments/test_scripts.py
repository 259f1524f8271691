"""Experiments are users of the library: they know its public names and nothing else."""

from __future__ import annotations

import argparse
import ast
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import dualform
import mnist_single
import runs

EXPERIMENTS = Path(__file__).resolve().parents[2] / "experiments"
SCRIPTS = sorted(EXPERIMENTS.glob("*.py"))

each_script = pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)


@each_script
def test_a_script_uses_public_names_only(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
            assert not [name for name in names if name.startswith("dualform.")]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("dualform"):
            assert node.module == "dualform"
            assert {alias.name for alias in node.names} <= set(dualform.__all__)
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value) == "dualform":
            assert node.attr in {*dualform.__all__, "__version__"}
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value) in ("dual", "final"):
            assert not node.attr.startswith("_")


@each_script
def test_a_script_opens_by_saying_what_it_is_for_and_stays_short(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert len(ast.get_docstring(ast.parse(text)) or "") > 100
    assert len(text.splitlines()) <= 450


@pytest.mark.parametrize(
    "name", ["mnist_single", "mnist_fashion_joint", "mnist_fashion_continual", "paper_images"]
)
def test_a_script_explains_its_options_without_any_data(name: str) -> None:
    done = subprocess.run(
        [sys.executable, str(EXPERIMENTS / f"{name}.py"), "--help"],
        capture_output=True, text=True, check=True, env={**os.environ, "DUALFORM_DATA": "/nowhere"},
    )  # fmt: skip
    for option in ("--quick", "--jobs", "--again", "--keep", "--results", "--scratch"):
        assert option in done.stdout


class Parsed(Exception):
    """A command line got past its checks."""


def parse(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    """Run mnist_single.py up to where it would begin to train."""

    def begin(*_: Any) -> Any:
        raise Parsed

    monkeypatch.setattr(sys, "argv", ["mnist_single.py", *arguments])
    monkeypatch.setattr(runs, "perform_all", begin)
    runs.main(mnist_single.EXPERIMENT, mnist_single.__doc__ or "")


def test_every_option_is_explained(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real, parsers = argparse.ArgumentParser.parse_args, []

    def kept(parser: argparse.ArgumentParser, *more: Any) -> Any:
        parsers.append(parser)
        return real(parser, *more)

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", kept)
    with pytest.raises(SystemExit):
        parse(monkeypatch, "--help")
    actions = parsers[0]._actions
    assert len(actions) > 9
    assert all(action.help for action in actions)
    assert "default: 5000" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--jobs", "0"], "--jobs: '0': expected a whole number from 1 on"),
        (["--jobs", "two"], "--jobs: 'two': expected a whole number from 1 on"),
        (["--steps", "0"], "--steps: '0': expected a whole number from 1 on"),
        (["--steps", "5", "5"], "--steps: 2 given; expected 1, the steps of each phase"),
        (["--seeds", "0", "-1"], "--seeds: '-1': expected a whole number from 0 on"),
        (["--preset", "other"], "--preset: invalid choice: 'other'"),
    ],
)
def test_options_that_make_no_run_are_refused(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    with pytest.raises(SystemExit) as end:
        parse(monkeypatch, *arguments)
    assert end.value.code == 2
    assert f"error: argument {message}" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--results", "--scratch"])
def test_a_place_that_cannot_be_written_is_refused_before_any_training(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    option: str,
) -> None:
    places = {"--results": tmp_path / "results", "--scratch": tmp_path / "runs"}
    with pytest.raises(Parsed):
        parse(monkeypatch, *(str(part) for place in places.items() for part in place))
    (tmp_path / "file").write_text("in the way")
    places[option] = tmp_path / "file" / "folder"
    with pytest.raises(SystemExit) as end:
        parse(monkeypatch, *(str(part) for place in places.items() for part in place))
    assert end.value.code == 2
    said = capsys.readouterr().err
    assert f"argument {option}: {places[option]} cannot be written (Not a directory)" in said
    assert "name another directory" in said
