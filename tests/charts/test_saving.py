"""Charts as files: every kind, the same bytes each time, and no half-written file."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dualform
from dualform import charts
from dualform.charts.saving import renumbered, rounded


def picture(run: Any) -> Any:
    return charts.totals_per_class(run.attention, by=("task", "label"), predicted=1, title="Saved")


@pytest.mark.parametrize(
    ("ending", "begins"),
    [(".svg", b"<svg"), (".png", b"\x89PNG"), (".pdf", b"%PDF"), (".html", b"<!DOCTYPE html>")],
)
def test_the_ending_says_what_is_written(
    run: Any, tmp_path: Path, ending: str, begins: bytes
) -> None:
    path = charts.save(picture(run), tmp_path / f"chart{ending}")
    content = path.read_bytes()
    assert content.strip().startswith(begins)
    assert [file.name for file in tmp_path.iterdir()] == [f"chart{ending}"]
    if ending == ".html":
        assert not re.search(rb"<(script|link)[^>]+(src|href)=.https?:", content)  # all inside


def test_json_is_a_valid_specification_that_altair_reads_back(run: Any, tmp_path: Path) -> None:
    import altair as alt

    chart = picture(run)
    saved = json.loads(charts.save(chart, tmp_path / "chart.json").read_text(encoding="utf-8"))
    assert saved == chart.to_dict()
    assert alt.Chart.from_dict(saved).to_dict() == saved


def test_a_png_has_as_many_pixels_as_its_scale_says(run: Any, tmp_path: Path) -> None:
    sizes = []
    for scale in (1, 2):
        content = charts.save(picture(run), tmp_path / "chart.png", scale=scale).read_bytes()
        sizes.append(np.frombuffer(content[16:24], ">u4"))
    assert np.abs(2 * sizes[0].astype(int) - sizes[1].astype(int)).max() <= 1


def test_the_same_chart_is_the_same_svg_byte_for_byte(run: Any, tmp_path: Path) -> None:
    first = charts.save(picture(run), tmp_path / "first.svg").read_bytes()
    charts.save(charts.images(np.eye(4)[None]), tmp_path / "another.svg")
    again = charts.save(picture(run), tmp_path / "again.svg").read_bytes()
    assert first == again


DRAWN = """
from dualform import charts
chart = charts.accuracies({"final": {"a": [1, 2], "b": 3}, "masked": {"b": 5}}, title="Again")
for ending in ("svg", "png", "json"):
    charts.save(chart, "chart." + ending)
"""


def test_another_process_writes_the_same_bytes(tmp_path: Path) -> None:
    written = []
    for seed in ("1", "2"):
        folder = tmp_path / seed
        folder.mkdir()
        environment = os.environ | {"PYTHONHASHSEED": seed}
        subprocess.run([sys.executable, "-c", DRAWN], check=True, cwd=folder, env=environment)
        written.append({file.name: file.read_bytes() for file in folder.iterdir()})
    assert written[0] == written[1]
    assert len(written[0]) == 3


def test_numbers_that_a_renderer_counts_up_are_counted_anew() -> None:
    one = '<clipPath id="clip7"><g clip-path="url(#clip7)"/><g clip-path="url(#clip9)"/>'
    other = one.replace("clip7", "clip31").replace("clip9", "clip44")
    assert renumbered(one) == renumbered(other)
    assert renumbered(one) != renumbered(one.replace("clip9", "clip7"))


def test_places_are_rounded_and_texts_are_not() -> None:
    svg = (
        '<g transform="translate(0.12345678,-0.00001)"><path d="M1.00049999,22.5996h-3.14159265Z"/>'
        '<text x="7.12345e-7">0.123456789</text><image href="data:image/png;base64,1.23456"/></g>'
    )
    assert rounded(svg) == (
        '<g transform="translate(0.123,0)"><path d="M1,22.6h-3.142Z"/>'
        '<text x="0">0.123456789</text><image href="data:image/png;base64,1.23456"/></g>'
    )


def test_numbers_that_differ_by_rounding_give_the_same_svg(tmp_path: Path) -> None:
    def drawn(number: float) -> bytes:
        chart = charts.accuracies({"final": {"a": number}})
        return charts.save(chart, tmp_path / "chart.svg").read_bytes()

    assert drawn(61.7) == drawn(61.7 * (1 + 1e-9)) != drawn(61.72)


@pytest.mark.parametrize("name", ["chart", "chart.gif", "chart.svg.gz"])
def test_an_ending_that_says_nothing_is_refused(run: Any, tmp_path: Path, name: str) -> None:
    with pytest.raises(dualform.DualFormError, match=r"expected a name ending in \.svg, \.png"):
        charts.save(picture(run), tmp_path / name)


def test_a_file_that_cannot_be_written_is_an_error_and_leaves_nothing(
    run: Any, tmp_path: Path
) -> None:
    with pytest.raises(
        dualform.DualFormError, match=r"cannot be written: there is no directory .*; make it first"
    ):
        charts.save(picture(run), tmp_path / "nowhere" / "chart.svg")
    (tmp_path / "chart.svg").mkdir()
    with pytest.raises(dualform.DualFormError, match="cannot be written"):
        charts.save(picture(run), tmp_path / "chart.svg")
    assert [file.name for file in tmp_path.iterdir()] == ["chart.svg"]


WITHOUT = """
import sys
sys.modules[{package!r}] = None  # as if it were not installed
import dualform
from dualform import charts
try:
    charts.save(charts.images([[[0, 255], [255, 0]]]), "chart.svg")
except dualform.DualFormError as error:
    print(error)
"""


@pytest.mark.parametrize(
    ("package", "called"), [("altair", "altair"), ("vl_convert", "vl-convert-python")]
)
def test_a_missing_package_is_named_with_the_extra_that_brings_it(
    tmp_path: Path, package: str, called: str
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT.format(package=package)],
        capture_output=True, text=True, check=True, cwd=tmp_path,
    )  # fmt: skip
    assert done.stdout == (
        f"charts need {called}, which is not installed. "
        "Install it with: pip install 'dualform[charts]'\n"
    )
    assert not list(tmp_path.iterdir())


def test_importing_dualform_and_its_charts_imports_no_altair() -> None:
    check = (
        "import sys, dualform.charts; print({'altair', 'vl_convert', 'pandas'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"
