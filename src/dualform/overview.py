"""What a memory holds, at a glance: the facts in plain values, and how they look as text.

Users ask first whether a memory is complete and exact, and how each parameter is covered; so that
is said parameter by parameter, in words.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from rich.console import Group, RenderableType
from rich.filesize import decimal
from rich.padding import Padding
from rich.table import Table as Grid
from rich.text import Text

import dualform as df

LISTED_VALUES = 12
"""A column with at most so many values is listed; of others the range is given."""


def facts(memory: df.Memory) -> dict[str, Any]:
    """Everything `dualform info` says, fit for `json.dumps`; sizes in bytes.

    Example:
        >>> from dualform.overview import facts
        >>> facts(df.Memory.open("runs/digits"))["exact"]         # doctest: +SKIP
        True
    """
    return {
        "path": str(memory.path),
        "steps": memory.steps,
        "every": memory.every,
        "exact": memory.exact,
        "closed": memory.closed,
        "being_recorded": memory.is_being_recorded,
        "bytes_on_disk": memory.bytes_on_disk,
        "layers": [_layer(memory.layer(name)) for name in memory.layers],
        "columns": [_column(memory, name) for name in memory.columns],
        "parameters": [
            {
                "name": p.name,
                "shape": list(p.shape),
                "dtype": _dtype(p.dtype),
                "coverage": p.coverage,
                "every": memory.every if p.coverage == "patterns" else 1,
                "role": p.role,
                "layers": list(p.layers),
                "accumulated_since": p.accumulated_since,
            }
            for p in memory.parameters.values()
        ],
        "buffers": [
            {"name": b.name, "shape": list(b.shape), "dtype": _dtype(b.dtype)}
            | {"coverage": b.coverage}
            for b in memory.buffers.values()
        ],
        "snapshots": list(memory.snapshot_steps),
        "phases": [asdict(phase) for phase in memory.phases],
        "conversions": [asdict(conversion) for conversion in memory.conversions],
        "environment": memory.environment,
        "remarks": list(memory.remarks),
    }


def draw(found: dict[str, Any]) -> Iterator[RenderableType]:
    """The facts as text."""
    yield _head(found)
    yield _grid(
        "layer",
        ["layer", "d_in → d_out", "patterns", "dtype", "parameters"],
        [
            [
                la["name"],
                f"{la['in_features']} → {la['out_features']}",
                f"{la['patterns']:,}",
                la["dtype"] + ("" if la["error_signals"] else ", keys alone"),
                ", ".join(filter(None, (la["weight"], la["bias"]))),
            ]
            for la in found["layers"]
        ],
    )
    yield _grid(
        "parameter",
        ["parameter", "shape", "covered by"],
        [[p["name"], _shape(p["shape"]), _coverage(p)] for p in found["parameters"]],
    )
    if found["buffers"]:
        yield _grid(
            "buffer",
            ["buffer", "shape", "kept"],
            [[b["name"], _shape(b["shape"]), _kept(b)] for b in found["buffers"]],
        )
    yield _grid(
        "column",
        ["column", "values", ""],
        [[c["name"], f"{c['distinct']:,}", _values(c)] for c in found["columns"] if c["distinct"]],
    )


def draw_sum(contribution: df.Contribution) -> RenderableType:
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


def narrow(table: df.Table) -> df.Table:
    """The table without the recorder's own columns where they say nothing, to fit the screen."""
    idle = [n for n in ("microbatch", "call", "position") if n in table.columns]
    idle = [name for name in idle if len(set(table[name].tolist())) < 2]
    kept = {name: table[name] for name in table.columns if name not in idle}
    return df.Table(kept, table.caption)


def _layer(layer: df.LayerMemory) -> dict[str, Any]:
    return {
        "name": layer.name,
        "kind": layer.kind,
        "in_features": layer.in_features,
        "out_features": layer.out_features,
        "patterns": layer.rows,
        "dtype": _dtype(layer.stored),
        "trained_in": _dtype(layer.dtype),
        "error_signals": layer.has_error_signals,
        "weight": layer.weight,
        "bias": layer.bias,
    }


