"""The mask the paper says does not exist in practice: each input chooses how much training to use.

A network trained on one task after another forgets the earlier ones: later patterns overwrite what
they wrote. Masking the later phase brings the earlier task back, but only if one knows which task
an input belongs to. The keys of the first layer tell: an input is most like the keys of its own
task. So per input, the phase whose keys are most like it is found (mean of the k largest cosines),
and what *later* phases wrote is left out. Earlier phases always stay: later ones built on them.

It is a mask like any other: the patterns that stay keep what they wrote. It is not retraining.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dualform.attention import grouping, ranking, weights
from dualform.attention.queries import queries_of
from dualform.errors import QueryError
from dualform.table import Table, beside

if TYPE_CHECKING:
    from dualform.attention.dual_form import DualForm


class Routed:
    """A network that leaves out, input by input, what was learned after the phase it is like.

    Example:
        >>> routed = dual.routed(by="task")                               # doctest: +SKIP
        >>> routed(images)               # outputs, in the model's units  # doctest: +SKIP
        >>> routed.routes(images)        # which phase each input is like # doctest: +SKIP
    """

    def __init__(self, dual: DualForm, by: str, layer: str | None, k: int) -> None:
        memory = dual.memory
        self.by, self.k = by, k
        if not memory.layers:
            raise QueryError(f"{memory.path} holds no patterns, so there is nothing to route by")
        self.layer = layer if layer is not None else memory.layers[0]
        self._dual, self._view = dual, dual._view
        self._memory = memory.layer(self.layer)
        patterns = self._memory.patterns
        cells = grouping.cells(patterns, (by,))
        self._included = self._view.row_weights(self._memory) != 0
        seen = np.flatnonzero(self._included)
        codes, first = np.unique(cells.codes[seen], return_index=True)
        order = codes[np.argsort(patterns["step"][seen][first], kind="stable")]
        self.phases: tuple[Any, ...] = tuple(cells.values[code][0] for code in order)
        if not self.phases:
            raise QueryError(
                f"layer {self.layer!r} has no pattern in this view, so there is no {by!r} to route "
                "by; ask a later step, or mask less"
            )
        if None in self.phases:
            raise QueryError(
                f"some patterns of layer {self.layer!r} have no {by!r}: which phase they belong to "
                "is not known. Tag every batch, or route by another column"
            )
        place = np.full(len(cells.values), len(order), np.int64)
        place[order] = np.arange(len(order))
        of_pattern = place[cells.codes]
        self._included &= of_pattern < len(order)
        in_order = [(phase,) for phase in self.phases]
        self._phases = grouping.Cells(in_order, np.minimum(of_pattern, len(order) - 1))
        self._views = [self._without(self.phases[i + 1 :]) for i in range(len(self.phases))]

    def _without(self, later: tuple[Any, ...]) -> DualForm:
        condition: dict[str, Any] = {self.by: list(later)}
        return self._dual.without(**condition) if later else self._dual

    def __call__(self, *inputs: Any, **kwargs: Any) -> Tensor:
        """The outputs, each input's by the view of its own phase, in the model's units."""
        preferred, _ = self._preferred(inputs, kwargs)
        output: Tensor | None = None
        for phase in np.unique(preferred):
            given = self._views[phase](*inputs, **kwargs)
            if not isinstance(given, Tensor) or len(given) != len(preferred):
                raise QueryError(
                    f"routing goes input by input, but {len(preferred)} inputs gave "
                    f"{getattr(given, 'shape', type(given).__name__)}: the first dimension of the "
                    "model's output must be that of its input"
                )
            output = torch.empty_like(given) if output is None else output
            chosen = torch.from_numpy(np.flatnonzero(preferred == phase)).to(given.device)
            output[chosen] = given[chosen]
        if output is None:
            raise QueryError("routing needs at least one input")
        return output

    def view(self, *inputs: Any, **kwargs: Any) -> DualForm:
        """The view that answers these inputs, which have to be like one and the same phase.

        Example:
            >>> routed.view(images[:1]).attend(images[:1])                 # doctest: +SKIP
        """
        preferred = np.unique(self._preferred(inputs, kwargs)[0])
        if len(preferred) != 1:
            phases = ", ".join(repr(self.phases[i]) for i in preferred)
            raise QueryError(
                f"these inputs are like different phases ({phases or 'none'}), and each has a view "
                "of its own; ask with one input at a time"
            )
        view: DualForm = self._views[preferred[0]]
        return view

    def routes(self, *inputs: Any, **kwargs: Any) -> Table:
        """Which phase each input is like: mean of the largest cosines per phase, from −1 to 1."""
        preferred, means = self._preferred(inputs, kwargs)
        table: dict[str, Any] = {"input": np.arange(len(preferred))}
        table[beside(self.by, table)] = [self.phases[i] for i in preferred]
        table |= {f"cosine {name}": means[:, i] for i, name in enumerate(self.phases)}
        return Table(
            table,
            f"layer {self.layer}: mean of the {self.k} largest cosines with the keys of each "
            f"{self.by}; what later ones wrote is left out",
        )

    def __repr__(self) -> str:
        phases = " → ".join(map(str, self.phases))
        return (
            f"Routed by {self.by} ({phases}) in layer {self.layer}: each input is answered without "
            "what was learned after the phase it is most like; it is not retraining"
        )

    def _preferred(
        self, inputs: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """The phase of every input, and the mean cosines [n, phases]; ties: the earlier phase."""
        model = self._dual._model("routing inputs")
        found = queries_of(model, self._view, inputs, kwargs, [self.layer])[self.layer]
        count = len(next(v for v in [*inputs, *kwargs.values()] if isinstance(v, Tensor)))
        if not count or len(found) % count:
            raise QueryError(
                f"layer {self.layer!r} receives {len(found)} queries for {count} inputs: they "
                "cannot be told apart; route by a layer that sees each input alike (layer=...)"
            )
        cosines = self.cosines(found.detach().to("cpu", torch.float64))
        means = cosines.reshape(count, -1, len(self.phases)).mean(1)
        return means.argmax(1), means

    def cosines(self, queries: Tensor) -> NDArray[np.float64]:
        """Mean of the k largest cosines of each query with the keys of each phase: [n, phases]."""
        size = weights.norms(self._memory)
        scales = np.divide(1.0, size, out=np.zeros_like(size), where=size > 0)
        length = queries.norm(dim=1, keepdim=True)
        directions = torch.where(length > 0, queries / length, 0.0)
        if self._memory.kind == "embedding":
            directions = queries  # a token's key is a single 1
        best = ranking.top_patterns(
            self._memory,
            directions,
            self._included,
            self.k,
            "most",
            self._phases,
            scales=scales,
        )
        cell = best.query * len(self.phases) + best.group
        count = len(queries) * len(self.phases)
        total = np.bincount(cell, best.weight, count)
        listed = np.bincount(cell, minlength=count)
        means = np.divide(total, listed, out=np.full(count, -np.inf), where=listed > 0)
        shaped: NDArray[np.float64] = means.reshape(len(queries), len(self.phases))
        return shaped
