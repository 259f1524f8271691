"""Each input chooses how much of the training to use; the same by brute force."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import dualform as df
from dualform.attention import compiled
from dualform.attention import weights as weights_room

EXACT = 1e-12


def cosines(run: Any, x: torch.Tensor, k: int) -> np.ndarray[Any, Any]:
    layer = run.memory.layer("fc1")
    keys = layer.keys / layer.keys.norm(dim=1, keepdim=True)
    alike = (x / x.norm(dim=1, keepdim=True)) @ keys.T
    tasks = layer.patterns["task"]
    return np.stack(
        [
            np.sort(alike.numpy()[:, tasks == task], axis=1)[:, -k:].mean(1)
            for task in ("first", "second")
        ],
        axis=1,
    )


@pytest.mark.parametrize("few", [8, 0])
@pytest.mark.parametrize("k", [1, 10, 500])
def test_an_input_goes_to_the_phase_whose_keys_it_is_most_like(
    run: Any, monkeypatch: pytest.MonkeyPatch, few: int, k: int
) -> None:
    monkeypatch.setattr(weights_room, "FEW", few)
    monkeypatch.setattr(compiled, "WORTH", 1 << 62)
    x = run.inputs[:7]
    routed = run.dual.routed(by="task", k=k)
    assert routed.phases == ("first", "second")
    expected = cosines(run, x, k)
    table = routed.routes(x)
    found = np.stack([table["cosine first"], table["cosine second"]], axis=1)
    assert np.abs(found - expected).max() < EXACT
    assert table["task"].tolist() == [routed.phases[i] for i in expected.argmax(1)]


def test_what_later_phases_wrote_is_left_out_input_by_input(run: Any) -> None:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(60, 6, generator=generator, dtype=torch.float64)
    routed = run.dual.routed(by="task")
    task = routed.routes(x)["task"]
    assert set(task.tolist()) == {"first", "second"}
    whole, earlier = run.dual(x), run.dual.without(task="second")(x)
    output = routed(x)
    for i in range(len(x)):
        expected = whole[i] if task[i] == "second" else earlier[i]
        assert float((output[i] - expected).abs().max()) < EXACT
    assert "not retraining" in repr(routed)


def test_a_query_of_zeros_is_like_nothing_and_goes_to_the_earliest(run: Any) -> None:
    x = torch.zeros(1, 6, dtype=torch.float64)
    assert run.dual.routed(by="task").routes(x)["task"].tolist() == ["first"]


def test_in_a_view_only_the_phases_it_knows_count(run: Any) -> None:
    routed = run.dual.at(10).routed(by="task")
    assert routed.phases == ("first",)
    assert torch.equal(routed(run.inputs[:3]), run.dual.at(10)(run.inputs[:3]))


def test_positions_of_an_input_decide_together(train: Any) -> None:
    run = train(shape=(3, 6), steps=8)
    routed = run.dual.routed(by="task", k=2)
    assert len(routed.routes(run.inputs[:5])) == 5
    assert routed(run.inputs[:5]).shape == (5, 3, 4)


def test_what_cannot_be_routed_is_refused(run: Any, tmp_path: Any) -> None:
    with pytest.raises(df.QueryError, match="no column 'source'"):
        run.dual.routed(by="source")
    with pytest.raises(df.QueryError, match="no layer 'fc9'"):
        run.dual.routed(by="task", layer="fc9")
    with pytest.raises(df.QueryError, match="without a model"):
        df.DualForm(None, run.path).routed(by="task")(run.inputs[:1])
    with pytest.raises(df.QueryError, match="no pattern in this view"):
        run.dual.at(0).routed(by="task")
    model = nn.Sequential(nn.Linear(4, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with df.record(model, optimizer, tmp_path / "gaps") as recorder:
        for tags in ({}, {"task": "one"}):
            recorder.tag(example=[0, 1], **tags)
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
    with pytest.raises(df.QueryError, match="have no 'task'"):
        df.DualForm(model, tmp_path / "gaps").routed(by="task")
