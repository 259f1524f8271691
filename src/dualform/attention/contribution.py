"""What each pattern wrote into one output: its value, in the output's own units, adding up.

A layer's output along a direction g is  g·(W q + b)  =  initial part  +  Σ_t c_t (x_t·q)(δ_t·g)
(+ the bias's own c_t δ_t·g). For the layer that produces the model's output, g picks a logit and
the parts add up to that logit. For a layer further down, g = d(target)/d(layer output): the parts
add up to g·(that layer's output) exactly, and stand for the effect on the target to first order.

It is an accounting of the recorded run, exact and complete. It is not a counterfactual: it does not
say what training without a pattern would have given.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dualform.attention import engine, grouping, ranking, weights, written
from dualform.attention.spotlight import check_absolute, check_k, pattern_columns
from dualform.attention.view import View, shared_rows
from dualform.layers import kinds
from dualform.memory import LayerMemory, Patterns
from dualform.table import Table, beside

UNEXPLAINED = "not explained by patterns"
"""The share of the remainder: what neither patterns nor the initial state account for."""

OWN = frozenset({"from", "to", "contribution", "absolute", "patterns"})
"""Columns of tables of sums that are no column of the patterns."""


@dataclass(frozen=True)
class Target:
    """Which number is being split up: its name, unit, and whether the split is first order."""

    name: str
    first_order: bool

    def caption(self, layer: str) -> str:
        if self.first_order:
            return (
                f"contributions through layer {layer} to {self.name}, to first order: they add up "
                "to gradient · layer output; positive raises it, in its units"
            )
        return f"contributions to {self.name}: positive raises it, in its units; they add up to it"


class Contribution:
    """What every pattern wrote into one output; with the initial shares it adds up to that output.

    Positive raises the target, in the target's own units (logits, usually). `values` [T] is one
    number per pattern, `shares` what the initial weights, biases and momentum account for, `total`
    their sum, `primal` the same output computed by the network, `residual` = total − primal.

    Example:
        >>> contribution = dual.contribute(images[:1], target=7)         # doctest: +SKIP
        >>> contribution.top(3), contribution.sum_by("label")            # doctest: +SKIP
        >>> contribution.total - contribution.primal    # rounding only  # doctest: +SKIP
    """

    def __init__(
        self,
        layer: LayerMemory,
        target: Target,
        values: Tensor,
        attention: NDArray[np.float64],
        included: NDArray[np.bool_],
        shares: dict[str, float],
        primal: float,
    ) -> None:
        self.layer = layer.name
        self.target = target.name
        self.first_order = target.first_order
        self.values = values
        self.primal = primal
        self.caption = target.caption(layer.name)
        self._attention = attention
        self._included = included
        self._shares = shares
        self._patterns = layer.patterns
        self._numbers: engine.Reals = values.detach().cpu().numpy()

    @property
    def patterns(self) -> Patterns:
        """The columns (step, example, label, …) of the layer's patterns."""
        return self._patterns

    @property
    def shares(self) -> dict[str, float]:
        """Signed parts of the target that add up to `total`: initial weights, …, patterns."""
        shares = {**self._shares, "patterns": float(self._numbers.sum())}
        left = {UNEXPLAINED: shares.pop(UNEXPLAINED)} if UNEXPLAINED in shares else {}
        return shares | left

    @property
    def total(self) -> float:
        """All parts added up: the output by the dual form, in the target's units."""
        return float(sum(self.shares.values()))

    @property
    def residual(self) -> float:
        """total − primal: rounding only, if the memory explains the network."""
        return self.total - self.primal

    def top(self, k: int = 10, sign: str = "most", by: str | Sequence[str] | None = None) -> Table:
        """The k patterns that wrote most; with `by`, the top k of every value of a column.

        `by=["task", "label"]`: of every combination of values of several columns.

        `sign="most"`: most raising first, `"least"`: most lowering, `"absolute"`: largest either
        way. Ties: the earlier pattern first. Signed, in the target's units.

        Example:
            >>> contribution.top(5, sign="least")                        # doctest: +SKIP
        """
        k, rows = check_k(k), np.flatnonzero(self._included)
        members: list[NDArray[np.int64]] = [rows]
        names = [] if by is None else grouping.named((by,), self._patterns)
        if by is not None:
            cells = grouping.cells(self._patterns, names)
            members = [some[self._included[some]] for some in cells.members]
        best = [some[ranking.top_of(self._numbers[some], k, sign)] for some in members]
        rows = np.concatenate([np.zeros(0, np.int64), *best])
        columns: dict[str, Any] = {
            "rank": np.concatenate([np.arange(1, len(some) + 1) for some in [rows[:0], *best]]),
            "pattern": rows,
            "contribution": self._numbers[rows],
            "attention": self._attention[rows],
        }
        per = "" if by is None else f"; the top per {' and '.join(names)}"
        return Table(columns | pattern_columns(self._patterns, rows, columns), self.caption + per)

    def sum_by(self, *columns: str | Sequence[str]) -> Table:
        """Contributions summed over the patterns of each value of a column, or of several together.

        `contribution` is the signed sum, in the target's units; `absolute` sums absolute values
        (how much of it cancels); `patterns` counts.

        Example:
            >>> contribution.sum_by("label")["contribution"]             # doctest: +SKIP
        """
        names = grouping.named(columns, self._patterns)
        cells = grouping.cells(self._patterns, names)
        table: dict[str, Any] = {beside(n, OWN): cells.column(i) for i, n in enumerate(names)}
        table |= self._sums(cells.codes, len(cells.values))
        return Table(table, f"{self.caption}; summed by {' and '.join(names)}")

    def over(self, column: str = "step", bins: int = 20, by: str | None = None) -> Table:
        """Contributions summed over equal ranges of a numeric column, such as the step.

        Ranges run from `from` up to, not including, `to`; with `by`, one line per range and group.
        Signed sums and sums of absolute values, in the target's units.

        Example:
            >>> contribution.over("step", bins=10, by="task")            # doctest: +SKIP
        """
        edges, bin_of = grouping.bins(self._patterns, column, bins, self._included)
        cells = grouping.cells(self._patterns, () if by is None else (by,))
        values, ranges = cells.column(0) if by is not None else [None], len(edges) - 1
        table: dict[str, Any] = {
            "from": np.repeat(edges[:-1], len(values)),
            "to": np.repeat(edges[1:], len(values)),
        }
        if by is not None:
            table[beside(by, OWN)] = values * ranges
        table |= self._sums(bin_of * len(values) + cells.codes, ranges * len(values))
        return Table(table, f"{self.caption}; over {column}")

    def by_example(self, column: str = "example", *, absolute: str = "before") -> Table:
        """Contributions per training example, all its visits added, most raising first.

        `absolute="before"` adds the absolute values of its visits (how much of it cancels),
        `"after"` takes the absolute value of their sum. In the target's units.

        Example:
            >>> contribution.by_example()["example"][:3]                 # doctest: +SKIP
        """
        cells = grouping.cells(self._patterns, (column,))
        sums = self._sums(cells.codes, len(cells.values))
        if check_absolute(absolute) == "after":
            sums["absolute"] = np.abs(sums["contribution"])
        order = ranking.top_of(sums["contribution"], len(cells.values), "most")
        order = order[sums["patterns"][order] > 0]  # masked out, or later than this view
        table: dict[str, Any] = {beside(column, OWN): cells.listed[order]}
        table |= {name: values[order] for name, values in sums.items()}
        return Table(table, f"{self.caption}; summed by {column}")

    def _sums(self, codes: NDArray[np.int64], groups: int) -> dict[str, NDArray[Any]]:
        """Signed and absolute sums and counts of every group."""
        rows = np.flatnonzero(self._included)
        inside, numbers = codes[rows], self._numbers[rows]
        return {
            "contribution": np.bincount(inside, numbers, groups),
            "absolute": np.bincount(inside, np.abs(numbers), groups),
            "patterns": np.bincount(inside, minlength=groups),
        }

    def to_dict(self) -> dict[str, Any]:
        """Shares, total, primal and residual, fit for `json.dumps`."""
        return {
            "layer": self.layer,
            "target": self.target,
            "first_order": self.first_order,
            "shares": self.shares,
            "total": self.total,
            "primal": self.primal,
            "residual": self.residual,
        }

    def __repr__(self) -> str:
        lines = [f"  {name:<28}{value:>+14.6g}" for name, value in self.shares.items()]
        lines.append(f"  {'total (dual form)':<28}{self.total:>+14.6g}")
        lines.append(f"  {'the network (primal form)':<28}{self.primal:>+14.6g}")
        lines.append(f"  {'residual':<28}{self.residual:>+14.2g}")
        head = f"Contribution to {self.target}, layer {self.layer}"
        return "\n".join([head, *lines, repr(self.top(5))])


