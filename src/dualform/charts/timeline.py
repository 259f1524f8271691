"""Attention over training: how much each stretch of steps gets, and when the strongest were seen.

Steps are put into equal ranges first: a picture has a few dozen numbers, however long the run was.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from dualform.attention import Contribution, Spotlight
from dualform.charts import style
from dualform.charts.groups import (
    Group,
    Readable,
    by_layer,
    cell,
    chosen,
    columns_of,
    labelled,
    number,
    one_query,
)
from dualform.errors import QueryError

if TYPE_CHECKING:
    from altair import ConcatChart


def over_time(
    attention: Readable | Contribution,
    by: str | None = None,
    *,
    column: str = "step",
    bins: int = 20,
    names: Any = None,
    groups: Sequence[Any] | None = None,
    layers: Sequence[str] | Mapping[str, str] | None = None,
    query: int | None = None,
    absolute: bool = True,
    mean: bool = False,
    unit: str | None = None,
    columns: int = 1,
    width: int = style.WIDTH,
    height: int = 90,
    title: str | None = None,
) -> ConcatChart:
    """Attention, or contribution, over equal ranges of the training steps: a panel per layer.

    Sums of |α| over each range (`absolute=False`: of the signed α), in units of key × query;
    contributions are always signed, in the target's units. `mean=True` divides by the number of
    patterns in the range. With `by`, a line per group, at most ten of them: `groups` chooses. Where
    one line can say it (without `by`, or with `mean=True`), a thin grey one is `even`: what each
    range would have were all patterns of the run attended to alike.
    Instead of spotlights, tables of their `.over(...)` may be given.

    Example:
        >>> charts.over_time(dual.attend(test), by="task")              # doctest: +SKIP
    """
    of = columns_of(by)
    amount = "absolute" if absolute else "sum"
    symbol = "|α|" if absolute else "α"
    if isinstance(attention, Contribution):
        amount, symbol = "contribution", " contribution"
        title = title or f"Contribution to {attention.target}"
        attention = {attention.layer: attention.over(column, bins, by)}
    unit = unit or (f"mean {symbol.strip()}" if mean else f"Σ{symbol}")
    found: dict[str, list[dict[str, Any]]] = {}
    for header, one in by_layer(attention, layers).items():
        table = one.over(column, bins, by) if isinstance(one, Spotlight) else one
        found[header] = one_query(table, query)
    occurring = [cell(row, of) for rows in found.values() for row in rows]
    drawn = labelled(chosen(occurring, groups), names) if of else {(): ""}
    panels = [
        _lines(_ranges(rows, of, drawn, amount, mean), list(drawn.values()), column, unit,
               _even(rows, amount, mean) if mean or not of else [],
               titled=place >= len(found) - columns)
        .properties(width=width, height=height, title=style.heading(header))
        for place, (header, rows) in enumerate(found.items())
    ]  # fmt: skip
    chart: ConcatChart = style.finished(style.panels(panels, columns), title)
    return chart


def _ranges(
    rows: Sequence[Mapping[str, Any]],
    of: tuple[str, ...],
    drawn: Mapping[Group, str],
    amount: str,
    mean: bool,
) -> list[dict[str, Any]]:
    """Each group's number from the start to the end of every range, a gap where it has none."""
    data = []
    for row in rows:
        group = cell(row, of)
        if group not in drawn:
            continue
        value = number(row, amount) if row["patterns"] else None
        if mean and value is not None:
            value /= row["patterns"]
        data += [
            {
                "at": row[end],
                "amount": value,
                "group": drawn[group],
                "order": 2 * row["from"] + last,
            }
            for last, end in enumerate(("from", "to"))
        ]
    return data


def _even(rows: Sequence[Mapping[str, Any]], amount: str, mean: bool) -> list[dict[str, Any]]:
    """What each range would have if every pattern of the run had the same."""
    patterns = sum(row["patterns"] for row in rows)
    if not patterns:
        return []
    each = sum(number(row, amount) for row in rows if row["patterns"]) / patterns
    return [
        {"at": row[end], "even": each if mean else each * row["patterns"]}
        for row in rows
        for end in ("from", "to")
    ]


