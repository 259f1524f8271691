"""Rules of the house that no linter knows: what may not be in the source, and what must be."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

import dualform

ROOT = Path(__file__).resolve().parent.parent
SRC = ROOT / "src" / "dualform"
MODULES = sorted(SRC.rglob("*.py"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))

LONGEST_FILE = 500
"""Lines; an idea that truly needs more is rare enough to be discussed."""

RUNS_CODE = {"pickle", "cloudpickle", "dill", "shelve", "marshal", "joblib"}
OPTIONAL = {"pandas", "pyarrow", "sklearn", "numba", "faiss", "altair", "vl_convert"}
VAGUE = {"utils", "util", "helpers", "helper", "common", "base", "manager", "misc"}


def module_id(path: Path) -> str:
    return path.relative_to(SRC).as_posix()


each_module = pytest.mark.parametrize("path", MODULES, ids=module_id)


def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def imported(node: ast.AST) -> Iterator[str]:
    """The outermost package names that an import statement names."""
    if isinstance(node, ast.Import):
        yield from (alias.name.partition(".")[0] for alias in node.names)
    elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
        yield node.module.partition(".")[0]


@each_module
def test_nothing_that_could_execute_a_file_is_used(path: Path) -> None:
    for node in ast.walk(tree(path)):
        assert not RUNS_CODE & set(imported(node)), ast.unparse(node)
        if isinstance(node, ast.Attribute):
            assert ast.unparse(node) not in {"torch.load", "torch.save", "np.load", "np.save"}
        if isinstance(node, ast.Call):
            assert ast.unparse(node.func) not in {"eval", "exec"}
            assert "allow_pickle" not in {keyword.arg for keyword in node.keywords}


@each_module
def test_a_module_opens_by_saying_what_it_is_for(path: Path) -> None:
    assert len(ast.get_docstring(tree(path)) or "") > 40


@each_module
def test_a_file_holds_one_idea(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) <= LONGEST_FILE


@each_module
def test_a_file_is_named_after_a_thing(path: Path) -> None:
    assert not VAGUE & {part.removesuffix(".py") for part in path.relative_to(SRC).parts}


@each_module
def test_optional_dependencies_are_imported_only_where_they_are_used(path: Path) -> None:
    for node in tree(path).body:
        assert not OPTIONAL & set(imported(node)), f"{ast.unparse(node)} at the top of {path.name}"


def test_importing_dualform_imports_no_optional_dependency() -> None:
    check = f"import sys, dualform; print(*({OPTIONAL!r} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


def test_the_verbs_promise_what_they_do() -> None:
    """`explain` and `influence` promise something else; an attention weight is not a score."""
    names = {
        name for value in vars(dualform).values() if isinstance(value, type) for name in dir(value)
    } | set(dualform.__all__)
    promises = ("score", "explain", "influence", "probabilit", "memory_size", "unlearn")
    assert not [n for n in names if not n.startswith("_") and any(p in n.lower() for p in promises)]


def test_the_package_says_it_is_typed() -> None:
    assert (SRC / "py.typed").is_file()


# The order of the rooms ---------------------------------------------------------------------------


def test_the_import_contract_names_every_room_once_and_in_order() -> None:
    (contract,) = PROJECT["tool"]["importlinter"]["contracts"]
    assert contract["type"] == "layers"
    assert contract["exhaustive"] is True
    floors = [re.split(r"\s*[|:]\s*", floor) for floor in contract["layers"]]
    rooms = [room.strip("()") for floor in floors for room in floor]
    assert len(rooms) == len(set(rooms))
    level = {room.strip("()"): i for i, floor in enumerate(floors) for room in floor}
    assert level["cli"] < level["attention"] == level["recording"] < level["certificate"]
    assert level["certificate"] < level["memory"] < level["layers"] == level["learning_rules"]
    assert any("|" in floor and "attention" in floor for floor in contract["layers"])


# What is published --------------------------------------------------------------------------------

NOT_PUBLISHED = {
    ".git", ".venv", "__pycache__", ".pytest_cache", ".mypy_cache", ".ruff_cache", ".hypothesis",
    ".import_linter_cache", "build", "dist", "runs",
}  # fmt: skip

# Written in pieces, so that this file does not trip over itself.
PRIVATE = re.compile(
    "|".join(
        [r"/wo" r"rk/", r"/ro" r"ot/", r"/ho" r"me/\w", "pypi" r"\.org", "python" "hosted",
         "npm" r"js\.org", "deb" r"\.debian", "find" "-links"]
    )
)  # fmt: skip


def published_text_files() -> Iterator[Path]:
    for path in sorted(ROOT.rglob("*")):
        parts = path.relative_to(ROOT).parts
        if path.is_file() and not NOT_PUBLISHED & set(parts):
            yield path


def test_no_file_names_a_workplace_or_a_package_registry() -> None:
    found = []
    for path in published_text_files():
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        found += [f"{path.relative_to(ROOT)}: {m[0]}" for m in PRIVATE.finditer(text)]
    assert not found


def test_the_package_is_imported_by_its_own_name() -> None:
    """`df` is what a DataFrame is called."""
    short = "import dualform " + "as"
    files = [p for p in published_text_files() if p.suffix in (".py", ".md")]
    assert not [p.name for p in files if short in p.read_text(encoding="utf-8")]


def test_the_version_is_the_same_everywhere() -> None:
    version = PROJECT["project"]["version"]
    assert dualform.__version__ == version
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert f"## [{version}]" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_everything_we_ask_for_is_pinned_in_constraints_and_only_there() -> None:
    project = PROJECT["project"]
    asked = [*project["dependencies"], *PROJECT["build-system"]["requires"]]
    asked += [r for extra in project["optional-dependencies"].values() for r in extra]
    names = {canonical(re.split(r"[<>=!~\[; ]", r, maxsplit=1)[0]) for r in asked}
    assert not [r for r in asked if "==" in r or "<" in r]
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = {canonical(line.split("==")[0]) for line in lines if "==" in line}
    assert all("==" in line for line in lines if line and not line.startswith("#"))
    assert names - {"dualform"} <= pins  # an extra may name another one of ours


def test_ci_runs_what_the_contributor_runs() -> None:
    assert "make test\n" in (ROOT / ".ci" / "run").read_text(encoding="utf-8")


# How large a thing may be -------------------------------------------------------------------------

MOST_ATTRIBUTES = 16
MOST_ARGUMENTS = 8


def classes() -> Iterator[tuple[Path, ast.ClassDef]]:
    for path in MODULES:
        yield from ((path, n) for n in ast.walk(tree(path)) if isinstance(n, ast.ClassDef))


def attributes(defined: ast.ClassDef) -> set[str]:
    """What a class declares, and what its methods put on `self`."""
    found = {n.target.id for n in defined.body if isinstance(n, ast.AnnAssign)}  # type: ignore[union-attr]
    for node in ast.walk(defined):
        is_own = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
        if is_own and node.value.id == "self" and isinstance(node.ctx, ast.Store):
            found.add(node.attr)
    return found


def test_no_class_name_stands_for_two_things() -> None:
    names = Counter(defined.name for _, defined in classes())
    assert [name for name, times in names.items() if times > 1] == []


def test_no_class_holds_too_much_and_no_constructor_asks_for_too_much() -> None:
    found = []
    for path, defined in classes():
        if len(held := attributes(defined)) > MOST_ATTRIBUTES:
            found.append(f"{module_id(path)}: {defined.name} has {len(held)} attributes")
        for made in defined.body:
            if isinstance(made, ast.FunctionDef) and made.name == "__init__":
                count = len(made.args.args) + len(made.args.kwonlyargs) - 1
                if count > MOST_ARGUMENTS:
                    found.append(f"{module_id(path)}: {defined.name}(...) takes {count} arguments")
    assert found == []


def test_the_package_stays_within_its_lines() -> None:
    total = sum(len(path.read_text(encoding="utf-8").splitlines()) for path in MODULES)
    assert total <= 21_000
