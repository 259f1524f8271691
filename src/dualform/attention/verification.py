"""The certificate: does the memory explain the network, up to rounding, and nothing less?

Three checks per parameter, each with a residual and the bound that honest rounding keeps to:

- *steps*: at every single step, u·(κ Σ_t δ_t (x_t·v)) against what training saw of its gradient.
  Residual: largest difference over the step's gross sum κ‖u‖ Σ_t ‖δ_t‖‖x_t∘v‖. Bound:
  `STEP_SLACK` · eps. It finds wrong error signals, keys or clipping factors wherever they are.
- *fingerprints*: W v and m v from each recorded fingerprint to the next by the learning rule and
  the patterns in between. Residual: largest root-mean-square difference over the size of W v (for
  m: of m v). Bound: `DEVIATIONS` standard deviations of `rounding.drift`. It finds wrong learning
  rates, and because it starts afresh at each fingerprint, errors early in a run are not buried.
- *weights*: all of W rebuilt from nothing but initial state, log and patterns, against the model's.
  Residual: max|W − dual| / max|W|. Bound: `DEVIATIONS` · drift over all steps / max|W|. It finds
  another model.

The rounding of T-pattern sums and S updates behaves like a random walk (see `rounding.py`): bounds
grow like eps · √S, with the learning rule's own momentum and decay. The factors are several times
what honest runs were seen to need (momentum up to .99, decay, clipping, 3,000 steps).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import sqrt
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dualform.attention import engine, queries
from dualform.attention.rounding import drift, unmoved
from dualform.attention.tally import Tally, tally
from dualform.attention.view import View
from dualform.errors import QueryError
from dualform.layers import as_patterns
from dualform.table import Table

STEP_SLACK = 64.0
"""How many eps a step's projected gradient may differ by, in units of its gross sum."""

DEVIATIONS = 12.0
"""How many standard deviations of accumulated rounding are still called rounding."""

KINDS = {
    "weights": "rebuilt weights against the model's",
    "fingerprints": "from fingerprint to fingerprint",
    "steps": "every step's patterns against its gradient",
    "outputs": "outputs by attention against the model's",
}


