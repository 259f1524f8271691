"""A kind of layer that dualform does not know, in some thirty lines: a 1×1 convolution."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dualform.certificate.checks import verify
from dualform.certificate.replay import at
from dualform.errors import MemoryFileError
from dualform.layers import Layer, find_layers, kinds, linear, of, register
from dualform.memory import Memory
from dualform.recording import record


class PixelKind(linear.LinearKind):
    """W[:, :, 0, 0] times the channels of every pixel."""

    name = "pixels"

    def recognises(self, module: nn.Module) -> bool:
        facts = ("kernel_size", "stride", "padding", "dilation", "groups", "padding_mode")
        usual = [(1, 1), (1, 1), (0, 0), (1, 1), 1, "zeros"]
        is_plain = kinds.is_plain(module, nn.Conv2d)
        return is_plain and [getattr(module, fact) for fact in facts] == usual

    def keys(self, given: Tensor) -> Tensor:
        return given.movedim(1, -1).reshape(-1, given.shape[1])

    error_signals = keys

    def leading(self, given: Tensor) -> tuple[int, ...]:
        return (given.shape[0], *given.shape[2:])

    def layout(self, given: Tensor, signal: Tensor) -> int:
        return (not given.is_contiguous()) + 2 * (not signal.is_contiguous())  # channels last

    def gradient(
        self, layer: Layer, role: str, keys: Tensor, signals: Tensor, shape: Any, layout: int = 0
    ) -> Tensor:
        x, signal = (t.view(*shape, -1).movedim(-1, 1) for t in (keys, signals))
        x = x if layout & 1 else x.contiguous()
        signal = signal if layout & 2 else signal.contiguous()
        weight, plain = keys.new_empty(layer.shape), ([1, 1], [0, 0], [1, 1], False, [0, 0], 1)
        grads = torch.ops.aten.convolution_backward(
            signal, x, weight, [layer.out_features], *plain, [False, True, True]
        )
        return grads[1 if role == "weight" else 2]


@pytest.fixture(autouse=True)
def pixels() -> Iterator[PixelKind]:
    kind = PixelKind()
    register(kind)
    yield kind
    del kinds._kinds["pixels"]


def network(dtype: torch.dtype) -> nn.Sequential:
    wide = nn.Conv2d(6, 6, 3, padding=1)
    return nn.Sequential(
        nn.Conv2d(3, 6, 1), nn.ReLU(inplace=True), wide, nn.Conv2d(6, 4, 1, bias=False)
    ).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_it_is_captured_and_its_gradient_has_torchs_bits(
    watch: Any, dtype: torch.dtype, memory_format: torch.memory_format
) -> None:
    model = network(dtype)
    x = torch.randn(5, 3, 8, 7, dtype=dtype).to(memory_format=memory_format)
    with watch(model) as seen:
        model(x).square().mean().backward()
    assert not seen.values
    assert [use.layer.name for use in seen.uses] == ["3", "0"]
    assert {use.shape for use in seen.uses} == {(5, 8, 7)}
    assert torch.equal(seen.of("0")[0].keys.view(5, 8, 7, 3), x.permute(0, 2, 3, 1))
    for name, gradient in seen.gradients().items():
        assert torch.equal(gradient, model.get_parameter(name).grad), name


def test_what_patterns_write_sums_to_the_gradient(watch: Any, rebuilt: Any) -> None:
    model = network(torch.float64)
    with watch(model) as seen:
        model(torch.randn(5, 3, 8, 7, dtype=torch.float64)).square().mean().backward()
    shapes = {n: p.shape for n, p in model.named_parameters() if not n.startswith("2")}
    for name, gradient in rebuilt(seen.uses, shapes).items():
        assert torch.allclose(gradient, model.get_parameter(name).grad, atol=1e-14)
    use = seen.of("0")[0]
    kind, weight = of("pixels"), model[0].weight
    v = torch.randn(3, dtype=torch.float64)
    along = kind.along(use.layer, use.keys, use.signals, v)
    assert torch.allclose(along, weight.grad.flatten(1) @ v)
    assert kind.gross(use.keys, use.signals) > float(along.norm()) / 100
    outputs = kind.multiply(weight.detach(), use.keys) + model[0].bias
    assert torch.allclose(
        outputs.view(5, 8, 7, 6).movedim(-1, 1), model[0](use.keys.view(5, 8, 7, 3).movedim(-1, 1))
    )
    assert torch.allclose(kind.attention(use.keys[:2], use.keys), use.keys[:2] @ use.keys.T)


def test_by_examples_it_is_handed_on_as_it_was_given(watch: Any) -> None:
    model = network(torch.float64)
    with watch(model, by_examples=lambda layer: layer.name == "0") as seen:
        model(torch.randn(5, 3, 8, 7, dtype=torch.float64)).square().mean().backward()
    use = seen.of("0")[0]
    assert use.keys.shape == (5, 3, 8, 7)
    assert use.signals.shape == (5, 6, 8, 7)
    wrote = of("pixels").examples(use.layer, use.keys, use.signals)
    assert torch.allclose(wrote["weight"].sum(0), model[0].weight.grad)
    assert torch.allclose(wrote["bias"].sum(0), model[0].bias.grad)
    assert wrote["keys"].shape == (5, 3)


def test_it_is_found_described_and_read_back() -> None:
    model = network(torch.float32)
    layers = list(find_layers(model))
    assert [(layer.name, layer.kind, layer.shape) for layer in layers] == [
        ("0", "pixels", (6, 3, 1, 1)),
        ("3", "pixels", (4, 6, 1, 1)),
    ]
    assert Layer.from_json(layers[0].to_json()) == layers[0]


def test_a_kind_that_is_not_registered_is_refused_by_name() -> None:
    with pytest.raises(
        MemoryFileError, match=r"kind 'fourier' was found; known are embedding, linear.*Register"
    ):
        of("fourier")


@pytest.mark.parametrize("keep", ["patterns", "examples"])
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_it_records_certifies_and_is_rebuilt_at_every_step(
    tmp_path: Path, keep: str, memory_format: torch.memory_format
) -> None:
    model, states = network(torch.float32), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    with record(model, tmp_path / "run", keep=keep) as recorder:
        for step in range(12):
            recorder.tag(example=[5 * step + i for i in range(5)])
            states.append({name: p.detach().clone() for name, p in model.named_parameters()})
            x = torch.randn(5, 3, 8, 7).to(memory_format=memory_format)
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    states.append(dict(model.named_parameters()))
    memory = Memory.open(tmp_path / "run")
    layer = memory.layer("0")
    assert (layer.kind, layer.rows) == ("pixels", 12 * 5 * (56 if keep == "patterns" else 1))
    found = verify(memory, model, every_step=True)
    assert found.passed, repr(found)
    for name in ("0.weight", "0.bias", "3.weight"):
        if keep == "patterns":
            assert found.verdicts[name].verdict == "bit for bit"
        for step in (0, 1, 7, 12):
            near = {"rtol": 0, "atol": 0 if keep == "patterns" else 1e-6}
            torch.testing.assert_close(at(memory, name, step), states[step][name].detach(), **near)
