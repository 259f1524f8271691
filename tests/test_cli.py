"""The command line: real recordings, real processes, exit codes, and JSON that is JSON."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

import dualform
from dualform import terminal
from dualform.cli import main

NETS = """
import torch
from torch import nn

class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.norm, self.fc2 = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)

    def forward(self, image, scale=None):
        hidden = torch.relu(self.norm(self.fc1(image)))
        return self.fc2(hidden if scale is None else hidden * scale)

net = Two
ready = Two()
other = lambda: nn.Linear(6, 3)
number = lambda: 7

def broken():
    raise RuntimeError("no such luck")
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A directory with a module of networks, a recorded run, its checkpoint, and inputs."""
    place = tmp_path_factory.mktemp("cli")
    (place / "cli_nets.py").write_text(NETS, encoding="utf-8")
    sys.path.insert(0, str(place))
    import cli_nets  # type: ignore[import-not-found]

    torch.manual_seed(0)
    record(cli_nets.Two(), place / "run", place / "trained.safetensors")
    image = torch.randn(1, 6)
    save = safetensors.torch.save_file
    save({"anything": image}, place / "one.safetensors")
    save({"image": image, "scale": torch.ones(1, 8)}, place / "two.safetensors")
    save({"anything": torch.randn(5, 6)}, place / "five.safetensors")
    save({"anything": torch.randn(1, 9)}, place / "wide.safetensors")
    save({"image": image, "example": torch.ones(1)}, place / "taken.safetensors")
    yield place
    sys.path.remove(str(place))


def record(model: nn.Module, path: Path, checkpoint: Path, names: bool = False) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with dualform.record(model, path) as recorder:
        for step in range(20):
            example = torch.arange(4) + 4 * (step % 3)
            ids = [f"e{i}" for i in example.tolist()] if names else example
            recorder.tag(example=ids, label=example % 3, source="left" if step < 9 else "right")
            loss = nn.functional.cross_entropy(model(torch.randn(4, 6)), example % 3)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    safetensors.torch.save_file(model.state_dict(), checkpoint)


def process(*args: Any, cwd: Path, **settings: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "dualform.cli", *map(str, args)],
        cwd=cwd,
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        check=False,
        **settings,
    )


# info ---------------------------------------------------------------------------------------------


def test_info_says_parameter_by_parameter_how_it_is_kept(ask: Any) -> None:
    result = ask("info", "run")
    assert result.exit_code == 0
    lines = [line.split() for line in result.stdout.splitlines()]
    assert ["fc1.weight", "8", "×", "6", "patterns"] in lines
    assert ["norm.weight", "8", "examples"] in lines
    assert "norm.running_mean" in result.stdout
    assert "left, right" in result.stdout
    assert "every update of every parameter" in result.stdout


def test_info_as_json_has_the_same_facts(ask_json: Any) -> None:
    facts = ask_json("info", "run")
    assert (facts["steps"], facts["closed"]) == (20, True)
    kept = {p["name"]: p["keep"] for p in facts["parameters"]}
    assert (kept["fc1.weight"], kept["norm.weight"]) == ("patterns", "examples")
    assert {p["not_explained"] for p in facts["parameters"]} == {"nothing"}
    columns = {c["name"]: c for c in facts["columns"]}
    assert columns["label"]["values"] == [0, 1, 2]
    assert (columns["step"]["distinct"], columns["step"]["highest"]) == (20, 19)
    assert facts["bytes_on_disk"] > 0
    assert facts["environment"]["torch"] == torch.__version__


def test_info_names_what_patterns_do_not_explain_and_what_happened(
    ask: Any, ask_json: Any, tmp_path: Path
) -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2), nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    keep = {"0": "patterns", "1": "keys", "*": "values"}
    with dualform.record(model, tmp_path / "run", keep=keep) as recorder:
        for step in range(4):
            recorder.tag(example=torch.arange(5))
            model(torch.randn(5, 4)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            if step == 1:
                with torch.no_grad():
                    model[0].bias.mul_(2)
    facts = ask_json("info", tmp_path / "run")
    kept = {layer["name"]: layer["keep"] for layer in facts["layers"]}
    assert kept == {"0": "patterns", "1": "keys"}
    lacking = {p["name"]: p["not_explained"] for p in facts["parameters"]}
    assert (lacking["0.weight"], lacking["0.bias"]) == ("nothing", "a part of it")
    assert {lacking[n] for n in ("1.weight", "1.bias", "2.weight", "2.bias")} == {"all of it"}
    (event,) = facts["events"]
    assert (event["step"], event["what"], event["parameters"]) == (2, "edited", ["0.bias"])
    said = " ".join(ask("info", tmp_path / "run").stdout.split())
    assert "every update of 1 of 6 parameters" in said
    assert "all of it: its layer keeps keys alone" in said
    assert "a part of it: changed between two updates (before step 2)" in said
    assert "event after 2 updates: changed between two updates (0.bias)" in said


# verify -------------------------------------------------------------------------------------------


def test_verify_alone_checks_the_run_against_itself(ask: Any, ask_json: Any) -> None:
    assert "PASSED" in ask("verify", "run").stdout
    found = ask_json("verify", "run")
    assert found["passed"] is True
    assert {c["kind"] for c in found["checks"]} >= {"fingerprints", "steps"}


def test_verify_says_which_verdict_holds_for_which_parameter(ask: Any, ask_json: Any) -> None:
    found = ask_json("verify", "run")
    verdicts = {v["parameter"]: v["verdict"] for v in found["parameters"]}
    assert {"fc1.weight", "fc1.bias", "norm.weight", "fc2.weight"} <= verdicts.keys()
    shown = ask("verify", "run").stdout
    for name, verdict in verdicts.items():
        assert any(name in line and verdict in line for line in shown.splitlines())


def test_verify_replays_every_step_if_asked(ask_json: Any, place: Path) -> None:
    memory = dualform.Memory.open(place / "run")
    found = ask_json("verify", "run", "--every-step")
    for verdict in found["parameters"]:
        ways = len(memory.kept.steps(verdict["parameter"])) - 1
        assert (verdict["walked"], verdict["ways"]) == (ways, ways)


def test_verify_with_a_model_compares_its_weights(ask_json: Any) -> None:
    found = ask_json("verify", "run", "--model", "cli_nets:net")
    compared = {c["parameter"] for c in found["checks"] if c["kind"] == "weights"}
    assert {"fc1.weight", "fc1.bias", "norm.weight", "fc2.weight"} <= compared


def test_verify_with_an_input_compares_outputs(ask_json: Any) -> None:
    found = ask_json("verify", "run", "--model", "cli_nets:net", "--input", "five.safetensors")
    assert "outputs" in {c["kind"] for c in found["checks"]}


def test_verify_compares_with_ones_own_checkpoint(place: Path, ask: Any, ask_json: Any) -> None:
    model = ("verify", "run", "--model", "cli_nets:net", "--weights")
    assert ask_json(*model, "trained.safetensors")["passed"] is True
    weights = safetensors.torch.load_file(place / "trained.safetensors")
    weights["fc1.weight"] = weights["fc1.weight"] * 1.01
    safetensors.torch.save_file(weights, place / "another.safetensors")
    result = ask(*model, "another.safetensors", "--json")
    assert result.exit_code == 1
    assert json.loads(result.stdout)["passed"] is False


def test_a_damaged_file_is_named(place: Path, ask: Any, tmp_path: Path) -> None:
    shutil.copytree(place / "run", tmp_path / "damaged")
    segment = tmp_path / "damaged" / "segments" / "000000.safetensors"
    content = bytearray(segment.read_bytes())
    content[-2000] ^= 1
    segment.write_bytes(content)
    result = ask("verify", tmp_path / "damaged")
    assert result.exit_code == 2
    assert "000000.safetensors" in result.stderr
    assert result.stdout == ""


# attend and contribute ----------------------------------------------------------------------------


def test_attend_gives_what_the_library_gives(place: Path, ask_json: Any) -> None:
    found = ask_json("attend", "run", "--example", "5", "--top", 3, "--sum-by", "label")
    attention = dualform.DualForm(None, place / "run").attend(example=5)
    assert list(found["layers"]) == ["fc1", "fc2"]
    for name, spotlight in attention.items():
        assert found["layers"][name]["top"] == spotlight.top(3).to_dict()
        assert found["layers"][name]["sum_by"] == spotlight.sum_by("label").to_dict()


def test_attend_with_an_input_runs_the_rebuilt_network(place: Path, ask_json: Any) -> None:
    import cli_nets

    asked = ("attend", "run", "--model", "cli_nets:net", "--layer", "fc2", "--at", 10)
    image = safetensors.torch.load_file(place / "one.safetensors")["anything"]
    expected = dualform.DualForm(cli_nets.Two(), place / "run").at(10).attend(image)["fc2"]
    one = ask_json(*asked, "--input", "one.safetensors", "--sign", "absolute", "--by", "label")
    assert one["layers"]["fc2"]["top"] == expected.top(10, "label", "absolute").to_dict()
    assert one["step"] == 10
    assert ask_json(*asked, "--input", "two.safetensors") == ask_json(
        *asked, "--input", "one.safetensors"
    )


def test_contributions_add_up_to_what_the_network_says(place: Path, ask_json: Any) -> None:
    import cli_nets

    asked = ("contribute", "run", "--model", "cli_nets:net", "--input", "one.safetensors")
    image = safetensors.torch.load_file(place / "one.safetensors")["anything"]
    output: Tensor = dualform.DualForm(cli_nets.Two(), place / "run")(image)[0]
    found = ask_json(*asked, "--target", 2, "--sum-by", "label")
    assert found["total"] == pytest.approx(float(output[2]), abs=1e-5)
    written = sum(row["contribution"] for row in found["sum_by"]["rows"])
    assert written == pytest.approx(found["shares"]["patterns"])
    assert ask_json(*asked)["target"] == f"output {int(output.argmax())} of the model"


def test_contribute_by_example_and_through_an_earlier_layer(ask: Any, ask_json: Any) -> None:
    by_example = ask_json("contribute", "run", "--example", 5, "--target", 1)
    assert by_example["layer"] == "fc2"
    through = ask_json(
        *("contribute", "run", "--model", "cli_nets:net", "--input", "one.safetensors"),
        *("--target", 1, "--layer", "fc1"),
    )
    assert through["first_order"] is True
    assert "residual" in ask("contribute", "run", "--example", 5, "--target", 1).stdout


def test_text_ids_are_text(place: Path, ask_json: Any, tmp_path: Path) -> None:
    import cli_nets

    record(cli_nets.Two(), tmp_path / "named", tmp_path / "weights", names=True)
    found = ask_json("attend", tmp_path / "named", "--example", "e3", "--top", 1)
    assert found["layers"]["fc1"]["top"]["rows"][0]["example"].startswith("e")


# estimate -----------------------------------------------------------------------------------------


def test_estimate_counts_from_a_sample(ask: Any, ask_json: Any) -> None:
    asked = ("estimate", "--model", "cli_nets:net", "--batch", 8, "--steps", 100)
    found = ask_json(*asked, "--input", "five.safetensors")
    assert [row["rows"] for row in found["table"]["rows"]] == [800, 800, 800]
    assert found["bytes_on_disk"] > 0
    assert "on disk for 100 steps of 8 examples" in ask(*asked).stdout


@pytest.mark.parametrize(
    ("keep", "kept"),
    [
        ((), {"fc1": "patterns", "norm": "examples", "fc2": "patterns"}),
        (("--keep", "keys"), {"fc1": "keys", "fc2": "keys"}),
        (("--keep", "fc1=keys", "--keep", "values"), {"fc1": "keys"}),
    ],
)
def test_keep_is_said_as_in_python(ask_json: Any, keep: Any, kept: dict[str, str]) -> None:
    asked = ("estimate", "--model", "cli_nets:net", "--batch", 8, "--steps", 100)
    found = ask_json(*asked, "--input", "five.safetensors", *keep)
    assert {row["layer"]: row["kept"] for row in found["table"]["rows"]} == kept


# export -------------------------------------------------------------------------------------------


def test_export_writes_a_memory_in_16_bits_that_verifies(
    ask: Any, ask_json: Any, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    record(nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)), run, tmp_path / "weights")
    found = ask_json("export", run, tmp_path / "half", "--dtype", "float16")
    assert found["passed"] is found["certificate"]["passed"] is True
    assert "patterns were put into float16 afterwards" in found["lost"][0]
    assert found["bytes_after"] == dualform.Memory.open(tmp_path / "half").bytes_on_disk
    shown = " ".join(ask("info", tmp_path / "half").stdout.split())
    assert "patterns were put into float16 afterwards" in shown
    verified = ask("verify", tmp_path / "half")
    assert verified.exit_code == 0
    assert "PASSED, within rounding" in verified.stdout
    again = ask("export", run, tmp_path / "half")
    assert again.exit_code == 2
    assert "--overwrite" in again.stderr
    assert ask("export", run, tmp_path / "half", "--overwrite").exit_code == 0


def test_a_memory_that_certifies_little_exits_with_1(ask: Any, tmp_path: Path) -> None:
    # fc1's bias stands before a norm: its gradient is rounding, and 16 bits make that larger
    result = ask("export", "run", tmp_path / "half", "--dtype", "bfloat16")
    assert result.exit_code == 1
    assert "FAILED, within rounding, certifies little" in result.stdout


def test_export_drops_layers_and_error_signals(ask: Any, tmp_path: Path) -> None:
    assert ask("export", "run", tmp_path / "one", "--layers", "fc1").exit_code == 0
    assert dualform.Memory.open(tmp_path / "one").layers == ("fc1",)
    some = ask("export", "run", tmp_path / "some", "--error-signals", "fc2")
    assert "the error signals of fc1 were dropped afterwards" in some.stdout
    memory = dualform.Memory.open(tmp_path / "some")
    assert {n: memory.layer(n).keep for n in memory.layers} == {
        "fc1": "keys", "norm": "examples", "fc2": "patterns",
    }  # fmt: skip
    assert ask("export", "run", tmp_path / "keys", "--no-error-signals").exit_code == 0
    both = ask("export", "run", tmp_path / "no", "--no-error-signals", "--error-signals", "fc1")
    assert (both.exit_code, (tmp_path / "no").exists()) == (2, False)


# What is wrong is said in a sentence --------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["info", "nowhere"], "not there"),
        (["info", "cli_nets.py"], "expected the directory of a memory"),
        (["attend", "run"], "either --example"),
        (["attend", "run", "--example", "5", "--input", "one.safetensors"], "either --example"),
        (["attend", "run", "--input", "one.safetensors"], "needs --model"),
        (["attend", "run", "--example", "99"], "no recorded pattern has example=99"),
        (["attend", "run", "--example", "x"], "ids of this memory are numbers"),
        (["attend", "run", "--example", "5", "--layer", "fc9"], "no layer 'fc9'"),
        (["attend", "run", "--example", "5", "--sum-by", "colour"], "no column 'colour'"),
        (["attend", "run", "--example", "5", "--at", "21"], "from 0 to 20"),
        (["attend", "run", "--example", "5", "--top", "0"], "at least 1"),
        (["contribute", "run", "--example", "5"], "needs --target"),
        (["contribute", "run", "--example", "5", "--target", "9"], "out of range"),
        (["verify", "run", "--input", "one.safetensors"], "need --model"),
        (["verify", "run", "--model", "cli_nets:net", "--weights", "one.safetensors"], "missing"),
        (["verify", "run", "--model", "cli_nets:other"], "not the architecture"),
        (["estimate", "--batch", "1", "--steps", "1"], "--model is needed"),
        (["estimate", "--model", "cli_nets:net", "--batch", "0", "--steps", "1"], "batch=0"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_wrong_question_is_answered_in_one_paragraph(
    ask: Any, args: list[str], said: str
) -> None:
    result = ask(*args)
    assert result.exit_code == 2
    assert said in " ".join(result.stderr.split())
    assert result.stdout == ""
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("cli_nets", "not of the form package.module:factory"),
        ("cli_nets:", "not of the form package.module:factory"),
        ("no_such_module:net", "No module named 'no_such_module'"),
        ("cli_nets:missing", "has no attribute 'missing'"),
        ("cli_nets:broken", "RuntimeError: no such luck"),
        ("cli_nets:number", "gave a int; expected a torch.nn.Module"),
    ],
)
def test_a_model_that_cannot_be_built_says_why(ask: Any, spec: str, said: str) -> None:
    result = ask("estimate", "--model", spec, "--batch", 1, "--steps", 1)
    assert result.exit_code == 2
    assert said in result.stderr


def test_a_module_that_is_built_already_will_do(ask: Any) -> None:
    asked = ("estimate", "--model", "cli_nets:ready", "--batch", 2, "--steps", 1)
    assert ask(*asked).exit_code == 0


@pytest.mark.parametrize(
    ("file", "said"),
    [
        ("wide.safetensors", "the model could not be run on wide.safetensors: RuntimeError"),
        ("five.safetensors", "one input at a time"),
        ("taken.safetensors", "one is called 'example'"),
        ("absent.safetensors", "cannot be read as a safetensors file"),
        ("cli_nets.py", "cannot be read as a safetensors file"),
    ],
)
def test_an_input_that_does_not_fit_says_why(ask: Any, file: str, said: str) -> None:
    asked = ("contribute", "run", "--model", "cli_nets:net", "--target", 1, "--input", file)
    result = ask(*asked)
    assert result.exit_code == 2
    assert said in result.stderr


def test_a_run_without_example_ids_says_what_to_tag(ask: Any, tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with dualform.record(model, tmp_path / "untagged"):
        model(torch.randn(3, 2)).sum().backward()
        optimizer.step()
    result = ask("attend", tmp_path / "untagged", "--example", 1)
    assert result.exit_code == 2
    assert "recorder.tag(example=ids)" in result.stderr


@pytest.mark.filterwarnings("ignore:dualform. nothing was recorded")
def test_a_memory_without_a_single_step_can_be_asked_what_it_is(ask: Any, tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    with dualform.record(model, tmp_path / "empty"):
        pass
    assert "no layers" in ask("info", tmp_path / "empty").stdout
    assert ask("verify", tmp_path / "empty").exit_code == 0
    assert ask("attend", tmp_path / "empty", "--example", 1).exit_code == 2


def test_a_gradient_that_was_edited_leaves_its_parameter_with_kept_states_only(
    ask: Any, ask_json: Any, tmp_path: Path
) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with dualform.record(model, tmp_path / "odd", audit="warn"):
        for step in range(3):
            model(torch.randn(3, 2)).sum().backward()
            assert model.weight.grad is not None
            if step == 1:
                model.weight.grad += torch.randn(2, 2)
                with pytest.warns(UserWarning, match="is not explained by its patterns"):
                    optimizer.step()
            else:
                optimizer.step()
            optimizer.zero_grad()
    said = " ".join(ask("info", tmp_path / "odd").stdout.split())
    assert "a part of it: its gradient was not explained at step 1" in said
    verdicts = {
        v["parameter"]: v["verdict"] for v in ask_json("verify", tmp_path / "odd")["parameters"]
    }
    assert verdicts == {"weight": "not replayable: kept states only", "bias": "bit for bit"}


# As a process -------------------------------------------------------------------------------------


def test_exit_codes_and_streams_of_the_real_command(place: Path) -> None:
    fine = process("verify", "run", "--json", cwd=place)
    assert fine.returncode == 0
    assert json.loads(fine.stdout)["passed"] is True
    assert fine.stderr == ""
    refused = process("info", "nowhere", "--json", cwd=place)
    assert refused.returncode == 2
    assert refused.stdout == ""
    assert refused.stderr.startswith("dualform: ")
    assert len(refused.stderr.splitlines()) == 1


def test_a_reader_that_goes_away_is_no_error(place: Path) -> None:
    command = [sys.executable, "-m", "dualform.cli", "attend", "run", "--example", "5", "--json"]
    for piped in (command, command[:-1]):
        with subprocess.Popen(
            piped, cwd=place, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        ) as running:
            assert running.stdout is not None
            assert running.stderr is not None
            running.stdout.close()
            said = running.stderr.read()
            assert running.wait() == 141
        assert said == b""


@pytest.mark.skipif(os.name != "posix", reason="signals")
def test_ctrl_c_says_one_line(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    run = tmp_path / "run"
    command = [sys.executable, "-m", "dualform.cli", "demo", "--steps", "1000000", "--json"]
    with subprocess.Popen(
        [*command, "--path", run],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # a shell's background jobs ignore Ctrl-C, and so would everything they start
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as running:
        patience = time.monotonic() + 60
        while not (run / "manifest.json").exists() and time.monotonic() < patience:
            time.sleep(0.05)
        running.send_signal(signal.SIGINT)
        out, said = running.communicate(timeout=60)
    assert running.returncode == 130
    assert said == "dualform: interrupted\n"
    assert out == ""
    assert dualform.Memory.open(run).closed


def test_the_version_is_ours(ask: Any) -> None:
    assert dualform.__version__ in ask("--version").stdout


@pytest.mark.parametrize("command", ["", *sorted(main.commands)])
def test_help_teaches(ask: Any, command: str) -> None:
    result = ask(*filter(None, [command]), "--help")
    assert result.exit_code == 0
    assert len(result.stdout.splitlines()) > 8


# Progress -----------------------------------------------------------------------------------------


class Terminal:
    """A stream that says it is a terminal and remembers what was written."""

    encoding = "utf-8"

    def __init__(self) -> None:
        self.written = ""

    def write(self, text: str) -> int:
        self.written += text
        return len(text)

    def flush(self) -> None: ...

    def isatty(self) -> bool:
        return True


def test_a_bar_appears_on_a_terminal_and_only_if_it_takes_a_moment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    for patience, appears in ((0.0, True), (1000.0, False)):
        stream = Terminal()
        monkeypatch.setattr(terminal, "PATIENCE", patience)
        monkeypatch.setattr(sys, "stderr", stream)
        with terminal.progress_bar() as progress:
            time.sleep(0.01)
            progress("verifying", 1, 2)
        assert ("verifying" in stream.written) is appears


def test_a_spinner_appears_where_there_is_no_measure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    stream = Terminal()
    monkeypatch.setattr(terminal, "PATIENCE", 0.0)
    monkeypatch.setattr(sys, "stderr", stream)
    with terminal.busy("attending"):
        time.sleep(0.3)
    assert "attending" in stream.written


# Further tables, exports, preparing ---------------------------------------------------------------


def test_attend_adds_up_over_time_by_example_and_by_two_columns(place: Path, ask_json: Any) -> None:
    asked = ("attend", "run", "--example", 5, "--layer", "fc1", "--sum-by", "source")
    found = ask_json(
        *asked, "--sum-by", "label", "--over", "step", "--bins", 4, "--by-example", "--by", "label"
    )
    spotlight = dualform.DualForm(None, place / "run").attend(example=5)["fc1"]
    tables = found["layers"]["fc1"]
    assert tables["top"] == spotlight.top(10, by="label").to_dict()
    assert tables["sum_by"] == spotlight.sum_by("source", "label").to_dict()
    assert tables["over"] == spotlight.over("step", bins=4, by="label").to_dict()
    assert tables["by_example"] == spotlight.by_example().to_dict()


def test_contribute_splits_a_margin_and_adds_it_up(place: Path, ask_json: Any) -> None:
    asked = ("contribute", "run", "--example", 5, "--target", "margin", "--label", 2)
    found = ask_json(*asked, "--by", "label", "--top", 2, "--over", "step", "--by-example")
    answer = dualform.DualForm(None, place / "run").contribute(example=5, target="margin", label=2)
    assert found["target"] == answer.target
    assert found["top"] == answer.top(2, by="label").to_dict()
    assert found["over"] == answer.over("step", by="label").to_dict()
    assert found["by_example"] == answer.by_example().to_dict()


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        (("contribute", "run", "--example", 5, "--target", "largest"), "number of an output"),
        (("contribute", "run", "--example", 5, "--target", 1, "--label", 1), "margin"),
        (("attend", "run", "--example", 5, "--export", "top.xlsx"), ".csv or .parquet"),
        (("attend", "run", "--example", 5, "--export", "nowhere/top.csv"), "cannot be written"),
        (("attend", "run", "--example", 5, "--over", "source"), "text"),
        (("attend", "run", "--example", 5, "--over", "step", "--bins", 0), "at least one"),
    ],
)
def test_questions_that_cannot_be_answered_say_why(ask: Any, asked: Any, words: str) -> None:
    result = ask(*asked)
    assert result.exit_code == 2
    assert words in result.stderr
    assert "Traceback" not in result.stderr


def test_one_table_is_exported_to_the_file_and_several_to_files_named_after_it(
    place: Path, ask: Any, tmp_path: Path
) -> None:
    import csv

    asked = ("attend", "run", "--example", 5, "--layer", "fc2", "--top", 7)
    assert ask(*asked, "--export", tmp_path / "top.csv").exit_code == 0
    expected = dualform.DualForm(None, place / "run").attend(example=5)["fc2"].top(7)
    with open(tmp_path / "top.csv", encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [float(row["weight"]) for row in rows] == expected["weight"].tolist()
    assert list(rows[0]) == list(expected.columns)
    result = ask(*asked, "--sum-by", "label", "--export", tmp_path / "all.csv")
    assert result.exit_code == 0
    assert {p.name for p in tmp_path.iterdir()} == {
        "top.csv", "all-fc2-top.csv", "all-fc2-sum_by.csv"
    }  # fmt: skip
    assert "all-fc2-top.csv" in result.stderr


def test_parquet_keeps_types_and_the_caption(place: Path, ask: Any, tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    file = tmp_path / "by.parquet"
    asked = ("contribute", "run", "--example", 5, "--target", 1, "--export", file)
    assert ask(*asked).exit_code == 0
    answer = dualform.DualForm(None, place / "run").contribute(example=5, target=1).top(10)
    table = parquet.read_table(file)
    assert table.column_names == list(answer.columns)
    assert table["contribution"].to_pylist() == answer["contribution"].tolist()
    assert table.schema.metadata[b"caption"].decode() == answer.caption
