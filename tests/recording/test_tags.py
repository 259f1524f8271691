"""Tags: every pattern of every layer gets its right name; a slip is an error where it happens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.recording.runs import recording
from torch import Tensor, nn
from torch.optim import SGD

from dualform.errors import RecordingError
from dualform.memory import Memory
from dualform.recording import record


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)


class Pooled(nn.Module):
    """[B, L, 4] -> a layer over positions -> mean over positions -> a layer over examples."""

    def __init__(self, flatten: bool = False) -> None:
        super().__init__()
        self.word, self.sentence, self.flatten = nn.Linear(4, 3), nn.Linear(3, 2), flatten

    def forward(self, inputs: Tensor) -> Tensor:
        flat = inputs.flatten(0, 1) if self.flatten else inputs
        hidden = torch.tanh(self.word(flat)).reshape(*inputs.shape[:2], 3)
        return self.sentence(hidden.mean(1))


def record_batches(model: nn.Module, path: Path, batches: list[tuple[Tensor, Any]]) -> Memory:
    """One update per (inputs, tag); a tag of None means no call of `tag`."""
    optimizer = SGD(model.parameters(), lr=0.1)
    with record(model, path) as recorder:
        for inputs, tag in batches:
            if tag is not None:
                recorder.tag(**tag)
            model(inputs).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    return Memory.open(path)


def column(memory: Memory, layer: str, name: str) -> list[Any]:
    return memory.layer(layer).patterns[name].tolist()


def test_a_value_per_example_reaches_every_position_of_every_layer(tmp_path: Path) -> None:
    memory = record_batches(
        Pooled(),
        tmp_path / "run",
        [
            (torch.randn(2, 3, 4), {"example": [10, 11]}),
            (torch.randn(1, 3, 4), {"example": torch.tensor([12])}),
        ],
    )
    assert column(memory, "word", "example") == [10, 10, 10, 11, 11, 11, 12, 12, 12]
    assert column(memory, "sentence", "example") == [10, 11, 12]
    assert column(memory, "word", "step") == [0] * 6 + [1] * 3
    assert column(memory, "word", "position") == [0, 1, 2] * 3
    assert column(memory, "sentence", "step") == [0, 0, 1]


@pytest.mark.parametrize("flatten", [False, True], ids=["as [B, L, d]", "flattened by the model"])
def test_a_value_per_position_reaches_its_own_pattern(flatten: bool, tmp_path: Path) -> None:
    tokens = np.arange(6).reshape(2, 3)
    memory = record_batches(
        Pooled(flatten), tmp_path / "run", [(torch.randn(2, 3, 4), {"token": tokens})]
    )
    assert column(memory, "word", "token") == [0, 1, 2, 3, 4, 5]
    assert column(memory, "word", "position") == [0, 1, 2, 0, 1, 2]
    assert column(memory, "sentence", "token") == [None, None]


def test_one_value_names_the_whole_batch(tmp_path: Path) -> None:
    memory = record_batches(
        Pooled(),
        tmp_path / "run",
        [
            (torch.randn(2, 3, 4), {"task": "digits", "epoch": 0}),
            (torch.randn(2, 3, 4), {"task": "letters", "epoch": 1}),
        ],
    )
    assert column(memory, "sentence", "task") == ["digits"] * 2 + ["letters"] * 2
    assert column(memory, "word", "epoch") == [0] * 6 + [1] * 6


@pytest.mark.parametrize(
    ("given", "stored"),
    [
        ([3, 1], [3, 1]),
        ((3, 1), [3, 1]),
        (np.array([3, 1], np.int8), [3, 1]),
        (torch.tensor([3, 1], dtype=torch.int32), [3, 1]),
        (np.array([2**62, -(2**62)]), [2**62, -(2**62)]),
        ([0.25, float("inf")], [0.25, float("inf")]),
        (torch.tensor([0.5, -1.5], dtype=torch.float16), [0.5, -1.5]),
        ([True, False], [True, False]),
        (torch.tensor([True, False]), [True, False]),
        (["cat", "Hündin"], ["cat", "Hündin"]),
        (np.array(["cat", ""]), ["cat", ""]),
        (np.array(["cat", "dog"], dtype=object), ["cat", "dog"]),
        ("one for all", ["one for all"] * 2),
        (7, [7, 7]),
        (True, [True, True]),
        (2.5, [2.5, 2.5]),
        (torch.tensor(4), [4, 4]),
        (np.float32(0.5), [0.5, 0.5]),
    ],
)
def test_numbers_booleans_and_strings_come_back_as_they_were(
    given: Any, stored: list[Any], tmp_path: Path
) -> None:
    memory = record_batches(
        nn.Linear(4, 2), tmp_path / "run", [(torch.randn(2, 4), {"what": given})]
    )
    values = column(memory, "model", "what")
    assert values == stored
    assert [type(v) for v in values] == [type(v) for v in stored]


def test_strings_keep_their_meaning_over_many_segments(tmp_path: Path) -> None:
    model = nn.Linear(4, 2)
    optimizer = SGD(model.parameters(), lr=0.1)
    words = [f"word {i * 7 % 13}" for i in range(40)]
    with recording(model, optimizer, tmp_path / "run", segment_bytes=100) as recorder:
        for i in range(20):
            recorder.tag(word=words[2 * i : 2 * i + 2])
            model(torch.randn(2, 4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    memory = Memory.open(tmp_path / "run")
    assert len(memory.opened.segments) > 3
    assert column(memory, "model", "word") == words
    chosen = memory.layer("model").patterns.select(word="word 7")
    assert chosen.tolist() == [word == "word 7" for word in words]


def test_micro_batches_and_calls_are_told_apart(tmp_path: Path) -> None:
    model = nn.Linear(4, 4)
    optimizer = SGD(model.parameters(), lr=0.1)
    with record(model, tmp_path / "run") as recorder:
        for step in range(2):
            for part in range(2):
                recorder.tag(part=[10 * step + part] * 3)
                model(torch.tanh(model(torch.randn(3, 4)))).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    memory = Memory.open(tmp_path / "run")
    assert len(memory.layer("model")) == 2 * 2 * 2 * 3
    rows = {name: column(memory, "model", name) for name in ("step", "part", "microbatch", "call")}
    for step in range(2):
        for part in range(2):
            mine = [i for i, p in enumerate(rows["part"]) if p == 10 * step + part]
            assert len(mine) == 6
            assert {rows["step"][i] for i in mine} == {step}
            assert {rows["microbatch"][i] for i in mine} == {part}
            assert len({rows["call"][i] for i in mine}) == 2


def test_tags_belong_to_the_forward_pass_even_if_backward_comes_later(tmp_path: Path) -> None:
    model = nn.Linear(4, 2)
    optimizer = SGD(model.parameters(), lr=0.1)
    with record(model, tmp_path / "run") as recorder:
        recorder.tag(example=[1, 2])
        one = model(torch.full((2, 4), 1.0)).sum()
        recorder.tag(example=[3, 4])
        two = model(torch.full((2, 4), 2.0)).sum()
        two.backward()
        one.backward()
        optimizer.step()
    layer = Memory.open(tmp_path / "run").layer("model")
    assert layer.patterns["example"].tolist() == [3, 4, 1, 2]
    assert layer.keys[:, 0].tolist() == [2.0, 2.0, 1.0, 1.0]


def test_inputs_without_a_batch_take_one_value(tmp_path: Path) -> None:
    memory = record_batches(
        nn.Linear(4, 2),
        tmp_path / "run",
        [(torch.randn(4), {"example": 5}), (torch.randn(4), {"example": [6]})],
    )
    assert column(memory, "model", "example") == [5, 6]


def test_without_tags_patterns_still_have_their_step(tmp_path: Path) -> None:
    memory = record_batches(
        nn.Linear(4, 2), tmp_path / "run", [(torch.randn(3, 4), None), (torch.randn(1, 4), None)]
    )
    assert memory.columns == ("step", "position", "microbatch", "call")
    assert column(memory, "model", "step") == [0, 0, 0, 1]


def test_keys_and_error_signals_stay_with_their_names(tmp_path: Path) -> None:
    """The example's number is also in its key: rows and columns cannot have been mixed up."""
    model = nn.Sequential(nn.Linear(4, 3), nn.ReLU(inplace=True), nn.Linear(3, 2))
    optimizer = SGD(model.parameters(), lr=0.01)
    with recording(model, optimizer, tmp_path / "run", segment_bytes=600) as recorder:
        for step in range(12):
            ids = torch.arange(step, step + 1 + step % 4)
            recorder.tag(example=ids, odd=ids % 2 == 1)
            inputs = torch.cat([ids[:, None].float(), torch.randn(len(ids), 3)], dim=1)
            model(inputs).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    layer = Memory.open(tmp_path / "run").layer("0")
    assert layer.keys[:, 0].tolist() == layer.patterns["example"].tolist()
    assert (layer.patterns["odd"] == (layer.patterns["example"] % 2 == 1)).all()


