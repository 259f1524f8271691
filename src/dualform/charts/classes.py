"""Attention class by class: the strongest patterns of each class, and each class's total.

One panel per layer, with its own vertical axis, since layers differ in the size of their keys. The
horizontal axis has one place per class; where classes belong to tasks, the tasks follow each other
and have a colour each. The class that the network predicts and the true one are marked and drawn in
full colour, the others paler.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from dualform.attention import Spotlight
from dualform.charts import style
from dualform.charts.class_axis import ClassAxis
from dualform.charts.groups import Group, Readable, by_layer, cell, columns_of, number, one_query
from dualform.errors import QueryError
from dualform.table import Table

if TYPE_CHECKING:
    from altair import ConcatChart

EDGE = 0.06
"""Room left and right of a class's curve, as a part of its place."""


def top_per_class(
    attention: Readable,
    k: int = 500,
    *,
    by: str | Sequence[str] = "label",
    predicted: Any = None,
    true: Any = None,
    names: Any = None,
    groups: Sequence[Any] | None = None,
    layers: Sequence[str] | Mapping[str, str] | None = None,
    query: int | None = None,
    absolute: bool = True,
    points: int = 50,
    unit: str | None = None,
    columns: int = 1,
    width: int = style.WIDTH,
    height: int = 90,
    title: str | None = None,
) -> ConcatChart:
    """The k largest attention weights of every class, in descending order: a panel per layer.

    Weights are α = key · query, unnormalised, in units of key × query; |α| as in the paper, or with
    `absolute=False` signed, the most positive first. `by=("task", "label")` draws the classes of
    each task. `predicted` and `true` are classes to mark, `names` what classes are called; `groups`
    chooses classes and their order. Instead of spotlights, tables of `spotlight.top(k, by=...)` may
    be given. Each class is drawn at `points` of its ranks, the first and the last among them; the
    weights at these are exact.

    Example:
        >>> charts.top_per_class(dual.attend(test), predicted=6, true=6)   # doctest: +SKIP
    """
    of = columns_of(by)

    def read(spotlight: Spotlight | Table) -> dict[Group, list[float]]:
        table = spotlight
        if isinstance(table, Spotlight):
            table = table.top(k, by=of, sign="absolute" if absolute else "most")
        weights: dict[Group, list[float]] = {}
        for row in one_query(table, query):
            weight = number(row, "weight")
            weights.setdefault(cell(row, of), []).append(abs(weight) if absolute else weight)
        return {group: sorted(found, reverse=True)[:k] for group, found in weights.items()}

    def panel(weights: dict[Group, list[float]], axis: ClassAxis, is_last: bool) -> Any:
        return _curves(weights, axis, points, unit or ("|α|" if absolute else "α"), is_last)

    found = {header: read(one) for header, one in by_layer(attention, layers).items()}
    axis = _axis(found, of, groups, names, {"predicted": predicted, "true": true}, width)
    return _per_layer(found, axis, panel, columns, (width, height), title)


def totals_per_class(
    attention: Readable,
    *,
    by: str | Sequence[str] = "label",
    predicted: Any = None,
    true: Any = None,
    names: Any = None,
    groups: Sequence[Any] | None = None,
    layers: Sequence[str] | Mapping[str, str] | None = None,
    query: int | None = None,
    absolute: bool = True,
    unit: str | None = None,
    columns: int = 1,
    width: int = style.WIDTH,
    height: int = 90,
    title: str | None = None,
) -> ConcatChart:
    """The attention that each class gets in total: bars, a panel per layer.

    Sums of |α| over all patterns of a class, as in the paper, or with `absolute=False` of the
    signed α, in units of key × query. Arguments are those of `top_per_class`; instead of
    spotlights, tables of `spotlight.sum_by(...)` may be given.

    Example:
        >>> charts.totals_per_class(dual.attend(test), predicted=3, true=1)   # doctest: +SKIP
    """
    of = columns_of(by)

    def read(spotlight: Spotlight | Table) -> dict[Group, float]:
        table = spotlight.sum_by(*of) if isinstance(spotlight, Spotlight) else spotlight
        column = "absolute" if absolute else "sum"
        return {cell(row, of): number(row, column) for row in one_query(table, query)}

    def panel(totals: dict[Group, float], axis: ClassAxis, is_last: bool) -> Any:
        return _bars(totals, axis, unit or ("Σ|α|" if absolute else "Σα"), is_last)

    found = {header: read(one) for header, one in by_layer(attention, layers).items()}
    axis = _axis(found, of, groups, names, {"predicted": predicted, "true": true}, width)
    return _per_layer(found, axis, panel, columns, (width, height), title)


