"""What a model consists of, to see that a loop has put other parameters in place of some."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from operator import is_
from typing import TYPE_CHECKING, Any

from torch import nn

if TYPE_CHECKING:
    from dualform.recording.watched import Watched


class Members:
    """Every module and parameter of a model, and where it is held."""

    def __init__(self, model: nn.Module, parameters: Sequence[Watched]) -> None:
        self._model, self._parameters = model, parameters
        self.replaced = 0
        """How many other objects were found in place of parameters so far."""
        self._look()

    def _look(self) -> None:
        both = ((m._modules, m._parameters) for m in self._model.modules())
        self._tables: list[dict[str, Any]] = [table for pair in both for table in pair if table]
        self._found = list(chain.from_iterable(map(dict.values, self._tables)))
        self.by_id = {id(w.tensor): w for w in reversed(self._parameters)}

    def follow(self) -> None:
        """Take up what the loop has put in place of parameters, under the same names."""
        if all(map(is_, chain.from_iterable(map(dict.values, self._tables)), self._found)):
            return
        named = dict(self._model.named_parameters(remove_duplicate=False))
        for w in self._parameters:
            found = named.get(w.name)  # None, or no parameter: pruned or parametrized since, say
            if found is not w.tensor and isinstance(found, nn.Parameter):
                w.tensor, self.replaced = found, self.replaced + 1
        self._look()
