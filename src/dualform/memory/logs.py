"""The optimizer's log of one parameter, put together from all segments.

What a rule with scalars did (SGD) and what an adaptive one did (Adam and its relatives) is logged
alike; the first comes back with a name for every setting, the second with its rule. Numbers that
are no numbers mean that the rule was not known: then there are no coefficients.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dualform.errors import MemoryFileError, QueryError
from dualform.learning_rules import (
    HYPERPARAMETERS,
    AdaptiveLog,
    ParameterLog,
    names_of_settings,
)
from dualform.memory.description import Parameter
from dualform.memory.segments import Segment


class Logs:
    """Every parameter's log, read when it is first asked for.

    `doubts` says why the memory is not exact; None if it is.
    """

    def __init__(
        self,
        path: Path,
        segments: Sequence[Segment],
        parameters: Mapping[str, Parameter],
        doubts: str | None,
    ) -> None:
        self._path, self._segments, self._parameters = path, segments, parameters
        self._doubts = doubts
        self._linear: dict[str, ParameterLog] = {}
        self._adaptive: dict[str, AdaptiveLog] = {}

    def linear(self, parameter: str, index: int) -> ParameterLog:
        """The log of a parameter that SGD moved."""
        if parameter not in self._linear:
            rule = self._parameters[parameter].rule
            if rule != "sgd":
                raise QueryError(
                    f"{parameter!r} was trained by the rule {rule!r}, which has no scalar "
                    "coefficients; its log is memory.adaptive_log(name)"
                )
            found = self._read(parameter, index)
            settings = found.pop("settings")
            named = {name: settings[:, i] for i, name in enumerate(HYPERPARAMETERS)}
            self._linear[parameter] = ParameterLog(**found, **named)
        return self._linear[parameter]

    def adaptive(self, parameter: str, index: int) -> AdaptiveLog:
        """The log of a parameter that an adaptive rule moved."""
        if parameter not in self._adaptive:
            rule = self._parameters[parameter].adaptive
            if rule is None:
                raise QueryError(
                    f"{parameter!r} was trained by SGD, or not at all; its log is memory.log(name)"
                )
            self._adaptive[parameter] = AdaptiveLog(rule, **self._read(parameter, index))
        return self._adaptive[parameter]

    def _read(self, parameter: str, index: int) -> dict[str, NDArray[Any]]:
        width = len(names_of_settings(self._parameters[parameter].rule))
        count = len(self._parameters)
        parts = [segment.log(index, count, width) for segment in self._segments]
        empty: dict[str, NDArray[Any]] = {
            "applied": np.zeros(0, np.uint8),
            "kappa": np.zeros(0),
            "first": np.zeros(0, np.int64),
            "fresh": np.zeros(0, np.uint8),
            "settings": np.zeros((0, width)),
        }
        found = {n: np.concatenate([v, *(p[n] for p in parts)]) for n, v in empty.items()}
        found |= {name: found[name].astype(bool) for name in ("applied", "fresh")}
        found["first"] = found["first"].astype(np.int64)
        self._refuse_unknown_rule(parameter, found)
        return found

    def _refuse_unknown_rule(self, parameter: str, found: dict[str, NDArray[Any]]) -> None:
        numbers = np.column_stack([found["kappa"], found["settings"]])
        unknown = np.flatnonzero(found["applied"] & ~np.isfinite(numbers).all(axis=1))
        if not len(unknown):
            return
        if self._doubts is None:
            raise MemoryFileError(
                f"{self._path} is damaged: the log of {parameter!r} at step {unknown[0]} holds "
                "numbers that are not finite"
            )
        raise QueryError(
            f"what the optimizer did with {parameter!r} at step {unknown[0]} is not known "
            f"({self._doubts}), so there are no coefficients. Attention needs none"
        )
