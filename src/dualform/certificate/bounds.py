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

ROUNDING = {
    torch.float64: 2.0**-53,
    torch.float32: 2.0**-24,
    torch.float16: 2.0**-11,
    torch.bfloat16: 2.0**-8,
}
"""u: half a unit in the last place of 1, by dtype."""

SUM = 16.0
"""How many roundings of its terms a sum may be off by."""

LEAST = 2.0**-120
"""Below this a sum says nothing: its terms may have no digits left (a net that died)."""

LOST = 3.0
"""How many times what 16 bits were measured to lose along the signs a row's sum may have lost."""

MEASURED = 4.0
"""How many times what replays differ by a run may be off."""

TINY = 1e-300

SMALLEST = {2.0**-53: 2.0**-1074, 2.0**-24: 2.0**-149, 2.0**-11: 2.0**-24, 2.0**-8: 2.0**-133}
"""The smallest number of a dtype, by u: below some 2/u of it roundings are as large as this."""

DOUBLE = 64 * 2.0**-53
"""The rounding of a fingerprint itself, which is a sum in float64."""

Reals = NDArray[np.float64]


def spread(terms: int, *, in_turn: bool = False) -> float:
    """How many times a short sum's rounding a long one's is: torch adds up blocks of rows, and
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


class Motion(NamedTuple):
    """One update along v: its scalars, G v as summed or as seen, and how far that may be off."""

    factors: Factors
    gv: Reals | float = 0.0
    room: Reals | float = 0.0


class Off(NamedTuple):
    """How far each row of (W v, m v) was found to be off, and how far rounding may put it."""

    W: Reals
    m: Reals
    room_W: Reals
    room_m: Reals
    reached: Reals
    """W v as the rule has it."""


def walk(start: Along, end: Along, motions: Sequence[Motion], u: float) -> Off:
    """Carry (W v, m v) from one known point through a rule with scalars only to the next."""
    size, W, m = np.maximum(start.size, end.size), start.W, start.m
    least = np.maximum(*(np.maximum(p.m_size, root_mean_square(p.m)) for p in (start, end)))
    e_W, e_m, tiny = np.zeros_like(W), np.zeros_like(W), 2 * SMALLEST.get(u, 0.0)
    for factors, gv, room in motions:
        ww, wm, mw, mm, nw, nm = map(float, factors)
        e_g, large = room + 2 * u * np.abs(gv), np.maximum(size, np.abs(W))
        step = abs(wm) * np.maximum(np.abs(m), least) + np.abs(nw * gv)
        W, m, before = ww * W + wm * m + nw * gv, mw * W + mm * m + nm * gv, (e_W, e_m)
        e_W = abs(ww) * before[0] + abs(wm) * before[1] + abs(nw) * e_g + u * large + 2 * u * step
        e_m = abs(mw) * (before[0] + u * large) + abs(mm) * before[1] + abs(nm) * e_g
        e_W, e_m = e_W + tiny, e_m + tiny + 2 * u * np.maximum(np.abs(m), least)
    few = 1 + 4 / max(1, len(motions)) ** 0.5  # a row's roundings may fall together
    room_W = few * (e_W + u * size) + DOUBLE * size
    room_m = few * (e_m + u * np.maximum(np.abs(m), least)) + DOUBLE * (size + np.abs(m))
    return Off(np.abs(end.W - W), np.abs(end.m - m), room_W, room_m, W)


def root_mean_square(rows: Reals) -> float:
    """Give the size of a typical row."""
    return float(np.sqrt(np.mean(rows * rows))) if rows.size else 0.0


def measured(
    double: Tensor, singles: Sequence[Tensor], actual: Tensor, u: float
) -> tuple[float, float, float, float]:
    """Bound how far a run may be from its replay, by what replays in two precisions differ by.

    Of the worst row: how far its entries are off, how far they may be, and the size that is
    relative to; and how far a row may be off at all. By medians: where a gradient is so small that
    rounding decides on its sign, single entries go far, in a replay as in training.
    """
    off, apart = _rows(actual - double), torch.cat([_rows(s - double) for s in singles], 1)
    between = apart.median(1).values
    room = (
        MEASURED * between.clamp(min=between.median()) + u * _rows(actual).square().mean(1).sqrt()
    )
    own = off.median(1).values
    found = int(torch.nan_to_num(own / (room + TINY), nan=torch.inf).argmax())
    return (
        float(own[found]),
        float(room[found]),
        float(actual.abs().amax()) + TINY,
        float(room.median()),
    )


def _rows(tensor: Tensor) -> Tensor:
    """The sizes of entries, row by row; a vector is one row."""
    return (tensor.flatten(1) if tensor.dim() > 1 else tensor.reshape(1, -1)).abs()
