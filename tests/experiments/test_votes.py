"""Table 1 and its company, against the same numbers counted one by one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import dualform
import votes

CLASSES = 4


class Recorded:
    """A small recorded run: 40 inputs that come again and again, ReLUs, two tasks."""

    def __init__(self, path: Path) -> None:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.model = nn.Sequential(
                nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 12), nn.ReLU(), nn.Linear(12, CLASSES)
            ).double()
            self.inputs = torch.randn(40, 6, dtype=torch.float64)
            self.labels = torch.randint(0, CLASSES, (40,))
            self.test = torch.randn(60, 6, dtype=torch.float64)
            self.test_labels = torch.randint(0, CLASSES, (60,))
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.2, momentum=0.9)
        generator = torch.Generator().manual_seed(1)
        with dualform.record(self.model, path) as recorder:
            for step in range(40):
                chosen = torch.randint(0, 40, (8,), generator=generator)
                task = "first" if step < 20 else "second"
                recorder.tag(example=chosen, label=self.labels[chosen], task=task)
                F.cross_entropy(self.model(self.inputs[chosen]), self.labels[chosen]).backward()
                optimizer.step()
                optimizer.zero_grad()
        self.dual = dualform.DualForm(self.model, path)
        self.memory = self.dual.memory

    def weights(self, layer: str) -> np.ndarray[Any, Any]:
        """All attention weights of the test inputs, [n, T], from the keys themselves."""
        queries: Tensor = self.test
        with torch.no_grad():
            for module in list(self.model)[: int(layer)]:
                queries = module(queries)
        return (queries @ self.memory.layer(layer).keys.T).numpy()


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    return Recorded(tmp_path_factory.mktemp("votes") / "memory")


def counted(conditions: Sequence[bool]) -> float:
    return round(100 * sum(conditions) / len(conditions), 2)


def test_a_row_of_table_1_is_what_counting_input_by_input_gives() -> None:
    generator = np.random.default_rng(0)
    vote, target, output = generator.integers(0, CLASSES, (3, 200))
    wrong = [i for i in range(200) if output[i] != target[i]]
    right = [i for i in range(200) if output[i] == target[i]]
    assert votes.split(vote, target, output) == {
        "target, if wrong": counted([vote[i] == target[i] for i in wrong]),
        "output, if wrong": counted([vote[i] == output[i] for i in wrong]),
        "both, if right": counted([vote[i] == output[i] for i in right]),
    }


def test_a_network_that_is_always_right_leaves_nothing_to_count_among_the_wrong() -> None:
    same = np.arange(CLASSES)
    row = votes.split(same, same, same)
    assert np.isnan(row["target, if wrong"])
    assert row["both, if right"] == 100


@pytest.mark.parametrize("step", [40, 25])
def test_table_1_at_any_step_is_that_of_the_keys_met_until_then(run: Recorded, step: int) -> None:
    dual = run.dual.at(step)
    found = votes.table1(dual, run.test, run.test_labels)
    model = dual.to_model()
    queries, target = run.test, run.test_labels.numpy()
    with torch.no_grad():
        output = model(run.test).argmax(1).numpy()
        for name in run.memory.layers:
            layer = run.memory.layer(name)
            met = layer.patterns["step"] < step
            inside = list(model)[: int(name)]
            asked = queries
            for module in inside:
                asked = module(asked)
            alpha = (asked @ layer.keys[torch.from_numpy(met)].T).abs().numpy()
            label = layer.patterns["label"][met]
            sums = np.stack([alpha[:, label == c].sum(1) for c in range(CLASSES)], axis=1)
            expected = votes.split(sums.argmax(1), target, output)
            assert found["layers"][name] == expected
    assert found["wrong"] == int((output != target).sum())


@pytest.mark.parametrize("layer", ["0", "2", "4"])
def test_votes_by_the_errors_size_are_those_of_every_pattern_weighed(
    run: Recorded, layer: str
) -> None:
    of = run.memory.layer(layer)
    assert (of.distinct is not None) == (layer == "0")  # both ways to the sum are met
    norms = of.error_signals.norm(dim=1).numpy()
    weighed = np.abs(run.weights(layer)) * norms
    label = of.patterns["label"]
    sums = np.stack([weighed[:, label == c].sum(1) for c in range(CLASSES)], axis=1)
    queries = run.dual.attend(run.test)[layer].queries
    assert votes.weighted_votes(of, queries).tolist() == sums.argmax(1).tolist()
    assert np.abs(votes.error_norms(of) - norms).max() < 1e-12


def test_totals_follow_their_groups(run: Recorded) -> None:
    sums, groups = votes.totals(run.dual.attend(run.test)["2"], "task", "label")
    patterns, alpha = run.memory.layer("2").patterns, np.abs(run.weights("2"))
    for column, (task, label) in enumerate(groups):
        inside = (patterns["task"] == task) & (patterns["label"] == label)
        assert np.abs(sums[:, column] - alpha[:, inside].sum(1)).max() < 1e-9


@pytest.mark.parametrize("layer", ["0", "4"])
def test_the_strongest_examples_are_different_and_in_order(run: Recorded, layer: str) -> None:
    found = votes.strongest_examples(run.dual.attend(run.test)[layer], 3)
    patterns, alpha = run.memory.layer(layer).patterns, np.abs(run.weights(layer))
    for query, rows in enumerate(found):
        best: dict[tuple[str, int], float] = {}
        for task, example, weight in zip(
            patterns["task"], patterns["example"], alpha[query], strict=True
        ):
            best[task, int(example)] = max(best.get((task, int(example)), 0.0), float(weight))
        expected = sorted(best.values(), reverse=True)[:3]
        assert len({(row["task"], row["example"]) for row in rows}) == 3
        assert np.abs(np.abs([row["weight"] for row in rows]) - expected).max() < 1e-9


def test_what_recurs_is_counted_over_inputs(run: Recorded) -> None:
    spotlight = run.dual.attend(run.test)["2"]
    most = votes.recurring(spotlight, 3, 320)[0]
    lists = votes.strongest_examples(spotlight, 3, 320)
    inside = [
        any((row["task"], row["example"]) == (most["task"], most["example"]) for row in rows)
        for rows in lists
    ]
    assert most["percent of inputs"] == round(100 * np.mean(inside), 1)


def test_the_parts_of_training_share_the_strongest_among_them(run: Recorded) -> None:
    spotlight = run.dual.attend(run.test)["2"]
    shares = votes.steps_of_the_strongest(spotlight, 10, 40, 4)
    order = np.argsort(-np.abs(run.weights("2")), axis=1)[:, :10]
    steps = run.memory.layer("2").patterns["step"][order]
    expected = [100 * np.mean((steps >= low) & (steps < low + 10)) for low in (0, 10, 20, 30)]
    assert np.abs(np.array(shares) - expected).max() < 1e-3


def test_an_example_is_chosen_by_rule_or_not_at_all() -> None:
    assert votes.first(np.array([False, True, True]), "") == 1
    with pytest.raises(LookupError, match="no test example is a cat"):
        votes.first(np.array([False]), "a cat")


def test_lengths_of_keys_are_those_of_the_stored_ones(run: Recorded) -> None:
    layer = run.memory.layer("2")
    expected = layer.keys.norm(dim=1).numpy()
    assert np.abs(votes.key_lengths(layer) - expected).max() < 1e-12
