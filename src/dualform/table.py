"""Small tables that print well: what every question about a memory comes back as.

A table is a handful of equally long columns and a caption that states sign and unit of its numbers:
the question users ask most is what a number means. It is deliberately not a data frame. Who
wants one calls `.to_pandas()` or `.to_arrow()`, and only then is such a library imported.
"""

from __future__ import annotations

import csv
import html
import io
import math
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import rich.box
import rich.console
import rich.markup
import rich.table
import rich.text
from numpy.typing import ArrayLike, NDArray

from dualform.errors import DualFormError, QueryError

if TYPE_CHECKING:
    import pandas
    import pyarrow

SHOWN_ROWS = 20
"""How many rows the printed forms show; the rest is counted, never lost."""


class Table:
    """A few named columns of equal length and a caption saying what the numbers mean.

    Example:
        >>> from dualform.table import Table
        >>> table = Table({"label": [3, 7], "weight": [1.5, -0.25]}, caption="positive = similar")
        >>> len(table), table.columns, table["label"].tolist()
        (2, ('label', 'weight'), [3, 7])
        >>> table.rows()[0]
        {'label': 3, 'weight': 1.5}
    """

    def __init__(self, columns: Mapping[str, ArrayLike], caption: str = "") -> None:
        self._columns = {name: _as_column(values) for name, values in columns.items()}
        self.caption = caption
        lengths = {name: len(values) for name, values in self._columns.items()}
        if len(set(lengths.values())) > 1:
            raise ValueError(f"the columns of a table must be equally long, got {lengths}")

    @property
    def columns(self) -> tuple[str, ...]:
        """The names of the columns, in order."""
        return tuple(self._columns)

    def __len__(self) -> int:
        return len(next(iter(self._columns.values()))) if self._columns else 0

    def __getitem__(self, column: str) -> NDArray[Any]:
        try:
            return self._columns[column]
        except KeyError:
            have = ", ".join(self._columns) or "none"
            raise QueryError(f"no column {column!r} in this table; it has: {have}") from None

    def rows(self) -> list[dict[str, Any]]:
        """Every row as a dict of plain Python values."""
        return list(self._iterate())

    def to_dict(self) -> dict[str, Any]:
        """The caption and the rows, fit for `json.dumps` (not-a-number becomes None)."""
        rows = [{name: _json_value(v) for name, v in row.items()} for row in self._iterate()]
        return {"caption": self.caption, "rows": rows}

    def to_pandas(self) -> pandas.DataFrame:
        """The table as a `pandas.DataFrame` (extra `tables`)."""
        try:
            import pandas
        except ImportError as error:
            raise _missing("pandas") from error
        return pandas.DataFrame(dict(self._columns))

    def to_arrow(self) -> pyarrow.Table:
        """The table as a `pyarrow.Table` (extra `tables`)."""
        try:
            import pyarrow
        except ImportError as error:
            raise _missing("pyarrow") from error
        return pyarrow.table(
            {n: v if v.dtype.kind in "biuf" else v.tolist() for n, v in self._columns.items()}
        )

    def to_csv(self, path: str | Path) -> None:
        """Write the rows to a CSV file, with a line of column names; reals in full precision.

        Example:
            >>> spotlight.top(500).to_csv("top.csv")   # doctest: +SKIP
        """
        with open(path, "w", encoding="utf-8", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(self._columns)
            plain = [values.tolist() for values in self._columns.values()]
            writer.writerows(zip(*plain, strict=True))

    def to_parquet(self, path: str | Path) -> None:
        """Write the table to a Parquet file, its caption in the metadata (extra `tables`).

        Example:
            >>> spotlight.top(500).to_parquet("top.parquet")   # doctest: +SKIP
        """
        table = self.to_arrow()
        import pyarrow.parquet

        described = table.replace_schema_metadata({"caption": self.caption})
        pyarrow.parquet.write_table(described, path)

    def __rich__(self) -> rich.console.Group:
        table = rich.table.Table(box=rich.box.SIMPLE_HEAD, pad_edge=False)
        shown = [_as_text(values[:SHOWN_ROWS]) for values in self._columns.values()]
        for (name, values), cells in zip(self._columns.items(), shown, strict=True):
            numeric = values.dtype.kind in "biuf"
            table.add_column(
                rich.markup.escape(name),
                justify="right" if numeric else "left",
                no_wrap=all(len(cell) <= 40 for cell in cells),
            )
        for row in zip(*shown, strict=True):
            table.add_row(*(rich.markup.escape(cell) for cell in row))
        parts: list[rich.console.RenderableType] = [table]
        if len(self) > SHOWN_ROWS:
            parts.append(rich.text.Text(f"… {len(self) - SHOWN_ROWS:,} more rows"))
        if self.caption:
            parts.append(rich.text.Text(self.caption, style="italic dim"))
        return rich.console.Group(*parts)

    def __repr__(self) -> str:
        text = io.StringIO()
        console = rich.console.Console(file=text, width=100, color_system=None, soft_wrap=False)
        # names of columns are read in full: a little wider, if need be
        shown = self.__rich__()
        natural = console.measure(shown.renderables[0], options=console.options.update(width=160))
        console.width = max(100, natural.maximum)
        console.print(shown)
        lines = (line.rstrip() for line in text.getvalue().splitlines())
        return "\n".join(line for line in lines if line)

    def _repr_html_(self) -> str:
        head = "".join(f"<th>{html.escape(name)}</th>" for name in self._columns)
        shown = [_as_text(values[:SHOWN_ROWS]) for values in self._columns.values()]
        body = "".join(
            "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>"
            for row in zip(*shown, strict=True)
        )
        more = f"… {len(self) - SHOWN_ROWS:,} more rows. " if len(self) > SHOWN_ROWS else ""
        caption = html.escape(more + self.caption)
        return (
            f'<table class="dualform"><caption style="caption-side:bottom">{caption}</caption>'
            f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
        )

    def _iterate(self) -> Iterator[dict[str, Any]]:
        plain = [values.tolist() for values in self._columns.values()]
        for row in zip(*plain, strict=True):
            yield dict(zip(self._columns, row, strict=True))


def beside(name: str, own: Collection[str]) -> str:
    """What a tag is called in a table that has columns of its `own`: a tag never hides a result."""
    return f"{name} (tag)" if name in own else name


def _as_column(values: ArrayLike) -> NDArray[Any]:
    column = np.asarray(values)
    if column.dtype.kind not in "biuf":  # strings and mixtures: keep what was given, unpadded
        column = np.array(list(np.asarray(values, dtype=object)), dtype=object)
    if column.ndim != 1:
        raise ValueError(f"a column of a table must be one-dimensional, got shape {column.shape}")
    return column


def _as_text(values: NDArray[Any]) -> list[str]:
    """One column's cells: integers plain, reals with four significant digits or fixed point."""
    if values.dtype.kind == "f":
        return [_real(float(value)) for value in values]
    return ["" if value is None else str(value) for value in values.tolist()]


def _real(value: float) -> str:
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    return f"{value:.4g}" if 1e-4 <= abs(value) < 1e6 else f"{value:.2e}"


def _json_value(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if isinstance(value, (bool, int, float, str, type(None))) else str(value)


def _missing(package: str) -> DualFormError:
    return DualFormError(
        f"this table cannot be converted: {package} is not installed. "
        'Install it with: pip install "dualform[tables]"'
    )
