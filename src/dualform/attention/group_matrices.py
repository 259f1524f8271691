"""What each group of patterns wrote into a layer, as matrices: masks become sums of a few of them.

ΔW_A = Σ_{t in A} c_t δ_t x_tᵀ is all that the patterns of A ever wrote. Patterns are divided by the
columns that masks ask about (task, label, …), all groups in one pass, which costs what rebuilding
the weights once costs. From then on any mask over those columns, of any strength, is a sum of
matrices: no pattern is looked at again.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dualform.attention import engine, grouping
from dualform.attention.masks import Mask
from dualform.attention.tables import kept
from dualform.layers.kinds import write
from dualform.memory import LayerMemory

MOST_GROUPS = 64
LARGEST = 1 << 28
"""Groups, and bytes of their matrices, up to which they are worth having."""


def columns_of(masks: tuple[Mask, ...], layer: LayerMemory) -> tuple[str, ...] | None:
    """The columns that decide what masks do to a layer's patterns; None if it is not columns."""
    concerned = [mask for mask in masks if mask.concerns(layer.name)]
    if any(mask.rows is not None for mask in concerned):
        return None
    return tuple(sorted({column for mask in concerned for column in mask.where}))


def are_worth_having(layer: LayerMemory, cells: grouping.Cells) -> bool:
    """Whether matrices of all these groups fit."""
    size = (layer.in_features + 1) * layer.out_features * 8
    return len(cells.values) <= MOST_GROUPS and len(cells.values) * size <= LARGEST


def group_matrices(
    layer: LayerMemory,
    cells: grouping.Cells,
    about: str,
    weight: engine.Reals | None,
    bias: engine.Reals | None,
) -> tuple[Tensor | None, Tensor | None]:
    """Σ weight_t δ_t x_tᵀ [groups, d_out, d_in] and Σ bias_t δ_t [groups, d_out], float64.

    `about` names the coefficients and columns; sums that are already known are not made again.
    """
    about = f"learned {'weight' * (weight is not None)} {'bias' * (bias is not None)} {about}"
    table = kept(layer, about, lambda: _build(layer, cells, weight, bias))
    return table.get("weight"), table.get("bias")


def _build(
    layer: LayerMemory,
    cells: grouping.Cells,
    weight: engine.Reals | None,
    bias: engine.Reals | None,
) -> dict[str, Tensor]:
    groups, shape = len(cells.values), layer.shape
    table: dict[str, Tensor] = {}
    included = np.zeros(layer.rows, bool)
    for name, numbers, of in (("weight", weight, shape), ("bias", bias, (layer.out_features,))):
        if numbers is not None:
            table[name] = torch.zeros(groups, *of, dtype=torch.float64)
            included |= numbers != 0
    for part in engine.scan(layer, included, keys=weight is not None):
        codes = cells.codes[part.rows]
        for group in np.unique(codes).tolist():
            inside = _where(codes, group)
            rows, signals = part.rows[inside.numpy()], part.error_signals[inside]
            if weight is not None:
                scaled = signals * torch.from_numpy(weight[rows])[:, None]
                write(layer.kind, table["weight"][group], part.keys[inside], scaled)
            if bias is not None:
                table["bias"][group] += torch.from_numpy(bias[rows]) @ signals
    return table


def _where(codes: NDArray[np.int64], group: int) -> Tensor:
    return torch.from_numpy(np.flatnonzero(codes == group))
