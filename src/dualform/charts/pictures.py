"""Images in a chart: test inputs, and the training images that each layer looks at most.

Pictures are laid out here, cell by cell, in the chart's own pixels: an image and a caption of a few
lines under it. They are embedded, so a chart can be taken anywhere.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from dualform.attention import Spotlight
from dualform.charts import style
from dualform.charts.groups import Readable, by_layer, cell, columns_of, one_query, shown
from dualform.charts.png import as_bytes, data_url
from dualform.errors import QueryError
from dualform.table import Table

if TYPE_CHECKING:
    from altair import LayerChart

LINE = 13
"""Pixels from one line of a caption to the next."""


class Cell(NamedTuple):
    """One image with its caption, and where it goes."""

    row: int
    column: int
    url: str
    caption: str
    tall: float
    """Its height as a part of its width."""


def images(
    pixels: Sequence[Any] | Any,
    captions: Sequence[Any] | None = None,
    *,
    columns: int | None = None,
    size: int = 64,
    invert: bool = False,
    span: tuple[float, float] | None = None,
    title: str | None = None,
) -> LayerChart:
    """Some images with a caption under each, in rows of so many columns.

    Pixels are whole numbers from 0 to 255 or reals from 0 to 1, black to white; `span=(black,
    white)` names other ends, `invert=True` exchanges them. An image is [height, width], with
    colours [height, width, 3] or [3, height, width], or a flat vector of a square picture.

    Example:
        >>> import numpy as np
        >>> from dualform import charts
        >>> chart = charts.images(np.eye(8)[None], captions=["a stroke"])
    """
    given = _listed(pixels, "images", "a list or an array of images")
    if not given:
        raise QueryError("images([]) has nothing to draw; expected at least one image")
    texts = [""] * len(given)
    if captions is not None:
        texts = [str(text) for text in _listed(captions, "captions", "a list, one per image")]
    if len(texts) != len(given):
        raise QueryError(f"{len(given)} images and {len(texts)} captions; expected one for each")
    wide = len(given) if columns is None else min(style.at_least_one(columns), len(given))
    cells = [
        _cell(*divmod(i, wide), picture, text, invert, span)
        for i, (picture, text) in enumerate(zip(given, texts, strict=True))
    ]
    chart: LayerChart = style.finished(_laid_out(cells, size), title)
    return chart


def _listed(values: Any, what: str, expected: str) -> list[Any]:
    try:
        return list(values)
    except TypeError as error:
        raise QueryError(f"{what} were given as {values!r}; expected {expected}") from error


def top_images(
    attention: Readable,
    images: Any,
    k: int = 3,
    *,
    layers: Sequence[str] | Mapping[str, str] | None = None,
    example: str | Sequence[str] = "example",
    label: str | Sequence[str] | None = "label",
    names: Any = None,
    query: int | None = None,
    absolute: bool = True,
    asked: Any = None,
    size: int = 56,
    invert: bool = False,
    span: tuple[float, float] | None = None,
    title: str | None = None,
) -> LayerChart:
    """The k training images that each layer looks at most, with weight, label and step: a row each.

    `images[id]` is the picture of an example; with `example=("task", "example")` it is
    `images[task][id]`. An example that training visited often is shown once, by its strongest
    visit. Weights are α = key · query in units of key × query, ranked by size (`absolute=False`:
    most positive first). `asked` is a picture of the test input, to be drawn first.

    Example:
        >>> charts.top_images(dual.attend(test), train_images)          # doctest: +SKIP
    """
    of = columns_of(example)
    cells: list[Cell] = []
    headers: list[str] = []
    before = 0 if asked is None else 1
    if asked is not None:
        cells.append(_cell(0, 0, asked, "input", invert, span))
    for place, (header, spotlight) in enumerate(by_layer(attention, layers).items()):
        headers.append(header)
        for rank, row in enumerate(_strongest(spotlight, k, of, query, absolute)):
            picture, caption = _looked_up(images, row, of), _caption(row, columns_of(label), names)
            cells.append(_cell(place, rank + before, picture, caption, invert, span))
    chart: LayerChart = style.finished(_laid_out(cells, size, headers), title)
    return chart


def _cell(
    row: int,
    column: int,
    pixels: Any,
    caption: str,
    invert: bool,
    span: tuple[float, float] | None,
) -> Cell:
    height, width = as_bytes(pixels, span).shape[:2]
    url = data_url(pixels, invert=invert, span=span)
    return Cell(row, column, url, caption, height / width)


def _strongest(
    spotlight: Spotlight | Table, k: int, of: tuple[str, ...], query: int | None, absolute: bool
) -> list[dict[str, Any]]:
    """The strongest visits of k different examples, the strongest first."""
    wanted = k
    while True:
        if isinstance(spotlight, Table):
            table, complete = spotlight, True
        else:
            table = spotlight.top(wanted, sign="absolute" if absolute else "most")
            complete = wanted >= len(spotlight.rows)
        rows = one_query(table, query)
        first: dict[tuple[Any, ...], dict[str, Any]] = {}
        for row in rows:
            first.setdefault(_example(row, of), row)
        if len(first) >= k or complete:
            return list(first.values())[:k]
        wanted *= 4


def _example(row: Mapping[str, Any], of: tuple[str, ...]) -> tuple[Any, ...]:
    """Which example a row is a visit of."""
    try:
        return cell(row, of)
    except QueryError as error:
        raise QueryError(
            f"{error}. Which picture a pattern came from has to be recorded: "
            "recorder.tag(example=ids). If it is under another name, say example='…'"
        ) from error


def _looked_up(images: Any, row: Mapping[str, Any], of: tuple[str, ...]) -> Any:
    """The picture of a row's example."""
    found = images
    for name, value in zip(of, cell(row, of), strict=True):
        try:
            found = found[value]
        except (KeyError, IndexError, TypeError) as error:
            raise QueryError(
                f"there is no picture of {name} {value!r} among the images given; "
                "expected images[id] for every example that was recorded"
            ) from error
    return found


