"""A table prints well, converts without loss, and never runs what it is given."""

from __future__ import annotations

import json
import sys

import numpy as np
import pytest

from dualform.errors import DualFormError, QueryError
from dualform.table import SHOWN_ROWS, Table


def small() -> Table:
    return Table(
        {"label": [3, 7], "weight": [1.5, -0.25], "task": ["a", None]},
        "positive = alike, in logits",
    )


def test_columns_and_rows_are_plain_python_values() -> None:
    table = small()
    assert len(table) == 2
    assert table.columns == ("label", "weight", "task")
    assert table.rows() == [
        {"label": 3, "weight": 1.5, "task": "a"},
        {"label": 7, "weight": -0.25, "task": None},
    ]
    assert all(type(value) in (int, float, str, type(None)) for value in table.rows()[1].values())


def test_an_unknown_column_names_the_ones_there_are() -> None:
    with pytest.raises(QueryError, match="label, weight, task"):
        small()["step"]


def test_columns_of_different_length_are_refused() -> None:
    with pytest.raises(ValueError, match="equally long"):
        Table({"a": [1], "b": [1, 2]})


def test_the_printed_form_is_aligned_and_carries_the_caption() -> None:
    lines = repr(small()).splitlines()
    assert lines[-1] == "positive = alike, in logits"
    header, first, second = lines[0], lines[2], lines[3]
    assert header.index("weight") + len("weight") == first.index("1.5") + len("1.5")
    assert second.rstrip().endswith("-0.25")


def test_the_printed_form_shows_twenty_rows_and_counts_the_rest() -> None:
    text = repr(Table({"n": np.arange(500)}))
    assert "480 more rows" in text
    assert f" {SHOWN_ROWS - 1}" in text
    assert f" {SHOWN_ROWS}\n" not in text


def test_brackets_are_text_and_not_markup() -> None:
    assert "[bold]x[/bold]" in repr(Table({"[red]": ["[bold]x[/bold]"]}))


def test_html_is_escaped() -> None:
    page = Table({"<b>": ["<script>alert(1)</script>"]}, "<i>")._repr_html_()
    assert "<script>" not in page
    assert "<b>" not in page
    assert "&lt;script&gt;" in page


def test_to_dict_is_strict_json_even_with_nan() -> None:
    table = Table({"x": [1.0, float("nan"), float("inf")], "y": np.array([1, 2, 3])}, "c")
    text = json.dumps(table.to_dict(), allow_nan=False)
    assert json.loads(text)["rows"][1] == {"x": None, "y": 2}


def test_pandas_and_arrow_get_the_same_columns() -> None:
    table = small()
    frame = table.to_pandas()
    assert list(frame.columns) == ["label", "weight", "task"]
    assert frame["weight"].tolist() == [1.5, -0.25]
    assert table.to_arrow().to_pylist() == table.rows()


@pytest.mark.parametrize(("method", "package"), [("to_pandas", "pandas"), ("to_arrow", "pyarrow")])
def test_a_missing_library_is_named_with_the_way_to_install_it(
    method: str, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(DualFormError, match=r'pip install "dualform\[tables\]"'):
        getattr(small(), method)()


def test_an_empty_table_prints_and_converts() -> None:
    table = Table({"a": np.zeros(0), "b": np.zeros(0, object)})
    assert len(table) == 0
    assert "a" in repr(table)
    assert table.rows() == []


def test_the_names_of_many_columns_are_printed_in_full() -> None:
    names = ["rank", "pattern", "contribution", "attention", "step", "example", "label", "task"]
    names += ["position", "microbatch", "call"]
    table = Table({name: [1234567] for name in names}, "a caption " * 30)
    text = repr(table)
    assert text.splitlines()[0].split() == names
    assert max(map(len, text.splitlines())) <= 160
    assert max(map(len, repr(Table({"text": ["word " * 80]})).splitlines())) <= 160
    assert max(map(len, repr(Table({"label": [1]}, "a caption " * 30)).splitlines())) <= 100
