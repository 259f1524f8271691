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
from operator import itemgetter

import numpy as np
import torch
from torch import Tensor

from dualform.certificate.bounds import sum_bound
from dualform.memory.content import COMPUTED_IN
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
class Comparison:
    """What was found of every parameter: the factor, whether its patterns explain the gradient."""

    kappa: Reals
    is_explained: Flags
    off: Reals
    """How large what patterns leave of the gradient is, along v."""

    def why(self, watch: Watch, w: Watched, step: int) -> str:
        """Say what was seen of a gradient that patterns do not explain."""
        share = float(self.off[w.index]) / max(float(np.linalg.norm(watch.seen[w.place])), 1e-300)
        if not np.isfinite(share):
            return (
                f"the gradient of {w.name!r}, or its square, is not finite at step {step}: the "
                "training diverged"
            )
        if watch.unknown[w.index]:
            return (
                f"the gradient of {w.name!r} held something already when recording began, or was "
                f"only partly reset before step {step}: call optimizer.zero_grad() before the "
                "first backward pass"
            )
        return (
            f"{share:.2g} of the gradient of {w.name!r} is not explained by its patterns at step "
            f"{step}. Common causes: gradients clipped by value or edited, a penalty on weights in "
            "the loss, a weight used outside its layer"
        )


def explain(watch: Watch, moving: Flags) -> Comparison:
    """Compare gradients that an optimizer is about to use with what their patterns sum to."""
    E, g, fold, room = watch.E, watch.seen, watch.fold, sum_bound(watch.gross)
    squares, products, difference = fold(E * E), fold(E * g), g - E
    rest = fold(difference * difference)
    size = np.sqrt(squares)
    here = moving & ~watch.unknown
    sure = here & (size > room)
    kappa = np.ones(len(watch))
    if sure.any():
        _measure(watch, (squares, products, rest), room / np.maximum(size, 1e-150), sure, kappa)
        if (kappa != 1.0).any():
            rest = fold((g - kappa[watch.owner] * E) ** 2)
    found = Comparison(kappa, here & (np.sqrt(rest) <= room * np.abs(kappa) + LEAST), np.sqrt(rest))
    if (kappa != 1.0).any():
        among = found.is_explained & watch.resolved  # not keys alone
        for i in np.flatnonzero(among & (watch.rows == 1) & ~watch.carried):
            if kappa[i] != 1.0 and watch.parameters[i].v is not None:
                factor = _factor_of_row(watch.parameters[i], kappa[i], room[i])
                found.is_explained[i] = factor is not None
                kappa[i] = kappa[i] if factor is None else settled(factor, 0.0, watch.u[i])
    if (here & watch.narrow).any():
        _sharpen(watch, kappa, found.is_explained & watch.resolved)
    return found


def _measure(
    watch: Watch, sums: tuple[Reals, Reals, Reals], room: Reals, sure: Flags, kappa: Reals
) -> None:
    """Measure κ where the sums are more than rounding: one for all if that fits, else by groups.

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
    kappa[sure] = own
    each = watch.fold((watch.seen - kappa[watch.owner] * watch.E) ** 2)[sure] / squares
    errors = (each / np.maximum(1, rows - 1)) ** 0.5
    errors = np.where(rows >= FEW, errors, room * np.abs(own) / ERRORS)
    errors, found = np.maximum(errors, u * np.abs(own) / ERRORS), own.copy()
    alone = np.isfinite(own) & np.isfinite(errors)
    for best in np.argsort(errors).tolist():  # those clipped together have one factor
        if alone[best]:
            near = alone & (np.abs(own - own[best]) <= ERRORS * (errors + errors[best]))
            share = (errors[best] / errors[near]) ** 2
            mean = float((own[near] * share).sum() / share.sum())
            found[near] = settled(mean, float(errors[best]), float(u[best]))
            alone &= ~near
    kappa[sure] = found


def settled(kappa: float, wrong: float, u: float) -> float:
    """The factor that was meant: 1 if it is that within its error, else a number of the dtype."""
    if abs(kappa - 1.0) <= ERRORS * wrong + 4 * u:
        return 1.0
    return float(kappa) if u < SINGLE else float(np.float32(kappa))


def _factor_of_row(w: Watched, kappa: float, room: float) -> float | None:
    """The factor by which a gradient of one row is what patterns sum to, None if by none: along v
    any edit is a κ. Where the sum along v is small by chance, all entries know κ better.
    """
    assert w.tensor.grad is not None
    gradient, total = w.tensor.grad.double(), pending_gradient(w).double()
    whole = float((gradient * total).sum() / total.square().sum().clamp(min=1e-300))
    for factor in (kappa, whole):
        off = gradient - factor * total
        if off.norm() <= abs(factor) * room * off.numel() ** 0.5:
            return factor
    return None


def _sharpen(watch: Watch, kappa: Reals, among: Flags) -> None:
    """Measure κ once more where products are of 16 bits: their rounding is far above that of sums.

    Of each κ the smallest parameter's gradient is summed as torch sums it, of those that a pass
    goes through once; the largest entry says κ to the last place or the one before.
    """
    exact: dict[float, float] = {}
    chosen = [watch.parameters[i] for i in np.flatnonzero(among & watch.narrow & ~watch.carried)]
    for w in sorted(chosen, key=lambda w: w.tensor.numel()):
        factor = float(kappa[w.index])
        passes = [call.number for site in w.sites for call in site.pending]
        if factor not in exact and len({*passes}) == len(passes):
            total, gradient = pending_gradient(w).view(-1), w.tensor.grad
            assert gradient is not None
            place = int(total.abs().argmax())
            if not total[place]:  # a layer that died says nothing
                continue
            ratio = float(gradient.view(-1)[place].double() / total[place].double())
            exact[factor] = settled(ratio, 0.0, float(watch.u[w.index]))
    for i in np.flatnonzero(among):
        kappa[i] = exact.get(float(kappa[i]), kappa[i])


def pending_gradient(w: Watched) -> Tensor:
    """The sum of a parameter's pending patterns, pass by pass; as torch has it if each goes through
    one use."""
    found: list[tuple[int, slice, Tensor]] = []
    for site in w.sites:
        first = site.settled
        role = next(role for role, own in site.parameters.items() if own is w)
        for use in site.pending:
            here, dtype = slice(first, first := first + use.rows), COMPUTED_IN[use.code]
            keys, signals = (site.parts[part].filled[here] for part in PARTS)
            rows = keys.to(dtype) if keys.is_floating_point() else keys, signals.to(dtype)
            own = site.kind.gradient(site.layer, role, *rows, use.shape, use.layout)
            found.append((use.number, site.layer.rows_of(w.name), own))
    total = torch.zeros_like(w.tensor)
    for _, place, own in sorted(found, key=itemgetter(0)):
        total[place] += own.to(total.dtype)
    return total
