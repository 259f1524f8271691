"""No defect hides in the remainder: what is not explained has a cause on record, or fails."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.certificate import tampering
from tests.certificate.runs import Run
from torch import nn

from dualform.certificate import at, verify
from dualform.certificate.report import BITS, KEPT, NOT, ROUNDED
from dualform.errors import AuditError, QueryError
from dualform.memory import Memory

SGD, ADAMW = torch.optim.SGD, torch.optim.AdamW
RULES = {"SGD": (SGD, {"lr": 0.05, "momentum": 0.9}), "AdamW": (ADAMW, {"lr": 1e-3})}
each_rule = pytest.mark.parametrize("rule", RULES)


def edited(model: nn.Module, step: int) -> None:
    """A gradient is edited by hand, at one step."""
    if step == 70:
        weight = model.get_parameter("2.weight")
        assert weight.grad is not None
        weight.grad[3, 4] += 0.01


def penalized(model: nn.Module, step: int) -> None:
    """A penalty on one weight, which is no pattern's."""
    weight = model.get_parameter("2.weight")
    assert weight.grad is not None
    weight.grad += 1e-3 * weight.detach()


def loaded(model: nn.Module, step: int) -> None:
    """Weights are edited between two updates."""
    if step == 70:
        with torch.no_grad():
            model.get_parameter("2.weight")[3].mul_(1.01)


@pytest.mark.parametrize("edit", [edited, penalized])
@each_rule
def test_an_unexplained_gradient_stops_before_the_update(
    rule: str, edit: Callable[[nn.Module, int], None], tmp_path: Path
) -> None:
    run = Run(*RULES[rule], edit=edit)
    with pytest.raises(AuditError, match=r"2\.weight.*stopped before the update"):
        run.train(tmp_path / "run")
    for name, p in run.trained.named_parameters():
        assert torch.equal(p, run.weights[-1][name]), "the optimizer did not move"
    found = verify(Memory.open(tmp_path / "run"), run.trained, every_step=True)
    assert found.steps == len(run.weights) - 1
    assert found.verdict in (BITS, KEPT)
    assert found.passed


@pytest.mark.parametrize("edit", [edited, penalized])
@each_rule
def test_under_warn_that_parameter_is_values_by_name(
    rule: str, edit: Callable[[nn.Module, int], None], tmp_path: Path
) -> None:
    run = Run(*RULES[rule], edit=edit, options={"audit": "warn"}).train(tmp_path / "run")
    found = verify(run.memory, run.trained, every_step=True)
    assert found.passed, repr(found)
    assert {n for n, v in found.verdicts.items() if v.verdict == BITS and not v.remainder} == set(
        found.verdicts
    ) - {"2.weight"}
    verdict = found.verdicts["2.weight"]
    assert 0.1 < verdict.remainder <= 1.1
    assert "was not explained at step" in verdict.why
    assert "not explained" in repr(found)
    gone = max(set(range(140)) - set(run.memory.kept.steps("2.weight")))
    with pytest.raises(QueryError, match="cannot be rebuilt"):
        at(run.memory, "2.weight", gone)


@each_rule
def test_an_edit_is_on_record_and_only_its_stretch_is_not_walked(rule: str, tmp_path: Path) -> None:
    run = Run(*RULES[rule], edit=loaded).train(tmp_path / "run")
    found = verify(run.memory, run.trained, every_step=True)
    assert found.passed, repr(found)
    assert found.verdict == BITS
    assert "changed between two updates" in found.verdicts["2.weight"].why
    assert 0 < found.verdicts["2.weight"].remainder < 1
    forged = tampering.forge(run.path, tmp_path / "forged", tampering.drop_events)
    found = verify(forged, run.trained, every_step=True)
    assert found.verdicts["2.weight"].verdict == NOT
    assert not found.passed


FORGERIES: dict[str, tuple[tampering.Change, ...]] = {
    "a step is said to be unexplained": (tampering.write_log("explained", 30, False),),
    "and its patterns are gone": (
        tampering.write_log("explained", 30, False),
        tampering.zero_error_signals("2", 30),
        tampering.zero_error_signals("0", 30),
        tampering.zero_error_signals("4", 30),
    ),
    "all of them are, from a step on": tuple(
        tampering.write_log("explained", step, False) for step in range(60, 140)
    ),
    "every one of them is": tuple(
        tampering.write_log("explained", step, False) for step in range(140)
    ),
    "and what was seen is no number": (
        tampering.write_log("explained", 30, False),
        tampering.write_log("seen", 30, float("nan")),
        tampering.write_log("kappa", 30, float("nan")),
    ),
}


@pytest.mark.parametrize("forgery", FORGERIES)
@each_rule
def test_what_has_no_cause_on_record_fails(rule: str, forgery: str, tmp_path: Path) -> None:
    run = Run(*RULES[rule]).train(tmp_path / "run")
    for where in ([], [tampering.elsewhere]):
        path = tmp_path / f"forged{len(where)}"
        found = verify(tampering.forge(run.path, path, *FORGERIES[forgery], *where), run.trained)
        assert {v.verdict for v in found.verdicts.values()} == {NOT}
        assert not found.passed
        assert "nothing on record says why" in repr(found)


@each_rule
def test_an_event_that_was_dropped_leaves_a_remainder_without_a_cause(
    rule: str, tmp_path: Path
) -> None:
    run = Run(*RULES[rule], edit=edited, options={"audit": "warn"}).train(tmp_path / "run")

    def still_patterns(found: tampering.Forgery) -> None:
        found.content.news.pop("coverage", None)

    forged = tampering.forge(run.path, tmp_path / "forged", tampering.drop_events, still_patterns)
    found = verify(forged, run.trained)
    assert found.verdicts["2.weight"].verdict == NOT
    assert not found.passed


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"every": 3}, "one of every 3 steps"),
        ({"keep": "keys"}, "keeps keys alone"),
        ({"keep": {"2": "values", "*": "patterns"}}, ""),
    ],
)
def test_what_was_not_asked_for_is_no_defect(
    options: dict[str, Any], why: str, tmp_path: Path
) -> None:
    run = Run(options=options).train(tmp_path / "run")
    found = verify(run.memory, run.trained, every_step=True)
    assert found.passed, repr(found)
    assert found.verdicts["2.weight"].verdict == KEPT
    assert why in found.verdicts["2.weight"].why
    assert found.verdicts["2.weight"].remainder > 0.5


def test_a_state_put_back_is_walked_along_the_path_that_led_to_the_network(tmp_path: Path) -> None:
    states: dict[str, Any] = {}

    def put_back(model: nn.Module, step: int) -> None:
        if step == 70:
            states["model"] = {n: p.detach().clone() for n, p in model.named_parameters()}
        if step == 100:
            with torch.no_grad():
                for name, p in model.named_parameters():
                    p.copy_(states["model"][name])

    for number, options in enumerate(({}, {"dtype": "float16"})):
        run = Run(settings={"lr": 0.05}, edit=put_back, options=options)
        run.train(tmp_path / str(number))
        assert [e.what for e in run.memory.events] == ["rewind"]
        found = verify(run.memory, run.trained, every_step=True)
        assert found.passed, repr(found)
        assert found.verdict == (ROUNDED if options else BITS)
        assert {v.remainder for v in found.verdicts.values()} == {0.0}
