"""The format as its page says it is: read without us, with what any program has."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import safetensors
import torch
from tests.memory.samples import write

from dualform.memory import Memory
from dualform.memory.directions import direction, signs
from dualform.memory.fields import quoted, unquoted


def test_segments_are_ordinary_safetensors_files(tmp_path: Path) -> None:
    truth = write(tmp_path / "run", (2, 3))
    lines = (tmp_path / "run" / "segments.jsonl").read_text().splitlines()
    found = []
    for line in map(json.loads, lines):
        with safetensors.safe_open(tmp_path / "run/segments" / line["segment"]["file"], "pt") as f:
            found.append(f.get_tensor("rows/fc1/error_signals"))
            families = {name.partition("/")[0] for name in f.keys()}  # noqa: SIM118
            assert families <= {"rows", "columns", "log", "kept", "padding"}
    assert torch.equal(torch.cat(found), torch.cat(truth.signals["fc1"]))


def test_the_page_names_what_is_on_disk(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs/memory-format.md").read_text(encoding="utf-8")
    said = set(re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", page, flags=re.DOTALL)))
    said |= {"name", "shape", "dtype"}
    write(tmp_path / "run", (2, 3), stored="float16")
    manifest = json.loads((tmp_path / "run/manifest.json").read_text())["manifest"]
    assert {*manifest, *manifest["phases"][0], *manifest["parameters"][0]} <= said
    for line in (tmp_path / "run/segments.jsonl").read_text().splitlines():
        segment = json.loads(line)["segment"]
        assert {*segment, *segment["news"]} <= said
        with safetensors.safe_open(tmp_path / "run/segments" / segment["file"], "pt") as f:
            names = set(f.keys())
        assert {name for name in names if name.startswith("kept/")} == segment["kept"].keys()
        assert {name.removeprefix("log/") for name in names if name.startswith("log/")} <= said
        columns = {name.split("/")[1] for name in names if name.startswith("columns/")}
        assert columns == {"uses", "tags", "lost"}
        for name in names:
            family, _, rest = name.partition("/")
            part = rest.rpartition("/")[2]
            if family == "rows":
                assert {part, f"rows/LAYER/{part}", f"…/{part}"} & said or part.endswith(".scales")
    assert {f.name for f in (tmp_path / "run").iterdir()} <= {
        "manifest.json", "segments.jsonl", "segments", "progress"
    }  # fmt: skip


def test_directions_never_change() -> None:
    expected = [-0.4673208307131058, -0.6620590790395239, -0.5537936180214634, 0.48631662939371556]
    np.testing.assert_array_equal(direction(3, 4).numpy(), expected)
    np.testing.assert_array_equal(signs(3, 8), [-1, -1, 1, -1, 1, -1, -1, -1])
    v = direction(0, 10_000) * 100
    assert 0.5 <= float(v.abs().min()) < 0.51 < 1.49 < float(v.abs().max()) < 1.5
    assert abs(float(v.mean())) < 0.05
    assert abs(signs(0, 10_000).mean()) < 0.05
    assert not torch.equal(direction(0, 50), direction(1, 50))
    assert direction(0, 0).shape == (0,)


def test_directions_of_a_memory_are_those_of_its_parameters(tmp_path: Path) -> None:
    write(tmp_path / "run", (1,))
    memory = Memory.open(tmp_path / "run")
    v = memory.direction("tokens.weight")
    assert v is not None
    assert torch.equal(v, direction(3, 5).float().double())
    assert memory.direction("fc1.bias") is None
    assert memory.direction("scale") is None
    assert memory.signs("fc1.bias").shape == (4,)
    steps = memory.direction("steps")
    assert steps is not None
    assert steps.shape == (4,)


def test_names_are_quoted_and_back() -> None:
    for name in ("a/b", "a%2Fb", "%", "//", "%25", "plain.name[0:3]"):
        assert "/" not in quoted(name)
        assert unquoted(quoted(name)) == name