@dataclass(frozen=True)
class Check:
    """One comparison: a relative residual (0 is perfect), and the bound that rounding keeps to."""

    parameter: str
    kind: str
    residual: float
    bound: float
    step: int | None = None

    @property
    def passed(self) -> bool:
        """Whether the residual is finite and within its bound."""
        return bool(np.isfinite(self.residual) and self.residual <= self.bound)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, fit for `json.dumps`."""
        finite = self.residual if np.isfinite(self.residual) else None
        return {
            "parameter": self.parameter,
            "check": self.kind,
            "residual": finite,
            "bound": self.bound,
            "step": self.step,
            "passed": self.passed,
        }


@dataclass(frozen=True)
class Verification:
    """Whether a memory explains a network: residual and bound per parameter, and hashes.

    Residuals are relative, without unit, 0 is perfect; `passed` says that each is within the bound
    rounding keeps to, and that recording met nothing it could not account for.

    Example:
        >>> certificate = dual.verify(images)                             # doctest: +SKIP
        >>> certificate.passed, certificate.residual("fc1.weight")        # doctest: +SKIP
    """

    step: int
    checks: tuple[Check, ...]
    hashes: Mapping[str, str]
    exact: bool = True
    remarks: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        """Whether every residual is within its bound, in a memory that is exact."""
        return self.exact and all(check.passed for check in self.checks)

    @property
    def failures(self) -> tuple[Check, ...]:
        """The checks that did not pass."""
        return tuple(check for check in self.checks if not check.passed)

    def residual(self, parameter: str, kind: str | None = None) -> float:
        """The relative residual of one parameter: of its weights, or of the check named."""
        return self._check(parameter, kind).residual

    def bound(self, parameter: str, kind: str | None = None) -> float:
        """The bound that rounding keeps that residual to."""
        return self._check(parameter, kind).bound

    @property
    def table(self) -> Table:
        """One line per check: relative residual, bound, the step where it is worst."""
        columns: dict[str, Any] = {
            "parameter": [check.parameter for check in self.checks],
            "check": [check.kind for check in self.checks],
            "residual": [check.residual for check in self.checks],
            "bound": [check.bound for check in self.checks],
            "step": [check.step for check in self.checks],
            "passed": ["yes" if check.passed else "NO" for check in self.checks],
        }
        return Table(columns, "relative residuals: 0 is perfect, up to the bound is rounding")

    def raise_if_failed(self) -> None:
        """Raise `QueryError` saying what did not pass; nothing if all did.

        Example:
            >>> dual.verify().raise_if_failed()                            # doctest: +SKIP
        """
        if not self.passed:
            raise QueryError(
                "\n".join(["the memory does not explain the network:", *self._blame()])
            )

    def to_dict(self) -> dict[str, Any]:
        """Everything in plain values, fit for `json.dumps`."""
        return {
            "passed": self.passed,
            "step": self.step,
            "exact": self.exact,
            "remarks": list(self.remarks),
            "hashes": dict(self.hashes),
            "checks": [check.to_dict() for check in self.checks],
        }

    def __repr__(self) -> str:
        verdict = "PASSED" if self.passed else "FAILED"
        lines = [f"Verification after {self.step:,} updates: {verdict}", self._summary()]
        if not self.passed:
            lines += self._blame()
        lines += [f"  remark: {remark}" for remark in self.remarks]
        lines += [f"  sha256 {name}: {value[:16]}…" for name, value in self.hashes.items()]
        return "\n".join(lines)

    def _summary(self) -> str:
        found = {(c.parameter, c.kind): c for c in self.checks if c.kind != "outputs"}
        kinds = [kind for kind in KINDS if any(known == kind for _, known in found)]
        names = list(dict.fromkeys(name for name, _ in found))
        columns = {"parameter": names} | {
            kind: [_cell(found.get((name, kind))) for name in names] for kind in kinds
        }
        table = repr(Table(columns, "residual ≤ bound, relative: 0 is perfect"))
        outputs = [f"  {c.parameter}: {_cell(c)}" for c in self.checks if c.kind == "outputs"]
        return "\n".join([table, *outputs])

    def _blame(self) -> list[str]:
        lines = [
            f"  {check.parameter}, {KINDS[check.kind]}: residual {check.residual:.2g} is more than "
            f"the {check.bound:.2g} of rounding"
            + ("" if check.step is None else f", worst at step {check.step}")
            for check in self.failures
        ]
        if not self.exact:
            lines.append("  the recording met something it could not account for: see the remarks")
        if self.failures and all(check.kind in ("weights", "outputs") for check in self.failures):
            lines.append(
                f"  the memory agrees with itself: is this the model as it was after {self.step:,} "
                "recorded updates?"
            )
        return lines

    def _check(self, parameter: str, kind: str | None) -> Check:
        for wanted in KINDS if kind is None else (kind,):
            for check in self.checks:
                if (check.parameter, check.kind) == (parameter, wanted):
                    return check
        have = ", ".join(f"{check.parameter} ({check.kind})" for check in self.checks)
        raise QueryError(f"nothing was checked for {parameter!r}, {kind or 'any check'}: {have}")


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
    stops = np.array([f.step for f in memory.fingerprints if f.step <= view.at], dtype=np.int64)
    tallies, rebuilt = tally(view, stops, rebuild=reference is not None, progress=progress)
    checks: list[Check] = []
    for name in memory.parameters:
        sums = tallies.get(name)
        if reference is not None:
            checks.append(_check_weights(view, name, rebuilt[name], reference[name], sums))
        if sums is not None:
            checks += _check_fingerprints(view, sums)
            checks += _check_steps(view, sums)
        else:
            checks += _check_coarsely(view, name, stops)
    hashes = dict(memory.hashes)
    if model is not None:
        hashes["model"] = model_hash(model)
        if inputs or kwargs:
            bounds = {c.parameter: c.bound for c in checks if c.kind == "weights"}
            checks += _check_outputs(view, model, inputs, kwargs, bounds)
    return Verification(view.at, tuple(checks), hashes, memory.exact, memory.remarks)


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
    """The coarsest precision that took part: the parameter's, or its layers' patterns'."""
    dtypes = [view.memory.parameters[parameter].dtype]
    dtypes += [layer.dtype for layer in view.writers(parameter)]
    return max(float(torch.finfo(dtype).eps) for dtype in dtypes)


