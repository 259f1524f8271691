"""How far rounding may put a number off: three bounds, each defined here and nowhere else.

    sum_bound    a sum of δ (x·v) over patterns, given how large its terms are
    walk         a rule with scalars only, along v, from one known point to the next
    measured     any other rule: the same replay in two precisions, what it differs by

Every check starts afresh from bits that were kept, so rounding may be taken at its worst in time
and at random across a row: a bound is the rule's own recursion with absolute values,

    e_g ← λ e_W + u |g|      e_m ← μ e_m + e_g + u |m|      e_W ← e_W + η e_m + ½u |W| + u |ηm|

Why it is hard: a bound must hold for honest runs of every size, and still find one learning rate
that is off by 2e-4. What each line is for was found by trying: the room of a sum comes from ‖x‖,
never from x·v, which may be small by chance where x is not; |W| is the largest on the way, since
entries cross zero; a few steps do not average.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dualform.learning_rules import Factors

DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
ROUNDING = {dtype: torch.finfo(dtype).eps / 2 for dtype in DTYPES}
"""u: half a unit in the last place of 1, by dtype."""

SMALLEST = {f.eps / 2: f.smallest_normal * f.eps for f in map(torch.finfo, DTYPES)}
"""The smallest number of a dtype, by u: below some 2/u of it roundings are as large as this."""

SUM = 16.0  # how many roundings of its terms a sum may be off by
LEAST = 2.0**-120  # below this a sum says nothing: its terms may have no digits left
LOST = 3.0  # how many times what 16 bits were measured to lose of a sum its rows may have lost
MEASURED = 4.0  # how many times what replays differ by a run may be off
DOUBLE = 64 * 2.0**-53  # the rounding of a fingerprint itself, which is a sum in float64
TINY = 1e-300

Reals = NDArray[np.float64]


def spread(terms: int, *, in_turn: bool = False) -> float:
    """Say how many times a short sum's rounding a long one's is: torch adds up blocks of rows, and
    (`in_turn`) a norm's gradient row by row."""
    return max(1.0, sqrt(terms) / (1 if in_turn else 16))


def sum_bound(gross: Reals) -> Reals:
    """Bound the rounding of sums Σ δ (x·v), given Σ u ‖δ‖ ‖x‖ of their uses, spread."""
    return SUM * gross + LEAST


class Along(NamedTuple):
    """(W v, m v) of every row of a parameter; sizes are those of its rows, |W| on average.

    m v may be small by chance where m is not; what is not known of its size, all rows say together.
    """

    W: Reals
    m: Reals
    size: Reals
    m_size: Reals | float = 0.0


Motion = tuple[Factors, Reals | float, Reals | float]
"""One update along v: its scalars, G v as summed or as seen, and how far that may be off."""


class Reached(NamedTuple):
    """(W v, m v) of every row as a rule has it, and how far from it rounding may put a run."""

    W: Reals
    m: Reals
    room_W: Reals
    room_m: Reals


def walk(start: Along, end: Along, motions: Sequence[Motion], u: float) -> Reached:
    """Carry (W v, m v) from one known point through a rule with scalars only to the next."""
    size, W, m = np.maximum(start.size, end.size), start.W, start.m
    least = np.maximum(start.m_size, end.m_size)
    e_W, e_m, tiny = np.zeros_like(W), np.zeros_like(W), 2 * SMALLEST.get(u, 0.0)
    for factors, gv, room in motions:
        ww, wm, mw, mm, nw, nm = map(float, factors)
        e_g, large = room + 2 * u * np.abs(gv), u * np.maximum(size, np.abs(W))
        step = 2 * u * (abs(wm) * np.maximum(np.abs(m), least) + np.abs(nw * gv))
        W, m = ww * W + wm * m + nw * gv, mw * W + mm * m + nm * gv
        e_W, e_m = (
            abs(ww) * e_W + abs(wm) * e_m + abs(nw) * e_g + large + step + tiny,
            abs(mw) * (e_W + large) + abs(mm) * e_m + abs(nm) * e_g + tiny,
        )
        e_m = e_m + 2 * u * np.maximum(np.abs(m), least)
    few = 1 + 4 / max(1, len(motions)) ** 0.5  # a row's roundings may fall together
    room_W = few * (e_W + u * size) + DOUBLE * size
    room_m = few * (e_m + u * np.maximum(np.abs(m), least)) + DOUBLE * (size + np.abs(m))
    return Reached(W, m, room_W, room_m)


def projected(tensor: Tensor, v: Tensor | None) -> tuple[Reals, Reals]:
    """Project a tensor onto v in float64, row by row; give the size of each row as well."""
    if v is None:
        return (rows := tensor.double().flatten()).numpy(), rows.abs().numpy()
    rows = tensor.double().flatten(1)
    size = torch.linalg.vector_norm(rows, dim=1) / max(1, rows.shape[1]) ** 0.5
    return (rows @ v.double().cpu()).numpy(), size.numpy()


def root_mean_square(rows: Reals) -> float:
    """Give the size of a typical row."""
    return float(np.sqrt(np.mean(rows * rows))) if rows.size else 0.0


def measured(
    double: Tensor, singles: Sequence[Tensor], actual: Tensor, u: float
) -> tuple[Reals, Reals]:
    """Give how far each row of a run is from its replay, and may be: by what replays differ by.

    By medians: where a gradient is so small that rounding decides on its sign, single entries go
    far, in a replay as in training.
    """
    own = (len(actual), -1) if actual.dim() > 1 else (1, -1)  # a vector is one row
    off, *apart = ((other - double).abs().view(own) for other in (actual, *singles))
    between = torch.cat(apart, 1).median(1).values
    room = MEASURED * between.clamp(min=between.median())
    room += u * actual.view(own).square().mean(1).sqrt()
    return off.median(1).values.numpy(), room.numpy()
