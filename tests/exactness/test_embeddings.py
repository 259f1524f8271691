"""Token by token: look-ups as patterns, tied to a linear layer or not, rebuilt and attended to.

The key of a look-up is a single one among zeros, and never written out: the tests write it out, and
compare.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_
from torch.optim import SGD

import dualform

STEPS = 6
TOKENS, WIDTH = 11, 6
RULE = {"lr": 0.1, "momentum": 0.9, "dampening": 0.3, "weight_decay": 0.02}

both_dtypes = pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32], ids=["float64", "float32"]
)


class Words(nn.Module):
    """An embedding, a body and a head; the head's weight may be the embedding's."""

    def __init__(self, tied: bool = False, tokens: int = TOKENS, **options: Any) -> None:
        super().__init__()
        self.embedding = nn.Embedding(tokens, WIDTH, **options)
        self.body, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, tokens)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(torch.tanh(self.body(self.embedding(tokens))))


class TiedByFunction(nn.Module):
    """Used as a product where it is an embedding, or looked up where it is a linear layer's."""

    def __init__(self, of_embedding: bool) -> None:
        super().__init__()
        self.of_embedding = of_embedding
        self.words = nn.Embedding(TOKENS, WIDTH) if of_embedding else nn.Linear(WIDTH, TOKENS)
        self.body = nn.Linear(WIDTH, WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        if self.of_embedding:
            return F.linear(torch.tanh(self.body(self.words(tokens))), self.words.weight)
        return self.words(torch.tanh(self.body(F.embedding(tokens, self.words.weight, 3))))


class Parts(nn.Module):
    """Some rows of a bare parameter are looked up, the same ones and others in another way."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Parameter(torch.randn(20, WIDTH) / 3), nn.Linear(WIDTH, TOKENS)

    def forward(self, tokens: Tensor) -> Tensor:
        both = F.embedding(tokens, self.table[:TOKENS]) + F.embedding(tokens // 2, self.table[5:])
        return self.head(both + (both @ self.table[:WIDTH].T).sin())


CASES: dict[str, Callable[[], nn.Module]] = {
    "an embedding": Words,
    "an embedding with padding": lambda: Words(padding_idx=2),
    "an embedding of two tokens": lambda: Words(tokens=2),
    "tied": lambda: Words(tied=True),
    "tied, with padding": lambda: Words(tied=True, padding_idx=-1),
    "a product with an embedding": lambda: TiedByFunction(of_embedding=True),
    "a look-up in a linear layer": lambda: TiedByFunction(of_embedding=False),
    "rows of a parameter": Parts,
}


def batch(model: nn.Module, generator: torch.Generator) -> Tensor:
    tokens = model.embedding.num_embeddings if isinstance(model, Words) else TOKENS
    return torch.randint(0, tokens, (4, 5), generator=generator)


def loss_of(model: nn.Module, generator: torch.Generator) -> Tensor:
    tokens = batch(model, generator)
    return F.cross_entropy(model(tokens.int()).flatten(0, 1), tokens.flip(1).flatten())


def seeded(build: Callable[[], nn.Module], dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(5)
    return build().to(dtype)


def step(run: Any, optimizer: SGD, clip: float = 0.5) -> None:
    run.loss().backward()
    clip_grad_norm_(run.model.parameters(), clip)
    optimizer.step()
    optimizer.zero_grad()
    run.keep()


def train(run: Any, *, record: bool = True) -> None:
    optimizer = SGD(run.model.parameters(), **RULE)
    if not record:
        run.kept = {0: run.weights()}
        for _ in range(STEPS):
            step(run, optimizer)
        return
    with run.recording(optimizer) as recorder:
        for number in range(STEPS):
            recorder.tag(example=[4 * number + i for i in range(4)], half=number // 3)
            step(run, optimizer)


def one_hot(layer: dualform.LayerMemory) -> Tensor:
    return F.one_hot(layer.keys[:, 0], layer.in_features).double()


@both_dtypes
@pytest.mark.parametrize("name", CASES)
def test_every_look_up_has_patterns_and_is_rebuilt(
    name: str, dtype: torch.dtype, new_run: Any, certify: Any
) -> None:
    run = new_run(seeded(CASES[name], dtype), loss_of, dtype)
    train(run)
    memory = certify(run)
    assert {p.keep for p in memory.parameters.values()} == {"patterns"}
    assert any(memory.layer(layer).kind == "embedding" for layer in memory.layers)
    tokens = batch(run.model, torch.Generator().manual_seed(1))
    dual = dualform.DualForm(run.model, memory)
    verification = dual.verify(tokens)
    assert verification.passed, repr(verification)
    off = (dual(tokens, by="patterns") - run.model(tokens).detach()).abs().max()
    assert float(off) <= (1e-12 if dtype == torch.float64 else 1e-4)
    unrecorded = new_run(seeded(CASES[name], dtype), loss_of, dtype)
    train(unrecorded, record=False)
    for parameter, weight in unrecorded.weights().items():
        assert torch.equal(weight, run.kept[STEPS][parameter])


@pytest.mark.parametrize("name", CASES)
def test_masks_take_away_what_look_ups_wrote(name: str, new_run: Any, certify: Any) -> None:
    run = new_run(seeded(CASES[name]), loss_of, torch.float64)
    train(run)
    memory = certify(run)
    dual = dualform.DualForm(run.model, memory)
    views = [dual, dual.without(), dual.without(half=1), dual.only(half=1)]
    whole, nothing, without, only = (view.weights(torch.float64) for view in views)
    for parameter, weight in whole.items():
        off = without[parameter] + only[parameter] - weight - nothing[parameter]
        assert float(off.abs().max()) <= 1e-12


def test_the_layers_are_named_after_what_they_are(new_run: Any) -> None:
    expected = {
        "an embedding": {"embedding": "embedding", "body": "linear", "head": "linear"},
        "tied": {"embedding": "embedding", "body": "linear", "head": "linear"},
        "a product with an embedding": {
            "words": "embedding", "body": "linear", "words.weight": "linear",
        },
        "a look-up in a linear layer": {
            "words.weight[tokens]": "embedding", "body": "linear", "words": "linear",
        },
        "rows of a parameter": {
            "table[0:11][tokens]": "embedding", "table[5:20][tokens]": "embedding",
            "table[0:6]": "linear", "head": "linear",
        },
    }  # fmt: skip
    for name, layers in expected.items():
        run = new_run(seeded(CASES[name]), loss_of, torch.float64, overwrite=True)
        train(run)
        memory = dualform.Memory.open(run.path)
        assert {la: memory.layer(la).kind for la in memory.layers} == layers, name


def test_attention_to_a_token_is_one_where_it_was_looked_up(new_run: Any, certify: Any) -> None:
    run = new_run(seeded(CASES["tied"]), loss_of, torch.float64)
    train(run)
    memory = certify(run)
    layer = memory.layer("embedding")
    tokens = torch.tensor([[3, 7, 3]])
    spotlight = dualform.DualForm(run.model, memory).attend(tokens)["embedding"]
    written_out = F.one_hot(tokens.flatten(), TOKENS).double() @ one_hot(layer).T
    assert torch.equal(spotlight.weights, written_out)
    seen = layer.keys[:, 0].tolist()
    for sign, wanted in (("most", 1.0), ("absolute", 1.0), ("least", 0.0)):
        top = spotlight.top(4, sign=sign)
        for query, token in enumerate([3, 7, 3]):
            here = [p for q, p in zip(top["query"], top["pattern"], strict=True) if q == query]
            assert here == [i for i, t in enumerate(seen) if (t == token) == bool(wanted)][:4]
    sums = spotlight.sum_by("half")
    halves = layer.patterns["half"]
    for query, half, found in zip(sums["query"], sums["half"], sums["sum"], strict=True):
        assert found == float(written_out[query][torch.from_numpy(halves == half)].sum())
    assert sums["sum"].tolist() == sums["absolute"].tolist()
    grouped = spotlight.top(2, by="half")
    assert set(grouped["weight"]) == {1.0}
    counts = written_out.sum(1).numpy()
    assert spotlight.effective.tolist() == counts.tolist()
    given = dualform.DualForm(None, memory).attend(queries=tokens, layers="embedding")["embedding"]
    assert torch.equal(given.weights, written_out)
    example = dualform.DualForm(None, memory).attend(example=9, layers="embedding")["embedding"]
    assert example.queries.shape == (5, 1)
    for wrong in (torch.tensor([0.5]), torch.tensor([TOKENS]), torch.tensor([-1])):
        with pytest.raises(dualform.QueryError, match="whole numbers from 0 to 10"):
            dualform.DualForm(None, memory).attend(queries=wrong, layers="embedding")


def test_contributions_through_a_tied_weight_add_up(new_run: Any, certify: Any) -> None:
    run = new_run(seeded(CASES["tied"]), loss_of, torch.float64)
    train(run)
    dual = dualform.DualForm(run.model, certify(run))
    tokens = torch.tensor([[3]])
    head = dual.contribute(tokens, target=5)
    assert head.layer == "head"
    assert "weight written by embedding" in head.shares
    assert abs(head.residual) <= 1e-12
    assert abs(head.total - float(run.model(tokens)[0, 0, 5].detach())) <= 1e-12
    through = dual.contribute(tokens, target=5, layer="embedding")
    assert through.first_order
    assert abs(through.residual) <= 1e-12
    assert "weight written by head" in through.shares
    layer = dual.memory.layer("embedding")
    other = (layer.keys[:, 0] != 3).numpy()
    assert not through.values.numpy()[other].any()
    example = dual.contribute(example=2, layer="embedding", target=torch.ones(5, WIDTH))
    assert abs(example.residual) <= 1e-12


def test_padding_writes_nothing(new_run: Any, certify: Any) -> None:
    run = new_run(seeded(CASES["an embedding with padding"]), loss_of, torch.float64)
    train(run)
    layer = certify(run).layer("embedding")
    padding = layer.keys[:, 0] == 2
    assert padding.any()
    assert not layer.error_signals[padding].any()
    assert layer.error_signals[~padding].any(1).all()


@pytest.mark.parametrize("stored", ["float16", "bfloat16"])
def test_tokens_stay_whole_where_patterns_are_stored_in_16_bits(stored: str, new_run: Any) -> None:
    run = new_run(seeded(CASES["tied"], torch.float32), loss_of, torch.float32)
    run.options = {"dtype": stored}
    train(run)
    memory = dualform.Memory.open(run.path)
    exact = new_run(seeded(CASES["tied"], torch.float32), loss_of, torch.float32, overwrite=True)
    layer = memory.layer("embedding")
    keys, signals = layer.keys.clone(), layer.error_signals.clone()
    assert dualform.DualForm(run.model, memory).verify().passed
    train(exact)
    whole = dualform.Memory.open(run.path).layer("embedding")
    assert torch.equal(whole.keys, keys)
    largest = whole.error_signals.abs().amax(1, keepdim=True)
    assert bool(((whole.error_signals - signals).abs() <= largest / 128).all())


def test_keys_alone_of_an_embedding_are_enough_to_attend(new_run: Any) -> None:
    run = new_run(seeded(Words), loss_of, torch.float64, keep={"embedding": "keys", "*": "auto"})
    train(run)
    memory = dualform.Memory.open(run.path)
    assert memory.parameters["embedding.weight"].why == "its layer keeps keys alone"
    dual = dualform.DualForm(run.model, memory)
    assert dual.verify().passed
    assert dual.attend(torch.tensor([[1]]))["embedding"].weights.sum() > 0


@pytest.mark.parametrize("name", ["tied", "an embedding with padding", "rows of a parameter"])
def test_a_run_with_look_ups_goes_on_where_it_was(name: str, new_run: Any, certify: Any) -> None:
    whole = new_run(seeded(CASES[name]), loss_of, torch.float64)
    train(whole)
    run = new_run(seeded(CASES[name]), loss_of, torch.float64, overwrite=True)
    optimizer = SGD(run.model.parameters(), **RULE)
    states: list[Any] = []
    with run.recording(optimizer) as recorder:
        for number in range(4):
            recorder.tag(example=[4 * number + i for i in range(4)], half=number // 3)
            step(run, optimizer)
            if number == 2:
                states = [run.generator.get_state(), optimizer.state_dict()]
                states[1] = {
                    **states[1],
                    "state": {
                        i: {"momentum_buffer": s["momentum_buffer"].clone()}
                        for i, s in states[1]["state"].items()
                    },
                }
    with torch.no_grad():
        for parameter, weight in run.model.named_parameters():
            weight.copy_(run.kept[3][parameter])
    run.generator.set_state(states[0])
    optimizer = SGD(run.model.parameters(), **RULE)
    optimizer.load_state_dict(states[1])
    run.kept = {s: run.kept[s] for s in range(4)}
    with dualform.record(run.model, run.path, resume=True) as recorder:
        assert recorder.steps == 3  # between two fingerprints: found by the patterns themselves
        for number in range(3, STEPS):
            recorder.tag(example=[4 * number + i for i in range(4)], half=number // 3)
            step(run, optimizer)
    certify(run)
    for parameter, weight in whole.kept[STEPS].items():
        assert torch.equal(weight, run.kept[STEPS][parameter])


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_look_ups_with_more_to_them_are_values_by_name(
    tied: bool, new_run: Any, certify: Any
) -> None:
    model = seeded(lambda: Words(tied=tied, scale_grad_by_freq=True))
    run = new_run(model, loss_of, torch.float64)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        train(run)
    found = [str(w.message) for w in said if "embedding.weight" in str(w.message)]
    assert bool(found) == tied  # a weight of a layer that is not only that is worth a warning
    known = certify(run).parameters["embedding.weight"]
    assert known.keep == "values"
    assert "EmbeddingBackward0" in known.why or not tied


@pytest.mark.parametrize("tokens", [TOKENS, 12_000], ids=["small", "large"])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_an_edited_gradient_of_an_embedding_is_found(
    tokens: int, tied: bool, new_run: Any, certify: Any
) -> None:
    """A large gradient is looked at in parts: the edit is in every row that was looked up."""
    run = new_run(seeded(lambda: Words(tied, tokens), torch.float32), loss_of, torch.float32)
    optimizer = SGD(run.model.parameters(), **RULE)
    with run.recording(optimizer):
        for _ in range(10):
            step(run, optimizer)
    assert certify(run).parameters["embedding.weight"].keep == "patterns"
    run.options = {"overwrite": True}
    found = pytest.raises(dualform.AuditError, match=r"'embedding.weight' is not explained")
    with found, run.recording(optimizer):
        for _ in range(10):
            run.loss().backward()
            run.model.embedding.weight.grad[:, ::2] *= 1.01
            optimizer.step()
            optimizer.zero_grad()


class Bags(nn.Module):
    """A look-up that no module makes, of rows that are kept short."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Parameter(torch.randn(TOKENS, WIDTH)), nn.Linear(WIDTH, TOKENS)
        self.max_norm = 0.5

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(F.embedding(tokens, self.table, max_norm=self.max_norm).tanh())


@pytest.mark.parametrize("tied", [False, True, None], ids=["untied", "tied", "past its module"])
def test_rows_that_are_kept_short_are_in_no_answer_as_if_they_were_not(
    tied: bool | None, new_run: Any, certify: Any
) -> None:
    """max_norm changes the weight in the forward pass: of the model trained, and of one asked."""
    build = Bags if tied is None else lambda: Words(bool(tied), max_norm=0.5)
    run = new_run(seeded(build), loss_of, torch.float64)
    train(run)
    name, place = ("table", "table[tokens]") if tied is None else ("embedding.weight", "embedding")
    memory = dualform.Memory.open(run.path) if tied is None else certify(run)
    if tied is not None:
        assert memory.parameters[name].keep == "values"
        assert "max_norm" in memory.parameters[name].why
    (run.model if tied is None else run.model.embedding).max_norm = 0.2  # it will shorten this one
    dual, tokens = dualform.DualForm(run.model, memory), torch.tensor([[3]])
    given = copy.deepcopy(run.model).eval()(tokens).detach()
    assert torch.equal(dual(tokens), given)
    aim = torch.randn(given.shape, dtype=torch.float64)
    asked = {n: dual.contribute(tokens, target=aim, layer=n) for n in memory.layers if n != place}
    assert asked.keys() == {None: {"head"}, False: {"body", "head"}, True: {"body"}}[tied]
    for split in asked.values():
        assert abs(split.residual) <= 1e-12
    if "head" in asked:
        assert abs(asked["head"].total - float((given * aim).sum())) <= 1e-12
    for layer in {place, "head"} - asked.keys():
        with pytest.raises(dualform.QueryError, match="max_norm"):
            dual.contribute(tokens, target=aim, layer=layer)
    assert dual.verify(tokens).passed
    for parameter, weight in run.kept[STEPS].items():  # the model that was asked is as it was
        assert torch.equal(run.model.get_parameter(parameter), weight)
