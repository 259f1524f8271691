"""Experiments are users of the library: they know its public names and nothing else."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

import dualform

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
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value) == "df":
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
