"""The page on the paper says what was measured: numbers are refreshed, words are checked."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

import claims
import page
from dualform import charts
from published import Measured, mean
from runs import RESULTS

TEXT = page.PAGE.read_text(encoding="utf-8")
REFRESH = "run: python experiments/page.py"


@pytest.fixture(scope="module")
def measured() -> Measured:
    return Measured()


def test_every_number_on_the_page_is_the_measured_one(measured: Measured) -> None:
    assert not page.stale(TEXT, page.fields(measured)), REFRESH
    assert page.refreshed(TEXT, page.fields(measured)) == TEXT


def test_every_claim_of_the_page_holds_and_is_on_it(measured: Measured) -> None:
    assert not claims.broken(measured), "the runs do not bear this out: rewrite these sentences"
    assert not claims.unsaid(measured, TEXT), "in claims.py, but not on the page"


def test_the_readme_says_what_was_measured(measured: Measured) -> None:
    readme = " ".join((page.PAGE.parents[1] / "README.md").read_text(encoding="utf-8").split())
    back = mean(measured.continual["second task masked"]["mnist"])
    assert f"MNIST returns to {charts.printed(back, 0)} %" in readme
    one = measured.first(page.CONTINUAL)["examples"]["continual-one"]
    assert claims.order(one, "layer0")[0] == ("mnist", 1)
    assert claims.order(one, "layer2")[0] == ("fashion", 3)


def changed(folder: Path, name: str, change: Any) -> Measured:
    """The published runs, one of them changed."""
    for path in RESULTS.glob("*-seed*.json"):
        shutil.copy(path, folder)
    run = json.loads((folder / name).read_text(encoding="utf-8"))
    change(run["results"])
    (folder / name).write_text(json.dumps(run), encoding="utf-8")
    return Measured(folder)


def test_new_numbers_are_put_where_they_belong_and_the_old_ones_are_named(tmp_path: Path) -> None:
    def change(results: Any) -> None:
        results["accuracy"]["trained network"] = 12.34
        results["votes"] = None

    other = changed(tmp_path, "mnist_single-vanilla-seed0.json", change)
    values = page.fields(other)
    (named,) = page.stale(TEXT, values)
    assert named.startswith("accuracies: the page has")
    new = page.refreshed(TEXT, values)
    assert re.search(r"\| single task, 5,000 steps \| 97 \| [^|]+ \| 12\.3 \|\n", new)
    assert page.FIELD.sub("", new) == page.FIELD.sub("", TEXT)
    assert not page.stale(new, values)


def test_a_sentence_that_new_runs_do_not_bear_out_is_named(tmp_path: Path) -> None:
    def change(results: Any) -> None:
        results["accuracy"]["fashion"]["trained network"] = 87.1

    other = changed(tmp_path, "mnist_fashion_joint-authors-seed0.json", change)
    assert claims.broken(other) == ["stay one to two points below the paper's 97 / 87"]


def test_a_mark_that_nobody_fills_is_an_error(measured: Measured) -> None:
    values = page.fields(measured)
    with pytest.raises(ValueError, match=r"marks \['unknown'\]"):
        page.refreshed(f"{TEXT} <!--unknown-->1<!--/-->", values)
    with pytest.raises(ValueError, match="does not mark"):
        page.refreshed("", values)


def test_no_line_of_text_begins_with_a_mark() -> None:
    """Markdown would take the line for a block of HTML: a paragraph would end there."""
    tables = {"accuracies", "table-1", "across", "masks"}
    begun = re.findall(r"^\s*(?:- )?<!--([\w-]+)-->", TEXT, re.MULTILINE)
    assert set(begun) == tables
    for name in tables:
        assert f"\n\n<!--{name}-->\n|" in TEXT


def test_figures_on_the_page_are_no_smaller_than_they_were_drawn() -> None:
    shown = re.findall(r'<img width="(\d+)" alt="[^"]+" src="([^"]+)">', TEXT)
    assert len(shown) == 2 * 8  # two for each example, and a third below them
    for width, source in shown:
        svg = (page.PAGE.parent / source).with_suffix(".svg").read_text(encoding="utf-8")
        drawn = re.search(r'<svg[^>]* width="(\d+)', svg)
        assert drawn is not None
        assert int(drawn[1]) <= int(width) <= 800
    assert not re.search(r"\|.*!\[.*\|.*!\[", TEXT)  # no figures side by side in a table
