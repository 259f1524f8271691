"""One number of every pattern against another, as a map of counts: never a dot per pattern.

Made for a side note of the paper: attention weights against the size of the values they multiply. A
training run has millions of patterns; a map has a few hundred squares, shaded by how many fall into
each, and a line through the medians that shows whether one number follows the other.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from dualform.charts import style
from dualform.errors import QueryError

if TYPE_CHECKING:
    from altair import LayerChart

Reals = NDArray[np.float64]


def weights_against_values(
    weights: Any,
    sizes: Any,
    *,
    bins: int = 24,
    log: bool = True,
    width: int = style.WIDTH,
    height: int = 170,
    unit: str = "attention weight α",
    size: str = "size of the value |e|",
    title: str | None = None,
) -> LayerChart:
    """Attention weights of all patterns against the size of their values: a map of counts.

    Two arrays with a number per pattern: α in units of key × query, and |e| in units of the layer's
    output per key × query. The line is the median size among patterns of about the same weight. A
    logarithmic axis has no place for zero: the subtitle counts the patterns that are left out.

    Example:
        >>> import numpy as np
        >>> from dualform import charts
        >>> generator = np.random.default_rng(0)
        >>> chart = charts.weights_against_values(generator.random(500), generator.random(500))
    """
    if not isinstance(bins, int) or bins < 1:
        raise QueryError(f"bins={bins!r}: expected a whole number from 1 on")
    x, y = _vector(weights, "weights"), _vector(sizes, "sizes")
    if len(x) != len(y) or not len(x):
        raise QueryError(f"{len(x)} weights and {len(y)} sizes; expected one of each per pattern")
    if log:
        kept = y > 0
        if not kept.any():
            raise QueryError("no size is above zero; draw them with log=False")
        left_out, x, y = int((~kept).sum()), x[kept], np.log10(y[kept])
    else:
        left_out = 0
    subtitle = f"{len(x):,} patterns; line: median"
    subtitle += f"; {left_out:,} whose value is zero are left out" if left_out else ""
    cells, medians = _mapped(x, y, bins)
    if log:
        for row in [*cells, *medians]:
            row |= {name: 10.0 ** row[name] for name in ("low", "high", "median") if name in row}
    chart: LayerChart = style.finished(
        _map(cells, medians, log, unit, size).properties(width=width, height=height),
        title,
        subtitle,
    )
    return chart


def _vector(values: Any, what: str) -> Reals:
    given = values.detach().cpu().numpy() if isinstance(values, torch.Tensor) else values
    try:
        array = np.asarray(given, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise QueryError(f"{what} are no numbers ({error}); expected one per pattern") from error
    if array.ndim != 1:
        raise QueryError(
            f"{what} of shape {array.shape} were given; expected a vector, a number per pattern. "
            f"Choose a query's row, {what}[0], or flatten both arrays"
        )
    if not np.isfinite(array).all():
        raise QueryError(
            f"{what} hold something that is no finite number ({array[~np.isfinite(array)][0]}); "
            "leave those patterns out of both arrays"
        )
    return array


def _mapped(x: Reals, y: Reals, bins: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Counts of the squares that are not empty, and the median of y in every column."""
    counts, across, up = np.histogram2d(x, y, bins)
    cells = [
        {"from": across[i], "to": across[i + 1], "low": up[j], "high": up[j + 1],
         "patterns": int(counts[i, j])}
        for i, j in np.argwhere(counts > 0)
    ]  # fmt: skip
    column = np.clip(np.searchsorted(across, x, side="right") - 1, 0, bins - 1)
    medians = [
        {"middle": (across[i] + across[i + 1]) / 2, "median": float(np.median(y[column == i]))}
        for i in np.unique(column)
    ]
    return cells, medians


def _map(
    cells: list[dict[str, Any]], medians: list[dict[str, Any]], log: bool, unit: str, size: str
) -> Any:
    alt = style.altair()
    ends = [min(cell["low"] for cell in cells), max(cell["high"] for cell in cells)]
    scale = alt.Scale(type="log" if log else "linear", domain=ends, nice=False)
    across = [min(cell["from"] for cell in cells), max(cell["to"] for cell in cells)]
    sideways = alt.Scale(domain=across, nice=False, zero=False)
    axis = alt.Axis(format="~e" if log else "~r", tickCount=4, grid=False)
    y = alt.Y("low:Q", title=size, scale=scale, axis=axis)
    shade = alt.Color(
        "patterns:Q",
        scale=alt.Scale(type="log", scheme="blues"),
        legend=alt.Legend(
            title="patterns",
            titleOrient="left",
            gradientLength=150,
            gradientThickness=8,
            tickCount=4,
            format="~s",
        ),
    )
    squares = (
        alt.Chart(alt.Data(values=cells))
        .mark_rect(aria=False)
        .encode(
            x=alt.X("from:Q", title=unit, scale=sideways, axis=alt.Axis(tickCount=6, grid=False)),
            x2="to:Q",
            y=y,
            y2="high:Q",
            color=shade,
            tooltip=["from:Q", "to:Q", "low:Q", "high:Q", "patterns:Q"],
        )
    )
    dots = {"color": style.VERMILLION, "size": 18}
    line = (
        alt.Chart(alt.Data(values=medians))
        .mark_line(color=style.VERMILLION, strokeWidth=2, point=dots, aria=False)
        .encode(x=alt.X("middle:Q", scale=sideways), y=alt.Y("median:Q", scale=scale))
    )
    return alt.layer(squares, line)
