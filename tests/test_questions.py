"""The command line's questions under masks, against the same asked in Python."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

import dualform

NETS = """
from torch import nn

def net():
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
"""

IMAGE = torch.linspace(-1, 1, 6)[None]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A directory with a network, a run of two tasks one after the other, and inputs."""
    place = tmp_path_factory.mktemp("questions")
    (place / "question_nets.py").write_text(NETS, encoding="utf-8")
    sys.path.insert(0, str(place))
    save = safetensors.torch.save_file
    save({"input": IMAGE}, place / "one.safetensors")
    save({"g": torch.tensor([1.0, -0.5, 0.25])}, place / "direction.safetensors")
    save({"a": IMAGE, "b": -IMAGE}, place / "two.safetensors")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        _record(net(), place / "run")
    yield place
    sys.path.remove(str(place))


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))


def _record(model: nn.Module, path: Path) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with dualform.record(model, path) as recorder:
        for step in range(20):
            example = torch.arange(4) + 4 * (step % 3)
            side = 1.0 if step < 10 else -1.0
            task = "left" if step < 10 else "right"
            recorder.tag(example=example, label=example % 3, task=task)
            images = side * IMAGE + 0.1 * torch.randn(4, 6)
            nn.functional.cross_entropy(model(images), example % 3).backward()
            optimizer.step()
            optimizer.zero_grad()


MODEL = ("--input", "one.safetensors", "--model", "question_nets:net")

MASKS: list[tuple[list[str], Callable[[dualform.DualForm], dualform.DualForm]]] = [
    (["--without", "task=right"], lambda d: d.without(task=["right"])),
    (
        ["--without", "label=0,2", "--strength", "0.7"],
        lambda d: d.without(label=[0, 2], strength=0.7),
    ),
    (["--without", "step=3:12"], lambda d: d.without(step=slice(3, 12))),
    (["--only", "step=:8"], lambda d: d.only(step=slice(None, 8))),
    (
        ["--without", "label=1", "--only", "task=left", "--mask-layer", "2"],
        lambda d: d.without(label=[1], layers=["2"]).only(task=["left"], layers=["2"]),
    ),
    (["--at", "11", "--without", "label=1"], lambda d: d.at(11).without(label=[1])),
]


@pytest.mark.parametrize(("words", "view"), MASKS)
def test_a_masked_view_is_asked_as_in_python(
    place: Path, ask_json: Any, words: list[str], view: Any
) -> None:
    dual = view(dualform.DualForm(net(), place / "run"))
    found = ask_json("attend", "run", *MODEL, *words, "--layer", "2", "--top", 4)
    expected = dual.attend(IMAGE)["2"].top(4)
    assert found["layers"]["2"]["top"] == expected.to_dict()
    assert found["masks"] == list(dual.masks)
    assert found["step"] == dual.step
    found = ask_json("contribute", "run", *MODEL, *words, "--target", 1)
    expected = dual.contribute(IMAGE, target=1)
    assert found["total"] == pytest.approx(expected.total, abs=1e-12)
    assert abs(found["residual"]) < 1e-6


def test_text_says_that_a_mask_is_not_retraining(ask: Any) -> None:
    shown = ask("attend", "run", "--example", 3, "--without", "task=right").stdout
    assert "without(task=['right'])" in shown
    assert "it is not retraining" in " ".join(shown.split())
    assert "retraining" not in ask("attend", "run", "--example", 3).stdout


def test_a_direction_over_the_outputs_is_a_target(place: Path, ask_json: Any) -> None:
    dual = dualform.DualForm(net(), place / "run")
    along = torch.tensor([1.0, -0.5, 0.25])
    found = ask_json("contribute", "run", *MODEL, "--direction", "direction.safetensors")
    output: Tensor = dual(IMAGE)[0]
    assert found["total"] == pytest.approx(float((output * along).sum()), abs=1e-6)
    expected = dual.contribute(IMAGE, target=along)
    assert found["top"] == expected.top().to_dict()


def test_how_far_attention_is_spread_and_absolute_values_after_summing(
    place: Path, ask_json: Any
) -> None:
    dual = dualform.DualForm(net(), place / "run")
    words = ("--effective", "--by-example", "--absolute", "after", "--layer", "0")
    found = ask_json("attend", "run", *MODEL, *words)["layers"]["0"]
    spotlight = dual.attend(IMAGE)["0"]
    spread = {"query": 0, "effective": float(spotlight.effective[0]), "patterns": 80}
    assert found["effective"]["rows"] == [spread]
    assert found["by_example"] == spotlight.by_example(absolute="after").to_dict()
    answer = ask_json("contribute", "run", *MODEL, "--target", 1, *words[1:4])["by_example"]
    contribution = dual.contribute(IMAGE, target=1).by_example(absolute="after")
    assert answer == contribution.to_dict()
    assert np.array_equal(contribution["absolute"], np.abs(contribution["contribution"]))


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        (["attend", "--example", 3, "--without", "label"], "expected COLUMN=VALUE"),
        (["attend", "--example", 3, "--without", "colour=7"], "no column 'colour'"),
        (["attend", "--example", 3, "--only", "label=blue"], "holds numbers such as 0"),
        (["attend", "--example", 3, "--only", "label=8"], "no recorded pattern has label=8"),
        (["attend", "--example", 3, "--only", "task=middle"], "task='middle'"),
        (["attend", "--example", 3, "--strength", 0.5], "belongs to --without"),
        (["attend", "--example", 3, "--mask-layer", "0"], "belongs to --without or --only"),
        (["contribute", *MODEL, "--target", 1, "--direction", "two.safetensors"], "either"),
        (["contribute", *MODEL, "--direction", "two.safetensors"], "holds 2 tensors"),
        (["contribute", *MODEL, "--direction", "one.safetensors"], "the target has shape"),
    ],
)
def test_a_question_that_cannot_be_asked_says_why(ask: Any, asked: Any, words: str) -> None:
    result = ask(asked[0], "run", *asked[1:])
    assert result.exit_code == 2
    assert words in " ".join(result.stderr.replace("│", "").split())


def test_a_memory_that_is_none_is_refused_by_name(place: Path) -> None:
    with pytest.raises(dualform.QueryError, match="was given None as its memory"):
        dualform.DualForm(net(), None)  # type: ignore[arg-type]
