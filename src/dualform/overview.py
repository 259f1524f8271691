"""What a memory holds, at a glance: the facts in plain values, and how they look as text.

Users ask first how finely a memory can say who wrote a parameter, and what patterns do not explain
of it; so that is said parameter by parameter, in words. How large that remainder is takes a walk
through the patterns: `verify` says it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.filesize import decimal
from rich.padding import Padding
from rich.table import Table as Grid
from rich.text import Text

import dualform
from dualform.certificate.replay import Record
from dualform.learning_rules import classes
from dualform.memory import Parameter

LISTED_EVENTS = 5
"""Of more events only the last are printed."""

LISTED_VALUES = 12
"""A column with at most so many values is listed; of others the range is given."""


def facts(memory: dualform.Memory) -> dict[str, Any]:
    """Everything `dualform info` says, fit for `json.dumps`; sizes in bytes.

    Example:
        >>> from dualform.overview import facts
        >>> facts(dualform.Memory.open("runs/digits"))["steps"]         # doctest: +SKIP
        600
    """
    return {
        "path": str(memory.path),
        "steps": memory.steps,
        "every": memory.every,
        "closed": memory.closed,
        "being_recorded": memory.is_being_recorded,
        "bytes_on_disk": memory.bytes_on_disk,
        "layers": [_layer(memory.layer(name)) for name in memory.layers],
        "columns": [_column(memory, name) for name in memory.columns],
        "parameters": [_parameter(memory, p) for p in memory.parameters.values()],
        "buffers": [
            {"name": b.name, "shape": list(b.shape), "dtype": _dtype(b.dtype)}
            for b in memory.buffers.values()
        ],
        "phases": [phase._asdict() for phase in memory.phases],
        "events": [event._asdict() for event in memory.events],
        "environment": dict(memory.environment),
        "remarks": list(memory.remarks),
    }


def draw(found: dict[str, Any]) -> Iterator[RenderableType]:
    """The facts as text."""
    yield _head(found)
    yield _grid(
        "layer",
        ["layer", "d_in → d_out", "kept", "rows", "dtype", "parameters"],
        [
            [
                la["name"],
                f"{la['in_features']} → {la['out_features']}",
                la["keep"],
                f"{la['rows']:,}",
                la["dtype"],
                ", ".join(filter(None, (la["weight"], la["bias"]))),
            ]
            for la in found["layers"]
        ],
    )
    yield _grid(
        "parameter",
        ["parameter", "shape", "kept as", "not explained by patterns"],
        [[p["name"], _shape(p["shape"]), p["keep"], _remainder(p)] for p in found["parameters"]],
    )
    if found["buffers"]:
        yield _grid(
            "buffer",
            ["buffer", "shape"],
            [[b["name"], _shape(b["shape"])] for b in found["buffers"]],
        )
    yield _grid(
        "column",
        ["column", "values", ""],
        [[c["name"], f"{c['distinct']:,}", _values(c)] for c in found["columns"] if c["distinct"]],
    )


def draw_sum(contribution: dualform.Contribution) -> RenderableType:
    """The parts of an output, their sum, and the same output as the network gives it."""
    grid = Grid.grid(padding=(0, 3))
    grid.add_column()
    grid.add_column(justify="right")
    for name, value in contribution.shares.items():
        grid.add_row(name, f"{value:+.6g}")
    grid.add_row("= total (dual form)", Text(f"{contribution.total:+.6g}", style="bold"))
    grid.add_row("the network (primal form)", f"{contribution.primal:+.6g}")
    grid.add_row("residual", f"{contribution.residual:+.1e}")
    head = Text(f"Contribution to {contribution.target}, layer {contribution.layer}", style="bold")
    return Group(head, Padding(grid, (0, 0, 0, 2)))


def narrow(table: dualform.Table) -> dualform.Table:
    """The table without the recorder's own columns where they say nothing, to fit the screen."""
    idle = [n for n in ("microbatch", "call", "position") if n in table.columns]
    idle = [name for name in idle if len(set(table[name].tolist())) < 2]
    kept = {name: table[name] for name in table.columns if name not in idle}
    return dualform.Table(kept, table.caption)


def _layer(layer: dualform.LayerMemory) -> dict[str, Any]:
    return {
        "name": layer.name,
        "kind": layer.kind,
        "keep": layer.keep,
        "in_features": layer.in_features,
        "out_features": layer.out_features,
        "rows": layer.rows,
        "dtype": _dtype(layer.stored),
        "trained_in": _dtype(layer.dtype),
        "weight": layer.weight,
        "bias": layer.bias,
    }


def _parameter(memory: dualform.Memory, known: Parameter) -> dict[str, Any]:
    not_explained, why = _unexplained(memory, known)
    return {
        "name": known.name,
        "shape": list(known.shape),
        "dtype": _dtype(known.dtype),
        "keep": known.keep,
        "layers": list(known.layers),
        "kept_states": len(memory.kept.steps(known.name)),
        "not_explained": not_explained,
        "why": why,
    }