def _column(memory: df.Memory, name: str) -> dict[str, Any]:
    tables = [memory.layer(layer).patterns for layer in memory.layers]
    found = {v for table in tables for v in table.values(name)}
    values = sorted(v for v in found if not (isinstance(v, float) and math.isnan(v)))
    plain = [v.item() if hasattr(v, "item") else v for v in values]
    listed = plain if len(plain) <= LISTED_VALUES else None
    ends = {"lowest": plain[0], "highest": plain[-1]} if plain else {}
    return {"name": name, "distinct": len(plain), "values": listed, **ends}


def _head(found: dict[str, Any]) -> RenderableType:
    exact = "yes: every step was explained" if found["exact"] else "NO: see the remarks"
    state = "ended normally" if found["closed"] else "did not end normally"
    grid = Grid.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    grid.add_row("memory", Text(found["path"]))
    grid.add_row("steps", f"{found['steps']:,} ({_state(found, state)})")
    if found["every"] > 1:
        grid.add_row("patterns", f"of one of every {found['every']} steps")
    grid.add_row("exact", Text(exact, style="green" if found["exact"] else "bold red"))
    grid.add_row("on disk", f"{decimal(found['bytes_on_disk'])} ({found['bytes_on_disk']:,} bytes)")
    if found["snapshots"]:
        kept = ", ".join(f"{step:,}" for step in found["snapshots"][-5:])
        more = len(found["snapshots"]) - 5
        grid.add_row("snapshots", f"step {kept}" + (f" and {more} earlier" if more > 0 else ""))
    for phase in found["phases"]:
        grid.add_row("phase", Text(_phase(phase)))
    for conversion in found["conversions"]:
        grid.add_row("converted", Text(f"{conversion['what']} ({conversion['when']})"))
    known = ", ".join(f"{name} {value}" for name, value in found["environment"].items())
    grid.add_row("recorded with", Text(known))
    for remark in found["remarks"]:
        grid.add_row("remark", Text(remark, style="yellow"))
    return grid


def _state(found: dict[str, Any], state: str) -> str:
    return "still being recorded" if found["being_recorded"] else f"the recording {state}"


def _phase(phase: dict[str, Any]) -> str:
    said = f"{phase['began']} at step {phase['first_step']:,} ({phase['when']})"
    if phase["rewound_from"] is not None:
        said += f", rewound from step {phase['rewound_from']:,}"
    return said + (f", momentum {phase['momentum']}" if phase["momentum"] != "none" else "")


def _coverage(parameter: dict[str, Any]) -> str:
    coverage = str(parameter["coverage"])
    if coverage == "patterns":
        said = f"every pattern of {', '.join(parameter['layers'])}"
        every = parameter["every"]
        return said if every == 1 else f"{said}, one of every {every} steps; the others as a sum"
    if coverage == "accumulated":
        since = parameter["accumulated_since"]
        return f"its learned part, kept now and then from step {since} on; no patterns"
    return {
        "steps": "its gradient at every step; no patterns",
        "untrained": "not trained: it never had a gradient",
    }.get(coverage, coverage)


def _kept(buffer: dict[str, Any]) -> str:
    return "its value at every change" if buffer["coverage"] == "recorded" else "constant"


def _values(column: dict[str, Any]) -> str:
    if column["values"] is not None:
        return ", ".join(map(str, column["values"]))
    return f"{column['lowest']} … {column['highest']}"


def _grid(title: str, heads: list[str], rows: list[list[str]]) -> RenderableType:
    grid = Grid(box=None, pad_edge=False, padding=(0, 3, 0, 0), header_style="dim")
    for head in heads:
        grid.add_column(head, overflow="fold", justify="right" if head == "patterns" else "left")
    for row in rows:
        grid.add_row(*map(Text, row))
    return Padding(grid, (1, 0, 0, 0)) if rows else Text(f"\nno {title}s", style="dim")


def _shape(shape: list[int]) -> str:
    return " × ".join(map(str, shape)) or "scalar"


def _dtype(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")
