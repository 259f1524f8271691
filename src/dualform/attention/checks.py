"""The comparisons behind `verify`: patterns and log against everything training left behind.

Three checks per parameter, each with a residual and the bound that honest rounding keeps to:

- *steps*: at every single step, u·(κ Σ_t δ_t (x_t·v)) against what training saw of its gradient.
  Residual: largest difference over the step's gross sum κ‖u‖ Σ_t ‖δ_t‖‖x_t‖|v|, |v| the size of
  an entry of v. Bound: `STEP_SLACK` · eps, since both sides are sums of the same products, rounded
  differently. It finds wrong error signals, keys or clipping factors wherever they are.
- *fingerprints*: W v and m v from each recorded fingerprint to the next, by the learning rule and
  the patterns in between. Residual: root-mean-square difference over that of W v (for m: of m v),
  where it is worst. Bound: `FINGERPRINT_DEVIATIONS` of `rounding.drift`. It finds wrong learning
  rates; because it starts afresh at each fingerprint, errors early in a run are not buried. A
  parameter that was never trained has to show its initial fingerprint to the last digit, always.
  Where not every step was recorded, it goes from one kept sum of the unrecorded steps to the next.
  Where only a learned part is kept, it has to show the fingerprints of its steps, and what was
  noted of every gradient has to lead from each to the next (`sketched_checks.py`).
- *weights*: all of W, rebuilt from nothing but initial state, log and patterns, against the
  model's. Residual: |W − dual| / max|W| of the worst entry. Bound: `ENTRY_DEVIATIONS` of the drift
  over all steps. It finds another model.

The rounding of T-pattern sums and S updates behaves like a random walk (see `rounding.py`), so
bounds grow like eps · √S, with the learning rule's own momentum and decay. Where patterns are
stored in 16 bits, residuals are what that lost, and the bounds of all three checks grow by what
rounding every key and error signal once may lose, and no more. Where gradients were computed in a
coarser precision than the weights are stored in (autocast), their share of a bound has the coarser
eps, as recorded, and only theirs. The factors are calibrated, not derived: honest runs (momentum up
to .999, decay, clipping, 3,000 steps of float32) mostly keep to a third of their bounds; the
closest seen, full batches at lr 1e-5 with momentum, came to 0.56 of one. What hides below them is
smaller than rounding: 1 % of one tiny update, against the roundings of all updates since the last
fingerprint.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from math import sqrt
from operator import attrgetter
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dualform.attention import engine, preconditioned_checks, queries
from dualform.attention.rounding import (
    DOUBLE,
    agreeing,
    buffer_sizes,
    carried,
    drift,
    entries_size,
    unmoved,
)
from dualform.attention.sketched_checks import check_sketched
from dualform.attention.tally import Tally, tallies
from dualform.attention.verification import Check, Verification
from dualform.attention.view import View
from dualform.errors import QueryError
from dualform.layers.fast_path import layer_by_layer
from dualform.memory.following import rms

STEP_SLACK = 128.0
"""How many eps a step's projected gradient may differ by, in units of its gross sum."""

STEP_SLACK_16_BITS = 8.0
"""The same for bfloat16 and float16, which sum in float32 and round once."""

STORED_DEVIATIONS = 16.0
"""How many standard deviations of what storing in 16 bits loses a step's sum may be off by."""

FINGERPRINT_DEVIATIONS = 12.0
"""How many standard deviations of accumulated rounding a fingerprint, a mean, may show."""

SUM_ROUNDINGS = 8.0
"""How many roundings of float64 the fingerprints at both ends of a stretch may show."""

LARGEST_ENTRY = 4.0
"""How many times a typical entry of a gradient the largest may be, where it is not known."""

ENTRY_DEVIATIONS = 20.0
"""The same for the worst of all entries of a parameter, of which there may be millions."""


