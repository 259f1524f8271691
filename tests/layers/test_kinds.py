"""What a kind's methods say of patterns agrees with the weights and gradients themselves."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from dualform.errors import MemoryFileError, QueryError
from dualform.layers import Layer, of

LAYERS = {
    "linear": Layer("fc", "linear", "fc.weight", "fc.bias", 6, 4, (4, 6)),
    "transposed": Layer("w", "transposed", "w", None, 6, 4, (6, 4)),
    "embedding": Layer("e", "embedding", "e.weight", None, 9, 4, (9, 4)),
}


def made(kind: str, n: int = 20) -> tuple[Tensor, Tensor]:
    keys = torch.randn(n, 6).double()
    return torch.randint(0, 9, (n, 1)) if kind == "embedding" else keys, torch.randn(n, 4).double()


@pytest.mark.parametrize("kind", LAYERS)
def test_along_is_what_was_written_times_a_direction(kind: str) -> None:
    layer, (keys, signals) = LAYERS[kind], made(kind)
    wrote = of(kind).write(torch.zeros(layer.shape, dtype=torch.float64), keys, signals)
    v = torch.randn(layer.shape[1]).double()
    along = of(kind).along(layer, keys, signals, v)
    assert torch.allclose(along, wrote @ v)
    one_by_one = [
        of(kind).along(layer, k[None], s[None], v) for k, s in zip(keys, signals, strict=True)
    ]
    terms = torch.stack(one_by_one)
    assert torch.allclose(of(kind).sizes(layer, keys, signals, v), terms.square().sum(0).sqrt())
    unit = v / v.abs() / layer.shape[1] ** 0.5
    gross = of(kind).gross(keys, signals)
    assert float(of(kind).along(layer, keys, signals, unit).norm()) < 4 * gross
    assert torch.allclose(wrote, of(kind).gradient(layer, "weight", keys, signals, (20,)))


@pytest.mark.parametrize("kind", LAYERS)
def test_what_a_pattern_wrote_is_read_by_attention(kind: str) -> None:
    layer, (keys, values), (queries, _) = LAYERS[kind], made(kind), made(kind, 7)
    matrix = of(kind).write(torch.zeros(layer.shape, dtype=torch.float64), keys, values)
    weights = of(kind).attention(queries, keys)
    assert weights.shape == (7, 20)
    assert torch.allclose(of(kind).multiply(matrix, queries), weights @ values)


@pytest.mark.parametrize("kind", LAYERS)
def test_a_use_without_rows_writes_nothing(kind: str) -> None:
    layer, (keys, signals) = LAYERS[kind], made(kind, 0)
    v = torch.ones(layer.shape[1]).double()
    assert not of(kind).along(layer, keys, signals, v).any()
    assert of(kind).gross(keys, signals) == 0
    assert not of(kind).gradient(layer, "weight", keys, signals, (0,)).any()


@pytest.mark.parametrize("kind", ["linear", "transposed"])
def test_examples_are_sums_over_their_rows(kind: str) -> None:
    layer = LAYERS[kind]
    given, signal = torch.randn(3, 5, 6).double(), torch.randn(3, 5, 4).double()
    found = of(kind).examples(layer, given, signal)
    for b in range(len(given)):
        keys, signals = (t[b] for t in (given, signal))
        wrote = of(kind).write(torch.zeros(layer.shape, dtype=torch.float64), keys, signals)
        assert torch.allclose(found["weight"][b], wrote)
        assert torch.allclose(found["bias"][b], signals.sum(0))
        assert torch.allclose(found["keys"][b], keys.sum(0))


def test_a_norm_has_no_attention_and_says_so() -> None:
    norm = of("layer_norm")
    for asked in (
        lambda: norm.attention(torch.ones(1, 2), torch.ones(1, 2)),
        lambda: norm.gross(torch.ones(1, 2), torch.ones(1, 2)),
        lambda: of("embedding").examples(LAYERS["embedding"], torch.ones(2), torch.ones(2, 4)),
    ):
        with pytest.raises(QueryError, match="was asked for what only"):
            asked()


def test_rows_of_a_packed_layer() -> None:
    layer = Layer("a.in_proj_k", "linear", "a.w", "a.b", 6, 4, (4, 6), 4, 8)
    assert layer.parameters == ("a.w", "a.b")
    assert layer.rows_of("a.w") == slice(4, 8)
    assert layer.rows_of("a.b") == slice(8, 12)
    with pytest.raises(KeyError, match="no parameter 'b'"):
        layer.rows_of("b")


def test_a_layer_goes_to_a_file_and_back() -> None:
    for layer in [
        *LAYERS.values(),
        Layer("n", "layer_norm", "n.weight", None, 1, 5, (5,), details=(("eps", 1e-5),)),
    ]:
        found = Layer.from_json(layer.to_json())
        assert found == layer
        assert hash(found) == hash(layer)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("name", 3), ("bias", 1), ("shape", []), ("shape", [4, -1]), ("shape", "46"),
        ("shape", [1.5]), ("in_features", 6.0), ("in_features", True), ("offset", -1),
        ("offset", None), ("details", []), ("details", {"a": [1]}), ("weight", ...),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused(field: str, value: Any) -> None:
    found = LAYERS["linear"].to_json() | {field: value}
    with pytest.raises(MemoryFileError, match=f"its {field!r} is missing or not what"):
        Layer.from_json(found)
    with pytest.raises(MemoryFileError, match="its 'name' is missing"):
        Layer.from_json([found])
    with pytest.raises(MemoryFileError, match="is missing"):
        Layer.from_json({k: v for k, v in found.items() if k != field})
