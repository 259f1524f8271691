"""Layers recorded without error signals: the same attention, kept states, clear refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dualform


@pytest.fixture(scope="session")
def alone(train: Any) -> Any:
    return train(warm=3, options={"keep": "keys"})


@pytest.fixture(scope="session")
def partly(train: Any) -> Any:
    return train(warm=3, options={"keep": {"fc1": "patterns", "*3": "patterns", "*": "keys"}})


def test_attention_is_the_same_without_error_signals(run: Any, alone: Any, difference: Any) -> None:
    assert alone.memory.layers == run.memory.layers
    for name, spotlight in run.dual.attend(run.inputs[:2]).items():
        ours = alone.dual.attend(run.inputs[:2])[name]
        assert difference(ours.weights, spotlight.weights) < 1e-12
        own, full = alone.memory.layer(name), run.memory.layer(name)
        assert torch.equal(own.keys, full.keys)
        assert not own.has_error_signals
        assert "keys alone" in repr(own)
        keys = [block.keys for block in own.blocks(7, error_signals=False)]
        assert sum(len(part) for part in keys if part is not None) == full.rows
    one, full = alone.dual.attend(example=5)["fc2"], run.dual.attend(example=5)["fc2"]
    assert one.top(5).rows() == full.top(5).rows()
    for segment in alone.memory.opened.segments:
        assert not [n for n in segment.file.places if "error_signals" in n]


@pytest.mark.parametrize("which", ["alone", "partly"])
def test_weights_are_those_that_were_kept(
    which: str, difference: Any, request: pytest.FixtureRequest
) -> None:
    run = request.getfixturevalue(which)
    certificate = run.dual.verify(run.inputs[:4])
    assert certificate.passed, certificate
    said = {name: found.verdict for name, found in certificate.verdicts.items()}
    for name, known in run.memory.parameters.items():
        is_alone = which == "alone" or name.startswith("fc2")
        assert known.keep == ("values" if is_alone else "patterns")
        assert "keys alone" in known.why or not is_alone
        assert (said[name] == "not replayable: kept states only") == is_alone
    for step in (0, 30):
        for name, weight in run.dual.at(step).weights().items():
            assert torch.equal(weight, run.history[step][name])
    with pytest.raises(
        dualform.QueryError,
        match=r"'fc\d\.\w+' after 13 .* rebuilt: its layer keeps keys alone.*steps \d+ and",
    ):
        run.dual.at(13).weights()
    twin = run.dual.to_model()
    assert torch.equal(twin(run.inputs), run.model(run.inputs))
    assert difference(run.dual(run.inputs, by="patterns"), run.model(run.inputs)) < 1e-12


def test_contributions_need_error_signals_and_say_who_has_them(alone: Any, partly: Any) -> None:
    x = alone.inputs[:1]
    contribution = partly.dual.contribute(x, target=1)
    assert abs(contribution.residual) < 1e-12
    example = int(partly.memory.layer("fc2").patterns["example"][0])
    for asked in ({"example": example}, {}):
        given = () if asked else (x,)
        with pytest.raises(dualform.QueryError, match=r"'fc2' keys alone.*fc1, fc3"):
            partly.dual.contribute(*given, target=1, layer="fc2", **asked)
    for ask in (
        lambda: alone.dual.contribute(x, target=1),
        lambda: alone.dual.without(label=1),
        lambda: alone.dual.only(label=1),
        lambda: alone.memory.layer("fc1").error_signals,
        lambda: list(alone.memory.layer("fc1").blocks()),
    ):
        with pytest.raises(dualform.QueryError, match="with error signals: none"):
            ask()


def test_masks_leave_layers_without_error_signals_as_trained(
    run: Any, partly: Any, difference: Any
) -> None:
    masked, full = partly.dual.without(label=1), run.dual.without(label=1)
    for name, weight in masked.weights().items():
        same = run.dual if name.startswith("fc2") else full
        assert difference(weight, same.weights()[name]) < 1e-12
    assert "no mask reaches: fc2.weight, fc2.bias" in repr(masked)


def test_a_name_that_no_layer_has_is_an_error_that_names_the_layers(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    for wrong in ({"fc*": "keys"}, {"0": "patterns", "fc1": "keys"}):
        with (
            pytest.raises(dualform.RecordingError, match=r"fc.*layers are 0, 1"),
            dualform.record(model, tmp_path / "run", keep=wrong),
        ):
            pass
    assert not (tmp_path / "run").exists()
    with (
        pytest.raises(dualform.RecordingError, match="one of the words"),
        dualform.record(model, tmp_path / "run", keep={"0": "error signals"}),
    ):
        pass


class Tied(nn.Module):
    """Two layers with one weight and a bias each."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)
        self.two.weight = self.one.weight

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.two(torch.tanh(self.one(x[..., :4])))
        return output


def test_a_weight_is_known_by_patterns_only_if_all_its_layers_are(train: Any) -> None:
    """Half of a weight's gradients would be half of the truth."""
    run = train(Tied, steps=12, options={"keep": {"one": "patterns", "*": "keys"}})
    kept = {name: p.keep for name, p in run.memory.parameters.items()}
    assert kept == {"one.weight": "values", "one.bias": "patterns", "two.bias": "values"}
    assert run.dual.verify(run.inputs[:3]).passed
    for step in (0, 12):
        for name, weight in run.dual.at(step).weights().items():
            assert torch.equal(weight, run.history[step][name])
    split = run.dual.contribute(run.inputs[:1], target=0, layer="one")
    assert abs(split.residual) < 1e-12
    assert abs(split.shares["not explained by patterns"]) > 1e-3  # all that the weight learned


def test_keys_of_a_skipped_step_are_dropped(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(6, 4, 3)
    with dualform.record(model, tmp_path, keep="keys", dtype="float16") as recorder:
        for i, batch in enumerate(x):
            model(batch).square().sum().backward()
            if i % 2:  # as a loss scaler does that met an overflow
                optimizer.zero_grad()
                continue
            optimizer.step()
            optimizer.zero_grad()
        assert recorder.steps == 3
    layer = dualform.Memory.open(tmp_path).layer("model")
    assert torch.equal(layer.keys, x[::2].reshape(-1, 3).half().float())
    assert dualform.DualForm(model, tmp_path).verify(x[0]).passed
