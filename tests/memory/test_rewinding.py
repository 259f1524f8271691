"""Cut back to an earlier step: what is left is what there was then, and can be gone on with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.memory.samples import PARAMETERS, Sample, description, raw, write

from dualform.errors import QueryError, RecordingError
from dualform.memory import Memory, MemoryWriter
from dualform.memory.content import LOG


def rewound(path: Path, step: int) -> Memory:
    writer = MemoryWriter(path, resume=True)
    writer.rewind(step)
    assert writer.steps == step
    writer.release()
    return Memory.open(path)


@pytest.mark.parametrize("stored", ["float32", "float16"])
@pytest.mark.parametrize("step", [0, 1, 4, 5, 6, 7, 11, 12])
def test_what_is_left_is_what_there_was(tmp_path: Path, step: int, stored: str) -> None:
    write(tmp_path / "run", (4, 3, 5), stored=stored)
    whole = Memory.open(tmp_path / "run")
    before = {name: whole.layer(name) for name in whole.layers}
    rows = {name: int((la.patterns["step"] < step).sum()) for name, la in before.items()}
    parts = {"patterns": ("keys", "error_signals"), "keys": ("keys",)}
    expected: dict[str, Any] = {}
    for name, layer in before.items():
        for part in parts.get(layer.keep, ("keys", "weight", "bias")):
            expected[name, "rows", part] = raw(layer.read(part, 0, rows[name]))
        for column in layer.patterns.names:
            expected[name, column] = repr(layer.patterns[column][: rows[name]].tolist())
        expected[name, "layout"] = layer.uses.layout[layer.uses.step < step].tolist()
    for name in PARAMETERS:
        log = whole.log(name)
        expected[name, "log"] = [getattr(log, field)[:step].tolist() for field in LOG]
        kept = [s for s in whole.kept.steps(name) if s <= step]
        states = [(whole.kept.weights(name, s), whole.kept.state(name, s)) for s in kept]
        expected[name, "kept"] = (
            kept,
            [(raw(w), {k: raw(v) for k, v in s.items()}) for w, s in states],
        )
        steps, prints = whole.kept.fingerprints(name)
        expected[name, "prints"] = raw(prints[torch.from_numpy(steps <= step)])
        gradients = [s for s in whole.kept.gradient_steps(name) if s < step]
        expected[name, "gradients"] = [(s, raw(whole.kept.gradient(name, s))) for s in gradients]
    buffers = [raw(whole.buffer("mean", s)) for s in range(step + 1)] if step else []
    whole.check()
    del whole, before

    memory = rewound(tmp_path / "run", step)
    assert (memory.steps, memory.closed) == (step, False)
    memory.check()
    assert memory.remarks[-1].endswith("no further step was completed")
    for name in memory.layers:
        layer = memory.layer(name)
        assert layer.rows == rows[name]
        for part in parts.get(layer.keep, ("keys", "weight", "bias")):
            assert raw(layer.read(part, 0, layer.rows)) == expected[name, "rows", part]
        for column in layer.patterns.names:
            assert repr(layer.patterns[column].tolist()) == expected[name, column]
        assert layer.uses.layout.tolist() == expected[name, "layout"]
    for name in PARAMETERS if step else ():
        log, kept = memory.log(name), memory.kept
        assert [getattr(log, field).tolist() for field in LOG] == expected[name, "log"]
        steps = list(kept.steps(name))
        states = [(kept.weights(name, s), kept.state(name, s)) for s in steps]
        found = steps, [(raw(w), {k: raw(v) for k, v in s.items()}) for w, s in states]
        assert found == expected[name, "kept"]
        assert raw(kept.fingerprints(name)[1]) == expected[name, "prints"]
        gradients = [(s, raw(kept.gradient(name, s))) for s in kept.gradient_steps(name)]
        assert gradients == expected[name, "gradients"]
    for s, expected_buffer in enumerate(buffers):
        assert raw(memory.buffer("mean", s)) == expected_buffer


def test_a_memory_that_was_cut_is_gone_on_with(tmp_path: Path) -> None:
    sample = Sample()
    writer = MemoryWriter(tmp_path / "run")
    writer.begin(description())
    contents = [sample.content(steps) for steps in (2, 3, 4)]
    for content in contents:
        writer.commit(content)
    writer.end(closed=True)
    writer.release()
    writer = MemoryWriter(tmp_path / "run", resume=True)
    writer.rewind(5)
    phases = [
        {"first_step": 0, "began": "started", "when": "1"},
        {"first_step": 5, "began": "resumed", "when": "2", "rewound_from": 9},
    ]
    writer.begin(description(phases=phases))
    writer.commit(contents[2])
    with pytest.raises(RecordingError, match="holds 9 steps"):
        writer.commit(contents[2])
    writer.end(closed=True)
    writer.release()
    memory = Memory.open(tmp_path / "run")
    assert memory.steps == 9
    assert [phase.rewound_from for phase in memory.phases] == [None, 9]
    for layer, keys in sample.truth.keys.items():
        assert torch.equal(memory.layer(layer).keys, torch.cat(keys))
    memory.check()
    names = sorted(f.name for f in (tmp_path / "run" / "segments").iterdir())
    assert names == ["000000.safetensors", "000001.safetensors", "000003.safetensors"]


def test_no_memory_goes_forward(tmp_path: Path) -> None:
    write(tmp_path / "run", (2,))
    writer = MemoryWriter(tmp_path / "run", resume=True)
    with pytest.raises(RecordingError, match="holds 2 steps"):
        writer.rewind(3)
    writer.release()
    assert Memory.open(tmp_path / "run").closed


def test_events_and_remarks_of_later_steps_are_taken_back(tmp_path: Path) -> None:
    sample = Sample()
    writer = MemoryWriter(tmp_path / "run")
    writer.begin(description())
    content = sample.content(6)
    content.news["events"] = [
        {"step": step, "parameters": ["fc1.weight"], "what": "edit", "why": ""} for step in (2, 5)
    ]
    content.news["remarks"] = ["of the run", [1, "early"], [4, "late"]]
    writer.commit(content)
    writer.release()
    assert [event.step for event in Memory.open(tmp_path / "run").events] == [2, 5]
    memory = rewound(tmp_path / "run", 3)
    assert [event.step for event in memory.events] == [2]
    assert memory.remarks[:2] == ("of the run", "early")
    assert len(memory.remarks) == 3


def test_the_path_to_a_state_leaves_out_what_was_taken_back(tmp_path: Path) -> None:
    sample = Sample()
    writer = MemoryWriter(tmp_path / "run")
    writer.begin(description())
    for first, events in ((0, [(3, 1)]), (4, [(6, 3), (7, 5)]), (8, [])):
        content = sample.content(4)
        content.news["events"] = [
            {"step": s, "parameters": ["fc1.weight"], "what": "rewind", "why": "", "to": to}
            for s, to in events
        ]
        assert content.first_step == first
        writer.commit(content)
    writer.release()
    memory = Memory.open(tmp_path / "run")

    def path(at: int) -> list[int]:
        return memory.path_to("fc1.weight", at).tolist()

    assert path(2) == [0, 1]
    assert path(3) == [0]  # the state that training went on from
    assert path(5) == [0, 3, 4]
    assert path(6) == [0, 1, 2]  # back to what the third update left, before it was taken back
    assert path(7) == [0, 3, 4]
    assert path(12) == [0, 3, 4, 7, 8, 9, 10, 11]
    assert memory.path_to("fc1.bias", 12).tolist() == list(range(12))
    with pytest.raises(QueryError, match="13 updates"):
        memory.path_to("fc1.bias", 13)


def test_a_state_that_was_kept_twice_is_the_later_one_as_a_whole(tmp_path: Path) -> None:
    sample = Sample()
    writer = MemoryWriter(tmp_path / "run")
    writer.begin(description())
    content = sample.content(2)
    new, other = torch.ones(2), torch.full((2,), 7.0, dtype=torch.float64)
    content.kept += [
        ("weights", "tags.bias", 1, new * 3), ("state.exp_avg", "tags.bias", 1, new.half()),
        ("state.step", "tags.bias", 1, 4), ("weights", "tags.bias", 2, new),
        ("state.exp_avg", "tags.bias", 2, other), ("state.step", "tags.bias", 2, True),
        ("state.z", "tags.bias", 2, torch.tensor([1 + 2j])),
    ]  # fmt: skip
    writer.commit(content)
    last = sample.content(0)
    last.kept = [("weights", "fc1.bias", 2, torch.zeros(4))]
    writer.commit(last)
    writer.end(closed=True)
    writer.release()
    kept = Memory.open(tmp_path / "run").kept
    assert kept.steps("tags.bias") == (0, 1, 2)
    assert torch.equal(kept.weights("tags.bias", 2), new)
    state = kept.state("tags.bias", 2)
    assert state.keys() == {"exp_avg", "step", "z"}  # and nothing of what was there before
    assert state["step"] is True
    assert state["exp_avg"].dtype == torch.float64
    assert state["z"].tolist() == [1 + 2j]
    assert kept.state("tags.bias", 1)["exp_avg"].dtype == torch.float16
    assert kept.state("fc1.bias", 2) == {}
    assert kept.last("tags.bias", 1) == 1
    assert (kept.last("fc1.bias", 1), kept.last("fc1.bias", 5)) == (0, 2)
    with pytest.raises(QueryError, match="was not kept"):
        kept.weights("fc1.bias", 1)
    with pytest.raises(QueryError, match="no parameter"):
        kept.steps("nothing")
    assert kept.gradient("fc1.bias", 1) is None


def test_settings_and_coverage_are_read_in_order(tmp_path: Path) -> None:
    sample = Sample()
    writer = MemoryWriter(tmp_path / "run")
    writer.begin(description())
    first, second = sample.content(2), sample.content(2)
    settings = first.news["settings"]
    second.news["settings"] = [settings[0] | {"path": "mine.Lion"}]
    second.news["coverage"] = {"fc1.weight": {"keep": "values", "why": "used past its layer"}}
    second.log["setting"] = np.ones((2, len(PARAMETERS)), np.int32)
    writer.commit(first)
    writer.commit(second)
    writer.release()
    memory = Memory.open(tmp_path / "run")
    assert [setting.path for setting in memory.settings] == ["torch.optim.sgd.SGD", "mine.Lion"]
    assert memory.settings[0]["momentum"] == 0.9
    assert memory.log("fc1.weight").setting.tolist() == [0, 0, 1, 1]
    assert memory.parameters["fc1.weight"].keep == "values"
    assert memory.parameters["fc1.weight"].why == "used past its layer"
    assert memory.parameters["fc1.weight"].layers == ("fc1",)
    assert memory.marks.shape == (4, 2, len(memory.parameters))
