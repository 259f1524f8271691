"""Inputs that come again are stored once: bit by bit the same ones, and no others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.recording.runs import recording, verified
from torch import Tensor, nn
from torch.nn import functional as F

import dualform
from dualform.memory import Memory
from dualform.recording import Recorder, record, recurring
from dualform.recording.recurring import RowIndex

WIDTH = 6


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)


def network(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, 9), nn.Tanh(), nn.Linear(9, 4)).to(dtype)


def train(
    model: nn.Sequential,
    optimizer: torch.optim.Optimizer,
    batches: list[Tensor],
    seen: list[Tensor],
    recorder: Recorder | None = None,
) -> None:
    for batch in batches:
        if recorder is not None:
            recorder.tag(example=np.arange(len(batch)))
        seen.append(batch.clone())
        F.cross_entropy(model(batch), torch.arange(len(batch)) % 4).backward()
        optimizer.step()
        optimizer.zero_grad()


def sgd(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def recorded(path: Path, batches: list[Tensor], **options: Any) -> tuple[Memory, Tensor]:
    """A run over these batches, and the inputs it was fed with, one after the other."""
    model, seen = network(batches[0].dtype), []  # type: ignore[var-annotated]
    optimizer = sgd(model)
    with recording(model, optimizer, path, **({"segment_bytes": 1 << 12} | options)) as recorder:
        train(model, optimizer, batches, seen, recorder)
    certificate = verified(path, model)
    assert certificate.passed, certificate
    return Memory.open(path), torch.cat(seen)


def epochs(data: Tensor, count: int, batch: int = 8) -> list[Tensor]:
    """Shuffled epochs; the last batch of each may be smaller."""
    return [data[chosen] for _ in range(count) for chosen in torch.randperm(len(data)).split(batch)]


def bits(rows: Tensor) -> list[bytes]:
    return [row.contiguous().view(torch.uint8).numpy().tobytes() for row in rows]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_keys_are_what_training_saw_and_each_input_is_stored_once(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    data = torch.randn(37, WIDTH, dtype=dtype)
    memory, seen = recorded(tmp_path / "run", epochs(data, 5))
    first = memory.layer("0")
    assert torch.equal(first.keys, seen)
    assert first.distinct is not None
    assert first.distinct.rows == 37
    assert torch.equal(first.distinct.take(first.distinct.references), seen)
    stored = torch.cat([rows for _, rows in first.distinct.blocks(5)])
    assert sorted(bits(stored)) == sorted(bits(data))
    assert memory.layer("2").distinct is None
    assert len(list((tmp_path / "run" / "segments").iterdir())) > 3


def test_blocks_of_any_size_are_the_same_keys(tmp_path: Path) -> None:
    memory, seen = recorded(tmp_path / "run", epochs(torch.randn(20, WIDTH), 4))
    for size in (1, 3, 8, 1000):
        blocks = [b.keys for b in memory.layer("0").blocks(size)]
        assert torch.equal(torch.cat([b for b in blocks if b is not None]), seen)


def test_augmented_inputs_stay_apart_however_little_they_differ(tmp_path: Path) -> None:
    """The next number up in one entry, a zero with another sign, a shift by one pixel."""
    image = torch.rand(WIDTH)
    one_up = image.clone()
    one_up[3] = torch.nextafter(one_up[3], torch.tensor(2.0))
    plus, minus = image.clone(), image.clone()
    plus[0], minus[0] = 0.0, -0.0
    shifted = image.roll(1)
    batch = torch.stack([image, one_up, plus, minus, shifted, image])
    memory, seen = recorded(tmp_path / "run", [batch, batch.flip(0), batch])
    distinct = memory.layer("0").distinct
    assert distinct is not None
    assert distinct.rows == 5
    assert bits(memory.layer("0").keys) == bits(seen)


def test_noise_at_every_visit_keeps_every_key(tmp_path: Path) -> None:
    data = torch.randn(16, WIDTH)
    batches = [data[:8] + 1e-6 * torch.randn(8, WIDTH) for _ in range(30)]
    memory, seen = recorded(tmp_path / "run", batches)
    distinct = memory.layer("0").distinct
    assert distinct is not None
    assert distinct.rows == len(seen) == len({bytes(b) for b in bits(seen)})
    assert torch.equal(memory.layer("0").keys, seen)


def test_the_content_counts_not_the_example_id(tmp_path: Path) -> None:
    """Two ids with one image; one id with two images."""
    model = network()
    optimizer = sgd(model)
    image, other = torch.randn(2, WIDTH)
    with recording(model, optimizer, tmp_path / "run") as recorder:
        for ids, batch in (([0, 1], [image, image]), ([0, 1], [other, image])):
            recorder.tag(example=ids)
            model(torch.stack(batch)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    first = Memory.open(tmp_path / "run").layer("0")
    assert first.distinct is not None
    assert first.distinct.references.tolist() == [0, 0, 1, 0]
    assert torch.equal(first.keys, torch.stack([image, image, other, image]))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_in_sixteen_bits_the_stored_rows_are_compared(dtype: str, tmp_path: Path) -> None:
    data = torch.randn(23, WIDTH)
    memory, seen = recorded(tmp_path / "run", epochs(data, 4), dtype=dtype)
    first = memory.layer("0")
    assert torch.equal(first.keys, seen.to(getattr(torch, dtype)).float())
    assert first.distinct is not None
    assert first.distinct.rows == 23


def test_rows_that_sixteen_bits_cannot_hold_are_told_from_their_rounded_selves(
    tmp_path: Path,
) -> None:
    """A huge key turns its segment to float32: there the others are stored once more."""
    data = torch.randn(8, WIDTH)
    huge = torch.full((8, WIDTH), 1e6)
    batches = [data] * 60 + [huge, data] + [data] * 60
    memory, seen = recorded(tmp_path / "run", batches, dtype="float16")
    keys = memory.layer("0").keys
    assert torch.equal(keys[: 8 * 50], seen[: 8 * 50].half().float())
    assert float(keys.max()) == 1e6
    off = (keys - seen).abs() / seen.abs().amax(1, keepdim=True)
    assert float(off.max()) <= 2**-11
    assert memory.layer("0").distinct.rows <= 8 + 1 + 8  # type: ignore[union-attr]


def test_beyond_the_most_rows_they_are_stored_as_they_come(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recurring, "MOST", 200)
    batches = [torch.randn(8, WIDTH) for _ in range(60)]
    memory, seen = recorded(tmp_path / "run", batches)
    first = memory.layer("0")
    assert first.distinct is None
    assert torch.equal(first.keys, seen)


class Reused(nn.Module):
    """One layer fed with the input first, with what training computed afterwards."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, again: bool) -> Tensor:
        out: Tensor = self.layer(x)
        return self.layer(out) if again else out


