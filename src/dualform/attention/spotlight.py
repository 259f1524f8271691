"""What a layer looks at: the attention weights of some queries over every training pattern.

α_t = x_t · q, unnormalised and signed, in units of key times query: large and positive where the
training pattern looked to this layer like the query does, negative where it looked opposite. The
weight says nothing about what the pattern *taught*: for that, ask for the contribution.

All weights at once are n × T numbers, far more than most questions need. A few queries have their
weights computed once, up to 64 MB of them, and every question is answered from there. Beyond that,
only `Spotlight.weights` holds them; everything else streams.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dualform.attention import buckets, engine, grouping, ranking
from dualform.attention.group_sums import Build, group_sums, sums_of_held
from dualform.attention.weights import all_weights, are_few, check_size
from dualform.errors import QueryError
from dualform.memory import LayerMemory, Patterns
from dualform.table import Table, beside

UNIT = "α = key · query: unnormalised, signed; positive = alike, in units of key × query"

OWN = frozenset({"query", "from", "to", "sum", "absolute", "patterns"})
"""Columns of tables of sums that are no column of the patterns."""


class Spotlight:
    """The attention of one or more queries, in one layer, over all patterns.

    Weights are `key · query`: unnormalised and signed, positive where a training pattern looked to
    this layer as the query does. In a view, patterns that are masked out, or later than its step,
    are not attended to.

    Example:
        >>> spotlight = dual.attend(images[:1])["fc1"]                 # doctest: +SKIP
        >>> spotlight.top(3)["weight"]          # most alike first      # doctest: +SKIP
        >>> spotlight.sum_by("label")           # signed and absolute   # doctest: +SKIP
    """

    def __init__(
        self,
        layer: LayerMemory,
        queries: Tensor,
        included: NDArray[np.bool_] | None = None,
    ) -> None:
        self.layer = layer.name
        self.queries = queries
        self._memory = layer
        self._asked = queries.detach().cpu()
        self._included = None if included is None or included.all() else included

    @property
    def rows(self) -> NDArray[np.int64]:
        """The patterns attended to, as row numbers of the layer: all of them, unless masked."""
        if self._included is None:
            return np.arange(self._memory.rows)
        return np.flatnonzero(self._included)

    @property
    def patterns(self) -> Patterns:
        """The columns (step, example, label, …) of the layer's patterns."""
        return self._memory.patterns

    @property
    def weights(self) -> Tensor:
        """All attention weights at once, float64 [n, T]: the only thing here that holds them all.

        Signed, in units of key × query; columns follow `rows`.
        """
        parts = [
            alpha
            for _, alpha in engine.attention_blocks(self._memory, self._queries, self._included)
        ]
        empty = torch.zeros(len(self._queries), 0, dtype=torch.float64)
        return torch.cat(parts or [empty], dim=1).to(self.queries.device)

    def top(self, k: int = 10, by: str | Sequence[str] | None = None, sign: str = "most") -> Table:
        """The k patterns attended to most, per query; with `by`, the top k of every group.

        A group is a value of a column, or of several together: `by=["task", "label"]`.

        `sign="most"`: most positive first; `"least"`: most negative first; `"absolute"`: largest
        either way. Ties: the earlier pattern first. Weights are signed, in units of key × query.

        Example:
            >>> spotlight.top(500, by="label")                          # doctest: +SKIP
        """
        k = check_k(k)
        names = [] if by is None else grouping.named((by,), self.patterns)
        cells = None if by is None else grouping.cells(self.patterns, names)
        found = ranking.top_patterns(
            self._memory,
            self._queries,
            self._included,
            k,
            sign,
            cells,
            held=self._held if are_few(self._memory, self._asked) else None,
        )
        columns: dict[str, Any] = self._query_column(found.query)
        columns |= {"rank": found.rank + 1, "pattern": found.row, "weight": found.weight}
        columns |= pattern_columns(self.patterns, found.row, columns)
        which = {"most": "most positive", "least": "most negative", "absolute": "largest"}[sign]
        per = "" if by is None else f" per {' and '.join(names)}"
        return Table(columns, f"layer {self.layer}: {which} attention{per}. {UNIT}")

    def sum_by(self, *columns: str | Sequence[str]) -> Table:
        """Attention summed over all patterns of each value of a column, or of several together.

        `sum` adds the signed weights, `absolute` their absolute values (the paper's choice), both
        in units of key × query; `patterns` counts.

        Example:
            >>> spotlight.sum_by("label")["sum"]                        # doctest: +SKIP
            >>> spotlight.sum_by("task", "label")                       # doctest: +SKIP
        """
        names = grouping.named(columns, self.patterns)
        cells = grouping.cells(self.patterns, names)
        sums = self._sums(cells)
        n = len(self._asked)
        table: dict[str, Any] = self._query_column(np.repeat(np.arange(n), len(cells.values)))
        for i, name in enumerate(names):
            table[beside(name, OWN)] = cells.column(i) * n
        named = " and ".join(names)
        return Table(table | sums, f"layer {self.layer}: attention summed by {named}. {UNIT}")

    def by_example(self, column: str = "example", *, absolute: str = "before") -> Table:
        """Attention to each training example: all its visits together, the strongest first.

        `sum` adds the signed weights of its visits. `absolute="before"` adds their absolute values,
        `"after"` takes the absolute value of the sum; the largest `absolute` comes first, ties: the
        smaller id first. Units of key × query; `patterns` counts visits (and positions).

        Example:
            >>> spotlight.by_example()["example"][:3]                   # doctest: +SKIP
        """
        check_absolute(absolute)
        cells = grouping.cells(self.patterns, (column,))
        sums = self._sums(cells)
        n = len(self._asked)
        query = np.repeat(np.arange(n), len(cells.values))
        if absolute == "after":
            sums["absolute"] = np.abs(sums["sum"])
        strongest = -sums["absolute"].reshape(n, len(cells.values))
        ordered = np.argsort(strongest, axis=1, kind="stable")
        ordered = (ordered + len(cells.values) * np.arange(n)[:, None]).reshape(-1)
        ordered = ordered[sums["patterns"][ordered] > 0]  # masked out, or later than this view
        listed = cells.listed[np.tile(np.arange(len(cells.values)), n)[ordered]]
        table: dict[str, Any] = self._query_column(query[ordered])
        table[beside(column, OWN)] = listed
        table |= {name: of[ordered] for name, of in sums.items()}
        what = {"before": "absolute: Σ|α|", "after": "absolute: |Σα|"}[absolute]
        return Table(table, f"layer {self.layer}: attention by {column}; {what}. {UNIT}")

    @property
    def effective(self) -> NDArray[np.float64]:
        """How many patterns the attention is spread over, per query: (Σ|α|)² / Σα².

        1 if a single pattern has it all, T if all have the same; 0 where there is none. No unit.

        Example:
            >>> spotlight.effective                                     # doctest: +SKIP
        """
        n = len(self._asked)
        absolute, squares = np.zeros(n), np.zeros(n)
        if are_few(self._memory, self._asked):
            # a power of two changes no digit, and keeps squares from running over or under
            size = np.abs(self._held).max(1, initial=0.0, keepdims=True)
            scaled = np.abs(np.ldexp(self._held, -np.frexp(size)[1]))
            absolute, squares = scaled.sum(1), np.square(scaled).sum(1)
        else:
            asked = self._queries
            if not engine.looks_up(self._memory):
                size = asked.abs().amax(1, keepdim=True)
                asked = torch.ldexp(asked, -torch.frexp(size).exponent)
            for part in engine.scan(self._memory, self._included, error_signals=False):
                for low in range(0, n, ranking.QUERIES_AT_ONCE):
                    here = slice(low, low + ranking.QUERIES_AT_ONCE)
                    alpha = engine.products(self._memory, asked[here], part.keys)
                    absolute[here] += alpha.abs().sum(1).numpy()
                    squares[here] += alpha.square_().sum(1).numpy()
        return np.divide(absolute**2, squares, out=np.zeros_like(squares), where=squares > 0)

    def over(self, column: str = "step", bins: int = 20, by: str | None = None) -> Table:
        """Attention summed over equal ranges of a numeric column, such as the step: a timeline.

        Ranges run from `from` up to, not including, `to`; with `by`, one line per range and group.
        `sum` is signed, `absolute` sums |α|, both in units of key × query.

        Example:
            >>> spotlight.over("step", bins=10, by="task")              # doctest: +SKIP
        """
        edges, bin_of = grouping.bins(self.patterns, column, bins, self._included)
        cells = grouping.cells(self.patterns, () if by is None else (by,))
        values, ranges = cells.column(0) if by is not None else [None], len(edges) - 1
        count, n = ranges * len(values), len(self._asked)
        columns: dict[str, Any] = self._query_column(np.repeat(np.arange(n), count))
        columns["from"] = np.tile(np.repeat(edges[:-1], len(values)), n)
        columns["to"] = np.tile(np.repeat(edges[1:], len(values)), n)
        if by is not None:
            columns[beside(by, OWN)] = values * (ranges * n)
        build: Build | None = None
        if column == "step" and buckets.are_worth_having(self._memory, ranges, len(values)):
            where = self._memory, self._included, bin_of, ranges, cells.codes, len(values)
            build = partial(buckets.from_buckets, *where)
        codes = bin_of if by is None else bin_of * len(values) + cells.codes
        columns |= self._sums(grouping.Cells([()] * count, codes), build)
        return Table(columns, f"layer {self.layer}: attention over {column}. {UNIT}")

    def __repr__(self) -> str:
        n = len(self._asked)
        head = (
            f"Spotlight of layer {self.layer}: {n:,} {'query' if n == 1 else 'queries'} over "
            f"{len(self.rows):,} patterns"
        )
        return f"{head}\n{self.top(5)}" if n <= 4 else f"{head}; .top(k) lists the strongest"

    def _query_column(self, queries: Any) -> dict[str, Any]:
        return {} if len(self._asked) == 1 else {"query": np.asarray(queries, dtype=np.int64)}

    def _sums(self, cells: grouping.Cells, build: Build | None = None) -> dict[str, NDArray[Any]]:
        """Signed and absolute sums and counts of every group, query after query."""
        codes, groups = cells.codes, len(cells.values)
        if are_few(self._memory, self._asked):
            signed, absolute = sums_of_held(self._held, self._included, codes, groups)
        else:
            signed, absolute = group_sums(
                self._memory, self._asked, self._included, codes, groups, build
            )
            check_size(self._memory, absolute.numpy())
        counts = cells.counts
        if self._included is not None:
            counts = np.bincount(codes[self._included], minlength=groups)
        return {
            "sum": signed.reshape(-1).numpy(),
            "absolute": absolute.reshape(-1).numpy(),
            "patterns": np.tile(counts, len(self._asked)),
        }

    @cached_property
    def _queries(self) -> Tensor:
        """The queries in float64, [n, d_in]."""
        return self._asked.double()

    @cached_property
    def _held(self) -> engine.Reals:
        """All weights of a few queries, [n, T]; zero where a pattern is not attended to."""
        return all_weights(self._memory, self._queries, self._included)