@np.errstate(over="ignore", invalid="ignore")  # of a run that diverged: such checks fail
def verify(
    view: View,
    model: nn.Module | None,
    inputs: Sequence[Any],
    kwargs: Mapping[str, Any],
    progress: engine.Progress | None,
) -> Verification:
    """Compare a view without masks with everything training left behind, and with the model."""
    memory = view.memory
    reference = _reference(view, model)
    adaptive = [name for name in memory.parameters if view.is_adaptive(name)]
    rebuilt: dict[str, Tensor] = {}
    for name in memory.parameters.keys() - set(adaptive):
        with suppress(QueryError) if reference is None else nullcontext():
            rebuilt[name] = view.base(name)  # without a reference, it only says how large W is
    found: dict[str, list[Check]] = {}
    shaking: dict[str, float] = {}

    def check(name: str, sums: Tally | None) -> None:
        found[name] = []
        if reference is not None:
            found[name].append(_check_weights(view, name, rebuilt[name], reference[name], sums))
        if sums is not None:
            found[name] += _check_fingerprints(view, sums, rebuilt.get(name))
            found[name] += _check_steps(view, sums)
        elif memory.parameters[name].coverage == "untrained":
            found[name] += _check_untrained(view, name)
        else:
            found[name] += _check_accumulated(view, name)
            precision = _eps(view, name), _smallest(view, name)
            found[name] += check_sketched(view, name, rebuilt.get(name), *precision)

    for sums in tallies(view, rebuilt, progress):
        check(sums.parameter, sums)
    for done, name in enumerate(adaptive, 1):
        stated = memory.parameters[name].accumulated_since is not None
        checking = preconditioned_checks.check_stated if stated else preconditioned_checks.check
        result = checking(view, name, (reference or {}).get(name))
        found[name], rebuilt[name] = result.checks, result.weights
        shaking[name] = result.typical
        if progress is not None:
            progress(done, len(adaptive))
    for name in memory.parameters.keys() - found.keys():
        check(name, None)
    checks = [one for name in memory.parameters for one in found[name]]
    hashes = dict(memory.hashes)
    if model is not None:
        hashes["model"] = model_hash(model)
        if inputs or kwargs:
            bounds = {c.parameter: c.bound for c in checks if c.kind == "weights"} | shaking
            seen = view.holding(rebuilt) if reference is not None else view
            checks += _check_outputs(seen, model, inputs, kwargs, bounds)
    layers = [memory.layer(name) for name in memory.layers]
    stored = {la.name: str(la.stored).removeprefix("torch.") for la in layers if la.stored_eps}
    alone = tuple(la.name for la in layers if not la.has_error_signals)
    return Verification(view.at, tuple(checks), hashes, memory.exact, memory.remarks, stored, alone)


def model_hash(model: nn.Module) -> str:
    """SHA-256 over names, types, shapes and bytes of all parameters and buffers."""
    digest = hashlib.sha256()
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        flat = tensor.detach().cpu().contiguous().reshape(-1)
        digest.update(flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b"")
    return digest.hexdigest()


def _reference(view: View, model: nn.Module | None) -> dict[str, Tensor] | None:
    """The weights to compare with: the model's at the end, a kept snapshot's before."""
    if view.at == view.memory.steps:
        if model is None:
            return None
        return {name: p.detach().cpu() for name, p in model.named_parameters()}
    return view.memory.snapshot(view.at) if view.at in view.memory.snapshot_steps else None


def _eps(view: View, parameter: str) -> float:
    """The precision that the parameter (and its momentum buffer) is stored in."""
    return float(torch.finfo(view.memory.parameters[parameter].dtype).eps)


def _gradient_eps(view: View, parameter: str) -> float:
    """The coarsest precision that took part in its gradients: autocast's, or its patterns'."""
    patterns = [float(torch.finfo(layer.dtype).eps) for layer in view.writers(parameter)]
    return max(view.memory.parameters[parameter].eps, _eps(view, parameter), *patterns)


