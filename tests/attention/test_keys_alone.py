"""Layers recorded without error signals: the same attention, exact accounting, clear refusals."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dualform as df


@pytest.fixture(scope="session")
def alone(train: Any) -> Any:
    return train(warm=3, options={"error_signals": False, "snapshot_every": 7})


@pytest.fixture(scope="session")
def partly(train: Any) -> Any:
    return train(warm=3, options={"error_signals": ["fc1", "*3"], "snapshot_every": 7})


def test_attention_is_the_same_without_error_signals(run: Any, alone: Any, difference: Any) -> None:
    assert alone.memory.layers == run.memory.layers
    for name, spotlight in run.dual.attend(run.inputs[:2]).items():
        ours = alone.dual.attend(run.inputs[:2])[name]
        assert difference(ours.weights, spotlight.weights) < 1e-12
        own, full = alone.memory.layer(name), run.memory.layer(name)
        assert torch.equal(own.keys, full.keys)
        assert not own.has_error_signals
        assert "no error signals" in repr(own)
        keys = [block.keys for block in own.blocks(7, error_signals=False)]
        assert sum(len(part) for part in keys if part is not None) == full.rows
    names = alone.memory._segments[0].file.names
    assert not any(name.startswith("error_signal") for name in names)


@pytest.mark.parametrize("which", ["alone", "partly"])
def test_it_is_still_exact_wherever_the_sums_were_kept(
    which: str, difference: Any, request: pytest.FixtureRequest
) -> None:
    run = request.getfixturevalue(which)
    certificate = run.dual.verify(run.inputs[:4])
    assert certificate.passed, certificate
    assert certificate.keys_alone == {"alone": ("fc1", "fc2", "fc3"), "partly": ("fc2",)}[which]
    assert "without error signals" in repr(certificate)
    for step in (0, 7, 14, 21, 28, 30):
        for name, weight in run.dual.at(step).weights().items():
            assert difference(weight, run.history[step][name]) < 1e-12
    with pytest.raises(
        df.QueryError,
        match=r"step 13 is not among them, the nearest are \[7, 14\]. .*signals of 'fc\d' too",
    ):
        run.dual.at(13).weights()
    twin = run.dual.to_model()
    assert difference(twin(run.inputs), run.model(run.inputs)) < 1e-12
    assert difference(run.dual(run.inputs, by="patterns"), run.model(run.inputs)) < 1e-12


@pytest.fixture(scope="session")
def long(train: Any) -> dict[torch.dtype, Any]:
    """Runs of several fingerprints: gradients of steps 0, 1, 61, 62, 122 and 123 are noted."""
    options = {"error_signals": False, "segment_bytes": 1 << 16}
    return {
        dtype: train(steps=150, dtype=dtype, warm=3, options=options)
        for dtype in (torch.float64, torch.float32)
    }


def scale_what_was_noted(tampering: Any, path: Path, step: int) -> None:
    """What the log says of one step's gradients is 1 % larger."""
    file, row = tampering.segment_of(path, step)

    def scale(projections: Tensor) -> None:
        projections[row] *= 1.01

    tampering.edit_tensor(file, "log/projection", scale)
    tampering.reseal(path)


def forget_what_was_noted(tampering: Any, path: Path, step: int) -> None:
    """Nothing is known of one step's gradients, and no remark says why."""
    file, row = tampering.segment_of(path, step)

    def forget(projections: Tensor) -> None:
        projections[row] = torch.nan

    tampering.edit_tensor(file, "log/projection", forget)
    tampering.reseal(path)


def scale_the_learned_part(tampering: Any, path: Path, step: int) -> None:
    """What was learned by the end is a little more."""
    file, _ = tampering.segment_of(path, 149)

    def scale(learned: Tensor) -> None:
        learned *= 1.001

    tampering.edit_tensor(file, "learned/fc2.weight", scale)
    tampering.reseal(path)