class Asked(NamedTuple):
    """What one input asks of a layer: its queries [n, d_in], and directions g [n, d_out].

    `along` says the same of its weight and bias, by role: Σ g qᵀ and Σ g. Of layers kept by
    examples that is all there is, and `queries` are empty.
    """

    queries: Tensor
    directions: Tensor
    along: Mapping[str, Tensor]


def asked(layer: LayerMemory, queries: Tensor, directions: Tensor) -> Asked:
    """What queries and directions ask of a layer that has keys."""
    queries, directions = (t.detach().to("cpu", torch.float64) for t in (queries, directions))
    kind = kinds.of(layer.kind)
    outer = torch.zeros(layer.shape, dtype=torch.float64)
    along = {"weight": kind.write(outer, queries, directions), "bias": directions.sum(0)}
    return Asked(queries, directions, along)


def asked_by_examples(layer: LayerMemory, given: Tensor, slopes: Tensor) -> Asked:
    """What an input as the layer is given it, and d(target)/d(its output), ask of a layer whose
    kind has no keys."""
    given, slopes = (t.detach().to("cpu", torch.float64) for t in (given, slopes))
    wrote = kinds.of(layer.kind).examples(layer.layer, given, slopes)
    along = {role: wrote[role].sum(0) for role in ("weight", "bias")}
    return Asked(torch.empty(0, 0).double(), slopes, along)


