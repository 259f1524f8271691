"""Attention as charts read it: layer by layer, group by group, with names to show.

A group is a value of one column (`label`), or of two together (`task` and `label`); inside this
room it is always a tuple of values. Charts take spotlights, or tables that spotlights gave earlier,
so that a picture can be drawn again after the memory is gone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isfinite, nan
from typing import Any

from dualform.attention import Spotlight
from dualform.errors import QueryError
from dualform.table import Table

Group = tuple[Any, ...]
Readable = Mapping[str, Spotlight | Table] | Spotlight | Table


def by_layer(
    attention: Readable, layers: Sequence[str] | Mapping[str, str] | None
) -> dict[str, Spotlight | Table]:
    """What to draw, under the name it is drawn with: all layers, or the named ones in that order.

    A list of layers chooses, a mapping chooses and names: `{"fc1": "layer 0"}`.
    """
    if isinstance(attention, Spotlight):
        attention = {attention.layer: attention}
    elif isinstance(attention, Table):
        attention = {"": attention}
    if not isinstance(attention, Mapping) or not all(
        isinstance(one, Spotlight | Table) for one in attention.values()
    ):
        raise QueryError(
            f"{type(attention).__name__} was given to draw; expected what dual.attend(...) gives, "
            "one of its spotlights, or their tables, by layer"
        )
    if layers is None:
        layers = list(attention)
    if isinstance(layers, str):
        layers = [layers]
    unknown = [name for name in layers if name not in attention]
    if unknown or not layers:
        have = ", ".join(attention)
        raise QueryError(
            f"layers={layers!r} was asked for; expected some of {have}, or None for all"
        )
    titles = layers if isinstance(layers, Mapping) else {name: _heading(name) for name in layers}
    return {titles[name]: attention[name] for name in layers}


def _heading(layer: str) -> str:
    """What a panel is called: "layer fc1", but not "layer layer 0"."""
    return layer if not layer or layer.lower().startswith("layer") else f"layer {layer}"


def columns_of(by: str | Sequence[str] | None) -> tuple[str, ...]:
    """The columns that make up a group."""
    return () if by is None else (by,) if isinstance(by, str) else tuple(by)


def one_query(table: Table, query: int | None) -> list[dict[str, Any]]:
    """The rows of one query; which one has to be said where there are several."""
    rows = table.rows()
    if "query" not in table.columns:
        if query not in (None, 0):
            raise QueryError(
                f"query={query!r} was asked for, but there is only one: query 0. Leave query out"
            )
        return rows
    known = sorted({row["query"] for row in rows})
    if not known:
        raise QueryError("attention of no input has nothing to draw; attend to at least one")
    if query not in known:
        seen = "and none was chosen" if query is None else f"but query={query!r} was asked for"
        raise QueryError(
            f"this attention has {len(known)} queries, {seen}; a picture shows one. "
            f"Choose query={known[0]} to query={known[-1]}, or attend to one input"
        )
    return [row for row in rows if row["query"] == query]


def cell(row: Mapping[str, Any], columns: Sequence[str]) -> Group:
    """The group that a row of a table belongs to."""
    return tuple(row[column_in(row, name)] for name in columns)


def column_in(row: Mapping[str, Any], name: str) -> str:
    """What a pattern's column is called in a table: a tag never hides a result."""
    found = f"{name} (tag)" if f"{name} (tag)" in row else name
    if found not in row:
        raise QueryError(f"no column {name!r} in this table; it has: {', '.join(row)}")
    return found


def chosen(occurring: Sequence[Group], groups: Sequence[Any] | None) -> list[Group]:
    """The groups to draw, in order: those that occur, or the named ones among them."""
    if groups is None:
        return list(dict.fromkeys(occurring))
    wanted = [one if isinstance(one, tuple) else (one,) for one in groups]
    if not wanted:
        have = ", ".join(repr(_plain(one)) for one in dict.fromkeys(occurring))
        raise QueryError(
            f"groups={groups!r} chooses nothing to draw; expected some of {have}, or None for all"
        )
    for one in wanted:
        if one not in occurring:
            raise _unknown("groups", one, occurring)
    return wanted


def number(row: Mapping[str, Any], column: str) -> float:
    """A number of a table's row, that can be drawn."""
    if column not in row:
        raise QueryError(
            f"the table has no column {column!r} (it has {', '.join(map(str, row))}); expected one "
            "as the spotlight's own tables have it"
        )
    try:
        value = float(row[column])
    except (TypeError, ValueError):
        value = nan
    if not isfinite(value):
        raise QueryError(f"the table's {column!r} holds {row[column]!r}; expected finite numbers")
    return value


def meant(what: str, value: Any, drawn: Sequence[Group]) -> list[Group]:
    """The groups that a class stands for: `3` all whose last value it is, `("mnist", 3)` itself."""
    if value is None:
        return []
    if hasattr(value, "item"):  # a class index may be numpy's or torch's
        value = value.item()
    found = [one for one in drawn if (one if isinstance(value, tuple) else one[-1]) == value]
    if not found:
        raise _unknown(what, value, drawn)
    return found


def _unknown(what: str, value: Any, drawn: Sequence[Group]) -> QueryError:
    shown = _plain(value) if isinstance(value, tuple) else value
    have = ", ".join(repr(_plain(one)) for one in dict.fromkeys(drawn))
    return QueryError(f"{what}={shown!r} names no class that was recorded; there are: {have}")


def _plain(group: Group) -> Any:
    """A group as a user names it."""
    return group[0] if len(group) == 1 else group


def short(group: Group, names: Any) -> str:
    """A group's name on an axis, where its task is shown by colour: its last value."""
    if isinstance(names, Mapping):
        for key in (group, group[-1]):
            if key in names:
                return str(names[key])
    elif names is not None and group[-1] is not None:
        return _by_number(group[-1], names)
    return "–" if group[-1] is None else str(group[-1])


def _by_number(value: Any, names: Any) -> str:
    """A list of names has one for every class: that of class 3 is names[3]."""
    if isinstance(names, str) or not hasattr(names, "__getitem__") or not hasattr(names, "__len__"):
        raise QueryError(f"names={names!r}: expected a list of names, or a dict, class → name")
    if not isinstance(value, int):
        raise QueryError(
            f"names is a list, for classes 0, 1, 2, …, but there is {value!r}; expected a dict, "
            "class → name"
        )
    if not 0 <= value < len(names):
        raise QueryError(
            f"names has {len(names)} names, but there is a class {value}; expected one for every "
            f"class from 0 on, {value + 1} at least, or a dict, class → name"
        )
    return str(names[value])


def labelled(drawn: Sequence[Group], names: Any) -> dict[Group, str]:
    """The full name of every group; no two may be called the same."""
    found = {group: shown(group, names) for group in drawn}
    taken: dict[str, Group] = {}
    for group, name in found.items():
        if taken.setdefault(name, group) != group:
            raise QueryError(
                f"{_plain(taken[name])!r} and {_plain(group)!r} would both be called {name!r}; "
                "expected different names"
            )
    return found


def task_name(task: Any, names: Any) -> str:
    """A task's name: `names` may have it too."""
    named = isinstance(task, str) and isinstance(names, Mapping) and task in names
    return str(names[task]) if named else "–" if task is None else str(task)


def shown(group: Group, names: Any) -> str:
    """A group's name where nothing else says what it is a group of."""
    return " ".join([*(task_name(value, names) for value in group[:-1]), short(group, names)])
