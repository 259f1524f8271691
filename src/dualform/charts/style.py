"""How every chart looks: colours that colour-blind readers can tell apart, sizes, and the layout.

Charts are made for a column of a page, about 340 pixels wide, where text of 10 pixels is still
read. Colours are Okabe and Ito's, which differ in lightness too; beyond eight groups, Tol's "muted"
ten. The style is part of each chart: nothing is registered with Altair, whose themes belong to the
user. Altair is imported here only, when the first chart is drawn.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from dualform.errors import DualFormError, QueryError

if TYPE_CHECKING:
    from altair import ConcatChart

BLUE, ORANGE, GREEN, VERMILLION = "#0072B2", "#E69F00", "#009E73", "#D55E00"
SKY, PURPLE, YELLOW, BLACK = "#56B4E9", "#CC79A7", "#F0E442", "#000000"
GREY, PALE, INK, FAINT = "#8A8A8A", "#D9D9D9", "#222222", "#666666"

FEW = (BLUE, ORANGE, GREEN, PURPLE, SKY, VERMILLION, BLACK, YELLOW)
"""Okabe and Ito's palette, in the order it is used."""

MANY = ("#332288", "#DDCC77", "#117733", "#88CCEE", "#882255",
        "#44AA99", "#CC6677", "#999933", "#AA4499", "#000000")  # fmt: skip
"""Tol's "muted" palette, black for its grey, which is hard to see: for nine or ten groups."""

WIDTH = 290
"""Pixels of a panel: with its axis and labels, about a column's 340."""

FONT = "Helvetica, Arial, sans-serif"
SMALL, NORMAL, LARGE = 9, 10, 12

CONFIG: dict[str, Any] = {
    "font": FONT,
    "background": "white",
    "padding": 4,
    "view": {"stroke": None},
    "axis": {
        "labelFontSize": NORMAL, "titleFontSize": NORMAL, "titleFontWeight": "normal",
        "labelColor": INK, "titleColor": INK, "domainColor": GREY, "tickColor": GREY,
        "gridColor": "#E8E8E8", "titlePadding": 6, "labelLimit": 200, "tickSize": 4,
        "labelFlush": False,
    },
    "legend": {
        "labelFontSize": NORMAL, "titleFontSize": NORMAL, "titleFontWeight": "normal",
        "labelColor": INK, "titleColor": INK, "labelLimit": 240, "orient": "top",
        "symbolSize": 60, "offset": 6,
    },
    "title": {
        "fontSize": LARGE, "fontWeight": 600, "anchor": "start", "color": INK, "offset": 6,
        "subtitleFontSize": NORMAL, "subtitleColor": FAINT, "subtitlePadding": 3,
    },
    "header": {"labelFontSize": NORMAL, "titleFontSize": NORMAL, "labelColor": INK},
    "text": {"fontSize": NORMAL, "color": INK},
}  # fmt: skip


def altair() -> Any:
    """Altair, imported when it is needed."""
    try:
        import altair as alt
    except ImportError as error:
        raise missing("altair") from error
    return alt


def missing(package: str) -> DualFormError:
    """What to do about a package that charts need and that is not there."""
    return DualFormError(
        f"charts need {package}, which is not installed. "
        "Install it with: pip install 'dualform[charts]'"
    )


def colours(count: int, what: str = "groups") -> list[str]:
    """As many colours as there are groups, all of them told apart by colour-blind readers."""
    if count > len(MANY):
        raise QueryError(
            f"{count} {what} would need {count} colours; {len(MANY)} can be told apart. "
            "Name the ones to draw with groups=[...]"
        )
    return list(FEW[:count] if count <= len(FEW) else MANY[:count])


def paler(colour: str) -> str:
    """The colour mixed with white: for what stays in the background."""
    parts = [int(colour[i : i + 2], 16) for i in (1, 3, 5)]
    return "#" + "".join(f"{round(255 - 0.42 * (255 - part)):02X}" for part in parts)


