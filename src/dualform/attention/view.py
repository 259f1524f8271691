"""One network out of a recorded run, as numbers: the run at some step, under some masks.

Every parameter is a *base* (what no pattern accounts for: a W_0 + h m_0, what unrecorded steps
wrote, or all of it where the parameter has no pattern resolution) plus the sum over the patterns
that wrote into it. This file says which base, which patterns and with which coefficients;
`engine.py` does the summing.

Why it is hard: weight and bias of one layer follow different rules, several layers may share one
parameter, and some parameters were only accounted for step by step. All of that ends here.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dualform.attention import engine, grouping, preconditioned
from dualform.attention.averaging import Averaging
from dualform.attention.group_matrices import are_worth_having, columns_of, group_matrices
from dualform.attention.masks import Mask, row_weights
from dualform.attention.rounding import as_computed
from dualform.attention.tables import kept
from dualform.errors import QueryError
from dualform.layers.kinds import multiply
from dualform.learning_rules import Coefficients, ParameterLog, coefficients
from dualform.memory import LayerMemory, Memory


class View:
    """A recorded network after `at` updates, with masks."""

    def __init__(
        self,
        memory: Memory,
        at: int,
        masks: tuple[Mask, ...] = (),
        averaging: Averaging | None = None,
    ) -> None:
        self.memory = memory
        self.at = at
        self.masks = masks
        self.averaging = averaging
        self.average = None if averaging is None else averaging.weights(at)
        self._coefficients: dict[str, Coefficients] = {}
        self._row_weights: dict[str, engine.Reals] = {}
        self._weights: dict[str, Tensor] | None = None
        self._initial: dict[str, preconditioned.Initial] = {}

    def is_adaptive(self, parameter: str) -> bool:
        """Whether Adam or one of its relatives trained it: its coefficients are no scalars."""
        known = self.memory.parameters[parameter]
        return known.adaptive is not None and known.coverage in ("patterns", "steps", "accumulated")

    def writes_adaptively(self, layer: LayerMemory, parameter: str | None) -> bool:
        """Whether a layer's patterns wrote into the parameter, by an adaptive rule."""
        if parameter is None or not self.is_adaptive(parameter):
            return False
        return self.memory.parameters[parameter].coverage == "patterns"

    def _replayed(self, parameter: str) -> preconditioned.Initial:
        """What no pattern wrote into a parameter that an adaptive rule trained."""
        if parameter not in self._initial:
            self._initial[parameter] = preconditioned.initial(
                self.memory, parameter, self.at, self.average
            )
        return self._initial[parameter]

    def _is_stated(self, parameter: str) -> bool:
        """Whether only the learned part itself is known of what an adaptive rule did."""
        since = self.memory.parameters[parameter].accumulated_since
        return self.is_adaptive(parameter) and since is not None and self.at > since

    @property
    def _when(self) -> str:
        """Of which weights a table is, for its name."""
        return f"after {self.at}" + ("" if self.averaging is None else f", {self.averaging}")

    def _refuse_average(self, parameter: str) -> None:
        if self.averaging is not None:
            raise QueryError(
                f"what {parameter!r} learned is kept only now and then, so its average over steps "
                "is not known. Record with every=1, error signals and a larger step_budget"
            )

    def drops_unresolved(self, parameter: str) -> bool:
        """Whether a mask asked that, without patterns, it falls back to its initial part."""
        dropping = [mask for mask in self.masks if mask.unresolved == "drop"]
        layers = [self.memory.layer(name) for name in self.memory.layers]
        users = [la.name for la in layers if parameter in (la.weight, la.bias)]
        return any(m.layers is None or any(map(m.concerns, users)) for m in dropping)

    def coefficients(self, parameter: str) -> Coefficients:
        """a, h and c of one parameter at this step."""
        if parameter not in self._coefficients:
            self._coefficients[parameter] = coefficients(self.log(parameter), average=self.average)
        return self._coefficients[parameter]

    def log(self, parameter: str) -> ParameterLog:
        """What the optimizer did with a parameter up to this step, as its dtype computed it."""
        dtype = self.memory.parameters[parameter].dtype
        return as_computed(self.memory.log(parameter).head(self.at), dtype)

    def writers(self, parameter: str) -> tuple[LayerMemory, ...]:
        """The layers whose patterns wrote into the parameter: several where it is shared."""
        if self.memory.parameters[parameter].coverage != "patterns":
            return ()
        layers = (self.memory.layer(name) for name in self.memory.layers)
        return tuple(layer for layer in layers if parameter in (layer.weight, layer.bias))

    def row_weights(self, layer: LayerMemory) -> engine.Reals:
        """What the masks multiply each pattern's value by; 0 for patterns of later steps."""
        if layer.name not in self._row_weights:
            weights = row_weights(self.masks, layer)
            self._row_weights[layer.name] = np.where(self._steps(layer) < self.at, weights, 0.0)
        return self._row_weights[layer.name]

    def included(self, layer: LayerMemory) -> NDArray[np.bool_] | None:
        """Which patterns have a part in this view; None where all of them have."""
        masked = any(mask.concerns(layer.name) for mask in self.masks)
        if not masked and self.at == self.memory.steps:
            return None
        included: NDArray[np.bool_] = self.row_weights(layer) != 0
        return included

    def row_coefficients(self, layer: LayerMemory, parameter: str | None) -> engine.Reals | None:
        """w_t c_t: how much of each pattern is in the parameter; None if none of it is.

        None as well where an adaptive rule trained it: see `written`.
        """
        coverage = None if parameter is None else self.memory.parameters[parameter].coverage
        if parameter is None or coverage != "patterns" or self.is_adaptive(parameter):
            return None
        per_pattern = self.coefficients(parameter).per_pattern(self._steps(layer))
        return self.row_weights(layer) * per_pattern

    def initial_parts(self, parameter: str) -> tuple[Tensor, Tensor | None]:
        """a W_0 and h m_0 (None if there was no momentum buffer), float64."""
        initial = self.memory.initial(parameter).double()
        untrained = self.memory.parameters[parameter].coverage == "untrained"
        if untrained or self._is_stated(parameter):
            return initial, None
        if self.is_adaptive(parameter):
            replayed = self._replayed(parameter)
            return replayed.weights, replayed.momentum
        factors = self.coefficients(parameter)
        buffer = self.memory.initial_momentum(parameter)
        return factors.initial * initial, (
            None if buffer is None else factors.momentum * buffer.double()
        )

    def unresolved(self, parameter: str) -> Tensor | None:
        """What was learned without pattern resolution, float64; None if nothing, or dropped."""
        known = self.memory.parameters[parameter]
        if known.coverage not in ("steps", "accumulated") or self.drops_unresolved(parameter):
            return None
        since = known.accumulated_since
        if since is not None and self.at > since:  # before that, every step was kept
            self._refuse_average(parameter)
            return self.memory.learned(parameter, self.at).double()
        if self.is_adaptive(parameter):
            return self._replayed(parameter).by_steps
        factors = self.coefficients(parameter).steps
        total = torch.zeros(known.shape, dtype=torch.float64)
        for step, applied in self.memory.step_gradients(parameter):
            if step < self.at and factors[step] != 0:
                total += factors[step] * applied.double()
        return total

    def unrecorded(self, parameter: str) -> Tensor | None:
        """U, what the steps wrote whose patterns were not kept (`every=k`), float64.

        None if every step was recorded, or if it is dropped.
        """
        known = self.memory.parameters[parameter]
        if self.memory.every == 1 or known.coverage != "patterns":
            return None
        self._refuse_average(parameter)
        if self.drops_unresolved(parameter):
            return None
        return self.memory.unrecorded(parameter, self.at)[0]

    def base(self, parameter: str) -> Tensor:
        """Everything in the parameter that no pattern accounts for, float64."""
        initial, momentum = self.initial_parts(parameter)
        base = initial.clone()  # the caller may add to it
        for part in (momentum, self.unresolved(parameter), self.unrecorded(parameter)):
            if part is not None:
                base += part
        return base

    @property
    def weights(self) -> dict[str, Tensor]:
        """Every parameter of this view in float64, rebuilt in one pass over each layer, once."""
        if self._weights is None:
            self._weights = self.rebuild()
        return self._weights

    def holding(self, weights: dict[str, Tensor]) -> View:
        """The same view with weights that are already known (or are meant to differ)."""
        view = View(self.memory, self.at, self.masks, self.averaging)
        view._weights = weights
        return view

    def rebuild(self) -> dict[str, Tensor]:
        """Every parameter: its base plus what the patterns of each layer wrote, float64."""
        rebuilt = {name: self.base(name) for name in self.memory.parameters}
        for name in self.memory.layers:
            layer = self.memory.layer(name)
            parts = self._learned(layer)
            for parameter, part in zip((layer.weight, layer.bias), parts, strict=True):
                if parameter is not None and part is not None:
                    rebuilt[parameter][layer.rows_of(parameter)] += part
                elif self.writes_adaptively(layer, parameter):
                    assert parameter is not None
                    rebuilt[parameter][layer.rows_of(parameter)] += self.written(layer, parameter)
        return rebuilt

    def written(self, layer: LayerMemory, parameter: str) -> Tensor:
        """What a layer's patterns wrote into a parameter of an adaptive rule, masks included.

        float64, in the shape of the layer's rows of it. By matrices of groups where that is
        possible: one sweep, and then sums of them; else by a sweep of its own.
        """
        columns = columns_of(self.masks, layer)
        cells = None if columns is None else grouping.cells(layer.patterns, columns)
        if cells is None or not are_worth_having(layer, cells):
            weights = self.row_weights(layer)
            return preconditioned.written(
                self.memory, layer, parameter, self.at, [weights], self.average
            )[0]
        codes, count = cells.codes, max(1, len(cells.values))

        def build() -> dict[str, Tensor]:
            groups: list[engine.Reals | None] = [None]
            if count > 1:
                groups = [np.where(codes == group, 1.0, 0.0) for group in range(count)]
            found = preconditioned.written(
                self.memory, layer, parameter, self.at, groups, self.average
            )
            return {"written": found}

        about = f"written into {parameter} by {columns} {self._when}"
        matrices = kept(layer, about, build)["written"]
        strength = np.zeros(count)
        strength[codes] = row_weights(self.masks, layer)  # the same all over a cell
        total: Tensor = torch.tensordot(torch.from_numpy(strength), matrices, 1)
        return total

    def _learned(self, layer: LayerMemory) -> tuple[Tensor | None, Tensor | None]:
        """What a layer's patterns wrote into weight and bias, under the masks, float64.

        By matrices of groups where masks go by columns with few values; else pattern by pattern.
        """
        columns = columns_of(self.masks, layer)
        cells = None if columns is None else grouping.cells(layer.patterns, columns)
        if cells is None or not are_worth_having(layer, cells):
            return engine.learned(
                layer,
                self.row_coefficients(layer, layer.weight),
                self.row_coefficients(layer, layer.bias),
            )
        bare = View(self.memory, self.at, averaging=self.averaging)
        factors = [bare.row_coefficients(layer, name) for name in (layer.weight, layer.bias)]
        if all(factor is None for factor in factors):
            return None, None
        matrices = group_matrices(layer, cells, f"by {columns} {self._when}", *factors)
        strength = np.zeros(len(cells.values))
        strength[cells.codes] = row_weights(self.masks, layer)  # the same all over a cell
        each = torch.from_numpy(strength)
        weight, bias = (None if m is None else torch.tensordot(each, m, 1) for m in matrices)
        return weight, bias

    def output(self, layer: LayerMemory, queries: Tensor) -> Tensor:
        """The layer's output by the rebuilt weights: [n, d_in] -> [n, d_out], float64."""
        own = self.weights[layer.weight][layer.rows_of(layer.weight)]
        output = multiply(layer.kind, own, queries.double())
        if layer.bias is not None:
            output = output + self.weights[layer.bias][layer.rows_of(layer.bias)]
        return output

    def dual_output(self, layer: LayerMemory, queries: Tensor) -> Tensor:
        """The layer's output as attention, literally: base·q + Σ_t w_t c_t (x_t·q) δ_t + bias.

        queries [n, d_in] float64 -> [n, d_out] float64. What a layer of another kind wrote into a
        shared weight (an embedding into the layer it is tied to) is summed into a matrix first.
        """
        own = self.base(layer.weight)[layer.rows_of(layer.weight)]
        output = torch.zeros(len(queries), layer.out_features, dtype=torch.float64)
        for writer in self.writers(layer.weight):
            factors = self.row_coefficients(writer, layer.weight)
            written, here = shared_rows(writer, layer, layer.weight)
            if self.is_adaptive(layer.weight):
                if writer.kind == layer.kind and writer.shape == layer.shape:
                    output[:, here if layer.kind == "linear" else slice(None)] += (
                        preconditioned.outputs(
                            self.memory,
                            layer,
                            writer,
                            self.at,
                            self.row_weights(writer),
                            queries,
                            self.average,
                        )
                    )
                else:
                    own[here] += self.written(writer, layer.weight)[written]
                continue
            if factors is None:
                continue
            if writer.kind == layer.kind == "linear":
                output[:, here] += engine.dual_outputs(writer, factors, queries)[:, written]
            elif writer.kind == layer.kind and writer.shape == layer.shape:
                output += engine.dual_outputs(writer, factors, queries)
            else:
                matrix, _ = engine.learned(writer, factors)
                assert matrix is not None
                own[here] += matrix[written]
        output += multiply(layer.kind, own, queries)
        if layer.bias is not None:
            output = output + self.base(layer.bias)[layer.rows_of(layer.bias)]
            for writer in self.writers(layer.bias):
                if self.is_adaptive(layer.bias):
                    written, here = shared_rows(writer, layer, layer.bias)
                    output[:, here] += self.written(writer, layer.bias)[written]
                    continue
                _, part = engine.learned(writer, None, self.row_coefficients(writer, layer.bias))
                if part is not None:
                    written, here = shared_rows(writer, layer, layer.bias)
                    output[:, here] += part[written]
        return output

    def _steps(self, layer: LayerMemory) -> engine.Rows:
        steps: engine.Rows = layer.patterns["step"]
        return steps


def shared_rows(writer: LayerMemory, layer: LayerMemory, parameter: str) -> tuple[slice, slice]:
    """Where two layers of one parameter overlap: in the writer's rows of it, and in the layer's."""
    one, two = writer.rows_of(parameter), layer.rows_of(parameter)
    start = max(one.start, two.start)
    end = max(start, min(one.stop, two.stop))
    return slice(start - one.start, end - one.start), slice(start - two.start, end - two.start)


def layers_named(memory: Memory, layers: str | list[str] | tuple[str, ...] | None) -> list[str]:
    """The layers a question is about: all of them, or the named ones, which must exist."""
    if layers is None:
        return list(memory.layers)
    names = [layers] if isinstance(layers, str) else list(layers)
    if not names:
        raise QueryError(f"layers=[] names no layer; recorded are: {', '.join(memory.layers)}")
    for name in names:
        memory.layer(name)  # QueryError naming the layers that exist
    return names
