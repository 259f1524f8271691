"""Images in charts: the right pictures, at the right places, with the numbers of the tables."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import dualform
from dualform import charts
from dualform.charts.png import data_url

OF = ("task", "example")


def strongest(run: Any, layer: str, k: int) -> list[tuple[str, int, float, int]]:
    """The strongest visits of k different examples, from the stored keys alone."""
    alpha = run.alpha(layer)
    columns = [run.column(layer, name) for name in ("task", "example", "step")]
    found: dict[tuple[Any, ...], tuple[str, int, float, int]] = {}
    for row in np.argsort(-np.abs(alpha), kind="stable"):
        task, example, step = (column[row] for column in columns)
        found.setdefault((task, int(example)), (task, int(example), alpha[row], int(step)))
    return list(found.values())[:k]


def test_each_layer_shows_its_strongest_examples_once(
    run: Any, rows_with: Callable[..., Any]
) -> None:
    chart = charts.top_images(run.attention, run.images, 4, example=OF)
    drawn = rows_with(chart, "image")
    expected = [one for layer in ("fc1", "fc2") for one in strongest(run, layer, 4)]
    assert [row["image"] for row in drawn] == [
        data_url(run.images[task][example]) for task, example, _, _ in expected
    ]
    captions = [row["caption"].split("\n") for row in rows_with(chart, "caption")]
    assert [c[0] for c in captions] == [f"α = {weight:#.4g}" for _, _, weight, _ in expected]
    assert [c[1] for c in captions] == [f"label {example % 3}" for _, example, _, _ in expected]
    assert [c[2] for c in captions] == [f"step {step:,}" for _, _, _, step in expected]


def test_an_example_that_training_often_visited_takes_one_place(
    run: Any, rows_with: Callable[..., Any]
) -> None:
    """Every picture is visited about twelve times; all 24 are found behind their many visits."""
    spotlight = run.attention["fc1"]
    visits = spotlight.top(3)
    assert len(spotlight.rows) == 144
    chart = charts.top_images(spotlight, run.images, 24, example=OF)
    urls = [row["image"] for row in rows_with(chart, "image")]
    assert len(urls) == len(set(urls)) == 24
    assert len(visits) == 3


def test_the_input_comes_first_and_layers_are_named(
    run: Any, rows_with: Callable[..., Any], texts_of: Callable[..., Any]
) -> None:
    asked = run.images["second"][5]
    chart = charts.top_images(
        run.attention, run.images, 2, example=OF, asked=asked, layers={"fc2": "the last layer"},
        label=("task", "label"), names=["zero", "one", "two"], title="Looked at most",
    )  # fmt: skip
    drawn = rows_with(chart, "image")
    assert drawn[0]["image"] == data_url(asked)
    assert len(drawn) == 3
    texts = texts_of(chart)
    assert {"input", "the last layer", "Looked at most"} <= set(texts)
    task, example, _, step = strongest(run, "fc2", 1)[0]
    assert f"{task} {['zero', 'one', 'two'][example % 3]}" in texts
    assert f"step {step}" in texts


def test_a_table_of_the_strongest_can_be_drawn_later(run: Any) -> None:
    tables = {
        name: spotlight.top(144, sign="absolute") for name, spotlight in run.attention.items()
    }
    one = charts.top_images(run.attention, run.images, example=OF)
    assert charts.top_images(tables, run.images, example=OF).to_dict() == one.to_dict()


def test_an_example_without_a_picture_is_named(run: Any) -> None:
    task, example, _, _ = strongest(run, "fc1", 1)[0]
    with pytest.raises(dualform.QueryError, match=f"no picture of example {example}"):
        charts.top_images(run.attention, {task: {}}, example=OF)
    with pytest.raises(dualform.QueryError, match=f"no picture of task '{task}'"):
        charts.top_images(run.attention, {}, example=OF)
    with pytest.raises(dualform.QueryError, match="no column 'page'"):
        charts.top_images(run.attention, run.images, example="page")
    with pytest.raises(dualform.QueryError, match="k=0"):
        charts.top_images(run.attention, run.images, 0, example=OF)


def test_images_lie_in_rows_and_do_not_touch(rows_with: Callable[..., Any]) -> None:
    pixels = np.random.default_rng(0).random((5, 6, 6))
    chart = charts.images(
        pixels, captions=["one", "a caption, long", "two\nlines", "", 5], columns=2
    )
    drawn = rows_with(chart, "image")
    assert [row["image"] for row in drawn] == [data_url(one) for one in pixels]
    places = [(row["x"], row["y"]) for row in drawn]
    assert len({x for x, _ in places}) == 2
    assert len({y for _, y in places}) == 3
    for i, (x, y) in enumerate(places):
        for other_x, other_y in places[:i]:
            assert max(abs(x - other_x), abs(y - other_y)) > 64
    specification = chart.to_dict()
    assert max(x for x, _ in places) + 32 <= specification["width"]
    assert max(y for _, y in places) + 32 <= specification["height"]


def test_a_wide_image_has_its_caption_right_below(rows_with: Callable[..., Any]) -> None:
    chart = charts.images(np.zeros((1, 8, 32)), captions=["wide"], size=64)
    (row,) = rows_with(chart, "image")
    (caption,) = rows_with(chart, "under", "caption")
    assert row["y"] == 8  # the middle of a height of 16
    assert 16 < caption["under"] < 24


def test_images_may_be_inverted(rows_with: Callable[..., Any]) -> None:
    pixels = [[[0, 255], [255, 255]]]
    (drawn,) = rows_with(charts.images(pixels, invert=True), "image")
    assert drawn["image"] == data_url([[255, 0], [0, 0]])


def test_images_need_a_caption_each_or_none() -> None:
    with pytest.raises(dualform.QueryError, match="2 images and 1 captions"):
        charts.images(np.zeros((2, 3, 3)), captions=["one"])
    with pytest.raises(dualform.QueryError, match="nothing to draw"):
        charts.images([])
