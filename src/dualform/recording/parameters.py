"""The parameters of the model under recording: what is known of each, and how it is covered."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from math import gcd
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dualform.errors import RecordingError
from dualform.layers import Layer
from dualform.learning_rules import (
    SGD,
    AdaptiveRule,
    State,
    adaptive_rule_of,
    momentum_buffer,
)
from dualform.recording.audit import ParameterAudit
from dualform.recording.audits import Audits


@dataclass(eq=False)
class Watched:
    """One parameter of the model, as the recorder follows it."""

    index: int
    name: str
    parameter: nn.Parameter
    audit: ParameterAudit
    momentum: Tensor | None  # the optimizer's buffer when recording began
    remembered: State  # all that an adaptive optimizer remembered then; empty if it was new
    shape: torch.Size
    dtype: torch.dtype
    rule: AdaptiveRule | None = None  # None for SGD, whose steps are scalars
    had_gradient: bool = False  # in `.grad`, when recording began
    layers: list[Layer] = field(default_factory=list)
    role: str | None = None
    coverage: str = "untrained"
    backward: int = -1  # the last backward pass that reached it
    seen: int = -1  # the last step with patterns of it
    passed_by: int = -1  # the last step with patterns of its layers while it was frozen
    is_silent: bool = True  # whether all patterns in its gradient have key or error signal zero
    spoiled: bool = False  # no longer where the learning rule puts it
    resolved: bool = True  # whether the error signals of all its layers are kept
    by_steps: bool = False  # used in ways that have no patterns
    is_read_off: bool = False  # whether what it learned is read off its weights

    @property
    def keys_alone(self) -> bool:
        """Whether it is of a layer whose keys are kept without error signals."""
        return bool(self.layers) and not self.resolved and not self.by_steps

    @property
    def is_counted(self) -> bool:
        """Whether torch's counters are to tell of edits, as not every step is predicted."""
        return self.rule is not None or self.is_read_off or self.keys_alone

    def forget(self, step: int) -> None:
        """Its gradient begins anew."""
        self.audit.forget(step)
        self.is_silent = True

    @property
    def expects_nothing(self) -> bool:
        """Whether its patterns so far write nothing: where keys alone are kept, each by itself."""
        return self.audit.expects_nothing if self.resolved else self.is_silent

    def join(self, rule: AdaptiveRule) -> None:
        """It was given to an adaptive optimizer after recording began; before, nothing moved it."""
        if self.coverage != "untrained":
            raise RecordingError(
                f"parameter {self.name!r} was trained by SGD and is now given to an optimizer of "
                f"the rule {rule.name!r}: one memory holds one rule per parameter. End the "
                "recording, and record what follows into a new path"
            )
        refuse_16_bits(self.name, self.parameter, rule)
        self.rule = rule
        self.audit.look_at_all_rows()

    def describe(self, accumulated_since: int | None) -> dict[str, Any]:
        """The manifest's entry."""
        return {
            "name": self.name,
            "shape": list(self.shape),
            "dtype": str(self.dtype).removeprefix("torch."),
            "coverage": self.coverage if accumulated_since is None else "accumulated",
            "accumulated_since": accumulated_since,
            "eps": self.audit.eps if self.keys_alone else self.audit.gradient_eps,
            "layers": [layer.name for layer in self.layers if self.coverage == "patterns"],
            "role": self.role,
            "rule": SGD if self.rule is None else self.rule.name,
            "is_noted_in_part": self.is_read_off and self.rule is None,
        }


def fresh_seed() -> int:
    """The seed of a recording's probes: the system's, so that training's own is not touched."""
    return int.from_bytes(np.random.SeedSequence().generate_state(2).tobytes(), "little") >> 1


