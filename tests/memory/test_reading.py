"""Reading a memory: while it grows, by `where` conditions, block by block."""

from __future__ import annotations

import gc
import time
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.memory.runs import TASKS, assert_sound, batch

from dualform import DualForm, QueryError
from dualform.memory import Memory


def test_a_memory_is_read_while_it_is_recorded(tmp_path: Path) -> None:
    from tests.memory.runs import train

    path = tmp_path / "run"
    seen = [0]

    def look(step: int) -> None:
        if step % 20:
            return
        memory = Memory.open(path)
        while memory.steps <= seen[-1]:  # the writer is on its way
            time.sleep(0.001)
            memory = memory.refresh()
        seen.append(memory.steps)
        assert_sound(memory)
        assert memory.is_being_recorded
        assert "still being recorded" in memory.remarks[-1]
        assert memory.bytes_on_disk > 0

    train(path, 60, after_step=look, segment_bytes=9000)
    assert len(seen) == 4
    memory = Memory.open(path)
    assert (memory.steps, memory.remarks) == (60, ())
    assert_sound(memory)


def test_an_opened_memory_stays_as_it_was_until_it_is_refreshed(tmp_path: Path) -> None:
    from tests.memory.runs import train

    opened: list[Memory] = []

    def look(step: int) -> None:
        if step == 6:
            opened.append(Memory.open(tmp_path))

    train(tmp_path, 12, segment_bytes=1, after_step=look)
    before = opened[0]
    assert 0 < before.steps <= 6
    assert_sound(before)
    assert before.refresh().steps == 12


def test_the_columns_say_which_pattern_is_which(recorded: Path) -> None:
    memory = Memory.open(recorded)
    patterns = memory.layer("1").patterns
    step, example, label, task = (patterns[c] for c in ("step", "example", "label", "task"))
    assert memory.columns[:1] == ("step",)
    for s in range(memory.steps):
        rows = step == s
        assert np.array_equal(example[rows], batch(s)[0].numpy())
        assert np.array_equal(label[rows], batch(s)[2].numpy())
        assert set(task[rows]) == {TASKS[s // 4 % 3]}
        assert np.allclose(patterns["weight"][rows], batch(s)[2].numpy() / 3.0)


def test_conditions_choose_patterns(recorded: Path) -> None:
    patterns = Memory.open(recorded).layer("4").patterns
    step, label, task = patterns["step"], patterns["label"], patterns["task"]
    everything = np.ones(len(patterns), bool)
    for chosen, expected in (
        (patterns.select(), everything),
        (patterns.select(label=2), label == 2),
        (patterns.select(label=[1, 2]), np.isin(label, [1, 2])),
        (patterns.select(label=np.array([1, 2], np.int8)), np.isin(label, [1, 2])),
        (patterns.select(label=torch.tensor(3)), label == 3),
        (patterns.select(label=range(4)), everything),
        (patterns.select(label=[]), ~everything),
        (patterns.select(label=2.0), label == 2),
        (patterns.select(step=slice(2, 5)), (step >= 2) & (step < 5)),
        (patterns.select(step=slice(None, 5), label=1), (step < 5) & (label == 1)),
        (patterns.select(weight=slice(0.5, None)), label >= 2),
        (patterns.select(task=TASKS[2]), task == TASKS[2]),
        (patterns.select(task=np.array(TASKS[:2])), task != TASKS[2]),
        (patterns.select(label == 1, step=3), (label == 1) & (step == 3)),
        (patterns.select(torch.from_numpy(label == 1)), label == 1),
    ):
        assert np.array_equal(chosen, expected)


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ({"color": 3}, "no column 'color'.*label"),
        ({"label": 9}, "no recorded pattern has label=9.*0, 1, 2, 3"),
        ({"label": [1, 9]}, "label=9"),
        ({"label": 2**70}, "no recorded pattern"),
        ({"label": "a"}, "of kind int"),
        ({"label": None}, "of kind int"),
        ({"label": 1.5}, "of kind int"),
        ({"label": float("nan")}, "of kind int"),
        ({"label": float("inf")}, "of kind int"),
        ({"label": slice(0, 4, 2)}, "no stride"),
        ({"label": slice("a", None)}, "goes by numbers"),
        ({"task": slice(0, 3)}, "a number column"),
        ({"task": "third"}, "no recorded pattern has task='third'"),
        ({"task": 3}, "of kind string"),
        ({"task": [["first"]]}, "of kind string"),
        ({"weight": 17.5}, "no recorded pattern"),
    ],
)
def test_conditions_that_cannot_be_met_are_refused(
    recorded: Path, where: dict[str, object], message: str
) -> None:
    with pytest.raises(QueryError, match=message):
        Memory.open(recorded).layer("4").patterns.select(**where)


def test_masks_of_another_length_are_refused(recorded: Path) -> None:
    patterns = Memory.open(recorded).layer("4").patterns
    for rows in ([True], np.ones(len(patterns), np.int64), "label"):
        with pytest.raises(QueryError, match="boolean array"):
            patterns.select(rows)


@pytest.mark.parametrize("size", [1, 5, 10_000])
def test_blocks_of_any_size_add_up_to_the_layer(recorded: Path, size: int) -> None:
    layer = Memory.open(recorded).layer("1")
    blocks = list(layer.blocks(size))
    assert blocks[0].start == 0
    keys = torch.cat([b.keys for b in blocks if b.keys is not None])
    assert torch.equal(keys, layer.keys)
    assert keys.shape == (len(layer), layer.in_features)
    assert all(b.keys is None for b in layer.blocks(size, keys=False))
    with pytest.raises(QueryError):
        next(layer.blocks(0))


def test_what_readers_write_never_reaches_the_disk(run: Path) -> None:
    memory = Memory.open(run)
    for block in memory.layer("1").blocks():
        assert block.keys is not None
        block.keys.zero_()
    memory.check()
    assert_sound(Memory.open(run))


def test_questions_about_what_is_not_there_name_what_is(recorded: Path) -> None:
    memory = Memory.open(recorded)
    with pytest.raises(QueryError, match="it has 1, 4"):
        memory.layer("2")
    with pytest.raises(QueryError, match=r"1\.weight"):
        memory.log("weight")
    with pytest.raises(QueryError, match="running_mean"):
        memory.buffer("mean")
    with pytest.raises(QueryError, match="holds 0 to 13"):
        memory.buffer("0.running_mean", 14)
    with pytest.raises(QueryError, match="holds 0 to 13"):
        memory.learned("3.weight", -1)
    with pytest.raises(QueryError, match="patterns"):
        memory.learned("1.weight", 3)


def test_a_memory_is_let_go_at_once_with_all_that_was_asked_of_it(recorded: Path) -> None:
    """Not by the garbage collector, some day: matrices of a layer's size are kept with it."""
    gc.collect()
    gc.disable()
    try:
        memory = Memory.open(recorded)
        layer = memory.layers[0]
        dual = DualForm(None, memory)
        queries = torch.ones(1, memory.layer(layer).in_features, dtype=memory.layer(layer).dtype)
        spotlight = dual.attend(queries=queries, layers=layer)[layer]
        spotlight.top(3)
        spotlight.sum_by("step")
        dual.verify()
        known = weakref.ref(memory), weakref.ref(memory.layer(layer))
        del memory, dual, spotlight
        assert [reference() for reference in known] == [None, None]
    finally:
        gc.enable()
