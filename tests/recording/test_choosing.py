"""Recording some layers only: their patterns are kept, everything else is still accounted for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import SGD

import dualform as df


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 7))
        self.norm = nn.LayerNorm(7)
        self.head = nn.Linear(7, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.head(self.norm(self.encoder(x)))
        return output


def train(path: Path | None, dtype: torch.dtype = torch.float64, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    model = Network().to(dtype)
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3)

    def loop(recorder: df.Recorder | None) -> None:
        for _ in range(12):
            if recorder is not None:
                recorder.tag(example=list(range(5)))
            loss = F.cross_entropy(model(torch.randn(5, 6, dtype=dtype)), torch.randint(3, (5,)))
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.4)
            optimizer.step()
            optimizer.zero_grad()

    if path is None:
        loop(None)
    else:
        with df.record(model, optimizer, path, **options) as recorder:
            loop(recorder)
    return model


@pytest.mark.parametrize(
    ("layers", "expected"),
    [
        ("head", ("head",)),
        ("encoder.*", ("encoder.0", "encoder.2")),
        (["head", "encoder.0"], ("encoder.0", "head")),
        (("*",), ("encoder.0", "encoder.2", "head")),
        (None, ("encoder.0", "encoder.2", "head")),
    ],
)
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_every_parameter_is_rebuilt_whichever_layers_were_chosen(
    layers: Any, expected: tuple[str, ...], dtype: torch.dtype, bound: float, tmp_path: Path
) -> None:
    model = train(tmp_path / "run", dtype, layers=layers)
    for ours, plain in zip(model.parameters(), train(None, dtype).parameters(), strict=True):
        assert torch.equal(ours, plain)
    memory = df.Memory.open(tmp_path / "run")
    assert memory.layers == expected
    for name, parameter in memory.parameters.items():
        recorded = name.rpartition(".")[0] in expected
        assert parameter.coverage == ("patterns" if recorded else "steps"), name
    dual = df.DualForm(model, memory)
    certificate = dual.verify(torch.randn(4, 6, dtype=dtype))
    assert certificate.passed, str(certificate)
    rebuilt = df.DualForm(Network().to(dtype), memory).to_model().state_dict()
    for name, real in model.state_dict().items():
        assert float((rebuilt[name] - real).abs().max()) <= bound


def test_what_other_layers_wrote_is_kept_when_examples_are_masked(tmp_path: Path) -> None:
    model = train(tmp_path / "run", layers="head")
    masked = df.DualForm(model, tmp_path / "run").without(example=list(range(5))).to_model()
    initial = df.DualForm(model, tmp_path / "run").at(step=0).to_model().state_dict()
    for name, value in masked.state_dict().items():
        if not name.startswith("head"):
            assert torch.allclose(value, model.state_dict()[name], rtol=0, atol=1e-12)
        else:
            assert not torch.equal(value, model.state_dict()[name])
            assert not torch.equal(initial[name], model.state_dict()[name])


def test_questions_about_a_layer_that_was_not_chosen_name_those_that_were(tmp_path: Path) -> None:
    model = train(tmp_path / "run", layers="head")
    dual = df.DualForm(model, tmp_path / "run")
    with pytest.raises(df.QueryError, match="head"):
        dual.attend(torch.randn(1, 6, dtype=torch.float64))["encoder.0"]


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ("haed", r"layers='haed' matches no layer.*encoder\.0, encoder\.2, head"),
        (["head", "Head"], r"layers='Head' matches no layer"),
        ([3], r"layers=\[3\] was given; expected a layer's name"),
        (3, r"layers=3 was given; expected a layer's name"),
    ],
)
def test_a_choice_that_matches_nothing_is_refused_before_anything_is_written(
    layers: Any, message: str, tmp_path: Path
) -> None:
    with pytest.raises(df.RecordingError, match=message):
        train(tmp_path / "run", layers=layers)
    assert not (tmp_path / "run").exists()
    with pytest.raises(df.DualFormError, match=message):
        df.estimate(Network(), batch=5, steps=12, layers=layers)


@pytest.mark.parametrize("error_signals", [None, 3, [3]])
def test_error_signals_that_are_no_choice_are_refused(error_signals: Any, tmp_path: Path) -> None:
    with pytest.raises(df.RecordingError, match=r"error_signals=.* was given; expected True"):
        train(tmp_path / "run", error_signals=error_signals)


def test_error_signals_of_a_layer_that_was_not_chosen_are_refused(tmp_path: Path) -> None:
    model = nn.TransformerEncoderLayer(8, 2, 12, batch_first=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    chosen = {"layers": "linear*", "error_signals": ["self_attn.in_proj"]}
    with pytest.raises(df.RecordingError, match=r"'self_attn.in_proj' names no layer"):
        df.record(model, optimizer, tmp_path / "run", **chosen).__enter__()


def test_the_estimate_knows_the_choice() -> None:
    everything = df.estimate(Network(), batch=5, steps=1200)
    one = df.estimate(Network(), batch=5, steps=1200, layers="head")
    assert [layer.name for layer in one.layers] == ["head"]
    assert one.parts["step-level parameters"] > everything.parts["step-level parameters"]
    assert not any("not called" in remark for remark in one.remarks)


# The place ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["s3://bucket/run", "hdfs://host/run", Path("gs://bucket/run")])
def test_a_url_is_refused_before_anything_is_made(
    place: str | Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    model = Network()
    with pytest.raises(df.RecordingError, match=r"looks like a URL; expected a directory"):
        df.record(model, SGD(model.parameters(), lr=0.1), place)
    assert not list(tmp_path.iterdir())


def test_a_directory_may_have_a_colon_in_its_name(tmp_path: Path) -> None:
    train(tmp_path / "2024-01-01 12:30" / "s3:")
    assert df.Memory.open(tmp_path / "2024-01-01 12:30" / "s3:").steps == 12