FORGERIES: dict[str, Callable[[Any, Path, int], None]] = {
    "a learning rate": lambda tools, path, step: tools.scale_learning_rate(path, step, 1.01),
    "a gradient": scale_what_was_noted,
    "no gradient": forget_what_was_noted,
    "what was learned": scale_the_learned_part,
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
@pytest.mark.parametrize("step", [0, 1, 61, 62, 123])
@pytest.mark.parametrize("forgery", FORGERIES)
def test_a_forgery_of_1_percent_is_found_without_error_signals(
    long: dict[torch.dtype, Any],
    tampering: Any,
    tmp_path: Path,
    forgery: str,
    step: int,
    dtype: torch.dtype,
) -> None:
    run = long[dtype]
    assert run.dual.verify().passed
    shutil.copytree(run.path, tmp_path / "forged")
    FORGERIES[forgery](tampering, tmp_path / "forged", step)
    memory = df.Memory.open(tmp_path / "forged")
    memory.check()  # every checksum matches: only arithmetic is left to tell
    failures = df.DualForm(None, memory).verify().failures
    assert "fingerprints" in {check.kind for check in failures}


def test_parameters_are_summed_up_where_error_signals_are_not_kept(partly: Any) -> None:
    coverage = {name: p.coverage for name, p in partly.memory.parameters.items()}
    assert coverage == {
        f"fc{i}.{part}": "accumulated" if i == 2 else "patterns"
        for i in (1, 2, 3)
        for part in ("weight", "bias")
    }


def test_contributions_need_error_signals_and_say_who_has_them(alone: Any, partly: Any) -> None:
    x = alone.inputs[:1]
    contribution = partly.dual.contribute(x, target=1)
    assert abs(contribution.residual) < 1e-12
    with pytest.raises(df.QueryError, match=r"'fc2' keys alone.*fc1, fc3"):
        partly.dual.contribute(x, target=1, layer="fc2")
    with pytest.raises(df.QueryError, match=r"'fc2' keys alone.*fc1, fc3"):
        partly.dual.contribute(example=int(partly.memory.layer("fc2").patterns["example"][0]),
                               target=1, layer="fc2")  # fmt: skip
    for ask in (
        lambda: alone.dual.contribute(x, target=1),
        lambda: alone.dual.without(label=1),
        lambda: alone.dual.only(label=1),
        lambda: alone.memory.layer("fc1").error_signals,
        lambda: list(alone.memory.layer("fc1").blocks()),
    ):
        with pytest.raises(df.QueryError, match="layers with error signals: none"):
            ask()


def test_masks_leave_layers_without_error_signals_as_trained(
    run: Any, partly: Any, difference: Any
) -> None:
    masked, full = partly.dual.without(label=1), run.dual.without(label=1)
    for name, weight in masked.weights().items():
        same = run.dual if name.startswith("fc2") else full
        assert difference(weight, same.weights()[name]) < 1e-12
    assert "fc2.weight" in repr(masked)
    dropped = partly.dual.without(unresolved="drop").weights()["fc2.weight"]
    assert difference(dropped, run.dual.without().weights()["fc2.weight"]) < 1e-12


def test_a_name_that_no_layer_has_is_an_error_that_names_the_layers(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for wrong in ("fc*", ["0", "fc1"]):
        recorder = df.record(model, optimizer, tmp_path / "run", error_signals=wrong)
        with pytest.raises(df.RecordingError, match=r"fc.*there are 0, 1"), recorder:
            pass
    assert not (tmp_path / "run").exists()
    with pytest.raises(df.RecordingError, match="name patterns"):
        df.record(model, optimizer, tmp_path / "run", error_signals=[3])  # type: ignore[list-item]


class Tied(nn.Module):
    """Two layers with one weight and a bias each."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)
        self.two.weight = self.one.weight

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.two(torch.tanh(self.one(x)))
        return output


def test_a_weight_is_resolved_only_if_all_its_layers_are(train: Any, difference: Any) -> None:
    class Net(Tied):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x[..., :4])

    run = train(Net, steps=12, options={"error_signals": "one", "snapshot_every": 5})
    coverage = {name: p.coverage for name, p in run.memory.parameters.items()}
    summed = "accumulated"
    assert coverage == {"one.weight": summed, "one.bias": "patterns", "two.bias": summed}
    assert run.dual.verify(run.inputs[:3]).passed
    for step in (0, 5, 12):
        for name, weight in run.dual.at(step).weights().items():
            assert difference(weight, run.history[step][name]) < 1e-12


def test_no_gradient_is_kept_of_a_layer_with_keys_alone(train: Any) -> None:
    run = train(steps=25, options={"error_signals": False, "snapshot_every": 10})
    assert {p.coverage for p in run.memory.parameters.values()} == {"accumulated"}
    assert {p.accumulated_since for p in run.memory.parameters.values()} == {0}
    assert not any(list(run.memory.step_gradients(name)) for name in run.memory.parameters)
    assert run.dual.verify(run.inputs[:3]).passed
    run.dual.at(20).weights()


def test_keys_of_a_skipped_step_are_dropped(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(6, 4, 3)
    with df.record(model, optimizer, tmp_path, error_signals=False, dtype="float16") as recorder:
        for i, batch in enumerate(x):
            model(batch).square().sum().backward()
            if i % 2:  # as a loss scaler does that met an overflow
                optimizer.zero_grad()
                continue
            optimizer.step()
            optimizer.zero_grad()
        assert recorder.steps == 3
    layer = df.Memory.open(tmp_path).layer("model")
    assert torch.equal(layer.keys, x[::2].reshape(-1, 3).half().float())
    assert df.DualForm(model, tmp_path).verify(x[0]).passed


def test_a_manifest_that_denies_error_signals_is_refused(
    run: Any, tampering: Any, tmp_path: Path
) -> None:
    for value in (False, "no", 0, None):
        path = tmp_path / str(value)
        shutil.copytree(run.path, path)
        manifest = tampering.read_manifest(path)
        manifest["layers"][0]["error_signals"] = value
        tampering.write_manifest(path, manifest)
        with pytest.raises(df.MemoryFileError):
            df.Memory.open(path)
