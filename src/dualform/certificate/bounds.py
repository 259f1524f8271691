"""How far rounding may put a number off: three bounds, each defined here and nowhere else.

    sum_bound       a sum of δ (x·v) over patterns, given how large its terms are
    carry, walk     a rule with scalars only, along v, from one fingerprint to the next
    measured        any other rule: the same replay in two precisions, what it differs by

Every check starts afresh from bits that were kept, so rounding may be taken at its worst in time
and at random across a row: a bound is the rule's own recursion with absolute values,

    e_g ← λ e_W + u |g|      e_m ← μ e_m + e_g + u |m|      e_W ← e_W + η e_m + ½u |W| + u |ηm|

Why it is hard: a bound must hold for honest runs of every size, and still find one learning rate
that is off by 2e-4. What each line is for was found by trying (research/spine.md, §3): the room of
a sum comes from ‖x‖, never from x·v, which may be small by chance where x is not; |W| is the
largest on the way, since entries cross zero; a few steps do not average.
"""

from __future__ import annotations

from collections.abc import Sequence
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

MEASURED = 16.0
"""How many times the difference of two replays a run may be off."""

TINY = 1e-300

SMALLEST = {2.0**-53: 2.0**-1074, 2.0**-24: 2.0**-149, 2.0**-11: 2.0**-24, 2.0**-8: 2.0**-133}
"""The smallest number of a dtype, by u: below some 2/u of it roundings are as large as this."""

DOUBLE = 64 * 2.0**-53
"""The rounding of a fingerprint itself, which is a sum in float64."""

Reals = NDArray[np.float64]


def sum_bound(gross: Reals) -> Reals:
    """Bound the rounding of sums Σ δ (x·v), given Σ u ‖δ‖ ‖x‖ of their uses."""
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


def carry(
    z: Along, e: tuple[Reals, Reals], motion: Motion, u: float
) -> tuple[Along, tuple[Reals, Reals]]:
    """Take one step of a rule with scalars only along v, and how far rounding may put it off."""
    (ww, wm, mw, mm, nw, nm), gv = map(float, motion.factors), motion.gv
    (e_W, e_m), e_g = e, motion.room + 2 * u * np.abs(gv)
    size = np.maximum(z.size, np.abs(z.W))  # between two fingerprints it may be larger
    m = mw * z.W + mm * z.m + nm * gv
    m_size = np.maximum(np.abs(m), z.m_size)
    step = abs(wm) * np.maximum(np.abs(z.m), z.m_size) + np.abs(nw * gv)
    tiny = 2 * SMALLEST.get(u, 0.0)
    off_m = abs(mw) * (e_W + u * size) + abs(mm) * e_m + abs(nm) * e_g + 2 * u * m_size + tiny
    off_W = abs(ww) * e_W + abs(wm) * e_m + abs(nw) * e_g + u * size + 2 * u * step + tiny
    return Along(ww * z.W + wm * z.m + nw * gv, m, z.size, z.m_size), (off_W, off_m)


def walk(start: Along, end: Along, motions: Sequence[Motion], u: float) -> Off:
    """Carry (W v, m v) from one fingerprint through the rule to the next."""
    largest = [np.maximum(p.m_size, root_mean_square(p.m)) for p in (start, end)]
    z = start._replace(size=np.maximum(start.size, end.size), m_size=np.maximum(*largest))
    e = np.zeros_like(z.W), np.zeros_like(z.W)
    for motion in motions:
        z, e = carry(z, e, motion, u)
    few = 1 + 4 / max(1, len(motions)) ** 0.5  # a row's roundings may fall together
    room_W = few * (e[0] + u * z.size) + DOUBLE * z.size
    room_m = few * (e[1] + u * np.maximum(np.abs(z.m), z.m_size)) + DOUBLE * (z.size + np.abs(z.m))
    return Off(np.abs(end.W - z.W), np.abs(end.m - z.m), room_W, room_m)


def root_mean_square(rows: Reals) -> float:
    """Give the size of a typical row."""
    return float(np.sqrt(np.mean(rows * rows))) if rows.size else 0.0


def measured(
    double: Tensor, singles: Sequence[Tensor], actual: Tensor, u: float
) -> tuple[float, float, float, float]:
    """Bound how far a run may be from its replay, by what replays in two precisions differ by.

    Of the worst row or entry: how far it is off, how far it may be, and the size that is relative
    to; and how far a row may be off on average.
    """
    off = (actual - double).abs()
    apart = torch.stack([(single - double).abs() for single in singles]).amax(0)
    own, between = (_rows(t) for t in (off, apart))
    room = MEASURED * between + u * _rows(actual)
    ratios = torch.nan_to_num(own / (room + TINY), nan=torch.inf)
    found = int(ratios.argmax()) if len(ratios) else 0
    typical = float(room.square().mean().sqrt()) if len(room) else 0.0
    size = float(_rows(actual).amax()) + TINY if len(room) else 1.0
    if not len(room):
        return 0.0, 0.0, 1.0, 0.0
    return float(own[found]), float(room[found]), size, typical


def _rows(tensor: Tensor) -> Tensor:
    """The root mean square of every row; of a vector, that of all of it."""
    rows = tensor if tensor.dim() > 1 else tensor.reshape(1, -1)
    return rows.flatten(1).square().mean(1).sqrt()
