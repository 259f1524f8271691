"""What patterns do not explain is one share, by name, whatever it comes from.

Every run here is accounted for twice: by `DualForm`, and by the test's own ledger.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.attention.ledger import Training, network
from torch.optim import Optimizer

import dualform
from dualform.errors import AuditError

STEPS, WHEN = 24, 11
"""How many updates there are, and before which one something happens."""
UNEXPLAINED = "not explained by patterns"
EXACT = 1e-12


def every_third_step(t: Training) -> None:
    for step in range(STEPS):
        t.step(unknown=("0", "2") if step % 3 else ())


def interrupted(what: Callable[[Training], None]) -> Callable[[Training], None]:
    def loop(t: Training) -> None:
        for step in range(STEPS):
            if step == WHEN:
                what(t)
                t.ledger.weights[-1] = t.ledger.copy()
            t.step()

    return loop


def edit(t: Training) -> None:
    with torch.no_grad():
        t.model[2].weight.mul_(0.7)
        t.model[2].bias.add_(0.3)


def load(t: Training) -> None:
    torch.manual_seed(9)
    t.model.load_state_dict(network().state_dict())


def replace(t: Training) -> None:
    t.optimizer = t.make(t.model)
    t.ledger.forget_momentum()


def break_off(t: Training) -> None:
    """The optimizer has moved everything, and something raises before its step returns."""

    def fail(*_: Any) -> None:
        raise ZeroDivisionError

    handle = t.optimizer.register_step_post_hook(fail)
    t.backward()
    with pytest.raises(ZeroDivisionError):
        t.optimizer.step()
    handle.remove()


def edit_a_gradient(t: Training) -> None:
    """Of one step; from there on the parameter is kept as values."""
    for step in range(STEPS):
        t.backward()
        if step == WHEN:
            t.model[2].weight.grad += 0.05
        t.optimizer.step()
        t.ledger.moved(t.optimizer, ("2.weight",) if step >= WHEN else ())


def penalize(t: Training) -> None:
    for _ in range(STEPS):
        t.backward()
        (0.1 * t.model[2].weight.square().sum()).backward()
        t.optimizer.step()
        t.ledger.moved(t.optimizer, ("2.weight",))


Cause = tuple[Callable[[Training], None], dict[str, Any], str]
CAUSES: dict[str, Cause] = {
    "every third step": (every_third_step, {"every": 3}, "one of every 3 steps"),
    "a gradient edited": (edit_a_gradient, {"audit": "warn"}, "not explained at step 11"),
    "a penalty": (penalize, {"audit": "warn"}, "not explained at step 0"),
    "weights edited": (interrupted(edit), {}, "changed between two updates"),
    "weights loaded": (interrupted(load), {}, "changed between two updates"),
    "optimizer replaced": (interrupted(replace), {}, ""),
    "update broken off": (interrupted(break_off), {}, "changed between two updates"),
}
"""What leaves a remainder: the loop, the options it is recorded with, what is said of it."""
LINEAR_ONLY = ("every third step", "a gradient edited", "a penalty")
CASES = [("SGD", cause) for cause in CAUSES]
CASES += [("AdamW", cause) for cause in CAUSES if cause not in LINEAR_ONLY]


def trained(path: Path, rule: str, cause: str) -> Training:
    loop, options, _ = CAUSES[cause]
    training = Training(path, rule, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # audit="warn" does
        with training.recording():
            loop(training)
    return training


@pytest.mark.parametrize(("rule", "cause"), CASES)
def test_the_remainder_is_one_share_by_name(tmp_path: Path, rule: str, cause: str) -> None:
    t = trained(tmp_path / "run", rule, cause)
    x = torch.randn(1, 5, dtype=torch.float64)
    for target in range(3):
        split, weights = t.dual.contribute(x, target=target), t.ledger.weights[-1]
        initial, patterns = (
            t.ledger.output(part, x, target, weights)
            for part in (t.ledger.initial, t.ledger.patterns)
        )
        output, shares = float(t.model(x)[0, target].detach()), split.shares
        first = shares["initial weights"] + shares["initial bias"]
        assert first == pytest.approx(initial, abs=EXACT)
        assert shares["patterns"] == pytest.approx(patterns, abs=EXACT)
        assert shares[UNEXPLAINED] == pytest.approx(output - initial - patterns, abs=EXACT)
        assert split.total == pytest.approx(output, abs=EXACT)
        assert abs(split.residual) <= EXACT
        is_there = abs(shares[UNEXPLAINED]) > 1e-6
        assert is_there == (cause != "optimizer replaced")  # that is nothing unexplained
        assert UNEXPLAINED in repr(split)


@pytest.mark.parametrize(("rule", "cause"), CASES)
def test_the_weights_are_those_of_training_wherever_they_can_be_had(
    tmp_path: Path, rule: str, cause: str
) -> None:
    t = trained(tmp_path / "run", rule, cause)
    kept = t.dual.memory.kept.steps("2.weight")
    first = {"every third step": 1, "a penalty": 0}.get(cause, WHEN)
    for at, history in enumerate(t.ledger.weights):
        if cause in LINEAR_ONLY and at not in kept and at > first:
            with pytest.raises(
                dualform.QueryError, match=f"after {at} updates cannot be rebuilt: "
            ):
                t.dual.at(at).weights()
            continue
        for name, weight in t.dual.at(at).weights().items():
            assert torch.equal(weight, history[name]), (name, at)


@pytest.mark.parametrize(("rule", "cause"), CASES)
def test_verify_passes_and_says_what_is_not_explained(
    tmp_path: Path, rule: str, cause: str
) -> None:
    t = trained(tmp_path / "run", rule, cause)
    x = torch.randn(2, 5, dtype=torch.float64)
    certificate = t.dual.verify(x, every_step=True)
    assert certificate.passed, repr(certificate)
    said = CAUSES[cause][2]
    assert said in repr(certificate)
    found = certificate.verdicts["2.weight"]
    assert said in found.why
    if said and cause != "a penalty":  # of which no part is explained: it is values throughout
        assert found.remainder > 1e-3
        assert "not explained" in repr(certificate)
    untouched = certificate.verdicts["0.weight"].verdict
    assert untouched == "bit for bit" or cause == "every third step"
    assert t.dual(x, by="patterns") == pytest.approx(t.dual(x), abs=EXACT)


@pytest.mark.parametrize("cause", CAUSES)
def test_the_repr_says_what_leaves_a_remainder(tmp_path: Path, cause: str) -> None:
    said = repr(trained(tmp_path / "run", "SGD", cause).dual)
    expected = {
        "every third step": "one of every 3 steps was recorded",
        "a gradient edited": "kept as values, without patterns: 2.weight",
        "a penalty": "kept as values, without patterns: 2.weight",
        "weights edited": "(before step 11), which is not explained by patterns: 2.weight, 2.bias",
        "optimizer replaced": "as attention over its training",
    }
    assert expected.get(cause, "(before step 11), which is not explained by patterns: 0.w") in said


@pytest.mark.parametrize(("rule", "cause"), CASES)
def test_no_mask_touches_it(tmp_path: Path, rule: str, cause: str) -> None:
    t = trained(tmp_path / "run", rule, cause)
    nothing = t.dual.without().weights(torch.float64)
    for name, weight in t.dual.weights(torch.float64).items():
        taken = weight - nothing[name]
        assert float((taken - t.ledger.patterns[name][0]).abs().max()) <= EXACT


@pytest.mark.parametrize("cause", LINEAR_ONLY)
def test_a_rule_that_goes_entry_by_entry_is_refused_by_name_after_what_is_not_explained(
    tmp_path: Path, cause: str
) -> None:
    t = trained(tmp_path / "run", "AdamW", cause)
    x, since = torch.randn(1, 5, dtype=torch.float64), {"every third step": 1, "a penalty": 0}
    why = f"'2.weight' cannot be told apart: AdamW.* step {since.get(cause, WHEN)} is not explained"
    with pytest.raises(dualform.QueryError, match=why):
        t.dual.contribute(x, target=0)
    with pytest.raises(dualform.QueryError, match=why):
        t.dual.without(label=1, layers="2")
    before = t.dual.at(since.get(cause, WHEN))
    split = before.contribute(x, target=0)
    assert abs(split.shares[UNEXPLAINED]) <= EXACT
    assert abs(split.residual) <= EXACT
    assert len(t.dual.attend(x)["2"].top(3)) == 3
    assert t.dual.verify(x).passed


@pytest.mark.parametrize("rule", ["SGD", "AdamW"])
def test_what_the_optimizer_remembers_edited_by_hand_is_in_the_remainder_and_fails_verify(
    tmp_path: Path, rule: str
) -> None:
    """A rule with scalars alone is followed, and the run stops; else nothing on record accounts for
    it, so it has to fail. What patterns wrote stays right."""
    t = Training(tmp_path / "run", rule)
    stops = pytest.raises(AuditError, match="not where its learning rule puts it")
    with stops if rule == "SGD" else nullcontext(), t.recording():
        for step in range(STEPS):
            if step == WHEN:
                for p in t.model.parameters():
                    t.optimizer.state[p][t.momentum].mul_(0.5)
            t.step()
    x = torch.randn(1, 5, dtype=torch.float64)
    split, weights = t.dual.contribute(x, target=0), t.ledger.weights[-1]
    patterns = t.ledger.output(t.ledger.patterns, x, 0, weights)
    assert split.shares["patterns"] == pytest.approx(patterns, abs=EXACT)
    assert abs(split.residual) <= EXACT
    assert abs(split.shares[UNEXPLAINED]) > 1e-6
    certificate = t.dual.verify(every_step=True)
    if rule == "SGD":  # now it is on record
        assert all("not where its learning rule" in v.why for v in certificate.verdicts.values())
    else:
        assert not certificate.passed
        assert {v.step for v in certificate.verdicts.values()} == {WHEN}


def test_a_bias_beyond_reach_is_a_share_of_its_own(tmp_path: Path) -> None:
    """Its weight is explained, and it is not: what each pattern wrote into it is not known."""
    t = Training(tmp_path / "run", "AdamW", audit="warn")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with t.recording():
            for _ in range(STEPS):
                t.backward()
                t.model[2].bias.grad += 0.05
                t.optimizer.step()
                t.ledger.moved(t.optimizer, ("2.bias",))
    x = torch.randn(1, 5, dtype=torch.float64)
    split = t.dual.contribute(x, target=2)
    assert split.shares["bias, kept as values"] == pytest.approx(float(t.model[2].bias[2].detach()))
    assert abs(split.residual) <= EXACT
    weight = {**t.ledger.patterns, "2.bias": (torch.zeros(3).double(),) * 2}
    wrote = t.ledger.output(weight, x, 2, t.ledger.weights[-1])
    assert split.shares["patterns"] == pytest.approx(wrote, abs=EXACT)
    masked = t.dual.without(label=1)
    assert torch.equal(masked.weights()["2.bias"], t.dual.weights()["2.bias"])
    assert "no mask reaches: 2.bias" in repr(masked)


def test_a_layer_kept_as_values_is_named_and_left_alone(tmp_path: Path) -> None:
    t = Training(tmp_path / "run", keep={"0": "values", "*": "patterns"})
    with t.recording():
        for _ in range(STEPS):
            t.step()
    x = torch.randn(2, 5, dtype=torch.float64)
    assert t.dual.memory.layers == ("2",)
    assert "kept as values, without patterns: 0.weight, 0.bias" in repr(t.dual)
    certificate = t.dual.verify(x)
    assert certificate.passed
    assert certificate.verdicts["0.weight"].verdict == "not replayable: kept states only"
    assert certificate.verdicts["2.weight"].verdict == "bit for bit"
    split = t.dual.contribute(x[:1], target=0)
    assert abs(split.shares[UNEXPLAINED]) <= EXACT
    assert abs(split.residual) <= EXACT
    for ask in (lambda: t.dual.attend(x, layers="0"), lambda: t.dual.without(layers="0")):
        with pytest.raises(dualform.QueryError, match="no layer '0'"):
            ask()
    whole, masked = t.dual.weights(), t.dual.without(label=1).weights()
    assert torch.equal(whole["0.weight"], masked["0.weight"])
    assert not torch.equal(whole["2.weight"], masked["2.weight"])


# Rules that are not known to be linear -----------------------------------------------------------


class Lion(Optimizer):
    """Moves by the sign of a mean of gradients."""

    def __init__(self, params: Any, lr: float = 3e-3) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                mean = self.state[p].setdefault("mean", torch.zeros_like(p))
                p.sub_(torch.sign(mean * 0.9 + p.grad * 0.1), alpha=group["lr"])
                mean.lerp_(p.grad, 0.01)


def test_an_unknown_rule_is_refused_by_name_where_it_has_to_be_linear(tmp_path: Path) -> None:
    t = Training(tmp_path / "run")
    t.optimizer, history = Lion(t.model.parameters()), []
    with t.recording() as recorder:
        for _ in range(STEPS):
            t.backward()
            t.optimizer.step()
            history.append(t.ledger.copy())
    assert "Lion is not known to be linear" in " ".join(recorder.remarks)
    x = torch.randn(2, 5, dtype=torch.float64)
    dual = dualform.DualForm(t.model, t.path, optimizer=Lion)
    for ask in (
        lambda: dual.contribute(x[:1], target=0),
        lambda: dual.only(label=1),
        lambda: dual.without(label=1),
    ):
        with pytest.raises(
            dualform.QueryError, match=r"Lion is not linear in its gradients.*verify"
        ):
            ask()
    for at in (1, 7, 23, 24):
        weights = dual.at(at).weights()
        assert all(torch.equal(weights[n], history[at - 1][n]) for n in weights)
    certificate = dual.verify(x, every_step=True)
    assert {v.verdict for v in certificate.verdicts.values()} == {"bit for bit"}
    assert dual(x, by="patterns") == pytest.approx(t.model(x).detach(), abs=EXACT)
    keys, query = dual.memory.layer("0").keys, x[:1]
    weights = dual.attend(query)["0"].weights
    assert float((weights - query @ keys.T).abs().max()) <= EXACT
    with pytest.raises(
        dualform.QueryError, match=r"not at hand: hand the class in \(optimizer=Lion\)"
    ):
        t.dual.at(7).weights()