def _check_weights(
    view: View, name: str, dual: Tensor, weights: Tensor, sums: Tally | None
) -> Check:
    """|W − dual| / max|W| of the worst entry, against the drift of an entry over all steps."""
    weights, initial = weights.double(), view.memory.initial(name).double()
    if not weights.numel():
        return Check(name, "weights", 0.0, 0.0)
    size = max(float(t.abs().max()) for t in (initial, dual, weights.nan_to_num(0, 0, 0)))
    eps = _eps(view, name)
    expected = drift(
        view.memory.log(name).head(view.at),
        np.array([view.at]),
        eps=eps,
        size=size,
        gross=sums.largest if sums is not None else np.zeros(view.at),
        anchored=False,
    )
    lost = unmoved(dual - initial, initial.abs(), view.at, eps)
    allowed = float(expected.bound(DEVIATIONS)[0]) + eps * size + lost
    off = (weights - dual).abs()
    worst = int(torch.argmax(torch.where(off.isfinite(), off / allowed, torch.inf)))
    scale = float(weights.nan_to_num(0, 0, 0).abs().max()) or size or 1.0
    return Check(
        name,
        "weights",
        float(off.reshape(-1)[worst]) / scale,
        float(allowed.reshape(-1)[worst]) / scale,
    )


def _check_steps(view: View, sums: Tally) -> list[Check]:
    """u·(grad v) of every step by the patterns, against what training saw."""
    if not view.at:
        return []
    seen = view.memory.audit_projections(sums.parameter)[: view.at]
    total = np.concatenate([[0.0], np.cumsum(sums.gross)])
    steps = np.arange(view.at)
    gross = np.where(sums.log.first == steps, sums.gross, total[steps + 1] - total[sums.log.first])
    scale = np.maximum(np.abs(sums.log.kappa) * gross * float(sums.sketch.norm()), np.abs(seen))
    off = np.where(sums.log.applied, np.abs(sums.applied_projections() - seen), 0.0)
    relative = np.divide(off, scale, out=np.zeros_like(off), where=scale > 0)
    relative = np.where(np.isfinite(relative), relative, np.inf)
    worst = int(np.argmax(relative))
    bound = STEP_SLACK * _eps(view, sums.parameter)
    return [Check(sums.parameter, "steps", float(relative[worst]), bound, worst)]