class Attention(Mapping[str, Spotlight]):
    """The spotlights of some queries, layer by layer: `attention["fc1"]`.

    Example:
        >>> attention = dual.attend(images[:1])                         # doctest: +SKIP
        >>> {name: spotlight.top(1) for name, spotlight in attention.items()}  # doctest: +SKIP
    """

    def __init__(self, spotlights: Mapping[str, Spotlight]) -> None:
        self._spotlights = dict(spotlights)

    def __getitem__(self, layer: str) -> Spotlight:
        try:
            return self._spotlights[layer]
        except KeyError:
            have = ", ".join(self._spotlights)
            raise QueryError(f"no layer {layer!r} in this attention; it has: {have}") from None

    def __contains__(self, layer: object) -> bool:
        return layer in self._spotlights

    def __iter__(self) -> Iterator[str]:
        return iter(self._spotlights)

    def __len__(self) -> int:
        return len(self._spotlights)

    def __repr__(self) -> str:
        lines = [
            f"  {name}: {len(spot.queries):,} × {spot.queries.shape[-1]} queries over "
            f"{len(spot.rows):,} patterns"
            for name, spot in self._spotlights.items()
        ]
        return "\n".join(["Attention, layer by layer:", *lines])


def check_absolute(absolute: str) -> str:
    """Whether absolute values are taken before or after summing, and nothing else."""
    if absolute not in ("before", "after"):
        raise QueryError(f'absolute={absolute!r}; expected "before" or "after" summing')
    return absolute


def check_k(k: int) -> int:
    """How many to list, as a positive whole number."""
    if not is_whole(k) or k < 1:
        raise QueryError(f"k={k!r}: expected a whole number of at least 1")
    return int(k)


def is_whole(number: Any) -> bool:
    """Whether something is a whole number (True and False are not)."""
    return isinstance(number, (int, np.integer)) and not isinstance(number, bool)


def pattern_columns(
    patterns: Patterns, rows: NDArray[np.int64], own: Collection[str]
) -> dict[str, NDArray[Any]]:
    """Every column that says something about some patterns, for a table with its `own` columns."""
    columns = {beside(name, own): patterns.take(name, rows) for name in patterns.names}
    return {name: values for name, values in columns.items() if _says_something(values)}


def _says_something(values: NDArray[Any]) -> bool:
    missing = [v is None for v in values.tolist()] if values.dtype == object else []
    return not (missing and all(missing))
