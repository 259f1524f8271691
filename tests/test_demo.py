"""The demo: what it says is so, it says it again with the same seed, and it fits the screen."""

from __future__ import annotations

import ast
import inspect
import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from rich.console import Console

import dualform
from dualform.cli import main
from dualform.demo import Chapter, draw, farewell, network, opening, story, tell
from dualform.demo.chapters import Certified, Digit, Masked, Recorded, TimeTravel

pytest.importorskip("sklearn")

STEPS = 150


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("demo") / "run"


@pytest.fixture(scope="module")
def chapters(run: Path) -> list[Chapter]:
    return list(tell(run, seed=0, steps=STEPS))


def only(chapters: list[Chapter], kind: type[Any]) -> Any:
    (found,) = (chapter for chapter in chapters if isinstance(chapter, kind))
    return found


def test_the_story_is_whole(chapters: list[Chapter]) -> None:
    kinds = [type(chapter) for chapter in chapters]
    assert kinds == [Recorded, Certified, Digit, Digit, Digit, Digit, Masked, TimeTravel]


def test_the_recorder_changed_nothing_and_the_memory_is_exact(chapters: list[Chapter]) -> None:
    recorded = only(chapters, Recorded)
    assert recorded.identical_without_recorder
    assert recorded.steps == STEPS
    assert recorded.clipped_steps > 0
    assert recorded.test_accuracy > 0.8
    certified = only(chapters, Certified)
    assert certified.passed
    assert set(certified.verdicts.values()) == {"bit for bit"} == {certified.verdict}
    assert {"fc1.weight", "fc3.bias"} <= set(certified.verdicts)
    assert certified.residuals.keys() == certified.bounds.keys() == {"outputs by attention"}


def test_right_and_wrong_digits_are_shown(chapters: list[Chapter]) -> None:
    digits = [chapter for chapter in chapters if isinstance(chapter, Digit)]
    assert [d.predicted == d.label for d in digits] == [True, True, False, False]
    assert len({d.example for d in digits}) == 4


def test_what_wrote_the_winning_logit_adds_up_to_it(chapters: list[Chapter]) -> None:
    for digit in (chapter for chapter in chapters if isinstance(chapter, Digit)):
        parts = sum(digit.initial.values()) + sum(digit.written_by_class)
        assert parts == pytest.approx(digit.total)
        assert digit.total == pytest.approx(digit.logits[digit.predicted], abs=1e-4)
        assert abs(digit.residual) < 1e-4


def test_the_training_digits_shown_are_those_attended_to_most(
    chapters: list[Chapter], run: Path
) -> None:
    digit = next(chapter for chapter in chapters if isinstance(chapter, Digit))
    image = torch.tensor(digit.pixels).reshape(1, 64)
    attention = dualform.DualForm(network(), run).attend(image)
    for layer in digit.attention:
        first = layer.top[0]
        strongest = attention[layer.layer].top(1).rows()[0]
        assert first.weight == pytest.approx(strongest["weight"])
        assert len({shown.example for shown in layer.top}) == len(layer.top)
        total = float(attention[layer.layer].weights.sum())
        assert sum(layer.sums) == pytest.approx(total)


def test_masks_start_from_the_trained_network_and_are_compared_with_retraining(
    chapters: list[Chapter],
) -> None:
    masked = only(chapters, Masked)
    assert masked.rows[0].accuracy == only(chapters, Recorded).test_accuracy
    assert masked.rows[1].accuracy < masked.rows[0].accuracy
    assert masked.retrained.accuracy_on_dropped == 0
    assert masked.retrained.accuracy_on_others > masked.rows[1].accuracy_on_others


def test_time_travel_meets_the_checkpoints(chapters: list[Chapter]) -> None:
    moments = only(chapters, TimeTravel).moments
    assert moments[0].step == 0
    assert moments[-1].step == STEPS
    for moment in moments:
        assert moment.accuracy == moment.checkpoint_accuracy
        assert moment.difference < 1e-5


NOISE = ("residual", "residuals", "bounds", "difference")
"""What is nothing but rounding: the recorder's private random probes leave their mark there."""


def without_noise(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: without_noise(item) for key, item in value.items() if key not in NOISE}
    return [without_noise(item) for item in value] if isinstance(value, list) else value


def rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    if isinstance(value, list):
        return [rounded(item) for item in value]
    return pytest.approx(value, rel=1e-3, abs=1e-3) if isinstance(value, float) else value


def test_the_same_seed_tells_the_same_story(chapters: list[Chapter], tmp_path: Path) -> None:
    again = [chapter.to_dict() for chapter in tell(tmp_path / "run", seed=0, steps=STEPS)]
    first = [chapter.to_dict() for chapter in chapters]
    assert without_noise(again) == rounded(without_noise(first))


def test_threads_and_random_state_are_put_back(tmp_path: Path) -> None:
    state, threads = torch.get_rng_state(), torch.get_num_threads()
    next(tale := tell(tmp_path / "run", steps=2))
    tale.close()
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.get_num_threads() == threads


def test_without_scikit_learn_it_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    result = CliRunner().invoke(main, ["demo", "--path", str(tmp_path / "run"), "--json"])
    assert result.exit_code == 2
    assert 'pip install "dualform[demo]"' in result.stderr
    assert not (tmp_path / "run").exists()


def test_it_uses_public_names_only() -> None:
    tree = ast.parse(inspect.getsource(story))
    taken = [
        alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.Import)
        for alias in node.names
        if alias.name.startswith("dualform")
    ]
    used = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "dualform"
    }
    assert taken == ["dualform"]
    assert used <= set(dualform.__all__)


# On the screen ------------------------------------------------------------------------------------


def printed(thing: Any, width: int, **settings: Any) -> str:
    text = io.StringIO()
    Console(file=text, width=width, **settings).print(thing)
    return text.getvalue()


@pytest.mark.parametrize("width", [80, 100, 120, 200])
def test_every_chapter_fits_the_screen_and_loses_nothing(
    chapters: list[Chapter], width: int
) -> None:
    things = [opening(STEPS), *map(draw, chapters), farewell(None), farewell(Path("a/b"))]
    text = "".join(printed(thing, width) for thing in things)
    assert max(map(len, text.splitlines())) <= width
    assert "…" not in text
    assert "\x1b" not in text
    for word in ("bit-identical", "PASSED", "Σα by class", "not retraining", "retrained without"):
        assert word in " ".join(text.split())


def test_colour_only_repeats_what_is_said(chapters: list[Chapter]) -> None:
    for chapter in chapters:
        colourful = printed(draw(chapter), 90, force_terminal=True, color_system="truecolor")
        assert "\x1b[" in colourful


def test_wider_screens_show_more_training_digits(chapters: list[Chapter]) -> None:
    digit = next(chapter for chapter in chapters if isinstance(chapter, Digit))
    narrow, wide = (printed(draw(digit), width).count("step ") for width in (80, 120))
    assert narrow < wide


def test_the_command_tells_it_as_text_and_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    result = CliRunner().invoke(main, ["demo", "--steps", "30", "--seed", "3"])
    assert result.exit_code == 0, result.stderr
    assert "5  Travel back in time" in result.stdout
    assert "The memory was temporary and is gone" in result.stdout
    assert not any(line.endswith(" ") for line in result.stdout.splitlines())
    assert list(tmp_path.iterdir()) == []


def test_the_command_keeps_the_memory_where_it_is_told(tmp_path: Path) -> None:
    run = tmp_path / "run"
    ask = ["demo", "--steps", "30", "--path", str(run), "--json"]
    result = CliRunner().invoke(main, ask)
    assert result.exit_code == 0, result.stderr
    told = json.loads(result.stdout)
    assert told["path"] == str(run)
    assert told["chapters"][1]["passed"] is True
    verified = CliRunner().invoke(main, ["verify", str(run), "--model", "dualform.demo:network"])
    assert verified.exit_code == 0
    again = CliRunner().invoke(main, ask)
    assert again.exit_code == 2
    assert "already holds a recorded memory" in again.stderr
    assert CliRunner().invoke(main, [*ask, "--overwrite"]).exit_code == 0


@pytest.mark.parametrize("steps", ["0", "-3"])
def test_no_steps_are_refused(steps: str) -> None:
    result = CliRunner().invoke(main, ["demo", "--steps", steps])
    assert result.exit_code == 2
    assert "at least one step" in result.stderr


def test_a_single_step_is_enough(tmp_path: Path) -> None:
    assert only(list(tell(tmp_path / "run", steps=1)), Certified).passed