def test_a_layer_fed_with_inputs_first_and_with_activations_later_is_whole(tmp_path: Path) -> None:
    model = Reused()
    optimizer = sgd(model)
    data, seen = torch.randn(8, WIDTH), []
    model.layer.register_forward_pre_hook(lambda m, a: seen.append(a[0].detach().clone()))
    with recording(model, optimizer, tmp_path / "run", segment_bytes=1 << 11):
        for step in range(20):
            model(data, step >= 10).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    first = Memory.open(tmp_path / "run").layer("layer")
    assert len(first.keys) == 8 * 30
    assert sorted(bits(first.keys)) == sorted(bits(torch.cat(seen)))
    assert verified(tmp_path / "run", model).passed


@pytest.mark.parametrize("stop", [7, 20, 33])
def test_a_resumed_memory_goes_on_with_the_same_rows(stop: int, tmp_path: Path) -> None:
    """Cut back amid a segment: rows that only the dropped steps brought are gone, and come back."""
    data = torch.randn(64, WIDTH)
    batches = epochs(data, 5)
    model, checkpoint, state = network(), {}, {}  # type: ignore[var-annotated]
    optimizer = sgd(model)
    with recording(model, optimizer, tmp_path / "run", segment_bytes=1 << 14) as recorder:
        for step, batch in enumerate(batches):
            if step == stop:
                checkpoint = {k: v.clone() for k, v in model.state_dict().items()}
                state = optimizer.state_dict()
                state = {
                    **state,
                    "state": {
                        k: {n: t.clone() for n, t in v.items()} for k, v in state["state"].items()
                    },
                }
            train(model, optimizer, [batch], [], recorder)
    model.load_state_dict(checkpoint)
    optimizer.load_state_dict(state)
    others = [torch.randn(8, WIDTH), *batches[stop:]]
    options: dict[str, Any] = {"segment_bytes": 1 << 14, "resume": True}
    with recording(model, optimizer, tmp_path / "run", **options) as recorder:
        assert recorder.steps == stop
        train(model, optimizer, others, [], recorder)
    first = Memory.open(tmp_path / "run").layer("0")
    assert torch.equal(first.keys, torch.cat([*batches[:stop], *others]))
    assert first.distinct is not None
    assert first.distinct.rows == 64 + 8
    assert verified(tmp_path / "run", model).passed


