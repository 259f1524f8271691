"""Patterns stored in 16 bits: what is kept of them, what never happens to them, what audits see."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dualform as df
from dualform.layers import Layer
from dualform.recording.regions import NarrowCopies, Region

LAYER = Layer("x", "linear", "x.weight", None, 1, 1)


def stored(
    rows: Tensor, dtype: torch.dtype, kind: str = "keys", copies: NarrowCopies | None = None
) -> tuple[Tensor, Tensor | None]:
    """What would be written: rows, and scales."""
    region = Region(rows.shape[1], rows.dtype, 1, dtype)
    for part in rows.split(7):
        region.append(part)
    written, scales = (copies or NarrowCopies()).of(kind, LAYER, region)
    return written.filled.clone(), None if scales is None else scales.filled[:, 0].clone()


def off(rows: Tensor, kept: Tensor) -> Tensor:
    """The largest difference in each row, relative to the row's largest entry."""
    sizes = rows.double().abs().amax(1).clamp(min=1e-300)
    return (rows.double() - kept.double()).abs().amax(1) / sizes


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_rows_are_rounded_once(dtype: torch.dtype) -> None:
    rows = torch.randn(100, 30)
    kept, _ = stored(rows, dtype)
    assert kept.dtype == dtype
    assert torch.equal(kept, rows.to(dtype))


@pytest.mark.parametrize("wide", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("dtype", "odd"),
    [
        (torch.float16, 65520.0),
        (torch.float16, -1e30),
        (torch.float16, 1e-9),
        (torch.bfloat16, 3.4e38),
    ],
)
def test_rows_that_16_bits_cannot_hold_are_kept_as_they_are(
    dtype: torch.dtype, odd: float, wide: torch.dtype
) -> None:
    rows, copies = torch.randn(20, 3, dtype=wide), NarrowCopies()
    rows[11] = torch.tensor([odd, 0.0, odd / 2])
    kept, _ = stored(rows, dtype, copies=copies)
    assert kept.dtype == wide
    assert torch.equal(kept, rows)
    again, _ = stored(rows[:5], dtype, copies=copies)
    assert again.dtype == dtype, "the next segment tries again"
    assert torch.equal(again, rows[:5].to(dtype))


def test_large_rows_are_rounded_as_small_ones_are() -> None:
    """More rows than are rounded at a time, and memory that earlier segments have used."""
    copies = NarrowCopies()
    for count in (9, 400, 3, 1000):
        rows = torch.randn(count, 700)
        kept, scales = stored(rows, torch.float16, "error_signals", copies)
        assert scales is not None
        assert torch.equal(scales, rows.abs().amax(1))
        assert torch.equal(kept, (rows / scales[:, None]).half())


def test_memory_of_layers_that_are_gone_is_let_go() -> None:
    copies = NarrowCopies()
    stored(torch.randn(5, 3), torch.float16, copies=copies)
    copies.next_segment()
    assert copies._copies
    copies.next_segment()
    assert not copies._copies


def test_zeros_and_the_largest_number_need_no_more_than_16_bits() -> None:
    rows = torch.tensor([[0.0, 0.0], [65504.0, -65519.0], [6.2e-5, 0.0]])
    kept, _ = stored(rows, torch.float16)
    assert kept.dtype == torch.float16
    assert kept.isfinite().all()
    assert float(off(rows, kept).max()) <= 2**-11


def test_what_is_not_finite_in_training_stays_so_and_widens_nothing() -> None:
    rows = torch.tensor([[1.0, float("inf")], [float("nan"), 2.0], [1e-12, -3e-12]])
    for dtype, kind in ((torch.bfloat16, "keys"), (torch.float16, "error_signals")):
        kept, scales = stored(rows, dtype, kind)
        widened = kept.float() if scales is None else kept.float() * scales[:, None]
        assert kept.itemsize == 2
        assert torch.equal(widened.isnan(), rows.isnan())
        assert torch.equal(widened.isinf(), rows.isinf())
        assert float(off(rows[2:], widened[2:]).max()) < 4e-3
        assert float(widened[0, 0]) == pytest.approx(1.0)


@pytest.mark.parametrize("size", [1e-42, 1e-30, 1e-9, 1.0, 1e30])
def test_scaled_rows_keep_three_digits_whatever_their_size(size: float) -> None:
    rows = torch.randn(50, 40) * size
    rows[3], rows[4] = 0.0, rows[4] * 1e-3
    kept, scales = stored(rows, torch.float16, "error_signals")
    assert scales is not None
    assert scales.shape == (50,)
    assert torch.equal(scales[:3], rows.abs().amax(1)[:3])
    worst = off(rows, kept.double() * scales.double()[:, None])
    assert float(worst.max()) <= 5e-4


