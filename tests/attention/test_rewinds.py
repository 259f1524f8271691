"""Weights and optimizer put back to a recorded state: what was learned since then wrote nothing."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from tests.attention.ledger import BATCH, RULES, Training

import dualform

BACK, SINCE, STEPS = 9, 15, 24
"""After 15 updates the state after 9 was restored."""
EXACT = 1e-12


@pytest.fixture(scope="module", params=RULES)
def rewound(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Training:
    t = Training(tmp_path_factory.mktemp("rewound") / "run", request.param)
    checkpoint: tuple[Any, ...] = ()
    with t.recording():
        for step in range(STEPS):
            if step == BACK:
                states = t.model.state_dict(), t.optimizer.state_dict()
                checkpoint = (*copy.deepcopy(states), t.ledger.mark())
            if step == SINCE:
                t.model.load_state_dict(checkpoint[0])
                t.optimizer.load_state_dict(checkpoint[1])
                t.ledger.go_back(checkpoint[2])
            t.step()
    return t


def test_it_is_on_record_as_a_rewind(rewound: Training) -> None:
    memory = rewound.dual.memory
    assert [(e.what, e.step, e.to) for e in memory.events] == [("rewind", SINCE, BACK)]
    assert f"put back to what they were after {BACK} updates" in " ".join(memory.remarks)
    assert memory.path_to("2.weight", STEPS).tolist() == [*range(BACK), *range(SINCE, STEPS)]


def test_the_weights_of_every_step_are_those_of_training(rewound: Training) -> None:
    for at, history in enumerate(rewound.ledger.weights):
        for name, weight in rewound.dual.at(at).weights().items():
            assert torch.equal(weight, history[name]), (name, at)


def test_verify_passes(rewound: Training) -> None:
    certificate = rewound.dual.verify(torch.randn(2, 5).double(), every_step=True)
    assert certificate.passed, repr(certificate)


@pytest.mark.parametrize("at", [STEPS, SINCE + 3, SINCE, SINCE - 1, BACK])
def test_contributions_are_those_of_the_path_alone(rewound: Training, at: int) -> None:
    x = torch.randn(1, 5, dtype=torch.float64)
    view = rewound.dual.at(at)
    split = view.contribute(x, target=1)
    on_path = np.isin(split.patterns["step"], rewound.dual.memory.path_to("2.weight", at))
    assert not split.values.numpy()[~on_path].any()
    assert split.values.numpy()[on_path].all()
    assert (
        len(split.top(1000)) == on_path.sum() == BATCH * len(np.unique(on_path.nonzero()[0] // 6))
    )
    assert abs(split.shares["not explained by patterns"]) <= EXACT
    assert abs(split.residual) <= EXACT
    if at == STEPS:
        ledger = rewound.ledger
        for part, names in (
            (ledger.patterns, ["patterns"]),
            (ledger.initial, ["initial weights", "initial bias"]),
        ):
            expected = ledger.output(part, x, 1, ledger.weights[-1])
            assert sum(split.shares[n] for n in names) == pytest.approx(expected, abs=EXACT)


def test_attention_leaves_out_what_was_taken_back(rewound: Training) -> None:
    x = torch.randn(2, 5, dtype=torch.float64)
    table = rewound.dual.attend(x)["0"].top(1000)
    steps = set(table["step"].tolist())
    assert steps == {*range(BACK), *range(SINCE, STEPS)}
    by_label = rewound.dual.attend(x)["0"].sum_by("label")
    assert by_label["patterns"].sum() == 2 * BATCH * len(steps)
    earlier = rewound.dual.at(SINCE - 1).attend(x)["0"].top(1000)
    assert set(earlier["step"].tolist()) == set(range(SINCE - 1))


def test_masks_have_nothing_to_take_away_of_it(rewound: Training) -> None:
    dual = rewound.dual
    whole, taken_back = dual.weights(torch.float64), slice(BACK, SINCE)
    for name, weight in dual.without(step=taken_back).weights(torch.float64).items():
        assert float((weight - whole[name]).abs().max()) <= EXACT
    nothing = dual.without().weights(torch.float64)
    for name, weight in dual.only(step=taken_back).weights(torch.float64).items():
        assert float((weight - nothing[name]).abs().max()) <= EXACT
    masked = dual.without(label=1)
    x = torch.randn(2, 5, dtype=torch.float64)
    assert masked(x, by="patterns") == pytest.approx(masked(x), abs=EXACT)


def test_there_is_no_average_of_a_run_that_went_back(rewound: Training) -> None:
    with pytest.raises(dualform.QueryError, match="taken back to an earlier step"):
        rewound.dual.averaged(0.9)