# Slips --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tag", "message"),
    [
        ({"label": [1, 2, 3]}, r"'label' has shape \[3\], but layer 'sentence' saw .* shape \[2\]"),
        ({"label": np.zeros((2, 2), int)}, r"'label' has shape \[2, 2\].*'word'.* shape \[2, 3\]"),
        ({"label": np.zeros((3, 2), int)}, r"has shape \[3, 2\].* shape \[2\] \(2 patterns\)"),
        ({"label": []}, r"'label' has shape \[0\]"),
    ],
)
def test_a_wrong_length_names_layer_and_shapes(
    tag: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(RecordingError, match=message) as e:
        record_batches(Pooled(), tmp_path / "run", [(torch.randn(2, 3, 4), tag)])
    assert "one value per example ([B])" in str(e.value)


@pytest.mark.parametrize(
    ("tag", "message"),
    [
        ({"label": np.zeros((2, 3, 1), int)}, r"'label' has shape \[2, 3, 1\]; expected \[B\]"),
        ({"a": [1, 2], "b": [1, 2, 3]}, "do not describe one batch; their lengths are a: 2, b: 3"),
        ({"label": [1 + 2j, 0]}, "'label' holds complex128 values; expected numbers"),
        ({"label": [None, "a"]}, "'label' holds object values"),
        ({"step": [0, 1]}, "'step' was given, but dualform keeps that column itself"),
        ({"strength": [0, 1]}, r"'strength' was given, but without\(\.\.\.\) and only"),
        ({"position": 0}, "'position' was given, but dualform keeps"),
        ({"microbatch": 0}, "'microbatch' was given, but dualform keeps"),
        ({"call": 0}, "'call' was given, but dualform keeps"),
    ],
)
def test_a_tag_that_cannot_be_a_column_is_refused_at_once(
    tag: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(RecordingError, match=message):
        record_batches(nn.Linear(4, 2), tmp_path / "run", [(torch.randn(2, 4), tag)])


def test_positions_looked_up_once_for_all_examples_get_no_tag(tmp_path: Path) -> None:
    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens, self.places = nn.Embedding(7, 4), nn.Embedding(9, 4)
            self.pairs = nn.Embedding(9, 4)

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            places = torch.arange(tokens.shape[1])
            pairs = self.pairs((places[:, None] + places) % 9).mean(1)
            return self.tokens(tokens) + self.places(places) + pairs

    # as many positions as examples among them: only their order tells
    batches = [(torch.randint(0, 7, (2, n)), {"example": [4, 5]}) for n in (3, 2, 5)]
    record_batches(Words(), tmp_path / "run", batches)
    memory = Memory.open(tmp_path / "run")
    tokens = memory.layer("tokens").patterns
    assert tokens["example"].tolist() == [4] * 3 + [5] * 3 + [4] * 2 + [5] * 2 + [4] * 5 + [5] * 5
    assert tokens["position"].tolist() == [*range(3)] * 2 + [*range(2)] * 2 + [*range(5)] * 2
    assert set(memory.layer("places").patterns["example"]) == {None}
    assert memory.layer("places").keys[:, 0].tolist() == [*range(3), *range(2), *range(5)]
    assert set(memory.layer("pairs").patterns["example"][:9]) == {None}


def test_a_model_fed_sequence_first_is_told_how_to_tag(tmp_path: Path) -> None:
    batch = torch.randn(5, 2, 4)
    with pytest.raises(RecordingError, match=r"tags of shape \[L, B\].*feed it batch first"):
        record_batches(nn.Linear(4, 2), tmp_path / "run", [(batch, {"example": [0, 1]})])


def test_a_forgotten_tag_names_the_layer(tmp_path: Path) -> None:
    batch = torch.randn(2, 4)
    with pytest.raises(
        RecordingError,
        match=r"layer 'model' saw a batch of leading shape \[2\] that was not tagged",
    ):
        record_batches(
            nn.Linear(4, 2), tmp_path / "run", [(batch, {"label": [1, 2]}), (batch, None)]
        )
    assert Memory.open(tmp_path / "run").steps == 1


def test_a_tag_forgotten_after_one_of_two_optimizers_has_moved_is_noticed(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    one, two = (SGD(layer.parameters(), lr=0.1) for layer in model)
    with record(model, tmp_path / "run") as recorder:
        recorder.tag(label=[1, 2])
        model(torch.randn(2, 4)).sum().backward()
        one.step()
        model.zero_grad()
        with pytest.raises(RecordingError, match="was not tagged"):
            model(torch.randn(2, 4)).sum().backward()
    del two


def test_evaluation_needs_no_tag(tmp_path: Path) -> None:
    model = nn.Linear(4, 2)
    optimizer = SGD(model.parameters(), lr=0.1)
    with record(model, tmp_path / "run") as recorder:
        for _ in range(3):
            recorder.tag(label=[1, 2])
            model(torch.randn(2, 4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            model(torch.randn(9, 4))
            with torch.no_grad():
                model(torch.randn(5, 4))
    assert len(Memory.open(tmp_path / "run").layer("model")) == 6


def test_a_forgotten_column_is_named(tmp_path: Path) -> None:
    batch = torch.randn(2, 4)
    with pytest.raises(RecordingError, match=r"'task' was given at earlier steps but not now"):
        record_batches(
            nn.Linear(4, 2),
            tmp_path / "run",
            [(batch, {"label": [1, 2], "task": "a"}), (batch, {"label": [1, 2]})],
        )


@pytest.mark.parametrize(
    ("first", "then"), [(1, "one"), ("one", 1), (1, 1.0), (True, 1), ([0.5, 1.5], [1, 2])]
)
def test_a_column_keeps_its_kind(first: Any, then: Any, tmp_path: Path) -> None:
    batch = torch.randn(2, 4)
    with pytest.raises(RecordingError, match=r"'what' was of kind \w+ at earlier steps and is"):
        record_batches(
            nn.Linear(4, 2), tmp_path / "run", [(batch, {"what": first}), (batch, {"what": then})]
        )


def test_a_column_given_later_has_no_value_before(tmp_path: Path) -> None:
    batch = torch.randn(2, 4)
    memory = record_batches(
        nn.Linear(4, 2),
        tmp_path / "run",
        [(batch, {"label": [1, 2]}), (batch, {"label": [3, 4], "task": "b", "weight": 0.5})],
    )
    assert column(memory, "model", "task") == [None, None, "b", "b"]
    weights = memory.layer("model").patterns["weight"]
    assert np.isnan(weights[:2]).all()
    assert weights[2:].tolist() == [0.5, 0.5]
