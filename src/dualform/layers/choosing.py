"""keep=: how finely the memory of each layer can say who wrote it, chosen by name.

One word for all, or a word for each name pattern (`*`, `?`, `[…]`, matched against whole names;
upper and lower case differ), of which the first that fits a layer's name counts. A pattern that
matches nothing is a typing error that would otherwise cost a training run, so it is refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase

from dualform.errors import RecordingError
from dualform.layers import kinds
from dualform.layers.layer import Layer

WORDS = ("patterns", "keys", "examples", "values", "auto")
"""What may be kept: rows with error signals, rows alone, sums by example, snapshots; or what suits
the kind of layer best."""


class Keep:
    """What the user's keep= means for each layer."""

    def __init__(self, keep: str | Mapping[str, str]) -> None:
        if not isinstance(keep, (str, Mapping)):
            raise RecordingError(
                f"keep={keep!r} was given; expected one of {_listed(WORDS)} for all layers, or a "
                'mapping such as {"head": "patterns", "*": "values"}'
            )
        self._patterns = {"*": keep} if isinstance(keep, str) else dict(keep)
        for pattern, word in self._patterns.items():
            if word not in WORDS or not isinstance(pattern, str):
                given = keep if isinstance(keep, str) else {pattern: word}
                later = ', which comes later; "auto" is the default' * (word == "smallest")
                raise RecordingError(
                    f"keep={given!r} was given{later}; expected one of the words {_listed(WORDS)}, "
                    "for all layers or for each layer's name (or pattern of names)"
                )

    def check(self, layers: Iterable[Layer], others: Iterable[str] = ()) -> None:
        """Raise `RecordingError` if a pattern matches nothing, or a word cannot be a layer's;
        `others` are names that are no layers now: parameters, or layers that may come up later."""
        names, others = [layer.name for layer in layers if self.word(layer)], list(others)
        for pattern in self._patterns:
            if not any(fnmatchcase(name, pattern) for name in [*names, *others, ""]):
                raise RecordingError(
                    f"keep={{{pattern!r}: ...}} matches no layer; this model's layers are "
                    f"{', '.join(names) or 'none that can be recorded'}"
                    + (f"; beside them there are {', '.join(others[:20])}" if others else "")
                )

    def word(self, layer: Layer) -> str:
        """What is kept of a layer. A word that its kind cannot do is an error if the layer was
        named; with wildcards it means what suits it best, or for keys alone its values."""
        kind = kinds.of(layer.kind)
        pattern = next((p for p in self._patterns if fnmatchcase(layer.name, p)), "*")
        word = self._patterns.get(pattern, "auto")
        if word in kind.words:
            return word
        if word != "auto" and not set("*?[") & set(pattern):
            raise RecordingError(
                f"keep={{{pattern!r}: {word!r}}} was given, but {layer.name!r} is of kind "
                f"{kind.name!r}; expected one of {_listed((*kind.words, 'auto'))}"
            )
        return "values" if word == "keys" else kind.keep(layer)


def _listed(words: Iterable[str]) -> str:
    return ", ".join(f'"{word}"' for word in words)