def finished(chart: Any, title: str | None = None, subtitle: str | None = None) -> Any:
    """The chart with its title and the house's style."""
    if title:
        chart = chart.properties(
            title={"text": title} | ({"subtitle": subtitle} if subtitle else {})
        )
    elif subtitle:  # Vega draws no subtitle without a title
        plain = {"text": subtitle, "fontSize": NORMAL, "fontWeight": "normal", "color": FAINT}
        chart = chart.properties(title=plain)
    chart.config = altair().Config(**CONFIG)
    return chart


def grid(
    charts: Sequence[Any], columns: int | None = None, title: str | None = None
) -> ConcatChart:
    """Some charts of this room as one, in rows of so many columns (default: one row).

    Charts carry their style with them, and Altair refuses to combine charts that do; this combines
    them and styles the whole.

    Example:
        >>> from dualform import charts
        >>> inputs = charts.images([[[0, 255], [255, 0]]], captions=["input"])
        >>> both = charts.grid([inputs, inputs], title="Twice")
    """
    if not isinstance(charts, list | tuple) or not all(map(is_chart, charts)):
        listed = charts if isinstance(charts, list | tuple) else ()
        seen = next((one for one in listed if not is_chart(one)), charts)
        raise QueryError(
            f"grid was given {type(seen).__name__}{' in its list' if listed else ''}; expected a "
            "list of charts: grid([one, other])"
        )
    if not charts:
        raise QueryError("grid([]) has nothing to draw; expected at least one chart")
    plain = [chart.copy(deep=False) for chart in charts]
    for chart in plain:
        chart.config = altair().Undefined
    drawn = _beside(plain, len(plain) if columns is None else columns)
    drawn = drawn.resolve_scale(color="independent", shape="independent")
    whole: ConcatChart = finished(drawn, title)
    return whole


def panels(charts: Sequence[Any], columns: int) -> Any:
    """The panels of one picture: axes of their own, and one legend for all."""
    return _beside(charts, columns).resolve_scale(color="shared", shape="shared")


def is_chart(value: Any) -> bool:
    """Whether something is a chart of Altair's, as all functions of this room give."""
    return isinstance(value, altair().TopLevelMixin)


def at_least_one(columns: int) -> int:
    """A number of columns that can be drawn."""
    if not isinstance(columns, int) or columns < 1:
        raise QueryError(f"columns={columns!r}: expected a whole number from 1 on")
    return columns


def _beside(charts: Sequence[Any], columns: int) -> Any:
    columns = at_least_one(columns)
    return altair().concat(*charts, columns=columns, spacing={"row": 14, "column": 18})


def heading(text: str) -> dict[str, Any]:
    """A panel's own title."""
    return {"text": text, "fontSize": NORMAL, "offset": 2}


def few_ticks(numbers: Sequence[float]) -> Any:
    """A vertical axis of a small panel: few ticks, thousands as k, and a plain zero."""
    large = max(map(abs, numbers), default=0.0) >= 1000  # below, "m" would stand for thousandths
    zero = "datum.value ? datum.label : '0'"
    return altair().Axis(tickCount=4, format="~s" if large else "~r", labelExpr=zero)


def percent(field: str, title: str | None, *, upright: bool = False) -> Any:
    """An axis from 0 to 100; layers that share an axis have to ask for the very same one."""
    alt = altair()
    axis = alt.Axis(values=[0, 20, 40, 60, 80, 100], labelOverlap=False)
    channel = alt.Y if upright else alt.X
    return channel(f"{field}:Q", title=title, scale=alt.Scale(domain=[0, 100]), axis=axis)


def number(value: float) -> str:
    """A number in a caption: four digits, in plain notation where that is readable."""
    size = abs(value)
    if size >= 1e4:
        return f"{value:,.0f}" if size < 1e9 else f"{value:.3e}"
    return f"{value:#.4g}" if size >= 1e-3 else f"{value:.3g}"


def text_width(value: Any) -> int:
    """How wide a text of this room's normal size is, in pixels, roughly and rather too much."""
    return round(0.51 * NORMAL * max((len(line) for line in str(value).split("\n")), default=0))
