"""Is every gradient what its patterns sum to, and by which factor κ?

Clipping, unscaling and a loop's own arithmetic multiply gradients between the backward pass and the
update. κ is measured from this step's own sums, at every step, for every parameter:

    κ = (E · g) / (E · E)           E: the sum of patterns, g: the gradient itself, both along v

Nearly always it is one number for all parameters, and a number of the dtype of training; then it is
that very number, for a replay reaches the very bits only with it.

Why it is hard: κ = 1 must come out as exactly 1, and 0.9999 must not. What remains of the gradient
after κ E is taken away says how uncertain κ is, and decides. It does so even under autocast, where
the worst case of rounding is six percent, and what is really there a thousandth of that.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from dualform.recording.watched import Flags, Reals, Watch, Watched

ERRORS = 8.0
"""How many standard errors κ may be from 1 and still be 1."""

FEW = 8
"""From so many rows on the standard error can be trusted; below, the bound of rounding decides."""

SINGLE = 2.0**-24

PARTS = ("keys", "error_signals")

LEAST = 64 * 2.0**-149
"""Below this float32 has no digits left, so nothing can be said of a difference."""


@dataclass(frozen=True)
class Explained:
    """What was found of every parameter: the factor, whether its patterns explain the gradient."""

    kappa: Reals
    is_explained: Flags
    off: Reals
    """How large what patterns leave of the gradient is, along v."""


def explain(watch: Watch, moving: Flags, room: Reals) -> Explained:
    """Compare the gradients that an optimizer is about to use with what their patterns sum to.

    `room` is how far each sum may be off by rounding.
    """
    E, g, fold = watch.E, watch.seen, watch.fold
    squares, products, difference = fold(E * E), fold(E * g), g - E
    rest = fold(difference * difference)
    size = np.sqrt(squares)
    here = moving & watch.resolved & ~watch.unknown
    sure = here & (size > room)
    kappa = np.ones(len(watch))
    if sure.any():
        _measure(watch, (squares, products, rest), room / np.maximum(size, 1e-150), sure, kappa)
        if (kappa != 1.0).any():
            rest = fold((g - kappa[watch.owner] * E) ** 2)
    off = np.sqrt(rest)
    is_explained = here & (off <= room * np.abs(kappa) + LEAST)
    return Explained(kappa, is_explained, off)


def _measure(
    watch: Watch, sums: tuple[Reals, Reals, Reals], room: Reals, sure: Flags, kappa: Reals
) -> None:
    """Measure κ where the sums are more than rounding: one for all if that fits, else each.

    What a factor leaves of the gradient is ‖g − E‖² − (κ − 1)² ‖E‖² if it is the best there is.
    """
    squares, products, rest = (rows[sure] for rows in sums)
    room, rows, u = room[sure], watch.rows[sure], watch.u[sure]
    own = products / squares
    weight = 1.0 / (room * room * squares)
    weight /= weight.max()
    among = weight * squares
    common = float((weight * products).sum() / among.sum())
    if (np.abs(own - common) <= room * abs(common)).all():
        left = float((weight * rest).sum() / among.sum()) - (common - 1.0) ** 2
        count = int(rows.sum())
        wrong = (max(left, 0.0) / max(1, count - 1)) ** 0.5
        kappa[:] = settled(common, wrong if count >= FEW else room.min() / ERRORS, u.max())
        return
    each = np.maximum(rest / squares - (own - 1.0) ** 2, 0.0)
    errors = np.where(rows >= FEW, np.sqrt(each / np.maximum(1, rows - 1)), room / ERRORS)
    kappa[sure] = [settled(*one) for one in zip(own, errors, u, strict=True)]


def settled(kappa: float, wrong: float, u: float) -> float:
    """The factor that was meant: 1 if it is that within its error, else a number of the dtype."""
    if abs(kappa - 1.0) <= ERRORS * wrong + 4 * u:
        return 1.0
    return float(kappa) if u < SINGLE else float(np.float32(kappa))


def single(watch: Watch, moving: Flags, kappa: Reals) -> Flags:
    """Whose κ cannot be believed: weights that are one number along v, and no other has their κ."""
    shared = watch.rows > 1
    found: Flags = moving & ~shared & ~watch.carried & (kappa != 1.0)
    found &= ~np.isin(kappa, kappa[moving & shared & (kappa != 1.0)])
    found &= np.array([w.v is not None for w in watch])
    return found


def is_multiple(w: Watched, kappa: float, room: float) -> bool:
    """Whether a whole gradient is κ times what the pending rows sum to: of weights of one row."""
    gradient, total = w.tensor.grad, torch.zeros_like(w.tensor, dtype=torch.float64)
    assert gradient is not None
    for site in w.sites:
        rows = [site.parts[part].filled[site.settled :].double() for part in PARTS]
        for use in site.pending:
            keys, signals = (part[: use[4]] for part in rows)
            total += site.kind.gradient(site.layer, "weight", keys, signals, use[6], use[7])
            rows = [part[use[4] :] for part in rows]
    off = gradient.double() - kappa * total
    return bool(off.norm() <= abs(kappa) * room * total.numel() ** 0.5)