def contribution(
    view: View, layer: LayerMemory, ask: Asked, target: Target, primal: float | None = None
) -> Contribution:
    """Split g·(W q + b), summed over the queries, into patterns and what no pattern wrote.

    `primal` is what the network gives; by default what this view's weights give.
    """
    if layer.keep == "keys":
        layer.need_error_signals("a contribution")
    view.need_reach(layer)
    values, attention = np.zeros(layer.rows), np.zeros(layer.rows)
    is_whole = layer.has_error_signals and len(ask.queries) > 0
    factors: dict[str, engine.Reals] = {}
    for role, parameter in _parameters(layer):
        scales = view.scales(layer, parameter)
        if scales is None:
            continue
        numbers, way = scales
        if way is None and is_whole:
            factors[role] = numbers
        else:
            values += written.along(layer, parameter, ask.along[role], numbers, way)
    if is_whole:
        own, attention = _written_by_patterns(
            layer, ask.queries, ask.directions, factors.get("weight"), factors.get("bias")
        )
        values += own
    if primal is None:
        primal = sum(
            float((view.weights[parameter].double()[layer.rows_of(parameter)] * h).sum())
            for role, parameter in _parameters(layer)
            for h in [ask.along[role]]
        )
    included = view.row_weights(layer) != 0
    shares = _shares(view, layer, ask)
    return Contribution(
        layer, target, torch.from_numpy(values), attention, included, shares, primal
    )


def _parameters(layer: LayerMemory) -> list[tuple[str, str]]:
    """The layer's parameters with the role each plays."""
    pairs = [("weight", layer.weight), ("bias", layer.bias)]
    return [(role, name) for role, name in pairs if name is not None]


def _written_by_patterns(
    layer: LayerMemory,
    queries: Tensor,
    directions: Tensor,
    weight: engine.Reals | None,
    bias: engine.Reals | None,
) -> tuple[engine.Reals, engine.Reals]:
    """What each pattern wrote along g, and its attention, summed over the query rows: [T] each.

    Σ_i weight_t (x_t·q_i)(δ_t·g_i) + bias_t (δ_t·g_i); queries [n, d_in], directions [n, d_out].
    """
    found, attention = np.zeros(layer.rows), np.zeros(layer.rows)
    if weights.are_few(layer, queries):
        alpha = weights.all_weights(layer, queries)
        along = weights.all_weights(layer, directions, of="error_signals")
        attention = alpha.sum(0)
        if weight is not None:
            found += weight * (alpha * along).sum(0)
        return (found if bias is None else found + bias * along.sum(0)), attention
    for part in engine.scan(layer):
        for low in range(0, len(queries), ranking.QUERIES_AT_ONCE):
            here = slice(low, low + ranking.QUERIES_AT_ONCE)
            slopes = directions[here] @ part.error_signals.T
            looked = engine.products(layer, queries[here], part.keys)
            attention[part.rows] += looked.sum(0).numpy()
            if weight is not None:
                found[part.rows] += weight[part.rows] * (looked * slopes).sum(0).numpy()
            if bias is not None:
                found[part.rows] += bias[part.rows] * slopes.sum(0).numpy()
    return found, attention


def _shares(view: View, layer: LayerMemory, ask: Asked) -> dict[str, float]:
    """What no pattern of this layer wrote: initial state, remainder, layers that share weights."""
    shares: dict[str, float] = {}

    def add(name: str, tensor: Tensor | None, along: Tensor) -> None:
        if tensor is not None:
            shares[name] = shares.get(name, 0.0) + float((tensor * along).sum())

    for role, parameter in _parameters(layer):
        own, along = layer.rows_of(parameter), ask.along[role]
        if not view.reach(parameter):
            add(f"{role}, kept as values", view.base(parameter)[own], along)
            continue
        initial, momentum, remainder = view.parts(parameter)
        add("initial weights" if role == "weight" else "initial bias", initial[own], along)
        add("initial momentum", None if momentum is None else momentum[own], along)
        add(UNEXPLAINED, remainder[own], along)
        for writer in view.writers(parameter):
            if writer.name != layer.name:
                theirs, here = shared_rows(writer, layer, parameter)
                if theirs.start < theirs.stop:  # else other rows of a packed parameter
                    wrote = view.written(writer, parameter)[theirs]
                    add(f"{role} written by {writer.name}", wrote, along[here])
    return shares
