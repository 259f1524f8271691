"""What a segment is made of: whole steps, ready to be written, and the names of their tensors.

There are four families of tensors: rows, columns, the log, what was kept. The recorder hands them
over by layer, field and parameter; this file alone knows what they are called.

Why it is hard: what was kept may change its type in mid-segment (another optimizer takes over), and
the same step may be kept twice (before and after an edit). Tensors of one type and shape are
stacked; a step's last state counts, as a whole.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dualform.memory.fields import quoted

Array = NDArray[Any]
Plain = None | bool | int | float | str
Kept = tuple[str, str, int, "Tensor | Plain"]
"""What ("weights", "state.exp_avg", "gradient", "fingerprint", "buffer"), of which parameter or
buffer, after how many updates (a gradient: in which update), the value. States may be plain."""

LOG: dict[str, torch.dtype] = {
    "moved": torch.uint8,
    "setting": torch.int32,
    "fresh": torch.uint8,
    "carried": torch.uint8,
    "kappa": torch.float64,
    "explained": torch.uint8,
    "seen": torch.float64,
    "mark": torch.uint32,
    "state_mark": torch.uint32,
}
"""What the log says of every step and parameter, [steps, parameters]."""

USE = ("step", "microbatch", "call", "order", "dtype", "rows", "positions", "start", "layout")
"""The columns of the table of uses, a line for every use of a layer: which backward pass of its
step, which forward call (a number that rises), as the how-manieth of all layers its pass arrived at
it, the place of the compute dtype in `COMPUTED_IN`, rows, positions per example, the first of its
rows in the tag columns (-1: no tags), what the kind said of its memory. Further columns are the
leading shape, -1 beyond it."""
ROWS, START = USE.index("rows"), USE.index("start")

COMPUTED_IN = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
"""The dtypes that products are computed in; a use holds the place in this list."""

REFERENCES, SCALES = "keys.references", ".scales"


def rows_name(layer: str, part: str) -> str:
    """`keys`, `error_signals`, `weight`, `bias`, or what belongs to one of them, row by row."""
    return f"rows/{quoted(layer)}/{part}"


def column_name(what: str, name: str, parameter: str | None = None) -> str:
    """`uses` of a layer, `tags` by name, what was `lost` of a layer's parameter."""
    of = "" if parameter is None else f"/{quoted(parameter)}"
    return f"columns/{what}/{quoted(name)}{of}"


def use_table(
    lines: Sequence[Sequence[int]], shapes: Sequence[tuple[int, ...]]
) -> NDArray[np.int64]:
    """The uses of a layer, from what `USE` names and the leading shape of each."""
    table = np.full((len(lines), len(USE) + max(map(len, shapes), default=0)), -1, np.int64)
    for to, line, shape in zip(table, lines, shapes, strict=True):
        to[: len(USE) + len(shape)] = (*line, *shape)
    return table


def stacked_uses(tables: Sequence[NDArray[np.int64]]) -> NDArray[np.int64]:
    """Tables of uses as one, as wide as the widest."""
    width = max((table.shape[1] for table in tables), default=len(USE))
    fill = [((0, 0), (0, width - table.shape[1])) for table in tables]
    wide = [np.pad(t, by, constant_values=-1) for t, by in zip(tables, fill, strict=True)]
    return np.concatenate([np.zeros((0, width), np.int64), *wide])


@dataclass
class SegmentContent:
    """Some steps, ready to be written. There may be none: then it says more of the state reached.

    `rows` are a layer's parts by name: keys, error_signals, weight, bias, keys.references (int32),
    error_signals.scales (float32). `uses` are made by `use_table`; `tags` int64 or float64, a value
    for every row that uses refer to; `lost` float64 [uses, 2], by layer and parameter.
    """

    first_step: int
    steps: int
    rows: dict[str, list[tuple[str, Tensor]]] = field(default_factory=dict)
    uses: dict[str, NDArray[np.int64]] = field(default_factory=dict)
    tags: dict[str, Array] = field(default_factory=dict)
    lost: dict[str, dict[str, Array]] = field(default_factory=dict)
    log: dict[str, Array] = field(default_factory=dict)
    kept: list[Kept] = field(default_factory=list)
    news: dict[str, Any] = field(default_factory=dict)

    @property
    def bytes(self) -> int:
        """The size of its rows."""
        return sum(found.nbytes for parts in self.rows.values() for _, found in parts)

    def packed(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """The tensors of the file, and what its line says."""
        tensors: dict[str, Any] = {}
        rows, distinct, same_keys = {}, {}, dict[str, str]()
        stored: list[tuple[str, Tensor]] = []
        for layer, table in self.uses.items():
            if not len(table):
                continue
            rows[layer], parts = int(table[:, ROWS].sum()), dict(self.rows[layer])
            if REFERENCES in parts:
                distinct[layer] = len(parts["keys"])
            elif (keys := parts.get("keys")) is not None:
                if (same := _same_as(keys, stored)) is None:
                    stored.append((layer, keys))
                else:
                    same_keys[layer] = same
                    del parts["keys"]
            tensors[column_name("uses", layer)] = table
            tensors |= {rows_name(layer, part): found for part, found in parts.items()}
        for layer, of in self.lost.items():
            tensors |= {
                column_name("lost", layer, parameter): lost for parameter, lost in of.items()
            }
        for name, values in self.tags.items():
            dtype = np.float64 if values.dtype.kind == "f" else np.int64
            tensors[column_name("tags", name)] = values.astype(dtype)
        for name, log_dtype in LOG.items() if self.steps else ():
            tensors[f"log/{name}"] = torch.as_tensor(self.log[name]).to(log_dtype)
        kept = _by_nature(self.kept)
        tensors |= {name: torch.stack(values) for name, (_, values) in kept.items()}
        return {name: torch.as_tensor(value) for name, value in tensors.items()}, {
            "first_step": self.first_step,
            "steps": self.steps,
            "rows": rows,
            "distinct": distinct,
            "same_keys": same_keys,
            "kept": {name: steps for name, (steps, _) in kept.items()},
            "news": {what: said for what, said in self.news.items() if said},
        }


def _same_as(keys: Tensor, stored: Sequence[tuple[str, Tensor]]) -> str | None:
    """The layer whose stored keys are these, to the bit: both were given the same input."""
    for layer, other in stored:
        if (keys.shape, keys.dtype) == (other.shape, other.dtype):
            bits = (keys.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))
            if torch.equal(bits[0][:1], bits[1][:1]) and torch.equal(*bits):
                return layer
    return None


def _by_nature(kept: Sequence[Kept]) -> dict[str, tuple[list[int], list[Tensor]]]:
    """Steps and values of each tensor, `kept/WHAT/NAME/float32[4,6]`, in the order of steps; what
    is no tensor is kept as JSON, in bytes: `json[4]`."""
    whole = {(name, step): i for i, (what, name, step, _) in enumerate(kept) if what == "weights"}
    found: dict[str, tuple[list[int], list[Tensor]]] = {}
    for i, (what, name, step, value) in sorted(enumerate(kept), key=lambda item: item[1][2]):
        is_state = what == "weights" or what.startswith("state.")
        if is_state and i < whole.get((name, step), 0):
            continue  # a whole state of this step came later
        dtype = str(value.dtype).removeprefix("torch.") if isinstance(value, Tensor) else "json"
        if not isinstance(value, Tensor):
            value = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        nature = f"{dtype}[{','.join(map(str, value.shape))}]"
        full = f"kept/{quoted(what)}/{quoted(name)}/{nature}"
        steps, values = found.setdefault(full, ([], []))
        steps.append(step)
        values.append(value)
    return found