def _lines(
    data: list[dict[str, Any]],
    kinds: Sequence[str],
    column: str,
    unit: str,
    even: list[dict[str, Any]],
    titled: bool,
) -> Any:
    """A panel: the groups' lines, above a thin one for what would be even."""
    alt = style.altair()
    colour = alt.Color(
        "group:N",
        sort=kinds,
        scale=alt.Scale(domain=kinds, range=style.colours(len(kinds))),
        legend=alt.Legend(title=None, symbolType="stroke", symbolStrokeWidth=2.5, columns=5)
        if len(kinds) > 1
        else None,
    )
    ends = [row["at"] for row in data]
    numbers = [0.0, *(row["amount"] for row in data if row["amount"] is not None)]
    numbers += [row["even"] for row in even]
    across = alt.Scale(domain=[min(ends), max(ends)], nice=False)
    up = alt.Scale(domain=[1.05 * min(numbers), 1.05 * max(numbers)], nice=False)
    axis = alt.Axis(tickCount=5, grid=False)
    x = alt.X("at:Q", title=column if titled else None, axis=axis, scale=across)
    y = alt.Y("amount:Q", title=unit, axis=style.few_ticks(numbers), scale=up)
    lines = (
        alt.Chart(alt.Data(values=data))
        .mark_line(strokeWidth=1.8, aria=False)
        .encode(
            order="order:Q",
            x=x,
            y=y,
            color=colour,
            tooltip=["group:N", alt.Tooltip("at:Q", title=column), "amount:Q"],
        )
    )
    if not even:
        return lines
    base = alt.Chart(alt.Data(values=even)).encode(x=x, y="even:Q")
    thin = base.mark_line(color=style.GREY, strokeWidth=1, aria=False)
    end = alt.Chart(alt.Data(values=even[-1:])).encode(x=x, y="even:Q")
    label = end.mark_text(text="even", align="left", dx=4, color=style.FAINT, aria=False)
    return alt.layer(thin, lines, label)


def top_over_time(
    attention: Mapping[str, Spotlight] | Spotlight,
    k: int = 500,
    *,
    column: str = "step",
    bins: int = 20,
    layers: Sequence[str] | Mapping[str, str] | None = None,
    query: int | None = None,
    absolute: bool = True,
    columns: int = 1,
    width: int = style.WIDTH,
    height: int = 70,
    title: str | None = None,
) -> ConcatChart:
    """When training met the k patterns that a layer looks at most: counts per range of steps.

    The dashed line is what each range would have if time did not matter: k times its share of all
    patterns.

    Example:
        >>> charts.top_over_time(dual.attend(test), 500)                # doctest: +SKIP
    """
    panels: list[Any] = []
    asked = by_layer(attention, layers)
    for header, one in asked.items():
        if not isinstance(one, Spotlight):
            raise QueryError(
                "a table was given to draw; expected spotlights: how many patterns each range has "
                "is not in a table of the strongest"
            )
        rows = _counts(one, k, column, bins, query, absolute)
        panels.append(
            _histogram(rows, k, column if len(panels) >= len(asked) - columns else None).properties(
                width=width, height=height, title=style.heading(header)
            )
        )
    subtitle = f"counts per range of {column}s; dashed: if time did not matter"
    chart: ConcatChart = style.finished(style.panels(panels, columns), title, subtitle)
    return chart


def _counts(
    spotlight: Spotlight, k: int, column: str, bins: int, query: int | None, absolute: bool
) -> list[dict[str, Any]]:
    top = one_query(spotlight.top(k, sign="absolute" if absolute else "most"), query)
    ranges = one_query(spotlight.over(column, bins), query)
    edges = [ranges[0]["from"], *(row["to"] for row in ranges)]
    counts, _ = np.histogram([cell(row, (column,))[0] for row in top], edges)
    patterns = sum(row["patterns"] for row in ranges)
    return [
        {"from": row["from"], "to": row["to"], "count": int(count),
         "even": len(top) * row["patterns"] / patterns}
        for row, count in zip(ranges, counts, strict=True)
    ]  # fmt: skip


def _histogram(rows: list[dict[str, Any]], k: int, column: str | None) -> Any:
    alt = style.altair()
    scale = alt.Scale(domain=[rows[0]["from"], rows[-1]["to"]], nice=False)
    x = alt.X("from:Q", title=column, scale=scale, axis=alt.Axis(tickCount=5, grid=False))
    y = alt.Y(
        "count:Q", title=f"of the top {k:,}", axis=style.few_ticks([row["count"] for row in rows])
    )
    base = alt.Chart(alt.Data(values=rows))
    even = [*rows, {**rows[-1], "from": rows[-1]["to"]}]
    return alt.layer(
        base.mark_rect(color=style.BLUE, stroke="white", strokeWidth=0.5, aria=False).encode(
            x=x, x2="to:Q", y=y, y2=alt.datum(0), tooltip=["from:Q", "to:Q", "count:Q", "even:Q"]
        ),
        alt.Chart(alt.Data(values=even))
        .mark_line(interpolate="step-after", color=style.INK, strokeDash=[4, 3], aria=False)
        .encode(x=x, y="even:Q"),
    )