def test_scaled_rows_beyond_float32_are_kept_in_float64() -> None:
    for odd in (1e-60, 1e200):
        rows = torch.randn(8, 3, dtype=torch.float64)
        rows[5] *= odd
        kept, scales = stored(rows, torch.float16, "error_signals")
        assert scales is None
        assert torch.equal(kept, rows)


def net(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 9), nn.ReLU(), nn.Linear(9, 4)).to(dtype)


def train(path: Path, dtype: str, *, large_at: int = -1, steps: int = 12, **options: Any) -> Any:
    """A model, and every key and error signal of its two layers by hooks of the test's own."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-12 if large_at >= 0 else 0.1)
    seen: dict[str, list[Tensor]] = {"0": [], "2": [], "0δ": [], "2δ": []}

    def note(name: str) -> Any:
        def hook(module: nn.Module, args: Any, output: Tensor) -> None:
            seen[name].append(args[0].detach().clone())
            output.register_hook(lambda grad: seen[name + "δ"].append(grad.clone()))

        return hook

    for name in ("0", "2"):
        model.get_submodule(name).register_forward_hook(note(name))
    generator = torch.Generator().manual_seed(1)
    with df.record(model, optimizer, path, dtype=dtype, **options):
        for step in range(steps):
            x = torch.randn(5, 6, generator=generator)
            x = x * 1e6 if step == large_at else x
            (1e-6 * model(x).square().mean()).backward()
            optimizer.step()
            optimizer.zero_grad()
    return model, {name: torch.cat(rows) for name, rows in seen.items()}


@pytest.mark.parametrize(("dtype", "worst"), [("float16", 5e-4), ("bfloat16", 4e-3)])
def test_a_memory_in_16_bits_hands_out_what_training_saw_up_to_rounding(
    tmp_path: Path, dtype: str, worst: float
) -> None:
    _, seen = train(tmp_path, dtype)
    memory = df.Memory.open(tmp_path)
    memory.check()
    for name in memory.layers:
        layer = memory.layer(name)
        assert (layer.dtype, layer.stored) == (torch.float32, getattr(torch, dtype))
        assert dtype in repr(layer)
        for whole, rows in ((layer.keys, seen[name]), (layer.error_signals, seen[name + "δ"])):
            assert whole.dtype == torch.float32
            assert float(off(rows, whole).max()) <= worst
            assert not torch.equal(whole, rows), "nothing was rounded"
        blocks = list(layer.blocks(7))
        assert torch.equal(torch.cat([b.keys for b in blocks if b.keys is not None]), layer.keys)


def test_a_segment_with_an_overflow_is_wide_and_its_neighbours_are_not(tmp_path: Path) -> None:
    _, seen = train(tmp_path, "float16", large_at=6, segment_bytes=1)
    memory = df.Memory.open(tmp_path)
    dtypes = [s.file.tensor("keys/0").dtype for s in memory._segments]
    assert dtypes == [torch.float32 if i == 6 else torch.float16 for i in range(12)]
    layer = memory.layer("0")
    assert torch.equal(layer.keys[30:35], seen["0"][30:35])
    assert float(off(seen["0"], layer.keys).max()) <= 5e-4
    certificate = df.DualForm(net(), memory).verify()
    assert not certificate.failures


def test_training_in_16_bits_is_stored_as_it_is(tmp_path: Path) -> None:
    model = net(torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(5, 6).bfloat16()
    with df.record(model, optimizer, tmp_path, dtype="float16"):
        model(x).square().mean().backward()
        optimizer.step()
    layer = df.Memory.open(tmp_path).layer("0")
    assert layer.stored == layer.dtype == torch.bfloat16
    assert torch.equal(layer.keys, x)


def test_an_edited_gradient_is_found_as_well_as_ever(tmp_path: Path) -> None:
    """The audit looks at the true values, not at the rounded copies."""
    for dtype in ("float32", "float16", "bfloat16"):
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model_is_edited = pytest.raises(df.AuditError, match="not in the recorded patterns")
        with (
            model_is_edited,
            df.record(model, optimizer, tmp_path / dtype, dtype=dtype),
        ):
            model(torch.randn(5, 6)).square().mean().backward()
            gradient = model.get_parameter("0.weight").grad
            assert gradient is not None
            gradient[::2] *= 1 + 3e-3  # less than bfloat16 can tell, and far above rounding
            optimizer.step()


def test_training_is_the_same_whatever_patterns_are_stored_in(tmp_path: Path) -> None:
    models = [train(tmp_path / d, d)[0] for d in ("float32", "float16", "bfloat16")]
    for model in models[1:]:
        for one, other in zip(models[0].parameters(), model.parameters(), strict=True):
            assert torch.equal(one, other)


def test_an_unknown_dtype_is_refused(tmp_path: Path) -> None:
    model = net()
    with pytest.raises(df.RecordingError, match="float16"):
        df.record(model, torch.optim.SGD(model.parameters(), lr=1), tmp_path, dtype="int8")