class Parameters:
    """Every parameter of the model, by identity and by name."""

    def __init__(
        self,
        model: nn.Module,
        layers: Iterable[Layer],
        optimizers: Iterable[Optimizer],
        directions: Mapping[str, tuple[Tensor, Tensor]] | None = None,
    ) -> None:
        optimizers = list(optimizers)
        generator = torch.Generator().manual_seed(fresh_seed())
        buffers = {id(p): momentum_buffer(o, p) for o in optimizers for p in parameters_of(o)}
        rules = {id(p): adaptive_rule_of(o) for o in optimizers for p in parameters_of(o)}
        states = {id(p): _remembered(o, p) for o in optimizers for p in parameters_of(o)}
        self.given: set[str] = set()
        """The names of those that the optimizers were given."""
        self.by_name: dict[str, Watched] = {}
        self._by_id: dict[int, Watched] = {}
        self._of_layer: dict[Layer, tuple[Watched, ...]] = {}
        for index, (name, parameter) in enumerate(model.named_parameters()):
            if isinstance(parameter, nn.parameter.UninitializedParameter):
                raise RecordingError(
                    f"parameter {name!r} has no shape yet (a lazy module); feed the model a batch "
                    "before recording"
                )
            if not parameter.numel():
                raise RecordingError(
                    f"parameter {name!r} has shape {list(parameter.shape)}, so nothing in it could "
                    "be learned; leave it out of the model given to record"
                )
            if not parameter.is_floating_point():
                raise RecordingError(
                    f"parameter {name!r} has dtype {parameter.dtype}; only real floating-point "
                    "parameters can be accounted for"
                )
            momentum = buffers.get(id(parameter))
            audit = ParameterAudit(parameter, momentum, generator, (directions or {}).get(name))
            rule = rules.get(id(parameter))
            if rule is not None:
                refuse_16_bits(name, parameter, rule)
                audit.look_at_all_rows()
            state = states.get(id(parameter), {})
            place = index, name, parameter, audit, momentum, state
            left_over = _holds_something(parameter.grad)
            watched = Watched(*place, parameter.shape, parameter.dtype, rule, left_over)
            self.by_name[name] = self._by_id[id(parameter)] = watched
            if id(parameter) in rules:
                self.given.add(name)
        self._keeps: Callable[[Layer], bool] = lambda layer: True
        self.audits = Audits([watched.audit for watched in self])
        for layer in layers:
            self.add(layer)

    def add(self, layer: Layer) -> None:
        """A layer that uses one or two of the parameters."""
        for role, used in (("weight", layer.weight), ("bias", layer.bias)):
            if used is not None:
                watched = self.by_name[used]
                watched.layers.append(layer)
                watched.role = role
                watched.resolved = watched.resolved and self._keeps(layer)

    def resolve(self, keeps_error_signals: Callable[[Layer], bool]) -> None:
        """Say which parameters patterns can account for: a sum needs all of its parts."""
        self._keeps = keeps_error_signals
        for watched in self:
            watched.resolved = all(map(keeps_error_signals, watched.layers))

    def keep_to_steps(self, layers: Iterable[Layer]) -> None:
        """Layers that were not chosen: their parameters have no patterns, however they are used."""
        for layer in layers:
            for watched in self.of_layer(layer):
                if watched.layers and not watched.by_steps:
                    warnings.warn(
                        f"dualform: {watched.name!r} is used by {watched.layers[0].name!r}, which "
                        f"layers= chose, and by {layer.name!r}, which it did not; it is accounted "
                        "for step by step, without patterns. Choose both",
                        stacklevel=2,
                    )
                watched.by_steps = True

    def refuse_sharing(self, optimizers: Iterable[Optimizer]) -> None:
        """Two optimizers may not train one parameter: each would keep a momentum of its own.

        Nor may they train one that is not the model's.
        """
        owners: dict[int, int] = {}
        for number, optimizer in enumerate(optimizers):
            for parameter in parameters_of(optimizer):
                watched = self.of(parameter)
                if owners.setdefault(id(parameter), number) != number:
                    raise RecordingError(
                        f"parameter {watched.name!r} is trained by two of the "
                        "optimizers given; give each parameter to one optimizer"
                    )

    def refuse_gaps(self) -> None:
        """What an adaptive rule remembers can only be replayed from all patterns."""
        for watched in self:
            if watched.rule is not None:
                raise RecordingError(
                    f"every= was given, and {watched.name!r} is trained by the rule "
                    f"{watched.rule.name!r}: what the optimizer remembers of each gradient can "
                    "only be replayed if the patterns of every step are kept. Record with every=1"
                )

    def __len__(self) -> int:
        return len(self.by_name)

    def __iter__(self) -> Iterator[Watched]:
        return iter(self.by_name.values())

    def of(self, parameter: nn.Parameter) -> Watched:
        """The entry of a parameter that an optimizer trains; it must be the model's."""
        watched = self._by_id.get(id(parameter))
        if watched is None:
            raise RecordingError(
                f"the optimizer trains a parameter of shape {list(parameter.shape)} that is not in "
                "the model given to record. Give a module that holds all trained parameters, such "
                "as nn.ModuleList([model, criterion]), and call its parts as before"
            )
        return watched

    def of_layer(self, layer: Layer) -> tuple[Watched, ...]:
        """The layer's parameters: its weight, and its bias if it has one."""
        found = self._of_layer.get(layer)
        if found is None:
            found = tuple(self.by_name[name] for name in layer.parameters)
            self._of_layer[layer] = found
        return found

    def initial(self) -> Mapping[str, Tensor]:
        """What a memory keeps of every parameter as recording begins."""
        kept: dict[str, Tensor] = {}
        for watched in self.by_name.values():
            kept[f"parameters/{watched.name}"] = watched.parameter
            kept[f"probes/{watched.name}"] = watched.audit.probe64
            kept[f"sketches/{watched.name}"] = watched.audit.sketch64
            if watched.momentum is not None:
                kept[f"momentum/{watched.name}"] = watched.momentum
            watched.momentum, watched.remembered = None, {}
        return kept


