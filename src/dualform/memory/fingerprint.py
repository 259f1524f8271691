"""What all parameters looked like at one moment of training, along random directions.

Of an adaptive optimizer everything it remembers has a fingerprint, too: with those of weights and
momentum they say to the last digit whether a checkpoint is of that moment.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from dualform.memory.description import Parameter
from dualform.memory.segments import Segment

STATE_FINGERPRINTS = "state_fingerprints"


@dataclass(frozen=True)
class Fingerprint:
    """Float64 projections of every parameter (and momentum buffer) after `step` updates.

    `states` has those of what else an adaptive optimizer remembered, by parameter and name; single
    numbers as they were.
    """

    step: int
    values: Mapping[str, Tensor]
    momentum: Mapping[str, Tensor]
    states: Mapping[str, Mapping[str, Tensor]] = field(default_factory=dict)


def fingerprints_of(segment: Segment, parameters: Mapping[str, Parameter]) -> Iterator[Fingerprint]:
    """The fingerprints that a segment holds, in the order of their steps."""
    steps = segment.fingerprint_steps()
    weights = _projections(segment, "fingerprints", parameters, len(steps))
    momenta = _projections(segment, "momentum_fingerprints", parameters, len(steps))
    states = {name: _states(segment, known, len(steps)) for name, known in parameters.items()}
    for i, step in enumerate(steps):
        yield Fingerprint(
            step,
            {name: values[i] for name, values in weights.items()},
            _there({name: values[i] for name, values in momenta.items()}),
            {n: _there({s: v[i] for s, v in of.items()}) for n, of in states.items() if of},
        )


def _projections(
    segment: Segment, kind: str, parameters: Mapping[str, Parameter], count: int
) -> dict[str, Tensor]:
    return {
        name: segment.file.tensor(f"{kind}/{name}", (count, parameter.height), torch.float64)
        for name, parameter in parameters.items()
        if f"{kind}/{name}" in segment.file.names
    }


def _states(segment: Segment, parameter: Parameter, count: int) -> dict[str, Tensor]:
    rule, found = parameter.adaptive, {}
    for state in () if rule is None else (*rule.tensors, *rule.numbers):
        assert rule is not None
        name = f"{STATE_FINGERPRINTS}/{state}/{parameter.name}"
        if name in segment.file.names:
            shape = (count,) if state in rule.numbers else (count, parameter.height)
            found[state] = segment.file.tensor(name, shape, torch.float64)
    return found


def _there(values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Those that are numbers: NaN says that the optimizer had none."""
    return {name: value for name, value in values.items() if not bool(value.isnan().any())}
