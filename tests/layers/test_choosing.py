"""keep=: which word each layer gets, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from dualform.errors import RecordingError
from dualform.layers import Keep, Layer, find_layers, possible_names


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm, self.wide = nn.Embedding(9, 8), nn.LayerNorm(8), nn.LayerNorm(5000)
        self.fc1, self.fc2 = nn.Linear(8, 8), nn.Linear(8, 3)


LAYERS = {layer.name: layer for layer in find_layers(Net())}


def words(keep: Any) -> dict[str, str]:
    chosen = Keep(keep)
    chosen.check(LAYERS.values())
    return {name: chosen.word(layer) for name, layer in LAYERS.items()}


@pytest.mark.parametrize(
    ("keep", "expected"),
    [
        ("auto", "patterns examples values patterns patterns"),
        ("patterns", "patterns examples values patterns patterns"),
        ("keys", "keys values values keys keys"),
        ("examples", "patterns examples examples examples examples"),
        ("values", "values values values values values"),
        ({"fc2": "keys"}, "patterns examples values patterns keys"),
        ({"fc1": "patterns", "fc*": "keys", "*": "values"}, "values values values patterns keys"),
        ({"fc?": "examples", "*": "auto"}, "patterns examples values examples examples"),
        ({"[en]*": "keys"}, "keys values values patterns patterns"),
        ({}, "patterns examples values patterns patterns"),
    ],
)
def test_the_first_pattern_that_fits_gives_the_word(keep: Any, expected: str) -> None:
    assert (
        " ".join(words(keep)[name] for name in ("embed", "norm", "wide", "fc1", "fc2")) == expected
    )


@pytest.mark.parametrize(
    ("keep", "message"),
    [
        ("smallest", r"'smallest' was given, which comes later"),
        ({"fc1": "smallest"}, r'"auto" is the default'),
        ("pattern", r"'pattern'.* expected .* \"patterns\", \"keys\", \"examples\", \"values\""),
        ({"fc1": "all"}, r"\{'fc1': 'all'\} was given"),
        ({3: "keys"}, r"\{3: 'keys'\} was given"),
        (["fc1"], r"expected one of .* or a mapping such as"),
        (None, r"keep=None was given"),
        (
            {"fc3": "keys"},
            r"'fc3'.* matches no layer; this model's layers are embed, norm, wide, fc1",
        ),
        ({"FC1": "keys"}, r"matches no layer"),
        ({"norm": "patterns"}, r"'norm' is of kind 'layer_norm'; expected one of \"examples\""),
        ({"embed": "examples"}, r"'embed' is of kind 'embedding'"),
    ],
)
def test_what_is_refused(keep: Any, message: str) -> None:
    with pytest.raises(RecordingError, match=message):
        words(keep)


def test_a_layer_that_may_come_up_later_may_be_named() -> None:
    model = nn.ModuleDict({"attn": nn.MultiheadAttention(8, 2), "fc": nn.Linear(8, 8)})
    model.own = nn.Parameter(model.fc.weight.detach().clone())
    names = possible_names(model)
    assert {"attn.in_proj", "attn.in_proj_kv", "own"} <= set(names)
    keep = Keep({"attn.in_proj*": "keys", "own": "values"})
    keep.check(find_layers(model), names)
    late = Layer("attn.in_proj_q", "linear", "attn.in_proj_weight", None, 8, 8, (8, 8))
    assert keep.word(late) == "keys"
    with pytest.raises(RecordingError, match=r"beside them there are attn.in_proj"):
        Keep({"attm.*": "keys"}).check(find_layers(model), names)
