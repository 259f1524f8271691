"""Accuracies: of several tasks under several conditions, and along the strength of a mask.

All numbers are percentages, 0 to 100. Each may be one number, a list of runs (drawn as their mean,
with one standard deviation to both sides) or a mean and a std. Masking is not retraining: an
accuracy without what some patterns wrote is that of an edited network.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isfinite
from typing import TYPE_CHECKING, Any

from dualform.charts import style
from dualform.charts.measured import measured, nested
from dualform.errors import QueryError

if TYPE_CHECKING:
    from altair import LayerChart

BAR = 13
"""Pixels of one bar."""


def accuracies(
    found: Mapping[str, Mapping[str, Any]],
    *,
    paper: Mapping[str, Mapping[str, Any]] | None = None,
    reference: str = "paper",
    width: int = 190,
    unit: str = "test accuracy (%)",
    title: str | None = None,
) -> LayerChart:
    """Accuracies of several tasks under several conditions: grouped bars, in percent.

    `found` is condition → task → accuracy; an accuracy is a number, a list of runs or
    `{"mean": …, "std": …}`. `paper` has numbers to compare with, in the same form, for any of them:
    each is drawn as an upright line that the legend calls `reference`.

    Example:
        >>> from dualform import charts
        >>> chart = charts.accuracies(
        ...     {"final": {"MNIST": [45.7, 52.5], "F-MNIST": 86.5}, "masked": {"MNIST": 96.4}},
        ...     paper={"final": {"MNIST": 45, "F-MNIST": 85}},
        ... )
    """
    for given in (found, paper or {}):
        nested(given, "accuracies", "condition → task → accuracy")
    if not found or not all(found.values()):
        raise QueryError("accuracies({}) has nothing to draw; expected condition → task → accuracy")
    tasks = list(dict.fromkeys(task for by_task in found.values() for task in by_task))
    rows = _rows(found)
    compared = _rows(paper or {})
    for row in compared:
        if row["task"] not in found.get(row["condition"], {}):
            raise QueryError(
                f"{reference} has {row['condition']!r}, {row['task']!r}, which was not measured; "
                "expected numbers for what is drawn. Leave it out, or measure it"
            )
    alt = style.altair()
    y = alt.Y("condition:N", sort=list(found), title=None, scale=alt.Scale(paddingInner=0.25),
              axis=alt.Axis(ticks=False, domain=False, labelPadding=6))  # fmt: skip
    offset = alt.YOffset("task:N", sort=tasks, scale=alt.Scale(paddingInner=0.1))
    colour = alt.Color(
        "task:N",
        scale=alt.Scale(domain=tasks, range=style.colours(len(tasks), "tasks")),
        legend=alt.Legend(title=None, symbolType="square") if len(tasks) > 1 else None,
    )
    base = alt.Chart().encode(y=y, yOffset=offset)
    layers = [
        base.mark_bar(aria=False).encode(
            x=style.percent("mean", unit),
            color=colour,
            tooltip=["condition:N", "task:N", "mean:Q", "std:Q"],
        ),
        *(
            base.mark_rule(color=colour, strokeWidth=wide, aria=False).encode(
                x=style.percent("low", unit), x2="high:Q"
            )
            for colour, wide in (("white", 3.2), (style.INK, 1.4))
        ),
        base.mark_text(align="left", aria=False).encode(x=alt.value(width + 6), text="text:N"),
    ]
    if compared:
        layers += _ticks(compared, y, offset, unit, reference)
    chart: LayerChart = style.finished(
        alt.layer(*layers, data=alt.Data(values=rows)).properties(
            width=width, height={"step": BAR, "for": "offset"}
        ),
        title,
    )
    return chart


def _rows(found: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    return [
        {"condition": condition, "task": task,
         **measured(value, f"the accuracy of {task}, {condition},").row}
        for condition, by_task in found.items()
        for task, value in by_task.items()
    ]  # fmt: skip


def _ticks(
    rows: Sequence[dict[str, Any]], y: Any, offset: Any, unit: str, reference: str
) -> list[Any]:
    """Numbers to compare with, as upright lines."""
    alt = style.altair()
    named = [{**row, "source": reference} for row in rows]
    legend = alt.Legend(title=None, symbolType="stroke", symbolStrokeColor=style.INK)
    shape = alt.Shape(
        "source:N", scale=alt.Scale(domain=[reference], range=[UPRIGHT]), legend=legend
    )
    x = style.percent("mean", unit)
    base = alt.Chart(alt.Data(values=named)).encode(x=x, y=y, yOffset=offset, shape=shape)
    return [
        base.mark_point(color=colour, strokeWidth=wide, opacity=1, size=BAR**2, aria=False)
        for colour, wide in (("white", 3.6), (style.INK, 2))
    ]


UPRIGHT = "M0,-1L0,1"
"""An upright line as a symbol, as tall as a bar is thick."""


def strengths(
    strength: Sequence[float],
    found: Mapping[str, Sequence[Any]],
    *,
    width: int = style.WIDTH,
    height: int = 170,
    what: str = "strength of the mask",
    unit: str = "test accuracy (%)",
    title: str | None = None,
) -> LayerChart:
    """Accuracy of every task along the strength of a mask, 0 (nothing masked) to 1: lines.

    `found` is task → one accuracy for every strength, in percent; each may be a list of runs, which
    are drawn as their mean with a band of one standard deviation to both sides.

    Example:
        >>> from dualform import charts
        >>> chart = charts.strengths(
        ...     [0, 0.5, 1], {"MNIST": [45, 80, [96, 97]], "F-MNIST": [86, 70, 9]}
        ... )
    """
    at = _places(strength)
    if not isinstance(found, Mapping):
        raise QueryError(
            f"strengths was given {type(found).__name__} to draw; expected a dict, task → one "
            "accuracy for every strength"
        )
    if not at or not found:
        raise QueryError("strengths([], {}) has nothing to draw; expected strengths and accuracies")
    for task, values in found.items():
        count = len(values) if hasattr(values, "__len__") else 1
        if count != len(at) or not hasattr(values, "__len__"):
            raise QueryError(
                f"{len(at)} strengths and {count} accuracies of {task!r}; expected one accuracy, "
                "or one list of runs, for every strength"
            )
    rows = [
        {"task": task, "strength": s, **measured(value, f"the accuracy of {task} at {s:g}").row}
        for task, values in found.items()
        for s, value in zip(at, values, strict=True)
    ]
    alt = style.altair()
    tasks = list(found)
    x = alt.X("strength:Q", title=what, scale=alt.Scale(domain=[min(at), max(at)], nice=False))
    y = style.percent("mean", unit, upright=True)
    colour = alt.Color(
        "task:N",
        scale=alt.Scale(domain=tasks, range=style.colours(len(tasks), "tasks")),
        legend=alt.Legend(title=None, symbolOpacity=1) if len(tasks) > 1 else None,
    )
    shape = alt.Shape("task:N", scale=alt.Scale(domain=tasks, range=_shapes(len(tasks))))
    base = alt.Chart(alt.Data(values=rows))
    layers = [base.mark_line(strokeWidth=2, aria=False).encode(x=x, y=y, color=colour)]
    if any(row["std"] is not None for row in rows):
        band = base.mark_area(opacity=0.2, aria=False)
        layers.insert(
            0,
            band.encode(x=x, y=style.percent("low", unit, upright=True), y2="high:Q", color=colour),
        )
    dots = base.mark_point(filled=True, opacity=1, size=36, aria=False)
    told = ["task:N", "strength:Q", "mean:Q", "std:Q"]
    layers.append(dots.encode(x=x, y=y, color=colour, shape=shape, tooltip=told))
    chart: LayerChart = style.finished(
        alt.layer(*layers).properties(width=width, height=height), title
    )
    return chart


def _places(strength: Any) -> list[float]:
    """Strengths as finite numbers."""
    try:
        at = [float(value) for value in strength]
    except (TypeError, ValueError) as error:
        raise QueryError(f"strengths are {strength!r}; expected a list of numbers") from error
    for value in at:
        if not isfinite(value):
            raise QueryError(f"a strength is {value}; expected finite numbers, 0 to 1")
    return at


def _shapes(count: int) -> list[str]:
    """A shape per line, so that lines are told apart without colour too."""
    shapes = ["circle", "square", "triangle-up", "diamond", "cross", "triangle-down"]
    return [shapes[i % len(shapes)] for i in range(count)]