@settings(max_examples=60, deadline=None)
@given(
    width=st.integers(1, 5),
    kind=st.sampled_from([torch.float16, torch.bfloat16, torch.float32, torch.float64]),
    lengths=st.lists(st.integers(0, 40), min_size=1, max_size=8),
    values=st.integers(1, 3),
    seed=st.integers(0, 1 << 30),
)
def test_numbers_are_those_of_a_dictionary(
    width: int, kind: torch.dtype, lengths: list[int], values: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    index, known, stored = RowIndex(), {}, []  # type: ignore[var-annotated]
    for length in lengths:
        rows = torch.randint(0, values + 1, (length, width), generator=generator).to(kind)
        numbers, fresh = index.add(rows)
        expected = [known.setdefault(b, len(known)) for b in bits(rows)]
        assert numbers.tolist() == expected
        stored += [bits(rows)[i] for i in fresh.tolist()]
    assert stored == list(known)
    assert index.rows == len(known)


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, 8)
        self.block = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.first, self.head = nn.Parameter(torch.randn(WIDTH, 8)), nn.Linear(8, 4)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden: Tensor = self.head(self.block(self.embed(inputs) + inputs @ self.first))
        return hidden.sum(1)


@pytest.mark.parametrize("cast", [False, True])
def test_what_training_computes_does_not_go_through_the_index(cast: bool, tmp_path: Path) -> None:
    """However a layer is called: packed attention, a product of its own, under autocast."""
    model = Attending()
    optimizer = sgd(model)
    with recording(model, optimizer, tmp_path / "run"):
        for _ in range(3):
            with torch.autocast("cpu", torch.bfloat16, enabled=cast):
                loss = F.cross_entropy(model(torch.ones(5, 3, WIDTH)).float(), torch.arange(5) % 4)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    memory = Memory.open(tmp_path / "run")
    once = {name for name in memory.layers if memory.layer(name).distinct is not None}
    assert once == {"embed", "first"}
    assert {"block.self_attn.in_proj", "block.self_attn.out_proj"} < set(memory.layers)
    assert verified(memory, model).passed


# -- layers that are given the same input ----------------------------------------------------------


class Projections(nn.Module):
    """Query, key and value are made from one tensor that training computes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Linear(6, 16)
        self.q, self.k, self.v = nn.Linear(16, 4), nn.Linear(16, 4), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.body(x).tanh()
        return self.q(h) * self.k(h) + self.v(h)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_keys_of_layers_fed_the_same_tensor_are_stored_once(dtype: str, tmp_path: Path) -> None:
    model = Projections()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(1)
    fed: list[Tensor] = []
    model.q.register_forward_hook(lambda m, x, y: fed.append(x[0].detach().clone()))
    with record(model, tmp_path / "run", dtype=dtype):
        for _ in range(6):
            model(torch.randn(5, 6, generator=generator)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    memory = Memory.open(tmp_path / "run")
    expected = torch.cat(fed) if dtype == "float32" else torch.cat(fed).half().float()
    (segment,) = (s for s in memory.opened.segments if s.rows)
    assert segment.same_keys == {"k": "q", "v": "q"}
    dualform.compact(memory, tmp_path / "small", dtype="float16", layers=["k", "v"])
    for found in (memory, Memory.open(tmp_path / "small")):
        for name in {"q", "k", "v"} & set(found.layers):
            rows = torch.cat([b.keys for b in found.layer(name).blocks(7, error_signals=False)])
            assert torch.equal(rows, expected if found is memory else expected.half().float())
            assert torch.equal(found.layer(name).keys[3:9], rows[3:9])
    with record(model, tmp_path / "run", dtype=dtype, resume=True):
        model(torch.randn(5, 6)).sum().backward()
        optimizer.step()
    assert torch.equal(Memory.open(tmp_path / "run").layer("v").keys[:30], expected)
