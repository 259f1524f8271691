"""The rooms of the record never ask which kind a layer is: no name of a kind is compared."""

from __future__ import annotations

import ast
from pathlib import Path

import dualform.layers as room
from dualform.layers import kinds

ROOM = Path(room.__file__).parent
ROOMS = ("recording", "certificate", "memory", "learning_rules")
OUTSIDE = [p for room in ROOMS for p in sorted((ROOM.parent / room).rglob("*.py"))]
NAMES = set(kinds._kinds)

OTHER_MEANINGS = {"certificate/report.py": "c.kind == 'outputs'"}
"""A check's kind (steps, fingerprints, ...), not a layer's. (Tags' columns and numpy have kinds of
their own as well: a bare `kind` is flagged only where it is compared with a layer kind's name.)"""


def branches_on_kind(node: ast.AST) -> bool:
    """Whether a comparison is between something called kind and a text, or with a kind's name."""
    if isinstance(node, ast.Match):
        return ast.unparse(node.subject).endswith(".kind")
    if not isinstance(node, ast.Compare):
        return False
    sides = [node.left, *node.comparators]
    texts = {c.value for side in sides for c in ast.walk(side) if isinstance(c, ast.Constant)}
    on_layer = any(isinstance(s, ast.Attribute) and s.attr == "kind" for s in sides)
    on_numpy = any(".dtype.kind" in ast.unparse(side) for side in sides)
    listed = any(ast.unparse(side) == "KINDS" for side in sides) and on_layer
    return bool(NAMES & texts) or (on_layer and not on_numpy and bool(texts)) or listed


def test_no_comparison_with_a_kind_outside_the_room() -> None:
    found = [
        f"{path.relative_to(ROOM.parent)}:{node.lineno}: {ast.unparse(node)[:80]}"
        for path in OUTSIDE
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if branches_on_kind(node)
        and ast.unparse(node) != OTHER_MEANINGS.get(str(path.relative_to(ROOM.parent)))
    ]
    assert found == []


def test_the_rule_is_not_blind() -> None:
    for text in ("layer.kind == 'linear'", "kind in ('embedding',)", "layer.kind in KINDS"):
        assert any(map(branches_on_kind, ast.walk(ast.parse(text)))), text
    assert not any(map(branches_on_kind, ast.walk(ast.parse("values.dtype.kind == 'f'"))))


def test_private_names_of_torch_are_in_one_file() -> None:
    for path in [*OUTSIDE, *ROOM.glob("*.py")]:
        if path.name == "torch_internals.py":
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            text = ast.unparse(node) if isinstance(node, ast.Attribute) else ""
            assert not text.startswith(("torch._C", "torch._dynamo", "Variable._")), (path, text)
            named = getattr(node, "attr", "")
            assert not named.startswith(("_saved_", "_raw_saved", "_input_metadata")), (path, text)