def _stored(view: View, parameter: str) -> float:
    """The deviation that storing has put into what a pattern wrote, relative; 0 if it is exact."""
    known = view.memory.parameters[parameter]
    writers = view.writers(parameter) if known.coverage == "patterns" else ()
    return max([known.stored_eps, *(la.stored_eps for la in writers)]) / sqrt(6)


def _smallest(view: View, parameter: str) -> float:
    """Where the parameter's dtype runs out of digits: nothing below it can be told apart."""
    return float(torch.finfo(view.memory.parameters[parameter].dtype).smallest_normal)


def _check_weights(
    view: View, name: str, dual: Tensor, weights: Tensor, sums: Tally | None
) -> Check:
    """|W − dual| / max|W| of the worst entry, against the drift of an entry over all steps."""
    weights, initial = weights.double(), view.memory.initial(name).double()
    if not weights.numel():
        return Check(name, "weights", 0.0, 0.0)
    size = max(float(t.abs().max()) for t in (initial, dual, weights.nan_to_num(0, 0, 0)))
    eps = _eps(view, name)
    lost = unmoved(dual - initial, initial.abs(), view.at, eps)
    lost = lost + _smallest(view, name)
    allowed = _drift_of_an_entry(view, name, size, sums) + eps * size + lost
    off = (weights - dual).abs()
    worst = int(torch.argmax(torch.where(off.isfinite(), off / allowed, torch.inf)))
    scale = float(weights.nan_to_num(0, 0, 0).abs().max()) or size or 1.0
    return Check(
        name,
        "weights",
        float(off.reshape(-1)[worst]) / scale,
        float(allowed.reshape(-1)[worst]) / scale,
    )


def _drift_of_an_entry(view: View, name: str, size: float, sums: Tally | None) -> float:
    """How far rounding may have put the worst entry of a parameter off, over all steps."""
    if view.memory.parameters[name].coverage == "untrained":
        return 0.0  # nothing was rounded, and an adaptive rule would have no such log to ask
    largest = view.memory.sizes(name)[2, : view.at] if sums is None else sums.largest
    log, gross = view.log(name), largest
    if sums is not None:
        log, _, unrecorded = sums.as_rounded()
        gross = largest * agreeing(sums.patterns) + LARGEST_ENTRY * unrecorded
    expected = drift(
        log,
        np.array([view.at]),
        eps=_eps(view, name),
        gradient_eps=_gradient_eps(view, name),
        size=size,
        gross=gross,
        anchored=False,
        stored=_stored(view, name) * largest,
    )
    return float(expected.bound(ENTRY_DEVIATIONS)[0, 0])


def _check_steps(view: View, sums: Tally) -> list[Check]:
    """u·(grad v) of every step by the patterns, against what training saw."""
    if not view.at:
        return []
    seen = np.where(sums.unrecorded, 0.0, sums.seen)  # where there are no patterns to explain it
    eps = _gradient_eps(view, sums.parameter)
    gross = np.abs(sums.log.kappa) * carried(sums.gross, sums.log) * float(sums.sketch.norm())
    scale = np.maximum(np.maximum(gross, np.abs(seen)), _smallest(view, sums.parameter) / eps)
    off = np.where(sums.log.applied, np.abs(sums.applied_projections() - seen), 0.0)
    relative = np.divide(off, scale, out=np.zeros_like(off), where=scale > 0)
    relative = np.where(np.isfinite(relative), relative, np.inf)
    bounds = np.full(view.at, (STEP_SLACK if eps < 1e-5 else STEP_SLACK_16_BITS) * eps)
    if stored := _stored(view, sums.parameter):
        entry = float(sums.sketch.norm()) / sqrt(max(1, len(sums.sketch)))
        spread = entry * np.sqrt(carried(sums.squares, sums.log))
        noise = STORED_DEVIATIONS * stored * (np.abs(sums.log.kappa) * spread + np.abs(seen))
        bounds += np.divide(noise, scale, out=np.zeros_like(off), where=scale > 0)
    worst = int(np.argmax(relative / bounds))
    found = float(relative[worst]), float(bounds[worst])
    return [Check(sums.parameter, "steps", *found, worst)]


