"""What an output adds up from: the initial weights, what each class wrote, biases; and the total.

A contribution is an exact account, so the picture is a walk: each bar begins where the one before
it ended, and the last one is the output itself.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from dualform.attention import Contribution
from dualform.charts import style
from dualform.charts.groups import cell, chosen, columns_of, labelled
from dualform.errors import QueryError

if TYPE_CHECKING:
    from altair import LayerChart

ROW = 18
"""Pixels of one part."""

KINDS = {"raises": style.BLUE, "lowers": style.VERMILLION, "total": "#555555"}


def parts(
    contribution: Contribution,
    by: str | Sequence[str] | None = "label",
    *,
    names: Any = None,
    groups: Sequence[Any] | None = None,
    at_most: int = 12,
    width: int = 200,
    title: str | None = None,
) -> LayerChart:
    """What an output adds up from, part by part, in its own units: a bar per part, then the total.

    Positive parts raise the output (a logit, usually), negative ones lower it. First what no
    pattern wrote (initial weights and bias), then what the patterns of each group wrote, grouped as
    in `contribution.sum_by(...)`. Beyond `at_most` groups, or outside of `groups`, the smaller ones
    are drawn as one.

    Example:
        >>> charts.parts(dual.contribute(test, target=7))               # doctest: +SKIP
    """
    if not isinstance(contribution, Contribution):
        raise QueryError(
            f"{type(contribution).__name__} was given to draw; expected what "
            "dual.contribute(...) gives"
        )
    found = _parts(contribution, columns_of(by), names, groups, at_most)
    rows, at = [], 0.0
    for place, (name, value) in enumerate(found):
        kind = "raises" if value >= 0 else "lowers"
        rows.append(_row(place, name, at, at + value, value, kind))
        at += value
    whole, heading = contribution.target, f"What {contribution.target} adds up from"
    if contribution.first_order:  # the parts are those of another number
        whole = "gradient · output of the layer"
        heading = f"{contribution.target} through one layer, to first order"
    rows.append(_row(len(rows), whole, 0.0, at, at, "total"))
    drawn = _walk(rows, width, whole)
    chart: LayerChart = style.finished(drawn, title or heading, f"layer {contribution.layer}")
    return chart


def _parts(
    contribution: Contribution,
    of: tuple[str, ...],
    names: Any,
    groups: Sequence[Any] | None,
    at_most: int,
) -> list[tuple[str, float]]:
    """Named parts that add up to the total."""
    shares = dict(contribution.shares)
    patterns = shares.pop("patterns")
    found = list(shares.items())
    if not of:
        return [*found, ("patterns", patterns)]
    table = contribution.sum_by(*of)
    written = {cell(row, of): float(row["contribution"]) for row in table.rows()}
    drawn = chosen(list(written), groups)
    called = labelled(drawn, names)
    if len(drawn) > at_most:
        largest = sorted(drawn, key=lambda group: -abs(written[group]))[: max(at_most - 1, 0)]
        drawn = [group for group in drawn if group in largest]
    # a bare number says little: "label 3"
    bare = len(of) == 1 and names is None and not any(isinstance(g[0], str) for g in drawn)
    found += [(f"{of[0]} {called[g]}" if bare else called[g], written[g]) for g in drawn]
    if rest := [value for group, value in written.items() if group not in drawn]:
        found.append((f"{len(rest)} {'other' if len(rest) == 1 else 'others'}", sum(rest)))
    return found


def _row(
    place: int, name: str, start: float, end: float, value: float, kind: str
) -> dict[str, Any]:
    text = f"{value:+.3g}" if kind != "total" else f"{value:.3g}"
    return {"place": place, "part": name, "from": start, "to": end, "value": value, "kind": kind,
            "text": text.replace("-", "−"), "right": max(start, end)}  # fmt: skip


def _walk(rows: list[dict[str, Any]], width: int, unit: str) -> Any:
    alt = style.altair()
    # by place: a class may be called like another part
    named = f"{json.dumps([row['part'] for row in rows])}[datum.value]"
    axis = alt.Axis(ticks=False, domain=False, labelPadding=6, labelExpr=named, labelOverlap=False)
    scale = alt.Scale(paddingInner=0.25, paddingOuter=0.1)
    y = alt.Y("place:O", title=None, scale=scale, axis=axis)
    low = min(0.0, *(min(row["from"], row["to"]) for row in rows))
    high = max(0.0, *(row["right"] for row in rows))
    room = (high - low) or 1.0
    scale = alt.Scale(domain=[low - 0.03 * room, high + 0.2 * room], nice=False)
    x = alt.X("from:Q", scale=scale, title=f"{unit} so far", axis=alt.Axis(tickCount=5))
    kinds = [kind for kind in KINDS if any(row["kind"] == kind for row in rows)]
    colour = alt.Color(
        "kind:N",
        scale=alt.Scale(domain=kinds, range=[KINDS[kind] for kind in kinds]),
        legend=alt.Legend(title=None, symbolType="square"),
    )
    base = alt.Chart().encode(y=y)
    zero = alt.Chart(alt.Data(values=[{"from": 0.0}])).mark_rule(color=style.GREY, aria=False)
    told = ["part:N", "value:Q", "from:Q", "to:Q"]
    return alt.layer(
        zero.encode(x=x),
        base.mark_bar(aria=False).encode(x=x, x2="to:Q", color=colour, tooltip=told),
        *(  # numbers stay readable where they cross a line
            base.mark_text(align="left", dx=3, aria=False, **halo).encode(
                x=alt.X("right:Q", scale=scale), text="text:N"
            )
            for halo in ({"stroke": "white", "strokeWidth": 4}, {})
        ),
        data=alt.Data(values=rows),
    ).properties(width=width, height={"step": ROW})
