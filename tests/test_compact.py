"""A memory made smaller is a whole memory: it says what is gone, and proves the rest to the bit.

`SOURCES` records small runs of every kind that may be made smaller. The destination is a complete
memory or none, whatever happens; the source is never touched.
"""

from __future__ import annotations

import json
import os
import shutil
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.memory.test_crashes import killed_at_every_act
from torch import Tensor, nn
from torch.nn import functional as F

import dualform
from dualform.certificate.checks import verify
from dualform.certificate.report import BITS, KEPT, LITTLE, ROUNDED
from dualform.errors import MemoryFileError, RecordingError
from dualform.memory import Memory
from dualform.memory.fields import seal
from dualform.memory.files import MANIFEST
from dualform.memory.liveness import Progress


def plain() -> nn.Module:
    """Three linear layers and a norm, which is kept by examples and has buffers that move."""
    layers = {"fc1": nn.Linear(6, 9), "act": nn.Tanh(), "fc2": nn.Linear(9, 7)}
    layers |= {"norm": nn.BatchNorm1d(7), "relu": nn.ReLU(), "fc3": nn.Linear(7, 4)}
    return nn.Sequential(OrderedDict(layers))


def tied() -> nn.Module:
    """Two layers with one weight and a bias each, and a third."""
    layers = {"fc1": nn.Linear(6, 6), "act": nn.Tanh(), "fc2": nn.Linear(6, 6)}
    layers["fc2"].weight = layers["fc1"].weight  # type: ignore[assignment]
    return nn.Sequential(OrderedDict({**layers, "fc3": nn.Linear(6, 4)}))