def _check_fingerprints(view: View, sums: Tally, rebuilt: Tensor | None) -> list[Check]:
    """W v and m v from each fingerprint to the next, by patterns and learning rule."""
    memory, name = view.memory, sums.parameter
    rows = len(sums.sketch)
    weights = _project(memory.initial(name), sums.probe, rows)
    buffer = memory.initial_momentum(name)
    momentum = torch.zeros(rows, dtype=torch.float64)
    if buffer is not None:
        momentum = _project(buffer, sums.probe, rows)
    entries = entries_size(sums.probe, memory.initial(name), rebuilt)
    size = max(entries, rms(weights), sums.largest_print)
    # Fingerprints are float64 sums themselves, and so is what they are compared with.
    terms = memory.initial(name).double().abs()
    summed = SUM_ROUNDINGS * DOUBLE * max(rms(_project(terms, sums.probe.abs(), rows)), size)
    eps = _eps(view, name)
    log, applied, unrecorded = sums.as_rounded()
    expected = drift(
        log,
        sums.stops,
        eps=eps,
        gradient_eps=_gradient_eps(view, name),
        size=size,
        gross=sums.gross / sqrt(max(rows, 1)) * agreeing(sums.patterns) + unrecorded,
        anchored=True,
        buffers=buffer_sizes(
            log,
            applied,
            float(sums.sketch @ weights),
            float(sums.sketch @ momentum),
        ),
        stored=_stored(view, name) * np.sqrt(sums.squares / max(rows, 1)),
    )
    bounds = expected.bound(FINGERPRINT_DEVIATIONS) + _smallest(view, name) + summed
    worst = Check(name, "fingerprints", 0.0, eps)
    start = 0
    for i, at_stop in enumerate(sums.fingerprints):
        (ww, wm), (mw, mm) = sums.stretches[i].whole.tolist()
        moved = ww * weights + wm * momentum + sums.written[0, i]
        buffered = mw * weights + mm * momentum + sums.written[1, i]
        stop, taken, start = at_stop.step, at_stop.step - start, at_stop.step
        lost = float(unmoved(torch.tensor(rms(moved - weights)), size, taken, eps))
        weights = at_stop.values[name].double()
        momentum = at_stop.momentum.get(name, buffered).double()
        scale = rms(weights) or size or 1.0
        allowed = (float(bounds[i, 0]) + lost) / scale
        found = [Check(name, "fingerprints", rms(moved - weights) / scale, allowed, stop)]
        if name in at_stop.momentum:
            scale = rms(momentum) or 1.0
            allowed = float(bounds[i, 1]) / scale
            found.append(
                Check(name, "fingerprints", rms(buffered - momentum) / scale, allowed, stop)
            )
        worst = max([worst, *found], key=attrgetter("severity"))
    return [worst]


def _check_untrained(view: View, name: str) -> list[Check]:
    """A parameter that no optimizer moved: every fingerprint is that of W_0, to the last digit."""
    probe = view.memory.probe(name).double()
    initial = view.memory.initial(name).double().reshape(-1, len(probe))
    expected, gross = initial @ probe, initial.abs() @ probe.abs()
    # Two float64 sums of the same terms, each in an order of its own.
    bound = (len(probe) + 2) * DOUBLE
    worst = Check(name, "fingerprints", 0.0, bound)
    for seen in view.memory.fingerprints:
        if seen.step <= view.at and name in seen.values and len(expected):
            off = (seen.values[name].double() - expected).abs()
            relative = torch.where(off == 0, 0.0, off / gross).nan_to_num(torch.inf)
            check = Check(name, "fingerprints", float(relative.max()), bound, seen.step)
            worst = max([worst, check], key=attrgetter("severity"))
    return [worst]


