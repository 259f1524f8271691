"""One network out of a recorded run, as numbers: the run at some step, under some masks.

The weights after any number of updates are the very ones of training: kept states, and replays from
them (`certificate`). What patterns wrote into them is known besides; what is left when that and the
initial part are taken away is the *remainder*. A mask takes away some of what patterns wrote, and
nothing else: W − Σ (1 − w_t) c_t δ_t ⊗ x_t.

Why it is hard: weight and bias of one layer follow different rules, several layers may share one
parameter, a run may have been taken back to an earlier step, and of some parameters no pattern's
share is known. All of that ends here.
"""

from __future__ import annotations

import copy
from contextlib import suppress
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dualform.attention import engine, grouping, written
from dualform.attention.averaging import Averaging
from dualform.attention.entrywise import Way
from dualform.attention.masks import Mask, columns_of, row_weights
from dualform.attention.reach import ENTRYWISE, LINEAR, Reach, reach
from dualform.attention.tables import kept
from dualform.certificate.replay import Factors, Record, Replay, at
from dualform.errors import QueryError
from dualform.layers import kinds
from dualform.learning_rules import Classes, Coefficients, coefficients
from dualform.memory import LayerMemory, Memory


class View:
    """A recorded network after `at` updates, with masks. `known`: classes that are not torch's."""

    def __init__(self, memory: Memory, step: int, known: Classes) -> None:
        self.memory, self.at, self.known = memory, step, known
        self.masks: tuple[Mask, ...] = ()
        self.averaging: Averaging | None = None
        self.average: NDArray[np.float64] | None = None
        self._records: dict[str, Record] = {}
        self._factors: Factors | None = None
        self._actual: dict[str, Tensor] = {}
        self._parts: dict[str, tuple[Tensor, Tensor | None, Tensor]] = {}
        self._weights: dict[str, Tensor] | None = None

    def masked(self, masks: tuple[Mask, ...]) -> View:
        """The same state under other masks."""
        other = copy.copy(self)  # what is known of the state without masks is shared
        other.masks, other._weights = masks, None
        return other

    def moved(self, step: int, averaging: Averaging | None) -> View:
        """Another state, or an average of states, under the same masks."""
        other = View(self.memory, step, self.known)
        other.masks, other.averaging, other._records = self.masks, averaging, self._records
        if averaging is not None:
            other.average = averaging.weights(step)
            if any(event.to is not None for event in self.memory.events):
                raise QueryError(
                    "averaged(...) was asked of a run that was taken back to an earlier step; "
                    "expected one that went on from step to step. Ask at(step=...) instead"
                )
        return other

    # -- the weights ----------------------------------------------------------------------------

    def actual(self, parameter: str) -> Tensor:
        """A parameter as training had it in this state: its own dtype (an average: float64)."""
        if parameter not in self._actual:
            if self.average is None:
                self._hear()
                found = at(self.memory, parameter, self.at, self.known, self._factors)
            else:
                found = self._mean(parameter, self.average)
            self._actual[parameter] = found
        return self._actual[parameter]

    def _hear(self) -> None:
        """Where gradients were clipped, have every parameter say what its marks know of κ."""
        if self._factors is not None:
            return
        self._factors = {}
        for name in self.memory.parameters:
            log = self.record(name).log
            if (log.explained[: self.at] & (log.kappa[: self.at] != 1.0)).any():
                with suppress(QueryError):  # it has nothing to say
                    at(self.memory, name, self.at, self.known, self._factors)

    def _mean(self, parameter: str, share: NDArray[np.float64]) -> Tensor:
        """Σ share[s] W_s over the states after s updates."""
        memory, record = self.memory, self.record(parameter)
        kept_steps, state = memory.kept.steps(parameter), self.at
        total = at(memory, parameter, state, self.known).double() * float(share[state])
        while state:
            way = record.stretch(state, kept_steps, self.known)
            if way.broken:  # each on its own: what cannot be rebuilt is named
                for step in range(way.start, state):
                    if share[step]:
                        total += share[step] * at(memory, parameter, step, self.known).double()
                state = way.start
                continue
            weights, since = memory.kept.weights(parameter, way.start).double(), way.start
            replay = Replay(record, record.known.dtype, self.known, {})
            for done in replay.run(way.start, way.steps):
                total += float(share[since : done.step + 1].sum()) * weights
                weights, since = done.weights.to(torch.float64, copy=True), done.step + 1
            total += float(share[since:state].sum()) * weights
            state = way.start
        return total

    @property
    def weights(self) -> dict[str, Tensor]:
        """Every parameter of this view: as training had it; under masks in float64."""
        if self._weights is None:
            self._weights = {name: self._masked(name) for name in self.memory.parameters}
        return self._weights

    def _masked(self, parameter: str) -> Tensor:
        """A parameter without what the masks take away."""
        weights = self.actual(parameter)
        for writer in self.writers(parameter) if self.masks else ():
            if any(mask.concerns(writer.name) for mask in self.masks):
                weights = weights.to(torch.float64, copy=True)
                own = writer.rows_of(parameter)
                weights[own] -= self._written_by(writer, parameter, is_taken=True)
        return weights

    # -- what patterns wrote --------------------------------------------------------------------

    def record(self, parameter: str) -> Record:
        """What is on record of a parameter."""
        if parameter not in self._records:
            self._records[parameter] = Record(self.memory, parameter)
        return self._records[parameter]

    def reach(self, parameter: str) -> Reach:
        """How far the shares of patterns in a parameter can be told apart here."""
        return reach(self.record(parameter), self.at)

    def writers(self, parameter: str) -> tuple[LayerMemory, ...]:
        """The layers whose patterns' shares in the parameter are known."""
        if not self.reach(parameter):
            return ()
        layers = map(self.memory.layer, self.memory.parameters[parameter].layers)
        return tuple(layer for layer in layers if layer.keep != "keys")

    def need_reach(self, layer: LayerMemory) -> None:
        """Refuse where nothing is known of what a layer's patterns wrote."""
        found = self.reach(layer.weight)
        if not found:
            raise QueryError(
                f"what patterns wrote into {layer.weight!r} cannot be told apart: {found.why}. "
                "attend, at and verify work there; contributions and masks do not"
            )

    def row_weights(self, layer: LayerMemory) -> engine.Reals:
        """What the masks multiply each pattern's value by; 0 for those that wrote nothing here:
        patterns of later steps, and of steps that were taken back."""
        return np.where(self._is_on_path(layer), row_weights(self.masks, layer), 0.0)

    def included(self, layer: LayerMemory) -> NDArray[np.bool_] | None:
        """Which patterns have a part in this view; None where all of them have."""
        masked = any(mask.concerns(layer.name) for mask in self.masks)
        taken_back = any(event.to is not None for event in self.memory.events)
        if not masked and not taken_back and self.at == self.memory.steps:
            return None
        included: NDArray[np.bool_] = self.row_weights(layer) != 0
        return included

    def _is_on_path(self, layer: LayerMemory) -> NDArray[np.bool_]:
        steps = layer.patterns["step"]
        is_on = np.zeros(self.memory.steps + 1, bool)
        is_on[self.memory.path_to(layer.weight, self.at)] = True
        found: NDArray[np.bool_] = is_on[steps]
        return found

    def coefficients(self, parameter: str) -> Coefficients:
        """a, h and c of a parameter that SGD moved, in this state."""
        known = self.memory.parameters[parameter]
        path = self.memory.path_to(parameter, self.at)
        log = self.record(parameter).log
        return coefficients(log, self.memory.settings, path, known.dtype, self.average)

    def way(self, parameter: str) -> Way:
        """The steps of a rule that goes entry by entry, from the last to the first."""
        return Way(self.record(parameter), self.at, self.known, self.average)

    def scales(
        self, layer: LayerMemory, parameter: str | None
    ) -> tuple[engine.Reals, Way | None] | None:
        """How much of each pattern is in a parameter: numbers [T], masks included, and beside them,
        where its rule goes entry by entry, the way of its factors. None: that is not known."""
        if parameter is None or layer.keep == "keys":
            return None
        how, numbers = self.reach(parameter).how, self.row_weights(layer)
        if how == ENTRYWISE:
            return numbers, self.way(parameter)
        if how != LINEAR:
            return None
        return numbers * self.coefficients(parameter).per_pattern(layer.patterns["step"]), None

    def written(self, layer: LayerMemory, parameter: str) -> Tensor:
        """What a layer's patterns wrote into (its rows of) a parameter, masks included: float64."""
        return self._written_by(layer, parameter, is_taken=False)

    def _written_by(self, layer: LayerMemory, parameter: str, *, is_taken: bool) -> Tensor:
        """The same, or what the masks take away of it; by matrices of groups where they fit."""
        columns = columns_of(self.masks, layer)
        cells = None if columns is None else grouping.cells(layer.patterns, columns)
        left = row_weights(self.masks, layer)
        wanted = 1 - left if is_taken else left
        bare = self.masked(())
        scales = bare.scales(layer, parameter)
        assert scales is not None
        numbers, way = scales
        if cells is None or not written.are_worth_having(layer, len(cells.values)):
            return written.sums(layer, parameter, numbers * wanted, way)[0]
        codes, count = cells.codes, max(1, len(cells.values))
        about = f"written into {parameter} by {columns} after {self.at}, {self.averaging}"
        build = partial(written.sums, layer, parameter, numbers, way, codes, count)
        matrices = kept(layer, about, lambda: {"written": build()})["written"]
        strength = np.zeros(count)
        strength[codes] = wanted  # the same all over a cell
        total: Tensor = torch.tensordot(torch.from_numpy(strength), matrices, 1)
        return total

    def parts(self, parameter: str) -> tuple[Tensor, Tensor | None, Tensor]:
        """What no pattern wrote: the share of W_0, that of m_0, and the remainder; float64."""
        if parameter not in self._parts:
            bare, kept = self.masked(()), self.memory.kept
            remainder = self.actual(parameter).to(torch.float64, copy=True)
            if self.reach(parameter).how == ENTRYWISE:  # one sweep for all of it
                way = self.way(parameter)
                for writer, total in written.of_all(way, self.writers(parameter)):
                    remainder[writer.rows_of(parameter)] -= total
                initial, momentum = way.initial()
            else:
                for writer in self.writers(parameter):
                    remainder[writer.rows_of(parameter)] -= bare.written(writer, parameter)
                found, buffer = self.coefficients(parameter), kept.state(parameter, 0)
                initial = found.initial * kept.weights(parameter, 0).double()
                momentum = buffer.get("momentum_buffer")
                momentum = None if momentum is None else found.momentum * momentum.double()
            remainder -= initial if momentum is None else initial + momentum
            self._parts[parameter] = initial, momentum, remainder
        return self._parts[parameter]

    def base(self, parameter: str) -> Tensor:
        """Everything in the parameter that no pattern wrote, float64; all of it, where no
        pattern's share is known."""
        if not self.reach(parameter):
            return self.actual(parameter).double()
        initial, momentum, remainder = self.parts(parameter)
        return initial + remainder if momentum is None else initial + momentum + remainder

    # -- outputs --------------------------------------------------------------------------------

    def output(self, layer: LayerMemory, queries: Tensor) -> Tensor:
        """The layer's output by this view's weights: [n, d_in] -> [n, d_out], float64."""
        own = self.weights[layer.weight].double()[layer.rows_of(layer.weight)]
        output = kinds.of(layer.kind).multiply(own, queries.double())
        if layer.bias is not None:
            output = output + self.weights[layer.bias].double()[layer.rows_of(layer.bias)]
        return output

    def dual_output(self, layer: LayerMemory, queries: Tensor) -> Tensor:
        """The layer's output as attention, literally: base·q + Σ_t w_t c_t (x_t·q) δ_t + bias.

        queries [n, d_in] float64 -> [n, d_out] float64. What a layer of another kind wrote into a
        shared weight (an embedding into the layer it is tied to), and what a rule wrote that goes
        entry by entry, is summed into a matrix first.
        """
        kind, name = kinds.of(layer.kind), layer.weight
        own = self.base(name)[layer.rows_of(name)]
        output = torch.zeros(len(queries), layer.out_features, dtype=torch.float64)
        for writer in self.writers(name):
            scales = self.scales(writer, name)
            assert scales is not None
            numbers, way = scales
            alike = writer.kind == layer.kind and writer.rows_of(name) == layer.rows_of(name)
            if alike and way is None and writer.has_error_signals:
                output += engine.dual_outputs(writer, numbers, queries)
            else:
                theirs, here = shared_rows(writer, layer, name)
                own[here] += self.written(writer, name)[theirs]
        output += kind.multiply(own, queries)
        if layer.bias is not None:
            bias = self.base(layer.bias)[layer.rows_of(layer.bias)]
            for writer in self.writers(layer.bias):
                theirs, here = shared_rows(writer, layer, layer.bias)
                bias[here] += self.written(writer, layer.bias)[theirs]
            output = output + bias
        return output


def shared_rows(writer: LayerMemory, layer: LayerMemory, parameter: str) -> tuple[slice, slice]:
    """Where two layers of one parameter overlap: in the writer's rows of it, and in the layer's."""
    one, two = writer.rows_of(parameter), layer.rows_of(parameter)
    start = max(one.start, two.start)
    end = max(start, min(one.stop, two.stop))
    return slice(start - one.start, end - one.start), slice(start - two.start, end - two.start)


def layers_named(memory: Memory, layers: str | list[str] | tuple[str, ...] | None) -> list[str]:
    """The layers a question about attention is about: those with keys, or the named ones."""
    if layers is None:
        return [name for name in memory.layers if memory.layer(name).key_width]
    names = [layers] if isinstance(layers, str) else list(layers)
    if not names:
        raise QueryError(f"layers=[] names no layer; recorded are: {', '.join(memory.layers)}")
    for name in names:
        if not memory.layer(name).key_width:  # QueryError naming the layers that exist
            raise QueryError(
                f"layer {name!r} was asked what it looked at; it keeps what each example wrote, "
                "and no keys. It has contributions: contribute(..., layer=...)"
            )
    return names
