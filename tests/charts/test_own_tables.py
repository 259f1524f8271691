"""Tables of one's own: what cannot be drawn is refused, in words."""

from __future__ import annotations

from typing import Any

import pytest

from dualform import charts
from dualform.errors import QueryError
from dualform.table import Table

OWN: dict[str, list[Any]] = {"label": [0, 1], "patterns": [3, 4]}


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), "many", None])
def test_a_number_that_cannot_be_drawn_is_refused(bad: Any) -> None:
    with pytest.raises(QueryError, match=r"'absolute' holds .*; expected finite numbers"):
        charts.totals_per_class(Table({**OWN, "absolute": [2.0, bad]}))
    with pytest.raises(QueryError, match=r"'weight' holds .*; expected finite numbers"):
        charts.top_per_class(Table({**OWN, "weight": [2.0, bad]}))


def test_a_column_that_is_missing_is_named_with_those_there_are() -> None:
    with pytest.raises(QueryError, match=r"no column 'absolute' .it has label, patterns"):
        charts.totals_per_class(Table(OWN))
    with pytest.raises(QueryError, match=r"no column 'weight'"):
        charts.top_per_class(Table(OWN))
