"""How well attention votes: the class with most attention in total, against target and output.

The paper's Table 1 as a picture. Each layer casts a vote for every test input: the class that gets
most of its attention. How often is that the model's output, or the true class, when the model is
right and when it is wrong?
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from dualform.charts import style
from dualform.charts.measured import measured, nested
from dualform.errors import QueryError

if TYPE_CHECKING:
    from altair import ConcatChart

ROW = 30
"""Pixels of one layer."""


def votes(
    found: Mapping[str, Mapping[str, Any]],
    *,
    paper: Mapping[str, Mapping[str, Any]] | None = None,
    sources: tuple[str, str] = ("ours", "paper"),
    width: int = 180,
    unit: str = "agreement (%)",
    title: str | None = None,
) -> ConcatChart:
    """How often the layers' votes agree with something, in percent: a panel per question.

    `found` is layer → question → percentage: a number, a list of runs (drawn as their mean with one
    standard deviation to both sides) or `{"mean": …, "std": …}`. `paper` has the same in the same
    form, drawn beside it; `sources` is what the legend calls the two.

    Example:
        >>> from dualform import charts
        >>> ours = {"layer 0": {"right: output": [75.0, 75.2]}, "layer 1": {"right: output": 80.1}}
        >>> paper = {"layer 0": {"right: output": {"mean": 75.1, "std": 0.0}}}
        >>> chart = charts.votes(ours, paper=paper)
    """
    for numbers in (found, paper or {}):
        nested(numbers, "votes", "layer → question → percentage")
    questions = list(dict.fromkeys(q for by_question in found.values() for q in by_question))
    if not questions:
        raise QueryError("votes({}) has nothing to draw; expected layer → question → percentage")
    given = [found] if paper is None else [found, paper]
    rows = [
        {"source": source, "layer": layer, "question": question,
         **measured(value, f"{question}, {layer},").row}
        for source, numbers in zip(sources, given, strict=False)
        for layer, by_question in numbers.items()
        for question, value in by_question.items()
    ]  # fmt: skip
    for row in rows:
        if row["layer"] not in found or row["question"] not in questions:
            raise QueryError(
                f"{sources[1]} has {row['layer']!r}, {row['question']!r}, which {sources[0]} has "
                "not; expected numbers for what is drawn. Leave it out, or measure it"
            )
    drawn = [
        _panel([row for row in rows if row["question"] == question], list(found), sources,
               paper is not None, width, unit if question == questions[-1] else None)
        .properties(width=width, height=ROW * len(found), title=style.heading(question))
        for question in questions
    ]  # fmt: skip
    chart: ConcatChart = style.finished(style.panels(drawn, 1), title)
    return chart


def _panel(
    rows: list[dict[str, Any]],
    layers: list[str],
    sources: tuple[str, str],
    both: bool,
    width: int,
    unit: str | None,
) -> Any:
    """One question: a dot with its error bar per layer and source, and the numbers at the right."""
    alt = style.altair()
    domain = list(sources) if both else [sources[0]]
    colours, shapes = [style.BLUE, style.VERMILLION], ["circle", "diamond"]
    legend = alt.Legend(title=None) if both else None
    colour = alt.Color(
        "source:N", scale=alt.Scale(domain=domain, range=colours[: len(domain)]), legend=legend
    )
    shape = alt.Shape(
        "source:N", scale=alt.Scale(domain=domain, range=shapes[: len(domain)]), legend=legend
    )
    base = alt.Chart(alt.Data(values=rows)).encode(
        y=alt.Y("layer:N", sort=layers, title=None, scale=alt.Scale(domain=layers),
                axis=alt.Axis(ticks=False, domain=False, grid=False, labelPadding=6)),
        yOffset=alt.YOffset("source:N", sort=domain, scale=alt.Scale(domain=domain)),
        color=colour,
    )  # fmt: skip
    told = ["source:N", "layer:N", "mean:Q", "std:Q"]
    return alt.layer(
        base.mark_rule(strokeWidth=1.5, aria=False).encode(
            x=style.percent("low", unit), x2="high:Q"
        ),
        base.mark_point(filled=True, opacity=1, size=36, aria=False).encode(
            x=style.percent("mean", unit), shape=shape, tooltip=told
        ),
        base.mark_text(align="left", aria=False).encode(x=alt.value(width + 6), text="text:N"),
    )
