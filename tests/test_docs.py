"""The documentation is code: its examples run, its links lead somewhere, and nothing is left out.

In README.md and docs/, a fenced block marked `python` is run by these tests, all blocks of a page
in order and in one namespace, in an empty directory. `python no-run` marks a fragment, `python with
lightning` what is run where that library is there.
"""

from __future__ import annotations

import doctest
import importlib
import importlib.util
import inspect
import pkgutil
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import click
import pytest
import torch

import dualform
from dualform.cli import main

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCE = re.compile(r"^```([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
RUNS = re.compile(r"python(?: with (\w+))?")


def page_id(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def runnable_blocks(page: Path) -> list[str]:
    """The page's `python` blocks, each moved to its own line numbers for readable tracebacks."""
    text = page.read_text(encoding="utf-8")
    return [
        "\n" * text[: match.start()].count("\n") + "\n" + match[2]
        for match in FENCE.finditer(text)
        if (runs := RUNS.fullmatch(match[1].strip()))
        and (runs[1] is None or importlib.util.find_spec(runs[1]))
    ]


def without_code(page: Path) -> str:
    return FENCE.sub("", page.read_text(encoding="utf-8"))


@pytest.mark.parametrize("page", [p for p in PAGES if runnable_blocks(p)], ids=page_id)
def test_the_code_on_the_page_runs(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, Any] = {"__name__": "__main__"}
    with torch.random.fork_rng(), warnings.catch_warnings():
        if "```python with " in page.read_text(encoding="utf-8"):
            warnings.simplefilter("ignore")  # of those libraries; ours are errors
            warnings.filterwarnings("error", message="dualform")
        for block in runnable_blocks(page):
            exec(compile(block, str(page), "exec"), namespace)


def test_readme_and_the_pages_for_newcomers_have_code_that_runs() -> None:
    with_code = {page_id(p) for p in PAGES if runnable_blocks(p)}
    assert {"README.md", "docs/your-own-model.md", "docs/dual-form.md"} <= with_code


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_every_fence_says_what_it_is(page: Path) -> None:
    kinds = {match[1].strip() for match in FENCE.finditer(page.read_text(encoding="utf-8"))}
    kinds = {kind for kind in kinds if not RUNS.fullmatch(kind)}
    assert kinds <= {"python no-run", "sh", "json", "text", ""}


def github_anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", without_code(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", h.lower()).strip().replace(" ", "-") for h in headings}


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_links_inside_the_project_lead_somewhere(page: Path) -> None:
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", without_code(page)):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        linked = (page.parent / path).resolve() if path else page
        if not linked.exists() or (anchor and anchor not in github_anchors(linked)):
            broken.append(target)
    assert not broken


def test_every_docs_page_is_reached_from_the_index() -> None:
    index = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    pages = {p.name for p in (ROOT / "docs").glob("*.md")} - {"index.md"}
    assert not {name for name in pages if f"({name}" not in index}


# The command line ---------------------------------------------------------------------------------


def cli_sections() -> dict[str, str]:
    """docs/cli.md, cut into the sections headed by a command."""
    text = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
    parts = re.split(r"^## `dualform ([a-z-]+)[^\n]*\n", text, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def long_options(command: click.Command) -> set[str]:
    flags = {
        flag
        for parameter in command.params
        if isinstance(parameter, click.Option) and not parameter.hidden
        for flag in (*parameter.opts, *parameter.secondary_opts)
    }
    return {flag for flag in flags if flag.startswith("--")} - {"--help"}


def test_every_command_has_its_section() -> None:
    assert isinstance(main, click.Group)
    assert set(cli_sections()) == set(main.commands)


@pytest.mark.parametrize("name", sorted(main.commands))
def test_every_option_of_the_command_is_documented_and_no_other(name: str) -> None:
    section = cli_sections()[name]
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", section)) - {"--help"}
    assert named == long_options(main.commands[name])


@pytest.mark.parametrize("name", sorted(main.commands))
def test_every_command_and_option_explains_itself(name: str) -> None:
    command = main.commands[name]
    assert command.help
    silent = [p.name for p in command.params if isinstance(p, click.Option) and not p.help]
    assert not silent


# Public names -------------------------------------------------------------------------------------


def public_objects() -> list[Any]:
    return [getattr(dualform, name) for name in dualform.__all__ if not name.startswith("_")]


def members_of(cls: type) -> Iterator[str]:
    """The public methods and properties a class of ours defines."""
    for base in cls.__mro__:
        if base.__module__.startswith("dualform"):
            yield from (
                name
                for name, member in vars(base).items()
                if not name.startswith("_")
                and (inspect.isroutine(member) or isinstance(member, property | classmethod))
            )


def object_id(value: Any) -> str:
    return str(getattr(value, "__name__", value))


def api_page() -> str:
    return (ROOT / "docs" / "api.md").read_text(encoding="utf-8")


def test_every_public_name_is_in_the_reference() -> None:
    headed = set(re.findall(r"^### `(?:dualform\.)?(\w+)", api_page(), re.MULTILINE))
    assert {name for name in dualform.__all__ if not name.startswith("_")} == headed


@pytest.mark.parametrize("cls", [c for c in public_objects() if isinstance(c, type)], ids=object_id)
def test_every_public_method_is_in_the_reference(cls: type) -> None:
    text = api_page()
    heading = re.search(rf"^### `(?:dualform\.)?{cls.__name__}\b.*?(?=^##|\Z)", text, re.M | re.S)
    assert heading is not None
    section = heading[0]
    named = re.compile(rf"`(?:{cls.__name__})?\.?(\w+)")
    missing = set(members_of(cls)) - set(named.findall(section))
    assert not missing


@pytest.mark.parametrize("value", public_objects(), ids=object_id)
def test_every_public_name_has_a_docstring_with_an_example(value: Any) -> None:
    if isinstance(value, ModuleType):
        assert value.__doc__
    else:
        text = inspect.getdoc(value) or ""
        assert ">>>" in text, f"{object_id(value)} has no example in its docstring"


def modules() -> list[str]:
    found = pkgutil.walk_packages(dualform.__path__, prefix="dualform.")
    return ["dualform", *(module.name for module in found)]


@pytest.mark.parametrize("name", modules())
def test_docstring_examples_run(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = doctest.testmod(importlib.import_module(name))
    assert result.failed == 0