class Text(nn.Module):
    """Tokens, packed attention, positions."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc3 = nn.Embedding(12, 8), nn.Linear(8, 4)
        self.fc2 = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        seen = self.fc1((x.float().abs() * 9).long().clamp(max=11))
        output: Tensor = self.fc3((seen + self.fc2(seen, seen, seen)[0]).mean(1))
        return output


def record(
    path: Path,
    make: Callable[[], nn.Module] = plain,
    *,
    rule: type[Any] = torch.optim.SGD,
    precision: torch.dtype = torch.float32,
    steps: int = 24,
    carry: int = 1,
    period: int = 1000,
    size: float = 1.0,
    edit: int = -1,
    **options: Any,
) -> nn.Module:
    """Train and record, in several segments; inputs come again after `period` steps."""
    with torch.random.fork_rng():
        torch.manual_seed(3)
        net = make().to(precision)
    optimizer = rule(net.parameters(), lr=0.02, weight_decay=1e-2)
    with dualform.record(net, path, **options) as recorder:
        for i in range(steps):
            generator = torch.Generator().manual_seed(i % period)
            inputs = torch.randn(8, 6, generator=generator, dtype=torch.float64).to(precision)
            inputs[:, 5] *= size
            labels = torch.randint(0, 4, (8,), generator=generator)
            recorder.tag(example=torch.arange(8) + 10 * i, label=labels, task=f"task {i // 7}")
            F.cross_entropy(net(inputs), labels).backward()
            optimizer.step()
            if i % carry == carry - 1:
                optimizer.zero_grad()
            if i % 5 == 2:
                recorder.flush()
            if i == edit:
                next(net.parameters()).data.add_(0.1)
    return net


def died(path: Path) -> None:
    """A recording that died three steps after its last commit."""
    record(path)
    manifest = Memory.open(path).opened.committed.manifest | {"closed": False}
    (path / MANIFEST).write_bytes(seal("manifest", manifest))
    progress = Progress(path)
    progress.set(27)
    progress.release()


SOURCES: dict[str, Callable[[Path], Any]] = {
    "plain": record,
    "adam": partial(record, rule=torch.optim.AdamW),
    "float64": partial(record, precision=torch.float64),
    "trained in bfloat16": partial(record, precision=torch.bfloat16),
    "recurring inputs": partial(record, period=5),
    "keys alone": partial(record, keep={"fc2": "patterns", "*": "keys"}),
    "float16": partial(record, dtype="float16"),
    "every third step": partial(record, every=3),
    "gradients carried over": partial(record, carry=3),
    "tied": partial(record, make=tied),
    "text": partial(record, make=Text),
    "no step": partial(record, steps=0),
    "edited": partial(record, edit=7),
    "died": died,
}

LESS: dict[str, dict[str, Any]] = {"as it is": {}, "without a layer": {"layers": "fc[12]*"}}
LESS["keys"] = {"error_signals": False}


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """`recorded("tied")`: a memory of that kind; never to be changed."""
    place = tmp_path_factory.mktemp("sources")

    def source(kind: str) -> Path:
        if not (place / kind).exists():
            SOURCES[kind](place / kind)
        return place / kind

    return source


def contents(path: Path) -> dict[str, bytes]:
    return {str(f): f.read_bytes() if f.is_file() else b"" for f in sorted(path.rglob("*"))}


def everything(memory: Memory, layer: str) -> list[Any]:
    """All rows and columns of a layer."""
    known = memory.layer(layer)
    words = {"patterns": ("keys", "error_signals"), "keys": ("keys",)}
    rows = [known.read(p, 0, known.rows) for p in words.get(known.keep, ("weight", "bias"))]
    columns = [known.patterns[column].tolist() for column in known.patterns.names]
    return [
        *(row.view(torch.uint8).tolist() for row in rows),
        repr(columns),
        known.uses.shape_of(0),
    ]


@pytest.mark.filterwarnings("ignore:dualform. nothing was recorded")
@pytest.mark.parametrize("kind", SOURCES)
@pytest.mark.parametrize("how", LESS)
def test_what_stays_is_the_same_to_the_bit_and_the_rest_is_kept_states(
    kind: str, how: str, recorded: Any, tmp_path: Path
) -> None:
    source, path = recorded(kind), tmp_path / "made"
    before = contents(source)
    made = dualform.compact(source, path, **LESS[how] if kind != "no step" else {})
    assert contents(source) == before
    ours, theirs = Memory.open(path), Memory.open(source)
    ours.check()
    for fact in ("steps", "closed", "phases", "events", "every"):
        assert getattr(ours, fact) == getattr(theirs, fact)
    assert set(theirs.remarks) <= set(ours.remarks)
    assert (made.bytes_before, made.bytes_after) == (theirs.bytes_on_disk, ours.bytes_on_disk)
    for layer in ours.layers:
        whole = everything(theirs, layer)
        is_less = ours.layer(layer).keep != theirs.layer(layer).keep
        assert everything(ours, layer) == ([whole[0], *whole[2:]] if is_less else whole)
    expected, found = verify(theirs, every_step=True), verify(ours, every_step=True)
    assert found.passed == expected.passed
    for name, verdict in found.verdicts.items():
        assert ours.kept.steps(name) == theirs.kept.steps(name)
        for step in theirs.kept.steps(name):
            assert torch.equal(ours.kept.weights(name, step), theirs.kept.weights(name, step))
        is_less = ours.parameters[name].keep != theirs.parameters[name].keep
        if is_less and theirs.log(name).moved.any():
            assert verdict.verdict == KEPT
            assert "dropped afterwards" in verdict.why
        else:
            assert verdict == expected.verdicts[name]


def test_what_is_dropped_is_gone(recorded: Any, tmp_path: Path) -> None:
    made = dualform.compact(recorded("plain"), tmp_path / "made", layers=["fc1", "fc2"])
    memory = Memory.open(tmp_path / "made")
    assert memory.layers == ("fc1", "fc2")
    assert memory.parameters["norm.weight"].keep == "values"
    assert not memory.kept.gradient_steps("norm.weight")
    assert "norm, fc3 were dropped" in made.lost[0]
    assert {v.verdict for v in made.certificate.verdicts.values()} == {BITS, KEPT}
    dualform.compact(memory, tmp_path / "less", error_signals="fc2")
    less = Memory.open(tmp_path / "less")
    assert [less.layer(n).keep for n in less.layers] == ["keys", "patterns"]
    assert set(memory.remarks) < set(less.remarks)
    whole = dualform.DualForm(None, Memory.open(recorded("plain")))
    found = [d.attend(example=31)["fc1"].top(3) for d in (whole, dualform.DualForm(None, less))]
    assert found[0].to_dict() == found[1].to_dict()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("kind", ["plain", "float64", "recurring inputs", "adam", "text", "tied"])
def test_16_bits_are_those_of_a_recording_in_that_dtype(
    kind: str, dtype: str, recorded: Any, tmp_path: Path
) -> None:
    SOURCES[kind](tmp_path / "narrow", dtype=dtype)  # type: ignore[call-arg]
    made = dualform.compact(recorded(kind), tmp_path / "made", dtype=dtype)
    ours, theirs = Memory.open(tmp_path / "made"), Memory.open(tmp_path / "narrow")
    for name in theirs.layers:
        layer = theirs.layer(name)
        assert everything(ours, name) == everything(theirs, name)
        for parameter in layer.layer.parameters if layer.keep == "patterns" else ():
            assert np.allclose(ours.layer(name).lost(parameter), layer.lost(parameter), atol=1e-6)
            assert layer.lost(parameter).any()
    verdicts = {name: v.verdict for name, v in made.certificate.verdicts.items()}
    # a recording in 16 bits keeps fewer states, so its stretches are longer
    direct = {name: v.verdict for name, v in verify(theirs).verdicts.items()}
    for name in verdicts:
        expected = {BITS} if "norm" in name else {ROUNDED, LITTLE}
        assert {verdicts[name], direct[name]} <= expected, name
    assert not made.certificate.failures


@pytest.mark.parametrize("period", [5, 1000])
def test_what_16_bits_cannot_hold_stays_as_it_was_and_is_said(period: int, tmp_path: Path) -> None:
    record(tmp_path / "wide", size=1e6, period=period)
    made = dualform.compact(tmp_path / "wide", tmp_path / "made", dtype="float16")
    assert any("cannot hold" in sentence and "fc1" in sentence for sentence in made.lost)
    assert not made.certificate.failures
    wide, ours = Memory.open(tmp_path / "wide"), Memory.open(tmp_path / "made")
    assert torch.equal(ours.layer("fc1").keys, wide.layer("fc1").keys)
    assert torch.equal(ours.layer("fc2").keys, wide.layer("fc2").keys.half().float())


def test_recurring_inputs_stay_stored_once(recorded: Any, tmp_path: Path) -> None:
    source = Memory.open(recorded("recurring inputs"))
    dualform.compact(source, tmp_path / "made", dtype="bfloat16")
    both = source, Memory.open(tmp_path / "made")
    found = [memory.layer("fc1").distinct for memory in both]
    assert [distinct.rows for distinct in found if distinct is not None] == [40, 40]


def test_recording_goes_on_in_a_memory_made_smaller(tmp_path: Path) -> None:
    net = record(tmp_path / "run")
    dualform.compact(tmp_path / "run", tmp_path / "made", error_signals=False)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    keep = {"norm": "auto", "*": "keys"}
    with dualform.record(net, tmp_path / "made", keep=keep, resume=True) as recorder:
        recorder.tag(example=0, label=0, task="more")
        F.cross_entropy(net(torch.eye(8, 6)), torch.arange(8) % 4).backward()
        optimizer.step()
    assert Memory.open(tmp_path / "made").steps == 25
    assert verify(Memory.open(tmp_path / "made")).passed


# Where it may go, and what is left when it is cut off ---------------------------------------------


@pytest.mark.filterwarnings("ignore:dualform. nothing was recorded")
def test_nothing_that_is_there_is_lost(recorded: Any, tmp_path: Path) -> None:
    source, path = recorded("plain"), tmp_path / "made"
    before = contents(source)
    (tmp_path / "link").symlink_to(source)
    for place in (source, source / "inside", source.parent, tmp_path / "link"):
        with pytest.raises(RecordingError, match="never changed"):
            dualform.compact(source, place, overwrite=True)
    assert contents(source) == before
    dualform.compact(source, path)
    before = contents(path)
    with pytest.raises(RecordingError, match=r"already holds a memory.*overwrite=True"):
        dualform.compact(source, path, layers="fc1")
    assert contents(path) == before
    dualform.compact(source, path, layers="fc1", overwrite=True)
    assert Memory.open(path).layers == ("fc1",)
    (path / "thesis.tex").write_text("years of work")
    for place, match in ((path, "thesis"), (path / "thesis.tex", "cannot be used")):
        with pytest.raises(RecordingError, match=match):
            dualform.compact(source, place, overwrite=True)
    with pytest.raises(RecordingError, match="looks like a URL"):
        dualform.compact(source, "s3://bucket/run")
    net = plain()
    with dualform.record(net, tmp_path / "live"):  # noqa: SIM117
        with pytest.raises(RecordingError, match="still being recorded"):
            dualform.compact(tmp_path / "live", tmp_path / "no")


@pytest.mark.parametrize(
    ("kind", "choices", "message"),
    [
        ("plain", {"dtype": "float8"}, "float32.*float16, bfloat16"),
        ("plain", {"layers": "fc9"}, "'fc9' matches no layer.*fc1, fc2, norm, fc3"),
        ("plain", {"layers": []}, "matches no layer"),
        ("plain", {"error_signals": ["fc1", "norm"]}, "'norm' matches no layer.*fc1, fc2, fc3"),
        ("float16", {"dtype": "float32"}, "does not come back"),
        ("float16", {"dtype": "bfloat16"}, "does not come back"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_written(
    kind: str, choices: dict[str, Any], message: str, recorded: Any, tmp_path: Path
) -> None:
    with pytest.raises(RecordingError, match=message):
        dualform.compact(recorded(kind), tmp_path / "no", **choices)
    assert not (tmp_path / "no").exists()


def test_damage_and_ctrl_c_leave_nothing(recorded: Any, tmp_path: Path) -> None:
    broken, existing = tmp_path / "broken", tmp_path / "existing"
    shutil.copytree(recorded("plain"), broken)
    existing.mkdir()
    file = broken / "segments" / "000004.safetensors"
    file.write_bytes(file.read_bytes()[:-9] + b"#" * 9)

    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    for path in (tmp_path / "no", existing):
        with pytest.raises(MemoryFileError, match="damaged"):
            dualform.compact(broken, path)
        with pytest.raises(KeyboardInterrupt):
            dualform.compact(recorded("plain"), path, progress=interrupt)
    assert not (tmp_path / "no").exists()
    assert list(existing.iterdir()) == []


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_kill_9_at_any_act_leaves_a_whole_memory_or_none(recorded: Any, tmp_path: Path) -> None:
    path, whole = tmp_path / "made", 0
    work = partial(dualform.compact, recorded("plain"), path, layers=["fc1"], overwrite=True)
    for _ in killed_at_every_act(work):
        if (path / MANIFEST).exists():
            Memory.open(path).check()
            assert (Memory.open(path).closed, Memory.open(path).layers) == (True, ("fc1",))
            whole += 1
    assert whole >= 1


def test_what_comes_back_prints_well_and_is_json(recorded: Any, tmp_path: Path) -> None:
    calls: list[tuple[int, int]] = []
    how = {"layers": ["fc1", "fc2"], "progress": lambda *at: calls.append(at)}
    made = dualform.compact(recorded("plain"), tmp_path / "made", dtype="bfloat16", **how)
    for said in ("put into bfloat16", "patterns of norm, fc3 were", "before", "(fc"):
        assert said in repr(made)
    assert json.loads(json.dumps(made.to_dict(), allow_nan=False))["passed"] is made.passed
    assert calls == sorted(calls, key=lambda at: at[0] / at[1])