def _caption(row: Mapping[str, Any], label: tuple[str, ...], names: Any) -> str:
    known = tuple(name for name in label if name in row or f"{name} (tag)" in row)
    lines = [f"α = {style.number(float(row['weight']))}"]
    if known:
        group = cell(row, known)
        bare = len(known) == 1 and names is None and not isinstance(group[0], str)
        lines.append(f"{known[0]} {shown(group, names)}" if bare else shown(group, names))
    if "step" in row:
        lines.append(f"step {row['step']:,}")
    return "\n".join(lines)


def _laid_out(cells: Sequence[Cell], size: int, headers: Sequence[str] = ()) -> Any:
    """Cells as layers of one chart: pictures, captions, and the names of the rows at the left."""
    alt = style.altair()
    lines = max(one.caption.count("\n") + 1 if one.caption else 0 for one in cells)
    column = max(size, *(style.text_width(one.caption) for one in cells)) + 10
    tall = round(size * max(min(one.tall, 1.0) for one in cells))
    row = tall + LINE * lines + (16 if lines else 8)
    left = max((style.text_width(header) for header in headers), default=0)
    left += 12 if headers else 0
    high, wide = (1 + max(getattr(one, axis) for one in cells) for axis in ("row", "column"))
    middle = {one: left + column * one.column + column / 2 for one in cells}
    pictures = [
        {"x": middle[one], "y": row * one.row + tall / 2, "image": one.url} for one in cells
    ]
    captions = [
        {"x": middle[one], "under": row * one.row + tall + 5, "caption": one.caption}
        for one in cells
        if one.caption
    ]
    layers = [
        alt.Chart(alt.Data(values=pictures))
        .mark_image(width=size, height=tall, aria=False)
        .encode(x=_pixels("x"), y=_pixels("y"), url="image:N"),
        alt.Chart(alt.Data(values=captions))
        .mark_text(baseline="top", lineBreak="\n", lineHeight=LINE, aria=False)
        .encode(x=_pixels("x"), y=_pixels("under"), text="caption:N"),
    ]
    if headers:
        at = [{"y": row * i + tall / 2, "header": text} for i, text in enumerate(headers)]
        layers.append(
            alt.Chart(alt.Data(values=at))
            .mark_text(align="left", fontWeight=600, aria=False, x=0)
            .encode(y=_pixels("y"), text="header:N")
        )
    width, height = left + column * wide, row * high - (8 if lines else 0)
    return alt.layer(*layers).properties(width=width, height=height)


def _pixels(field: str) -> Any:
    """A place in the chart's own pixels, without scale or axis."""
    alt = style.altair()
    channel = alt.X if field == "x" else alt.Y
    return channel(f"{field}:Q", scale=None, axis=None)
