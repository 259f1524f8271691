"""`DualForm`: a recorded network, seen as attention over its own training.

The verbs live here (`attend`, `contribute`, `verify`, `without`, `only`, `at`); what they compute
lives in the files beside. The model lends its architecture and is never modified: every number
comes from the memory.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dualform.attention import queries as asking
from dualform.attention import splitting
from dualform.attention.averaging import averaging
from dualform.attention.checks import verify
from dualform.attention.contribution import Contribution
from dualform.attention.engine import Progress
from dualform.attention.masks import Mask, as_rows, as_strength
from dualform.attention.spotlight import Attention, Spotlight, is_whole
from dualform.attention.targets import Aim, index_of, is_margin
from dualform.attention.verification import Verification
from dualform.attention.view import View, layers_named
from dualform.errors import QueryError
from dualform.memory import Memory


class DualForm:
    """A network as attention over the patterns it was trained on.

    `model` is the recorded architecture (its own weights matter to `verify` only; it is never
    modified); None suffices for questions that need no forward pass.

    Example:
        >>> import dualform as df
        >>> dual = df.DualForm(model, "runs/digits")                      # doctest: +SKIP
        >>> dual.verify(images)                                           # doctest: +SKIP
        >>> dual.attend(images[:1])["fc1"].top(3)                         # doctest: +SKIP
    """

    def __init__(self, model: nn.Module | None, memory: Memory | str | Path) -> None:
        memory = Memory.open(memory) if isinstance(memory, (str, Path)) else memory
        if not isinstance(memory, Memory):
            raise QueryError(
                f"DualForm was given {memory!r} as its memory; expected a recorded run: its path, "
                'or df.Memory.open("RUN")'
            )
        self.memory = memory
        self.model = model
        if model is not None:
            asking.check_architecture(model, self.memory)
        self._view = View(self.memory, self.memory.steps)

    @property
    def step(self) -> int:
        """How many updates this view has seen."""
        return self._view.at

    @property
    def is_masked(self) -> bool:
        """Whether `without` or `only` took something away."""
        return bool(self._view.masks)

    @property
    def masks(self) -> tuple[str, ...]:
        """The masks of this view, as they were asked for: `"without(task='fashion')"`."""
        return tuple(str(mask) for mask in self._view.masks)

    def __call__(self, *inputs: Any, by: str = "weights", **kwargs: Any) -> Any:
        """The network's output, in eval mode, by `"weights"` (rebuilt) or by `"patterns"`.

        `by="patterns"` computes every recorded layer literally as initial part + Σ_t α_t e_t over
        all patterns; `by="weights"` sums the patterns into weights first. Same units, same result
        up to rounding.

        Example:
            >>> (dual(x) - dual(x, by="patterns")).abs().max() < 1e-5      # doctest: +SKIP
        """
        if by not in ("weights", "patterns"):
            raise QueryError(f"by={by!r}: expected 'weights' or 'patterns'")
        model = self._model("a forward pass")
        forward = asking.run if by == "weights" else asking.run_by_patterns
        with torch.no_grad():
            return forward(model, self._view, inputs, kwargs)

    def weights(self, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
        """Every parameter of this view, rebuilt from the memory: own dtype, or the one asked for.

        Summed in float64; `dtype=torch.float64` keeps all of it.

        Example:
            >>> dual.at(0).weights()["fc1.weight"]   # the initial weights # doctest: +SKIP
        """
        parameters = self.memory.parameters
        return {
            name: weight.to(dtype or parameters[name].dtype, copy=True)
            for name, weight in self._view.weights.items()
        }

    def to_model(self) -> nn.Module:
        """A plain `nn.Module`: a copy of the architecture with this view's weights and buffers.

        Example:
            >>> before = dual.at(step=100).to_model()                      # doctest: +SKIP
        """
        twin = copy.deepcopy(self._model("building a module"))
        named = dict(twin.named_parameters()) | dict(twin.named_buffers())
        with torch.no_grad():
            for name, tensor in asking.tensors_of(self._view).items():
                held = named[name]
                held.data = tensor.to(held.device)
        return twin

    def verify(self, *inputs: Any, progress: Progress | None = None, **kwargs: Any) -> Verification:
        """Whether initial state, log and patterns explain the network, to rounding.

        Every step's patterns are checked against what training saw of its weight update, every
        fingerprint against the one before, and, with a model, every rebuilt parameter (and, with
        inputs, the outputs) against the model's. Residuals are relative: 0 is perfect.

        Example:
            >>> dual.verify(images).passed                                 # doctest: +SKIP
            True
        """
        if self.is_masked:
            raise QueryError(
                f"{self._name()} cannot be verified: nothing was ever trained to be it. "
                "Verify the view without masks; a mask takes parts of it away exactly."
            )
        if self._view.averaging is not None:
            raise QueryError(
                f"{self._name()} cannot be verified: training left no trace of an average. Verify "
                "the view itself; its average is a sum of weights that are then certified."
            )
        if inputs or kwargs:
            self._model("comparing outputs")
            if self.step != self.memory.steps:
                raise QueryError(
                    f"outputs after {self.step} updates cannot be compared: the model is as it was "
                    f"after {self.memory.steps}. Verify this step without inputs."
                )
        return verify(self._view, self.model, inputs, kwargs, progress)

    def attend(
        self,
        *inputs: Any,
        example: Any = None,
        queries: Tensor | Mapping[str, Tensor] | None = None,
        layers: str | Sequence[str] | None = None,
        **kwargs: Any,
    ) -> Attention:
        """What each layer looks at: inputs as the model takes them, or a recorded `example`.

        A test input runs through this view's network once; what a layer receives are its queries.
        `example=7` asks with the keys of that training example's last visit (no model needed);
        `queries` hands over a layer's queries directly. Weights are key · query, signed.

        Example:
            >>> dual.attend(images[:1], layers="fc1")["fc1"].sum_by("label")  # doctest: +SKIP
        """
        given = {"inputs": bool(inputs or kwargs), "example": example is not None}
        given["queries"] = queries is not None
        if sum(given.values()) != 1:
            seen = ", ".join(name for name, yes in given.items() if yes) or "nothing"
            raise QueryError(f"attend takes inputs, or example=, or queries=; got {seen}")
        if isinstance(queries, Mapping) and layers is None:
            layers = list(queries)
        names = layers_named(self.memory, None if layers is None else _names(layers))
        if given["inputs"]:
            model = self._model("turning inputs into queries")
            found = asking.queries_of(model, self._view, inputs, kwargs, names)
        elif given["example"]:
            found = {
                name: asking.example_queries(self._view, self.memory.layer(name), example)
                for name in names
            }
        else:
            found = self._given_queries(queries, names)
        return Attention({name: self._spotlight(name, rows) for name, rows in found.items()})

    def contribute(
        self,
        *inputs: Any,
        target: Aim,
        layer: str | None = None,
        example: Any = None,
        label: int | None = None,
        **kwargs: Any,
    ) -> Contribution:
        """What every pattern wrote into one output of one input: positive raises it, in its units.

        `target` is a class index, a vector over the outputs, or `"margin"`: the true class
        (`label`) minus the best other; without a label, the predicted minus the runner-up. By
        default the layer that produces the model's output is split, and the parts add up to the
        target; for a `layer` further down they add up to gradient · layer output and stand for the
        target to first order. With a recorded `example`, the target counts the outputs of the layer
        itself.

        Example:
            >>> dual.contribute(images[:1], target=7).sum_by("label")      # doctest: +SKIP
            >>> dual.contribute(images[:1], target="margin", label=3)      # doctest: +SKIP
        """
        if bool(inputs or kwargs) == (example is not None):
            raise QueryError("contribute takes one input as the model takes it, or example=ID")
        target, label = index_of(target), index_of(label)
        if label is not None and not is_margin(target):
            raise QueryError('label= belongs to target="margin"; a class index is a target itself')
        if label is not None and not is_whole(label):
            raise QueryError(f"label={label!r}: expected the index of the true class")
        if example is not None:
            return splitting.of_example(self._view, example, target, layer, label)
        model = self._model("a contribution to the model's output")
        asked = splitting.Asked(self._view, model, inputs, kwargs)
        return splitting.of_input(asked, target, layer, label)

    def at(self, step: int) -> DualForm:
        """The same network after `step` updates: 0 is before training. Masks stay.

        Example:
            >>> dual.at(step=3000)(images)                                 # doctest: +SKIP
        """
        if not is_whole(step) or not 0 <= step <= self.memory.steps:
            raise QueryError(
                f"at({step!r}): expected a whole number of updates from 0 to {self.memory.steps}, "
                "which is what this memory holds"
            )
        return self._with(step, self._view.masks)

    def averaged(self, decay: float | None = None, *, start: int = 1, every: int = 1) -> DualForm:
        """The network whose weights are an average over training, as `AveragedModel` keeps it.

        By `decay`, exponential: E ← decay · E + (1 − decay) · W; without, the mean. Kept after
        `start` updates, and then `every` so many. Buffers are those of the last time it was kept,
        copied, not averaged (`use_buffers=False`, torch's default).

        Example:
            >>> dual.averaged(decay=0.999).contribute(images[:1], target=7)  # doctest: +SKIP
        """
        view = copy.copy(self)
        chosen = averaging(decay, start, every)
        view._view = View(self.memory, self.step, self._view.masks, chosen)
        return view

    def without(
        self,
        rows: Any = None,
        /,
        *,
        strength: float = 1.0,
        unresolved: str = "keep",
        layers: str | Sequence[str] | None = None,
        **where: Any,
    ) -> DualForm:
        """The same weights minus what some patterns wrote. Not retraining, and not unlearning.

        Their values are multiplied by 1 − `strength`, in all layers or in the named `layers`.
        Without a condition: everything learned. What has no pattern resolution (other parameters,
        unrecorded steps) stays as it is (`unresolved="keep"`) or falls back to the initial part
        (`"drop"`). Contributions are large and cancel: dropping a single class can wreck a network
        that retraining would keep.

        Example:
            >>> dual.without(task="fashion", strength=0.7)                 # doctest: +SKIP
        """
        named = None if layers is None else tuple(_names(layers))
        taken = as_strength(strength)
        return self._masked(Mask(False, as_rows(rows), where, taken, unresolved, named))

    def only(
        self,
        rows: Any = None,
        /,
        *,
        unresolved: str = "keep",
        layers: str | Sequence[str] | None = None,
        **where: Any,
    ) -> DualForm:
        """The initial part plus what some patterns wrote, and nothing else. Not retraining.

        With `layers`, other layers stay as they are.

        Example:
            >>> dual.only(label=[1, 7])                                    # doctest: +SKIP
        """
        named = None if layers is None else tuple(_names(layers))
        return self._masked(Mask(True, as_rows(rows), where, 1.0, unresolved, named))

    def __repr__(self) -> str:
        lines = [
            f"{self._name()}: the network after {self.step:,} of {self.memory.steps:,} updates, "
            "as attention over its training"
        ]
        for name in self.memory.layers:
            layer = self.memory.layer(name)
            lines.append(
                f"  {name}: {layer.in_features} → {layer.out_features}, {layer.rows:,} patterns"
            )
        unresolved = [
            name
            for name, parameter in self.memory.parameters.items()
            if parameter.coverage in ("steps", "accumulated")
        ]
        every = self.memory.every
        if every > 1:
            lines.append(
                f"  one of every {every} steps was recorded; what the others wrote is one sum"
            )
        if self.is_masked:
            lines.append("  a mask takes away what patterns wrote; it is not retraining")
        if self.is_masked and every > 1:
            for what, of in (("dropped", True), ("kept", False)):
                resolved = [
                    n for n, p in self.memory.parameters.items() if p.coverage == "patterns"
                ]
                names = [n for n in resolved if self._view.drops_unresolved(n) is of]
                if names and len(names) == len(resolved):
                    lines.append(f"  {what}: what unrecorded steps wrote")
                elif names:
                    lines.append(f"  {what}: what unrecorded steps wrote into {', '.join(names)}")
        if self.is_masked and unresolved:
            dropped = [name for name in unresolved if self._view.drops_unresolved(name)]
            kept = [name for name in unresolved if name not in dropped]
            for what, names in (("their initial part", dropped), ("kept as trained", kept)):
                if names:
                    lines.append(f"  without pattern resolution, {what}: {', '.join(names)}")
        if not self.memory.exact:
            lines.append("  the memory is not exact: see memory.remarks")
        return "\n".join(lines)

    # ------------------------------------------------------------------------------------------

    def _name(self) -> str:
        at = "" if self.step == self.memory.steps else f".at({self.step})"
        at += "" if self._view.averaging is None else ".averaged(…)"
        return f"DualForm{at}" + "".join(f".{mask}" for mask in self._view.masks)

    def _with(self, step: int, masks: tuple[Mask, ...]) -> DualForm:
        view = copy.copy(self)
        view._view = View(self.memory, step, masks, self._view.averaging)
        return view

    def _masked(self, mask: Mask) -> DualForm:
        mask.check(self.memory)
        return self._with(self.step, (*self._view.masks, mask))

    def _model(self, what_for: str) -> nn.Module:
        if self.model is None:
            raise QueryError(
                f"{what_for} needs the network's architecture, but this DualForm was made without "
                "a model; make it with DualForm(model, memory), any weights will do"
            )
        return self.model

    def _spotlight(self, name: str, rows: Tensor) -> Spotlight:
        layer = self.memory.layer(name)
        return Spotlight(layer, rows, self._view.included(layer))

    def _given_queries(
        self, queries: Tensor | Mapping[str, Tensor] | None, names: list[str]
    ) -> dict[str, Tensor]:
        if isinstance(queries, Mapping):
            missing = [name for name in names if name not in queries]
            if missing:
                raise QueryError(f"no queries given for layer {missing[0]!r}; got {list(queries)}")
            handed = {name: queries[name] for name in names}
        elif len(names) != 1:
            raise QueryError(
                f"one tensor of queries belongs to one layer, but {len(names)} are asked for: say "
                f"which with layers=..., one of: {', '.join(names)}"
            )
        else:
            assert queries is not None
            handed = {names[0]: queries}
        return {
            name: asking.given_queries(self.memory.layer(name), rows)
            for name, rows in handed.items()
        }


def _names(layers: str | Sequence[str]) -> list[str]:
    if not isinstance(layers, (str, Iterable)):
        raise QueryError(f"layers={layers!r}: expected the name of a layer, or several")
    return [layers] if isinstance(layers, str) else list(layers)