def refuse_16_bits(name: str, parameter: nn.Parameter, rule: AdaptiveRule) -> None:
    """An adaptive optimizer rounds its moments to the parameter's dtype at every step."""
    if parameter.dtype not in (torch.float32, torch.float64):
        raise RecordingError(
            f"parameter {name!r} is {parameter.dtype} and trained by the rule {rule.name!r}: its "
            "moments are rounded to 16 bits at every step, which no pattern accounts for. Train "
            "float32 parameters (under torch.autocast, say)"
        )


def _remembered(optimizer: Optimizer, parameter: nn.Parameter) -> State:
    """What an adaptive optimizer remembers of a parameter; nothing if it has made no step."""
    rule = adaptive_rule_of(optimizer)
    found = None if rule is None else rule.found(optimizer.state.get(parameter))
    return {} if rule is None or found is None or rule.is_new(found) else found


def parameters_of(optimizer: Optimizer) -> list[nn.Parameter]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def version_of(tensor: Tensor) -> int:
    """How often a tensor was changed in place, where that is counted."""
    return -1 if tensor.is_inference() else tensor._version


def is_reset(gradient: Tensor | None) -> bool:
    """Whether there is no gradient: none at all, or all zeros (looked at sparingly first)."""
    if gradient is None:
        return True
    flat = gradient.detach().reshape(-1)
    sample = flat[:: apart(flat.numel(), gradient.shape[-1] if gradient.dim() else 1)]
    return not bool(sample.any()) and not bool(flat.any())


def apart(count: int, width: int) -> int:
    """How far apart to look at about 64 of so many entries, so that they are of many columns.

    Those of a few might be zero always: the edge of an image, say.
    """
    distance = max(1, count // 64)
    while gcd(distance, width) > 1:
        distance += 1
    return distance


def _holds_something(gradient: Tensor | None) -> bool:
    """Whether a gradient that was there before recording is more than zeros."""
    return gradient is not None and (gradient.is_sparse or not is_reset(gradient))
