"""Each private name of torch may be missing: the room works without it, on the safe side."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from tests.layers.conftest import global_hooks
from torch import Tensor, nn
from torch.autograd import Variable
from torch.nn.modules import module as torch_module
from torch.utils.checkpoint import checkpoint

from dualform.layers import capture, torch_internals

NAMES = {
    "running_pass": (torch._C, "_current_graph_task_id"),
    "keeps_graph": (torch._C._autograd, "_get_current_graph_task_keep_graph"),
    "hooks_on_saving": (torch._C._autograd, "_top_saved_tensors_default_hooks"),
    "functorch_level": (torch._C._functorch, "maybe_current_level"),
    "_will_execute": (torch._C, "_will_engine_execute_node"),
}
FALLBACK = {
    "running_pass": ((), -1),
    "keeps_graph": ((), True),
    "hooks_on_saving": ((True,), ()),
    "functorch_level": ((), None),
}


@pytest.fixture
def reloaded(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Take names away, and look torch's names up once more; put all back afterwards."""
    before = {module: dict(vars(module)) for module in (torch_internals, capture)}

    def without(*names: str) -> ModuleType:
        for name in names:
            monkeypatch.delattr(*NAMES[name])
        importlib.reload(torch_internals)
        monkeypatch.undo()
        for name in ("running_pass", "keeps_graph", "hooks_on_saving", "will_run"):
            setattr(capture, name, getattr(torch_internals, name))
        return torch_internals

    yield without
    for module, values in before.items():
        vars(module).update(values)


@pytest.mark.parametrize("name", FALLBACK)
def test_without_a_name_its_fallback_answers(reloaded: Any, name: str) -> None:
    given, expected = FALLBACK[name]
    assert getattr(reloaded(name), name)(*given) == expected


def test_with_them_they_are_torchs_own() -> None:
    for name, (owner, private) in NAMES.items():
        assert getattr(torch_internals, name) == getattr(owner, private)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.own = nn.Linear(6, 6), nn.Parameter(torch.randn(6, 6))
        self.attn = nn.MultiheadAttention(6, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        x = checkpoint(self.fc, x, use_reentrant=False)
        return self.attn(x, x, x)[0] @ self.own  # type: ignore[no-any-return]


def trained(watch: Any, *, rows: int) -> Any:
    """Patterns of two passes: gradients are what they sum to."""
    model = Net().double()
    with watch(model) as seen:
        for _ in range(2):
            model(torch.randn(4, 3, 6, dtype=torch.float64)).square().sum().backward()
    assert len(seen.uses) == rows
    return seen


@pytest.mark.parametrize("name", [n for n in NAMES if n != "running_pass"])
def test_recording_goes_on_without_a_name(
    reloaded: Any, watch: Any, rebuilt: Any, name: str
) -> None:
    reloaded(name)
    seen = trained(watch, rows=8)
    parameters = dict(seen.model.named_parameters())
    used = {n for use in seen.uses for n in use.layer.parameters}
    found = rebuilt(seen.uses, {n: tuple(parameters[n].shape) for n in used})
    assert used == set(parameters)
    for n, gradient in found.items():
        assert torch.allclose(gradient, parameters[n].grad)


def test_where_nothing_saved_can_be_read_weights_past_modules_are_values(
    watch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_internals, "saved_input", lambda node, name: None)
    model = Net().double()
    with watch(model) as seen:
        model(torch.randn(4, 3, 6, dtype=torch.float64)).square().sum().backward()
    assert seen.names == {"fc"}
    assert set(seen.values) >= {"own", "attn.in_proj_weight", "attn.out_proj.weight"}


def test_facts_that_nodes_do_not_tell_have_fallbacks() -> None:
    x = torch.randn(3, 3, requires_grad=True)
    node = (x @ x).grad_fn
    assert torch_internals.saved_input(node, "nothing") is None
    assert torch_internals.fact_of(node, "nothing", 7) == 7
    assert torch_internals.shape_of_output(node) == (3, 3)
    assert torch_internals.shape_of_output(object()) is None  # type: ignore[arg-type]
    assert torch_internals.sequence_number(object()) == 0


def test_what_a_checkpoint_has_promised_is_read_with_torchs_names_or_not_at_all() -> None:
    weight = torch.randn(3, 3, requires_grad=True)
    y = checkpoint(lambda x: x @ weight, torch.randn(2, 3), use_reentrant=False)
    assert callable(torch_internals.saved_input(y.grad_fn, "self"))


def test_the_end_of_a_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[bool] = []
    x = torch.randn(3, requires_grad=True)
    y = x * 2
    y.register_hook(
        lambda g: ended.append(torch_internals.at_end_of_pass(lambda: ended.append(True)))
    )
    y.sum().backward()
    assert ended == [True, True]
    monkeypatch.setattr(Variable, "_execution_engine", None)
    assert not torch_internals.at_end_of_pass(lambda: None)


def test_versions_of_tensors_that_torch_does_not_count() -> None:
    x = torch.zeros(2)
    x += 1
    assert torch_internals.version_of(x) == 1
    with torch.inference_mode():
        assert torch_internals.version_of(torch.zeros(2)) == -1


def test_global_hooks_are_taken_away_even_where_torch_has_no_such_tables(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = global_hooks()
    handle = torch_module.register_module_forward_hook(lambda *a: None, always_call=True)
    monkeypatch.delattr(torch_module, "_global_forward_hooks_with_kwargs")
    torch_internals.take_away(handle)
    monkeypatch.undo()
    assert global_hooks() == before
