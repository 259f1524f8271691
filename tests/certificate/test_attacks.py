"""A memory that was tampered with does not verify, though every checksum in it matches."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from tests.certificate import tampering
from tests.certificate.runs import Run

from dualform.certificate import at, verify
from dualform.certificate.report import BITS, KEPT, NOT
from dualform.errors import QueryError

STEP = 100
RULES = {
    "SGD": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "weight_decay": 1e-4}),
    "AdamW": (torch.optim.AdamW, {"lr": 1e-3}),
}
ATTACKS: dict[str, tampering.Change] = {
    "one step's error signals zeroed": tampering.zero_error_signals("2", STEP),
    "one learning rate off by 0.1 %": tampering.scale_learning_rate(STEP, 1.001),
    "one clipping factor dropped": tampering.write_log("kappa", STEP, 1.0),
    "one clipping factor off by 1e-4": tampering.scale_log("kappa", STEP, 1.0001),
    "two keys exchanged": tampering.exchange_keys("2", STEP),
    "one row's key × 1.001": tampering.scale_key("2", STEP, 3, 1.001),
    "one kept weight off by 1e-3": tampering.scale_kept_entry("2.weight", 64, 1.001),
    "an update left out": tampering.write_log("moved", STEP, False),
    "no number as factor": tampering.write_log("kappa", STEP, float("nan")),
    "no number as what was seen": tampering.write_log("seen", STEP, float("nan")),
}
BITS_ALONE: dict[str, tampering.Change] = {
    "one row's key × 1.00001": tampering.scale_key("2", STEP, 3, 1.00001),
    "one learning rate off by 1e-6": tampering.scale_learning_rate(STEP, 1 + 1e-6),
}
"""What is far below rounding: only bits can tell."""


@pytest.fixture(scope="module", params=RULES)
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Run:
    kind, settings = RULES[request.param]
    run = Run(kind, settings, steps=136, clip=0.3)  # type: ignore[arg-type]
    return run.train(tmp_path_factory.mktemp("run") / "run")


def test_what_is_written_anew_without_a_change_is_honest(run: Run, tmp_path: Path) -> None:
    assert verify(tampering.forge(run.path, tmp_path / "same"), run.trained, every_step=True).passed


@pytest.mark.parametrize("attack", [*ATTACKS, *BITS_ALONE])
def test_bits_find_every_attack(run: Run, attack: str, tmp_path: Path) -> None:
    change = {**ATTACKS, **BITS_ALONE}[attack]
    found = verify(tampering.forge(run.path, tmp_path / "forged", change), every_step=True)
    assert not found.passed
    assert found.verdict == NOT
    assert found.blame()
    others = [v.verdict for name, v in found.verdicts.items() if not name.startswith("2.")]
    if "key" in attack or "signals" in attack or "kept" in attack:
        assert set(others) == {BITS}, "only the layer that was tampered with"
        steps = [v.step for v in found.verdicts.values() if v.verdict == NOT]
        assert set(steps) <= ({STEP} if "kept" not in attack else {63, 64, 127})


def test_bits_find_one_edited_entry_of_what_an_optimizer_remembers(
    run: Run, tmp_path: Path
) -> None:
    """Though κ is searched for at every step, and no mark may see that entry."""
    (state,) = (
        n for n in run.memory.kept.state("2.weight", 64) if n in ("momentum_buffer", "exp_avg")
    )
    change = tampering.scale_kept_entry("2.weight", 64, 1.001, f"state.{state}")
    found = verify(tampering.forge(run.path, tmp_path / "forged", change), every_step=True)
    assert found.verdicts["2.weight"].verdict == NOT


@pytest.mark.parametrize("attack", ATTACKS)
def test_bounds_find_what_is_above_rounding(run: Run, attack: str, tmp_path: Path) -> None:
    """On another machine no bits are to be expected."""
    path = tmp_path / "forged"
    found = verify(tampering.forge(run.path, path, ATTACKS[attack], tampering.elsewhere))
    assert not found.passed
    assert found.verdict == NOT


def test_the_model_of_another_seed_is_another(run: Run) -> None:
    found = verify(run.memory, run.model(seed=1))
    assert not found.passed
    assert not found.failures
    assert found.model == "of no recorded step"
    assert repr(found).splitlines()[0].endswith("PASSED, bit for bit; the model is another")
    with pytest.raises(QueryError, match="weights of no recorded step, so only its architecture"):
        found.raise_if_failed()


def test_one_edited_weight_of_the_model_is_found(run: Run) -> None:
    model = run.model()
    model.load_state_dict(run.trained.state_dict())
    assert verify(run.memory, model).passed
    with torch.no_grad():
        model.get_parameter("2.weight")[3, 1] *= 1 + 1e-6
    assert [c.parameter for c in verify(run.memory, model).failures] == ["2.weight"]


HOSTILE = ["hostile_module.Hostile", "os.system", "torch.optim.hostile_module.Hostile"]


@pytest.mark.parametrize("path", HOSTILE)
def test_a_class_named_in_a_file_is_never_imported(
    run: Run, path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "hostile_module.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(str(tmp_path))
    memory = tampering.forge(run.path, tmp_path / "forged", tampering.name_class(path))
    before = set(sys.modules)
    found = verify(memory, run.trained, every_step=True)
    with pytest.raises(QueryError, match="hand the class in"):
        at(memory, "2.weight", 10)
    assert set(sys.modules) == before
    assert found.verdict == KEPT
    assert path.rpartition(".")[2] in repr(found)


@pytest.mark.parametrize("path", ["torch.optim.optimizer.Optimizer", "torch.optim.sgd.nn"])
def test_a_class_that_cannot_take_the_steps_certifies_nothing(
    run: Run, path: str, tmp_path: Path
) -> None:
    memory = tampering.forge(run.path, tmp_path / "forged", tampering.name_class(path))
    assert verify(memory).verdict in (NOT, KEPT)