def _curves(
    weights: dict[Group, list[float]], axis: ClassAxis, points: int, unit: str, titled: bool
) -> Any:
    """Sorted weights of every class, at some of their ranks."""
    alt = style.altair()
    longest = max(len(found) for found in weights.values())
    rows = []
    for group in axis.groups:
        found, ranks = weights.get(group, []), _ranks(len(weights.get(group, [])), points)
        # every rank is as wide as any other, the last one too: a single pattern can be seen
        for left, rank in [*((rank - 1, rank) for rank in ranks), (len(found), len(found))]:
            if found:
                x = axis.start[group] + EDGE + (1 - 2 * EDGE) * left / longest
                row = {"x": round(x, 4), "rank": rank, "weight": found[rank - 1]}
                rows.append(row | axis.about(group))

    def y(field: str) -> Any:
        return axis.y(field, [row["weight"] for row in rows], unit)

    area = (
        alt.Chart(alt.Data(values=rows))
        .mark_area(aria=False, interpolate="step-after" if longest <= points else "linear")
        .encode(
            x=axis.x("x", titled),
            y=y("weight"),
            detail="class:N",
            color=axis.colour(),
            tooltip=["class:N", "rank:Q", "weight:Q"],
        )
    )
    heads = {g: (axis.start[g] + EDGE + 0.1, weights[g][0]) for g in axis.groups if g in weights}
    return alt.layer(area, *axis.marks(heads, axis.x("x", titled), y("y")))


def _bars(totals: dict[Group, float], axis: ClassAxis, unit: str, titled: bool) -> Any:
    """Totals of every class."""
    alt = style.altair()
    rows = [
        {
            "from": axis.start[group] + 0.12,
            "to": axis.start[group] + 0.88,
            "total": totals.get(group, 0.0),
            **axis.about(group),
        }
        for group in axis.groups
    ]

    def y(field: str) -> Any:
        return axis.y(field, [row["total"] for row in rows], unit)

    bars = (
        alt.Chart(alt.Data(values=rows))
        .mark_rect(aria=False)
        .encode(
            x=axis.x("from", titled),
            x2="to:Q",
            y=y("total"),
            y2=alt.datum(0),
            color=axis.colour(),
            tooltip=["class:N", "total:Q"],
        )
    )
    heads = {g: (axis.start[g] + 0.5, totals.get(g, 0.0)) for g in axis.groups}
    return alt.layer(bars, *axis.marks(heads, axis.x("x", titled), y("y")))


def _axis(
    found: Mapping[str, Mapping[Group, Any]],
    of: tuple[str, ...],
    groups: Sequence[Any] | None,
    names: Any,
    marked: Mapping[str, Any],
    width: int,
) -> ClassAxis:
    """The axis that all layers share."""
    occurring = [group for numbers in found.values() for group in numbers]
    return ClassAxis(occurring, of, groups, names, marked, width)


def _per_layer(
    found: Mapping[str, Any],
    axis: ClassAxis,
    panel: Callable[[Any, ClassAxis, bool], Any],
    columns: int,
    size: tuple[int, int],
    title: str | None,
) -> ConcatChart:
    """A panel per layer, all with the same classes."""
    width, height = size
    drawn = [
        panel(numbers, axis, place >= len(found) - columns).properties(
            width=width, height=height, title=style.heading(header)
        )
        for place, (header, numbers) in enumerate(found.items())
    ]
    chart: ConcatChart = style.finished(style.panels(drawn, columns), title)
    return chart


def _ranks(count: int, points: int) -> list[int]:
    """Ranks from 1 to `count`, at most so many, evenly: the first and the last among them."""
    if points < 2:
        raise QueryError(f"points={points!r}: expected at least 2, a first and a last one")
    ranks = np.unique(np.round(np.linspace(1, count, min(count, points))).astype(np.int64))
    return [int(rank) for rank in ranks]
