"""The look of all charts: told apart without colour vision, alike everywhere, combinable."""

from __future__ import annotations

import ast
from collections.abc import Callable
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dualform
from dualform import charts
from dualform.charts import style

# Viénot, Brettel and Mollon (1999): what is left of linear RGB without red or green cones
DICHROMATS = {
    "protan": [[0.11238, 0.88762, 0.0], [0.11238, 0.88762, 0.0], [0.00401, -0.00401, 1.0]],
    "deutan": [[0.29275, 0.70725, 0.0], [0.29275, 0.70725, 0.0], [-0.02234, 0.02234, 1.0]],
}


def seen(colour: str, kind: str | None) -> Any:
    """A colour in CIE L*a*b*, as readers of this kind see it."""
    rgb = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    if kind is not None:
        linear = np.clip(np.array(DICHROMATS[kind]) @ linear, 0, 1)
    xyz = np.array(
        [[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]
    ) @ linear / [0.9505, 1.0, 1.089]  # fmt: skip
    f = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


@pytest.mark.parametrize("kind", [None, "protan", "deutan"])
@pytest.mark.parametrize("count", [2, 3, 4, 6, 8, 10])
def test_no_two_colours_look_the_same(kind: str | None, count: int) -> None:
    """2.3 in L*a*b* is just noticeable; lines in a chart need several times that."""
    for one, other in combinations(style.colours(count), 2):
        assert np.linalg.norm(seen(one, kind) - seen(other, kind)) > 9, (one, other)


def test_more_colours_than_can_be_told_apart_are_refused() -> None:
    with pytest.raises(dualform.QueryError, match="11 tasks would need 11 colours"):
        style.colours(11, "tasks")


def test_charts_are_combined_and_keep_their_legends(run: Any, texts_of: Callable[..., Any]) -> None:
    image = charts.images(run.images["first"][:1], captions=["the input"])
    totals = charts.totals_per_class(run.attention, predicted=0)
    before = totals.to_dict()
    both = charts.grid([image, totals], title="Together")
    assert {"the input", "predicted", "Together", "layer fc1"} <= set(texts_of(both))
    assert totals.to_dict() == before
    assert charts.grid([image, totals], columns=1).to_dict()["columns"] == 1
    with pytest.raises(dualform.QueryError, match="nothing to draw"):
        charts.grid([])


@pytest.mark.parametrize(
    ("number", "text"),
    [(45.3, "45.30"), (-444.81, "-444.8"), (12345.6, "12,346"), (0.0, "0"), (2.5e-7, "2.5e-07"),
     (3e12, "3.000e+12"), (0.0123456, "0.01235")],
)  # fmt: skip
def test_a_number_in_a_caption_has_four_digits(number: float, text: str) -> None:
    assert style.number(number) == text


def test_the_users_theme_is_left_alone(run: Any) -> None:
    import altair as alt

    before = alt.Chart().mark_point().to_dict()["config"]
    config = charts.totals_per_class(run.attention).to_dict()["config"]
    assert alt.Chart().mark_point().to_dict()["config"] == before != config
    assert config["axis"]["labelFontSize"] >= 10
    assert config["background"] == "white"


def test_every_public_chart_is_on_its_page_and_says_sign_or_unit() -> None:
    page = (Path(__file__).parents[2] / "docs" / "charts.md").read_text(encoding="utf-8")
    called = {
        node.func.attr
        for block in page.split("```python\n")[1:]
        for node in ast.walk(ast.parse(block.partition("```")[0]))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and isinstance(node.func.value, ast.Name)
        and node.func.value.id == "charts"
    }
    assert called == set(charts.__all__)
    for name in charts.__all__:
        assert ">>>" in (getattr(charts, name).__doc__ or "")