def _check_accumulated(view: View, name: str) -> list[Check]:
    """A parameter of which only the sum is known: its fingerprint wherever the sum was kept."""
    memory, known = view.memory, view.memory.learned_steps(name)
    kept = [f for f in memory.fingerprints if f.step <= view.at and f.step in known]
    kept = [f for f in kept if name in f.values]
    probe = memory.probe(name).double()
    eps = _eps(view, name)
    initial = _project(memory.initial(name), probe, memory.parameters[name].height)
    last = View(memory, kept[-1].step).base(name) if kept else None
    size = max(rms(p) for p in [initial, *(f.values[name].double() for f in kept)])
    size = max(size, entries_size(probe, memory.initial(name), last))
    sizes = memory.sizes(name)[:, : view.at]
    expected = drift(
        view.log(name),
        np.array([f.step for f in kept], dtype=np.int64),
        eps=eps,
        gradient_eps=_gradient_eps(view, name),
        size=size,
        gross=sizes[0],
        anchored=False,
        stored=_stored(view, name) * sizes[1],
    )
    bounds = expected.bound(FINGERPRINT_DEVIATIONS)[:, 0].tolist()
    worst = Check(name, "fingerprints", 0.0, eps)
    for seen, bound in zip(kept, bounds, strict=True):
        values = seen.values[name].double()
        weights = _project(View(memory, seen.step).base(name), probe, len(values))
        scale = max(rms(values), rms(weights)) or 1.0
        moved = torch.tensor(rms(weights - initial))
        allowed = (bound + float(unmoved(moved, size, seen.step, eps))) / scale + eps
        check = Check(name, "fingerprints", rms(weights - values) / scale, allowed, seen.step)
        worst = max([worst, check], key=attrgetter("severity"))
    return [worst] if kept else []


def _check_outputs(
    view: View,
    model: nn.Module,
    inputs: Sequence[Any],
    kwargs: Mapping[str, Any],
    bounds: Mapping[str, float],
) -> list[Check]:
    """The model's outputs against the dual form's, both ways.

    The bound is how far the outputs move if every parameter moves by its own bound, at random.
    """
    with torch.no_grad(), queries.evaluating(model), layer_by_layer():
        primal = _flat(model(*inputs, **kwargs))
    scale = float(primal.abs().max()) if primal.numel() else 0.0
    scale = scale or 1.0
    with torch.no_grad(), layer_by_layer():
        rebuilt = _flat(queries.run(model, view, inputs, kwargs))
        attended = _flat(queries.run_by_patterns(model, view, inputs, kwargs))
        moved = 0.0
        for seed in range(4):
            shaken = view.holding(_shaken(view.weights, bounds, seed))
            other = _flat(queries.run(model, shaken, inputs, kwargs))
            moved = max(moved, float((other - rebuilt).abs().max()) if other.numel() else 0.0)
    stored = max(_eps(view, name) for name in view.memory.parameters)
    # A model that computes in lower precision inside rounds its outputs to that precision, too.
    computed = max(_gradient_eps(view, name) for name in view.memory.parameters)
    bound = moved / scale + 16 * stored + 2 * computed
    residuals = {
        "outputs by weights": float((rebuilt - primal).abs().max()) / scale,
        "outputs by patterns": float((attended - primal).abs().max()) / scale,
    }
    return [Check(name, "outputs", value, bound) for name, value in residuals.items()]


def _shaken(
    weights: Mapping[str, Tensor], bounds: Mapping[str, float], seed: int
) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: w
        + w.abs().max() * bounds[name] * torch.randn(w.shape, generator=generator, dtype=w.dtype)
        if w.numel()
        else w
        for name, w in weights.items()
    }


def _flat(output: Any) -> Tensor:
    """All numbers of a model's output in one row, float64."""
    parts = [t.detach().cpu().double().reshape(-1) for t in queries.tensors_in(output)]
    return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.float64)


def _project(tensor: Tensor, probe: Tensor, rows: int) -> Tensor:
    return tensor.double().reshape(rows, -1) @ probe