def _unexplained(memory: dualform.Memory, known: Parameter) -> tuple[str, str]:
    """How much of what it learned patterns do not explain: nothing, a part or all of it; and why.

    Its share is not known here: `verify` says it.
    """
    record = Record(memory, known.name)
    moved = record.log.moved
    if not moved.any():
        return "nothing", "no optimizer moved it"
    if not record.explained[moved].any():
        return "all of it", known.why or record.cause(int(moved.argmax()))
    ways = record.stretches(classes())
    reasons = dict.fromkeys(way.broken for way in ways if way.broken)
    return ("a part of it" if reasons else "nothing"), "; ".join(reasons)


def _column(memory: dualform.Memory, name: str) -> dict[str, Any]:
    tables = [memory.layer(layer).patterns for layer in memory.layers]
    found = {v for table in tables for v in table.values(name)}
    values = sorted(v for v in found if not (isinstance(v, float) and math.isnan(v)))
    plain = [v.item() if hasattr(v, "item") else v for v in values]
    listed = plain if len(plain) <= LISTED_VALUES else None
    ends = {"lowest": plain[0], "highest": plain[-1]} if plain else {}
    return {"name": name, "distinct": len(plain), "values": listed, **ends}


def _head(found: dict[str, Any]) -> RenderableType:
    grid = Grid.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    grid.add_row("memory", Text(found["path"]))
    grid.add_row("steps", f"{found['steps']:,} ({_state(found)})")
    if found["every"] > 1:
        grid.add_row("patterns", f"of one of every {found['every']} steps")
    whole = [p for p in found["parameters"] if p["not_explained"] == "nothing"]
    if len(whole) == len(found["parameters"]):
        grid.add_row("explained", Text("every update of every parameter", style="green"))
    else:
        said = (
            f"every update of {len(whole)} of {len(found['parameters'])} parameters; what is not "
            "is listed below, and its share is said by: dualform verify"
        )
        grid.add_row("explained", Text(said, style="yellow"))
    grid.add_row("on disk", f"{decimal(found['bytes_on_disk'])} ({found['bytes_on_disk']:,} bytes)")
    for phase in found["phases"]:
        grid.add_row("phase", Text(_phase(phase)))
    known = ", ".join(f"{name} {value}" for name, value in found["environment"].items())
    grid.add_row("recorded with", Text(known))
    for said in _events(found):
        grid.add_row("event", Text(said, style="yellow"))
    for remark in found["remarks"]:
        grid.add_row("remark", Text(remark, style="yellow"))
    return grid


def _state(found: dict[str, Any]) -> str:
    if found["being_recorded"]:
        return "still being recorded"
    return f"the recording {'ended' if found['closed'] else 'did not end'} normally"


def _phase(phase: dict[str, Any]) -> str:
    said = f"{phase['began']} at step {phase['first_step']:,} ({phase['when']})"
    if phase["rewound_from"] is not None:
        said += f", rewound from step {phase['rewound_from']:,}"
    return said


def _events(found: dict[str, Any]) -> Iterator[str]:
    """The last events, each in a sentence, but for those that a remark tells already."""
    events = [event for event in found["events"] if event["why"] not in found["remarks"]]
    if len(events) > LISTED_EVENTS:
        yield f"{len(events) - LISTED_EVENTS} earlier ones (--json lists them)"
    for event in events[-LISTED_EVENTS:]:
        said = (
            event["why"] if event["to"] is None else f"{event['why']}, that after {event['to']:,}"
        )
        yield f"after {event['step']:,} updates: {said} ({_some(event['parameters'])})"


def _some(names: Sequence[str]) -> str:
    listed = ", ".join(names[:3]) or "every parameter"
    return listed + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _remainder(parameter: dict[str, Any]) -> str:
    """What patterns do not explain of a parameter."""
    said = "" if parameter["not_explained"] == "nothing" else parameter["not_explained"]
    return f"{said}: {parameter['why']}" if said and parameter["why"] else said or parameter["why"]


def _values(column: dict[str, Any]) -> str:
    if column["values"] is not None:
        return ", ".join(map(str, column["values"]))
    return f"{column['lowest']} … {column['highest']}"


def _grid(title: str, heads: list[str], rows: list[list[str]]) -> RenderableType:
    grid = Grid(box=None, pad_edge=False, padding=(0, 3, 0, 0), header_style="dim")
    for head in heads:
        grid.add_column(head, overflow="fold", justify="right" if head == "rows" else "left")
    for row in rows:
        grid.add_row(*map(Text, row))
    return Padding(grid, (1, 0, 0, 0)) if rows else Text(f"\nno {title}s", style="dim")


def _shape(shape: list[int]) -> str:
    return " × ".join(map(str, shape)) or "scalar"


def _dtype(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")
