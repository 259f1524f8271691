"""The horizontal axis of pictures drawn class by class: where each class is, and how it is marked.

An axis of numbers, one unit per class, rather than of names: a class can then be as wide as its
sorted weights need, tasks can stand apart, and bars, curves and marks share one scale.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from dualform.charts import style
from dualform.charts.groups import Group, chosen, labelled, meant, short, task_name
from dualform.errors import QueryError

GAP = 0.8
"""Room between two tasks, in classes."""

HEADROOM = 0.24
"""Room for marks above the highest number, as a part of all there is."""

MARKS = {"predicted": "triangle-down", "true": "circle"}
"""What stands above the class that the network predicts, and above the true one."""


PALER = " (others)"


class ClassAxis:
    """Where each class is drawn, what it is called, and how it is marked."""

    def __init__(
        self,
        occurring: Sequence[Group],
        columns: tuple[str, ...],
        groups: Sequence[Any] | None,
        names: Any,
        marked: Mapping[str, Any],
        width: int,
    ) -> None:
        if len(columns) not in (1, 2):
            raise QueryError(f"by={columns!r}: expected a column of classes, or a task and a class")
        self.groups = chosen(occurring, groups)
        if not self.groups:
            raise QueryError(
                "nothing to draw: this attention is over no pattern; expected at least one. Look "
                "at what the mask or the step of this dual form leaves"
            )
        self.tasks = list(dict.fromkeys(group[0] for group in self.groups))
        self.start = self._starts(len(columns) == 2)
        self._columns, self._names, self._width = columns, names, width
        self._full = labelled(self.groups, names)
        self.marked = {kind: meant(kind, value, self.groups) for kind, value in marked.items()}

    def _starts(self, by_task: bool) -> dict[Group, float]:
        at, starts = 0.0, {}
        for before, group in zip([None, *self.groups], self.groups, strict=False):
            at += GAP if by_task and before is not None and before[0] != group[0] else 0.0
            starts[group] = round(at, 6)
            at += 1.0
        return starts

    def about(self, group: Group) -> dict[str, Any]:
        """What every row of a group says about it: its name, and the colour it has."""
        task = task_name(group[0], self._names) if len(group) == 2 else "class"
        is_pale = any(self.marked.values()) and not self._is_marked(group)
        return {"class": self._full[group], "shade": task + (PALER if is_pale else "")}

    def _is_marked(self, group: Group) -> bool:
        return any(group in some for some in self.marked.values())

    def x(self, field: str, title: bool = True) -> Any:
        """The axis, with every class's name at its middle."""
        alt = style.altair()
        names = {f"{self.start[g] + 0.5:g}": short(g, self._names) for g in self.groups}
        longest = max(len(name) for name in names.values())
        end = self.start[self.groups[-1]] + 1
        room = self._width / end  # pixels of a class
        is_tight = longest > 3 or room < style.text_width("0" * longest) + 3
        axis = alt.Axis(
            values=[self.start[group] + 0.5 for group in self.groups],
            # JSON is an expression of Vega's too; a name can be nothing but text in it
            labelExpr=f"{json.dumps(names)}[format(datum.value, '~g')]",
            labelAngle=-45 if is_tight else 0,
            labelFontSize=style.SMALL if len(names) > 12 else style.NORMAL,
            labelOverlap="greedy" if room < style.NORMAL else False,
            grid=False,
            ticks=False,
            domain=False,
            title=self._columns[-1] if title else None,
            titlePadding=4,
        )
        return alt.X(f"{field}:Q", scale=alt.Scale(domain=[0, end], nice=False), axis=axis)

    def y(self, field: str, numbers: Sequence[float], unit: str) -> Any:
        """A vertical axis from zero, with room for marks where there are any."""
        alt = style.altair()
        low, high = min(0.0, *numbers), max(0.0, *numbers)
        high = high if high > low else low + 1.0
        if any(self.marked.values()):
            high += HEADROOM * (high - low)
        scale = alt.Scale(domain=[low, high], nice=False)
        return alt.Y(
            f"{field}:Q", title=unit, scale=scale, axis=style.few_ticks(numbers), stack=None
        )

    def colour(self) -> Any:
        """A colour per task, or one for all; paler for classes beside those that are marked."""
        alt = style.altair()
        tasks = ["class"]
        if len(self._columns) == 2:
            tasks = [task_name(task, self._names) for task in self.tasks]
        full = style.colours(len(tasks), "tasks")
        scale = alt.Scale(
            domain=tasks + [task + PALER for task in tasks],
            range=full + [style.paler(colour) for colour in full],
        )
        legend = alt.Legend(title=None, symbolType="square", values=tasks)
        return alt.Color("shade:N", scale=scale, legend=None if tasks == ["class"] else legend)

    def marks(self, heads: Mapping[Group, tuple[float, float]], x: Any, y: Any) -> list[Any]:
        """Signs above the marked classes, on these axes, for rows that name their place x and y.

        `heads` is where each class's drawing is highest.
        """
        alt = style.altair()
        kinds = [kind for kind, some in self.marked.items() if some]
        scale = alt.Scale(domain=kinds, range=[MARKS[kind] for kind in kinds])
        legend = alt.Legend(title=None, symbolFillColor=style.INK, symbolStrokeWidth=0)
        rows: dict[int, list[dict[str, Any]]] = {}
        for place, kind in enumerate(kinds):
            for group in self.marked[kind]:
                if group in heads:
                    at, high = heads[group]
                    below = sum(group in self.marked[other] for other in kinds[:place])
                    row = {"x": at, "y": max(0.0, high), "mark": kind}
                    rows.setdefault(-8 - 11 * below, []).append(row)
        return [
            alt.Chart(alt.Data(values=some))
            .mark_point(filled=True, color=style.INK, opacity=1, size=46, yOffset=up, aria=False)
            .encode(x=x, y=y, shape=alt.Shape("mark:N", scale=scale, legend=legend))
            for up, some in rows.items()
        ]
