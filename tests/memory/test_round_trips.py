"""What a writer was given, a reader finds."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from tests.memory.samples import (
    LAYERS,
    PARAMETERS,
    Sample,
    description,
    raw,
    read_all,
    write,
)

from dualform.memory import Memory, MemoryWriter
from dualform.memory.content import LOG, use_table


@pytest.mark.parametrize("stored", ["float32", "float16", "bfloat16"])
def test_everything_that_was_written_is_read(tmp_path: Path, stored: str) -> None:
    truth = write(tmp_path / "run", stored=stored)
    memory = Memory.open(tmp_path / "run")
    assert (memory.steps, memory.closed, memory.remarks) == (12, True, ())
    for layer, word in LAYERS:
        found = memory.layer(layer.name)
        assert found.keep == word
        torch.testing.assert_close(found.keys, torch.cat(truth.keys[layer.name]), rtol=0, atol=0)
        if word == "patterns":
            signals = torch.cat(truth.signals[layer.name])
            torch.testing.assert_close(found.error_signals, signals, rtol=0, atol=0)
        if word == "examples":
            for part in ("weight", "bias"):
                written = torch.cat(truth.written[f"{layer.name}/{part}"])
                assert torch.equal(found.read(part, 0, found.rows), written)
        assert found.patterns["step"].tolist() == truth.step[layer.name]
        assert found.patterns["label"].tolist() == truth.label[layer.name]
    for index, name in enumerate(PARAMETERS):
        log = memory.log(name)
        for field in LOG:
            expected = np.concatenate(truth.log[field])[:, index]
            np.testing.assert_array_equal(getattr(log, field), expected)
        steps, prints = memory.kept.fingerprints(name)
        assert steps.tolist() == [step for step, _ in truth.prints[name]]
        assert torch.equal(prints, torch.stack([p for _, p in truth.prints[name]]))
    for (name, step), kept in truth.kept.items():
        assert torch.equal(memory.kept.weights(name, step), kept["weights"])
        state = memory.kept.state(name, step)
        assert raw(state.pop("momentum_buffer")) == raw(kept["momentum_buffer"])
        assert state == {"count": step, "rate": float("inf"), "a/b": None}
        assert type(state["count"]) is int
    for (name, step), gradient in truth.gradients.items():
        found_gradient = memory.kept.gradient(name, step)
        assert found_gradient is not None
        assert torch.equal(found_gradient, gradient)
    for step, mean in truth.buffers.items():
        assert torch.equal(memory.buffer("mean", step), mean)
    assert torch.equal(memory.buffer("mean", 11), truth.buffers[7])
    marks = np.concatenate(truth.log["mark"])
    for step in range(1, 13):
        np.testing.assert_array_equal(memory.marks[step - 1, 0], marks[step - 1])
    memory.check()


def test_rows_can_be_read_from_any_to_any(tmp_path: Path) -> None:
    truth = write(tmp_path / "run")
    layer = Memory.open(tmp_path / "run").layer("fc1")
    keys, signals = torch.cat(truth.keys["fc1"]), torch.cat(truth.signals["fc1"])
    for low in range(0, 60, 7):
        for high in range(low, 61, 5):
            assert torch.equal(layer.read("keys", low, high), keys[low:high])
            assert torch.equal(layer.read("error_signals", low, high), signals[low:high])
    for size in (1, 7, 100):
        blocks = list(layer.blocks(size))
        assert torch.equal(torch.cat([b.keys for b in blocks]), keys)
        assert torch.equal(torch.cat([b.error_signals for b in blocks]), signals)
        assert [b.start for b in blocks] == np.cumsum([0, *[b.rows for b in blocks]])[:-1].tolist()


def test_uses_say_where_their_rows_are(tmp_path: Path) -> None:
    write(tmp_path / "run")
    memory = Memory.open(tmp_path / "run")
    tokens = memory.layer("tokens").uses
    assert tokens.step.tolist() == [0, 2, 4, 6, 8, 10]
    assert tokens.start.tolist() == [0, 5, 10, 15, 20, 25]
    assert tokens.shape_of(3) == (1, 5)
    assert memory.layer("fc1").uses.shape_of(0) == (5,)
    assert memory.layer("fc1").uses.of_step(7) == range(7, 8)
    assert memory.layer("tokens").uses.of_step(7) == range(4, 4)
    assert tokens.dtype_of(0) == torch.float32
    assert tokens.layout.tolist() == [0, 2, 1, 0, 2, 1]
    assert memory.layer("tokens").patterns["position"].tolist() == [0, 1, 2, 3, 4] * 6
    assert set(memory.layer("fc1").patterns["position"].tolist()) == {None}
    assert set(memory.layer("fc1").patterns["call"].tolist()) == {0}


def test_calls_are_counted_in_their_pass(tmp_path: Path) -> None:
    sample = Sample()
    content = sample.content(1)
    content.uses["a/b%2F"] = use_table(
        [
            [0, 0, 17, 0, 1, 2, 1, -1, 0],
            [0, 0, 4, 1, 1, 1, 1, -1, 0],
            [0, 1, 29, 0, 1, 2, 1, -1, 0],
        ],
        [(2,), (1,), (2, 1)],
    )
    writer = MemoryWriter(tmp_path / "run")
    writer.begin(description())
    writer.commit(content)
    writer.release()
    layer = Memory.open(tmp_path / "run").layer("a/b%2F")
    assert layer.patterns["call"].tolist() == [1, 1, 0, 0, 0]
    assert layer.patterns["microbatch"].tolist() == [0, 0, 0, 1, 1]


def test_conditions_choose_patterns(tmp_path: Path) -> None:
    truth = write(tmp_path / "run")
    patterns = Memory.open(tmp_path / "run").layer("fc1").patterns
    labels, steps = np.array(truth.label["fc1"]), np.array(truth.step["fc1"])
    assert patterns.names == ("step", "label", "task", "weight", "position", "microbatch", "call")
    chosen = patterns.select(label=[1, 2], step=slice(3, 9))
    np.testing.assert_array_equal(chosen, np.isin(labels, [1, 2]) & (steps >= 3) & (steps < 9))
    np.testing.assert_array_equal(patterns.select(task="task 4"), (steps >= 4) & (steps < 7))
    assert patterns.values("task") == ["task 0", "task 4", "task 7"]
    assert patterns.take("label", np.array([3, 1])).tolist() == labels[[3, 1]].tolist()
    np.testing.assert_array_equal(patterns["weight"], labels / 8)


def test_keys_that_recur_are_stored_once(tmp_path: Path) -> None:
    truth = write(tmp_path / "run")
    layer = Memory.open(tmp_path / "run").layer("fc1")
    keys = torch.cat(truth.keys["fc1"])
    assert layer.distinct is not None
    assert layer.distinct.rows == len(torch.unique(keys, dim=0)) < len(keys)
    assert torch.equal(layer.distinct.take(layer.distinct.references), keys)
    stored = torch.cat(list(layer.distinct.stored()))
    assert torch.equal(torch.cat([b for _, b in layer.distinct.blocks(3)]), stored)
    assert Memory.open(tmp_path / "run").layer("tags").distinct is None


def test_a_copy_is_the_same_memory(tmp_path: Path) -> None:
    write(tmp_path / "run", stored="float16")
    memory = Memory.open(tmp_path / "run")
    writer = MemoryWriter(tmp_path / "copy")
    writer.begin(description("float16"), write=False)
    for segment in memory.opened.segments:
        writer.commit(memory.opened.content(segment))
    assert not (tmp_path / "copy" / "manifest.json").exists()
    writer.end(closed=True)
    writer.release()
    copy = dict(read_all(Memory.open(tmp_path / "copy")))
    assert copy == dict(read_all(memory))