def _check_fingerprints(view: View, sums: Tally) -> list[Check]:
    """W v and m v from each fingerprint to the next, by patterns and learning rule."""
    memory, name = view.memory, sums.parameter
    known = {f.step: f for f in memory.fingerprints}
    rows = len(sums.sketch)
    weights = _project(memory.initial(name), sums.probe, rows)
    buffer = memory.initial_momentum(name)
    momentum = torch.zeros(rows, dtype=torch.float64)
    if buffer is not None:
        momentum = _project(buffer, sums.probe, rows)
    prints = [weights, *(known[s].values[name].double() for s in sums.stops.tolist())]
    size = max(_rms(p) for p in prints)
    eps = _eps(view, name)
    expected = drift(
        sums.log,
        sums.stops,
        eps=eps,
        size=size,
        gross=sums.gross / np.sqrt(max(rows, 1)),
        anchored=True,
    )
    bounds = expected.bound(DEVIATIONS)
    worst = Check(name, "fingerprints", 0.0, float(_eps(view, name)))
    for i, stop in enumerate(sums.stops.tolist()):
        whole = sums.stretches[i].whole
        at_stop = known[stop]
        moved = whole[0, 0] * weights + whole[0, 1] * momentum + sums.written[i, 0]
        buffered = whole[1, 0] * weights + whole[1, 1] * momentum + sums.written[i, 1]
        taken = stop - (int(sums.stops[i - 1]) if i else 0)
        lost = float(unmoved(torch.tensor(_rms(moved - weights)), size, taken, eps))
        weights = at_stop.values[name].double()
        momentum = at_stop.momentum.get(name, buffered).double()
        scale = _rms(weights) or size or 1.0
        allowed = (bounds[i] + lost) / scale
        found = [Check(name, "fingerprints", _rms(moved - weights) / scale, allowed, stop)]
        if name in at_stop.momentum:
            scale = _rms(momentum) or 1.0
            allowed = DEVIATIONS * expected.momentum[i] / scale
            found.append(
                Check(name, "fingerprints", _rms(buffered - momentum) / scale, allowed, stop)
            )
        worst = max([worst, *found], key=_severity)
    return [worst]


def _check_coarsely(view: View, name: str, stops: engine.Rows) -> list[Check]:
    """A parameter without patterns or stored steps: its fingerprint, as far as it is known."""
    memory = view.memory
    known = {f.step: f.values[name].double() for f in memory.fingerprints if name in f.values}
    trained = memory.parameters[name].coverage == "accumulated"
    kept = [s for s in stops.tolist() if s in known]
    if trained:
        kept = [s for s in kept if s in memory.learned_steps(name)]
    probe = memory.probe(name).double()
    worst = Check(name, "fingerprints", 0.0, _eps(view, name))
    for stop in kept:
        weights = _project(View(memory, stop).base(name), probe, len(known[stop]))
        scale = max(_rms(known[stop]), _rms(weights)) or 1.0
        log = memory.log(name).head(stop)
        expected = drift(
            log,
            np.array([stop]),
            eps=_eps(view, name),
            size=scale,
            gross=np.zeros(stop),
            anchored=False,
        )
        bound = float(expected.bound(DEVIATIONS)[0]) / scale + _eps(view, name)
        off = _rms(weights - known[stop]) / scale
        worst = max([worst, Check(name, "fingerprints", off, bound, stop)], key=_severity)
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
    with torch.no_grad(), queries.evaluating(model):
        primal = _flat(model(*inputs, **kwargs))
    scale = float(primal.abs().max()) if primal.numel() else 0.0
    scale = scale or 1.0

    def attend(name: str, given: Tensor, output: Tensor) -> Tensor:
        layer = view.memory.layer(name)
        rows = as_patterns(layer.kind, given).to("cpu", torch.float64)
        return view.dual_output(layer, rows).reshape(output.shape).to(output)

    with torch.no_grad():
        rebuilt = _flat(queries.run(model, view, inputs, kwargs))
        attended = _flat(queries.run(model, view, inputs, kwargs, attend, view.memory.layers))
        moved = 0.0
        for seed in range(4):
            shaken = View(view.memory, view.at)
            shaken.__dict__["weights"] = _shaken(view.weights, bounds, seed)
            other = _flat(queries.run(model, shaken, inputs, kwargs))
            moved = max(moved, float((other - rebuilt).abs().max()) if other.numel() else 0.0)
    eps = max(_eps(view, name) for name in view.memory.parameters)
    bound = moved / scale + 16 * eps
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


def _rms(vector: Tensor) -> float:
    return float(vector.norm()) / sqrt(max(vector.numel(), 1))


def _severity(check: Check) -> float:
    if check.residual == 0:
        return 0.0
    if not np.isfinite(check.residual) or check.bound <= 0:
        return float("inf")
    return float(check.residual / check.bound)


def _cell(check: Check | None) -> str:
    if check is None:
        return ""
    return f"{check.residual:.1e} {'≤' if check.passed else '> !'} {check.bound:.1e}"
