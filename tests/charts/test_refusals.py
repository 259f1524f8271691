"""What cannot be drawn is refused in words: what was seen, what was expected, what to do."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import dualform
from dualform import charts

NAN, INF = float("nan"), float("inf")
PICTURE = np.zeros((1, 2, 2))


def accuracy(value: Any) -> Any:
    return charts.accuracies({"final": {"MNIST": value}})


def picture() -> Any:
    return charts.images(PICTURE)


PLAIN: dict[str, tuple[Callable[[], Any], str]] = {
    "an accuracy that is no number": (lambda: accuracy(NAN), "final, is nan; expected a finite"),
    "an infinite run": (lambda: accuracy([50, INF]), "is inf; expected a finite number"),
    "a std that is no number": (lambda: accuracy({"mean": 5, "std": NAN}), "is nan; expected"),
    "a negative std": (lambda: accuracy({"mean": 5, "std": -1}), "is -1; expected a percentage"),
    "two means": (lambda: accuracy({"mean": [5, 6]}), "expected one mean"),
    "more than all": (lambda: accuracy(100.5), "is 100.5; expected a percentage, 0 to 100"),
    "less than none": (lambda: accuracy([50, -1]), "is -1; expected a percentage, 0 to 100"),
    "agreement beyond 100": (lambda: charts.votes({"fc": {"right": 101}}), "is 101; expected a p"),
    "a paper's number": (
        lambda: charts.accuracies({"a": {"b": 5}}, paper={"a": {"b": 970}}),
        "is 970; expected a percentage",
    ),
    "a list for accuracies": (lambda: charts.accuracies([1, 2]), "given list; expected a dict, co"),  # type: ignore[arg-type]
    "no tasks": (lambda: charts.accuracies({"a": 3.0}), "3.0 for 'a'; expected a dict of dicts"),  # type: ignore[dict-item]
    "a list for votes": (lambda: charts.votes([1]), "given list; expected a dict, layer → questi"),  # type: ignore[arg-type]
    "no questions": (lambda: charts.votes({"fc": 3.0}), "3.0 for 'fc'; expected a dict of dicts"),  # type: ignore[dict-item]
    "a paper of numbers": (
        lambda: charts.votes({"fc": {"right": 5}}, paper={"fc": 5}),  # type: ignore[dict-item]
        "5 for 'fc'; expected a dict of dicts",
    ),
    "a strength that is no number": (
        lambda: charts.strengths([0, NAN], {"a": [1, 2]}),
        "a strength is nan; expected finite numbers",
    ),
    "an infinite strength": (lambda: charts.strengths([INF], {"a": [1]}), "is inf; expected fin"),
    "a word for a strength": (lambda: charts.strengths("x", {"a": [1]}), "expected a list of num"),  # type: ignore[arg-type]
    "an accuracy along": (lambda: charts.strengths([0], {"a": [NAN]}), "a at 0 is nan; expected"),
    "strengths of other length": (
        lambda: charts.strengths([0, 0.5, 1], {"a": [1, 2]}),
        "3 strengths and 2 accuracies of 'a'; expected one accuracy, or one list of runs, for ever",
    ),
    "one accuracy for all": (lambda: charts.strengths([0, 1], {"a": 5}), "2 strengths and 1 accur"),  # type: ignore[dict-item]
    "a list for strengths": (lambda: charts.strengths([0], [1]), "given list to draw; expected"),  # type: ignore[arg-type]
    "a matrix of weights": (
        lambda: charts.weights_against_values(np.ones((2, 3)), np.ones(6)),
        r"weights of shape \(2, 3\) were given; expected a vector.*weights\[0\]",
    ),
    "a matrix of sizes": (
        lambda: charts.weights_against_values(torch.ones(6), torch.ones(2, 3)),
        r"sizes of shape \(2, 3\) were given; expected a vector",
    ),
    "words for weights": (lambda: charts.weights_against_values(["a"], [1]), "are no numbers"),
    "no bins": (lambda: charts.weights_against_values([1], [1], bins=0), "bins=0: expected a whol"),
    "no charts": (lambda: charts.grid(None), "given NoneType; expected a list of charts"),  # type: ignore[arg-type]
    "a chart alone": (lambda: charts.grid(picture()), r"LayerChart; expected .* grid\(\[one"),
    "no chart in the list": (lambda: charts.grid([picture(), 3]), "given int in its list; expect"),
    "no columns": (lambda: charts.grid([picture()], columns=0), "columns=0: expected a whole num"),
    "columns of images": (lambda: charts.images(PICTURE, columns=-1), "columns=-1: expected a who"),
    "no images": (lambda: charts.images(None), "given as None; expected a list or an array"),
    "a batch of none": (lambda: charts.images(np.zeros((0, 2, 2))), "nothing to draw; expected at"),
    "one end": (lambda: charts.images(PICTURE, span=(1,)), r"span=\(1,\): expected two different"),  # type: ignore[arg-type]
    "ends of words": (lambda: charts.images(PICTURE, span="bw"), "span='bw': expected two differ"),  # type: ignore[arg-type]
    "captions of no list": (lambda: charts.images(PICTURE, captions=3), "given as 3; expected a l"),  # type: ignore[arg-type]
    "nothing to save": (lambda: charts.save(None, "a.svg"), "given NoneType as the chart; expecte"),
    "nowhere to save": (lambda: charts.save(picture(), None), "None as the path; expected a file"),  # type: ignore[arg-type]
    "no pixels": (lambda: charts.save(picture(), "a.png", scale=0), "scale=0: expected a number a"),
    "endless pixels": (lambda: charts.save(picture(), "a.png", scale=INF), "scale=inf: expected"),
}


@pytest.mark.parametrize("case", PLAIN)
def test_what_cannot_be_drawn_is_refused_in_words(case: str) -> None:
    call, message = PLAIN[case]
    with pytest.raises(dualform.DualFormError, match=message):
        call()


def test_a_file_below_a_file_is_refused_before_anything_is_drawn(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("here already")
    with pytest.raises(
        dualform.DualFormError, match=r"there is no directory .*file; make it first"
    ):
        charts.save(picture(), tmp_path / "file" / "chart.svg")


DRAWN = [charts.top_per_class, charts.totals_per_class, charts.over_time, charts.top_over_time]


@pytest.mark.parametrize("draw", DRAWN, ids=lambda draw: draw.__name__)
def test_attention_of_no_input_and_of_several_is_refused(run: Any, draw: Any) -> None:
    with pytest.raises(
        dualform.QueryError, match="attention of no input has nothing to draw; attend to"
    ):
        draw(run.dual.attend(run.test[:0]))
    three = run.dual.attend(run.images["first"][:3].flatten(1))
    with pytest.raises(
        dualform.QueryError, match=r"3 queries, and none was chosen.*query=0 to query=2"
    ):
        draw(three)
    with pytest.raises(dualform.QueryError, match="3 queries, but query=7 was asked for"):
        draw(three, query=7)
    draw(three, query=2)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["a", "b"], "names has 2 names, but there is a class 2; expected one for every class"),
        ([], "names has 0 names, but there is a class 0"),
        ("abc", "names='abc': expected a list of names, or a dict"),
        (3, "names=3: expected a list of names, or a dict"),
    ],
)
def test_names_that_do_not_name_every_class_are_refused(run: Any, names: Any, message: str) -> None:
    contribution = run.dual.contribute(run.test, target=1)
    for draw in (
        lambda: charts.totals_per_class(run.attention, names=names),
        lambda: charts.over_time(run.attention, by="label", names=names),
        lambda: charts.parts(contribution, names=names),
    ):
        with pytest.raises(dualform.QueryError, match=message):
            draw()


def test_names_by_number_are_no_names_of_tasks_and_may_be_more_than_were_met(run: Any) -> None:
    with pytest.raises(
        dualform.QueryError, match=r"names is a list.*there is 'first'; expected a dict"
    ):
        charts.totals_per_class(run.attention, by="task", names=["a", "b"])
    charts.totals_per_class(run.attention, names=["a", "b", "c", "never met"])


def test_choosing_no_group_is_refused_with_those_there_are(run: Any) -> None:
    for draw in (
        lambda: charts.totals_per_class(run.attention, groups=[]),
        lambda: charts.over_time(run.attention, by="label", groups=[]),
    ):
        with pytest.raises(
            dualform.QueryError, match=r"groups=\[\] chooses nothing.* 0, 1, 2, or None"
        ):
            draw()


def test_pictures_need_to_know_the_example_and_how_to_record_it_is_said(run: Any) -> None:
    table = dualform.Table({"weight": [1.0], "step": [0]})
    with pytest.raises(
        dualform.QueryError,
        match=r"no column 'example'.*it has: weight, step.*recorder\.tag\(example=",
    ):
        charts.top_images(table, [PICTURE[0]])
