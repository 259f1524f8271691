"""`DualForm`: a recorded network, seen as attention over its own training.

The verbs live here (`attend`, `contribute`, `verify`, `without`, `only`, `at`); what they compute
lives in the files beside. The model lends its architecture and is never modified: every number
comes from the memory.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dualform.attention import queries as asking
from dualform.attention import splitting
from dualform.attention.averaging import averaging
from dualform.attention.contribution import Contribution
from dualform.attention.engine import Progress
from dualform.attention.masks import Mask, as_rows, as_strength
from dualform.attention.spotlight import Attention, Spotlight, is_whole
from dualform.attention.targets import Aim, index_of, is_margin
from dualform.attention.view import View, layers_named
from dualform.certificate import ANOTHER, Check, Verification, step_of, verify
from dualform.errors import QueryError
from dualform.layers import layer_by_layer
from dualform.learning_rules import classes
from dualform.memory import Memory

ROUNDINGS = 64
"""How many roundings an output by attention may be off from the model's own."""


class DualForm:
    """A network as attention over the patterns it was trained on.

    `model` is the recorded architecture (its own weights matter to `verify`, and where a digest
    alone is kept; it is never modified); None suffices for questions that need no forward pass.
    `optimizer` hands in the class (or classes) of a learning rule that is not torch's own: no name
    in a file is ever imported.

    Example:
        >>> import dualform
        >>> dual = dualform.DualForm(model, "runs/digits")                      # doctest: +SKIP
        >>> dual.verify(images)                                           # doctest: +SKIP
        >>> dual.attend(images[:1])["fc1"].top(3)                         # doctest: +SKIP
    """

    def __init__(
        self,
        model: nn.Module | None,
        memory: Memory | str | Path,
        *,
        optimizer: type[Optimizer] | Iterable[type[Optimizer]] | None = None,
    ) -> None:
        if isinstance(memory, nn.Module):
            raise QueryError("model and memory are exchanged. Write DualForm(model, memory)")
        memory = Memory.open(memory) if isinstance(memory, (str, Path)) else memory
        if not isinstance(memory, Memory):
            raise QueryError(
                f"DualForm was given {memory!r} as its memory; expected a recorded run: its path, "
                'or dualform.Memory.open("RUN")'
            )
        self.memory = memory
        self.model = model
        if model is not None:
            asking.check_architecture(model, self.memory)
            memory.kept.use_model(dict(model.named_parameters()))
        self._handed, self._known = optimizer, classes(optimizer)
        self._view = View(self.memory, self.memory.steps, self._known)

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
        """Every parameter of this view: own dtype, or the one asked for.

        Without masks the very ones training had, bit for bit on a machine like that of training.
        Masks and averages are summed up in float64; `dtype=torch.float64` keeps all of it.

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

    def verify(
        self,
        *inputs: Any,
        every_step: bool = False,
        progress: Progress | None = None,
        **kwargs: Any,
    ) -> Verification:
        """Whether patterns, log, kept states and weights agree: a verdict for every parameter.

        *bit for bit*: torch's own optimizer, given the patterns' gradients, reaches the very bits
        of every state that was compared; *within rounding*; *not*, and at which step; or *not
        replayable: kept states only*. The last stretch and up to eight more are replayed;
        `every_step=True` replays all, which takes up to as long as training. With inputs,
        outputs by attention are compared with the model's.

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
            now = step_of(self.memory, self._model("comparing outputs"))
            if now is not None and now != self.step:
                raise QueryError(
                    f"outputs after {self.step} updates cannot be compared: the model is as it was "
                    f"after {now}. Ask at({now}).verify(...), or verify this step without inputs"
                )
        model = self.model if self.step == self.memory.steps else None
        found = verify(
            self.memory, model, every_step=every_step, optimizer=self._handed, progress=progress
        )
        if (inputs or kwargs) and found.model != ANOTHER:
            found = replace(found, checks=(*found.checks, self._outputs(inputs, kwargs)))
        return found

    def _outputs(self, inputs: Sequence[Any], kwargs: Mapping[str, Any]) -> Check:
        """Compare the outputs by attention with the model's own."""
        model = self._model("comparing outputs")
        own_noise = torch.random.fork_rng(devices=[])
        with own_noise, torch.no_grad(), asking.evaluating(model), layer_by_layer():
            both = (*model.named_parameters(), *model.named_buffers())
            own = {name: tensor.clone() for name, tensor in both}  # it may change them (max_norm)
            random = torch.get_rng_state()  # a model that draws noise draws the same twice
            primal = _flat(torch.func.functional_call(model, own, tuple(inputs), dict(kwargs)))
            torch.set_rng_state(random)
            attended = _flat(asking.run_by_patterns(model, self._view, inputs, kwargs))
        scale = float(primal.abs().max()) if primal.numel() else 0.0
        off = float((attended - primal).abs().max()) if primal.numel() else 0.0
        dtypes = [p.dtype for p in self.memory.parameters.values() if p.dtype.is_floating_point]
        kept = self.memory.kept
        is_rebuilt = any(kept.steps(n)[-1] < self.step for n in self.memory.parameters)
        for name in self.memory.layers:  # autocast: products are rounded to fewer digits
            uses = self.memory.layer(name).uses
            dtypes += [self.memory.layer(name).stored] if is_rebuilt else []  # a run that died
            dtypes += [uses.dtype_of(int(place)) for place in np.unique(uses.dtype, True)[1]]
        eps = max(torch.finfo(dtype).eps for dtype in dtypes)
        return Check("outputs by attention", "outputs", off / (scale or 1.0), ROUNDINGS * eps)

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
        asked = splitting.OneInput(self._view, model, inputs, kwargs)
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
        return self._with(self._view.moved(step, self._view.averaging))

    def averaged(self, decay: float | None = None, *, start: int = 1, every: int = 1) -> DualForm:
        """The network whose weights are an average over training, as `AveragedModel` keeps it.

        By `decay`, exponential: E ← decay · E + (1 − decay) · W; without, the mean. Kept after
        `start` updates, and then `every` so many. Buffers are those of the last time it was kept,
        copied, not averaged (`use_buffers=False`, torch's default).

        Example:
            >>> dual.averaged(decay=0.999).contribute(images[:1], target=7)  # doctest: +SKIP
        """
        return self._with(self._view.moved(self.step, averaging(decay, start, every)))

    def without(
        self,
        rows: Any = None,
        /,
        *,
        strength: float = 1.0,
        layers: str | Sequence[str] | None = None,
        **where: Any,
    ) -> DualForm:
        """The same weights minus what some patterns wrote. Not retraining, and not unlearning.

        Their values are multiplied by 1 − `strength`, in all layers or in the named `layers`.
        Without a condition: all that patterns wrote. What they do not explain (parameters kept as
        values, steps that were not recorded) stays as it is. Contributions are large and cancel:
        dropping a single class can wreck a network that retraining would keep.

        Example:
            >>> dual.without(task="fashion", strength=0.7)                 # doctest: +SKIP
        """
        named = None if layers is None else tuple(_names(layers))
        taken = as_strength(strength)
        return self._masked(Mask(False, as_rows(rows), where, taken, named))

    def only(
        self,
        rows: Any = None,
        /,
        *,
        layers: str | Sequence[str] | None = None,
        **where: Any,
    ) -> DualForm:
        """The same weights minus what all other patterns wrote. Not retraining.

        What is left: the initial part, what no pattern explains, and what these patterns wrote.
        With `layers`, other layers stay as they are.

        Example:
            >>> dual.only(label=[1, 7])                                    # doctest: +SKIP
        """
        named = None if layers is None else tuple(_names(layers))
        return self._masked(Mask(True, as_rows(rows), where, 1.0, named))

    def __repr__(self) -> str:
        lines = [
            f"{self._name()}: the network after {self.step:,} of {self.memory.steps:,} updates, "
            "as attention over its training"
        ]
        for name in self.memory.layers:
            layer = self.memory.layer(name)
            sizes = " × ".join(map(str, layer.shape))
            what = {"patterns": "patterns", "keys": "keys alone", "examples": "examples"}[
                layer.keep
            ]
            lines.append(f"  {name}: {layer.kind} {sizes}, {layer.rows:,} {what}")
        if self.is_masked:
            lines.append("  a mask takes away what patterns wrote; it is not retraining")
            if self._untouched:
                lines.append(f"  no mask reaches: {', '.join(self._untouched)}")
        values = [name for name, known in self.memory.parameters.items() if known.keep == "values"]
        if values:
            lines.append(f"  kept as values, without patterns: {', '.join(values)}")
        edits = [event for event in self.memory.events if event.what == "edited"]
        if edited := dict.fromkeys(name for event in edits for name in event.parameters):
            steps = ", ".join(dict.fromkeys(str(event.step) for event in edits[:3]))
            lines.append(
                f"  changed between updates (before step {steps}{' …' * (len(edits) > 3)}), which "
                f"is not explained by patterns: {', '.join(edited)}"
            )
        if self.memory.every > 1:
            lines.append(
                f"  one of every {self.memory.every} steps was recorded; what the others wrote is "
                "not explained by patterns"
            )
        now = None if self.model is None else step_of(self.memory, self.model)
        if now not in (None, self.step, self.memory.steps):
            lines.append(f"  the model given is the network after {now} updates: see at({now})")
        if self.memory.remarks:
            lines.append("  see memory.remarks")
        return "\n".join(lines)

    # ------------------------------------------------------------------------------------------

    def _name(self) -> str:
        at = "" if self.step == self.memory.steps else f".at({self.step})"
        at += "" if self._view.averaging is None else ".averaged(…)"
        return f"DualForm{at}" + "".join(f".{mask}" for mask in self._view.masks)

    def _with(self, view: View) -> DualForm:
        other = copy.copy(self)
        other._view = view
        return other

    def _masked(self, mask: Mask) -> DualForm:
        mask.check(self.memory)
        concerned = [
            layer
            for layer in map(self.memory.layer, mask.layers or self.memory.layers)
            if layer.keep != "keys"
        ]
        if not concerned:
            raise QueryError(
                f"{mask} was asked for, but no layer it concerns has rows of what patterns wrote: "
                "they are kept as keys alone or as values. at and verify work there"
            )
        if not any(self._view.reach(layer.weight) for layer in concerned):
            self._view.need_reach(concerned[0])
        return self._with(self._view.masked((*self._view.masks, mask)))

    @property
    def _untouched(self) -> list[str]:
        """The parameters that some mask should reach, and cannot."""
        found = []
        for name, known in self.memory.parameters.items():
            layers = list(map(self.memory.layer, known.layers))
            masks = [(m, la) for m in self._view.masks for la in layers if m.concerns(la.name)]
            if any(m.is_finer(la) for m, la in masks) or (masks and not self._view.reach(name)):
                found.append(name)
        return found

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


def _flat(output: Any) -> Tensor:
    """All numbers of a model's output in one row, float64."""
    parts = [t.detach().cpu().double().reshape(-1) for t in asking.tensors_in(output)]
    return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.float64)


def _names(layers: str | Sequence[str]) -> list[str]:
    if not isinstance(layers, (str, Iterable)):
        raise QueryError(f"layers={layers!r}: expected the name of a layer, or several")
    return [layers] if isinstance(layers, str) else list(layers)
