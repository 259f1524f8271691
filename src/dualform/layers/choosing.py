"""Choosing layers by name: `layers="fc1"`, `layers=["encoder.*", "head"]`.

Patterns are those of file names (`*`, `?`, `[…]`), matched against whole names; upper and lower
case differ. A pattern that matches nothing is a typing error that would otherwise cost a training
run, so it is refused, and the names there are listed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

from dualform.errors import RecordingError

NamePatterns = str | Sequence[str] | None
"""One pattern, several of them, or None for everything."""


def is_chosen(name: str, patterns: NamePatterns) -> bool:
    """Whether a name matches."""
    if patterns is None:
        return True
    listed = [patterns] if isinstance(patterns, str) else patterns
    return any(fnmatchcase(name, pattern) for pattern in listed)


def chosen_names(
    names: Iterable[str],
    patterns: NamePatterns,
    option: str,
    others: Iterable[str] = (),
    *,
    none: bool = False,
) -> list[str]:
    """The names that match, in their own order; `option` is what the user called the patterns.

    `others` are names that may come up later: a pattern may mean them alone. `none`: whether an
    empty list is a choice.
    """
    known = list(names)
    if patterns is None:
        return known
    listed = [patterns] if isinstance(patterns, str) else patterns
    possible = [*known, *others]
    names_given = isinstance(listed, Sequence) and all(isinstance(p, str) for p in listed)
    if not names_given or not (listed or none):
        raise RecordingError(
            f"{option}={patterns!r} was given; expected a layer's name, a pattern such as 'fc*', "
            f"or a list of them{' ([] for none)' if none else ''}"
        )
    for pattern in listed:
        if not any(fnmatchcase(name, pattern) for name in possible):
            raise RecordingError(
                f"{option}={pattern!r} matches no layer; this model's layers are "
                f"{', '.join(possible) or 'none that can be recorded'}"
            )
    return [name for name in known if is_chosen(name, listed)]
